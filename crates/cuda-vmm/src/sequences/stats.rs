//! The accounts of a space.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::core::SpaceCore;

/// A look at a space's accounts.
///
/// In every look `reserved == mapped + parked + in_transit + retiring + quarantined + unmapped`, and
/// of the pool's pages those in use by this space are `mapped + parked + in_transit + retiring +
/// quarantined`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct SpaceStats {
    /// Addresses reserved.
    pub reserved_bytes: u64,
    /// Mapped under live sequences.
    pub mapped_bytes: u64,
    /// Mapped under finished sequences, for the next ones.
    pub parked_bytes: u64,
    /// Mapped a moment ago, not yet published, or about to be unmapped.
    pub in_transit_bytes: u64,
    /// Being unmapped.
    pub retiring_bytes: u64,
    /// Mapped because the driver would not unmap them.
    pub quarantined_bytes: u64,
    /// Reserved, without memory.
    pub unmapped_bytes: u64,
    /// Of the mapped bytes, those of tokens in use.
    pub used_bytes: u64,
    /// Of the mapped bytes, those that no token uses: ends of pages and look-ahead.
    pub waste_bytes: u64,
    /// Of the waste, what sequences have adopted and not asked for: unmapped under pressure.
    pub spare_bytes: u64,
    /// Live sequences.
    pub live: u64,
    /// Finished sequences whose memory is still mapped, abandoned ones aside.
    pub parked: u64,
    /// Seats whose sequence was dropped while its users are unknown; see
    /// [`SequenceSpace::recover`](super::SequenceSpace::recover).
    pub abandoned: u64,
    /// Sequences admitted.
    pub admitted: u64,
    /// Of those, sequences that found memory mapped.
    pub adopted: u64,
    /// Bytes that they found.
    pub adopted_bytes: u64,
    /// Times that memory was not ready when a step needed it.
    pub stalls: u64,
    /// Time that [`extend_blocking`](super::Sequence::extend_blocking) took for those, on the host's
    /// clock or the simulated machine's.
    pub stall_time: Duration,
}

/// Counts for the accounts. All `Relaxed`: each stands for itself.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) admitted: AtomicU64,
    pub(super) adopted: AtomicU64,
    pub(super) adopted_bytes: AtomicU64,
    pub(super) stalls: AtomicU64,
    pub(super) stall_nanos: AtomicU64,
}

impl Counters {
    pub(super) fn admit(&self, found_bytes: u64) {
        self.admitted.fetch_add(1, Ordering::Relaxed);
        self.adopted.fetch_add(u64::from(found_bytes > 0), Ordering::Relaxed);
        self.adopted_bytes.fetch_add(found_bytes, Ordering::Relaxed);
    }

    pub(super) fn stall(&self) {
        self.stalls.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn stalled_for(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.stall_nanos.fetch_add(nanos, Ordering::Relaxed);
    }
}

impl SpaceCore {
    pub(super) fn stats(&self) -> SpaceStats {
        // The book is held while the reservation's is looked at: pages enter that one before this one
        // and leave it after, so the difference is what is on its way.
        let (census, spare_rows, used_tokens, bytes) = {
            let book = self.book.lock();
            let used = book.seats.iter().zip(&self.lengths).map(|(seat, place)| {
                let ready = self.shape.tokens_in(seat.rows);
                place.used.load(Ordering::Relaxed).min(ready)
            });
            let used_tokens = used.sum();
            (book.census(), self.all_spare_rows(&book), used_tokens, self.reservation.stats())
        };
        let mapped_bytes = self.shape.row_bytes(census.live_rows);
        let parked_bytes = self.shape.row_bytes(census.parked_rows);
        let used_bytes = self.shape.used_bytes(used_tokens);
        let held = bytes.mapped_bytes + bytes.retiring_bytes + bytes.quarantined_bytes;
        let counters = &self.counters;
        SpaceStats {
            reserved_bytes: bytes.reserved_bytes,
            mapped_bytes,
            parked_bytes,
            in_transit_bytes: bytes.mapped_bytes - mapped_bytes - parked_bytes,
            retiring_bytes: bytes.retiring_bytes,
            quarantined_bytes: bytes.quarantined_bytes,
            unmapped_bytes: bytes.reserved_bytes - held,
            used_bytes,
            waste_bytes: mapped_bytes - used_bytes,
            spare_bytes: self.shape.row_bytes(spare_rows),
            live: census.live,
            parked: census.parked,
            abandoned: census.abandoned,
            admitted: counters.admitted.load(Ordering::Relaxed),
            adopted: counters.adopted.load(Ordering::Relaxed),
            adopted_bytes: counters.adopted_bytes.load(Ordering::Relaxed),
            stalls: counters.stalls.load(Ordering::Relaxed),
            stall_time: Duration::from_nanos(counters.stall_nanos.load(Ordering::Relaxed)),
        }
    }
}
