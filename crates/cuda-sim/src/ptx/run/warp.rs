//! Instructions that the lanes of a warp execute together.

use super::super::op::{Exchange, WarpOp};
use super::WARP;
use super::block::{Block, State};
use super::observation::{ObservationKind, Trouble};

impl Block<'_, '_> {
    /// Executes what all lanes that it names have reached; whether there was any.
    pub(super) fn resolve_warp(&mut self, warp: usize) -> Result<bool, (usize, Box<Trouble>)> {
        let first = warp * WARP;
        let count = (self.threads.len() - first).min(WARP);
        let existing = if count == WARP { u32::MAX } else { (1 << count) - 1 };
        let mut done = 0u32;
        let mut resolved = false;
        for lane in 0..count {
            let State::AtWarp { index, mask } = self.threads[first + lane].state else { continue };
            if done >> lane & 1 == 1 {
                continue;
            }
            if mask >> lane & 1 == 0 {
                let detail = format!("lane {lane} is not in the mask {mask:#x} that it gives");
                return Err((first + lane, Trouble::new(ObservationKind::Barrier, detail)));
            }
            let named = mask & existing;
            let next = self.threads[first + lane].next;
            let is_here = |other: usize| {
                let thread = &self.threads[first + other];
                thread.next == next && thread.state == State::AtWarp { index, mask }
            };
            let lanes = || (0..count).filter(|other| named >> other & 1 == 1);
            if let Some(gone) =
                lanes().find(|other| self.threads[first + other].state == State::Done)
            {
                let detail =
                    format!("waits for lane {gone}, which its mask {mask:#x} names and has ended");
                return Err((first + lane, Trouble::new(ObservationKind::Barrier, detail)));
            }
            if lanes().all(is_here) {
                self.exchange(first, named, self.program.warp_ops[index as usize]);
                done |= named;
                resolved = true;
            }
        }
        Ok(resolved)
    }

    /// Executes one instruction for the lanes of `named`, and lets them go on.
    fn exchange(&mut self, first: usize, named: u32, op: WarpOp) {
        let lanes = (0..WARP).filter(|lane| named >> lane & 1 == 1);
        let mut values = [0; WARP];
        for lane in lanes.clone() {
            values[lane] = self.register(first + lane, op.a);
        }
        let holds = lanes.clone().filter(|&lane| values[lane] & 1 == 1);
        let ballot = holds.fold(0u32, |ballot, lane| ballot | 1 << lane);
        let newest = lanes.clone().map(|lane| self.threads[first + lane].warp_epoch).max();
        for lane in lanes {
            let (result, valid) = match op.exchange {
                Exchange::All => ((ballot == named).into(), false),
                Exchange::Any => ((ballot != 0).into(), false),
                Exchange::Uniform => ((ballot == named || ballot == 0).into(), false),
                Exchange::Ballot => (ballot.into(), false),
                Exchange::MatchAny => {
                    let same = (0..WARP)
                        .filter(|&other| named >> other & 1 == 1 && values[other] == values[lane])
                        .fold(0u64, |same, other| same | 1 << other);
                    (same, false)
                }
                Exchange::Reduce(f) => {
                    let all = (0..WARP).filter(|&other| named >> other & 1 == 1);
                    (all.map(|other| values[other]).reduce(f).unwrap_or(0), false)
                }
                Exchange::Barrier => {
                    self.threads[first + lane].warp_epoch = newest.unwrap_or(0) + 1;
                    self.threads[first + lane].stretch = 0;
                    (0, false)
                }
                shuffle => {
                    let b = self.register(first + lane, op.b);
                    let c = self.register(first + lane, op.c);
                    let (from, valid) = source_lane(shuffle, lane as u32, b as u32, c as u32);
                    (values[from as usize], valid)
                }
            };
            self.set_register(first + lane, op.d, result);
            self.set_register(first + lane, op.valid, valid.into());
            self.threads[first + lane].state = State::Ready;
        }
    }
}

/// The lane that `shfl` reads, and whether it lies in the segment.
fn source_lane(exchange: Exchange, lane: u32, b: u32, c: u32) -> (u32, bool) {
    let (b, clamp, segment) = (b as i32 & 31, c as i32 & 31, c as i32 >> 8 & 31);
    let lane = lane as i32;
    let most = (lane & segment) | (clamp & !segment);
    let least = lane & segment;
    let (from, valid) = match exchange {
        Exchange::Up => (lane - b, lane - b >= most),
        Exchange::Down => (lane + b, lane + b <= most),
        Exchange::Xor => (lane ^ b, (lane ^ b) <= most),
        _ => {
            let from = least | (b & !segment);
            (from, from <= most)
        }
    };
    if valid { (from as u32 & 31, true) } else { (lane as u32, false) }
}
