//! What concerns the sequences that were there before it: it is kept as long as one of them is.

use std::collections::VecDeque;
use std::sync::Arc;

/// When a sequence was admitted: between which two events that concern all sequences of before. Its twins are of the same era.
#[derive(Clone, Debug, Default)]
pub(crate) struct Era {
    /// The number of its first sequence.
    first: Arc<u64>,
}

impl Era {
    /// Whether a sequence of this era was there when the one with number `next` was the next.
    pub(crate) fn is_before(&self, next: u64) -> bool {
        *self.first < next
    }
}

/// The eras of which there are sequences, and the one that new sequences are of.
#[derive(Debug)]
pub(super) struct Eras {
    /// The last one is the present.
    all: VecDeque<Era>,
}

impl Default for Eras {
    fn default() -> Self {
        Self { all: VecDeque::from([Era::default()]) }
    }
}

impl Eras {
    /// The era of a sequence that is admitted now.
    pub(super) fn present(&self) -> Era {
        self.all.back().cloned().unwrap_or_default()
    }

    /// Begins an era with the sequence of number `next`; the number from which on there are sequences, `next` if there are
    /// none.
    pub(super) fn begin(&mut self, next: u64) -> u64 {
        self.all.retain(|era| Arc::strong_count(&era.first) > 1);
        let oldest = self.all.front().map_or(next, |era| *era.first);
        self.all.push_back(Era { first: Arc::new(next) });
        oldest
    }
}

/// Steps that have failed, until no sequence is left that was there then.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    /// How many are not kept any more.
    gone: usize,
    /// Each with the number of the first sequence that came later.
    steps: VecDeque<(u64, u64)>,
}

impl Failures {
    /// How many steps have failed.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.gone + self.steps.len()
    }

    /// Notes that a step has failed before sequence `next`, where there are sequences from `oldest` on.
    pub(super) fn note(&mut self, step: u64, next: u64, oldest: u64) {
        while self.steps.front().is_some_and(|&(_, later)| later <= oldest) {
            self.steps.pop_front();
            self.gone += 1;
        }
        self.steps.push_back((step, next));
    }

    /// The steps that have failed after the first `count` that did.
    pub(crate) fn since(&self, count: usize) -> impl Iterator<Item = u64> {
        self.steps.iter().skip(count.saturating_sub(self.gone)).map(|&(step, _)| step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_kept_as_long_as_a_sequence_of_before_is_there() {
        let (mut eras, mut failures) = (Eras::default(), Failures::default());
        let mut fail = |failures: &mut Failures, step| {
            let oldest = eras.begin(step);
            failures.note(step, step, oldest);
            eras.present()
        };
        for step in 1..100 {
            drop(fail(&mut failures, step));
            assert_eq!((failures.count(), failures.steps.len()), (step as usize, 1));
        }
        let seen = failures.count();
        let held = fail(&mut failures, 100);
        for step in 101..110 {
            drop(fail(&mut failures, step));
        }
        assert!(failures.since(seen + 1).eq(101..110), "it has not heard of these");
        assert!(held.is_before(101) && !held.is_before(100));
        drop(held);
        drop(fail(&mut failures, 110));
        assert_eq!((failures.count(), failures.steps.len()), (110, 1));
        assert_eq!(eras.all.len(), 1);
    }
}
