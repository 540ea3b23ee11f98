//! Rows of the block table, each leased to one sequence.

use std::sync::Arc;

use parking_lot::Mutex;

/// The rows that no sequence has.
#[derive(Clone, Debug)]
pub(crate) struct RowPool {
    free: Arc<Mutex<Free>>,
}

#[derive(Debug)]
struct Free {
    /// Rows that came back, with room for every row that was ever leased.
    returned: Vec<usize>,
    /// The first row that was never leased; all after it were not, either.
    fresh: usize,
    rows: usize,
}

impl RowPool {
    pub(crate) fn new(rows: usize) -> Self {
        Self { free: Arc::new(Mutex::new(Free { returned: Vec::new(), fresh: 0, rows })) }
    }

    pub(crate) fn lease(&self) -> Option<RowLease> {
        let row = self.free.lock().take()?;
        Some(RowLease { rows: self.clone(), row })
    }

    pub(crate) fn owns(&self, lease: &RowLease) -> bool {
        Arc::ptr_eq(&self.free, &lease.rows.free)
    }
}

impl Free {
    fn take(&mut self) -> Option<usize> {
        if let Some(row) = self.returned.pop() {
            return Some(row);
        }
        let row = self.fresh;
        if row >= self.rows {
            return None;
        }
        self.fresh += 1;
        self.returned.reserve(self.fresh);
        Some(row)
    }
}

/// One row, which goes back when the lease is dropped. What is in it is the table's concern.
#[derive(Debug)]
pub(crate) struct RowLease {
    rows: RowPool,
    row: usize,
}

impl RowLease {
    pub(crate) fn row(&self) -> usize {
        self.row
    }
}

impl Drop for RowLease {
    fn drop(&mut self) {
        // There is room, which was made when a row was first leased.
        self.rows.free.lock().returned.push(self.row);
    }
}
