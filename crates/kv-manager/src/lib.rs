//! The deciding half of a KV cache: which block holds what, for which sequence, in which step.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod admit;
mod blocks;
mod budget;
mod bytes;
mod check;
mod commit;
mod decode;
mod draft;
mod ends;
mod error;
mod events;
mod export;
mod fork;
mod group;
mod growing;
mod hit;
mod holding;
mod host_share;
mod lower;
mod manager;
mod names;
mod options;
mod pace;
mod pins;
mod plan;
mod price;
mod progress;
#[cfg(test)]
mod proportion;
mod ready;
mod replica;
mod request;
mod reserve;
mod reuse;
mod rewind;
mod rows;
mod sequence;
mod shared;
mod stage;
mod stats;
mod steps;
mod suspend;
mod table;
mod take_over;
mod transfers;
pub mod vllm;

pub use kv_pool::{GroupId, Row};

pub use budget::Budgeted;
pub use bytes::{BytesError, Message};
pub use check::PlanError;
pub use commit::Committed;
pub use error::{
    AdmitError, BudgetError, ChangeError, CommitError, CompletionError, DraftError, Missing,
    OptionsError, ReserveError, SequenceError, SlotError, StageError, StepError, SuspendError,
    TokensError,
};
pub use events::{CacheEvent, EventReader, EventsLost, StoredBlocks};
pub use export::{Adoption, Export, ExportRefused};
pub use growing::Growing;
pub use lower::{ComputeRate, LowerBlocks, LowerOptions, LowerStats};
pub use manager::Manager;
pub use names::{Content, Tokens};
pub use options::{GroupOptions, ManagerOptions, SharedMemory};
pub use pins::PinnedPrefix;
pub use plan::{
    BatchRow, BlockCopy, BlockScrub, Completion, Dropped, Forget, Gained, GranuleMove, LayerLoad,
    Outcome, RowEdit, Settled, Snapshot, SnapshotTable, Start, StepPlan, Survivors,
};
pub use replica::{Checked, Replica};
pub use request::{Admission, Answer, NoRoom, Request, Room, Waiting};
pub use reserve::Reserved;
pub use reuse::Reuse;
pub use sequence::Sequence;
pub use stats::{BlockStates, ManagerStats, Stalls};
pub use steps::{OpenStep, WorkerId};
pub use transfers::TierTransfers;

/// What a caller looks at cannot be changed from there.
///
/// ```compile_fail,E0599
/// # fn view(manager: kv_manager::Manager) {
/// manager.pool(kv_manager::GroupId(0)).unwrap().begin_epoch();
/// # }
/// ```
#[cfg(doctest)]
struct LookedAtOnly;
