//! Barriers of a block.

use super::super::op::BarrierOp;
use super::WARP;
use super::block::{Block, State};
use super::observation::{ObservationKind, Trouble};

/// Barriers that a block has.
pub(super) const BARRIERS: usize = 16;

impl Block<'_, '_> {
    /// Brings a thread to a barrier.
    pub(super) fn reach(&mut self, thread: usize, op: BarrierOp) -> Result<(), Box<Trouble>> {
        let id = self.register(thread, op.id) as usize;
        let refuse = |detail: String| Err(Trouble::new(ObservationKind::Barrier, detail));
        if id >= BARRIERS {
            return refuse(format!("there is no barrier {id}"));
        }
        let all = self.threads.len();
        let expected = match op.threads {
            Some(register) => {
                let count = self.register(thread, register) as usize;
                if count == 0 || !count.is_multiple_of(WARP) || count > all.next_multiple_of(WARP) {
                    return refuse(format!("barrier {id} of {count} threads in a block of {all}"));
                }
                count.min(all)
            }
            None => all,
        };
        if op.arrive {
            self.arrived[id] += 1;
        } else {
            let aligned = op.aligned;
            self.threads[thread].state = State::AtBarrier { id: id as u8, expected, aligned };
        }
        Ok(())
    }

    /// Lets those go on whose barrier is complete; whether there were any.
    pub(super) fn release_barriers(&mut self) -> Result<bool, (usize, Box<Trouble>)> {
        let mut released = false;
        for id in 0..BARRIERS {
            let waiting: Vec<(usize, usize)> = self.waiting(id as u8).collect();
            let Some(&(first, expected)) = waiting.first() else { continue };
            if let Some(&(other, _)) = waiting.iter().find(|(_, count)| *count != expected) {
                let detail = format!("barrier {id} is given different numbers of threads");
                return Err((other, Trouble::new(ObservationKind::Barrier, detail)));
            }
            if waiting.len() + self.arrived[id] < expected {
                continue;
            }
            self.check_alignment(id, first, &waiting)?;
            self.arrived[id] = 0;
            let epochs = waiting.iter().map(|&(thread, _)| self.threads[thread].block_epoch);
            let epoch = epochs.max().unwrap_or(0) + 1;
            for (thread, _) in waiting {
                let thread = &mut self.threads[thread];
                thread.state = State::Ready;
                thread.block_epoch = epoch;
                thread.warp_epoch = 0;
                thread.stretch = 0;
            }
            released = true;
        }
        Ok(released)
    }

    fn waiting(&self, wanted: u8) -> impl Iterator<Item = (usize, usize)> {
        self.threads.iter().enumerate().filter_map(move |(index, thread)| match thread.state {
            State::AtBarrier { id, expected, .. } if id == wanted => Some((index, expected)),
            _ => None,
        })
    }

    /// Threads of one warp must be at the same aligned barrier instruction.
    fn check_alignment(
        &self,
        id: usize,
        _first: usize,
        waiting: &[(usize, usize)],
    ) -> Result<(), (usize, Box<Trouble>)> {
        for pair in waiting.windows(2) {
            let (a, b) = (pair[0].0, pair[1].0);
            let is_aligned =
                matches!(self.threads[a].state, State::AtBarrier { aligned: true, .. });
            if a / WARP == b / WARP && is_aligned && self.threads[a].next != self.threads[b].next {
                let line = self.line_of(a);
                let detail = format!(
                    "barrier {id} is reached by threads of one warp on different lines: \
                     another is on line {line}"
                );
                return Err((b, Trouble::new(ObservationKind::Barrier, detail)));
            }
        }
        Ok(())
    }

    /// Why nothing goes on any more, told of the first thread that waits.
    pub(super) fn deadlock(&self) -> (usize, Box<Trouble>) {
        let waits = |state: State| matches!(state, State::AtBarrier { .. } | State::AtWarp { .. });
        let first = self.threads.iter().position(|thread| waits(thread.state)).unwrap_or(0);
        let here = self.threads[first];
        let (what, missing) = match here.state {
            State::AtWarp { mask, .. } => {
                let base = first / WARP * WARP;
                let missing = (0..WARP)
                    .filter(|lane| mask >> lane & 1 == 1)
                    .map(|lane| base + lane)
                    .find(|&other| self.threads.get(other).is_some_and(|t| t.next != here.next));
                ("the lanes of its mask".to_owned(), missing)
            }
            State::AtBarrier { id, expected, .. } => {
                let came = self.waiting(id).count() + self.arrived[usize::from(id)];
                let missing = self.threads.iter().position(|thread| {
                    !matches!(thread.state, State::AtBarrier { id: other, .. } if other == id)
                });
                (format!("barrier {id}, which {came} of {expected} threads reached"), missing)
            }
            _ => ("something".to_owned(), None),
        };
        let missing = missing.map_or(String::new(), |missing| {
            let [x, y, z] = self.coordinates(missing);
            match self.threads[missing].state {
                State::Done => format!(": thread ({x}, {y}, {z}) has ended"),
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
