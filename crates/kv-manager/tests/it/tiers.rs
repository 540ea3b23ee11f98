//! Tiers below host memory: what is visible when, what a failed load is, and who owns the blocks on their way.

use crate::common::below::blocks_of;
use crate::prelude::*;
use kv_pool::retention::{Retention, RetentionPolicy, TokenRange};

#[test]
fn a_block_is_found_below_once_every_worker_has_stored_it() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(16, 8) });
    let _sequence = rig.computed(0..8);
    let plan = rig.step(&mut []);
    let [store] = &plan.transfers[..] else { panic!("{plan:?}") };
    assert_eq!((store.direction, store.blocks.len()), (Direction::Store, 2));
    // The content was copied down first: the link was idle.
    assert_eq!(plan.copies.len(), 2);
    let names = store.blocks.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    assert!(names.iter().all(|name| !rig.is_stored(*name)), "nobody has said so");
    rig.settle(0, store.ticket, &[]);
    assert!(names.iter().all(|name| !rig.is_stored(*name)), "one worker has not said so");
    rig.settle(1, store.ticket, &[(1, BlockFault::Failed)]);
    assert_eq!(names.iter().map(|name| rig.is_stored(*name)).collect::<Vec<_>>(), [true, false]);
    // What was stored in part is to go.
    let plan = rig.step(&mut []);
    assert_eq!(plan.forgets, [Forget::Block(Tier::Third, GroupId(0), names[1])]);
    let stats = rig.manager.lower_stats();
    assert_eq!((stats.stored_blocks, stats.unstored_blocks, stats.open_tickets), ([1, 0], 1, 1));
    assert_eq!(plan.transfers[0].blocks[0].0, names[1], "it is tried once more");
}

#[test]
fn content_that_a_step_still_computes_is_not_stored() {
    let mut rig = Rig::new(16, 8);
    let mut sequence = admitted(rig.ask(0..8).1);
    let plan = staged(&mut rig.manager, &mut [&mut sequence]);
    let next = staged(&mut rig.manager, &mut []);
    assert!(plan.transfers.is_empty() && next.transfers.is_empty());
    complete(&mut rig.manager, 2, Outcome::Done);
    assert_eq!(rig.step(&mut []).transfers.len(), 1);
}

#[test]
fn content_of_a_failed_step_is_never_stored() {
    let mut rig = Rig::new(16, 8);
    let mut sequence = admitted(rig.ask(0..8).1);
    staged(&mut rig.manager, &mut [&mut sequence]);
    complete(&mut rig.manager, 1, Outcome::Failed);
    drop(sequence);
    assert!(rig.step(&mut []).transfers.is_empty());
}

#[test]
fn a_busy_link_is_left_to_the_copies_that_are_needed() {
    let mut rig = Rig::new(4, 8);
    rig.pass(0..8);
    // Evicts content to host memory, so what is new on the device waits; what went out is stored from there.
    let mut second = admitted(rig.ask(100..116).1);
    let plan = rig.step(&mut [&mut second]);
    assert!(!plan.copies.is_empty());
    let out: Vec<_> = plan.copies.iter().map(|copy| copy.to.id).collect();
    let stored = plan.transfers.iter().flat_map(|transfer| &transfer.blocks);
    assert!(
        stored.clone().count() > 0 && stored.clone().all(|(_, at)| out.contains(at)),
        "{plan:?}"
    );
}

#[test]
fn content_on_the_device_waits_for_an_idle_link() {
    let mut rig = Rig::new(9, 8);
    rig.manager.set_store_policy(Tier::Third, Box::new(StoreNone)).unwrap();
    assert!(rig.store(0..16).is_empty());
    rig.manager.set_store_policy(Tier::Third, Box::new(StoreAll)).unwrap();
    let _fresh = rig.computed(50..58);
    let mut large = admitted(rig.ask(100..120).1);
    let plan = rig.step(&mut [&mut large]);
    assert_eq!((plan.copies.len(), plan.transfers.len()), (2, 0), "evicted content goes first");
    drop(large);
    let plan = rig.step(&mut []);
    assert!(!plan.transfers.is_empty() && !plan.copies.is_empty(), "the link is idle");
}

#[test]
fn an_idle_engine_is_told_that_stores_wait() {
    let mut rig = Rig::new(9, 8);
    assert!(!rig.manager.has_decided());
    rig.pass(0..8);
    let _ = rig.manager.begin_step().unwrap();
    assert!(rig.manager.has_decided(), "its two blocks are complete, and are not stored");
    let plan = rig.step(&mut []);
    assert_eq!(plan.transfers.len(), 1);
    assert!(!rig.manager.has_decided(), "all that there is is on its way");
}

#[test]
fn an_idle_engine_is_not_told_of_stores_that_find_no_room() {
    let mut rig = Rig::new(4, 2);
    rig.manager.set_store_policy(Tier::Third, Box::new(StoreNone)).unwrap();
    let first = rig.store(0..8);
    assert!(first.is_empty());
    // What was there goes to host memory, which is full of content then.
    let large = rig.computed(100..116);
    rig.manager.set_store_policy(Tier::Third, Box::new(StoreAll)).unwrap();
    drop(large);
    let _ = rig.manager.begin_step().unwrap();
    assert_eq!(rig.pool().stats().secondary.empty, 0);
    let plan = rig.step(&mut []);
    assert!(plan.transfers.is_empty(), "{:?}", plan.transfers);
    assert!(!rig.manager.has_decided(), "nothing could be stored");
    let names = rig.pool().snapshot().blocks;
    let in_host = names.iter().filter(|block| block.location.tier == Tier::Secondary);
    let in_host: Vec<_> = in_host.filter_map(|block| block.hash).collect();
    assert_eq!(rig.manager.forget(&in_host), 2);
    rig.step(&mut []);
    assert!(!rig.transfers.is_empty(), "there is room in host memory");
}

#[test]
fn the_policy_decides_what_is_stored() {
    let mut rig = Rig::new(16, 8);
    rig.manager.set_store_policy(Tier::Third, Box::new(StoreNone)).unwrap();
    assert!(rig.store(0..8).is_empty());
    rig.manager.set_store_policy(Tier::Third, Box::new(StoreAll)).unwrap();
    assert_eq!(rig.store(50..58).len(), 2);
}

#[test]
fn a_name_that_a_tier_dropped_is_not_found_and_goes_everywhere() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(16, 8) });
    let names = rig.store(0..8);
    let blocks = blocks_of(&[names[0], BlockHash::ROOT]);
    let dropped = Dropped { worker: WorkerId(1), tier: Tier::Third, blocks };
    rig.manager.dropped(&dropped).unwrap();
    assert!(!rig.is_stored(names[0]) && rig.is_stored(names[1]));
    assert_eq!(rig.step(&mut []).forgets, [Forget::Block(Tier::Third, GroupId(0), names[0])]);
    let tiers = 1;
    let nowhere = Dropped { tier: Tier::Fourth, ..dropped };
    let refused = rig.manager.dropped(&nowhere);
    assert_eq!(refused, Err(CompletionError::NoTier { tier: Tier::Fourth, tiers }));
}

#[test]
fn a_name_that_is_dropped_while_it_is_stored_is_not_found() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(16, 8) });
    let _sequence = rig.computed(0..4);
    let store = rig.step(&mut []).transfers[0].clone();
    rig.settle(0, store.ticket, &[]);
    let (name, tier) = (store.blocks[0].0, Tier::Third);
    rig.manager
        .dropped(&Dropped { worker: WorkerId(0), tier, blocks: blocks_of(&[name]) })
        .unwrap();
    rig.settle(1, store.ticket, &[]);
    assert!(!rig.is_stored(name));
}

#[test]
fn a_hit_below_waits_alone_and_then_comes_from_the_host() {
    let mut rig = Rig::new(8, 4);
    let names = rig.store_away(0..12);
    assert!(names.iter().all(|name| rig.found(*name).is_none() && rig.is_stored(*name)));
    let mut requests = [request(0..14), request(500..508)];
    let mut answers = rig.manager.ask_all(&mut requests, u64::MAX);
    // The one behind it is not held up.
    let other = admitted(answers.pop().unwrap());
    let Some(Answer::Waiting(Waiting::Load { ticket, blocks })) = answers.pop() else { panic!() };
    assert_eq!(blocks, 3);
    let plan = rig.step(&mut []);
    let [load] = &plan.transfers[..] else { panic!("{plan:?}") };
    assert_eq!((load.ticket, load.direction), (ticket, Direction::Load));
    assert_eq!(load.blocks.iter().map(|(name, _)| *name).collect::<Vec<_>>(), names);
    assert!(matches!(rig.again(&mut requests[0]), Answer::Waiting(Waiting::Load { .. })));
    assert!(names.iter().all(|name| rig.found(*name).is_none()), "it has not arrived");
    rig.settle(0, ticket, &[]);
    assert!(names.iter().all(|name| rig.found(*name) == Some(Tier::Secondary)));
    let sequence = admitted(rig.again(&mut requests[0]));
    assert_eq!((sequence.cached_tokens(), sequence.onboarded_blocks()), (12, 3));
    // What was kept for it has moved to the device.
    assert!(names.iter().all(|name| rig.found(*name) == Some(Tier::Primary)));
    let stats = rig.manager.lower_stats();
    assert_eq!((stats.loaded_blocks, stats.waits, stats.kept_blocks), ([3, 0], 1, 0));
    drop((sequence, other));
}

#[test]
fn a_wrong_block_is_a_miss_and_the_request_computes_from_there() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(8, 4) });
    let (names, mut wanted, load) = rig.stored_and_loading(0..12, 0..14);
    rig.settle(1, load.ticket, &[(1, BlockFault::Checksum)]);
    rig.settle(0, load.ticket, &[]);
    let here = names.iter().map(|name| rig.found(*name).is_some()).collect::<Vec<_>>();
    assert_eq!(here, [true, false, true], "the others are right");
    // It is not asked for again, and every worker forgets it.
    assert!(!rig.is_stored(names[1]));
    let mut sequence = admitted(rig.again(&mut wanted));
    assert_eq!(sequence.cached_tokens(), 4);
    let plan = rig.step(&mut [&mut sequence]);
    assert_eq!(plan.forgets, [Forget::Block(Tier::Third, GroupId(0), names[1])]);
    assert_eq!(rig.manager.lower_stats().faults[BlockFault::Checksum.index()], 1);
}

#[test]
fn requests_with_one_prefix_wait_for_one_load() {
    let mut rig = Rig::new(8, 4);
    rig.store_away(0..12);
    let mut requests = [request(0..14), request(0..13)];
    let answers = rig.manager.ask_all(&mut requests, u64::MAX);
    let tickets = answers.iter().map(|answer| match answer {
        Answer::Waiting(Waiting::Load { ticket, .. }) => *ticket,
        other => panic!("{other:?}"),
    });
    let tickets = tickets.collect::<Vec<_>>();
    assert_eq!(tickets[0], tickets[1]);
    assert_eq!(rig.step(&mut []).transfers.len(), 1);
}

#[test]
fn a_request_that_does_not_wait_loads_nothing() {
    let mut rig = Rig::new(8, 4);
    rig.store_away(0..12);
    let mut hasty = request(0..14);
    hasty.waits = false;
    assert_eq!(admitted(rig.again(&mut hasty)).cached_tokens(), 0);
    assert!(rig.step(&mut []).transfers.is_empty());
}

#[test]
fn loaded_blocks_stay_for_their_request_until_its_deadline() {
    let mut rig = Rig::new(8, 4);
    let (names, _wanted, load) = rig.stored_and_loading(0..12, 0..14);
    rig.settle(0, load.ticket, &[]);
    assert_eq!(rig.manager.lower_stats().kept_blocks, 3);
    // Others' content does not push it out.
    rig.pass(700..732);
    rig.pass(800..832);
    assert!(names.iter().all(|name| rig.found(*name) == Some(Tier::Secondary)));
    rig.wait(WAIT);
    assert_eq!(rig.manager.lower_stats().kept_blocks, 0, "it did not come back in time");
}

#[test]
fn a_request_that_asks_for_a_load_keeps_no_block_from_others() {
    let mut rig = Rig::new(8, 8);
    let names = rig.store(0..24);
    let before = rig.pool().claimable();
    let step = rig.manager.begin_step().unwrap();
    assert!(names.iter().all(|name| rig.is_stored(*name)));
    assert!(rig.manager.ask_all(&mut [request(0..30)], 0).is_empty());
    assert_eq!(rig.pool().claimable(), before, "a look keeps blocks from others");
    drop(step);
}

#[test]
fn a_deadline_ends_the_wait_and_not_the_tickets_hold_on_its_blocks() {
    let mut rig = Rig::new(8, 4);
    let (names, mut wanted, load) = rig.stored_and_loading(0..12, 0..14);
    let places = load.blocks.iter().map(|(_, at)| *at).collect::<Vec<_>>();
    rig.wait(WAIT);
    let stats = rig.manager.lower_stats();
    assert_eq!((stats.quarantined_blocks, stats.ticket_blocks, stats.open_tickets), (3, 3, 1));
    // Nobody waits any longer: it is computed.
    let mut sequence = admitted(rig.again(&mut wanted));
    assert_eq!((sequence.cached_tokens(), rig.manager.lower_stats().late), (0, 1));
    rig.step(&mut [&mut sequence]);
    drop(sequence);
    // Whatever else needs host blocks, these are not among them.
    for turn in 1..4 {
        let mut other = admitted(rig.ask(900 * turn..900 * turn + 32).1);
        let plan = rig.step(&mut [&mut other]);
        assert!(
            plan.copies
                .iter()
                .all(|copy| !places.contains(&copy.to.id) || copy.to.tier != Tier::Secondary)
        );
        drop(other);
    }
    let stats = rig.pool().stats();
    assert_eq!(stats.secondary.claimed, 3);
    rig.settle(0, load.ticket, &[(0, BlockFault::Failed)]);
    assert_eq!(rig.manager.lower_stats().quarantined_blocks, 0);
    assert_eq!(rig.manager.lower_stats().loaded_blocks, [2, 0], "late, but right");
    assert_eq!(rig.pool().stats().secondary.claimed, 0);
    assert!(!rig.is_stored(names[0]));
}

#[test]
fn a_dropped_request_leaves_its_blocks_with_the_ticket() {
    let mut rig = Rig::new(8, 4);
    let (_, wanted, load) = rig.stored_and_loading(0..12, 0..14);
    drop(wanted);
    rig.step(&mut []);
    assert_eq!(rig.pool().stats().secondary.claimed, 3);
    rig.settle(0, load.ticket, &[]);
    rig.wait(WAIT);
    assert_eq!(rig.pool().stats().secondary.claimed, 0);
    rig.pool().check_integrity().unwrap();
}

#[test]
fn a_ticket_is_settled_once_by_each_worker() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(8, 4) });
    let (_, _wanted, load) = rig.stored_and_loading(0..12, 0..14);
    let (worker, ticket) = (WorkerId(0), load.ticket);
    let wrong = vec![(3, BlockFault::Missing)];
    let refused = rig.manager.settle(&Settled { worker, ticket, wrong });
    assert_eq!(refused, Err(CompletionError::NoBlock { ticket, index: 3, blocks: 3 }));
    rig.settle(0, ticket, &[]);
    let again = rig.manager.settle(&Settled { worker, ticket, wrong: Vec::new() });
    assert_eq!(again, Err(CompletionError::NotOpen { worker, ticket }));
    assert_eq!(rig.manager.lower_stats().open_tickets, 1, "the other worker has not settled it");
    rig.settle(1, ticket, &[]);
    assert_eq!(rig.manager.lower_stats().open_tickets, 0);
}

#[test]
fn blocks_of_a_lost_worker_are_kept_until_it_is_fenced() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(8, 4) });
    let (names, _wanted, load) = rig.stored_and_loading(0..12, 0..14);
    rig.settle(0, load.ticket, &[]);
    rig.manager.lose_worker(WorkerId(1)).unwrap();
    assert!(names.iter().all(|name| !rig.is_stored(*name)), "a share of each is lost");
    let stats = rig.manager.lower_stats();
    assert_eq!((stats.quarantined_blocks, rig.pool().stats().secondary.claimed), (3, 3));
    let (worker, ticket) = (WorkerId(1), load.ticket);
    let late = rig.manager.settle(&Settled { worker, ticket, wrong: Vec::new() });
    assert_eq!(late, Err(CompletionError::Lost { worker }), "it is not believed");
    rig.manager.fence_worker(worker).unwrap();
    let stats = rig.manager.lower_stats();
    assert_eq!((stats.open_tickets, stats.void_blocks), (0, 3));
    assert_eq!(rig.pool().stats().secondary.claimed, 0);
    assert!(names.iter().all(|name| rig.found(*name).is_none()));
}

#[test]
fn a_reset_voids_what_is_on_its_way() {
    let mut rig = Rig::new(8, 4);
    let (names, mut wanted, load) = rig.stored_and_loading(0..12, 0..14);
    rig.manager.reset();
    assert!(names.iter().all(|name| !rig.is_stored(*name)));
    let plan = rig.step(&mut []);
    assert!(plan.forgets.contains(&Forget::All(Tier::Third)));
    rig.settle(0, load.ticket, &[]);
    assert!(names.iter().all(|name| rig.found(*name).is_none()), "weights were changed");
    assert_eq!(admitted(rig.again(&mut wanted)).cached_tokens(), 0);
}

#[test]
fn a_store_that_ends_after_a_reset_is_forgotten() {
    let mut rig = Rig::new(16, 8);
    let _sequence = rig.computed(0..4);
    let store = rig.step(&mut []).transfers[0].clone();
    rig.manager.reset();
    rig.step(&mut []);
    rig.settle(0, store.ticket, &[]);
    let name = store.blocks[0].0;
    assert!(!rig.is_stored(name));
    assert!(rig.step(&mut []).forgets.contains(&Forget::Block(Tier::Third, GroupId(0), name)));
}

#[test]
fn a_forgotten_name_goes_from_every_tier_and_does_not_arrive() {
    let mut rig = Rig::new(8, 4);
    let (names, mut wanted, load) = rig.stored_and_loading(0..12, 0..14);
    assert_eq!(rig.manager.forget(&names[1..2]), 1);
    rig.settle(0, load.ticket, &[]);
    let here = names.iter().map(|name| rig.found(*name).is_some()).collect::<Vec<_>>();
    assert_eq!(here, [true, false, true]);
    assert!(!rig.is_stored(names[1]));
    assert_eq!(rig.step(&mut []).forgets, [Forget::Block(Tier::Third, GroupId(0), names[1])]);
    assert_eq!(admitted(rig.again(&mut wanted)).cached_tokens(), 4);
}

#[test]
fn retention_follows_a_name_down_and_back() {
    let mut rig = Rig::new(8, 4);
    let high = Retention { priority: Priority::MAX, duration: Some(Duration::from_secs(60)) };
    let ranges = vec![TokenRange { start: 0, end: Some(4), retention: high }];
    let mut wanted = request(0..14);
    wanted.retention = Some(Arc::new(RetentionPolicy::new(ranges, high).unwrap()));
    let mut sequence = admitted(rig.again(&mut wanted));
    rig.step(&mut [&mut sequence]);
    drop(sequence);
    let plan = rig.step(&mut []);
    let names = plan.transfers[0].blocks.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    rig.settle_all();
    // A high priority leaves the cache once its time is over.
    while rig.found(names[0]).is_some() {
        rig.wait(Duration::from_secs(61));
        rig.push_out();
    }
    let load = rig.load(&mut request(0..14));
    rig.settle(0, load.ticket, &[]);
    let priority = |rig: &Rig, name: BlockHash| {
        let blocks = rig.pool().snapshot().blocks;
        blocks.iter().find(|view| view.hash == Some(name)).map(|view| view.priority.get())
    };
    assert_eq!((priority(&rig, names[0]), priority(&rig, names[1])), (Some(100), Some(35)));
    rig.wait(WAIT);
    // What is said while it is cached holds for the copy below.
    let sequence = admitted(rig.ask(0..14).1);
    rig.manager.retain(&sequence, Priority::new(33).unwrap());
    drop(sequence);
    rig.step(&mut []);
    rig.push_out();
    assert!(names.iter().all(|name| rig.found(*name).is_none()));
    let load = rig.load(&mut request(0..14));
    rig.settle(0, load.ticket, &[]);
    assert_eq!((priority(&rig, names[0]), priority(&rig, names[1])), (Some(33), Some(33)));
}

#[test]
fn a_repair_tells_of_a_tier_below_in_chains() {
    let options = ManagerOptions { events_max: 64, lower: lower(), ..options(16, 8) };
    let mut rig = Rig::with(options);
    let names = rig.store(0..32);
    assert_eq!(names.len(), 8);
    let mut events = Vec::new();
    rig.manager.events().unwrap().read(&mut events).unwrap();
    let below = events.iter().filter_map(|event| match event {
        CacheEvent::Stored(stored) if stored.tier == Tier::Third => Some(stored),
        _ => None,
    });
    let below: Vec<_> = below.collect();
    assert_eq!(below.len(), 1, "one chain is one event: {below:?}");
    assert_eq!((&below[0].names, below[0].parent), (&names, None));
    assert_eq!(below[0].token_ids, (0..32).collect::<Vec<_>>());
    assert_eq!(below[0].first_token, Some(0));
}

#[test]
fn what_is_loaded_behind_content_in_host_memory_is_told_of_behind_it() {
    let options = ManagerOptions { events_max: 1024, lower: lower(), ..options(16, 24) };
    let mut rig = Rig::with(options);
    let names = rig.store_away(0..32);
    // The first half comes back, and is in host memory then.
    let mut first = Request::new((0..17).collect());
    let load = rig.load(&mut first);
    rig.settle(0, load.ticket, &[]);
    let mut sequence = admitted(rig.again(&mut first));
    rig.step(&mut [&mut sequence]);
    drop(sequence);
    rig.manager.set_store_policy(Tier::Third, Box::new(StoreNone)).unwrap();
    rig.pass(900_000..900_064);
    rig.step(&mut []);
    let mut reader = rig.manager.events().unwrap();
    let mut events = Vec::new();
    reader.read(&mut events).unwrap();
    assert!(rig.pool().find_and_pin(names[3], Tier::Secondary).is_some());
    // The second half is loaded behind it.
    let mut both = Request::new((0..33).collect());
    let load = rig.load(&mut both);
    assert_eq!(load.blocks.len(), 4);
    rig.settle(0, load.ticket, &[]);
    let mut sequence = admitted(rig.again(&mut both));
    assert_eq!(sequence.cached_tokens(), 32);
    rig.step(&mut [&mut sequence]);
    events.clear();
    reader.read(&mut events).unwrap();
    let on_device = events.iter().filter_map(|event| match event {
        CacheEvent::Stored(to) | CacheEvent::Moved { to, .. } => Some(to),
        _ => None,
    });
    let on_device = on_device.filter(|to| to.tier == Tier::Primary).flat_map(|to| to.names.clone());
    assert_eq!(on_device.collect::<Vec<_>>(), names);
}
