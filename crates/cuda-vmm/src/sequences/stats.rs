//! The statistics of a space.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::core::SpaceCore;

/// The statistics of a space at one moment.
///
/// `reserved == mapped + parked + in_transit + retiring + quarantined + unmapped` always holds.
/// This space uses `mapped + parked + in_transit + retiring + quarantined` of the pool's pages.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct SpaceStats {
    /// Bytes of reserved addresses.
    pub reserved_bytes: u64,
    /// Bytes mapped for live sequences.
    pub mapped_bytes: u64,
    /// Bytes mapped for finished sequences, to be reused by the next ones.
    pub parked_bytes: u64,
    /// Bytes mapped and not yet published, or about to be unmapped.
    pub in_transit_bytes: u64,
    /// Bytes being unmapped.
    pub retiring_bytes: u64,
    /// Bytes that stay mapped because the driver refused to unmap them.
    pub quarantined_bytes: u64,
    /// Reserved bytes without memory.
    pub unmapped_bytes: u64,
    /// Mapped bytes of tokens in use.
    pub used_bytes: u64,
    /// Mapped bytes that no token uses: ends of pages and look-ahead.
    pub waste_bytes: u64,
    /// Wasted bytes of live sequences that nobody uses: adopted and not asked for, or given up. They
    /// are unmapped under pressure.
    pub spare_bytes: u64,
    /// Number of live sequences.
    pub live: u64,
    /// Number of finished sequences whose memory is still mapped, without abandoned ones.
    pub parked: u64,
    /// Number of seats whose sequence was dropped while its users are unknown; see
    /// [`SequenceSpace::recover`](super::SequenceSpace::recover).
    pub abandoned: u64,
    /// Number of admitted sequences.
    pub admitted: u64,
    /// Number of admitted sequences that found memory mapped.
    pub adopted: u64,
    /// Number of bytes that they found.
    pub adopted_bytes: u64,
    /// Number of times that memory was not ready when a step needed it.
    pub stalls: u64,
    /// Time spent by [`extend_blocking`](super::Sequence::extend_blocking) on stalls, on the host's
    /// clock or the simulated machine's.
    pub stall_time: Duration,
}

/// Counters. All `Relaxed`: they order nothing.
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
        // The book is locked while the reservation is read. Pages enter the reservation first and
        // leave it last, so the difference is what is in transit.
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
