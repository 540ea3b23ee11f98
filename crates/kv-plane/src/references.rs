//! What the kernels of a cache compute, for simulated devices.

use cuda_driver::reference::KernelReference;

/// What the kernels that a cache launches compute, on the CPU. A simulated device that knows it (`register_kernels`)
/// does not interpret their PTX, and runs a cache some fifty times as fast.
///
/// # Examples
///
/// ```
/// let sim = cuda_sim::SimDriver::new(cuda_sim::SimConfig::default())?;
/// sim.register_kernels(&kv_plane::references());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn references() -> Vec<KernelReference> {
    [kv_kernels::references(), kv_stage::references()].concat()
}
