//! One sequence: the handle that a step extends, and the addresses of its planes.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_driver::{DeviceSpan, Fence, guard};

use super::core::SpaceCore;
use super::{RoomError, SequenceSpace};
use crate::background::Waker;
use crate::background::{Fault, Health};
use crate::gate::UsersUnknown;
use crate::rest::{Covered, Quiescence};

/// A seat of a [`SequenceSpace`] with a contiguous range of addresses for each plane. One sequence
/// holds it until it is finished or dropped. Any thread may own it.
///
/// # Ordering
/// Tokens for which [`extend_to`](Sequence::extend_to) returned `Ok` may be used at once. They stay
/// mapped while the sequence is held and does not [shrink](Sequence::shrink_to). Their contents are
/// undefined until written.
///
/// # Drop
/// [`finish`](Sequence::finish) names the possible users of the memory. A drop does not, so it
/// assumes the worst. If no address was ever handed out (by [`plane`](Sequence::plane) of this
/// sequence or by [`SequenceSpace::span`]), nothing can use the memory, and the seat is free at
/// once. If leases were ever taken at the space's gate, they cover every use: the seat is parked
/// until the leases taken so far are closed and their work is done. Otherwise the users are
/// unknown, and the seat is abandoned: it is neither reused nor unmapped until
/// [`SequenceSpace::recover`] or [`SequenceSpace::close`] gets fences that cover them. The same
/// happens to a sequence finished without a fence, or with fences of devices without access.
#[derive(Debug)]
#[must_use = "dropping a sequence may abandon its seat: finish it"]
pub struct Sequence {
    pub(super) core: Arc<SpaceCore>,
    waker: Waker,
    place: u64,
    /// Up to this number of tokens there is memory, and no need to ask for more: the step path only
    /// compares with it.
    quiet_until: u64,
    /// Number of tokens for which memory was requested.
    asked: u64,
    exposed: AtomicBool,
}

/// The result of a step on one sequence, or on several of one space.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Demand {
    /// Whether the tokens may be used.
    pub(super) ready: bool,
    /// Whether the worker has more to do.
    pub(super) more: bool,
}

impl Demand {
    /// Nothing to do.
    pub(super) const QUIET: Self = Self { ready: true, more: false };

    pub(super) fn and(self, other: Self) -> Self {
        Self { ready: self.ready && other.ready, more: self.more || other.more }
    }

    /// Wakes the worker if needed, for work ahead of need or immediate work.
    pub(super) fn tell(self, waker: &Waker) {
        match self {
            Self { ready: false, .. } => waker.wake_now(),
            Self { more: true, .. } => waker.wake(),
            Self { .. } => {}
        }
    }
}

impl Sequence {
    pub(super) fn new(core: Arc<SpaceCore>, waker: Waker, place: u64) -> Self {
        let exposed = AtomicBool::new(false);
        Self { core, waker, place, quiet_until: 0, asked: 0, exposed }
    }

    /// Sets the number of tokens of the sequence, and returns whether they may be used. Calls no
    /// driver, takes no lock and allocates nothing; most calls only compare and store. Fewer tokens
    /// than before unmap nothing: for that, use [`shrink_to`](Sequence::shrink_to).
    ///
    /// Wakes the worker when the last of the memory ahead comes into use.
    ///
    /// # Errors
    /// [`RoomError::NotReady`], counted as a stall, if the memory is not mapped yet;
    /// [`RoomError::Failed`] if it never will be; [`RoomError::TooLong`].
    pub fn extend_to(&mut self, tokens: u64) -> Result<(), RoomError> {
        let demand = self.demand(tokens);
        demand.tell(&self.waker);
        if demand.ready { Ok(()) } else { Err(self.refuse(tokens)) }
    }

    /// Like [`extend_to`](Sequence::extend_to), but maps missing memory on this thread, with about
    /// 75 µs of driver calls for each page. That counts as a stall, with its time.
    ///
    /// # Ordering
    /// May wait for the running step of the worker. Does not wait for device work: memory of
    /// finished sequences is taken only when it is at rest.
    ///
    /// # Errors
    /// [`RoomError::NotReady`] with the cause, if there is too little memory even after
    /// everything at rest was taken; memory mapped by the call stays mapped.
    /// [`RoomError::Failed`], [`RoomError::TooLong`].
    #[track_caller]
    pub fn extend_blocking(&mut self, tokens: u64) -> Result<(), RoomError> {
        let demand = self.demand(tokens);
        if demand.ready {
            demand.tell(&self.waker);
            return Ok(());
        }
        let _site = cuda_driver::site::enter();
        self.check_length(tokens)?;
        self.core.counters.stall();
        let begin = self.core.clock();
        let mapped = self.map_here(tokens);
        self.core.counters.stalled_for(self.core.elapsed(begin));
        // Wakes the worker for the look-ahead.
        self.waker.wake();
        let ready_tokens = self.ready_tokens();
        self.quiet_until = self.quiet_until.max(self.quiet(ready_tokens));
        mapped.map_err(|cause| match cause.is_fatal() {
            true => RoomError::Failed { asked_tokens: tokens, ready_tokens, cause },
            false => RoomError::NotReady { asked_tokens: tokens, ready_tokens, cause: Some(cause) },
        })
    }

    /// Number of tokens that may be used now: those with memory, among the requested ones and the
    /// look-ahead.
    #[must_use]
    pub fn ready_tokens(&self) -> u64 {
        // Partner: the worker's store after access to all planes was granted.
        let ready = self.core.lengths[self.place as usize].ready.load(Ordering::Acquire);
        // Memory that was not requested may be mapped, but may also be unmapped soon.
        ready.min(self.asked)
    }

    /// Number of tokens in use, as last passed to [`extend_to`](Sequence::extend_to).
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.core.lengths[self.place as usize].used.load(Ordering::Relaxed)
    }

    /// Index of the seat, which is the index of this sequence in each plane's tensor; see
    /// [`Layout`](super::Layout).
    #[must_use]
    pub fn seat(&self) -> u64 {
        self.place
    }

    /// The location of a plane of this sequence, for as many tokens as may be used now.
    ///
    /// # Errors
    /// [`RoomError::NoPlane`].
    pub fn plane(&self, plane: u64) -> Result<Plane, RoomError> {
        let shape = &self.core.shape;
        if plane >= shape.planes {
            return Err(RoomError::NoPlane { plane, planes: shape.planes });
        }
        let tokens = self.ready_tokens();
        let offset = shape.offset(self.place, plane, 0);
        let stride = shape.strides.token;
        // Up to the last byte of the last token. The rest of its stride belongs to other planes.
        let bytes = tokens.saturating_sub(1) * stride + shape.token_bytes * tokens.min(1);
        self.expose();
        let span = self.core.reservation.inner.span.slice(offset, bytes)?;
        Ok(Plane { span, tokens, token_stride: stride, token_bytes: shape.token_bytes })
    }

    /// Ends the sequence. Its memory stays mapped, and is adopted or unmapped once the work before
    /// `fences` has completed and the leases of the gate taken so far are closed. Calls no driver.
    ///
    /// If neither a fence nor a lease covers the uses of the memory, this equals a
    /// [drop](Sequence#drop).
    #[track_caller]
    pub fn finish(mut self, fences: &[Fence]) {
        let _site = cuda_driver::site::enter();
        self.leave(Some(fences));
    }

    /// The step path: two comparisons and a store in most calls.
    #[inline]
    pub(super) fn demand(&mut self, tokens: u64) -> Demand {
        if tokens <= self.quiet_until {
            self.core.lengths[self.place as usize].used.store(tokens, Ordering::Relaxed);
            return Demand::QUIET;
        }
        self.demand_more(tokens)
    }

    fn demand_more(&mut self, tokens: u64) -> Demand {
        let shape = &self.core.shape;
        if tokens > shape.tokens_max {
            return Demand { ready: false, more: false };
        }
        let place = &self.core.lengths[self.place as usize];
        place.used.store(tokens, Ordering::Relaxed);
        let covered = shape.cover(tokens);
        let more = covered > self.asked;
        if more {
            self.asked = covered;
            // SeqCst, like the load below: see `SpaceCore::lower`.
            place.wanted.store(covered, Ordering::SeqCst);
        }
        let ready = place.ready.load(Ordering::SeqCst);
        self.quiet_until = self.quiet(ready);
        Demand { ready: tokens <= ready, more }
    }

    /// Whether more memory was requested than `tokens` tokens need.
    pub(super) fn asks_beyond(&self, tokens: u64) -> bool {
        self.asked > self.core.shape.cover(tokens.min(self.core.shape.tokens_max))
    }

    /// Lowers the request here, but not yet in the seat: from now on the sequence relies on nothing
    /// beyond it.
    pub(super) fn want_less(&mut self, tokens: u64) -> u64 {
        let tokens = tokens.min(self.core.shape.tokens_max);
        self.asked = self.asked.min(self.core.shape.cover(tokens));
        self.quiet_until = self.quiet_until.min(self.core.shape.quiet_until(self.asked));
        self.asked
    }

    fn quiet(&self, ready: u64) -> u64 {
        ready.min(self.core.shape.quiet_until(self.asked))
    }

    /// Counts the stall, and returns why `tokens` tokens were not granted.
    pub(super) fn refuse(&self, tokens: u64) -> RoomError {
        if let Err(error) = self.check_length(tokens) {
            return error;
        }
        self.core.counters.stall();
        let ready_tokens = self.ready_tokens();
        let cause = match self.waker.health() {
            Health::Failed { cause } => {
                return RoomError::Failed { asked_tokens: tokens, ready_tokens, cause };
            }
            Health::Degraded { cause } => Some(cause),
            Health::Healthy => None,
        };
        RoomError::NotReady { asked_tokens: tokens, ready_tokens, cause }
    }

    fn check_length(&self, asked_tokens: u64) -> Result<(), RoomError> {
        let tokens_max = self.core.shape.tokens_max;
        if asked_tokens <= tokens_max {
            Ok(())
        } else {
            Err(RoomError::TooLong { asked_tokens, tokens_max })
        }
    }

    /// Maps a few rows at a time, so that other sequences without memory get their turn.
    fn map_here(&self, tokens: u64) -> Result<(), Fault> {
        let shape = &self.core.shape;
        while self.ready_tokens() < tokens {
            // Maps only what is needed now. The rest is ahead of need.
            let missing =
                shape.rows_for(tokens).saturating_sub(shape.rows_for(self.ready_tokens()));
            self.waker.run(|| self.core.grow(self.place, missing.min(shape.step_rows())))?;
        }
        Ok(())
    }

    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }

    fn expose(&self) {
        // Relaxed: read when the sequence is consumed, which is later.
        self.exposed.store(true, Ordering::Relaxed);
        self.core.reservation.inner.expose();
    }

    fn is_exposed(&self) -> bool {
        self.exposed.load(Ordering::Relaxed) || self.core.exposed.load(Ordering::Relaxed)
    }

    /// Whether `fences` or the gate's leases cover all users of this sequence's memory.
    fn covers(&self, fences: &[Fence]) -> Covered {
        if self.is_exposed() { self.core.reservation.inner.covers(fences) } else { Covered::Yes }
    }

    /// Like [`covers`](Sequence::covers), but fails if nothing covers the users, or if a fence is of
    /// a device that cannot be one.
    pub(super) fn check_covers(&self, fences: &[Fence]) -> Result<(), UsersUnknown> {
        self.core.reservation.inner.check_fences(fences, self.covers(fences))
    }

    /// Number of rows, from the start, that work on this sequence's tokens can touch.
    pub(super) fn rows_asked(&self) -> u64 {
        self.core.shape.rows_for(self.asked)
    }

    /// Gives up the seat, to be reused when its users are done; with `None` the users are not
    /// known.
    fn leave(&mut self, fences: Option<&[Fence]>) {
        // Memory whose addresses were never handed out has no users.
        let unused = fences.is_none() && !self.is_exposed();
        let fences = fences.unwrap_or_default();
        let covered = self.covers(fences);
        // Fences that do not cover the users say nothing about them.
        let (fences, end) = match covered {
            Covered::Yes => (fences, self.rows_asked()),
            Covered::No => (&[][..], u64::MAX),
        };
        // The handle is consumed, so no new user finds the addresses from here on.
        let told = guard!("vmm.unknown-end-abandons", covered, else Covered::Yes);
        let users = Quiescence::new(self.core.reservation.gate(), fences, told);
        let place = &self.core.lengths[self.place as usize];
        let none = {
            let mut book = self.core.book.lock();
            // In one step: the worker may take the memory of a seat that wants nothing.
            place.wanted.store(0, Ordering::Relaxed);
            place.used.store(0, Ordering::Relaxed);
            book.park(self.place);
            let seat = book.seat(self.place);
            match unused {
                true => Some(std::mem::take(&mut seat.users)),
                false => {
                    seat.users.add(end, users);
                    None
                }
            }
        };
        // Dropped outside the lock, because it may hold the last reference to an event.
        drop(none);
        self.waker.wake();
        self.place = GONE;
    }
}

/// Replaces the seat number of a sequence that has left its seat.
const GONE: u64 = u64::MAX;

impl Drop for Sequence {
    fn drop(&mut self) {
        if self.place != GONE {
            self.leave(None);
        }
    }
}

/// The location of one plane of a sequence. A plain value: it keeps nothing mapped.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Plane {
    span: DeviceSpan,
    tokens: u64,
    token_stride: u64,
    token_bytes: u64,
}

impl Plane {
    /// Device address of token 0, a `CUdeviceptr`. Pass it to a kernel, or create a view of another
    /// library from it, such as cudarc's `upgrade_device_ptr` (leak its result instead of dropping
    /// it, because it does not own the memory).
    #[must_use]
    pub fn address(self) -> u64 {
        self.span.address()
    }

    /// Number of tokens that could be used when this value was made.
    #[must_use]
    pub fn tokens(self) -> u64 {
        self.tokens
    }

    /// Distance in bytes from one token to the next.
    #[must_use]
    pub fn token_stride(self) -> u64 {
        self.token_stride
    }

    /// The bytes of a run of tokens. Depending on the layout, this includes bytes of other planes
    /// in between.
    ///
    /// # Errors
    /// [`RoomError::NotReady`] for tokens beyond [`tokens`](Plane::tokens).
    pub fn span(self, tokens: Range<u64>) -> Result<DeviceSpan, RoomError> {
        let Range { start, end } = tokens;
        if end > self.tokens {
            return Err(RoomError::NotReady {
                asked_tokens: end,
                ready_tokens: self.tokens,
                cause: None,
            });
        }
        if start >= end {
            return Ok(self.span.slice(start.min(end) * self.token_stride, 0)?);
        }
        let bytes = (end - start - 1) * self.token_stride + self.token_bytes;
        Ok(self.span.slice(start * self.token_stride, bytes)?)
    }
}

impl SequenceSpace {
    pub(super) fn sequence(&self, place: u64, tokens: u64) -> Sequence {
        let waker = self.handle.waker().clone();
        let mut sequence = Sequence::new(Arc::clone(&self.core), waker, place);
        sequence.demand(tokens).tell(&sequence.waker);
        sequence
    }
}
