//! Contiguous addresses for each sequence, with memory that is mapped ahead of need.
//!
//! Attention over a contiguous range needs no block table. A [`SequenceSpace`] reserves addresses
//! for every sequence at its maximum length, and maps pages as sequences grow:
//!
//! - [`SequenceSpace::admit`] creates a [`Sequence`], if possible on a seat whose memory an earlier
//!   sequence left mapped;
//! - [`Sequence::extend_to`], and [`SequenceSpace::extend`] for a batch, are the step path: they
//!   compare and store, and sometimes wake the [`Worker`], which maps within the look-ahead;
//! - [`Sequence::extend_blocking`] maps on the calling thread what the worker has not mapped;
//! - [`Sequence::plane`] returns addresses; [`Layout`] has the index formula;
//! - [`Sequence::shrink_to`] gives up the end of the memory, which is unmapped when it is at rest;
//! - [`Sequence::finish`] parks the memory, still mapped, until the given fences and the gate's
//!   leases are done; then the next sequence adopts it, or the worker gives it to a sequence that
//!   needs it more;
//! - [`SequenceSpace::trim`] releases memory to the device, [`SequenceSpace::stats`] returns
//!   statistics;
//! - [`SequenceSpace::close`] closes the space in order.
//!
//! A growth maps a row: one page of each contiguous range of the sequence, that is one for every
//! plane, or one for all planes. A row is mapped completely or not at all, and published after
//! access to all of it was granted.

mod book;
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

use cuda_driver::{Device, DeviceSpan, Fence, guard};
use parking_lot::Mutex;

use self::book::{Book, Lengths};
use self::core::SpaceCore;
use self::holder::SpaceHolder;
use self::shape::Shape;
use crate::background::{Fault, Health, WorkHandle};
use crate::pages::close::ThenPages;
use crate::pages::{CloseError, Closing, PagePool, Reservation, ReservationOptions};
use crate::rest::{Covered, Quiescence};
use crate::{EpochGate, SpaceError, Worker, gate::UsersUnknown};

pub use error::{BatchError, RoomError, StillLive};
use sequence::Demand;
pub use sequence::{Plane, Sequence};
pub use shape::{Layout, SpaceOptions, SpaceStrides};
pub use stats::SpaceStats;

/// Seats for sequences, each with contiguous addresses for every plane; see the [page of the
/// crate](crate).
///
/// # Drop
/// Detaches the space from its worker, without waiting. Live sequences keep their memory and cannot
/// grow. When the last sequence is gone, memory at rest is unmapped. Other memory follows the rule
/// for dropping a [`Reservation`]: memory that may be in use is leaked.
/// [`close`](SequenceSpace::close) leaks nothing.
#[derive(Debug)]
pub struct SequenceSpace {
    core: Arc<SpaceCore>,
    handle: WorkHandle,
    /// Kept alive so that the pool's limit can find the space.
    holder: Option<Arc<SpaceHolder>>,
}

/// The result of [`SequenceSpace::trim`].
#[derive(Debug, Default)]
pub struct TrimReport {
    /// Bytes unmapped from finished sequences.
    pub unmapped_bytes: u64,
    /// Bytes released to the device.
    pub released_bytes: u64,
    /// Pages that the driver refused to unmap. They are in quarantine.
    pub failed: Vec<CloseError>,
    /// Refused releases.
    pub errors: Vec<CloseError>,
}

impl SequenceSpace {
    /// Reserves addresses on the device of `pages`, with its page size; nothing is mapped yet.
    /// Memory comes from `pages`, which other owners may use too, and `worker` maps it.
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

    /// Like [`new`](SequenceSpace::new), with a gate that other memory may share.
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

    /// Gives a seat to a sequence that will soon have `tokens` tokens. The seat is at rest, and its
    /// mapped memory fits best: the smallest that is enough, else the largest. The worker maps the
    /// missing memory; [`extend_to`](Sequence::extend_to) tells whether it has.
    ///
    /// Calls the driver only if no seat known to be at rest has enough memory, to query the fences
    /// of finished sequences.
    ///
    /// # Errors
    /// [`RoomError`].
    #[track_caller]
    pub fn admit(&self, tokens: u64) -> Result<Sequence, RoomError> {
        let _site = cuda_driver::site::enter();
        let shape = &self.core.shape;
        if tokens > shape.tokens_max {
            let tokens_max = shape.tokens_max;
            return Err(RoomError::TooLong { asked_tokens: tokens, tokens_max });
        }
        let rows = shape.rows_for(tokens);
        let claim = |enough| {
            let mut book = self.core.book.lock();
            let claim = book.claim(rows, enough)?;
            // Under the same lock; otherwise the adopted memory would look unused.
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
            return Err(RoomError::NoSeat { sequences, live, busy: sequences - live });
        };
        self.core.counters.admit(shape.row_bytes(claim.rows));
        Ok(self.sequence(claim.place, tokens))
    }

    /// Calls [`Sequence::extend_to`] for each sequence of a batch, of this space or others. Wakes
    /// this space's worker at most once. Every demand is recorded, even after a refused one.
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
            if Arc::ptr_eq(&sequence.core, &self.core) {
                demands = demands.and(demand);
            } else {
                demand.tell(sequence.waker());
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

    /// Names fences that cover the memory of sequences dropped with unknown users: their seats are
    /// parked until the work before `fences`, and before those that the sequences themselves have
    /// named, has completed. Returns the number of these seats.
    ///
    /// # Errors
    /// [`UsersUnknown`] if there are such seats; they do not change.
    pub fn recover(&self, fences: &[Fence]) -> Result<u64, UsersUnknown> {
        let abandoned = self.core.book.lock().abandoned();
        if !abandoned.is_empty() {
            self.core.reservation.inner.check_covers(fences)?;
        }
        for &place in &abandoned {
            let users = Quiescence::new(self.gate(), fences, Covered::Yes);
            let mut book = self.core.book.lock();
            let seat = book.seat(place);
            // Unless another thread did so meanwhile.
            if seat.users.are_unknown() {
                seat.users.explain(users);
            }
        }
        self.handle.waker().wake();
        Ok(abandoned.len() as u64)
    }

    /// Releases memory to the device until `bytes` are released or nothing more can be: first idle
    /// pages of the pool, then the memory of finished sequences at rest, oldest first, then memory
    /// at rest that live sequences have adopted and not asked for, or given up. Makes driver calls
    /// on this thread, so do not call it on the step path.
    ///
    /// # Errors
    /// [`Fault`] if the space has failed.
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

    /// Releases idle pages, at most as many as `bytes` require.
    fn release_idle(&self, bytes: u64, report: &mut TrimReport) {
        let page_bytes = self.core.shape.page_bytes;
        let missing = bytes.saturating_sub(report.released_bytes).div_ceil(page_bytes);
        let idle = self.core.pages.stats().idle;
        let (released, errors) = self.core.pages.trim(idle.saturating_sub(missing));
        report.released_bytes += released * page_bytes;
        report.errors.extend(errors);
    }

    /// The state of the work for this space.
    #[must_use]
    pub fn health(&self) -> Health {
        self.handle.health()
    }

    /// The statistics at one moment.
    #[must_use]
    pub fn stats(&self) -> SpaceStats {
        self.core.stats()
    }

    /// The device with the memory.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.core.device()
    }

    /// The gate whose leases batches take before they use addresses.
    #[must_use]
    pub fn gate(&self) -> &EpochGate {
        self.core.reservation.gate()
    }

    /// The pool that provides the pages.
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
    /// [`strides`](SequenceSpace::strides). From now on every sequence counts as having its
    /// addresses handed out.
    #[must_use]
    pub fn span(&self) -> DeviceSpan {
        // Relaxed: a sequence whose address is taken from the span is dropped by a thread that has
        // the span.
        self.core.exposed.store(true, Ordering::Relaxed);
        self.core.reservation.span()
    }

    /// Detaches the space from its worker, after a running step, and retires everything that is
    /// mapped, as the first step of clean-up. [`Closing`] does the rest, once the work before
    /// `fences` and before the fences of finished sequences has completed and the leases of the
    /// gate are closed. `fences` must cover all uses of the memory of abandoned sequences.
    ///
    /// # Errors
    /// [`StillLive`] with the space while sequences are live.
    #[track_caller]
    pub fn close(self, fences: &[Fence]) -> Result<Closing, StillLive<Self>> {
        let _site = cuda_driver::site::enter();
        let census = self.core.book.lock().census();
        let live = census.live;
        if live > 0 {
            return Err(StillLive { space: self, live });
        }
        let Self { core, handle, holder } = self;
        drop(holder);
        handle.detach();
        let seats = std::mem::take(&mut core.book.lock().seats);
        let mut users: Vec<_> = fences.to_vec();
        let named = seats.iter().flat_map(|seat| seat.users.fences().cloned());
        guard!("vmm.space-close-waits", users.extend(named));
        let covered = match census.abandoned {
            0 => Covered::Yes,
            _ => core.reservation.inner.covers(fences),
        };
        let reservation = Reservation { inner: Arc::clone(&core.reservation.inner) };
        let then = ThenPages::GivenBack(core.pages.clone());
        Ok(reservation.close_after(&users, covered, then))
    }
}
