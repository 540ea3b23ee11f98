//! Beginning, staging and finishing steps.

use cuda_driver::guard;
use kv_manager::{OpenStep, Outcome, Sequence};
use kv_stage::error::BatchError;

use crate::{KvCache, StepError, Workers};

impl<W: Workers> KvCache<W> {
    /// Begins a step once the device is at most `overlap_depth` steps behind.
    ///
    /// A step that was staged and then dropped, not [finished](Self::finish_step), counts as failed: it is
    /// waited for here, its names are withdrawn, and the sequences that were in it are told by their next
    /// call ([`Redo`](kv_manager::SequenceError::Redo)). Worker processes compute what was sent to them: with these, it counts as
    /// finished.
    ///
    /// # Ordering
    /// Waits on the host for the oldest steps in flight, until no more than `overlap_depth` are.
    /// Blocks released during completed steps can be claimed again.
    ///
    /// # Errors
    /// [`StepError::Step`] before the last step was finished or dropped; [`StepError::HostCopy`] while copies
    /// of the step before are refused; [`StepError::Device`], with the sticky error if the work of a step
    /// failed.
    #[track_caller]
    pub fn begin_step(&mut self) -> Result<OpenStep, StepError> {
        let _span = tracing::debug_span!("begin_step").entered();
        let _site = cuda_driver::site::enter();
        if !self.manager.has_open_step() {
            guard!("cache.dropped-work-has-events", self.leave(Outcome::Failed)?);
            let most = self.options().overlap_depth as usize;
            let depth = guard!("cache.the-depth-bounds-steps", most, else most + 1);
            self.workers.complete(&mut self.manager, depth)?;
            self.workers.tend(&mut self.manager)?;
        }
        Ok(self.manager.begin_step()?)
    }

    /// Waits until every step that was finished or dropped has completed. Blocks released by then
    /// can be claimed, unless a step is open.
    ///
    /// # Ordering
    /// Waits on the host.
    ///
    /// # Errors
    /// As [`begin_step`](KvCache::begin_step).
    #[track_caller]
    pub fn drain(&mut self) -> Result<(), StepError> {
        let _span = tracing::debug_span!("drain").entered();
        let _site = cuda_driver::site::enter();
        loop {
            // Another thread may have dropped its step while this one waited.
            if !self.manager.has_open_step() {
                self.leave(Outcome::Failed)?;
                guard!("cache.drains-end-dropped-steps", self.manager.end_dropped_step());
            }
            let in_flight = self.workers.in_flight();
            self.workers.complete(&mut self.manager, in_flight.saturating_sub(1))?;
            if in_flight == 0 {
                return Ok(());
            }
        }
    }

    /// Stages a batch, each sequence with the tokens that were [reserved](KvCache::reserve) for it. Sends
    /// each device what the step needs, in one copy: changes of the block table and the rows of the batch.
    /// They lie in the parts' [`batch`](crate::Part::batch) then.
    ///
    /// Full blocks of known tokens that the step writes get their names, and later requests find them.
    ///
    /// # Ordering
    /// Enqueues what was decided since the last call: copies between devices and host memory, within
    /// devices, and scrubs. Waits on the host only if every staging buffer is still being read, which does
    /// not happen with one call after each [`begin_step`](KvCache::begin_step). Work that is enqueued on
    /// the compute streams after this call finds the arrays, and the blocks of the batch, in place.
    ///
    /// # Errors
    /// [`StepError`]. If the manager refuses the batch ([`StepError::Refused`]), or it has more than
    /// `step_tokens_max` tokens, of the model or of the draft model ([`BatchError::Tokens`]), nothing was staged, and the call can be made
    /// again. After another error the step has failed: finish or drop it. Its copies that were not enqueued
    /// are enqueued then, or when the next step begins.
    #[track_caller]
    pub fn stage(&mut self, step: &OpenStep, batch: &mut [&mut Sequence]) -> Result<(), StepError> {
        self.stage_batch(step, batch, None)
    }

    /// The same with what the engine sends along. In this process that is a function that sets
    /// [arrays](crate::KvCacheOptions::step_arrays) of its own beside the batch: it is called once for each part, with its
    /// index, while the part's device is [kept current](cuda_driver::Device::while_current). To worker processes it is bytes.
    ///
    /// # Errors
    /// As [`stage`](Self::stage).
    #[track_caller]
    pub fn stage_with(
        &mut self,
        step: &OpenStep,
        batch: &mut [&mut Sequence],
        work: W::Work<'_>,
    ) -> Result<(), StepError> {
        self.stage_batch(step, batch, Some(work))
    }

    #[track_caller]
    fn stage_batch(
        &mut self,
        step: &OpenStep,
        batch: &mut [&mut Sequence],
        work: Option<W::Work<'_>>,
    ) -> Result<(), StepError> {
        let sequences = batch.len();
        let _span = tracing::debug_span!("stage", step = step.number(), sequences).entered();
        let _site = cuda_driver::site::enter();
        let max = self.options().step_tokens_max;
        check_tokens(max, batch.iter().map(|sequence| u64::from(sequence.next())))?;
        if self.options().groups.iter().any(|group| group.draft_model) {
            let drafts = batch.iter().map(|sequence| sequence.next_draft());
            guard!("cache.drafts-fit-their-step", check_tokens(max, drafts)?);
        }
        self.workers.check_step(work.as_ref())?;
        self.note_use();
        self.manager.stage(step, batch)?;
        // Until the work is said to be enqueued, it is not.
        self.staged = None;
        self.workers.carry_out(self.manager.staged(), work)?;
        self.staged = Some(step.number());
        Ok(())
    }

    /// Ends a step, whose work is enqueued on the compute streams. What was decided in a step that was not
    /// staged is enqueued now.
    ///
    /// # Errors
    /// [`StepError::Device`] when no event could be recorded after the work, or another that copies met:
    /// the step counts as dropped then. [`StepError::Step`] for a step of another cache.
    #[track_caller]
    pub fn finish_step(&mut self, step: OpenStep) -> Result<(), StepError> {
        let _span = tracing::debug_span!("finish_step", step = step.number()).entered();
        let _site = cuda_driver::site::enter();
        if self.manager.is_unstaged(&step) && self.manager.has_decided() {
            self.stage(&step, &mut [])?;
        }
        let number = step.number();
        self.manager.finish_step(step)?;
        let is_staged = self.staged == Some(number);
        let is_done = guard!("cache.refused-batches-fail", is_staged, else true);
        self.leave(if is_done { Outcome::Done } else { Outcome::Failed })
    }

    /// Records fences after the work of the last step that was staged, if that has not been done.
    fn leave(&mut self, outcome: Outcome) -> Result<(), StepError> {
        self.workers.finish(outcome)?;
        self.staged = None;
        Ok(())
    }
}

/// Checks that a step has room for the tokens of the rows of a batch.
pub(crate) fn check_tokens(max: u32, rows: impl Iterator<Item = u64>) -> Result<(), BatchError> {
    let tokens = rows.fold(0, u64::saturating_add);
    if tokens > max.into() { Err(BatchError::Tokens { tokens, max }) } else { Ok(()) }
}
