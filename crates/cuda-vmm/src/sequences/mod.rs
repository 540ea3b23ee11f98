//! Contiguous addresses for each sequence, with memory that is mapped ahead of need.
//!
//! Attention over a contiguous range needs no block table. A [`SequenceSpace`] reserves addresses for
//! every sequence at its longest, and puts pages under them as sequences grow:
//!
//! - [`SequenceSpace::admit`] gives a [`Sequence`], if possible on a seat whose memory an earlier
//!   sequence left mapped;
//! - [`Sequence::extend_to`], and [`SequenceSpace::extend`] for a batch, are the step path: compare,
//!   store, and now and then wake the [`Worker`], which maps within the look-ahead;
//! - [`Sequence::extend_blocking`] maps on the calling thread what the worker has not;
//! - [`Sequence::plane`] gives addresses; [`Layout`] has the index formula;
//! - [`Sequence::shrink_to`] gives the end of the memory up, to be unmapped when it is at rest;
//! - [`Sequence::finish`] parks the memory, still mapped, until the given events and the gate's leases
//!   are done; then the next sequence adopts it, or the worker takes it for one that needs it more;
//! - [`SequenceSpace::trim`] gives memory back to the device, [`SequenceSpace::stats`] adds up;
//! - [`SequenceSpace::close`] ends it all in order.
//!
//! A growth maps a row, one page of each contiguous range of the sequence: of every plane, or one for
//! all planes. It is mapped whole or not at all, and published when access was granted on all of it.

mod book;
mod close;
mod core;
mod error;
mod holder;
#[cfg(all(feature = "sabotage", debug_assertions))]
mod sabotage;
mod sequence;
mod shape;
mod shrink;
mod stats;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_driver::{Device, DeviceSpan};
use parking_lot::Mutex;

use self::book::{Book, Lengths};
use self::core::SpaceCore;
use self::holder::SpaceHolder;
use self::shape::Shape;
use crate::pages::{CloseError, PagePool, Reservation, ReservationOptions, UnmapFailure};
use crate::worker::{Fault, Health, WorkHandle};
use crate::{EpochGate, Fence, UsersUnknown, Worker};

pub use close::SpaceClosing;
pub use error::{AdmitError, BatchError, ExtendError, PlaneError, SpaceError, StillLive};
use sequence::Demand;
pub use sequence::{Plane, Sequence};
pub use shape::{Layout, SpaceOptions, SpaceStrides};
pub use stats::SpaceStats;

/// Seats for sequences, each with contiguous addresses for every plane; see the
/// [page of the crate](crate).
///
/// # Drop
/// Takes the space away from its worker and waits for nothing. Live sequences keep what they have,
/// and cannot grow. When the last is gone, what is at rest is unmapped, and the rest follows the rule
/// for dropping a [`Reservation`]: what may be in use is leaked. [`close`](SequenceSpace::close) leaks
/// nothing.
#[derive(Debug)]
pub struct SequenceSpace {
    core: Arc<SpaceCore>,
    handle: WorkHandle,
    /// Kept for the pool's limit, which finds the space by it.
    holder: Option<Arc<SpaceHolder>>,
}

/// What [`SequenceSpace::trim`] did.
#[derive(Debug, Default)]
pub struct TrimReport {
    /// Bytes unmapped from finished sequences.
    pub unmapped_bytes: u64,
    /// Bytes released to the device.
    pub released_bytes: u64,
    /// Pages that the driver would not unmap: in quarantine.
    pub failed: Vec<UnmapFailure>,
    /// Refused releases.
    pub errors: Vec<CloseError>,
}

impl SequenceSpace {
    /// Reserves addresses on the device of `pages`, with its page size; nothing is mapped yet. Memory
    /// comes from `pages`, which others may use too, and is mapped by `worker`.
    ///
    /// # Errors
    /// [`SpaceError`].
    #[track_caller]
    pub fn new(
        pages: &PagePool,
        worker: &Worker,
        options: SpaceOptions,
    ) -> Result<Self, SpaceError> {
        Self::with_gate(pages, worker, options, EpochGate::new())
    }

    /// As [`new`](SequenceSpace::new), with a gate that other memory uses too.
    ///
    /// # Errors
    /// [`SpaceError`].
    #[track_caller]
    pub fn with_gate(
        pages: &PagePool,
        worker: &Worker,
        options: SpaceOptions,
        gate: EpochGate,
    ) -> Result<Self, SpaceError> {
        let _site = cuda_driver::site::enter();
        let shape = Shape::new(&options, pages.page_bytes())?;
        let reserve = ReservationOptions {
            bytes: shape.bytes(),
            page_bytes: Some(shape.page_bytes),
            peers: options.peers,
        };
        let core = Arc::new(SpaceCore {
            shape,
            parked_pages_max: options.parked_pages_max,
            prepared_pages: options.prepared_pages,
            reservation: Reservation::with_gate(pages.device(), reserve, gate)?,
            pages: pages.clone(),
            lengths: (0..shape.sequences).map(|_| Lengths::default()).collect(),
            book: Mutex::new(Book::new(shape.sequences)),
            counters: stats::Counters::default(),
            exposed: AtomicBool::new(false),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            sabotage: sabotage::Sabotage::default(),
        });
        let handle = worker.attach(Arc::clone(&core) as _);
        let holder = SpaceHolder::enroll(&core, handle.waker());
        Ok(Self { core, handle, holder })
    }

    /// Gives a seat to a sequence that will soon have `tokens` tokens. It is the seat at rest whose
    /// mapped memory fits best: the least that is enough, else the most. The worker maps what is
    /// missing; [`extend_to`](Sequence::extend_to) answers whether it has.
    ///
    /// Calls the driver only if no seat known to be at rest has enough: then to ask the events of
    /// finished sequences.
    ///
    /// # Errors
    /// [`AdmitError`].
    #[track_caller]
    pub fn admit(&self, tokens: u64) -> Result<Sequence, AdmitError> {
        let _site = cuda_driver::site::enter();
        let shape = &self.core.shape;
        if tokens > shape.tokens_max {
            let tokens_max = shape.tokens_max;
            return Err(AdmitError::TooLong { asked_tokens: tokens, tokens_max });
        }
        let rows = shape.rows_for(tokens);
        let claim = |enough| {
            let mut book = self.core.book.lock();
            let claim = book.claim(rows, enough)?;
            // In the same hold, or what is adopted would seem to be to spare.
            let wanted = if tokens == 0 { 0 } else { shape.cover(tokens) };
            self.core.lengths[claim.place as usize].wanted.store(wanted, Ordering::SeqCst);
            Some(claim)
        };
        let claim = claim(true).or_else(|| {
            self.core.settle();
            claim(false)
        });
        let Some(claim) = claim else {
            let live = self.core.book.lock().census().live;
            let sequences = shape.sequences;
            return Err(AdmitError::NoSeat { sequences, live, busy: sequences - live });
        };
        self.core.counters.admit(shape.row_bytes(claim.rows));
        Ok(self.sequence(claim.place, tokens))
    }

    /// [`Sequence::extend_to`] for each of a batch, of this space or others; wakes this space's worker
    /// at most once. Every demand is noted, also after one that is refused.
    ///
    /// # Errors
    /// [`BatchError`] with the first refusal.
    pub fn extend<'a>(
        &self,
        batch: impl IntoIterator<Item = (&'a mut Sequence, u64)>,
    ) -> Result<(), BatchError> {
        let mut demands = Demand::QUIET;
        let mut refused: Option<BatchError> = None;
        for (place, (sequence, tokens)) in batch.into_iter().enumerate() {
            let demand = sequence.demand(tokens);
            match Arc::ptr_eq(&sequence.core, &self.core) {
                true => demands = demands.and(demand),
                false => demand.tell(sequence.waker()),
            }
            if !demand.ready {
                let error = sequence.refuse(tokens);
                let first = BatchError { refused: 0, first: place, error };
                refused.get_or_insert(first).refused += 1;
            }
        }
        demands.tell(self.handle.waker());
        refused.map_or(Ok(()), Err)
    }

    /// Says what covers the uses of the memory of sequences that were dropped with unknown users:
    /// their seats are parked until the work before `fences` has completed. Returns how many there
    /// were.
    ///
    /// # Errors
    /// [`UsersUnknown`], where there are any; they stay as they are.
    pub fn recover(&self, fences: &[Fence]) -> Result<u64, UsersUnknown> {
        let abandoned = self.core.book.lock().abandoned();
        if !abandoned.is_empty() {
            self.core.reservation.inner.check_covers(fences)?;
        }
        for &place in &abandoned {
            let users = self.core.users(fences, None);
            self.core.book.lock().park_abandoned(place, users);
        }
        self.handle.waker().wake();
        Ok(abandoned.len() as u64)
    }

    /// Gives memory back to the device until `bytes` are released, or nothing is left that can be:
    /// first idle pages of the pool, then the memory of finished sequences at rest, the oldest
    /// first, then what live sequences have adopted and not asked for. Driver calls on this thread: not for the step path.
    ///
    /// # Errors
    /// [`Fault`], when the space has failed.
    #[track_caller]
    pub fn trim(&self, bytes: u64) -> Result<TrimReport, Fault> {
        let _site = cuda_driver::site::enter();
        self.handle.waker().run(|| {
            let mut report = TrimReport::default();
            self.core.settle();
            loop {
                self.release_idle(bytes, &mut report);
                if report.released_bytes >= bytes {
                    return Ok(report);
                }
                let Some(unmapped) = self.core.unmap_unneeded_row() else { return Ok(report) };
                report.unmapped_bytes += unmapped.pages * self.core.shape.page_bytes;
                report.failed.extend(unmapped.failed);
            }
        })
    }

    /// Releases idle pages, no more than `bytes` ask for.
    fn release_idle(&self, bytes: u64, report: &mut TrimReport) {
        let page_bytes = self.core.shape.page_bytes;
        let missing = bytes.saturating_sub(report.released_bytes).div_ceil(page_bytes);
        let idle = self.core.pages.stats().idle;
        let (released, errors) = self.core.pages.trim(idle.saturating_sub(missing));
        report.released_bytes += released * page_bytes;
        report.errors.extend(errors);
    }

    /// How the work for this space is doing.
    #[must_use]
    pub fn health(&self) -> Health {
        self.handle.health()
    }

    /// A look at the accounts, at one instant.
    #[must_use]
    pub fn stats(&self) -> SpaceStats {
        self.core.stats()
    }

    /// The device that holds the memory.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.core.device()
    }

    /// The gate at which batches take leases before they use addresses.
    #[must_use]
    pub fn gate(&self) -> &EpochGate {
        self.core.reservation.gate()
    }

    /// The pool that the pages come from.
    #[must_use]
    pub fn pages(&self) -> &PagePool {
        &self.core.pages
    }

    /// Distances between planes, seats and tokens; see [`Layout`].
    #[must_use]
    pub fn strides(&self) -> SpaceStrides {
        self.core.shape.strides
    }

    /// All addresses, mapped or not: the base that kernels index from with
    /// [`strides`](SequenceSpace::strides). From here on every sequence counts as having given its
    /// addresses out.
    #[must_use]
    pub fn span(&self) -> DeviceSpan {
        // Relaxed: a sequence whose address is found through the span is dropped by who found it.
        self.core.exposed.store(true, Ordering::Relaxed);
        self.core.reservation.span()
    }
}
