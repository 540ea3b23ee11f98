//! How two sides of a copy are taken apart into units: pieces that lie together on both.

use bytemuck::{Pod, Zeroable};
use cuda_driver::guard;

use crate::divider::Divider31;
use crate::{Blocks, KvShape, PagedLayout, error::KernelError, layout::RowPart};

/// One side, as `BlockSide` of `kernels/blocks.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, Pod, PartialEq, Zeroable)]
pub struct RawBlockSide {
    /// Added to every address; all of it where there is no table.
    pub base: u64,
    /// Address of the table of plane addresses, or 0.
    pub plane_ptrs: u64,
    /// Bytes from a plane to the next where there is no table.
    pub plane_stride: u64,
    /// Bytes from a block to the next.
    pub block_stride: u64,
    /// Bytes from a token to the next.
    pub token_stride: u64,
    /// Bytes from a segment to the next.
    pub segment_stride: u64,
    /// Blocks that may be named.
    pub num_blocks: u64,
}

/// What a block is made of, as kernels count it; each at least 1 and below 2^31.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RawBlockUnits {
    /// Planes.
    pub planes: u64,
    /// Tokens of a plane; 1 where the tokens of a plane make up one unit.
    pub tokens: u64,
    /// Segments of a token.
    pub segments: u64,
    /// Vectors of a unit.
    pub unit_vectors: u64,
}

const _: () = assert!(size_of::<RawBlockSide>() == 56, "BlockSide of kernels/blocks.cuh");

impl RawBlockUnits {
    /// `BlockUnits` of `kernels/blocks.cuh`: each count, and what makes a multiplication of a division
    /// by it.
    #[must_use]
    pub fn dividers(&self) -> [u32; 12] {
        let mut dividers = [0; 12];
        let counts = [self.planes, self.tokens, self.segments, self.unit_vectors];
        for (divider, count) in dividers.chunks_exact_mut(3).zip(counts) {
            // One that is 0 counts as 1.
            let Divider31 { divisor, magic, shift } = Divider31::new((count as u32).max(1));
            divider.copy_from_slice(&[divisor, magic, shift]);
        }
        dividers
    }

    /// The same from what a kernel is given.
    pub(crate) fn of_dividers(dividers: [u32; 12]) -> Self {
        let [planes, tokens, segments, unit_vectors] =
            [0, 3, 6, 9].map(|count| u64::from(dividers[count]));
        Self { planes, tokens, segments, unit_vectors }
    }

    /// Vectors of a block, where each axis can be counted by a kernel.
    pub(crate) fn vectors(&self) -> Result<u64, KernelError> {
        let axes = [
            ("planes", self.planes),
            ("tokens", self.tokens),
            ("segments", self.segments),
            ("vectors of a unit", self.unit_vectors),
        ];
        let mut vectors = 1u64;
        for (what, axis) in axes {
            if axis > ITEMS_MAX {
                return Err(KernelError::TooMany { what, count: axis });
            }
            let too_many = KernelError::TooMany { what, count: u64::MAX };
            vectors = vectors.checked_mul(axis).ok_or(too_many)?;
        }
        Ok(vectors)
    }
}

/// Items of one launch, and places of one axis, at most: kernels count both in 31 bits.
pub(crate) const ITEMS_MAX: u64 = i32::MAX as u64;

/// The number of a launch's items, `None` where 64 bits do not count them, as kernels count them.
pub(crate) fn counted(what: &'static str, items: Option<u64>) -> Result<u32, KernelError> {
    let count = items.unwrap_or(u64::MAX);
    if count > ITEMS_MAX {
        return Err(KernelError::TooMany { what, count });
    }
    Ok(count as u32)
}

/// Cuts `count` things of `items` items each into launches: where each begins, and how many it has.
pub(crate) fn launches(
    what: (&'static str, u64),
    items: u64,
) -> Result<impl Iterator<Item = (u64, u64)>, KernelError> {
    cut(what, items, guard!("kernels.launches-are-cut", ITEMS_MAX, else ITEMS_MAX + 1))
}

fn cut(
    (what, count): (&'static str, u64),
    items: u64,
    items_max: u64,
) -> Result<impl Iterator<Item = (u64, u64)>, KernelError> {
    let each = items_max.checked_div(items).unwrap_or(count);
    if each == 0 && count > 0 {
        return Err(KernelError::TooMany { what, count: items });
    }
    let starts =
        (0..count.checked_div(each).map_or(0, |_| count.div_ceil(each))).map(move |n| n * each);
    Ok(starts.map(move |start| (start, each.min(count - start))))
}

/// A run of bytes that every row has, which lies alike in all rows, on both sides.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct UnitRun {
    /// Its first byte, from the beginning of what was taken apart.
    pub(crate) first: u64,
    pub(crate) from: UnitStrides,
    pub(crate) to: UnitStrides,
    pub(crate) tokens: u64,
    pub(crate) segments: u64,
    /// Bytes of a unit.
    pub(crate) unit: u64,
}

/// Where a run lies on one side, from the start of a block in its plane.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct UnitStrides {
    pub(crate) offset: u64,
    pub(crate) token: u64,
    pub(crate) segment: u64,
}

/// The planes of one launch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Planes {
    /// All, in the order `layer * kv_count + kv`.
    All,
    /// One tensor of each layer, in the order of the layers: keys (0) or values (1).
    Of(u64),
}

impl Planes {
    /// What the planes of these sides go in: all together, or keys and values apart where they lie
    /// differently on one of the sides, which have as many planes each.
    pub(crate) fn of(sides: &[Blocks<'_>]) -> &'static [Self] {
        let are_alike = sides.iter().all(|side| side.layout().has_like_planes());
        if are_alike { &[Self::All] } else { &[Self::Of(0), Self::Of(1)] }
    }

    /// Whether what counts once for all launches counts here.
    pub(crate) fn are_first(self) -> bool {
        self.kv() == 0
    }

    /// The first tensor of a layer that is among them.
    fn kv(self) -> u64 {
        match self {
            Self::All => 0,
            Self::Of(kv) => kv,
        }
    }

    /// Planes of a layer.
    pub(crate) fn of_layer(self, shape: &KvShape) -> u32 {
        match self {
            Self::All => shape.kv_count(),
            Self::Of(_) => 1,
        }
    }

    /// How many there are.
    pub(crate) fn count(self, shape: &KvShape) -> u64 {
        u64::from(shape.layers()) * u64::from(self.of_layer(shape))
    }

    /// What their rows are made of.
    pub(crate) fn parts(self, blocks: Blocks<'_>) -> &[RowPart] {
        blocks.layout().parts_of(self.kv())
    }

    /// Address of the table of their addresses.
    fn table(self, blocks: Blocks<'_>) -> u64 {
        let layers = u64::from(blocks.shape().layers());
        match self {
            Self::All => blocks.planes_address(),
            Self::Of(kv) => blocks.chunk_planes_address() + kv * layers * PLANE_BYTES,
        }
    }
}

/// Bytes of the address of a plane.
const PLANE_BYTES: u64 = size_of::<u64>() as u64;

/// The addresses of all planes in the order `layer * kv_count + kv`, and then in the order
/// `kv * layers + layer`; `None` where the host has no memory for them.
pub(crate) fn plane_table(shape: &KvShape, address: impl Fn(u64, u64) -> u64) -> Option<Vec<u64>> {
    let (layers, kv_count) = (u64::from(shape.layers()), u64::from(shape.kv_count()));
    let mut table = Vec::new();
    let entries = usize::try_from(shape.planes()).ok()?.checked_mul(2)?;
    table.try_reserve_exact(entries).ok()?;
    for layer in 0..layers {
        table.extend((0..kv_count).map(|kv| address(layer, kv)));
    }
    for kv in 0..kv_count {
        table.extend((0..layers).map(|layer| address(layer, kv)));
    }
    Some(table)
}

/// Takes the rows of `tokens` tokens, of `bytes` bytes each, apart into as few runs as the parts that they
/// are made of on either side allow.
pub(crate) fn runs(from: &[RowPart], to: &[RowPart], (tokens, bytes): (u64, u64)) -> Vec<UnitRun> {
    let mut runs: Vec<UnitRun> = Vec::new();
    let mut done = 0;
    while done < bytes {
        let (a, b) = (BytePlace::of(from, done), BytePlace::of(to, done));
        let left = bytes - done;
        let unit = left.min(a.contiguous).min(b.contiguous);
        // How many units follow each other in equal steps on both sides.
        let segments = (left / unit).min(a.steps(unit)).min(b.steps(unit)).max(1);
        let strides = |place: &BytePlace| UnitStrides {
            offset: place.offset,
            token: place.token_stride,
            segment: place.step(unit),
        };
        runs.push(UnitRun {
            first: done,
            from: strides(&a),
            to: strides(&b),
            tokens,
            segments,
            unit,
        });
        done += unit * segments;
    }
    runs
}

/// Where a byte of a row lies, and what follows it.
struct BytePlace {
    offset: u64,
    token_stride: u64,
    /// Bytes of its segment from here on.
    contiguous: u64,
    segment: u64,
    segment_stride: u64,
    /// Whole segments of its part from here on; 0 inside a segment.
    segments: u64,
}

impl BytePlace {
    fn of(parts: &[RowPart], byte: u64) -> Self {
        let mut start = 0;
        for part in parts {
            let bytes = part.segment_bytes * u64::from(part.segments);
            if byte < start + bytes {
                let (segment, inside) =
                    ((byte - start) / part.segment_bytes, (byte - start) % part.segment_bytes);
                let segments = if inside == 0 { u64::from(part.segments) - segment } else { 0 };
                return Self {
                    offset: part.offset_bytes + segment * part.segment_stride_bytes + inside,
                    token_stride: part.token_stride_bytes,
                    contiguous: part.segment_bytes - inside,
                    segment: part.segment_bytes,
                    segment_stride: part.segment_stride_bytes,
                    segments,
                };
            }
            start += bytes;
        }
        unreachable!("byte {byte} of a row of {start}: parts make up rows")
    }

    /// How many units of `unit` bytes, at most `contiguous`, follow in equal steps.
    fn steps(&self, unit: u64) -> u64 {
        if unit == self.segment { self.segments } else { self.contiguous / unit }
    }

    /// Bytes from such a unit to the next.
    fn step(&self, unit: u64) -> u64 {
        if unit == self.segment { self.segment_stride } else { unit }
    }
}

impl UnitRun {
    /// The same with units as long as both sides allow.
    pub(crate) fn merged(mut self) -> Self {
        for _ in 0..2 {
            let unit = self.unit;
            if self.segments > 1 && self.from.segment == unit && self.to.segment == unit {
                self.unit *= self.segments;
                self.segments = 1;
            } else if self.tokens > 1 && self.from.token == unit && self.to.token == unit {
                self.unit *= self.tokens;
                self.tokens = 1;
            }
        }
        self
    }

    /// Every number that a vector of the source must divide, or-ed together, beside the blocks' own
    /// and the unit.
    pub(crate) fn source_bits(&self) -> u64 {
        self.bits(&self.from)
    }

    /// The same of the destination.
    pub(crate) fn destination_bits(&self) -> u64 {
        self.bits(&self.to)
    }

    fn bits(&self, side: &UnitStrides) -> u64 {
        let token = if self.tokens > 1 { side.token } else { 0 };
        let segment = if self.segments > 1 { side.segment } else { 0 };
        side.offset | token | segment
    }
}

impl RawBlockSide {
    /// One side of a run, over the first `num_blocks` blocks.
    pub(crate) fn of(
        (blocks, planes): (Blocks<'_>, Planes),
        strides: &UnitStrides,
        num_blocks: u64,
    ) -> Self {
        Self {
            base: strides.offset,
            plane_ptrs: planes.table(blocks),
            plane_stride: 0,
            block_stride: blocks.layout().block_stride_bytes(),
            token_stride: strides.token,
            segment_stride: strides.segment,
            num_blocks,
        }
    }

    /// Blocks that are one piece each and begin `block_stride` bytes apart, of a memory that begins at `address`.
    pub(crate) fn whole(address: u64, block_stride: u64, num_blocks: u64) -> Self {
        Self { base: address, block_stride, num_blocks, ..Self::default() }
    }
}

/// Where a plane begins in its tensor; planes are numbered as in the table of their addresses.
pub(crate) fn plane_offset(shape: &KvShape, layout: &PagedLayout, plane: u64) -> u64 {
    let kv_count = u64::from(shape.kv_count());
    layout.plane_offset(plane / kv_count, plane % kv_count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvFormat, layout::FormatOptions};

    fn cut(count: u64, items: u64) -> Result<Vec<(u64, u64)>, KernelError> {
        super::cut(("vectors of a block", count), items, 100).map(Iterator::collect)
    }

    #[test]
    fn launches_have_all_of_the_pairs_and_few_enough_items() {
        assert_eq!(cut(7, 30), Ok(vec![(0, 3), (3, 3), (6, 1)]));
        assert_eq!(cut(6, 50), Ok(vec![(0, 2), (2, 2), (4, 2)]));
        assert_eq!(cut(3, 10), Ok(vec![(0, 3)]));
        assert_eq!(cut(2, 100), Ok(vec![(0, 1), (1, 1)]));
        assert_eq!(cut(0, 10), Ok(vec![]));
        assert_eq!(cut(5, 0), Ok(vec![(0, 5)]));
        let too_many = KernelError::TooMany { what: "vectors of a block", count: 101 };
        assert_eq!(cut(1, 101), Err(too_many));
    }

    /// What a launch is cut to, its axes and its items in all, is what kernels count.
    #[test]
    fn no_launch_has_more_than_kernels_count() {
        for items in [1, 2, 3, 100, ITEMS_MAX - 1, ITEMS_MAX] {
            for count in [ITEMS_MAX / items, ITEMS_MAX / items + 1, 1 << 33] {
                let cut = launches(("vectors of a block", count), items).unwrap();
                for (_, count) in cut.take(3) {
                    let units = RawBlockUnits {
                        planes: 1,
                        tokens: count,
                        segments: 1,
                        unit_vectors: items,
                    };
                    assert_eq!(
                        counted("vectors", units.vectors().ok()),
                        Ok((count * items) as u32)
                    );
                }
            }
        }
        for items in [ITEMS_MAX + 1, u64::MAX] {
            let too_many = KernelError::TooMany { what: "vectors", count: items };
            assert_eq!(counted("vectors", Some(items)), Err(too_many));
        }
    }

    /// Blocks of any format go to a packed layout in pieces as long as a plane has them together.
    #[test]
    fn a_plane_of_a_block_moves_in_one_piece_where_both_sides_have_it_so() {
        for format in KvFormat::ALL {
            let one = matches!(format, KvFormat::Mla | KvFormat::MlaSlots | KvFormat::IndexerPages);
            let element_bytes = if format == KvFormat::IndexerPages { 1 } else { 2 };
            let options = FormatOptions {
                layers: 2,
                heads: if one { 1 } else { 4 },
                head_bytes: 128,
                element_bytes,
                block_tokens: 16,
                blocks: 3,
                block_padding_bytes: 0,
            };
            let shape = format.shape(&options).unwrap();
            let layout = format.layout(&options).unwrap();
            let packed = layout.packed(&shape);
            assert_eq!(packed.extent_bytes(&shape, 3), Ok(3 * shape.block_bytes()), "{format:?}");
            for kv in 0..u64::from(shape.kv_count()) {
                let side = |layout: &PagedLayout| layout.parts_of(kv).to_vec();
                let (from, to) = (side(&layout), side(&packed));
                let row = (16, shape.row_bytes());
                let runs = runs(&from, &to, row);
                let units: Vec<u64> = runs.iter().map(|run| run.merged().unit).collect();
                let expected = match format {
                    // Values and scales.
                    KvFormat::IndexerPages => vec![16 * 128, 16 * 4],
                    // Keys and values of a head, or of a token, are neighbours.
                    KvFormat::FusedHndSplit | KvFormat::FusedNhdSplit => vec![128],
                    _ => vec![shape.block_plane_bytes()],
                };
                assert_eq!(units, expected, "{format:?}");
            }
        }
    }
}
