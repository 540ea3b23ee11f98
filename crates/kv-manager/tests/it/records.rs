//! A worker's part of tiers below host memory: records that are checked, memory that is taken back, and plans that are
//! not believed.

use std::sync::{Arc, Mutex};

use kv_manager::{Forget, GroupId, LayerLoad, Settled, StepPlan, TierTransfers, WorkerId};
use kv_pool::{BlockHash, BlockId, Tier};
use kv_tier::{
    Arrived, BlockFault, BlockSink, BlockSource, Direction, FaultRules, HostBlocks, LowerTier,
    MemoryTier, MemoryTierOptions, TicketId, Transfer, header_bytes,
};

#[derive(Debug)]
struct Host {
    block_bytes: usize,
    bytes: Mutex<Vec<u8>>,
}

impl Host {
    fn new(blocks: usize, block_bytes: usize) -> Arc<Self> {
        let bytes =
            Mutex::new((0..blocks * block_bytes).map(|at| (at / block_bytes) as u8).collect());
        Arc::new(Self { block_bytes, bytes })
    }

    fn block(&self, at: usize) -> Vec<u8> {
        self.bytes.lock().unwrap()[at * self.block_bytes..][..self.block_bytes].to_vec()
    }
}

impl HostBlocks for Host {
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn section_bytes(&self) -> usize {
        30
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        let from = block.index() * self.block_bytes + offset;
        into.copy_from_slice(&self.bytes.lock().unwrap()[from..from + into.len()]);
        true
    }

    fn write(&self, block: BlockId, offset: usize, from: &[u8]) -> bool {
        let at = block.index() * self.block_bytes + offset;
        self.bytes.lock().unwrap()[at..at + from.len()].copy_from_slice(from);
        true
    }
}

fn name(number: u128) -> BlockHash {
    BlockHash::from_u128(number)
}

fn transfer(ticket: u64, direction: Direction, blocks: &[(u128, u32)]) -> Transfer {
    let blocks = blocks.iter().map(|&(of, at)| (name(of), BlockId::new(at).unwrap())).collect();
    let (ticket, tier) = (TicketId(ticket), Tier::Third);
    Transfer { ticket, tier, group: Default::default(), direction, blocks }
}

fn poll(transfers: &mut TierTransfers) -> Vec<Settled> {
    let (mut settled, mut dropped) = (Vec::new(), Vec::new());
    transfers.poll(WorkerId(0), &mut settled, &mut dropped);
    settled
}

/// A tier that loads what it is told to, whatever was stored.
#[derive(Debug, Default)]
struct Liar {
    stored: Vec<Vec<u8>>,
    /// What each load gets, and says that it is right.
    answers: Arc<Mutex<Vec<Vec<u8>>>>,
    held: Arc<Mutex<Vec<BlockSink>>>,
    holds: bool,
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
            self.stored.push(record.clone());
            self.answers.lock().unwrap().push(record);
            block.done();
        }
    }

    fn load(&mut self, blocks: Vec<BlockSink>) {
        for mut block in blocks {
            if self.holds {
                self.held.lock().unwrap().push(block);
                continue;
            }
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

#[test]
fn a_record_counts_as_loaded_only_if_every_bit_of_it_is_right() {
    let host = Host::new(4, 100);
    let shared: Arc<dyn HostBlocks> = host.clone();
    let liar = Liar::default();
    let answers = Arc::clone(&liar.answers);
    let mut tiers = TierTransfers::new(vec![Box::new(liar)], 7);
    tiers.begin(&transfer(1, Direction::Store, &[(1, 1), (2, 2)]), &shared).unwrap();
    assert_eq!(poll(&mut tiers)[0].wrong, []);
    let [first, second]: [Vec<u8>; 2] =
        std::mem::take(&mut *answers.lock().unwrap()).try_into().unwrap();
    assert_eq!(first.len(), 100 + header_bytes(4), "of 30 bytes, and the last of 10");
    let mut load = |record: &[u8]| {
        *answers.lock().unwrap() = vec![record.to_vec()];
        tiers.begin(&transfer(2, Direction::Load, &[(1, 3)]), &shared).unwrap();
        let mut wrong = poll(&mut tiers).pop().unwrap().wrong;
        wrong.pop().map(|(_, fault)| fault)
    };
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
    // A cache of another format reads none of it.
    let mut other = TierTransfers::new(
        vec![Box::new(Liar { answers: Arc::clone(&answers), ..Liar::default() })],
        8,
    );
    *answers.lock().unwrap() = vec![first];
    other.begin(&transfer(3, Direction::Load, &[(1, 3)]), &shared).unwrap();
    assert_eq!(poll(&mut other)[0].wrong, [(0, BlockFault::Foreign)]);
}

#[test]
fn a_fenced_worker_has_its_memory_back() {
    let host = Host::new(4, 100);
    let shared: Arc<dyn HostBlocks> = host.clone();
    let liar = Liar { holds: true, ..Liar::default() };
    let held = Arc::clone(&liar.held);
    let mut tiers = TierTransfers::new(vec![Box::new(liar)], 7);
    tiers.begin(&transfer(1, Direction::Load, &[(1, 1), (2, 2)]), &shared).unwrap();
    let mut sinks = std::mem::take(&mut *held.lock().unwrap());
    let body = header_bytes(4);
    sinks[0].write_at(body, &[9; 10]).unwrap();
    assert_eq!((poll(&mut tiers), tiers.open()), (Vec::new(), 1));
    tiers.fence();
    assert_eq!(sinks[0].write_at(body + 10, &[9; 10]), Err(BlockFault::Fenced));
    assert_eq!(sinks[1].write_at(0, &[9; 10]), Err(BlockFault::Fenced), "in the header");
    assert_eq!(
        (&host.block(1)[..12], host.block(2)),
        (&[9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 1, 1][..], vec![2; 100])
    );
    assert_eq!((poll(&mut tiers), tiers.open()), (Vec::new(), 0));
}

/// A load of a record of four sections into block 3, which a tier holds.
struct Held {
    host: Arc<Host>,
    tiers: TierTransfers,
    record: Vec<u8>,
    sink: BlockSink,
}

impl Held {
    fn new() -> Self {
        let host = Host::new(4, 100);
        let shared: Arc<dyn HostBlocks> = host.clone();
        let stored = Liar::default();
        let answers = Arc::clone(&stored.answers);
        let liar = Liar { holds: true, ..Liar::default() };
        let held = Arc::clone(&liar.held);
        let mut tiers = TierTransfers::new(vec![Box::new(stored), Box::new(liar)], 7);
        tiers.begin(&transfer(1, Direction::Store, &[(1, 1)]), &shared).unwrap();
        poll(&mut tiers);
        let record = answers.lock().unwrap().remove(0);
        let load = transfer(2, Direction::Load, &[(1, 3)]);
        tiers.begin(&Transfer { tier: Tier::Fourth, ..load }, &shared).unwrap();
        let sink = held.lock().unwrap().remove(0);
        Self { host, tiers, record, sink }
    }

    fn arrived(&self) -> Option<Arrived> {
        self.tiers.arrived(TicketId(2), BlockId::from(3))
    }
}

#[test]
fn each_section_is_right_when_its_last_byte_is() {
    let Held { host, tiers, record, mut sink } = Held::new();
    let mut found = Vec::new();
    for at in 0..record.len() {
        found.push(tiers.arrived(TicketId(2), BlockId::from(3)).unwrap());
        sink.write_at(at, &record[at..=at]).unwrap();
    }
    let header = header_bytes(4);
    for (at, found) in found.into_iter().enumerate() {
        assert_eq!(found, Arrived::Sections(at.saturating_sub(header) / 30), "{at} bytes");
    }
    assert_eq!(tiers.arrived(TicketId(2), BlockId::from(3)), Some(Arrived::Sections(4)));
    sink.done().unwrap();
    assert_eq!(tiers.arrived(TicketId(2), BlockId::from(3)), Some(Arrived::Right));
    assert_eq!(tiers.arrived(TicketId(2), BlockId::from(1)), None, "another block");
    assert_eq!(tiers.arrived(TicketId(1), BlockId::from(1)), None, "a ticket that has ended");
    assert_eq!(host.block(3), vec![1; 100]);
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
        assert_eq!(held.tiers.arrived(TicketId(2), BlockId::from(3)), Some(Arrived::Wrong));
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
    assert_eq!(held.host.block(3)[..60], [1; 60]);
    assert_eq!(held.host.block(3)[60..70], [0xee; 10]);
    held.sink.write_at(header + 50, &record[header + 50..]).unwrap();
    held.sink.done().unwrap();
    assert_eq!(held.host.block(3), vec![1; 100]);
}

#[test]
fn a_load_that_is_given_up_is_late_and_writes_nothing_more() {
    let mut held = Held::new();
    let record = held.record.clone();
    held.sink.write_at(0, &record[..header_bytes(4) + 30]).unwrap();
    held.tiers.give_up(TicketId(9));
    assert_eq!(held.arrived(), Some(Arrived::Sections(1)));
    held.tiers.give_up(TicketId(2));
    assert_eq!(held.arrived(), Some(Arrived::Wrong));
    let settled = poll(&mut held.tiers);
    let wrong = vec![(0, BlockFault::Late)];
    assert_eq!(settled, [Settled { worker: WorkerId(0), ticket: TicketId(2), wrong }]);
    let at = header_bytes(4) + 30;
    assert_eq!(held.sink.write_at(at, &record[at..]), Err(BlockFault::Fenced));
    assert_eq!(
        held.host.block(3)[30..],
        [0; 70],
        "nothing of the record, or of what was there before"
    );
    // It has ended, and does not end again.
    drop(held.sink);
    assert_eq!((poll(&mut held.tiers), held.tiers.open()), (Vec::new(), 0));
}

#[test]
fn a_dropped_block_has_failed() {
    let shared: Arc<dyn HostBlocks> = Host::new(4, 100);
    let liar = Liar { holds: true, ..Liar::default() };
    let held = Arc::clone(&liar.held);
    let mut tiers = TierTransfers::new(vec![Box::new(liar)], 7);
    tiers.begin(&transfer(1, Direction::Load, &[(1, 1), (2, 2)]), &shared).unwrap();
    let mut sinks = std::mem::take(&mut *held.lock().unwrap());
    sinks.pop().unwrap().failed(BlockFault::Missing);
    assert_eq!(poll(&mut tiers), []);
    drop(sinks);
    let mut wrong = poll(&mut tiers).pop().unwrap().wrong;
    wrong.sort_unstable();
    assert_eq!(wrong, [(0, BlockFault::Failed), (1, BlockFault::Missing)]);
    let lost = Transfer { tier: Tier::Fourth, ..transfer(2, Direction::Load, &[(1, 1)]) };
    let refused = tiers.begin(&lost, &shared).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "ticket 2 is of the Fourth tier, and the worker has 1 below host memory"
    );
}

#[test]
fn a_tier_that_does_everything_wrong_never_delivers_a_wrong_block() {
    let host = Host::new(40, 64);
    let shared: Arc<dyn HostBlocks> = host.clone();
    let faults = FaultRules { late_polls_max: 5, ..FaultRules::all(3) };
    let tier = MemoryTier::new(MemoryTierOptions {
        faults,
        records_max: 15,
        ..MemoryTierOptions::default()
    });
    let made = tier.faults();
    let mut tiers = TierTransfers::new(vec![Box::new(tier)], 7);
    let (mut right, mut wrong, mut ticket) = (0, [0; BlockFault::ALL.len()], 0);
    for _ in 0..200 {
        for direction in [Direction::Store, Direction::Load] {
            let to = if direction == Direction::Store { 0 } else { 20 };
            let blocks: Vec<_> = (0..20).map(|at| (u128::from(at), at + to)).collect();
            ticket += 1;
            host.bytes.lock().unwrap()[20 * 64..].fill(0xff);
            tiers.begin(&transfer(ticket, direction, &blocks), &shared).unwrap();
            let settled = loop {
                if let Some(settled) = poll(&mut tiers).pop() {
                    break settled;
                }
            };
            for (at, _) in blocks.iter().filter(|_| direction == Direction::Load) {
                let fault = settled.wrong.iter().find(|(index, _)| u128::from(*index) == *at);
                match fault {
                    Some((_, fault)) => wrong[fault.index()] += 1,
                    None => {
                        assert_eq!(host.block(*at as usize + 20), vec![*at as u8; 64]);
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
fn transfers_of_a_faulty_sender_are_refused() {
    let tier: Box<dyn LowerTier> = Box::new(Liar { holds: true, ..Liar::default() });
    let mut tiers = TierTransfers::new(vec![tier], 7);
    let shared: Arc<dyn HostBlocks> = Host::new(8, 100);
    tiers.begin(&transfer(3, Direction::Load, &[(1, 1)]), &shared).unwrap();
    let waiting = transfer(4, Direction::Store, &[(2, 2)]);
    let check_in = |host: &[u64], transfers: Vec<Transfer>| {
        tiers.check(&StepPlan { step: 9, transfers, ..StepPlan::default() }, host, [&waiting])
    };
    let check = |transfers| check_in(&[8], transfers);
    let message = |transfers| check(transfers).unwrap_err().to_string();
    let load = |ticket, blocks: &[(u128, u32)]| transfer(ticket, Direction::Load, blocks);
    let store = |ticket, blocks: &[(u128, u32)]| transfer(ticket, Direction::Store, blocks);
    check(vec![store(5, &[(1, 3), (2, 2)]), store(6, &[(1, 3)]), load(7, &[(5, 4)])]).unwrap();
    assert_eq!(message(vec![load(4, &[(5, 5)])]), "plan 9 opens ticket 4 behind ticket 4");
    assert_eq!(
        message(vec![load(6, &[(5, 5)]), load(5, &[(6, 6)])]),
        "plan 9 opens ticket 5 behind ticket 6"
    );
    for (transfers, ticket, other, block) in [
        (vec![load(5, &[(5, 5), (6, 5)])], 5, 5, 5),
        (vec![load(5, &[(5, 5)]), load(6, &[(6, 5)])], 6, 5, 5),
        (vec![load(5, &[(5, 5)]), store(6, &[(6, 5)])], 6, 5, 5),
        (vec![store(5, &[(6, 1)])], 5, 3, 1),
        (vec![load(5, &[(6, 2)])], 5, 4, 2),
    ] {
        let expected = format!(
            "plan 9 has ticket {ticket} use host block {block}, as does ticket {other}, and one is a load"
        );
        assert_eq!(message(transfers), expected);
    }
    // Groups have host blocks of their own: of another one, the same place is another block.
    let further = |ticket, place| Transfer { group: GroupId(1), ..load(ticket, &[(5, place)]) };
    assert_eq!(message(vec![further(5, 5)]), "plan 9 names group 1, where there are 1");
    check_in(&[8, 4], vec![further(5, 1), further(6, 2), load(7, &[(6, 3)])]).unwrap();
    assert!(check_in(&[8, 4], vec![further(5, 4)]).is_err(), "there are 4 blocks of the group");
    assert!(check_in(&[8, 4], vec![further(5, 1), further(6, 1)]).is_err(), "one place twice");
    let forgets = vec![Forget::Block(Tier::Third, GroupId(1), BlockHash::ROOT)];
    let forgets = StepPlan { step: 9, forgets, ..StepPlan::default() };
    assert!(tiers.check(&forgets, &[8], []).is_err() && tiers.check(&forgets, &[8, 4], []).is_ok());
    assert!(check(vec![load(5, &[(5, 8)])]).is_err(), "there are 8 blocks");
    // A worker that begins anew takes tickets from 1 on.
    tiers.fence();
    tiers.begin(&transfer(1, Direction::Load, &[(1, 1)]), &shared).unwrap();
}

#[test]
fn layer_loads_of_a_faulty_sender_are_refused() {
    let tier: Box<dyn LowerTier> = Box::new(Liar { holds: true, ..Liar::default() });
    let mut tiers = TierTransfers::new(vec![tier], 7);
    let shared: Arc<dyn HostBlocks> = Host::new(8, 100);
    tiers.begin(&transfer(3, Direction::Load, &[(1, 1)]), &shared).unwrap();
    let load = |ticket, blocks: &[(u128, u32)]| transfer(ticket, Direction::Load, blocks);
    // Blocks are copied as they arrive by loads from before.
    let copies = |loads: &[(u64, u32, u32)], transfers: Vec<Transfer>| {
        let layer_load = |&(ticket, from, to): &(u64, u32, u32)| LayerLoad {
            ticket: TicketId(ticket),
            group: Default::default(),
            from: BlockId::new(from).unwrap(),
            to: BlockId::new(to).unwrap(),
        };
        let layer_loads = loads.iter().map(layer_load).collect();
        let plan = StepPlan { step: 9, transfers, layer_loads, ..StepPlan::default() };
        tiers.check(&plan, &[8], [&transfer(4, Direction::Load, &[(2, 2)])])
    };
    // Of tickets that are begun, that wait, and that have ended.
    copies(&[(3, 1, 0), (4, 2, 1), (2, 5, 2)], Vec::new()).unwrap();
    let message =
        |loads: &[(u64, u32, u32)], transfers| copies(loads, transfers).unwrap_err().to_string();
    let none = "as it arrives by ticket";
    assert_eq!(
        message(&[(3, 2, 0)], Vec::new()),
        format!("plan 9 copies host block 2 {none} 3, which does not bring it")
    );
    assert_eq!(
        message(&[(5, 5, 0)], vec![load(5, &[(5, 5)])]),
        format!("plan 9 copies host block 5 {none} 5, which does not bring it"),
        "it may arrive before the plan's copies are made"
    );
    assert_eq!(
        message(&[(2, 1, 0)], Vec::new()),
        "plan 9 has ticket 2 use host block 1, as does ticket 3, and one is a load"
    );
    assert_eq!(
        message(&[(2, 5, 0)], vec![load(5, &[(5, 5)])]),
        "plan 9 has ticket 2 use host block 5, as does ticket 5, and one is a load"
    );
    assert_eq!(
        message(&[(3, 1, 0), (4, 2, 0)], Vec::new()),
        "plan 9 copies two blocks to device block 0 as they arrive"
    );
    assert!(copies(&[(2, 8, 0)], Vec::new()).is_err(), "there are 8 blocks");
}

#[test]
fn what_a_load_has_not_brought_right_is_zero_before_its_memory_is_anybodys() {
    let host = Host::new(6, 100);
    let shared: Arc<dyn HostBlocks> = host.clone();
    let held = Arc::new(Mutex::new(Vec::new()));
    let records = Arc::new(Mutex::new(Vec::new()));
    let tier =
        |holds| Liar { holds, held: held.clone(), answers: records.clone(), ..Liar::default() };
    let mut stores = TierTransfers::new(vec![Box::new(tier(false))], 7);
    stores.begin(&transfer(1, Direction::Store, &[(0, 0), (1, 1), (2, 2)]), &shared).unwrap();
    assert_eq!(poll(&mut stores)[0].wrong, []);
    let mut loads = TierTransfers::new(vec![Box::new(tier(true))], 7);
    loads.begin(&transfer(1, Direction::Load, &[(0, 3), (1, 4), (2, 5)]), &shared).unwrap();
    let records = records.lock().unwrap().clone();
    let mut sinks = std::mem::take(&mut *held.lock().unwrap()).into_iter();
    let (mut right, mut short, mut foreign) =
        (sinks.next().unwrap(), sinks.next().unwrap(), sinks.next().unwrap());
    right.write_at(0, &records[0]).unwrap();
    right.done().unwrap();
    // Two sections, a part of the third, and a record of another block.
    let two = short.header_bytes() + 60;
    short.write_at(0, &records[1][..two + 11]).unwrap();
    assert!(foreign.write_at(0, &records[0]).is_err());
    assert_eq!(poll(&mut loads), [], "the others have not ended");
    assert_eq!(
        host.block(4)[60..],
        [&[1; 11][..], &[4; 29][..]].concat(),
        "as it was, and as it came"
    );
    drop((short, foreign));
    let settled = poll(&mut loads);
    assert_eq!(settled[0].wrong.len(), 2);
    assert_eq!(host.block(3), vec![0; 100]);
    assert_eq!(host.block(4), [&[1; 60][..], &[0; 40][..]].concat(), "what was right stays");
    assert_eq!(host.block(5), vec![0; 100], "another block's bytes");
    // What is stored is read only.
    let mut stores = TierTransfers::new(vec![Box::new(tier(true))], 7);
    stores.begin(&transfer(1, Direction::Store, &[(1, 1)]), &shared).unwrap();
    stores.give_up(TicketId(1));
    poll(&mut stores);
    assert_eq!(host.block(1), vec![1; 100]);
}
