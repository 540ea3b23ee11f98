//! What of a prefix is cached, decided in one place for all groups.

use kv_pool::{BlockHash, Location, Pinned, Tier};
use smallvec::SmallVec;

use crate::group::{Group, names_of};
use crate::{GroupKind, Manager};

/// What was found of a prefix in a group: pins of all blocks that a token behind it reads.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The first blocks.
    pub(crate) head: Pinned,
    /// The position of the first block of `tail`: those between are not needed.
    pub(crate) tail_first: usize,
    pub(crate) tail: Pinned,
}

impl Found {
    pub(crate) fn head(head: Pinned) -> Self {
        Self { tail_first: head.len(), head, tail: Pinned::default() }
    }

    /// The position behind the last block.
    pub(crate) fn end(&self) -> usize {
        self.tail_first + self.tail.len()
    }

    /// The blocks' places, in the order of [`positions`](Self::positions).
    pub(crate) fn locations(&self) -> impl Iterator<Item = Location> + '_ {
        self.head.locations().chain(self.tail.locations())
    }

    /// Blocks that do not lie on the device.
    pub(crate) fn far(&self) -> usize {
        self.locations().filter(|at| at.tier != Tier::Primary).count()
    }
}

/// The longest prefix that all groups can serve.
#[derive(Debug, Default)]
pub(crate) struct Hit {
    pub(crate) tokens: u64,
    pub(crate) found: SmallVec<[Found; 4]>,
}

impl Manager {
    /// Finds and pins the longest prefix, of at most `most` tokens, that every group can serve. A group that
    /// lags shortens it, and then it is judged anew in all: a window needs other blocks, and a state is there
    /// behind certain tokens only (H26).
    pub(crate) fn hit(&self, names: &[BlockHash], most: u64) -> Hit {
        let mut found: SmallVec<[Option<Found>; 4]> = self.groups.iter().map(|_| None).collect();
        let tokens = self.agree(most, |index, end| {
            self.groups[index].find(names, end, false, &mut found[index])
        });
        let trimmed = self.groups.iter().zip(found);
        let trimmed =
            trimmed.map(|(group, found)| group.trimmed(found.unwrap_or_default(), tokens));
        Hit { tokens, found: trimmed.collect() }
    }

    /// The largest end, `most` or less, that all groups agree on: `serve` says how far a group can go with an
    /// end, at most.
    pub(crate) fn agree(&self, most: u64, mut serve: impl FnMut(usize, u64) -> u64) -> u64 {
        let mut end = most;
        loop {
            let before = end;
            for index in 0..self.groups.len() {
                end = end.min(serve(index, end));
            }
            if end == before {
                return end;
            }
        }
    }
}

impl Group {
    /// Finds and pins what a sequence needs that goes on behind `end` tokens, or less: the end for which it is
    /// there. `found` is what was found for a larger end.
    pub(crate) fn find(
        &self,
        names: &[BlockHash],
        end: u64,
        near: bool,
        found: &mut Option<Found>,
    ) -> u64 {
        let mut blocks = self.whole_blocks(end).min(names.len() / self.stride);
        match self.kind {
            GroupKind::Full => {
                let found =
                    found.get_or_insert_with(|| Found::head(self.look(names, 0, blocks, near)));
                blocks = blocks.min(found.head.len());
            }
            GroupKind::Window { .. } => {
                let found = found.get_or_insert_with(|| {
                    Found::head(self.look(names, 0, self.sink_blocks().min(blocks), near))
                });
                blocks = self.find_window(names, blocks, near, found);
            }
            GroupKind::State { .. } => {
                if found.as_ref().is_none_or(|found| found.end() > blocks) {
                    *found = Some(self.find_state(names, blocks, near));
                }
                blocks = found.as_ref().map_or(0, Found::end).min(blocks);
            }
        }
        self.tokens_of(blocks)
    }

    /// The blocks from `first` up to `end`, up to one that is not there.
    pub(crate) fn look(&self, names: &[BlockHash], first: usize, end: usize, near: bool) -> Pinned {
        if first >= end {
            return Pinned::default();
        }
        let mut found = self.pool.match_prefix(&names_of(names, self.stride, first, end));
        if near {
            let near = found.locations().take_while(|at| at.tier == Tier::Primary).count();
            found.truncate(near);
        }
        found
    }

    /// The largest end, `blocks` or less, before which all blocks of the window and the sinks are there.
    fn find_window(
        &self,
        names: &[BlockHash],
        mut blocks: usize,
        near: bool,
        found: &mut Found,
    ) -> usize {
        loop {
            let sinks = self.sink_blocks().min(blocks);
            if found.head.len() < sinks {
                blocks = found.head.len();
                continue;
            }
            let first = self.first_read(self.tokens_of(blocks)).max(sinks).min(blocks);
            let there = found.tail_first <= first && blocks <= found.end();
            if first == blocks || there {
                return blocks;
            }
            found.tail = self.look(names, first, blocks, near);
            found.tail_first = first;
            // Every end behind the first that is missing needs it, as long as its window begins before.
            blocks = found.end();
        }
    }

    /// The last checkpoint within the first blocks.
    fn find_state(&self, names: &[BlockHash], mut blocks: usize, near: bool) -> Found {
        let names = names_of(names, self.stride, 0, blocks);
        while let Some((at, tail)) = self.pool.match_last(&names[..blocks]) {
            if !near || tail.locations().all(|at| at.tier == Tier::Primary) {
                return Found { tail_first: at, tail, ..Found::default() };
            }
            blocks = at;
        }
        Found::default()
    }

    /// What is needed of what was found, if a sequence goes on behind `end` tokens.
    pub(crate) fn trimmed(&self, mut found: Found, end: u64) -> Found {
        let blocks = self.whole_blocks(end);
        match self.kind {
            _ if blocks == 0 => return Found::default(),
            GroupKind::Full => {
                found.head.truncate(blocks);
                found.tail_first = found.head.len();
            }
            GroupKind::Window { .. } => {
                let sinks = self.sink_blocks().min(blocks);
                found.head.truncate(sinks);
                let first = self.first_read(end).max(sinks).min(blocks);
                if first == blocks {
                    found.tail = Pinned::default();
                } else {
                    found.tail.truncate(blocks - found.tail_first);
                    let needed = found.tail.split_off(first - found.tail_first);
                    found.tail = needed;
                }
                found.tail_first = first;
            }
            GroupKind::State { .. } => {}
        }
        found
    }
}
