//! The block table of a group as the manager knows it: one row a sequence, and what has changed since the last plan.

use kv_pool::{Claimed, TableEntry, guard};

use crate::blocks::Blocks;
use crate::options::{check_table, repeated};
use crate::plan::{RowEdit, StepPlan};
use crate::{GroupId, OptionsError, Row};

/// The block ids of all rows, `[rows, width]`.
#[derive(Debug)]
pub(crate) struct Table {
    group: GroupId,
    ids: Vec<TableEntry>,
    /// Of each row, the first entry behind all blocks.
    ends: Vec<u32>,
    width: usize,
}

impl Table {
    pub(crate) fn new(group: GroupId, rows: u32, width: u32) -> Result<Self, OptionsError> {
        check_table(group, rows, width)?;
        let (rows, width) = (rows as usize, width as usize);
        let (ids, ends) = (repeated(TableEntry::NONE, rows * width)?, repeated(0, rows)?);
        Ok(Self { group, ids, ends, width })
    }

    pub(crate) fn ids(&self) -> &[TableEntry] {
        &self.ids
    }

    pub(crate) fn row(&self, row: Row) -> &[TableEntry] {
        &self.ids[row.index() * self.width..][..self.width]
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Writes the ids of a sequence's blocks to its row, from entry `first` on, and notes them in the plan.
    /// What the row's last sequence has left behind them goes.
    pub(crate) fn write(&mut self, plan: &mut StepPlan, row: Row, first: usize, blocks: &Blocks) {
        let start = plan.edit_ids.len();
        blocks.add_ids(first, &mut plan.edit_ids);
        self.put(plan, row, first, start);
    }

    /// The same of blocks that were claimed just now, which come behind those that the row has.
    pub(crate) fn append(
        &mut self,
        plan: &mut StepPlan,
        row: Row,
        first: usize,
        claimed: &Claimed,
    ) {
        let start = plan.edit_ids.len();
        plan.edit_ids.extend(claimed.ids().map(|id| TableEntry::from(Some(id))));
        self.put(plan, row, first, start);
    }

    /// Writes the ids of the plan from `start` on to a row, from entry `first` on, and ends the row there.
    fn put(&mut self, plan: &mut StepPlan, row: Row, first: usize, start: usize) {
        let ids = &plan.edit_ids[start..];
        let end = first + ids.len();
        self.ids[row.index() * self.width..][first..end].copy_from_slice(ids);
        self.end_row(plan, row, end);
        self.note(plan, row, first, start);
    }

    /// Ends a row: what its last sequence has left behind there goes.
    fn end_row(&mut self, plan: &mut StepPlan, row: Row, at: usize) {
        let end = std::mem::replace(&mut self.ends[row.index()], at as u32) as usize;
        if guard!("manager.rows-lose-what-was-there", end > at, else false) {
            self.ids[row.index() * self.width..][at..end].fill(TableEntry::NONE);
            plan.edit_ids.resize(plan.edit_ids.len() + end - at, TableEntry::NONE);
        }
    }

    /// Makes the entries of a row from `first` on mean no block, as far as `upto`.
    pub(crate) fn clear(&mut self, plan: &mut StepPlan, row: Row, first: usize, upto: usize) {
        if first >= upto {
            return;
        }
        let start = plan.edit_ids.len();
        let end = &mut self.ends[row.index()];
        if *end as usize <= upto {
            *end = (*end).min(first as u32);
        }
        self.ids[row.index() * self.width..][first..upto].fill(TableEntry::NONE);
        plan.edit_ids.resize(start + upto - first, TableEntry::NONE);
        self.note(plan, row, first, start);
    }

    /// Notes that the entries of a row from `first` on become the ids of the plan from `start` on.
    fn note(&self, plan: &mut StepPlan, row: Row, first: usize, start: usize) {
        let count = (plan.edit_ids.len() - start) as u32;
        if count > 0 {
            plan.edits.push(RowEdit { group: self.group, row, first: first as u32, count });
        }
    }
}
