//! One block: its threads, and the choice of the thread that runs next.

use super::super::op::{Op, Program, Register, special};
use super::WARP;
use super::barrier::{BARRIERS, Phase};
use super::conflicts::KnownStretches;
use super::launch::{LaunchShape, Limits, Notes};
use super::observation::{Ran, Trouble};
use super::spaces::{Accessor, Spaces};
use super::thread::{Lane, Stop};
use crate::{FindingKind, KernelSite};

/// Number of instructions of a thread before another thread runs. A thread may wait in a loop for
/// another thread's write.
const TURN: u64 = 1 << 14;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ThreadState {
    Ready,
    AtBarrier { id: u8 },
    AtWarp { index: u32, mask: u32 },
    Done,
}

/// One thread of the block, without its registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Thread {
    pub(super) state: ThreadState,
    pub(super) next: usize,
    /// Its stretch, or 0 before it starts.
    pub(super) stretch: u32,
    ran: u64,
}

pub(super) struct ThreadBlock<'a, 'm> {
    pub(super) program: &'a Program,
    pub(super) spaces: &'a mut Spaces<'m>,
    pub(super) threads: Vec<Thread>,
    registers: Vec<u64>,
    pub(super) barriers: [Phase; BARRIERS],
    /// How often all threads have met at a barrier.
    pub(super) meetings: u32,
    /// For each thread, what it knows of the other threads since then.
    pub(super) known: Vec<Option<KnownStretches>>,
    shape: &'a LaunchShape,
    index: [u32; 3],
    /// Number of its first thread in the launch.
    first_thread: u64,
}

impl<'a, 'm> ThreadBlock<'a, 'm> {
    pub(super) fn new(
        program: &'a Program,
        shape: &'a LaunchShape,
        spaces: &'a mut Spaces<'m>,
    ) -> Self {
        Self {
            program,
            spaces,
            threads: Vec::new(),
            registers: vec![0; program.registers as usize * shape.block_threads()],
            barriers: Default::default(),
            meetings: 0,
            known: Vec::new(),
            shape,
            index: [0; 3],
            first_thread: 0,
        }
    }

    /// Resets it to block `number` of the launch, before any thread has run.
    pub(super) fn renew(&mut self, number: u64) {
        let [x, y, _] = self.shape.grid.map(u64::from);
        self.index = [number % x, number / x % y, number / x / y].map(|i| i as u32);
        let count = self.shape.block_threads();
        self.first_thread = number * count as u64;
        self.threads.clear();
        let thread = Thread { state: ThreadState::Ready, next: 0, stretch: 0, ran: 0 };
        self.threads.resize(count, thread);
        self.barriers = Default::default();
        self.meetings = 0;
        self.known.clear();
        self.known.resize(count, None);
        self.spaces.renew();
        self.fill_registers();
    }

    fn fill_registers(&mut self) {
        let size = self.program.registers as usize;
        let mut row = vec![0; size];
        row[special::TRUE as usize] = 1;
        for axis in 0..3 {
            row[special::NTID as usize + axis] = self.shape.block[axis].into();
            row[special::CTAID as usize + axis] = self.index[axis].into();
            row[special::NCTAID as usize + axis] = self.shape.grid[axis].into();
        }
        row[special::NWARPID as usize] = self.threads.len().div_ceil(WARP) as u64;
        row[special::NSMID as usize] = 1;
        row[special::GRIDID as usize] = 1;
        row[special::WARP_SIZE as usize] = WARP as u64;
        row[special::DYNAMIC_SHARED as usize] = self.shape.shared_bytes.into();
        row[special::TOTAL_SHARED as usize] =
            u64::from(self.shape.shared_bytes) + u64::from(self.program.shared_bytes);
        let constants = size - self.program.constants.len();
        row[constants..].copy_from_slice(&self.program.constants);
        for thread in 0..self.threads.len() {
            let [x, y, z] = self.coordinates(thread);
            let tid = special::TID as usize;
            row[tid..tid + 3].copy_from_slice(&[x.into(), y.into(), z.into()]);
            let lane = thread % WARP;
            row[special::LANEID as usize] = lane as u64;
            row[special::WARPID as usize] = (thread / WARP) as u64;
            let equal = 1u32 << lane;
            let below = equal - 1;
            let masks = [equal, below | equal, below, !below, !(below | equal)];
            let lanemask = special::LANEMASK as usize;
            row[lanemask..lanemask + 5].copy_from_slice(&masks.map(u64::from));
            self.registers[thread * size..][..size].copy_from_slice(&row);
        }
    }

    pub(super) fn register(&self, thread: usize, register: Register) -> u64 {
        self.registers[thread * self.program.registers as usize + register as usize]
    }

    pub(super) fn set_register(&mut self, thread: usize, register: Register, value: u64) {
        self.registers[thread * self.program.registers as usize + register as usize] = value;
    }

    /// Index of a thread in x, y and z.
    pub(super) fn coordinates(&self, thread: usize) -> [u32; 3] {
        self.shape.coordinates(thread as u64)
    }

    /// Line of the step that a thread has reached.
    pub(super) fn line_of(&self, thread: usize) -> u32 {
        self.program.lines[self.threads[thread].next.saturating_sub(1)]
    }

    fn site(&self, thread: usize) -> KernelSite {
        KernelSite {
            line: self.line_of(thread),
            thread: self.coordinates(thread),
            block: self.index,
        }
    }

    /// Runs the block to its end and records its mistakes. Returns false if a mistake ends the
    /// launch.
    pub(super) fn run(&mut self, limits: &Limits, notes: &mut Notes) -> bool {
        match self.run_all(limits, notes) {
            Ok(()) => true,
            Err((thread, trouble)) => {
                notes.end((self.site(thread), *trouble));
                false
            }
        }
    }

    fn run_all(&mut self, limits: &Limits, notes: &mut Notes) -> Result<(), (usize, Box<Trouble>)> {
        let warps = self.threads.len().div_ceil(WARP);
        loop {
            let mut moved = false;
            for warp in 0..warps {
                moved |= self.run_warp(warp, limits, notes)?;
            }
            if self.threads.iter().all(|thread| thread.state == ThreadState::Done) {
                return Ok(());
            }
            if !moved {
                return Err(self.deadlock());
            }
        }
    }

    /// Runs every ready thread of a warp, repeatedly while they unblock each other.
    fn run_warp(
        &mut self,
        warp: usize,
        limits: &Limits,
        notes: &mut Notes,
    ) -> Result<bool, (usize, Box<Trouble>)> {
        let threads = warp * WARP..self.threads.len().min((warp + 1) * WARP);
        let mut moved = false;
        loop {
            for thread in threads.clone() {
                if self.threads[thread].state == ThreadState::Ready {
                    self.run_thread(thread, limits, notes).map_err(|trouble| (thread, trouble))?;
                    moved = true;
                }
            }
            if !self.resolve_warp(warp, notes)? {
                return Ok(moved);
            }
        }
    }

    /// Runs a thread until it waits, ends or has used up its turn.
    fn run_thread(&mut self, thread: usize, limits: &Limits, notes: &mut Notes) -> Ran<()> {
        if self.threads[thread].stretch == 0 {
            // A launch with more threads than a thread number can hold is not checked for
            // conflicts.
            let number = u32::try_from(self.first_thread + thread as u64);
            let stretches = &mut self.spaces.stretches;
            let meetings = self.meetings;
            let stretch = number.map_or(0, |number| stretches.begin(number, meetings));
            self.threads[thread].stretch = stretch;
        }
        let known = self.known[thread].clone();
        self.spaces.stretches.enter(self.threads[thread].stretch, known);
        let by = Accessor { thread, stretch: self.threads[thread].stretch };
        let mut left = TURN;
        while self.threads[thread].state == ThreadState::Ready && left > 0 {
            let size = self.program.registers as usize;
            let mut lane = Lane {
                program: self.program,
                registers: &mut self.registers[thread * size..][..size],
                spaces: self.spaces,
                by,
                clock: notes.steps,
                next: self.threads[thread].next,
                ran: 0,
            };
            let stop = lane.run(left);
            let (next, ran) = (lane.next, lane.ran);
            left -= ran;
            notes.steps += ran;
            self.threads[thread].next = next;
            self.threads[thread].ran += ran;
            self.note_remarks(thread, notes);
            match stop? {
                Stop::Turn => {}
                Stop::Exit => self.threads[thread].state = ThreadState::Done,
                Stop::Special => {
                    self.special(thread)?;
                    self.note_remarks(thread, notes);
                    if self.threads[thread].stretch != by.stretch {
                        break;
                    }
                }
            }
        }
        if self.threads[thread].ran > limits.thread_steps || notes.steps > limits.launch_steps {
            let detail = format!(
                "has run {} instructions, of {} in the launch, and has not ended",
                self.threads[thread].ran, notes.steps
            );
            return Err(Trouble::new(FindingKind::Endless, detail));
        }
        Ok(())
    }

    /// Executes the step before the next. It concerns more than one thread.
    fn special(&mut self, thread: usize) -> Ran<()> {
        match self.program.steps[self.threads[thread].next - 1].op {
            Op::Barrier(op) => self.reach(thread, op),
            Op::Warp { index } => {
                let mask = self.program.warp_ops[index as usize].mask;
                let mask = self.register(thread, mask) as u32;
                self.threads[thread].state = ThreadState::AtWarp { index, mask };
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn note_remarks(&mut self, thread: usize, notes: &mut Notes) {
        if self.spaces.remarks.is_empty() {
            return;
        }
        let step = self.threads[thread].next - 1;
        for mut remark in std::mem::take(&mut self.spaces.remarks) {
            if notes.is_new(step, remark.kind) {
                remark.detail = self.shape.name_threads(&remark.detail);
                notes.seen.push((self.site(thread), remark));
            }
        }
    }
}
