//! Accesses with their actor and time, and the order that is known between them.

use cuda_driver::guard;

use std::sync::Arc;

pub(super) const HOST: u16 = 0;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct How {
    pub(crate) writes: bool,
    /// Of an access that is atomic or takes part in synchronisation with other launches.
    pub(crate) strong: Option<Strong>,
}

/// What decides with which others such an access does not conflict ("morally strong" in the memory
/// model of PTX).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Strong {
    /// The device of the launch.
    pub(crate) device: u32,
    pub(crate) mark: StrongMark,
}

/// The part of [`Strong`] that the instruction says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct StrongMark {
    /// Whether the scope is the whole system, and not the device alone.
    pub(crate) is_system: bool,
    /// Whether the access reads and writes in one: an atomic operation.
    pub(crate) is_update: bool,
    /// Bytes of the access, as a power of two.
    pub(crate) size_log2: u8,
}

impl How {
    pub(crate) const READ: Self = Self { writes: false, strong: None };
    pub(crate) const WRITE: Self = Self { writes: true, strong: None };

    /// The same access to memory of a device, which makes all updates of it. In memory of the host
    /// each GPU makes its own: what another writes between the two halves of one is lost.
    pub(super) fn on_device(mut self) -> Self {
        if let Some(Strong { mark, .. }) = &mut self.strong {
            mark.is_update = false;
        }
        self
    }

    fn conflicts(self, other: Self) -> bool {
        let both_write = self.writes && other.writes;
        let strong = self.strong.zip(other.strong);
        let are_strong = strong.is_some_and(|(one, other)| one.meets(other, both_write));
        (self.writes || other.writes) && !are_strong
    }
}

impl Strong {
    /// Whether both are of one size, and so of the same bytes, and each scope includes the other's
    /// device. Two that write are then of one device, or neither is an update.
    fn meets(self, other: Self, both_write: bool) -> bool {
        let updates = self.mark.is_update || other.mark.is_update;
        let is_split = both_write && guard!("sim.host-updates-split", updates, else false);
        let is_of_both = self.mark.is_system && other.mark.is_system && !is_split;
        let are_near = self.device == other.device || is_of_both;
        let is_one_size = self.mark.size_log2 == other.mark.size_log2;
        guard!("sim.strong-sizes", is_one_size, else true)
            && guard!("sim.strong-scope", are_near, else true)
    }

    /// Whether every access that this one meets and that could conflict with `old` meets `old` too.
    fn stands_for(self, old: Self, old_writes: bool) -> bool {
        let meets_writes = |mark: StrongMark| mark.is_system && !mark.is_update;
        let reads = !old_writes || old.mark.is_system || !self.mark.is_system;
        let writes = meets_writes(old.mark) || !meets_writes(self.mark);
        let are_alike = self.device == old.device && self.mark.size_log2 == old.mark.size_log2;
        are_alike && reads && writes
    }
}

const ACTOR_BITS: u32 = 16;
const FLAG_BITS: u32 = 12;
const WRITES: u64 = 1;
const STRONG: u64 = 2;
const SYSTEM: u64 = 4;
const SIZE_SHIFT: u32 = 3;
const SIZE_MAX: u64 = 7;
const DEVICE_SHIFT: u32 = 6;
const DEVICE_MAX: u64 = 31;
const UPDATE: u64 = 1 << 11;

/// One access, packed in one word: its actor, its number in the order of calls, and its kind.
///
/// Numbers count all calls of the machine, so they rise within each actor.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Epoch(u64);

impl Epoch {
    pub(super) fn new(actor: u16, sequence: u64, how: How) -> Self {
        let mut flags = u64::from(how.writes) * WRITES;
        if let Some(Strong { device, mark }) = how.strong {
            let size = u64::from(mark.size_log2) & SIZE_MAX;
            let device = u64::from(device) & DEVICE_MAX;
            flags |= STRONG | (u64::from(mark.is_system) * SYSTEM);
            // The half of an update that reads is like any other read.
            flags |= u64::from(how.writes && mark.is_update) * UPDATE;
            flags |= (size << SIZE_SHIFT) | (device << DEVICE_SHIFT);
        }
        Self((sequence << (ACTOR_BITS + FLAG_BITS)) | (u64::from(actor) << FLAG_BITS) | flags)
    }

    pub(super) fn actor(self) -> u16 {
        (self.0 >> FLAG_BITS) as u16
    }

    pub(super) fn sequence(self) -> u64 {
        self.0 >> (ACTOR_BITS + FLAG_BITS)
    }

    pub(super) fn how(self) -> How {
        let mark = StrongMark {
            is_system: self.0 & SYSTEM != 0,
            is_update: self.0 & UPDATE != 0,
            size_log2: ((self.0 >> SIZE_SHIFT) & SIZE_MAX) as u8,
        };
        let strong = Strong { device: ((self.0 >> DEVICE_SHIFT) & DEVICE_MAX) as u32, mark };
        How { writes: self.0 & WRITES != 0, strong: (self.0 & STRONG != 0).then_some(strong) }
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
        let covers = |new: Strong| old.strong.is_some_and(|one| new.stands_for(one, old.writes));
        guard!("sim.read-hides-no-write", new.writes || !old.writes, else true)
            && guard!("sim.atomic-hides-no-plain", new.strong.is_none_or(covers), else true)
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

    fn strong(device: u32, is_system: bool, size_log2: u8) -> Option<Strong> {
        let mark = StrongMark { is_system, is_update: false, size_log2 };
        Some(Strong { device, mark })
    }

    fn update(device: u32, is_system: bool, size_log2: u8) -> Option<Strong> {
        let mark = StrongMark { is_system, is_update: true, size_log2 };
        Some(Strong { device, mark })
    }

    #[test]
    fn an_epoch_keeps_its_parts() {
        let most = How { writes: true, strong: update(31, true, 4) };
        let least = How { writes: false, strong: strong(0, false, 0) };
        for (actor, sequence, how) in
            [(0, 0, How::READ), (u16::MAX, (1 << 36) - 1, most), (7, 9, least)]
        {
            let epoch = Epoch::new(actor, sequence, how);
            assert_eq!((epoch.actor(), epoch.sequence(), epoch.how()), (actor, sequence, how));
        }
    }

    #[test]
    fn what_covers_an_access_conflicts_with_all_that_it_does() {
        let kind = |n: u32| (n & 1, n & 2 != 0, 2 + (n >> 2) as u8);
        let kinds = (0..8).map(kind).flat_map(|(device, is_system, size)| {
            [strong(device, is_system, size), update(device, is_system, size)]
        });
        let hows = kinds
            .chain([None])
            .flat_map(|strong| [false, true].map(|writes| How { writes, strong }));
        let hows: Vec<How> = hows.collect();
        let epoch = |how| Epoch::new(1, 1, how);
        for &old in &hows {
            for &new in &hows {
                let misses =
                    hows.iter().any(|&later| later.conflicts(old) && !later.conflicts(new));
                assert_eq!(epoch(old).is_covered_by(epoch(new)), !misses, "{old:?} {new:?}");
            }
        }
    }
}
