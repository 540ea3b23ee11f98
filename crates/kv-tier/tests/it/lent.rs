//! Memory of blocks that a tier borrows: checked as what is copied is, and the worker's again only when it is back.

use std::sync::Arc;

use kv_pool::{BlockId, BlockPool, PoolConfig};
use kv_tier::{Arrived, BlockFault, HostBlocks, HostShareWriter, ShareOptions, SharedGroup};

use crate::common::{BLOCK_BYTES, Holder, Worker};

fn worker() -> Worker<Holder> {
    Worker::holding(4, BLOCK_BYTES)
}

impl Worker<Holder> {
    /// What a disk does: block 0 is copied to another place, by the tier's own means.
    fn lands(&self, at: usize) {
        self.host.bytes.lock().unwrap().copy_within(..BLOCK_BYTES, at * BLOCK_BYTES);
    }
}

#[test]
fn what_has_landed_is_right_if_every_section_is() {
    let (checksum, foreign) = (Some(BlockFault::Checksum), Some(BlockFault::Foreign));
    for (what, expected) in [
        ("nothing", None),
        ("a bit of the header", checksum),
        ("a bit of the block", checksum),
        ("the header of another block", foreign),
    ] {
        let mut worker = worker();
        let (source, other) = (worker.source(5, 0), worker.source(6, 0));
        let of = if expected == foreign { &other } else { &source };
        let mut header = of.header().unwrap().to_vec();
        assert_eq!(header.len(), source.header_bytes());
        assert_eq!(source.lend().unwrap().pieces()[0].bytes, BLOCK_BYTES);
        source.done();
        other.done();
        let mut sink = worker.sink(5, 1);
        let lent = sink.lend().unwrap();
        worker.lands(1);
        if what == "a bit of the header" {
            header[70] ^= 1;
        } else if what == "a bit of the block" {
            worker.host.bytes.lock().unwrap()[BLOCK_BYTES + 99] ^= 1;
        }
        let landed = sink.landed(lent, &header);
        assert_eq!((landed.err(), sink.done().err()), (expected, expected), "{what}");
        let wrong: Vec<_> = expected.into_iter().map(|fault| (0, fault)).collect();
        assert_eq!(worker.poll(), [vec![], vec![], wrong], "{what}");
    }
}

#[test]
fn memory_of_another_block_or_a_short_header_does_not_land() {
    let mut worker = worker();
    let source = worker.source(5, 0);
    let header = source.header().unwrap().to_vec();
    let (mut one, two) = (worker.sink(5, 1), worker.sink(5, 2));
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
    let mut worker = worker();
    let sink = worker.sink(5, 1);
    let lent = sink.lend().unwrap();
    worker.open[0].give_up();
    assert!(lent.is_fenced());
    let arrived = worker.open[0].arrived(BlockId::from(1));
    assert_eq!(arrived, Some(Arrived::Wrong), "the engine is told at once");
    assert!(worker.poll().is_empty());
    sink.failed(BlockFault::Failed);
    assert!(worker.poll().is_empty(), "the disk may write the memory still");
    drop(lent);
    assert_eq!(worker.poll(), [[(0, BlockFault::Late)]]);
}

#[test]
fn memory_that_is_taken_back_is_not_lent_again() {
    let mut worker = worker();
    let (mut sink, source) = (worker.sink(5, 1), worker.source(6, 2));
    let lent = sink.lend().unwrap();
    worker.open.iter().for_each(|batch| batch.fence());
    assert!(worker.open[0].is_lent() && !worker.open[1].is_lent());
    assert_eq!(source.lend().err(), Some(BlockFault::Fenced));
    let header = vec![0; sink.header_bytes()];
    assert!(sink.landed(lent, &header).is_err());
    assert!(!worker.open[0].is_lent(), "it is back");
    assert_eq!(sink.lend().err(), Some(BlockFault::Missing), "it has landed");
}

#[test]
fn memory_is_lent_whole_or_not_at_all() {
    let mut part = Worker::holding(4, BLOCK_BYTES - 1);
    let mut sink = part.sink(5, 1);
    assert_eq!(sink.lend().err(), Some(BlockFault::Missing));
    sink.write_at(0, &[1]).unwrap();
    let mut written = worker().sink(5, 1);
    written.write_at(0, &[1]).unwrap();
    assert_eq!(written.lend().err(), Some(BlockFault::Missing), "others may read what was right");
}

/// Host memory whose blocks have no byte.
#[derive(Debug)]
struct Nothing;

impl HostBlocks for Nothing {
    fn block_bytes(&self) -> usize {
        0
    }

    fn read(&self, _: BlockId, _: usize, _: &mut [u8]) -> bool {
        true
    }

    fn write(&self, _: BlockId, _: usize, _: &[u8]) -> bool {
        true
    }
}

#[test]
fn blocks_without_bytes_are_at_no_address() {
    let pool = BlockPool::new(&PoolConfig::primary_only(1)).unwrap();
    let groups = vec![SharedGroup { pool, blocks: 4, memory: Arc::new(Nothing) }];
    let options = ShareOptions { groups, format: 7, completed: 0, staged: 0 };
    let writer = HostShareWriter::new(options);
    assert!(!writer.share().read(0, &mut [0; 4]) && writer.share().read(0, &mut []));
}
