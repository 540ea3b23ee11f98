//! The device that kernels run on, and what every launch has in common.

use cuda_driver::{
    CopyError, Device, DeviceAttribute, DeviceSpan, Kernel, KernelArgs, LaunchConfig, Stream, guard,
};

use crate::lazy::LazyModule;
use crate::shape::WORD_BYTES;
use crate::{Blocks, DeviceReport, HostBlocks, KernelError, KvShape, PagedKv};

/// The device of some kernels: checks that operands are its own, and sizes grids for it.
#[derive(Debug)]
pub(crate) struct Launcher {
    device: Device,
    /// Multiprocessors of the device, 1 to 65536.
    multiprocessors: u64,
}

impl Launcher {
    pub(crate) fn new(device: &Device) -> Self {
        // Only a matter of speed: a device that does not tell gets a grid for a middling one.
        let multiprocessors = device.attribute(DeviceAttribute::MULTIPROCESSOR_COUNT);
        let multiprocessors = multiprocessors.map_or(64, |count| count.clamp(1, 1 << 16) as u64);
        Self { device: device.clone(), multiprocessors }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn multiprocessors(&self) -> u64 {
        self.multiprocessors
    }

    /// One of five kernels, for vectors of 16, 8, 4, 2 or 1 bytes.
    pub(crate) fn by_vector<'a>(
        &self,
        kernels: &'a LazyModule<5>,
        vector_bytes: u64,
    ) -> Result<&'a Kernel, KernelError> {
        Ok(&kernels.get(&self.device)?[vector_bytes.trailing_zeros().min(4) as usize])
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

    /// Checks that blocks are reached from the kernels' device, and that there are so many.
    pub(crate) fn check_blocks(
        &self,
        blocks: Blocks<'_>,
        num_blocks: u64,
    ) -> Result<(), KernelError> {
        match blocks {
            Blocks::Device(paged) => self.check_paged(paged, num_blocks),
            Blocks::Host(host) => self.check_host_blocks(host, num_blocks),
        }
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
