//! Beginning, staging and finishing steps.

use cuda_driver::guard;
use kv_manager::{Completion, OpenStep, Outcome, Sequence, WorkerId};
use kv_stage::{BatchStep, error::BatchError};

use crate::{KvCache, StepError};

impl KvCache {
    /// Begins a step once the device is at most `overlap_depth` steps behind.
    ///
    /// A step that was staged and then dropped, not [finished](Self::finish_step), counts as failed: it is
    /// waited for here, its names are withdrawn, and the sequences that were in it are told by their next
    /// call ([`Redo`](kv_manager::SequenceError::Redo)).
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
            while self.worker.in_flight() > depth || self.worker.has_failed() {
                self.complete_oldest()?;
            }
            while let Some(completed) = self.worker.poll()? {
                self.note_completed(completed);
            }
            self.take_transfers();
            self.take_pinned();
            self.give_back();
            self.give_back_host();
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
            if self.worker.in_flight() == 0 {
                return Ok(());
            }
            self.complete_oldest()?;
        }
    }

    /// Stages a batch, each sequence with the tokens that were [reserved](KvCache::reserve) for it. Sends
    /// each device what the step needs, in one copy: changes of the block table, the rows of the batch,
    /// and the arrays that `add` sets. They lie in the parts' [`batch`](crate::Part::batch) then.
    ///
    /// `add` is called once for each part, with its index, while the part's device is
    /// [kept current](cuda_driver::Device::while_current).
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
    pub fn stage<F>(
        &mut self,
        step: &OpenStep,
        batch: &mut [&mut Sequence],
        add: F,
    ) -> Result<(), StepError>
    where
        F: FnMut(usize, &mut BatchStep<'_>) -> Result<(), BatchError>,
    {
        let sequences = batch.len();
        let _span = tracing::debug_span!("stage", step = step.number(), sequences).entered();
        let _site = cuda_driver::site::enter();
        self.worker.check_tokens(batch.iter().map(|sequence| u64::from(sequence.next())))?;
        if self.options().groups().any(|group| group.draft_model) {
            let drafts = batch.iter().map(|sequence| sequence.next_draft());
            guard!("cache.drafts-fit-their-step", self.worker.check_tokens(drafts)?);
        }
        let plan = self.manager.stage(step, batch)?;
        // Until the work is said to be enqueued, it is not.
        self.staged = None;
        self.worker.carry_out_own(plan, add)?;
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
            self.stage(&step, &mut [], |_, _| Ok(()))?;
        }
        let number = step.number();
        self.manager.finish_step(step)?;
        let is_staged = self.staged == Some(number);
        let is_done = guard!("cache.refused-batches-fail", is_staged, else true);
        self.leave(if is_done { Outcome::Done } else { Outcome::Failed })
    }

    /// Records fences after the work of the last step that was staged, if that has not been done.
    fn leave(&mut self, outcome: Outcome) -> Result<(), StepError> {
        self.worker.finish(outcome)?;
        self.staged = None;
        Ok(())
    }

    fn complete_oldest(&mut self) -> Result<(), StepError> {
        if let Some(completed) = self.worker.wait()? {
            self.note_completed(completed);
        }
        Ok(())
    }

    fn note_completed(&mut self, (step, outcome): (u64, Outcome)) {
        // What a step has read of loads is known before the step is over.
        self.take_settled();
        let completion = Completion { worker: WorkerId(0), step, outcome };
        if let Err(error) = self.manager.complete(completion) {
            tracing::error!(%error, "a completed step that was not staged");
        }
    }
}
