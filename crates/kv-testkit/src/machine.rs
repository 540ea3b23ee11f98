//! Simulated devices, and a kernel that copies bytes: what reads memory in tests.

use std::sync::Arc;

use cuda_driver::{
    Device, DeviceError, DeviceSpan, Kernel, KernelArgs, LaunchConfig, Module, Stream,
};
use cuda_sim::{SimConfig, SimDriver};

/// Copies bytes, one a thread, from host or device memory to device memory: `copy_bytes(destination,
/// source, bytes)`.
pub const COPY_PTX: &str = include_str!("../fixtures/copy_bytes.compute_80.ptx");

/// A simulated machine of `devices` devices whose scheduler has `seed`.
pub fn sim(devices: u32, seed: u64) -> SimDriver {
    SimDriver::new(SimConfig { devices, seed, ..SimConfig::default() }).unwrap()
}

/// Device `ordinal` of a machine.
pub fn device(sim: &SimDriver, ordinal: i32) -> Device {
    Device::open(Arc::new(sim.clone()), ordinal).unwrap()
}

/// The number of calls of `name` that a machine's driver has had.
pub fn calls(sim: &SimDriver, name: &str) -> u64 {
    sim.calls().get(name).copied().unwrap_or(0)
}

/// The contents of `span` once all earlier work of `stream` has run.
pub fn read(stream: &Stream, span: DeviceSpan) -> Vec<u8> {
    let mut bytes = vec![0; span.bytes() as usize];
    stream.download(&mut bytes, span).unwrap();
    bytes
}

/// The kernel that copies bytes, on one device.
#[derive(Debug)]
pub struct CopyKernel(Kernel);

impl CopyKernel {
    /// Loads it.
    pub fn load(device: &Device) -> Self {
        Self(Module::load(device, COPY_PTX).unwrap().kernel("copy_bytes").unwrap())
    }

    /// Enqueues a copy of `destination.bytes()` bytes.
    ///
    /// # Safety
    ///
    /// Until the kernel has run, `source` is as many readable bytes of host memory that the device sees, or of
    /// memory of a device, and nothing else uses `destination`.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        destination: DeviceSpan,
        source: u64,
    ) -> Result<(), DeviceError> {
        let bytes = destination.bytes();
        let threads = bytes.clamp(1, 128);
        let config = LaunchConfig::linear(bytes.div_ceil(threads) as u32, threads as u32);
        let args = KernelArgs::new().arg(destination.address()).arg(source).arg(bytes);
        // SAFETY: three 64-bit parameters, as the kernel declares; the caller's promise for both addresses.
        unsafe { self.0.launch(stream, &config, &args) }
    }
}
