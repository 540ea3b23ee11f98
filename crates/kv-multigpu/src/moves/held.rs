//! Memory that a move holds: given to it with its owner, and given back when the move has completed.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, DeviceError, DeviceSpan, Event, Stream};
use parking_lot::Mutex;
use smallvec::SmallVec;

/// Device memory and what keeps it: a buffer, a lease, a reference.
#[derive(Debug)]
pub struct Held<K> {
    pub(super) device: Device,
    pub(super) span: DeviceSpan,
    pub(super) keeper: K,
}

impl<K> Held<K> {
    /// Memory of `device` that stays allocated, and whose use stays the holder's, until `keeper` is
    /// dropped.
    #[must_use]
    pub fn new(device: &Device, span: DeviceSpan, keeper: K) -> Self {
        Self { device: device.clone(), span, keeper }
    }

    /// The keeper.
    #[must_use]
    pub fn into_keeper(self) -> K {
        self.keeper
    }
}

impl From<DeviceBuffer> for Held<DeviceBuffer> {
    /// All of a buffer.
    fn from(buffer: DeviceBuffer) -> Self {
        Self { device: buffer.device().clone(), span: buffer.span(), keeper: buffer }
    }
}

/// What stands for the end of work that was enqueued.
#[derive(Clone, Debug)]
pub(super) enum Pending {
    /// An event recorded after it.
    Event(Arc<Event>),
    /// The stream it is on, where an event could not be recorded.
    Stream(Stream),
}

impl Pending {
    /// Whether the work is over. A lost device has stopped, so there it is.
    pub(super) fn is_over(&self) -> Result<bool, DeviceError> {
        let (over, device) = match self {
            Self::Event(event) => (event.is_complete(), event.device()),
            Self::Stream(stream) => (stream.is_idle(), stream.device()),
        };
        match over {
            Err(_) if device.poison().is_some() => Ok(true),
            other => other,
        }
    }

    fn wait(&self) -> Result<(), DeviceError> {
        let (waited, device) = match self {
            Self::Event(event) => (event.synchronize(), event.device()),
            Self::Stream(stream) => (stream.synchronize(), stream.device()),
        };
        match waited {
            Err(_) if device.poison().is_some() => Ok(()),
            other => other,
        }
    }
}

pub(super) type Pendings = SmallVec<[Pending; 2]>;

/// Whether all of it is over.
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
            Pending::Event(event) => stream.wait(event)?,
            Pending::Stream(other) => stream.wait_for(other, &Event::new(other.device())?)?,
        }
    }
    Ok(())
}

/// Events that stand for the ends of moves, used again when nobody asks for the last end any more: as
/// many as moves are alive at once.
#[derive(Debug, Default)]
pub(super) struct Events {
    events: VecDeque<Arc<Event>>,
}

impl Events {
    /// An event of `device` that nobody else has.
    pub(super) fn take(&mut self, device: &Device) -> Result<Arc<Event>, DeviceError> {
        // Moves end in order for the most part, so the oldest is let go of first.
        let is_free = self.events.front_mut().is_some_and(|oldest| Arc::get_mut(oldest).is_some());
        if is_free {
            self.events.rotate_left(1);
        } else {
            self.events.push_back(Arc::new(Event::new(device)?));
        }
        Ok(Arc::clone(&self.events[self.events.len() - 1]))
    }
}

/// Owners of memory whose moves were dropped before they had completed.
#[derive(Debug, Default)]
pub(super) struct Parking {
    parked: Mutex<Vec<Parked>>,
}

struct Parked {
    pendings: Pendings,
    /// Held for its destructor.
    _keepers: Box<dyn Any + Send>,
}

impl fmt::Debug for Parked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parked").field("pendings", &self.pendings).finish_non_exhaustive()
    }
}

impl Parking {
    fn park(&self, pendings: Pendings, keepers: Box<dyn Any + Send>) {
        self.parked.lock().push(Parked { pendings, _keepers: keepers });
    }

    /// Lets go of owners whose moves have completed; returns how many are left.
    pub(super) fn sweep(&self) -> usize {
        // Driver calls are made and owners dropped with the lock given back.
        let mut parked = std::mem::take(&mut *self.parked.lock());
        if parked.is_empty() {
            return 0;
        }
        parked.retain(|parked| !matches!(all_over(&parked.pendings), Ok(true)));
        let left = parked.len();
        self.parked.lock().append(&mut parked);
        left
    }

    /// As [`sweep`](Parking::sweep), up to the first that has not completed: those after it seldom have,
    /// and to ask takes a call each.
    pub(super) fn sweep_oldest(&self) {
        let mut parked = std::mem::take(&mut *self.parked.lock());
        let not_over = |parked: &Parked| !matches!(all_over(&parked.pendings), Ok(true));
        let over = parked.iter().position(not_over).unwrap_or(parked.len());
        let left = parked.split_off(over);
        // Before those that were dropped meanwhile.
        self.parked.lock().splice(0..0, left);
    }

    /// Waits for all of them, and lets go of their owners.
    pub(super) fn settle(&self) -> Result<(), DeviceError> {
        let parked = std::mem::take(&mut *self.parked.lock());
        let mut outcome = Ok(());
        for parked in parked {
            let waited = parked.pendings.iter().try_for_each(Pending::wait);
            if waited.is_err() {
                outcome = outcome.and(waited);
                self.parked.lock().push(parked);
            }
        }
        outcome
    }
}

impl Drop for Parking {
    fn drop(&mut self) {
        self.sweep();
        let left = std::mem::take(&mut *self.parked.lock());
        if !left.is_empty() {
            // Freeing what a device still reads would hand its bytes to somebody else.
            tracing::warn!(moves = left.len(), "memory of moves still under way is leaked");
            std::mem::forget(left);
        }
    }
}

/// A move under way. It owns the source and the destination until it has completed.
///
/// Dropping it waits for nothing: the owners are kept by the mover, which lets go of them at a later
/// call, when the move has completed.
pub struct Move<S: Send + 'static, D: Send + 'static> {
    parking: Arc<Parking>,
    /// # Invariants
    /// Stands for all enqueued work that reads the source or writes the destination.
    pendings: Pendings,
    keepers: Option<(Option<S>, Option<D>)>,
}

impl<S: Send, D: Send> Move<S, D> {
    pub(super) fn new(parking: &Arc<Parking>, pendings: Pendings, source: S, to: D) -> Self {
        let keepers = Some((Some(source), Some(to)));
        Self { parking: Arc::clone(parking), pendings, keepers }
    }

    /// Whether the move has completed. One of a lost device has: nothing runs there any more.
    ///
    /// # Errors
    /// What the driver answers, of a device that is not lost.
    pub fn is_complete(&self) -> Result<bool, DeviceError> {
        all_over(&self.pendings)
    }

    /// Makes work enqueued on `stream` from now on wait for the end of the move. Not needed on the
    /// stream that the move was ordered on.
    ///
    /// # Ordering
    /// Waits on the device, not on the host.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn wait_on(&self, stream: &Stream) -> Result<(), DeviceError> {
        wait_on(&self.pendings, stream)
    }

    /// Gives the source back for work of `stream`, which waits for the end of the move: memory that is
    /// written again and again needs no host to look.
    ///
    /// None when it was given back before.
    ///
    /// # Errors
    /// What the driver answers; the source is then still held.
    pub fn reclaim_on(&mut self, stream: &Stream) -> Result<Option<S>, DeviceError> {
        self.wait_on(stream)?;
        Ok(self.keepers.as_mut().and_then(|(source, _)| source.take()))
    }

    /// Gives the destination out, for work of the stream that the move was ordered on, or of one
    /// that [waits](Move::wait_on) for it. None when it was given out before.
    pub fn take_destination(&mut self) -> Option<D> {
        self.keepers.as_mut().and_then(|(_, destination)| destination.take())
    }

    /// Source and destination, unless given out before, if the move has completed.
    ///
    /// # Errors
    /// The move itself, when it has not completed or the driver does not tell.
    #[allow(clippy::type_complexity, reason = "two owners, each of which may have been given out")]
    pub fn try_finish(mut self) -> Result<(Option<S>, Option<D>), Self> {
        match all_over(&self.pendings) {
            Ok(true) => Ok(self.keepers.take().unwrap_or((None, None))),
            _ => Err(self),
        }
    }

    /// Waits on the host until the move has completed, and gives both ends back as
    /// [`try_finish`](Move::try_finish) does. For tests and tear-down.
    ///
    /// # Errors
    /// What the driver answers, with the move.
    #[allow(clippy::type_complexity, reason = "two owners, each of which may have been given out")]
    pub fn finish(mut self) -> Result<(Option<S>, Option<D>), (DeviceError, Self)> {
        match self.pendings.iter().try_for_each(Pending::wait) {
            Ok(()) => Ok(self.keepers.take().unwrap_or((None, None))),
            Err(error) => Err((error, self)),
        }
    }
}

impl<S: Send, D: Send> Drop for Move<S, D> {
    fn drop(&mut self) {
        let Some(keepers) = self.keepers.take() else { return };
        let pendings = std::mem::take(&mut self.pendings);
        if pendings.is_empty() || (keepers.0.is_none() && keepers.1.is_none()) {
            return;
        }
        self.parking.park(pendings, Box::new(keepers));
    }
}

impl<S: Send, D: Send> fmt::Debug for Move<S, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Move").field("pendings", &self.pendings).finish_non_exhaustive()
    }
}
