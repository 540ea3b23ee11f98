//! Virtual reservations, physical pages and mappings for KV memory on CUDA devices.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod elastic_pool;
mod epoch;
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

/// Answers of an [`ElasticPool`]: reports, figures and refusals.
pub mod elastic {
    pub use crate::elastic_pool::{
        AheadError, AheadStats, BlockNotReady, ElasticPoolStats, Park, PollReport, Shrink,
    };
}

/// Refusals of an [`EpochGate`]: what is not at rest, and why.
pub mod gate {
    pub use crate::epoch::{CoverError, UncoveredLease, Unrest};
    pub use crate::rest::{NotAtRest, UsersUnknown};
}
