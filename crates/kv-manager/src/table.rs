//! The block table of a group as the manager knows it: one row a sequence, and what has changed since the last plan.

use kv_pool::{Claimed, TableEntry, guard};

use crate::blocks::Blocks;
use crate::options::{check_table, repeated};
use crate::plan::PlanDraft;
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
    pub(crate) fn write(&mut self, plan: &mut PlanDraft, row: Row, first: usize, blocks: &Blocks) {
        self.put(plan, row, first, |ids| blocks.add_ids(first, ids));
    }

    /// The same of blocks that were claimed just now, which come behind those that the row has.
    pub(crate) fn append(
        &mut self,
        plan: &mut PlanDraft,
        row: Row,
        first: usize,
        claimed: &Claimed,
    ) {
        let new = claimed.ids().map(|id| TableEntry::from(Some(id)));
        self.put(plan, row, first, |ids| ids.extend(new));
    }

    /// Writes ids to a row, from entry `first` on, and ends the row there.
    fn put(
        &mut self,
        plan: &mut PlanDraft,
        row: Row,
        first: usize,
        add: impl FnOnce(&mut Vec<TableEntry>),
    ) {
        let end = &mut self.ends[row.index()];
        let ids = plan.edit((self.group, row, first), |ids| {
            let start = ids.len();
            add(ids);
            let at = first + ids.len() - start;
            let before = std::mem::replace(end, at as u32) as usize;
            if guard!("manager.rows-lose-what-was-there", before > at, else false) {
                ids.resize(ids.len() + before - at, TableEntry::NONE);
            }
        });
        self.ids[row.index() * self.width + first..][..ids.len()].copy_from_slice(ids);
    }

    /// Makes the entries of a row from `first` on mean no block, as far as `upto`.
    pub(crate) fn clear(&mut self, plan: &mut PlanDraft, row: Row, first: usize, upto: usize) {
        if first >= upto {
            return;
        }
        let end = &mut self.ends[row.index()];
        if *end as usize <= upto {
            *end = (*end).min(first as u32);
        }
        let none = |ids: &mut Vec<_>| ids.resize(ids.len() + upto - first, TableEntry::NONE);
        plan.edit((self.group, row, first), none);
        self.ids[row.index() * self.width..][first..upto].fill(TableEntry::NONE);
    }
}
