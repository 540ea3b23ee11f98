//! A simulated machine with a kernel that reads host memory.

use std::sync::{Arc, OnceLock};

use cuda_driver::reference::{DeviceMemory, KernelReference, ReferenceError};
use cuda_driver::{
    Device, DeviceBuffer, DeviceError, DeviceSpan, KernelArgs, LaunchConfig, Stream,
};
use cuda_sim::SimDriver;
use kv_stage::{StagingOptions, StagingPool, TableEntry};
use kv_testkit::machine::{self, CopyKernel};

pub(crate) struct Machine {
    pub(crate) sim: SimDriver,
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    /// Loaded by the first launch.
    kernel: OnceLock<CopyKernel>,
}

impl Machine {
    /// Two devices.
    pub(crate) fn new(seed: u64) -> Self {
        Self::on(machine::sim(2, seed))
    }

    pub(crate) fn on(sim: SimDriver) -> Self {
        sim.register_kernels(&[KernelReference { name: "copy_bytes", run: copy_bytes }]);
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        Self { sim, device, stream, kernel: OnceLock::new() }
    }

    pub(crate) fn pool(&self, buffer_bytes: u64, buffers_max: usize) -> StagingPool {
        StagingPool::new(&self.device, StagingOptions { buffer_bytes, buffers_max }).unwrap()
    }

    pub(crate) fn memory(&self, bytes: u64) -> DeviceBuffer {
        DeviceBuffer::alloc(&self.device, bytes).unwrap()
    }

    pub(crate) fn copy_kernel(&self) -> &CopyKernel {
        self.kernel.get_or_init(|| CopyKernel::load(&self.device))
    }

    /// Enqueues the kernel: `destination.bytes()` bytes from `source`, host or device memory.
    pub(crate) fn launch_copy(
        &self,
        stream: &Stream,
        destination: DeviceSpan,
        source: u64,
    ) -> Result<(), DeviceError> {
        // SAFETY: host sources are staging buffers, which their pool keeps until the kernel has run, or
        // memory that outlives the machine's work; the simulated device checks every access.
        unsafe { self.copy_kernel().launch(stream, destination, source) }
    }

    /// The contents of `span` once all work of the machine's stream has run.
    pub(crate) fn read(&self, span: DeviceSpan) -> Vec<u8> {
        machine::read(&self.stream, span)
    }

    pub(crate) fn calls(&self, name: &str) -> u64 {
        machine::calls(&self.sim, name)
    }
}

fn copy_bytes(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let word = |index| args.get::<u64>(index).ok_or(ReferenceError::Argument { index });
    let data = memory.load(word(1)?, word(2)?)?.into_owned();
    Ok(memory.store(word(0)?, &data)?)
}

/// Entries of a block table, -1 for none.
pub(crate) fn entries(ids: &[i32]) -> Vec<TableEntry> {
    ids.iter().map(|&id| TableEntry::new(id).unwrap()).collect()
}
