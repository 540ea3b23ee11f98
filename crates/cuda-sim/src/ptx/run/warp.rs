//! Instructions that the lanes of a warp execute together.

use cuda_driver::guard;

use super::super::op::Exchange;
use super::WARP;
use super::block::{Thread, ThreadBlock, ThreadState};
use super::launch::Notes;
use super::meeting::Came;
use super::observation::Trouble;
use crate::FindingKind;

/// The value that a lane reads from a lane that provides none.
const NOTHING: u64 = 0xA7A7_A7A7;

impl ThreadBlock<'_, '_> {
    /// Executes the exchanges that all named lanes have reached. Returns whether there was one.
    pub(super) fn resolve_warp(
        &mut self,
        warp: usize,
        notes: &mut Notes,
    ) -> Result<bool, (usize, Box<Trouble>)> {
        let first = warp * WARP;
        let count = (self.threads.len() - first).min(WARP);
        let living =
            (0..count).filter(|lane| self.threads[first + lane].state != ThreadState::Done);
        let living = living.fold(0u32, |living, lane| living | 1 << lane);
        let mut done = 0u32;
        let mut resolved = false;
        for lane in 0..count {
            let here = self.threads[first + lane];
            let ThreadState::AtWarp { mask, .. } = here.state else { continue };
            if done >> lane & 1 == 1 {
                continue;
            }
            if mask >> lane & 1 == 0 {
                let detail = format!("lane {lane} is not in the mask {mask:#x} that it gives");
                return Err((first + lane, Trouble::new(FindingKind::Barrier, detail)));
            }
            // Lanes that have ended are not waited for.
            let named = guard!("sim.ended-lanes", mask & living, else mask);
            let mut lanes = (0..count).filter(|other| named >> other & 1 == 1);
            if lanes.all(|other| self.meets(here, self.threads[first + other])) {
                self.exchange(first, (named, mask), notes);
                done |= named;
                resolved = true;
            }
        }
        Ok(resolved)
    }

    /// Whether two threads of a warp are at instructions of the same kind with the same mask. They
    /// need not be at the same instruction.
    pub(super) fn meets(&self, one: Thread, other: Thread) -> bool {
        let kind = |index: u32| self.program.warp_ops[index as usize].kind;
        match (one.state, other.state) {
            (
                ThreadState::AtWarp { index: a, mask },
                ThreadState::AtWarp { index: b, mask: same },
            ) => guard!("sim.lanes-meet", kind(a) == kind(b), else a == b) && mask == same,
            _ => false,
        }
    }

    /// Executes instructions of one kind for the lanes `named`, which have reached them, and lets
    /// the lanes continue.
    fn exchange(&mut self, first: usize, (named, mask): (u32, u32), notes: &mut Notes) {
        let lanes = || (0..WARP).filter(move |lane| named >> lane & 1 == 1);
        let mut values = [0; WARP];
        let mut ops = [None; WARP];
        for lane in lanes() {
            if let ThreadState::AtWarp { index, .. } = self.threads[first + lane].state {
                let op = self.program.warp_ops[index as usize];
                values[lane] = self.register(first + lane, op.a);
                ops[lane] = Some(op);
            }
            self.threads[first + lane].state = ThreadState::Ready;
        }
        let holds = lanes().filter(|&lane| values[lane] & 1 == 1);
        let ballot = holds.fold(0u32, |ballot, lane| ballot | 1 << lane);
        for lane in lanes() {
            let Some(op) = ops[lane] else { continue };
            let (result, valid) = match op.exchange {
                Exchange::All => ((ballot == named).into(), false),
                Exchange::Any => ((ballot != 0).into(), false),
                Exchange::Uniform => ((ballot == named || ballot == 0).into(), false),
                Exchange::Ballot => (ballot.into(), false),
                Exchange::MatchAny => {
                    let same = lanes().filter(|&other| values[other] == values[lane]);
                    (same.fold(0u64, |same, other| same | 1 << other), false)
                }
                Exchange::Reduce(f) => {
                    (lanes().map(|other| values[other]).reduce(f).unwrap_or(0), false)
                }
                Exchange::Barrier => return self.meet_lanes(first, named),
                shuffle => {
                    let b = self.register(first + lane, op.b);
                    let c = self.register(first + lane, op.c);
                    let (from, valid) = source_lane(shuffle, lane as u32, b as u32, c as u32);
                    if guard!("sim.lanes-outside", named >> from & 1 == 1, else true) {
                        (values[from as usize], valid)
                    } else {
                        self.remark_nothing(first, from, mask);
                        (NOTHING, valid)
                    }
                }
            };
            self.set_register(first + lane, op.d, result);
            self.set_register(first + lane, op.valid, valid.into());
            self.note_remarks(first + lane, notes);
        }
    }

    /// Orders the lanes of an exchange after each other.
    fn meet_lanes(&mut self, first: usize, named: u32) {
        let lanes = || (0..WARP).filter(|lane| named >> lane & 1 == 1).map(|lane| first + lane);
        let came: Vec<Came> = lanes().map(|thread| self.come(thread)).collect();
        if came.len() == self.threads.len() {
            self.meet_all();
        } else {
            self.meet(&came, lanes());
        }
    }

    /// Reports that a lane reads a lane outside the exchange.
    #[cold]
    fn remark_nothing(&mut self, first: usize, from: u32, mask: u32) {
        let why = match self.threads.get(first + from as usize) {
            None => "which has no thread".to_owned(),
            Some(_) if mask >> from & 1 == 0 => format!("which is not in its mask {mask:#x}"),
            Some(_) => "which has ended".to_owned(),
        };
        let detail = format!("reads lane {from}, {why}");
        self.spaces.remarks.push(*Trouble::new(FindingKind::Uninitialised, detail));
    }
}

/// The lane that `shfl` reads, and whether it is inside the segment.
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
