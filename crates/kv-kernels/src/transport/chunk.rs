//! Chunks in pinned host memory: `[kv, layer, token, row]`, to and from pages.

use std::ops::Range;

use cuda_driver::{DeviceSpan, OutOfBounds, PinnedBuffer, Stream};

use super::fragments::{fragment_bytes, push_fragments};
use super::pieces::{Order, Piece, Rows};
use super::{HostDirection, HostLink, LayerEvents, Load, Transport, TransportError};
use crate::launch::{RawChunk, RawMapping, RawTransfer};
use crate::operand::check_array;
use crate::{Direction, KernelError, Operand, PagedKv};

/// What [`HostLink::transfer_chunk`] moves.
#[derive(Clone, Copy, Debug)]
pub struct HostTransfer<'a> {
    /// The pages.
    pub paged: &'a PagedKv,
    /// Pinned memory that holds the chunk, `[kv, layer, token, row]`, from `host_offset` on.
    pub host: &'a PinnedBuffer,
    /// Where the chunk begins in it, in bytes.
    pub host_offset: u64,
    /// One slot (`i64`) for each token, on the device; at least `tokens` of them.
    pub slot_mapping: DeviceSpan,
    /// The same slots on the host: exactly `tokens`. A negative slot means "skip this token".
    pub host_slots: &'a [i64],
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

/// What a transfer is, once it has been checked.
struct Checked<'a> {
    transfer: HostTransfer<'a>,
    rows: Rows<'a>,
    direction: HostDirection,
    /// Where the chunk begins, by host and by device address.
    host: u64,
    device: u64,
}

/// Where the chunk's side of a piece lies.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// In the chunk.
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
    pub fn transfer_chunk(
        &mut self,
        stream: &Stream,
        transfer: HostTransfer<'_>,
    ) -> Result<Transport, TransportError> {
        let mut live = std::mem::take(&mut self.scratch.live);
        let outcome = self.checked(stream, transfer, &mut live).and_then(|checked| {
            let transport = self.transport_of(&checked);
            self.carry(stream, &checked, transport)
                .inspect_err(|_| self.rejoin(stream))
                .map(|()| transport)
        });
        self.scratch.live = live;
        outcome
    }

    fn checked<'a>(
        &self,
        stream: &Stream,
        transfer: HostTransfer<'a>,
        live: &'a mut Vec<Range<u64>>,
    ) -> Result<Checked<'a>, TransportError> {
        let HostTransfer { paged, host, host_offset, tokens, layer_events, .. } = transfer;
        self.kernels.check_stream(stream)?;
        self.kernels.check_paged(paged, transfer.num_blocks)?;
        self.kernels.check_device("pinned memory", host.device())?;
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
        check_array(Operand::SlotMapping, transfer.slot_mapping, tokens, size_of::<i64>() as u64)
            .map_err(KernelError::from)?;
        if let Some(events) = layer_events.filter(|events| events.layers() != shape.layers()) {
            let (events, layers) = (events.layers(), shape.layers());
            return Err(TransportError::LayerEvents { events, layers });
        }
        let slots = transfer.num_blocks * u64::from(shape.block_tokens());
        find_live(&transfer, slots, live)?;
        let order = if layer_events.is_some() { Order::ByLayer } else { Order::AsTheyLie };
        Ok(Checked {
            transfer,
            rows: Rows {
                layers: shape.layers().into(),
                kv_count: shape.kv_count().into(),
                tokens,
                row_bytes: shape.row_bytes(),
                live,
                order,
            },
            direction: transfer.direction.into(),
            host: host.host_address() + host_offset,
            device: host.device_address() + host_offset,
        })
    }

    fn load(&self, checked: &Checked<'_>) -> Load {
        let rows = &checked.rows;
        let fits = rows.row_bytes <= self.slot_bytes();
        Load {
            bytes: rows.bytes(),
            fragment_bytes: fragment_bytes(checked.transfer.paged),
            window_bytes: rows.window_bytes(),
            slot_bytes: if fits { self.slot_bytes() } else { 0 },
            slots: self.options.ring_slots,
        }
    }

    fn transport_of(&self, checked: &Checked<'_>) -> Transport {
        let load = self.load(checked);
        match self.profile.choose(checked.direction, load) {
            Transport::TwoHop if load.slot_bytes == 0 => Transport::DirectKernel,
            transport => transport,
        }
    }

    fn carry(
        &mut self,
        stream: &Stream,
        checked: &Checked<'_>,
        transport: Transport,
    ) -> Result<(), TransportError> {
        if checked.rows.live.is_empty() {
            return self.note_layers(stream, checked, 0, checked.rows.layers);
        }
        match transport {
            Transport::DirectKernel => self.carry_directly(stream, checked),
            Transport::CopyEngine => self.carry_by_engine(stream, checked),
            Transport::TwoHop => self.carry_by_two_hops(stream, checked),
        }
    }

    /// Bytes of a piece where nothing but the caller asks for pieces: a layer at least where layers are
    /// told of.
    fn piece_bytes(&self, rows: &Rows<'_>) -> u64 {
        let most =
            if self.options.launch_bytes == 0 { u64::MAX } else { self.options.launch_bytes };
        match rows.order {
            Order::AsTheyLie => most,
            Order::ByLayer => most.min((rows.bytes() / rows.layers).max(1)),
        }
    }

    fn carry_directly(&self, stream: &Stream, checked: &Checked<'_>) -> Result<(), TransportError> {
        let mut pieces = checked.rows.pieces();
        let mut told = 0;
        while let Some(piece) = pieces.take(self.piece_bytes(&checked.rows)) {
            // SAFETY: every row of the chunk lies in the pinned buffer (`checked`), which is not freed
            // before the device has finished (a drop only retires it), and which hands out no references
            // to its bytes except where the caller rules out device access (`slice_mut`).
            unsafe { self.launch(stream, checked, &piece, Place::Chunk) }?;
            self.note_layers(stream, checked, told, piece.layers_done)?;
            told = piece.layers_done;
        }
        Ok(())
    }

    fn carry_by_engine(
        &mut self,
        stream: &Stream,
        checked: &Checked<'_>,
    ) -> Result<(), TransportError> {
        let mut copies = std::mem::take(&mut self.scratch.copies);
        let mut pieces = checked.rows.pieces();
        let mut outcome = Ok(());
        let mut told = 0;
        while let Some(piece) = pieces.take(self.piece_bytes(&checked.rows))
            && outcome.is_ok()
        {
            copies.clear();
            push_fragments(&checked.transfer, checked.host, &piece, &mut copies);
            // SAFETY: rows of the chunk lie in the pinned buffer (`checked`), as for a direct launch;
            // rows of slots below `num_blocks` lie in the pages (invariant of `PagedKv`).
            outcome = unsafe { self.copy_all(stream, checked.direction, &copies) }
                .and_then(|()| self.note_layers(stream, checked, told, piece.layers_done));
            told = piece.layers_done;
        }
        self.scratch.copies = copies;
        outcome
    }

    fn carry_by_two_hops(
        &mut self,
        stream: &Stream,
        checked: &Checked<'_>,
    ) -> Result<(), TransportError> {
        let to_host = checked.direction == HostDirection::ToHost;
        let costs = self.profile.costs(checked.direction);
        let slot_bytes = self.slot_bytes();
        // Forced where the profile knows of no engine, pieces are as long as slots.
        let taper = costs.plan(checked.direction, self.load(checked)).map(|(taper, _)| taper);
        let Some(mut ring) = self.ring.take() else { return Ok(()) };
        let outcome = (|| {
            if !to_host {
                self.fork.record(stream)?;
                self.copies.wait(&self.fork)?;
            }
            let mut pieces = checked.rows.pieces();
            let (mut before, mut told) = (0, 0);
            loop {
                let left = pieces.bytes_left();
                let budget = taper.map_or(slot_bytes, |taper| taper.next(before, left));
                let Some(piece) = pieces.take(budget) else { break };
                before = piece.bytes;
                let turn = ring.turn();
                let (filler, emptier) =
                    if to_host { (stream, &self.copies) } else { (&self.copies, stream) };
                turn.wait_until_empty(filler)?;
                let slot = turn.address;
                if to_host {
                    // SAFETY: the windows of a piece fit in a slot, one after the other: its budget is
                    // at most a slot, and a row fits (`transport_of`).
                    unsafe { self.launch(stream, checked, &piece, Place::Packed(slot)) }?;
                    turn.hand_over(filler, emptier)?;
                    self.copy_windows(checked, &piece, slot)?;
                } else {
                    self.copy_windows(checked, &piece, slot)?;
                    turn.hand_over(filler, emptier)?;
                    // SAFETY: as above.
                    unsafe { self.launch(stream, checked, &piece, Place::Packed(slot)) }?;
                }
                turn.emptied(emptier)?;
                self.note_layers(emptier, checked, told, piece.layers_done)?;
                told = piece.layers_done;
            }
            if to_host {
                self.join.record(&self.copies)?;
                stream.wait(&self.join)?;
            }
            Ok(())
        })();
        self.ring = Some(ring);
        outcome
    }

    /// Copies the windows of a piece between the chunk and a slot, where they lie one after the other.
    fn copy_windows(
        &self,
        checked: &Checked<'_>,
        piece: &Piece,
        slot: u64,
    ) -> Result<(), TransportError> {
        let row_bytes = checked.rows.row_bytes;
        let copies = self.copies.raw();
        let mut at = slot;
        for window in &piece.windows {
            let bytes = (window.end - window.start) * row_bytes;
            let host = checked.host + window.start * row_bytes;
            self.device().run(|driver| match checked.direction {
                // SAFETY: the window lies in the pinned buffer (`checked`), of which the same holds as
                // for a direct launch; the slot is device memory of this link; the stream is live.
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
        Ok(())
    }

    /// Launches the transfer of a piece.
    ///
    /// # Safety
    /// - as of `multi_layer_transfer_raw`, of the rows of the piece.
    unsafe fn launch(
        &self,
        stream: &Stream,
        checked: &Checked<'_>,
        piece: &Piece,
        place: Place,
    ) -> Result<(), TransportError> {
        let HostTransfer { paged, slot_mapping, tokens, .. } = checked.transfer;
        let mut packed = 0;
        let chunks: smallvec::SmallVec<[RawChunk; 2]> = piece
            .windows
            .iter()
            .map(|window| {
                let row_bytes = checked.rows.row_bytes;
                let address = match place {
                    Place::Chunk => checked.device,
                    // Row 0 of a window that lies packed would lie before it.
                    Place::Packed(slot) => (slot + packed).wrapping_sub(window.start * row_bytes),
                };
                packed += (window.end - window.start) * row_bytes;
                RawChunk {
                    address,
                    mapping: RawMapping::Slots(slot_mapping.address()),
                    tokens,
                    skip_prefix_n_tokens: checked.transfer.skip_prefix_n_tokens,
                    rows: window.clone(),
                }
            })
            .collect();
        let transfer = RawTransfer {
            paged,
            chunks: &chunks,
            layers: 0..paged.shape().layers(),
            direction: checked.transfer.direction,
            num_blocks: checked.transfer.num_blocks,
            limits: self.limits(),
            report: None,
        };
        // SAFETY: the caller's promise of the rows; the mapping has `tokens` slots (`checked`). That
        // chunk and pages do not overlap follows from their being of different memories.
        Ok(unsafe { self.kernels.multi_layer_transfer_raw(stream, &transfer) }?)
    }

    fn note_layers(
        &self,
        stream: &Stream,
        checked: &Checked<'_>,
        from: u64,
        to: u64,
    ) -> Result<(), TransportError> {
        match checked.transfer.layer_events {
            Some(events) if from < to => Ok(events.record(stream, from, to)?),
            _ => Ok(()),
        }
    }
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
    live.clear();
    // The skip is at most the length.
    for (token, &slot) in (skip_prefix_n_tokens..).zip(&host_slots[skip_prefix_n_tokens as usize..])
    {
        if slot < 0 {
            continue;
        }
        if slot as u64 >= slots {
            return Err(KernelError::SlotOutOfRange { token, slot, slots });
        }
        match live.last_mut() {
            Some(run) if run.end == token => run.end += 1,
            _ => live.push(token..token + 1),
        }
    }
    Ok(())
}
