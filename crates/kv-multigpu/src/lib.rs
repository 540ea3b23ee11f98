//! One shared instance per physical GPU, from any thread, for as long as the GPU is sound.
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
//! [`DeviceRegistry::report`] says who each device is: ordinal, UUID as NVML spells it, name, PCI bus, whether
//! it is a part of a GPU (MIG), NVML's index where a [`DeviceDirectory`] knows it, what has become of it, and
//! what is alive on it.
//!
//! # Life and loss
//! The registry keeps every instance open until it is closed. [`drain`](DeviceRegistry::drain) hands a device
//! out no more and waits for its work, [`close`](DeviceRegistry::close) gives its context back or says what is
//! still alive, [`close_all`](DeviceRegistry::close_all) does both for all of them. No other device is touched
//! or waited for.
//!
//! A device that was lost answers every operation with the error that lost it, in whatever part of the
//! program. It can be drained and closed like any other; then it stays closed. NVIDIA's driver keeps a kernel's
//! fault to the *process*, not to the device: all devices of the process answer the error, those too that were
//! not open yet, and closing mends nothing (seen with driver 580). [`DeviceState::Lost`] then names the device
//! that met it first. Work that must go on when another GPU faults belongs into another process, which notices
//! nothing. Losses that are one device's own, such as a card that fails, leave the others serving.
//!
//! # Threads
//! Every handle may be used and dropped on any thread. For async programs a [`DeviceThread`](threads::DeviceThread) is one worker for a
//! device: tasks run on it in the order of submission, with the device's context current, and a [`Completion`](threads::Completion)
//! is a future of any runtime, or waited for by blocking. The queue is bounded, full is an outcome and
//! [`Room`](threads::Room) can be waited for, a task can be taken back until it begins, a panic is an error, and dropping
//! waits for nothing.
//!
//! ```
//! # use cuda_sim::{SimConfig, SimDriver};
//! # use kv_multigpu::DeviceRegistry;
//! # use kv_multigpu::threads::{DeviceThread, DeviceThreadOptions};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let registry = DeviceRegistry::new(std::sync::Arc::new(SimDriver::new(SimConfig::default())?))?;
//! let thread = DeviceThread::spawn(&registry.device(0)?, DeviceThreadOptions::default())?;
//! let task = thread.submit(|device: &cuda_driver::Device| device.memory_info())?;
//! let (free, total) = task.wait()??; // or `task.await??`
//! assert!(free <= total);
//! thread.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Moves
//! [`moves`] takes memory from one device to another, without waiting on the host, and holds both ends
//! until that is done.
//!
//! # Topology
//! [`topology`] tells where devices are and what joins them, and measures links on request.
//!
//! # Features
//! - `nvml`: `NvmlDirectory`, NVML's indices of devices, and `topology::NvmlLinks`, its links, where the machine
//!   has it. Its absence is no error.
//! - `sabotage` (debug builds only): opens an instance at every call, and lets moves forget an order,
//!   so that tests see what goes wrong then.
//!
//! # What it does not do
//! It starts no process and restarts none.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod health;
mod identity;
pub mod moves;
#[cfg(feature = "nvml")]
mod nvml;
mod registry;
mod sync;
pub mod threads;
pub mod topology;

pub use health::{CloseDeviceError, CloseReport, DeviceEntry, DeviceState, Drained};
pub use identity::{DeviceDirectory, DeviceKind, DeviceListing, DeviceUuid, UuidError};
#[cfg(feature = "nvml")]
#[cfg_attr(docsrs, doc(cfg(feature = "nvml")))]
pub use nvml::NvmlDirectory;
pub use registry::{DeviceRegistry, RegistryError};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
