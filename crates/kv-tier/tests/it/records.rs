//! Records that are checked section by section, and memory that is taken back.

use std::sync::{Arc, Mutex};

use kv_pool::{BlockHash, BlockId, GroupId};
use kv_tier::{
    Arrived, BlockFault, BlockSink, BlockSource, Direction, FaultRules, LowerTier, MemoryTier,
    MemoryTierOptions, header_bytes, record_format,
};

use crate::common::{BLOCK_BYTES, Holder, Host, Worker};

/// A tier that loads what it is told to, whatever was stored.
#[derive(Clone, Debug, Default)]
struct Liar {
    /// What was stored, and what each load gets, which says that it is right.
    answers: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl LowerTier for Liar {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        for block in blocks {
            let mut record = vec![0; block.len()];
            // In odd pieces.
            for (at, piece) in record.chunks_mut(37).enumerate() {
                block.read_at(at * 37, piece).unwrap();
            }
            assert_eq!(block.record().unwrap(), record);
            self.answers.lock().unwrap().push(record);
            block.done();
        }
    }

    fn load(&mut self, blocks: Vec<BlockSink>) {
        for mut block in blocks {
            let record = self.answers.lock().unwrap().remove(0);
            for (at, piece) in record.chunks(29).enumerate() {
                let _ = block.write_at(at * 29, piece);
            }
            let _ = block.done();
        }
    }

    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}
    fn clear(&mut self) {}
    fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
}

/// The records of blocks of these names and places.
fn records(host: &Arc<Host>, blocks: &[(u128, u32)]) -> Vec<Vec<u8>> {
    let liar = Liar::default();
    let mut worker = Worker::new(host, liar.clone());
    worker.store(blocks);
    assert_eq!(worker.poll(), [vec![]]);
    std::mem::take(&mut *liar.answers.lock().unwrap())
}

#[test]
fn workers_with_other_bytes_have_other_formats() {
    let of = |model: &[u8], layout, rank| record_format(model, layout, rank);
    let formats = [
        of(b"a model", "2 layers", (0, 2)),
        of(b"a model", "2 layers", (1, 2)),
        // Ranks of another number have other heads, also where they have as many.
        of(b"a model", "2 layers", (0, 4)),
        of(b"a model", "2 layers", (1, 4)),
        of(b"a model", "2 layers", (0, 1)),
        of(b"another", "2 layers", (0, 1)),
        of(b"a model", "4 layers", (0, 1)),
        of(b"a model2", " layers", (0, 1)),
        of(b"", "a model2 layers", (0, 1)),
    ];
    let distinct: std::collections::HashSet<_> = formats.into_iter().collect();
    assert_eq!(distinct.len(), formats.len(), "{formats:x?}");
    // Processes of two builds read each other's records.
    assert_eq!(formats[0], 463_806_830_350_382_326);
}

#[test]
fn a_record_counts_as_loaded_only_if_every_bit_of_it_is_right() {
    let host = Host::new(4, 0);
    let [first, second]: [Vec<u8>; 2] = records(&host, &[(1, 1), (2, 2)]).try_into().unwrap();
    assert_eq!(first.len(), 100 + header_bytes(4), "of 30 bytes, and the last of 10");
    let mut worker = Worker::new(&host, Liar::default());
    let mut load_as = |format, record: &[u8]| {
        *worker.tier.answers.lock().unwrap() = vec![record.to_vec()];
        worker.begin(format, Direction::Load, &[(1, 3)]);
        worker.poll().pop().unwrap().pop().map(|(_, fault)| fault)
    };
    let mut load = |record: &[u8]| load_as(7, record);
    assert_eq!((load(&first), host.block(3)), (None, vec![1; 100]));
    for bit in 0..first.len() * 8 {
        let mut record = first.clone();
        record[bit / 8] ^= 1 << (bit % 8);
        assert!(load(&record).is_some(), "bit {bit} was changed");
    }
    for length in 0..first.len() {
        assert_eq!(load(&first[..length]), Some(BlockFault::Short), "{length} bytes");
        // What was short once leaves right bytes behind, which count for nothing.
        assert_eq!(load(&first), None);
    }
    assert_eq!(load(&second), Some(BlockFault::Foreign), "another block's record");
    assert_eq!(load(&[&first[..], &[0]].concat()), Some(BlockFault::Short), "too long");
    for cut in 1..first.len() {
        let torn = [&first[..cut], &second[cut..]].concat();
        assert!(load(&torn).is_some(), "two records, joined at {cut}");
    }
    assert_eq!(load_as(8, &first), Some(BlockFault::Foreign), "a cache of another format");
}

#[test]
fn a_fenced_worker_has_its_memory_back() {
    let mut worker = Worker::holding(4, 0);
    let mut sinks = worker.sinks(&[(1, 1), (2, 2)]);
    let body = header_bytes(4);
    sinks[0].write_at(body, &[9; 10]).unwrap();
    assert!(worker.poll().is_empty());
    worker.open[0].fence();
    assert_eq!(sinks[0].write_at(body + 10, &[9; 10]), Err(BlockFault::Fenced));
    assert_eq!(sinks[1].write_at(0, &[9; 10]), Err(BlockFault::Fenced), "in the header");
    let kept = [&[9; 10][..], &[1; 90]].concat();
    assert_eq!((worker.host.block(1), worker.host.block(2)), (kept, vec![2; 100]));
}

/// A load of a record of four sections into block 3, which a tier holds.
struct Held {
    worker: Worker<Holder>,
    record: Vec<u8>,
    sink: BlockSink,
}

impl Held {
    fn new() -> Self {
        let mut worker = Worker::holding(4, 0);
        let record = records(&worker.host, &[(1, 1)]).remove(0);
        let sink = worker.sink(1, 3);
        Self { worker, record, sink }
    }

    fn arrived(&self) -> Option<Arrived> {
        self.worker.open[0].arrived(BlockId::from(3))
    }
}

#[test]
fn each_section_is_right_when_its_last_byte_is() {
    let mut held = Held::new();
    let header = header_bytes(4);
    for at in 0..held.record.len() {
        let right = at.saturating_sub(header) / 30;
        assert_eq!(held.arrived(), Some(Arrived::Sections(right)), "{at} bytes");
        held.sink.write_at(at, &held.record[at..=at]).unwrap();
    }
    assert_eq!(held.arrived(), Some(Arrived::Sections(4)));
    held.sink.done().unwrap();
    let batch = &held.worker.open[0];
    assert_eq!(batch.arrived(BlockId::from(3)), Some(Arrived::Right));
    assert_eq!(batch.arrived(BlockId::from(1)), None, "another block");
    assert_eq!(held.worker.host.block(3), vec![1; 100]);
}

#[test]
fn a_section_that_is_wrong_ends_what_is_right() {
    for wrong in 0..4 {
        let mut held = Held::new();
        held.record[header_bytes(4) + 30 * wrong] ^= 1;
        let mut faults = Vec::new();
        for (at, byte) in held.record.clone().into_iter().enumerate() {
            faults.extend(held.sink.write_at(at, &[byte]).err());
        }
        let behind = 100 - (30 * (wrong + 1)).min(100) + 1;
        assert_eq!(faults, vec![BlockFault::Checksum; behind], "section {wrong}");
        assert_eq!(held.arrived(), Some(Arrived::Sections(wrong)));
        assert_eq!(held.sink.done(), Err(BlockFault::Checksum));
        assert_eq!(held.worker.open[0].arrived(BlockId::from(3)), Some(Arrived::Wrong));
    }
}

#[test]
fn a_section_that_was_right_stays_so() {
    let mut held = Held::new();
    let (header, record) = (header_bytes(4), held.record.clone());
    held.sink.write_at(0, &record[..header + 60]).unwrap();
    assert_eq!(held.arrived(), Some(Arrived::Sections(2)));
    // The tier writes something else over it, and over the header, and a part of the next section.
    held.sink.write_at(0, &vec![0xee; header + 70]).unwrap();
    let expected = [&[1; 60][..], &[0xee; 10]].concat();
    assert_eq!(held.worker.host.block(3)[..70], expected);
    held.sink.write_at(header + 50, &record[header + 50..]).unwrap();
    held.sink.done().unwrap();
    assert_eq!(held.worker.host.block(3), vec![1; 100]);
}

#[test]
fn a_load_that_is_given_up_is_late_and_writes_nothing_more() {
    let mut held = Held::new();
    let (at, record) = (header_bytes(4) + 30, held.record.clone());
    held.sink.write_at(0, &record[..at]).unwrap();
    assert_eq!(held.arrived(), Some(Arrived::Sections(1)));
    held.worker.open[0].give_up();
    assert_eq!(held.arrived(), Some(Arrived::Wrong));
    assert_eq!(held.worker.poll(), [[(0, BlockFault::Late)]]);
    assert_eq!(held.sink.write_at(at, &record[at..]), Err(BlockFault::Fenced));
    let rest = &held.worker.host.block(3)[30..];
    assert_eq!(rest, [0; 70], "nothing of the record, or of what was there before");
}

#[test]
fn a_dropped_block_has_failed() {
    let mut worker = Worker::holding(4, 0);
    let mut sinks = worker.sinks(&[(1, 1), (2, 2)]);
    sinks.pop().unwrap().failed(BlockFault::Missing);
    assert!(worker.poll().is_empty());
    drop(sinks);
    let mut wrong = worker.poll().pop().unwrap();
    wrong.sort_unstable();
    assert_eq!(wrong, [(0, BlockFault::Failed), (1, BlockFault::Missing)]);
}

#[test]
fn a_tier_that_does_everything_wrong_never_delivers_a_wrong_block() {
    let host = Host::new(40, 0);
    let faults = FaultRules { late_polls_max: 5, ..FaultRules::all(3) };
    let options = MemoryTierOptions { faults, records_max: 15, ..MemoryTierOptions::default() };
    let tier = MemoryTier::new(options);
    let made = tier.faults();
    let mut worker = Worker::new(&host, tier);
    let (mut right, mut wrong) = (0, [0; BlockFault::ALL.len()]);
    for _ in 0..200 {
        for direction in [Direction::Store, Direction::Load] {
            let to = if direction == Direction::Store { 0 } else { 20 };
            let blocks: Vec<_> = (0..20).map(|at| (u128::from(at), at + to)).collect();
            host.bytes.lock().unwrap()[20 * BLOCK_BYTES..].fill(0xff);
            worker.begin(7, direction, &blocks);
            let ended = loop {
                if let Some(ended) = worker.poll().pop() {
                    break ended;
                }
            };
            for at in (0..20).filter(|_| direction == Direction::Load) {
                match ended.iter().find(|(index, _)| *index == at) {
                    Some((_, fault)) => wrong[fault.index()] += 1,
                    None => {
                        assert_eq!(host.block(at as usize + 20), vec![at as u8; BLOCK_BYTES]);
                        right += 1;
                    }
                }
            }
        }
    }
    assert!(right > 1000, "{right}");
    let [missing, failed, short, checksum, foreign, fenced, late] = wrong;
    assert!(missing > 0 && failed > 0 && short > 0 && checksum > 0 && foreign > 0, "{wrong:?}");
    assert_eq!((fenced, late), (0, 0));
    assert!(made.by_name().all(|(_, count)| count > 0), "{made:?}");
}

#[test]
fn what_a_load_has_not_brought_right_is_zero_before_its_memory_is_anybodys() {
    let mut worker = Worker::holding(6, 0);
    let host = Arc::clone(&worker.host);
    let records = records(&host, &[(0, 0), (1, 1), (2, 2)]);
    let sinks = worker.sinks(&[(0, 3), (1, 4), (2, 5)]);
    let [mut right, mut short, mut foreign]: [BlockSink; 3] = sinks.try_into().unwrap();
    right.write_at(0, &records[0]).unwrap();
    right.done().unwrap();
    // Two sections, a part of the third, and a record of another block.
    let two = short.header_bytes() + 60;
    short.write_at(0, &records[1][..two + 11]).unwrap();
    assert!(foreign.write_at(0, &records[0]).is_err());
    assert!(worker.poll().is_empty(), "the others have not ended");
    let third = [&[1; 11][..], &[4; 29][..]].concat();
    assert_eq!(host.block(4)[60..], third, "as it was, and as it came");
    drop((short, foreign));
    assert_eq!(worker.poll()[0].len(), 2);
    assert_eq!(host.block(3), vec![0; 100]);
    assert_eq!(host.block(4), [&[1; 60][..], &[0; 40][..]].concat(), "what was right stays");
    assert_eq!(host.block(5), vec![0; 100], "another block's bytes");
    // What is stored is read only.
    let source = worker.source(1, 1);
    worker.open[0].give_up();
    assert_eq!(worker.poll().len(), 1);
    assert_eq!(host.block(1), vec![1; 100]);
    drop(source);
}
