//! Beginning, staging and finishing steps.

use kv_stage::Step;

use crate::part::Part;
use crate::sequence::Sequence;
use crate::step::{InFlight, OpenStep, StagedPart};
use crate::{KvCache, StepError};
use cuda_driver::Event;
use std::sync::Arc;

impl KvCache {
    /// Begins a step, when the device is at most `overlap_depth` steps behind.
    ///
    /// # Ordering
    /// Waits on the host for the oldest steps in flight, until no more than `overlap_depth` are.
    /// What was released during the steps that have completed can be claimed again.
    ///
    /// # Errors
    /// [`StepError::Device`], with the sticky error if the work of a step failed.
    pub fn begin_step(&mut self) -> Result<OpenStep, StepError> {
        while self.in_flight.len() > self.options.overlap_depth as usize {
            self.complete_oldest()?;
        }
        let epoch = self.pool.begin_epoch();
        Ok(OpenStep { number: self.stats.steps + 1, epoch, lease: self.gate.lease() })
    }

    /// The number of the latest step that was seen to complete; 0 for none.
    #[must_use]
    pub fn completed_step(&self) -> u64 {
        self.in_flight.front().map_or(self.stats.steps, |oldest| oldest.number - 1)
    }

    /// Waits until every step that was finished has completed.
    ///
    /// # Ordering
    /// Waits on the host.
    ///
    /// # Errors
    /// As [`begin_step`](KvCache::begin_step).
    pub fn drain(&mut self) -> Result<(), StepError> {
        while !self.in_flight.is_empty() {
            self.complete_oldest()?;
        }
        Ok(())
    }

    /// Sends the devices what a step reads: the block tables and lengths of `sequences`, and whatever
    /// arrays `add` puts beside them, in one copy for each device.
    ///
    /// `add` is called once for each part, with its index; what it returns is found again in the
    /// part's [`StagedPart::extra`].
    ///
    /// # Ordering
    /// Waits on the host only if every staging buffer is being read still, which
    /// [`begin_step`](KvCache::begin_step) rules out with one call a step. Work that is enqueued on
    /// the compute streams after this call finds the arrays, and everything that was onboarded
    /// before it, in place.
    ///
    /// # Errors
    /// [`StepError`]. Devices before the one that failed may have been sent theirs.
    pub fn stage<T, F>(
        &mut self,
        sequences: &[&Sequence],
        mut add: F,
    ) -> Result<Vec<StagedPart<T>>, StepError>
    where
        F: FnMut(usize, &mut Step<'_>) -> Result<T, kv_stage::StepError>,
    {
        let mut rows = Vec::with_capacity(sequences.len());
        let mut lengths = Vec::with_capacity(sequences.len());
        let mut width = 0;
        for sequence in sequences {
            if !self.rows.owns(&sequence.row) {
                return Err(StepError::ForeignSequence);
            }
            let tokens = sequence.tokens;
            let length = u32::try_from(tokens).map_err(|_| StepError::TooLong { tokens })?;
            rows.push(sequence.row.row());
            lengths.push(length);
            width = width.max(sequence.blocks.len());
        }
        if self.copies_pending {
            for part in &self.parts {
                part.await_copies()?;
            }
            self.copies_pending = false;
        }
        let table = &self.table;
        let stage = |(index, part): (usize, &mut Part)| {
            let mut step = part.stager.begin_wait()?;
            let table = step.block_rows(table, &rows, width)?;
            let lengths = step.array(&lengths)?;
            let extra = add(index, &mut step)?;
            let staged = step.submit(&part.compute)?;
            Ok(StagedPart { staged, table, lengths, width, extra })
        };
        self.parts.iter_mut().enumerate().map(stage).collect()
    }

    /// Ends a step: its work is enqueued on the compute streams.
    ///
    /// # Errors
    /// [`StepError::Device`] when no event could be recorded; the step then counts as in flight with
    /// the next one.
    pub fn finish_step(&mut self, step: OpenStep) -> Result<(), StepError> {
        let events = match self.spare_events.pop() {
            Some(events) => events,
            None => self
                .parts
                .iter()
                .map(|part| Event::new(part.device()).map(Arc::new))
                .collect::<Result<Vec<_>, _>>()?,
        };
        for (part, event) in self.parts.iter().zip(&events) {
            event.record(&part.compute)?;
        }
        let OpenStep { number, epoch, lease } = step;
        lease.submitted(events.iter().cloned());
        self.stats.steps = number;
        self.in_flight.push_back(InFlight { number, epoch, events });
        Ok(())
    }

    fn complete_oldest(&mut self) -> Result<(), StepError> {
        let Some(oldest) = self.in_flight.front() else { return Ok(()) };
        for event in &oldest.events {
            event.synchronize()?;
        }
        let Some(InFlight { epoch, events, .. }) = self.in_flight.pop_front() else {
            return Ok(());
        };
        if let Err(error) = self.pool.complete_epoch(epoch) {
            tracing::error!(%error, "a step's epoch was never begun");
        }
        self.spare_events.push(events);
        Ok(())
    }
}
