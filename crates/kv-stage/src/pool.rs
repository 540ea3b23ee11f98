//! The pool: which buffers are free, which the device may still read, and when that ends.

use std::sync::Arc;

use cuda_driver::{Device, DeviceError, Event, HostAllocFlags, PinnedBuffer, Stream};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::{AcquireError, StagingBuffer, StagingError};

/// Size and number of a pool's buffers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StagingOptions {
    /// Bytes of each buffer: the most that one submission can carry.
    pub buffer_bytes: u64,
    /// Number of buffers. A host that runs `depth` submissions ahead of the device needs
    /// `depth + 1`.
    pub buffers_max: usize,
}

/// A fixed set of pinned host buffers that are reused only when their last reader has finished.
///
/// A cheap handle: clones are the same pool, for use from any thread. All pinned memory is allocated
/// by [`new`](StagingPool::new): cached by the host, visible to kernels, known to every context of
/// the process. Dropping the last handle waits for nothing and is safe with work under way, because
/// the memory is freed later, by a call that waits for the device; [`close`](StagingPool::close)
/// does it now and reports.
///
/// # Losing the device
/// When the pool's device is lost, every submitted buffer counts as read, and
/// [`acquire`](StagingPool::acquire) answers with the cause.
#[derive(Clone, Debug)]
pub struct StagingPool {
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    device: Device,
    options: StagingOptions,
    /// Guards the lists only: driver calls are made without it.
    state: Mutex<State>,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    reuse_before_event: std::sync::atomic::AtomicBool,
}

#[derive(Debug)]
struct State {
    /// # Invariants
    /// No device operation refers to a slot in here, unless the device that ran it is lost: a slot
    /// enters new, never submitted, or once every event recorded after its readers has completed.
    free: Vec<Slot>,
    /// In order of submission.
    submitted: Vec<Ticket>,
    /// Slots that no event could be recorded for: nobody knows when they are free.
    leaked: Vec<Slot>,
    /// Buffers in the hands of callers.
    held: usize,
    live_peak: usize,
    /// Buffers that have not been given up by `close`.
    buffers: usize,
    sequence_next: u64,
    closed: bool,
}

/// One pinned buffer and the events that retire it.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) pinned: PinnedBuffer,
    /// Kept for reuse, since creating one is a driver call. One suffices for one reading stream.
    pub(crate) events: Events,
}

pub(crate) type Events = SmallVec<[Arc<Event>; 2]>;

/// A submitted buffer: it is free again when all of `awaited` have completed.
#[derive(Debug)]
struct Ticket {
    sequence: u64,
    /// The one stream that reads the buffer, by context and handle: its tickets complete in order,
    /// so only the first is polled. `None` with several readers, whose tickets are polled each.
    stream: Option<StreamKey>,
    awaited: Events,
    slot: Slot,
}

type StreamKey = (u64, u64);

impl StagingPool {
    /// Pins all buffers. Slow (about 0.4 s a GiB): at start-up, never on a step's path.
    ///
    /// # Ordering
    /// May wait for the device, as every allocation.
    ///
    /// # Errors
    /// [`StagingError::Options`]; [`StagingError::Device`] when memory cannot be pinned, with what
    /// had been pinned by then given back.
    pub fn new(device: &Device, options: StagingOptions) -> Result<Self, StagingError> {
        let StagingOptions { buffer_bytes, buffers_max } = options;
        let all_bytes = buffer_bytes.checked_mul(buffers_max as u64);
        if !all_bytes.is_some_and(|all| all > 0 && all <= isize::MAX as u64) {
            return Err(StagingError::Options { buffer_bytes, buffers_max });
        }
        let mut free = Vec::with_capacity(buffers_max);
        for _ in 0..buffers_max {
            match Slot::new(device, buffer_bytes) {
                Ok(slot) => free.push(slot),
                Err(error) => {
                    drop(free);
                    // A refusal here would hide the error that matters; the driver crate logs it.
                    let _ = device.free_retired();
                    return Err(error.into());
                }
            }
        }
        let state = State {
            free,
            submitted: Vec::with_capacity(buffers_max),
            leaked: Vec::new(),
            held: 0,
            live_peak: 0,
            buffers: buffers_max,
            sequence_next: 0,
            closed: false,
        };
        Ok(Self {
            shared: Arc::new(Shared {
                device: device.clone(),
                options,
                state: Mutex::new(state),
                #[cfg(all(feature = "sabotage", debug_assertions))]
                reuse_before_event: std::sync::atomic::AtomicBool::new(false),
            }),
        })
    }

    /// A buffer to write. Its contents are what an earlier use left.
    ///
    /// Takes back the buffers whose readers have finished, at the cost of about one event query for
    /// each of them and one for each stream that still reads; allocates nothing.
    ///
    /// # Ordering
    /// Does not wait.
    ///
    /// # Errors
    /// [`AcquireError::Exhausted`] when all buffers are in use, which is an expected outcome;
    /// [`AcquireError::Closed`]; [`AcquireError::Device`] when the device is lost.
    pub fn acquire(&self) -> Result<StagingBuffer, AcquireError> {
        let refused = self.shared.retire_completed();
        let mut state = self.shared.state.lock();
        if state.closed {
            return Err(AcquireError::Closed);
        }
        if let Some(first) = self.shared.device.poison() {
            return Err(AcquireError::Device(DeviceError::Poisoned { first }));
        }
        let Some(slot) = state.free.pop() else {
            // An event that cannot be asked about is why nothing came back.
            refused?;
            return Err(AcquireError::Exhausted { live: state.live(), max: state.circulating() });
        };
        state.held += 1;
        state.live_peak = state.live_peak.max(state.live());
        drop(state);
        Ok(StagingBuffer::new(self.shared.clone(), slot))
    }

    /// As [`acquire`](StagingPool::acquire), but waits for the oldest submitted buffer when there is
    /// no free one.
    ///
    /// # Ordering
    /// May wait on the host for that buffer's readers, even if another stream's finish earlier.
    ///
    /// # Errors
    /// As `acquire`; [`AcquireError::Exhausted`] only when every buffer is in the hands of callers,
    /// so that no work of the device will free one.
    pub fn acquire_wait(&self) -> Result<StagingBuffer, AcquireError> {
        loop {
            match self.acquire() {
                Err(AcquireError::Exhausted { live, max }) => {
                    let Some(awaited) = self.shared.oldest_submitted(u64::MAX) else {
                        return Err(AcquireError::Exhausted { live, max });
                    };
                    wait_for(&awaited)?;
                }
                other => return other,
            }
        }
    }

    /// Bytes of each buffer.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        self.shared.options.buffer_bytes
    }

    /// The device that the memory was pinned for.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Buffers being written, or submitted and not yet seen to be read.
    ///
    /// Only `acquire`, `drain` and `close` look at events, so this may be more than the device needs.
    #[must_use]
    pub fn live(&self) -> usize {
        self.shared.state.lock().live()
    }

    /// The most buffers that were ever live at once.
    #[must_use]
    pub fn peak_live(&self) -> usize {
        self.shared.state.lock().live_peak
    }

    /// Buffers lost to the pool because no event could be recorded after their readers.
    #[must_use]
    pub fn leaked(&self) -> usize {
        self.shared.state.lock().leaked.len()
    }

    /// Pinned memory that the pool has: the same from construction to `close`.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.shared.state.lock().buffers as u64 * self.shared.options.buffer_bytes
    }

    /// Takes back every buffer submitted before this call.
    ///
    /// # Ordering
    /// Waits on the host for all their readers. Buffers in the hands of callers are not waited for.
    ///
    /// # Errors
    /// [`StagingError::Device`] when the device is lost; its buffers are taken back all the same.
    pub fn drain(&self) -> Result<(), StagingError> {
        let until = self.shared.state.lock().sequence_next;
        loop {
            self.shared.retire_completed()?;
            let Some(awaited) = self.shared.oldest_submitted(until) else { break };
            wait_for(&awaited)?;
        }
        match self.shared.device.poison() {
            Some(first) => Err(StagingError::Device(DeviceError::Poisoned { first })),
            None => Ok(()),
        }
    }

    /// Takes back every submitted buffer and frees the pinned memory, for all handles of the pool.
    ///
    /// Buffers that callers still hold can be submitted; their memory is freed with the last of them.
    ///
    /// # Ordering
    /// Waits on the host for all readers, and for the device.
    ///
    /// # Errors
    /// [`StagingError::Device`] when the device refuses. A lost device is no error here: nothing
    /// reads the memory any more, and the loss was reported where it was met.
    pub fn close(self) -> Result<(), StagingError> {
        self.shared.state.lock().closed = true;
        let drained = self.drain();
        let given_up = {
            let mut state = self.shared.state.lock();
            let mut given_up = std::mem::take(&mut state.free);
            given_up.append(&mut state.leaked);
            state.buffers -= given_up.len();
            given_up
        };
        // Outside the lock: dropping events calls the driver.
        drop(given_up);
        let freed = self.shared.device.free_retired();
        if self.shared.device.poison().is_some() {
            return Ok(());
        }
        drained?;
        freed?;
        Ok(())
    }

    /// Makes `submit` return buffers to the pool at once, without waiting for their readers.
    ///
    /// This is the mistake that the pool exists to prevent; tests use it to show that they would
    /// notice.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_reuse_before_event(&self) {
        self.shared.reuse_before_event.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

impl Slot {
    fn new(device: &Device, bytes: u64) -> Result<Self, DeviceError> {
        let pinned = PinnedBuffer::alloc(device, bytes, HostAllocFlags::CACHED)?;
        let mut events = Events::new();
        events.push(Arc::new(Event::new(device)?));
        Ok(Self { pinned, events })
    }
}

impl State {
    fn live(&self) -> usize {
        self.held + self.submitted.len()
    }

    fn circulating(&self) -> usize {
        self.buffers - self.leaked.len()
    }
}

impl Shared {
    /// Takes a buffer back that its holder gives up without having submitted it.
    pub(crate) fn give_back(&self, slot: Slot) {
        let mut state = self.state.lock();
        state.held -= 1;
        let unwanted = state.put_free(slot);
        drop(state);
        drop(unwanted);
    }

    /// Keeps a submitted buffer until the events recorded after its readers have completed.
    pub(crate) fn keep(&self, slot: Slot, readers: &[(Stream, Arc<Event>)]) {
        let stream = match readers {
            [(stream, _)] => Some((stream.device().context(), stream.raw())),
            _ => None,
        };
        let awaited = readers.iter().map(|(_, event)| event.clone()).collect();
        let mut state = self.state.lock();
        state.held -= 1;
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if self.reuse_before_event.load(std::sync::atomic::Ordering::Relaxed) {
            state.free.push(slot);
            return;
        }
        let sequence = state.sequence_next;
        state.sequence_next += 1;
        state.submitted.push(Ticket { sequence, stream, awaited, slot });
    }

    /// Keeps a buffer for ever: it was submitted, and nothing tells when its readers finish.
    pub(crate) fn leak(&self, slot: Slot) {
        let mut state = self.state.lock();
        state.held -= 1;
        state.leaked.push(slot);
    }

    /// Moves every buffer whose readers have finished to the free list.
    ///
    /// Events are asked without the lock, so threads may do this at the same time: a ticket is
    /// removed by its number, so an answer about a ticket that another thread removed is void.
    fn retire_completed(&self) -> Result<(), DeviceError> {
        let mut outcome = Ok(());
        let mut unfinished: SmallVec<[u64; 8]> = SmallVec::new();
        loop {
            let candidates = self.state.lock().candidates(&unfinished);
            let mut finished: SmallVec<[u64; 8]> = SmallVec::new();
            for (sequence, awaited) in candidates {
                match all_complete(&awaited) {
                    Ok(true) => finished.push(sequence),
                    Ok(false) => unfinished.push(sequence),
                    Err(error) => {
                        tracing::warn!(%error, "a staging buffer's event could not be queried");
                        outcome = outcome.and(Err(error));
                        unfinished.push(sequence);
                    }
                }
            }
            if finished.is_empty() {
                return outcome;
            }
            let unwanted = self.state.lock().retire(&finished);
            drop(unwanted);
        }
    }

    /// The events of the oldest submitted buffer numbered below `until`.
    fn oldest_submitted(&self, until: u64) -> Option<Events> {
        let state = self.state.lock();
        let oldest = state.submitted.first()?;
        (oldest.sequence < until).then(|| oldest.awaited.clone())
    }
}

impl State {
    /// Puts a slot on the free list, or hands it back for dropping when the pool is closed.
    #[must_use]
    fn put_free(&mut self, slot: Slot) -> Option<Slot> {
        if self.closed {
            self.buffers -= 1;
            return Some(slot);
        }
        self.free.push(slot);
        None
    }

    /// The tickets worth asking about: the first of each stream, and each with several readers,
    /// except those known to be unfinished.
    fn candidates(&self, unfinished: &[u64]) -> SmallVec<[(u64, Events); 8]> {
        let mut streams: SmallVec<[StreamKey; 8]> = SmallVec::new();
        let mut candidates = SmallVec::new();
        for ticket in &self.submitted {
            if let Some(stream) = ticket.stream {
                if streams.contains(&stream) {
                    continue;
                }
                streams.push(stream);
            }
            if !unfinished.contains(&ticket.sequence) {
                candidates.push((ticket.sequence, ticket.awaited.clone()));
            }
        }
        candidates
    }

    /// Frees the slots of the tickets numbered `finished`; returns what a closed pool has no use for.
    #[must_use]
    fn retire(&mut self, finished: &[u64]) -> SmallVec<[Slot; 8]> {
        let mut unwanted = SmallVec::new();
        for sequence in finished {
            let position = self.submitted.iter().position(|ticket| ticket.sequence == *sequence);
            if let Some(position) = position {
                let ticket = self.submitted.remove(position);
                unwanted.extend(self.put_free(ticket.slot));
            }
        }
        unwanted
    }
}

/// Whether every event has completed, or will never because its device is lost.
fn all_complete(events: &[Arc<Event>]) -> Result<bool, DeviceError> {
    for event in events {
        match event.is_complete() {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(_) if event.device().poison().is_some() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Waits on the host for every event whose device is not lost.
fn wait_for(events: &[Arc<Event>]) -> Result<(), DeviceError> {
    for event in events {
        match event.synchronize() {
            Err(error) if event.device().poison().is_none() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
