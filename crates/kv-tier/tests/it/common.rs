//! A worker with one tier, which is handed what its tickets are of.

use std::sync::{Arc, Mutex};

use kv_pool::{BlockHash, BlockId, GroupId, Tier};
use kv_tier::{
    Batch, BlockFault, BlockSink, BlockSource, Direction, HostBlocks, HostPiece, LowerTier,
    TicketId, Transfer,
};

/// Bytes of a block, in sections of 30, of which the last has 10.
pub(crate) const BLOCK_BYTES: usize = 100;

/// Host memory, of which so many bytes of a block are lent. Each byte of a block has the block's number at first.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) bytes: Arc<Mutex<Vec<u8>>>,
    lends: usize,
}

impl Host {
    pub(crate) fn new(blocks: usize, lends: usize) -> Arc<Self> {
        let bytes = (0..blocks * BLOCK_BYTES).map(|at| (at / BLOCK_BYTES) as u8).collect();
        Arc::new(Self { bytes: Arc::new(Mutex::new(bytes)), lends })
    }

    pub(crate) fn block(&self, at: usize) -> Vec<u8> {
        self.bytes.lock().unwrap()[at * BLOCK_BYTES..][..BLOCK_BYTES].to_vec()
    }
}

impl HostBlocks for Host {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn section_bytes(&self) -> usize {
        30
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        let from = block.index() * BLOCK_BYTES + offset;
        into.copy_from_slice(&self.bytes.lock().unwrap()[from..from + into.len()]);
        true
    }

    fn write(&self, block: BlockId, offset: usize, from: &[u8]) -> bool {
        let at = block.index() * BLOCK_BYTES + offset;
        self.bytes.lock().unwrap()[at..at + from.len()].copy_from_slice(from);
        true
    }

    fn pieces(&self, block: BlockId) -> Vec<HostPiece> {
        let offset = (block.index() * BLOCK_BYTES) as u64;
        vec![HostPiece { memory: self.bytes.clone(), offset, bytes: self.lends }]
    }
}

/// A tier that hands its orders to the test.
#[derive(Clone, Debug, Default)]
pub(crate) struct Holder {
    sources: Arc<Mutex<Vec<BlockSource>>>,
    sinks: Arc<Mutex<Vec<BlockSink>>>,
}

impl LowerTier for Holder {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        self.sources.lock().unwrap().extend(blocks);
    }
    fn load(&mut self, blocks: Vec<BlockSink>) {
        self.sinks.lock().unwrap().extend(blocks);
    }
    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}
    fn clear(&mut self) {}
    fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
}

pub(crate) type Wrong = Vec<(u32, BlockFault)>;

/// A worker whose tickets are told of once they have ended.
pub(crate) struct Worker<T> {
    pub(crate) host: Arc<Host>,
    pub(crate) tier: T,
    pub(crate) open: Vec<Arc<Batch>>,
}

impl<T: LowerTier> Worker<T> {
    pub(crate) fn new(host: &Arc<Host>, tier: T) -> Self {
        Self { host: Arc::clone(host), tier, open: Vec::new() }
    }

    pub(crate) fn begin(&mut self, format: u64, direction: Direction, blocks: &[(u128, u32)]) {
        let blocks =
            blocks.iter().map(|&(of, at)| (BlockHash::from_u128(of), BlockId::new(at).unwrap()));
        let (ticket, tier, group) = (TicketId(1), Tier::Third, GroupId(0));
        let transfer = Transfer { ticket, tier, group, direction, blocks: blocks.collect() };
        let host: Arc<dyn HostBlocks> = self.host.clone();
        self.open.push(Batch::begin(&transfer, &host, format, &mut self.tier));
    }

    pub(crate) fn store(&mut self, blocks: &[(u128, u32)]) {
        self.begin(7, Direction::Store, blocks);
    }

    pub(crate) fn load(&mut self, blocks: &[(u128, u32)]) {
        self.begin(7, Direction::Load, blocks);
    }

    /// What was wrong with each ticket that has ended.
    pub(crate) fn poll(&mut self) -> Vec<Wrong> {
        self.tier.poll(&mut Vec::new());
        let mut ended = Vec::new();
        self.open.retain(|batch| {
            let wrong = batch.ended();
            let is_open = wrong.is_none();
            ended.extend(wrong);
            is_open
        });
        ended
    }
}

impl Worker<Holder> {
    pub(crate) fn holding(blocks: usize, lends: usize) -> Self {
        Self::new(&Host::new(blocks, lends), Holder::default())
    }

    pub(crate) fn source(&mut self, of: u128, at: u32) -> BlockSource {
        self.store(&[(of, at)]);
        self.tier.sources.lock().unwrap().pop().unwrap()
    }

    pub(crate) fn sinks(&mut self, blocks: &[(u128, u32)]) -> Vec<BlockSink> {
        self.load(blocks);
        std::mem::take(&mut *self.tier.sinks.lock().unwrap())
    }

    pub(crate) fn sink(&mut self, of: u128, at: u32) -> BlockSink {
        self.sinks(&[(of, at)]).pop().unwrap()
    }
}
