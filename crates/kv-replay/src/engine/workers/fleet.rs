//! The manager of the KV cache, with worker processes that carry its plans out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cuda_driver::guard;
use kv_kernels::KvShape;
use kv_plane::manager::{GroupId, Manager, Message, Outcome, WorkerId};
use kv_pool::Tier;

use super::drill::{KillWorker, StopWorker};
use super::error::{FrameError, WorkerFault};
use super::frame::{self, Frame, Kind};
use super::member::{Deadline, Member, WorkerCommand};
use super::setup::{Account, Memory, Open, Opened, Ready, Share};
use crate::engine::RunError;
use crate::engine::batch::Batch;
use crate::engine::cache::Cache as _;
use crate::engine::groups::Reads;
use crate::report::{RestartReport, StopReport, WorkersReport};

/// Processes that may fail in one worker's place without having completed a step.
const FAILURES_MAX: u32 = 3;

/// A manager, and one process for each of its workers.
#[derive(Debug)]
pub(super) struct Fleet {
    pub(super) manager: Manager,
    pub(super) workers: Vec<Place>,
    pub(super) command: WorkerCommand,
    pub(super) timeout: Duration,
    /// Whether completions are taken in as they arrive. Otherwise no more are taken in than a step needs, so
    /// that every run is the same.
    pub(super) eager: bool,
    /// Steps that were staged and that not all workers have completed, oldest first.
    pub(super) in_flight: VecDeque<u64>,
    pub(super) staged: u64,
    /// Of each group, device blocks that have memory on every device, and host blocks that are handed out.
    pub(super) memory: Vec<Memory>,
    pub(super) reads: Vec<Reads>,
    /// The budget: most device blocks of the first group that are handed out.
    pub(super) budget: u64,
    /// See [`Cache::take_loss`].
    pub(super) loss: Option<u64>,
    /// Steps up to this one are counted as void, or were not void.
    pub(super) judged: u64,
    pub(super) stops: Vec<StopWorker>,
    pub(super) kills: Vec<KillWorker>,
    pub(super) report: WorkersReport,
}

/// The place of a worker, which one process after another may take.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) member: Member,
    pub(super) open: Open,
    pub(super) share: Share,
    pub(super) shapes: Vec<(KvShape, Reads)>,
    /// Processes that have failed here since a step was completed.
    pub(super) failures: u32,
}

pub(super) fn open(
    member: &mut Member,
    open: &Open,
    deadline: Deadline,
) -> Result<Opened, WorkerFault> {
    member.send(frame::of_value(Kind::Open, open).into());
    Ok(member.expect(Kind::Opened, "an open device", deadline)?.value()?)
}

/// Waits until a process has memory for its share of the model; how much for each of the groups, and what its tiers have.
pub(super) fn ready(
    member: &mut Member,
    groups: usize,
    deadline: Deadline,
) -> Result<Ready, WorkerFault> {
    let what = "a share that is ready";
    let ready: Ready = member.expect(Kind::Ready, what, deadline)?.value()?;
    if ready.memory.len() != groups {
        return Err(FrameError::Groups { found: ready.memory.len(), expected: groups }.into());
    }
    Ok(ready)
}

impl Fleet {
    /// Waits until all workers have completed `step`. A worker that fails is replaced, and the step does not
    /// count then.
    pub(super) fn await_step(&mut self, step: u64) -> Result<(), RunError> {
        for worker in 0..self.workers.len() {
            let mut deadline = Deadline::after(self.timeout);
            while let Some(&oldest) = self.workers[worker].member.sent.front()
                && oldest.0 <= step
            {
                let member = &mut self.workers[worker].member;
                let stopped = member.is_stopped();
                let taken = member.receive(deadline);
                if stopped && !self.workers[worker].member.is_stopped() {
                    self.note_go_on(worker);
                }
                if let Err(fault) = taken.and_then(|frame| self.take(worker, &frame)) {
                    self.replace(worker, fault)?;
                }
                if self.workers[worker].member.sent.front() != Some(&oldest) {
                    deadline = Deadline::after(self.timeout);
                }
            }
        }
        self.forget_completed();
        if self.in_flight.front().is_some_and(|&oldest| oldest <= step) {
            // No worker has anything more to say of it, so waiting again would not end.
            let fault = Box::new(WorkerFault::NotComputed { step });
            return Err(RunError::Worker { worker: 0, source: fault });
        }
        Ok(())
    }

    pub(super) fn take_arrived(&mut self) -> Result<(), RunError> {
        for worker in 0..self.workers.len() {
            while let Some(taken) = self.workers[worker].member.receive_arrived() {
                if let Err(fault) = taken.and_then(|frame| self.take(worker, &frame)) {
                    self.replace(worker, fault)?;
                }
            }
        }
        self.forget_completed();
        Ok(())
    }

    fn forget_completed(&mut self) {
        let completed = self.manager.completed_step();
        while self.in_flight.pop_front_if(|step| *step <= completed).is_some() {}
        self.judged = self.judged.max(completed);
    }

    fn take(&mut self, worker: usize, frame: &Frame) -> Result<(), WorkerFault> {
        let Place { member, failures, .. } = &mut self.workers[worker];
        match frame.kind {
            Kind::Checksums => {
                let mut body = &frame.body[..];
                let step = frame::take::<u64>(&mut body)?;
                let sums = self.reads.iter().map(|_| frame::take(&mut body));
                let sums = sums.collect::<Result<_, _>>()?;
                member.checksums.push_back((step.first().copied().unwrap_or(0), sums));
                Ok(())
            }
            Kind::Message => {
                let message = Message::from_bytes(&frame.body).map_err(FrameError::from)?;
                let of = |named: WorkerId| match usize::from(named.0) == worker {
                    true => Ok(()),
                    false => Err(WorkerFault::Step { worker: named.0, step: 0, expected: 0 }),
                };
                let completion = match message {
                    Message::Completion(completion) => completion,
                    Message::Settled(settled) => {
                        of(settled.worker)?;
                        return Ok(self.manager.settle(&settled)?);
                    }
                    Message::Dropped(dropped) => {
                        of(dropped.worker)?;
                        return Ok(self.manager.dropped(&dropped)?);
                    }
                    message => {
                        let found = format!("{message:?}");
                        let expected = "a completion";
                        return Err(FrameError::Unexpected { found, expected }.into());
                    }
                };
                let (named, step) = (completion.worker.0, completion.step);
                let (next, reads) = member.sent.front().copied().unwrap_or((u64::MAX, false));
                let known = guard!("replay.old-completion-ignored", step < next, else false);
                let beyond = guard!("replay.completes-only-sent-steps", step > next, else false);
                if usize::from(named) != worker || beyond {
                    return Err(WorkerFault::Step { worker: named, step, expected: next });
                }
                let there = member.checksums.back().is_some_and(|(of, _)| *of == step);
                if completion.outcome != Outcome::Done || reads && !known && !there {
                    return Err(WorkerFault::NotComputed { step });
                }
                // What is known already changes nothing.
                self.manager.complete(completion)?;
                if !known {
                    member.sent.pop_front();
                    *failures = 0;
                }
                Ok(())
            }
            kind => {
                let found = format!("{kind:?}");
                Err(FrameError::Unexpected { found, expected: "what came of a step" }.into())
            }
        }
    }

    /// Puts a new process in the place of a worker that has failed. All that was computed is lost, since the
    /// worker held a share of it.
    fn replace(&mut self, worker: usize, fault: WorkerFault) -> Result<(), RunError> {
        let id = worker_id(worker);
        let completed = self.manager.completed_step();
        let void = self.in_flight.iter().filter(|&&step| step > completed.max(self.judged));
        self.report.steps_voided += void.count() as u64;
        self.judged = self.judged.max(self.staged);
        let loss = self.loss.map_or(completed, |before| before.min(completed));
        guard!("replay.lost-requests-again", self.loss = Some(loss));
        let failed = |source| RunError::Worker { worker: id.0, source: Box::new(source) };
        let inner = |source: kv_plane::manager::CompletionError| failed(source.into());
        guard!("replay.lost-worker-told", self.manager.lose_worker(id).map_err(inner)?);
        // Its blocks are not handed out before it has ended.
        let place = &mut self.workers[worker];
        let status = place.member.fence(Deadline::after(self.timeout)).map_err(failed)?;
        let mut fault = fault;
        if let WorkerFault::Ended(ended) = &mut fault {
            *ended = status;
        }
        guard!("replay.worker-fenced", self.manager.fence_worker(id).map_err(inner)?);
        let reason = fault.reason();
        let member = loop {
            let place = &mut self.workers[worker];
            place.failures += 1;
            if place.failures > FAILURES_MAX {
                return Err(failed(fault));
            }
            match self.start(worker) {
                Ok(member) => break member,
                Err(next) => fault = next,
            }
        };
        self.manager.join_worker(id).map_err(inner)?;
        let mut bytes = Vec::new();
        let snapshot = self.manager.snapshot();
        frame::append(&mut bytes, Kind::Message, |body| snapshot.to_bytes(body));
        guard!("replay.new-worker-snapshot", member.send(bytes.into()));
        self.workers[worker].member = member;
        let step = self.staged;
        self.report.restarts.push(RestartReport { worker: id.0.into(), step, reason });
        Ok(())
    }

    fn start(&self, worker: usize) -> Result<Member, WorkerFault> {
        let Place { open: device, share, .. } = &self.workers[worker];
        let mut member = Member::start(&self.command)?;
        let deadline = Deadline::after(self.timeout);
        open(&mut member, device, deadline)?;
        member.send(frame::of_value(Kind::Share, share).into());
        let Ready { memory, .. } = ready(&mut member, self.memory.len(), deadline)?;
        for (own, all) in memory.iter().zip(&self.memory) {
            for (tier, blocks, expected) in [
                ("device", own.device_blocks, all.device_blocks),
                ("host", own.host_blocks, all.host_blocks),
            ] {
                if blocks < expected {
                    return Err(WorkerFault::Memory { tier, blocks, expected });
                }
            }
        }
        Ok(member)
    }

    /// Sends the workers the plan that was staged last, and what the engine computes in its step.
    pub(super) fn send(&mut self, step: u64, batch: &Batch, read: bool) -> Result<(), RunError> {
        let mut bytes = Vec::new();
        let plan = self.manager.last_plan();
        frame::append(&mut bytes, Kind::Message, |body| plan.to_bytes(body));
        frame::append(&mut bytes, Kind::Work, |body| {
            frame::put(body, &[step, u64::from(read)]);
            batch.put(body);
        });
        let bytes: Arc<[u8]> = bytes.into();
        for drill in take_due(&mut self.stops, step, |drill| drill.step) {
            let place = self.workers.get_mut(usize::from(drill.worker));
            let Some(place) = place else { continue };
            let unstopped = |source| RunError::Worker { worker: drill.worker, source };
            let deadline = Deadline::after(self.timeout);
            place.member.stop(drill.wait, deadline).map_err(Box::new).map_err(unstopped)?;
            let worker = drill.worker.into();
            self.report.stops.push(StopReport { worker, step, ..StopReport::default() });
        }
        let kills = take_due(&mut self.kills, step, |drill| drill.step);
        for drill in &kills {
            // It is killed with the plan unread: otherwise it could complete the step before it ends.
            let place = self.workers.get_mut(usize::from(drill.worker));
            let Some(place) = place else { continue };
            let unstopped = |source| RunError::Worker { worker: drill.worker, source };
            let deadline = Deadline::after(self.timeout);
            place.member.stop(Duration::MAX, deadline).map_err(Box::new).map_err(unstopped)?;
        }
        for place in &mut self.workers {
            place.member.send(Arc::clone(&bytes));
            place.member.sent.push_back((step, read));
        }
        for drill in kills {
            if let Some(place) = self.workers.get_mut(usize::from(drill.worker)) {
                place.member.kill();
            }
        }
        self.in_flight.push_back(step);
        self.staged = step;
        Ok(())
    }

    /// Device blocks of the first group that have memory on every device.
    pub(super) fn mapped(&self) -> u64 {
        self.memory.first().map_or(0, |memory| memory.device_blocks)
    }

    /// Has the workers map and unmap memory of the first group as the budget says: memory beyond it that no plan
    /// uses is given back, and a larger budget is mapped before blocks are handed out.
    pub(super) fn fit_memory(&mut self) -> Result<(), RunError> {
        if !self.manager.granules().is_empty() {
            // Memory that groups share is all there from the start.
            return Ok(());
        }
        let (group, mapped) = (GroupId::default(), self.mapped());
        if self.budget < mapped {
            let unused = self.manager.unmappable_from(group, Tier::Primary)?;
            return match unused.max(self.budget) {
                from if from < mapped => self.map(from, false),
                _ => Ok(()),
            };
        }
        if self.budget > mapped {
            // What a worker says of steps is taken in first, so that its next answer is about memory.
            self.drain()?;
            self.map(self.budget, true)?;
            self.manager.set_budget(group, Tier::Primary, self.mapped())?;
        }
        Ok(())
    }

    /// Has every worker map so many device blocks and no others. If `awaited`, as many count as all have memory
    /// for. A process that fails meanwhile is replaced, and the next step asks again.
    fn map(&mut self, blocks: u64, awaited: bool) -> Result<(), RunError> {
        let mut bytes = Vec::new();
        frame::append(&mut bytes, Kind::Memory, |body| frame::put(body, &[blocks, awaited.into()]));
        let bytes: Arc<[u8]> = bytes.into();
        self.workers.iter().for_each(|place| place.member.send(Arc::clone(&bytes)));
        let mut mapped = blocks;
        for worker in 0..self.workers.len() {
            if awaited {
                let deadline = Deadline::after(self.timeout);
                let answer = self.answer_of(worker, Kind::Mapped, "memory of blocks", deadline);
                match answer.and_then(|frame| Ok(frame.value::<Memory>()?)) {
                    Ok(memory) => mapped = mapped.min(memory.device_blocks),
                    Err(fault) => {
                        mapped = mapped.min(self.mapped());
                        self.replace(worker, fault)?;
                    }
                }
            }
        }
        self.memory.iter_mut().take(1).for_each(|memory| memory.device_blocks = mapped);
        self.workers.iter_mut().for_each(|place| place.share.mapped_blocks = mapped);
        Ok(())
    }

    /// A worker's answer to an order. What it says of transfers before is taken in.
    fn answer_of(
        &mut self,
        worker: usize,
        kind: Kind,
        what: &'static str,
        deadline: Deadline,
    ) -> Result<Frame, WorkerFault> {
        loop {
            let frame = self.workers[worker].member.receive(deadline)?;
            if frame.kind == kind {
                return Ok(frame);
            }
            if frame.kind != Kind::Message {
                let found = format!("{:?}", frame.kind);
                return Err(FrameError::Unexpected { found, expected: what }.into());
            }
            self.take(worker, &frame)?;
        }
    }

    /// Notes how far the manager has come while a worker was stopped.
    fn note_go_on(&mut self, worker: usize) {
        let completed = self.manager.completed_step();
        let stop = self.report.stops.iter_mut().rfind(|stop| stop.worker == worker as u64);
        if let Some(stop) = stop {
            (stop.staged, stop.completed) = (self.staged, completed);
        }
    }

    /// Ends all processes in an orderly way; what they have done.
    pub(super) fn close(mut self) -> Result<(Vec<Account>, WorkersReport), RunError> {
        let close: Arc<[u8]> = frame::of_value(Kind::Close, &()).into();
        self.workers.iter().for_each(|place| place.member.send(Arc::clone(&close)));
        let deadline = Deadline::after(self.timeout);
        let mut accounts = Vec::new();
        for worker in 0..self.workers.len() {
            let failed =
                |source| RunError::Worker { worker: worker_id(worker).0, source: Box::new(source) };
            let closed = self.answer_of(worker, Kind::Closed, "an account", deadline);
            let account = closed.and_then(|frame| Ok(frame.value()?));
            accounts.push(account.map_err(failed)?);
        }
        Ok((accounts, self.report))
    }

    pub(super) fn unused_drill(&self) -> Option<String> {
        let stop = self.stops.first().map(StopWorker::to_string);
        stop.or_else(|| self.kills.first().map(KillWorker::to_string))
    }
}

fn worker_id(worker: usize) -> WorkerId {
    // There are no more workers than such numbers.
    WorkerId(worker as u16)
}

fn take_due<T: Copy>(drills: &mut Vec<T>, step: u64, of: impl Fn(&T) -> u64) -> Vec<T> {
    let due = drills.iter().copied().filter(|drill| of(drill) <= step).collect();
    drills.retain(|drill| of(drill) > step);
    due
}

pub(super) fn sum(accounts: Vec<Account>) -> Account {
    let mut all = Account::default();
    for account in accounts {
        for (name, count) in account.driver_calls {
            *all.driver_calls.entry(name).or_default() += count;
        }
        for (way, (batches, blocks)) in all.transports.iter_mut().zip(account.transports) {
            *way = (way.0 + batches, way.1 + blocks);
        }
        all.copied_bytes += account.copied_bytes;
        if let Some(pinned) = account.pinned_after_warmup {
            *all.pinned_after_warmup.get_or_insert(0) += pinned;
        }
        all.findings = all.findings.or(account.findings);
        if let Some(disk) = account.disk {
            all.disk.get_or_insert_default().add(disk);
        }
    }
    all
}
