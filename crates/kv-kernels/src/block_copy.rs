//! Copying blocks by pairs of ids: within a device, between peers, to and from pinned host memory, and
//! between layouts.

use cuda_driver::{Device, KernelArgs, LaunchConfig, ModuleError, Stream};

use crate::block_units::{
    ITEMS_MAX, Planes, RawBlockSide, RawBlockUnits, UnitRun, counted, launches, runs,
};
use crate::launcher::Launcher;
use crate::lazy::LazyModule;
use crate::operand::{check_array, check_disjoint};
use crate::paged_layout::alignment_of;
use crate::pairs::{BlockPair, BlockPairs};
use crate::{
    Blocks, DeviceReport, KernelError, KernelSource, entry,
    error::{Operand, Side},
};

const PTX: &str = include_str!("../ptx/block_copy.compute_80.ptx");

/// What [`KvKernels::copy_blocks`](crate::KvKernels::copy_blocks) copies.
#[derive(Clone, Copy, Debug)]
pub struct BlockCopy<'a> {
    /// The memory that is read.
    pub from: Blocks<'a>,
    /// The memory that is written.
    pub to: Blocks<'a>,
    /// `count` pairs ([`BlockPair`]), where the kernel reads them.
    pub pairs: KernelSource<'a>,
    /// How many pairs.
    pub count: u64,
    /// The host's copy of the pairs, which was looked through when it was made; `None` where only the
    /// device has them.
    pub host_pairs: Option<BlockPairs<'a>>,
    /// Blocks of the source that are ready, the first ones; others are refused.
    pub from_blocks: u64,
    /// Blocks of the destination that are ready, the first ones; others are refused.
    pub to_blocks: u64,
    /// Where to tell of pairs that the device had to pass over.
    pub report: Option<&'a DeviceReport>,
    /// Most multiprocessors to occupy; `None` for all, or for a few where host memory is involved,
    /// whose bus more do not make faster.
    pub multiprocessors: Option<u32>,
}

/// The parameters of one launch of `copy_blocks`, unchecked; see `kernels/block_copy.cu`.
#[derive(Clone, Copy, Debug)]
pub struct RawBlockCopy {
    /// The side that is written.
    pub to: RawBlockSide,
    /// The side that is read.
    pub from: RawBlockSide,
    /// What a block is made of.
    pub units: RawBlockUnits,
    /// Address of the pairs.
    pub pairs: u64,
    /// Vectors of all pairs, below 2^31.
    pub items: u64,
    /// The side whose blocks lie in the order of the pairs, if one does: its block of the pair at place
    /// `n` of this launch is block `n`, whatever the pair says.
    pub by_place: Option<Side>,
    /// Pairs before these, which count where places are reported.
    pub first_pair: u64,
    /// Bytes of a vector: 16, 8, 4, 2 or 1.
    pub vector_bytes: u64,
    /// Address of a report, or 0.
    pub report: u64,
    /// Blocks of the grid, no more than have vectors.
    pub grid: u32,
    /// Threads of a block, 1 to 1,024, and to 512 in a batched walk.
    pub threads: u32,
    /// Whether a block of threads fetches the addresses of many blocks at once before it moves them: for pairs
    /// and plane tables in host memory, and for few blocks of threads over a link between GPUs.
    pub batched: bool,
}

impl RawBlockCopy {
    /// Vectors of one block in one plane that a [batched](RawBlockCopy::batched) launch takes at most.
    pub const BATCHED_VECTORS_MAX: u64 = 1 << 24;
    /// Threads of a block that a batched launch takes at most.
    pub const BATCHED_THREADS_MAX: u32 = 512;
    /// Vectors of all pairs that a launch takes at most.
    pub const ITEMS_MAX: u64 = ITEMS_MAX;
}

/// The kernels of block copies alone, loaded on one device: what moves between GPUs need.
#[derive(Debug)]
pub struct BlockCopyKernels {
    device: Device,
    module: LazyModule<10>,
}

impl BlockCopyKernels {
    /// Kernels that are compiled at their first launch.
    pub(crate) fn new(device: &Device) -> Self {
        Self { device: device.clone(), module: LazyModule::new(PTX, entry::COPY_BLOCKS) }
    }

    /// Compiles the kernels for `device`.
    ///
    /// # Ordering
    /// Waits for the compiler the first time; not for the device's work.
    ///
    /// # Errors
    /// [`ModuleError`], with the compiler's log.
    #[track_caller]
    pub fn load(device: &Device) -> Result<Self, ModuleError> {
        let _site = cuda_driver::site::enter();
        let kernels = Self::new(device);
        kernels.module.get(device)?;
        Ok(kernels)
    }

    /// See [`KvKernels::copy_blocks`](crate::KvKernels::copy_blocks).
    pub(crate) fn copy(
        &self,
        on: &Launcher,
        stream: &Stream,
        copy: &BlockCopy<'_>,
    ) -> Result<(), KernelError> {
        on.check_stream(stream)?;
        check_copy(on, copy)?;
        if copy.count == 0 {
            return Ok(());
        }
        // All launches first, so that nothing is enqueued where one of them cannot be.
        let launches = block_copies(on, stream, copy)?;
        for raw in &launches {
            // SAFETY: `check_copy` has found the pairs in their memory, and both sides to be of the
            // kernels' device; the units of blocks below `num_blocks`, to which the kernel keeps,
            // lie in the memory of their side (invariants of `PagedKv` and `HostBlocks`, whose rows are
            // as long as each other, which `check_copy` has compared). Pinned memory is not freed before
            // the device has finished (a dropped buffer is only retired), and is not written by the
            // host, which shares it (`HostBlocks`).
            unsafe { self.launch(stream, raw) }?;
        }
        Ok(())
    }

    /// Launches one kernel with these parameters, unchecked.
    ///
    /// # Errors
    /// [`KernelError::TooMany`] for more vectors than the kernel counts, [`KernelError::Module`] and
    /// [`KernelError::Device`].
    ///
    /// # Safety
    /// - every address is of memory that the kernels' device can access, and stays allocated until
    ///   the kernel has completed; all of what the head of `kernels/block_copy.cu` names as read or
    ///   written lies there, and is aligned to `vector_bytes`, which is 16, 8, 4, 2 or 1;
    /// - `units` and `grid` are as their fields say;
    /// - host memory that is written is not accessed by the host until then.
    #[track_caller]
    pub unsafe fn launch(&self, stream: &Stream, raw: &RawBlockCopy) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        let vectors = raw.units.vectors()?;
        let items = counted("vectors", Some(raw.items))?;
        let part = vectors / raw.units.planes.max(1);
        if raw.batched && part > RawBlockCopy::BATCHED_VECTORS_MAX {
            return Err(KernelError::TooMany {
                what: "vectors of a block in a plane",
                count: part,
            });
        }
        let args = KernelArgs::new()
            .arg(raw.to)
            .arg(raw.from)
            .arg(raw.units.dividers())
            .arg(raw.pairs)
            .arg(items)
            .arg(named_by_ids(raw.by_place))
            .arg(raw.first_pair)
            .arg(raw.report);
        let width = raw.vector_bytes.trailing_zeros().min(4) as usize;
        let (first, threads_max) = if raw.batched {
            (5, RawBlockCopy::BATCHED_THREADS_MAX)
        } else {
            (0, COPY_THREADS_MAX)
        };
        let kernel = &self.module.get(&self.device)?[first + width];
        let config = LaunchConfig::linear(raw.grid.max(1), raw.threads.clamp(1, threads_max));
        // SAFETY: the 8 arguments are the parameters of `copy_blocks_*` in `kernels/block_copy.cu`, in
        // order and size (asserted in `block_units.rs`); the rest is the caller's promise.
        Ok(unsafe { kernel.launch(stream, &config, &args) }?)
    }
}

/// Checks what is to be copied, and nothing of the stream.
pub(crate) fn check_copy(on: &Launcher, copy: &BlockCopy<'_>) -> Result<(), KernelError> {
    let BlockCopy { from, to, .. } = *copy;
    on.check_blocks(from, copy.from_blocks)?;
    on.check_blocks(to, copy.to_blocks)?;
    if let Some(report) = copy.report {
        on.check_report(report)?;
    }
    check_same_rows(from, to)?;
    check_array(Operand::BlockPairs, copy.pairs, copy.count.saturating_mul(2), 4)?;
    for extent in to.extents() {
        check_disjoint((Operand::HostBlocks, extent), (Operand::BlockPairs, copy.pairs))?;
    }
    let same = is_same_memory(from, to);
    if !same {
        check_apart(from, to)?;
    }
    check_pairs(copy.host_pairs, copy.count, (copy.from_blocks, copy.to_blocks))?;
    match copy.host_pairs {
        Some(pairs) if same => pairs.check_sources_unwritten(),
        _ => Ok(()),
    }
}

/// One launch for each run of the rows, or more where there are more vectors than one counts.
fn block_copies(
    on: &Launcher,
    stream: &Stream,
    copy: &BlockCopy<'_>,
) -> Result<Vec<RawBlockCopy>, KernelError> {
    let BlockCopy { from, to, .. } = *copy;
    let pairs = copy.pairs.address(stream)?;
    let shape = from.shape();
    let whole = |blocks: Blocks<'_>| blocks.layout().has_whole_blocks(blocks.shape());
    if whole(from) && whole(to) && shape == to.shape() {
        let side = |blocks: Blocks<'_>, num_blocks| {
            let address = blocks.extents()[0].address;
            RawBlockSide::whole(address, shape.block_bytes(), num_blocks)
        };
        let (to, from) = (side(to, copy.to_blocks), side(from, copy.from_blocks));
        let bits = to.base | from.base | shape.block_bytes();
        let units = RawBlockUnits { planes: 1, tokens: 1, segments: 1, unit_vectors: 0 };
        return launches_of(on, (copy, pairs), (to, from), units, (shape.block_bytes(), bits));
    }
    let rows = (u64::from(shape.block_tokens()), shape.row_bytes());
    let of_run = |planes: Planes, run: UnitRun| {
        let (first, run) = (run.first, run.merged());
        let sides = (
            RawBlockSide::of((to, planes), &run.to, copy.to_blocks),
            RawBlockSide::of((from, planes), &run.from, copy.from_blocks),
        );
        let bits = run.source_bits()
            | run.destination_bits()
            | run.unit
            | from.alignment_bits()
            | to.alignment_bits();
        let units = RawBlockUnits {
            planes: planes.count(shape),
            tokens: run.tokens,
            segments: run.segments,
            unit_vectors: 0,
        };
        // A pair that is passed over is told of once.
        let report = copy.report.filter(|_| planes.are_first() && first == 0);
        let copy = BlockCopy { report, ..*copy };
        launches_of(on, (&copy, pairs), sides, units, (run.unit, bits))
    };
    let mut launches = Vec::new();
    for &planes in Planes::of(&[from, to]) {
        for run in runs(planes.parts(from), planes.parts(to), rows) {
            launches.extend(of_run(planes, run)?);
        }
    }
    Ok(launches)
}

/// The launches of one run of the rows, whose pairs a kernel reads at the address `pairs`.
fn launches_of(
    on: &Launcher,
    (copy, pairs): (&BlockCopy<'_>, u64),
    (to, from): (RawBlockSide, RawBlockSide),
    units: RawBlockUnits,
    (unit_bytes, bits): (u64, u64),
) -> Result<Vec<RawBlockCopy>, KernelError> {
    let vector_bytes = alignment_of(bits);
    let units = RawBlockUnits { unit_vectors: unit_bytes / vector_bytes, ..units };
    let vectors = units.vectors()?;
    let host = matches!(copy.from, Blocks::Host(_)) || matches!(copy.to, Blocks::Host(_));
    // A multiprocessor takes a block of so many threads, and a second one only when all have one.
    let (threads, blocks_max) = match (copy.multiprocessors, host) {
        (Some(most), _) => (COPY_THREADS_MAX, u64::from(most).clamp(1, on.multiprocessors())),
        (None, true) => (COPY_THREADS_MAX, HOST_MULTIPROCESSORS.min(on.multiprocessors())),
        // Tiles that are dealt out by the device leave no multiprocessor waiting for the last.
        (None, false) => (FLAT_THREADS, u64::MAX),
    };
    let launch = |(first_pair, count): (u64, u64)| {
        let items = count * vectors;
        let blocks = items.div_ceil(u64::from(threads) * UNROLL);
        RawBlockCopy {
            to,
            from,
            units,
            pairs: pairs + first_pair * size_of::<BlockPair>() as u64,
            items,
            by_place: None,
            first_pair,
            vector_bytes,
            report: copy.report.map_or(0, DeviceReport::address),
            grid: blocks.clamp(1, blocks_max) as u32,
            threads,
            batched: false,
        }
    };
    let cut = launches(("vectors of a block", copy.count), vectors)?;
    Ok(cut.map(launch).collect())
}

/// `NamedByIds` of `kernels/block_copy.cu`: all ones for a side whose blocks are named by ids.
fn named_by_ids(by_place: Option<Side>) -> [u32; 2] {
    [Side::Source, Side::Destination].map(|side| if by_place == Some(side) { 0 } else { u32::MAX })
}

/// Vectors that a thread moves at once: `KV_COPY_UNROLL` of `kernels/kv.cuh`.
const UNROLL: u64 = 2;
/// Most threads of a block: `KV_COPY_THREADS` of `kernels/kv.cuh`.
const COPY_THREADS_MAX: u32 = 1024;
/// Threads of a block where each has an item of its own and the device deals blocks out.
pub(crate) const FLAT_THREADS: u32 = 128;
/// Multiprocessors that a copy to or from host memory occupies unless told otherwise: what is in
/// flight on so many exceeds what the bus holds.
const HOST_MULTIPROCESSORS: u64 = 8;

/// Checks that both sides have the same layers, tensors and tokens, and rows of one length.
fn check_same_rows(from: Blocks<'_>, to: Blocks<'_>) -> Result<(), KernelError> {
    let (a, b) = (from.shape(), to.shape());
    for (what, source_count, destination_count) in [
        ("layers", a.layers().into(), b.layers().into()),
        ("tensors of a layer", a.kv_count().into(), b.kv_count().into()),
        ("tokens of a block", a.block_tokens().into(), b.block_tokens().into()),
        ("bytes of a row", a.row_bytes(), b.row_bytes()),
    ] {
        if source_count != destination_count {
            return Err(KernelError::Shapes { what, source_count, destination_count });
        }
    }
    Ok(())
}

/// Whether a block of one is the block of the same number of the other.
fn is_same_memory(from: Blocks<'_>, to: Blocks<'_>) -> bool {
    from.layout() == to.layout()
        && from.shape() == to.shape()
        && from
            .extents()
            .iter()
            .map(|extent| extent.address)
            .eq(to.extents().iter().map(|extent| extent.address))
}

/// Checks that two memories share no byte.
fn check_apart(from: Blocks<'_>, to: Blocks<'_>) -> Result<(), KernelError> {
    for written in to.extents() {
        for read in from.extents() {
            check_disjoint((to.operand(), written), (from.operand(), read))?;
        }
    }
    Ok(())
}

/// Checks what the host knows of the pairs: their number, and that they are of both sides.
fn check_pairs(
    pairs: Option<BlockPairs<'_>>,
    count: u64,
    (from_blocks, to_blocks): (u64, u64),
) -> Result<(), KernelError> {
    let Some(pairs) = pairs else { return Ok(()) };
    let given = pairs.len() as u64;
    if given != count {
        return Err(KernelError::BlockCount { count, given });
    }
    pairs.check_within(from_blocks, to_blocks)
}
