//! Rows of the block table, each leased to one sequence.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::OptionsError;
use crate::options::repeated;

/// A sequence's line of the block table.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Row(u32);

impl Row {
    /// Row number `index`, counted from 0.
    #[must_use]
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// The number, counted from 0.
    #[must_use]
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The free rows. The identity of this list is that of the manager.
#[derive(Clone, Debug)]
pub(crate) struct RowPool {
    free: Arc<Mutex<Vec<Row>>>,
}

impl RowPool {
    pub(crate) fn new(rows: u32) -> Result<Self, OptionsError> {
        let mut free = repeated(Row::new(0), rows as usize)?;
        free.iter_mut().zip((0..rows).rev()).for_each(|(row, index)| *row = Row::new(index));
        Ok(Self { free: Arc::new(Mutex::new(free)) })
    }

    pub(crate) fn lease(&self) -> Option<RowLease> {
        let row = self.free.lock().pop()?;
        Some(RowLease { rows: self.clone(), row })
    }

    /// Whether both are of one manager.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.free, &other.free)
    }

    pub(crate) fn free(&self) -> usize {
        self.free.lock().len()
    }
}

/// One row, which is free again when the lease is dropped.
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
