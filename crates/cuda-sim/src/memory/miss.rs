//! Finds the memory that a bad access was probably meant for.

use cuda_driver::reference::AccessFault;

use super::{Denied, FREED_MAX, Memory};
use crate::{NearMiss, RangeKind};

#[derive(Clone, Copy, Debug)]
pub(super) struct FreedRange {
    kind: RangeKind,
    base: u64,
    bytes: u64,
}

/// `reason`, with the range closest to the access.
pub(crate) fn describe(reason: &str, nearest: Option<NearMiss>) -> String {
    match nearest {
        Some(nearest) => format!("{reason}: {nearest}"),
        None => format!("{reason}, and nothing was ever allocated"),
    }
}

impl Memory {
    pub(super) fn remember_freed(&mut self, kind: RangeKind, base: u64, bytes: u64) {
        if self.freed.len() == FREED_MAX {
            self.freed.pop_front();
        }
        self.freed.push_back(FreedRange { kind, base, bytes });
    }

    #[cold]
    pub(super) fn fault(&self, address: u64, bytes: u64, denied: Denied) -> AccessFault {
        let reason = match denied {
            Denied::Nothing => "no live memory",
            Denied::Unmapped => "reserved but not mapped",
            Denied::NoAccess => "the device has no access",
        };
        let reason = describe(reason, self.nearest(address, bytes));
        AccessFault { address, bytes, reason }
    }

    /// The range closest to the access; live ranges before freed ones. The search visits all
    /// ranges, which is fine outside hot paths.
    pub(crate) fn nearest(&self, address: u64, bytes: u64) -> Option<NearMiss> {
        let live = self.live_ranges().map(|range| (range, false));
        let freed = self.freed.iter().copied();
        let quarantined = self.host.quarantine().map(|region| FreedRange {
            kind: RangeKind::PinnedHost,
            base: region.base(),
            bytes: region.bytes(),
        });
        live.chain(freed.chain(quarantined).map(|range| (range, true)))
            .map(|(range, freed)| measure(range, freed, address, bytes))
            .min_by_key(|near| near.missed_by)
    }

    fn live_ranges(&self) -> impl Iterator<Item = FreedRange> {
        let allocations = self.allocations.live().iter().map(|allocation| FreedRange {
            kind: RangeKind::Allocation,
            base: allocation.base,
            bytes: allocation.bytes(),
        });
        let reservations =
            self.virtual_memory.reservations().iter().map(|reservation| FreedRange {
                kind: RangeKind::Reservation,
                base: reservation.base,
                bytes: reservation.bytes,
            });
        let pinned = self.host.live().iter().map(|region| FreedRange {
            kind: RangeKind::PinnedHost,
            base: region.base(),
            bytes: region.bytes(),
        });
        allocations.chain(reservations).chain(pinned)
    }
}

fn measure(range: FreedRange, freed: bool, address: u64, bytes: u64) -> NearMiss {
    let before = range.base.saturating_sub(address);
    let after = address.saturating_add(bytes).saturating_sub(range.base + range.bytes);
    NearMiss {
        kind: range.kind,
        freed,
        base: range.base,
        bytes: range.bytes,
        missed_by: before.max(after),
        before: before > after,
    }
}
