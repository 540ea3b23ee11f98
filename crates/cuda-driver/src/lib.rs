//! The CUDA driver calls that a KV cache makes, behind one object-safe trait, with RAII handles.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(feature = "cuda"), allow(rustdoc::broken_intra_doc_links))]

mod alive;
mod attributes;
mod class;
mod close;
mod counting;
#[cfg(feature = "cuda")]
mod cuda;
mod current;
mod device;
mod driver;
mod error;
mod fence;
mod graph;
mod guard;
pub mod host_pages;
mod launch;
mod memory;
mod memory_flags;
mod module;
mod opened;
mod peer;
mod pin;
mod prepared;
pub mod reference;
mod residency;
pub mod site;
mod span;
mod stream;
mod virtual_memory;

pub use alive::LiveHandles;
pub use attributes::{DeviceAttribute, DeviceInfo, PeerAttribute};
pub use close::{CloseError, Closed, Loss};
pub use counting::CountingDriver;
#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub use cuda::{CudaDriver, interop};
pub use device::{Device, DeviceError};
pub use driver::{AllocationProp, BatchCopy, Driver, DriverResult, HostAccess, PeerCopy};
pub use error::{DriverError, ErrorCode, Unavailable};
pub use fence::{Fence, FencePool};
pub use graph::CapturedGraph;
#[doc(hidden)]
pub use kv_errors as messages;
pub use kv_errors::{Classed, ErrorClass};
pub use launch::{KernelArgs, LaunchConfig};
pub use memory::{CopyError, DeviceBuffer, OutOfBounds, PinnedBuffer, PinnedSpan};
pub use memory_flags::{
    AccessDesc, Granularity, HostAllocFlags, HostRegisterFlags, MemoryKind, PointerAttributes,
};
pub use module::{Kernel, Module, ModuleError};
pub use prepared::PreparedLaunch;
pub use residency::ResidencyError;
pub use span::DeviceSpan;
pub use stream::{Event, Stream};
pub use virtual_memory::{AddressRange, PhysicalMemory, ReleaseError};

pub(crate) use host_pages::{GrantedPages, HostPages, HostPagesOptions, HostRegion, PageKind};
