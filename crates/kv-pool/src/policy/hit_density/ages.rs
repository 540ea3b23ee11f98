//! Ages and gaps, in ticks: lookups, counted in units that grow with the cache.

/// Ticks in which a cache looks up as many blocks as it has, or up to twice as many.
const TICKS_PER_CACHE: u64 = 128;

/// Classes of age: two to an octave.
pub(super) const AGES: usize = 30;

/// The greatest age that is told apart, in ticks: a thousand caches. Older blocks are taken for so old.
const AGE_MAX: u32 = 1 << 15;

/// How many ticks pass at most while all blocks and names are looked at once. So none is older, when it is looked at
/// the next time, than moments that go round can tell.
const TICKS_PER_ROUND: u32 = 1 << 30;

const _: () = assert!(AGE_MAX + 2 * TICKS_PER_ROUND < u32::MAX);

/// Counts lookups in ticks. It stands still from some time on if nothing is looked at: what is old stays old.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// Lookups of a tick, as a power of two.
    shift: u32,
    /// The tick of the last lookup, if it never stood still.
    last: u64,
    now: Tick,
    /// Ticks that have passed in the round under way.
    passed: u32,
}

/// A moment, in ticks; goes round.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Tick(u32);

/// A span of time, in ticks.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Age(u32);

impl Clock {
    /// The clock of a cache of `blocks` blocks.
    pub(super) fn new(blocks: usize) -> Self {
        let shift = (blocks as u64 / TICKS_PER_CACHE).max(1).ilog2();
        Self { shift, last: 0, now: Tick::ZERO, passed: 0 }
    }

    /// The moment of a lookup, which is that of an earlier one at least.
    pub(super) fn tick(&mut self, lookups: u64) -> Tick {
        let tick = lookups >> self.shift;
        let left = u64::from(TICKS_PER_ROUND - 1 - self.passed);
        let passed = tick.saturating_sub(self.last).min(left) as u32;
        self.last = self.last.max(tick);
        self.passed += passed;
        let now = self.now.0.wrapping_add(passed);
        self.now = Tick(crate::guard!("pool.ages-do-not-go-round", now, else now & 0xFFFF));
        self.now
    }

    /// Says that all blocks and names have been looked at.
    pub(super) fn begin_round(&mut self) {
        self.passed = 0;
    }
}

impl Tick {
    pub(super) const ZERO: Self = Self(0);

    #[cfg(test)]
    pub(super) const fn of(ticks: u32) -> Self {
        Self(ticks)
    }

    /// The time from this moment to `now`.
    pub(super) fn age_at(self, now: Self) -> Age {
        Age(now.0.wrapping_sub(self.0))
    }

    /// This moment, or the earliest that is told apart at `now`. To be asked once in each round of the [`Clock`].
    pub(super) fn at_least(self, now: Self) -> Self {
        if self.age_at(now) > Age(AGE_MAX) { Self(now.0.wrapping_sub(AGE_MAX)) } else { self }
    }

    /// Whether this moment is closer to `one` than to `other`.
    pub(super) fn is_closer(self, one: Self, other: Self) -> bool {
        let distance = |to: Self| (self.0.wrapping_sub(to.0) as i32).unsigned_abs();
        distance(one) < distance(other)
    }
}

impl Age {
    pub(super) fn ticks(self) -> u32 {
        self.0
    }

    pub(super) fn class(self) -> usize {
        let ticks = self.0.saturating_add(2);
        let octave = ticks.ilog2();
        let upper_half = (ticks >> (octave - 1)) & 1;
        ((2 * (octave - 1) + upper_half) as usize).min(AGES - 1)
    }
}

/// The least age of a class, in ticks.
pub(super) fn age_from(class: usize) -> u32 {
    let octave = class / 2 + 1;
    (1 << octave) + (class as u32 % 2) * (1 << (octave - 1)) - 2
}

/// The time between two uses of a block, in eighths of an octave above one tick; 0 before there were
/// two. It has 7 bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Gap(u8);

impl Gap {
    pub(super) const UNKNOWN: Self = Self(0);
    pub(super) const MAX: u8 = 127;

    pub(super) fn of(age: Age) -> Self {
        let ticks = age.0.clamp(1, AGE_MAX);
        let octave = ticks.ilog2();
        let eighths = ((ticks << 3) >> octave) & 7;
        Self((8 * octave + eighths).clamp(1, u32::from(Self::MAX)) as u8)
    }

    pub(super) const fn to_bits(self) -> u8 {
        self.0
    }

    /// The gap of these bits, of which there are 7.
    pub(super) const fn from_bits(bits: u8) -> Self {
        Self(bits & Self::MAX)
    }

    /// The mean after another gap: two fifths of what is new, so that one pause does not hide the pace.
    pub(super) fn then(self, next: Self) -> Self {
        match self {
            Self::UNKNOWN => next,
            Self(mean) => {
                Self(((3 * u32::from(mean) + 2 * u32::from(next.0) + 2) / 5).max(1) as u8)
            }
        }
    }

    /// Whole octaves, below 16.
    pub(super) const fn octave(self) -> u8 {
        self.0 / 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_follow_each_other_without_gaps() {
        assert_eq!(age_from(0), 0);
        for class in 1..AGES {
            let from = age_from(class);
            assert_eq!((Age(from - 1).class(), Age(from).class()), (class - 1, class));
        }
        assert_eq!(Age(u32::MAX).class(), AGES - 1);
    }

    #[test]
    fn moments_go_round_and_the_oldest_are_kept_apart_from_the_newest() {
        let (mut clock, mut tiny) = (Clock::new(3000), Clock::new(5));
        assert_eq!((clock.tick(31), clock.tick(32)), (Tick(1), Tick(2)));
        assert_eq!(tiny.tick(7), Tick(7));
        let now = Tick(4464);
        assert_eq!(Tick(u32::MAX - 535).age_at(now), Age(5000));
        assert_eq!(Tick(u32::MAX - 535).at_least(now), Tick(u32::MAX - 535));
        assert_eq!(Tick(u32::MAX - 50_000).age_at(now).class(), AGES - 1);
        assert_eq!(Tick(u32::MAX - 50_000).at_least(now).age_at(now), Age(AGE_MAX));
    }

    #[test]
    fn time_stands_still_while_nothing_is_looked_at_and_goes_on_afterwards() {
        let mut clock = Clock::new(1);
        let long = clock.tick(u64::MAX / 2);
        assert_eq!(long, Tick(TICKS_PER_ROUND - 1));
        assert_eq!(clock.tick(u64::MAX / 2 + 9), long);
        clock.begin_round();
        assert_eq!(long.age_at(clock.tick(u64::MAX / 2 + 12)), Age(3));
        assert_eq!(long.age_at(clock.tick(7)), Age(3), "it does not go back");
    }
}
