//! Rows of the block table, each leased to one sequence.

use std::sync::Arc;

use kv_stage::Row;
use parking_lot::Mutex;

/// The free rows.
#[derive(Clone, Debug)]
pub(crate) struct RowPool {
    free: Arc<Mutex<Vec<Row>>>,
}

impl RowPool {
    pub(crate) fn new(rows: u32) -> Self {
        Self { free: Arc::new(Mutex::new((0..rows).rev().map(Row::new).collect())) }
    }

    pub(crate) fn lease(&self) -> Option<RowLease> {
        let row = self.free.lock().pop()?;
        Some(RowLease { rows: self.clone(), row })
    }

    pub(crate) fn owns(&self, lease: &RowLease) -> bool {
        Arc::ptr_eq(&self.free, &lease.rows.free)
    }
}

/// One row, which is free again when the lease is dropped. The table has its contents.
#[derive(Debug)]
pub(crate) struct RowLease {
    rows: RowPool,
    row: Row,
}

impl RowLease {
    pub(crate) fn row(&self) -> Row {
        self.row
    }
}

impl Drop for RowLease {
    fn drop(&mut self) {
        // The vector has room: it once held every row.
        self.rows.free.lock().push(self.row);
    }
}
