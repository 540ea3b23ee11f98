//! Virtual reservations, physical pages and mappings for KV memory on CUDA devices, transactional and ordered after use.
//!
//! CUDA reserves addresses without memory and puts memory under them later. The calls for it are raw:
//! mapping races, a mapped page without access faults, and unmapping is ordered after nothing. Here,
//! mapping is all or nothing and one thread at a time, and unmapping needs proof of rest.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//!
//! use cuda_driver::{Device, Stream};
//! use cuda_sim::{SimConfig, SimDriver};
//! use cuda_vmm::Fence;
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
//! // A fence after the work of the batch takes the place of its lease.
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
//! An [`ElasticPool`] has equal blocks on one range of addresses. A [`Worker`] makes its driver calls
//! ahead of need. The parts below it are public too:
//!
//! - [`pages`]: a [`PagePool`](pages::PagePool) creates physical pages, each with an identity. A
//!   [`Reservation`](pages::Reservation) takes pages over when it maps them, and hands them back when it
//!   has unmapped them. A call that fails returns the pages that it was given. [`pages::share`] gives a
//!   page to another process.
//! - [`sequences`]: a [`SequenceSpace`](sequences::SequenceSpace) has contiguous addresses for each
//!   sequence, mapped ahead of need.
//! - [`limit`]: limits in bytes, and admission by what the device has free.
//! - [`worker`]: how work ahead of need is doing.
//!
//! # Order
//! A page goes from free to mapped, from mapped to retiring, and from retiring to free. The last step takes
//! a proof that two kinds of users are done. Work on the device is done when the [`Fence`]s recorded after
//! it are complete. Batches that the CPU has not enqueued yet are done when their [`Lease`]s of the
//! [`EpochGate`] are closed. Nothing else unmaps. A retiring page counts as neither mapped nor free, so no
//! new user finds it and nothing is mapped over it.
//!
//! A dropped lease counts as enqueued work with no fence after it: see [`Lease`].
//!
//! Once an address was given out, no fence and no lease is no proof. Then only a call that waits for all
//! work of the device unmaps memory or gives it to another user.
//!
//! No work goes on on a lost device. Its fences count as complete, so clean-up finishes there too.
//!
//! # How much memory there may be
//! Pools charge every page to a [`MemoryLimit`]. Pools may share a limit, and any thread may move it while
//! they work. An [`AdmissionPolicy`](limit::AdmissionPolicy) says whether the device can spare the memory.
//! [`MemoryRules`] names both. A refusal is a typed error with all figures. Memory that has no user is given
//! back before anything is refused.
//!
//! # Features
//! - `nvml`: `limit::NvmlProbe`, a source of figures that knows what other processes hold of a device.
//! - `sabotage`: in builds with debug assertions, lets a test take the protection out.
//!
//! # What it does not do
//! It does not say which block belongs to whom. It orders nothing between processes that share a page. It
//! cannot know of work on its addresses without a fence or a lease.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod elastic_pool;
mod epoch;
mod fence;
pub mod limit;
pub mod pages;
mod rest;
pub mod sequences;
pub mod worker;

pub use elastic_pool::{
    AheadError, AheadStats, BlockNotReady, ElasticPool, ElasticPoolOptions, ElasticPoolStats,
    GrowError, Park, PollReport, PoolClosing, PoolError, Shrink,
};
pub use epoch::{CoverError, EpochGate, Lease, UncoveredLease, Unrest};
pub use fence::Fence;
pub use limit::{MemoryLimit, MemoryRules};
pub use pages::close::CloseReport;
pub use pages::reservation::leaked_bytes;
pub use rest::{NotAtRest, UsersUnknown};
pub use worker::{Worker, WorkerOptions};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
