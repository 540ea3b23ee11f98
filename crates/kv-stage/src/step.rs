//! What a step sends to the device: snapshots and small arrays, in one buffer and one copy.

use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::NoUninit;
use cuda_driver::{Device, DeviceBuffer, DeviceError, DeviceSpan, Event, Stream};
use smallvec::SmallVec;

use crate::{
    AcquireError, BlockTable, PartError, StagingBuffer, StagingError, StagingPool, StepError,
    TableError,
};

/// Every part of a step starts at a multiple of this many bytes, in the buffer and on the device.
pub const PART_ALIGNMENT: u64 = 256;

/// Size of a stager.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StepStagerOptions {
    /// Device memory of a step's copy, in bytes. Steps larger than this, or than the pool's buffers,
    /// are refused.
    pub device_bytes: u64,
}

/// The one path by which tables and per-step arrays reach the device.
///
/// Each step is written to a staging buffer of its own and copied, once, to the stager's device
/// memory. That memory is reused by every step in stream order, so the stager is bound to a stream:
/// the first submit binds it.
///
/// # Ordering
/// A step's spans are valid on the stager's stream from its submit to the next submit there: readers
/// enqueued on that stream in between see this step and no other. A reader on another stream waits
/// for an event recorded after the submit, and the stager's stream waits for that reader before the
/// next submit.
#[derive(Debug)]
pub struct StepStager {
    pool: StagingPool,
    destination: DeviceBuffer,
    /// The stream that the steps go to, from the first submit on.
    stream: Option<Stream>,
}

impl StepStager {
    /// Allocates the device memory.
    ///
    /// # Errors
    /// [`StagingError::Device`] when the device has too little memory.
    pub fn new(
        device: &Device,
        pool: &StagingPool,
        options: StepStagerOptions,
    ) -> Result<Self, StagingError> {
        let destination = DeviceBuffer::alloc(device, options.device_bytes)?;
        Ok(Self { pool: pool.clone(), destination, stream: None })
    }

    /// Starts a step, with a staging buffer of its own.
    ///
    /// # Errors
    /// [`AcquireError::Exhausted`] when the device is as far behind as the pool allows; the caller
    /// lets it catch up.
    pub fn begin(&mut self) -> Result<Step<'_>, AcquireError> {
        let buffer = self.pool.acquire()?;
        Ok(self.step_in(buffer))
    }

    /// As [`begin`](StepStager::begin), but waits for the oldest submitted buffer.
    ///
    /// # Ordering
    /// May wait on the host, see [`StagingPool::acquire_wait`].
    ///
    /// # Errors
    /// As [`StagingPool::acquire_wait`].
    pub fn begin_wait(&mut self) -> Result<Step<'_>, AcquireError> {
        let buffer = self.pool.acquire_wait()?;
        Ok(self.step_in(buffer))
    }

    /// Sends later steps to `stream`, which first waits for all work of the stream before it.
    ///
    /// # Errors
    /// What the driver answers; the stager then stays with its stream.
    pub fn rebind(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        if let Some(bound) = &self.stream {
            let event = Event::new(bound.device())?;
            event.record(bound)?;
            stream.wait(&event)?;
            self.stream = Some(stream.clone());
        }
        Ok(())
    }

    /// The most bytes that a step can have.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.destination.bytes().min(self.pool.buffer_bytes())
    }

    fn step_in(&mut self, buffer: StagingBuffer) -> Step<'_> {
        // Only distinct numbers are needed of the counter, so no ordering is.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Step { stager: self, buffer, parts: Parts { number, used: 0, ranges: SmallVec::new() } }
    }
}

/// A step being put together. Dropping it gives the buffer back; nothing was sent.
#[derive(Debug)]
pub struct Step<'a> {
    stager: &'a mut StepStager,
    buffer: StagingBuffer,
    parts: Parts,
}

/// A part of one step: rows of a table or an array.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PartId {
    step: u64,
    index: u32,
}

#[derive(Clone, Debug)]
struct Parts {
    /// Tells this step's parts from another's.
    number: u64,
    /// End of the last part, in bytes.
    used: u64,
    /// Offset and length of each part, in bytes.
    ranges: SmallVec<[(u64, u64); 8]>,
}

impl Step<'_> {
    /// Snapshots the first `width` columns of the rows of `slots`, in that order, as one row-major
    /// `[slots, width]` array of `i32`.
    ///
    /// Later edits of the table do not reach the step. Columns beyond a row's length carry -1.
    ///
    /// # Errors
    /// [`StepError::Table`] for a slot or a width that the table does not have,
    /// [`StepError::Capacity`]. The step is then as it was.
    pub fn block_rows(
        &mut self,
        table: &BlockTable,
        slots: &[usize],
        width: usize,
    ) -> Result<PartId, StepError> {
        if width > table.max_blocks() {
            let max_blocks = table.max_blocks();
            return Err(TableError::Column { logical: width, max_blocks }.into());
        }
        for slot in slots {
            table.row(*slot)?;
        }
        let row_bytes = width * size_of::<i32>();
        let bytes = (slots.len() as u64).saturating_mul(row_bytes as u64);
        let (part, destination) = self.add_part(bytes)?;
        if row_bytes > 0 {
            for (slot, row) in slots.iter().zip(destination.chunks_exact_mut(row_bytes)) {
                row.copy_from_slice(bytemuck::cast_slice(&table.row(*slot)?[..width]));
            }
        }
        Ok(part)
    }

    /// Copies an array into the step.
    ///
    /// # Errors
    /// [`StepError::Capacity`]. The step is then as it was.
    pub fn array<T: NoUninit>(&mut self, values: &[T]) -> Result<PartId, StepError> {
        const { assert!(align_of::<T>() as u64 <= PART_ALIGNMENT) }
        let (part, destination) = self.add_part(size_of_val(values) as u64)?;
        destination.copy_from_slice(bytemuck::cast_slice(values));
        Ok(part)
    }

    /// Bytes used so far, padding between parts included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.used
    }

    /// Copies the step to the device: one copy, however many parts.
    ///
    /// # Ordering
    /// Waits for nothing; see [`StepStager`] for how long the result is valid.
    ///
    /// # Errors
    /// [`StepError::OtherStream`] and [`StepError::OtherDevice`], with nothing enqueued;
    /// [`StepError::Submit`].
    pub fn submit(self, stream: &Stream) -> Result<Staged, StepError> {
        let Self { stager, buffer, parts } = self;
        let device = stager.destination.device();
        if stream.device() != device {
            let stream = stream.device().ordinal();
            return Err(StepError::OtherDevice { stager: device.ordinal(), stream });
        }
        let given = stream.raw();
        match &stager.stream {
            Some(bound) if bound.raw() != given => {
                return Err(StepError::OtherStream { bound: bound.raw(), given });
            }
            Some(_) => {}
            None => stager.stream = Some(stream.clone()),
        }
        let span = stager.destination.span();
        let used = parts.used;
        if used > 0 {
            buffer.submit(stream, |view| view.copy_to_device(span.slice(0, used)?, 0))?;
        }
        Ok(Staged { span, parts })
    }

    /// Makes room for `bytes` bytes, aligned, with the gap before them cleared.
    fn add_part(&mut self, bytes: u64) -> Result<(PartId, &mut [u8]), StepError> {
        let capacity_bytes = self.stager.capacity_bytes();
        let offset = self.parts.used.next_multiple_of(PART_ALIGNMENT);
        let needed_bytes = offset.saturating_add(bytes);
        // No part, not even an empty one, starts beyond the memory: its address would be another's.
        if needed_bytes > capacity_bytes {
            return Err(StepError::Capacity { needed_bytes, capacity_bytes });
        }
        let part = PartId { step: self.parts.number, index: self.parts.ranges.len() as u32 };
        self.parts.ranges.push((offset, bytes));
        let gap = self.parts.used as usize..offset as usize;
        self.parts.used = needed_bytes;
        let all = self.buffer.bytes_mut();
        // What an earlier step left in the gap must not travel.
        all[gap].fill(0);
        Ok((part, &mut all[offset as usize..needed_bytes as usize]))
    }
}

/// A step that was sent: where its parts lie on the device.
///
/// Valid on the stager's stream until the next submit there; see [`StepStager`].
#[derive(Clone, Debug)]
pub struct Staged {
    span: DeviceSpan,
    parts: Parts,
}

impl Staged {
    /// Where a part lies on the device; its address is a multiple of [`PART_ALIGNMENT`].
    ///
    /// # Errors
    /// [`PartError`] for a part of another step.
    pub fn span(&self, part: PartId) -> Result<DeviceSpan, PartError> {
        let foreign = PartError { part_step: part.step, step: self.parts.number };
        if part.step != self.parts.number {
            return Err(foreign);
        }
        let &(offset, bytes) = self.parts.ranges.get(part.index as usize).ok_or(foreign)?;
        self.span.slice(offset, bytes).map_err(|_| foreign)
    }

    /// Bytes that were copied, padding between parts included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.used
    }
}
