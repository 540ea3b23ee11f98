//! Virtual reservations, physical pages and mappings for KV memory on CUDA devices.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod background;
mod class;
mod elastic_pool;
mod epoch;
mod error;
mod memory_limit;
pub mod pages;
mod rest;
pub mod sequences;

pub use background::{Worker, WorkerOptions};
pub use elastic_pool::{ElasticPool, ElasticPoolOptions, GrowError};
pub use epoch::{EpochGate, Lease};
pub use error::SpaceError;
pub use memory_limit::{MemoryLimit, MemoryRules};
pub use pages::close::CloseReport;
pub use pages::reservation::leaked_bytes;

/// Answers of an [`ElasticPool`]: reports, figures and refusals.
pub mod elastic {
    pub use crate::elastic_pool::{
        AheadError, AheadStats, BlockNotReady, ElasticPoolStats, PollReport, Shrink,
    };
}

/// Refusals of an [`EpochGate`]: what is not at rest, and why.
pub mod gate {
    pub use crate::epoch::{CoverError, UncoveredLease, Unrest};
    pub use crate::rest::{NotAtRest, UsersUnknown};
}

/// What a [`MemoryLimit`] answers, and a check of the device's free memory before more is created.
pub mod limit {
    pub use crate::memory_limit::{
        AdmissionPolicy, LimitStats, MemoryFigures, MemoryProbe, OverLimit, Reclaimed, Verdict,
    };
}

/// The state of what a [`Worker`] does ahead of need, and the obstacles to it. An obstacle that may pass is tried
/// again. A panic or a lost device ends the work of the pool or space that met it, and of no other.
pub mod worker {
    pub use crate::background::{Fault, Health, SpawnError};
}
