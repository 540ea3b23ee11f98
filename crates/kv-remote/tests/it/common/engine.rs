//! An engine whose host memory a node serves, and a worker that carries out its plans as late as a test says.

use std::collections::VecDeque;

use kv_manager::{Completion, Manager, ManagerOptions, Outcome, Request, Sequence, StepPlan};
use kv_pool::PoolConfig;

use super::block;
use super::worker::{BLOCK_BYTES, bytes_of};

use crate::prelude::*;

/// Tokens of a block.
const BLOCK: u32 = 4;

/// Host memory, each block with the bytes of its number.
#[derive(Debug)]
pub(crate) struct Host(Vec<AtomicU64>);

impl Host {
    fn set(&self, block: BlockId, number: u64) {
        self.0[block.index()].store(number, Ordering::Relaxed);
    }

    pub(crate) fn get(&self, block: BlockId) -> u64 {
        self.0[block.index()].load(Ordering::Relaxed)
    }
}

impl HostBlocks for Host {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        let bytes = bytes_of(self.get(block));
        let Some(from) = bytes.get(offset..offset + into.len()) else { return false };
        into.copy_from_slice(from);
        true
    }

    fn write(&self, _: BlockId, _: usize, _: &[u8]) -> bool {
        unreachable!("a reader writes nothing")
    }
}

/// A manager, and a worker that carries out its plans as late as the test says.
pub(crate) struct Engine {
    pub(crate) manager: Manager,
    device: Vec<u64>,
    pub(crate) host: Arc<Host>,
    /// Plans that are not carried out, each with the contents that its step writes.
    pub(crate) flight: VecDeque<(StepPlan, Vec<(BlockId, u64)>)>,
}

impl Engine {
    pub(crate) fn new(device: u64, host: u64) -> Self {
        let pool = PoolConfig { secondary_blocks: host, ..PoolConfig::primary_only(device) };
        let manager = Manager::new(ManagerOptions {
            steps_in_flight_max: 4,
            events_max: 4096,
            ..ManagerOptions::new(BLOCK, pool)
        });
        Self {
            manager: manager.unwrap(),
            device: vec![0; device as usize],
            host: Arc::new(Host((0..host).map(|_| AtomicU64::new(0)).collect())),
            flight: VecDeque::new(),
        }
    }

    pub(crate) fn admit(&mut self, numbers: &[u64]) -> Sequence {
        let tokens = numbers.len() as u64 * u64::from(BLOCK);
        let request =
            Request::named(tokens, numbers.iter().map(|&number| block(number).name).collect());
        let mut admission = self.manager.admit(&mut VecDeque::from([request]), u64::MAX);
        let Some((_, sequence)) = admission.admitted.pop() else { panic!("{admission:?}") };
        sequence
    }

    /// Stages a step that computes a sequence.
    pub(crate) fn stage(&mut self, sequence: &mut Sequence, numbers: &[u64]) {
        let step = self.manager.begin_step().unwrap();
        let block = |(at, &number)| Some((sequence.block(GroupId(0), at)?, number));
        let writes = numbers.iter().enumerate().filter_map(block).collect();
        let plan = self.manager.stage(&step, &mut [sequence]).unwrap().clone();
        self.manager.finish_step(step).unwrap();
        self.flight.push_back((plan, writes));
    }

    /// Carries out the oldest plan.
    pub(crate) fn carry_out(&mut self) {
        let (plan, writes) = self.flight.pop_front().unwrap();
        for copy in &plan.copies {
            let content = match copy.from.tier {
                Tier::Primary => self.device[copy.from.id.index()],
                _ => self.host.get(copy.from.id),
            };
            match copy.to.tier {
                Tier::Primary => self.device[copy.to.id.index()] = content,
                _ => self.host.set(copy.to.id, content),
            }
        }
        for (block, number) in writes {
            self.device[block.index()] = number;
        }
        let (worker, outcome) = (WorkerId(0), Outcome::Done);
        let completion = Completion { worker, step: plan.step, outcome };
        self.manager.complete(completion).unwrap();
    }

    /// Computes a prompt, completely.
    pub(crate) fn compute(&mut self, numbers: &[u64]) {
        let mut sequence = self.admit(numbers);
        self.stage(&mut sequence, numbers);
        while !self.flight.is_empty() {
            self.carry_out();
        }
    }
}

/// Ends what other threads do, also by a panic.
pub(crate) struct Ends<'a>(pub(crate) &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
