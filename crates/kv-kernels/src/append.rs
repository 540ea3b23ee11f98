//! Scattering the keys and values of new tokens into pages.

use bytemuck::{Pod, Zeroable};
use cuda_driver::{KernelArgs, LaunchConfig, Stream, guard};
use kv_pool::Slot;

use crate::block_copy::FLAT_THREADS;
use crate::block_units::{
    Planes, RawBlockSide, RawBlockUnits, UnitRun, UnitStrides, counted, launches, runs,
};
use crate::divider::Divider64;
use crate::launcher::{Launcher, planes_of};
use crate::layout::RowPart;
use crate::lazy::LazyModule;
use crate::operand::{check_array, check_disjoint, check_length};
use crate::paged_layout::alignment_of;
use crate::stored::{Named, check_named};
use crate::{
    Blocks, DeviceReport, KernelError, KernelSource, PagedKv, entry,
    error::{Operand, OperandError},
};

const PTX: &str = include_str!("../ptx/append.compute_80.ptx");

/// What [`KvKernels::append`](crate::KvKernels::append) scatters.
///
/// The row of token `n` in tensor `k` (keys or values) of layer `first_layer + l` begins at
/// `l * layer_stride_bytes + n * token_stride_bytes` of its source, and is one piece: heads one after
/// another. A token stride longer than a row is what a slice of a fused projection has.
#[derive(Clone, Copy, Debug)]
pub struct Append<'a> {
    /// The rows of keys, or of the one tensor that each layer has.
    pub keys: KernelSource<'a>,
    /// The rows of values, exactly where each layer has two tensors.
    pub values: Option<KernelSource<'a>>,
    /// Bytes from a layer's rows to the next layer's.
    pub layer_stride_bytes: u64,
    /// Bytes from a token's row to the next token's, at least a row.
    pub token_stride_bytes: u64,
    /// The layer of the pages that the first rows are of.
    pub first_layer: u32,
    /// How many layers the rows are of.
    pub layers: u32,
    /// One [`Slot`] for each token; [`Slot::NONE`] is passed over.
    pub slot_mapping: KernelSource<'a>,
    /// The host's copy of the mapping, which is checked before the launch; `None` where only the
    /// device has it.
    pub host_slots: Option<&'a [Slot]>,
    /// How many tokens.
    pub tokens: u64,
    /// Blocks that are ready, the first of the pages; slots beyond them are refused.
    pub num_blocks: u64,
    /// Where to tell of slots that the device had to pass over.
    pub report: Option<&'a DeviceReport>,
}

/// The rows of new tokens, as `AppendRows` of `kernels/append.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, Pod, PartialEq, Zeroable)]
pub(crate) struct RawAppendRows {
    /// Addresses of the rows of keys and of values.
    pub(crate) rows: [u64; 2],
    /// Bytes from a layer to the next.
    pub(crate) layer_stride: u64,
    /// Bytes from a token to the next.
    pub(crate) token_stride: u64,
    /// Bytes from a segment to the next.
    pub(crate) segment_stride: u64,
    /// Where the first segment begins in a row.
    pub(crate) base: u64,
}

const _: () = assert!(size_of::<RawAppendRows>() == 48, "AppendRows of kernels/append.cu");

/// The parameters of one launch of `append`, unchecked; see `kernels/append.cu`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawAppend {
    /// The pages.
    pub(crate) pages: RawBlockSide,
    /// The rows.
    pub(crate) from: RawAppendRows,
    /// What a row is made of; `tokens` are the new ones. Fewer than 2^31 vectors in all.
    pub(crate) units: RawBlockUnits,
    /// Address of the slots.
    pub(crate) slot_mapping: u64,
    /// Tokens of a block.
    pub(crate) block_tokens: u64,
    /// Tokens before these, which count where places are reported.
    pub(crate) first_token: u64,
    /// The plane of the pages that the first rows are of.
    pub(crate) first_plane: u32,
    /// Tensors of a layer, 1 or 2.
    pub(crate) kv_count: u32,
    /// Address of a report, or 0.
    pub(crate) report: u64,
    /// Bytes of a vector: 16, 8, 4, 2 or 1.
    pub(crate) vector_bytes: u64,
}

/// `AppendSlots` of `kernels/append.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct AppendSlots {
    slots: u64,
    block_tokens: Divider64,
    first_token: u64,
    first_plane: u32,
    kv_count: u32,
}

const _: () = assert!(size_of::<AppendSlots>() == 40, "AppendSlots of kernels/append.cu");

/// The kernels that scatter rows, by the logarithm of the bytes of a vector.
#[derive(Debug)]
pub(crate) struct AppendKernels(LazyModule<5>);

impl AppendKernels {
    pub(crate) const fn new() -> Self {
        Self(LazyModule::new(PTX, entry::APPEND))
    }

    /// See [`KvKernels::append`](crate::KvKernels::append).
    pub(crate) fn append(
        &self,
        on: &Launcher,
        stream: &Stream,
        paged: &PagedKv,
        append: &Append<'_>,
    ) -> Result<(), KernelError> {
        on.check_stream(stream)?;
        check_append(on, paged, append)?;
        if append.tokens == 0 || append.layers == 0 {
            return Ok(());
        }
        for raw in &appends(stream, paged, append)? {
            // SAFETY: `check_append` has found a slot for each token, and the rows of all tokens and
            // layers in their sources; slots of blocks below `num_blocks`, to which the kernel keeps,
            // lie in the paged memory (invariant of `PagedKv`), and so do the planes of the layers,
            // which `check_append` has compared. Pinned memory is only read, and is not freed before
            // the device has finished (a dropped buffer is only retired).
            unsafe { self.launch(on, stream, raw) }?;
        }
        Ok(())
    }

    /// Launches the kernel with these parameters, unchecked.
    ///
    /// # Errors
    /// [`KernelError::TooMany`] for more vectors than the kernel counts, [`KernelError::Module`] and
    /// [`KernelError::Device`].
    ///
    /// # Safety
    /// - every address is of memory that the kernels' device can access, and stays allocated until
    ///   the kernel has completed; all of what the head of `kernels/append.cu` names as read or
    ///   written lies there, and is aligned to `vector_bytes`, which is 16, 8, 4, 2 or 1;
    /// - `kv_count` is 1 or 2;
    /// - no host memory is written.
    pub(crate) unsafe fn launch(
        &self,
        on: &Launcher,
        stream: &Stream,
        raw: &RawAppend,
    ) -> Result<(), KernelError> {
        let items = guard!(
            "kernels.launches-are-counted",
            counted("vectors", Some(raw.units.vectors()?))?,
            else raw.units.vectors().unwrap_or(0) as u32
        );
        let slots = AppendSlots {
            slots: raw.slot_mapping,
            block_tokens: Divider64::new(raw.block_tokens.max(1)),
            first_token: raw.first_token,
            first_plane: raw.first_plane,
            kv_count: raw.kv_count,
        };
        let args = KernelArgs::new()
            .arg(raw.pages)
            .arg(raw.from)
            .arg(raw.units.dividers())
            .arg(slots)
            .arg(raw.report);
        let kernel = on.by_vector(&self.0, raw.vector_bytes)?;
        let blocks = items.div_ceil(FLAT_THREADS);
        let config = LaunchConfig::linear(blocks.max(1), FLAT_THREADS);
        // SAFETY: the 5 arguments are the parameters of `append_*` in `kernels/append.cu`, in order
        // and size (asserted here and in `block_units.rs`); the rest is the caller's promise.
        Ok(unsafe { kernel.launch(stream, &config, &args) }?)
    }
}

fn check_append(on: &Launcher, paged: &PagedKv, append: &Append<'_>) -> Result<(), KernelError> {
    on.check_paged(paged, append.num_blocks)?;
    if let Some(report) = append.report {
        on.check_report(report)?;
    }
    let shape = paged.shape();
    planes_of(shape)?;
    let Append { first_layer, layers, tokens, token_stride_bytes, .. } = *append;
    if first_layer.checked_add(layers).is_none_or(|end| end > shape.layers()) {
        let of = shape.layers();
        return Err(KernelError::AppendLayers { first_layer, layers, of });
    }
    let given = 1 + u32::from(append.values.is_some());
    if given != shape.kv_count() {
        return Err(KernelError::AppendTensors { given, kv_count: shape.kv_count() });
    }
    let row_bytes = shape.row_bytes();
    if token_stride_bytes < row_bytes {
        let (width, stride) = (row_bytes, token_stride_bytes);
        return Err(OperandError::Stride { operand: Operand::Rows, width, stride }.into());
    }
    check_array(Operand::SlotMapping, append.slot_mapping, tokens, 8)?;
    for source in [Some(append.keys), append.values].into_iter().flatten() {
        check_rows(source, append, row_bytes)?;
        for tensor in Blocks::Device(paged).extents() {
            check_disjoint((Operand::Pages, tensor), (Operand::Rows, source))?;
        }
    }
    for tensor in Blocks::Device(paged).extents() {
        let slots = (Operand::SlotMapping, append.slot_mapping);
        check_disjoint((Operand::Pages, tensor), slots)?;
    }
    check_slots(append, append.num_blocks * u64::from(shape.block_tokens()))
}

/// One launch for each run of a row, or more where there are more vectors than one counts.
fn appends(
    stream: &Stream,
    paged: &PagedKv,
    append: &Append<'_>,
) -> Result<Vec<RawAppend>, KernelError> {
    let (shape, blocks) = (paged.shape(), Blocks::Device(paged));
    let row_bytes = shape.row_bytes();
    let row = [RowPart {
        segment_bytes: row_bytes,
        segments: 1,
        segment_stride_bytes: row_bytes,
        token_stride_bytes: append.token_stride_bytes,
        offset_bytes: 0,
    }];
    let address = |source: KernelSource<'_>| source.address(stream).map_err(KernelError::from);
    let values = append.values.map(address).transpose()?.unwrap_or(0);
    let (addresses, slots) = ([address(append.keys)?, values], address(append.slot_mapping)?);
    let whole_row = (append.tokens, row_bytes);
    let mut launches = Vec::new();
    for &planes in Planes::of(&[blocks]) {
        for run in runs(&row, planes.parts(blocks), whole_row) {
            let run = AppendRun::new((paged, planes), append, (addresses, slots), run);
            launches.extend(run.launches(append)?);
        }
    }
    Ok(launches)
}

/// A run of a row, and where it lies.
struct AppendRun<'a> {
    paged: &'a PagedKv,
    planes: Planes,
    /// Of the rows of the first planes, and of those beside them.
    addresses: [u64; 2],
    slots: u64,
    report: u64,
    from: UnitStrides,
    to: UnitStrides,
    segments: u64,
    unit: u64,
    vector_bytes: u64,
}

impl<'a> AppendRun<'a> {
    fn new(
        (paged, planes): (&'a PagedKv, Planes),
        append: &Append<'_>,
        (addresses, slots): ([u64; 2], u64),
        run: UnitRun,
    ) -> Self {
        let addresses = match planes {
            Planes::All => addresses,
            Planes::Of(kv) => [addresses[kv as usize], 0],
        };
        let is_first = planes.are_first() && run.first == 0;
        let report = append.report.filter(|_| is_first).map_or(0, DeviceReport::address);
        // Tokens go to slots, so their strides are no reason for longer units.
        let UnitRun { from, to, segments, unit, .. } = UnitRun { tokens: 1, ..run }.merged();
        let run = UnitRun { from, to, segments, unit, ..run };
        // A stride that is never taken needs no alignment.
        let own_bits = if append.layers > 1 { append.layer_stride_bytes } else { 0 }
            | if append.tokens > 1 { append.token_stride_bytes } else { 0 };
        let [keys, values] = addresses;
        let bits = run.source_bits() | run.destination_bits() | to.token | unit;
        let places = own_bits | keys | values | Blocks::Device(paged).alignment_bits();
        let vector_bytes = alignment_of(bits | places);
        Self { paged, planes, addresses, slots, report, from, to, segments, unit, vector_bytes }
    }

    /// Its launches, each of some tokens.
    fn launches(self, append: &Append<'_>) -> Result<impl Iterator<Item = RawAppend>, KernelError> {
        let shape = self.paged.shape();
        let kv_count = self.planes.of_layer(shape);
        let units = RawBlockUnits {
            planes: u64::from(append.layers) * u64::from(kv_count),
            tokens: 1,
            segments: self.segments,
            unit_vectors: self.unit / self.vector_bytes,
        };
        let cut = launches(("vectors of a token", append.tokens), units.vectors()?)?;
        Ok(cut.map(move |(first_token, tokens)| {
            let skipped = first_token * append.token_stride_bytes;
            let side = (Blocks::Device(self.paged), self.planes);
            let rows = self.addresses.map(|address| address + skipped);
            RawAppend {
                pages: RawBlockSide::of(side, &self.to, append.num_blocks),
                from: raw_rows(rows, append, &self.from),
                units: RawBlockUnits { tokens, ..units },
                slot_mapping: self.slots + first_token * 8,
                block_tokens: shape.block_tokens().into(),
                first_token,
                // No overflow: it is one of the planes, which `check_append` has counted.
                first_plane: append.first_layer * kv_count,
                kv_count,
                report: self.report,
                vector_bytes: self.vector_bytes,
            }
        }))
    }
}

fn raw_rows(rows: [u64; 2], append: &Append<'_>, from: &UnitStrides) -> RawAppendRows {
    RawAppendRows {
        rows,
        layer_stride: append.layer_stride_bytes,
        token_stride: append.token_stride_bytes,
        segment_stride: from.segment,
        base: from.offset,
    }
}

/// Checks that a source has the rows of all layers and tokens.
fn check_rows(
    source: KernelSource<'_>,
    append: &Append<'_>,
    row_bytes: u64,
) -> Result<(), OperandError> {
    let Append { layers, tokens, layer_stride_bytes, token_stride_bytes, .. } = *append;
    if layers == 0 || tokens == 0 {
        return Ok(());
    }
    let operand = Operand::Rows;
    let overflow = OperandError::Overflow { operand, rows: tokens, row_bytes: token_stride_bytes };
    let of_layers = layer_stride_bytes.checked_mul(u64::from(layers) - 1);
    let of_tokens = token_stride_bytes.checked_mul(tokens - 1);
    let needed = of_layers
        .zip(of_tokens)
        .and_then(|(layers, tokens)| layers.checked_add(tokens)?.checked_add(row_bytes))
        .ok_or(overflow)?;
    check_length(operand, source.bytes(), needed)
}

/// Checks the host's copy of the slots.
fn check_slots(append: &Append<'_>, slots: u64) -> Result<(), KernelError> {
    let Some(host_slots) = append.host_slots else { return Ok(()) };
    let (given, tokens) = (host_slots.len() as u64, append.tokens);
    if given != tokens {
        return Err(KernelError::SlotCount { slots: given, tokens });
    }
    check_named(slots, &[Named::Slots { skip: 0, slots: host_slots }], true)
}
