//! What can do one thing at a time: a copy engine, a link, a device's memory.

use std::collections::VecDeque;

/// Busy times that are remembered; time before the oldest of them counts as busy.
const BUSY_MAX: usize = 64;

/// When something is busy.
///
/// Operations are placed in the order in which the scheduler runs them, which is not that of their
/// times. So an operation takes the first gap that is long enough, as on hardware, where what is
/// ready first begins first.
#[derive(Clone, Debug, Default)]
pub(super) struct Engine {
    /// Starts and ends, rising, none touching the next.
    busy: VecDeque<(u64, u64)>,
    /// Nothing begins before this.
    forgotten: u64,
}

impl Engine {
    /// When something of that length begins that is ready at `ready`.
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

    /// Takes the time from `start`, which is an [`earliest`](Engine::earliest), to `end`.
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
        if let Some(&(_, to)) = self.busy.get(index).filter(|busy| busy.0 <= end) {
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

    /// Takes the first gap of that length from `ready` on; returns when it begins.
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
        assert_eq!(engine.place(50, 1), 140, "nothing is left between them");
        assert_eq!(engine.busy, [(0, 141)]);
        assert_eq!(engine.place(5, 0), 141, "what takes no time waits too");
        assert_eq!(engine.busy.len(), 1);
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
