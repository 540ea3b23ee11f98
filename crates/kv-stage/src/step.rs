//! A step's data for the device: table rows and small arrays, in one buffer.

use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::NoUninit;
use cuda_driver::{CopyError, Device, DeviceBuffer, DeviceError, DeviceSpan, Event, Stream};
use smallvec::SmallVec;

use crate::mirror::{Changes, TableView, copy_row, copy_word};
use crate::scatter::{INDEX_BYTES, Packet, ScatterKernel, ScatteredWords, WORD_BYTES};
use crate::staged::{PartRange, Parts};
use crate::{
    BlockTable, PartId, Row, Staged, StagingBuffer, StagingPool, SubmittedView,
    error::{AcquireError, StageError, StagingError, TableError},
};

/// Maximum number of bytes of a buffer lost to the alignment of its parts and of the indices.
const INDEX_SLACK_BYTES: u64 = 2 * PART_ALIGNMENT;
const PART_ALIGNMENT: u64 = StepStager::PART_ALIGNMENT;
/// Larger arrays are copied instead of scattered.
const SCATTERED_ARRAY_BYTES_MAX: u64 = 64 << 10;
const WORD_SIZE: usize = WORD_BYTES as usize;

/// Maximum number of bytes of a step whose words, each with an index, fit in a buffer.
const fn scatter_capacity(buffer_bytes: u64) -> u64 {
    buffer_bytes.saturating_sub(INDEX_SLACK_BYTES) / 5 * 4
}

/// The only path by which tables and per-step arrays reach the device.
///
/// Each step is written to its own staging buffer and sent once to the stager's device memory.
/// Every step reuses that memory in stream order, so the stager is bound to a stream: the first
/// submit binds it.
///
/// # What is sent
/// A stager made with [`new`](StepStager::new) copies every step completely. A stager made with
/// [`with_scatter`](StepStager::with_scatter) sends only the changes of a table since the previous
/// step, as long as it knows the device's contents. For that, three conditions must hold: the same
/// table was at the same place of the last step, that step was sent without an error, and the table
/// still remembers its edits since. Rows whose place another row took are then sent completely,
/// other changes as words of 16 bytes, all in a single kernel launch. In every other case, and if
/// most of the table changed, the step is copied. To keep their places, put tables before arrays,
/// and tables whose number of rows changes last among the tables.
///
/// # Ordering
/// A step's spans are valid on the stager's stream from its submit to the next submit there:
/// readers enqueued on that stream in between see exactly this step. A reader on another stream
/// waits for an event recorded after the submit, and the stager's stream waits for that reader
/// before the next submit. No other code may write the spans. If some did, call
/// [`forget`](StepStager::forget).
#[derive(Debug)]
pub struct StepStager {
    pool: StagingPool,
    destination: DeviceBuffer,
    /// The stream of the steps, from the first submit on.
    stream: Option<Stream>,
    mirror: Option<Mirror>,
}

/// The table contents on the device, and the kernel that updates them.
#[derive(Debug)]
struct Mirror {
    kernel: ScatterKernel,
    /// # Invariants
    /// The `n`-th view belongs to the `n`-th table of the last step. While `certain`, the device's
    /// memory will hold the rows that the views describe once the work enqueued on the stager's
    /// stream has run.
    views: Vec<TableView>,
    /// Cleared before anything changes, here or on the device. Set when a step was sent completely.
    certain: bool,
    /// Kept to reuse its allocation.
    changes: Changes,
    /// Destination of each word of the step, in words from the start of the destination.
    index: Vec<u32>,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    trust_uncertain: bool,
}

impl StepStager {
    /// Every part of a step starts at a multiple of this many bytes, in the buffer and on the device.
    pub const PART_ALIGNMENT: u64 = 256;

    /// Bytes of a staging buffer with which a stager that [sends only
    /// changes](StepStager::with_scatter) can use all of `device_bytes`.
    #[must_use]
    pub const fn buffer_bytes(device_bytes: u64) -> u64 {
        let room = device_bytes.saturating_add(device_bytes.div_ceil(4));
        room.saturating_add(INDEX_SLACK_BYTES)
    }

    /// Creates a stager that copies every step completely.
    ///
    /// `device_bytes` is the device memory for a step's parts. Steps larger than this, or than the
    /// pool's buffers, are refused.
    ///
    /// # Errors
    /// [`StagingError::Device`] if the device has too little memory.
    #[track_caller]
    pub fn new(
        device: &Device,
        pool: &StagingPool,
        device_bytes: u64,
    ) -> Result<Self, StagingError> {
        let destination = DeviceBuffer::alloc(device, device_bytes)?;
        Ok(Self { pool: pool.clone(), destination, stream: None, mirror: None })
    }

    /// Creates a stager that sends only changes where possible, with a kernel.
    ///
    /// Buffers of [`buffer_bytes`](StepStager::buffer_bytes) bytes allow steps of up to
    /// `device_bytes`.
    ///
    /// # Errors
    /// Like [`new`](StepStager::new); [`StagingError::Kernel`].
    #[track_caller]
    pub fn with_scatter(
        device: &Device,
        pool: &StagingPool,
        device_bytes: u64,
    ) -> Result<Self, StagingError> {
        let _site = cuda_driver::site::enter();
        let mirror = Mirror {
            kernel: ScatterKernel::load(device)?,
            views: Vec::new(),
            certain: false,
            changes: Changes::default(),
            index: Vec::new(),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            trust_uncertain: false,
        };
        Ok(Self { mirror: Some(mirror), ..Self::new(device, pool, device_bytes)? })
    }

    /// Starts a step, with its own staging buffer.
    ///
    /// # Errors
    /// [`AcquireError::Exhausted`] if the device is as far behind as the pool allows. The caller
    /// then lets it catch up.
    #[track_caller]
    pub fn begin(&mut self) -> Result<Step<'_>, AcquireError> {
        let _site = cuda_driver::site::enter();
        let buffer = self.pool.acquire()?;
        Ok(self.step_in(buffer))
    }

    /// Like [`begin`](StepStager::begin), but waits for the oldest submitted buffer.
    ///
    /// # Ordering
    /// May wait on the host, see [`StagingPool::acquire_wait`].
    ///
    /// # Errors
    /// Like [`StagingPool::acquire_wait`].
    #[track_caller]
    pub fn begin_wait(&mut self) -> Result<Step<'_>, AcquireError> {
        let _site = cuda_driver::site::enter();
        let buffer = self.pool.acquire_wait()?;
        Ok(self.step_in(buffer))
    }

    /// Sends later steps on `stream`, which first waits for all work of the previous stream.
    ///
    /// # Errors
    /// [`DeviceError::OtherDevice`]; the driver's error. The stager then keeps its stream.
    #[track_caller]
    pub fn rebind(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        let _site = cuda_driver::site::enter();
        let device = self.destination.device();
        if stream.device() != device {
            let (device, stream) = (device.ordinal(), stream.device().ordinal());
            return Err(DeviceError::OtherDevice { call: "StepStager::rebind", device, stream });
        }
        if let Some(bound) = &self.stream {
            let event = Event::new(bound.device())?;
            event.record(bound)?;
            stream.wait(&event)?;
        }
        self.stream = Some(stream.clone());
        Ok(())
    }

    /// Makes the next step be sent completely, because other code may have written the device's
    /// memory.
    pub fn forget(&mut self) {
        if let Some(mirror) = &mut self.mirror {
            mirror.certain = false;
        }
    }

    /// Maximum number of bytes of a step.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        let (device, buffer) = (self.destination.bytes(), self.pool.buffer_bytes());
        if self.mirror.is_none() {
            return device.min(buffer);
        }
        // Whole words, at most as many as an index can address.
        let indexed = u64::from(u32::MAX) * WORD_BYTES;
        let bytes = device.min(scatter_capacity(buffer)).min(indexed);
        bytes - bytes % WORD_BYTES
    }

    /// Makes the stager send only changes, even if a previous step may not have arrived.
    ///
    /// This is the mistake that sending everything after an error prevents. Tests use it to check
    /// that they would detect it.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_trust_uncertain(&mut self) {
        if let Some(mirror) = &mut self.mirror {
            mirror.trust_uncertain = true;
        }
    }

    fn step_in(&mut self, buffer: StagingBuffer) -> Step<'_> {
        // The numbers only have to be distinct, so no ordering is needed.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        if let Some(mirror) = &mut self.mirror {
            mirror.begin();
        }
        let capacity_bytes = self.capacity_bytes();
        let parts = Parts { number, used: 0, sent: 0, words: 0, places: SmallVec::new() };
        // The contents of the device's memory are unknown, so changes alone would not suffice.
        let whole = self.mirror.as_ref().is_none_or(|mirror| mirror.views.is_empty());
        let copied = whole.then_some(Copied { from: 0, buffer_from: 0 });
        Step { stager: self, buffer, capacity_bytes, parts, tables: 0, copied }
    }
}

impl Mirror {
    fn begin(&mut self) {
        #[cfg(all(feature = "sabotage", debug_assertions))]
        {
            self.certain |= self.trust_uncertain;
        }
        if !self.certain {
            self.views.clear();
        }
        self.index.clear();
    }

    /// The view of the step's table number `number`.
    fn view(&mut self, number: usize) -> &mut TableView {
        if self.views.len() <= number {
            self.views.resize_with(number + 1, TableView::empty);
        }
        &mut self.views[number]
    }
}

/// A step under construction. Dropping it returns the buffer; nothing was sent.
#[derive(Debug)]
pub struct Step<'a> {
    stager: &'a mut StepStager,
    buffer: StagingBuffer,
    capacity_bytes: u64,
    parts: Parts,
    /// Number of tables of the step so far.
    tables: usize,
    /// Start of the copied part of the step; words before it are scattered.
    copied: Option<Copied>,
}

/// The copied rest of a step: the same bytes in the buffer and on the device.
#[derive(Clone, Copy, Debug)]
struct Copied {
    /// Its start in the device's memory.
    from: u64,
    /// Its start in the buffer.
    buffer_from: u64,
}

impl Step<'_> {
    /// Copies the first `width` columns of `rows`, in that order, as one row-major array of `i32`.
    ///
    /// Later edits of the table do not affect the step. Columns beyond a row's length are -1. A
    /// stager that sends only changes may make rows longer than `width`, filled with the table's
    /// next columns: [`Staged::row_entries`] returns their length.
    ///
    /// # Errors
    /// [`StageError::Table`] for a row or a width that the table does not have,
    /// [`StageError::Capacity`]. The step is unchanged then.
    #[track_caller]
    pub fn block_rows(
        &mut self,
        table: &BlockTable,
        rows: &[Row],
        width: usize,
    ) -> Result<PartId, StageError> {
        let _site = cuda_driver::site::enter();
        if width > table.max_blocks() {
            let max_blocks = table.max_blocks();
            return Err(TableError::Column { logical: width, max_blocks }.into());
        }
        // All rows at once first, because a branch for each would be slow.
        let last = rows.iter().fold(Row::default(), |last, &row| last.max(row));
        if last.index() >= table.rows() {
            for &row in rows {
                table.row(row)?;
            }
        }
        let part = if self.stager.mirror.is_some() {
            self.mirrored_rows(table, rows, width)?
        } else {
            let place = self.place(rows_bytes(rows.len(), width), width)?;
            let copied = self.copy_from(place.offset);
            self.write_rows(place, copied, table, rows, width);
            self.add(place)
        };
        self.tables += 1;
        Ok(part)
    }

    /// Copies an array into the step.
    ///
    /// # Errors
    /// [`StageError::Capacity`]. The step is unchanged then.
    #[track_caller]
    pub fn array<T: NoUninit>(&mut self, values: &[T]) -> Result<PartId, StageError> {
        let _site = cuda_driver::site::enter();
        const { assert!(align_of::<T>() as u64 <= PART_ALIGNMENT) }
        let place = self.place(size_of_val(values) as u64, 0)?;
        let values: &[u8] = bytemuck::cast_slice(values);
        if self.copied.is_none() && place.bytes <= SCATTERED_ARRAY_BYTES_MAX {
            self.scatter_array(place, values);
        } else {
            let copied = self.copy_from(place.offset);
            self.copied_bytes(place, copied).copy_from_slice(values);
        }
        Ok(self.add(place))
    }

    /// Bytes of device memory used so far, including padding between parts.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.used
    }

    /// Sends the step to the device: one copy, or one launch that writes the changes, for any
    /// number of parts. Both are used if one table changed a little and a later one a lot.
    ///
    /// # Ordering
    /// Does not wait; see [`StepStager`] for how long the result is valid.
    ///
    /// # Errors
    /// [`StageError::OtherStream`] and [`StageError::OtherDevice`], with nothing enqueued;
    /// [`StageError::Submit`].
    #[track_caller]
    pub fn submit(mut self, stream: &Stream) -> Result<Staged, StageError> {
        let _site = cuda_driver::site::enter();
        self.bind(stream)?;
        let words = self.write_index();
        let Self { stager, buffer, mut parts, tables, copied, .. } = self;
        let span = stager.destination.span();
        let copied = copied.filter(|copied| copied.from < parts.used);
        let copied_bytes = copied.map_or(0, |copied| parts.used - copied.from);
        parts.words = words.map_or(0, |words| words.count);
        parts.sent = copied_bytes + u64::from(parts.words) * (WORD_BYTES + INDEX_BYTES);
        let Some(mirror) = &mut stager.mirror else {
            if copied_bytes > 0 {
                buffer.submit(stream, |view| send_copy(view, span, copied, copied_bytes))?;
            }
            return Ok(Staged { span, parts });
        };
        mirror.certain = false;
        if parts.sent > 0 {
            buffer.submit(stream, |view| {
                send_copy(view, span, copied, copied_bytes)?;
                match words {
                    Some(words) => Ok(mirror.kernel.send(view, span, words)?),
                    None => Ok(()),
                }
            })?;
        }
        // The step's arrays may now cover views of tables that the step did not have.
        mirror.views.truncate(tables);
        mirror.certain = true;
        Ok(Staged { span, parts })
    }

    /// Binds the stager to `stream`, or checks that it is bound to it.
    fn bind(&mut self, stream: &Stream) -> Result<(), StageError> {
        let device = self.stager.destination.device();
        if stream.device() != device {
            let stream = stream.device().ordinal();
            return Err(StageError::OtherDevice { stager: device.ordinal(), stream });
        }
        let given = stream.raw();
        match &self.stager.stream {
            Some(bound) if bound.raw() != given => {
                return Err(StageError::OtherStream { bound: bound.raw(), given });
            }
            Some(_) => {}
            None => self.stager.stream = Some(stream.clone()),
        }
        Ok(())
    }

    /// The place of the next part, which is not reserved yet.
    fn place(&self, bytes: u64, row_entries: usize) -> Result<PartRange, StageError> {
        let offset = self.parts.used.next_multiple_of(PART_ALIGNMENT);
        let needed_bytes = offset.saturating_add(bytes);
        // No part, not even an empty one, may start beyond the memory: its address would belong to
        // other memory.
        if needed_bytes > self.capacity_bytes {
            return Err(StageError::Capacity { needed_bytes, capacity_bytes: self.capacity_bytes });
        }
        Ok(PartRange { offset, bytes, row_entries })
    }

    fn add(&mut self, place: PartRange) -> PartId {
        let part = PartId { step: self.parts.number, index: self.parts.places.len() as u32 };
        self.parts.places.push(place);
        self.parts.used = place.offset + place.bytes;
        part
    }

    /// Adds rows as changes of the device's contents if these are certain and few, and otherwise as
    /// a copy.
    fn mirrored_rows(
        &mut self,
        table: &BlockTable,
        rows: &[Row],
        width: usize,
    ) -> Result<PartId, StageError> {
        let number = self.tables;
        let Some(mirror) = &mut self.stager.mirror else { unreachable!("the caller saw one") };
        let stride = mirror.view(number).stride_for(table, width);
        // Rows that do not fit may fit without room to grow.
        let place = self.place(rows_bytes(rows.len(), stride), stride);
        let place = place.or_else(|_| self.place(rows_bytes(rows.len(), width), width))?;
        let Some(mirror) = &mut self.stager.mirror else { unreachable!("the caller saw one") };
        mirror.certain = false;
        let view = &mut mirror.views[number];
        let known = self.copied.is_none()
            && place.row_entries == view.stride()
            && view.is_of(table, place.offset, width);
        if known && view.advance(table, rows, &mut mirror.changes).is_some() {
            self.scatter_rows(place, table, rows);
        } else {
            view.reset(table, place.offset, place.row_entries, rows);
            let copied = self.copy_from(place.offset);
            self.write_rows(place, copied, table, rows, place.row_entries);
        }
        Ok(self.add(place))
    }

    /// The start of the copied part of the step, set to `offset` if nothing was copied before.
    fn copy_from(&mut self, offset: u64) -> Copied {
        let words = self.stager.mirror.as_ref().map_or(0, |mirror| mirror.index.len());
        let buffer_from = (words as u64 * WORD_BYTES).next_multiple_of(PART_ALIGNMENT);
        *self.copied.get_or_insert(Copied { from: offset, buffer_from })
    }

    /// The bytes of a copied part, with the gap before them cleared.
    fn copied_bytes(&mut self, place: PartRange, copied: Copied) -> &mut [u8] {
        let first = self.parts.used.max(copied.from);
        let start = first - copied.from + copied.buffer_from;
        let gap = place.offset - first;
        let (gap, part) =
            in_buffer(&mut self.buffer, start, gap + place.bytes).split_at_mut(gap as usize);
        // Data of an earlier step in the gap must not be sent.
        gap.fill(0);
        part
    }

    fn write_rows(
        &mut self,
        place: PartRange,
        copied: Copied,
        table: &BlockTable,
        rows: &[Row],
        stride: usize,
    ) {
        let destination = self.copied_bytes(place, copied);
        if stride > 0 {
            let lines = bytemuck::cast_slice_mut::<u8, i32>(destination).chunks_exact_mut(stride);
            for (row, line) in rows.iter().zip(lines) {
                copy_row(table, *row, line);
            }
        }
    }

    /// Writes the changed words to the buffer.
    fn scatter_rows(&mut self, place: PartRange, table: &BlockTable, rows: &[Row]) {
        let Some(mirror) = &mut self.stager.mirror else { unreachable!("the caller saw one") };
        let Mirror { index, changes, .. } = mirror;
        let first = (place.offset / WORD_BYTES) as u32;
        let start = index.len() as u64 * WORD_BYTES;
        let bytes = changes.words.len() as u64 * WORD_BYTES;
        let bytes = in_buffer(&mut self.buffer, start, bytes);
        let words = bytemuck::cast_slice_mut::<u8, i32>(bytes).chunks_exact_mut(WORD_SIZE / 4);
        for (&word, to) in changes.words.iter().zip(words) {
            copy_word(table, rows, place.row_entries, word, to);
            index.push(first + word);
        }
    }

    /// Writes an array to the buffer as words, the last one padded with zeros.
    fn scatter_array(&mut self, place: PartRange, values: &[u8]) {
        let Some(mirror) = &mut self.stager.mirror else { unreachable!("else all is copied") };
        let words = values.len().div_ceil(WORD_SIZE);
        let start = mirror.index.len() as u64 * WORD_BYTES;
        let bytes = in_buffer(&mut self.buffer, start, words as u64 * WORD_BYTES);
        let (data, rest) = bytes.split_at_mut(values.len());
        data.copy_from_slice(values);
        rest.fill(0);
        let first = (place.offset / WORD_BYTES) as u32;
        mirror.index.extend(first..first + words as u32);
    }

    /// Writes the words' indices, and for a packet also their number.
    fn write_index(&mut self) -> Option<ScatteredWords> {
        let index = &self.stager.mirror.as_ref()?.index;
        let count = u32::try_from(index.len()).ok().filter(|&count| count > 0)?;
        let packet = self.copied.is_none() && Packet::fits(count, self.buffer.bytes());
        let end = match self.copied {
            Some(copied) => copied.buffer_from + self.parts.used - copied.from,
            None => index.len() as u64 * WORD_BYTES,
        };
        let start = if packet { Packet::INDEX_OFFSET } else { end.next_multiple_of(WORD_BYTES) };
        let mut write = |at: u64, bytes: &[u8]| {
            in_buffer(&mut self.buffer, at, bytes.len() as u64).copy_from_slice(bytes);
        };
        write(start, bytemuck::cast_slice(index));
        if packet {
            write(Packet::COUNT_OFFSET, bytemuck::bytes_of(&count));
        }
        Some(ScatteredWords { index_offset: start, count, packet })
    }
}

/// `bytes` bytes of a step's buffer, to be filled.
fn in_buffer(buffer: &mut StagingBuffer, offset: u64, bytes: u64) -> &mut [u8] {
    match buffer.range_mut(offset, bytes) {
        Ok(part) => part,
        Err(error) => unreachable!("a step keeps to its capacity, which its buffer has: {error}"),
    }
}

/// Bytes of `rows` rows of `width` entries; on overflow, more than any memory has.
fn rows_bytes(rows: usize, width: usize) -> u64 {
    (rows as u64).saturating_mul((width * size_of::<i32>()) as u64)
}

fn send_copy(
    view: &SubmittedView<'_>,
    span: DeviceSpan,
    copied: Option<Copied>,
    bytes: u64,
) -> Result<(), CopyError> {
    let Some(Copied { from, buffer_from }) = copied else { return Ok(()) };
    let destination = span.slice(from, bytes)?;
    view.copy_to_device(destination, buffer_from)
}
