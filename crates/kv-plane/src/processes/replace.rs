//! The start of a worker's process, and what happens when it fails.

use std::time::Duration;

use cuda_driver::guard;
use cuda_driver::messages::Chain;
use kv_manager::{Manager, Survivors, WorkerId};

use super::error::{WorkerError, WorkerFault};
use super::fleet::Processes;
use super::frame::{self, Kind};
use super::handshake::{Begin, Memory, Open, Ready};
use super::member::{Deadline, Member};

/// Processes that may fail in one worker's place without having completed a step.
const FAILURES_MAX: u32 = 3;

/// The place of a worker, which one process after another may take.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) member: Member,
    /// What the engine has asked before the worker began.
    asked: Vec<Vec<u8>>,
    /// Processes that have failed here since a step was completed.
    pub(super) failures: u32,
}

/// A process that failed, and that another has taken the place of.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Replaced {
    /// The worker.
    pub worker: WorkerId,
    /// The latest step that was complete: later ones were computed for nobody, and sequences from before are lost.
    pub completed: u64,
    /// The latest step that was staged.
    pub staged: u64,
    /// Steps that do not count, and that no failure before had made void.
    pub voided: u64,
    /// Why it was given up.
    pub reason: String,
}

impl Place {
    pub(super) fn new(member: Member) -> Self {
        Self { member, asked: Vec::new(), failures: 0 }
    }
}

impl Processes {
    /// Asks a worker that has not [begun](super::Orders::begin) for something that the engine wants to know, or tells it
    /// something; its [answer](super::Orders::answer). A process that takes the place of this one is asked the same again.
    ///
    /// # Errors
    /// [`WorkerError`], and for a worker that there is not.
    pub fn ask(&mut self, worker: WorkerId, question: &[u8]) -> Result<Vec<u8>, WorkerError> {
        let failed = |fault| WorkerError { worker, fault };
        let Some(place) = self.places.get_mut(usize::from(worker.0)) else {
            return Err(failed(WorkerFault::Ended(None)));
        };
        let answer = ask(&mut place.member, question, self.timeout);
        let answer = answer.map_err(|fault| failed(fault.at_start()))?;
        place.asked.push(question.to_vec());
        Ok(answer)
    }

    pub(super) fn connect(
        &mut self,
        worker: WorkerId,
        workers: u16,
        replaces: bool,
    ) -> Result<Member, WorkerFault> {
        let member = Member::new((self.connect)(worker).map_err(WorkerFault::Start)?)?;
        let open = Open { worker: worker.0, workers, replaces };
        member.send(frame::of(Kind::Open, |body| open.put(body)));
        Ok(member)
    }

    /// Has all workers begin, and waits until each has its memory; what their tiers have had since before.
    pub(super) fn begin(&mut self) -> Result<Vec<Survivors>, WorkerError> {
        let blocks = self.options.first().device_blocks.into();
        let begin = Begin::new(&self.options, blocks);
        for place in &self.places {
            place.member.send(frame::of(Kind::Begin, |body| begin.put(body)));
        }
        let (mut memory, mut survivors) = (Memory::of(&self.options), Vec::new());
        for (place, id) in self.places.iter_mut().zip(0..) {
            let worker = WorkerId(id);
            let ready = ready(&mut place.member, memory.len(), self.timeout);
            let ready = ready.map_err(|fault| WorkerError { worker, fault: fault.at_start() })?;
            memory.iter_mut().zip(&ready.memory).for_each(|(all, own)| *all = all.meet(*own));
            survivors.extend(ready.survivors(worker));
        }
        self.memory = memory;
        self.budget = self.mapped_blocks();
        Ok(survivors)
    }

    /// Puts a new process in the place of a worker that has failed. All that was computed is lost, since the
    /// worker held a share of it.
    pub(super) fn replace(
        &mut self,
        manager: &mut Manager,
        worker: usize,
        fault: WorkerFault,
    ) -> Result<(), WorkerError> {
        // There are no more workers than such numbers.
        let id = WorkerId(worker as u16);
        // Until it is: what starts processes is the engine's, and may panic.
        guard!("replay.panics-replace-nobody", self.over = Some(id));
        let replaced = self.replace_worker(manager, id, fault);
        self.over = replaced.is_err().then_some(id);
        replaced
    }

    fn replace_worker(
        &mut self,
        manager: &mut Manager,
        id: WorkerId,
        fault: WorkerFault,
    ) -> Result<(), WorkerError> {
        let worker = usize::from(id.0);
        let completed = manager.completed_step();
        let void = self.in_flight.iter().filter(|&&step| step > completed.max(self.judged));
        let voided = void.count() as u64;
        self.judged = self.judged.max(self.staged);
        let failed = |fault| WorkerError { worker: id, fault };
        let inner = |error: kv_manager::CompletionError| failed(error.into());
        guard!("replay.lost-worker-told", manager.lose_worker(id).map_err(inner)?);
        // Its blocks are not handed out before it has ended.
        let place = &mut self.places[worker];
        let status = place.member.fence(Deadline::after(self.timeout)).map_err(failed)?;
        let mut fault = fault.with_status(status);
        guard!("replay.worker-fenced", manager.fence_worker(id).map_err(inner)?);
        let reason = Chain(&fault).to_string();
        let member = loop {
            let place = &mut self.places[worker];
            place.failures += 1;
            if place.failures > FAILURES_MAX {
                return Err(failed(fault));
            }
            match self.restart(id) {
                Ok(member) => break member,
                // It holds memory, and maybe files, that another one would need.
                Err(next @ WorkerFault::NotFenced { .. }) => return Err(failed(next)),
                Err(next) => fault = next,
            }
        };
        manager.join_worker(id).map_err(inner)?;
        let snapshot = manager.snapshot();
        let snapshot = frame::of(Kind::Message, |body| snapshot.to_bytes(body));
        guard!("replay.new-worker-snapshot", member.send(snapshot));
        self.places[worker].member = member;
        let staged = self.staged;
        self.replaced.push(Replaced { worker: id, completed, staged, voided, reason });
        Ok(())
    }

    /// A process with as much memory as the one before had.
    fn restart(&mut self, worker: WorkerId) -> Result<Member, WorkerFault> {
        let mut member = self.connect(worker, self.places.len() as u16, true)?;
        let Err(fault) = self.begin_again(worker, &mut member) else { return Ok(member) };
        let status = guard!(
            "replay.failed-successors-are-fenced",
            member.fence(Deadline::after(self.timeout))?,
            else None
        );
        Err(fault.with_status(status))
    }

    /// Has a new process begin with what the one before was asked and has had.
    fn begin_again(&self, worker: WorkerId, member: &mut Member) -> Result<(), WorkerFault> {
        for question in &self.places[usize::from(worker.0)].asked {
            ask(member, question, self.timeout)?;
        }
        let begin = Begin::new(&self.options, self.mapped_blocks());
        member.send(frame::of(Kind::Begin, |body| begin.put(body)));
        let ready = ready(member, self.memory.len(), self.timeout)?;
        for (own, all) in ready.memory.iter().zip(&self.memory) {
            for (tier, blocks, expected) in [
                ("device", own.device_blocks, all.device_blocks),
                ("host", own.host_blocks, all.host_blocks),
            ] {
                if blocks < expected {
                    return Err(WorkerFault::Memory { tier, blocks, expected });
                }
            }
        }
        Ok(())
    }
}

fn ask(member: &mut Member, question: &[u8], timeout: Duration) -> Result<Vec<u8>, WorkerFault> {
    member.send(frame::of(Kind::Ask, |body| body.extend_from_slice(question)));
    Ok(member.expect(Kind::Answer, "an answer", timeout)?.body)
}

/// Waits until a process has its memory: how much for each of the groups, and what its tiers have.
fn ready(member: &mut Member, groups: usize, timeout: Duration) -> Result<Ready, WorkerFault> {
    let frame = member.expect(Kind::Ready, "a worker that is ready", timeout)?;
    Ok(Ready::take(&frame.body, groups)?)
}
