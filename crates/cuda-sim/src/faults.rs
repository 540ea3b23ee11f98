//! Call counts, and the failures and device losses that a test orders.

use std::collections::BTreeMap;

use cuda_driver::ErrorCode;

/// Counts every call and decides which calls fail.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    calls: BTreeMap<&'static str, u64>,
    orders: Vec<OrderedFault>,
    losses: Vec<OrderedLoss>,
}

#[derive(Debug)]
struct OrderedFault {
    call: &'static str,
    /// Calls with that name left until the failing call, including that call.
    left: u64,
    code: ErrorCode,
}

#[derive(Debug)]
struct OrderedLoss {
    device: u32,
    /// Operations of the device left until it is lost.
    left: u64,
    code: ErrorCode,
}

impl Faults {
    /// Loses `device` after it has run `operations` more operations, at least one.
    pub(crate) fn order_loss(&mut self, device: u32, operations: u64, code: ErrorCode) {
        self.losses.push(OrderedLoss { device, left: operations.max(1), code });
    }

    /// Counts an operation of `device`, and returns the error code if the device is lost now.
    pub(crate) fn ran(&mut self, device: u32) -> Option<ErrorCode> {
        for loss in self.losses.iter_mut().filter(|loss| loss.device == device) {
            loss.left -= 1;
        }
        let due = self.losses.iter().position(|loss| loss.left == 0)?;
        Some(self.losses.swap_remove(due).code)
    }

    pub(crate) fn order(&mut self, call: &'static str, nth: u64, code: ErrorCode) {
        self.orders.push(OrderedFault { call, left: nth.max(1), code });
    }

    /// Counts a call, and fails it if a test ordered that.
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
