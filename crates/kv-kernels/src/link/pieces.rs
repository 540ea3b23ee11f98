//! Which rows of a chunk travel together, and in what order.

use std::ops::Range;

use smallvec::SmallVec;

use crate::launch::CHUNKS_MAX;

/// The order in which the rows of a chunk, `[kv, layer, token]`, travel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Order {
    /// As they lie: the pieces are as few as they can be.
    AsTheyLie,
    /// Layer by layer, all tensors of a layer together.
    ByLayer,
}

/// The rows of a chunk, of which some tokens move.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkRows<'a> {
    pub(crate) layers: u64,
    pub(crate) kv_count: u64,
    pub(crate) tokens: u64,
    pub(crate) row_bytes: u64,
    /// Runs of tokens that move, in rising order, not touching; none is empty.
    pub(crate) live: &'a [Range<u64>],
    pub(crate) order: Order,
}

/// Rows that travel together.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct ChunkPiece {
    /// Rows that lie together in the chunk; at most [`CHUNKS_MAX`] such windows.
    pub(crate) windows: SmallVec<[Range<u64>; CHUNKS_MAX]>,
    pub(crate) bytes: u64,
    /// Layers of which every row is in this piece or in one before; by layer only.
    pub(crate) layers_done: u64,
}

/// The pieces of a chunk, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Pieces<'a> {
    rows: ChunkRows<'a>,
    /// Planes, in the order of travel, that are over.
    planes_done: u64,
    /// Of the next plane: the run of live tokens, and tokens of it that are over.
    run: usize,
    run_done: u64,
}

impl<'a> ChunkRows<'a> {
    /// Bytes of one plane that move.
    fn plane_bytes(&self) -> u64 {
        self.live.iter().map(|run| run.end - run.start).sum::<u64>() * self.row_bytes
    }

    /// All bytes that move.
    pub(crate) fn bytes(&self) -> u64 {
        self.plane_bytes() * self.layers * self.kv_count
    }

    /// Whether every token moves.
    fn is_whole(&self) -> bool {
        matches!(self.live, [run] if *run == (0..self.tokens))
    }

    /// Rows that lie together in the chunk at least, in bytes, before pieces cut them.
    pub(crate) fn window_bytes(&self) -> u64 {
        match (self.is_whole(), self.order) {
            (true, Order::AsTheyLie) => self.bytes(),
            _ => self.plane_bytes() / (self.live.len() as u64).max(1),
        }
    }

    pub(crate) fn pieces(self) -> Pieces<'a> {
        Pieces { rows: self, planes_done: 0, run: 0, run_done: 0 }
    }
}

impl Pieces<'_> {
    /// Number of the next plane in the chunk, `kv * layers + layer`.
    fn plane(&self) -> u64 {
        let ChunkRows { layers, kv_count, .. } = self.rows;
        match self.rows.order {
            Order::AsTheyLie => self.planes_done,
            Order::ByLayer => {
                let (layer, kv) = (self.planes_done / kv_count, self.planes_done % kv_count);
                kv * layers + layer
            }
        }
    }

    /// Bytes that are left.
    pub(crate) fn bytes_left(&self) -> u64 {
        let ChunkRows { layers, kv_count, live, row_bytes, .. } = self.rows;
        let planes = layers * kv_count - self.planes_done;
        let before: u64 = live[..self.run].iter().map(|run| run.end - run.start).sum();
        planes * self.rows.plane_bytes() - (before + self.run_done) * row_bytes
    }

    /// Takes the next piece: at most `budget` bytes, but one row at least, in at most `windows_most`
    /// windows.
    ///
    /// By layer, a piece also ends with a layer when it has half of the budget.
    pub(crate) fn take(&mut self, budget: u64, windows_most: usize) -> Option<ChunkPiece> {
        let ChunkRows { layers, kv_count, tokens, row_bytes, live, order } = self.rows;
        let planes = layers * kv_count;
        let mut piece = ChunkPiece::default();
        let budget = budget.max(row_bytes);
        while self.planes_done < planes && !live.is_empty() {
            let run = &live[self.run];
            let left = run.end - run.start - self.run_done;
            let rows = left.min((budget - piece.bytes) / row_bytes);
            let start = self.plane() * tokens + run.start + self.run_done;
            let follows = piece.windows.last().is_some_and(|last| last.end == start);
            if rows == 0 || (!follows && piece.windows.len() == windows_most) {
                break;
            }
            match piece.windows.last_mut() {
                Some(last) if follows => last.end += rows,
                _ => piece.windows.push(start..start + rows),
            }
            piece.bytes += rows * row_bytes;
            self.run_done += rows;
            if rows < left {
                continue;
            }
            self.run_done = 0;
            self.run += 1;
            if self.run < live.len() {
                continue;
            }
            self.run = 0;
            self.planes_done += 1;
            let layer_ends = self.planes_done.is_multiple_of(kv_count);
            if order == Order::ByLayer && layer_ends && piece.bytes >= budget / 2 {
                break;
            }
        }
        if order == Order::ByLayer {
            piece.layers_done = self.planes_done / kv_count;
        }
        (piece.bytes > 0).then_some(piece)
    }
}

/// How long the pieces of a pipeline are.
///
/// Where a kernel fills the ring, the first piece is short, so that the copy engine begins soon, and
/// each of the next is longer by `growth`, which the kernel keeps ahead of. Where a kernel empties
/// it, that is mirrored: the last piece is short, so that little is left when the engine ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Taper {
    /// The shortest, in bytes.
    pub(crate) least: u64,
    /// The longest, in bytes.
    pub(crate) most: u64,
    /// At least 2.
    pub(crate) growth: u64,
    /// Whether the short pieces come first.
    pub(crate) rising: bool,
}

impl Taper {
    /// Bytes of the piece that follows one of `before` bytes (0: the first), when `left` are left.
    pub(crate) fn next(&self, before: u64, left: u64) -> u64 {
        let Self { least, most, growth, rising } = *self;
        if rising {
            return if before == 0 { least } else { before.saturating_mul(growth) }.min(most);
        }
        // What follows is 1 / growth of what is left, until that is the least.
        let next = left - left / growth;
        if left <= least { left.min(most) } else { next.clamp(least, most) }
    }
}

/// How long each piece is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Pace {
    /// So that a pipeline that begins and ends with nothing else in it is over soon.
    Tapered(Taper),
    /// As long as may be, of one length: what is before and after keeps the pipeline full.
    Even {
        /// The longest, in bytes.
        most: u64,
    },
}

impl Pace {
    /// Bytes of the piece that follows one of `before` bytes (0: the first), when `left` are left, and
    /// `left_here` of the chunk that it begins with.
    pub(crate) fn next(self, before: u64, left: u64, left_here: u64) -> u64 {
        match self {
            Self::Tapered(taper) => taper.next(before, left),
            // Short chunks share a piece; a long one is cut evenly.
            Self::Even { most } if left_here <= most / 2 => most,
            Self::Even { most } => left_here.div_ceil(left_here.div_ceil(most.max(1)).max(1)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of windows, some of one")]
mod tests {
    use super::*;

    const ROW: u64 = 64;

    const ALL: &[Range<u64>] = &[0..10];

    fn rows(live: &[Range<u64>], order: Order) -> ChunkRows<'_> {
        ChunkRows { layers: 3, kv_count: 2, tokens: 10, row_bytes: ROW, live, order }
    }

    fn all_pieces(rows: ChunkRows<'_>, budget: u64) -> Vec<ChunkPiece> {
        let mut pieces = rows.pieces();
        let mut left = rows.bytes();
        let mut taken = Vec::new();
        while let Some(piece) = pieces.take(budget, CHUNKS_MAX) {
            assert!(piece.bytes <= budget.max(ROW) && piece.windows.len() <= CHUNKS_MAX);
            let moved: u64 = piece.windows.iter().map(|window| window.end - window.start).sum();
            assert_eq!(piece.bytes, moved * ROW);
            left -= piece.bytes;
            assert_eq!(pieces.bytes_left(), left);
            taken.push(piece);
        }
        assert_eq!(left, 0);
        taken
    }

    #[test]
    fn a_whole_chunk_is_cut_as_it_lies() {
        let pieces = all_pieces(rows(ALL, Order::AsTheyLie), 25 * ROW);
        let windows: Vec<_> = pieces.iter().map(|piece| piece.windows.to_vec()).collect();
        assert_eq!(windows, [vec![0..25], vec![25..50], vec![50..60]]);
        assert_eq!(rows(ALL, Order::AsTheyLie).window_bytes(), 60 * ROW);
    }

    #[test]
    fn layers_travel_with_both_their_tensors() {
        let pieces = all_pieces(rows(ALL, Order::ByLayer), 20 * ROW);
        let windows: Vec<_> = pieces.iter().map(|piece| piece.windows.to_vec()).collect();
        assert_eq!(windows, [vec![0..10, 30..40], vec![10..20, 40..50], vec![20..30, 50..60]]);
        assert_eq!(pieces.iter().map(|p| p.layers_done).collect::<Vec<_>>(), [1, 2, 3]);
        // A piece that has half of its budget at the end of a layer ends there.
        let done: Vec<_> = all_pieces(rows(ALL, Order::ByLayer), 35 * ROW)
            .iter()
            .map(|piece| (piece.bytes / ROW, piece.layers_done))
            .collect();
        assert_eq!(done, [(20, 1), (20, 2), (20, 3)]);
    }

    #[test]
    fn tokens_that_stay_are_in_no_window() {
        let live = [2..5, 7..10];
        for order in [Order::AsTheyLie, Order::ByLayer] {
            for budget in [1, 2, 5, 7, 11, 100].map(|rows| rows * ROW) {
                let pieces = all_pieces(rows(&live, order), budget);
                let mut seen: Vec<u64> =
                    pieces.iter().flat_map(|p| p.windows.iter().cloned().flatten()).collect();
                seen.sort_unstable();
                let expected: Vec<u64> = (0..6)
                    .flat_map(|plane| (0..10).map(move |token| (plane, token)))
                    .filter(|(_, token)| live.iter().any(|run| run.contains(token)))
                    .map(|(plane, token)| plane * 10 + token)
                    .collect();
                assert_eq!(seen, expected);
            }
        }
        // Runs that meet over the edge of a plane lie together.
        let first = all_pieces(rows(&live, Order::AsTheyLie), 100 * ROW).remove(0);
        assert_eq!(first.windows[..2], [2..5, 7..10]);
        let wrapping = [0..2, 8..10];
        let first = all_pieces(rows(&wrapping, Order::AsTheyLie), 100 * ROW).remove(0);
        assert_eq!(first.windows[..3], [0..2, 8..12, 18..22]);
    }

    #[test]
    fn no_live_token_is_no_piece() {
        assert_eq!(all_pieces(rows(&[], Order::ByLayer), 100), []);
    }

    #[test]
    fn a_row_longer_than_the_budget_travels_alone() {
        assert_eq!(all_pieces(rows(ALL, Order::AsTheyLie), 1).len(), 60);
    }

    fn tapered(taper: Taper, whole: u64) -> Vec<u64> {
        let (mut left, mut before, mut taken) = (whole, 0, Vec::new());
        while left > 0 {
            before = taper.next(before, left).min(left);
            left -= before;
            taken.push(before);
        }
        taken
    }

    #[test]
    fn pieces_grow_where_a_kernel_fills_and_shrink_where_it_empties() {
        let taper = Taper { least: 1, most: 12, growth: 4, rising: true };
        assert_eq!(tapered(taper, 40), [1, 4, 12, 12, 11]);
        let taper = Taper { rising: false, ..taper };
        assert_eq!(tapered(taper, 40), [12, 12, 12, 3, 1]);
        assert_eq!(tapered(taper, 1), [1]);
        let flat = Taper { least: 5, most: 5, growth: 2, rising: false };
        assert_eq!(tapered(flat, 12), [5, 5, 2]);
    }

    #[test]
    fn an_even_pace_cuts_long_chunks_evenly_and_leaves_room_for_several_short_ones() {
        let even = Pace::Even { most: 12 };
        assert_eq!(even.next(0, 100, 32), 11);
        assert_eq!(even.next(11, 89, 21), 11);
        assert_eq!(even.next(11, 78, 10), 10);
        assert_eq!(even.next(10, 68, 5), 12);
        let taper = Taper { least: 1, most: 12, growth: 4, rising: true };
        assert_eq!(Pace::Tapered(taper).next(1, 30, 2), 4);
    }
}
