//! Converting blocks between a 16-bit and an 8-bit cache while they are copied.

use bytemuck::{Pod, Zeroable};
use cuda_driver::{DeviceSpan, KernelArgs, LaunchConfig, Stream};

use crate::block_copy::{FLAT_THREADS, check_apart, check_pairs, check_same_planes};
use crate::block_units::{
    Planes, RawBlockSide, RawBlockUnits, RowSide, UnitRun, UnitStrides, counted, dividers,
    launches, runs,
};
use crate::kernels::check_alive;
use crate::layout::alignment_of;
use crate::operand::{Extent, check_aligned, check_array, check_disjoint};
use crate::{
    BlockPair, BlockPairs, Blocks, DeviceReport, KernelError, KernelSource, KvKernels, KvShape,
    convert::{NarrowFormat, WideFormat},
    error::{BlocksError, Operand, Side},
};

/// Which elements share a scale.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ScalePer {
    /// All of a plane: `scales[plane]`.
    Plane,
    /// A head of a plane, as calibrated: `scales[plane][head]`.
    Head,
    /// A block of a plane: `scales[plane][block]`.
    Block,
    /// A head of a block: `scales[plane][block][head]`.
    BlockHead,
    /// A token: `scales[plane][block][token]`, so that a token's place is its slot.
    Token,
    /// A head of a token: `scales[plane][block][token][head]`.
    TokenHead,
}

impl ScalePer {
    /// Whether each block has scales of its own, so that they can be measured.
    #[must_use]
    pub fn is_of_block(self) -> bool {
        !matches!(self, Self::Plane | Self::Head)
    }

    fn has_tokens(self) -> bool {
        matches!(self, Self::Token | Self::TokenHead)
    }

    fn has_heads(self) -> bool {
        matches!(self, Self::Head | Self::BlockHead | Self::TokenHead)
    }
}

/// What the conversions of [`KvKernels`] convert.
///
/// A row is heads one after another, each `head_size` elements. Blocks, where scales count them, are
/// those of the 8-bit side. Every element of the 16-bit side lies at an even address: memory, offsets and
/// strides of its layout that make it another are refused.
#[derive(Clone, Copy, Debug)]
pub struct Conversion<'a> {
    /// The memory that is read.
    pub from: Blocks<'a>,
    /// The memory that is written.
    pub to: Blocks<'a>,
    /// Format of the 16-bit side.
    pub wide: WideFormat,
    /// Format of the 8-bit side.
    pub narrow: NarrowFormat,
    /// Elements of a head; the whole row where heads do not matter.
    pub head_size: u32,
    /// One scale (`f32`) for each group of elements, `[plane][block][token][head]` without the
    /// indices that `per` leaves out.
    pub scales: DeviceSpan,
    /// Which elements share a scale.
    pub per: ScalePer,
    /// `count` pairs ([`BlockPair`]), where the kernel reads them.
    pub pairs: KernelSource<'a>,
    /// How many pairs.
    pub count: u64,
    /// The host's copy of the pairs, which is checked before the launch; `None` where only the device
    /// has them.
    pub host_pairs: Option<BlockPairs<'a>>,
    /// Blocks of the source that are ready, the first ones; others are refused.
    pub from_blocks: u64,
    /// Blocks of the destination that are ready, the first ones; others are refused.
    pub to_blocks: u64,
    /// Where to tell of pairs that the device had to pass over.
    pub report: Option<&'a DeviceReport>,
}

/// Where scales lie, as `Scales` of `kernels/quantize.cu`; strides in scales, 0 where an index does not
/// count.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, Pod, PartialEq, Zeroable)]
pub struct RawScales {
    /// Address of the first.
    pub scales: u64,
    /// From a plane to the next.
    pub plane_stride: u64,
    /// From a block to the next.
    pub block_stride: u64,
    /// From a token to the next.
    pub token_stride: u64,
    /// From a head to the next.
    pub head_stride: u64,
}

/// Formats, as kernels number them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RawFormats {
    /// [`WideFormat`] as a number.
    pub wide: u32,
    /// [`NarrowFormat`] as a number.
    pub narrow: u32,
    /// Units of a head, at least 1.
    pub head_units: u32,
    /// Units of the row before the first.
    pub first_unit: u32,
}

const _: () = assert!(size_of::<RawScales>() == 40, "Scales of kernels/quantize.cu");

impl RawScales {
    /// Those of some planes, by their numbers among these.
    fn of(self, planes: Planes, shape: &KvShape) -> Self {
        let first = planes.kv() * self.plane_stride * SCALE_BYTES;
        // No overflow: scales are found in their memory (`places`).
        let plane_stride = planes.step(shape) * self.plane_stride;
        Self { scales: self.scales + first, plane_stride, ..self }
    }
}

impl RawFormats {
    /// `Formats` of `kernels/quantize.cu`.
    fn args(&self) -> [u32; 6] {
        let [head_units, magic, shift] = dividers([self.head_units.into()]);
        [self.wide, self.narrow, head_units, magic, shift, self.first_unit]
    }
}

/// Which kernel of `kernels/quantize.cu`.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ConversionKind {
    /// From 16 bits to 8.
    Quantize,
    /// From 8 bits to 16.
    Dequantize,
    /// Of 16 bits, to find scales.
    Measure,
}

/// The parameters of one launch of a conversion, unchecked; see `kernels/quantize.cu`.
#[derive(Clone, Copy, Debug)]
pub struct RawConversion {
    /// Which kernel.
    pub kind: ConversionKind,
    /// The side that is written.
    pub to: RawBlockSide,
    /// The side that is read.
    pub from: RawBlockSide,
    /// What a block is made of.
    pub units: RawBlockUnits,
    /// Address of the pairs.
    pub pairs: u64,
    /// How many pairs; fewer than 2^31 vectors in all.
    pub count: u64,
    /// Pairs before these, which count where places are reported.
    pub first_pair: u64,
    /// The scales.
    pub scales: RawScales,
    /// The formats.
    pub formats: RawFormats,
    /// Address of a report, or 0.
    pub report: u64,
    /// Elements of a vector: 8 or 1.
    pub vector: u32,
}

impl KvKernels {
    /// Copies blocks from a 16-bit cache to an 8-bit one: for each pair `(s, d)`, plane `p`, token `t`
    /// and element `x` of head `h`,
    /// `to[d][p][t][h][x] = narrow.encode(wide.decode(from[s][p][t][h][x]) * (1 / scale))`, with the
    /// scale of `(p, d, t, h)`, in single precision, each operation rounded.
    ///
    /// [`NarrowFormat::encode`] says how it is rounded, that it saturates, and what becomes of a NaN.
    /// Nothing is launched without pairs.
    ///
    /// # Ordering
    /// As of [`copy_blocks`](KvKernels::copy_blocks); scales are read when the kernel runs.
    ///
    /// # Errors
    /// [`BlocksError`]; nothing was enqueued then, except where the device refuses one of several
    /// launches.
    #[track_caller]
    pub fn quantize_blocks(
        &self,
        stream: &Stream,
        conversion: Conversion<'_>,
    ) -> Result<(), BlocksError> {
        let _site = cuda_driver::site::enter();
        self.convert(stream, &conversion, ConversionKind::Quantize)
    }

    /// Copies blocks from an 8-bit cache to a 16-bit one: for each pair `(s, d)`, plane `p`, token `t`
    /// and element `x` of head `h`,
    /// `to[d][p][t][h][x] = wide.encode(narrow.decode(from[s][p][t][h][x]) * scale)`, with the scale of
    /// `(p, s, t, h)`, in single precision.
    ///
    /// # Ordering
    /// As of [`quantize_blocks`](KvKernels::quantize_blocks).
    ///
    /// # Errors
    /// As of [`quantize_blocks`](KvKernels::quantize_blocks).
    #[track_caller]
    pub fn dequantize_blocks(
        &self,
        stream: &Stream,
        conversion: Conversion<'_>,
    ) -> Result<(), BlocksError> {
        let _site = cuda_driver::site::enter();
        self.convert(stream, &conversion, ConversionKind::Dequantize)
    }

    /// Finds the scales with which [`quantize_blocks`](KvKernels::quantize_blocks) of the same
    /// conversion uses all of the narrow format: for each group of elements the largest magnitude
    /// divided by [`NarrowFormat::largest`], at least 2^-126, and 1 where all elements are 0. NaN are
    /// left out, and an infinity counts as the largest finite number of the wide format.
    ///
    /// The destination is not touched; its blocks say where scales go.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. A conversion enqueued on the same stream afterwards reads
    /// these scales.
    ///
    /// # Errors
    /// [`BlocksError::SharedScales`] where blocks share scales; [`BlocksError::TooMany`] (`parts of a row`) where rows are in two
    /// parts, or where several heads are in pieces finer than a head on one side and whole on the other; and as of
    /// [`quantize_blocks`](KvKernels::quantize_blocks).
    #[track_caller]
    pub fn measure_scales(
        &self,
        stream: &Stream,
        conversion: Conversion<'_>,
    ) -> Result<(), BlocksError> {
        let _site = cuda_driver::site::enter();
        if !conversion.per.is_of_block() {
            return Err(BlocksError::SharedScales { per: conversion.per });
        }
        self.convert(stream, &conversion, ConversionKind::Measure)
    }

    fn convert(
        &self,
        stream: &Stream,
        conversion: &Conversion<'_>,
        kind: ConversionKind,
    ) -> Result<(), BlocksError> {
        self.check_stream(stream)?;
        let scales = self.check_conversion(conversion, kind)?;
        if conversion.count == 0 {
            return Ok(());
        }
        for raw in &self.conversions(stream, conversion, (kind, scales))? {
            // SAFETY: `check_conversion` has found the pairs and a scale for each group in their
            // memory, and both sides to be of the kernels' device; the units of blocks below
            // `num_blocks`, to which the kernel keeps, lie in the memory of their side (invariants of
            // `PagedKv` and `HostBlocks`, and `runs` stays inside a row, whose elements
            // `check_conversion` has compared). Pinned memory is not freed before the device has
            // finished (a dropped buffer is only retired), and is not written by the host, which
            // shares it (`HostBlocks`).
            unsafe { self.convert_blocks_raw(stream, raw) }?;
        }
        Ok(())
    }

    /// Launches a conversion with these parameters, unchecked.
    ///
    /// # Errors
    /// [`BlocksError::TooMany`] for more vectors than the kernel counts, [`KernelError::Module`] and
    /// [`KernelError::Device`].
    ///
    /// # Safety
    /// - every address is of memory that the kernels' device can access, and stays allocated until
    ///   the kernel has completed; all of what the head of `kernels/quantize.cu` names as read or
    ///   written lies there, and is aligned to `vector` elements, which is 8 or 1;
    /// - `head_units` is not 0, and divides the segments for [`ConversionKind::Measure`];
    /// - host memory that is written is not accessed by the host until then.
    #[track_caller]
    pub unsafe fn convert_blocks_raw(
        &self,
        stream: &Stream,
        raw: &RawConversion,
    ) -> Result<(), BlocksError> {
        let _site = cuda_driver::site::enter();
        // Groups have no more threads than vectors, so that these count for them too.
        let vectors = counted("vectors", raw.units.vectors()?.checked_mul(raw.count))?;
        let sides = KernelArgs::new().arg(raw.to).arg(raw.from);
        let (described, items, threads) = match raw.kind {
            ConversionKind::Measure => {
                let groups = ScaleGroups::of(raw);
                let items = raw.count * groups.of_pair;
                (sides.arg(groups.args()), items, items * u64::from(groups.lanes))
            }
            _ => {
                let items = u64::from(vectors);
                (sides.arg(raw.units.dividers()), items, items.div_ceil(UNROLL))
            }
        };
        let args = described
            .arg(raw.pairs)
            .arg(items as u32)
            .arg(raw.first_pair)
            .arg(raw.scales)
            .arg(raw.formats.args())
            .arg(raw.report);
        // In the order of `entry::CONVERSIONS`.
        let index = match (raw.kind, raw.vector) {
            (ConversionKind::Quantize, 8) => 0,
            (ConversionKind::Quantize, _) => 1,
            (ConversionKind::Dequantize, 8) => 2,
            (ConversionKind::Dequantize, _) => 3,
            (ConversionKind::Measure, 8) => 4,
            (ConversionKind::Measure, _) => 5,
        };
        let kernel = &self.conversions.get(self.device())?[index];
        let blocks = threads.div_ceil(FLAT_THREADS.into()).max(1);
        let config = LaunchConfig::linear(blocks as u32, FLAT_THREADS);
        // SAFETY: the 9 arguments are the parameters of every entry of `kernels/quantize.cu`, in order
        // and size (asserted here and in `block_units.rs`); the rest is the caller's promise.
        Ok(unsafe { kernel.launch(stream, &config, &args) }?)
    }

    /// Checks a conversion; the places of its scales.
    fn check_conversion(
        &self,
        conversion: &Conversion<'_>,
        kind: ConversionKind,
    ) -> Result<RawScales, BlocksError> {
        let Conversion { from, to, pairs, count, .. } = *conversion;
        self.check_blocks(from, conversion.from_blocks)?;
        self.check_blocks(to, conversion.to_blocks)?;
        if let Some(report) = conversion.report {
            self.check_report(report)?;
        }
        check_same_planes(from, to)?;
        let (from_bytes, to_bytes) = kind.element_bytes();
        let elements = elements_of(from, from_bytes, Side::Source)?;
        let to_elements = elements_of(to, to_bytes, Side::Destination)?;
        if elements != to_elements {
            let (what, source_count, destination_count) =
                ("elements of a row", elements, to_elements);
            return Err(BlocksError::Shapes { what, source_count, destination_count });
        }
        let head_size = u64::from(conversion.head_size);
        if head_size == 0 || !elements.is_multiple_of(head_size) {
            return Err(BlocksError::HeadSize { head_size, elements });
        }
        check_array(Operand::BlockPairs, pairs, count.saturating_mul(2), 4)?;
        let narrow = if kind == ConversionKind::Dequantize { from } else { to };
        let (scales, scale_count) = places(conversion, narrow, elements / head_size)?;
        check_array(Operand::Scales, conversion.scales, scale_count, SCALE_BYTES)?;
        check_alive(conversion.scales)?;
        check_apart(from, to)?;
        let written: &[_] = match kind {
            ConversionKind::Measure => &[(Operand::Scales, conversion.scales.into())],
            _ => &to.extents().into_iter().map(|e| (to.operand(), e)).collect::<Vec<_>>(),
        };
        for &(operand, extent) in written {
            check_disjoint((operand, extent), (Operand::BlockPairs, pairs))?;
            if kind == ConversionKind::Measure {
                for read in from.extents() {
                    check_disjoint((operand, extent), (from.operand(), read))?;
                }
            } else {
                check_disjoint((operand, extent), (Operand::Scales, conversion.scales))?;
            }
        }
        let ready = (conversion.from_blocks, conversion.to_blocks);
        check_pairs(conversion.host_pairs, count, ready)?;
        Ok(scales)
    }

    /// One launch for each run of a row, or more where there are more vectors than one counts.
    fn conversions(
        &self,
        stream: &Stream,
        conversion: &Conversion<'_>,
        (kind, scales): (ConversionKind, RawScales),
    ) -> Result<Vec<RawConversion>, BlocksError> {
        let Conversion { from, to, head_size, .. } = *conversion;
        let pairs = conversion.pairs.address(stream).map_err(KernelError::from)?;
        let shape = from.shape();
        let (from_bytes, to_bytes) = kind.element_bytes();
        let side = |parts, element_bytes| RowSide { parts, first: 0, element_bytes };
        let elements = shape.row_bytes() / from_bytes;
        let row = (u64::from(shape.block_tokens()), elements);
        let head_size = u64::from(head_size);
        let launch = |planes: Planes, run: UnitRun| {
            // A pair that is passed over is told of once.
            let report = conversion.report.filter(|_| planes.are_first() && run.first == 0);
            let scales = scales.of(planes, shape);
            let aligned = |bits: u64, bytes: u64| alignment_of(bits) >= 8 * bytes;
            // What is measured is not written.
            let to_bits = match kind {
                ConversionKind::Measure => 0,
                _ => run.destination_bits() | to.alignment_bits(),
            };
            let vector = if run.unit.is_multiple_of(8)
                && aligned(run.source_bits() | from.alignment_bits(), from_bytes)
                && aligned(to_bits, to_bytes)
            {
                8
            } else {
                1
            };
            let units = RawBlockUnits {
                planes: planes.count(shape),
                tokens: run.tokens,
                segments: run.segments,
                unit_vectors: run.unit / vector,
            };
            let all = ("vectors of a block", conversion.count);
            let raw = move |(first_pair, count)| RawConversion {
                kind,
                to: RawBlockSide::of((to, planes), &run.to, conversion.to_blocks),
                from: RawBlockSide::of((from, planes), &run.from, conversion.from_blocks),
                units,
                pairs: pairs + first_pair * size_of::<BlockPair>() as u64,
                count,
                first_pair,
                scales,
                formats: RawFormats {
                    wide: conversion.wide as u32,
                    narrow: conversion.narrow as u32,
                    head_units: (head_size / run.unit) as u32,
                    first_unit: (run.first / run.unit) as u32,
                },
                report: report.map_or(0, DeviceReport::address),
                vector: vector as u32,
            };
            Ok::<Vec<_>, BlocksError>(launches(all, units.vectors()?)?.map(raw).collect())
        };
        let mut raws = Vec::new();
        for &planes in Planes::of(&[from, to]) {
            let source = side(planes.parts(from), from_bytes);
            let target = side(planes.parts(to), to_bytes);
            let runs = runs(source, target, row, head_size);
            check_runs(conversion, kind, &runs)?;
            for run in runs {
                raws.extend(launch(planes, run)?);
            }
        }
        Ok(raws)
    }
}

/// Refuses runs of a row that a kernel cannot count, reads at odd addresses, or cuts heads with.
fn check_runs(
    conversion: &Conversion<'_>,
    kind: ConversionKind,
    runs: &[UnitRun],
) -> Result<(), BlocksError> {
    let Conversion { from, to, from_blocks, to_blocks, .. } = *conversion;
    let elements = from.shape().row_bytes() / kind.element_bytes().0;
    let head_size = u64::from(conversion.head_size);
    for run in runs {
        // Kernels number the units of a row in 31 bits.
        counted("units of a row", Some(elements / run.unit))?;
        match kind {
            ConversionKind::Dequantize => {
                check_whole(to, Side::Destination, (run, &run.to), to_blocks)?;
            }
            _ => check_whole(from, Side::Source, (run, &run.from), from_blocks)?,
        }
    }
    // A head is whole units, of every run.
    let whole =
        |run: &UnitRun| head_size.is_multiple_of(run.unit) && run.first.is_multiple_of(run.unit);
    if !runs.iter().all(whole) {
        return Err(BlocksError::HeadSize { head_size, elements });
    }
    if kind == ConversionKind::Measure && runs.len() > 1 {
        return Err(BlocksError::TooMany { what: "parts of a row", count: runs.len() as u64 });
    }
    Ok(())
}

impl ConversionKind {
    /// Bytes of an element of the source and of the destination.
    fn element_bytes(self) -> (u64, u64) {
        match self {
            Self::Quantize | Self::Measure => (WIDE_BYTES, 1),
            Self::Dequantize => (1, WIDE_BYTES),
        }
    }
}

/// How the elements of a pair share scales, for [`ConversionKind::Measure`].
struct ScaleGroups {
    planes: u64,
    token_groups: u64,
    head_groups: u64,
    /// Of a group, as the two that follow.
    tokens: u64,
    segments: u64,
    unit_vectors: u64,
    /// Groups of a pair.
    of_pair: u64,
    /// Vectors of a group.
    vectors: u64,
    /// Neighbouring threads that share a group, a power of two up to a warp.
    lanes: u32,
}

impl ScaleGroups {
    fn of(raw: &RawConversion) -> Self {
        let RawBlockUnits { planes, tokens, segments, unit_vectors } = raw.units;
        let groups_of = |stride: u64, count: u64| if stride == 0 { 1 } else { count.max(1) };
        let heads = segments / u64::from(raw.formats.head_units.max(1));
        let token_groups = groups_of(raw.scales.token_stride, tokens);
        let head_groups = groups_of(raw.scales.head_stride, heads);
        let (tokens, segments) = (tokens / token_groups, segments / head_groups);
        let vectors = tokens * segments * unit_vectors;
        // So many that each has a round of loads, where there are enough vectors.
        let lanes = vectors.div_ceil(MEASURED_IN_FLIGHT).clamp(1, 32).next_power_of_two();
        Self {
            planes,
            token_groups,
            head_groups,
            tokens,
            segments,
            unit_vectors,
            of_pair: planes * token_groups * head_groups,
            vectors,
            lanes: lanes as u32,
        }
    }

    /// `ScaleGroups` of `kernels/quantize.cu`.
    fn args(&self) -> [u32; 18] {
        let mut args = [0; 18];
        let groups: [u32; 9] = dividers([self.planes, self.token_groups, self.head_groups]);
        let of_group: [u32; 6] = dividers([self.segments, self.unit_vectors]);
        args[..9].copy_from_slice(&groups);
        args[9] = self.tokens as u32;
        args[10..16].copy_from_slice(&of_group);
        args[16..].copy_from_slice(&[self.vectors as u32, self.lanes]);
        args
    }
}

/// Vectors that a thread converts at once: `KV_CONVERT_UNROLL` of `kernels/kv.cuh`.
const UNROLL: u64 = 4;
/// Vectors that a thread reads at once: the same of `kernels/quantize.cu`.
const MEASURED_IN_FLIGHT: u64 = 2;

/// Elements of a row, all of whose segments are whole elements.
fn elements_of(blocks: Blocks<'_>, element_bytes: u64, side: Side) -> Result<u64, BlocksError> {
    let row_bytes = blocks.shape().row_bytes();
    let parts = [0, 1].into_iter().flat_map(|kv| blocks.layout().parts_of(kv));
    for bytes in parts.map(|part| part.segment_bytes).chain([row_bytes]) {
        if !bytes.is_multiple_of(element_bytes) {
            return Err(BlocksError::Elements { side, bytes, element_bytes });
        }
    }
    Ok(row_bytes / element_bytes)
}

/// Checks that the elements of a run of the 16-bit side lie at even addresses.
fn check_whole(
    blocks: Blocks<'_>,
    side: Side,
    (run, strides): (&UnitRun, &UnitStrides),
    num_blocks: u64,
) -> Result<(), BlocksError> {
    let (shape, layout) = (blocks.shape(), blocks.layout());
    for Extent { address, .. } in blocks.extents() {
        check_aligned(blocks.operand(), address, WIDE_BYTES)?;
    }
    // A stride counts where there is a second place along its axis.
    for (bytes, places) in [
        (layout.layer_stride_bytes(), u64::from(shape.layers())),
        (layout.kv_stride_bytes(), u64::from(shape.kv_count())),
        (layout.block_stride_bytes(), num_blocks),
        (strides.token, run.tokens),
        (strides.segment, run.segments),
        (strides.offset, u64::MAX),
    ] {
        if places > 1 && !bytes.is_multiple_of(WIDE_BYTES) {
            return Err(BlocksError::Elements { side, bytes, element_bytes: WIDE_BYTES });
        }
    }
    Ok(())
}

/// Bytes of a scale.
const SCALE_BYTES: u64 = 4;
/// Bytes of an element of the 16-bit side.
const WIDE_BYTES: u64 = 2;

/// Where scales lie, and how many there are.
fn places(
    conversion: &Conversion<'_>,
    narrow: Blocks<'_>,
    heads: u64,
) -> Result<(RawScales, u64), BlocksError> {
    let per = conversion.per;
    let shape = narrow.shape();
    let heads = if per.has_heads() { heads } else { 1 };
    let tokens = if per.has_tokens() { u64::from(shape.block_tokens()) } else { 1 };
    let blocks = if per.is_of_block() { narrow.count() } else { 1 };
    let too_many = BlocksError::TooMany { what: "scales", count: u64::MAX };
    let of_block = heads.checked_mul(tokens).ok_or(too_many.clone())?;
    let of_plane = of_block.checked_mul(blocks).ok_or(too_many.clone())?;
    let count = of_plane.checked_mul(shape.planes()).ok_or(too_many)?;
    let scales = RawScales {
        scales: conversion.scales.address(),
        plane_stride: of_plane,
        block_stride: if per.is_of_block() { of_block } else { 0 },
        token_stride: if per.has_tokens() { heads } else { 0 },
        head_stride: per.has_heads().into(),
    };
    Ok((scales, count))
}
