//! Tiers below host memory for several groups of layers: what is loaded is what all of them can serve.

use crate::prelude::*;

const FULL: GroupId = GroupId(0);
const WINDOW: GroupId = GroupId(1);
const STATE: GroupId = GroupId(2);
const GROUPS: [GroupId; 3] = [FULL, WINDOW, STATE];
const DEVICE: u64 = 16;
const HOST: u64 = 12;

fn group(kind: GroupKind) -> GroupOptions {
    let pool = PoolConfig { secondary_blocks: HOST, ..PoolConfig::primary_only(DEVICE) };
    GroupOptions { pool, ..common::group(kind, 0) }
}

/// Full attention, a window of six tokens, and a state with a checkpoint every eight.
fn rig(lower: LowerOptions) -> Rig {
    rig_with_window(6, lower)
}

fn rig_with_window(tokens: u32, lower: LowerOptions) -> Rig {
    let further = [
        group(GroupKind::Window { tokens, sinks: 0 }),
        group(GroupKind::State { checkpoint_tokens: 8, drafts: 0 }),
    ];
    Rig::with(ManagerOptions { lower, ..with_groups(options(DEVICE, HOST), further) })
}

impl Rig {
    fn compute(&mut self, ids: Range<u32>) {
        let (_, answer) = self.ask(ids);
        let mut sequence = admitted(answer);
        loop {
            self.step(&mut [&mut sequence]);
            let left = sequence.to_compute() as u32;
            if left == 0 {
                break;
            }
            self.manager.reserve(&mut sequence, left).unwrap().given().unwrap();
        }
    }

    /// Computes 22 tokens, has all that is named stored below, and has it leave the device and the host; the names.
    fn store_all(&mut self) -> Vec<BlockHash> {
        self.store_below(0..22);
        let stored = self.manager.lower_stats().stored_blocks;
        assert_eq!(stored, [5 + 5 + 3, 0], "states behind 8, 16 and 20 tokens");
        let names = self.names();
        assert!(names.iter().all(|name| self.is_below(FULL, *name)));
        names
    }

    fn store_below(&mut self, ids: Range<u32>) {
        self.compute(ids);
        self.settle_all();
        while self.manager.has_decided() {
            self.step(&mut []);
            self.settle_all();
        }
        self.push_all_out();
    }

    /// Stages a step of a sequence, which no worker has completed; its number.
    fn step_open(&mut self, sequence: &mut Sequence) -> u64 {
        staged(&mut self.manager, &mut [sequence]).step
    }

    fn complete(&mut self, step: u64) {
        let done = Completion { worker: WorkerId(0), step, outcome: Outcome::Done };
        self.manager.complete(done).unwrap();
    }

    /// Has everything leave the device and the host.
    fn push_all_out(&mut self) {
        self.manager.set_store_policy(Tier::Third, Box::new(StoreNone)).unwrap();
        for tier in [Tier::Secondary, Tier::Primary] {
            for group in GROUPS {
                self.manager.set_budget(group, tier, 0).unwrap();
            }
            self.step(&mut []);
        }
        for group in GROUPS {
            self.manager.set_budget(group, Tier::Primary, DEVICE).unwrap();
            self.manager.set_budget(group, Tier::Secondary, HOST).unwrap();
            assert_eq!(self.manager.pool(group).unwrap().match_prefix(&self.names()).len(), 0);
        }
    }

    /// The names of the five blocks that 22 tokens fill.
    fn names(&self) -> Vec<BlockHash> {
        common::names(0..20)
    }

    /// Whether a block is cached on the device or in host memory.
    fn has(&self, group: GroupId, name: BlockHash) -> bool {
        let pool = self.manager.pool(group).unwrap();
        [Tier::Primary, Tier::Secondary].iter().any(|tier| pool.find_and_pin(name, *tier).is_some())
    }

    fn is_below(&self, group: GroupId, name: BlockHash) -> bool {
        self.manager.find_below(group, name) == Some(Tier::Third)
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
        rig.settle_loads(&loads);
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
        assert_eq!((loads.len(), loads[0].blocks.len()), (1, 1), "ticket {ticket}");
        rig.settle(0, loads[0].ticket, &[]);
    }
    assert_eq!(admitted(rig.again(&mut wanted)).cached_tokens(), 20);
    assert_eq!(rig.manager.lower_stats().kept_blocks, 0);
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
fn blocks_that_tiers_move_are_counted_by_group() {
    let mut rig = rig(lower());
    rig.store_all();
    let stored = GROUPS.map(|group| rig.manager.lower_blocks(group).unwrap().stored);
    assert_eq!(stored, [[5, 0], [5, 0], [3, 0]]);
    assert_eq!(rig.manager.lower_blocks(GroupId(3)), None);
    let mut wanted = request(0..22);
    let loads = rig.loads(&mut wanted);
    rig.settle_loads(&loads);
    let loaded = GROUPS.map(|group| rig.manager.lower_blocks(group).unwrap().loaded);
    assert_eq!(loaded, [[5, 0], [2, 0], [1, 0]]);
    let all = rig.manager.lower_stats();
    assert_eq!((all.stored_blocks, all.loaded_blocks), ([13, 0], [8, 0]));
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
    assert_eq!(rig.manager.lower_stats().waits, 0);
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
        let blocks = rig.manager.pool(load.group).unwrap().snapshot().blocks;
        let back = blocks.iter().find(|view| view.hash == Some(load.blocks[0].0));
        assert_eq!(back.unwrap().priority.get(), 33, "{:?}", load.group);
    }
}

/// A request that was admitted while loads bring what all groups need of its first 20 tokens; the loads.
fn entered(rig: &mut Rig) -> (Sequence, Vec<Transfer>) {
    rig.store_all();
    let mut wanted = by_layers(0..23);
    let loads = rig.loads(&mut wanted);
    assert_eq!(loads.len(), 3);
    let sequence = admitted(rig.again(&mut wanted));
    assert_eq!((sequence.cached_tokens(), sequence.next()), (20, 3));
    (sequence, loads)
}

#[test]
fn a_sequence_of_several_groups_is_admitted_while_each_of_them_is_loaded() {
    let mut rig = rig(lower());
    let (mut sequence, loads) = entered(&mut rig);
    let plan = staged(&mut rig.manager, &mut [&mut sequence]);
    // Every block that is loaded goes to the sequence's block at its place; a state has one place.
    let places = [0..5, 3..5, 0..1];
    for ((group, places), load) in GROUPS.into_iter().zip(places).zip(&loads) {
        let copied = plan.layer_loads.iter().filter(|copy| copy.group == group);
        let copied: Vec<_> = copied.map(|copy| (copy.ticket, copy.from, copy.to)).collect();
        let to = places.map(|place| sequence.block(group, place).unwrap());
        let from = load.blocks.iter().map(|&(_, block)| block);
        let expected: Vec<_> = from.zip(to).map(|(from, to)| (load.ticket, from, to)).collect();
        assert_eq!(copied, expected, "{group:?}");
    }
    assert!(plan.copies.is_empty(), "nothing was cached: {:?}", plan.copies);
    assert_eq!(sequence.loads(), Some(loads[0].ticket));
}

#[test]
fn ids_of_a_sequence_of_several_groups_count_when_all_its_loads_have_ended() {
    let mut rig = rig(lower());
    let (mut sequence, loads) = entered(&mut rig);
    let staged = staged(&mut rig.manager, &mut [&mut sequence]).step;
    for load in &loads {
        let later = rig.manager.commit(&mut sequence, staged, &[7]).unwrap_err();
        let reason = matches!(later, CommitError::Sequence(SequenceError::Loading { .. }));
        assert!(reason, "{later}, before {:?} has ended", load.group);
        rig.settle(0, load.ticket, &[]);
    }
    rig.complete(staged);
    assert_eq!(rig.manager.commit(&mut sequence, staged, &[7]), Ok(Committed::Taken));
    assert_eq!((sequence.resolved(), sequence.known()), (23, 24));
    assert_eq!(rig.manager.lower_stats().redone, 0);
    // The blocks behind the load get their names, in every group that has any.
    rig.manager.reserve(&mut sequence, 1).unwrap().given().unwrap();
    rig.step(&mut [&mut sequence]);
    let last = common::names((0..23).chain([7]))[5];
    for group in [FULL, WINDOW] {
        assert!(rig.has(group, last), "{group:?}");
    }
}

#[test]
fn h21_a_block_that_one_group_is_loaded_wrong_is_computed_again_by_all() {
    // Behind a state that is wrong nothing can go on, and none is on the device; a window that ends further ahead
    // needs blocks that were not loaded.
    for (group, index, from) in [(FULL, 0, 0), (FULL, 3, 0), (WINDOW, 0, 0), (STATE, 0, 0)] {
        let mut rig = rig(lower());
        let (mut sequence, loads) = entered(&mut rig);
        let staged = rig.step_open(&mut sequence);
        for load in &loads {
            let wrong = (load.group == group).then_some((index, BlockFault::Checksum));
            rig.settle(0, load.ticket, wrong.as_slice());
        }
        rig.complete(staged);
        let committed = rig.manager.commit(&mut sequence, staged, &[7]);
        assert_eq!(committed, Ok(Committed::Redo { from }), "{group:?}");
        assert_eq!((sequence.resolved(), sequence.known()), (from, 23));
        assert_eq!(rig.manager.lower_stats().redone, 1);
        // It is computed again as far as checkpoints allow, and all is named then.
        while sequence.to_compute() > 0 {
            let left = sequence.to_compute() as u32;
            rig.manager.reserve(&mut sequence, left).unwrap().given().unwrap();
            rig.step(&mut [&mut sequence]);
        }
        let last = rig.names()[4];
        for group in GROUPS {
            assert!(rig.has(group, last), "{group:?}");
        }
    }
}

#[test]
fn nothing_of_any_group_is_named_behind_an_open_load() {
    let mut rig = rig(lower());
    let (mut sequence, _) = entered(&mut rig);
    rig.manager.extend(&mut sequence, &[23, 24, 25, 26]).unwrap();
    rig.manager.reserve(&mut sequence, 4).unwrap().given().unwrap();
    rig.step_open(&mut sequence);
    for name in common::names(0..27) {
        for group in GROUPS {
            assert!(!rig.has(group, name), "{group:?}");
        }
    }
    // A sequence that goes before its load has ended names nothing either.
    drop(sequence);
    for name in common::names(0..27) {
        for group in GROUPS {
            assert!(!rig.has(group, name), "{group:?}");
        }
    }
}

#[test]
fn a_part_that_is_cached_is_not_loaded_and_the_rest_is_by_layers() {
    let mut rig = rig(lower());
    let names = rig.store_all();
    // The first eight tokens come back, for another request.
    let mut short = request(0..9);
    let loads = rig.loads(&mut short);
    rig.settle_loads(&loads);
    let first = admitted(rig.again(&mut short));
    assert_eq!(first.cached_tokens(), 8);
    let mut wanted = by_layers(0..23);
    let loads = rig.loads(&mut wanted);
    let expected =
        [(FULL, names[2..].to_vec()), (WINDOW, names[3..].to_vec()), (STATE, vec![names[4]])];
    assert_eq!(loaded(&loads), expected);
    let mut sequence = admitted(rig.again(&mut wanted));
    assert_eq!(sequence.cached_tokens(), 20);
    let shared = (0..2).map(|place| first.block(GroupId(0), place)).collect::<Vec<_>>();
    assert_eq!((0..2).map(|place| sequence.block(GroupId(0), place)).collect::<Vec<_>>(), shared);
    let staged = rig.step_open(&mut sequence);
    // The third block of the full group is wrong.
    for load in &loads {
        let wrong = (load.group == FULL).then_some((0, BlockFault::Short));
        rig.settle(0, load.ticket, wrong.as_slice());
    }
    rig.complete(staged);
    let committed = rig.manager.commit(&mut sequence, staged, &[7]);
    assert_eq!(committed, Ok(Committed::Redo { from: 0 }), "the state behind 8 is in host memory");
    assert!(names[..2].iter().all(|name| rig.has(FULL, *name)), "it stays cached");
}

#[test]
fn what_is_cached_behind_a_load_is_waited_for() {
    let mut rig = rig_with_window(10, lower());
    rig.store_below(0..26);
    // Behind 24 tokens a window begins with the fourth block.
    let mut long = request(0..26);
    let loads = rig.loads(&mut long);
    rig.settle_loads(&loads);
    assert_eq!(admitted(rig.again(&mut long)).cached_tokens(), 24);
    // Behind 16 it ends with that block, which is cached, and begins with two that are not.
    let mut wanted = by_layers(0..19);
    let loads = rig.loads(&mut wanted);
    assert_eq!(loads.iter().map(|load| load.group).collect::<Vec<_>>(), [WINDOW, STATE]);
    assert_eq!(loads[0].blocks.len(), 2);
    assert!(matches!(rig.again(&mut wanted), Answer::Waiting(Waiting::Load { .. })));
    rig.settle(0, loads[0].ticket, &[]);
    let sequence = admitted(rig.again(&mut wanted));
    assert_eq!((sequence.cached_tokens(), sequence.loads()), (16, Some(loads[1].ticket)));
}

#[test]
fn a_sequence_enters_with_all_that_the_tiers_have() {
    // One ticket at a time brings one block.
    let one = LowerOptions { ticket_blocks_max: 1, loads_open_max: 1, ..lower() };
    let mut rig = rig(one);
    rig.store_all();
    let mut wanted = by_layers(0..23);
    for ticket in 0..7 {
        let load = rig.loads(&mut wanted).pop().unwrap();
        let answer = rig.again(&mut wanted);
        assert!(matches!(answer, Answer::Waiting(Waiting::Load { .. })), "ticket {ticket}");
        rig.settle(0, load.ticket, &[]);
    }
    rig.loads(&mut wanted);
    assert_eq!(admitted(rig.again(&mut wanted)).cached_tokens(), 20);
    // Host memory has room for a shorter prefix of one group, which is loaded first.
    let mut rig = rig_with_window(6, lower());
    rig.store_all();
    rig.manager.set_budget(FULL, Tier::Secondary, 4).unwrap();
    let mut wanted = by_layers(0..23);
    assert_eq!(rig.loads(&mut wanted).len(), 3);
    let answer = rig.again(&mut wanted);
    assert!(matches!(answer, Answer::Waiting(Waiting::Load { .. })), "{answer:?}");
}

#[test]
fn nothing_is_pinned_for_a_request_whose_loads_have_no_room() {
    let mut rig = rig(lower());
    rig.store_all();
    let mut short = request(0..9);
    let loads = rig.loads(&mut short);
    rig.settle_loads(&loads);
    drop(admitted(rig.again(&mut short)));
    rig.step(&mut []);
    let mut wanted = by_layers(0..23);
    rig.loads(&mut wanted);
    // The prompt takes six blocks of the full group, two of which are cached, and three of which are loaded.
    rig.manager.set_budget(FULL, Tier::Primary, 5).unwrap();
    rig.step(&mut []);
    let stats = |rig: &Rig| GROUPS.map(|group| rig.manager.pool(group).unwrap().stats());
    let before = stats(&rig);
    assert!(matches!(rig.again(&mut wanted), Answer::NoRoom(_)));
    assert_eq!(stats(&rig), before);
    rig.manager.set_budget(FULL, Tier::Primary, 6).unwrap();
    assert_eq!(admitted(rig.again(&mut wanted)).cached_tokens(), 20);
}

#[test]
fn h21_a_state_that_was_loaded_wrong_before_its_sequence_was_staged_is_not_gone_on_from() {
    let mut rig = rig(lower());
    let (mut sequence, loads) = entered(&mut rig);
    // The plan copies what comes, in a step of nobody.
    let staged = staged(&mut rig.manager, &mut []).step;
    for load in &loads {
        let wrong = (load.group == STATE).then_some((0, BlockFault::Checksum));
        rig.settle(0, load.ticket, wrong.as_slice());
    }
    rig.complete(staged);
    let refused = rig.manager.reserve(&mut sequence, 3).unwrap_err();
    let redo = ReserveError::Sequence(SequenceError::Redo { from: 0 });
    assert_eq!(refused, redo);
    assert_eq!(sequence.resolved(), 0);
}
