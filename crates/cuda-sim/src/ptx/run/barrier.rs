//! Barriers of a block.
//!
//! A barrier counts arriving threads. When the expected number has arrived, the waiting ones
//! continue and the count starts again at zero. Threads that arrive afterwards belong to the next
//! phase.

use cuda_driver::guard;

use super::super::op::BarrierOp;
use super::WARP;
use super::block::{ThreadBlock, ThreadState};
use super::meeting::Came;
use super::observation::{Ran, Trouble};
use crate::FindingKind;

pub(super) const BARRIERS: usize = 16;

/// The threads that have arrived in the current phase of a barrier.
#[derive(Debug, Default)]
pub(super) struct Phase {
    /// Number of threads that complete the phase; 0 before the first arrives.
    expected: usize,
    /// Number of arrived threads. A warp with fewer than 32 threads counts as a full warp.
    count: usize,
    came: Vec<Arrival>,
}

/// One thread at a barrier.
#[derive(Debug)]
struct Arrival {
    came: Came,
    /// The step after the barrier instruction.
    next: usize,
    aligned: bool,
    waits: bool,
}

impl ThreadBlock<'_, '_> {
    /// A thread arrives at a barrier, and may complete it.
    pub(super) fn reach(&mut self, thread: usize, op: BarrierOp) -> Ran<()> {
        let id = self.register(thread, op.id) as u32 as usize;
        let refuse = |detail: String| Err(Trouble::new(FindingKind::Barrier, detail));
        if id >= BARRIERS {
            return refuse(format!("there is no barrier {id}"));
        }
        let all = self.threads.len().next_multiple_of(WARP);
        let expected = match op.threads {
            Some(register) => {
                let count = self.register(thread, register) as u32 as usize;
                if count == 0 || !count.is_multiple_of(WARP) || count > all {
                    let all = self.threads.len();
                    return refuse(format!("barrier {id} of {count} threads in a block of {all}"));
                }
                count
            }
            None => all,
        };
        if ![0, expected].contains(&self.barriers[id].expected) {
            return refuse(format!("barrier {id} is used with different numbers of threads"));
        }
        let next = self.threads[thread].next;
        let arrival =
            Arrival { came: self.come(thread), next, aligned: op.aligned, waits: !op.arrive };
        let first_of_rest = self.threads.len() / WARP * WARP;
        let phase = &mut self.barriers[id];
        phase.expected = expected;
        // In a partial warp, the first thread also counts for the missing ones.
        let missing = if thread == first_of_rest { all - self.threads.len() } else { 0 };
        phase.count += 1 + missing;
        phase.came.push(arrival);
        if !op.arrive {
            self.threads[thread].state = ThreadState::AtBarrier { id: id as u8 };
        }
        if phase.count < expected {
            return Ok(());
        }
        let phase = guard!(
            "sim.barrier-anew",
            std::mem::take(phase),
            else Phase { came: std::mem::take(&mut phase.came), ..*phase }
        );
        guard!("sim.aligned-barrier", self.check_alignment(id, &phase)?);
        self.complete_barrier(phase);
        Ok(())
    }

    fn complete_barrier(&mut self, phase: Phase) {
        let waiting = || phase.came.iter().filter(|arrival| arrival.waits);
        for arrival in waiting() {
            self.threads[arrival.came.thread].state = ThreadState::Ready;
        }
        // A waiting thread arrives once, so these are all threads.
        if guard!("sim.meeting-of-all", waiting().count() == self.threads.len(), else true) {
            return self.meet_all();
        }
        let after: Vec<usize> = waiting().map(|arrival| arrival.came.thread).collect();
        let came: Vec<Came> = phase.came.into_iter().map(|arrival| arrival.came).collect();
        self.meet(&came, after.into_iter());
    }

    /// Checks an aligned barrier: all threads of a warp must arrive through the same instruction.
    fn check_alignment(&self, id: usize, phase: &Phase) -> Ran<()> {
        let place = |arrival: &Arrival| (arrival.came.thread / WARP, arrival.next);
        let mut places: Vec<_> = phase.came.iter().filter(|a| a.aligned).map(place).collect();
        places.sort_unstable();
        for same in places.chunk_by(|a, b| a == b) {
            let (warp, next) = same[0];
            let size = (self.threads.len() - warp * WARP).min(WARP);
            if !same.len().is_multiple_of(size) {
                let line = self.program.lines[next - 1];
                let count = same.len();
                let detail = format!(
                    "barrier {id} on line {line} is reached by {count} of the {size} threads of a \
                     warp, which must reach it together"
                );
                return Err(Trouble::new(FindingKind::Barrier, detail));
            }
        }
        Ok(())
    }

    /// Describes a deadlock: the first waiting thread, and the reason.
    pub(super) fn deadlock(&self) -> (usize, Box<Trouble>) {
        let waits = |state: ThreadState| {
            matches!(state, ThreadState::AtBarrier { .. } | ThreadState::AtWarp { .. })
        };
        let first = self.threads.iter().position(|thread| waits(thread.state)).unwrap_or(0);
        let here = self.threads[first];
        let (what, missing) = match here.state {
            ThreadState::AtWarp { mask, .. } => {
                let base = first / WARP * WARP;
                let missing = (0..WARP)
                    .filter(|lane| mask >> lane & 1 == 1)
                    .map(|lane| base + lane)
                    .find(|&other| self.threads.get(other).is_some_and(|t| !self.meets(here, *t)));
                ("the lanes of its mask".to_owned(), missing)
            }
            ThreadState::AtBarrier { id } => {
                let Phase { count, expected, .. } = self.barriers[usize::from(id)];
                let all = self.threads.len();
                let (came, expected) = (count.min(all), expected.min(all));
                let missing = self.threads.iter().position(|thread| thread.state != here.state);
                (format!("barrier {id}, which {came} of {expected} threads reached"), missing)
            }
            _ => ("something".to_owned(), None),
        };
        let missing = missing.map_or(String::new(), |missing| {
            let [x, y, z] = self.coordinates(missing);
            match self.threads[missing].state {
                ThreadState::Done => format!(": thread ({x}, {y}, {z}) has ended"),
                _ => {
                    let line = self.line_of(missing);
                    format!(": thread ({x}, {y}, {z}) waits on line {line}")
                }
            }
        });
        let detail = format!("waits for ever for {what}{missing}");
        (first, Trouble::new(FindingKind::Barrier, detail))
    }
}
