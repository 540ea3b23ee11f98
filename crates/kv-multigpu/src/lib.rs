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
//! # One registry
//! A program makes one registry and hands it to whoever needs a device: two registries are two sets
//! of instances again. GPUs are told apart by UUID, not by ordinal, because `CUDA_VISIBLE_DEVICES`
//! renumbers them.
//!
//! # Life and loss
//! The registry keeps every instance open; a device lives until the registry and all handles made
//! from it are gone. A GPU that was lost stays registered, and every operation on it answers with
//! the error that lost it, in whatever part of the program: its context is gone for the process.
//!
//! # Placement
//! [`placement`] decides which GPU holds which layers, KV blocks and heads, from plain numbers.
//!
//! # Moves
//! [`moves`] takes memory from one device to another, without waiting on the host, and holds both ends
//! until that is done.
//!
//! # What it does not do
//! It measures no links.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod device_thread;
mod health;
mod identity;
pub mod moves;
#[cfg(feature = "nvml")]
mod nvml;
pub mod placement;
mod registry;
mod sync;

#[cfg(loom)]
pub use device_thread::model;
pub use device_thread::{
    CloseThreadError, Completion, DeviceThread, DeviceThreadOptions, Refusal, SubmitError,
    TaskError,
};
pub use health::{CloseDeviceError, CloseReport, DeviceEntry, DeviceState, Drained};
pub use identity::{DeviceDirectory, DeviceKind, DeviceUuid, Place, UuidError};
#[cfg(feature = "nvml")]
#[cfg_attr(docsrs, doc(cfg(feature = "nvml")))]
pub use nvml::NvmlDirectory;
pub use registry::{DeviceRegistry, RegistryError};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
