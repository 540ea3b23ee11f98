//! A limit that several pools share: changed while they work, and always consistent with the
//! existing memory.

use std::any::Any;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{DEVICE_PAGES, Machine, PAGE, machine, machine_with, one_seat, recorded};
use cuda_driver::{Device, ErrorCode, Stream};
use cuda_sim::Pace;
use cuda_vmm::limit::{AdmissionPolicy, OverLimit, Reclaimed};
use cuda_vmm::pages::{PageError, PagePool, PagePoolOptions, PhysicalPage};
use cuda_vmm::sequences::{SequenceSpace, SpaceOptions};
use cuda_vmm::worker::Health;
use cuda_vmm::{
    ElasticPool, ElasticPoolOptions, EpochGate, GrowError, MemoryLimit, MemoryRules, Worker,
};
use kv_testkit::Random;

fn limited(machine: &Machine, limit: &MemoryLimit) -> PagePool {
    let options = PagePoolOptions { page_bytes: None, capacity_pages: u64::MAX };
    let rules = MemoryRules { limit: Some(limit.clone()), admission: None };
    PagePool::with_rules(&machine.device, options, rules).unwrap()
}

fn elastic(machine: &Machine, limit: &MemoryLimit, capacity_blocks: u64) -> ElasticPool {
    let options = ElasticPoolOptions {
        block_bytes: PAGE,
        capacity_blocks,
        page_bytes: None,
        initial_blocks: 0,
    };
    let rules = MemoryRules { limit: Some(limit.clone()), admission: None };
    ElasticPool::with_rules(&machine.device, options, EpochGate::new(), rules).unwrap()
}

/// The limit's count equals the pools' memory and the device's used memory.
#[track_caller]
fn assert_adds_up(machine: &Machine, limit: &MemoryLimit, pools: &[&PagePool]) {
    let live: u64 = pools.iter().map(|pool| pool.stats().live * pool.page_bytes()).sum();
    assert_eq!(limit.stats().used_bytes, live);
    assert_eq!(machine.sim.device_used_bytes(0), live);
}

#[test]
fn pools_share_a_limit_and_take_each_others_idle_pages() {
    let machine = machine();
    let limit = MemoryLimit::new(6 * PAGE);
    let (first, second) = (limited(&machine, &limit), limited(&machine, &limit));
    let taken = first.take_many(4).unwrap();
    let (used_bytes, asked_bytes) = (4 * PAGE, 3 * PAGE);
    let refused = OverLimit { limit_bytes: 6 * PAGE, used_bytes, asked_bytes, revision: 0 };
    // All or none: no page is created for the failed call.
    assert_eq!(second.take_many(3).unwrap_err(), PageError::OverLimit(refused));
    assert_eq!((machine.calls("cuMemCreate"), limit.stats().refusals), (4, 1));
    assert_adds_up(&machine, &limit, &[&first, &second]);
    assert_eq!(second.stats().live, 0);
    // Unused pages of the first pool are released for the second.
    for page in taken {
        first.give_back(page).unwrap();
    }
    let others = second.take_many(5).unwrap();
    assert_eq!((first.stats().idle, first.stats().released), (1, 3));
    // A request that is granted is no refusal.
    assert_eq!(limit.stats().refusals, 1);
    // More than all unused memory: nothing is released in vain.
    assert!(second.take_many(3).is_err());
    assert_eq!((first.stats().idle, limit.stats().refusals), (1, 2));
    assert_adds_up(&machine, &limit, &[&first, &second]);
    drop((first, others, second));
    assert_eq!(limit.stats().used_bytes, 0);
    machine.assert_clean();
}

#[test]
fn a_limit_lowered_below_what_is_in_use_refuses_what_is_new_and_takes_idle_pages_first() {
    let machine = machine();
    let limit = MemoryLimit::new(u64::MAX);
    let pool = elastic(&machine, &limit, 16);
    pool.grow_to(6).unwrap();
    pool.pages().prepare(4).unwrap();
    assert_eq!(limit.set(7 * PAGE), 1);
    assert_eq!(limit.stats().over_by(), 3 * PAGE);
    let done = limit.reclaim();
    assert_eq!(done, Reclaimed { idle_bytes: 3 * PAGE, parked_bytes: 0, over_by: 0 });
    assert_eq!(pool.grow_to(7), Ok(7));
    assert_adds_up(&machine, &limit, &[pool.pages()]);
    let source =
        OverLimit { limit_bytes: 7 * PAGE, used_bytes: 7 * PAGE, asked_bytes: PAGE, revision: 1 };
    let refused = GrowError::OverLimit { asked_blocks: 8, ready_blocks: 7, source };
    assert_eq!(pool.grow_to(8), Err(refused));
    assert!(refused.is_retryable() && refused.is_out_of_memory());

    // Memory in use stays, and the limit reports by how much it is exceeded.
    assert_eq!(limit.set(2 * PAGE), 2);
    assert_eq!(limit.reclaim(), Reclaimed { over_by: 5 * PAGE, ..Reclaimed::default() });
    assert_eq!(pool.ready_blocks(), 7);
    assert_eq!(pool.shrink_to(1, &[]).unwrap().retiring_pages, 6);
    assert_eq!(pool.poll_retired().unmapped_pages, 6);
    assert_eq!(limit.reclaim().idle_bytes, 5 * PAGE);
    assert_eq!(limit.stats().used_bytes, 2 * PAGE);
    assert!(pool.close(&[]).wait().unwrap().is_clean());
    let stats = limit.stats();
    assert_eq!((stats.revision, stats.limit_bytes, stats.used_bytes), (2, 2 * PAGE, 0));
    machine.assert_clean();
}

/// Three hundred operations on the pools; returns how often the limit refused.
fn work(thread: u64, mine: &PagePool, pool: &ElasticPool) -> u64 {
    let mut refusals = 0;
    for round in 0..300 {
        let size = (thread * 7 + round * 5) % 13;
        match (thread + round) % 4 {
            0 => match pool.grow_to(size) {
                Ok(ready) => assert!(ready >= size),
                Err(error) => assert!(error.is_retryable(), "{error:?}"),
            },
            1 => {
                pool.shrink_to(size, &[]).unwrap();
                pool.poll_retired();
            }
            // Once, more pages than the limit ever allows.
            _ => match mine.take_many(if round < 4 { 25 } else { 1 + size % 4 }) {
                Ok(taken) if round % 3 == 0 => drop(taken),
                Ok(taken) => taken.into_iter().for_each(|page| mine.give_back(page).unwrap()),
                Err(PageError::OverLimit(refused)) => {
                    assert!(refused.asked_bytes.is_multiple_of(PAGE), "{refused}");
                    refusals += 1;
                }
                Err(error) => panic!("{error:?}"),
            },
        }
    }
    refusals
}

#[test]
fn accounts_add_up_while_threads_take_drop_grow_and_the_limit_moves() {
    const WORKERS: u64 = 6;
    const MOST: u64 = 24 * PAGE;
    let machine = machine();
    let limit = MemoryLimit::new(MOST);
    let (first, second) = (limited(&machine, &limit), limited(&machine, &limit));
    let pool = elastic(&machine, &limit, 24);
    let start = Barrier::new(WORKERS as usize + 2);
    let done = AtomicBool::new(false);
    let move_limit = || {
        start.wait();
        let mut revision = 0;
        while !done.load(Ordering::Relaxed) {
            revision += 1;
            assert_eq!(limit.set((2 + revision * 7 % 23) * PAGE), revision);
            limit.reclaim();
            std::thread::yield_now();
        }
    };
    let watch = || {
        start.wait();
        while !done.load(Ordering::Relaxed) {
            assert!(limit.stats().used_bytes <= MOST);
            // Charged before the memory exists, and until after it is released.
            assert!(machine.sim.device_used_bytes(0) <= MOST);
        }
    };
    let refusals: u64 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|thread| {
                let mine = if thread % 2 == 0 { &first } else { &second };
                let (pool, start) = (&pool, &start);
                scope.spawn(move || {
                    start.wait();
                    work(thread, mine, pool)
                })
            })
            .collect();
        let others = [scope.spawn(move_limit), scope.spawn(watch)];
        let refusals = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
        done.store(true, Ordering::Relaxed);
        others.into_iter().for_each(|other| other.join().unwrap());
        refusals
    });
    assert!(refusals >= WORKERS, "the limit refused too few calls");
    assert_adds_up(&machine, &limit, &[&first, &second, pool.pages()]);
    assert!(pool.close(&[]).wait().unwrap().is_clean());
    assert_eq!((first.stats().in_use, second.stats().in_use), (0, 0));
    limit.set(0);
    assert_eq!((limit.reclaim().over_by, machine.sim.device_used_bytes(0)), (0, 0));
    drop((first, second));
    machine.assert_clean();
}

/// The idle pages that a model releases when it is `over` a limit.
fn release_idle(idle: &mut [u64; 2], over: u64) -> u64 {
    let mut left = over;
    for idle in idle {
        let released = left.min(*idle);
        *idle -= released;
        left -= released;
    }
    over - left
}

#[test]
fn random_actions_agree_with_a_model_that_only_counts() {
    for seed in 0..60 {
        let machine = machine();
        let mut random = Random::new(seed);
        let limit = MemoryLimit::new(10 * PAGE);
        let pools = [limited(&machine, &limit), limited(&machine, &limit)];
        // The model: held and idle pages of each pool, and the limit in pages.
        let mut held: [Vec<PhysicalPage>; 2] = [Vec::new(), Vec::new()];
        let mut idle = [0_u64; 2];
        let (mut limit_pages, mut revision) = (10_u64, 0_u64);
        for _ in 0..200 {
            let at = random.below(2) as usize;
            let mut used =
                held.iter().map(|held| held.len() as u64).sum::<u64>() + idle.iter().sum::<u64>();
            match random.below(6) {
                0 | 1 => {
                    let count = 1 + random.below(4);
                    // Idle pages, including the pool's own, are released first, as far as the limit
                    // asks.
                    used -= release_idle(&mut idle, used.saturating_sub(limit_pages));
                    let new = count.saturating_sub(idle[at]);
                    let others = used - idle[at];
                    let fits = used <= limit_pages
                        && others - idle[1 - at] + idle[at].max(count) <= limit_pages;
                    match pools[at].take_many(count) {
                        Ok(pages) => {
                            assert!(fits, "seed {seed}: {count} of {used}, limit {limit_pages}");
                            held[at].extend(pages);
                            idle[at] -= count - new;
                            idle[1 - at] -= (used + new).saturating_sub(limit_pages);
                        }
                        Err(PageError::OverLimit(refused)) => {
                            assert!(!fits, "seed {seed}: {refused}");
                            assert_eq!(refused.revision, revision);
                        }
                        Err(error) => panic!("seed {seed}: {error:?}"),
                    }
                }
                2 => drop(held[at].pop()),
                3 => {
                    if let Some(page) = held[at].pop() {
                        pools[at].give_back(page).unwrap();
                        idle[at] += 1;
                    }
                }
                4 => {
                    limit_pages = random.below(14);
                    revision += 1;
                    assert_eq!(limit.set(limit_pages * PAGE), revision);
                }
                _ => {
                    let done = limit.reclaim();
                    let over = used.saturating_sub(limit_pages);
                    let left = over - release_idle(&mut idle, over);
                    assert_eq!(done.over_by, left * PAGE, "seed {seed}");
                }
            }
            for at in 0..2 {
                let stats = pools[at].stats();
                let seen = (stats.in_use, stats.idle);
                assert_eq!(seen, (held[at].len() as u64, idle[at]), "seed {seed}, pool {at}");
            }
            assert_adds_up(&machine, &limit, &[&pools[0], &pools[1]]);
        }
        drop((held, pools));
        assert_eq!(limit.stats().used_bytes, 0);
        machine.assert_clean();
    }
}

#[test]
fn a_lowered_limit_takes_a_pools_own_idle_pages_before_it_is_refused_any() {
    type Take = fn(&PagePool) -> Result<usize, PageError>;
    let ways: [Take; 2] =
        [|pages| pages.take().map(|_| 1), |pages| pages.take_many(3).map(|taken| taken.len())];
    for take in ways {
        let machine = machine();
        let limit = MemoryLimit::new(u64::MAX);
        let pages = limited(&machine, &limit);
        assert_eq!(pages.prepare(8), Ok(8));
        limit.set(4 * PAGE);
        assert!(take(&pages).is_ok());
        assert!(limit.stats().over_by() == 0 && pages.stats().live <= 4, "{:?}", pages.stats());
        // Nothing helps below the memory in use.
        let held = pages.take_many(4).unwrap();
        limit.set(3 * PAGE);
        assert!(matches!(take(&pages), Err(PageError::OverLimit(_))));
        drop((held, pages));
        machine.assert_clean();
    }
    let machine = machine();
    let limit = MemoryLimit::new(u64::MAX);
    let pool = elastic(&machine, &limit, 16);
    pool.grow_to(2).unwrap();
    pool.pages().prepare(8).unwrap();
    limit.set(5 * PAGE);
    assert_eq!(pool.grow_to(5), Ok(5));
    assert_adds_up(&machine, &limit, &[pool.pages()]);
    assert!(pool.close(&[]).wait().unwrap().is_clean());
    machine.assert_clean();
}

#[test]
fn preparing_at_a_limit_ends_and_takes_nothing_from_anybody() {
    let machine = machine();
    let limit = MemoryLimit::new(6 * PAGE);
    let (pages, others) = (limited(&machine, &limit), limited(&machine, &limit));
    let held = pages.take_many(2).unwrap();
    assert_eq!((pages.prepare(2), others.prepare(2)), (Ok(2), Ok(2)));
    // Ends the test if the pools take memory from each other without end.
    machine.sim.fail_nth("cuMemCreate", 50, ErrorCode::INVALID_VALUE);
    assert!(matches!(pages.prepare(3), Err(PageError::OverLimit(_))));
    assert!(matches!(pages.prepare(u64::MAX), Err(PageError::OverLimit(_))));
    assert_eq!((pages.stats().idle, others.stats().idle, machine.calls("cuMemCreate")), (2, 2, 6));
    assert_eq!(machine.calls("cuMemRelease"), 0);
    // Memory that is needed is a different case.
    assert_eq!(pages.take_many(4).unwrap().len(), 4);
    drop((held, pages, others));
    machine.assert_clean();
}

#[test]
fn spaces_that_stock_their_pools_come_to_an_end_at_a_limit() {
    let machine = machine();
    let limit = MemoryLimit::new(6 * PAGE);
    let worker = Worker::manual();
    let pools = [limited(&machine, &limit), limited(&machine, &limit)];
    let options = SpaceOptions {
        sequences: 2,
        planes: 1,
        token_bytes: PAGE,
        tokens_max: 8,
        prepared_pages: 4,
        ..SpaceOptions::default()
    };
    let space = |pages| SequenceSpace::new(pages, &worker, options.clone()).unwrap();
    let spaces = [space(&pools[0]), space(&pools[1])];
    let polls = (0..100).take_while(|_| worker.poll()).count();
    assert!(polls < 20, "{polls} rounds");
    assert_eq!((limit.stats().used_bytes, machine.calls("cuMemCreate")), (6 * PAGE, 6));
    assert_eq!(machine.calls("cuMemRelease"), 0);
    assert!(worker.health() == Health::Healthy);
    drop((spaces, pools));
    worker.close();
    machine.assert_clean();
}

#[test]
fn what_one_pool_gives_back_by_closing_another_that_was_refused_can_have() {
    let machine = machine();
    let limit = MemoryLimit::new(8 * PAGE);
    let worker = Worker::manual();
    let (first, mut second) = (elastic(&machine, &limit, 64), elastic(&machine, &limit, 64));
    second.work_on(&worker);
    first.grow_to(4).unwrap();
    second.grow_to(4).unwrap();
    let refused = second.grow_to(8).unwrap_err();
    assert!(matches!(refused, GrowError::OverLimit { .. }) && refused.is_retryable());
    let _ = second.demand(8);
    while worker.poll() {}
    assert!(second.demand(8).unwrap_err().is_retryable());
    assert!(first.close(&[]).wait().unwrap().is_clean());
    // The limit was not changed, and the pool was not told.
    while worker.poll() {}
    assert_eq!((second.demand(8), limit.stats().revision), (Ok(8), 0));
    assert!(second.close(&[]).wait().unwrap().is_clean());
    machine.assert_clean();
}

/// A pool of pages under a limit whose idle pages the driver refuses to release at the third call.
fn with_refused_release(machine: &Machine, limit: &MemoryLimit) -> PagePool {
    let pages = limited(machine, limit);
    pages.prepare(4).unwrap();
    machine.sim.fail_nth("cuMemRelease", 3, ErrorCode::INVALID_VALUE);
    pages
}

#[test]
fn memory_whose_release_was_refused_stays_charged_and_is_not_counted_as_released() {
    type Release = fn(&MemoryLimit, &PagePool) -> u64;
    // Trimmed, taken by the limit, given to another pool, dropped.
    let ways: [Release; 4] = [
        |_, pages| {
            let (released, errors) = pages.trim(0);
            assert_eq!(errors.len(), 1);
            released
        },
        |limit, _| {
            limit.set(0);
            limit.reclaim().idle_bytes / PAGE
        },
        |limit, pages| {
            let (device, rules) =
                (pages.device(), MemoryRules { limit: Some(limit.clone()), admission: None });
            let options = PagePoolOptions { page_bytes: None, capacity_pages: 8 };
            let other = PagePool::with_rules(device, options, rules).unwrap();
            limit.set(4 * PAGE);
            assert!(other.take_many(4).is_err());
            let taken = other.take_many(3).unwrap();
            assert_eq!((limit.stats().used_bytes, limit.stats().refusals), (4 * PAGE, 1));
            taken.len() as u64
        },
        |_, pages| {
            drop(pages.take_many(4).unwrap());
            3
        },
    ];
    for release in ways {
        let machine = machine();
        let limit = MemoryLimit::new(u64::MAX);
        let pages = with_refused_release(&machine, &limit);
        assert_eq!(release(&limit, &pages), 3);
        assert_eq!(machine.sim.device_used_bytes(0), PAGE);
        assert_eq!(limit.stats().used_bytes, PAGE);
        let stats = pages.stats();
        assert_eq!((stats.live, stats.idle, stats.released), (1, 0, 3), "{stats:?}");
    }
}

#[test]
fn memory_that_stays_mapped_stays_charged() {
    let machine = machine();
    let limit = MemoryLimit::new(4 * PAGE);
    let pool = elastic(&machine, &limit, 4);
    pool.grow_to(4).unwrap();
    // The fifth call is the second attempt for the page that the first call was for.
    for nth in [1, 5] {
        machine.sim.fail_nth("cuMemUnmap", nth, ErrorCode::INVALID_VALUE);
    }
    let report = pool.close(&[]).wait().unwrap();
    assert_eq!((report.leaked_bytes, report.unmapped, report.released), (PAGE, 3, 3));
    assert_eq!((machine.sim.device_used_bytes(0), limit.stats().used_bytes), (PAGE, PAGE));
}

#[test]
fn retired_memory_at_rest_is_released_before_others_are_refused() {
    let machine = machine();
    let limit = MemoryLimit::new(8 * PAGE);
    let (shrinks, grows) = (elastic(&machine, &limit, 8), elastic(&machine, &limit, 8));
    shrinks.grow_to(8).unwrap();
    let stream = machine.stream();
    machine.sim.hold(stream.raw());
    stream.fill(shrinks.block_span(7).unwrap(), 1).unwrap();
    assert_eq!(shrinks.shrink_to(2, &[recorded(&stream)]).unwrap().retiring_pages, 6);
    assert!(matches!(grows.grow_to(1), Err(GrowError::OverLimit { .. })));
    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    assert_eq!(grows.grow_to(6), Ok(6));
    assert_eq!((shrinks.stats().retiring_bytes, limit.stats().used_bytes), (0, 8 * PAGE));
    assert!(matches!(grows.grow_to(7), Err(GrowError::OverLimit { .. })));
    assert!(machine.sim.findings().is_empty(), "{:?}", machine.sim.findings());
}

#[test]
fn memory_that_a_sequence_has_given_up_is_released_before_others_are_refused() {
    let machine = machine();
    let limit = MemoryLimit::new(4 * PAGE);
    let space = one_seat(&limited(&machine, &limit), &Worker::manual());
    let mut sequence = space.admit(16).unwrap();
    sequence.extend_blocking(16).unwrap();
    let stream = machine.stream();
    machine.sim.hold(stream.raw());
    stream.fill(sequence.plane(0).unwrap().span(15..16).unwrap(), 1).unwrap();
    sequence.shrink_to(4, &[recorded(&stream)]).unwrap();
    let other = elastic(&machine, &limit, 8);
    assert!(matches!(other.grow_to(1), Err(GrowError::OverLimit { .. })));
    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    // Whoever asks gets it, though the space's worker has not looked.
    assert_eq!((other.grow_to(3), sequence.ready_tokens()), (Ok(3), 4));
    assert!(matches!(other.grow_to(4), Err(GrowError::OverLimit { .. })));
    sequence.shrink_to(0, &[recorded(&stream)]).unwrap();
    stream.synchronize().unwrap();
    limit.set(3 * PAGE);
    assert_eq!(limit.reclaim(), Reclaimed { parked_bytes: PAGE, ..Reclaimed::default() });
    assert!(machine.sim.findings().is_empty(), "{:?}", machine.sim.findings());
    sequence.finish(&[recorded(&stream)]);
}

#[test]
fn idle_pages_under_a_limit_are_released_before_a_request_is_refused_for_the_devices_memory() {
    for headroom in [false, true] {
        let machine = machine_with(2, 0);
        let limit = MemoryLimit::new(u64::MAX);
        let admission = headroom.then(|| AdmissionPolicy::new(0));
        let pool = |ordinal| {
            let device = Device::open(machine.device.driver().clone(), ordinal).unwrap();
            let rules = MemoryRules { limit: Some(limit.clone()), admission: admission.clone() };
            let options = PagePoolOptions { page_bytes: None, capacity_pages: u64::MAX };
            PagePool::with_rules(&device, options, rules).unwrap()
        };
        let (elsewhere, hoards, asks) = (pool(1), pool(0), pool(0));
        assert_eq!(elsewhere.prepare(3), Ok(3));
        assert_eq!(hoards.prepare(DEVICE_PAGES - 2), Ok(DEVICE_PAGES - 2));
        let taken = asks.take_many(4).unwrap();
        // No more than is needed, and none on another device.
        assert_eq!((hoards.stats().idle, elsewhere.stats().idle), (DEVICE_PAGES - 4, 3));
        let error = asks.take_many(DEVICE_PAGES - 3).unwrap_err();
        assert!(!matches!(error, PageError::Device(_)), "{error}");
        // Nothing was released for what is too much.
        assert_eq!(hoards.stats().idle, DEVICE_PAGES - 4);
        assert_eq!(asks.take_many(DEVICE_PAGES - 4).unwrap().len() as u64, DEVICE_PAGES - 4);
        assert_eq!((taken.len(), elsewhere.stats().idle), (4, 3));
    }
}

/// Owners that have given memory up, with the work on it that still runs.
#[test]
fn nothing_is_released_for_a_request_that_needs_memory_in_use_as_well() {
    type GiveUp = fn(&Machine, &MemoryLimit, &Stream) -> Box<dyn Any>;
    let ways: [GiveUp; 2] = [
        |machine, limit, stream| {
            let pool = elastic(machine, limit, 4);
            pool.grow_to(4).unwrap();
            stream.fill(pool.block_span(3).unwrap(), 1).unwrap();
            pool.shrink_to(1, &[recorded(stream)]).unwrap();
            Box::new(pool)
        },
        |machine, limit, stream| {
            let space = one_seat(&limited(machine, limit), &Worker::manual());
            let mut sequence = space.admit(16).unwrap();
            sequence.extend_blocking(16).unwrap();
            stream.fill(sequence.plane(0).unwrap().span(12..16).unwrap(), 1).unwrap();
            sequence.shrink_to(4, &[recorded(stream)]).unwrap();
            Box::new((space, sequence))
        },
    ];
    for (way, give_up) in ways.into_iter().enumerate() {
        let machine = machine();
        let limit = MemoryLimit::new(6 * PAGE);
        let (hoards, asks) = (limited(&machine, &limit), limited(&machine, &limit));
        assert_eq!(hoards.prepare(2), Ok(2));
        let stream = machine.stream();
        machine.sim.hold(stream.raw());
        let owner = give_up(&machine, &limit, &stream);
        assert!(matches!(asks.take_many(3), Err(PageError::OverLimit(_))), "way {way}");
        assert_eq!((hoards.stats().idle, machine.calls("cuMemRelease")), (2, 0), "way {way}");
        machine.sim.release_hold(stream.raw());
        stream.synchronize().unwrap();
        assert_eq!(asks.take_many(5).unwrap().len(), 5, "way {way}");
        drop(owner);
    }
}

/// A row of four pages, of which others have two idle. The space's own row that it could take is in use.
#[test]
fn a_space_at_work_is_released_nothing_that_does_not_suffice() {
    let machine = machine();
    let limit = MemoryLimit::new(10 * PAGE);
    let hoards = limited(&machine, &limit);
    let options = SpaceOptions {
        sequences: 2,
        planes: 4,
        token_bytes: PAGE,
        tokens_max: 2,
        ..SpaceOptions::default()
    };
    let pages = limited(&machine, &limit);
    let space = SequenceSpace::new(&pages, &Worker::manual(), options).unwrap();
    let mut first = space.admit(2).unwrap();
    first.extend_blocking(2).unwrap();
    assert_eq!((hoards.prepare(2), pages.stats().live), (Ok(2), 8));
    let stream = machine.stream();
    machine.sim.hold(stream.raw());
    stream.fill(first.plane(0).unwrap().span(1..2).unwrap(), 1).unwrap();
    first.shrink_to(1, &[recorded(&stream)]).unwrap();
    let mut second = space.admit(1).unwrap();
    assert!(second.extend_blocking(1).is_err());
    assert_eq!((hoards.stats().idle, machine.calls("cuMemRelease")), (2, 0));
    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    second.extend_blocking(1).unwrap();
    assert_eq!(hoards.stats().idle, 2);
    first.finish(&[recorded(&stream)]);
    second.finish(&[]);
}

#[test]
fn nothing_is_released_for_a_limit_if_the_device_has_no_headroom() {
    let machine = machine_with(2, 0);
    let limit = MemoryLimit::new(4 * PAGE);
    let pool = |ordinal| {
        let device = Device::open(machine.device.driver().clone(), ordinal).unwrap();
        let admission = Some(AdmissionPolicy::new(61 * PAGE));
        let rules = MemoryRules { limit: Some(limit.clone()), admission };
        let options = PagePoolOptions { page_bytes: None, capacity_pages: DEVICE_PAGES };
        PagePool::with_rules(&device, options, rules).unwrap()
    };
    let (elsewhere, hoards, asks) = (pool(1), pool(0), pool(0));
    assert_eq!((elsewhere.prepare(2), hoards.prepare(2)), (Ok(2), Ok(2)));
    // The limit would have room for four, but the device for three.
    assert!(matches!(asks.take_many(4), Err(PageError::NoHeadroom(_))));
    assert_eq!((elsewhere.stats().idle, hoards.stats().idle), (2, 2));
    assert_eq!(asks.take_many(3).unwrap().len(), 3);
}

#[test]
fn a_worker_that_asks_for_less_is_refused_once() {
    let machine = machine();
    let limit = MemoryLimit::new(8 * PAGE);
    let worker = Worker::manual();
    let mut pool = elastic(&machine, &limit, 8);
    pool.work_on(&worker);
    let other = limited(&machine, &limit);
    let held = other.take_many(5).unwrap();
    // Eight are refused, and four; two are granted, and one. Then there is no more.
    let _ = pool.demand(8);
    while worker.poll() {}
    assert_eq!((pool.ready_blocks(), limit.stats().refusals), (3, 1));
    drop(pool);
    let space = one_seat(&limited(&machine, &limit), &worker);
    let mut sequence = space.admit(16).unwrap();
    sequence.extend_blocking(8).unwrap();
    // Two rows are refused, and one is granted.
    assert!(sequence.extend_blocking(16).is_err());
    assert_eq!((sequence.ready_tokens(), limit.stats().refusals), (12, 2));
    sequence.finish(&[]);
    drop(held);
}

/// The driver says of a release that it was not made, twice, and so leaves no doubt.
#[test]
fn memory_that_was_not_released_for_certain_is_released_by_the_next_call() {
    type Next = fn(&MemoryLimit, &PagePool);
    let ways: [Next; 4] = [
        |_, pages| assert_eq!(pages.trim(0), (1, vec![])),
        |limit, _| assert_eq!(limit.reclaim().idle_bytes, PAGE),
        |limit, pages| {
            limit.set(4 * PAGE);
            assert_eq!(pages.take_many(4).unwrap().len(), 4);
        },
        |limit, pages| {
            limit.set(4 * PAGE);
            let rules = MemoryRules { limit: Some(limit.clone()), admission: None };
            let options = PagePoolOptions { page_bytes: None, capacity_pages: 8 };
            let other = PagePool::with_rules(pages.device(), options, rules).unwrap();
            assert_eq!(other.take_many(4).unwrap().len(), 4);
        },
    ];
    for (way, next) in ways.into_iter().enumerate() {
        let machine = machine();
        let limit = MemoryLimit::new(u64::MAX);
        let pages = limited(&machine, &limit);
        let held = pages.take_many(2).unwrap();
        for nth in [1, 2] {
            machine.sim.fail_nth("cuMemRelease", nth, ErrorCode::OUT_OF_MEMORY);
        }
        drop(held);
        let used = |pages: &PagePool| {
            (machine.sim.device_used_bytes(0), limit.stats().used_bytes, pages.stats().live * PAGE)
        };
        assert_eq!(used(&pages), (PAGE, PAGE, PAGE), "way {way}");
        next(&limit, &pages);
        pages.trim(0);
        assert_eq!(used(&pages), (0, 0, 0), "way {way}");
        drop(pages);
        machine.assert_clean();
    }
}

/// The driver refuses to unmap a page that a pool, or a sequence, has given up.
#[test]
fn memory_in_quarantine_is_tried_again_before_others_are_refused() {
    type GiveUp = fn(&Machine, &MemoryLimit) -> Box<dyn Any>;
    let ways: [GiveUp; 2] = [
        |machine, limit| {
            let pool = elastic(machine, limit, 4);
            pool.grow_to(4).unwrap();
            pool.shrink_to(1, &[]).unwrap();
            machine.sim.fail_nth("cuMemUnmap", 2, ErrorCode::INVALID_VALUE);
            assert_eq!(pool.poll_retired().failed.len(), 1);
            Box::new(pool)
        },
        |machine, limit| {
            let worker = Worker::manual();
            let space = one_seat(&limited(machine, limit), &worker);
            let mut sequence = space.admit(16).unwrap();
            sequence.extend_blocking(16).unwrap();
            sequence.shrink_to(4, &[]).unwrap();
            machine.sim.fail_nth("cuMemUnmap", 1, ErrorCode::INVALID_VALUE);
            worker.poll();
            assert_eq!(space.stats().quarantined_bytes, PAGE);
            Box::new((space, sequence))
        },
    ];
    for (way, give_up) in ways.into_iter().enumerate() {
        for lowers in [false, true] {
            let machine = machine();
            let limit = MemoryLimit::new(4 * PAGE);
            let owner = give_up(&machine, &limit);
            let asks = limited(&machine, &limit);
            if lowers {
                limit.set(PAGE);
                assert_eq!(limit.reclaim().over_by, 0, "way {way}");
            } else {
                assert!(asks.take_many(4).is_err(), "way {way}");
                assert_eq!(asks.take_many(3).map(|pages| pages.len()), Ok(3), "way {way}");
            }
            drop(owner);
        }
    }
}

#[test]
fn a_limit_that_looks_at_parked_blocks_makes_nothing_mapped_that_was_retired() {
    let machine = machine();
    machine.sim.set_pace(Pace::Slowest);
    let limit = MemoryLimit::new(8 * PAGE);
    // Four blocks on a page: three are parked on the page that is kept.
    let options = ElasticPoolOptions {
        block_bytes: PAGE / 4,
        capacity_blocks: 32,
        page_bytes: None,
        initial_blocks: 32,
    };
    let rules = MemoryRules { limit: Some(limit.clone()), admission: None };
    let pool = ElasticPool::with_rules(&machine.device, options, EpochGate::new(), rules).unwrap();
    let stream = machine.stream();
    stream.fill(pool.block_span(31).unwrap(), 1).unwrap();
    assert_eq!(pool.shrink_to(1, &[recorded(&stream)]).unwrap().retiring_pages, 7);
    limit.set(PAGE);
    let reclaimed = limit.reclaim();
    assert_eq!((reclaimed.idle_bytes, reclaimed.parked_bytes), (0, 0));
    stream.synchronize().unwrap();
    limit.reclaim();
    limit.set(8 * PAGE);
    pool.poll_retired();
    assert_eq!(pool.grow_to(32), Ok(32));
    for block in 0..32 {
        stream.fill(pool.block_span(block).unwrap(), 7).unwrap();
    }
    stream.synchronize().unwrap();
    assert!(pool.close(&[]).wait().unwrap().is_clean());
    drop(stream);
    machine.assert_clean();
}
