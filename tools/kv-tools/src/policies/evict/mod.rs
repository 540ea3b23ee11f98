//! Published eviction policies that no engine uses, as implementations of `kv-pool`'s trait, and all policies by name.
//!
//! | implementation | order |
//! | --- | --- |
//! | [`PriorityLru`] | lowest priority first, in it the least recently released: that of a pool without a policy |
//! | [`Slru`] | segmented LRU: what was found outlives what never was |
//! | [`S3Fifo`] | three first-in, first-out queues; what is looked up once passes quickly |
//! | [`AdaptiveReplacement`] | ARC: recent against frequent, in shares that follow the misses |
//!
//! The others decide as if all blocks had the same priority. Tables are allocated when a policy is made; no operation allocates, and
//! what is remembered of evicted content is bounded by the number of blocks.

mod arc;
mod ghosts;
mod kind;
mod lru;
mod queues;
mod s3fifo;
mod slru;

pub use arc::AdaptiveReplacement;
pub use kind::{Eviction, UnknownEviction};
pub use lru::PriorityLru;
pub use s3fifo::S3Fifo;
pub use slru::Slru;

use kv_pool::ConfigError;

/// A table of `len` times `value`, for a policy of `blocks` blocks.
fn table<T: Clone>(len: usize, value: T, blocks: u64) -> Result<Vec<T>, ConfigError> {
    let mut table = Vec::new();
    table.try_reserve_exact(len).map_err(|_| ConfigError::PolicyMemory { blocks })?;
    table.resize(len, value);
    Ok(table)
}

/// `blocks` as an index bound, if a pool can be so large.
fn check_blocks(blocks: u64) -> Result<usize, ConfigError> {
    if blocks > kv_pool::BLOCKS_MAX {
        return Err(ConfigError::PolicyBlocks { blocks });
    }
    usize::try_from(blocks).map_err(|_| ConfigError::PolicyBlocks { blocks })
}
