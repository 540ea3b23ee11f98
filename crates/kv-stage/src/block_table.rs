//! The persistent table of block ids. Only the host edits and reads it; the device never sees it.

use std::collections::TryReserveError;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::edits::{Edit, EditLog};
use crate::{Row, error::TableError};

/// The persistent host table `[rows, max_blocks]` of block ids, row-major; unused entries are -1.
///
/// Layout and address never change, so synchronous readers may keep both. The table is plain memory
/// that no device operation uses: [`Step::block_rows`](crate::Step::block_rows) copies the rows
/// that a step needs, and only the copy is sent. Readers share the table (`&`), and a writer has
/// exclusive access (`&mut`).
///
/// A cache with several pools, attention windows, models or kinds of attention has a table for
/// each. A step carries rows of any number of tables. A block that has left a window is a hole, see
/// [`set`](BlockTable::set).
#[derive(Debug)]
pub struct BlockTable {
    rows: usize,
    max_blocks: usize,
    /// # Invariants
    /// `rows * max_blocks` entries, each at least -1; never reallocated.
    entries: Box<[i32]>,
    /// # Invariants
    /// For each row, columns at and beyond its length hold -1; the length is at most `max_blocks`.
    lens: Box<[usize]>,
    /// Distinguishes this table from all others of the process.
    id: u64,
    edits: EditLog,
}

impl BlockTable {
    /// Creates a table without blocks.
    ///
    /// # Errors
    /// [`TableError::Shape`], [`TableError::OutOfMemory`].
    pub fn new(rows: usize, max_blocks: usize) -> Result<Self, TableError> {
        let bytes = rows.checked_mul(max_blocks).and_then(|n| n.checked_mul(size_of::<i32>()));
        match bytes {
            Some(1..=MAX_TABLE_BYTES) if u32::try_from(rows).is_ok() => {}
            _ => return Err(TableError::Shape { rows, max_blocks }),
        }
        let out_of_memory = |_| TableError::OutOfMemory { rows, max_blocks };
        // The numbers only have to be distinct, so no ordering is needed. 0 is not used.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let edits = rows.saturating_mul(EDITS_PER_ROW).clamp(EDITS_MIN, EDITS_MAX);
        Ok(Self {
            rows,
            max_blocks,
            entries: filled(-1, rows * max_blocks).map_err(out_of_memory)?,
            lens: filled(0, rows).map_err(out_of_memory)?,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            edits: EditLog::new(edits).map_err(out_of_memory)?,
        })
    }

    /// Writes `block` to column `logical`, any column of the row. The row's length grows to include
    /// it.
    ///
    /// -1 marks a hole, such as a block that has left an attention window.
    ///
    /// # Errors
    /// [`TableError::Row`], [`TableError::Column`], [`TableError::Block`].
    pub fn set(&mut self, row: Row, logical: usize, block: i32) -> Result<(), TableError> {
        let start = self.start(row)?;
        if logical >= self.max_blocks {
            return Err(TableError::Column { logical, max_blocks: self.max_blocks });
        }
        check_block(block)?;
        let entry = &mut self.entries[start + logical];
        if *entry != block {
            *entry = block;
            self.edits.note(Edit { row, from: logical, to: logical + 1 });
        }
        self.lens[row.index()] = self.lens[row.index()].max(logical + 1);
        Ok(())
    }

    /// Writes blocks to consecutive columns of a row, from `logical` on. Like [`set`](Self::set)
    /// for each, but recorded as one change.
    ///
    /// # Errors
    /// [`TableError::Row`], [`TableError::Column`]; nothing was written then.
    /// [`TableError::Block`]; the blocks before the invalid one were written.
    pub fn set_run(
        &mut self,
        row: Row,
        logical: usize,
        blocks: impl ExactSizeIterator<Item = i32>,
    ) -> Result<(), TableError> {
        let (start, count) = (self.start(row)?, blocks.len());
        if count > self.max_blocks.saturating_sub(logical) {
            let first_outside = logical.max(self.max_blocks);
            return Err(TableError::Column { logical: first_outside, max_blocks: self.max_blocks });
        }
        if count == 0 {
            return Ok(());
        }
        let mut set = 0;
        let mut outcome = Ok(());
        let entries = &mut self.entries[start + logical..start + logical + count];
        // Unchanged entries are recorded with the others, so that one range suffices.
        let (mut from, mut to) = (count, 0);
        for (entry, block) in entries.iter_mut().zip(blocks) {
            outcome = check_block(block);
            if outcome.is_err() {
                break;
            }
            if *entry != block {
                *entry = block;
                (from, to) = (from.min(set), set + 1);
            }
            set += 1;
        }
        if from < to {
            self.edits.note(Edit { row, from: logical + from, to: logical + to });
        }
        if set > 0 {
            self.lens[row.index()] = self.lens[row.index()].max(logical + set);
        }
        outcome
    }

    /// Puts `block` after the row's last column.
    ///
    /// # Errors
    /// [`TableError::Row`], [`TableError::Full`], [`TableError::Block`].
    pub fn append(&mut self, row: Row, block: i32) -> Result<(), TableError> {
        let len = self.len(row)?;
        if len == self.max_blocks {
            return Err(TableError::Full { row, max_blocks: self.max_blocks });
        }
        self.set(row, len, block)
    }

    /// Shortens the row to `len` columns and fills the rest with -1. A shorter row does not change.
    ///
    /// # Errors
    /// [`TableError::Row`].
    pub fn truncate(&mut self, row: Row, len: usize) -> Result<(), TableError> {
        let start = self.start(row)?;
        let old = self.lens[row.index()];
        if len < old {
            self.entries[start + len..start + old].fill(-1);
            self.lens[row.index()] = len;
            self.edits.note(Edit { row, from: len, to: old });
        }
        Ok(())
    }

    /// Fills the row with -1.
    ///
    /// # Errors
    /// [`TableError::Row`].
    pub fn clear_row(&mut self, row: Row) -> Result<(), TableError> {
        self.truncate(row, 0)
    }

    /// The whole table, row-major. The address never changes.
    #[must_use]
    pub fn as_slice(&self) -> &[i32] {
        &self.entries
    }

    /// All `max_blocks` columns of a row.
    ///
    /// # Errors
    /// [`TableError::Row`].
    pub fn row(&self, row: Row) -> Result<&[i32], TableError> {
        let start = self.start(row)?;
        Ok(&self.entries[start..start + self.max_blocks])
    }

    /// The number of columns up to the last one written since the row was cleared or truncated.
    ///
    /// # Errors
    /// [`TableError::Row`].
    pub fn len(&self, row: Row) -> Result<usize, TableError> {
        self.start(row)?;
        Ok(self.lens[row.index()])
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[must_use]
    pub fn max_blocks(&self) -> usize {
        self.max_blocks
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn edits(&self) -> &EditLog {
        &self.edits
    }

    fn start(&self, row: Row) -> Result<usize, TableError> {
        if row.index() < self.rows {
            Ok(row.index() * self.max_blocks)
        } else {
            Err(TableError::Row { row, rows: self.rows })
        }
    }
}

/// Rust allocations are not larger than this.
const MAX_TABLE_BYTES: usize = isize::MAX as usize;

/// Number of edits that a table remembers per row: enough for a step that changes every row twice.
const EDITS_PER_ROW: usize = 2;
const EDITS_MIN: usize = 64;
const EDITS_MAX: usize = 1 << 16;

pub(crate) fn filled<T: Clone>(value: T, len: usize) -> Result<Box<[T]>, TryReserveError> {
    let mut values = Vec::new();
    values.try_reserve_exact(len)?;
    values.resize(len, value);
    Ok(values.into_boxed_slice())
}

fn check_block(block: i32) -> Result<(), TableError> {
    if block < -1 { Err(TableError::Block { block }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_keep_layout_and_minus_one_beyond_their_length() {
        let mut table = BlockTable::new(3, 4).unwrap();
        table.append(Row::new(1), 7).unwrap();
        table.append(Row::new(1), 8).unwrap();
        table.set(Row::new(2), 2, 9).unwrap();
        assert_eq!(table.as_slice(), [-1, -1, -1, -1, 7, 8, -1, -1, -1, -1, 9, -1]);
        assert_eq!(
            (table.len(Row::new(0)), table.len(Row::new(1)), table.len(Row::new(2))),
            (Ok(0), Ok(2), Ok(3))
        );
        assert_eq!(table.row(Row::new(1)), Ok(&[7, 8, -1, -1][..]));
        table.truncate(Row::new(1), 1).unwrap();
        assert_eq!(table.row(Row::new(1)), Ok(&[7, -1, -1, -1][..]));
        table.truncate(Row::new(1), 3).unwrap();
        assert_eq!(table.len(Row::new(1)), Ok(1));
        table.clear_row(Row::new(2)).unwrap();
        assert_eq!(table.row(Row::new(2)), Ok(&[-1; 4][..]));
        assert_eq!(table.len(Row::new(2)), Ok(0));
    }

    #[test]
    fn a_run_is_as_its_blocks_one_by_one_and_one_edit() {
        let blocks = [4, 9, 4, 7];
        let [mut run, mut single] = [(); 2].map(|()| BlockTable::new(2, 6).unwrap());
        let row = Row::new(1);
        for logical in [2, 0, 1, 0] {
            let seen = [run.edits.seal(), single.edits.seal()];
            run.set_run(row, logical, blocks.into_iter()).unwrap();
            for (at, block) in blocks.into_iter().enumerate() {
                single.set(row, logical + at, block).unwrap();
            }
            assert_eq!((run.as_slice(), run.len(row)), (single.as_slice(), single.len(row)));
            let columns = |table: &BlockTable, seen| -> Vec<Edit> {
                table.edits.since(seen).unwrap().collect()
            };
            let (edits, others) = (columns(&run, seen[0]), columns(&single, seen[1]));
            assert!(edits.len() <= 1, "{edits:?}");
            let covers =
                |edit: &Edit| edits.iter().any(|all| all.from <= edit.from && edit.to <= all.to);
            assert!(others.iter().all(covers), "{edits:?}, {others:?}");
        }
        // An invalid block ends the run: the blocks before it are written and recorded.
        let seen = run.edits.seal();
        let refused = run.set_run(row, 0, [1, -2, 3].into_iter());
        assert_eq!(refused, Err(TableError::Block { block: -2 }));
        assert_eq!(run.row(row).unwrap()[..3], [1, 9, 4]);
        assert_eq!(run.edits.since(seen).unwrap().count(), 1);
    }

    #[test]
    fn every_bound_is_a_typed_error_that_changes_nothing() {
        let mut table = BlockTable::new(2, 2).unwrap();
        let no_row = TableError::Row { row: Row::new(2), rows: 2 };
        assert_eq!(table.set(Row::new(2), 0, 1), Err(no_row));
        assert_eq!(table.append(Row::new(2), 1), Err(no_row));
        assert_eq!(table.clear_row(Row::new(2)), Err(no_row));
        assert_eq!(table.row(Row::new(2)), Err(no_row));
        assert_eq!(table.len(Row::new(2)), Err(no_row));
        assert_eq!(
            table.set(Row::new(0), 2, 1),
            Err(TableError::Column { logical: 2, max_blocks: 2 })
        );
        assert_eq!(table.set(Row::new(0), 0, -2), Err(TableError::Block { block: -2 }));
        assert_eq!(table.append(Row::new(0), i32::MIN), Err(TableError::Block { block: i32::MIN }));
        assert_eq!(table.as_slice(), [-1; 4]);
        table.append(Row::new(0), 1).unwrap();
        table.append(Row::new(0), 2).unwrap();
        assert_eq!(
            table.append(Row::new(0), 3),
            Err(TableError::Full { row: Row::new(0), max_blocks: 2 })
        );
        assert_eq!(table.as_slice(), [1, 2, -1, -1]);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        for (rows, max_blocks) in [(0, 1), (1, 0), (usize::MAX, 2), (usize::MAX / 8, 4)] {
            let refused = BlockTable::new(rows, max_blocks).map(|_| ());
            assert_eq!(refused, Err(TableError::Shape { rows, max_blocks }));
        }
    }

    #[test]
    fn a_table_beyond_the_memory_is_refused_and_does_not_abort() {
        let max_blocks = MAX_TABLE_BYTES / size_of::<i32>();
        let refused = BlockTable::new(1, max_blocks).map(|_| ());
        assert_eq!(refused, Err(TableError::OutOfMemory { rows: 1, max_blocks }));
    }
}
