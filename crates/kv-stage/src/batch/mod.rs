//! A step's batch on the device, at addresses that stay.

mod buffers;
mod kernel;
mod options;
mod packet;
mod reference;
mod step;

use cuda_driver::{CopyError, DeviceError, Event, Stream, guard};

use crate::error::{AcquireError, BatchError, StagingError};
use crate::{Row, StagingBuffer, StagingPool, TableEntry};
use buffers::Memory;
pub use buffers::{BatchBuffers, TableBuffers};
use kernel::Gather;
pub use options::{BatchOptions, BatchTable};
use packet::{Edit, Records};
pub use reference::references;
pub use step::{BatchLength, BatchStep, RowStates, StagedBatch};

/// The batch of each step on one device: block tables, slots, positions and lengths, in buffers whose
/// addresses never change.
///
/// The block tables of all rows lie on the device. A step sends what changed in them, its rows and the
/// arrays of the engine, in one copy. One launch then applies the changes and makes the batch, with
/// padding behind it. So CUDA graphs that were captured over the buffers read each step's values when
/// they are replayed, and the launch itself may be a part of a graph
/// ([`submit_inputs`](BatchStep::submit_inputs)).
///
/// # Tokens that may be rejected
/// A step may be staged before it is known how many tokens of the step before stand, because drafts may
/// be rejected. The device then computes where a row's tokens begin: where those of its last step
/// began, and behind so many of these as [`accepted`](BatchBuffers::accepted) says. That array has an
/// entry for each *row*, and [`rows`](BatchBuffers::rows) names the row of each sequence of the batch.
///
/// * Each step's gather sets the entries of its rows to their numbers of tokens: all of them stand.
/// * The engine's sampler lowers the entries of rows with rejected drafts: to the number of tokens whose
///   KV is right. For one sampled token and `k` accepted drafts that is `1 + k`. It does so on
///   the batch's stream, or ordered by events, before the gather of the row's next step.
/// * Nothing needs to be reset.
///
/// The start is kept between `resolved` and `upper`, so that a wrong count leads to no slot outside
/// the row's blocks. Where `resolved` is `upper`, no count is used.
///
/// # Several streams
/// Every step goes through the same buffers in the order of one stream, the first that a step was begun
/// with. Steps that overlap on two streams have a batch each (lanes), which has its own tables: each change
/// goes to both. A row whose start is open is staged in the batch of its last step.
#[derive(Debug)]
pub struct DeviceBatch {
    options: BatchOptions,
    pool: StagingPool,
    gather: Gather,
    memory: Memory,
    /// The stream of the steps, from the first on.
    stream: Option<Stream>,
    /// Number of the last step that was sent.
    number: u64,
    /// Changes that the device does not have yet, in order, and their ids one after the other.
    edits: Vec<Edit>,
    ids: Vec<TableEntry>,
    records: Records,
    lengths: Vec<BatchLength>,
    /// Tokens that a row has blocks for in every table.
    row_tokens: u64,
}

impl DeviceBatch {
    /// Allocates the memory of a batch on the pool's device. All buffers hold padding.
    ///
    /// A pool with buffers of [`BatchOptions::buffer_bytes`] bytes, one more than steps are in
    /// flight, serves every step.
    ///
    /// # Ordering
    /// Waits for the device.
    ///
    /// # Errors
    /// [`StagingError::Batch`] for a size that is 0 or too large, also for the pool's buffers;
    /// [`StagingError::HostMemory`], [`StagingError::Device`] without enough memory;
    /// [`StagingError::Kernel`].
    #[track_caller]
    pub fn new(pool: &StagingPool, options: BatchOptions) -> Result<Self, StagingError> {
        let _site = cuda_driver::site::enter();
        Self::with_ptx(pool, options, kernel::PTX)
    }

    /// Like [`new`](Self::new), with a kernel from other PTX. Tests break the kernel in this way, to check
    /// that they would detect it.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_with_ptx(
        pool: &StagingPool,
        options: BatchOptions,
        ptx: &str,
    ) -> Result<Self, StagingError> {
        Self::with_ptx(pool, options, ptx)
    }

    fn with_ptx(
        pool: &StagingPool,
        options: BatchOptions,
        ptx: &str,
    ) -> Result<Self, StagingError> {
        options.check()?;
        let (value, most) = (options.buffer_bytes(), pool.buffer_bytes());
        if value > most {
            return Err(StagingError::Batch { what: "bytes in a packet", value, most });
        }
        let records = Records::new(&options)?;
        let stream = Stream::new(pool.device())?;
        let memory = Memory::new(&stream, &options)?;
        let gather = Gather::load(pool.device(), ptx, &options, &memory)?;
        gather.launch(&stream)?;
        stream.synchronize()?;
        let row_tokens = options.tables.iter().map(BatchOptions::row_tokens).min();
        let ids = (options.edit_room_bytes() / 4) as usize;
        Ok(Self {
            pool: pool.clone(),
            gather,
            memory,
            stream: None,
            number: 0,
            edits: Vec::with_capacity(ids / 4),
            ids: Vec::with_capacity(ids),
            records,
            lengths: Vec::with_capacity(options.sequences_max as usize),
            row_tokens: row_tokens.unwrap_or(0),
            options,
        })
    }

    /// The sizes.
    #[must_use]
    pub fn options(&self) -> &BatchOptions {
        &self.options
    }

    /// Where the batch is: for kernels enqueued between two submits, and for graphs.
    #[must_use]
    pub fn buffers(&self) -> &BatchBuffers {
        &self.memory.buffers
    }

    /// Changes the entries of a row from `first` on, as of the next step.
    ///
    /// `table` is the place in [`BatchOptions::tables`]. Changes apply in the order of the calls.
    /// Until a step has sent them, they wait on the host: a step that was refused is begun again without
    /// repeating its changes. At most twice as many ids wait as the batch's tables have entries: twice the
    /// rows, times the sum of the tables' widths.
    ///
    /// # Errors
    /// [`BatchError::Table`], [`BatchError::Row`], [`BatchError::Columns`]; [`BatchError::Backlog`] where more
    /// than twice as many ids as the tables have entries, in all rows, would wait for a step. Nothing is
    /// changed then; after a backlog, [`forget_edits`](Self::forget_edits) and the whole tables go on.
    pub fn edit(
        &mut self,
        table: usize,
        row: Row,
        first: u32,
        ids: &[TableEntry],
    ) -> Result<(), BatchError> {
        let tables = self.options.tables.len();
        let width = match self.options.tables.get(table) {
            Some(table) => table.width,
            None => return Err(BatchError::Table { table, tables }),
        };
        if row.index() as u32 >= self.options.rows {
            return Err(BatchError::Row { row, rows: self.options.rows });
        }
        let room = width.saturating_sub(first) as usize;
        let fits = ids.len() <= room && first <= width;
        if !guard!("stage.changes-lie-in-rows", fits, else true) {
            return Err(BatchError::Columns { row, first, count: ids.len(), width });
        }
        if ids.is_empty() {
            return Ok(());
        }
        let waiting = (self.ids.len() + ids.len()) as u64;
        let max = self.options.pending_max();
        if guard!("stage.changes-are-bounded", waiting > max, else false) {
            return Err(BatchError::Backlog { ids: waiting, max });
        }
        let (row, count) = (row.index() as u32, ids.len() as u32);
        self.edits.push(Edit { table: table as u32, row, first, count });
        self.ids.extend_from_slice(ids);
        Ok(())
    }

    /// Forgets the changes that no step has sent yet, for a caller who writes the whole tables instead.
    pub fn forget_edits(&mut self) {
        self.edits.clear();
        self.ids.clear();
    }

    /// Begins a step on `stream`, with a staging buffer of its own. Changes that do not fit in it are
    /// sent at once, before the step.
    ///
    /// # Errors
    /// [`BatchError::Acquire`] with [`AcquireError::Exhausted`] if the device is as far behind as the
    /// pool allows; [`BatchError::OtherStream`], [`BatchError::OtherDevice`]; like
    /// [`BatchStep::submit`].
    #[track_caller]
    pub fn step(&mut self, stream: &Stream) -> Result<BatchStep<'_>, BatchError> {
        let _site = cuda_driver::site::enter();
        self.begin(stream, StagingPool::acquire)
    }

    /// Like [`step`](Self::step), but waits for the oldest submitted buffer if none is free.
    ///
    /// # Ordering
    /// May wait on the host, see [`StagingPool::acquire_wait`].
    ///
    /// # Errors
    /// Like `step`.
    #[track_caller]
    pub fn step_wait(&mut self, stream: &Stream) -> Result<BatchStep<'_>, BatchError> {
        let _site = cuda_driver::site::enter();
        self.begin(stream, StagingPool::acquire_wait)
    }

    /// Enqueues the launch that makes the batch from the step's inputs, for a stream that captures a
    /// graph. [`BatchStep::submit`] has enqueued it already; a step that is gathered again gives the same
    /// batch.
    ///
    /// # Ordering
    /// Reads the inputs that were copied before it in the order of the streams. A graph that holds the
    /// launch is replayed only while the batch lives.
    ///
    /// # Errors
    /// The driver's error.
    #[track_caller]
    pub fn gather(&self, stream: &Stream) -> Result<(), DeviceError> {
        let _site = cuda_driver::site::enter();
        self.gather.launch_plainly(stream)
    }

    /// Begins later steps on `stream`, which first waits for all work of the stream before.
    ///
    /// # Errors
    /// [`BatchError::OtherDevice`], [`BatchError::Device`]. The batch then keeps its stream.
    #[track_caller]
    pub fn rebind(&mut self, stream: &Stream) -> Result<(), BatchError> {
        let _site = cuda_driver::site::enter();
        self.check_device(stream)?;
        if let Some(bound) = &self.stream {
            let event = Event::new(bound.device())?;
            event.record(bound)?;
            guard!("stage.rebinding-waits", stream.wait(&event)?);
        }
        self.stream = guard!(
            "stage.first-binding-stays",
            Some(stream.clone()),
            else self.stream.take().map(|_| stream.clone())
        );
        Ok(())
    }

    fn begin(
        &mut self,
        stream: &Stream,
        acquire: fn(&StagingPool) -> Result<StagingBuffer, AcquireError>,
    ) -> Result<BatchStep<'_>, BatchError> {
        self.check_stream(stream)?;
        let used = self.options.header_bytes();
        let buffer = acquire(&self.pool);
        if guard!("stage.refused-steps-bind-nothing", buffer.is_ok(), else true) {
            self.stream = Some(stream.clone());
        }
        let mut buffer = buffer?;
        while guard!("stage.long-changes-go-first", self.taken().0 < self.edits.len(), else false) {
            self.records.clear(&self.options);
            self.send(buffer, used, true)?;
            buffer = acquire(&self.pool)?;
        }
        self.records.clear(&self.options);
        self.lengths.clear();
        Ok(BatchStep { batch: self, buffer, used })
    }

    /// How many of the waiting edits, and of their ids, one packet has room for.
    fn taken(&self) -> (usize, usize) {
        let mut room = self.options.edit_room_bytes();
        let mut ids = 0;
        for (number, edit) in self.edits.iter().enumerate() {
            match room.checked_sub(self.options.edit_bytes(edit.count)) {
                Some(left) => room = left,
                None => return (number, ids),
            }
            ids += edit.count as usize;
        }
        (self.edits.len(), ids)
    }

    /// Enqueues the step in `records`, whose arrays end at `used`, with the edits that have room.
    fn send(
        &mut self,
        mut buffer: StagingBuffer,
        used: u64,
        gathers: bool,
    ) -> Result<u64, BatchError> {
        let (edits, ids) = self.taken();
        let changes = (&self.edits[..edits], &self.ids[..ids]);
        let tables = self.options.tables.len();
        // A step that was not sent keeps its number, for it may have been sent after all.
        let number = self.number + 1;
        let bytes = self.records.write(&mut buffer, number, used, tables, changes);
        let Some(stream) = &self.stream else { unreachable!("`begin` binds it") };
        let packet = self.memory.packet.span().slice(0, bytes).map_err(CopyError::from)?;
        // The context is looked up once for all calls.
        let sent = stream.device().while_current(|| -> Result<(), BatchError> {
            // The copy overwrites the packet of the step before after that was read: one stream.
            buffer.submit(stream, |view| view.copy_to_device(packet, 0))?;
            if gathers {
                self.gather.launch(stream)?;
            }
            Ok(())
        });
        let sent = sent.map_err(BatchError::from).and_then(|sent| sent);
        if guard!("stage.refused-changes-stay", sent.is_ok(), else true) {
            self.number = number;
            self.edits.drain(..edits);
            self.ids.drain(..ids);
        }
        sent.map(|()| bytes)
    }

    /// Refuses a stream that the batch cannot be bound to, or is not.
    fn check_stream(&self, stream: &Stream) -> Result<(), BatchError> {
        self.check_device(stream)?;
        let given = stream.raw();
        let is_other = |bound: &&Stream| bound.raw() != given;
        let other = self.stream.as_ref().filter(is_other);
        match guard!("stage.batches-keep-streams", other, else None) {
            Some(bound) => Err(BatchError::OtherStream { bound: bound.raw(), given }),
            None => Ok(()),
        }
    }

    fn check_device(&self, stream: &Stream) -> Result<(), BatchError> {
        let (batch, stream) = (self.pool.device(), stream.device());
        if guard!("stage.batches-keep-devices", stream != batch, else false) {
            let (batch, stream) = (batch.ordinal(), stream.ordinal());
            return Err(BatchError::OtherDevice { batch, stream });
        }
        Ok(())
    }
}
