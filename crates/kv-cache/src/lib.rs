//! A KV cache that an LLM engine can talk to: admit, extend, stage, offload, onboard and release.
//!
//! This crate composes the others: `kv-pool` decides which block lies where, `cuda-vmm` maps memory
//! under them, `kv-stage` brings block tables to the device, `kv-kernels` moves tokens. An engine with
//! an overlap scheduler uses it like this:
//!
//! 1. [`KvCache::begin_step`] waits until the device is at most `overlap_depth` steps behind.
//! 2. [`KvCache::admit_batch`] of new requests, [`KvCache::extend`] running ones.
//! 3. [`KvCache::stage`] sends the block tables, and the engine's own small arrays, to the devices.
//! 4. The engine enqueues its kernels on the compute streams of [`KvCache::parts`].
//! 5. [`KvCache::seal`] lets others find the blocks that this step fills.
//! 6. [`KvCache::finish_step`]; requests that are done are dropped.
//!
//! With [`Growth::Ahead`] memory is mapped by a worker, off the steps; no step calls the driver for
//! memory once that keeps up or the pool has grown, and none waits for a copy on the host.
//! The README has a whole loop, on the simulated device.
//!
//! A step that fails between [`KvCache::begin_step`] and [`KvCache::finish_step`] needs no care: dropping
//! its [`OpenStep`] says that its work may be enqueued.
//!
//! # Who may use memory, and until when
//! Blocks are numbered alike on all devices. What a step may use is its own until an event after its
//! work has completed on every device: blocks by the pool's epochs, mappings by the leases of one
//! gate, staging buffers by events of their own.
//!
//! Copies between device and host are decided when blocks are admitted, and enqueued when the next step
//! is staged, many by one call ([`TransportRules`]). They run on one stream a device, in the order in
//! which they were decided, so that slots in host memory need no events; the compute streams wait for
//! them, and the gate counts them as users of the memory until they do.
//!
//! # Features
//! - `sabotage`: in builds with debug assertions, lets a test take a protection out.
//!
//! # What it does not do
//! It schedules nothing, shrinks never, and computes no hashes.

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod admit;
mod cache;
mod carrier;
mod close;
mod copies;
mod error;
mod growth;
mod host_tier;
mod options;
mod part;
mod request;
mod rows;
mod runs;
mod sequence;
mod shares;
mod step;
mod steps;
mod tenants;
mod transport;

pub use cache::{CacheStats, KvCache};
pub use cuda_vmm::worker::SpawnError;
pub use cuda_vmm::{MemoryLimit, MemoryRules, Worker, WorkerOptions};
pub use error::{
    AdmitError, BuildError, CloseError, DemandError, HostCopyError, QuotaError, SealError,
    SlotError, StepError,
};
pub use options::{Eviction, Growth, KvCacheOptions, OptionsError, PoolRules};
pub use part::Part;
pub use request::Request;
pub use sequence::Sequence;
pub use step::{OpenStep, StagedPart};
pub use transport::{Carried, TransportChoice, TransportRules, TransportStats, UnknownTransport};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
