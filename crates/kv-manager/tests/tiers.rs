//! Tiers below host memory: what is visible when, what a failed load is, and who owns the blocks on their way.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{BLOCK, admitted, options};
use kv_manager::tiers::{
    BlockFault, BlockSink, BlockSource, FaultRules, HostBlocks, LowerTier, MemoryTier,
    MemoryTierOptions, TRAILER_BYTES, TierTransfers,
};
use kv_manager::{
    Answer, Completion, Direction, Dropped, Forget, LowerOptions, Manager, ManagerOptions, Outcome,
    Request, Sequence, Settled, StepPlan, StorePolicy, TicketError, TicketId, Transfer, Waiting,
    WorkerId,
};
use kv_pool::clock::ManualClock;
use kv_pool::retention::{Retention, RetentionPolicy, TokenRange};
use kv_pool::{BlockHash, BlockId, Priority, Tier};

const WAIT: Duration = Duration::from_millis(100);

/// A manager with one tier below the host, and the time.
struct Rig {
    manager: Manager,
    clock: ManualClock,
    workers: u16,
    /// Tickets that plans have brought and nobody has settled.
    transfers: Vec<Transfer>,
    forgets: Vec<Forget>,
}

fn lower() -> LowerOptions {
    LowerOptions { tiers: 1, wait_max: WAIT, ..LowerOptions::default() }
}

impl Rig {
    fn new(device: u64, host: u64) -> Self {
        Self::with(ManagerOptions { lower: lower(), ..options(device, host) })
    }

    fn with(options: ManagerOptions) -> Self {
        let (clock, workers) = (ManualClock::new(), options.workers);
        let manager = Manager::with_pool(options, |builder| builder.clock(clock.clone())).unwrap();
        Self { manager, clock, workers, transfers: Vec::new(), forgets: Vec::new() }
    }

    /// A whole step, which all workers complete.
    fn step(&mut self, batch: &mut [&mut Sequence]) -> StepPlan {
        let step = self.manager.begin_step().unwrap();
        let plan = self.manager.stage(&step, batch).unwrap().clone();
        self.manager.finish_step(step).unwrap();
        for worker in (0..self.workers).map(WorkerId) {
            let completion = Completion { worker, step: plan.step, outcome: Outcome::Done };
            self.manager.complete(completion).unwrap();
        }
        self.transfers.extend(plan.transfers.iter().cloned());
        self.forgets.extend(&plan.forgets);
        plan
    }

    fn ask(&mut self, ids: std::ops::Range<u32>) -> (Request, Answer) {
        let mut request = Request::new(ids.collect());
        let answer = self.again(&mut request);
        (request, answer)
    }

    fn again(&mut self, request: &mut Request) -> Answer {
        self.manager.admit(std::slice::from_mut(request), u64::MAX).pop().unwrap()
    }

    fn settle(&mut self, worker: u16, ticket: TicketId, wrong: &[(u32, BlockFault)]) {
        let settled = Settled { worker: WorkerId(worker), ticket, wrong: wrong.to_vec() };
        self.manager.settle(&settled).unwrap();
    }

    /// Settles all tickets, without a fault.
    fn settle_all(&mut self) {
        for transfer in std::mem::take(&mut self.transfers) {
            (0..self.workers).for_each(|worker| self.settle(worker, transfer.ticket, &[]));
        }
    }

    /// Computes a prompt and has it stored below; its names.
    fn store(&mut self, ids: std::ops::Range<u32>) -> Vec<BlockHash> {
        let (_, answer) = self.ask(ids);
        let mut sequence = admitted(answer);
        self.step(&mut [&mut sequence]);
        drop(sequence);
        let plan = self.step(&mut []);
        let names = plan.transfers.iter().flat_map(|transfer| &transfer.blocks);
        let names = names.map(|(name, _)| *name).collect();
        self.settle_all();
        names
    }

    /// Has everything leave the device and the host.
    fn push_out(&mut self) {
        let pool = self.manager.options().pool.clone();
        self.manager.set_store_policy(Box::new(StoreNone));
        for turn in 0..2 + pool.secondary_blocks / pool.primary_blocks {
            let first = 100_000 * (turn as u32 + 1);
            let (_, answer) = self.ask(first..first + pool.primary_blocks as u32 * BLOCK);
            let mut sequence = admitted(answer);
            self.step(&mut [&mut sequence]);
            drop(sequence);
            self.step(&mut []);
        }
        self.manager.set_store_policy(Box::new(kv_manager::StoreAll));
    }

    /// A ticket that a request waits for.
    fn load(&mut self, request: &mut Request) -> Transfer {
        let Answer::Waiting(Waiting::Load { ticket, .. }) = self.again(request) else { panic!() };
        let plan = self.step(&mut []);
        let load = plan.transfers.iter().find(|transfer| transfer.ticket == ticket).unwrap();
        assert_eq!(load.direction, Direction::Load);
        load.clone()
    }

    fn is_stored(&self, name: BlockHash) -> bool {
        self.manager.find_below(name) == Some(Tier::Third)
    }

    fn found(&self, name: BlockHash) -> Option<Tier> {
        let pool = self.manager.pool();
        let here = |tier: &Tier| pool.find_and_pin(name, *tier).is_some();
        [Tier::Primary, Tier::Secondary].into_iter().find(here)
    }
}

#[derive(Debug)]
struct StoreNone;

impl StorePolicy for StoreNone {
    fn stores(&mut self, _: Tier, _: BlockHash, _: Retention) -> bool {
        false
    }
}

fn request(ids: std::ops::Range<u32>) -> Request {
    Request::new(ids.collect())
}

#[test]
fn a_block_is_found_below_once_every_worker_has_stored_it() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(16, 8) });
    let mut sequence = admitted(rig.ask(0..8).1);
    rig.step(&mut [&mut sequence]);
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
    assert_eq!(plan.forgets, [Forget::Name(Tier::Third, names[1])]);
    let stats = rig.manager.lower_stats();
    assert_eq!((stats.stored_blocks, stats.unstored_blocks, stats.open_tickets), ([1, 0], 1, 0));
}

#[test]
fn content_that_a_step_still_computes_is_not_stored() {
    let mut rig = Rig::new(16, 8);
    let mut sequence = admitted(rig.ask(0..8).1);
    let step = rig.manager.begin_step().unwrap();
    let plan = rig.manager.stage(&step, &mut [&mut sequence]).unwrap().clone();
    rig.manager.finish_step(step).unwrap();
    let open = rig.manager.begin_step().unwrap();
    let next = rig.manager.stage(&open, &mut []).unwrap().clone();
    rig.manager.finish_step(open).unwrap();
    assert!(plan.transfers.is_empty() && next.transfers.is_empty());
    let done = Completion { worker: WorkerId(0), step: 2, outcome: Outcome::Done };
    rig.manager.complete(done).unwrap();
    assert_eq!(rig.step(&mut []).transfers.len(), 1);
}

#[test]
fn content_of_a_failed_step_is_never_stored() {
    let mut rig = Rig::new(16, 8);
    let mut sequence = admitted(rig.ask(0..8).1);
    let step = rig.manager.begin_step().unwrap();
    rig.manager.stage(&step, &mut [&mut sequence]).unwrap();
    rig.manager.finish_step(step).unwrap();
    let failed = Completion { worker: WorkerId(0), step: 1, outcome: Outcome::Failed };
    rig.manager.complete(failed).unwrap();
    drop(sequence);
    assert!(rig.step(&mut []).transfers.is_empty());
}

#[test]
fn a_busy_link_is_left_to_the_copies_that_are_needed() {
    let mut rig = Rig::new(4, 8);
    let mut first = admitted(rig.ask(0..8).1);
    rig.step(&mut [&mut first]);
    drop(first);
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
    rig.manager.set_store_policy(Box::new(StoreNone));
    assert!(rig.store(0..16).is_empty());
    rig.manager.set_store_policy(Box::new(kv_manager::StoreAll));
    let mut fresh = admitted(rig.ask(50..58).1);
    rig.step(&mut [&mut fresh]);
    let mut large = admitted(rig.ask(100..120).1);
    let plan = rig.step(&mut [&mut large]);
    assert_eq!((plan.copies.len(), plan.transfers.len()), (2, 0), "evicted content goes first");
    drop(large);
    let plan = rig.step(&mut []);
    assert!(!plan.transfers.is_empty() && !plan.copies.is_empty(), "the link is idle");
}

#[test]
fn the_policy_decides_what_is_stored() {
    let mut rig = Rig::new(16, 8);
    rig.manager.set_store_policy(Box::new(StoreNone));
    assert!(rig.store(0..8).is_empty());
    rig.manager.set_store_policy(Box::new(kv_manager::StoreAll));
    assert_eq!(rig.store(50..58).len(), 2);
}

#[test]
fn a_name_that_a_tier_dropped_is_not_found_and_goes_everywhere() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(16, 8) });
    let names = rig.store(0..8);
    let dropped =
        Dropped { worker: WorkerId(1), tier: Tier::Third, names: vec![names[0], BlockHash::ROOT] };
    rig.manager.dropped(&dropped).unwrap();
    assert!(!rig.is_stored(names[0]) && rig.is_stored(names[1]));
    assert_eq!(rig.step(&mut []).forgets, [Forget::Name(Tier::Third, names[0])]);
    let tiers = 1;
    let nowhere = Dropped { tier: Tier::Fourth, ..dropped };
    let refused = rig.manager.dropped(&nowhere);
    assert_eq!(refused, Err(TicketError::NoTier { tier: Tier::Fourth, tiers }));
}

#[test]
fn a_name_that_is_dropped_while_it_is_stored_is_not_found() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(16, 8) });
    let mut sequence = admitted(rig.ask(0..4).1);
    rig.step(&mut [&mut sequence]);
    let store = rig.step(&mut []).transfers[0].clone();
    rig.settle(0, store.ticket, &[]);
    let (name, tier) = (store.blocks[0].0, Tier::Third);
    rig.manager.dropped(&Dropped { worker: WorkerId(0), tier, names: vec![name] }).unwrap();
    rig.settle(1, store.ticket, &[]);
    assert!(!rig.is_stored(name));
}

#[test]
fn a_hit_below_waits_alone_and_then_comes_from_the_host() {
    let mut rig = Rig::new(8, 4);
    let names = rig.store(0..12);
    rig.push_out();
    assert!(names.iter().all(|name| rig.found(*name).is_none() && rig.is_stored(*name)));
    let mut requests = [request(0..14), request(500..508)];
    let mut answers = rig.manager.admit(&mut requests, u64::MAX);
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
    let names = rig.store(0..12);
    rig.push_out();
    let mut wanted = request(0..14);
    let load = rig.load(&mut wanted);
    rig.settle(1, load.ticket, &[(1, BlockFault::Checksum)]);
    rig.settle(0, load.ticket, &[]);
    let here = names.iter().map(|name| rig.found(*name).is_some()).collect::<Vec<_>>();
    assert_eq!(here, [true, false, true], "the others are right");
    // It is not asked for again, and every worker forgets it.
    assert!(!rig.is_stored(names[1]));
    let mut sequence = admitted(rig.again(&mut wanted));
    assert_eq!(sequence.cached_tokens(), 4);
    let plan = rig.step(&mut [&mut sequence]);
    assert_eq!(plan.forgets, [Forget::Name(Tier::Third, names[1])]);
    assert_eq!(rig.manager.lower_stats().faults[BlockFault::Checksum.index()], 1);
}

#[test]
fn requests_with_one_prefix_wait_for_one_load() {
    let mut rig = Rig::new(8, 4);
    rig.store(0..12);
    rig.push_out();
    let mut requests = [request(0..14), request(0..13)];
    let answers = rig.manager.admit(&mut requests, u64::MAX);
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
    rig.store(0..12);
    rig.push_out();
    let mut hasty = request(0..14);
    hasty.waits = false;
    assert_eq!(admitted(rig.again(&mut hasty)).cached_tokens(), 0);
    assert!(rig.step(&mut []).transfers.is_empty());
}

#[test]
fn loaded_blocks_stay_for_their_request_until_its_deadline() {
    let mut rig = Rig::new(8, 4);
    let names = rig.store(0..12);
    rig.push_out();
    let mut wanted = request(0..14);
    let load = rig.load(&mut wanted);
    rig.settle(0, load.ticket, &[]);
    assert_eq!(rig.manager.lower_stats().kept_blocks, 3);
    // Others' content does not push it out.
    let mut other = admitted(rig.ask(700..732).1);
    rig.step(&mut [&mut other]);
    drop(other);
    let mut other = admitted(rig.ask(800..832).1);
    rig.step(&mut [&mut other]);
    drop(other);
    assert!(names.iter().all(|name| rig.found(*name) == Some(Tier::Secondary)));
    rig.clock.advance(WAIT);
    rig.step(&mut []);
    assert_eq!(rig.manager.lower_stats().kept_blocks, 0, "it did not come back in time");
}

#[test]
fn a_request_that_asks_for_a_load_keeps_no_block_from_others() {
    let mut rig = Rig::new(8, 8);
    let names = rig.store(0..24);
    let before = rig.manager.pool().claimable();
    let step = rig.manager.begin_step().unwrap();
    assert!(names.iter().all(|name| rig.is_stored(*name)));
    assert!(rig.manager.admit(&mut [request(0..30)], 0).is_empty());
    assert_eq!(rig.manager.pool().claimable(), before, "a look keeps blocks from others");
    drop(step);
}

#[test]
fn a_deadline_ends_the_wait_and_not_the_tickets_hold_on_its_blocks() {
    let mut rig = Rig::new(8, 4);
    let names = rig.store(0..12);
    rig.push_out();
    let mut wanted = request(0..14);
    let load = rig.load(&mut wanted);
    let places = load.blocks.iter().map(|(_, at)| *at).collect::<Vec<_>>();
    rig.clock.advance(WAIT);
    rig.step(&mut []);
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
    let stats = rig.manager.pool().stats();
    assert_eq!(stats.secondary.claimed, 3);
    rig.settle(0, load.ticket, &[(0, BlockFault::Failed)]);
    assert_eq!(rig.manager.lower_stats().quarantined_blocks, 0);
    assert_eq!(rig.manager.lower_stats().loaded_blocks, [2, 0], "late, but right");
    assert_eq!(rig.manager.pool().stats().secondary.claimed, 0);
    assert!(!rig.is_stored(names[0]));
}

#[test]
fn a_dropped_request_leaves_its_blocks_with_the_ticket() {
    let mut rig = Rig::new(8, 4);
    rig.store(0..12);
    rig.push_out();
    let mut wanted = request(0..14);
    let load = rig.load(&mut wanted);
    drop(wanted);
    rig.step(&mut []);
    assert_eq!(rig.manager.pool().stats().secondary.claimed, 3);
    rig.settle(0, load.ticket, &[]);
    rig.clock.advance(WAIT);
    rig.step(&mut []);
    assert_eq!(rig.manager.pool().stats().secondary.claimed, 0);
    rig.manager.pool().check_integrity().unwrap();
}

#[test]
fn a_ticket_is_settled_once_by_each_worker() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(8, 4) });
    rig.store(0..12);
    rig.push_out();
    let mut wanted = request(0..14);
    let load = rig.load(&mut wanted);
    let (worker, ticket) = (WorkerId(0), load.ticket);
    let wrong = vec![(3, BlockFault::Missing)];
    let refused = rig.manager.settle(&Settled { worker, ticket, wrong });
    assert_eq!(refused, Err(TicketError::NoBlock { ticket, index: 3, blocks: 3 }));
    rig.settle(0, ticket, &[]);
    let again = rig.manager.settle(&Settled { worker, ticket, wrong: Vec::new() });
    assert_eq!(again, Err(TicketError::NotOpen { worker, ticket }));
    assert_eq!(rig.manager.lower_stats().open_tickets, 1, "the other worker has not settled it");
    rig.settle(1, ticket, &[]);
    assert_eq!(rig.manager.lower_stats().open_tickets, 0);
}

#[test]
fn blocks_of_a_lost_worker_are_kept_until_it_is_fenced() {
    let mut rig = Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(8, 4) });
    let names = rig.store(0..12);
    rig.push_out();
    let mut wanted = request(0..14);
    let load = rig.load(&mut wanted);
    rig.settle(0, load.ticket, &[]);
    rig.manager.lose_worker(WorkerId(1)).unwrap();
    assert!(names.iter().all(|name| !rig.is_stored(*name)), "a share of each is lost");
    let stats = rig.manager.lower_stats();
    assert_eq!((stats.quarantined_blocks, rig.manager.pool().stats().secondary.claimed), (3, 3));
    let (worker, ticket) = (WorkerId(1), load.ticket);
    let late = rig.manager.settle(&Settled { worker, ticket, wrong: Vec::new() });
    assert_eq!(late, Err(TicketError::Lost { worker }), "it is not believed");
    rig.manager.fence_worker(worker).unwrap();
    let stats = rig.manager.lower_stats();
    assert_eq!((stats.open_tickets, stats.void_blocks), (0, 3));
    assert_eq!(rig.manager.pool().stats().secondary.claimed, 0);
    assert!(names.iter().all(|name| rig.found(*name).is_none()));
}

#[test]
fn a_reset_voids_what_is_on_its_way() {
    let mut rig = Rig::new(8, 4);
    let names = rig.store(0..12);
    rig.push_out();
    let mut wanted = request(0..14);
    let load = rig.load(&mut wanted);
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
    let mut sequence = admitted(rig.ask(0..4).1);
    rig.step(&mut [&mut sequence]);
    let store = rig.step(&mut []).transfers[0].clone();
    rig.manager.reset();
    rig.step(&mut []);
    rig.settle(0, store.ticket, &[]);
    let name = store.blocks[0].0;
    assert!(!rig.is_stored(name));
    assert!(rig.step(&mut []).forgets.contains(&Forget::Name(Tier::Third, name)));
}

#[test]
fn a_forgotten_name_goes_from_every_tier_and_does_not_arrive() {
    let mut rig = Rig::new(8, 4);
    let names = rig.store(0..12);
    rig.push_out();
    let mut wanted = request(0..14);
    let load = rig.load(&mut wanted);
    assert_eq!(rig.manager.forget(&names[1..2]), 1);
    rig.settle(0, load.ticket, &[]);
    let here = names.iter().map(|name| rig.found(*name).is_some()).collect::<Vec<_>>();
    assert_eq!(here, [true, false, true]);
    assert!(!rig.is_stored(names[1]));
    assert_eq!(rig.step(&mut []).forgets, [Forget::Name(Tier::Third, names[1])]);
    assert_eq!(admitted(rig.again(&mut wanted)).cached_tokens(), 4);
}

#[test]
fn a_prefetch_begins_the_load_before_the_request_comes() {
    let mut rig = Rig::new(8, 4);
    let names = rig.store(0..12);
    rig.push_out();
    assert_eq!(rig.manager.prefetch(&names), 3);
    let load = rig.step(&mut []).transfers[0].clone();
    assert_eq!(rig.manager.prefetch(&names), 3, "it is on its way");
    assert!(rig.step(&mut []).transfers.is_empty());
    rig.settle(0, load.ticket, &[]);
    assert_eq!(admitted(rig.ask(0..14).1).cached_tokens(), 12);
    assert_eq!(rig.manager.lower_stats().waits, 0);
}

#[test]
fn retention_follows_a_name_down_and_back() {
    let mut rig = Rig::new(8, 4);
    let high = Retention { priority: Priority::MAX, duration: Some(Duration::from_secs(60)) };
    let ranges = vec![TokenRange::new(0, 4, high)];
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
        rig.clock.advance(Duration::from_secs(61));
        rig.step(&mut []);
        rig.push_out();
    }
    let load = rig.load(&mut request(0..14));
    rig.settle(0, load.ticket, &[]);
    let priority = |rig: &Rig, name: BlockHash| {
        let blocks = rig.manager.pool().snapshot().blocks;
        blocks.iter().find(|view| view.hash == Some(name)).map(|view| view.priority.get())
    };
    assert_eq!((priority(&rig, names[0]), priority(&rig, names[1])), (Some(100), Some(35)));
    rig.clock.advance(WAIT);
    rig.step(&mut []);
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
    let blocks = blocks.iter().map(|&(of, at)| (name(of), BlockId::new(at))).collect();
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

    fn forget(&mut self, _: &[BlockHash]) {}
    fn clear(&mut self) {}
    fn poll(&mut self, _: &mut Vec<BlockHash>) {}
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
    assert_eq!(first.len(), 100 + TRAILER_BYTES);
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
    let torn = [&first[..50], &second[50..]].concat();
    assert!(load(&torn).is_some(), "half of two records");
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
    sinks[0].write_at(0, &[9; 10]).unwrap();
    assert_eq!((poll(&mut tiers), tiers.open()), (Vec::new(), 1));
    tiers.fence();
    assert_eq!(sinks[0].write_at(10, &[9; 10]), Err(BlockFault::Fenced));
    assert_eq!(sinks[1].write_at(0, &[9; 10]), Err(BlockFault::Fenced));
    assert_eq!(
        (&host.block(1)[..12], host.block(2)),
        (&[9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 1, 1][..], vec![2; 100])
    );
    assert_eq!((poll(&mut tiers), tiers.open()), (Vec::new(), 0));
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
    let [missing, failed, short, checksum, foreign, fenced] = wrong;
    assert!(missing > 0 && failed > 0 && short > 0 && checksum > 0 && foreign > 0, "{wrong:?}");
    assert_eq!(fenced, 0);
    assert!(made.by_name().all(|(_, count)| count > 0), "{made:?}");
}
