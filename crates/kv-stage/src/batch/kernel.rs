//! The kernel that makes a batch from the step's packet, and its launch.

use cuda_driver::{
    Device, DeviceError, DeviceSpan, Kernel, KernelArgs, LaunchConfig, Module, ModuleError,
    PreparedLaunch, Stream,
};

use super::buffers::Memory;
use super::options::BatchOptions;

/// Built from `kernels/stage/batch.cu` by `cargo xtask kernels`.
pub(super) const PTX: &str = include_str!("../../ptx/batch.compute_80.ptx");

/// The kernel's name.
pub(crate) const GATHER: &str = "gather_batch";

/// Maximum number of threads of a block: `THREADS_MAX` of the source.
const THREADS: u32 = 256;
/// As many blocks as run at once on the largest cards. More take turns.
const BLOCKS_MAX: u32 = 1024;

/// The gather of one batch: its arguments are the same for every launch.
#[derive(Debug)]
pub(super) struct Gather {
    kernel: Kernel,
    config: LaunchConfig,
    /// # Invariants
    /// The parameters of `gather_batch`, in order and size. All memory is the batch's.
    args: KernelArgs,
    ready: PreparedLaunch,
}

impl Gather {
    pub(super) fn load(
        device: &Device,
        ptx: &str,
        options: &BatchOptions,
        memory: &Memory,
    ) -> Result<Self, ModuleError> {
        let kernel = Module::load(device, ptx)?.kernel(GATHER)?;
        let config = LaunchConfig::linear(options.sequences_max.min(BLOCKS_MAX), THREADS);
        let arrays = memory.arrays.as_ref().map_or(0, |arrays| arrays.address());
        let address = DeviceSpan::address;
        let buffers = &memory.buffers;
        let args = KernelArgs::new()
            .arg(memory.packet.address())
            .arg(memory.tables.address())
            .arg(options.tables.len() as u32)
            .arg(arrays)
            .arg(options.arrays.len() as u32)
            .arg(memory.states.address())
            .arg(address(buffers.accepted))
            .arg(address(buffers.rows))
            .arg(address(buffers.lengths))
            .arg(address(buffers.query_starts))
            .arg(address(buffers.positions))
            .arg(options.sequences_max)
            .arg(options.tokens_max);
        // SAFETY: the 13 arguments are the parameters of `gather_batch` in `kernels/stage/batch.cu`, in
        // order and size.
        let ready = unsafe { kernel.prepare(&config, &args) };
        let ready =
            ready.map_err(|source| ModuleError::Kernel { name: GATHER.to_owned(), source })?;
        Ok(Self { kernel, config, args, ready })
    }

    /// Enqueues the gather by the launch that is ready.
    pub(super) fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: the kernel reads and writes device memory only (invariant of `args`).
        unsafe { self.ready.launch(stream) }
    }

    /// Enqueues the gather as a launch of its own, which a capturing stream takes.
    pub(super) fn launch_plainly(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: the arguments are the kernel's, and it reads and writes device memory only (invariants
        // of `args`).
        unsafe { self.kernel.launch(stream, &self.config, &self.args) }
    }
}
