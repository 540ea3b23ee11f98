//! The boundary between two stages of a pipeline: activations go from one device to the next.

use cuda_driver::{Device, DeviceBuffer, DeviceError, DeviceSpan, Event, Stream};

use super::held::{Pendings, wait_on};
use super::mover::{Mover, check_device};
use super::{MoveError, MoveOrder};

/// `CU_STREAM_PER_THREAD`, which is another stream on every thread.
const STREAM_PER_THREAD: u64 = 2;

/// Activation buffers in a ring on either side of a boundary, allocated once, and the events that
/// order their use. The host waits for nothing.
///
/// ```text
/// producer's stream:  room -> write outgoing -> send
/// consumer's stream:                            send -> read incoming -> done
/// ```
///
/// A buffer is written again after its copy has completed, and copied into again after its reader has:
/// [`room`](HandOver::room) and [`send`](HandOver::send) make the streams wait for that. With two buffers
/// the producer writes one while the other is under way.
///
/// Cheapest with one consumer's stream, whose own order keeps a copy behind the buffer's last reader.
/// From the first change of that stream on, readers are marked by events. The last stream that read a
/// buffer is held until the buffer is sent again.
#[derive(Debug)]
pub struct HandOver {
    mover: Mover,
    buffers: Vec<Buffers>,
    next: usize,
    /// Whether there was more than one stream of a consumer.
    several: bool,
}

#[derive(Debug)]
struct Buffers {
    outgoing: DeviceBuffer,
    incoming: DeviceBuffer,
    /// Recorded after the copy.
    copied: Event,
    /// Recorded after the reader, but for one that `reader` tells of.
    read: Event,
    /// The stream of a reader after which `read` was not recorded.
    reader: Option<Stream>,
    /// A copy that failed half-way, after which `copied` was not recorded.
    interrupted: Pendings,
    holder: Holder,
}

/// Who may use a pair of buffers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Holder {
    Nobody,
    Producer,
    Consumer,
}

/// A buffer that the producer fills. Handed to [`HandOver::send`], or given back.
#[derive(Debug)]
#[must_use = "a buffer that is not sent or given back stays in use"]
pub struct Outgoing {
    index: usize,
    span: DeviceSpan,
}

impl Outgoing {
    /// The memory to fill, on the producer's device.
    #[must_use]
    pub fn span(&self) -> DeviceSpan {
        self.span
    }
}

/// Activations that have been handed over. Handed to [`HandOver::done`] when the reader is enqueued.
#[derive(Debug)]
#[must_use = "a buffer that is not given back stays in use"]
pub struct Incoming {
    index: usize,
    span: DeviceSpan,
}

impl Incoming {
    /// The bytes that arrived, on the consumer's device.
    #[must_use]
    pub fn span(&self) -> DeviceSpan {
        self.span
    }
}

/// A hand-over that failed, with the buffer, which still holds what the producer writes.
#[derive(Debug, thiserror::Error)]
#[error("the activations were not handed over")]
pub struct SendFailed {
    /// Why.
    #[source]
    pub error: MoveError,
    /// The buffer.
    pub outgoing: Outgoing,
}

impl HandOver {
    /// `count` buffers of `bytes` bytes on either side of `mover`'s way.
    ///
    /// # Errors
    /// [`MoveError::Zero`]; what the driver answers.
    pub fn new(mover: Mover, bytes: u64, count: usize) -> Result<Self, MoveError> {
        if count == 0 || bytes == 0 {
            return Err(MoveError::Zero { what: "buffers" });
        }
        let buffers = (0..count).map(|_| {
            Ok::<_, MoveError>(Buffers {
                outgoing: DeviceBuffer::alloc(mover.from(), bytes)?,
                incoming: DeviceBuffer::alloc(mover.to(), bytes)?,
                copied: Event::new(mover.to())?,
                read: Event::new(mover.to())?,
                reader: None,
                interrupted: Pendings::new(),
                holder: Holder::Nobody,
            })
        });
        let buffers = buffers.collect::<Result<_, _>>()?;
        Ok(Self { mover, buffers, next: 0, several: false })
    }

    /// The device that hands over.
    #[must_use]
    pub fn from(&self) -> &Device {
        self.mover.from()
    }

    /// The device that activations are handed to.
    #[must_use]
    pub fn to(&self) -> &Device {
        self.mover.to()
    }

    /// A buffer for the producer to fill, by work enqueued on `producer` from now on.
    ///
    /// # Ordering
    /// Makes `producer` wait on the device until the buffer's last copy has completed.
    ///
    /// # Errors
    /// [`MoveError::NoBuffer`] when the next buffer is still held; [`MoveError::WrongDevice`]; what the
    /// driver answers.
    pub fn room(&mut self, producer: &Stream) -> Result<Outgoing, MoveError> {
        check_device("producer's stream", self.mover.from(), producer.device())?;
        let (index, count) = (self.next, self.buffers.len());
        if self.buffers[index].holder != Holder::Nobody {
            let in_use = self.buffers.iter().filter(|b| b.holder != Holder::Nobody).count();
            return Err(MoveError::NoBuffer { in_use, buffers: count });
        }
        let buffers = &mut self.buffers[index];
        wait_on(&buffers.interrupted, producer)?;
        buffers.interrupted.clear();
        producer.wait(&buffers.copied)?;
        buffers.holder = Holder::Producer;
        self.next = (index + 1) % count;
        Ok(Outgoing { index, span: buffers.outgoing.span() })
    }

    /// Hands the first `bytes` bytes of a buffer over, after the work that is on `producer` now, for
    /// work enqueued on `consumer` from now on.
    ///
    /// # Ordering
    /// `consumer` waits on the device for the copy, and the copy for the buffer's last reader.
    ///
    /// # Errors
    /// [`SendFailed`] with the buffer, which may be sent again.
    pub fn send(
        &mut self,
        outgoing: Outgoing,
        bytes: u64,
        producer: &Stream,
        consumer: &Stream,
    ) -> Result<Incoming, SendFailed> {
        match self.try_send(outgoing.index, bytes, producer, consumer) {
            Ok(span) => Ok(Incoming { index: outgoing.index, span }),
            Err(error) => Err(SendFailed { error, outgoing }),
        }
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
        let Some(buffers) = self.buffers.get_mut(index) else {
            return Err(MoveError::NoBuffer { in_use: index, buffers: self.buffers.len() });
        };
        let source = buffers.outgoing.span().slice(0, bytes)?;
        let span = buffers.incoming.span().slice(0, bytes)?;
        // Bound once for all calls.
        let bound = consumer.device().run(|_| {
            let room = buffers.make_room(consumer, &mut self.several);
            Ok(room.map_err(MoveError::from).and_then(|()| {
                let copy = |mover: &mut Mover, started: &mut bool| {
                    mover.copy(source, span, consumer, started)
                };
                let copied = self.mover.ordered_until(order, lane, &buffers.copied, copy);
                copied.map_err(|interrupted| {
                    // Sent again, the copy comes after what of it is under way, which is after what
                    // was under way before it.
                    if !interrupted.pendings.is_empty() {
                        buffers.interrupted = interrupted.pendings;
                    }
                    interrupted.error
                })
            }))
        });
        bound??;
        buffers.interrupted.clear();
        buffers.holder = Holder::Consumer;
        Ok(span)
    }

    /// Gives a buffer back whose reader is enqueued on `consumer`.
    ///
    /// # Errors
    /// What the driver answers, with the buffer, which is then still in use.
    pub fn done(
        &mut self,
        incoming: Incoming,
        consumer: &Stream,
    ) -> Result<(), (MoveError, Incoming)> {
        let Some(buffers) = self.buffers.get_mut(incoming.index) else {
            let (in_use, buffers) = (incoming.index, self.buffers.len());
            return Err((MoveError::NoBuffer { in_use, buffers }, incoming));
        };
        if self.several {
            if let Err(error) = buffers.read.record(consumer) {
                return Err((error.into(), incoming));
            }
            buffers.reader = None;
        } else {
            buffers.reader = Some(consumer.clone());
        }
        buffers.holder = Holder::Nobody;
        Ok(())
    }

    /// Gives a buffer back that was not sent.
    pub fn give_back(&mut self, outgoing: Outgoing) {
        if let Some(buffers) = self.buffers.get_mut(outgoing.index) {
            buffers.holder = Holder::Nobody;
        }
    }

    /// Takes the boundary apart.
    #[must_use]
    pub fn into_mover(self) -> Mover {
        self.mover
    }
}

impl Buffers {
    /// Makes work enqueued on `consumer` from now on wait for what still uses the buffers.
    fn make_room(&mut self, consumer: &Stream, several: &mut bool) -> Result<(), DeviceError> {
        wait_on(&self.interrupted, consumer)?;
        match &self.reader {
            Some(reader) if is_same(reader, consumer) => Ok(()),
            Some(reader) => {
                *several = true;
                // What is on the other stream now includes the reader.
                consumer.wait_for(reader, &self.read)?;
                self.reader = None;
                Ok(())
            }
            None => consumer.wait(&self.read),
        }
    }
}

/// Whether what is enqueued on the one is in order with what is on the other.
fn is_same(one: &Stream, other: &Stream) -> bool {
    one.raw() == other.raw()
        && one.raw() != STREAM_PER_THREAD
        && one.device().context() == other.device().context()
}
