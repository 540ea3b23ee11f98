//! How soon blocks of a kind are found again, learned while serving, and what that makes them worth.

use super::ages::{AGES, age_from};
use super::kind::{FAMILIES, KINDS, Kind};

/// Weight of what is assumed, in each class of age, in blocks.
const PRIOR: f64 = 30.0;

/// What all kinds together start from, in blocks and in those of them that are found: one in twenty
/// in each class. With classes that widen, that is a rate that falls with the age, so that before
/// anything is learned the order is that of LRU.
const START_AT_RISK: f64 = 10.0;
const START_FOUND: f64 = 0.5;

/// What is kept of all counts when the table is made anew.
const KEPT: f64 = 0.99;

type Counts = [Count; AGES];

/// Blocks that reached a class of age without having been found, and those found in it.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    at_risk: f64,
    found: f64,
}

/// Counts by kind and age, and the densities that follow from them.
#[derive(Debug)]
pub(super) struct Rates {
    counts: Box<[Counts]>,
    /// Kinds that there were any blocks of.
    seen: [bool; KINDS],
    /// See [`Rates::densities`].
    densities: Box<[[f64; AGES]]>,
}

impl Rates {
    pub(super) fn new() -> Self {
        let counts = vec![[Count::default(); AGES]; KINDS].into_boxed_slice();
        let densities = vec![[0.0; AGES]; KINDS].into_boxed_slice();
        let mut rates = Self { counts, seen: [true; KINDS], densities };
        rates.renew();
        rates.seen = [false; KINDS];
        rates
    }

    /// `blocks` blocks of a kind have come to an age without having been found.
    pub(super) fn reached(&mut self, kind: Kind, age: usize, blocks: u32) {
        self.counts[kind.index()][age].at_risk += f64::from(blocks);
        self.seen[kind.index()] = true;
    }

    /// `blocks` blocks are of another kind than was thought when they were counted at an age.
    pub(super) fn moved(&mut self, from: Kind, to: Kind, age: usize, blocks: u32) {
        let count = &mut self.counts[from.index()][age].at_risk;
        *count = (*count - f64::from(blocks)).max(0.0);
        self.reached(to, age, blocks);
    }

    /// A block of a kind was found at an age.
    pub(super) fn found(&mut self, kind: Kind, age: usize) {
        self.counts[kind.index()][age].found += 1.0;
    }

    /// Hits that a block of a kind and an age is good for in each lookup that it stays for, if it
    /// stays as long as is best: the greatest quotient, over all ends, of the chance to be found by
    /// then and the time that it is expected to stay until then or until found.
    ///
    /// All of them, by kind and then by age.
    pub(super) fn densities(&self) -> &[f64] {
        self.densities.as_flattened()
    }

    #[cfg(test)]
    fn density(&self, kind: Kind, age: usize) -> f64 {
        self.densities[kind.index()][age]
    }

    /// Makes the densities anew, and lets older counts fade.
    ///
    /// A kind of which little is known is taken to be like its family, and a family like all blocks.
    pub(super) fn renew(&mut self) {
        let start = Count { at_risk: START_AT_RISK, found: START_FOUND };
        let mut all = [start; AGES];
        let mut families = [[Count::default(); AGES]; FAMILIES];
        for kind in Kind::all().filter(|kind| self.seen[kind.index()]) {
            let counts = &self.counts[kind.index()];
            add(&mut families[kind.family()], counts);
            if kind.can_be_left() {
                add(&mut all, counts);
            }
        }
        for kind in Kind::all().filter(|kind| self.seen[kind.index()]) {
            let mut chances = [0.0; AGES];
            for (age, chance) in chances.iter_mut().enumerate() {
                let of_all = if kind.can_be_left() { all[age] } else { start };
                let of_family = families[kind.family()][age].shrunk_to(of_all.chance());
                *chance = self.counts[kind.index()][age].shrunk_to(of_family);
            }
            self.densities[kind.index()] = best_densities(&chances);
        }
        for count in self.counts.iter_mut().flatten() {
            count.at_risk *= KEPT;
            count.found *= KEPT;
        }
    }
}

impl Count {
    fn chance(self) -> f64 {
        (self.found / self.at_risk).min(1.0)
    }

    /// The chance to be found, which is `prior` as long as few blocks were counted.
    fn shrunk_to(self, prior: f64) -> f64 {
        ((self.found + PRIOR * prior) / (self.at_risk + PRIOR)).min(1.0)
    }
}

fn add(sum: &mut Counts, counts: &Counts) {
    for (sum, count) in sum.iter_mut().zip(counts) {
        sum.at_risk += count.at_risk;
        sum.found += count.found;
    }
}

/// The density at each age, from the chances to be found in each class by those who reach it.
fn best_densities(chances: &[f64; AGES]) -> [f64; AGES] {
    let mut densities = [0.0; AGES];
    for (age, density) in densities.iter_mut().enumerate() {
        let (mut left, mut hits, mut time) = (1.0, 0.0, 0.0);
        for (end, chance) in chances.iter().enumerate().skip(age) {
            let width = (age_from(end + 1) - age_from(end)) as f64;
            hits += left * chance;
            // Those found in a class were found half-way through it on average.
            time += left * width * (1.0 - chance / 2.0);
            left *= 1.0 - chance;
            *density = f64::max(*density, hits / time);
        }
    }
    densities
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_end_is_that_of_the_class_that_pays() {
        // Nobody is found before class 10, everybody who is there in it, half-way on average.
        let mut chances = [0.0; AGES];
        chances[10] = 1.0;
        let densities = best_densities(&chances);
        let middle = (age_from(10) + age_from(11)) as f64 / 2.0;
        for (age, density) in densities.iter().enumerate().take(11) {
            let expected = 1.0 / (middle - age_from(age) as f64);
            assert!((density / expected - 1.0).abs() < 1e-12, "{age}");
        }
        assert_eq!(densities[11..], [0.0; AGES - 11]);
        // A tenth found at once is worth waiting for no longer than that.
        chances = [0.0; AGES];
        chances[0] = 0.1;
        let width = age_from(1) as f64;
        assert!((best_densities(&chances)[0] * width - 0.1 / 0.95).abs() < 1e-12);
    }

    #[test]
    fn before_anything_is_learned_older_is_worth_less() {
        let rates = Rates::new();
        for kind in Kind::all() {
            // The two classes of an octave are equally wide.
            for age in 0..AGES - 2 {
                assert!(rates.density(kind, age) > rates.density(kind, age + 2));
            }
        }
    }

    #[test]
    fn blocks_before_the_usual_think_time_are_worth_more_than_after_it() {
        let mut rates = Rates::new();
        let kind = Kind::PARTIAL;
        for age in 0..AGES {
            rates.reached(kind, age, 10_000);
        }
        (0..5000).for_each(|_| rates.found(kind, 20));
        rates.renew();
        assert!(rates.density(kind, 0) < rates.density(kind, 19));
        assert!(rates.density(kind, 19) > 100.0 * rates.density(kind, 21));
    }
}
