//! Tiers below host memory for several groups of layers: what is loaded is what all of them can serve.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::below::{Rig, StoreNone, lower, request};
use common::{BLOCK, admitted, options};
use kv_manager::tiers::BlockFault;
use kv_manager::{
    Answer, Direction, Dropped, Forget, GroupId, GroupKind, GroupOptions, LowerOptions,
    ManagerOptions, Request, Transfer, Waiting, WorkerId,
};
use kv_pool::{BlockHash, PoolConfig, Priority, Tier};

const FULL: GroupId = GroupId(0);
const WINDOW: GroupId = GroupId(1);
const STATE: GroupId = GroupId(2);
const GROUPS: [GroupId; 3] = [FULL, WINDOW, STATE];
const DEVICE: u64 = 16;
const HOST: u64 = 12;

fn group(kind: GroupKind) -> GroupOptions {
    GroupOptions {
        kind,
        block_tokens: BLOCK,
        pool: PoolConfig { secondary_blocks: HOST, ..PoolConfig::primary_only(DEVICE) },
        blocks_per_sequence_max: 16,
        watermark_blocks: 0,
    }
}

/// Full attention, a window of six tokens, and a state with a checkpoint every eight.
fn rig(lower: LowerOptions) -> Rig {
    let further_groups = vec![
        group(GroupKind::Window { tokens: 6, sinks: 0 }),
        group(GroupKind::State { checkpoint_tokens: 8 }),
    ];
    Rig::with(ManagerOptions { lower, further_groups, ..options(DEVICE, HOST) })
}

impl Rig {
    fn compute(&mut self, ids: std::ops::Range<u32>) {
        let (_, answer) = self.ask(ids);
        let mut sequence = admitted(answer);
        loop {
            self.step(&mut [&mut sequence]);
            let left = sequence.to_compute() as u32;
            if left == 0 {
                break;
            }
            self.manager.reserve(&mut sequence, left).unwrap();
        }
    }

    /// Computes 22 tokens, has all that is named stored below, and has it leave the device and the host; the names.
    fn store_all(&mut self) -> Vec<BlockHash> {
        self.compute(0..22);
        self.settle_all();
        while self.manager.has_decided() {
            self.step(&mut []);
            self.settle_all();
        }
        let stored = self.manager.lower_stats().stored_blocks;
        assert_eq!(stored, [5 + 5 + 3, 0], "states behind 8, 16 and 20 tokens");
        self.push_all_out();
        let names = self.names();
        assert!(names.iter().all(|name| self.is_below(FULL, *name)));
        names
    }

    /// Has everything leave the device and the host.
    fn push_all_out(&mut self) {
        self.manager.set_store_policy(Box::new(StoreNone));
        for tier in [Tier::Secondary, Tier::Primary] {
            for group in GROUPS {
                self.manager.set_budget(group, tier, 0).unwrap();
            }
            self.step(&mut []);
        }
        for group in GROUPS {
            self.manager.set_budget(group, Tier::Primary, DEVICE).unwrap();
            self.manager.set_budget(group, Tier::Secondary, HOST).unwrap();
            assert_eq!(self.manager.pool_of(group).unwrap().match_prefix(&self.names()).len(), 0);
        }
    }

    /// The names of the five blocks that 22 tokens fill.
    fn names(&self) -> Vec<BlockHash> {
        let ids: Vec<u32> = (0..20).collect();
        let mut parent = BlockHash::ROOT;
        let name = |ids: &[u32]| {
            parent = BlockHash::chain(parent, ids);
            parent
        };
        ids.chunks(BLOCK as usize).map(name).collect()
    }

    fn is_below(&self, group: GroupId, name: BlockHash) -> bool {
        self.manager.find_below_of(group, name) == Some(Tier::Third)
    }

    /// Asks for a prompt that is stored below, which begins loads; their transfers.
    fn loads(&mut self, request: &mut Request) -> Vec<Transfer> {
        let answer = self.again(request);
        assert!(matches!(answer, Answer::Waiting(Waiting::Load { .. })), "{answer:?}");
        let loads = self.step(&mut []).transfers;
        self.transfers.clear();
        loads
    }
}

/// What is loaded of each group.
fn loaded(loads: &[Transfer]) -> Vec<(GroupId, Vec<BlockHash>)> {
    assert!(loads.iter().all(|load| load.direction == Direction::Load));
    let names = |load: &Transfer| load.blocks.iter().map(|(name, _)| *name).collect();
    loads.iter().map(|load| (load.group, names(load))).collect()
}

#[test]
fn h26_each_group_is_loaded_what_it_needs_behind_one_end() {
    let mut rig = rig(lower());
    let names = rig.store_all();
    let mut wanted = request(0..23);
    let loads = rig.loads(&mut wanted);
    let expected = [
        (FULL, names.clone()),
        // Token 20 reads from token 15 on.
        (WINDOW, names[3..].to_vec()),
        (STATE, names[4..].to_vec()),
    ];
    assert_eq!(loaded(&loads), expected);
    // One group alone serves nothing.
    for load in &loads {
        assert!(matches!(rig.again(&mut wanted), Answer::Waiting(Waiting::Load { .. })));
        rig.settle(0, load.ticket, &[]);
    }
    let sequence = admitted(rig.again(&mut wanted));
    assert_eq!(sequence.cached_tokens(), 20);
    let stats = rig.manager.lower_stats();
    assert_eq!((stats.kept_blocks, stats.open_tickets, stats.waits), (0, 0, 3));
    let plan = rig.step(&mut []);
    let back = |group| {
        let copies = plan.copies.iter().filter(|copy| copy.group == group);
        copies.filter(|copy| copy.from.tier == Tier::Secondary).count()
    };
    assert_eq!(GROUPS.map(back), [5, 2, 1]);
}

#[test]
fn h26_a_wrong_block_of_one_group_shortens_the_hit_of_all() {
    for (group, index) in [(WINDOW, 1), (STATE, 0), (FULL, 4)] {
        let mut rig = rig(lower());
        let names = rig.store_all();
        let mut wanted = request(0..23);
        for load in rig.loads(&mut wanted) {
            let wrong = [(index, BlockFault::Checksum)];
            rig.settle(0, load.ticket, if load.group == group { &wrong } else { &[] });
        }
        // It is forgotten in its group, and nowhere else.
        assert_eq!(GROUPS.map(|of| rig.is_below(of, names[4])), GROUPS.map(|of| of != group));
        // Judged anew: the window of 16 tokens needs the blocks from token 11 on, and the state is another one.
        let loads = rig.loads(&mut wanted);
        assert!(rig.forgets.contains(&Forget::Block(Tier::Third, group, names[4])));
        assert_eq!(loaded(&loads), [(WINDOW, vec![names[2]]), (STATE, vec![names[3]])]);
        loads.iter().for_each(|load| rig.settle(0, load.ticket, &[]));
        assert_eq!(admitted(rig.again(&mut wanted)).cached_tokens(), 16, "{group:?}");
    }
}

#[test]
fn h26_what_one_group_lacks_is_loaded_for_none() {
    let mut rig = rig(lower());
    let names = rig.store_all();
    let blocks = names.iter().map(|&name| (STATE, name)).collect();
    let dropped = Dropped { worker: WorkerId(0), tier: Tier::Third, blocks };
    rig.manager.dropped(&dropped).unwrap();
    assert!(names.iter().all(|name| rig.is_below(WINDOW, *name)));
    assert_eq!(admitted(rig.again(&mut request(0..23))).cached_tokens(), 0);
    assert_eq!(rig.manager.lower_stats().open_tickets, 0);
}

#[test]
fn a_load_begins_only_if_the_host_has_room_in_all_groups() {
    for (group, blocks) in [(WINDOW, 1), (STATE, 0)] {
        let mut rig = rig(lower());
        rig.store_all();
        rig.manager.set_budget(group, Tier::Secondary, blocks).unwrap();
        assert_eq!(admitted(rig.again(&mut request(0..23))).cached_tokens(), 0);
        assert_eq!(rig.manager.lower_stats().open_tickets, 0);
    }
    // There is a shorter end that the host has room for.
    let mut rig = rig(lower());
    let names = rig.store_all();
    rig.manager.set_budget(FULL, Tier::Secondary, 4).unwrap();
    let loads = rig.loads(&mut request(0..23));
    let expected =
        [(FULL, names[..4].to_vec()), (WINDOW, names[2..4].to_vec()), (STATE, vec![names[3]])];
    assert_eq!(loaded(&loads), expected);
}

#[test]
fn a_long_prefix_of_several_groups_is_loaded_to_its_end() {
    let mut rig = rig(LowerOptions { ticket_blocks_max: 1, loads_open_max: 1, ..lower() });
    rig.store_all();
    let mut wanted = request(0..23);
    for ticket in 0..8 {
        let loads = rig.loads(&mut wanted);
        assert_eq!(loads.len(), 1, "ticket {ticket}");
        rig.settle(0, loads[0].ticket, &[]);
    }
    assert_eq!(admitted(rig.again(&mut wanted)).cached_tokens(), 20);
}

#[test]
fn groups_take_turns_with_the_tickets_of_stores() {
    let mut rig = rig(LowerOptions { ticket_blocks_max: 1, stores_open_max: 1, ..lower() });
    rig.compute(0..22);
    let mut groups = Vec::new();
    while groups.len() < 6 {
        rig.step(&mut []);
        groups.extend(rig.transfers.iter().map(|transfer| transfer.group));
        rig.settle_all();
    }
    for turn in groups.windows(3) {
        assert!(GROUPS.iter().all(|group| turn.contains(group)), "{groups:?}");
    }
}

#[test]
fn a_prefetch_loads_what_all_groups_need() {
    let mut rig = rig(lower());
    let names = rig.store_all();
    assert_eq!(rig.manager.prefetch(&names), 5 + 2 + 1);
    assert_eq!(rig.step(&mut []).transfers.len(), 3);
    assert_eq!(rig.manager.prefetch(&names), 5 + 2 + 1, "they are on their way still");
    assert!(rig.step(&mut []).transfers.is_empty());
    rig.settle_all();
    assert_eq!(admitted(rig.again(&mut request(0..23))).cached_tokens(), 20);
}

#[test]
fn what_is_forgotten_or_retained_is_so_in_all_groups_below() {
    let mut rig = rig(lower());
    let names = rig.store_all();
    assert_eq!(rig.manager.forget(&names[4..]), 1);
    assert_eq!(GROUPS.map(|group| rig.is_below(group, names[4])), [false; 3]);
    assert!(rig.is_below(FULL, names[3]) && rig.is_below(STATE, names[3]));
    // Retention follows the names of every group down and back.
    let mut wanted = request(0..18);
    rig.loads(&mut wanted).iter().for_each(|load| rig.settle(0, load.ticket, &[]));
    let sequence = admitted(rig.again(&mut wanted));
    assert_eq!(sequence.cached_tokens(), 16);
    rig.manager.retain(&sequence, Priority::new(33).unwrap());
    drop(sequence);
    rig.step(&mut []);
    rig.push_all_out();
    let loads = rig.loads(&mut request(0..18));
    assert_eq!(loads.len(), 3);
    for load in loads {
        rig.settle(0, load.ticket, &[]);
        let blocks = rig.manager.pool_of(load.group).unwrap().snapshot().blocks;
        let back = blocks.iter().find(|view| view.hash == Some(load.blocks[0].0));
        assert_eq!(back.unwrap().priority.get(), 33, "{:?}", load.group);
    }
}
