//! One shared instance for each physical GPU, from any thread, for as long as the GPU is sound.
//!
//! Weights, kernels and KV that are created through different instances of one GPU lie in different contexts. They then
//! fail far from the cause. A [`DeviceRegistry`] hands out one [`Device`](cuda_driver::Device) for each GPU, keyed by
//! UUID, on its primary context. It can adopt a context of the host program instead.
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
//! A program makes one registry and passes it on: two registries would be two sets of instances. GPUs are told apart by
//! UUID, not by ordinal, because `CUDA_VISIBLE_DEVICES` renumbers them.
//!
//! [`DeviceRegistry::report`] lists the devices: ordinal, UUID as NVML spells it, name, PCI bus, whether the device is a
//! part of a GPU (MIG), NVML's index where a [`DeviceDirectory`](directory::DeviceDirectory) knows it, state, and live handles.
//!
//! # Life and loss
//! The registry keeps every instance open until it is closed. [`drain`](DeviceRegistry::drain) stops handing a device
//! out and waits for its work. [`close`](DeviceRegistry::close) gives the device's context back, or lists the handles
//! that are still alive. [`close_all`](DeviceRegistry::close_all) does both for all devices. No other device is touched
//! or waited for.
//!
//! A lost device answers every operation with the error that lost it, in every part of the program. It can be drained
//! and closed like any other device, and stays closed. A *kernel's fault* is a loss of the whole process in NVIDIA's
//! driver (580): all devices of the process answer the error, also those that were not open yet, and closing them does
//! not help. [`DeviceState::Lost`] then names the device that met the fault first. Work that must go on when another
//! GPU faults belongs in another process. The loss of one device alone, such as a card that fails, leaves the other
//! devices serving.
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
//! [`moves`] copies memory from one device to another without waiting on the host, and holds both ends until the copy
//! has completed.
//!
//! # Topology
//! [`topology`] finds the places of devices and the links between them, and measures links on request.
//!
//! # Placement
//! [`place`] decides from plain numbers, without a device, which GPU holds which layers, KV blocks and heads.
//!
//! # Features
//! - `nvml`: `NvmlDirectory`, NVML's indices of devices, and `topology::NvmlLinks`, its links, where the machine
//!   has it. Its absence is no error.
//!
//! # What it does not do
//! It starts no process and restarts none.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod directory;
mod health;
mod identity;
pub mod moves;
#[cfg(feature = "nvml")]
mod nvml;
pub mod place;
mod registry;
mod sync;
pub mod threads;
pub mod topology;

pub use health::{CloseDeviceError, CloseReport, DeviceEntry, DeviceState, Drained};
pub use identity::{DeviceKind, DeviceUuid, UuidError};
pub use registry::{DeviceRegistry, RegistryError};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
