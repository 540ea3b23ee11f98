//! What a worker checks of a plan before it carries it out: what came from another process is not believed.

use kv_pool::{BlockId, Tier};

use crate::Row;
use crate::plan::{BlockScrub, GroupId, Snapshot, StepPlan};
use crate::tickets::Forget;
use crate::tiers::index_of;

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
    /// A copy, a scrub or an edit names a block that its tier does not have.
    #[error("plan {step} names block {id} of the {tier:?} tier, which has {blocks}")]
    Block {
        /// The plan, or the step of a snapshot.
        step: u64,
        /// The tier.
        tier: Tier,
        /// The block named.
        id: i64,
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
        match self.batch.iter().find(|row| row.row.index() >= rows) {
            Some(row) => Err(PlanError::Row { step, row: row.row, rows }),
            None => Ok(()),
        }
    }

    /// Checks that copies, scrubs and edits name blocks of tiers with so many blocks, of each group on the device
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
            match (id.index() as u64) < blocks {
                true => Ok(()),
                false => Err(PlanError::Block { step, tier, id: id.index() as i64, blocks }),
            }
        };
        for copy in &self.copies {
            check(copy.group, copy.from.tier, copy.from.id)?;
            check(copy.group, copy.to.tier, copy.to.id)?;
            if copy.from.tier != Tier::Primary && copy.to.tier != Tier::Primary {
                // A worker copies from or to its device.
                let (tier, id) = (copy.to.tier, copy.to.id.index() as i64);
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
        let mut ids = &self.edit_ids[..];
        for edit in &self.edits {
            let (here, rest) = ids.split_at_checked(edit.count as usize).unwrap_or((ids, &[]));
            ids = rest;
            check_ids(step, here, of_group(groups, edit.group, step)?[0])?;
        }
        Ok(())
    }
}

impl StepPlan {
    /// Checks that transfers and forgotten names are of the first `tiers` tiers below host memory, and the
    /// transfers of the first `host` host blocks.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn check_transfers(&self, tiers: usize, host: u64) -> Result<(), PlanError> {
        let step = self.step;
        let named = self.forgets.iter().map(Forget::tier);
        let mut named = named.chain(self.transfers.iter().map(|transfer| transfer.tier));
        let is_there = |tier: &Tier| index_of(*tier).is_some_and(|at| at < tiers);
        if let Some(tier) = named.find(|tier| !is_there(tier)) {
            return Err(PlanError::Tier { step, tier, tiers });
        }
        let mut blocks = self.transfers.iter().flat_map(|transfer| &transfer.blocks);
        match blocks.find(|(_, block)| block.index() as u64 >= host) {
            Some((_, block)) => {
                let (tier, id) = (Tier::Secondary, block.index() as i64);
                Err(PlanError::Block { step, tier, id, blocks: host })
            }
            None => Ok(()),
        }
    }
}

impl Snapshot {
    /// Checks that the snapshot is of block tables of `rows` rows, one for each group, with so many entries in a
    /// row, of blocks of a device that has so many blocks of the group.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn check(&self, rows: usize, widths: &[usize], device: &[u64]) -> Result<(), PlanError> {
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

/// What is said of a group.
fn of_group<T>(all: &[T], group: GroupId, step: u64) -> Result<&T, PlanError> {
    let groups = all.len();
    all.get(usize::from(group.0)).ok_or(PlanError::Group { step, group, groups })
}

fn check_ids(step: u64, ids: &[i32], blocks: u64) -> Result<(), PlanError> {
    let outside = |id: &&i32| **id < -1 || i64::from(**id) >= 0 && **id as u64 >= blocks;
    match ids.iter().find(outside) {
        Some(&id) => Err(PlanError::Block { step, tier: Tier::Primary, id: id.into(), blocks }),
        None => Ok(()),
    }
}
