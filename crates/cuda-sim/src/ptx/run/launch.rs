//! A launch: all its blocks, one after another.

use std::collections::HashSet;

use cuda_driver::{KernelArgs, LaunchConfig};

use super::super::op::{AccessOrder, Exchange, Op, Program, PtxStep, WarpOp};
use super::block::ThreadBlock;
use super::conflicts::{Conflicts, Stretches};
use super::non_coherent::NonCoherent;
use super::observation::Observation;
use super::shared::SharedBytes;
use super::spaces::Spaces;
use crate::FindingKind;
use crate::memory::View;

/// Maximum number of observations of one launch.
const SEEN_MAX: usize = 64;

/// Number of instructions after which a launch counts as endless.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Instructions of one thread.
    pub(crate) thread_steps: u64,
    /// Instructions of all threads.
    pub(crate) launch_steps: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { thread_steps: 1 << 22, launch_steps: 1 << 33 }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchShape {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    /// Dynamic shared memory, in bytes.
    pub(super) shared_bytes: u32,
}

impl LaunchShape {
    pub(crate) fn new(config: &LaunchConfig) -> Self {
        Self { grid: config.grid, block: config.block, shared_bytes: config.shared_bytes }
    }

    pub(super) fn block_threads(&self) -> usize {
        self.block.iter().map(|&size| size as usize).product()
    }

    /// Index of the thread with this number in its block.
    pub(super) fn coordinates(&self, thread: u64) -> [u32; 3] {
        let [x, y, _] = self.block.map(u64::from);
        [thread % x, thread / x % y, thread / x / y].map(|index| index as u32)
    }

    /// Replaces `{number}`, a thread of the launch, by the indices of the thread and its block.
    pub(super) fn name_threads(&self, text: &str) -> String {
        let parts = text.split_once('{').and_then(|(before, rest)| {
            let (number, after) = rest.split_once('}')?;
            Some((before, number.parse::<u64>().ok()?, after))
        });
        let Some((before, number, after)) = parts else { return text.to_owned() };
        let threads = self.block_threads() as u64;
        let [x, y, z] = self.coordinates(number % threads);
        let [width, height, _] = self.grid.map(u64::from);
        let block = number / threads;
        let (i, j, k) = (block % width, block / width % height, block / width / height);
        format!("{before}({x}, {y}, {z}) of block ({i}, {j}, {k}){after}")
    }
}

/// Observations made while a launch runs.
#[derive(Debug, Default)]
pub(super) struct Notes {
    pub(super) steps: u64,
    pub(super) seen: Vec<Observation>,
    end: Option<Observation>,
    known: HashSet<(usize, FindingKind)>,
}

impl Notes {
    /// Whether this is the first observation of this kind at this step.
    pub(super) fn is_new(&mut self, step: usize, kind: FindingKind) -> bool {
        self.seen.len() < SEEN_MAX && self.known.insert((step, kind))
    }

    pub(super) fn end(&mut self, observation: Observation) {
        self.end = Some(observation);
    }
}

#[derive(Debug)]
pub(crate) struct Outcome {
    /// Number of instructions run, over all threads.
    pub(crate) steps: u64,
    /// The mistakes that did not end the launch, each line once.
    pub(crate) seen: Vec<Observation>,
    /// The mistake that ended the launch.
    pub(crate) end: Option<Observation>,
}

impl Program {
    fn loads_non_coherently(&self) -> bool {
        let is_such = |step: &PtxStep| matches!(step.op, Op::Load { access, .. } if access.order == AccessOrder::NonCoherent);
        self.steps.iter().any(is_such)
    }

    /// Whether a part of a block's threads can meet without the rest.
    fn parts_meet(&self) -> bool {
        let is_of_lanes = |op: &WarpOp| matches!(op.exchange, Exchange::Barrier);
        let is_of_part = |step: &PtxStep| matches!(step.op, Op::Barrier(barrier) if barrier.threads.is_some() || barrier.arrive);
        self.warp_ops.iter().any(is_of_lanes) || self.steps.iter().any(is_of_part)
    }
}

/// Runs all blocks of a launch. Its geometry and arguments passed [`Program::check`].
pub(crate) fn run(
    program: &Program,
    config: &LaunchConfig,
    args: &KernelArgs,
    view: View<'_>,
    variables: &mut [u8],
    limits: &Limits,
) -> Outcome {
    let shape = LaunchShape::new(config);
    let threads = shape.block_threads();
    let local_bytes = program.local_bytes as usize;
    let mut spaces = Spaces {
        view,
        shared: SharedBytes::new(program.shared_bytes.saturating_add(config.shared_bytes)),
        local: vec![0; local_bytes * threads],
        local_bytes,
        parameters: program.parameter_block(args),
        variables,
        stretches: Stretches::new(threads as u32, program.parts_meet()),
        device_conflicts: Conflicts::new(),
        shared_conflicts: Conflicts::new(),
        non_coherent: program.loads_non_coherently().then(NonCoherent::default),
        remarks: Vec::new(),
    };
    let mut notes = Notes::default();
    let mut block = ThreadBlock::new(program, &shape, &mut spaces);
    let blocks: u64 = shape.grid.iter().map(|&size| u64::from(size)).product();
    for number in 0..blocks {
        block.renew(number);
        if !block.run(limits, &mut notes) {
            break;
        }
    }
    Outcome { steps: notes.steps, seen: notes.seen, end: notes.end }
}
