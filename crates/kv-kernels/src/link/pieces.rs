//! How long the pieces are that travel through the ring.

/// How long the pieces of a pipeline are.
///
/// Where a kernel fills the ring, the first piece is short, so that the copy engine begins soon, and
/// each of the next is longer by `growth`, which the kernel keeps ahead of. Where a kernel empties
/// it, that is mirrored: the last piece is short, so that little is left when the engine ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Taper {
    /// The shortest, in bytes.
    pub(crate) least: u64,
    /// The longest, in bytes.
    pub(crate) most: u64,
    /// At least 2.
    pub(crate) growth: u64,
    /// Whether the short pieces come first.
    pub(crate) rising: bool,
}

impl Taper {
    /// Bytes of the piece that follows one of `before` bytes (0: the first), when `left` are left.
    pub(crate) fn next(&self, before: u64, left: u64) -> u64 {
        let Self { least, most, growth, rising } = *self;
        if rising {
            return if before == 0 { least } else { before.saturating_mul(growth) }.min(most);
        }
        // What follows is 1 / growth of what is left, until that is the least.
        let next = left - left / growth;
        if left <= least { left.min(most) } else { next.clamp(least, most) }
    }
}

/// How long each piece is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Pace {
    /// So that a pipeline that begins and ends with nothing else in it is over soon.
    Tapered(Taper),
    /// As long as may be, those of a run of one length.
    Even {
        /// The longest, in bytes.
        most: u64,
    },
}

impl Pace {
    /// Bytes of the piece that follows one of `before` bytes (0: the first), when `left` are left, and
    /// `left_here` of the run that it begins with.
    pub(crate) fn next(self, before: u64, left: u64, left_here: u64) -> u64 {
        match self {
            Self::Tapered(taper) => taper.next(before, left),
            Self::Even { most } => left_here.div_ceil(left_here.div_ceil(most.max(1)).max(1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tapered(taper: Taper, whole: u64) -> Vec<u64> {
        let (mut left, mut before, mut taken) = (whole, 0, Vec::new());
        while left > 0 {
            before = taper.next(before, left).min(left);
            left -= before;
            taken.push(before);
        }
        taken
    }

    #[test]
    fn pieces_grow_where_a_kernel_fills_and_shrink_where_it_empties() {
        let taper = Taper { least: 1, most: 12, growth: 4, rising: true };
        assert_eq!(tapered(taper, 40), [1, 4, 12, 12, 11]);
        let taper = Taper { rising: false, ..taper };
        assert_eq!(tapered(taper, 40), [12, 12, 12, 3, 1]);
        assert_eq!(tapered(taper, 1), [1]);
        let flat = Taper { least: 5, most: 5, growth: 2, rising: false };
        assert_eq!(tapered(flat, 12), [5, 5, 2]);
    }

    #[test]
    fn an_even_pace_cuts_a_run_evenly() {
        let even = Pace::Even { most: 12 };
        assert_eq!(even.next(0, 100, 32), 11);
        assert_eq!(even.next(11, 89, 21), 11);
        assert_eq!(even.next(11, 78, 10), 10);
        assert_eq!(even.next(10, 68, 5), 5);
        let taper = Taper { least: 1, most: 12, growth: 4, rising: true };
        assert_eq!(Pace::Tapered(taper).next(1, 30, 2), 4);
    }
}
