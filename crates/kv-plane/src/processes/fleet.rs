//! The worker processes of a cache, as its manager's process sees them.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use cuda_driver::guard;
use kv_manager::{
    BudgetError, Budgeted, Checked, Completion, GroupId, Manager, ManagerOptions, Message, Outcome,
    WorkerId,
};
use kv_pool::Tier;
use kv_tier::codec::Fields;

use super::connection::Connection;
use super::error::{FrameError, WorkerError, WorkerFault};
use super::frame::{self, FRAME_BYTES_MAX, Frame, Kind};
use super::handshake::{Memory, in_writer, snapshot_bytes};
use super::member::{Deadline, FRAMES_MAX};
use super::replace::{Place, Replaced};
use crate::cache::manager;
use crate::growth::Shortage;
use crate::{
    BuildError, CloseError, CloseErrors, DemandError, KvCache, KvCacheOptions, OptionsError,
    StepError, Workers,
};

/// How long a wait for nothing but transfers takes.
const PAUSE: Duration = Duration::from_micros(200);

/// The workers of a [`KvCache`] whose devices are those of other processes, which [serve](super::serve).
///
/// # Ordering
/// What the engine sends along with a step ([`stage_with`](KvCache::stage_with)) is bytes for all workers alike; what each says of
/// a step that is complete is its [`result`](Self::result). A worker that fails is replaced inside the next call that waits for it:
/// [`begin_step`](KvCache::begin_step) or [`drain`](KvCache::drain). All sequences are lost then, which their next calls say
/// ([`SequenceError::Lost`](kv_manager::SequenceError::Lost)), and are admitted anew. Where no successor begins,
/// that call and all steps after it are refused.
pub struct Processes {
    pub(super) options: KvCacheOptions,
    pub(super) places: Vec<Place>,
    pub(super) connect: Box<dyn FnMut(WorkerId) -> io::Result<Connection> + Send>,
    pub(super) timeout: Duration,
    /// Whether completions are taken in only when a step needs them.
    lockstep: bool,
    /// Steps that were staged and that not all workers have completed, oldest first.
    pub(super) in_flight: VecDeque<u64>,
    pub(super) staged: u64,
    /// Of each group, device blocks that have memory on every device, and host blocks that are handed out.
    pub(super) memory: Vec<Memory>,
    /// The budget: most device blocks of the first group that are handed out.
    pub(super) budget: u64,
    /// The workers have less memory than the budget, which they were asked for.
    shortage: Option<Shortage>,
    /// Results of steps up to this one were there for the engine to look at.
    shown: u64,
    /// Steps up to this one are counted as void, or were not void.
    pub(super) judged: u64,
    pub(super) replaced: Vec<Replaced>,
    /// A worker that has failed and has no successor. The manager asks nothing of it any more, so whatever the others completed
    /// from then on would count as computed by all.
    pub(super) over: Option<WorkerId>,
}

impl fmt::Debug for Processes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Processes");
        shown.field("workers", &self.places.len()).field("in_flight", &self.in_flight);
        shown.field("replaced", &self.replaced.len()).finish_non_exhaustive()
    }
}

impl KvCache<Processes> {
    /// A cache whose plans these workers carry out, all alike. Waits until each has the memory that the options say, or as much
    /// as there is: blocks that all have are handed out.
    ///
    /// # Errors
    /// [`BuildError`]; the processes are ended.
    pub fn start(mut workers: Processes) -> Result<Self, BuildError> {
        let survivors = workers.begin()?;
        let count = workers.places.len() as u16;
        let of_manager = ManagerOptions { workers: count, ..workers.options.manager() };
        let mut manager = manager(&workers.options, of_manager)?;
        for survivors in &survivors {
            let worker = survivors.worker;
            let taken = manager.take_survivors(survivors);
            taken.map_err(|error| WorkerError { worker, fault: error.into() })?;
        }
        let shares = workers.options.shared.is_some();
        for ((id, of), memory) in workers.options.numbered().zip(&workers.memory) {
            let budgets = [
                (Tier::Primary, memory.device_blocks, of.device_blocks),
                (Tier::Secondary, memory.host_blocks, of.host_blocks),
            ];
            // Memory that groups share is all there.
            for (tier, ready, blocks) in budgets.into_iter().skip(shares.into()) {
                let set = manager.set_budget(id, tier, ready.min(blocks.into()));
                debug_assert!(blocks == 0 || set.is_ok(), "{set:?}");
            }
        }
        Ok(Self::joined(manager, workers))
    }
}

impl Processes {
    /// Starts the worker processes of a cache of `options`: `connect` starts each and connects to it, or connects to one that has
    /// been started, now and whenever one is to be [replaced](Replaced). The options' shape is that of all workers together or of
    /// one, which makes no difference here; each worker has options of its own, with the same blocks and tables.
    ///
    /// A worker that is waited for and makes no progress for `timeout` is given up: at the start, for each of the questions that it is
    /// [asked](Self::ask), and for its memory.
    ///
    /// # Errors
    /// [`BuildError`]; the processes are ended.
    pub fn start(
        options: KvCacheOptions,
        workers: u16,
        timeout: Duration,
        connect: impl FnMut(WorkerId) -> io::Result<Connection> + Send + 'static,
    ) -> Result<Self, BuildError> {
        options.check(workers.min(1).into())?;
        // Each process that takes another's place gets the tables in one frame.
        let (bytes, max) = (snapshot_bytes(&options), FRAME_BYTES_MAX);
        if guard!("replay.snapshots-fit-a-frame", bytes > max, else false) {
            return Err(OptionsError::Snapshot { bytes, max }.into());
        }
        let mut all = Self {
            memory: Memory::of(&options),
            options,
            places: Vec::new(),
            connect: Box::new(connect),
            timeout,
            lockstep: false,
            in_flight: VecDeque::new(),
            staged: 0,
            budget: 0,
            shortage: None,
            shown: 0,
            judged: 0,
            over: None,
            replaced: Vec::new(),
        };
        // All start at once.
        for worker in (0..workers).map(WorkerId) {
            let member = all.connect(worker, workers, false);
            let member = member.map_err(|fault| WorkerError { worker, fault })?;
            all.places.push(Place::new(member));
        }
        Ok(all)
    }

    /// Has completions taken in only as far as a step needs them, so that runs with simulated devices are all the same.
    #[must_use]
    pub fn in_lockstep(self) -> Self {
        Self { lockstep: true, ..self }
    }

    /// What a worker has said of a step that is complete: of each that has become so since the last
    /// [`begin_step`](KvCache::begin_step), or in it. `None` for others.
    #[must_use]
    pub fn result(&self, worker: WorkerId, step: u64) -> Option<&[u8]> {
        let member = &self.places.get(usize::from(worker.0))?.member;
        let found = member.results.iter().find(|(of, _)| *of == step);
        found.map(|(_, result)| &result[..])
    }

    /// The processes that others have taken the place of, oldest first.
    #[must_use]
    pub fn replaced(&self) -> &[Replaced] {
        &self.replaced
    }

    /// The system's number of a worker's process, if it was started [here](Connection::spawn).
    #[must_use]
    pub fn pid(&self, worker: WorkerId) -> Option<u32> {
        self.places.get(usize::from(worker.0))?.member.pid()
    }

    /// Device blocks of the first group that have memory on every device.
    #[must_use]
    pub fn mapped_blocks(&self) -> u64 {
        self.memory.first().map_or(0, |memory| memory.device_blocks)
    }

    /// Waits until all workers have completed `step`. A worker that fails is replaced, and the step does not
    /// count then.
    fn await_step(&mut self, manager: &mut Manager, step: u64) -> Result<(), WorkerError> {
        for worker in 0..self.places.len() {
            let mut deadline = Deadline::after(self.timeout);
            while let Some(&oldest) = self.places[worker].member.sent.front()
                && oldest <= step
            {
                let taken = self.places[worker].member.receive(&mut deadline);
                if let Err(fault) = taken.and_then(|frame| self.take(manager, worker, frame)) {
                    self.replace(manager, worker, fault)?;
                }
                if self.places[worker].member.sent.front() != Some(&oldest) {
                    deadline = Deadline::after(self.timeout);
                }
            }
        }
        self.forget_completed(manager);
        if self.in_flight.front().is_some_and(|&oldest| oldest <= step) {
            // No worker has anything more to say of it, so waiting again would not end.
            return Err(WorkerError {
                worker: WorkerId(0),
                fault: WorkerFault::NotComputed { step },
            });
        }
        Ok(())
    }

    /// Whether no worker is without a process.
    fn check_all_work(&self) -> Result<(), WorkerError> {
        let fault = WorkerFault::Ended(None);
        self.over.map_or(Ok(()), |worker| Err(WorkerError { worker, fault }))
    }

    fn await_all(&mut self, manager: &mut Manager) -> Result<(), WorkerError> {
        while let Some(&latest) = self.in_flight.back() {
            self.await_step(manager, latest)?;
        }
        Ok(())
    }

    /// Takes in what the workers have said, and what one says within `pause`.
    fn take_arrived(&mut self, manager: &mut Manager, pause: Duration) -> Result<(), WorkerError> {
        let mut wait = pause;
        for worker in 0..self.places.len() {
            // One that never stops talking holds nobody up.
            for _ in 0..FRAMES_MAX {
                let Some(taken) = self.places[worker].member.receive_within(wait) else { break };
                wait = Duration::ZERO;
                if let Err(fault) = taken.and_then(|frame| self.take(manager, worker, frame)) {
                    self.replace(manager, worker, fault)?;
                }
            }
            wait = Duration::ZERO;
        }
        self.forget_completed(manager);
        Ok(())
    }

    fn forget_completed(&mut self, manager: &Manager) {
        let completed = manager.completed_step();
        while self.in_flight.pop_front_if(|step| *step <= completed).is_some() {}
        self.judged = self.judged.max(completed);
    }

    fn take(
        &mut self,
        manager: &mut Manager,
        worker: usize,
        frame: Frame,
    ) -> Result<(), WorkerFault> {
        match frame.kind {
            Kind::Result => {
                let mut body = Fields::new(&frame.body);
                let step = body.u64().map_err(FrameError::from)?;
                if !self.is_next(worker, step)? {
                    return Ok(());
                }
                let results = &mut self.places[worker].member.results;
                let again = results.back().is_some_and(|(of, _)| *of == step);
                if guard!("replay.results-come-once", again, else false) {
                    return Err(frame.unexpected("the completion of the same step").into());
                }
                results.push_back((step, body.rest().to_vec()));
                Ok(())
            }
            Kind::Message => self.take_message(manager, worker, &frame.body),
            _ => Err(frame.unexpected("what came of a step").into()),
        }
    }

    /// Whether a step is the next one that a worker is to complete. One from before was known already, and changes nothing.
    fn is_next(&self, worker: usize, step: u64) -> Result<bool, WorkerFault> {
        let sent = &self.places[worker].member.sent;
        let expected = sent.front().copied().unwrap_or(self.staged + 1);
        let is_next = sent.front() == Some(&step);
        let is_beyond = step >= expected && !is_next;
        if guard!("replay.completes-only-sent-steps", is_beyond, else false) {
            return Err(WorkerFault::Step { worker: worker as u16, step, expected });
        }
        Ok(is_next)
    }

    fn take_message(
        &mut self,
        manager: &mut Manager,
        worker: usize,
        body: &[u8],
    ) -> Result<(), WorkerFault> {
        let message = Message::from_bytes(body).map_err(FrameError::from)?;
        let (WorkerId(named), found) = match &message {
            Message::Completion(completion) => (completion.worker, "a completion"),
            Message::Settled(settled) => (settled.worker, "a ticket"),
            Message::Dropped(dropped) => (dropped.worker, "dropped names"),
            Message::Gained(gained) => (gained.worker, "gained names"),
            Message::Plan(_) => (WorkerId(worker as u16), "a plan"),
            Message::Snapshot(_) => (WorkerId(worker as u16), "a snapshot"),
        };
        let is_other = usize::from(named) != worker;
        if guard!("replay.workers-speak-for-themselves", is_other, else false) {
            return Err(WorkerFault::Other { worker: named });
        }
        match message {
            Message::Completion(completion) => self.take_completion(manager, worker, completion),
            Message::Settled(settled) => Ok(manager.settle(&settled)?),
            Message::Dropped(dropped) => Ok(manager.dropped(&dropped)?),
            Message::Gained(gained) => Ok(manager.take_gained(&gained)?),
            // Not itself, which may have as many bytes as a frame.
            Message::Plan(_) | Message::Snapshot(_) => {
                let expected = "what came of a plan";
                Err(FrameError::Unexpected { found: found.into(), expected }.into())
            }
        }
    }

    fn take_completion(
        &mut self,
        manager: &mut Manager,
        worker: usize,
        completion: Completion,
    ) -> Result<(), WorkerFault> {
        let Completion { step, outcome, .. } = completion;
        let is_new = self.is_next(worker, step)?;
        let is_next = guard!("replay.old-completion-ignored", is_new, else true);
        let Place { member, failures, .. } = &mut self.places[worker];
        let there = member.results.back().is_some_and(|(of, _)| *of == step);
        if outcome != Outcome::Done || is_next && !there {
            return Err(WorkerFault::NotComputed { step });
        }
        // What is known already changes nothing.
        manager.complete(completion)?;
        if is_next {
            member.sent.pop_front();
            *failures = 0;
        }
        Ok(())
    }

    /// A worker's answer to an order. What it says of transfers before is taken in.
    fn answer_of(
        &mut self,
        manager: &mut Manager,
        worker: usize,
        kind: Kind,
        what: &'static str,
    ) -> Result<Frame, WorkerFault> {
        let mut deadline = Deadline::after(self.timeout);
        loop {
            let frame = self.places[worker].member.receive(&mut deadline)?;
            if frame.kind != Kind::Message {
                return Ok(frame.expected(kind, what)?);
            }
            self.take(manager, worker, frame)?;
        }
    }

    /// Has every worker map so many device blocks and no others. If `awaited`, as many count as all have memory
    /// for. A process that fails meanwhile is replaced, and the next step asks again.
    fn map(
        &mut self,
        manager: &mut Manager,
        blocks: u64,
        awaited: bool,
    ) -> Result<(), WorkerError> {
        let order = frame::of(Kind::Memory, |body| {
            in_writer(body, |out| {
                out.u64(blocks);
                out.u8(awaited.into());
            });
        });
        let order: Arc<[u8]> = order.into();
        self.places.iter().for_each(|place| place.member.send(Arc::clone(&order)));
        let mut mapped = blocks;
        for worker in 0..self.places.len() {
            if awaited {
                let answer = self.answer_of(manager, worker, Kind::Mapped, "memory of blocks");
                match answer.and_then(|frame| Ok(Memory::read(&mut Fields::new(&frame.body))?)) {
                    Ok(memory) => mapped = mapped.min(memory.device_blocks),
                    Err(fault) => {
                        mapped = mapped.min(self.mapped_blocks());
                        self.replace(manager, worker, fault)?;
                    }
                }
            }
        }
        self.memory.iter_mut().take(1).for_each(|memory| memory.device_blocks = mapped);
        Ok(())
    }

    /// Has the workers map and unmap memory of the first group as the budget says: memory beyond it that no plan
    /// uses is given back, and a larger budget is mapped before blocks are handed out.
    fn fit_memory(&mut self, manager: &mut Manager) -> Result<(), StepError> {
        if self.options.shared.is_some() {
            // Memory that groups share is all there from the start.
            return Ok(());
        }
        let (group, mapped) = (GroupId::default(), self.mapped_blocks());
        if self.budget < mapped {
            match manager.unmappable_from(group, Tier::Primary) {
                Ok(unused) if unused.max(self.budget) < mapped => {
                    self.map(manager, unused.max(self.budget), false)?;
                }
                Ok(_) => {}
                Err(error) => tracing::error!(%error, "the first group is not there"),
            }
        } else if self.budget > mapped && self.asks_again() {
            // What a worker says of steps is taken in first, so that its next answer is about memory.
            self.await_all(manager)?;
            self.map(manager, self.budget, true)?;
            let before = self.shortage.take().filter(|_| self.mapped_blocks() <= mapped);
            if self.mapped_blocks() < self.budget {
                self.shortage = Some(Shortage::after(before, None));
            }
            if let Err(error) = manager.set_budget(group, Tier::Primary, self.mapped_blocks()) {
                tracing::error!(%error, "the manager has fewer blocks than there is memory");
            }
        }
        Ok(())
    }
}

impl Processes {
    /// Whether the workers are asked for memory that they did not have when they were asked last: all steps in flight are waited
    /// for then.
    fn asks_again(&mut self) -> bool {
        let asks = self.shortage.as_mut().is_none_or(|shortage| shortage.is_over(None));
        guard!("replay.refused-memory-is-not-asked-for-in-each-step", asks, else true)
    }
}

impl Workers for Processes {
    type Work<'a> = &'a [u8];
    type Closed = Vec<Vec<u8>>;

    fn options(&self) -> &KvCacheOptions {
        &self.options
    }

    fn ready_blocks(&mut self) -> u64 {
        match self.options.shared {
            Some(_) => self.options.first().device_blocks.into(),
            None => self.mapped_blocks().min(self.budget),
        }
    }

    fn can_grow(&self) -> bool {
        // Memory comes between two steps.
        false
    }

    fn grow(&mut self, _blocks: u64) -> Result<u64, DemandError> {
        Ok(self.ready_blocks())
    }

    fn set_budget(
        &mut self,
        manager: &mut Manager,
        (group, tier): (GroupId, Tier),
        blocks: u64,
    ) -> Result<(u64, Budgeted), BudgetError> {
        let at = usize::from(group.0);
        let there = self.memory.get(at).copied().unwrap_or_default();
        let of = self.options.groups.get(at);
        let (ready, most) = match tier {
            Tier::Secondary => (there.host_blocks, of.map_or(0, |of| of.host_blocks)),
            _ => (there.device_blocks, of.map_or(0, |of| of.device_blocks)),
        };
        // The manager refuses more than there can be, and more blocks are handed out when all workers have mapped them.
        let told = if blocks > most.into() { blocks } else { blocks.min(ready) };
        let budgeted = manager.set_budget(group, tier, told)?;
        if (group.0, tier) == (0, Tier::Primary) {
            (self.budget, self.shortage) = (blocks, None);
        }
        Ok((told, budgeted))
    }

    fn check_step(&self, work: Option<&&[u8]>) -> Result<(), StepError> {
        guard!("replay.no-plan-without-all-workers", self.check_all_work()?);
        match work.map_or(0, |work| work.len()) as u64 {
            bytes if bytes > FRAME_BYTES_MAX => {
                Err(StepError::Work { bytes, max: FRAME_BYTES_MAX })
            }
            _ => Ok(()),
        }
    }

    fn carry_out(&mut self, plan: Checked<'_>, work: Option<&[u8]>) -> Result<(), StepError> {
        let mut bytes = Vec::new();
        frame::append(&mut bytes, Kind::Message, |body| plan.to_bytes(body));
        frame::append(&mut bytes, Kind::Work, |body| body.extend(work.unwrap_or_default()));
        let bytes: Arc<[u8]> = bytes.into();
        for place in &mut self.places {
            place.member.send(Arc::clone(&bytes));
            place.member.sent.push_back(plan.step);
        }
        self.in_flight.push_back(plan.step);
        self.staged = plan.step;
        Ok(())
    }

    fn finish(&mut self, _outcome: Outcome) -> Result<(), StepError> {
        // What was sent is computed, whatever becomes of the step here.
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn complete(&mut self, manager: &mut Manager, most: usize) -> Result<(), StepError> {
        guard!("replay.nothing-without-all-workers", self.check_all_work()?);
        let transfers = |manager: &Manager| manager.lower_stats().open_tickets > 0;
        if !self.lockstep || transfers(manager) {
            // With nothing in flight, only the workers' tiers have something to do.
            let idle = most == 0 && self.in_flight.is_empty() && transfers(manager);
            self.take_arrived(manager, if idle { PAUSE } else { Duration::ZERO })?;
        }
        while self.in_flight.len() > most
            && let Some(&oldest) = self.in_flight.front()
        {
            self.await_step(manager, oldest)?;
        }
        Ok(())
    }

    fn tend(&mut self, manager: &mut Manager) -> Result<(), StepError> {
        let shown = std::mem::replace(&mut self.shown, manager.completed_step());
        for place in &mut self.places {
            while place.member.results.pop_front_if(|(step, _)| *step <= shown).is_some() {}
        }
        self.fit_memory(manager)
    }

    /// Has all processes release everything and end; what each says at the end.
    fn close(mut self) -> Result<Vec<Vec<u8>>, CloseErrors> {
        let close: Arc<[u8]> = frame::of(Kind::Close, |_| ()).into();
        self.places.iter().for_each(|place| place.member.send(Arc::clone(&close)));
        let deadline = Deadline::after(self.timeout);
        let (mut accounts, mut errors) = (Vec::new(), Vec::new());
        for (place, worker) in self.places.iter_mut().zip(0..) {
            let mut deadline = deadline;
            let account = loop {
                match place.member.receive(&mut deadline) {
                    // Of steps and transfers, nobody is interested any more.
                    Ok(frame) if matches!(frame.kind, Kind::Message | Kind::Result) => {}
                    Ok(frame) => {
                        break frame.expected(Kind::Closed, "an account").map_err(Into::into);
                    }
                    Err(fault) => break Err(fault),
                }
            };
            match account {
                Ok(frame) => {
                    place.member.leave(deadline);
                    accounts.push(frame.body);
                }
                Err(fault) => {
                    errors.push(CloseError::from(WorkerError { worker: WorkerId(worker), fault }))
                }
            }
        }
        if errors.is_empty() { Ok(accounts) } else { Err(errors.into()) }
    }
}
