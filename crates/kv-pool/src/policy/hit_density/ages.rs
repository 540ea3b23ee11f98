//! Ages in classes that widen with the age, two to an octave: seconds matter early, minutes later.

/// Classes of age. The last one, from nine hours on, has no end.
pub(super) const AGES: usize = 36;

/// Width of the first class, in milliseconds: requests are seldom told apart more finely.
pub(super) const UNIT_MS: u64 = 64;

/// The class of an age.
pub(super) fn age_class(age_ms: u64) -> usize {
    let units = age_ms / UNIT_MS + 2;
    let octave = units.ilog2();
    let upper_half = (units >> (octave - 1)) & 1;
    (2 * (octave as usize - 1) + upper_half as usize).min(AGES - 1)
}

/// The least age of a class, in milliseconds.
pub(super) fn age_from_ms(class: usize) -> u64 {
    let octave = class / 2 + 1;
    let units = (1_u64 << octave) + (class as u64 % 2) * (1 << (octave - 1));
    (units - 2) * UNIT_MS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_follow_each_other_without_gaps() {
        assert_eq!(age_from_ms(0), 0);
        for class in 1..AGES {
            let from = age_from_ms(class);
            assert_eq!((age_class(from - 1), age_class(from)), (class - 1, class));
        }
        assert_eq!(age_class(u64::MAX), AGES - 1);
    }
}
