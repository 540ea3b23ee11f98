//! What is stored below host memory when, and how requests wait for loads.

use crate::common::below::blocks_of;
use crate::prelude::*;

#[test]
fn what_is_being_loaded_is_not_stored_before_the_load_has_ended() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(8, 4) });
    let (names, mut wanted, load) = rig.stored_and_loading(0..12, 0..14);
    // Worker 0 loads it still when the name leaves the tier of worker 1, and the request computes it.
    let dropped = Dropped { worker: WorkerId(1), tier: Tier::Third, blocks: blocks_of(&names) };
    rig.manager.dropped(&dropped).unwrap();
    rig.wait(WAIT);
    let mut sequence = admitted(rig.again(&mut wanted));
    assert_eq!(sequence.cached_tokens(), 0);
    rig.step(&mut [&mut sequence]);
    // The host has room, so nothing but the load keeps the store back.
    for blocks in [0, 4] {
        rig.manager.set_budget(GroupId(0), Tier::Secondary, blocks).unwrap();
        rig.step(&mut []);
    }
    assert!(rig.pool().stats().secondary.empty > 0);
    assert!(rig.transfers.iter().all(|of| of.ticket <= load.ticket), "it stores what it loads");
    // When the load has ended, the content that was computed is stored.
    let faults: Vec<_> = (0..3).map(|at| (at, BlockFault::Missing)).collect();
    rig.settle(0, load.ticket, &[]);
    rig.settle(1, load.ticket, &faults);
    let plan = rig.step(&mut []);
    let [store] = &plan.transfers[..] else { panic!("{plan:?}") };
    assert_eq!(store.direction, Direction::Store);
    assert_eq!(store.blocks.iter().map(|(name, _)| *name).collect::<Vec<_>>(), names);
}

#[test]
fn a_load_that_brings_nothing_any_more_is_not_waited_for() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(8, 4) });
    let (_, mut wanted, load) = rig.stored_and_loading(0..12, 0..14);
    rig.manager.reset();
    // Its ticket is open still, and the deadline has not passed.
    assert_eq!(admitted(rig.again(&mut wanted)).cached_tokens(), 0);
    let stats = rig.manager.lower_stats();
    assert_eq!((stats.open_tickets, stats.late), (1, 0));
    (0..2).for_each(|worker| rig.settle(worker, load.ticket, &[]));
}

/// A rig that loads one block with a ticket, and so many tickets at a time.
fn small_tickets(loads_open_max: u32) -> Rig {
    let lower = LowerOptions { ticket_blocks_max: 1, loads_open_max, ..lower() };
    Rig::with(ManagerOptions { lower, ..options(12, 8) })
}

#[test]
fn as_many_tickets_as_a_prefix_takes_are_opened_at_once() {
    let mut rig = small_tickets(3);
    for block in 0..5 {
        rig.store(0..4 * (block + 1));
    }
    rig.push_out();
    let mut wanted = request(0..22);
    assert!(matches!(rig.again(&mut wanted), Answer::Waiting(Waiting::Load { .. })));
    let plan = rig.step(&mut []);
    assert_eq!(plan.transfers.len(), 3);
    plan.transfers.iter().for_each(|load| rig.settle(0, load.ticket, &[]));
    assert_eq!(rig.manager.lower_stats().kept_blocks, 3, "all are kept for the request");
}

#[test]
fn loads_that_bring_nothing_are_begun_a_few_times_only() {
    let mut rig = small_tickets(1);
    let mut wanted = request(0..6);
    let mut tickets = 0;
    loop {
        // It is computed, stored, and leaves the device and the host, which have room then.
        let names = rig.store(0..4);
        drop(admitted(rig.ask(100..148).1));
        rig.step(&mut []);
        for blocks in [0, 8] {
            rig.manager.set_budget(GroupId(0), Tier::Secondary, blocks).unwrap();
            rig.step(&mut []);
        }
        assert_eq!((names.len(), rig.found(names[0])), (1, None));
        let Answer::Waiting(Waiting::Load { ticket, .. }) = rig.again(&mut wanted) else { break };
        tickets += 1;
        assert!(tickets < 10, "it never ends");
        rig.step(&mut []);
        rig.settle(0, ticket, &[(0, BlockFault::Failed)]);
        rig.transfers.clear();
    }
    assert_eq!(tickets, 2);
}

#[test]
fn what_two_requests_wait_for_is_kept_for_both() {
    let mut rig = Rig::new(8, 4);
    let names = rig.store_away(0..12);
    let (mut long, mut short) = (request(0..14), request(0..6));
    let load = rig.load(&mut long);
    assert!(matches!(rig.again(&mut short), Answer::Waiting(Waiting::Load { .. })));
    rig.settle(0, load.ticket, &[]);
    let first = admitted(rig.again(&mut short));
    assert_eq!((first.cached_tokens(), rig.manager.lower_stats().kept_blocks), (4, 3));
    drop(first);
    // Whatever others need, the rest of it stays.
    for turn in 7..9 {
        rig.pass(turn * 100..turn * 100 + 32);
    }
    assert!(names.iter().all(|name| rig.found(*name).is_some()));
    assert_eq!(admitted(rig.again(&mut long)).cached_tokens(), 12);
    assert_eq!(rig.manager.lower_stats().kept_blocks, 0);
}

#[test]
fn a_store_that_failed_is_tried_once_more() {
    let mut rig = Rig::new(16, 8);
    let _sequence = rig.computed(0..4);
    for turn in 0..2 {
        let plan = rig.step(&mut []);
        assert_eq!(plan.transfers.len(), 1, "turn {turn}");
        rig.settle(0, plan.transfers[0].ticket, &[(0, BlockFault::Failed)]);
    }
    assert!(rig.step(&mut []).transfers.is_empty(), "a tier that fails is left alone");
    assert_eq!(rig.manager.lower_stats().unstored_blocks, 2);
}

#[test]
fn what_comes_from_another_process_is_stored() {
    let mut rig = Rig::new(16, 8);
    let mut request = request(0..10);
    let (answer, adoption) = adopt(&mut rig.manager, &mut request, 8);
    let mut sequence = admitted(answer);
    rig.step(&mut []);
    assert_eq!(rig.manager.adopted(&mut sequence, adoption.unwrap(), 2), Ok(8));
    let plan = rig.step(&mut []);
    let blocks = plan.transfers.iter().flat_map(|transfer| &transfer.blocks);
    assert_eq!(blocks.count(), 2);
}

#[test]
fn an_adoption_ends_the_wait_for_a_load_as_an_admission_does() {
    let mut rig = Rig::new(8, 4);
    let (names, mut wanted, load) = rig.stored_and_loading(0..12, 0..14);
    rig.settle(0, load.ticket, &[]);
    let (answer, adoption) = adopt(&mut rig.manager, &mut wanted, 14);
    let (_sequence, _adoption) = (admitted(answer), adoption.unwrap());
    assert_eq!(rig.manager.lower_stats().kept_blocks, 0);
    assert!(names.iter().all(|name| rig.found(*name) == Some(Tier::Primary)), "they moved");
    let stats = rig.manager.stats();
    assert_eq!((stats.cached_tokens, stats.host_tokens), (12, 12));
}

#[test]
fn loads_begin_behind_the_first_without_room_but_for_tenants_at_their_bounds() {
    for (held_max, transfers) in [(u64::MAX, 1), (4, 0)] {
        let mut rig = Rig::new(8, 4);
        let tenant = rig.manager.add_tenant().unwrap();
        let of = |ids| {
            let mut request = request(ids);
            request.tenant = tenant;
            request
        };
        let mut stored = admitted(rig.again(&mut of(0..12)));
        rig.step(&mut [&mut stored]);
        drop(stored);
        rig.step(&mut []);
        rig.settle_all();
        rig.push_out();
        let mut running = admitted(rig.again(&mut of(600..616)));
        rig.step(&mut [&mut running]);
        let quota = TenantQuota { held_max, ..TenantQuota::NONE };
        rig.manager.set_quota(GroupId(0), tenant, Tier::Primary, quota).unwrap();
        let mut requests = [request(100..124), of(0..14)];
        let answers = rig.manager.ask_all(&mut requests, u64::MAX);
        assert!(matches!(answers[..], [Answer::NoRoom(_)]), "{answers:?}");
        assert_eq!(rig.step(&mut []).transfers.len(), transfers);
    }
}

#[test]
fn a_store_ahead_of_need_evicts_no_content_from_the_host() {
    let mut rig = Rig::new(8, 2);
    rig.manager.set_store_policy(Tier::Third, Box::new(StoreNone)).unwrap();
    let mut running = rig.computed(0..7);
    rig.manager.commit(&mut running, 1, &[7]).unwrap();
    // Fills the host with content that is in no tier below.
    for turn in 1..3 {
        rig.pass(turn * 100..turn * 100 + 24);
        rig.step(&mut []);
    }
    let host = |rig: &Rig| {
        let blocks = rig.pool().snapshot().blocks;
        let host = blocks.iter().filter(|view| view.location.tier == Tier::Secondary);
        host.filter_map(|view| view.hash).collect::<Vec<_>>()
    };
    let before = host(&rig);
    assert_eq!(before.len(), 2);
    // A block becomes full, and is to be stored.
    rig.manager.set_store_policy(Tier::Third, Box::new(StoreAll)).unwrap();
    rig.manager.reserve(&mut running, 1).unwrap().given().unwrap();
    rig.step(&mut [&mut running]);
    let plan = rig.step(&mut []);
    assert!(plan.copies.is_empty(), "{plan:?}");
    assert_eq!(host(&rig), before);
}

#[test]
fn a_load_does_not_evict_the_head_of_its_prefix() {
    let mut rig = Rig::new(8, 2);
    // One block after the other: the host has room for two.
    for end in [4, 8, 12] {
        rig.store(0..end);
    }
    let names = rig.store(0..12);
    assert!(names.is_empty(), "all is stored");
    rig.push_out();
    // The first two blocks come back to the host, fill it, and nobody comes for them.
    let load = rig.load(&mut request(0..9));
    assert_eq!(load.blocks.len(), 2);
    rig.settle(0, load.ticket, &[]);
    rig.wait(WAIT);
    assert_eq!(rig.manager.lower_stats().kept_blocks, 0);
    // The third block would need the place of one of them.
    assert_eq!(admitted(rig.again(&mut request(0..14))).cached_tokens(), 8);
}

#[test]
fn a_name_waits_to_be_stored_once() {
    let lower = LowerOptions { stores_open_max: 1, ..lower() };
    let mut rig = Rig::with(ManagerOptions { lower, ..options(16, 8) });
    let _first = rig.computed(0..4);
    let open = rig.step(&mut []).transfers[0].ticket;
    // While the only ticket is out, another name waits, is withdrawn, and is named again.
    for _ in 0..3 {
        let again = rig.computed(50..54);
        let blocks = rig.pool().snapshot().blocks;
        let newest = blocks.iter().filter_map(|view| view.hash).collect::<Vec<_>>();
        drop(again);
        rig.manager.forget(&newest);
    }
    let _last = rig.computed(50..54);
    rig.settle(0, open, &[]);
    let plan = rig.step(&mut []);
    let blocks: Vec<_> = plan.transfers.iter().flat_map(|transfer| &transfer.blocks).collect();
    assert_eq!(blocks.len(), 1, "{plan:?}");
    assert_eq!(rig.manager.lower_stats().open_tickets, 1);
}

#[test]
fn a_store_looks_at_few_blocks_that_have_to_wait() {
    #[derive(Debug)]
    struct Counts(Arc<std::sync::atomic::AtomicUsize>);
    impl StorePolicy for Counts {
        fn name(&self) -> &'static str {
            "test"
        }

        fn stores(&mut self, _: Tier, _: &Candidate) -> bool {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            true
        }
    }
    let asked = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    // There is no room in the host, so everything on the device has to wait.
    let mut rig = Rig::new(64, 1);
    rig.manager.set_budget(GroupId(0), Tier::Secondary, 0).unwrap();
    let counts = Box::new(Counts(Arc::clone(&asked)));
    rig.manager.set_store_policy(Tier::Third, counts).unwrap();
    let _sequence = rig.computed(0..200);
    asked.store(0, std::sync::atomic::Ordering::Relaxed);
    rig.step(&mut []);
    assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 8);
}

#[test]
fn a_load_without_room_in_host_memory_takes_none_from_others() {
    let mut rig = Rig::new(8, 4);
    rig.store_away(0..25);
    // Two of the four blocks of host memory are those of suspended sequences.
    let asleep = [600..602, 700..702].map(|ids| {
        let mut sequence = admitted(rig.ask(ids).1);
        let plan = rig.step(&mut [&mut sequence]);
        rig.manager.commit(&mut sequence, plan.step, &[1]).unwrap();
        rig.manager.suspend(&mut sequence).unwrap();
        rig.step(&mut []);
        sequence
    });
    let _running = rig.computed(500..532);
    // The other two hold the beginning of what is stored below, which nobody has come back for.
    let load = rig.load(&mut request(0..9));
    rig.settle(0, load.ticket, &[]);
    rig.wait(WAIT);
    rig.step(&mut []);
    let open = rig.manager.begin_step().unwrap();
    let claimable = |rig: &Rig| rig.pool().stats().secondary.claimable();
    assert_eq!(claimable(&rig), 2);
    let mut wanted = request(0..26);
    for _ in 0..3 {
        let answer = rig.again(&mut wanted);
        assert!(matches!(answer, Answer::NoRoom(_)), "{answer:?}");
        assert_eq!(claimable(&rig), 2, "a question takes nothing");
    }
    drop((open, asleep));
}

#[test]
fn loads_begin_for_as_many_requests_behind_those_that_are_admitted_as_may_be_open() {
    let mut rig = small_tickets(3);
    for first in [0, 100, 200, 300, 400] {
        rig.store(first..first + 4);
    }
    rig.push_out();
    // One is admitted, and uses the budget.
    let mut requests: Vec<_> =
        [900, 0, 100, 200, 300, 400].map(|first| request(first..first + 6)).into();
    let answers = rig.manager.ask_all(&mut requests, 4);
    assert_eq!(answers.len(), 1, "{answers:?}");
    assert!(matches!(answers[0], Answer::Admitted(_)), "{answers:?}");
    // The first of those behind is named now, the next one with the next call.
    for (calls, loads) in [(1, 1), (2, 2), (3, 3), (4, 3)] {
        assert_eq!(rig.manager.lower_stats().open_tickets, loads, "after {calls} calls");
        let mut first = request(700 + calls * 10..704 + calls * 10);
        first.waits = false;
        let behind = std::mem::replace(&mut requests[0], first);
        drop((behind, rig.manager.ask_all(&mut requests, 4)));
    }
}
