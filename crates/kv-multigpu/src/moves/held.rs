//! Memory that a move owns until it has completed.

use cuda_driver::guard;
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, DeviceError, DeviceSpan, Event, Stream};
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

    /// The owner.
    #[must_use]
    pub fn into_keeper(self) -> K {
        self.keeper
    }
}

impl From<DeviceBuffer> for Held<DeviceBuffer> {
    /// The whole buffer.
    fn from(buffer: DeviceBuffer) -> Self {
        Self { device: buffer.device().clone(), span: buffer.span(), keeper: buffer }
    }
}

/// How the end of enqueued work is detected.
#[derive(Clone, Debug)]
pub(super) enum Pending {
    /// An event recorded after it.
    Event(Arc<Event>),
    /// An event that the receiver recorded after it, and the stream on which the sender reads the
    /// source. The sender continues to read if the receiver is lost.
    Relayed(Arc<Event>, Stream),
    /// The stream of the work, if no event could be recorded.
    Stream(Stream),
}

impl Pending {
    /// Whether the work is complete. Work of a lost device is. The device at the other end may
    /// continue.
    pub(super) fn is_over(&self) -> Result<bool, DeviceError> {
        let (over, device) = match self {
            Self::Event(event) | Self::Relayed(event, _) => (event.is_complete(), event.device()),
            Self::Stream(stream) => (stream.is_idle(), stream.device()),
        };
        match (over, self) {
            (Err(_), Self::Relayed(_, sender)) if device.poison().is_some() => {
                Self::Stream(sender.clone()).is_over()
            }
            (Err(_), _) if device.poison().is_some() => Ok(true),
            (other, _) => other,
        }
    }

    fn wait(&self) -> Result<(), DeviceError> {
        let (waited, device) = match self {
            Self::Event(event) | Self::Relayed(event, _) => (event.synchronize(), event.device()),
            Self::Stream(stream) => (stream.synchronize(), stream.device()),
        };
        match (waited, self) {
            (Err(_), Self::Relayed(_, sender)) if device.poison().is_some() => {
                Self::Stream(sender.clone()).wait()
            }
            (Err(_), _) if device.poison().is_some() => Ok(()),
            (other, _) => other,
        }
    }
}

/// One entry, or several when a move failed half-way.
pub(super) type Pendings = SmallVec<[Pending; 1]>;

/// Whether all of it is complete.
pub(super) fn all_over(pendings: &[Pending]) -> Result<bool, DeviceError> {
    for pending in pendings {
        if !pending.is_over()? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Makes work enqueued on `stream` from now on wait for all of it, on the device.
pub(super) fn wait_on(pendings: &[Pending], stream: &Stream) -> Result<(), DeviceError> {
    for pending in pendings {
        match pending {
            Pending::Event(event) | Pending::Relayed(event, _) => stream.wait(event)?,
            Pending::Stream(other) => stream.wait_for(other, &Event::new(other.device())?)?,
        }
    }
    Ok(())
}

/// Events recorded at the ends of moves. An event is reused when its last move is dropped, so there
/// are never more events than live moves.
#[derive(Debug, Default)]
pub(super) struct Events {
    events: VecDeque<Arc<Event>>,
}

impl Events {
    /// An event of `device` that no other move uses.
    pub(super) fn take(&mut self, device: &Device) -> Result<Arc<Event>, DeviceError> {
        // Moves usually end in order, so the first event is free unless a move is kept for long.
        let is_free = |event: &mut Arc<Event>| Arc::get_mut(event).is_some();
        let is_free = |event| guard!("multigpu.event-not-shared", is_free(event), else true);
        let free = self.events.iter_mut().position(is_free);
        let event = match free.and_then(|free| self.events.remove(free)) {
            Some(event) => event,
            None => Arc::new(Event::new(device)?),
        };
        self.events.push_back(Arc::clone(&event));
        Ok(event)
    }
}

/// Owners of memory whose moves were dropped before completion.
#[derive(Debug, Default)]
pub(super) struct Parking {
    parked: Mutex<Vec<ParkedMove>>,
}

struct ParkedMove {
    pendings: Pendings,
    /// Dropped when the move has completed.
    _keepers: Box<dyn Any + Send>,
}

impl ParkedMove {
    /// Whether nothing uses the memory any more. Without an answer of the driver, the memory counts
    /// as in use.
    fn is_over(&self) -> bool {
        matches!(all_over(&self.pendings), Ok(true))
    }
}

impl fmt::Debug for ParkedMove {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parked").field("pendings", &self.pendings).finish_non_exhaustive()
    }
}

impl Parking {
    fn park(&self, pendings: Pendings, keepers: Box<dyn Any + Send>) {
        self.parked.lock().push(ParkedMove { pendings, _keepers: keepers });
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
                let waited = parked.pendings.iter().try_for_each(Pending::wait);
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

/// A running move. It owns the source and the destination until it has completed.
///
/// Dropping it does not wait. The mover keeps the owners, and drops them in a later call after the
/// move has completed.
pub struct Move<S: Send + 'static, D: Send + 'static> {
    parking: Arc<Parking>,
    /// # Invariants
    /// Covers all enqueued work that reads the source or writes the destination.
    pendings: Pendings,
    keepers: Option<(Option<S>, Option<D>)>,
}

impl<S: Send, D: Send> Move<S, D> {
    pub(super) fn new(parking: &Arc<Parking>, pendings: Pendings, source: S, to: D) -> Self {
        let keepers = Some((Some(source), Some(to)));
        Self { parking: Arc::clone(parking), pendings, keepers }
    }

    /// Whether the move has completed. A move of a lost device counts as completed, because nothing
    /// runs there any more.
    ///
    /// # Errors
    /// The driver's error, for a device that is not lost.
    #[track_caller]
    pub fn is_complete(&self) -> Result<bool, DeviceError> {
        let _site = cuda_driver::site::enter();
        all_over(&self.pendings)
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
        wait_on(&self.pendings, stream)
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
        Ok(self.keepers.as_mut().and_then(|(source, _)| source.take()))
    }

    /// Returns the destination, for work of the stream that the move was ordered on, or of one that
    /// [waits](Move::wait_on) for it. Returns `None` if it was returned before.
    pub fn take_destination(&mut self) -> Option<D> {
        self.keepers.as_mut().and_then(|(_, destination)| destination.take())
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
    pub fn try_finish(mut self) -> Result<(Option<S>, Option<D>), Self> {
        let _site = cuda_driver::site::enter();
        match all_over(&self.pendings) {
            Ok(true) => Ok(self.keepers.take().unwrap_or((None, None))),
            _ => Err(self),
        }
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
    pub fn finish(mut self) -> Result<(Option<S>, Option<D>), (DeviceError, Self)> {
        let _site = cuda_driver::site::enter();
        match self.pendings.iter().try_for_each(Pending::wait) {
            Ok(()) => Ok(self.keepers.take().unwrap_or((None, None))),
            Err(error) => Err((error, self)),
        }
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
    parking: Arc<Parking>,
    /// # Invariants
    /// Covers all enqueued work that reads the source or writes the destination.
    pendings: Pendings,
    /// # Invariants
    /// Taken only by methods that consume the value.
    ends: Option<(S, D)>,
}

impl<S: Send, D: Send> Withheld<S, D> {
    pub(super) fn new(parking: &Arc<Parking>, pendings: Pendings, source: S, to: D) -> Self {
        Self { parking: Arc::clone(parking), pendings, ends: Some((source, to)) }
    }

    /// Whether no part of the move is running any more. On a lost device, none is.
    ///
    /// # Errors
    /// The driver's error, for a device that is not lost.
    #[track_caller]
    pub fn is_complete(&self) -> Result<bool, DeviceError> {
        let _site = cuda_driver::site::enter();
        all_over(&self.pendings)
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
    pub fn reclaim_on(self, stream: &Stream) -> Result<(S, D), (DeviceError, Self)> {
        let _site = cuda_driver::site::enter();
        match guard!("multigpu.withheld-waits", wait_on(&self.pendings, stream), else Ok(())) {
            Ok(()) => Ok(self.into_ends()),
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
        match all_over(&self.pendings) {
            Ok(true) => Ok(self.into_ends()),
            _ => Err(self),
        }
    }

    /// Waits on the host until no part of the move is running any more, and returns both ends. For
    /// tests and tear-down.
    ///
    /// # Errors
    /// The driver's error, with both ends still held.
    #[track_caller]
    pub fn finish(self) -> Result<(S, D), (DeviceError, Self)> {
        let _site = cuda_driver::site::enter();
        match self.pendings.iter().try_for_each(Pending::wait) {
            Ok(()) => Ok(self.into_ends()),
            Err(error) => Err((error, self)),
        }
    }

    fn into_ends(mut self) -> (S, D) {
        match self.ends.take() {
            Some(ends) => ends,
            None => unreachable!("the ends are taken by methods that consume the value"),
        }
    }
}

impl<S: Send, D: Send> Drop for Withheld<S, D> {
    fn drop(&mut self) {
        if let Some(ends) = self.ends.take()
            && !self.pendings.is_empty()
        {
            let pendings = std::mem::take(&mut self.pendings);
            guard!("multigpu.withheld-kept", self.parking.park(pendings, Box::new(ends)));
        }
    }
}

impl<S: Send, D: Send> fmt::Debug for Withheld<S, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Withheld").field("pendings", &self.pendings).finish_non_exhaustive()
    }
}

impl<S: Send, D: Send> Drop for Move<S, D> {
    fn drop(&mut self) {
        let Some(keepers) = self.keepers.take() else { return };
        let pendings = std::mem::take(&mut self.pendings);
        if pendings.is_empty() || (keepers.0.is_none() && keepers.1.is_none()) {
            return;
        }
        guard!("multigpu.dropped-move-kept", self.parking.park(pendings, Box::new(keepers)));
    }
}

impl<S: Send, D: Send> fmt::Debug for Move<S, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Move").field("pendings", &self.pendings).finish_non_exhaustive()
    }
}
