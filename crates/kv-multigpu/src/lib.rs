//! One shared instance for each physical GPU, placement of a model on them, and moves between them.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod class;
mod health;
mod identity;
pub mod moves;
pub mod place;
mod registry;
mod sync;
pub mod threads;
pub mod topology;

pub use health::{CloseReport, DeviceEntry, DeviceState, Drained};
pub use identity::{DeviceKind, DeviceUuid};
pub use registry::{DeviceRegistry, RegistryError};
