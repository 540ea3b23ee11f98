//! A block pool for LLM KV caches: prefix index, eviction, pins and tiers, with atomic claims.
//!
//! The pool decides which KV block lies in which slot of which tier. It knows nothing of CUDA,
//! copies nothing and allocates no device memory: slots are numbers, and what is to be copied is
//! handed to the caller as a token that is committed when the copy is enqueued.
//!
//! | want | call |
//! | --- | --- |
//! | the cached prefix of a prompt, pinned | [`BlockPool::match_prefix`] |
//! | new blocks, all or none | [`BlockPool::claim`] |
//! | evicted content to host memory | [`ClaimedBlock::take_offload`], then [`Offload::commit`] |
//! | content back from host memory | [`BlockPool::begin_onboard`], then [`Onboard::commit`] |
//! | others to find what was written | [`ClaimedBlock::register`] |
//! | blocks given back, tail first | [`BlockPool::release`] |
//! | no reuse before the device is done | [`BlockPool::begin_epoch`], [`BlockPool::complete_epoch`] |
//!
//! # What cannot go wrong
//!
//! Numbers such as H10 are those of `docs/HAZARDS.md` in the repository.
//!
//! - Finding a block and taking it is one step; there is no peek to act on (H10).
//! - Reference counts and lists change together, under one lock that each operation takes once
//!   (H6, H9). A count below zero is refused and counted in the statistics (H7).
//! - A block that anybody else has pinned is never moved: the check and the swap are one step,
//!   after the copy (H8).
//! - Released is not free: a block is handed out again only after the epoch of its release.
//!
//! # Examples
//!
//! ```
//! use kv_pool::{BlockHash, BlockPool, PoolConfig, Priority, Registration};
//!
//! let pool = BlockPool::new(&PoolConfig::primary_only(8))?;
//! let hash = BlockHash::chain(BlockHash::ROOT, &[1, 2, 3, 4]);
//!
//! // One request computes a block and gives it a name.
//! let block = pool.claim(1)?.remove(0);
//! let slot = block.slot();
//! let Registration::New(pin) = block.register(hash, Priority::DEFAULT) else { panic!() };
//! pool.release(vec![pin]);
//!
//! // Another one finds it.
//! let pins = pool.match_prefix(&[hash]);
//! assert_eq!(pins[0].slot(), slot);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod claim;
mod clock;
mod config;
mod error;
#[cfg(test)]
mod events;
mod eviction;
#[cfg(test)]
mod expiry;
mod hash;
mod ids;
mod integrity;
mod list;
mod onboard;
mod pin;
pub mod policy;
mod pool;
mod retention;
mod retiring;
#[cfg(all(feature = "sabotage", debug_assertions))]
mod sabotage;
mod state;
mod stats;
#[cfg(test)]
mod tenants;

pub use claim::{ClaimedBlock, Offload, Registration};
pub use clock::{Clock, ManualClock, SystemClock};
pub use config::{BLOCKS_MAX, ConfigError, PoolConfig};
pub use error::{ClaimError, EpochError, GrowError, IntegrityError, OnboardError};
#[cfg(test)]
pub use events::{PoolEvent, Reading};
pub use hash::{BlockHash, BlockHasher, ExtraKey};
pub use ids::{BlockId, Epoch, Location, Priority, SlotIndex, Tier};
pub use onboard::{Onboard, OnboardRefused, Onboarded};
pub use pin::BlockPin;
pub use pool::BlockPool;
pub use retention::{Retention, RetentionError, RetentionPolicy, TokenRange};
pub use stats::{PoolCounters, PoolStats, TierStats};
#[cfg(test)]
pub use tenants::{EvictionVerdict, TenantCounts, TenantError, TenantId, TenantQuota};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
