//! What happens to requests by chance: drawn from the seed, so that every run is the same.

use crate::config::Life;
use crate::rng::SplitMix64;

pub(super) const SLEEP_ITERATIONS_MAX: u64 = 16;

/// In how many iterations, of 100, a draft model computes tokens of a request.
const DRAFTS_PERCENT: u32 = 60;

#[derive(Clone, Copy, Debug)]
pub(super) struct Chance {
    life: Life,
    seed: u64,
}

impl Chance {
    pub(super) fn new(life: Life, seed: u64) -> Self {
        Self { life, seed }
    }

    fn draw(&self, what: u64, request: usize, at: u64) -> SplitMix64 {
        let mut mixed = SplitMix64::new(self.seed ^ what.rotate_left(48));
        for part in [request as u64, at] {
            mixed = SplitMix64::new(mixed.next_u64() ^ part);
        }
        mixed
    }

    fn hits(&self, what: u64, request: usize, at: u64, percent: u32) -> bool {
        percent > 0 && self.draw(what, request, at).below(100) < u64::from(percent)
    }

    pub(super) fn accepted(&self, request: usize, position: u64, drafts: u32) -> u32 {
        let mut drawn = self.draw(1, request, position);
        (0..drafts).take_while(|_| drawn.below(100) < u64::from(self.life.accept)).count() as u32
    }

    pub(super) fn drafts(&self, request: usize, iteration: u64) -> bool {
        self.hits(6, request, iteration, DRAFTS_PERCENT)
    }

    /// Whether a running request is suspended in an iteration, and for how many.
    pub(super) fn sleeps(&self, request: usize, iteration: u64) -> Option<u64> {
        let hit = self.hits(2, request, iteration, self.life.suspend);
        hit.then(|| 1 + self.draw(3, request, iteration).below(SLEEP_ITERATIONS_MAX))
    }

    /// After how many iterations an admitted request of `tokens` tokens to generate is cancelled, if it is.
    pub(super) fn lives(&self, request: usize, tokens: u64) -> Option<u64> {
        let hit = self.hits(4, request, 0, self.life.cancel);
        hit.then(|| self.draw(5, request, 0).below(tokens.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certain_and_impossible_events_are_so() {
        let life = Life { accept: 100, suspend: 100, cancel: 100, ..Life::default() };
        let always = Chance::new(life, 1);
        let never = Chance::new(Life { accept: 0, ..Life::default() }, 1);
        for request in 0..100 {
            assert_eq!(always.accepted(request, 7, 4), 4);
            assert!(always.sleeps(request, 3).is_some_and(|for_| (1..=16).contains(&for_)));
            assert!(always.lives(request, 5).is_some_and(|after| after < 5));
            assert_eq!(never.accepted(request, 7, 4), 0);
            assert_eq!((never.sleeps(request, 3), never.lives(request, 5)), (None, None));
        }
    }
}
