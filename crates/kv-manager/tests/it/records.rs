//! A worker's part of tiers below host memory: plans that are not believed.

use crate::prelude::*;

/// Host memory that nobody looks at.
#[derive(Debug)]
struct Host;

impl HostBlocks for Host {
    fn block_bytes(&self) -> usize {
        100
    }

    fn read(&self, _: BlockId, _: usize, _: &mut [u8]) -> bool {
        false
    }

    fn write(&self, _: BlockId, _: usize, _: &[u8]) -> bool {
        false
    }
}

/// A tier that does nothing with what it is told.
#[derive(Debug, Default)]
struct Holder(Vec<BlockSource>, Vec<BlockSink>);

impl LowerTier for Holder {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        self.0.extend(blocks);
    }
    fn load(&mut self, blocks: Vec<BlockSink>) {
        self.1.extend(blocks);
    }
    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}
    fn clear(&mut self) {}
    fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
}

/// A tier that drops a block, and ends a store that this makes room for, as soon as it was asked what it has dropped.
#[derive(Debug, Default)]
struct Quick(Vec<BlockSource>, Vec<(GroupId, BlockHash)>);

impl LowerTier for Quick {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        self.0.extend(blocks);
    }
    fn load(&mut self, _: Vec<BlockSink>) {}
    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}
    fn clear(&mut self) {}
    fn poll(&mut self, dropped: &mut Vec<(GroupId, BlockHash)>) {
        dropped.append(&mut self.1);
        for source in self.0.drain(..) {
            self.1.push((source.group(), BlockHash::from_u128(!source.name().to_u128())));
            source.done();
        }
    }
}

#[test]
fn what_made_room_for_a_store_is_told_with_its_end() {
    let mut tiers = TierTransfers::new(vec![Box::new(Quick::default())], 7);
    let host: Arc<dyn HostBlocks> = Arc::new(Host);
    tiers.begin(&transfer(1, Direction::Store, &[(1, 1)]), &host).unwrap();
    let (mut settled, mut dropped) = (Vec::new(), Vec::new());
    tiers.poll(WorkerId(0), &mut settled, &mut dropped);
    assert_eq!(settled.len(), 1);
    let blocks = vec![(GroupId(0), BlockHash::from_u128(!1))];
    assert_eq!(dropped, [Dropped { worker: WorkerId(0), tier: Tier::Third, blocks }]);
}

fn transfer(ticket: u64, direction: Direction, blocks: &[(u128, u32)]) -> Transfer {
    let block = |&(of, at): &(u128, u32)| (BlockHash::from_u128(of), BlockId::new(at).unwrap());
    let (ticket, tier, blocks) =
        (TicketId(ticket), Tier::Third, blocks.iter().map(block).collect());
    Transfer { ticket, tier, group: Default::default(), direction, blocks }
}

/// A worker with one tier, at which ticket 3 is open, a load to host block 1.
fn worker() -> (TierTransfers, Arc<dyn HostBlocks>) {
    let mut tiers = TierTransfers::new(vec![Box::new(Holder::default())], 7);
    let host: Arc<dyn HostBlocks> = Arc::new(Host);
    tiers.begin(&transfer(3, Direction::Load, &[(1, 1)]), &host).unwrap();
    (tiers, host)
}

#[test]
fn a_transfer_of_a_tier_that_there_is_not_is_refused() {
    let (mut tiers, host) = worker();
    let lost = Transfer { tier: Tier::Fourth, ..transfer(4, Direction::Load, &[(1, 1)]) };
    let refused = tiers.begin(&lost, &host).unwrap_err();
    assert_eq!(refused.to_string(), "there is no Fourth tier below host memory: there are 1");
    assert_eq!(tiers.open(), 1);
    let arrived =
        |ticket, block| tiers.arrived(TicketId(ticket), BlockId::new(block).unwrap()).is_some();
    assert!(arrived(3, 1) && !arrived(3, 2) && !arrived(4, 1));
}

#[test]
fn transfers_of_a_faulty_sender_are_refused() {
    let (mut tiers, host) = worker();
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
    tiers.begin(&transfer(1, Direction::Load, &[(1, 1)]), &host).unwrap();
}

#[test]
fn layer_loads_of_a_faulty_sender_are_refused() {
    let (tiers, _) = worker();
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
