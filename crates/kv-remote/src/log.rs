//! What has come to a node and gone, for peers that follow it.

use kv_pool::guard;
use kv_tier::RecordKey;

use crate::message::{Change, Changes, Cursor, LIST_MAX};

/// Changes of other formats that one call passes over, at most.
const PASSED_MAX: usize = 16 * LIST_MAX;

/// Changes from a beginning on. When there are many more than blocks, the log begins anew with what is there.
#[derive(Debug)]
pub(crate) struct Log {
    id: u64,
    changes: Vec<(bool, RecordKey)>,
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
        key: RecordKey,
        there: impl Iterator<Item = RecordKey>,
    ) {
        if self.changes.len() < self.max {
            self.changes.push((is_there, key));
            return;
        }
        self.id = self.id.wrapping_add(1);
        self.changes.clear();
        self.changes.extend(there.map(|key| (true, key)));
    }

    /// What has become of records of a format from a place on.
    pub(crate) fn read(&self, from: Cursor, format: u64) -> Changes {
        let read = usize::try_from(from.read).unwrap_or(usize::MAX);
        let known = from.log == self.id && read <= self.changes.len();
        let start = if known { read } else { 0 };
        let (mut changes, mut end) = (Vec::new(), start);
        for &(is_there, key) in self.changes.iter().skip(start).take(PASSED_MAX) {
            if changes.len() == LIST_MAX {
                break;
            }
            end += 1;
            if guard!("remote.tells-of-one-format", key.format == format, else true) {
                changes.push(Change { is_there, group: key.group, name: key.name });
            }
        }
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
            let name = BlockHash::from_u128((state >> 60).into());
            let block = RecordKey { format: 3, group: GroupId(0), name };
            let is_there = there.insert(block) || { !there.remove(&block) };
            log.push(is_there, block, there.iter().copied());
            assert!(log.changes.len() <= 2 * 10 + 1024 + 16);
            let at = (turn % 97) as usize;
            if let Some((cursor, known)) = readers.get_mut(at) {
                loop {
                    let Changes { next, changes } = log.read(*cursor, 3);
                    if next.log != cursor.log {
                        known.clear();
                    }
                    *cursor = next;
                    for change in &changes {
                        let key = RecordKey { format: 3, group: change.group, name: change.name };
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
