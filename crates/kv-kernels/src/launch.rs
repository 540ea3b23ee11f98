//! The raw transfer: what its kernels take, and a launch that checks no memory.

use std::ops::Range;

use cuda_driver::{Kernel, Stream};
use smallvec::SmallVec;

use crate::block_units::Planes;
use crate::launcher::Launcher;
use crate::lazy::{LazyKernel, LazyModule};
use crate::paged_layout::alignment_of;
use crate::walk::{MovedRows, TransferKernel, TransferLaunch, TransferRows};
use crate::{DeviceReport, Direction, KernelError, PagedKv, entry};

/// Most chunks of one launch: `KV_TRANSFER_CHUNKS` of `kernels/kv.cuh`.
pub(crate) const CHUNKS_MAX: usize = 16;
/// Most threads of a block: `KV_WALK_THREADS` of `kernels/kv.cuh`.
const THREADS_MAX: u32 = 1024;
/// Most tokens of a chunk and most vectors of a row.
pub(crate) const COUNT_MAX: u64 = i32::MAX as u64;

/// In the order of [`entry::TRANSFERS`], as those that follow.
const TRANSFER_PTX: [&str; 5] = [
    include_str!("../ptx/transfer_1.compute_80.ptx"),
    include_str!("../ptx/transfer_2.compute_80.ptx"),
    include_str!("../ptx/transfer_4.compute_80.ptx"),
    include_str!("../ptx/transfer_8.compute_80.ptx"),
    include_str!("../ptx/transfer_16.compute_80.ptx"),
];
const WALK_PTX: [&str; 5] = [
    include_str!("../ptx/walk_1.compute_80.ptx"),
    include_str!("../ptx/walk_2.compute_80.ptx"),
    include_str!("../ptx/walk_4.compute_80.ptx"),
    include_str!("../ptx/walk_8.compute_80.ptx"),
    include_str!("../ptx/walk_16.compute_80.ptx"),
];

/// How much of the device a launch may take.
///
/// Blocks stay on a multiprocessor until they end, so at most `blocks` multiprocessors work for the
/// transfer, and what runs beside it keeps the others.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LaunchLimits {
    /// Blocks of the grid, at most; 0 for as many as fill the device.
    pub blocks: u32,
    /// Threads of a block, a multiple of 32 and at most 1,024; 0 for the default.
    pub threads: u32,
}

/// Where the tokens of a chunk lie in the pages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum RawMapping {
    /// Address of a slot (`i64`) for each token.
    Slots(u64),
    /// Address of a block id (`i32`) for each `block_tokens` tokens.
    Blocks(u64),
}

impl RawMapping {
    pub(crate) fn address(self) -> u64 {
        match self {
            Self::Slots(address) | Self::Blocks(address) => address,
        }
    }

    pub(crate) fn kind(self) -> u32 {
        u32::from(matches!(self, Self::Blocks(_)))
    }
}

/// One chunk of a [`RawTransfer`]: tokens of a range of layers, `[kv, layer, token, row]`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct RawChunk {
    /// Address of the first row: of all `kv_count * layers * tokens` in the order `[kv, layer, token]`.
    pub(crate) address: u64,
    /// Where its tokens lie. All chunks of a launch have the same kind of mapping.
    pub(crate) mapping: RawMapping,
    /// Tokens of the chunk, at most `i32::MAX`.
    pub(crate) tokens: u64,
    /// How many of the first tokens stay untouched.
    pub(crate) skip_prefix_n_tokens: u64,
}

/// What [`TransferKernels::launch`] moves.
#[derive(Clone, Debug)]
pub(crate) struct RawTransfer<'a> {
    /// The pages.
    pub(crate) paged: &'a PagedKv,
    /// At most [`CHUNKS_MAX`] chunks.
    pub(crate) chunks: &'a [RawChunk],
    /// The layers of the paged memory that the chunks hold.
    pub(crate) layers: Range<u32>,
    /// Which way.
    pub(crate) direction: Direction,
    /// Blocks that are ready, the first of the paged memory; rows of others are passed over.
    pub(crate) num_blocks: u64,
    /// How much of the device the launch may take.
    pub(crate) limits: LaunchLimits,
    /// Where the device tells of slots and ids that are out of range, if anywhere; places are those of
    /// the mapping, and a place counts once for each plane.
    pub(crate) report: Option<&'a DeviceReport>,
}

/// The kernels that move tokens between chunks and pages, by the logarithm of the bytes that a thread moves at once.
#[derive(Debug)]
pub(crate) struct TransferKernels {
    transfers: [LazyModule<2>; 5],
    walks: [LazyKernel; 5],
}

impl TransferKernels {
    pub(crate) fn new() -> Self {
        Self {
            transfers: std::array::from_fn(|i| {
                LazyModule::new(TRANSFER_PTX[i], entry::TRANSFERS[i])
            }),
            walks: std::array::from_fn(|i| LazyKernel::new(WALK_PTX[i], entry::WALKS[i])),
        }
    }

    /// Moves chunks to or from pages, and checks no memory.
    ///
    /// That is one launch, or one for keys and one for values where they lie differently; and one for each
    /// plane, or more, of a chunk of which 31 bits do not count the
    /// vectors, or 32 the bytes of the skipped tokens.
    ///
    /// For each chunk, row `r`, counted in the order `[kv, layer, token]`, moves between
    /// `address + r * row_bytes` and the place that the mapping gives its token in its plane. Chunks lie in
    /// device memory, or in pinned host memory by its device address. Nothing is launched when no row
    /// is left.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`](crate::KvKernels). Mappings are read when the kernel runs.
    ///
    /// # Errors
    /// [`KernelError`] for numbers that do not fit each other and another device; nothing was enqueued
    /// then. Launches before one that the driver refuses stay enqueued.
    ///
    /// # Safety
    /// - every row of every chunk lies in device memory, or in pinned memory that stays allocated until
    ///   the launch has completed and that the host does not access meanwhile where it is written;
    /// - mappings are memory of that kind, and hold an entry for each token of the chunks;
    /// - no chunk overlaps the paged memory, nor, where chunks are written, another chunk.
    pub(crate) unsafe fn launch(
        &self,
        on: &Launcher,
        stream: &Stream,
        transfer: &RawTransfer<'_>,
    ) -> Result<(), KernelError> {
        on.check_stream(stream)?;
        on.check_paged(transfer.paged, transfer.num_blocks)?;
        if let Some(report) = transfer.report {
            on.check_report(report)?;
        }
        // All plans first, so that nothing is enqueued where one of them cannot be.
        let all = Planes::of(&[transfer.paged.into()]).iter().map(|&planes| plan(transfer, planes));
        let all: SmallVec<[Option<Planned>; 2]> = all.collect::<Result<_, _>>()?;
        for planned in all.into_iter().flatten() {
            let Planned { planes, vector_bytes, mapping_kind, chunks } = planned;
            let rows = TransferRows { transfer, planes, vector_bytes, mapping_kind };
            if let Some(launch) = rows.together(&chunks) {
                // SAFETY: the caller's contract is this function's.
                unsafe { self.launch_one(on, stream, vector_bytes, &launch) }?;
                continue;
            }
            for launch in chunks.iter().flat_map(|chunk| rows.apart(*chunk)) {
                // SAFETY: as above; the launches move the same rows.
                unsafe { self.launch_one(on, stream, vector_bytes, &launch?) }?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As of [`launch`](Self::launch), of the transfer that the
    /// launch is of.
    unsafe fn launch_one(
        &self,
        on: &Launcher,
        stream: &Stream,
        vector_bytes: u64,
        launch: &TransferLaunch,
    ) -> Result<(), KernelError> {
        let kernel = self.kernel(on, vector_bytes, launch.kernel)?;
        // SAFETY: the arguments are the parameters of the entries of `kernels/transfer.cu` and
        // `kernels/walk.cu`, whose sizes both sides assert. Chunks and mappings are the caller's, a
        // report is a live buffer's. The plane table has an address for each plane (invariant of
        // `PagedKv`), the layers lie in it (`plan`), and rows of blocks below `num_blocks`, to which the
        // kernel keeps, lie in the tensors (invariant of `PagedKv`, and `check_paged`).
        Ok(unsafe { kernel.launch(stream, &launch.config, &launch.args) }?)
    }

    /// The transfer that moves 1, 2, 4, 8 or 16 bytes at once.
    fn kernel(
        &self,
        on: &Launcher,
        vector_bytes: u64,
        kernel: TransferKernel,
    ) -> Result<&Kernel, KernelError> {
        let index = vector_bytes.trailing_zeros() as usize;
        let transfers = |which| Ok(&self.transfers[index].get(on.device())?[which]);
        match kernel {
            TransferKernel::One => transfers(0),
            TransferKernel::Several => transfers(1),
            TransferKernel::Walk => Ok(self.walks[index].get(on.device())?),
        }
    }
}

/// What a transfer moves of some planes, once it has been checked; `None` where no row is left.
fn plan(transfer: &RawTransfer<'_>, of: Planes) -> Result<Option<Planned>, KernelError> {
    let RawTransfer { paged, chunks, layers, limits, .. } = transfer;
    let shape = paged.shape();
    if layers.start > layers.end || layers.end > shape.layers() {
        let (start, end) = (layers.start, layers.end);
        return Err(KernelError::Layers { start, end, layers: shape.layers() });
    }
    if chunks.len() > CHUNKS_MAX {
        return Err(KernelError::Chunks { chunks: chunks.len(), most: CHUNKS_MAX });
    }
    limits.check()?;
    let row_bytes = shape.row_bytes();
    let bits = chunks.iter().fold(row_bytes, |bits, chunk| bits | chunk.address);
    let aligned = match of {
        Planes::All => paged.alignment(),
        Planes::Of(kv) => paged.alignment_of(kv),
    };
    let vector_bytes = aligned.min(alignment_of(bits));
    if row_bytes / vector_bytes > COUNT_MAX {
        return Err(KernelError::RowTooLong { row_bytes, vector_bytes });
    }
    let mut moved = SmallVec::<[MovedRows; 1]>::new();
    let mut mapping_kind = None;
    for chunk in *chunks {
        let counted = moved_rows(chunk, (layers.len() as u64, of), paged)?;
        if *mapping_kind.get_or_insert(chunk.mapping.kind()) != chunk.mapping.kind() {
            return Err(KernelError::MixedMappings);
        }
        if counted.rows > 0 {
            moved.push(counted);
        }
    }
    let mapping_kind = mapping_kind.unwrap_or(0);
    let planned = Planned { planes: of, vector_bytes, mapping_kind, chunks: moved };
    Ok((!planned.chunks.is_empty()).then_some(planned))
}

impl LaunchLimits {
    fn check(self) -> Result<(), KernelError> {
        match self.threads {
            threads if threads.is_multiple_of(32) && threads <= THREADS_MAX => Ok(()),
            threads => Err(KernelError::Threads { threads, most: THREADS_MAX }),
        }
    }
}

struct Planned {
    planes: Planes,
    vector_bytes: u64,
    mapping_kind: u32,
    chunks: SmallVec<[MovedRows; 1]>,
}

/// The rows that move in some planes, of those that move in the whole chunk.
fn moved_rows(
    chunk: &RawChunk,
    (layers, of): (u64, Planes),
    paged: &PagedKv,
) -> Result<MovedRows, KernelError> {
    let RawChunk { address, tokens, skip_prefix_n_tokens: skip, ref mapping } = *chunk;
    if skip > tokens {
        return Err(KernelError::Skip { skip_prefix_n_tokens: skip, tokens });
    }
    if tokens > COUNT_MAX {
        return Err(KernelError::TooManyTokens { tokens, most: COUNT_MAX });
    }
    // No overflow: 2^31 tokens of 2^32 planes at most, and `planes` refuses more.
    let planes = u64::from(paged.shape().kv_count()) * layers;
    let planes = u64::from(u32::try_from(planes).map_err(|_| KernelError::Planes { planes })?);
    let moved = tokens - skip;
    let (first, rows) = match of {
        Planes::All => (0, planes * moved),
        // Of each tensor the rows of all layers follow each other.
        Planes::Of(kv) => (kv * layers * moved, layers * moved),
    };
    Ok(MovedRows { address, mapping: mapping.address(), first, rows, moved, skip })
}
