//! What has come to a node and gone, for peers that follow it.

use crate::message::{Block, Change, Changes, Cursor, LIST_MAX};

/// Changes from a beginning on. When there are many more than blocks, the log begins anew with what is there.
#[derive(Debug)]
pub(crate) struct Log {
    id: u64,
    changes: Vec<Change>,
    max: usize,
}

impl Log {
    /// An empty log. No two of a name should have the same first number.
    pub(crate) fn new(id: u64, blocks: usize) -> Self {
        Self { id, changes: Vec::new(), max: blocks.saturating_mul(2).saturating_add(1024) }
    }

    /// Which log it is.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Adds a change; `there` is everything that is there with it.
    pub(crate) fn push(
        &mut self,
        is_there: bool,
        block: Block,
        there: impl Iterator<Item = Block>,
    ) {
        let change = |is_there, (group, name): Block| Change { is_there, group, name };
        if self.changes.len() < self.max {
            self.changes.push(change(is_there, block));
            return;
        }
        self.id = self.id.wrapping_add(1);
        self.changes.clear();
        self.changes.extend(there.map(|block| change(true, block)));
    }

    pub(crate) fn read(&self, from: Cursor) -> Changes {
        let read = usize::try_from(from.read).unwrap_or(usize::MAX);
        let known = from.log == self.id && read <= self.changes.len();
        let start = if known { read } else { 0 };
        let end = self.changes.len().min(start + LIST_MAX);
        let changes = self.changes.get(start..end).unwrap_or_default().to_vec();
        Changes { next: Cursor { log: self.id, read: end as u64 }, changes }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kv_pool::{BlockHash, GroupId};

    use super::*;

    #[test]
    fn a_reader_that_comes_at_any_time_knows_what_is_there_in_the_end() {
        let mut log = Log::new(9, 10);
        let mut there = BTreeSet::new();
        let mut readers = vec![(Cursor::default(), BTreeSet::new()); 3];
        let mut state = 1_u64;
        for turn in 0..20_000_u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let block = (GroupId(0), BlockHash::from_u128((state >> 60).into()));
            let is_there = there.insert(block) || { !there.remove(&block) };
            log.push(is_there, block, there.iter().copied());
            assert!(log.changes.len() <= 2 * 10 + 1024 + 16);
            let at = (turn % 97) as usize;
            if let Some((cursor, known)) = readers.get_mut(at) {
                loop {
                    let Changes { next, changes } = log.read(*cursor);
                    if next.log != cursor.log {
                        known.clear();
                    }
                    *cursor = next;
                    for change in &changes {
                        let key = (change.group, change.name);
                        if change.is_there {
                            known.insert(key)
                        } else {
                            known.remove(&key)
                        };
                    }
                    if changes.is_empty() {
                        break;
                    }
                }
                assert_eq!(*known, there);
            }
        }
    }
}
