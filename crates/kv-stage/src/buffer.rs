//! One staging buffer: first its owner writes it, then only the device reads it.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use cuda_driver::{
    CopyError, DeviceError, DeviceSpan, Fence, FencePool, OutOfBounds, PinnedSpan, Stream, guard,
};
use smallvec::SmallVec;

use crate::error::SubmitError;
use crate::retire::{Awaited, PoolShared};
use crate::slab::{BufferMemory, PooledBuffer};

/// A pinned buffer to write, with one owner.
///
/// Dropping it returns it to the pool at once, because no device operation has used it. Only
/// [`submit`](StagingBuffer::submit) makes it available to the device, and consumes it.
pub struct StagingBuffer {
    shared: Arc<PoolShared>,
    /// # Invariants
    /// Present until the buffer is dropped or submitted. It came from the pool's free list, so no
    /// device operation refers to it. While it is present none is enqueued, because only `submit`
    /// passes its memory to the device, and takes it out.
    pooled: Option<PooledBuffer>,
}

impl StagingBuffer {
    /// Wraps a buffer from the pool's free list.
    pub(crate) fn new(shared: Arc<PoolShared>, pooled: PooledBuffer) -> Self {
        Self { shared, pooled: Some(pooled) }
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pooled.as_ref().map_or(0, |pooled| pooled.memory.bytes())
    }

    /// The bytes, to be filled. They contain data of an earlier use.
    ///
    /// Drivers that check orders record a write of all bytes at this call.
    #[track_caller]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.bytes();
        self.range_mut(0, bytes).unwrap_or_default()
    }

    /// `bytes` bytes at `offset`, to be filled. Like [`bytes_mut`](StagingBuffer::bytes_mut), for
    /// callers that fill only a part.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    #[track_caller]
    pub fn range_mut(&mut self, offset: u64, bytes: u64) -> Result<&mut [u8], OutOfBounds> {
        let Some(pooled) = &mut self.pooled else {
            return Err(OutOfBounds { offset, bytes, capacity: 0 });
        };
        // SAFETY: no device operation that reads or writes the buffer is pending, and none can be
        // enqueued while the slice borrows `self`: invariant of `pooled`. (On a lost device,
        // operations may have been cut off, but nothing runs any more.)
        unsafe { pooled.memory.slice_mut(offset, bytes) }
    }

    /// Copies `data` into the buffer at `offset`.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    #[track_caller]
    pub fn write_at(&mut self, offset: u64, data: &[u8]) -> Result<(), OutOfBounds> {
        self.range_mut(offset, data.len() as u64)?.copy_from_slice(data);
        Ok(())
    }

    /// Lets device work read the buffer, and gives the buffer up.
    ///
    /// `enqueue` enqueues the readers: copies with [`SubmittedView::copy_to_device`], kernels with
    /// [`SubmittedView::address`]. The buffer returns to the pool when an event recorded after them
    /// has completed. If `enqueue` fails or panics, work that it already enqueued may still run, so
    /// the buffer waits for its event in that case too.
    ///
    /// # Ordering
    /// Does not wait. Covers work that `enqueue` enqueues on `stream` and on streams passed to
    /// [`SubmittedView::also_read_by`]. Work enqueued elsewhere, or after this call, must not use
    /// the address.
    ///
    /// If no event can be recorded after the readers ([`SubmitError::Retire`]), the pool keeps a handle
    /// of their streams until the buffer is seen to be read. An [adopted](Stream::adopt) stream must
    /// live until then, or until the pool is closed.
    ///
    /// # Errors
    /// [`SubmitError`]; each variant says what was enqueued.
    #[track_caller]
    pub fn submit<R, E>(
        mut self,
        stream: &Stream,
        enqueue: impl FnOnce(&SubmittedView<'_>) -> Result<R, E>,
    ) -> Result<R, SubmitError<E>> {
        let _site = cuda_driver::site::enter();
        let Some(pooled) = self.pooled.take() else {
            unreachable!("only `submit` and `drop` take it, and both end the buffer's life")
        };
        let mut submission = Submission {
            shared: self.shared.clone(),
            memory: Some(pooled.memory),
            readers: RefCell::new(Readers { fences: pooled.fences, reading: SmallVec::new() }),
        };
        if let Err(error) = submission.readers.get_mut().add(stream) {
            submission.abandon();
            return Err(SubmitError::Event(error));
        }
        let enqueued = match &submission.memory {
            Some(memory) => {
                enqueue(&SubmittedView { stream, memory, readers: &submission.readers })
            }
            None => unreachable!("taken by `retire` and `abandon` only"),
        };
        let retired = submission.retire();
        let result = enqueued.map_err(SubmitError::Enqueue)?;
        retired.map_err(SubmitError::Retire)?;
        Ok(result)
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        if let Some(pooled) = self.pooled.take() {
            self.shared.give_back(pooled);
        }
    }
}

impl fmt::Debug for StagingBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagingBuffer").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

/// A buffer being submitted. Dropping it retires the buffer, however `enqueue` ended.
struct Submission {
    shared: Arc<PoolShared>,
    /// Present until `retire` or `abandon`.
    memory: Option<BufferMemory>,
    readers: RefCell<Readers>,
}

/// The streams that read a buffer.
struct Readers {
    /// # Invariants
    /// Has an event for each of the streams, so that none is created after their reads.
    fences: FencePool,
    /// # Invariants
    /// Each stream once.
    reading: SmallVec<[Stream; 2]>,
}

impl Readers {
    /// Adds a stream, unless it is present.
    #[track_caller]
    fn add(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        let ours = stream.device();
        // Handles of one context share the events.
        let same = |other: &&Stream| {
            let theirs = other.device();
            guard!("stage.twins-have-events", theirs.shares_context(ours), else theirs == ours)
        };
        let of_context = self.reading.iter().filter(same);
        if of_context.clone().any(|other| other.raw() == stream.raw()) {
            return Ok(());
        }
        self.fences.prepare(ours, of_context.count() + 1)?;
        self.reading.push(stream.clone());
        Ok(())
    }
}

impl Submission {
    /// Returns a buffer for which nothing was enqueued.
    fn abandon(&mut self) {
        if let Some(pooled) = self.take_pooled() {
            self.shared.give_back(pooled);
        }
    }

    /// Records the fences and passes the buffer to the pool, which keeps it until they complete.
    fn retire(&mut self) -> Result<(), DeviceError> {
        let reading = std::mem::take(&mut self.readers.get_mut().reading);
        let Some(mut pooled) = self.take_pooled() else { return Ok(()) };
        let (mut outcome, mut awaited) = (Ok(()), Awaited::new());
        for stream in &reading {
            match pooled.fences.record(stream) {
                Ok(fence) => awaited.push(fence),
                Err(error) => {
                    tracing::warn!(%error, "a staging buffer waits until its stream is idle");
                    let fence = Fence::without_event(stream);
                    guard!("stage.unrecorded-buffers-wait", awaited.push(fence));
                    outcome = outcome.and(Err(error));
                }
            }
        }
        let only = match reading.as_slice() {
            [stream] if outcome.is_ok() => Some((stream.device().context(), stream.raw())),
            _ => None,
        };
        self.shared.keep(pooled, only, awaited);
        outcome
    }

    fn take_pooled(&mut self) -> Option<PooledBuffer> {
        let memory = self.memory.take()?;
        let fences = std::mem::take(&mut self.readers.get_mut().fences);
        Some(PooledBuffer { memory, fences })
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        // Has an effect only if `enqueue` panicked. `retire` logs errors that it cannot return.
        guard!("stage.panics-retire", self.retire().unwrap_or_default());
    }
}

/// A submitted buffer, while its readers are being enqueued.
///
/// After a refused record the pool keeps handles of the streams that read it: see
/// [`submit`](StagingBuffer::submit).
pub struct SubmittedView<'a> {
    stream: &'a Stream,
    memory: &'a BufferMemory,
    readers: &'a RefCell<Readers>,
}

impl SubmittedView<'_> {
    /// The stream of the submission.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        self.stream
    }

    /// The address at which kernels read the buffer, for work enqueued within the closure.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.device_address()
    }

    /// Length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Enqueues a copy of the buffer's bytes from `offset` on, filling `destination`.
    ///
    /// # Ordering
    /// Runs on the submission's stream, after earlier work there.
    ///
    /// # Errors
    /// [`CopyError::OutOfBounds`] if the buffer has fewer than `offset + destination` bytes.
    #[track_caller]
    pub fn copy_to_device(&self, destination: DeviceSpan, offset: u64) -> Result<(), CopyError> {
        self.copy_on(self.stream, destination, offset)
    }

    /// Like [`copy_to_device`](SubmittedView::copy_to_device), on another stream, possibly of
    /// another device.
    ///
    /// # Errors
    /// Like `copy_to_device`; [`CopyError::Device`] if no event could be created. Nothing is
    /// enqueued then.
    #[track_caller]
    pub fn copy_to_device_on(
        &self,
        stream: &Stream,
        destination: DeviceSpan,
        offset: u64,
    ) -> Result<(), CopyError> {
        guard!("stage.copies-elsewhere-keep", self.also_read_by(stream)?);
        self.copy_on(stream, destination, offset)
    }

    /// Keeps the buffer also until work on `stream`, enqueued within the closure, has completed.
    ///
    /// Call it before enqueuing that work, so that a failure leaves nothing unordered. The stream
    /// may belong to another device. The first use of a second stream creates an event, which the
    /// buffer keeps.
    ///
    /// # Errors
    /// The driver's error.
    #[track_caller]
    pub fn also_read_by(&self, stream: &Stream) -> Result<(), DeviceError> {
        self.readers.borrow_mut().add(stream)
    }

    /// The buffer's memory, for launches that check what a kernel reads, on the submission's stream
    /// and within the closure. A launch on another stream refuses it.
    #[must_use]
    pub fn span(&self) -> PinnedSpan<'_> {
        self.span_for(self.stream)
    }

    /// Like [`span`](SubmittedView::span), for launches on `stream`. The buffer is also
    /// [kept](SubmittedView::also_read_by) for that stream.
    ///
    /// # Errors
    /// Like `also_read_by`.
    #[track_caller]
    pub fn span_on<'s>(&'s self, stream: &'s Stream) -> Result<PinnedSpan<'s>, DeviceError> {
        guard!("stage.spans-elsewhere-keep", self.also_read_by(stream)?);
        Ok(self.span_for(stream))
    }

    fn span_for<'s>(&'s self, reader: &'s Stream) -> PinnedSpan<'s> {
        match self.memory.span_for(reader) {
            Some(span) => span,
            None => unreachable!("a buffer lies inside its slab, see `BufferMemory::offset`"),
        }
    }

    #[track_caller]
    fn copy_on(
        &self,
        stream: &Stream,
        destination: DeviceSpan,
        offset: u64,
    ) -> Result<(), CopyError> {
        let offset = self.memory.range(offset, destination.bytes())?;
        stream.copy_to_device(destination, self.memory.place().0, offset)
    }
}

impl fmt::Debug for SubmittedView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SubmittedView")
            .field("stream", &self.stream.raw())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}
