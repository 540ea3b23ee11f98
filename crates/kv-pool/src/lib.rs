//! A block pool for LLM KV caches: prefix index, eviction, pins and tiers, with atomic claims.
//!
//! The pool decides what each KV block of each tier holds. It knows nothing of CUDA, copies nothing and
//! allocates no device memory: blocks are numbers ([`BlockId`]), and what is to be copied is handed to
//! the caller as a token that is committed when the copy is enqueued.
//!
//! Two handles are lists of blocks: [`Claimed`] for blocks that one owner writes, [`Pinned`] for blocks
//! that others may read. One block is a list of one.
//!
//! | want | call |
//! | --- | --- |
//! | the cached prefix of a prompt, pinned | [`BlockPool::match_prefix`] |
//! | new blocks, all or none | [`BlockPool::claim`], or [`claim_one`](BlockPool::claim_one) |
//! | others to find what was written | [`Claimed::register`]; [`Claimed::register_new`], to choose where content is cached already; [`Claimed::register_onto`], one after the other |
//! | blocks given back, tail first | drop the [`Pinned`]; [`BlockPool::release`] for several lists |
//! | another reference to what is held | clone the [`Pinned`]: no lock |
//! | evicted content to host memory | [`Claimed::take_offload`], then [`moves::Offload::commit`] |
//! | content back from host memory | [`BlockPool::begin_onboard`], then [`moves::Onboard::commit`] |
//! | no reuse before the device is done | [`BlockPool::begin_epoch`], [`BlockPool::complete_epoch`] |
//! | a batch: all matches, then all claims | [`BlockPool::admit_fitting`], as many as fit; all or none: [`BlockPool::admit`]; before anything is evicted: [`BlockPool::admit_to_empty`] |
//! | content moved down ahead of need | [`BlockPool::pin_victims`], [`BlockPool::claim_in`], [`BlockPool::begin_onboard`] |
//! | readers in other processes | [`BlockPool::lend`], [`BlockPool::end_loan`], [`BlockPool::end_overdue_loans`] |
//! | memory that comes and goes | [`BlockPool::set_budget`], [`BlockPool::blocks_end`] |
//! | priorities that end | [`retention::Retention`], [`BlockPool::retain`], [`BlockPool::refresh`] |
//! | what the engine knows of the future | [`Pinned::hint`] |
//! | tenants | [`BlockPool::add_tenant`], [`BlockPool::set_quota`], [`BlockPool::claim_for`] |
//! | content dropped | [`BlockPool::remove`], [`BlockPool::remove_with_successors`], [`BlockPool::remove_tenant`] |
//! | a clock, events, other policies | [`BlockPool::builder`], [`BlockPool::events`], [`policy`] |
//! | to show a pool and keep it | [`BlockPool::view`] |
//! | what it holds | [`BlockPool::stats`], [`BlockPool::snapshot`], [`BlockPool::check_integrity`] |
//!
//! Lists of blocks take the lock once, whatever their length: a request looks up its prefix, claims
//! the rest, and later names what it has written, in one step each.
//!
//! ```
//! use kv_pool::{BlockHash, BlockPool, Naming, PoolConfig, TableEntry};
//!
//! let pool = BlockPool::new(&PoolConfig::primary_only(64))?;
//! let mut parent = BlockHash::ROOT;
//! let prompt: Vec<BlockHash> = (0..10)
//!     .map(|block| {
//!         parent = BlockHash::chain(parent, &[block; 16]);
//!         parent
//!     })
//!     .collect();
//!
//! let mut held = pool.match_prefix(&prompt);
//! let mut new = pool.claim(prompt.len() - held.len())?;
//! let block_table: Vec<TableEntry> = held.ids().chain(new.ids()).map(TableEntry::from).collect();
//! // ... enqueue the work that writes the new blocks ...
//! let written = new.register(&prompt[held.len()..], Naming::default())?;
//! held.append(written).expect("of the same pool");
//! assert_eq!((held.len(), block_table.len()), (10, 10));
//!
//! // In flight on the device: one more owner of all ten, without a lock.
//! let in_flight = held.clone();
//! drop((held, in_flight));
//! assert_eq!(pool.match_prefix(&prompt).len(), 10);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
//! - A name has one bearer, also while its content moves: what is removed does not come back, and what
//!   is computed again is held once.
//! - A block id that a copy reads or writes is handed out again only after the end of the copy.
//! - Released is not free: a block is handed out again only after the epoch of its release.
//! - Epochs, tenants, loans, pins and claimed blocks are of one pool. Another pool refuses them, or
//!   leaves them alone.
//! - A policy decides on an order alone. A victim that the pool has not given it is not taken. A policy
//!   that chooses one, or that panics, is called no more: [`stats::PoolCounters::policy_faults`].
//!
//! # Locks, and when an operation takes effect
//!
//! A pool has one lock, and locks nothing else while it holds it. Code of the caller runs under it in three
//! places: an injected [clock](clock::Clock), [eviction policies](policy::EvictionPolicy) and a
//! [store policy](store::StorePolicy), their panics and their drops after a panic included. These must not call
//! the pool. A panic of theirs leaves no operation half done. A clock that goes back stands still for the pool.
//! Iterators, conversions and writers that a caller passes run outside of the lock. The caller may hold any lock
//! of its own when it calls the pool.
//!
//! A thread that finds the lock taken waits before it looks again, longer each time and up to 50
//! microseconds. It sleeps after half a millisecond. So what the lock guards stays in one processor's
//! caches for a while. The lock is not fair until a thread sleeps.
//!
//! Every operation takes effect at one moment while it holds the lock, and one that fails has no effect.
//!
//! Two operations take no lock. Cloning a [`Pinned`] takes effect with an addition to the count of its
//! owners. Dropping one that has other owners takes effect with a subtraction. The drop of the last owner
//! takes the lock. While it holds it, the count of each block falls, and a block whose count becomes zero
//! is queued, so nobody sees a block that is neither held nor queued. [`moves::Onboard::commit`] decides
//! under the lock, by both counts, whether anybody else holds a block. Its own list cannot be cloned
//! meanwhile, for the move owns it.
//!
//! The time for which an operation holds the lock is bounded by the length of the lists that the caller
//! gives, and of those that it gives back or drops, with these exceptions:
//!
//! | operation | time for |
//! | --- | --- |
//! | [`BlockPool::snapshot`], [`BlockPool::check_integrity`], [`BlockPool::remove_with_successors`], [`BlockPool::remove_tenant`], [`BlockPool::set_budget`] | all blocks |
//! | [`BlockPool::granules`] | the blocks of the tier |
//! | [`BlockPool::grant`], [`BlockPool::withdraw`], [`BlockPool::vacate`], [`BlockPool::granule`] | the blocks of the granules |
//! | the first [`BlockPool::add_tenant`] or [`BlockPool::set_quota`] | all blocks, once |
//! | the first release that begins a duration | all blocks, once |
//! | a claim in a tier whose policy has nothing left but blocks that others follow, or is called no more | all blocks, once |
//! | a claim | each block that it passes over, once a release, because others follow the block or it is kept for another tenant |
//! | [`BlockPool::complete_epoch`] | each block that was released in the epoch |
//! | [`BlockPool::refresh`], [`BlockPool::end_overdue_loans`] | each block whose duration is over, each block of an overdue loan |
//! | [`BlockPool::set_quota`] | each cached block that gives way |
//!
//! What is done for a block takes constant time, or the logarithm of the number of blocks with durations, of loans, or
//! of tenants with blocks that were passed over.
//!
//! # Examples
//!
//! ```
//! use kv_pool::{BlockHash, BlockPool, PoolConfig, Priority};
//!
//! let pool = BlockPool::new(&PoolConfig::primary_only(8))?;
//! let hash = BlockHash::chain(BlockHash::ROOT, &[1, 2, 3, 4]);
//!
//! // One request computes a block and gives it a name.
//! let mut block = pool.claim(1)?;
//! let written = block.register(&[hash], Priority::DEFAULT)?;
//! let id = written.ids().next();
//! drop(written);
//!
//! // Another one finds it.
//! let pins = pool.match_prefix(&[hash]);
//! assert_eq!(pins.ids().next(), id);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod admit;
mod blocks;
#[cfg(loom)]
mod broken;
mod budget;
mod builder;
mod claim;
pub mod clock;
mod config;
mod error;
pub mod events;
mod eviction;
mod expiry;
mod guard;
mod hash;
mod hold;
mod ids;
mod index;
mod integrity;
mod list;
pub mod loan;
pub mod moves;
mod naming;
mod offload;
mod onboard;
mod pin;
pub mod policy;
mod pool;
#[cfg(test)]
mod proportion;
#[cfg(test)]
mod refusals;
mod removal;
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

pub use admit::{Admission, Admit, Admitted, Budget, Partial};
pub use budget::{GranuleUse, Withdrawn};
pub use builder::PoolBuilder;
pub use claim::{Claimed, Registered};
pub use config::{BLOCKS_MAX, ConfigError, PoolConfig};
pub use error::{BudgetError, ClaimError, EpochError, RegisterError};
pub use hash::{BlockHash, BlockHasher, ExtraKey};
pub use ids::{BlockId, Epoch, GroupId, Location, Priority, Row, Slot, TableEntry, Tier};
pub use naming::Naming;
pub use pin::Pinned;
pub use pool::BlockPool;
pub use view::PoolView;

// The names of the modules, as the modules themselves write them.
pub(crate) use error::{IntegrityError, OnboardError};
pub(crate) use events::{PoolEvent, Reading};
pub(crate) use ids::RecordId;
pub(crate) use loan::LoanId;
pub(crate) use retention::Retention;
pub(crate) use snapshot::{EventReader, PoolSnapshot};
pub(crate) use stats::{EvictionAges, PoolCounters, PoolStats};
pub(crate) use tenants::{TenantCounts, TenantError, TenantId, TenantQuota};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
