//! A worker's copy of the block table, and what it checks of each plan before it carries it out.

use crate::options::{check_table, repeated};
use crate::plan::{Snapshot, Start, StepPlan};
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
        Ok(Self { step: 0, rows, width, ids: repeated(NO_BLOCK, rows * width)? })
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
        let mut ids = &plan.edit_ids[..];
        for edit in &plan.edits {
            let (here, rest) = ids.split_at(edit.count as usize);
            let first = edit.row.index() * self.width + edit.first as usize;
            self.ids[first..first + here.len()].copy_from_slice(here);
            ids = rest;
        }
        self.step = plan.step;
        Ok(())
    }

    /// Checks that every row of a plan's batch has blocks of `block_tokens` tokens for what it computes, among
    /// the first `blocks` of the device, which have memory. To be called when the plan is
    /// [applied](Self::apply).
    ///
    /// # Errors
    /// [`PlanError::NoBlocks`].
    pub fn check_batch(
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
