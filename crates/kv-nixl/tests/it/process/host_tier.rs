//! An engine's host tier in pinned memory of a simulated device, for nodes that serve it.

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_driver::{Device, Driver, HostAllocFlags, PinnedBuffer};
use cuda_sim::{SimConfig, SimDriver};
use kv_manager::{Completion, Manager, ManagerOptions, Outcome, Request, WorkerId};
use kv_pool::{BlockHash, BlockId, GroupId, PoolConfig, Tier as PoolTier};
use kv_tier::{HostBlocks, HostPiece, HostShare, RecordKey};

/// Bytes of a block.
pub(crate) const BLOCK_BYTES: usize = 100_000;
/// Blocks of a slab, and of the tier.
const PER_SLAB: usize = 4;
const BLOCKS: u64 = 12;
/// Blocks of the device, all of which a prompt takes, and tokens of each.
const COMPUTED: u64 = 8;
const BLOCK_TOKENS: u64 = 4;

/// The bytes of the block of a number.
pub(crate) fn bytes_of(number: u64) -> Vec<u8> {
    let mut state = number.wrapping_mul(77) + 3;
    let words = (0..BLOCK_BYTES.div_ceil(8)).flat_map(|_| crate::random(&mut state).to_le_bytes());
    words.take(BLOCK_BYTES).collect()
}

/// Pinned blocks, some to a slab.
#[derive(Debug)]
struct Slabs(Vec<Arc<PinnedBuffer>>);

impl Slabs {
    fn place(&self, block: BlockId) -> Option<(&Arc<PinnedBuffer>, u64)> {
        let (slab, at) = (block.index() / PER_SLAB, block.index() % PER_SLAB);
        Some((self.0.get(slab)?, (at * BLOCK_BYTES) as u64))
    }
}

impl HostBlocks for Slabs {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn section_bytes(&self) -> usize {
        BLOCK_BYTES / 3
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        let place = self.place(block);
        place.is_some_and(|(slab, first)| slab.read_at(first + offset as u64, into).is_ok())
    }

    fn write(&self, block: BlockId, offset: usize, from: &[u8]) -> bool {
        let place = self.place(block);
        place.is_some_and(|(slab, first)| slab.write_shared(first + offset as u64, from).is_ok())
    }

    fn pieces(&self, block: BlockId) -> Vec<HostPiece> {
        let piece = |(slab, offset): (&Arc<PinnedBuffer>, u64)| {
            let memory: Arc<PinnedBuffer> = Arc::clone(slab);
            HostPiece { memory, offset, bytes: BLOCK_BYTES }
        };
        self.place(block).map(piece).into_iter().collect()
    }
}

/// An engine whose first blocks are in host memory. A block of the device holds a number.
pub(crate) struct Tier {
    manager: Manager,
    pub(crate) share: Arc<HostShare>,
    slabs: Arc<Slabs>,
    device: Vec<u64>,
    /// The number of each host block that its bytes are of.
    host: Vec<u64>,
}

impl Tier {
    pub(crate) fn new() -> Self {
        let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(SimConfig::default()).unwrap());
        let device = Device::open(driver, 0).unwrap();
        let bytes = (PER_SLAB * BLOCK_BYTES) as u64;
        let slab =
            || Arc::new(PinnedBuffer::alloc(&device, bytes, HostAllocFlags::CACHED).unwrap());
        let slabs = (0..BLOCKS as usize / PER_SLAB).map(|_| slab()).collect();
        let slabs = Arc::new(Slabs(slabs));
        let pool = PoolConfig { secondary_blocks: BLOCKS, ..PoolConfig::primary_only(COMPUTED) };
        let block_tokens = BLOCK_TOKENS as u32;
        let mut manager = Manager::new(ManagerOptions::new(block_tokens, pool)).unwrap();
        let share = manager.share_host(7, vec![slabs.clone()]).unwrap();
        let (device, host) = (vec![0; COMPUTED as usize], vec![0; BLOCKS as usize]);
        let mut tier = Self { manager, share, slabs, device, host };
        // Numbers from 1 to 8, and then as many that stay on the device.
        tier.compute(1);
        tier.compute(100);
        tier
    }

    /// Computes eight blocks. What leaves the device moves to host memory, and what leaves that is gone.
    pub(crate) fn compute(&mut self, first: u64) {
        let numbers = first..first + COMPUTED;
        let request = Request::named(COMPUTED * BLOCK_TOKENS, numbers.clone().map(hash).collect());
        let mut admission = self.manager.admit(&mut VecDeque::from([request]), u64::MAX);
        let Some((_, mut sequence)) = admission.admitted.pop() else { panic!("{admission:?}") };
        let step = self.manager.begin_step().unwrap();
        let plan = self.manager.stage(&step, &mut [&mut sequence]).unwrap().clone();
        self.manager.finish_step(step).unwrap();
        for copy in &plan.copies {
            let number = match copy.from.tier {
                PoolTier::Primary => self.device[copy.from.id.index()],
                _ => self.host[copy.from.id.index()],
            };
            match copy.to.tier {
                PoolTier::Primary => self.device[copy.to.id.index()] = number,
                _ => {
                    self.host[copy.to.id.index()] = number;
                    assert!(self.slabs.write(copy.to.id, 0, &bytes_of(number)));
                }
            }
        }
        for (at, number) in numbers.enumerate() {
            self.device[sequence.block(GroupId(0), at).unwrap().index()] = number;
        }
        let (worker, outcome) = (WorkerId(0), Outcome::Done);
        self.manager.complete(Completion { worker, step: plan.step, outcome }).unwrap();
    }
}

fn hash(number: u64) -> BlockHash {
    BlockHash::from_u128(u128::from(number) << 64 | 1)
}

/// What a block of the engine is found by.
pub(crate) fn block(number: u64) -> crate::common::Block {
    RecordKey { format: 7, group: GroupId(0), name: hash(number) }
}
