//! The CUDA driver calls that a KV cache makes, behind one object-safe trait, with RAII handles.
//!
//! Code that manages GPU memory is hard to test: what goes wrong depends on which context is current
//! on the thread, on the order in which streams happen to run, and on a machine that has a GPU. Here
//! every driver call passes through one seam, the trait [`Driver`]. [`CudaDriver`] stands behind it
//! on a machine with a GPU; a simulated device (the crate `cuda-sim`) stands behind it anywhere else,
//! when it is asked for by name. What is written against the handles runs on both unchanged.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//!
//! use cuda_driver::{Device, DeviceBuffer, Driver, Event, HostAllocFlags, PinnedBuffer, Stream};
//! use cuda_sim::{SimConfig, SimDriver};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // With a GPU: `let driver = cuda_driver::CudaDriver::probe()?;`. Nothing below changes.
//! let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(SimConfig::default())?);
//! let device = Device::open(driver, 0)?;
//! let stream = Stream::new(&device)?;
//! let memory = DeviceBuffer::alloc(&device, 4096)?;
//! let mut host = PinnedBuffer::alloc(&device, 4096, HostAllocFlags::CACHED)?;
//!
//! host.write_at(0, &[7; 4096])?;
//! stream.copy_to_device(memory.span(), &host, 0)?;
//! let sent = Event::new(&device)?;
//! sent.record(&stream)?;
//! sent.synchronize()?; // until now the copy may not have read `host`
//!
//! let mut seen = [0; 16];
//! stream.download(&mut seen, memory.span().slice(4080, 16)?)?;
//! assert_eq!(seen, [7; 16]);
//! # Ok(())
//! # }
//! ```
//!
//! # Layers
//! 1. [`Driver`]: one method per driver call, plain integers in, [`DriverError`] out. What follows a
//!    handle or a host address is `unsafe`. [`CountingDriver`] counts the calls over any driver.
//! 2. The handles: [`Device`], [`Stream`], [`Event`], [`DeviceBuffer`], [`PinnedBuffer`],
//!    [`AddressRange`], [`PhysicalMemory`], [`Module`] and [`Kernel`]. Each owns one driver object and
//!    keeps its device alive. [`DeviceSpan`] is an address and a length, and owns nothing.
//!
//! A driver that checks orders is also told of the host's accesses to pinned memory
//! ([`Driver::host_access`]), and for which line of the program each call is made ([`site`]). What wraps
//! these handles in functions of its own notes its callers' lines in the same way.
//!
//! What a host program already has is taken in: a context by [`Device::adopt`], a stream by
//! [`Stream::adopt`], memory by [`DeviceSpan::from_raw`]. Adopted objects stay their owner's, and our
//! raw handles ([`Device::context`], [`Stream::raw`], [`DeviceBuffer::address`]) may be lent the other
//! way. For cudarc, [`interop`] does both without raw handles: it keeps cudarc's objects alive, and
//! lends any span as a slice that cudarc does not free.
//!
//! Host memory that a program has, such as a shared segment, is pinned where it is
//! ([`PinnedBuffer::register`]); [`PinnedBuffer::pin`] maps huge pages beside the device for the purpose.
//!
//! Physical memory may be another process's too: [`PhysicalMemory::export`] and
//! [`PhysicalMemory::import`], by a file descriptor or a fabric handle.
//!
//! # Contexts
//! Every operation of a handle, a drop too, binds its own device's context on the calling thread and
//! restores what was current. So handles may be used and dropped on any thread, whatever the host
//! program has bound there. [`Device::run`] does the same for calls that no handle wraps.
//!
//! # Order
//! Operations of a stream run in the order of their calls and nothing else is ordered, except by
//! [`Event::record`] and [`Stream::wait`]. An operation uses memory when it runs, not when it is
//! enqueued. What waits on the host says so under *Ordering*. Dropping a buffer, stream or event does
//! not wait for the device: a buffer's memory is freed by the next allocation, by
//! [`Device::free_retired`], or with the last handle of the device, and so is a module unloaded. Dropping
//! that last handle may wait in the driver.
//!
//! # Loss
//! After an illegal access every later call in the context fails. The first such error poisons the
//! [`Device`]: later operations fail at once and name it ([`DeviceError::Poisoned`]), and clean-up is
//! still tried ([`Device::clean_up`]). Running out of memory is no loss:
//! [`DeviceError::is_out_of_memory`] tells it apart.
//!
//! # Features
//! - `cuda`: [`CudaDriver`] and [`interop`], through cudarc's bindings. Without a driver library there is a typed
//!   [`Unavailable`] and never a panic. The application names the version of the bindings and how they are linked.
//! - `cuda-defaults` (on by default): `cuda` with that choice made: loaded at run time, bindings of CUDA 12.8.
//!
//! # What it does not do
//! It keeps no book of mappings and proves no rest before an unmap (`cuda-vmm` does), pools no memory,
//! orders nothing on its own, and wraps no call that these crates do not make.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(feature = "cuda"), allow(rustdoc::broken_intra_doc_links))]

mod alive;
mod attributes;
mod close;
mod counting;
#[cfg(feature = "cuda")]
mod cuda;
mod current;
mod device;
mod driver;
mod error;
mod host_pages;
mod launch;
mod memory;
mod memory_flags;
pub mod messages;
mod module;
mod opened;
mod peer;
mod pin;
mod prepared;
mod reference;
mod residency;
mod shareable;
pub mod site;
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
pub use driver::{
    AllocationProp, BatchCopy, Driver, DriverResult, HostAccess, HostFunction, PeerCopy,
};
pub use error::{DriverError, ErrorCode, Unavailable};
pub use host_pages::{
    HostPages, HostPagesError, HostPagesOptions, HostRegion, MemoryNode, PageKind, PagesGot,
};
pub use launch::{KernelArgs, LaunchConfig};
pub use memory::{
    CopyError, DeviceBuffer, DeviceSpan, OutOfBounds, PinnedBuffer, PinnedSpan, ReaderError,
};
pub use memory_flags::{
    AccessDesc, Granularity, HostAllocFlags, HostRegisterFlags, MemoryKind, PointerAttributes,
};
pub use module::{Kernel, Module, ModuleError};
pub use pin::{HostMemory, PinError, RegisterError};
pub use prepared::PreparedLaunch;
pub use reference::{AccessFault, DeviceMemory, KernelReference, ReferenceError, ReferenceFn};
pub use residency::ResidencyError;
pub use shareable::{FabricHandle, ShareableHandle, ShareableKind, ShareableRef};
pub use stream::{Event, Stream, StreamPriority};
pub use virtual_memory::{AddressRange, FabricSupport, PhysicalMemory, ReleaseError};

#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
