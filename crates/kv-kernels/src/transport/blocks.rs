//! Whole blocks between pages and a tier of blocks in pinned memory, by pairs of ids.

use std::ops::Range;

use cuda_driver::{BatchCopy, Stream};

use super::fragments::push;
use super::pieces::Taper;
use super::{HostDirection, HostLink, Load, Transport, TransportError};
use crate::Blocks;
use crate::block_copy::{BlockCopy, BlockPair, RawBlockCopy, RowRange};
use crate::block_units::{RawBlockSide, RawBlockUnits};

/// A copy that engines can make: both sides have each block in one piece.
struct Whole<'a> {
    copy: BlockCopy<'a>,
    pairs: &'a [BlockPair],
    direction: HostDirection,
    block_bytes: u64,
    /// By host and by device address where the two differ.
    from: u64,
    to: u64,
}

impl HostLink {
    /// Copies blocks between pages and host memory, by the cheapest transport of the profile; returns
    /// which.
    ///
    /// The result is that of [`KvKernels::copy_blocks`](crate::KvKernels::copy_blocks), which is the
    /// direct kernel here. The others are for blocks that both sides have in one piece, of one shape,
    /// and for pairs that the host knows. Two hops carry blocks that follow each other in the host's
    /// memory, run by run, and only where the profile [forces](super::TransportProfile::forced) them:
    /// the kernel for pairs has fewer threads than the one for chunks and does not keep ahead of the
    /// link. Blocks that make up one run on the host are a chunk of one layer whose rows are blocks, and
    /// go faster as such ([`transfer_chunk`](HostLink::transfer_chunk)).
    ///
    /// # Ordering
    /// One operation of `stream`; see [`HostLink`].
    ///
    /// # Errors
    /// [`TransportError`].
    pub fn copy_blocks(
        &mut self,
        stream: &Stream,
        copy: BlockCopy<'_>,
    ) -> Result<Transport, TransportError> {
        let multiprocessors = Some(copy.multiprocessors.unwrap_or(self.options.multiprocessors));
        let copy = BlockCopy { multiprocessors, ..copy };
        let whole = whole(copy);
        let transport =
            whole.as_ref().map_or(Transport::DirectKernel, |whole| self.transport_of_blocks(whole));
        if transport != Transport::DirectKernel {
            // What the kernel's launch checks by itself.
            self.kernels.check_stream(stream)?;
            let bytes = copy.from.shape().row_bytes();
            self.kernels.check_copy(&copy, RowRange { from_byte: 0, to_byte: 0, bytes })?;
        }
        match (transport, whole) {
            (Transport::CopyEngine, Some(whole)) => {
                let outcome = self.blocks_by_engine(stream, &whole);
                outcome.map(|()| transport)
            }
            (Transport::TwoHop, Some(whole)) => self
                .blocks_by_two_hops(stream, &whole)
                .inspect_err(|_| self.rejoin(stream))
                .map(|()| transport),
            _ => {
                self.kernels.copy_blocks(stream, copy)?;
                Ok(Transport::DirectKernel)
            }
        }
    }

    fn load_of_blocks(&self, whole: &Whole<'_>) -> Load {
        let Whole { pairs, block_bytes, .. } = *whole;
        let runs = 1 + pairs.windows(2).filter(|two| !whole.follows(two[0], two[1])).count() as u64;
        let bytes = pairs.len() as u64 * block_bytes;
        Load {
            bytes,
            fragment_bytes: block_bytes,
            window_bytes: bytes / runs,
            // Two hops are not chosen by themselves.
            slot_bytes: 0,
            slots: self.options.ring_slots,
        }
    }

    fn transport_of_blocks(&self, whole: &Whole<'_>) -> Transport {
        let fits = whole.block_bytes <= self.slot_bytes();
        match self.profile.choose(whole.direction, self.load_of_blocks(whole)) {
            Transport::TwoHop if !fits || self.ring.is_none() => Transport::DirectKernel,
            transport => transport,
        }
    }

    fn blocks_by_engine(
        &mut self,
        stream: &Stream,
        whole: &Whole<'_>,
    ) -> Result<(), TransportError> {
        let mut copies = std::mem::take(&mut self.scratch.copies);
        copies.clear();
        let bytes = whole.block_bytes;
        for pair in whole.pairs {
            // Ids have been checked to be below the blocks of their side.
            let destination = whole.to + pair.destination as u64 * bytes;
            let source = whole.from + pair.source as u64 * bytes;
            push(&mut copies, BatchCopy { destination, source, bytes });
        }
        // SAFETY: blocks of ids below the blocks of a side lie in its memory (invariants of `PagedKv`
        // and `HostBlocks`). Pinned memory is not freed before the device has finished (a dropped buffer
        // is only retired), and the host, which shares it (`HostBlocks`), does not write it.
        let outcome = unsafe { self.copy_all(stream, whole.direction, &copies) };
        self.scratch.copies = copies;
        outcome
    }

    fn blocks_by_two_hops(
        &mut self,
        stream: &Stream,
        whole: &Whole<'_>,
    ) -> Result<(), TransportError> {
        let to_host = whole.direction == HostDirection::ToHost;
        let slot_bytes = self.slot_bytes();
        let load = Load { slot_bytes, ..self.load_of_blocks(whole) };
        let taper = self.profile.costs(whole.direction).plan(whole.direction, load);
        let taper = taper.map(|(taper, _)| taper);
        let Some(mut ring) = self.ring.take() else { return Ok(()) };
        let outcome = (|| {
            if !to_host {
                self.fork.record(stream)?;
                self.copies.wait(&self.fork)?;
            }
            let (mut done, mut before) = (0, 0);
            while done < whole.pairs.len() {
                let piece = whole.piece(done, before, taper, slot_bytes);
                before = piece.len() as u64 * whole.block_bytes;
                done = piece.end;
                let turn = ring.turn();
                let (filler, emptier) =
                    if to_host { (stream, &self.copies) } else { (&self.copies, stream) };
                turn.wait_until_empty(filler)?;
                if to_host {
                    self.launch_blocks(stream, whole, piece.clone(), turn.address)?;
                    turn.hand_over(filler, emptier)?;
                    self.copy_run(whole, piece, turn.address)?;
                } else {
                    self.copy_run(whole, piece.clone(), turn.address)?;
                    turn.hand_over(filler, emptier)?;
                    self.launch_blocks(stream, whole, piece, turn.address)?;
                }
                turn.emptied(emptier)?;
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

    /// Copies a run of blocks between the host and a slot.
    fn copy_run(
        &self,
        whole: &Whole<'_>,
        piece: Range<usize>,
        slot: u64,
    ) -> Result<(), TransportError> {
        let bytes = piece.len() as u64 * whole.block_bytes;
        let host = whole.host_place(piece.start);
        let copies = self.copies.raw();
        Ok(self.device().run(|driver| match whole.direction {
            // SAFETY: the blocks of the run lie one after the other (`Whole::piece`) in the pinned
            // memory, of which the same holds as in `blocks_by_engine`; the slot is device memory of
            // this link, and as long; the stream is live.
            HostDirection::ToHost => unsafe { driver.memcpy_dtoh_async(host, slot, bytes, copies) },
            // SAFETY: likewise.
            HostDirection::ToPages => unsafe {
                driver.memcpy_htod_async(slot, host, bytes, copies)
            },
        })?)
    }

    /// Launches the copy of a run of blocks between the pages and a slot.
    fn launch_blocks(
        &self,
        stream: &Stream,
        whole: &Whole<'_>,
        piece: Range<usize>,
        slot: u64,
    ) -> Result<(), TransportError> {
        let Whole { copy, block_bytes, direction, .. } = *whole;
        // The pairs name blocks of the host: the first of the run is to lie where the slot begins.
        let before = whole.host_id(piece.start) * block_bytes;
        let base = slot.wrapping_sub(before);
        let (from, to) = match direction {
            HostDirection::ToHost => (whole.from, base),
            HostDirection::ToPages => (base, whole.to),
        };
        let vector_bytes = 1 << (from | to | block_bytes | 16).trailing_zeros();
        let unit_vectors = block_bytes / vector_bytes;
        let raw = RawBlockCopy {
            to: RawBlockSide::whole(to, block_bytes, copy.to_blocks),
            from: RawBlockSide::whole(from, block_bytes, copy.from_blocks),
            units: RawBlockUnits { planes: 1, tokens: 1, segments: 1, unit_vectors },
            pairs: copy.pairs.address() + (piece.start * size_of::<BlockPair>()) as u64,
            items: piece.len() as u64 * unit_vectors,
            first_pair: 0,
            vector_bytes,
            report: 0,
            grid: self.options.multiprocessors,
            threads: 1024,
        };
        // SAFETY: `check_copy` has found the pairs in their memory and the ids below the blocks of their
        // side, and pages hold those (invariant of `PagedKv`). On the other side ids of the run lie in
        // the slot, one after the other, which is long enough (`Whole::piece`). Should the device's
        // pairs be others than the host's, blocks would be read or written elsewhere in device memory,
        // which is an error of bytes, and the caller's (`BlockCopy::host_pairs`).
        Ok(unsafe { self.kernels.copy_blocks_raw(stream, &raw) }?)
    }
}

impl Whole<'_> {
    fn host_id(&self, place: usize) -> u64 {
        let pair = self.pairs[place];
        // Checked not to be negative.
        match self.direction {
            HostDirection::ToHost => pair.destination as u64,
            HostDirection::ToPages => pair.source as u64,
        }
    }

    fn host_place(&self, place: usize) -> u64 {
        let base = match self.direction {
            HostDirection::ToHost => self.to,
            HostDirection::ToPages => self.from,
        };
        base + self.host_id(place) * self.block_bytes
    }

    /// Whether a pair's block follows the other's in the host's memory.
    fn follows(&self, first: BlockPair, second: BlockPair) -> bool {
        match self.direction {
            HostDirection::ToHost => i64::from(first.destination) + 1 == second.destination.into(),
            HostDirection::ToPages => i64::from(first.source) + 1 == second.source.into(),
        }
    }

    /// The pairs of the next piece: blocks that follow each other on the host, one at least.
    fn piece(
        &self,
        start: usize,
        before: u64,
        taper: Option<Taper>,
        slot_bytes: u64,
    ) -> Range<usize> {
        let left = (self.pairs.len() - start) as u64 * self.block_bytes;
        let budget = taper.map_or(slot_bytes, |taper| taper.next(before, left));
        let most = (budget / self.block_bytes).max(1) as usize;
        let pairs = &self.pairs[start..];
        let run = 1 + pairs.windows(2).take_while(|two| self.follows(two[0], two[1])).count();
        start..start + run.min(most)
    }
}

/// The copy, if engines can make it.
fn whole(copy: BlockCopy<'_>) -> Option<Whole<'_>> {
    let pairs = copy.host_pairs.filter(|pairs| !pairs.is_empty())?;
    let (direction, paged, host) = match (copy.from, copy.to) {
        (Blocks::Device(paged), Blocks::Host(host)) => (HostDirection::ToHost, paged, host),
        (Blocks::Host(host), Blocks::Device(paged)) => (HostDirection::ToPages, paged, host),
        _ => return None,
    };
    let shape = paged.shape();
    let is_whole = |blocks: Blocks<'_>| blocks.layout().has_whole_blocks(shape);
    if shape != host.shape() || !is_whole(copy.from) || !is_whole(copy.to) {
        return None;
    }
    let of_pages = paged.span().address();
    let of_host = host.buffer().host_address() + host.offset();
    let (from, to) = match direction {
        HostDirection::ToHost => (of_pages, of_host),
        HostDirection::ToPages => (of_host, of_pages),
    };
    Some(Whole { copy, pairs, direction, block_bytes: shape.block_bytes(), from, to })
}
