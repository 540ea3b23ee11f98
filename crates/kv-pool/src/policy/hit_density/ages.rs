//! Ages and gaps in lookups, in classes that widen: two to an octave.

/// Classes of age. The last one, from four million lookups on, has no end.
pub(super) const AGES: usize = 36;

/// Width of the first class, in lookups: less than one short request.
pub(super) const UNIT: u64 = 16;

/// The class of an age.
pub(super) fn age_class(age: u64) -> usize {
    let units = age / UNIT + 2;
    let octave = units.ilog2();
    let upper_half = (units >> (octave - 1)) & 1;
    (2 * (octave as usize - 1) + upper_half as usize).min(AGES - 1)
}

/// The least age of a class, in lookups.
pub(super) fn age_from(class: usize) -> u64 {
    let octave = class / 2 + 1;
    let units = (1_u64 << octave) + (class as u64 % 2) * (1 << (octave - 1));
    (units - 2) * UNIT
}

/// The time between two uses of a block, in eighths of an octave above one lookup; 0 before there
/// were two.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Gap(u8);

impl Gap {
    pub(super) const UNKNOWN: Self = Self(0);

    pub(super) fn of_lookups(lookups: u64) -> Self {
        let octave = lookups.max(1).ilog2();
        let eighths = ((u128::from(lookups.max(1)) << 3 >> octave) & 7) as u32;
        Self((8 * octave + eighths).clamp(1, u32::from(u8::MAX)) as u8)
    }

    pub(super) const fn to_bits(self) -> u8 {
        self.0
    }

    pub(super) const fn from_bits(bits: u8) -> Self {
        Self(bits)
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

    /// Whole octaves.
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
            assert_eq!((age_class(from - 1), age_class(from)), (class - 1, class));
        }
        assert_eq!(age_class(u64::MAX), AGES - 1);
    }

    #[test]
    fn gaps_are_logarithms_and_their_mean_follows_the_last_ones() {
        assert_eq!(Gap::of_lookups(0), Gap(1));
        assert_eq!(Gap::of_lookups(1024), Gap(80));
        assert_eq!(Gap::of_lookups(1536), Gap(84));
        assert_eq!(Gap::of_lookups(u64::MAX), Gap(255));
        assert_eq!(Gap::UNKNOWN.then(Gap(40)), Gap(40));
        assert_eq!(Gap(40).then(Gap(80)), Gap(56));
        assert_eq!(Gap(80).octave(), 10);
    }
}
