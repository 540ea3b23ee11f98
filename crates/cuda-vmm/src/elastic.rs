//! Answers of an [`ElasticPool`](crate::ElasticPool): reports, figures, refusals, and its closing.

pub use crate::elastic_pool::{
    AheadError, AheadStats, BlockNotReady, ElasticPoolStats, Park, PollReport, PoolClosing, Shrink,
};
