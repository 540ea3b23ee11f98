//! One shared instance per physical GPU.
//!
//! Weights, kernels and KV that are created through different instances of the same GPU end up in
//! different contexts and fail in ways that show far from the cause. A [`DeviceRegistry`] hands out
//! the one [`Device`](cuda_driver::Device) of each GPU, keyed by UUID, on its primary context, and
//! can take in a context that the host program made before.
//!
//! ```
//! use cuda_sim::{SimConfig, SimDriver};
//! use kv_multigpu::DeviceRegistry;
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let driver = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() })?;
//! let registry = DeviceRegistry::new(Arc::new(driver))?;
//! let first = registry.device(0)?;
//! assert!(first == registry.device(0)?, "the same instance every time");
//! assert!(first != registry.device(1)?);
//! # Ok(())
//! # }
//! ```
//!
//! # What it does not do
//! It measures no links and places nothing.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod registry;

pub use registry::{DeviceRegistry, RegistryError};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
