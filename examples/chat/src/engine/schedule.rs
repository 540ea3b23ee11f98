//! Who takes part in the next step: reservations, preemption, forks, resumption and admission.

use anyhow::Context as _;
use kv_plane::manager::{ChangeError, ReserveError as Refusal, SequenceError, SuspendError};
use kv_plane::{ReserveError, Room, Sequence, Waiting};

use super::{Engine, Queued, Reuse, Running, blocks_of};

impl Engine {
    /// Decides the next step: first the sequences that run, the oldest first, then those that were suspended, and then
    /// prompts that wait.
    pub(super) fn schedule(&mut self) -> anyhow::Result<()> {
        let may_resume = !std::mem::take(&mut self.preempted);
        if may_resume {
            self.resume_one()?;
        }
        self.fork_answers()?;
        let mut budget = self.options.chunk_tokens;
        let mut index = 0;
        while index < self.running.len() {
            let run = &mut self.running[index];
            let tokens = run.tokens_wanted(budget);
            if tokens == 0 {
                // The budget is used up. It runs again in the next step.
                self.cache.reserve(&mut run.sequence, 0)?.given()?;
                index += 1;
                continue;
            }
            match self.cache.reserve(&mut run.sequence, tokens) {
                Ok(Room::Given(reserved)) => {
                    let adopted = reserved.adopted_tokens;
                    self.counts.joined += u64::from(adopted > 0);
                    run.reuse.device_tokens += adopted;
                    budget = budget.saturating_sub(run.sequence.next().into());
                    index += 1;
                }
                Err(ReserveError::Refused(Refusal::Sequence(SequenceError::Redo { from }))) => {
                    run.ids.truncate(run.sequence.known() as usize);
                    run.outcomes.clear();
                    run.kv_end = from;
                }
                Ok(Room::Lacks(_)) => {
                    // The youngest gives way, which may be this one.
                    let youngest = self.running.len() - 1;
                    self.preempt(youngest)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if may_resume && !self.preempted {
            self.admit(budget)?;
        }
        Ok(())
    }

    /// Takes a running sequence off the device: to host memory, or, without room there, to be computed again.
    pub(super) fn preempt(&mut self, index: usize) -> anyhow::Result<()> {
        self.preempted = true;
        let mut run = self.running.remove(index);
        match self.cache.suspend(&mut run.sequence) {
            Ok(()) => {
                self.counts.suspended += 1;
                self.suspended.push_back(run);
            }
            Err(SuspendError::NoRoom(_)) => {
                self.counts.restarted += 1;
                let Running { job, answer, asked, ids, started, first_token, forks, .. } = run;
                self.enqueue(Queued {
                    job,
                    answer,
                    asked,
                    started,
                    first_token,
                    forks,
                    ids,
                    joined: false,
                    loaded_blocks: 0,
                });
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Suspends the youngest running sequence, if there are several.
    ///
    /// # Errors
    /// What the cache says.
    pub fn suspend_youngest(&mut self) -> anyhow::Result<bool> {
        if self.running.len() < 2 {
            return Ok(false);
        }
        self.preempt(self.running.len() - 1)?;
        Ok(true)
    }

    /// Brings the sequence back that was suspended first, if there is room.
    fn resume_one(&mut self) -> anyhow::Result<()> {
        let Some(mut run) = self.suspended.pop_front() else { return Ok(()) };
        match self.cache.resume(&mut run.sequence)? {
            Room::Given(_) => {
                if run.sequence.awaits().is_none() {
                    // What came out of a step that has failed was forgotten.
                    run.ids.truncate(run.sequence.known() as usize);
                    run.kv_end = run.sequence.resolved();
                }
                self.running.push(run);
                Ok(())
            }
            Room::Lacks(_) => {
                self.suspended.push_front(run);
                Ok(())
            }
        }
    }

    /// Branches off the further answers of a job, once all of its prompt but the last token has KV or is staged.
    fn fork_answers(&mut self) -> anyhow::Result<()> {
        let mut twins = Vec::new();
        for run in &mut self.running {
            while run.forks > 0 && run.sequence.to_compute() == 1 {
                let twin = match self.cache.fork(&mut run.sequence) {
                    Ok(twin) => twin,
                    Err(ChangeError::NoRow { .. } | ChangeError::Later) => break,
                    Err(error) => return Err(error.into()),
                };
                run.forks -= 1;
                let answer = run.asked.answers - 1 - run.forks;
                twins.push(Running {
                    number: self.next_number,
                    answer,
                    sequence: twin,
                    ids: run.ids.clone(),
                    asked: run.asked.clone(),
                    outcomes: run.outcomes.clone(),
                    forks: 0,
                    reuse: Reuse::default(),
                    ..*run
                });
                self.next_number += 1;
                self.counts.forked += 1;
                self.counts.sequences += 1;
            }
        }
        self.running.append(&mut twins);
        Ok(())
    }

    /// Admits waiting prompts.
    fn admit(&mut self, budget: u64) -> anyhow::Result<()> {
        if budget == 0 || self.queue.is_empty() {
            return Ok(());
        }
        let admission = self.cache.admit(&mut self.queue, budget)?;
        for ((queued, _), sequence) in admission.admitted {
            let run = self.begin(queued, sequence)?;
            self.running.push(run);
        }
        for (position, waiting) in admission.waiting {
            let queued = &mut self.queue[position].0;
            queued.joined |= matches!(waiting, Waiting::Prefix { .. });
            queued.loaded_blocks = queued.loaded_blocks.max(blocks_of(&waiting));
        }
        match admission.refused.into_iter().next() {
            Some((_, error)) => Err(error).context("a prompt was refused"),
            None => Ok(()),
        }
    }

    /// An answer begins.
    fn begin(&mut self, queued: Queued, mut sequence: Sequence) -> anyhow::Result<Running> {
        let block_tokens = u64::from(self.cache.options().groups[0].shape.block_tokens());
        let cached = sequence.cached_tokens();
        let host = (sequence.onboarded_blocks() as u64 * block_tokens).min(cached);
        let below = (queued.loaded_blocks * block_tokens).min(host);
        let reuse =
            Reuse { device_tokens: cached - host, host_tokens: host - below, below_tokens: below };
        self.counts.sequences += 1;
        self.counts.reused += u64::from(cached > 0);
        self.counts.onboarded += u64::from(host > 0);
        self.counts.joined += u64::from(queued.joined);
        self.counts.loaded += u64::from(below > 0);
        if queued.forks > 0 && sequence.next() > 0 {
            // The last token of the prompt is each answer's own.
            let chunk = u64::from(sequence.next()).min(sequence.to_compute() - 1);
            self.cache.reserve(&mut sequence, chunk as u32)?.given()?;
        }
        let run = Running {
            number: self.next_number,
            job: queued.job,
            answer: queued.answer,
            asked: queued.asked.clone(),
            kv_end: sequence.resolved(),
            sequence,
            ids: queued.ids.clone(),
            outcomes: Default::default(),
            forks: queued.forks,
            drafts: 0,
            reuse,
            started: queued.started,
            first_token: queued.first_token,
        };
        self.next_number += 1;
        Ok(run)
    }
}
