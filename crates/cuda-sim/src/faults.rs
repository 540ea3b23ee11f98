//! Calls counted by name, and failures on order.

use std::collections::BTreeMap;

use cuda_driver::ErrorCode;

/// Counts every call and decides which of them fail.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    calls: BTreeMap<&'static str, u64>,
    orders: Vec<Order>,
}

#[derive(Debug)]
struct Order {
    call: &'static str,
    /// Calls of that name left until the failing one, which is counted too.
    left: u64,
    code: ErrorCode,
}

impl Faults {
    pub(crate) fn order(&mut self, call: &'static str, nth: u64, code: ErrorCode) {
        self.orders.push(Order { call, left: nth.max(1), code });
    }

    /// Counts a call; fails it if that was ordered.
    pub(crate) fn count(&mut self, call: &'static str) -> Result<(), ErrorCode> {
        *self.calls.entry(call).or_default() += 1;
        let mut due = None;
        for (index, order) in self.orders.iter_mut().enumerate() {
            if order.call == call {
                order.left = order.left.saturating_sub(1);
                if order.left == 0 && due.is_none() {
                    due = Some(index);
                }
            }
        }
        match due {
            Some(index) => Err(self.orders.remove(index).code),
            None => Ok(()),
        }
    }

    pub(crate) fn calls(&self) -> BTreeMap<&'static str, u64> {
        self.calls.clone()
    }
}
