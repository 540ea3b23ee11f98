//! A worker's copy of the block table, and what it checks of each plan before it carries it out.

use std::ops::Range;

use crate::options::{check_table, repeated};
use crate::plan::{RowEdit, Snapshot, Start, StepPlan};
use crate::table::NO_BLOCK;
use crate::{OptionsError, PlanError, Row};

/// The block table as a worker knows it.
///
/// # Examples
///
/// ```
/// use kv_manager::{Replica, StepPlan};
///
/// let mut replica = Replica::new(8, 32)?;
/// replica.apply(&StepPlan { step: 1, ..StepPlan::default() })?;
/// let missed = replica.apply(&StepPlan { step: 3, after: 2, ..StepPlan::default() });
/// assert_eq!(missed.unwrap_err().to_string(), "plan 3 follows plan 2, but plan 1 was the last one here");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Replica {
    step: u64,
    rows: usize,
    width: usize,
    ids: Vec<i32>,
    /// What the last plan has replaced.
    before: Vec<i32>,
}

impl Replica {
    /// A table of `rows` rows of `width` entries, all without blocks, before the first plan: the manager's
    /// [`sequences_max`](crate::ManagerOptions::sequences_max) and
    /// [`blocks_per_sequence_max`](crate::ManagerOptions::blocks_per_sequence_max).
    ///
    /// # Errors
    /// [`OptionsError`], as for the manager.
    pub fn new(rows: u32, width: u32) -> Result<Self, OptionsError> {
        check_table(rows, width)?;
        let (rows, width) = (rows as usize, width as usize);
        let ids = repeated(NO_BLOCK, rows * width)?;
        Ok(Self { step: 0, rows, width, ids, before: Vec::new() })
    }

    /// The step of the last plan that was applied.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The block ids of a row, -1 where there is none; `None` if there is no such row.
    #[must_use]
    pub fn row(&self, row: Row) -> Option<&[i32]> {
        self.ids.chunks_exact(self.width.max(1)).nth(row.index())
    }

    /// Takes the place that a snapshot describes.
    ///
    /// # Errors
    /// [`PlanError::Snapshot`].
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), PlanError> {
        snapshot.check(self.rows, self.width, u64::MAX)?;
        self.ids.copy_from_slice(&snapshot.table);
        self.step = snapshot.step;
        Ok(())
    }

    /// Checks a plan and changes the table as it says. What came from another process is not believed:
    /// a plan that names what is not there changes nothing.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn apply(&mut self, plan: &StepPlan) -> Result<(), PlanError> {
        plan.check_follows(self.step)?;
        plan.check_table(self.rows, self.width)?;
        self.write(plan);
        self.step = plan.step;
        Ok(())
    }

    /// The same, and every row of the plan's batch must then have blocks of `block_tokens` tokens for what it
    /// computes, among the first `blocks` of the device, which have memory.
    ///
    /// # Errors
    /// [`PlanError`]; nothing has changed.
    pub fn apply_to_memory(
        &mut self,
        plan: &StepPlan,
        block_tokens: u32,
        blocks: u64,
    ) -> Result<(), PlanError> {
        plan.check_follows(self.step)?;
        plan.check_table(self.rows, self.width)?;
        self.write(plan);
        if let Err(error) = self.check_batch(plan, block_tokens, blocks) {
            self.take_back(plan);
            return Err(error);
        }
        self.step = plan.step;
        Ok(())
    }

    /// Makes the changes of a plan, and notes what was there.
    fn write(&mut self, plan: &StepPlan) {
        self.before.clear();
        let mut ids = &plan.edit_ids[..];
        for edit in &plan.edits {
            let (here, rest) = ids.split_at(edit.count as usize);
            let entries = entries(edit, self.width);
            self.before.extend_from_slice(&self.ids[entries.clone()]);
            self.ids[entries].copy_from_slice(here);
            ids = rest;
        }
    }

    /// Puts back what the changes of a plan have replaced, the last one first: edits may overlap.
    fn take_back(&mut self, plan: &StepPlan) {
        for edit in plan.edits.iter().rev() {
            let start = self.before.len() - edit.count as usize;
            self.ids[entries(edit, self.width)].copy_from_slice(&self.before[start..]);
            self.before.truncate(start);
        }
    }

    fn check_batch(
        &self,
        plan: &StepPlan,
        block_tokens: u32,
        blocks: u64,
    ) -> Result<(), PlanError> {
        for batch in &plan.batch {
            let (Start::At(upper) | Start::Open { upper, .. }) = batch.start;
            let end = upper.saturating_add(batch.tokens.into());
            let needed = end.div_ceil(block_tokens.max(1).into());
            let row = self.row(batch.row).unwrap_or_default();
            let there = usize::try_from(needed).ok().and_then(|needed| row.get(..needed));
            let is_ready = |&id: &i32| u64::try_from(id).is_ok_and(|id| id < blocks);
            if !there.is_some_and(|ids| ids.iter().all(is_ready)) {
                return Err(PlanError::NoBlocks { step: plan.step, row: batch.row, end });
            }
        }
        Ok(())
    }
}

/// The entries of the table that an edit changes.
fn entries(edit: &RowEdit, width: usize) -> Range<usize> {
    let first = edit.row.index() * width + edit.first as usize;
    first..first + edit.count as usize
}
