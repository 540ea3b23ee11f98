//! A worker's copy of the block table, and what it checks of each plan before it carries it out.

use crate::options::{check_table, repeated};
use crate::plan::{Snapshot, Start, StepPlan};
use crate::table::NO_BLOCK;
use crate::{OptionsError, Row};

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
        let Snapshot { step, width, table } = snapshot;
        if *width as usize != self.width || table.len() != self.ids.len() {
            let (ids, expected) = (table.len(), self.ids.len());
            return Err(PlanError::Snapshot { ids, width: *width, expected });
        }
        self.ids.copy_from_slice(table);
        self.step = *step;
        Ok(())
    }

    /// Checks a plan and changes the table as it says. What came from another process is not believed:
    /// a plan that names what is not there changes nothing.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn apply(&mut self, plan: &StepPlan) -> Result<(), PlanError> {
        let step = plan.step;
        if plan.after != self.step || step <= self.step {
            return Err(PlanError::Gap { step, after: plan.after, last: self.step });
        }
        self.check(plan)?;
        let mut ids = &plan.edit_ids[..];
        for edit in &plan.edits {
            let (here, rest) = ids.split_at(edit.count as usize);
            let first = edit.row.index() * self.width + edit.first as usize;
            self.ids[first..first + here.len()].copy_from_slice(here);
            ids = rest;
        }
        self.step = step;
        Ok(())
    }

    fn check(&self, plan: &StepPlan) -> Result<(), PlanError> {
        let (step, rows, width) = (plan.step, self.rows, self.width);
        let mut entries = 0_u64;
        for edit in &plan.edits {
            if edit.row.index() >= rows {
                return Err(PlanError::Row { step, row: edit.row, rows });
            }
            let (first, count) = (edit.first, edit.count);
            if u64::from(first) + u64::from(count) > width as u64 {
                return Err(PlanError::Edit { step, first, count, width });
            }
            entries += u64::from(count);
        }
        if entries != plan.edit_ids.len() as u64 {
            return Err(PlanError::Ids { step, ids: plan.edit_ids.len(), entries });
        }
        match plan.batch.iter().find(|row| row.row.index() >= rows) {
            Some(row) => Err(PlanError::Row { step, row: row.row, rows }),
            None => Ok(()),
        }
    }

    /// Checks that every row of a plan's batch has blocks of `block_tokens` tokens for what it computes.
    /// To be called when the plan is [applied](Self::apply).
    ///
    /// # Errors
    /// [`PlanError::NoBlocks`].
    pub fn check_batch(&self, plan: &StepPlan, block_tokens: u32) -> Result<(), PlanError> {
        for batch in &plan.batch {
            let (Start::At(upper) | Start::Open { upper, .. }) = batch.start;
            let end = upper.saturating_add(batch.tokens.into());
            let blocks = end.div_ceil(block_tokens.max(1).into());
            let row = self.row(batch.row).unwrap_or_default();
            let there = usize::try_from(blocks).ok().and_then(|blocks| row.get(..blocks));
            if !there.is_some_and(|ids| ids.iter().all(|&id| id >= 0)) {
                return Err(PlanError::NoBlocks { step: plan.step, row: batch.row, end });
            }
        }
        Ok(())
    }
}
