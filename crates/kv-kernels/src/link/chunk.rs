//! Chunks in pinned host memory: `[kv, layer, token, row]`, to and from pages.

use std::ops::Range;

use cuda_driver::{DeviceError, DeviceSpan, OutOfBounds, PinnedBuffer, Stream, guard};
use kv_pool::Slot;
use smallvec::SmallVec;

use super::chunks::{Checked, ChunkWalk, ChunksPiece};
use super::decision::Decision;
use super::fragments::{fragment_bytes, push_fragments};
use super::host_order::{HostArrival, HostOrder, HostReady};
use super::two_hops::Carried;
use super::{HostDirection, HostLink, LayerEvents, Load, Transport, TransportError};
use crate::launch::{RawChunk, RawMapping, RawTransfer};
use crate::launcher::check_alive;
use crate::operand::check_array;
use crate::stored::{Named, check_named};
use crate::{Direction, KernelError, PagedKv, error::Operand};

/// What [`HostLink::transfer_chunk`] moves.
#[derive(Clone, Copy, Debug)]
pub struct HostTransfer<'a> {
    /// The pages.
    pub paged: &'a PagedKv,
    /// Pinned memory that holds the chunk, `[kv, layer, token, row]`, from `host_offset` on.
    pub host: &'a PinnedBuffer,
    /// Where the chunk begins in it, in bytes.
    pub host_offset: u64,
    /// One [`Slot`] for each token, on the device; at least `tokens` of them.
    pub slot_mapping: DeviceSpan,
    /// The same slots on the host: exactly `tokens`. [`Slot::NONE`] means "skip this token".
    pub host_slots: &'a [Slot],
    /// Tokens of the chunk.
    pub tokens: u64,
    /// How many of the first tokens stay untouched, at most `tokens`.
    pub skip_prefix_n_tokens: u64,
    /// Which way.
    pub direction: Direction,
    /// Blocks that are ready, the first of the paged memory; slots beyond them are refused.
    pub num_blocks: u64,
    /// Where to tell of each layer that has arrived. With it, rows travel layer by layer.
    pub layer_events: Option<&'a LayerEvents>,
}

/// Transfers of one call, checked.
type AllChecked<'a> = SmallVec<[Checked<'a>; 2]>;

/// Where the chunks' side of a piece lies.
#[derive(Clone, Copy, Debug)]
enum ChunkSide {
    /// In the chunks.
    Chunk,
    /// Window after window, from this address on.
    Packed(u64),
}

impl HostLink {
    /// Moves tokens between a chunk in pinned host memory and paged memory, by the cheapest transport
    /// of the profile; returns which.
    ///
    /// Tokens that are skipped, or whose slot is negative, are neither read nor written in pages, and
    /// not written in the chunk. The chunk's other tokens and the pages are as after
    /// [`KvKernels::multi_layer_transfer`](crate::KvKernels::multi_layer_transfer) over such a chunk.
    ///
    /// # Ordering
    /// One operation of `stream`; see [`HostLink`]. The mapping on the device is read when the kernel
    /// runs and must hold the same slots as the host's copy; the chunk, until then, must not change.
    /// Of a chunk that is written, bytes have arrived when an event recorded on `stream` after this call
    /// has completed, or the layer's event.
    ///
    /// # Errors
    /// [`TransportError`].
    #[track_caller]
    pub fn transfer_chunk(
        &mut self,
        stream: &Stream,
        transfer: HostTransfer<'_>,
    ) -> Result<Transport, TransportError> {
        let _site = cuda_driver::site::enter();
        let outcome = self.carry_all(stream, &[transfer], HostOrder::Strict);
        Ok(outcome.map_err(TransportError::of_one)?.0)
    }

    /// Moves several chunks of one direction, as [`transfer_chunk`](HostLink::transfer_chunk) moves
    /// each, in one sequence: the next chunk begins while the last is still on its way. Returns the
    /// transport of all.
    ///
    /// # Ordering
    /// One operation of `stream`, as of `transfer_chunk`.
    ///
    /// # Errors
    /// [`TransportError`]; [`TransportError::InSequence`] says which transfer was refused for its
    /// numbers, and none was enqueued then.
    #[track_caller]
    pub fn transfer_chunks(
        &mut self,
        stream: &Stream,
        transfers: &[HostTransfer<'_>],
    ) -> Result<Transport, TransportError> {
        let _site = cuda_driver::site::enter();
        Ok(self.carry_all(stream, transfers, HostOrder::Strict)?.0)
    }

    /// Starts to move chunks of one direction, as [`transfer_chunks`](HostLink::transfer_chunks) does,
    /// but holds the stream only for the pages' end; the arrival tells of the host's.
    ///
    /// Transfers that are started one after the other follow each other through the ring without a gap,
    /// also past other work of the stream. A single one is not sooner than with `transfer_chunks`.
    ///
    /// # Ordering
    /// * Pages are accessed as by one operation of `stream`: after what was enqueued there before, and
    ///   before what is enqueued there after.
    /// * To the host: the stream goes on as soon as the pages have been read, as far as the ring has
    ///   room, while bytes are still on their way. They have arrived when the arrival is complete, and
    ///   not when an event recorded on `stream` is.
    /// * From the host: bytes are fetched into the ring as soon as `ready` allows, while the stream's
    ///   earlier work still runs. The chunks must not change before the arrival is complete.
    ///
    /// Mappings are read by kernels of the stream, as ever. Nothing but the arrival orders accesses of
    /// the host's chunks: of a later transfer too, which takes [`HostReady::After`] it, or comes after
    /// a wait for its [fence](HostArrival::fence) on its stream. After an error, the stream waits for all that was enqueued.
    ///
    /// # Errors
    /// As of [`transfer_chunks`](HostLink::transfer_chunks), and for an event of another driver.
    #[track_caller]
    pub fn start_chunks(
        &mut self,
        stream: &Stream,
        ready: HostReady<'_>,
        transfers: &[HostTransfer<'_>],
    ) -> Result<HostArrival, TransportError> {
        let _site = cuda_driver::site::enter();
        self.fences.prepare(self.kernels.device(), 1)?;
        let carried = self.carry_all(stream, transfers, HostOrder::Started(ready))?;
        let direction = transfers.first().map(|first| first.direction.into());
        self.arrival(stream, direction.unwrap_or(HostDirection::ToPages), carried)
    }

    /// Checks everything, and then carries it; returns how, and how many bytes.
    fn carry_all(
        &mut self,
        stream: &Stream,
        transfers: &[HostTransfer<'_>],
        order: HostOrder<'_>,
    ) -> Result<(Transport, u64, Stream), TransportError> {
        let mut live = std::mem::take(&mut self.scratch.live);
        live.clear();
        let outcome = self.check_all(stream, transfers, &mut live).and_then(|checked| {
            let mut chunks = ChunkWalk::new(&checked, &live);
            let (load, direction) = (self.load(&chunks), chunks.direction());
            let decision = self.decide(self.question(direction, load, order));
            self.wait_for_unordered()?;
            self.carry(stream, &mut chunks, decision, order)
                .map_err(|error| self.rejoin(stream, direction, error))
                .map(|last| (decision.transport, load.bytes, last))
        });
        self.scratch.live = live;
        outcome
    }

    fn check_all<'a>(
        &self,
        stream: &Stream,
        transfers: &[HostTransfer<'a>],
        live: &mut Vec<Range<u64>>,
    ) -> Result<AllChecked<'a>, TransportError> {
        self.kernels.launcher().check_stream(stream)?;
        let mut all = AllChecked::new();
        for (index, transfer) in transfers.iter().enumerate() {
            let checked = self.checked(stream, *transfer, live);
            all.push(checked.map_err(|error| error.in_sequence(index))?);
        }
        let direction = all.first().map(|first| first.direction);
        if let Some(index) = all.iter().position(|next| Some(next.direction) != direction) {
            return Err(TransportError::Directions { index });
        }
        match direction {
            Some(HostDirection::ToHost) if all.len() > 1 => {
                guard!("kernels.sequence-chunks-apart", check_apart(&all)?);
            }
            Some(HostDirection::ToPages) => {
                guard!("kernels.sequence-slots-apart", check_slots_apart(&all)?);
            }
            _ => {}
        }
        Ok(all)
    }

    fn checked<'a>(
        &self,
        stream: &Stream,
        transfer: HostTransfer<'a>,
        live: &mut Vec<Range<u64>>,
    ) -> Result<Checked<'a>, TransportError> {
        let HostTransfer { paged, host, host_offset, tokens, layer_events, .. } = transfer;
        self.kernels.launcher().check_paged(paged, transfer.num_blocks)?;
        let device = host.device_address_on(stream)?;
        self.kernels.launcher().check_device("pinned memory", host.device())?;
        let shape = paged.shape();
        let skip_prefix_n_tokens = transfer.skip_prefix_n_tokens;
        if skip_prefix_n_tokens > tokens {
            return Err(KernelError::Skip { skip_prefix_n_tokens, tokens }.into());
        }
        let bytes = tokens.checked_mul(shape.token_bytes());
        let outside = OutOfBounds {
            offset: host_offset,
            bytes: bytes.unwrap_or(u64::MAX),
            capacity: host.bytes(),
        };
        let bytes = bytes.ok_or(TransportError::HostRange(outside))?;
        host.span(host_offset, bytes).map_err(TransportError::HostRange)?;
        check_array(Operand::SlotMapping, transfer.slot_mapping, tokens, size_of::<Slot>() as u64)
            .map_err(KernelError::from)?;
        check_alive(transfer.slot_mapping)?;
        if let Some(events) = layer_events.filter(|events| events.layers() != shape.layers()) {
            let (events, layers) = (events.layers(), shape.layers());
            return Err(TransportError::LayerEvents { events, layers });
        }
        let slots = transfer.num_blocks * u64::from(shape.block_tokens());
        let first = live.len();
        find_live(&transfer, slots, live)?;
        Ok(Checked {
            transfer,
            live: first..live.len(),
            direction: transfer.direction.into(),
            host: host.host_address() + host_offset,
            device: device + host_offset,
        })
    }

    fn load(&self, chunks: &ChunkWalk<'_>) -> Load {
        let mut load = Load {
            bytes: 0,
            fragment_bytes: u64::MAX,
            window_bytes: u64::MAX,
            ring_buffer_bytes: self.ring_buffer_bytes(),
            ring_buffers: self.options.ring_buffers,
        };
        for index in 0..chunks.all.len() {
            let rows = chunks.rows(index);
            let bytes = rows.bytes();
            if bytes == 0 {
                continue;
            }
            load.bytes += bytes;
            let fragment = fragment_bytes(chunks.all[index].transfer.paged);
            load.fragment_bytes = load.fragment_bytes.min(fragment);
            load.window_bytes = load.window_bytes.min(rows.window_bytes());
            if rows.row_bytes > self.ring_buffer_bytes() {
                load.ring_buffer_bytes = 0;
            }
        }
        load
    }

    fn carry(
        &mut self,
        stream: &Stream,
        chunks: &mut ChunkWalk<'_>,
        decision: Decision,
        order: HostOrder<'_>,
    ) -> Result<Stream, TransportError> {
        // Layers of which nothing moves have arrived.
        for empty in chunks.all.iter().filter(|checked| checked.live.is_empty()) {
            if let Some(events) = empty.transfer.layer_events {
                events.record(stream, 0, events.layers().into())?;
            }
        }
        let moves = chunks.bytes_left().0 > 0;
        if decision.transport == Transport::TwoHop && moves {
            return self.carry_in_two_hops(stream, chunks, decision.pace, order);
        }
        self.in_stream(stream, order, |link| match decision.transport {
            Transport::CopyEngine => link.carry_by_engine(stream, chunks),
            Transport::DirectKernel | Transport::TwoHop => link.carry_directly(stream, chunks),
        })
    }

    /// Bytes of a piece where nothing but the caller asks for pieces: a layer at least where layers are
    /// told of.
    fn piece_bytes(&self, chunks: &ChunkWalk<'_>) -> u64 {
        let most =
            if self.options.launch_bytes == 0 { u64::MAX } else { self.options.launch_bytes };
        match chunks.all.get(chunks.now) {
            Some(checked) if checked.transfer.layer_events.is_some() => {
                let rows = chunks.rows(chunks.now);
                most.min((rows.bytes() / rows.layers).max(1))
            }
            _ => most,
        }
    }

    fn carry_directly(
        &self,
        stream: &Stream,
        chunks: &mut ChunkWalk<'_>,
    ) -> Result<(), TransportError> {
        while let Some(piece) = chunks.take_piece(self.piece_bytes(chunks)) {
            // SAFETY: every row of a chunk lies in its pinned buffer (`checked`), which is not freed
            // before the device has finished (a drop only retires it), and which hands out no references
            // to its bytes except where the caller rules out device access (`slice_mut`).
            unsafe { self.launch(stream, chunks, &piece, ChunkSide::Chunk) }?;
            chunks.note_layers(stream, &piece)?;
        }
        Ok(())
    }

    fn carry_by_engine(
        &mut self,
        stream: &Stream,
        chunks: &mut ChunkWalk<'_>,
    ) -> Result<(), TransportError> {
        let mut copies = std::mem::take(&mut self.scratch.copies);
        let mut outcome = Ok(());
        while let Some(piece) = chunks.take_piece(self.piece_bytes(chunks))
            && outcome.is_ok()
        {
            copies.clear();
            for part in &piece.parts {
                let checked = &chunks.all[part.index];
                push_fragments(&checked.transfer, checked.host, &part.windows, &mut copies);
            }
            // SAFETY: rows of chunks lie in their pinned buffers (`checked`), as for a direct launch;
            // rows of slots below `num_blocks` lie in the pages (invariant of `PagedKv`).
            outcome = unsafe { self.copy_all(stream, chunks.direction(), &copies) }
                .and_then(|()| Ok(chunks.note_layers(stream, &piece)?));
        }
        self.scratch.copies = copies;
        outcome
    }

    /// Launches the transfer of a piece.
    ///
    /// # Safety
    /// - as of `multi_layer_transfer_raw`, of the rows of the piece.
    unsafe fn launch(
        &self,
        stream: &Stream,
        chunks: &ChunkWalk<'_>,
        piece: &ChunksPiece,
        place: ChunkSide,
    ) -> Result<(), TransportError> {
        let mut packed = 0;
        let mut raw: SmallVec<[RawChunk; 2]> = SmallVec::new();
        for part in &piece.parts {
            let checked = &chunks.all[part.index];
            let HostTransfer { paged, slot_mapping, tokens, .. } = checked.transfer;
            let row_bytes = paged.shape().row_bytes();
            for window in &part.windows {
                let address = match place {
                    ChunkSide::Chunk => checked.device,
                    // Row 0 of a window that lies packed would lie before it.
                    ChunkSide::Packed(slot) => {
                        (slot + packed).wrapping_sub(window.start * row_bytes)
                    }
                };
                packed += (window.end - window.start) * row_bytes;
                raw.push(RawChunk {
                    address,
                    mapping: RawMapping::Slots(slot_mapping.address()),
                    tokens,
                    skip_prefix_n_tokens: checked.transfer.skip_prefix_n_tokens,
                    rows: window.clone(),
                });
            }
        }
        let Some(first) = piece.parts.first() else { return Ok(()) };
        let HostTransfer { paged, direction, num_blocks, .. } = chunks.all[first.index].transfer;
        let transfer = RawTransfer {
            paged,
            chunks: &raw,
            layers: 0..paged.shape().layers(),
            direction,
            num_blocks,
            limits: self.limits(),
            report: None,
        };
        // SAFETY: the caller's promise of the rows; each mapping has its `tokens` slots (`checked`), and
        // the chunks of a piece are of the same pages (`Chunks::share`). That chunks and pages do not
        // overlap follows from their being of different memories.
        Ok(unsafe { self.kernels.transfers().launch(self.kernels.launcher(), stream, &transfer) }?)
    }
}

impl Carried for ChunkWalk<'_> {
    type Piece = ChunksPiece;

    fn direction(&self) -> HostDirection {
        self.all.first().map_or(HostDirection::ToHost, |first| first.direction)
    }

    fn bytes_left(&self) -> (u64, u64) {
        ChunkWalk::bytes_left(self)
    }

    fn take(&mut self, budget: u64) -> Option<(ChunksPiece, u64)> {
        let piece = self.take_piece(budget)?;
        let bytes = piece.bytes;
        Some((piece, bytes))
    }

    fn walk(
        &self,
        link: &HostLink,
        stream: &Stream,
        piece: &ChunksPiece,
        slot: u64,
    ) -> Result<(), TransportError> {
        // SAFETY: the windows of a piece fit in a slot, one after the other: its budget is at most a
        // slot, and a row fits (`HostLink::decide`, of a load without a slot).
        unsafe { link.launch(stream, self, piece, ChunkSide::Packed(slot)) }
    }

    /// Copies the windows of a piece between the chunks and a slot, where they lie one after the other.
    fn copy(
        &self,
        link: &HostLink,
        copies: &Stream,
        piece: &ChunksPiece,
        slot: u64,
    ) -> Result<(), TransportError> {
        let copies = copies.raw();
        let mut at = slot;
        for part in &piece.parts {
            let checked = &self.all[part.index];
            let row_bytes = checked.transfer.paged.shape().row_bytes();
            for window in &part.windows {
                let bytes = (window.end - window.start) * row_bytes;
                let host = checked.host + window.start * row_bytes;
                link.device().run(|driver| match checked.direction {
                    // SAFETY: the window lies in the pinned buffer (`checked`), of which the same holds
                    // as for a direct launch; the slot is device memory of the link, and long enough
                    // (`walk`); the stream is live.
                    HostDirection::ToHost => unsafe {
                        driver.memcpy_dtoh_async(host, at, bytes, copies)
                    },
                    // SAFETY: likewise.
                    HostDirection::ToPages => unsafe {
                        driver.memcpy_htod_async(at, host, bytes, copies)
                    },
                })?;
                at += bytes;
            }
        }
        Ok(())
    }

    fn arrived(&self, stream: &Stream, piece: &ChunksPiece) -> Result<(), DeviceError> {
        self.note_layers(stream, piece)
    }
}

/// Checks that no two chunks that are written share a byte.
fn check_apart(all: &[Checked<'_>]) -> Result<(), TransportError> {
    let extent = |index: usize| {
        let Checked { transfer, host, .. } = &all[index];
        *host..*host + transfer.tokens * transfer.paged.shape().token_bytes()
    };
    let mut places: SmallVec<[usize; 8]> = (0..all.len()).collect();
    places.retain(|index| !extent(*index).is_empty());
    places.sort_by_key(|&index| extent(index).start);
    match places.windows(2).find(|two| extent(two[0]).end > extent(two[1]).start) {
        Some(two) => Err(TransportError::ChunksOverlap {
            first: two[0].min(two[1]),
            second: two[0].max(two[1]),
        }),
        None => Ok(()),
    }
}

/// Checks that no two tokens are stored to one slot of the same pages.
fn check_slots_apart(all: &[Checked<'_>]) -> Result<(), KernelError> {
    let pages = |checked: &Checked<'_>| {
        checked.transfer.paged.tensors().first().map_or(0, |tensor| tensor.address())
    };
    for (index, first) in all.iter().enumerate() {
        if all[..index].iter().any(|earlier| pages(earlier) == pages(first)) {
            continue;
        }
        let mut slots = 0;
        let named: SmallVec<[Named<'_>; 4]> = all
            .iter()
            .map(|other| {
                let HostTransfer { paged, num_blocks, host_slots, .. } = other.transfer;
                if pages(other) != pages(first) {
                    return Named::Slots { skip: 0, slots: &[] };
                }
                slots = slots.max(num_blocks * u64::from(paged.shape().block_tokens()));
                Named::Slots { skip: other.transfer.skip_prefix_n_tokens, slots: host_slots }
            })
            .collect();
        check_named(slots, &named, true)?;
    }
    Ok(())
}

/// Checks the slots, and finds the runs of tokens that move.
fn find_live(
    transfer: &HostTransfer<'_>,
    slots: u64,
    live: &mut Vec<Range<u64>>,
) -> Result<(), KernelError> {
    let HostTransfer { host_slots, tokens, skip_prefix_n_tokens, .. } = *transfer;
    if host_slots.len() as u64 != tokens {
        return Err(KernelError::SlotCount { slots: host_slots.len() as u64, tokens });
    }
    let first = live.len();
    // The skip is at most the length.
    for (token, &slot) in (skip_prefix_n_tokens..).zip(&host_slots[skip_prefix_n_tokens as usize..])
    {
        let Some(place) = slot.place() else { continue };
        if place >= slots {
            return Err(KernelError::SlotOutOfRange { token, slot, slots });
        }
        match live[first..].last_mut() {
            Some(run) if run.end == token => run.end += 1,
            _ => live.push(token..token + 1),
        }
    }
    Ok(())
}
