//! Memory that a move owns until it has completed.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, DeviceError, DeviceSpan, Fence, Stream, guard};
use parking_lot::Mutex;
use smallvec::SmallVec;

/// Device memory, with the owner that keeps it alive: a buffer, a lease, a reference.
#[derive(Debug)]
pub struct Held<K> {
    pub(super) device: Device,
    pub(super) span: DeviceSpan,
    pub(super) keeper: K,
}

impl<K> Held<K> {
    /// Memory of `device`. It stays allocated, and no other code uses it, until `keeper` is
    /// dropped.
    #[must_use]
    pub fn new(device: &Device, span: DeviceSpan, keeper: K) -> Self {
        Self { device: device.clone(), span, keeper }
    }
}

impl From<DeviceBuffer> for Held<DeviceBuffer> {
    /// The whole buffer.
    fn from(buffer: DeviceBuffer) -> Self {
        Self { device: buffer.device().clone(), span: buffer.span(), keeper: buffer }
    }
}

/// Fences after everything that a move has enqueued.
#[derive(Clone, Debug, Default)]
pub(super) struct Fences {
    /// After the end of a whole move, and so after all of its parts.
    pub(super) arrived: Option<Fence>,
    /// After each part that goes on without the others: those of a move that failed half-way, and on a path
    /// through the host the sender's reads, if the receiver is lost.
    pub(super) parts: SmallVec<[Fence; 2]>,
}

impl Fences {
    pub(super) fn is_empty(&self) -> bool {
        self.arrived.is_none() && self.parts.is_empty()
    }

    /// Makes work enqueued on `stream` from now on wait for the move, on the device.
    pub(super) fn hold_back(&self, stream: &Stream) -> Result<(), DeviceError> {
        if let Some(arrived) = &self.arrived {
            arrived.hold_back(stream)?;
            // The bytes have arrived even where the sender is lost.
            guard!("multigpu.waits-for-arrival", return Ok(()));
        }
        self.parts.iter().try_for_each(|part| part.hold_back(stream))
    }

    /// Whether no part of the move runs any more.
    pub(super) fn are_at_rest(&self) -> Result<bool, DeviceError> {
        if let Some(arrived) = &self.arrived {
            let is_at_rest = arrived.is_at_rest()?;
            if arrived.is_known_complete() || !is_at_rest {
                return Ok(is_at_rest);
            }
        }
        Fence::are_at_rest(&self.parts)
    }

    /// Waits on the host until no part of the move runs any more.
    fn wait_for_rest(&self) -> Result<(), DeviceError> {
        if let Some(arrived) = &self.arrived {
            arrived.wait_for_rest()?;
            if arrived.is_known_complete() {
                return Ok(());
            }
        }
        self.parts.iter().try_for_each(Fence::wait_for_rest)
    }
}

/// Owners of memory whose moves were dropped before completion.
#[derive(Debug, Default)]
pub(super) struct Parking {
    parked: Mutex<Vec<ParkedMove>>,
}

struct ParkedMove {
    fences: Fences,
    /// Dropped when the move has completed.
    _keepers: Box<dyn Any + Send>,
}

impl ParkedMove {
    /// Whether nothing uses the memory any more. Without an answer of the driver, the memory counts
    /// as in use.
    fn is_over(&self) -> bool {
        matches!(self.fences.are_at_rest(), Ok(true))
    }
}

impl fmt::Debug for ParkedMove {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parked").field("fences", &self.fences).finish_non_exhaustive()
    }
}

impl Parking {
    fn park(&self, fences: Fences, keepers: Box<dyn Any + Send>) {
        self.parked.lock().push(ParkedMove { fences, _keepers: keepers });
    }

    /// Drops owners whose moves have completed; returns the number of the others.
    pub(super) fn sweep(&self) -> usize {
        self.let_go_of(|parked| parked.into_iter().partition(ParkedMove::is_over))
    }

    /// Like [`sweep`](Parking::sweep), up to the first incomplete move. Later moves are rarely
    /// complete, and each query costs a driver call.
    pub(super) fn sweep_oldest(&self) {
        self.let_go_of(|mut parked| {
            let over = parked.iter().position(|parked| !parked.is_over()).unwrap_or(parked.len());
            let left = parked.split_off(over);
            (parked, left)
        });
    }

    /// Waits for all of them, and drops their owners.
    pub(super) fn settle(&self) -> Result<(), DeviceError> {
        let mut outcome = Ok(());
        self.let_go_of(|parked| {
            parked.into_iter().partition(|parked| {
                let waited = parked.fences.wait_for_rest();
                let is_over = guard!("multigpu.refused-wait-not-over", waited.is_ok(), else true);
                outcome = std::mem::replace(&mut outcome, Ok(())).and(waited);
                is_over
            })
        });
        outcome
    }

    /// Divides the parked owners with `over` into those to drop and those to keep; returns the
    /// number kept.
    fn let_go_of(
        &self,
        over: impl FnOnce(Vec<ParkedMove>) -> (Vec<ParkedMove>, Vec<ParkedMove>),
    ) -> usize {
        let parked = std::mem::take(&mut *self.parked.lock());
        if parked.is_empty() {
            return 0;
        }
        // Driver calls are made, and owners dropped, without the lock. The kept entries are put
        // back before the first owner is dropped, because an owner's destructor may panic.
        let (over, left) = over(parked);
        let count = left.len();
        // Before the entries that were parked meanwhile.
        self.parked.lock().splice(0..0, left);
        drop(over);
        count
    }
}

impl Drop for Parking {
    fn drop(&mut self) {
        self.sweep();
        let left = std::mem::take(&mut *self.parked.lock());
        if !left.is_empty() {
            // If the memory were freed, its next owner would get memory that a device still reads.
            tracing::warn!(moves = left.len(), "memory of moves still under way is leaked");
            std::mem::forget(left);
        }
    }
}

/// What a move owns until no part of it runs any more.
struct Owned<K: Send + 'static> {
    parking: Arc<Parking>,
    /// # Invariants
    /// Covers all enqueued work that reads the source or writes the destination.
    fences: Fences,
    keepers: Option<K>,
}

impl<K: Send> Owned<K> {
    fn new(parking: &Arc<Parking>, fences: Fences, keepers: K) -> Self {
        Self { parking: Arc::clone(parking), fences, keepers: Some(keepers) }
    }

    fn is_complete(&self) -> Result<bool, DeviceError> {
        self.fences.are_at_rest()
    }

    /// The keepers, unless they were returned before, if it has completed.
    fn try_finish(mut self) -> Result<Option<K>, Self> {
        match self.is_complete() {
            Ok(true) => Ok(self.keepers.take()),
            _ => Err(self),
        }
    }

    /// Waits on the host, and returns the keepers like `try_finish`.
    fn finish(mut self) -> Result<Option<K>, (DeviceError, Self)> {
        match self.fences.wait_for_rest() {
            Ok(()) => Ok(self.keepers.take()),
            Err(error) => Err((error, self)),
        }
    }
}

impl<K: Send> Drop for Owned<K> {
    fn drop(&mut self) {
        if let Some(keepers) = self.keepers.take()
            && !self.fences.is_empty()
        {
            let fences = std::mem::take(&mut self.fences);
            guard!("multigpu.dropped-move-kept", self.parking.park(fences, Box::new(keepers)));
        }
    }
}

/// A running move. It owns the source and the destination until it has completed.
///
/// Dropping it does not wait. The mover keeps the owners, and drops them in a later call after the
/// move has completed.
pub struct Move<S: Send + 'static, D: Send + 'static> {
    /// No keepers if both ends were returned.
    owned: Owned<(Option<S>, Option<D>)>,
}

impl<S: Send, D: Send> Move<S, D> {
    pub(super) fn new(parking: &Arc<Parking>, fences: Fences, source: S, to: D) -> Self {
        Self { owned: Owned::new(parking, fences, (Some(source), Some(to))) }
    }

    /// Whether the move has completed. A move of a lost device counts as completed, because nothing
    /// runs there any more.
    ///
    /// # Errors
    /// The driver's error, for a device that is not lost.
    #[track_caller]
    pub fn is_complete(&self) -> Result<bool, DeviceError> {
        let _site = cuda_driver::site::enter();
        self.owned.is_complete()
    }

    /// Makes work enqueued on `stream` from now on wait for the end of the move. Not needed on the
    /// stream that the move was ordered on.
    ///
    /// # Ordering
    /// Waits on the device, not on the host.
    ///
    /// # Errors
    /// The driver's error.
    #[track_caller]
    pub fn wait_on(&self, stream: &Stream) -> Result<(), DeviceError> {
        let _site = cuda_driver::site::enter();
        self.owned.fences.hold_back(stream)
    }

    /// Returns the source for work of `stream`, which waits on the device for the end of the move.
    /// A source that is written repeatedly then needs no wait on the host.
    ///
    /// Returns `None` if the source was returned before.
    ///
    /// # Errors
    /// The driver's error; the source is still held then.
    #[track_caller]
    pub fn reclaim_on(&mut self, stream: &Stream) -> Result<Option<S>, DeviceError> {
        let _site = cuda_driver::site::enter();
        guard!("multigpu.reclaim-waits", self.wait_on(stream)?);
        Ok(self.take_from(|(source, _)| source.take()))
    }

    /// Returns the destination, for work of the stream that the move was ordered on, or of one that
    /// [waits](Move::wait_on) for it. Returns `None` if it was returned before.
    pub fn take_destination(&mut self) -> Option<D> {
        self.take_from(|(_, destination)| destination.take())
    }

    fn take_from<T>(
        &mut self,
        take: impl FnOnce(&mut (Option<S>, Option<D>)) -> Option<T>,
    ) -> Option<T> {
        let taken = take(self.owned.keepers.as_mut()?);
        self.owned.keepers.take_if(|ends| ends.0.is_none() && ends.1.is_none());
        taken
    }

    /// Source and destination, unless returned before, if the move has completed.
    ///
    /// # Errors
    /// The move itself, if it has not completed or the driver does not answer.
    #[allow(
        clippy::type_complexity,
        reason = "two owners, each of which may have been returned before"
    )]
    #[track_caller]
    pub fn try_finish(self) -> Result<(Option<S>, Option<D>), Self> {
        let _site = cuda_driver::site::enter();
        let ends = self.owned.try_finish().map_err(|owned| Self { owned })?;
        Ok(ends.unwrap_or((None, None)))
    }

    /// Waits on the host until the move has completed, and returns both ends like
    /// [`try_finish`](Move::try_finish). For tests and tear-down.
    ///
    /// # Errors
    /// The driver's error, with the move.
    #[allow(
        clippy::type_complexity,
        reason = "two owners, each of which may have been returned before"
    )]
    #[track_caller]
    pub fn finish(self) -> Result<(Option<S>, Option<D>), (DeviceError, Self)> {
        let _site = cuda_driver::site::enter();
        let ends = self.owned.finish().map_err(|(error, owned)| (error, Self { owned }))?;
        Ok(ends.unwrap_or((None, None)))
    }
}

/// Both ends of a failed move, until no part of the move is running any more.
///
/// A part of the move may have been enqueued before the failing call. That part still reads the
/// source and writes the destination, on streams that the caller does not know. So neither end can
/// be taken before it has ended:
///
/// ```compile_fail,E0599
/// # use kv_multigpu::moves::MoveFailed;
/// fn reuse(failed: MoveFailed<(), ()>) {
///     let mut held = failed.held;
///     let _destination = held.take_destination();
/// }
/// ```
///
/// Dropping it does not wait, like dropping a [`Move`].
pub struct Withheld<S: Send + 'static, D: Send + 'static> {
    /// Its keepers are taken only by methods that consume the value.
    owned: Owned<(S, D)>,
}

impl<S: Send, D: Send> Withheld<S, D> {
    pub(super) fn new(parking: &Arc<Parking>, fences: Fences, source: S, to: D) -> Self {
        Self { owned: Owned::new(parking, fences, (source, to)) }
    }

    /// Whether no part of the move is running any more. On a lost device, none is.
    ///
    /// # Errors
    /// The driver's error, for a device that is not lost.
    #[track_caller]
    pub fn is_complete(&self) -> Result<bool, DeviceError> {
        let _site = cuda_driver::site::enter();
        self.owned.is_complete()
    }

    /// Source and destination, for work of `stream`, which waits for the part of the move that was
    /// enqueued.
    ///
    /// # Ordering
    /// Waits on the device, not on the host.
    ///
    /// # Errors
    /// The driver's error, with both ends still held.
    #[track_caller]
    pub fn reclaim_on(mut self, stream: &Stream) -> Result<(S, D), (DeviceError, Self)> {
        let _site = cuda_driver::site::enter();
        let fences = &self.owned.fences;
        match guard!("multigpu.withheld-waits", fences.hold_back(stream), else Ok(())) {
            Ok(()) => Ok(ends(self.owned.keepers.take())),
            Err(error) => Err((error, self)),
        }
    }

    /// Source and destination, if no part of the move is running any more. If nothing was enqueued,
    /// they are returned at once.
    ///
    /// # Errors
    /// The value itself, if a part is running or the driver does not answer.
    #[track_caller]
    pub fn try_finish(self) -> Result<(S, D), Self> {
        let _site = cuda_driver::site::enter();
        self.owned.try_finish().map(ends).map_err(|owned| Self { owned })
    }

    /// Waits on the host until no part of the move is running any more, and returns both ends. For
    /// tests and tear-down.
    ///
    /// # Errors
    /// The driver's error, with both ends still held.
    #[track_caller]
    pub fn finish(self) -> Result<(S, D), (DeviceError, Self)> {
        let _site = cuda_driver::site::enter();
        self.owned.finish().map(ends).map_err(|(error, owned)| (error, Self { owned }))
    }
}

fn ends<S, D>(keepers: Option<(S, D)>) -> (S, D) {
    match keepers {
        Some(ends) => ends,
        None => unreachable!("the ends are taken by methods that consume the value"),
    }
}

impl<S: Send, D: Send> fmt::Debug for Withheld<S, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Withheld").field("fences", &self.owned.fences).finish_non_exhaustive()
    }
}

impl<S: Send, D: Send> fmt::Debug for Move<S, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Move").field("fences", &self.owned.fences).finish_non_exhaustive()
    }
}
