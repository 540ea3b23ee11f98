//! What a worker checks of a plan before it carries it out: what came from another process is not believed.

use kv_pool::{BlockId, TableEntry, Tier};
use kv_tier::TicketId;
use smallvec::SmallVec;

use crate::plan::{BatchRow, BlockScrub, Snapshot, Start, StepPlan};
use crate::{GroupId, Row};

/// Why a plan was not carried out. Nothing has changed.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A plan is missing before this one, or it was carried out before. The worker's memory is not what the
    /// manager thinks: the worker counts as lost, and joins again by a snapshot.
    #[error("plan {step} follows plan {after}, but plan {last} was the last one here")]
    Gap {
        /// The plan.
        step: u64,
        /// The plan before it.
        after: u64,
        /// The last plan that was carried out.
        last: u64,
    },
    /// A copy, a scrub or an edit names a group that there is not.
    #[error("plan {step} names group {}, where there are {groups}", group.0)]
    Group {
        /// The plan.
        step: u64,
        /// The group named.
        group: GroupId,
        /// Groups that there are.
        groups: usize,
    },
    /// An edit or a batch names a row that the table does not have.
    #[error("plan {step} names row {row} of a block table with {rows} rows")]
    Row {
        /// The plan.
        step: u64,
        /// The row named.
        row: Row,
        /// Rows of the table.
        rows: usize,
    },
    /// An edit goes beyond the end of its row.
    #[error("plan {step} changes {count} entries from {first} on in rows of {width}")]
    Edit {
        /// The plan.
        step: u64,
        /// The first entry that changes.
        first: u32,
        /// Entries that change.
        count: u32,
        /// Entries of a row.
        width: usize,
    },
    /// The edits and their block ids are not equally many.
    #[error("plan {step} has {ids} block ids for edits of {entries} entries")]
    Ids {
        /// The plan.
        step: u64,
        /// Block ids.
        ids: usize,
        /// Entries that the edits change.
        entries: u64,
    },
    /// The batch has tokens for which a row has no blocks.
    #[error("plan {step} computes tokens up to {end} in row {row}, which has no block for them")]
    NoBlocks {
        /// The plan.
        step: u64,
        /// The row.
        row: Row,
        /// The end of the tokens.
        end: u64,
    },
    /// A batch has a row twice: two would write the same slots.
    #[error("plan {step} has row {row} twice in a batch")]
    RowTwice {
        /// The plan.
        step: u64,
        /// The row.
        row: Row,
    },
    /// A draft model computes tokens of a row that the batch has not.
    #[error("plan {step} has a draft model compute row {row}, which is not in its batch")]
    DraftRow {
        /// The plan.
        step: u64,
        /// The row.
        row: Row,
    },
    /// The least number of tokens before a row's is above the most.
    #[error("plan {step} begins row {row} behind at least {resolved} tokens and at most {upper}")]
    Start {
        /// The plan.
        step: u64,
        /// The row.
        row: Row,
        /// The least.
        resolved: u64,
        /// The most.
        upper: u64,
    },
    /// A row has no token before its drafts: the first token of a row is none.
    #[error("plan {step} computes {tokens} tokens of row {row}, of which {drafts} are drafts")]
    Drafts {
        /// The plan.
        step: u64,
        /// The row.
        row: Row,
        /// Its tokens.
        tokens: u32,
        /// Its drafts.
        drafts: u32,
    },
    /// A copy, a scrub or an edit names a block that its tier does not have.
    #[error("plan {step} names block {id} of the {tier:?} tier, which has {blocks}")]
    Block {
        /// The plan, or the step of a snapshot.
        step: u64,
        /// The tier.
        tier: Tier,
        /// The block named.
        id: BlockId,
        /// Blocks of the tier.
        blocks: u64,
    },
    /// A transfer or a forgotten name is of a tier below host memory that the worker does not have.
    #[error("plan {step} names the {tier:?} tier of a worker with {tiers} below host memory")]
    Tier {
        /// The plan.
        step: u64,
        /// The tier.
        tier: Tier,
        /// Tiers below host memory.
        tiers: usize,
    },
    /// A transfer has a ticket that has been given out before.
    #[error("plan {step} opens ticket {} behind ticket {}", ticket.0, last.0)]
    Ticket {
        /// The plan.
        step: u64,
        /// The ticket.
        ticket: TicketId,
        /// The ticket before it.
        last: TicketId,
    },
    /// A load writes a block that another transfer reads or writes.
    #[error("plan {step} has ticket {} use host block {block}, as does ticket {}, and one is a load", ticket.0, other.0)]
    Shared {
        /// The plan.
        step: u64,
        /// The ticket.
        ticket: TicketId,
        /// The other ticket, or the same.
        other: TicketId,
        /// The block.
        block: BlockId,
    },
    /// A block is copied layer by layer of a load that does not bring it.
    #[error("plan {step} copies host block {block} as it arrives by ticket {}, which does not bring it", ticket.0)]
    NotLoaded {
        /// The plan.
        step: u64,
        /// The ticket.
        ticket: TicketId,
        /// The host block.
        block: BlockId,
    },
    /// Two blocks are copied layer by layer to one.
    #[error("plan {step} copies two blocks to device block {block} as they arrive")]
    LoadedTwice {
        /// The plan.
        step: u64,
        /// The device block.
        block: BlockId,
    },
    /// A scrub comes after more copies than there are, or before the scrub ahead of it.
    #[error("plan {step} scrubs after {after} copies, where {least} to {most} are possible")]
    Scrub {
        /// The plan.
        step: u64,
        /// Copies that come before the scrub.
        after: u32,
        /// Copies that come before the scrub ahead of it.
        least: u32,
        /// Copies of the plan.
        most: usize,
    },
    /// A move names a granule that there is not. Where groups have memory of their own, there is none.
    #[error("plan {step} moves granule {granule}, where there are {granules}")]
    NoGranule {
        /// The plan.
        step: u64,
        /// The granule named.
        granule: u32,
        /// Granules that there are.
        granules: usize,
    },
    /// A move takes a granule from a group that has it not: it would belong to two.
    #[error("plan {step} takes granule {granule} from {from:?}, and {owner:?} has it")]
    GranuleOwner {
        /// The plan.
        step: u64,
        /// The granule named.
        granule: u32,
        /// The group that the plan takes it from; `None` for nobody.
        from: Option<GroupId>,
        /// The group that has it.
        owner: Option<GroupId>,
    },
    /// A copy or a scrub names a block in a granule that its group has not.
    #[error("plan {step} names block {id} of group {}, which has not its granule", group.0)]
    NotOwned {
        /// The plan.
        step: u64,
        /// The group.
        group: GroupId,
        /// The block named.
        id: u64,
    },
    /// A snapshot of other granules.
    #[error("a snapshot of {granules} granules where there are {expected}")]
    SnapshotGranules {
        /// Granules of the snapshot.
        granules: usize,
        /// Granules that there are.
        expected: usize,
    },
    /// A snapshot of more groups, or of fewer.
    #[error("a snapshot of {tables} block tables for {groups} groups")]
    SnapshotTables {
        /// Block tables of the snapshot.
        tables: usize,
        /// Groups that there are.
        groups: usize,
    },
    /// A snapshot of another table.
    #[error("a snapshot of {ids} block ids in rows of {width} for a table of {expected}")]
    Snapshot {
        /// Block ids of the snapshot.
        ids: usize,
        /// Entries of its rows.
        width: u32,
        /// Entries of the table.
        expected: usize,
    },
}

kv_pool::one_line_debug!(PlanError);

impl StepPlan {
    /// Checks that the plan follows that of step `last`.
    ///
    /// # Errors
    /// [`PlanError::Gap`].
    pub fn check_follows(&self, last: u64) -> Result<(), PlanError> {
        let &Self { step, after, .. } = self;
        if after != last || step <= last {
            return Err(PlanError::Gap { step, after, last });
        }
        Ok(())
    }

    /// Checks that the edits and the batch are of block tables of `rows` rows, one for each group, with so many
    /// entries in a row.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn check_table(&self, rows: usize, widths: &[usize]) -> Result<(), PlanError> {
        let step = self.step;
        let mut entries = 0_u64;
        for edit in &self.edits {
            let width = *of_group(widths, edit.group, step)?;
            if edit.row.index() >= rows {
                return Err(PlanError::Row { step, row: edit.row, rows });
            }
            let (first, count) = (edit.first, edit.count);
            if u64::from(first) + u64::from(count) > width as u64 {
                return Err(PlanError::Edit { step, first, count, width });
            }
            entries += u64::from(count);
        }
        if entries != self.edit_ids.len() as u64 {
            return Err(PlanError::Ids { step, ids: self.edit_ids.len(), entries });
        }
        let mut batch = self.batch.iter().chain(&self.draft_batch);
        match batch.find(|row| row.row.index() >= rows) {
            Some(row) => Err(PlanError::Row { step, row: row.row, rows }),
            None => Ok(()),
        }
    }

    /// Checks that the rows of the batches can be computed together, whatever the tables say: each once, with a start
    /// and drafts that can be, and those of the draft model in the batch.
    pub(crate) fn check_rows(&self) -> Result<(), PlanError> {
        let step = self.step;
        let rows = sorted_rows(step, &self.batch)?;
        for &row in &sorted_rows(step, &self.draft_batch)? {
            if rows.binary_search(&row).is_err() {
                return Err(PlanError::DraftRow { step, row });
            }
        }
        for &BatchRow { row, start, tokens, drafts, .. } in
            self.batch.iter().chain(&self.draft_batch)
        {
            if let Start::Open { resolved, upper } = start
                && resolved > upper
            {
                return Err(PlanError::Start { step, row, resolved, upper });
            }
            if drafts > 0 && drafts >= tokens {
                return Err(PlanError::Drafts { step, row, tokens, drafts });
            }
        }
        Ok(())
    }

    /// Checks that copies, loads, scrubs and edits name blocks of tiers with so many blocks, of each group on the device
    /// and in host memory.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn check_blocks(&self, groups: &[[u64; 2]]) -> Result<(), PlanError> {
        let step = self.step;
        let check = |group: GroupId, tier: Tier, id: BlockId| {
            let [device, host] = *of_group(groups, group, step)?;
            let blocks = match tier {
                Tier::Primary => device,
                Tier::Secondary => host,
                _ => 0,
            };
            if (id.index() as u64) < blocks {
                Ok(())
            } else {
                Err(PlanError::Block { step, tier, id, blocks })
            }
        };
        for copy in &self.copies {
            check(copy.group, copy.from.tier, copy.from.id)?;
            check(copy.group, copy.to.tier, copy.to.id)?;
            if copy.from.tier != Tier::Primary && copy.to.tier != Tier::Primary {
                // A worker copies from or to its device.
                let (tier, id) = (copy.to.tier, copy.to.id);
                return Err(PlanError::Block { step, tier, id, blocks: 0 });
            }
        }
        let mut least = 0;
        for &BlockScrub { group, block, after } in &self.scrubs {
            if after < least || after as usize > self.copies.len() {
                return Err(PlanError::Scrub { step, after, least, most: self.copies.len() });
            }
            least = after;
            check(group, Tier::Primary, block)?;
        }
        for load in &self.layer_loads {
            check(load.group, Tier::Secondary, load.from)?;
            check(load.group, Tier::Primary, load.to)?;
        }
        let mut ids = &self.edit_ids[..];
        for edit in &self.edits {
            let (here, rest) = ids.split_at_checked(edit.count as usize).unwrap_or((ids, &[]));
            ids = rest;
            check_ids(step, here, of_group(groups, edit.group, step)?[0])?;
        }
        Ok(())
    }
}

impl Snapshot {
    /// Checks that the snapshot is of block tables of `rows` rows, one for each group, with so many entries in a
    /// row, of blocks of a device that has so many blocks of the group.
    pub(crate) fn check(
        &self,
        rows: usize,
        widths: &[usize],
        device: &[u64],
    ) -> Result<(), PlanError> {
        if self.tables.len() != widths.len() {
            let (tables, groups) = (self.tables.len(), widths.len());
            return Err(PlanError::SnapshotTables { tables, groups });
        }
        for (group, (table, &width)) in self.tables.iter().zip(widths).enumerate() {
            let (ids, expected) = (table.ids.len(), rows.saturating_mul(width));
            if table.width as usize != width || ids != expected {
                return Err(PlanError::Snapshot { ids, width: table.width, expected });
            }
            check_ids(self.step, &table.ids, device.get(group).copied().unwrap_or(0))?;
        }
        Ok(())
    }
}

/// The rows of a batch in order, each of which is there once.
fn sorted_rows(step: u64, batch: &[BatchRow]) -> Result<SmallVec<[Row; 64]>, PlanError> {
    let mut rows: SmallVec<[Row; 64]> = batch.iter().map(|row| row.row).collect();
    rows.sort_unstable();
    match rows.windows(2).find(|two| two[0] == two[1]) {
        Some(two) => Err(PlanError::RowTwice { step, row: two[0] }),
        None => Ok(rows),
    }
}

/// What is said of a group.
pub(crate) fn of_group<T>(all: &[T], group: GroupId, step: u64) -> Result<&T, PlanError> {
    let groups = all.len();
    all.get(usize::from(group.0)).ok_or(PlanError::Group { step, group, groups })
}

fn check_ids(step: u64, ids: &[TableEntry], blocks: u64) -> Result<(), PlanError> {
    let is_outside = |id: &BlockId| id.index() as u64 >= blocks;
    match ids.iter().filter_map(|entry| entry.block()).find(is_outside) {
        Some(id) => Err(PlanError::Block { step, tier: Tier::Primary, id, blocks }),
        None => Ok(()),
    }
}
