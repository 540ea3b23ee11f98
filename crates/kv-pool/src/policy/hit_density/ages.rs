//! Ages and gaps, in ticks: lookups, counted in units that grow with the cache.

/// Ticks in which a cache looks up as many blocks as it has, or up to twice as many.
const TICKS_PER_CACHE: u64 = 128;

/// Classes of age: two to an octave.
pub(super) const AGES: usize = 30;

/// The greatest age that is told apart, in ticks: a thousand caches. Older blocks are taken for so old.
const AGE_MAX: u16 = 1 << 15;

/// Counts lookups in ticks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// Lookups of a tick, as a power of two.
    shift: u32,
}

/// A moment, in ticks; goes round.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Tick(u16);

/// A span of time, in ticks.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Age(u16);

impl Clock {
    /// The clock of a cache of `blocks` blocks.
    pub(super) fn new(blocks: usize) -> Self {
        Self { shift: (blocks as u64 / TICKS_PER_CACHE).max(1).ilog2() }
    }

    pub(super) fn tick(self, lookups: u64) -> Tick {
        Tick((lookups >> self.shift) as u16)
    }
}

impl Tick {
    pub(super) const ZERO: Self = Self(0);

    /// The time from this moment to `now`.
    pub(super) fn age_at(self, now: Self) -> Age {
        Age(now.0.wrapping_sub(self.0))
    }

    /// This moment, or the earliest that is told apart at `now`. To be asked more often than moments go
    /// round.
    pub(super) fn at_least(self, now: Self) -> Self {
        if self.age_at(now) > Age(AGE_MAX) { Self(now.0.wrapping_sub(AGE_MAX)) } else { self }
    }

    /// Whether this moment is closer to `one` than to `other`.
    pub(super) fn is_closer(self, one: Self, other: Self) -> bool {
        let distance = |to: Self| (self.0.wrapping_sub(to.0) as i16).unsigned_abs();
        distance(one) < distance(other)
    }
}

impl Age {
    pub(super) fn ticks(self) -> u32 {
        self.0.into()
    }

    pub(super) fn class(self) -> usize {
        let ticks = u32::from(self.0) + 2;
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
        let ticks = u32::from(age.0.max(1));
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
            let from = age_from(class) as u16;
            assert_eq!((Age(from - 1).class(), Age(from).class()), (class - 1, class));
        }
        assert_eq!(Age(u16::MAX).class(), AGES - 1);
    }

    #[test]
    fn gaps_are_logarithms_and_their_mean_follows_the_last_ones() {
        assert_eq!(Gap::of(Age(0)), Gap(1));
        assert_eq!(Gap::of(Age(1024)), Gap(80));
        assert_eq!(Gap::of(Age(1536)), Gap(84));
        assert_eq!(Gap::of(Age(u16::MAX)), Gap(127));
        assert_eq!(Gap::UNKNOWN.then(Gap(40)), Gap(40));
        assert_eq!(Gap(40).then(Gap(80)), Gap(56));
        assert_eq!(Gap(80).octave(), 10);
    }

    #[test]
    fn moments_go_round_and_the_oldest_are_kept_apart_from_the_newest() {
        let (clock, tiny) = (Clock::new(3000), Clock::new(5));
        assert_eq!((clock.tick(31), clock.tick(32)), (Tick(1), Tick(2)));
        assert_eq!(tiny.tick(7), Tick(7));
        let now = clock.tick(16 * 70_000);
        assert_eq!(Tick(65_000).age_at(now), Age(5000));
        assert_eq!(Tick(65_000).at_least(now), Tick(65_000));
        assert_eq!(Tick(10_000).age_at(now).class(), AGES - 1);
        assert_eq!(Tick(10_000).at_least(now).age_at(now), Age(AGE_MAX));
    }
}
