//! Records the ranges that a running operation touches, and merges them while it runs.

use parking_lot::Mutex;

use super::epoch::How;
use crate::time::{SHARDS, shard};

/// Number of ranges that can still grow, one for each pointer with which a kernel walks through
/// memory.
const OPEN: usize = 4;

/// Number of ranges at which neighbours are merged.
const MERGE_AT: usize = 4096;

/// A range of addresses.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Range {
    start: u64,
    end: u64,
}

/// Ranges of one kind of access.
#[derive(Debug, Default)]
struct Ranges {
    open: [Option<Range>; OPEN],
    /// The open range that grew last, and the next one to close.
    last: usize,
    next: usize,
    closed: Vec<Range>,
    /// Number of closed ranges at which the next merge is worthwhile.
    merge_at: usize,
}

impl Ranges {
    #[inline]
    fn add(&mut self, start: u64, end: u64) {
        if grow(&mut self.open[self.last], start, end) {
            return;
        }
        match self.open.iter_mut().position(|open| grow(open, start, end)) {
            Some(index) => self.last = index,
            None => self.add_new(Range { start, end }),
        }
    }

    fn add_new(&mut self, range: Range) {
        self.last = self.next;
        self.next = (self.next + 1) % OPEN;
        if let Some(closed) = self.open[self.last].replace(range) {
            self.closed.push(closed);
            if self.closed.len() >= self.merge_at.max(MERGE_AT) {
                merge(&mut self.closed);
                self.merge_at = self.closed.len() * 2;
            }
        }
    }

    fn clear(&mut self) {
        self.open = [None; OPEN];
        self.closed.clear();
    }

    fn take_into(&mut self, all: &mut Vec<Range>) {
        all.append(&mut self.closed);
        all.extend(self.open.iter_mut().filter_map(Option::take));
        self.merge_at = 0;
    }
}

/// Extends an open range by an adjacent or overlapping range.
#[inline]
fn grow(open: &mut Option<Range>, start: u64, end: u64) -> bool {
    match open {
        Some(range) if start <= range.end && range.start <= end => {
            range.start = range.start.min(start);
            range.end = range.end.max(end);
            true
        }
        _ => false,
    }
}

/// Sorts ranges and joins those that touch.
fn merge(ranges: &mut Vec<Range>) {
    ranges.sort_unstable();
    ranges.dedup_by(|next, kept| {
        let touches = next.start <= kept.end;
        if touches {
            kept.end = kept.end.max(next.end);
        }
        touches
    });
}

/// The ranges that the running operation has touched. A reference may load on several threads at
/// once.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    on: bool,
    loads: [Mutex<[Ranges; 2]>; SHARDS],
    stores: [Ranges; 2],
}

impl Recorder {
    /// Turns recording on or off. Drops what an operation left that ended in a panic.
    pub(crate) fn switch(&mut self, on: bool) {
        self.on = on;
        let loads = self.loads.iter_mut().flat_map(|shard| shard.get_mut());
        loads.chain(&mut self.stores).for_each(Ranges::clear);
    }

    #[inline]
    pub(crate) fn load(&self, address: u64, bytes: u64, strong: bool) {
        if self.on && bytes > 0 {
            let mut shard = self.loads[shard()].lock();
            shard[usize::from(strong)].add(address, address.saturating_add(bytes));
        }
    }

    #[inline]
    pub(crate) fn store(&mut self, address: u64, bytes: u64, strong: bool) {
        if self.on && bytes > 0 {
            self.stores[usize::from(strong)].add(address, address.saturating_add(bytes));
        }
    }

    /// The merged ranges of one kind since the last call, as addresses and lengths.
    pub(super) fn take(&mut self, how: How) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        let index = usize::from(how.strong);
        if how.writes {
            self.stores[index].take_into(&mut all);
        } else {
            for shard in &mut self.loads {
                shard.get_mut()[index].take_into(&mut all);
            }
        }
        merge(&mut all);
        all.into_iter().map(|range| (range.start, range.end - range.start)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_hold_the_bytes_that_were_added() {
        let mut random = 7u64;
        let mut below = |end: u64| {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (random >> 33) % end
        };
        for adds in [1, 3, 20, 300, 20_000] {
            let mut recorder = Recorder::default();
            recorder.switch(true);
            let mut bytes = vec![false; 60_000];
            for _ in 0..adds {
                let (start, length) = (below(50_000), 1 + below(40));
                bytes[start as usize..(start + length) as usize].fill(true);
                recorder.load(start, length, false);
            }
            let mut found = vec![false; 60_000];
            let ranges = recorder.take(How::READ);
            for &(start, length) in &ranges {
                found[start as usize..(start + length) as usize].fill(true);
            }
            assert_eq!(found, bytes);
            assert!(ranges.is_sorted_by(|a, b| a.0 + a.1 < b.0), "neighbours are joined");
            assert!(recorder.take(How::READ).is_empty());
        }
    }

    #[test]
    fn kinds_are_apart_and_nothing_is_kept_while_off() {
        let strong = |how| How { strong: true, ..how };
        let mut recorder = Recorder::default();
        recorder.load(1, 1, false);
        recorder.switch(true);
        recorder.load(10, 1, false);
        recorder.load(20, 1, true);
        recorder.store(30, 1, false);
        recorder.store(40, 1, true);
        assert_eq!(recorder.take(How::READ), [(10, 1)]);
        assert_eq!(recorder.take(strong(How::READ)), [(20, 1)]);
        assert_eq!(recorder.take(How::WRITE), [(30, 1)]);
        assert_eq!(recorder.take(strong(How::WRITE)), [(40, 1)]);
    }
}
