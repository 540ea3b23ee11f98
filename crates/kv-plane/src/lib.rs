//! A KV cache for LLM engines: the whole life of a sequence, over mapped memory or the engine's tensors.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod awaited;
mod cache;
mod calls;
mod carrier;
mod class;
mod draft;
mod error;
mod granules;
mod group;
mod growth;
#[cfg(feature = "remote")]
pub mod handover;
mod host_tier;
mod in_process;
mod layers;
#[cfg(feature = "metrics")]
pub mod metrics;
mod options;
mod order;
mod part;
mod pieces;
mod pinned;
pub mod prelude;
#[cfg(feature = "processes")]
pub mod processes;
mod references;
mod runs;
mod shares;
mod steps;
mod streams;
mod tiers;
mod transport;
mod worker;
mod workers;

// The parts, so that one dependency is enough, of versions that fit together.
#[doc(no_inline)]
pub use cuda_driver as driver;
#[doc(no_inline)]
pub use cuda_vmm as vmm;
#[cfg(feature = "disk")]
#[doc(no_inline)]
pub use kv_disk as disk;
#[doc(no_inline)]
pub use kv_kernels as kernels;
#[doc(no_inline)]
pub use kv_manager as manager;
#[doc(no_inline)]
pub use kv_multigpu as multigpu;
#[cfg(feature = "nixl")]
#[doc(no_inline)]
pub use kv_nixl as nixl;
#[doc(no_inline)]
pub use kv_pool as pool;
#[cfg(feature = "remote")]
#[doc(no_inline)]
pub use kv_remote as remote;
#[doc(no_inline)]
pub use kv_stage as stage;
#[doc(no_inline)]
pub use kv_tier as tier;

pub use cache::{CacheStats, KvCache, WayBytes};
pub use cuda_vmm::{MemoryLimit, MemoryRules, Worker, WorkerOptions};
pub use error::{
    BuildError, CloseError, CloseErrors, DemandError, GranuleError, HostCopyError, QuotaError,
    ReserveError, ResumeError, StepError,
};
pub use group::GroupPart;
pub use in_process::InProcess;
pub use kv_manager::{
    Admission, Answer, Committed, GroupId, NoRoom, OpenStep, Request, Room, Sequence, SharedMemory,
    StepPlan, Tokens, Waiting,
};
pub use kv_pool::{Classed, ErrorClass};
pub use kv_stage::BatchStep;
pub use kv_tier::GroupKind;
pub use options::{
    Eviction, GroupOptions, Growth, HostPinning, HostStore, KvCacheOptions, OptionsError, PoolRules,
};
pub use part::Part;
pub use references::references;
pub use tiers::LowerTiers;
pub use transport::{Carried, TransportChoice, TransportRules, TransportStats, UnknownTransport};
pub use worker::KvWorker;
pub use workers::Workers;

/// What a caller looks at cannot be changed from there.
///
/// ```compile_fail,E0596
/// # fn change(cache: kv_plane::KvCache) {
/// cache.manager().reset();
/// # }
/// ```
///
/// ```compile_fail,E0599
/// # fn view(cache: kv_plane::KvCache) {
/// cache.manager().pool(kv_plane::GroupId(0)).unwrap().begin_epoch();
/// # }
/// ```
///
/// ```compile_fail,E0599
/// # fn view(cache: kv_plane::KvCache, epoch: kv_pool::Epoch) {
/// cache.manager().pool(kv_plane::GroupId(0)).unwrap().complete_epoch(epoch);
/// # }
/// ```
///
/// ```compile_fail,E0599
/// # fn view(cache: kv_plane::KvCache) {
/// cache.manager().pool(kv_plane::GroupId(0)).unwrap().add_primary_blocks(1);
/// # }
/// ```
#[cfg(doctest)]
struct LookedAtOnly;
