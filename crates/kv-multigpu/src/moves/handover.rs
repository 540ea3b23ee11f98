//! The boundary between two stages of a pipeline, where activations go from one device to the next.

use cuda_driver::guard;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use cuda_driver::messages::Chain;
use cuda_driver::{Device, DeviceBuffer, DeviceError, DeviceSpan, Event, Fence, Stream};

use super::held::Fences;
use super::mover::{COUNT_MAX, Mover, check_count, check_device};
use super::{MoveError, MoveOrder, Side};

/// A ring of activation buffers on each side of a boundary between pipeline stages, with the events
/// that order their use. Everything is allocated once, except an event where a buffer that was given back unsent
/// is filled on another stream. The host never waits.
///
/// ```text
/// producer's stream:  room -> write outgoing -> send
/// consumer's stream:                            send -> read incoming -> done
/// ```
///
/// [`room`](HandOver::room) makes the producer's stream wait until the buffer's last copy has completed.
/// [`send`](HandOver::send) makes the copy wait for the last reader. With two buffers, the producer writes one while
/// the other is copied.
///
/// A boundary with one consumer's stream needs the fewest calls, because the order of that stream keeps a copy behind
/// the buffer's last reader. After the first change of the consumer's stream, events are recorded after readers. The
/// last stream that read a buffer is kept until the buffer is sent again.
///
/// A boundary refuses tokens of another boundary ([`MoveError::OtherHandOver`]).
///
/// # Loss
/// A buffer is abandoned if its [`Outgoing`] or [`Incoming`] is dropped, for instance by a
/// panicking thread: work that the boundary does not know may use it. It is never handed out again,
/// and the others stay in use. Once the device of either end is known to be lost, no buffer is
/// handed out or sent ([`MoveError::EndLost`]). The other device keeps working.
#[derive(Debug)]
pub struct HandOver {
    mover: Mover,
    /// Unique in the process. Every [`Outgoing`] and [`Incoming`] carries it.
    id: u64,
    buffers: Vec<BufferPair>,
    next: usize,
    /// Whether several consumer streams were used.
    several: bool,
}

#[derive(Debug)]
struct BufferPair {
    outgoing: DeviceBuffer,
    incoming: DeviceBuffer,
    /// After the last copy.
    copied: Fence,
    /// Recorded after the reader, except while `reader` names its stream.
    read: Event,
    /// The stream of a reader after which `read` was not recorded.
    reader: Option<Stream>,
    /// After copies that failed half-way. Kept until a later copy was sent.
    interrupted: Fences,
    /// The stream of a producer that returned the outgoing buffer unsent, and may still write it.
    written_on: Option<Stream>,
    /// Whether an [`Outgoing`] or an [`Incoming`] of these buffers exists.
    is_held: bool,
    /// Whether that token was dropped. The token sets it once, and the boundary reads it. Relaxed,
    /// because it guards no data.
    is_abandoned: Arc<AtomicBool>,
}

/// Marks a buffer as abandoned when its token is dropped without being returned.
#[derive(Debug)]
struct Abandoning(Option<Arc<AtomicBool>>);

impl Abandoning {
    /// The buffer's token is returned, or passed on.
    fn forget(&mut self) {
        self.0 = None;
    }
}

impl Drop for Abandoning {
    fn drop(&mut self) {
        if let Some(is_abandoned) = &self.0 {
            guard!("multigpu.abandoned-not-given", is_abandoned.store(true, Relaxed));
        }
    }
}

/// The number of the next boundary.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// A buffer that the producer fills. Pass it to [`HandOver::send`], or return it.
#[derive(Debug)]
#[must_use = "a buffer that is neither sent nor returned is never handed out again"]
pub struct Outgoing {
    hand_over: u64,
    index: usize,
    span: DeviceSpan,
    /// The stream whose work fills it.
    producer: Stream,
    abandoning: Abandoning,
}

impl Outgoing {
    /// The memory to fill, on the producer's device.
    #[must_use]
    pub fn span(&self) -> DeviceSpan {
        self.span
    }
}

/// Activations that were handed over. Pass it to [`HandOver::done`] when the reader is enqueued.
#[derive(Debug)]
#[must_use = "a buffer that is not returned is never handed out again"]
pub struct Incoming {
    hand_over: u64,
    index: usize,
    span: DeviceSpan,
    abandoning: Abandoning,
}

impl Incoming {
    /// The received bytes, on the consumer's device.
    #[must_use]
    pub fn span(&self) -> DeviceSpan {
        self.span
    }
}

/// A failed hand-over, with its buffer. The buffer still holds what the producer has written.
pub struct SendFailed {
    /// The cause.
    pub error: MoveError,
    /// The buffer.
    pub outgoing: Outgoing,
}

impl fmt::Display for SendFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hand-over of buffer {}: {}", self.outgoing.index, self.error)
    }
}

impl fmt::Debug for SendFailed {
    /// One line with all causes. `?` in `main` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Chain(self), f)
    }
}

impl std::error::Error for SendFailed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl HandOver {
    /// Creates `count` buffers of `bytes` bytes on each side of `mover`'s path, at most 4,096.
    ///
    /// # Errors
    /// [`MoveError::Zero`], [`MoveError::TooMany`]; the driver's error.
    #[track_caller]
    pub fn new(mut mover: Mover, bytes: u64, count: usize) -> Result<Self, MoveError> {
        let _site = cuda_driver::site::enter();
        for (what, number) in [("buffers", count as u64), ("bytes of a buffer", bytes)] {
            if number == 0 {
                return Err(MoveError::Zero { what });
            }
        }
        check_count("buffers", count as u64, COUNT_MAX)?;
        let to = mover.to().clone();
        // No copy was made yet: a fence after nothing.
        let idle = Stream::new(&to)?;
        let buffers = (0..count).map(|_| {
            Ok::<_, MoveError>(BufferPair {
                outgoing: DeviceBuffer::alloc(mover.from(), bytes)?,
                incoming: DeviceBuffer::alloc(&to, bytes)?,
                copied: mover.arrived.record(&idle)?,
                read: Event::new(&to)?,
                reader: None,
                interrupted: Fences::default(),
                written_on: None,
                is_held: false,
                is_abandoned: Arc::default(),
            })
        });
        let buffers = buffers.collect::<Result<_, _>>()?;
        // A copy's fence is recorded while the buffer still has that of the copy before.
        guard!("multigpu.sends-create-nothing", mover.arrived.prepare(&to, 1)?);
        let id = NEXT_ID.fetch_add(1, Relaxed);
        Ok(Self { mover, id, buffers, next: 0, several: false })
    }

    /// The sending device.
    pub(crate) fn from(&self) -> &Device {
        self.mover.from()
    }

    /// The receiving device.
    pub(crate) fn to(&self) -> &Device {
        self.mover.to()
    }

    /// A buffer for the producer to fill, by work enqueued on `producer` from now on.
    ///
    /// # Ordering
    /// Makes `producer` wait on the device for the buffer's last copy, and for work that wrote the
    /// buffer without sending it.
    ///
    /// # Errors
    /// [`MoveError::NoBuffer`] if the next buffer is still held, or all were abandoned;
    /// [`MoveError::EndLost`], [`MoveError::WrongDevice`]; the driver's error.
    #[track_caller]
    pub fn room(&mut self, producer: &Stream) -> Result<Outgoing, MoveError> {
        let _site = cuda_driver::site::enter();
        check_device("producer's stream", self.mover.from(), producer.device())?;
        let (index, count) = (self.next_buffer()?, self.buffers.len());
        if let Err(error) = self.buffers[index].make_free(producer) {
            // The driver refuses events of a lost device.
            let lost = guard!("multigpu.receiver-loss-told", self.check_ends().err(), else None);
            return Err(lost.unwrap_or(error.into()));
        }
        let buffers = &mut self.buffers[index];
        buffers.is_held = true;
        self.next = (index + 1) % count;
        let (hand_over, span) = (self.id, buffers.outgoing.span());
        let abandoning = Abandoning(Some(Arc::clone(&buffers.is_abandoned)));
        Ok(Outgoing { hand_over, index, span, producer: producer.clone(), abandoning })
    }

    /// The next buffer that was not abandoned.
    fn next_buffer(&self) -> Result<usize, MoveError> {
        let count = self.buffers.len();
        let mut all = (0..count).map(|after| (self.next + after) % count);
        let next = all.find(|&index| !self.buffers[index].is_abandoned());
        if let Some(next) = next.filter(|&next| !self.buffers[next].is_held) {
            return Ok(next);
        }
        let abandoned = self.buffers.iter().filter(|buffers| buffers.is_abandoned()).count();
        let held = self.buffers.iter().filter(|buffers| buffers.is_held).count();
        // Abandoned buffers count as held too.
        Err(MoveError::NoBuffer { in_use: held - abandoned, abandoned, buffers: count })
    }

    /// Fails once either end is known to be lost.
    fn check_ends(&self) -> Result<(), MoveError> {
        for (end, device) in [(Side::Destination, self.to()), (Side::Source, self.from())] {
            if let Some(first) = device.poison() {
                return Err(MoveError::EndLost { end, device: device.ordinal(), first });
            }
        }
        Ok(())
    }

    /// Hands over the first `bytes` bytes of a buffer, after the work on `producer` at this moment,
    /// to work enqueued on `consumer` from now on.
    ///
    /// # Ordering
    /// `consumer` waits on the device for the copy, and the copy for the buffer's last reader.
    ///
    /// # Errors
    /// [`SendFailed`] with the buffer, which may be sent again unless an end is lost
    /// ([`MoveError::EndLost`]).
    #[expect(clippy::result_large_err, reason = "a refusal returns its arguments")]
    #[track_caller]
    pub fn send(
        &mut self,
        mut outgoing: Outgoing,
        bytes: u64,
        producer: &Stream,
        consumer: &Stream,
    ) -> Result<Incoming, SendFailed> {
        let _site = cuda_driver::site::enter();
        let (hand_over, index) = (outgoing.hand_over, outgoing.index);
        let sent = self
            .check_own(hand_over, index)
            .and_then(|()| self.try_send(index, bytes, producer, consumer));
        match sent {
            Ok(span) => {
                let abandoning = Abandoning(outgoing.abandoning.0.take());
                Ok(Incoming { hand_over, index, span, abandoning })
            }
            // A call of the send may have been the first to see the loss.
            Err(error) => {
                let error = self.check_ends().err().unwrap_or(error);
                Err(SendFailed { error, outgoing })
            }
        }
    }

    /// Refuses tokens of another boundary. A token of this one names an existing buffer, and no
    /// other token names that buffer: only `room` and `send` create tokens, and tokens cannot be
    /// cloned.
    fn check_own(&self, found: u64, buffer: usize) -> Result<(), MoveError> {
        let expected = self.id;
        if guard!("multigpu.own-token", found == expected, else true) {
            return Ok(());
        }
        Err(MoveError::OtherHandOver { buffer, expected, found })
    }

    fn try_send(
        &mut self,
        index: usize,
        bytes: u64,
        producer: &Stream,
        consumer: &Stream,
    ) -> Result<DeviceSpan, MoveError> {
        let order = MoveOrder { after: producer, on: consumer };
        self.mover.check_order(order)?;
        let lane = self.mover.copy_lane();
        let buffers = &mut self.buffers[index];
        let source = buffers.outgoing.span().slice(0, bytes)?;
        let span = buffers.incoming.span().slice(0, bytes)?;
        // Bound once for all calls.
        let bound = consumer.device().run(|_| {
            let room = buffers.make_room(consumer, &mut self.several);
            Ok(room.map_err(MoveError::from).and_then(|()| {
                let copy = |mover: &mut Mover, started: &mut bool| {
                    mover.copy(source, span, consumer, started)
                };
                let copied = self.mover.ordered_until(order, lane, copy);
                copied.map_err(|interrupted| {
                    // The next copy of this buffer waits for the part that was enqueued. That part
                    // waits for everything before it.
                    if !interrupted.fences.is_empty() {
                        buffers.interrupted = interrupted.fences;
                    }
                    interrupted.error
                })
            }))
        });
        buffers.copied = bound??;
        buffers.interrupted = Fences::default();
        buffers.written_on = None;
        Ok(span)
    }

    /// Returns a buffer whose reader is enqueued on `consumer`.
    ///
    /// # Errors
    /// [`MoveError::OtherHandOver`], [`MoveError::WrongDevice`], or the driver's error, with the
    /// buffer, which is still in use then.
    #[track_caller]
    pub fn done(
        &mut self,
        mut incoming: Incoming,
        consumer: &Stream,
    ) -> Result<(), (MoveError, Incoming)> {
        let _site = cuda_driver::site::enter();
        let checked = self
            .check_own(incoming.hand_over, incoming.index)
            .and_then(|()| check_device("consumer's stream", self.mover.to(), consumer.device()));
        if let Err(error) = checked {
            return Err((error, incoming));
        }
        let buffers = &mut self.buffers[incoming.index];
        // Covers the reader, but not later work on its stream.
        if self.several {
            let recorded =
                guard!("multigpu.reader-recorded", buffers.read.record(consumer), else Ok(()));
            if let Err(error) = recorded {
                return Err((error.into(), incoming));
            }
            buffers.reader = None;
        } else {
            buffers.reader = Some(consumer.clone());
        }
        buffers.is_held = false;
        incoming.abandoning.forget();
        Ok(())
    }

    /// Returns an unsent buffer. The buffer's next producer waits for the writes to it on this
    /// producer's stream.
    ///
    /// # Errors
    /// [`MoveError::OtherHandOver`], with the buffer.
    #[expect(clippy::result_large_err, reason = "a refusal returns its arguments")]
    pub fn give_back(&mut self, mut outgoing: Outgoing) -> Result<(), (MoveError, Outgoing)> {
        if let Err(error) = self.check_own(outgoing.hand_over, outgoing.index) {
            return Err((error, outgoing));
        }
        outgoing.abandoning.forget();
        let buffers = &mut self.buffers[outgoing.index];
        // Its work runs after that of the previously recorded writer.
        guard!("multigpu.unsent-writer-kept", buffers.written_on = Some(outgoing.producer));
        buffers.is_held = false;
        Ok(())
    }
}

impl BufferPair {
    fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Relaxed)
    }

    /// Makes work enqueued on `producer` from now on wait for everything that still uses the
    /// outgoing buffer.
    fn make_free(&self, producer: &Stream) -> Result<(), DeviceError> {
        // These stay recorded, because the next copy has to wait for them too.
        guard!("multigpu.producer-waits-interrupted", self.interrupted.hold_back(producer)?);
        match &self.written_on {
            Some(writer) if !is_same(writer, producer) => {
                producer.wait_for(writer, &Event::new(writer.device())?)?;
            }
            _ => {}
        }
        guard!("multigpu.producer-waits-copied", self.copied.hold_back(producer), else Ok(()))
    }

    /// Makes work enqueued on `consumer` from now on wait for everything that still uses the
    /// buffers.
    fn make_room(&mut self, consumer: &Stream, several: &mut bool) -> Result<(), DeviceError> {
        guard!("multigpu.copy-waits-interrupted", self.interrupted.hold_back(consumer)?);
        match &self.reader {
            Some(reader) if is_same(reader, consumer) => Ok(()),
            Some(reader) => {
                *several = true;
                // The work on the other stream at this moment includes the reader.
                guard!("multigpu.copy-waits-reader", consumer.wait_for(reader, &self.read)?);
                self.reader = None;
                Ok(())
            }
            None => consumer.wait(&self.read),
        }
    }
}

/// Whether both handles refer to the same stream.
fn is_same(one: &Stream, other: &Stream) -> bool {
    one.raw() == other.raw() && one.device().shares_context(other.device())
}
