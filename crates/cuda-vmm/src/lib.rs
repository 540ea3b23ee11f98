//! Virtual reservations, physical pages and mappings for KV memory on CUDA devices.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod class;
mod elastic_pool;
mod epoch;
mod error;
pub mod limit;
pub mod pages;
mod rest;
pub mod sequences;
pub mod worker;

pub use elastic_pool::{ElasticPool, ElasticPoolOptions, GrowError};
pub use epoch::{EpochGate, Lease};
pub use error::SpaceError;
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
