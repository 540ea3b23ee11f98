//! The deciding half of a KV cache: which block holds what, for which sequence, in which step.
//!
//! A [`Manager`] knows blocks, steps and workers as numbers. It calls no driver. What is to be done on
//! the devices leaves it as a [`StepPlan`], one a step, and comes back as a [`Completion`]: values that
//! an engine hands to a worker in the same process, or sends as bytes to others ([`StepPlan::to_bytes`]).
//!
//! # A step
//! 1. [`Manager::begin_step`] begins it. [`Manager::complete`] told the manager before which steps the
//!    workers have completed.
//! 2. [`Manager::commit`] takes the token ids that earlier steps have produced.
//! 3. [`Manager::reserve`] gives running sequences room for their next tokens;
//!    [`Manager::admit`] lets new ones in.
//! 4. [`Manager::stage`] returns the plan of the step.
//! 5. [`Manager::finish_step`] ends it.
//!
//! At any time a sequence can be [truncated](Manager::truncate), [forked](Manager::fork),
//! [suspended](Manager::suspend) and [resumed](Manager::resume), or dropped.
//!
//! # What is named
//! A full block gets a name, which others find it by, when its token ids are known *and* a staged step
//! writes its KV for certain: the last sampled token has an id before it has KV, and drafts have KV before
//! they are accepted. So no rejected token is ever shared (H24).

#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod admit;
mod admit_groups;
mod blocks;
mod budget;
mod bytes;
mod chains;
mod check;
mod commit;
mod draft;
mod ends;
mod eras;
mod error;
mod events;
mod export;
mod feed;
mod fork;
mod frontier;
mod group;
mod hit;
mod holding;
mod host_share;
mod lower;
mod manager;
mod names;
mod options;
mod owners;
mod pins;
mod plan;
mod prefetch;
mod price;
#[cfg(test)]
mod proportion;
mod ready;
mod replica;
mod reserve;
mod reuse;
mod rewind;
mod rows;
mod sequence;
mod shared;
mod slots;
mod stage;
mod stats;
mod steps;
mod suspend;
mod table;
mod tickets;
mod transfers;
mod truncate;
pub mod vllm;
#[cfg(test)]
mod work;
mod workers;

pub use kv_pool::{GroupId, Row};

pub use admit::{Answer, Request, Waiting};
pub use budget::Budgeted;
pub use bytes::{BytesError, Message};
pub use check::PlanError;
pub use commit::Committed;
pub use error::{
    AdmitError, BudgetError, CommitError, CompletionError, DraftError, ForkError, Missing,
    OptionsError, PinError, ReserveError, SequenceError, StageError, StepError, SuspendError,
    TokensError, TruncateError,
};
pub use events::{CacheEvent, EventReader, EventsLost, StoredBlocks};
pub use export::{Adoption, Export, ExportError, ExportRefused};
pub use lower::{ComputeRate, LowerBlocks, LowerOptions, LowerStats};
pub use manager::Manager;
pub use names::{Content, Tokens};
pub use options::{GroupOptions, ManagerOptions, SharedMemory};
pub use pins::PinnedPrefix;
pub use plan::{
    BatchRow, BlockCopy, BlockScrub, Completion, GranuleMove, LayerLoad, Outcome, RowEdit,
    Snapshot, SnapshotTable, Start, StepPlan,
};
pub use replica::Replica;
pub use reserve::Reserved;
pub use reuse::Reuse;
pub use sequence::Sequence;
pub use slots::SlotError;
pub use stats::{BlockStates, ManagerStats, Stalls};
pub use steps::OpenStep;
pub use tickets::{Dropped, Forget, Gained, Settled, Survivors, TicketError};
pub use transfers::{TierError, TierTransfers};
pub use workers::WorkerId;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;

/// What a caller looks at cannot be changed from there.
///
/// ```compile_fail,E0599
/// # fn view(manager: kv_manager::Manager) {
/// manager.pool().begin_epoch();
/// # }
/// ```
#[cfg(doctest)]
struct LookedAtOnly;
