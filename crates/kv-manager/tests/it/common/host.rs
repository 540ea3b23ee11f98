//! A manager with a host tier, and a worker that carries out its plans as late as a test says. A block holds one number, many times.

#![allow(dead_code, reason = "each test uses a part")]

use crate::prelude::*;

const WORDS: usize = 8;
/// Bytes of a block.
pub(crate) const BYTES: usize = 8 * WORDS;

/// Host memory of which each block holds one number, many times.
#[derive(Debug)]
pub(crate) struct Host(Vec<[AtomicU64; WORDS]>);

impl Host {
    pub(crate) fn new(blocks: usize) -> Arc<Self> {
        Arc::new(Self((0..blocks).map(|_| Default::default()).collect()))
    }

    pub(crate) fn set(&self, block: BlockId, content: u64) {
        self.0[block.index()].iter().for_each(|word| word.store(content, Ordering::Relaxed));
    }

    pub(crate) fn get(&self, block: BlockId) -> u64 {
        self.0[block.index()][0].load(Ordering::Relaxed)
    }
}

impl HostBlocks for Host {
    fn block_bytes(&self) -> usize {
        BYTES
    }

    fn section_bytes(&self) -> usize {
        24
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        let Some(words) = self.0.get(block.index()) else { return false };
        let bytes = words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes());
        into.iter_mut().zip(bytes.skip(offset)).for_each(|(to, from)| *to = from);
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
    /// What the blocks of numbers are called.
    pub(crate) name: fn(u64) -> BlockHash,
    /// Plans that are not carried out, each with the contents that its step writes.
    pub(crate) flight: VecDeque<(StepPlan, Vec<(BlockId, u64)>)>,
}

pub(crate) fn hash(name: u64) -> BlockHash {
    BlockHash::from_u128(u128::from(name) << 64 | 1)
}

pub(crate) fn keys(names: &[u64]) -> Vec<(GroupId, BlockHash)> {
    names.iter().map(|&name| (GroupId(0), hash(name))).collect()
}

impl Engine {
    pub(crate) fn new(device: u64, host: u64) -> Self {
        Self::with(ManagerOptions { steps_in_flight_max: 4, ..options(device, host) })
    }

    pub(crate) fn with(options: ManagerOptions) -> Self {
        let pool = &options.groups[0].pool;
        let (device, host) = (pool.primary_blocks, pool.secondary_blocks);
        let manager = Manager::new(options);
        Self {
            manager: manager.unwrap(),
            device: vec![0; device as usize],
            host: Host::new(host as usize),
            name: hash,
            flight: VecDeque::new(),
        }
    }

    pub(crate) fn share(&mut self) -> Arc<HostShare> {
        self.manager.share_host(7, vec![self.host.clone()]).unwrap()
    }

    pub(crate) fn admit(&mut self, names: &[u64]) -> Sequence {
        let tokens = names.len() as u64 * u64::from(BLOCK);
        let request = Request::named(tokens, names.iter().map(|&name| (self.name)(name)).collect());
        admitted(self.manager.ask_all(&mut [request], u64::MAX).pop().unwrap())
    }

    /// Stages a step that computes a sequence.
    pub(crate) fn stage(&mut self, sequence: Option<(&mut Sequence, &[u64])>) -> u64 {
        let step = self.manager.begin_step().unwrap();
        let (mut batch, mut writes) = (Vec::new(), Vec::new());
        if let Some((sequence, names)) = sequence {
            let block = |(at, &name)| Some((sequence.block(GroupId(0), at)?, name));
            writes = names.iter().enumerate().filter_map(block).collect();
            batch.push(sequence);
        }
        let plan = self.manager.stage(&step, &mut batch).unwrap().clone();
        self.manager.finish_step(step).unwrap();
        let number = plan.step;
        self.flight.push_back((plan, writes));
        number
    }

    /// Carries out the oldest plan.
    pub(crate) fn carry_out(&mut self, outcome: Outcome) {
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
        for (block, name) in writes {
            self.device[block.index()] = if outcome == Outcome::Done { name } else { u64::MAX };
        }
        complete(&mut self.manager, plan.step, outcome);
    }

    /// Computes a prompt, completely.
    pub(crate) fn compute(&mut self, names: &[u64]) {
        let mut sequence = self.admit(names);
        self.stage(Some((&mut sequence, names)));
        while !self.flight.is_empty() {
            self.carry_out(Outcome::Done);
        }
    }
}
