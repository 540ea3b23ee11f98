//! The location of a token of a plane of a sequence: the arithmetic of a space, checked once.

use std::ops::Range;

use crate::SpaceError;

/// The arrangement of a sequence's planes in its addresses.
///
/// In both layouts, in bytes from the base of the space,
/// `offset = plane * strides.plane + seat * strides.sequence + token * strides.token`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Layout {
    /// Each plane of a sequence is one contiguous range: token stride = token bytes. A plane of all
    /// seats is a tensor `[sequences, tokens, token_bytes]` with a fixed stride between seats.
    /// Attention kernels for contiguous K and V read this form (such as FlashAttention with a batch
    /// stride and lengths). A growth maps one page for each plane.
    #[default]
    PlaneMajor,
    /// All planes of a token are adjacent, and each sequence is one range: token stride = planes *
    /// token bytes. A growth maps a single page, so small models waste less memory. But a plane is
    /// strided, so only kernels with a token stride can read it (FlashAttention and FlashInfer have
    /// one, in elements; a kernel that assumes packed tokens does not).
    TokenMajor,
}

/// Distances in bytes; see [`Layout`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SpaceStrides {
    /// From one plane to the next, same sequence and token.
    pub plane: u64,
    /// From one seat to the next, same plane and token.
    pub sequence: u64,
    /// From one token to the next, same sequence and plane.
    pub token: u64,
}

/// The size of a space: sequences, planes, tokens, and what is mapped ahead.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SpaceOptions {
    /// Number of seats: maximum number of sequences at once, parked ones included; at most 524,288.
    pub sequences: u64,
    /// Number of planes, such as layers times two for K and V.
    pub planes: u64,
    /// Bytes of one token in one plane.
    pub token_bytes: u64,
    /// Maximum number of tokens of a sequence. Addresses are reserved for all of them, memory for
    /// none.
    pub tokens_max: u64,
    /// The arrangement of the planes.
    pub layout: Layout,
    /// Maximum number of tokens beyond the present length for which memory is mapped ahead of need.
    pub look_ahead_tokens: u64,
    /// Maximum number of mapped pages without a token on them or within the look-ahead: left by
    /// finished sequences for later ones, or adopted by a shorter one. Pages beyond this number are
    /// unmapped.
    pub parked_pages_max: u64,
    /// Number of idle pages that the pool is refilled to ahead of need.
    pub prepared_pages: u64,
    /// Ordinals of other devices that may read and write the mapped memory.
    pub peers: Vec<i32>,
}

impl Default for SpaceOptions {
    /// Plane-major, no limit on parked pages, nothing ahead of need. The sizes are 0 and must be
    /// set.
    fn default() -> Self {
        Self {
            sequences: 0,
            planes: 0,
            token_bytes: 0,
            tokens_max: 0,
            layout: Layout::PlaneMajor,
            look_ahead_tokens: 0,
            parked_pages_max: u64::MAX,
            prepared_pages: 0,
            peers: Vec::new(),
        }
    }
}

/// Maximum number of seats of a space. It bounds the book on the host, to about 64 MiB.
const SEQUENCES_MAX: u64 = 1 << 19;

/// Maximum number of pages that one step maps, unless a single row has more.
const STEP_PAGES_MAX: u64 = 8;

/// The checked arithmetic of a space.
///
/// # Invariants
/// All numbers except the look-ahead are positive, and the product of all of them fits in 64 bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) sequences: u64,
    pub(super) planes: u64,
    pub(super) token_bytes: u64,
    pub(super) tokens_max: u64,
    pub(super) page_bytes: u64,
    pub(super) look_ahead: u64,
    pub(super) strides: SpaceStrides,
    /// Number of ranges of a sequence that are mapped together: a row is one page of each.
    pub(super) ranges: u64,
    /// Number of pages of each range.
    pub(super) rows_max: u64,
}

impl Shape {
    pub(super) fn new(options: &SpaceOptions, page_bytes: u64) -> Result<Self, SpaceError> {
        let &SpaceOptions { sequences, planes, token_bytes, tokens_max, .. } = options;
        let empty = SpaceError::Empty { sequences, planes, token_bytes, tokens_max };
        if [sequences, planes, token_bytes, tokens_max].contains(&0) {
            return Err(empty);
        }
        if sequences > SEQUENCES_MAX {
            return Err(SpaceError::TooManySeats { sequences, sequences_max: SEQUENCES_MAX });
        }
        let (ranges, packed) = match options.layout {
            Layout::PlaneMajor => (planes, 1),
            Layout::TokenMajor => (1, planes),
        };
        let shape = || {
            let token = token_bytes.checked_mul(packed)?;
            let sequence = tokens_max.checked_mul(token)?.checked_next_multiple_of(page_bytes)?;
            let range_plane = sequence.checked_mul(sequences)?;
            range_plane.checked_mul(ranges)?;
            let plane = if ranges == 1 && packed == planes { token_bytes } else { range_plane };
            Some(Self {
                sequences,
                planes,
                token_bytes,
                tokens_max,
                page_bytes,
                look_ahead: options.look_ahead_tokens,
                strides: SpaceStrides { plane, sequence, token },
                ranges,
                rows_max: sequence / page_bytes,
            })
        };
        shape().ok_or(SpaceError::Overflow { sequences, planes, token_bytes, tokens_max })
    }

    /// Number of bytes of addresses.
    pub(super) fn bytes(&self) -> u64 {
        self.ranges * self.sequences * self.strides.sequence
    }

    /// Number of whole tokens in the first `rows` rows.
    pub(super) fn tokens_in(&self, rows: u64) -> u64 {
        (rows * self.page_bytes / self.strides.token).min(self.tokens_max)
    }

    /// Number of rows that hold the first `tokens` tokens; `tokens` is at most `tokens_max`.
    pub(super) fn rows_for(&self, tokens: u64) -> u64 {
        (tokens * self.strides.token).div_ceil(self.page_bytes)
    }

    /// Number of tokens that should have memory when a sequence has `tokens`: with the look-ahead,
    /// rounded up to the end of the last row.
    pub(super) fn cover(&self, tokens: u64) -> u64 {
        let ahead = tokens.saturating_add(self.look_ahead).min(self.tokens_max);
        self.tokens_in(self.rows_for(ahead))
    }

    /// The largest number of tokens whose [`cover`](Self::cover) is at most `covered`.
    pub(super) fn quiet_until(&self, covered: u64) -> u64 {
        if covered == self.tokens_max { covered } else { covered.saturating_sub(self.look_ahead) }
    }

    /// The pages of the reservation that make up a row of a seat, in ascending order.
    pub(super) fn row(&self, place: u64, row: u64) -> impl DoubleEndedIterator<Item = u64> + use<> {
        self.rows(place, row..row + 1)
    }

    /// The same for several rows.
    pub(super) fn rows(
        &self,
        place: u64,
        rows: Range<u64>,
    ) -> impl DoubleEndedIterator<Item = u64> + use<> {
        let Self { sequences, rows_max, .. } = *self;
        (0..self.ranges).flat_map(move |range| {
            let first = (range * sequences + place) * rows_max;
            first + rows.start..first + rows.end
        })
    }

    /// Maximum number of rows that one step maps. It bounds how long others wait for the step.
    pub(super) fn step_rows(&self) -> u64 {
        (STEP_PAGES_MAX / self.ranges).max(1)
    }

    /// The seat of a page of the reservation.
    pub(super) fn seat_of(&self, page: u64) -> u64 {
        page / self.rows_max % self.sequences
    }

    /// Number of bytes of the tokens of one sequence, over all planes.
    pub(super) fn used_bytes(&self, tokens: u64) -> u64 {
        tokens * self.planes * self.token_bytes
    }

    /// Number of bytes of the pages of that many rows.
    pub(super) fn row_bytes(&self, rows: u64) -> u64 {
        rows * self.ranges * self.page_bytes
    }

    /// Offset of a token from the base; all arguments are within bounds.
    pub(super) fn offset(&self, place: u64, plane: u64, token: u64) -> u64 {
        let SpaceStrides { plane: by_plane, sequence, token: by_token } = self.strides;
        plane * by_plane + place * sequence + token * by_token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(layout: Layout, look_ahead_tokens: u64) -> Shape {
        let options = SpaceOptions {
            sequences: 3,
            planes: 4,
            token_bytes: 48,
            tokens_max: 100,
            layout,
            look_ahead_tokens,
            ..SpaceOptions::default()
        };
        Shape::new(&options, 1024).unwrap()
    }

    #[test]
    fn no_two_bytes_share_an_offset_and_each_lies_in_its_row() {
        for layout in [Layout::PlaneMajor, Layout::TokenMajor] {
            let shape = shape(layout, 0);
            let mut taken = vec![false; shape.bytes() as usize];
            for (place, plane, token) in (0..3).flat_map(|place| {
                (0..4).flat_map(move |plane| (0..100).map(move |token| (place, plane, token)))
            }) {
                let offset = shape.offset(place, plane, token);
                for byte in offset..offset + 48 {
                    assert!(!std::mem::replace(&mut taken[byte as usize], true));
                    let page = byte / 1024;
                    assert_eq!(shape.seat_of(page), place);
                    let rows = shape.rows_for(token + 1);
                    assert!((0..rows).any(|row| shape.row(place, row).any(|own| own == page)));
                }
            }
        }
    }

    #[test]
    fn a_token_that_straddles_pages_counts_with_the_second() {
        let shape = shape(Layout::PlaneMajor, 0);
        assert_eq!((shape.tokens_in(1), shape.rows_for(21), shape.rows_for(22)), (21, 1, 2));
        assert_eq!((shape.rows_max, shape.tokens_in(5)), (5, 100));
    }

    #[test]
    fn what_is_quiet_is_covered() {
        for look_ahead in [0, 1, 20, 21, 50, 99, 1_000] {
            let shape = shape(Layout::TokenMajor, look_ahead);
            for tokens in 0..=100 {
                let covered = shape.cover(tokens);
                assert!(covered >= (tokens + look_ahead).min(100));
                let quiet = shape.quiet_until(covered);
                assert!(quiet >= tokens, "{tokens} tokens cover {covered}, quiet until {quiet}");
                assert_eq!(shape.cover(quiet), covered);
                assert!(quiet == 100 || shape.cover(quiet + 1) > covered);
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let options = SpaceOptions {
            sequences: 1 << 19,
            planes: 1 << 20,
            token_bytes: 1 << 20,
            tokens_max: 1 << 20,
            ..SpaceOptions::default()
        };
        assert!(matches!(Shape::new(&options, 1 << 21), Err(SpaceError::Overflow { .. })));
        let many = SpaceOptions { sequences: (1 << 19) + 1, ..options.clone() };
        assert!(matches!(Shape::new(&many, 1 << 21), Err(SpaceError::TooManySeats { .. })));
        let options = SpaceOptions { planes: 0, ..options };
        assert!(matches!(Shape::new(&options, 1 << 21), Err(SpaceError::Empty { .. })));
    }
}
