//! Accesses with their actor and time, and the order that is known between them.

use std::sync::Arc;

/// The number of the actor "host".
pub(super) const HOST: u16 = 0;

/// The kind of an access.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct How {
    pub(crate) writes: bool,
    /// Whether the access is atomic or takes part in synchronisation. Such accesses do not conflict
    /// with each other.
    pub(crate) strong: bool,
}

impl How {
    pub(crate) const READ: Self = Self { writes: false, strong: false };
    pub(crate) const WRITE: Self = Self { writes: true, strong: false };

    fn conflicts(self, other: Self) -> bool {
        (self.writes || other.writes) && !(self.strong && other.strong)
    }
}

const ACTOR_BITS: u32 = 16;
const FLAG_BITS: u32 = 2;
const WRITES: u64 = 1;
const STRONG: u64 = 2;

/// One access, packed in one word: its actor, its number in the order of calls, and its kind.
///
/// Numbers count all calls of the machine, so they rise within each actor.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Epoch(u64);

impl Epoch {
    pub(super) fn new(actor: u16, sequence: u64, how: How) -> Self {
        let flags = (u64::from(how.writes) * WRITES) | (u64::from(how.strong) * STRONG);
        Self((sequence << (ACTOR_BITS + FLAG_BITS)) | (u64::from(actor) << FLAG_BITS) | flags)
    }

    pub(super) fn actor(self) -> u16 {
        (self.0 >> FLAG_BITS) as u16
    }

    pub(super) fn sequence(self) -> u64 {
        self.0 >> (ACTOR_BITS + FLAG_BITS)
    }

    pub(super) fn how(self) -> How {
        How { writes: self.0 & WRITES != 0, strong: self.0 & STRONG != 0 }
    }

    /// Whether both have the same actor and kind.
    pub(super) fn is_like(self, other: Self) -> bool {
        (self.0 ^ other.0) & ((1 << (ACTOR_BITS + FLAG_BITS)) - 1) == 0
    }

    pub(super) fn conflicts(self, other: Self) -> bool {
        self.how().conflicts(other.how())
    }

    /// Whether every later unordered access that conflicts with `self` also conflicts with `newer`,
    /// which comes after `self`. Then `self` need not be kept.
    pub(super) fn is_covered_by(self, newer: Self) -> bool {
        let (old, new) = (self.how(), newer.how());
        (new.writes || !old.writes) && (!new.strong || old.strong)
    }
}

/// For each actor, its last call that is known to come before.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Clock(Vec<u64>);

impl Clock {
    pub(super) fn of(&self, actor: u16) -> u64 {
        self.0.get(usize::from(actor)).copied().unwrap_or(0)
    }

    /// Records that call `sequence` of `actor`, and all earlier calls of the actor, come before.
    pub(super) fn learn(&mut self, actor: u16, sequence: u64) {
        let index = usize::from(actor);
        if self.0.len() <= index {
            self.0.resize(index + 1, 0);
        }
        self.0[index] = self.0[index].max(sequence);
    }

    /// Adds all that `other` knows.
    pub(super) fn join(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (known, &more) in self.0.iter_mut().zip(&other.0) {
            *known = (*known).max(more);
        }
    }

    /// Whether `self` knows all that `other` knows.
    pub(super) fn includes(&self, other: &Clock) -> bool {
        (0..).zip(&other.0).all(|(actor, &known)| self.of(actor) >= known)
    }
}

/// What comes before one access. This decides whether another access is ordered before it.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(super) actor: u16,
    pub(super) sequence: u64,
    pub(super) clock: Arc<Clock>,
}

impl Order {
    /// Whether `earlier`, an access seen before, is ordered before this access.
    ///
    /// The calls of one actor are ordered. A call of the host is ordered before all work that is
    /// enqueued later.
    pub(super) fn is_after(&self, earlier: Epoch) -> bool {
        let (actor, sequence) = (earlier.actor(), earlier.sequence());
        match actor {
            _ if actor == self.actor => true,
            HOST => sequence < self.sequence,
            _ => sequence <= self.clock.of(actor),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_keeps_its_parts() {
        let strong = How { writes: true, strong: true };
        for (actor, sequence, how) in [(0, 0, How::READ), (u16::MAX, (1 << 46) - 1, strong)] {
            let epoch = Epoch::new(actor, sequence, how);
            assert_eq!((epoch.actor(), epoch.sequence(), epoch.how()), (actor, sequence, how));
        }
    }

    #[test]
    fn what_covers_an_access_conflicts_with_all_that_it_does() {
        let hows: Vec<How> =
            (0..4).map(|n| How { writes: n & 1 != 0, strong: n & 2 != 0 }).collect();
        let epoch = |how| Epoch::new(1, 1, how);
        for &old in &hows {
            for &new in &hows {
                let misses =
                    hows.iter().any(|&later| later.conflicts(old) && !later.conflicts(new));
                assert_eq!(epoch(old).is_covered_by(epoch(new)), !misses, "{old:?} {new:?}");
            }
        }
    }

    #[test]
    fn clocks_join_by_the_greater() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.learn(1, 5);
        a.learn(1, 3);
        b.learn(3, 2);
        assert!(!a.includes(&b) && !b.includes(&a) && a.includes(&Clock::default()));
        a.join(&b);
        assert_eq!((a.of(1), a.of(2), a.of(3), a.of(9)), (5, 0, 2, 0));
        assert!(a.includes(&b) && !b.includes(&a));
    }
}
