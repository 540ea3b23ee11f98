//! Errors, one enum for each family of operations.

use kv_pool::ErrorClass::{Restart, Retry, Shed};
use kv_pool::{ClaimError, Classed, ConfigError, ErrorClass, Tier, one_line_debug};
use kv_tier::{GroupFormat, GroupKind, TicketId};

use crate::{BytesError, ExportRefused, GroupId, PlanError, WorkerId};

/// Why a manager was not made.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// A number that must be at least 1 is 0.
    #[error("{field} is 0")]
    Zero {
        /// The field of the options.
        field: &'static str,
    },
    /// A number of a group that must be at least 1 is 0.
    #[error("{field} of group {} is 0", group.0)]
    GroupZero {
        /// The group: its place in the list of groups.
        group: GroupId,
        /// The field of the group's options.
        field: &'static str,
    },
    /// There are too many tiers below host memory.
    #[error("{tiers} tiers below host memory, where {max} are possible")]
    Tiers {
        /// Tiers asked for.
        tiers: u8,
        /// The most there can be.
        max: u8,
    },
    /// A block size is no multiple of the smallest one, or the distance of checkpoints is none of all block sizes.
    #[error("{tokens} tokens of group {} are not a multiple of {unit}", group.0)]
    Unaligned {
        /// The group.
        group: GroupId,
        /// Tokens of a block, or between checkpoints.
        tokens: u32,
        /// What they have to be a multiple of.
        unit: u64,
    },
    /// Not one number of blocks of a granule for each of two groups or more.
    #[error("shared memory of {given} groups' blocks for {groups} groups, where two or more share")]
    SharedGroups {
        /// Numbers of blocks given.
        given: usize,
        /// Groups of the manager.
        groups: usize,
    },
    /// The pool of a group has other blocks than the memory that it shares.
    #[error("group {} has {blocks} device blocks, where shared memory holds {expected}", group.0)]
    SharedBlocks {
        /// The group.
        group: GroupId,
        /// Its device blocks.
        blocks: u64,
        /// Blocks of the group in all granules.
        expected: u64,
    },
    /// The KV of a draft model is kept whole.
    #[error("group {} of a draft model is of kind {kind:?}, not full", group.0)]
    DraftKind {
        /// The group.
        group: GroupId,
        /// Its kind.
        kind: GroupKind,
    },
    /// There is no group, or there are more than a manager has.
    #[error("{groups} groups of layers, where 1 to {max} are possible")]
    Groups {
        /// Groups asked for.
        groups: usize,
        /// The most there are.
        max: usize,
    },
    /// The block table has too many entries.
    #[error("group {} has a block table of {rows} rows of {width} blocks, which is too large", group.0)]
    TableTooLarge {
        /// The group.
        group: GroupId,
        /// Rows.
        rows: u32,
        /// Blocks of a row.
        width: u32,
    },
    /// There is no memory for what the manager notes of each block or row.
    #[error("{bytes} bytes of host memory could not be allocated for the manager")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// The pool refused its size.
    #[error("no manager can have a block pool of this size")]
    Pool(#[from] ConfigError),
}

/// Why tokens were not taken.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TokensError {
    /// The sequence began with token ids.
    #[error("names were given for a sequence that is named by its token ids")]
    IdsExpected,
    /// The sequence began with the engine's names.
    #[error("token ids were given for a sequence that the engine names")]
    NamesExpected,
    /// There is one name for each block that becomes full.
    #[error("{names} names for {blocks} blocks that become full")]
    Names {
        /// Names given.
        names: usize,
        /// Blocks that become full.
        blocks: u64,
    },
    /// The inputs of a request come in the order of their tokens.
    #[error("the inputs of a request are not in the order of their tokens")]
    InputsUnordered,
    /// An input stands behind none of the ids that it was given with.
    #[error("an input begins with token {at} of {tokens} that it was given with")]
    InputOutside {
        /// The position of its first token among these.
        at: u64,
        /// Tokens given.
        tokens: u64,
    },
    /// An id [stands for something else](crate::ManagerOptions::placeholder_ids), and nothing says for what.
    #[error("id {id} of token {at} is a placeholder: no input was given that begins there")]
    Placeholder {
        /// The id.
        id: u32,
        /// The position of the token in the sequence.
        at: u64,
    },
}

/// Blocks that are missing.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("group {}: {reason:?}", group.0)]
pub struct Missing {
    /// The group that lacks room.
    pub group: GroupId,
    /// How many blocks were asked for, and how many there are.
    pub reason: ClaimError,
}

/// Why a request can never be admitted.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AdmitError {
    /// A request has at least one token.
    #[error("a request of 0 tokens cannot be admitted")]
    NoTokens,
    /// The sequence needs more entries than a row of the block table has.
    #[error("a sequence of {blocks} blocks is too long: a row of the block table has {max}")]
    TooLong {
        /// Blocks needed.
        blocks: u64,
        /// Entries of a row.
        max: u64,
    },
    /// The sequence needs more blocks than there are.
    #[error("a sequence of {blocks} blocks never fits: the device has {capacity}")]
    NeverFits {
        /// Blocks needed.
        blocks: u64,
        /// Blocks of the device.
        capacity: u64,
    },
    /// The sequence needs more blocks of a group than its tenant may ever hold: its
    /// [quota](kv_pool::tenants::TenantQuota), and what is kept for other tenants, leave fewer.
    #[error(
        "a sequence of {blocks} blocks never fits: its tenant may hold {most} of group {}", group.0
    )]
    NeverFitsTenant {
        /// The group.
        group: GroupId,
        /// Blocks needed.
        blocks: u64,
        /// Blocks that the tenant may hold.
        most: u64,
    },
    /// The sequence needs more granules of shared memory than there are.
    #[error("a sequence of {granules} granules never fits: the shared memory has {capacity}")]
    NeverFitsShared {
        /// Granules needed, of all groups together.
        granules: u64,
        /// Granules of the memory.
        capacity: u64,
    },
    /// Content of another process has other groups.
    #[error("group {group} is {here:?} here, and {there:?} in the other process")]
    Format {
        /// The first group that differs, counted from 0.
        group: usize,
        /// What it is here; `None` if there is none here.
        here: Option<GroupFormat>,
        /// What it is in the other process.
        there: Option<GroupFormat>,
    },
    /// Content of another process ends behind the last token that need not be computed, where a group does not keep
    /// all.
    #[error("{tokens} tokens of another process, of which {max} at most are of use")]
    Behind {
        /// Tokens that have KV there.
        tokens: u64,
        /// Tokens of the request but for the last.
        max: u64,
    },
    /// The tokens and their names do not fit together.
    #[error("the request's tokens were not taken: {0}")]
    Tokens(TokensError),
    /// Another manager has added its tenant.
    #[error("the request's tenant is none of this manager: {0}")]
    Tenant(kv_pool::tenants::TenantError),
    /// The request was admitted before.
    #[error("the request was admitted before")]
    Admitted,
}

/// Why a sequence cannot go on as it is.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SequenceError {
    /// Another manager admitted it.
    #[error("the sequence belongs to another manager")]
    Foreign,
    /// It is suspended.
    #[error("the sequence is suspended")]
    Suspended,
    /// A transfer fills its blocks: [`adopted`](crate::Manager::adopted) comes first.
    #[error("a transfer fills the sequence's blocks")]
    Arriving,
    /// A worker that holds a share of it is lost. Drop it, and admit its request again.
    #[error("worker {} is lost, which holds a share of the sequence", worker.0)]
    Lost {
        /// The worker.
        worker: WorkerId,
    },
    /// A load that it was [admitted with](crate::Request::by_layers) has not ended at all workers: what it computes is
    /// not known to be right. Take in what workers say, and ask again.
    #[error("ticket {} brings a part of the sequence's prefix, and has not ended", ticket.0)]
    Loading {
        /// The ticket.
        ticket: TicketId,
    },
    /// A step that it was in, or whose blocks it reads, has failed, or a load that it was admitted with. It has been
    /// set back, and is told so once: its KV ends at `from`, and ids that came out of void steps are forgotten.
    #[error("a step or a load has failed: the sequence is to be computed again from token {from}")]
    Redo {
        /// The first token to be computed again.
        from: u64,
    },
}

/// Why a sequence got no room. It is as it was.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The sequence cannot go on as it is.
    #[error("no room was reserved: {0}")]
    Sequence(SequenceError),
    /// The sequence needs more entries than a row of the block table has.
    #[error("a sequence of {blocks} blocks is too long: a row of the block table has {max}")]
    TooLong {
        /// Blocks needed.
        blocks: u64,
        /// Entries of a row.
        max: u64,
    },
    /// A state has room for fewer drafts: one that is rejected could not be taken back.
    #[error(
        "{drafts} drafts in a step of a sequence with recurrent state, which has room for {max}"
    )]
    Drafts {
        /// Tokens that may be rejected.
        drafts: u32,
        /// The most that are possible.
        max: u32,
    },
}

/// Why ids were not committed. The sequence is as it was.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// The sequence cannot go on as it is.
    #[error("no ids were committed: {0}")]
    Sequence(SequenceError),
    /// The sequence was not in the step, or nothing comes out of it, or it was committed before.
    #[error("the sequence waits for no ids of step {step}")]
    NotStaged {
        /// The step.
        step: u64,
    },
    /// The ids of an earlier step come first.
    #[error("the ids of step {first} come before those of step {step}")]
    OutOfOrder {
        /// The step that was named.
        step: u64,
        /// The step whose ids are next.
        first: u64,
    },
    /// More ids than can come out of the step.
    #[error("{ids} ids came out of step {step}, from which at most {max} can come")]
    TooManyIds {
        /// The step.
        step: u64,
        /// Ids given.
        ids: u64,
        /// The most that can come.
        max: u64,
    },
    /// The ids and their names do not fit together.
    #[error("the ids were not taken: {0}")]
    Tokens(TokensError),
}

/// Why the end of a draft model's KV stays where it was. The sequence is as it was.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DraftError {
    /// The sequence cannot go on as it is.
    #[error("the end of the draft model's KV was not taken: {0}")]
    Sequence(SequenceError),
    /// No group is of a draft model.
    #[error("no group is of a draft model")]
    NoDraftModel,
    /// The draft model has computed nothing of the sequence in that step or later.
    #[error(
        "step {step} computes nothing of the sequence by the draft model; the last that does is {last}"
    )]
    NotStaged {
        /// The step.
        step: u64,
        /// The last step that does; 0 for none.
        last: u64,
    },
    /// The tokens up to there are not known, or not certain to be the sequence's.
    #[error(
        "the draft model's KV ends at {end}, where the sequence's certain tokens end at {certain}"
    )]
    Beyond {
        /// The end given.
        end: u64,
        /// Tokens that are known and have KV for certain.
        certain: u64,
    },
    /// The draft model's KV ends further on already: what is right does not become wrong.
    #[error("the draft model's KV ends at {end}, and is right up to {before} already")]
    Back {
        /// The end given.
        end: u64,
        /// Where it ends.
        before: u64,
    },
}

/// Why a batch was not staged. No sequence has changed, but for one that a failed step has set back.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// The step was begun by another manager, or is over.
    #[error("step {step} is not open")]
    NotOpen {
        /// The step.
        step: u64,
    },
    /// A step is staged once.
    #[error("step {step} is staged already")]
    StagedAlready {
        /// The step.
        step: u64,
    },
    /// A sequence cannot go on as it is.
    #[error("sequence {index} of the batch cannot be staged: {reason}")]
    Sequence {
        /// Its position in the batch.
        index: usize,
        /// The reason.
        reason: SequenceError,
    },
    /// No tokens were reserved for a sequence.
    #[error("sequence {index} of the batch has no tokens reserved for the step")]
    NothingReserved {
        /// Its position in the batch.
        index: usize,
    },
    /// Every known token of a sequence has KV, and no step is in flight whose ids could follow: it was cut
    /// there. Extend it, or cut it by one token more and extend it by that one.
    #[error(
        "sequence {index} of the batch has KV for all its {known} tokens, and no id is to come"
    )]
    NothingKnown {
        /// Its position in the batch.
        index: usize,
        /// Tokens that are known.
        known: u64,
    },
}

/// Why a tier keeps the budget, or a tenant the bounds, that it had, or a prefix is over that of pins.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// There is no such group.
    #[error("there is no group {}", group.0)]
    NoGroup {
        /// The group named.
        group: GroupId,
    },
    /// The groups share no memory.
    #[error("the groups have device memory of their own, not granules")]
    NotShared,
    /// There are fewer granules.
    #[error("{granules} granules are more than the {most} of the shared memory")]
    OverGranules {
        /// The budget asked for.
        granules: u32,
        /// The most that is possible.
        most: u32,
    },
    /// All pins together would hold more blocks than they may.
    #[error("{more} blocks were not pinned: {pinned} are, and no more than {max} may be")]
    Pins {
        /// Blocks of the prefix on the device.
        more: u64,
        /// Blocks that pins hold.
        pinned: u64,
        /// Blocks that they may hold.
        max: u64,
    },
    /// The pool refuses a tenant's bounds.
    #[error("the bounds of a tenant were not changed: {0}")]
    Tenant(kv_pool::tenants::TenantError),
    /// The pool refuses the budget.
    #[error("the budget was not changed: {0}")]
    Pool(kv_pool::BudgetError),
}

/// Why a step was not begun or finished.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The last step was neither finished nor dropped.
    #[error("step {step} is still open")]
    StillOpen {
        /// The open step.
        step: u64,
    },
    /// As many steps are in flight as may be: wait for the oldest to complete.
    #[error("{in_flight} steps are in flight, of which {oldest} is the oldest")]
    Busy {
        /// Steps that are staged and not complete.
        in_flight: usize,
        /// The oldest.
        oldest: u64,
    },
    /// Another manager began the step.
    #[error("step {step} belongs to another manager")]
    Foreign {
        /// The step.
        step: u64,
    },
}

/// Why what a worker said of a step, a ticket or a tier was not taken in, or a tier is not there.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CompletionError {
    /// There is no such worker.
    #[error("there is no worker {}: {workers} workers carry out the plans", worker.0)]
    NoWorker {
        /// The worker named.
        worker: WorkerId,
        /// How many there are.
        workers: usize,
    },
    /// The worker was given up. What it still says is not believed.
    #[error("worker {} is lost", worker.0)]
    Lost {
        /// The worker.
        worker: WorkerId,
    },
    /// The worker is not lost, so nothing is to be fenced or joined.
    #[error("worker {} is not lost", worker.0)]
    NotLost {
        /// The worker.
        worker: WorkerId,
    },
    /// No plan of the step was made.
    #[error("step {step} has not been staged: the latest is {latest}")]
    NotStaged {
        /// The step named.
        step: u64,
        /// The latest step that was staged.
        latest: u64,
    },
    /// The worker has settled the ticket before, or never had it.
    #[error("worker {} has no open ticket {}", worker.0, ticket.0)]
    NotOpen {
        /// The worker.
        worker: WorkerId,
        /// The ticket named.
        ticket: TicketId,
    },
    /// A block is named that the ticket does not have.
    #[error("block {index} of ticket {} is wrong, which has {blocks}", ticket.0)]
    NoBlock {
        /// The ticket.
        ticket: TicketId,
        /// The block named.
        index: u32,
        /// Blocks of the ticket.
        blocks: usize,
    },
    /// The worker has told its survivors before.
    #[error("worker {} has told before what its {tier:?} tier has", worker.0)]
    Again {
        /// The worker.
        worker: WorkerId,
        /// The tier.
        tier: Tier,
    },
    /// There is no such tier below host memory.
    #[error("there is no {tier:?} tier below host memory: there are {tiers}")]
    NoTier {
        /// The tier named.
        tier: Tier,
        /// Tiers that there are.
        tiers: usize,
    },
}

/// Why a sequence was not forked, truncated, extended or exported. It is as it was.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// The sequence cannot go on as it is.
    #[error("{0}")]
    Sequence(SequenceError),
    /// The ids of a step are to come: commit them first, or truncate.
    #[error("the ids of a step that the sequence is in are to come")]
    Later,
    /// Ids of a step are to come, or a step that writes its KV is not complete.
    #[error("step {step} writes its KV and is not complete")]
    Writing {
        /// The latest of these steps.
        step: u64,
    },
    /// All rows of the block table are in use.
    #[error("the sequence was not forked: all {rows} rows are in use")]
    NoRow {
        /// Rows of the block table.
        rows: u32,
    },
    /// The sequence has fewer tokens.
    #[error("a sequence of {known} tokens cannot be cut to {tokens}")]
    Beyond {
        /// Tokens to be left.
        tokens: u64,
        /// Tokens that are known.
        known: u64,
    },
    /// The tokens and their names do not fit together.
    #[error("the tokens were not taken: {0}")]
    Tokens(TokensError),
}

/// Why a sequence was not suspended or resumed. It is as it was.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SuspendError {
    /// The sequence cannot go on as it is.
    #[error("the sequence was not suspended or resumed: {0}")]
    Sequence(SequenceError),
    /// It is not suspended.
    #[error("the sequence is not suspended")]
    NotSuspended,
    /// There are too few blocks in host memory to suspend it. A group that was made without any says
    /// [`NoTier`](ClaimError::NoTier).
    #[error("the sequence was not suspended: {0}")]
    NoRoom(Missing),
}

/// The slots of a sequence's tokens were not listed: it has no blocks for them, is suspended, or belongs to
/// another manager.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("no slots for tokens {start}..{end} of a sequence with room for {tokens} tokens here")]
pub struct SlotError {
    /// First token asked for.
    pub start: u64,
    /// One past the last.
    pub end: u64,
    /// Tokens that its blocks have room for; 0 if it has none here.
    pub tokens: u64,
}

/// Causes that stand in the message whole, and so are no sources beside it.
macro_rules! told_whole {
    ($($error:ident::$variant:ident($cause:ty)),+ $(,)?) => {$(
        impl From<$cause> for $error {
            fn from(cause: $cause) -> Self {
                Self::$variant(cause)
            }
        }
    )+};
}

told_whole!(
    AdmitError::Tokens(TokensError),
    AdmitError::Tenant(kv_pool::tenants::TenantError),
    ReserveError::Sequence(SequenceError),
    CommitError::Sequence(SequenceError),
    CommitError::Tokens(TokensError),
    DraftError::Sequence(SequenceError),
    BudgetError::Tenant(kv_pool::tenants::TenantError),
    BudgetError::Pool(kv_pool::BudgetError),
    ChangeError::Sequence(SequenceError),
    ChangeError::Tokens(TokensError),
    SuspendError::Sequence(SequenceError),
    SuspendError::NoRoom(Missing),
);

one_line_debug!(
    OptionsError,
    TokensError,
    Missing,
    BudgetError,
    AdmitError,
    SequenceError,
    ReserveError,
    CommitError,
    DraftError,
    StageError,
    StepError,
    CompletionError,
    ChangeError,
    SuspendError,
    SlotError,
);

macro_rules! classed {
    ($($error:ident { $($kinds:tt)+ })+) => {$(
        impl Classed for $error {
            fn class(&self) -> ErrorClass {
                match self { $($kinds)+ }
            }
        }
    )+};
}

classed! {
    // Numbers, names and tokens that are refused whenever they come.
    OptionsError { _ => Shed }
    TokensError { _ => Shed }
    SlotError { _ => Shed }
    Missing { Self { reason, .. } => reason.class() }
    // Such a request is never admitted.
    AdmitError { _ => Shed }
    SequenceError {
        // It has been set back, or what is under way will end.
        Self::Redo { .. } | Self::Arriving | Self::Loading { .. } => Retry,
        // The sequence alone is of no use here.
        Self::Foreign | Self::Suspended | Self::Lost { .. } => Shed,
    }
    ReserveError {
        Self::Sequence(error) => error.class(),
        Self::TooLong { .. } | Self::Drafts { .. } => Shed,
    }
    CommitError {
        Self::Sequence(error) => error.class(),
        Self::OutOfOrder { .. } => Retry,
        Self::NotStaged { .. } | Self::TooManyIds { .. } | Self::Tokens(_) => Shed,
    }
    DraftError {
        Self::Sequence(error) => error.class(),
        Self::NoDraftModel
        | Self::NotStaged { .. }
        | Self::Beyond { .. }
        | Self::Back { .. } => Shed,
    }
    StageError {
        Self::Sequence { reason, .. } => reason.class(),
        Self::NotOpen { .. }
        | Self::StagedAlready { .. }
        | Self::NothingReserved { .. }
        | Self::NothingKnown { .. } => Shed,
    }
    BudgetError {
        Self::Tenant(error) => error.class(),
        Self::Pool(error) => error.class(),
        Self::NoGroup { .. }
        | Self::NotShared
        | Self::OverGranules { .. }
        | Self::Pins { .. } => Shed,
    }
    StepError {
        Self::StillOpen { .. } | Self::Busy { .. } => Retry,
        Self::Foreign { .. } => Shed,
    }
    CompletionError {
        // It joins again, and begins with a snapshot.
        Self::Lost { .. } => Restart,
        Self::NoWorker { .. }
        | Self::NotLost { .. }
        | Self::NotStaged { .. }
        | Self::NotOpen { .. }
        | Self::NoBlock { .. }
        | Self::Again { .. }
        | Self::NoTier { .. } => Shed,
    }
    ChangeError {
        Self::Sequence(error) => error.class(),
        Self::Later | Self::Writing { .. } => Retry,
        Self::NoRow { .. } | Self::Beyond { .. } | Self::Tokens(_) => Shed,
    }
    SuspendError {
        Self::Sequence(error) => error.class(),
        Self::NoRoom(missing) => missing.class(),
        Self::NotSuspended => Shed,
    }
    ExportRefused { Self { reason, .. } => reason.class() }
    // The worker's memory is not what the manager thinks: it joins again by a snapshot.
    PlanError { _ => Restart }
    // Whoever says such things is no manager and no worker of this version.
    BytesError { _ => Restart }
}
