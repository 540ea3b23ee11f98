//! Records the ranges that a running operation touches, and merges them while it runs.

use parking_lot::Mutex;

use super::epoch::StrongMark;
use crate::time::{SHARDS, shard};

/// Number of ranges that can still grow, one for each pointer with which a kernel walks through
/// memory.
const OPEN: usize = 4;

/// Number of ranges at which neighbours are merged.
const MERGE_AT: usize = 4096;

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

/// The ranges of plain accesses, and those of each kind of strong ones.
#[derive(Debug, Default)]
struct ByMark {
    plain: Ranges,
    strong: Vec<(StrongMark, Ranges)>,
}

impl ByMark {
    #[inline]
    fn add(&mut self, address: u64, bytes: u64, mark: Option<StrongMark>) {
        let end = address.saturating_add(bytes);
        let Some(mark) = mark else { return self.plain.add(address, end) };
        let place = self.strong.iter().position(|(known, _)| *known == mark);
        let place = place.unwrap_or_else(|| {
            self.strong.push((mark, Ranges::default()));
            self.strong.len() - 1
        });
        self.strong[place].1.add(address, end);
    }

    fn clear(&mut self) {
        self.plain.clear();
        self.strong.clear();
    }

    fn take_into(&mut self, all: &mut Vec<(Option<StrongMark>, Vec<Range>)>) {
        let strong = self.strong.drain(..).map(|(mark, ranges)| (Some(mark), ranges));
        for (mark, mut ranges) in strong {
            ranges.take_into(of_mark(all, mark));
        }
        self.plain.take_into(of_mark(all, None));
    }
}

/// The list of a mark.
fn of_mark(
    all: &mut Vec<(Option<StrongMark>, Vec<Range>)>,
    mark: Option<StrongMark>,
) -> &mut Vec<Range> {
    let place = all.iter().position(|(known, _)| *known == mark).unwrap_or_else(|| {
        all.push((mark, Vec::new()));
        all.len() - 1
    });
    &mut all[place].1
}

/// Ranges of one kind of access, as addresses and lengths.
pub(super) struct Recorded {
    pub(super) writes: bool,
    pub(super) mark: Option<StrongMark>,
    pub(super) ranges: Vec<(u64, u64)>,
}

/// The ranges that the running operation has touched. A reference may load on several threads at
/// once.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    on: bool,
    loads: [Mutex<ByMark>; SHARDS],
    stores: ByMark,
}

impl Recorder {
    /// Turns recording on or off. Drops what an operation left that ended in a panic.
    pub(crate) fn switch(&mut self, on: bool) {
        self.on = on;
        self.loads.iter_mut().for_each(|shard| shard.get_mut().clear());
        self.stores.clear();
    }

    #[inline]
    pub(crate) fn load(&self, address: u64, bytes: u64, mark: Option<StrongMark>) {
        if self.on && bytes > 0 {
            self.loads[shard()].lock().add(address, bytes, mark);
        }
    }

    #[inline]
    pub(crate) fn store(&mut self, address: u64, bytes: u64, mark: Option<StrongMark>) {
        if self.on && bytes > 0 {
            self.stores.add(address, bytes, mark);
        }
    }

    /// The merged ranges since the last call: loads before stores, and those without a mark first.
    pub(super) fn take(&mut self) -> Vec<Recorded> {
        let (mut loads, mut stores) = (vec![(None, Vec::new())], vec![(None, Vec::new())]);
        self.loads.iter_mut().for_each(|shard| shard.get_mut().take_into(&mut loads));
        self.stores.take_into(&mut stores);
        let all = loads.into_iter().map(|load| (false, load));
        let all = all.chain(stores.into_iter().map(|store| (true, store)));
        all.map(|(writes, (mark, mut ranges))| {
            merge(&mut ranges);
            let ranges = ranges.into_iter().map(|range| (range.start, range.end - range.start));
            Recorded { writes, mark, ranges: ranges.collect() }
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_hold_the_bytes_that_were_added() {
        let mut random = kv_testkit::Random::new(1);
        let mut below = |end| random.below(end);
        for adds in [1, 3, 20, 300, 20_000] {
            let mut recorder = Recorder::default();
            recorder.switch(true);
            let mut bytes = vec![false; 60_000];
            for _ in 0..adds {
                let (start, length) = (below(50_000), 1 + below(40));
                bytes[start as usize..(start + length) as usize].fill(true);
                recorder.load(start, length, None);
            }
            let mut found = vec![false; 60_000];
            let ranges = plain_loads(&mut recorder);
            for &(start, length) in &ranges {
                found[start as usize..(start + length) as usize].fill(true);
            }
            assert_eq!(found, bytes);
            assert!(ranges.is_sorted_by(|a, b| a.0 + a.1 < b.0), "neighbours are joined");
            assert!(plain_loads(&mut recorder).is_empty());
        }
    }

    fn plain_loads(recorder: &mut Recorder) -> Vec<(u64, u64)> {
        let mut all = recorder.take().into_iter();
        all.find(|one| !one.writes && one.mark.is_none()).unwrap().ranges
    }
}
