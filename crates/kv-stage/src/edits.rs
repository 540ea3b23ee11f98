//! The changes of a table, in order, so that only these need to be sent.

use std::collections::TryReserveError;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Row;
use crate::block_table::filled;

/// Columns `from..to` of a row.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Edit {
    pub(crate) row: Row,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

/// The latest edits of a table. Older ones are dropped: a reader that is further behind resends the
/// whole table.
#[derive(Debug)]
pub(crate) struct EditLog {
    /// # Invariants
    /// Edit number `n` is at `n % len`, for the last `len` numbers below `next`; never empty.
    ring: Box<[Edit]>,
    next: u64,
    /// Edits below this number were read, and do not change any more. Relaxed: an edit holds the
    /// table by `&mut`, so earlier reads are ordered before it by the hand-over of that reference.
    sealed: AtomicU64,
}

impl EditLog {
    pub(crate) fn new(capacity: usize) -> Result<Self, TryReserveError> {
        let ring = filled(Edit::default(), capacity.max(1))?;
        Ok(Self { ring, next: 0, sealed: AtomicU64::new(0) })
    }

    /// Records an edit. An edit that continues the last one is merged into it.
    pub(crate) fn note(&mut self, edit: Edit) {
        if self.next > *self.sealed.get_mut() {
            let index = self.index(self.next - 1);
            let last = &mut self.ring[index];
            if last.row == edit.row && edit.from <= last.to && last.from <= edit.to {
                *last = Edit { from: last.from.min(edit.from), to: last.to.max(edit.to), ..edit };
                return;
            }
        }
        let index = self.index(self.next);
        self.ring[index] = edit;
        self.next += 1;
    }

    /// The number of the next edit. Edits recorded so far keep lower numbers.
    pub(crate) fn seal(&self) -> u64 {
        self.sealed.store(self.next, Ordering::Relaxed);
        self.next
    }

    /// The edits from number `seen` on; `None` if some of them were dropped.
    pub(crate) fn since(&self, seen: u64) -> Option<impl Iterator<Item = Edit>> {
        let known = self.next.checked_sub(seen)? <= self.ring.len() as u64;
        known.then(|| (seen..self.next).map(|number| self.ring[self.index(number)]))
    }

    fn index(&self, number: u64) -> usize {
        (number % self.ring.len() as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edit(row: u32, from: usize, to: usize) -> Edit {
        Edit { row: Row::new(row), from, to }
    }

    fn since(log: &EditLog, seen: u64) -> Option<Vec<Edit>> {
        log.since(seen).map(Iterator::collect)
    }

    #[test]
    fn neighbours_join_unless_the_last_one_was_read() {
        let mut log = EditLog::new(4).unwrap();
        log.note(edit(1, 0, 1));
        log.note(edit(1, 1, 2));
        log.note(edit(2, 2, 3));
        assert_eq!(since(&log, 0), Some(vec![edit(1, 0, 2), edit(2, 2, 3)]));
        let seen = log.seal();
        log.note(edit(2, 3, 4));
        assert_eq!(since(&log, seen), Some(vec![edit(2, 3, 4)]));
        log.note(edit(2, 9, 10));
        assert_eq!(since(&log, seen), Some(vec![edit(2, 3, 4), edit(2, 9, 10)]));
    }

    #[test]
    fn forgotten_edits_are_not_passed_over() {
        let mut log = EditLog::new(2).unwrap();
        for row in 0..3 {
            log.note(edit(row, 0, 1));
        }
        assert_eq!(since(&log, 0), None);
        assert_eq!(since(&log, 1), Some(vec![edit(1, 0, 1), edit(2, 0, 1)]));
        assert_eq!(since(&log, 3), Some(vec![]));
        assert_eq!(since(&log, 4), None, "a number of another table's");
    }
}
