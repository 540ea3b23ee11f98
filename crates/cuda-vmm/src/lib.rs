//! Virtual reservations, physical pages and mappings for KV memory on CUDA devices. Mapping is
//! transactional, and unmapping is ordered after use.
//!
//! CUDA can reserve addresses and map memory to them later. The raw calls are hard to use safely:
//! concurrent mapping calls race, a mapped page without access rights faults, and unmapping waits
//! for no work. In this crate, mapping is all or nothing and serialised, and unmapping needs a
//! proof that the memory is at rest.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//!
//! use cuda_driver::{Device, Fence, Stream};
//! use cuda_sim::{SimConfig, SimDriver};
//! use cuda_vmm::pages::{PagePool, PagePoolOptions, PageState, Reservation, ReservationOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open(Arc::new(SimDriver::new(SimConfig::default())?), 0)?;
//! let pages = PagePool::new(&device, PagePoolOptions { page_bytes: None, capacity_pages: 8 })?;
//! let bytes = 64 * pages.page_bytes();
//! let options = ReservationOptions { bytes, ..Default::default() };
//! let addresses = Reservation::new(&device, options)?;
//!
//! addresses.map_range(10, pages.take_many(4)?)?;
//! let span = addresses.mapped_span(10..14)?;
//! assert_eq!(span.bytes(), 4 * pages.page_bytes());
//!
//! // A batch on the CPU still has the addresses: the pages are out of use, but stay mapped.
//! let lease = addresses.gate().lease();
//! let retiring = addresses.retire(10..14, &[])?;
//! assert!(matches!(addresses.page_state(10), PageState::Retiring(_)));
//! let retiring = retiring.try_complete().unwrap_err().request;
//! // A fence after the batch's work replaces its lease.
//! let stream = Stream::new(&device)?;
//! let fence = Fence::record(&stream)?;
//! fence.wait()?;
//! lease.submitted(&[fence])?;
//! for page in retiring.try_complete()?.pages {
//!     pages.give_back(page)?;
//! }
//! assert_eq!(pages.stats().idle, 4);
//! assert!(addresses.close(&[]).wait()?.is_clean());
//! # Ok(())
//! # }
//! ```
//!
//! # Who owns what
//! An [`ElasticPool`] has equal blocks on one range of addresses. A [`Worker`] makes the pool's
//! driver calls ahead of need. The parts below are public too:
//!
//! - [`pages`]: a [`PagePool`](pages::PagePool) creates physical pages, each with an identity. A
//!   [`Reservation`](pages::Reservation) takes ownership of pages when it maps them, and returns
//!   them when it has unmapped them. A failed call returns the pages that it was given.
//! - [`sequences`]: a [`SequenceSpace`](sequences::SequenceSpace) has contiguous addresses for each
//!   sequence, mapped ahead of need.
//! - [`limit`]: limits in bytes, and admission by the device's free memory.
//! - [`worker`]: the state of work ahead of need.
//!
//! # Order
//! A page goes from free to mapped, from mapped to retiring, and from retiring to free. The last
//! step needs a proof that two kinds of users are done. Work on the device is done when the
//! [`Fence`](cuda_driver::Fence)s recorded after it are complete. Batches that the CPU has not enqueued yet are done
//! when their [`Lease`]s of the [`EpochGate`] are closed. Nothing else unmaps. A retiring page
//! counts as neither mapped nor free, so no new user finds it and nothing is mapped over it.
//!
//! A dropped lease counts as enqueued work with no fence after it: see [`Lease`].
//!
//! Once an address was handed out, the absence of fences and leases proves nothing. Then only a
//! call that waits for all work of the device unmaps the memory or gives it to another user.
//!
//! On a lost device no work runs. Its fences count as complete, so clean-up finishes there too.
//!
//! # Limits
//! Pools charge every page to a [`MemoryLimit`]. Pools may share a limit, and any thread may change
//! it while they work. An [`AdmissionPolicy`](limit::AdmissionPolicy) decides whether the device
//! can spare the memory. [`MemoryRules`] holds both. A refusal is a typed error with all figures.
//! Unused memory is released before any request is refused.
//!
//! # Features
//! - `nvml`: `limit::NvmlProbe`, which also knows how much of a device other processes hold.
//! - `sabotage`: in builds with debug assertions, lets a test disable the protection.
//!
//! # What it does not do
//! The crate does not know which sequence a block belongs to, shares no page with other processes, and
//! cannot see work on its addresses that has no fence and no lease.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod elastic;
mod elastic_pool;
mod epoch;
pub mod gate;
pub mod limit;
pub mod pages;
mod rest;
pub mod sequences;
pub mod worker;

pub use elastic_pool::{ElasticPool, ElasticPoolOptions, GrowError, PoolError};
pub use epoch::{EpochGate, Lease};
pub use limit::{MemoryLimit, MemoryRules};
pub use pages::close::CloseReport;
pub use pages::reservation::leaked_bytes;
pub use worker::{Worker, WorkerOptions};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
