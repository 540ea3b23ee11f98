//! Which queued blocks lose their priority next: a heap of times that blocks can be taken out of.

use std::collections::TryReserveError;
use std::time::Duration;

use crate::RecordId;
use crate::clock::nanos;

/// Children of a node: a wider heap than a binary one is flatter, and its children share a line.
const WIDTH: usize = 4;

/// A block and when it expires. Of equal times the lower block comes first, so that the order of
/// expiry, and with it that of eviction, is the same in every run.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Entry {
    nanos: u64,
    block: u32,
}

/// Blocks by the time at which they expire; each is there at most once.
///
/// A block has expired when its time is not later than now. Insertion and removal take time in
/// proportion to the logarithm of the number of blocks; a look at the first takes constant time.
/// Times are whole nanoseconds, up to 584 years.
#[derive(Debug)]
pub(crate) struct Expiries {
    heap: Vec<Entry>,
    /// Where in the heap a block is, counted from 1; 0 for a block that is not there.
    places: Vec<u32>,
}

impl Expiries {
    /// A heap for blocks with indices below `blocks`. It makes room as times are set, never more
    /// than for each block once.
    pub(crate) fn new(blocks: usize) -> Result<Self, TryReserveError> {
        let mut places = Vec::new();
        places.try_reserve_exact(blocks)?;
        places.resize(blocks, 0);
        Ok(Self { heap: Vec::new(), places })
    }

    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    /// When the block expires, if it has a time.
    pub(crate) fn of(&self, block: RecordId) -> Option<Duration> {
        let place = self.place(block)?;
        self.heap.get(place).map(|entry| Duration::from_nanos(entry.nanos))
    }

    /// Sets the time of a block, in place of one that it may have had.
    pub(crate) fn insert(&mut self, block: RecordId, expiry: Duration) {
        let entry = Entry { nanos: nanos(expiry), block: block.0 };
        match self.place(block) {
            Some(place) => {
                self.heap[place] = entry;
                self.restore(place);
            }
            None => {
                self.heap.push(entry);
                self.rise(self.heap.len() - 1);
            }
        }
    }

    /// Takes a block out; whether it had a time.
    pub(crate) fn remove(&mut self, block: RecordId) -> bool {
        let Some(place) = self.place(block) else { return false };
        self.remove_at(place);
        true
    }

    /// The block that expires next, and when.
    pub(crate) fn first(&self) -> Option<(Duration, RecordId)> {
        let entry = self.heap.first()?;
        Some((Duration::from_nanos(entry.nanos), RecordId(entry.block)))
    }

    /// Takes out the block that expires first, if it has expired at `now`.
    pub(crate) fn pop_expired(&mut self, now: Duration) -> Option<RecordId> {
        let entry = *self.heap.first()?;
        if entry.nanos > nanos(now) {
            return None;
        }
        self.remove_at(0);
        Some(RecordId(entry.block))
    }

    /// Whether every entry is where its block says, and none before its parent.
    pub(crate) fn is_consistent(&self) -> bool {
        let placed = self.places.iter().filter(|&&place| place != 0).count();
        placed == self.heap.len()
            && self.heap.iter().enumerate().all(|(at, entry)| {
                let parent = self.heap[at.saturating_sub(1) / WIDTH];
                self.places[entry.block as usize] as usize == at + 1 && parent <= *entry
            })
    }

    fn place(&self, block: RecordId) -> Option<usize> {
        (self.places[block.index()] as usize).checked_sub(1)
    }

    fn remove_at(&mut self, place: usize) {
        let removed = self.heap.swap_remove(place);
        self.places[removed.block as usize] = 0;
        if place < self.heap.len() {
            self.restore(place);
        }
    }

    /// Moves the entry at `place`, which may be wrong in either direction, where it belongs.
    fn restore(&mut self, place: usize) {
        let place = self.rise(place);
        self.sink(place);
    }

    fn rise(&mut self, mut place: usize) -> usize {
        let entry = self.heap[place];
        while place > 0 {
            let parent = (place - 1) / WIDTH;
            if self.heap[parent] <= entry {
                break;
            }
            self.put(place, self.heap[parent]);
            place = parent;
        }
        self.put(place, entry);
        place
    }

    fn sink(&mut self, mut place: usize) {
        let entry = self.heap[place];
        loop {
            let first = place * WIDTH + 1;
            let end = self.heap.len().min(first + WIDTH);
            let least = (first..end).min_by_key(|&child| self.heap[child]);
            let Some(child) = least.filter(|&child| self.heap[child] < entry) else { break };
            self.put(place, self.heap[child]);
            place = child;
        }
        self.put(place, entry);
    }

    fn put(&mut self, place: usize, entry: Entry) {
        self.heap[place] = entry;
        // Fewer entries than blocks, and those are below 2^31.
        self.places[entry.block as usize] = place as u32 + 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_block_expires_at_its_time_and_not_before() {
        let mut expiries = Expiries::new(1).unwrap();
        expiries.insert(RecordId(0), at(1));
        assert_eq!(expiries.first(), Some((at(1), RecordId(0))));
        assert_eq!(expiries.pop_expired(at(0)), None);
        assert_eq!(expiries.pop_expired(at(1) - Duration::from_nanos(1)), None);
        assert_eq!(expiries.pop_expired(at(1)), Some(RecordId(0)));
        assert_eq!(expiries.pop_expired(Duration::MAX), None);
        assert_eq!(expiries.len(), 0);
    }

    #[test]
    fn blocks_with_the_same_time_are_all_kept_and_leave_by_number() {
        let mut expiries = Expiries::new(9).unwrap();
        for block in [4, 8, 0, 6, 2] {
            expiries.insert(RecordId(block), at(7));
        }
        let order: Vec<_> = std::iter::from_fn(|| expiries.pop_expired(at(7))).collect();
        assert_eq!(order, [0, 2, 4, 6, 8].map(RecordId));
    }

    #[test]
    fn a_removed_block_never_expires_and_a_second_time_replaces_the_first() {
        let mut expiries = Expiries::new(3).unwrap();
        (0..3).for_each(|block| expiries.insert(RecordId(block), at(1)));
        assert!(expiries.remove(RecordId(1)));
        assert!(!expiries.remove(RecordId(1)));
        expiries.insert(RecordId(0), at(5));
        assert_eq!(expiries.of(RecordId(0)), Some(at(5)));
        assert_eq!(expiries.of(RecordId(1)), None);
        let order: Vec<_> = std::iter::from_fn(|| expiries.pop_expired(at(9))).collect();
        assert_eq!(order, [RecordId(2), RecordId(0)]);
    }

    #[test]
    fn a_time_beyond_the_end_of_the_clock_is_never_reached_early() {
        let mut expiries = Expiries::new(2).unwrap();
        expiries.insert(RecordId(0), Duration::MAX);
        assert_eq!(expiries.pop_expired(Duration::from_nanos(u64::MAX - 1)), None);
        assert_eq!(expiries.pop_expired(Duration::from_nanos(u64::MAX)), Some(RecordId(0)));
    }

    #[test]
    fn random_operations_agree_with_an_ordered_set() {
        const BLOCKS: u64 = 300;
        let mut random = 1_u64;
        let mut below = |bound: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % bound
        };
        let mut expiries = Expiries::new(BLOCKS as usize).unwrap();
        let mut set = BTreeSet::new();
        let mut now = 0;
        for step in 0..60_000 {
            let block = RecordId(below(BLOCKS) as u32);
            match below(10) {
                0..6 => {
                    let expiry = at(now + below(40));
                    set.retain(|&(_, other)| other != block);
                    set.insert((expiry, block));
                    expiries.insert(block, expiry);
                }
                6..8 => {
                    let there = set.len();
                    set.retain(|&(_, other)| other != block);
                    assert_eq!(expiries.remove(block), set.len() < there);
                }
                _ => {
                    now += below(4);
                    while let Some(expired) = expiries.pop_expired(at(now)) {
                        let first = set.pop_first().unwrap();
                        assert!(first.0 <= at(now));
                        assert_eq!(first.1, expired);
                    }
                    assert!(set.first().is_none_or(|first| first.0 > at(now)));
                }
            }
            assert_eq!(expiries.first(), set.first().copied());
            assert_eq!(expiries.len(), set.len());
            if step % 100 == 0 {
                assert!(expiries.is_consistent());
            }
        }
    }
}
