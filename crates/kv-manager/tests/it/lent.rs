//! Memory of blocks that a tier borrows: checked as what is copied is, and the worker's again only when it is back.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kv_manager::{GroupId, Settled, TierTransfers, WorkerId};
use kv_pool::{BlockHash, BlockId, Tier};
use kv_tier::{
    Arrived, BlockFault, BlockSink, BlockSource, Direction, HostBlocks, HostPiece, LowerTier,
    TicketId, Transfer,
};

const BLOCK_BYTES: usize = 100;

/// Host memory that is lent, up to so many bytes of a block.
#[derive(Debug)]
struct Host {
    bytes: Arc<Mutex<Vec<u8>>>,
    lends: usize,
}

impl Host {
    fn new(lends: usize) -> Arc<Self> {
        let bytes = (0..4 * BLOCK_BYTES).map(|at| (at / 7) as u8).collect();
        Arc::new(Self { bytes: Arc::new(Mutex::new(bytes)), lends })
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
struct Holder {
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

struct Worker {
    host: Arc<Host>,
    holder: Holder,
    tiers: TierTransfers,
}

impl Worker {
    fn new(lends: usize) -> Self {
        let holder = Holder::default();
        let tiers = TierTransfers::new(vec![Box::new(holder.clone())], 7);
        Self { host: Host::new(lends), holder, tiers }
    }

    fn begin(&mut self, ticket: u64, direction: Direction, blocks: &[(u128, u32)]) {
        let blocks =
            blocks.iter().map(|&(of, at)| (BlockHash::from_u128(of), BlockId::new(at).unwrap()));
        let (ticket, tier, group) = (TicketId(ticket), Tier::Third, GroupId(0));
        let transfer = Transfer { ticket, tier, group, direction, blocks: blocks.collect() };
        let host: Arc<dyn HostBlocks> = self.host.clone();
        self.tiers.begin(&transfer, &host).unwrap();
    }

    fn source(&mut self, ticket: u64, of: u128, at: u32) -> BlockSource {
        self.begin(ticket, Direction::Store, &[(of, at)]);
        self.holder.sources.lock().unwrap().pop().unwrap()
    }

    fn sink(&mut self, ticket: u64, of: u128, at: u32) -> BlockSink {
        self.begin(ticket, Direction::Load, &[(of, at)]);
        self.holder.sinks.lock().unwrap().pop().unwrap()
    }

    fn settled(&mut self) -> Vec<Settled> {
        let mut settled = Vec::new();
        self.tiers.poll(WorkerId(0), &mut settled, &mut Vec::new());
        settled
    }

    /// What a disk does: block 0 is copied to another place, by the tier's own means.
    fn lands(&self, at: usize) {
        self.host.bytes.lock().unwrap().copy_within(..BLOCK_BYTES, at * BLOCK_BYTES);
    }
}

#[test]
fn what_has_landed_is_right_if_every_section_is() {
    // Nothing, a bit of the header, a bit of the block, and the header of another block.
    for wrong in 0..4 {
        let mut worker = Worker::new(BLOCK_BYTES);
        let source = worker.source(1, 5, 0);
        let other = worker.source(2, 6, 0);
        let mut header =
            if wrong == 3 { other.header() } else { source.header() }.unwrap().to_vec();
        assert_eq!(header.len(), source.header_bytes());
        assert_eq!(source.lend().unwrap().pieces()[0].bytes, BLOCK_BYTES);
        source.done();
        other.done();
        let mut sink = worker.sink(3, 5, 1);
        let lent = sink.lend().unwrap();
        worker.lands(1);
        if wrong == 1 {
            header[70] ^= 1;
        } else if wrong == 2 {
            worker.host.bytes.lock().unwrap()[BLOCK_BYTES + 99] ^= 1;
        }
        let landed = sink.landed(lent, &header);
        let expected = [
            None,
            Some(BlockFault::Checksum),
            Some(BlockFault::Checksum),
            Some(BlockFault::Foreign),
        ];
        assert_eq!((landed.err(), sink.done().err()), (expected[wrong], expected[wrong]));
        let settled = worker.settled();
        let wrong_blocks = settled[2].wrong.iter().map(|(_, fault)| *fault);
        assert_eq!(
            wrong_blocks.collect::<Vec<_>>(),
            expected[wrong].into_iter().collect::<Vec<_>>()
        );
    }
}

#[test]
fn memory_of_another_block_or_a_short_header_does_not_land() {
    let mut worker = Worker::new(BLOCK_BYTES);
    let source = worker.source(1, 5, 0);
    let header = source.header().unwrap().to_vec();
    let (mut one, two) = (worker.sink(2, 5, 1), worker.sink(3, 5, 2));
    let lent = two.lend().unwrap();
    worker.lands(1);
    assert_eq!(one.landed(lent, &header), Err(BlockFault::Foreign), "of another ticket");
    let lent = one.lend().unwrap();
    assert_eq!(one.landed(lent, &header[1..]), Err(BlockFault::Foreign), "cut off");
    let lent = one.lend().unwrap();
    one.landed(lent, &header).unwrap();
    one.done().unwrap();
    source.done();
    drop(two);
}

#[test]
fn a_ticket_that_is_given_up_ends_when_its_memory_is_back() {
    let mut worker = Worker::new(BLOCK_BYTES);
    let sink = worker.sink(1, 5, 1);
    let lent = sink.lend().unwrap();
    worker.tiers.give_up(TicketId(1));
    assert!(lent.is_fenced());
    let arrived = worker.tiers.arrived(TicketId(1), BlockId::from(1));
    assert_eq!(arrived, Some(Arrived::Wrong), "the engine is told at once");
    assert_eq!((worker.settled(), worker.tiers.open()), (Vec::new(), 1));
    sink.failed(BlockFault::Failed);
    assert_eq!(worker.settled(), Vec::new(), "the disk may write the memory still");
    drop(lent);
    assert_eq!(worker.settled()[0].wrong, [(0, BlockFault::Late)]);
}

#[test]
fn memory_that_is_taken_back_is_waited_for_and_not_lent_again() {
    let mut worker = Worker::new(BLOCK_BYTES);
    let (mut sink, source) = (worker.sink(1, 5, 1), worker.source(2, 6, 2));
    let lent = sink.lend().unwrap();
    worker.tiers.fence();
    assert!(!worker.tiers.await_lent(Duration::ZERO));
    assert_eq!(source.lend().err(), Some(BlockFault::Fenced));
    let header = vec![0; sink.header_bytes()];
    assert!(sink.landed(lent, &header).is_err());
    assert!(worker.tiers.await_lent(Duration::ZERO), "it is back");
    assert_eq!(sink.lend().err(), Some(BlockFault::Missing), "it has landed");
}

#[test]
fn memory_is_lent_whole_or_not_at_all() {
    let mut worker = Worker::new(BLOCK_BYTES - 1);
    let mut sink = worker.sink(1, 5, 1);
    assert_eq!(sink.lend().err(), Some(BlockFault::Missing));
    let mut worker = Worker::new(BLOCK_BYTES);
    let mut written = worker.sink(1, 5, 1);
    written.write_at(0, &[1]).unwrap();
    assert_eq!(written.lend().err(), Some(BlockFault::Missing), "others may read what was right");
    sink.write_at(0, &[1]).unwrap();
}
