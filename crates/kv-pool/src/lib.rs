//! A block pool for LLM KV caches: prefix index, eviction, pins and tiers, with atomic claims.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod blocks;
#[cfg(loom)]
mod broken;
mod builder;
mod claim;
mod class;
pub mod clock;
mod config;
mod error;
pub mod events;
mod eviction;
mod guard;
mod hash;
mod hold;
mod ids;
mod index;
mod integrity;
mod list;
mod loan;
pub mod moves;
mod naming;
mod pin;
pub mod policy;
mod pool;
#[cfg(test)]
mod proportion;
#[cfg(test)]
mod refusals;
pub mod retention;
#[cfg(all(feature = "sabotage", debug_assertions))]
mod sabotage;
mod snapshot;
mod state;
pub mod stats;
#[cfg(test)]
mod steps;
pub mod store;
mod sync;
pub mod tenants;
mod view;

pub use builder::PoolBuilder;
pub use claim::Claimed;
pub use config::{BLOCKS_MAX, ConfigError, PoolConfig};
pub use error::{BudgetError, ClaimError, HandleError};
pub use hash::{BlockHash, BlockHasher, ExtraKey};
pub use ids::{BlockId, Epoch, GroupId, Location, Priority, Row, Slot, TableEntry, Tier};
pub use kv_errors::{Classed, ErrorClass};
pub use loan::{Loan, LoanId};
pub use naming::Naming;
pub use pin::Pinned;
pub use pool::BlockPool;
pub use state::{GranuleUse, Withdrawn};
pub use view::PoolView;

#[doc(hidden)]
pub use kv_errors::one_line_debug;

// The names of the modules, as the modules themselves write them.
pub(crate) use error::IntegrityError;
pub(crate) use events::{PoolEvent, Reading};
pub(crate) use ids::RecordId;
pub(crate) use retention::Retention;
pub(crate) use stats::PoolStats;
pub(crate) use tenants::{TenantCounts, TenantError, TenantId, TenantQuota};
