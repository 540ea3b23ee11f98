//! Who accessed what last, so that two unordered accesses to one address are seen.
//!
//! The record is kept for words of four bytes: who wrote last, and two of those who read since, each
//! with the bytes of the word that were meant. Two readers are enough, because whoever writes is not
//! both of them.

use std::collections::HashMap;

/// Bytes that one page of records covers, as a power of two.
const PAGE_SHIFT: u32 = 10;

/// Words of a page.
const PAGE_WORDS: usize = 1 << (PAGE_SHIFT - 2);

/// Most pages kept; beyond that all are forgotten and recording begins anew.
const PAGES_MAX: usize = 1 << 17;

/// Places of the cache before the table of pages.
const CACHE: usize = 256;

/// Most stretches of one launch.
const STRETCHES_MAX: usize = 1 << 28;

/// A part of a thread's run between two barriers.
#[derive(Clone, Copy, Debug, Default)]
struct Stretch {
    thread: u32,
    /// Barriers of the block that the thread has passed.
    block_epoch: u32,
    /// Barriers of its warp since then.
    warp_epoch: u32,
}

/// Number of a stretch, from 1 on; 0 where accesses are not recorded.
pub(super) type StretchId = u32;

/// All stretches of a launch.
#[derive(Debug, Default)]
pub(super) struct Stretches {
    all: Vec<Stretch>,
    block_threads: u32,
}

impl Stretches {
    pub(super) fn new(block_threads: u32) -> Self {
        Self { all: vec![Stretch::default()], block_threads }
    }

    /// A new stretch of the thread with this number in the launch.
    pub(super) fn begin(&mut self, thread: u32, block_epoch: u32, warp_epoch: u32) -> StretchId {
        if self.all.len() >= STRETCHES_MAX {
            return 0;
        }
        self.all.push(Stretch { thread, block_epoch, warp_epoch });
        (self.all.len() - 1) as StretchId
    }

    /// Number in the launch of the thread whose stretch it is.
    pub(super) fn thread(&self, id: StretchId) -> u32 {
        self.all[id as usize].thread
    }

    /// Whether all of `earlier` comes before `now`.
    fn is_ordered(&self, earlier: StretchId, now: StretchId) -> bool {
        let (earlier, now) = (&self.all[earlier as usize], &self.all[now as usize]);
        if earlier.thread == now.thread {
            return true;
        }
        let (block, other) = (now.thread / self.block_threads, earlier.thread / self.block_threads);
        if block != other {
            return false;
        }
        let first = block * self.block_threads;
        let is_same_warp = (now.thread - first) / 32 == (earlier.thread - first) / 32;
        earlier.block_epoch < now.block_epoch
            || (is_same_warp
                && earlier.block_epoch == now.block_epoch
                && earlier.warp_epoch < now.warp_epoch)
    }
}

/// A stretch and the bytes of a word: `id << 4 | mask`, or 0.
type Mark = u32;

#[derive(Clone, Copy, Debug, Default)]
struct Word {
    writer: Mark,
    reader: Mark,
    other_reader: Mark,
}

/// The last accesses to every word.
#[derive(Debug)]
pub(super) struct Conflicts {
    pages: Vec<[Word; PAGE_WORDS]>,
    table: HashMap<u64, u32>,
    cache: Box<[(u64, u32); CACHE]>,
}

/// A conflict with another stretch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conflict {
    pub(super) with: StretchId,
    /// Whether the other one wrote.
    pub(super) wrote: bool,
}

impl Conflicts {
    pub(super) fn new() -> Self {
        let cache = Box::new([(u64::MAX, 0); CACHE]);
        Self { pages: Vec::new(), table: HashMap::new(), cache }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        if !self.pages.is_empty() {
            self.pages.clear();
            self.table.clear();
            self.cache.fill((u64::MAX, 0));
        }
    }

    /// Records an access that lies within one page, and returns what it conflicts with.
    #[inline]
    pub(super) fn access(
        &mut self,
        stretches: &Stretches,
        id: StretchId,
        (address, bytes): (u64, u32),
        writes: bool,
    ) -> Option<Conflict> {
        if id == 0 {
            return None;
        }
        let page = self.page(address >> PAGE_SHIFT);
        let first = (address as usize >> 2) & (PAGE_WORDS - 1);
        if bytes < 4 {
            let mask = ((1 << bytes) - 1) << (address & 3);
            return page[first].access(stretches, id << 4 | mask, writes);
        }
        let last = (first + (bytes as usize >> 2)).min(PAGE_WORDS);
        let mut found = None;
        for word in &mut page[first..last] {
            found = word.access(stretches, id << 4 | 0xF, writes).or(found);
        }
        found
    }

    #[inline]
    fn page(&mut self, key: u64) -> &mut [Word; PAGE_WORDS] {
        let place = key as usize % CACHE;
        let (cached, index) = self.cache[place];
        let index = if cached == key { index } else { self.find_page(key, place) };
        &mut self.pages[index as usize]
    }

    #[cold]
    fn find_page(&mut self, key: u64, place: usize) -> u32 {
        let index = match self.table.get(&key) {
            Some(&index) => index,
            None => {
                if self.pages.len() >= PAGES_MAX {
                    self.clear();
                }
                self.pages.push([Word::default(); PAGE_WORDS]);
                let index = (self.pages.len() - 1) as u32;
                self.table.insert(key, index);
                index
            }
        };
        self.cache[place] = (key, index);
        index
    }
}

impl Word {
    #[inline]
    fn access(&mut self, stretches: &Stretches, mark: Mark, writes: bool) -> Option<Conflict> {
        let conflicts = |earlier: Mark| {
            earlier & mark & 0xF != 0
                && earlier >> 4 != mark >> 4
                && !stretches.is_ordered(earlier >> 4, mark >> 4)
        };
        let mut found = None;
        if conflicts(self.writer) {
            found = Some(Conflict { with: self.writer >> 4, wrote: true });
        }
        if writes {
            for reader in [self.reader, self.other_reader] {
                if conflicts(reader) {
                    found = found.or(Some(Conflict { with: reader >> 4, wrote: false }));
                }
            }
            join(&mut self.writer, mark);
        } else if self.reader == 0
            || self.reader >> 4 == mark >> 4
            || stretches.is_ordered(self.reader >> 4, mark >> 4)
        {
            join(&mut self.reader, mark);
        } else {
            join(&mut self.other_reader, mark);
        }
        found
    }
}

/// Replaces a mark, or adds bytes to one of the same stretch.
#[inline]
fn join(old: &mut Mark, new: Mark) {
    *old = if *old >> 4 == new >> 4 { *old | new } else { new };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unordered_accesses_of_the_same_bytes_conflict() {
        let mut stretches = Stretches::new(64);
        let first = stretches.begin(0, 0, 0);
        let beside = stretches.begin(1, 0, 0);
        let later = stretches.begin(1, 1, 0);
        let after_warp = stretches.begin(2, 0, 1);
        let other_warp = stretches.begin(40, 0, 1);
        let other_block = stretches.begin(64, 5, 0);
        let race = |reader: StretchId, bytes: u32| {
            let mut conflicts = Conflicts::new();
            assert!(conflicts.access(&stretches, first, (4096, 2), true).is_none());
            conflicts.access(&stretches, reader, (4096, bytes), false).is_some()
        };
        assert!(race(beside, 2));
        assert!(race(beside, 8));
        assert!(!race(first, 2));
        assert!(!race(later, 2));
        assert!(!race(after_warp, 2));
        assert!(race(other_warp, 2));
        assert!(race(other_block, 2));

        let mut conflicts = Conflicts::new();
        assert!(conflicts.access(&stretches, first, (4096, 2), true).is_none());
        assert!(conflicts.access(&stretches, beside, (4098, 2), true).is_none());
        assert!(conflicts.access(&stretches, first, (8192, 16), false).is_none());
        assert!(conflicts.access(&stretches, beside, (8192, 16), false).is_none());
        let found = conflicts.access(&stretches, first, (8192, 4), true).unwrap();
        assert_eq!((stretches.thread(found.with), found.wrote), (1, false));
    }
}
