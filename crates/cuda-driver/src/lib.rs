//! The CUDA driver calls that a KV cache makes, behind one object-safe trait.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod counting;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod driver;
mod error;
mod launch;
mod memory;
mod module;
mod reference;
mod stream;
mod virtual_memory;

pub use counting::CountingDriver;
#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub use cuda::{CudaDriver, interop};
pub use device::{Device, DeviceError};
pub use driver::{
    AccessDesc, AllocationProp, DeviceAttribute, DeviceInfo, Driver, DriverResult, Granularity,
    HostAllocFlags, PeerCopy,
};
pub use error::{DriverError, ErrorCode, Unavailable};
pub use launch::{KernelArgs, LaunchConfig};
pub use memory::{CopyError, DeviceBuffer, DeviceSpan, OutOfBounds, PinnedBuffer};
pub use module::{Kernel, Module, ModuleError};
pub use reference::{AccessFault, DeviceMemory, KernelReference, ReferenceError, ReferenceFn};
pub use stream::{Event, Stream};
pub use virtual_memory::{AddressRange, PhysicalMemory};
