//! The block table as the manager knows it: one row a sequence, and what has changed since the last plan.

use crate::blocks::Blocks;
use crate::options::{check_table, repeated};
use crate::plan::{RowEdit, StepPlan};
use crate::{OptionsError, Row};

/// What a row holds behind its sequence's blocks.
pub(crate) const NO_BLOCK: i32 = -1;

/// The block ids of all rows, `[rows, width]`.
#[derive(Debug)]
pub(crate) struct Table {
    ids: Vec<i32>,
    width: usize,
}

impl Table {
    pub(crate) fn new(rows: u32, width: u32) -> Result<Self, OptionsError> {
        check_table(rows, width)?;
        let (rows, width) = (rows as usize, width as usize);
        Ok(Self { ids: repeated(NO_BLOCK, rows * width)?, width })
    }

    pub(crate) fn ids(&self) -> &[i32] {
        &self.ids
    }

    pub(crate) fn row(&self, row: Row) -> &[i32] {
        &self.ids[row.index() * self.width..][..self.width]
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Writes the ids of a sequence's blocks to its row, from entry `first` on, and notes them in the plan.
    /// What the row's last sequence has left behind them goes.
    pub(crate) fn write(&mut self, plan: &mut StepPlan, row: Row, first: usize, blocks: &Blocks) {
        let entries = &mut self.ids[row.index() * self.width..][..self.width];
        let start = plan.edit_ids.len();
        let mut at = first;
        blocks.for_each_id(first, |id| {
            entries[at] = id.as_i32();
            plan.edit_ids.push(id.as_i32());
            at += 1;
        });
        let left = entries[at..].iter_mut().take_while(|id| **id != NO_BLOCK);
        left.for_each(|id| {
            *id = NO_BLOCK;
            plan.edit_ids.push(NO_BLOCK);
        });
        note(plan, row, first, start);
    }

    /// Makes the entries of a row from `first` on mean no block, as far as `upto`.
    pub(crate) fn clear(&mut self, plan: &mut StepPlan, row: Row, first: usize, upto: usize) {
        if first >= upto {
            return;
        }
        let start = plan.edit_ids.len();
        self.ids[row.index() * self.width..][first..upto].fill(NO_BLOCK);
        plan.edit_ids.resize(start + upto - first, NO_BLOCK);
        note(plan, row, first, start);
    }
}

/// Notes that the entries of a row from `first` on become the ids of the plan from `start` on.
fn note(plan: &mut StepPlan, row: Row, first: usize, start: usize) {
    let count = (plan.edit_ids.len() - start) as u32;
    if count > 0 {
        plan.edits.push(RowEdit { row, first: first as u32, count });
    }
}
