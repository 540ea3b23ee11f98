//! What the scheduler asks of a fleet: the manager decides, and the workers are told.

use std::time::Duration;

use cuda_driver::guard;
use kv_kernels::KvShape;
use kv_plane::manager::{
    CommitError, DraftError, ForkError, GroupId, Manager, Reserved, SuspendError,
};
use kv_plane::{
    Admission, Committed, DemandError, OpenStep, Request, ReserveError, ResumeError, Sequence,
    StepError, Tokens,
};
use kv_pool::{BlockHash, Tier};

use super::error::WorkerFault;
use super::fleet::Fleet;
use crate::engine::batch::Batch;
use crate::engine::cache::{Cache, Queue};
use crate::engine::groups::Reads;
use crate::engine::verify::{Reading, SequenceSums};
use crate::engine::{OVERLAP_DEPTH, RunError};

/// Between two looks at what workers say while nothing but transfers goes on.
const PAUSE: Duration = Duration::from_micros(200);

impl Cache for Fleet {
    fn manager(&self) -> &Manager {
        &self.manager
    }

    fn shapes(&self) -> Vec<(KvShape, Reads)> {
        self.workers.iter().flat_map(|place| place.shapes.iter().copied()).collect()
    }

    fn further_groups(&self) -> &[Reads] {
        self.reads.get(1..).unwrap_or_default()
    }

    fn mapped_blocks(&self) -> u64 {
        self.mapped()
    }

    fn ready_blocks(&self) -> u64 {
        self.mapped().min(self.budget)
    }

    fn begin_step(&mut self) -> Result<OpenStep, RunError> {
        if self.eager || self.manager.lower_stats().open_tickets > 0 {
            self.take_arrived()?;
        }
        let most = guard!("replay.one-step-ahead-of-workers", OVERLAP_DEPTH as usize, else 99);
        while self.in_flight.len() > most
            && let Some(&oldest) = self.in_flight.front()
        {
            self.await_step(oldest)?;
        }
        self.fit_memory()?;
        Ok(self.manager.begin_step().map_err(StepError::from)?)
    }

    fn finish_step(&mut self, step: OpenStep) -> Result<(), RunError> {
        if self.manager.is_unstaged(&step) && self.manager.has_decided() {
            // What was decided for nobody in a batch: suspensions, and the budget.
            self.launch(&step, &Batch::default(), &mut [], false)?;
        }
        Ok(self.manager.finish_step(step).map_err(StepError::from)?)
    }

    fn drain(&mut self) -> Result<(), RunError> {
        while let Some(&latest) = self.in_flight.back() {
            self.await_step(latest)?;
        }
        if self.manager.lower_stats().open_tickets > 0 {
            // Only the workers' tiers have something to do.
            std::thread::sleep(PAUSE);
            self.take_arrived()?;
        }
        Ok(())
    }

    fn take_loss(&mut self) -> Option<u64> {
        self.loss.take()
    }

    fn commit(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        tokens: Tokens<'_>,
    ) -> Result<Committed, CommitError> {
        self.manager.commit(sequence, step, tokens)
    }

    fn reserve(&mut self, sequence: &mut Sequence, tokens: u32) -> Result<Reserved, ReserveError> {
        Ok(self.manager.reserve(sequence, tokens)?)
    }

    fn reserve_draft(&mut self, sequence: &mut Sequence, tokens: u32) -> Result<(), ReserveError> {
        Ok(self.manager.reserve_draft(sequence, tokens)?)
    }

    fn commit_draft(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        end: u64,
    ) -> Result<Committed, DraftError> {
        self.manager.commit_draft(sequence, step, end)
    }

    fn admit(
        &mut self,
        queue: &mut Queue,
        budget: u64,
    ) -> Result<Admission<(usize, Request)>, DemandError> {
        Ok(self.manager.admit(queue, budget))
    }

    fn fork(&mut self, sequence: &mut Sequence) -> Result<Sequence, ForkError> {
        self.manager.fork(sequence)
    }

    fn suspend(&mut self, sequence: &mut Sequence) -> Result<(), SuspendError> {
        self.manager.suspend(sequence)
    }

    fn resume(&mut self, sequence: &mut Sequence) -> Result<u64, ResumeError> {
        Ok(self.manager.resume(sequence)?)
    }

    fn forget(&mut self, names: &[BlockHash]) {
        self.manager.forget(names);
    }

    fn set_budget(&mut self, blocks: u64) -> Result<(), RunError> {
        // More blocks are handed out when all workers have mapped them.
        let told = blocks.min(self.mapped());
        self.manager.set_budget(GroupId::default(), Tier::Primary, told)?;
        self.budget = blocks;
        Ok(())
    }

    fn set_granules(&mut self, granules: u32) -> Result<(), RunError> {
        self.manager.set_granules(granules)?;
        Ok(())
    }

    fn launch(
        &mut self,
        step: &OpenStep,
        batch: &Batch,
        readers: &mut [&mut Sequence],
        read: bool,
    ) -> Result<(), RunError> {
        self.manager.stage(step, readers).map_err(StepError::from)?;
        self.send(step.number(), batch, read)
    }

    fn checksums(
        &mut self,
        part: usize,
        reading: &Reading,
        checksums: &mut Vec<u64>,
    ) -> Result<usize, RunError> {
        let (worker, group) = (part / self.reads.len(), part % self.reads.len());
        let member = &mut self.workers[worker].member;
        // Those of steps that were void are asked for by nobody, and those of earlier steps no more.
        while member.checksums.pop_front_if(|(step, _)| *step < reading.step).is_some() {}
        let found = member.checksums.front().filter(|(step, _)| *step == reading.step);
        let block_tokens = self.manager.options().block_tokens.into();
        let entries = |row: &SequenceSums| self.reads[group].checksums(row.tokens, block_tokens);
        let (expected, width) = reading
            .rows
            .iter()
            .map(entries)
            .fold((0, 0), |(sum, most), row| (sum + row, row.max(most)));
        let sums = found.and_then(|(_, groups)| groups.get(group));
        let Some(sums) = sums.filter(|sums| sums.len() == expected) else {
            let fault = WorkerFault::NotComputed { step: reading.step };
            return Err(RunError::Worker { worker: worker as u16, source: Box::new(fault) });
        };
        checksums.clear();
        let mut rest = &sums[..];
        for row in &reading.rows {
            let (here, behind) = rest.split_at(entries(row));
            checksums.extend_from_slice(here);
            checksums.resize(checksums.len() + width - here.len(), 0);
            rest = behind;
        }
        Ok(width)
    }
}
