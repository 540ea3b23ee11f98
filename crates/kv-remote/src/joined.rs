//! Blocks that lie side by side are read as one.

use crate::message::{Found, Span};

/// Bytes between two blocks that are read with them rather than left out.
const GAP: u64 = 64;

/// The blocks of an answer as few spans, in the order of their addresses.
#[derive(Clone, Debug)]
pub struct Joined {
    spans: Vec<Span>,
    /// Where each block is, in the same order.
    places: Vec<Place>,
}

/// Where a block is in the bytes of a span.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Place {
    /// Its place in the answer.
    block: usize,
    span: usize,
    offset: usize,
}

impl Joined {
    /// Joins blocks to spans of at most so many bytes, unless one block has more.
    #[must_use]
    pub fn of(found: &Found, bytes_max: u64) -> Self {
        let bytes_max = bytes_max.min(u32::MAX.into());
        let mut order: Vec<_> = (0..).zip(found.blocks.iter().map(|block| block.span)).collect();
        order.sort_unstable_by_key(|(_, span)| span.address);
        let (mut spans, mut places) = (Vec::<Span>::new(), Vec::with_capacity(order.len()));
        for (block, span) in order {
            let end = span.address.saturating_add(span.bytes.into());
            let joins = spans.last_mut().filter(|last| {
                let last_end = last.address.saturating_add(last.bytes.into());
                span.address <= last_end.saturating_add(GAP) && end - last.address <= bytes_max
            });
            let offset = match joins {
                Some(last) => {
                    let bytes = u64::from(last.bytes).max(end - last.address);
                    last.bytes = bytes as u32;
                    (span.address - last.address) as usize
                }
                None => {
                    spans.push(span);
                    0
                }
            };
            places.push(Place { block, span: spans.len() - 1, offset });
        }
        Self { spans, places }
    }

    /// The spans.
    #[must_use]
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The blocks in a span, by their places in the answer, and where each slot begins there.
    pub fn blocks_of(&self, span: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let first = self.places.partition_point(|place| place.span < span);
        let of = self.places.iter().skip(first).take_while(move |place| place.span == span);
        of.map(|place| (place.block, place.offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Located;

    type Spans = Vec<(u64, u32)>;
    type Places = Vec<(usize, usize)>;

    /// The spans, and of each block its span and where it begins there.
    fn joined(spans: &[(u64, u32)]) -> (Spans, Places) {
        let span = |&(address, bytes): &(u64, u32)| Span { address, bytes };
        let blocks = spans
            .iter()
            .map(|of| Located { span: span(of), generation: 0, sum: 0, head: None })
            .collect::<Vec<_>>();
        let joined = Joined::of(&Found { lease: None, blocks }, 512 << 10);
        let spans = joined.spans.iter().map(|span| (span.address, span.bytes)).collect();
        let mut places = joined.places;
        places.sort_unstable_by_key(|place| place.block);
        (spans, places.iter().map(|place| (place.span, place.offset)).collect())
    }

    #[test]
    fn blocks_side_by_side_are_one_span_and_each_is_found_in_the_bytes() {
        assert_eq!(
            joined(&[(0, 100), (128, 100), (256, 100)]),
            (vec![(0, 356)], vec![(0, 0), (0, 128), (0, 256)])
        );
        assert_eq!(
            joined(&[(256, 100), (0, 100), (128, 90)]),
            (vec![(0, 356)], vec![(0, 256), (0, 0), (0, 128)])
        );
        let apart = joined(&[(1000, 10), (0, 10), (1064, 10), (500, 10)]);
        assert_eq!(
            apart,
            (vec![(0, 10), (500, 10), (1000, 74)], vec![(2, 0), (0, 0), (2, 64), (1, 0)])
        );
        // A peer may name one block twice, or one within the other.
        assert_eq!(
            joined(&[(0, 100), (0, 100), (10, 20)]),
            (vec![(0, 100)], vec![(0, 0), (0, 0), (0, 10)])
        );
        assert_eq!(joined(&[]), (vec![], vec![]));
    }
}
