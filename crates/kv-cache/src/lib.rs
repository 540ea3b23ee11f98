//! A KV cache for LLM engines: the whole life of a sequence, over mapped memory or the engine's tensors.
//!
//! A [`KvCache`] has two halves. A [`Manager`](kv_manager::Manager) decides which block holds what; it
//! calls no driver. A [`KvWorker`] carries its plans out on the devices: `cuda-vmm` maps memory under
//! the blocks, `kv-stage` brings each step's batch to the device, `kv-kernels` moves blocks. An engine
//! with an overlap scheduler makes these calls:
//!
//! 1. [`KvCache::begin_step`] waits until the device is at most `overlap_depth` steps behind.
//! 2. [`KvCache::commit`] takes the ids that came out of earlier steps.
//! 3. [`KvCache::reserve`] gives running sequences room for their next tokens, drafts included;
//!    [`KvCache::admit`] lets new ones in.
//! 4. [`KvCache::stage`] enqueues copies, and sends each device the step's batch.
//! 5. The engine enqueues its kernels on the compute streams of [`KvCache::parts`]. They read
//!    [`Part::batch`], at addresses that stay, so that a step can be a captured graph.
//! 6. [`KvCache::finish_step`]; requests that are done are dropped.
//!
//! At any time a sequence can be [truncated](KvCache::truncate), [forked](KvCache::fork),
//! [suspended](KvCache::suspend) and [resumed](KvCache::resume), or dropped. The README has the loop, and
//! the examples show drafts, an engine's own tensors, two GPUs and a captured graph.
//!
//! With [`Growth::Ahead`] a worker maps memory, off the steps. Once the worker keeps up, or the
//! pool has grown, no step calls the driver for memory. [`KvCache::set_budget`] gives memory back while
//! requests run. No step waits for a copy on the host.
//!
//! # Steps that fail
//! A step that was staged and is dropped instead of finished counts as failed: its names are withdrawn,
//! and its sequences are told from where to compute again.
//!
//! # How long memory is in use
//! Block ids are the same on all devices. Memory that a step may use is kept until an event after
//! its work has completed on every device. The pool's epochs keep blocks, the leases of one gate
//! keep mappings, and staging buffers have events of their own.
//!
//! Copies are decided with the calls that need them, and enqueued when the next step is staged, many by
//! one call ([`TransportRules`]). Copies to host memory run on one stream of each device and copies back
//! on another, at the same time; copies within the device and scrubs run on the compute stream. A copy
//! waits for those of other streams that touch one of its blocks, and for the work that still writes
//! what it reads, and for nothing else. The compute stream waits for the copies that touch a block of the
//! batch.
//!
//! # Whose bytes memory holds
//! With [`scrubs`](KvCacheOptions::scrubs), a device block is overwritten with zeros before another tenant's sequence writes it. A host
//! block needs no scrub: it is read only after all of it was written, by a whole copy or by a load that was checked, and what a load
//! has not brought right is overwritten with zeros before the block is anybody's. Staging buffers hold tables and lengths, and the
//! ring of two hops holds whole blocks on their way: no call reads either.
//!
//! # Features
//! - `cuda-defaults` (default), `cuda`: the real driver, as in `cuda-driver`.
//! - `metrics`: the statistics as Prometheus text, in the module `metrics`.
//! - `sabotage`: for tests. In builds with debug assertions it adds switches that take protections out.
//!
//! # What it does not do
//! It does not schedule.

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod awaited;
mod cache;
mod calls;
mod carrier;
mod draft;
mod error;
mod granules;
mod group;
mod growth;
mod host_share;
mod host_tier;
mod layers;
#[cfg(feature = "metrics")]
pub mod metrics;
mod options;
mod order;
mod part;
mod pieces;
mod pinned;
mod references;
mod runs;
mod shares;
mod steps;
mod streams;
mod tiers;
mod transport;
mod worker;

pub use cache::{CacheStats, KvCache, WayBytes};
pub use cuda_vmm::worker::SpawnError;
pub use cuda_vmm::{MemoryLimit, MemoryRules, Worker, WorkerOptions};
pub use error::{
    BuildError, CloseError, DemandError, GranuleError, HostCopyError, QuotaError, ReserveError,
    ResumeError, StepError,
};
pub use group::GroupPart;
pub use kv_manager::{
    self, Answer, CacheEvent, Committed, Content, DraftError, EventReader, EventsLost, GroupId,
    OpenStep, PinnedPrefix, Request, Reserved, Reuse, Sequence, SharedMemory, SlotError, StepPlan,
    StoredBlocks, Tokens, Waiting,
};
pub use kv_stage::{BatchBuffers, BatchLength, BatchStep, TableBuffers};
pub use kv_tier::{self, GroupKind};
pub use options::{
    Eviction, GroupOptions, Growth, HostPinning, HostStore, KvCacheOptions, OptionsError, PoolRules,
};
pub use part::Part;
pub use references::references;
pub use tiers::LowerTiers;
pub use transport::{Carried, TransportChoice, TransportRules, TransportStats, UnknownTransport};
pub use worker::KvWorker;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;

/// What a caller looks at cannot be changed from there.
///
/// ```compile_fail,E0596
/// # fn change(cache: kv_cache::KvCache) {
/// cache.manager().reset();
/// # }
/// ```
///
/// ```compile_fail,E0599
/// # fn view(cache: kv_cache::KvCache) {
/// cache.pool().begin_epoch();
/// # }
/// ```
///
/// ```compile_fail,E0599
/// # fn view(cache: kv_cache::KvCache, epoch: kv_pool::Epoch) {
/// cache.pool().complete_epoch(epoch);
/// # }
/// ```
///
/// ```compile_fail,E0599
/// # fn view(cache: kv_cache::KvCache) {
/// cache.pool().add_primary_blocks(1);
/// # }
/// ```
#[cfg(doctest)]
struct LookedAtOnly;
