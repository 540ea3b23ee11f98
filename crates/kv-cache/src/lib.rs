//! A KV cache for LLM engines: admit, extend, stage, offload, onboard and release.
//!
//! This crate composes the others. `kv-pool` decides which block holds what, `cuda-vmm` maps memory
//! under the blocks, `kv-stage` brings block tables to the device, `kv-kernels` moves tokens. An
//! engine with an overlap scheduler makes these calls:
//!
//! 1. [`KvCache::begin_step`] waits until the device is at most `overlap_depth` steps behind.
//! 2. [`KvCache::admit_fitting`] of new requests, [`KvCache::extend`] running ones.
//! 3. [`KvCache::stage`] sends the block tables, and the engine's own small arrays, to the devices.
//! 4. The engine enqueues its kernels on the compute streams of [`KvCache::parts`].
//! 5. [`KvCache::seal`] lets others find the blocks that this step fills.
//! 6. [`KvCache::finish_step`]; requests that are done are dropped.
//!
//! With [`Growth::Ahead`] a worker maps memory, off the steps. Once the worker keeps up, or the
//! pool has grown, no step calls the driver for memory. No step waits for a copy on the host. The
//! README has a whole loop, on the simulated device.
//!
//! A step may fail between [`KvCache::begin_step`] and [`KvCache::finish_step`]. Drop its
//! [`OpenStep`] then: its work counts as enqueued.
//!
//! # How long memory is in use
//! Block ids are the same on all devices. Memory that a step may use is kept until an event after
//! its work has completed on every device. The pool's epochs keep blocks, the leases of one gate
//! keep mappings, and staging buffers have events of their own.
//!
//! Copies between device and host are decided at admission, and enqueued when the next step is
//! staged, many by one call ([`TransportRules`]). Copies to host memory run on one stream of each
//! device and copies back on another, at the same time. A copy waits for those of the other
//! direction that touch one of its blocks, and for no others. The compute streams wait for both.
//! Until then the gate counts them as users of the memory.
//!
//! # Features
//! - `cuda-defaults` (default), `cuda`: the real driver, as in `cuda-driver`.
//! - `sabotage`: for tests. In builds with debug assertions it adds switches that take protections out.
//!
//! # What it does not do
//! It does not schedule, does not shrink, and computes no hashes.

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod awaited;
mod cache;
mod calls;
mod carrier;
mod error;
mod growth;
mod host_tier;
mod options;
mod order;
mod part;
mod pieces;
mod runs;
mod shares;
mod steps;
mod transport;
mod worker;

pub use cache::{CacheStats, KvCache};
pub use cuda_vmm::worker::SpawnError;
pub use cuda_vmm::{MemoryLimit, MemoryRules, Worker, WorkerOptions};
pub use error::{
    BuildError, CloseError, DemandError, HostCopyError, QuotaError, ReserveError, ResumeError,
    SlotError, StepError,
};
pub use kv_manager::{
    self, Answer, Committed, Content, OpenStep, Request, Reserved, Sequence, StepPlan, Tokens,
    Waiting,
};
pub use kv_stage::{BatchBuffers, BatchLength, BatchStep, TableBuffers};
pub use options::{Eviction, Growth, KvCacheOptions, OptionsError, PoolRules};
pub use part::Part;
pub use transport::{Carried, TransportChoice, TransportRules, TransportStats, UnknownTransport};
pub use worker::KvWorker;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
