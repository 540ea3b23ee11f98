//! How soon blocks of a kind are found again, learned while serving, and what that makes them worth.

use super::ages::{AGES, Age, age_from};
use super::kind::{FAMILIES, KINDS, Kind};

/// Weight of what is assumed, in each class of age, in blocks.
const PRIOR: f64 = 30.0;

/// What all kinds together start from, in blocks and in those of them that are found: one in twenty
/// in each class. With classes that widen, that is a rate that falls with the age, so that before
/// anything is learned the order is that of LRU.
const START_AT_RISK: f64 = 10.0;
const START_FOUND: f64 = 0.5;

/// What is kept of all counts when the table is made anew.
const KEPT: f64 = 0.9975;

/// Blocks by age.
#[derive(Clone, Copy, Debug, Default)]
struct Ages([f64; AGES]);

/// What has become of the blocks of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// Found, at which age.
    found: Ages,
    /// Seen to no greater age than that: found, or lost sight of.
    ended: Ages,
    /// Cached or remembered now, and so old.
    waiting: Ages,
}

/// Blocks that reached a class of age without having been found, and those found in it.
#[derive(Clone, Copy, Debug, Default)]
struct Chance {
    at_risk: f64,
    found: f64,
}

/// Counts by kind and age, and the densities that follow from them.
#[derive(Debug)]
pub(super) struct Rates {
    counts: Box<[Counts]>,
    /// See [`Rates::density`].
    densities: Box<[[f32; AGES]]>,
}

impl Rates {
    pub(super) fn new() -> Self {
        let counts = vec![Counts::default(); KINDS].into_boxed_slice();
        let densities = vec![[0.0; AGES]; KINDS].into_boxed_slice();
        let mut rates = Self { counts, densities };
        rates.renew();
        rates
    }

    /// A block of a kind was found at an age.
    pub(super) fn found(&mut self, kind: Kind, age: Age) {
        let counts = &mut self.counts[kind.index()];
        counts.found.0[age.class()] += 1.0;
        counts.ended.0[age.class()] += 1.0;
    }

    /// A block of a kind will not be seen to grow older, nor to be found.
    pub(super) fn lost(&mut self, kind: Kind, age: Age) {
        self.counts[kind.index()].ended.0[age.class()] += 1.0;
    }

    /// `blocks` blocks of a kind are so old and have not been found: to be said of all before
    /// [`renew`](Self::renew).
    pub(super) fn waits(&mut self, kind: Kind, age: Age, blocks: f64) {
        self.counts[kind.index()].waiting.0[age.class()] += blocks;
    }

    /// Hits that a block of a kind and a class of age is good for in each tick that it stays for, if it
    /// stays as long as is best: the greatest quotient, over all ends, of the chance to be found by
    /// then and the time that it is expected to stay until then or until found.
    pub(super) fn density(&self, kind: usize, age: Age) -> f32 {
        self.densities[kind][age.class()]
    }

    /// Makes the densities anew, lets older counts fade, and forgets who waits.
    ///
    /// A kind of which little is known is taken to be like its family, and a family like all blocks.
    pub(super) fn renew(&mut self) {
        let start = Chance { at_risk: START_AT_RISK, found: START_FOUND };
        let mut all = [start; AGES];
        let mut families = [[Chance::default(); AGES]; FAMILIES];
        for kind in Kind::all() {
            let counts = &self.counts[kind.index()];
            counts.add_to(&mut families[kind.family()]);
            if !kind.is_special() {
                counts.add_to(&mut all);
            }
        }
        let mut of_unseen = [None; FAMILIES];
        for kind in Kind::all() {
            let mut own = [Chance::default(); AGES];
            self.counts[kind.index()].add_to(&mut own);
            let is_seen = own[0].at_risk > 0.0;
            if let (false, Some(densities)) = (is_seen, of_unseen[kind.family()]) {
                self.densities[kind.index()] = densities;
                continue;
            }
            let mut chances = [0.0; AGES];
            for (age, chance) in chances.iter_mut().enumerate() {
                let of_all = if kind.is_special() { start } else { all[age] };
                let of_family = families[kind.family()][age].shrunk_to(of_all.chance());
                *chance = own[age].shrunk_to(of_family);
            }
            let densities = best_densities(&chances);
            self.densities[kind.index()] = densities;
            if !is_seen {
                of_unseen[kind.family()] = Some(densities);
            }
        }
        for counts in &mut self.counts {
            counts.waiting = Ages::default();
            for count in counts.found.0.iter_mut().chain(&mut counts.ended.0) {
                *count *= KEPT;
            }
        }
    }
}

impl Counts {
    fn add_to(&self, sum: &mut [Chance; AGES]) {
        let mut at_risk = 0.0;
        for age in (0..AGES).rev() {
            at_risk += self.ended.0[age] + self.waiting.0[age];
            sum[age].at_risk += at_risk;
            sum[age].found += self.found.0[age];
        }
    }
}

impl Chance {
    fn chance(self) -> f64 {
        (self.found / self.at_risk).min(1.0)
    }

    /// The chance to be found, which is `prior` as long as few blocks were counted.
    fn shrunk_to(self, prior: f64) -> f64 {
        ((self.found + PRIOR * prior) / (self.at_risk + PRIOR)).min(1.0)
    }
}

/// The density at each age, from the chances to be found in each class by those who reach it.
fn best_densities(chances: &[f64; AGES]) -> [f32; AGES] {
    let mut densities = [0.0; AGES];
    for (age, density) in densities.iter_mut().enumerate() {
        let (mut left, mut hits, mut time, mut best) = (1.0, 0.0, 0.0, 0.0);
        for (end, chance) in chances.iter().enumerate().skip(age) {
            let width = f64::from(age_from(end + 1) - age_from(end));
            hits += left * chance;
            // Those found in a class were found half-way through it on average.
            time += left * width * (1.0 - chance / 2.0);
            left *= 1.0 - chance;
            best = f64::max(best, hits / time);
        }
        *density = best as f32;
    }
    densities
}

#[cfg(test)]
mod tests {
    use super::super::ages::Clock;
    use super::*;

    /// The least age of a class.
    fn age(class: usize) -> Age {
        let mut clock = Clock::new(0);
        clock.tick(0).age_at(clock.tick(age_from(class).into()))
    }

    #[test]
    fn the_best_end_is_that_of_the_class_that_pays() {
        // Nobody is found before class 10, everybody who is there in it, half-way on average.
        let mut chances = [0.0; AGES];
        chances[10] = 1.0;
        let densities = best_densities(&chances);
        let middle = f64::from(age_from(10) + age_from(11)) / 2.0;
        for (age, density) in densities.iter().enumerate().take(11) {
            let expected = 1.0 / (middle - f64::from(age_from(age)));
            assert!((f64::from(*density) / expected - 1.0).abs() < 1e-6, "{age}");
        }
        assert_eq!(densities[11..], [0.0; AGES - 11]);
        // A tenth found at once is worth waiting for no longer than that.
        chances = [0.0; AGES];
        chances[0] = 0.1;
        let width = f64::from(age_from(1));
        assert!((f64::from(best_densities(&chances)[0]) * width - 0.1 / 0.95).abs() < 1e-6);
    }

    #[test]
    fn before_anything_is_learned_older_is_worth_less() {
        let rates = Rates::new();
        for kind in Kind::all() {
            // The two classes of an octave are equally wide.
            for class in 0..AGES - 2 {
                let density = |class| rates.density(kind.index(), age(class));
                assert!(density(class) > density(class + 2));
            }
        }
    }
}
