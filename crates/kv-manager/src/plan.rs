//! What passes between the manager and its workers: plans and completions, as values.

use kv_pool::{BlockHash, BlockId, Claimed, Location, TableEntry, Tier, guard};
use kv_tier::{BlockFault, TicketId, Transfer};

use crate::stats::ManagerStats;
use crate::{GroupId, Row, WorkerId};

/// The copy of a block's first tokens.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BlockCopy {
    /// Whose blocks they are.
    pub group: GroupId,
    /// What is read.
    pub from: Location,
    /// What is written.
    pub to: Location,
    /// Tokens to copy, from the block's first on; of a block with a recurrent state, the whole block.
    pub tokens: u32,
    /// The last step whose batch may write what is read: the copy comes after its work. 0 where nothing is
    /// being written, as in an evicted block.
    pub written_by: u64,
}

/// A block of a load that is copied to the device layer by layer, as its layers arrive.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LayerLoad {
    /// The load, of a plan before. It may have ended at the worker: then the block is copied as it is.
    pub ticket: TicketId,
    /// Whose block it is.
    pub group: GroupId,
    /// Where it arrives in host memory.
    pub from: BlockId,
    /// The device block.
    pub to: BlockId,
}

/// Consecutive entries of a row of the block table, whose ids lie in [`StepPlan::edit_ids`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RowEdit {
    /// Whose block table changes.
    pub group: GroupId,
    /// The row.
    pub row: Row,
    /// The first entry that changes.
    pub first: u32,
    /// Entries that change.
    pub count: u32,
}

/// A device block that is overwritten with zeros.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BlockScrub {
    /// Whose block it is.
    pub group: GroupId,
    /// The block.
    pub block: BlockId,
    /// Copies of the plan that come before.
    pub after: u32,
}

/// A granule of shared memory that gets another owner.
///
/// Nothing reads or writes the memory any more when the plan is carried out, as far as plans say: the steps that
/// used it are complete, and so are copies from there. The new owner finds zeros.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GranuleMove {
    /// The granule.
    pub granule: u32,
    /// The group that has had it; `None` for nobody.
    pub from: Option<GroupId>,
    /// The group that has it from this plan on.
    pub to: Option<GroupId>,
}

/// Where the tokens of a row begin in a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Start {
    /// Behind so many tokens.
    At(u64),
    /// Where the outcome of the steps in flight says. The worker computes it on the device: `resolved`
    /// tokens, and those that were accepted since.
    Open {
        /// Tokens before it at least.
        resolved: u64,
        /// Tokens before it at most: there are blocks for these and the row's own.
        upper: u64,
    },
}

/// A sequence in a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BatchRow {
    /// The sequence's row.
    pub row: Row,
    /// Where its tokens begin.
    pub start: Start,
    /// Tokens that the step computes.
    pub tokens: u32,
    /// Those of them, the last ones, that may be rejected. A recurrent group has a state behind the tokens before
    /// them, and behind each.
    pub drafts: u32,
    /// Of recurrent groups, the entry of the row with the state that the step begins with. If the start is
    /// [open](Start::Open), that is known on the device alone: the row's last step has so many tokens before its drafts,
    /// and the entry is the number of tokens that stand beyond these.
    pub input: u32,
}

/// What a worker does in one step, in this order: moves of granules, copies, scrubs and table changes, and then the batch.
///
/// The copies and scrubs mean what they mean one after the other, [scrubs](Self::scrubs) at their
/// positions. A worker may run them at the same time where they concern different blocks. All come after
/// the work of the plans before, and before the work of this one.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct StepPlan {
    /// The number of the step; the first is 1.
    pub step: u64,
    /// The step of the plan before; 0 for none. A worker that has not carried out that one needs a
    /// snapshot.
    pub after: u64,
    /// Granules of shared memory that get another owner, one after the other.
    pub moves: Vec<GranuleMove>,
    /// Copies between tiers, and within the device for copy-on-write.
    pub copies: Vec<BlockCopy>,
    /// Device blocks to be overwritten with zeros.
    pub scrubs: Vec<BlockScrub>,
    /// Changes of the block tables, in order.
    pub edits: Vec<RowEdit>,
    /// The entries that the edits write, one after the other.
    pub edit_ids: Vec<TableEntry>,
    /// The sequences of the step, in the order of the call.
    pub batch: Vec<BatchRow>,
    /// What a draft model computes in the step, of sequences of the batch: tokens behind those that it has KV for.
    pub draft_batch: Vec<BatchRow>,
    /// Names that tiers below host memory are to forget, before the transfers.
    pub forgets: Vec<Forget>,
    /// Stores to tiers below host memory, and loads from them. Each begins when the copies of this plan and of
    /// those before are complete, and ends at any time. No step waits for it.
    pub transfers: Vec<Transfer>,
    /// Blocks of loads that sequences of this step or later ones read. They are copied behind the plan's copies and
    /// scrubs, each layer before the batch reads it. The step is over at a worker when these copies are made, and the
    /// worker has said before what became of the loads.
    pub layer_loads: Vec<LayerLoad>,
}

impl StepPlan {
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.moves.is_empty()
            && self.copies.is_empty()
            && self.scrubs.is_empty()
            && self.edits.is_empty()
            && self.batch.is_empty()
            && self.draft_batch.is_empty()
            && self.forgets.is_empty()
            && self.transfers.is_empty()
            && self.layer_loads.is_empty()
    }

    /// Empties it, and keeps its memory.
    pub(crate) fn clear(&mut self) {
        self.moves.clear();
        self.copies.clear();
        self.scrubs.clear();
        self.edits.clear();
        self.edit_ids.clear();
        self.batch.clear();
        self.draft_batch.clear();
        self.forgets.clear();
        self.transfers.clear();
        self.layer_loads.clear();
    }
}

/// Why a plan copies a block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CopyFor {
    /// It was evicted from the device.
    Eviction,
    /// It comes back from host memory.
    Return,
    /// A sequence writes what others hold, too.
    Write,
    /// A sequence goes on behind a checkpoint.
    Checkpoint,
    /// Its sequence is suspended.
    Suspension,
    /// It is stored from host memory.
    Store,
}

/// What has been decided since the last plan, that plan, and what all of them do.
#[derive(Debug, Default)]
pub(crate) struct PlanDraft {
    next: StepPlan,
    last: StepPlan,
    /// The latest step whose plan makes copies.
    copied: u64,
    copies: [u64; CopyFor::Store as usize + 1],
    scrubs: u64,
    granted: u64,
    taken: u64,
}

impl PlanDraft {
    /// What has been decided since the last plan.
    pub(crate) fn next(&self) -> &StepPlan {
        &self.next
    }

    /// The last plan.
    pub(crate) fn last(&self) -> &StepPlan {
        &self.last
    }

    /// Makes what was decided the plan of a step.
    pub(crate) fn stage(&mut self, step: u64) -> &StepPlan {
        let after = self.last.step;
        std::mem::swap(&mut self.next, &mut self.last);
        self.next.clear();
        (self.last.step, self.last.after) = (step, after);
        if !self.last.copies.is_empty() {
            self.copied = step;
        }
        &self.last
    }

    /// The step that makes all copies decided so far, or an earlier one if the next plan makes some.
    pub(crate) fn copied_by(&self) -> u64 {
        let copied = guard!("manager.copies-are-waited-for", self.copied, else 0);
        if self.next.copies.is_empty() { copied } else { self.last.step + 1 }
    }

    /// Counts what plans have done so far.
    pub(crate) fn count(&self, stats: &mut ManagerStats) {
        let copies = |of: CopyFor| self.copies[of as usize];
        stats.offloaded_blocks = copies(CopyFor::Eviction);
        stats.onboarded_blocks = copies(CopyFor::Return);
        stats.copied_on_write = copies(CopyFor::Write);
        stats.suspended_blocks = copies(CopyFor::Suspension);
        stats.scrubbed_blocks = self.scrubs;
        (stats.granted_granules, stats.taken_granules) = (self.granted, self.taken);
    }

    #[inline]
    pub(crate) fn compute(&mut self, row: BatchRow) {
        self.next.batch.push(row);
    }

    pub(crate) fn compute_draft(&mut self, row: BatchRow) {
        self.next.draft_batch.push(row);
    }

    pub(crate) fn copy(&mut self, of: CopyFor, copy: BlockCopy) {
        self.next.copies.push(copy);
        self.copies[of as usize] += 1;
    }

    /// Scrubs a block behind all copies decided so far.
    pub(crate) fn scrub(&mut self, group: GroupId, block: BlockId) {
        let copies = self.next.copies.len() as u32;
        let after = guard!("manager.scrubs-behind-copies", copies, else 0);
        self.next.scrubs.push(BlockScrub { group, block, after });
        self.scrubs += 1;
    }

    /// Gives a granule another owner. One that a group gives up is `taken` for another one.
    pub(crate) fn hand(&mut self, one: GranuleMove, taken: bool) {
        self.next.moves.push(one);
        self.granted += u64::from(one.to.is_some());
        self.taken += u64::from(taken);
    }

    /// Has the entries of a row from `first` on become the ids that `add` adds; these.
    pub(crate) fn edit(
        &mut self,
        (group, row, first): (GroupId, Row, usize),
        add: impl FnOnce(&mut Vec<TableEntry>),
    ) -> &[TableEntry] {
        let start = self.next.edit_ids.len();
        add(&mut self.next.edit_ids);
        let ids = &self.next.edit_ids[start..];
        if !ids.is_empty() {
            let (first, count) = (first as u32, ids.len() as u32);
            self.next.edits.push(RowEdit { group, row, first, count });
        }
        ids
    }

    pub(crate) fn forget(&mut self, forget: Forget) {
        self.next.forgets.push(forget);
    }

    pub(crate) fn transfer(&mut self, transfer: Transfer) {
        self.next.transfers.push(transfer);
    }

    pub(crate) fn load(&mut self, load: LayerLoad) {
        self.next.layer_loads.push(load);
    }

    /// Loads nothing to blocks of a group that are claimed: what is to come there is of a sequence that has gone since, before
    /// its plan was staged, and would come at any time.
    pub(crate) fn drop_loads(&mut self, group: GroupId, to: &Claimed) {
        let is_kept = |load: &LayerLoad| load.group != group || to.ids().all(|id| id != load.to);
        guard!("manager.loads-go-with-their-sequence", self.next.layer_loads.retain(is_kept));
    }

    /// Loads nothing: a worker that joins anew has none of the loads.
    pub(crate) fn drop_all_loads(&mut self) {
        self.next.layer_loads.clear();
    }
}

/// What a worker begins with that was started anew. Its memory has no content then: a worker that has
/// missed a plan, or was started anew, is [lost](crate::Manager::lose_worker) first.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Snapshot {
    /// The step of the last plan that it includes: the next plan comes after that.
    pub step: u64,
    /// The block table of each group.
    pub tables: Vec<SnapshotTable>,
    /// Whose each granule of shared memory is; empty where groups have memory of their own.
    pub granules: Vec<Option<GroupId>>,
}

/// A block table.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct SnapshotTable {
    /// Entries of a row.
    pub width: u32,
    /// The block ids, row by row.
    pub ids: Vec<TableEntry>,
}

/// What came of plans.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// The step and all before it are complete on the worker's devices.
    Done,
    /// The step is over, and what its batch computed is wrong or missing: of each row, anything from where its
    /// tokens begin at the earliest to where they end at the latest. Its copies, scrubs and table
    /// changes were made, and the steps before it are complete. Steps that were staged after it are void
    /// too, since they may have read its KV. A worker that cannot make the copies is
    /// [lost](crate::Manager::lose_worker).
    Failed,
}

/// What a worker says of a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Completion {
    /// Who says it.
    pub worker: WorkerId,
    /// The step.
    pub step: u64,
    /// What came of it.
    pub outcome: Outcome,
}

/// What a tier below host memory is to forget.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Forget {
    /// A group's block of a name.
    Block(Tier, GroupId, BlockHash),
    /// Everything that was stored before.
    All(Tier),
}

impl Forget {
    /// The tier.
    #[must_use]
    pub fn tier(&self) -> Tier {
        match *self {
            Self::Block(tier, ..) | Self::All(tier) => tier,
        }
    }
}

/// What a worker says of a ticket that has ended there: no tier reads or writes its blocks any more.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Settled {
    /// Who says it.
    pub worker: WorkerId,
    /// The ticket.
    pub ticket: TicketId,
    /// Blocks that are not right, by their position in the transfer. All others are.
    pub wrong: Vec<(u32, BlockFault)>,
}

/// Blocks that a tier of a worker has dropped by itself.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Dropped {
    /// Who says it.
    pub worker: WorkerId,
    /// The tier.
    pub tier: Tier,
    /// The blocks, each by its group and name.
    pub blocks: Vec<(GroupId, BlockHash)>,
}

/// Blocks that a tier of a worker has had since before the worker began.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Survivors {
    /// Who says it.
    pub worker: WorkerId,
    /// The tier.
    pub tier: Tier,
    /// The blocks, each by its group and name.
    pub blocks: Vec<(GroupId, BlockHash)>,
}

/// Blocks that have come to a tier of a worker otherwise than by its stores.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Gained {
    /// Who says it.
    pub worker: WorkerId,
    /// The tier.
    pub tier: Tier,
    /// The blocks, each by its group and name.
    pub blocks: Vec<(GroupId, BlockHash)>,
}
