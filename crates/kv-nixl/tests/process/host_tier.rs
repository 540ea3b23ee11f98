//! An engine's host tier in pinned memory of a simulated device, for nodes that serve it.

use std::sync::Arc;

use cuda_driver::{Device, Driver, HostAllocFlags, PinnedBuffer};
use cuda_sim::{SimConfig, SimDriver};
use kv_manager::HostShare;
use kv_manager::tiers::{HostBlocks, HostPiece};
use kv_pool::BlockId;

use crate::manager::host::{Engine, hash};

/// Bytes of a block.
pub(crate) const BLOCK_BYTES: usize = 100_000;
/// Blocks of a slab, and of the tier.
const PER_SLAB: usize = 4;
const BLOCKS: u64 = 12;

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

/// An engine whose first blocks are in host memory.
pub(crate) struct Tier {
    engine: Engine,
    pub(crate) share: Arc<HostShare>,
    slabs: Arc<Slabs>,
    /// The number of each host block that its bytes are of.
    filled: Vec<u64>,
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
        let mut engine = Engine::new(8, BLOCKS);
        let share = engine.manager.share_host(7, vec![slabs.clone()]).unwrap();
        let filled = vec![0; BLOCKS as usize];
        let mut tier = Self { engine, share, slabs, filled };
        // Numbers from 1 to 8, and then as many that stay on the device.
        tier.compute(1);
        tier.compute(100);
        tier
    }

    /// Computes eight blocks. What leaves the device moves to host memory, and what leaves that is gone.
    pub(crate) fn compute(&mut self, first: u64) {
        self.engine.compute(&(first..first + 8).collect::<Vec<_>>());
        for (at, filled) in self.filled.iter_mut().enumerate() {
            let block = BlockId::new(at as u32);
            let number = self.engine.host.get(block);
            if std::mem::replace(filled, number) != number {
                assert!(self.slabs.write(block, 0, &bytes_of(number)));
            }
        }
    }
}

/// What a block of the engine is found by.
pub(crate) fn block(number: u64) -> crate::common::Block {
    (kv_manager::GroupId(0), hash(number))
}
