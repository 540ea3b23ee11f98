//! Beginning, staging and finishing steps.

use cuda_driver::DeviceError;
use cuda_vmm::Fence;
use kv_pool::Epoch;
use kv_stage::Step;

use crate::part::Part;
use crate::sequence::Sequence;
use crate::step::{InFlight, Latest, OpenStep, StagedPart};
use crate::{KvCache, StepError};

impl KvCache {
    /// Begins a step once the device is at most `overlap_depth` steps behind.
    ///
    /// # Ordering
    /// Waits on the host for the oldest steps in flight, until no more than `overlap_depth` are.
    /// Blocks released during completed steps can be claimed again.
    ///
    /// # Errors
    /// [`StepError::StillOpen`] before the last step was finished or dropped; [`StepError::Device`],
    /// with the sticky error if the work of a step failed.
    #[track_caller]
    pub fn begin_step(&mut self) -> Result<OpenStep, StepError> {
        let _site = cuda_driver::site::enter();
        if self.has_open_step() {
            return Err(StepError::StillOpen);
        }
        self.cover_left()?;
        while self.in_flight.len() > self.options.overlap_depth as usize {
            self.complete_oldest()?;
        }
        // The pool's clock advances once a step, and expired priorities end.
        self.pool.tick();
        self.pool.refresh();
        let epoch = self.pool.begin_epoch();
        let held = (epoch, self.gate.lease());
        Ok(OpenStep::open(&self.latest, self.stats.steps + 1, held))
    }

    /// The number of the latest step that was seen to complete; 0 for none.
    #[must_use]
    pub fn completed_step(&self) -> u64 {
        self.in_flight.front().map_or(self.stats.steps, |oldest| oldest.number - 1)
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
        let _site = cuda_driver::site::enter();
        self.cover_left()?;
        while !self.in_flight.is_empty() {
            self.complete_oldest()?;
            // Another thread may have dropped its step while this one waited.
            self.cover_left()?;
        }
        Ok(())
    }

    /// Sends each device the arrays that a step reads, in one copy: the block tables and lengths of
    /// `sequences`, and the arrays that `add` adds.
    ///
    /// `lengths` are the tokens of each sequence that the step reads: fewer than the sequence has where
    /// blocks are reserved ahead of the tokens. `None` stands for all tokens of each.
    ///
    /// `add` is called once for each part, with its index, while the part's device is
    /// [kept current](cuda_driver::Device::while_current); its value is returned by the part's
    /// [`StagedPart::extra`].
    ///
    /// # Ordering
    /// Enqueues the copies between devices and host memory that were decided since the last call.
    /// Waits on the host only if every staging buffer is still being read; with one call after each
    /// [`begin_step`](KvCache::begin_step), that does not happen. Work that is enqueued on the
    /// compute streams after this call finds the arrays, and all blocks onboarded before it, in
    /// place.
    ///
    /// # Errors
    /// [`StepError`]. Devices before the one that failed may have been sent their arrays. The next
    /// call enqueues the copies that were not enqueued.
    #[track_caller]
    pub fn stage<T, F>(
        &mut self,
        sequences: &[&Sequence],
        lengths: Option<&[u32]>,
        mut add: F,
    ) -> Result<Vec<StagedPart<T>>, StepError>
    where
        F: FnMut(usize, &mut Step<'_>) -> Result<T, kv_stage::error::StageError>,
    {
        let _site = cuda_driver::site::enter();
        if let Some(lengths) = lengths.filter(|lengths| lengths.len() != sequences.len()) {
            let (lengths, sequences) = (lengths.len(), sequences.len());
            return Err(StepError::LengthCount { lengths, sequences });
        }
        let mut rows = Vec::with_capacity(sequences.len());
        let mut read = Vec::with_capacity(sequences.len());
        let mut width = 0;
        for (index, sequence) in sequences.iter().enumerate() {
            if !self.rows.owns(&sequence.row) {
                return Err(StepError::ForeignSequence);
            }
            let tokens = sequence.tokens;
            let length = match lengths {
                Some(lengths) => lengths[index],
                None => u32::try_from(tokens).map_err(|_| StepError::TooLong { tokens })?,
            };
            if u64::from(length) > tokens {
                return Err(StepError::Length { index, length, tokens });
            }
            rows.push(sequence.row.row());
            read.push(length);
            width = width.max(sequence.blocks.len());
        }
        self.send_copies()?;
        self.await_copies()?;
        let table = &self.table;
        let stage = |(index, part): (usize, &mut Part)| {
            let device = part.device().clone();
            let staged = device.while_current(|| {
                let mut step = part.stager.begin_wait()?;
                let table = step.block_rows(table, &rows, width)?;
                let lengths = step.array(&read)?;
                let extra = add(index, &mut step)?;
                let staged = step.submit(&part.compute)?;
                let width = staged.row_entries(table)?;
                Ok(StagedPart { staged, table, lengths, width, extra })
            });
            staged?
        };
        self.parts.iter_mut().enumerate().map(stage).collect()
    }

    /// Ends a step, whose work is enqueued on the compute streams.
    ///
    /// # Errors
    /// [`StepError::Device`] when no event could be recorded after the work: the step is dropped then,
    /// and the next one has the same number. [`StepError::ForeignStep`], with the step, which stays open
    /// where it was begun.
    #[track_caller]
    pub fn finish_step(&mut self, mut step: OpenStep) -> Result<(), StepError> {
        let _site = cuda_driver::site::enter();
        if !step.is_of(&self.latest) {
            return Err(StepError::ForeignStep { step });
        }
        let mut fences = self.record_fences()?;
        let (number, epoch) = (step.number(), step.epoch());
        if let Some(lease) = step.end() {
            // The fences are of the parts' devices. A lease that is refused counts as dropped.
            drop(lease.submitted(&fences));
        }
        // The step waits for these, so they complete with it.
        fences.append(&mut self.arrived);
        self.stats.steps = number;
        self.in_flight.push_back(InFlight { number, epoch, fences });
        Ok(())
    }

    /// Records fences after the work of a dropped step, and counts the step as in flight.
    fn cover_left(&mut self) -> Result<(), DeviceError> {
        if !matches!(*self.latest.lock(), Latest::Left { .. }) {
            return Ok(());
        }
        let mut fences = self.record_fences()?;
        let latest = std::mem::take(&mut *self.latest.lock());
        if let Latest::Left { lease, epoch } = latest {
            drop(lease.submitted(&fences));
            fences.append(&mut self.arrived);
            // The next step has this number too.
            self.in_flight.push_back(InFlight { number: self.stats.steps + 1, epoch, fences });
        }
        Ok(())
    }

    pub(crate) fn has_open_step(&self) -> bool {
        matches!(*self.latest.lock(), Latest::Open)
    }

    /// Makes the compute streams wait for the copies enqueued so far. The gate keeps fences of the
    /// copies, because no step covers them yet.
    fn await_copies(&mut self) -> Result<(), DeviceError> {
        if self.copies.is_none() {
            return Ok(());
        }
        let mut arrived = Vec::with_capacity(self.parts.len());
        for part in &mut self.parts {
            for fence in part.fence_copies()? {
                #[cfg(all(feature = "sabotage", debug_assertions))]
                if self.sabotage.ignores_copies {
                    arrived.push(fence);
                    continue;
                }
                fence.hold_back(&part.compute)?;
                arrived.push(fence);
            }
        }
        // Not before: after a refusal, the next call records fences on all devices again.
        self.parts.iter_mut().for_each(|part| part.carries = [false; 2]);
        if let Some(lease) = self.copies.take() {
            drop(lease.submitted(&arrived));
        }
        self.arriving.clear();
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if self.sabotage.ignores_copies {
            return Ok(());
        }
        // These fences are of a dropped step, or of an earlier staging of this one. Completed ones
        // are kept as spares; the others are asked again at the next call. There are at most as
        // many pending as staging buffers, since each buffer is sent after one.
        let before = std::mem::take(&mut self.arrived);
        for fence in before {
            match fence.is_complete() {
                Ok(true) => self.keep_spare(fence),
                _ => self.arrived.push(fence),
            }
        }
        self.arrived.append(&mut arrived);
        Ok(())
    }

    /// Records a fence on every compute stream.
    fn record_fences(&mut self) -> Result<Vec<Fence>, DeviceError> {
        self.parts.iter_mut().map(Part::fence_compute).collect()
    }

    fn complete(&self, epoch: Epoch) {
        if let Err(error) = self.pool.complete_epoch(epoch) {
            tracing::error!(%error, "a step's epoch is of another pool");
        }
    }

    fn complete_oldest(&mut self) -> Result<(), StepError> {
        let Some(oldest) = self.in_flight.front() else { return Ok(()) };
        for fence in &oldest.fences {
            fence.wait()?;
        }
        let Some(InFlight { epoch, fences, .. }) = self.in_flight.pop_front() else {
            return Ok(());
        };
        self.complete(epoch);
        fences.into_iter().for_each(|fence| self.keep_spare(fence));
        Ok(())
    }

    /// Keeps a fence that has completed, for its event to be recorded again.
    fn keep_spare(&mut self, fence: Fence) {
        // Two parts may be on one device: the one with fewer spares gets it.
        let on_device = |part: &&mut Part| part.device() == fence.device();
        let parts = self.parts.iter_mut().filter(on_device);
        if let Some(part) = parts.min_by_key(|part| part.spare_count()) {
            part.keep_spare(fence);
        }
    }
}
