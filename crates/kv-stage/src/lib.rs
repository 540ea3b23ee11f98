//! Host buffers that cannot be overwritten while the device still reads them.
//!
//! An asynchronous copy, and a kernel that reads host memory, read their source when they *run*. By
//! then, a host that works one step ahead has overwritten it, unless two rules hold: every step
//! writes its own buffer, and a buffer is reused only after its last reader has finished. This
//! crate enforces both rules by types:
//!
//! * [`StagingPool`]: a bounded number of pinned buffers of a few sizes, cut from a few slabs.
//! * [`StagingBuffer`]: one of these buffers, owned by one host thread and writable. Only
//!   [`StagingBuffer::submit`] passes it to the device, and consumes it: later code can neither
//!   write it nor submit it again. It returns to the pool when events recorded after its readers
//!   have completed.
//! * [`PinnedSlabs`]: much pinned memory for blocks, pinned by several threads in the background.
//! * [`DeviceBatch`]: the block tables, slots, positions and lengths of each step, at addresses that
//!   captured CUDA graphs can keep. A step sends what changed, in one buffer.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//!
//! use cuda_driver::{Device, DeviceBuffer, Stream};
//! use cuda_sim::{SimConfig, SimDriver};
//! use kv_stage::{StagingOptions, StagingPool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A simulated device. On a real one only the driver differs.
//! let sim = SimDriver::new(SimConfig::default())?;
//! let device = Device::open(Arc::new(sim.clone()), 0)?;
//! let stream = Stream::new(&device)?;
//! let target = DeviceBuffer::alloc(&device, 64)?;
//!
//! let pool = StagingPool::new(&device, StagingOptions { buffer_bytes: 64, buffers_max: 2 })?;
//! sim.hold(stream.raw()); // the device is busy elsewhere: nothing runs yet
//! let mut buffer = pool.acquire()?;
//! buffer.bytes_mut().fill(7);
//! buffer.submit(&stream, |view| view.copy_to_device(target.span(), 0))?;
//! pool.acquire()?.bytes_mut().fill(8); // another buffer: the copy still has to read the first
//!
//! sim.release_hold(stream.raw());
//! let mut arrived = [0; 64];
//! stream.download(&mut arrived, target.span())?;
//! assert_eq!(arrived, [7; 64]);
//! # Ok(())
//! # }
//! ```
//!
//! # Ordering
//! `submit` records its event after the closure's work, on the same stream and on every stream
//! passed to [`SubmittedView::also_read_by`]. Only these calls wait on the host:
//! [`StagingPool::acquire_wait`], [`StagingPool::drain`] and [`StagingPool::close`]. Each stream's
//! buffers retire in the order of submission; a blocked stream does not delay the buffers of
//! others.
//!
//! # Features
//! * `sabotage` (debug builds only): a switch that returns buffers too early, so that tests can see
//!   the harm. Off by default, also at run time.
//!
//! # What it does not do
//! It pins only the memory that the pool was created for, never falls back to pageable memory, and
//! never grows: an empty pool returns [`AcquireError::Exhausted`](error::AcquireError::Exhausted), and
//! the caller waits. If the system has no huge pages or memory nodes, the pool works without them, see
//! [`StagingPool::memory`].

#![cfg_attr(docsrs, feature(doc_cfg))]

mod batch;
mod buffer;
pub mod error;
mod pinned_slabs;
mod pinning;
mod pool;
mod retire;
mod slab;

pub use batch::{
    BatchBuffers, BatchLength, BatchOptions, BatchStep, BatchTable, DeviceBatch, RowStates,
    StagedBatch, TableBuffers, references,
};
pub use buffer::{StagingBuffer, SubmittedView};
pub use kv_pool::{BlockId, Row, TableEntry};
pub use pinned_slabs::{PinnedSlabs, SlabsOptions};
pub use pinning::Pinning;
pub use pool::{PoolOptions, StagingOptions, StagingPool};
pub use slab::SlabMemory;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
