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
//! use cuda_driver::Device;
//! use cuda_sim::{SimConfig, SimDriver};
//! use cuda_vmm::{PagePool, PagePoolOptions, PageState, Reservation, ReservationOptions};
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
//! // It was given up before it enqueued anything.
//! lease.cancel();
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
//! A [`PagePool`] creates [`PhysicalPage`]s, each with one holder and an identity. A [`Reservation`]
//! takes pages over when it maps them and hands them back when it has unmapped them; whatever fails
//! returns what it was given. A page may have holders in other processes too, by way of the module
//! `share`. An [`ElasticPool`] is one of each, seen as equal blocks; a
//! [`SequenceSpace`] is a reservation seen as sequences with contiguous planes. A [`Worker`] makes
//! their driver calls ahead of need.
//!
//! # Order
//! A page goes from free to mapped, from mapped to retiring, and from retiring to free. The last
//! step takes a proof that two kinds of users are done: work on the device, by the [`Fence`]s
//! recorded after it, and batches that the CPU has not enqueued yet, by the [`Lease`]s of an
//! [`EpochGate`]. Nothing else unmaps. Between retiring and free the page is reported as neither
//! mapped nor free, so no new user finds it and nothing is mapped over it.
//!
//! A lease that is dropped counts as enqueued, with no fence after the work: see [`Lease`].
//!
//! No fence and no lease is no proof, once an address was given out: then nothing is unmapped, or
//! given to somebody else, without a wait for the device.
//!
//! On a lost device no work goes on, so its fences count as complete: clean-up finishes there too.
//!
//! # How much there may be
//! Pools charge every page to a [`MemoryLimit`] that they share and that any thread may move while they
//! work, and ask an [`AdmissionPolicy`] whether the device can spare it; [`MemoryRules`] names both. What
//! is refused is a typed error with all figures; what nobody needs is given back first.
//!
//! # Features
//! - `nvml`: `NvmlProbe`, an admission policy's source that knows what other processes hold.
//! - `sabotage`: in builds with debug assertions, lets a test take the protection out.
//!
//! # What it does not do
//! It does not say which block belongs to whom, orders nothing between processes that share a page
//! (module `share`), and cannot know of work on its addresses without a fence or a lease.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod access;
mod admission;
mod close;
mod elastic_pool;
mod epoch;
mod error;
mod fence;
mod limit;
mod map;
#[cfg(feature = "nvml")]
mod nvml;
mod page;
mod page_pool;
mod reservation;
mod rest;
mod retire;
mod sequence_space;
#[cfg(unix)]
#[cfg_attr(docsrs, doc(cfg(unix)))]
pub mod share;
mod table;
mod worker;

pub use admission::{
    AdmissionError, AdmissionPolicy, DriverProbe, Headroom, MemoryFigures, MemoryProbe, Verdict,
};
pub use close::{CloseReport, Closing};
pub use elastic_pool::{
    AheadError, AheadStats, ElasticPool, ElasticPoolOptions, ElasticPoolStats, PAGE_SIZES,
    PageSizeError, PageSizeReport, Park, PollReport, PoolClosing, Shrink, page_size_report,
};
pub use epoch::{EpochGate, Lease, Unrest};
pub use error::{
    BlockNotReady, CloseError, CloseStep, ForeignPage, GrowError, MapError, MapRefusal, MapStep,
    NotAtRest, NotMapped, PageError, PoolError, ReserveError, RetireError, UsersUnknown,
};
pub use fence::Fence;
pub use limit::{LimitStats, MemoryLimit, OverLimit, Reclaimed};
#[cfg(feature = "nvml")]
#[cfg_attr(docsrs, doc(cfg(feature = "nvml")))]
pub use nvml::NvmlProbe;
pub use page::{Page, PageId, PhysicalPage, SharedPage};
pub use page_pool::{MemoryRules, PagePool, PagePoolOptions, PagePoolStats};
pub use reservation::{Mapped, Reservation, ReservationOptions, ReservationStats, leaked_bytes};
pub use retire::{Retiring, UnmapFailure, UnmapReport};
pub use sequence_space::{
    AdmitError, BatchError, ExtendError, Layout, Plane, PlaneError, Sequence, SequenceSpace,
    SpaceClosing, SpaceError, SpaceOptions, SpaceStats, StillLive, Strides, TrimReport,
};
pub use table::PageState;
pub use worker::{
    Fault, Health, Progress, SpawnError, Waker, WorkHandle, WorkSource, Worker, WorkerOptions,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
