//! Barriers of a block.
//!
//! A barrier counts the threads that come to it. When as many have come as it was told, those of them
//! that wait go on, and it begins anew from none: who comes next is of its next phase.

use super::super::op::BarrierOp;
use super::WARP;
use super::block::{ThreadBlock, ThreadState};
use super::meeting::Came;
use super::observation::{ObservationKind, Ran, Trouble};

/// Barriers that a block has.
pub(super) const BARRIERS: usize = 16;

/// The threads that have come to a barrier since it was complete.
#[derive(Debug, Default)]
pub(super) struct Phase {
    /// Threads that complete it; 0 while none has come.
    expected: usize,
    /// Threads that have come, where a warp that is not full counts as one that is.
    count: usize,
    came: Vec<Arrival>,
}

/// One thread at a barrier.
#[derive(Debug)]
struct Arrival {
    came: Came,
    /// The step after the barrier's.
    next: usize,
    aligned: bool,
    waits: bool,
}

impl ThreadBlock<'_, '_> {
    /// Brings a thread to a barrier, which may complete it.
    pub(super) fn reach(&mut self, thread: usize, op: BarrierOp) -> Ran<()> {
        let id = self.register(thread, op.id) as u32 as usize;
        let refuse = |detail: String| Err(Trouble::new(ObservationKind::Barrier, detail));
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
            return refuse(format!("barrier {id} is given different numbers of threads"));
        }
        let next = self.threads[thread].next;
        let arrival =
            Arrival { came: self.come(thread), next, aligned: op.aligned, waits: !op.arrive };
        let first_of_rest = self.threads.len() / WARP * WARP;
        let phase = &mut self.barriers[id];
        phase.expected = expected;
        // The first thread of a warp that is not full stands for those that are missing too.
        let missing = if thread == first_of_rest { all - self.threads.len() } else { 0 };
        phase.count += 1 + missing;
        phase.came.push(arrival);
        if !op.arrive {
            self.threads[thread].state = ThreadState::AtBarrier { id: id as u8 };
        }
        if phase.count < expected {
            return Ok(());
        }
        let phase = std::mem::take(phase);
        self.check_alignment(id, &phase)?;
        self.complete_barrier(phase);
        Ok(())
    }

    fn complete_barrier(&mut self, phase: Phase) {
        let waiting = || phase.came.iter().filter(|arrival| arrival.waits);
        for arrival in waiting() {
            self.threads[arrival.came.thread].state = ThreadState::Ready;
        }
        // Who waits comes once, so these are all.
        if waiting().count() == self.threads.len() {
            return self.meet_all();
        }
        let after: Vec<usize> = waiting().map(|arrival| arrival.came.thread).collect();
        let came: Vec<Came> = phase.came.into_iter().map(|arrival| arrival.came).collect();
        self.meet(&came, after.into_iter());
    }

    /// All threads of a warp must come to an aligned barrier by the same instruction.
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
                return Err(Trouble::new(ObservationKind::Barrier, detail));
            }
        }
        Ok(())
    }

    /// Why nothing goes on any more, told of the first thread that waits.
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
        (first, Trouble::new(ObservationKind::Barrier, detail))
    }
}
