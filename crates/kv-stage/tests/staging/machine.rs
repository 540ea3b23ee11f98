//! A simulated machine with a kernel that reads host memory, and helpers for all tests.

use std::sync::{Arc, OnceLock};

use cuda_driver::reference::{DeviceMemory, KernelReference, ReferenceError};
use cuda_driver::{
    Device, DeviceBuffer, DeviceError, DeviceSpan, Kernel, KernelArgs, LaunchConfig, Module, Stream,
};
use cuda_sim::{SimConfig, SimDriver};
use kv_stage::{StagingOptions, StagingPool};

/// Copies `bytes` bytes, one thread per byte.
pub(crate) const COPY_PTX: &str = include_str!("../fixtures/copy_bytes.compute_80.ptx");

pub(crate) struct Machine {
    pub(crate) sim: SimDriver,
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    /// Loaded by the first launch.
    kernel: OnceLock<Kernel>,
}

impl Machine {
    pub(crate) fn new(seed: u64) -> Self {
        let config = SimConfig { seed, devices: 2, ..SimConfig::default() };
        Self::on(SimDriver::new(config).unwrap())
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

    /// Enqueues the kernel: `destination.bytes()` bytes from `source`, host or device memory.
    pub(crate) fn launch_copy(
        &self,
        stream: &Stream,
        destination: DeviceSpan,
        source: u64,
    ) -> Result<(), DeviceError> {
        let load = || Module::load(&self.device, COPY_PTX).unwrap().kernel("copy_bytes").unwrap();
        let kernel = self.kernel.get_or_init(load);
        let bytes = destination.bytes();
        let threads = bytes.clamp(1, 128);
        let config = LaunchConfig::linear(bytes.div_ceil(threads) as u32, threads as u32);
        let args = KernelArgs::new().arg(destination.address()).arg(source).arg(bytes);
        // SAFETY: three 64-bit parameters, as declared; host sources are staging buffers, which
        // their pool keeps until the kernel has run; the destination is device memory.
        unsafe { kernel.launch(stream, &config, &args) }
    }

    /// The contents of `span` once all work of the machine's stream has run.
    pub(crate) fn read(&self, span: DeviceSpan) -> Vec<u8> {
        let mut bytes = vec![0; span.bytes() as usize];
        self.stream.download(&mut bytes, span).unwrap();
        bytes
    }

    pub(crate) fn calls(&self, name: &str) -> u64 {
        self.sim.calls().get(name).copied().unwrap_or(0)
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

/// Bytes that depend on the number and on the position.
pub(crate) fn pattern(number: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random(number.wrapping_mul(2).wrapping_add(1));
    (0..bytes).map(|_| random.below(256) as u8).collect()
}

/// A small generator, so that every run is the same.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % end
    }
}
