//! The loaded kernels of one device, and what every launch has in common.

use cuda_driver::{
    CopyError, Device, DeviceAttribute, DeviceSpan, Kernel, KernelArgs, LaunchConfig, Module,
    ModuleError, Stream, guard,
};

use crate::block_copy::BlockCopyKernels;
use crate::lazy::{LazyKernel, LazyModule};
use crate::shape::WORD_BYTES;
use crate::walk::TransferKernel;
use crate::{DeviceReport, HostBlocks, KernelError, KvShape, PagedKv};

/// Names of the kernels in their modules.
pub(crate) mod entry {
    /// By the logarithm of the bytes that a thread moves at once; for one chunk, and for several.
    pub(crate) const TRANSFERS: [[&str; 2]; 5] = [
        ["transfer_1", "transfers_1"],
        ["transfer_2", "transfers_2"],
        ["transfer_4", "transfers_4"],
        ["transfer_8", "transfers_8"],
        ["transfer_16", "transfers_16"],
    ];
    pub(crate) const WALKS: [&str; 5] = ["walk_1", "walk_2", "walk_4", "walk_8", "walk_16"];
    pub(crate) const CHECKSUM: &str = "paged_checksum";
    pub(crate) const FILL: &str = "fill_pattern";
    pub(crate) const GATHER: &str = "gather_rows";
    pub(crate) const BLOCK_OFFSETS: &str = "gather_block_offsets";
    pub(crate) const BUSY: &str = "keep_busy";
    /// By the logarithm of the bytes that a thread takes at once, as the two that follow.
    pub(crate) const APPEND: [&str; 5] =
        ["append_1", "append_2", "append_4", "append_8", "append_16"];
    pub(crate) const SUM_BLOCKS: [&str; 5] =
        ["sum_blocks_1", "sum_blocks_2", "sum_blocks_4", "sum_blocks_8", "sum_blocks_16"];
    /// By the logarithm of the bytes of a vector; then the batched ones likewise.
    pub(crate) const COPY_BLOCKS: [&str; 10] = [
        "copy_blocks_1",
        "copy_blocks_2",
        "copy_blocks_4",
        "copy_blocks_8",
        "copy_blocks_16",
        "copy_blocks_batched_1",
        "copy_blocks_batched_2",
        "copy_blocks_batched_4",
        "copy_blocks_batched_8",
        "copy_blocks_batched_16",
    ];
}

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
const CHECKSUM_PTX: &str = include_str!("../ptx/checksum.compute_80.ptx");
const PATTERN_PTX: &str = include_str!("../ptx/pattern.compute_80.ptx");
const GATHER_PTX: &str = include_str!("../ptx/gather.compute_80.ptx");
const APPEND_PTX: &str = include_str!("../ptx/append.compute_80.ptx");
const BLOCK_SUM_PTX: &str = include_str!("../ptx/block_sum.compute_80.ptx");
const BLOCK_OFFSETS_PTX: &str = include_str!("../ptx/block_offsets.compute_80.ptx");
const BUSY_PTX: &str = include_str!("../ptx/busy.compute_80.ptx");

/// The kernels of this crate, loaded on one device.
///
/// # Checks
/// Before a launch the host checks every quantity with checked 64-bit arithmetic: lengths and
/// alignment of all memory, token counts, slots, blocks. What only the device knows (the mapping, the
/// table and the lengths *as they are when the kernel runs*) the kernel checks again: a slot out of
/// range is skipped, a block out of range is not read, lengths are cut to the table's width.
///
/// # Ordering
/// Every method enqueues one launch on the stream it is given, or a few where rows are in two parts, where
/// keys and values lie differently and where numbers are too large for one, and waits for nothing. A
/// kernel reads its operands when it runs: until an event recorded after the call has completed,
/// they must stay allocated, what it reads must not change, and what it writes must not be read.
/// Work on other streams is ordered by events, by the caller. Memory that was freed or unmapped
/// meanwhile is an error of the device, never undefined behaviour on the host.
#[derive(Debug)]
pub struct KvKernels {
    device: Device,
    /// # Invariants
    /// Each the entry of its name, whose parameters are those of `kernels/*.cu`.
    /// In the order of [`entry::TRANSFERS`], as those that follow.
    pub(crate) transfers: [LazyModule<2>; 5],
    pub(crate) walks: [LazyKernel; 5],
    pub(crate) checksum: Kernel,
    pub(crate) fill: Kernel,
    pub(crate) gather: Kernel,
    pub(crate) block_offsets: LazyKernel,
    pub(crate) busy: LazyKernel,
    /// By the logarithm of the bytes of a vector, as the two that follow.
    pub(crate) copy_blocks: BlockCopyKernels,
    pub(crate) append: LazyModule<5>,
    pub(crate) sum_blocks: LazyModule<5>,
    /// Multiprocessors of the device, 1 to 65536.
    pub(crate) multiprocessors: u64,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) ignore_skip: std::sync::atomic::AtomicBool,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) allow_stored_twice: std::sync::atomic::AtomicBool,
}

impl KvKernels {
    /// Loads the kernels on `device`.
    ///
    /// The reader, the pattern and the small kernels that steps launch are compiled from their PTX now.
    /// Every other kernel is compiled at its first launch.
    ///
    /// # Ordering
    /// Waits for the compiler, tenths of a second the first time; not for the device's work.
    ///
    /// # Errors
    /// [`ModuleError`], with the compiler's log.
    #[track_caller]
    pub fn load(device: &Device) -> Result<Self, ModuleError> {
        let _site = cuda_driver::site::enter();
        let load = |ptx, entry| Module::load(device, ptx)?.kernel(entry);
        // Only a matter of speed: a device that does not tell gets a grid for a middling one.
        let multiprocessors = device.attribute(DeviceAttribute::MULTIPROCESSOR_COUNT);
        Ok(Self {
            device: device.clone(),
            transfers: std::array::from_fn(|i| {
                LazyModule::new(TRANSFER_PTX[i], entry::TRANSFERS[i])
            }),
            walks: std::array::from_fn(|i| LazyKernel::new(WALK_PTX[i], entry::WALKS[i])),
            checksum: load(CHECKSUM_PTX, entry::CHECKSUM)?,
            fill: load(PATTERN_PTX, entry::FILL)?,
            gather: load(GATHER_PTX, entry::GATHER)?,
            block_offsets: LazyKernel::new(BLOCK_OFFSETS_PTX, entry::BLOCK_OFFSETS),
            busy: LazyKernel::new(BUSY_PTX, entry::BUSY),
            append: LazyModule::new(APPEND_PTX, entry::APPEND),
            sum_blocks: LazyModule::new(BLOCK_SUM_PTX, entry::SUM_BLOCKS),
            copy_blocks: BlockCopyKernels::new(device),
            multiprocessors: multiprocessors.map_or(64, |count| count.clamp(1, 1 << 16) as u64),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            ignore_skip: false.into(),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            allow_stored_twice: false.into(),
        })
    }

    /// One of five kernels, for vectors of 16, 8, 4, 2 or 1 bytes.
    pub(crate) fn by_vector<'a>(
        &self,
        kernels: &'a LazyModule<5>,
        vector_bytes: u64,
    ) -> Result<&'a Kernel, KernelError> {
        Ok(&kernels.get(&self.device)?[vector_bytes.trailing_zeros().min(4) as usize])
    }

    /// The transfer that moves 1, 2, 4, 8 or 16 bytes at once.
    pub(crate) fn transfer(
        &self,
        vector_bytes: u64,
        kernel: TransferKernel,
    ) -> Result<&Kernel, KernelError> {
        let index = vector_bytes.trailing_zeros() as usize;
        let transfers = |which| Ok(&self.transfers[index].get(&self.device)?[which]);
        match kernel {
            TransferKernel::One => transfers(0),
            TransferKernel::Several => transfers(1),
            TransferKernel::Walk => Ok(self.walks[index].get(&self.device)?),
        }
    }

    /// The device that the kernels run on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Checks that a stream's work runs on the kernels' device.
    pub(crate) fn check_stream(&self, stream: &Stream) -> Result<(), KernelError> {
        self.check_device("stream", stream.device())
    }

    /// Checks that paged memory is of the kernels' context, is there, and has `num_blocks` blocks.
    pub(crate) fn check_paged(&self, paged: &PagedKv, num_blocks: u64) -> Result<(), KernelError> {
        self.check_device("paged memory", paged.device())?;
        if num_blocks > paged.blocks() {
            return Err(KernelError::Blocks { num_blocks, capacity: paged.blocks() });
        }
        let are_alive = paged.tensors().iter().try_for_each(|tensor| check_alive(*tensor));
        guard!("kernels.pages-are-alive", are_alive, else Ok(()))
    }

    /// Checks that host blocks are reached from the kernels' device, and that there are `num_blocks`.
    pub(crate) fn check_host_blocks(
        &self,
        blocks: &HostBlocks,
        num_blocks: u64,
    ) -> Result<(), KernelError> {
        self.check_device("host blocks", blocks.device())?;
        if num_blocks > blocks.blocks() {
            return Err(KernelError::Blocks { num_blocks, capacity: blocks.blocks() });
        }
        Ok(())
    }

    /// Checks that a report is of the kernels' device.
    pub(crate) fn check_report(&self, report: &DeviceReport) -> Result<(), KernelError> {
        self.check_device("report", report.device())
    }

    pub(crate) fn check_device(
        &self,
        operand: &'static str,
        other: &Device,
    ) -> Result<(), KernelError> {
        let is_own = other.shares_context(&self.device);
        if guard!("kernels.of-one-context", is_own, else other.context() == self.device.context()) {
            return Ok(());
        }
        let (kernels, other) = (self.device.ordinal(), other.ordinal());
        Err(KernelError::OtherDevice { kernels, operand, other })
    }

    /// The grid and block for kernels that give each row to a group of threads.
    pub(crate) fn row_launch(&self, rows: u64, shape: &KvShape) -> LaunchConfig {
        let group = shape.row_words().next_power_of_two().min(WARP_THREADS);
        let blocks = rows.saturating_mul(group).div_ceil(ROW_THREADS);
        let most = self.multiprocessors * ROW_BLOCKS_OF_MULTIPROCESSOR;
        LaunchConfig::linear(blocks.clamp(1, most) as u32, ROW_THREADS as u32)
    }

    /// Enqueues a kernel over device memory that has been checked.
    ///
    /// # Safety
    /// - `args` has the number, order and sizes of the kernel's parameters;
    /// - every address in `args` is device memory, and the kernel accesses no host memory.
    pub(crate) unsafe fn launch(
        &self,
        kernel: &Kernel,
        stream: &Stream,
        config: &LaunchConfig,
        args: &KernelArgs,
    ) -> Result<(), KernelError> {
        // SAFETY: the arguments are the kernel's, by this function's contract; the kernel accesses
        // no host memory, by the same, so nothing is asked of host memory.
        Ok(unsafe { kernel.launch(stream, config, args) }?)
    }
}

/// Threads of a warp.
pub(crate) const WARP_THREADS: u64 = 32;
/// Threads of a block of the kernels that move or fill rows: `KV_ROW_THREADS` of `kernels/kv.cuh`.
pub(crate) const ROW_THREADS: u64 = 256;
/// Blocks of a multiprocessor beyond which more bring nothing: four times what is resident.
const ROW_BLOCKS_OF_MULTIPROCESSOR: u64 = 32;
/// Threads of a block of the reader: `KV_SUM_THREADS` of `kernels/kv.cuh`.
pub(crate) const SUM_THREADS: u32 = 512;
/// Most blocks of a grid in y on any device.
pub(crate) const GRID_Y_MAX: u32 = 65_535;

/// Checks that rows are whole words, of which the pattern and its checksums are made.
pub(crate) fn check_words(row_bytes: u64) -> Result<(), KernelError> {
    if row_bytes.is_multiple_of(WORD_BYTES) {
        Ok(())
    } else {
        Err(KernelError::RowWords { row_bytes })
    }
}

/// Checks that the owner of the memory is there.
pub(crate) fn check_alive(span: DeviceSpan) -> Result<(), KernelError> {
    let (address, bytes) = (span.address(), span.bytes());
    if span.is_alive() { Ok(()) } else { Err(CopyError::Gone { address, bytes }.into()) }
}

/// The planes of a shape, as kernels count them.
pub(crate) fn planes_of(shape: &KvShape) -> Result<u32, KernelError> {
    let planes = shape.planes();
    u32::try_from(planes).map_err(|_| KernelError::Planes { planes })
}

/// Checks that a chunk holds exactly `tokens` tokens, because its planes are spaced by that number.
pub(crate) fn check_chunk(
    shape: &KvShape,
    chunk: DeviceSpan,
    tokens: u64,
) -> Result<(), KernelError> {
    let (bytes, token_bytes) = (chunk.bytes(), shape.token_bytes());
    if tokens.checked_mul(token_bytes) != Some(bytes) {
        return Err(KernelError::ChunkTokens { bytes, tokens, token_bytes });
    }
    Ok(())
}
