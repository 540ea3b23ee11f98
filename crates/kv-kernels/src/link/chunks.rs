//! The transfers of a call on their way: which rows of which chunks make up the next piece.

use std::ops::Range;

use cuda_driver::{DeviceError, Stream};
use smallvec::SmallVec;

use super::pieces::{ChunkRows, Order, Pieces};
use super::{HostDirection, HostTransfer};
use crate::launch::CHUNKS_MAX;

/// What a transfer is, once it has been checked.
pub(super) struct Checked<'a> {
    pub(super) transfer: HostTransfer<'a>,
    /// The runs of tokens that move, in the list of all transfers.
    pub(super) live: Range<usize>,
    pub(super) direction: HostDirection,
    /// Where the chunk begins, by host and by device address.
    pub(super) host: u64,
    pub(super) device: u64,
}

/// The transfers of a call, on their way.
pub(super) struct ChunkWalk<'a> {
    pub(super) all: &'a [Checked<'a>],
    live: &'a [Range<u64>],
    /// The transfer that the next piece begins with, and what is left of it.
    pub(super) now: usize,
    pieces: Option<Pieces<'a>>,
    /// Bytes of the transfers after it.
    later_bytes: u64,
    /// Layers of it of which every row has been taken.
    layers_done: u64,
}

/// Rows of one or several transfers that travel together.
#[derive(Default)]
pub(super) struct ChunksPiece {
    pub(super) parts: SmallVec<[TransferPart; 1]>,
    pub(super) bytes: u64,
}

/// Rows of one transfer.
pub(super) struct TransferPart {
    pub(super) index: usize,
    /// Rows that lie together in the chunk.
    pub(super) windows: SmallVec<[Range<u64>; CHUNKS_MAX]>,
    /// Layers whose last rows these are.
    layers: Range<u64>,
}

impl<'a> ChunkWalk<'a> {
    pub(super) fn new(all: &'a [Checked<'a>], live: &'a [Range<u64>]) -> Self {
        let mut chunks = Self { all, live, now: 0, pieces: None, later_bytes: 0, layers_done: 0 };
        chunks.later_bytes = (0..all.len()).map(|index| chunks.rows(index).bytes()).sum();
        chunks.turn_to(0);
        chunks
    }

    pub(super) fn rows(&self, index: usize) -> ChunkRows<'a> {
        let Checked { transfer, live, .. } = &self.all[index];
        let shape = transfer.paged.shape();
        let by_layer = transfer.layer_events.is_some();
        ChunkRows {
            layers: shape.layers().into(),
            kv_count: shape.kv_count().into(),
            tokens: transfer.tokens,
            row_bytes: shape.row_bytes(),
            live: &self.live[live.clone()],
            order: if by_layer { Order::ByLayer } else { Order::AsTheyLie },
        }
    }

    /// Goes on with the first transfer, of `index` and those after it, of which something moves.
    fn turn_to(&mut self, index: usize) {
        let moving = |&index: &usize| !self.all[index].live.is_empty();
        let next = (index..self.all.len()).find(moving);
        self.now = next.unwrap_or(self.all.len());
        self.layers_done = 0;
        self.pieces = next.map(|index| {
            let rows = self.rows(index);
            self.later_bytes -= rows.bytes();
            rows.pieces()
        });
    }

    /// Whether rows of both may be in one launch.
    fn share(&self, first: usize, second: usize) -> bool {
        let (first, second) = (&self.all[first].transfer, &self.all[second].transfer);
        std::ptr::eq(first.paged, second.paged)
            && first.num_blocks == second.num_blocks
            && first.layer_events.is_none()
            && second.layer_events.is_none()
    }

    /// Takes rows of at most `budget` bytes, but one row at least.
    ///
    /// Short chunks of the same pages travel together. A piece also ends with a chunk when it has half
    /// of the budget.
    pub(super) fn take_piece(&mut self, budget: u64) -> Option<ChunksPiece> {
        let mut piece = ChunksPiece::default();
        let mut windows = 0;
        while self.pieces.is_some() {
            let left = budget.saturating_sub(piece.bytes);
            if let Some(first) = piece.parts.first() {
                let row_bytes = self.all[self.now].transfer.paged.shape().row_bytes();
                let is_full =
                    left < row_bytes || piece.bytes >= budget / 2 || windows == CHUNKS_MAX;
                if is_full || !self.share(first.index, self.now) {
                    break;
                }
            }
            // The windows of all parts are those of one launch.
            let most = CHUNKS_MAX - windows;
            let taken = self.pieces.as_mut().and_then(|pieces| pieces.take(left, most));
            let Some(taken) = taken else { break };
            windows += taken.windows.len();
            piece.bytes += taken.bytes;
            let layers = self.layers_done..taken.layers_done;
            self.layers_done = taken.layers_done;
            piece.parts.push(TransferPart { index: self.now, windows: taken.windows, layers });
            let over = self.pieces.as_ref().is_none_or(|pieces| pieces.bytes_left() == 0);
            if !over {
                break;
            }
            self.turn_to(self.now + 1);
        }
        (piece.bytes > 0).then_some(piece)
    }

    pub(super) fn note_layers(
        &self,
        stream: &Stream,
        piece: &ChunksPiece,
    ) -> Result<(), DeviceError> {
        for TransferPart { index, layers, .. } in &piece.parts {
            if let Some(events) = self.all[*index].transfer.layer_events
                && !layers.is_empty()
            {
                events.record(stream, layers.start, layers.end)?;
            }
        }
        Ok(())
    }

    /// Bytes that are left of all, and of the transfer that the next piece begins with.
    pub(super) fn bytes_left(&self) -> (u64, u64) {
        let here = self.pieces.as_ref().map_or(0, Pieces::bytes_left);
        (self.later_bytes + here, here)
    }
}
