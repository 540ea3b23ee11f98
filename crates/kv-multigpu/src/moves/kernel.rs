//! The kernel that moves scattered blocks, loaded on one device.

use bytemuck::NoUninit;
use cuda_driver::{Device, DeviceError, Kernel, KernelArgs, LaunchConfig, Module, Stream};

use super::MoveError;

/// Built from `kernels/multigpu/move_blocks.cu` by `cargo xtask kernels`.
const PTX: &str = include_str!("../../ptx/move_blocks.compute_80.ptx");

/// Threads of a block: `MOVE_THREADS` of the source.
const THREADS: u32 = 512;
/// Words of an item, at most: `MOVE_ELEMENTS_MAX` of the source.
pub(super) const ELEMENTS_MAX: u64 = 1 << 24;
/// What a thread moves at once where everything is aligned to it.
pub(super) const WORD_BYTES: u64 = 16;

/// One side of a job: `Side` of the source.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
pub(super) struct Side {
    /// Address of the planes' addresses; not read where `dense` is not 0.
    pub(super) planes: u64,
    /// Where the items lie one after the other, or 0.
    pub(super) dense: u64,
    pub(super) block_stride: u64,
    pub(super) row_stride: u64,
}

/// What a launch moves: `Job` of the source.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
pub(super) struct Job {
    pub(super) from: Side,
    pub(super) to: Side,
    pub(super) pairs: u64,
    pub(super) first: u64,
    pub(super) items: u64,
    pub(super) row_bytes: u64,
    pub(super) rows: u32,
    pub(super) pair_count: u32,
}

const _: () = assert!(size_of::<Side>() == 32 && size_of::<Job>() == 104);

/// The kernel in its two widths.
#[derive(Clone, Debug)]
pub(super) struct MoveKernel {
    words: Kernel,
    bytes: Kernel,
}

impl MoveKernel {
    pub(super) fn load(device: &Device) -> Result<Self, MoveError> {
        let module = Module::load(device, PTX)?;
        Ok(Self { words: module.kernel("move_words")?, bytes: module.kernel("move_bytes")? })
    }

    /// Enqueues a job, 16 bytes at a time if `wide`.
    ///
    /// # Safety
    /// - Every row of every item lies in device memory, or in pinned memory that the host does not
    ///   access before the launch has completed;
    /// - planes and pairs lie in memory that stays allocated, and unwritten, until then;
    /// - an item has at most [`ELEMENTS_MAX`] words, and if `wide`, every address, stride and
    ///   `row_bytes` is a multiple of [`WORD_BYTES`].
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        blocks: u32,
        job: Job,
        wide: bool,
    ) -> Result<(), DeviceError> {
        let kernel = if wide { &self.words } else { &self.bytes };
        let config = LaunchConfig::linear(blocks, THREADS);
        // SAFETY: both entries take one `Job` by value, whose layout the source's struct shares; what
        // the kernel reads and writes is the caller's promise.
        unsafe { kernel.launch(stream, &config, &KernelArgs::new().arg(job)) }
    }
}
