//! A resource that serves one operation at a time: a copy engine, a link, a device's memory.

use std::collections::VecDeque;

/// Number of busy periods that are remembered. Time before the oldest counts as busy.
const BUSY_MAX: usize = 64;

/// The busy periods of a resource.
///
/// Operations are placed in the scheduler's order, which is not the order of their times. An
/// operation takes the first gap that is long enough, as on hardware, where the operation that is
/// ready first starts first.
#[derive(Clone, Debug, Default)]
pub(super) struct Engine {
    /// Starts and ends of the busy periods, ascending. No two periods touch.
    busy: VecDeque<(u64, u64)>,
    /// No operation starts before this time.
    forgotten: u64,
}

impl Engine {
    /// The start of an operation of that length that is ready at `ready`.
    pub(super) fn earliest(&self, ready: u64, length: u64) -> u64 {
        let mut start = ready.max(self.forgotten);
        let first = self.busy.partition_point(|&(_, end)| end <= start);
        for &(from, to) in self.busy.range(first..) {
            if start.saturating_add(length) <= from {
                break;
            }
            start = start.max(to);
        }
        start
    }

    /// Marks the time from `start`, a result of [`earliest`](Engine::earliest), to `end` as busy.
    pub(super) fn take(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let mut index = self.busy.partition_point(|&(from, _)| from < start);
        let (mut start, mut end) = (start, end);
        if let Some(&(from, _)) =
            index.checked_sub(1).and_then(|i| self.busy.get(i)).filter(|b| b.1 >= start)
        {
            start = from;
            index -= 1;
            self.busy.remove(index);
        }
        while let Some(&(_, to)) = self.busy.get(index).filter(|busy| busy.0 <= end) {
            end = end.max(to);
            self.busy.remove(index);
        }
        self.busy.insert(index, (start, end));
        if self.busy.len() > BUSY_MAX
            && let Some((_, end)) = self.busy.pop_front()
        {
            self.forgotten = end;
        }
    }

    /// The end of an operation that starts at `start` and takes `length` alone. While this resource
    /// is busy, it takes `percent` percent of that time.
    pub(super) fn beside(&self, start: u64, length: u64, percent: u32) -> u64 {
        let (mut now, mut left) = (start, length);
        let percent = u64::from(percent.max(100));
        let first = self.busy.partition_point(|&(_, end)| end <= start);
        for &(from, to) in self.busy.range(first..) {
            let alone = from.saturating_sub(now);
            if left <= alone {
                break;
            }
            left -= alone;
            now = now.max(from);
            let slowed = left.saturating_mul(percent) / 100;
            if slowed <= to - now {
                return now.saturating_add(slowed);
            }
            left = left.saturating_sub((to - now).saturating_mul(100) / percent);
            now = to;
        }
        now.saturating_add(left)
    }

    /// Reserves the first gap of that length from `ready` on; returns its start.
    pub(super) fn place(&mut self, ready: u64, length: u64) -> u64 {
        let start = self.earliest(ready, length);
        self.take(start, start.saturating_add(length));
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_late_takes_the_first_gap_that_is_long_enough() {
        let mut engine = Engine::default();
        assert_eq!(engine.place(100, 10), 100);
        assert_eq!(engine.place(130, 10), 130);
        assert_eq!(engine.place(0, 100), 0, "before the first");
        assert_eq!(engine.place(50, 20), 110, "between the two");
        assert_eq!(engine.place(50, 1), 140, "no gap is left between them");
        assert_eq!(engine.busy, [(0, 141)]);
        assert_eq!(engine.place(5, 0), 141, "an operation of length 0 waits too");
        assert_eq!(engine.busy.len(), 1);
    }

    #[test]
    fn what_is_beside_something_busy_takes_longer_there() {
        let mut engine = Engine::default();
        engine.take(100, 200);
        engine.take(300, 400);
        assert_eq!(engine.beside(0, 100, 200), 100, "over before");
        assert_eq!(engine.beside(0, 120, 200), 140, "the last 20 take twice as long");
        assert_eq!(engine.beside(100, 50, 200), 200);
        assert_eq!(engine.beside(150, 60, 200), 235, "25 in 50, and then 35 alone");
        assert_eq!(engine.beside(100, 175, 200), 350, "50 in 100, 100 alone, 25 in 50");
        assert_eq!(engine.beside(100, 50, 100), 150, "not slowed at all");
        assert_eq!(engine.beside(500, 10, 200), 510);
    }

    #[test]
    fn a_long_time_swallows_several_that_it_reaches() {
        let mut engine = Engine::default();
        for start in [10, 20, 30, 50] {
            engine.take(start, start + 2);
        }
        engine.take(5, 31);
        assert_eq!(engine.busy, [(5, 32), (50, 52)]);
    }

    #[test]
    fn the_oldest_busy_times_are_forgotten_and_stay_busy() {
        let mut engine = Engine::default();
        for index in 0..=BUSY_MAX as u64 {
            assert_eq!(engine.place(index * 10, 5), index * 10);
        }
        assert_eq!(engine.busy.len(), BUSY_MAX);
        assert_eq!(engine.place(0, 1), 5, "the gap after what was forgotten");
    }
}
