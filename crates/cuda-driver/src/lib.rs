//! The CUDA driver calls that a KV cache makes, behind one object-safe trait.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod driver;
mod error;
mod launch;
mod reference;

pub use driver::{
    AccessDesc, AllocationProp, DeviceAttribute, DeviceInfo, Driver, DriverResult, Granularity,
    HostAllocFlags, PeerCopy,
};
pub use error::{DriverError, ErrorCode, Unavailable};
pub use launch::{KernelArgs, LaunchConfig};
pub use reference::{AccessFault, DeviceMemory, KernelReference, ReferenceError, ReferenceFn};
