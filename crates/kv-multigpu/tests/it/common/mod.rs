//! What the tests of several devices share: machines, a kernel, and a model whose layers lie on all devices.

#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod drops;
pub(crate) mod kernel;
pub(crate) mod levels;
pub(crate) mod links;
pub(crate) mod moving;
pub(crate) mod pipeline;
pub(crate) mod serving;

use std::sync::Arc;

use cuda_driver::Driver;
use cuda_sim::{SimConfig, SimDriver};
use kv_multigpu::DeviceRegistry;

/// A simulated machine with so many devices, and its registry.
pub(crate) fn machine(devices: u32, peer_access: bool) -> (SimDriver, DeviceRegistry) {
    let config = SimConfig { devices, peer_access, ..SimConfig::default() };
    let sim = SimDriver::new(config).unwrap();
    sim.register_kernels(&[kernel::REFERENCE]);
    let registry = DeviceRegistry::new(Arc::new(sim.clone()) as Arc<dyn Driver>).unwrap();
    (sim, registry)
}
