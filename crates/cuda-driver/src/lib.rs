//! The CUDA driver calls that a KV cache makes, behind one object-safe trait, with RAII handles.
//!
//! Code that manages GPU memory is hard to test. Its failures depend on the current context of the
//! thread and on the order in which streams happen to run, and they need a machine with a GPU. Here
//! every driver call passes through one seam, the trait [`Driver`]. On a machine with a GPU,
//! [`CudaDriver`] implements it. On any machine, a simulated device (the crate `cuda-sim`)
//! implements it, when a program asks for it by name. Code on top of the handles runs on both
//! unchanged.
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
//! 1. [`Driver`]: one method per driver call, plain integers in, [`DriverError`] out. Calls that
//!    follow a handle or a host address are `unsafe`. [`CountingDriver`] counts the calls over any
//!    driver.
//! 2. The handles: [`Device`], [`Stream`], [`Event`], [`DeviceBuffer`], [`PinnedBuffer`],
//!    [`AddressRange`], [`PhysicalMemory`], [`Module`] and [`Kernel`]. Each owns one driver object and
//!    keeps its device alive. [`DeviceSpan`] is an address and a length. It owns nothing, and names its owner, after
//!    whose end no call takes it.
//!
//! A driver that checks orders also gets the host's accesses to pinned memory
//! ([`Driver::host_access`]), and the line of the program behind each call ([`site`]). A crate with
//! functions over these handles passes on its callers' lines in the same way.
//!
//! Objects of the host program are adopted: a context by [`Device::adopt`], a stream by
//! [`Stream::adopt`], memory by [`DeviceSpan::from_raw`]. Adopted objects stay their owner's. Our
//! raw handles ([`Device::context`], [`Stream::raw`], [`DeviceBuffer::address`]) may be lent to
//! other libraries. For cudarc, [`interop`] does both without raw handles: it keeps cudarc's
//! objects alive, and lends any span as a slice that cudarc does not free.
//!
//! Host memory of the program, such as a shared segment, is pinned in place
//! ([`PinnedBuffer::register`]). [`PinnedBuffer::pin`] maps and pins huge pages next to the device.
//!
//! # Contexts
//! Every operation of a handle, also a drop, binds its own device's context on the calling thread
//! and restores the context that was current before. So handles may be used and dropped on any
//! thread, whatever context the host program has bound there. [`Device::run`] does the same for
//! calls that no handle wraps.
//!
//! # Order
//! Operations of one stream run in the order of their calls. Operations of different streams are
//! ordered by [`Event::record`] and [`Stream::wait`] only. An operation uses memory when it runs,
//! not when it is enqueued. Methods that wait on the host say so under *Ordering*. Dropping a
//! buffer, stream or event does not wait for the device. The memory of a dropped buffer is freed,
//! and a dropped module unloaded, by the next allocation, by [`Device::free_retired`], or with the
//! last handle of the device. Dropping that last handle may wait in the driver.
//!
//! # Loss
//! After an illegal access every later call in the context fails. The first such error poisons the
//! [`Device`]: later operations fail at once and name it ([`DeviceError::Poisoned`]), and clean-up is
//! still tried ([`Device::clean_up`]). Exhausted memory is no loss: see
//! [`DeviceError::is_out_of_memory`].
//!
//! # Features
//! - `cuda`: [`CudaDriver`] and [`interop`], through cudarc's bindings. Without a driver library
//!   the answer is an [`Unavailable`], never a panic. The application chooses the version of the
//!   bindings and how they are linked.
//! - `cuda-defaults` (on by default): `cuda` with that choice made: loaded at run time, bindings of CUDA 12.8.
//!
//! # What it does not do
//! It has no table of mappings and no proof of rest before an unmap; `cuda-vmm` has both. It pools
//! no memory and makes no order between streams by itself. It wraps only the calls that these
//! crates make.

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
mod fence;
mod graph;
mod guard;
pub mod host_pages;
mod launch;
mod memory;
mod memory_flags;
pub mod messages;
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
pub use launch::{KernelArgs, LaunchConfig};
pub use memory::{CopyError, DeviceBuffer, OutOfBounds, PinnedBuffer, PinnedSpan, ReaderError};
pub use memory_flags::{
    AccessDesc, Granularity, HostAllocFlags, HostRegisterFlags, MemoryKind, PointerAttributes,
};
pub use module::{Kernel, Module, ModuleError};
pub use prepared::PreparedLaunch;
pub use residency::ResidencyError;
pub use span::DeviceSpan;
pub use stream::{Event, Stream, StreamPriority};
pub use virtual_memory::{AddressRange, PhysicalMemory, ReleaseError};

pub(crate) use host_pages::{
    GrantedPages, HostPages, HostPagesError, HostPagesOptions, HostRegion, PageKind,
};

#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
