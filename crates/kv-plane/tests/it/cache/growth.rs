//! Memory is mapped when blocks are first needed, as far as there is memory.

use crate::prelude::*;

#[test]
fn pages_are_mapped_as_blocks_are_needed_and_once_grown_never_again() {
    let (machine, mut engine) = Machine::one(32, 32);
    let maps = || machine.calls("cuMemMap");
    assert_eq!((engine.cache.stats().ready_blocks, maps()), (0, 0));
    // Four blocks on a page.
    for (seed, blocks, ready) in [(1, 1, 4), (2, 3, 4), (3, 1, 8), (4, 11, 16), (5, 16, 32)] {
        let live = engine.computed(&Prompt::new(seed, blocks * 4));
        // No content is evicted while there are addresses without memory.
        assert_eq!((engine.cache.stats().ready_blocks, maps()), (ready, ready / 4));
        drop(live);
        engine.drain().unwrap();
    }
    let calls = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAlloc", "cuMemHostRegister"];
    let memory_calls = || calls.map(|name| machine.calls(name));
    let grown = memory_calls();
    (10..30).for_each(|seed| drop(engine.computed(&Prompt::new(seed, 40))));
    assert!(engine.decided().offloaded_blocks > 0);
    assert_eq!(memory_calls(), grown);
    engine.close();
}

#[test]
fn a_worker_gives_memory_back_and_maps_it_again() {
    let machine = Machine::new(1, 1, small());
    let pages = || ["cuMemMap", "cuMemUnmap"].map(|name| machine.calls(name));
    let mut worker = machine.rig.worker(options(small(), 32, 0));
    let ready = |worker: &KvWorker| worker.ready_blocks(GroupId(0));
    assert_eq!((worker.grow_to(32).unwrap(), pages()), (32, [8, 0]));
    // Four blocks on a page: the third page has two that stay.
    assert!(worker.shrink_to(10));
    assert_eq!((ready(&worker), pages()), (10, [8, 5]));
    assert!(worker.shrink_to(20), "a worker that has less keeps what it has");
    assert_eq!((ready(&worker), pages()), (10, [8, 5]));
    assert_eq!((worker.grow_to(32).unwrap(), pages()), (32, [13, 5]));
    worker.close().unwrap();
    machine.assert_clean();
}

#[test]
fn devices_with_unequal_shares_of_the_layers_grow_to_what_all_have() {
    // Two layers of 1 KiB and one: 2 KiB and 1 KiB of a block.
    let machine = Machine::new(1, 2, shape(3, 64, 8));
    let mut engine = machine.rig.engine(32, 0);
    let mut live = engine.admit(&Prompt::new(1, 3 * 8)).unwrap();
    let ready: Vec<_> = engine.cache.parts().iter().map(|part| part.ready_blocks()).collect();
    assert_eq!((ready, engine.cache.stats().ready_blocks), (vec![4, 4], 4));
    engine.extend(&mut live, 2, 2 * 8).unwrap();
    engine.reserve(&mut live).unwrap().given().unwrap();
    let ready: Vec<_> = engine.cache.parts().iter().map(|part| part.ready_blocks()).collect();
    assert_eq!((ready, engine.cache.stats().ready_blocks), (vec![6, 8], 6));
    engine.end(live);
    machine.close(engine);
}

/// A machine whose device has memory for `pages` pages beside what an engine needs for itself.
fn machine_with(pages: u64, devices: u32) -> Machine {
    let (machine, engine) = Machine::on(devices, 64, 4);
    let own = (0..devices).map(|device| machine.sim.device_used_bytes(device)).max().unwrap();
    engine.try_close().unwrap();
    Machine::with(SimConfig { devices, device_bytes: own + pages * PAGE, ..config() }, small())
}

#[test]
fn a_device_without_memory_is_used_as_far_as_it_goes() {
    for devices in [1, 2] {
        let machine = machine_with(5, devices);
        let mut engine = machine.rig.engine(64, 4);
        let ready = if devices == 1 { 20 } else { 40 };
        let mut first = engine.admit(&Prompt::new(1, 9 * 4)).unwrap();
        let mut others: Vec<_> = Vec::new();
        let refused = loop {
            // The device never has all of it, so the search for the largest part begins with a
            // refusal.
            match engine.admit(&Prompt::new(2 + others.len() as u32, 16 * 4)) {
                Ok(live) => others.push(live),
                Err(error) => break error,
            }
        };
        assert!(matches!(refused, Refused::NoRoom(_)), "{refused}");
        assert_eq!(engine.cache.stats().ready_blocks, ready);
        let mut all: Vec<_> = others.iter_mut().chain([&mut first]).collect();
        engine.run(&mut all).unwrap();
        drop((first, others));
        engine.drain().unwrap();
        let maps = machine.calls("cuMemCreate");
        for seed in 10..20 {
            engine.serve(&Prompt::new(seed, 14 * 4));
        }
        let asked = machine.calls("cuMemCreate") - maps;
        assert!(asked < 4 * u64::from(devices), "memory was asked for {asked} times");
        engine.close();
        assert_eq!(machine.sim.findings(), []);
    }
}

/// Takes all of the first device's memory but `pages` pages, as another allocator does.
fn all_but(machine: &Machine, pages: u64) -> DeviceBuffer {
    let device = &machine.rig.devices[0];
    let (free_bytes, _) = device.memory_info().unwrap();
    DeviceBuffer::alloc(device, free_bytes - pages * PAGE).unwrap()
}

#[test]
fn memory_that_comes_back_is_used_by_the_next_request() {
    for devices in [1, 2] {
        let machine = machine_with(16, devices);
        let mut engine = machine.rig.engine(64, 4);
        let others = all_but(&machine, 1);
        let refused = engine.admit(&Prompt::new(1, 16 * 4)).unwrap_err();
        assert!(matches!(refused, Refused::NoRoom(_)), "{refused}");
        // The cache does not give up: others may free memory.
        assert!(refused.is_retryable());
        others.free().unwrap();
        engine.serve(&Prompt::new(1, 16 * 4));
        machine.close(engine);
    }
}

#[test]
fn one_refusal_of_memory_is_of_the_moment() {
    for nth in 1..=4 {
        let (machine, mut engine) = Machine::one(64, 4);
        machine.sim.fail_nth("cuMemCreate", nth, ErrorCode::OUT_OF_MEMORY);
        // The remaining pages may be enough.
        drop(engine.admit(&Prompt::new(1, 9 * 4)));
        engine.serve(&Prompt::new(1, 16 * 4));
        machine.close(engine);
    }
}

#[test]
fn a_cache_that_closes_leaves_its_memory_to_the_others_of_its_limit() {
    for growth in [Growth::OnDemand, Growth::Ahead { blocks: 8, worker: Worker::manual() }] {
        let machine = Machine::new(1, 1, small());
        let limit = MemoryLimit::new(16 * PAGE);
        let memory = MemoryRules { limit: Some(limit.clone()), ..MemoryRules::default() };
        let options = KvCacheOptions { memory, growth, ..options(small(), 64, 0) };
        let engine = || machine.rig.engine_with(options.clone());
        let (mut first, mut second) = (engine(), engine());
        let lives = [1, 2, 3].map(|seed| first.admit(&Prompt::new(seed, 16 * 4)).unwrap());
        let lives = (lives, first.admit(&Prompt::new(4, 12 * 4)).unwrap());
        // However often it was refused before.
        for _ in 0..40 {
            let refused = second.admit(&Prompt::new(5, 16 * 4)).unwrap_err();
            assert!(refused.is_retryable(), "{refused}");
        }
        drop(lives);
        first.try_close().unwrap();
        let mut live = second.admit(&Prompt::new(5, 16 * 4)).unwrap();
        second.run(&mut [&mut live]).unwrap();
        drop(live);
        second.close();
        machine.assert_clean();
    }
}

#[test]
fn memory_that_has_run_out_is_asked_for_seldom_and_grown_into_when_it_is_back() {
    let machine = machine_with(16, 1);
    let mut engine = machine.rig.engine(64, 32);
    let others = all_but(&machine, 2);
    let serve = |engine: &mut Engine, seeds: std::ops::Range<u32>| {
        for seed in seeds {
            engine.serve(&Prompt::new(seed, 6 * 4));
        }
    };
    serve(&mut engine, 0..2);
    assert_eq!(engine.cache.stats().ready_blocks, 8);
    let asked = machine.calls("cuMemCreate");
    serve(&mut engine, 2..1000);
    let asked = machine.calls("cuMemCreate") - asked;
    assert!((1..20).contains(&asked), "asked for {asked} times");
    assert_eq!(engine.cache.stats().ready_blocks, 8);
    others.free().unwrap();
    // No request is refused, and yet memory that is back is found.
    serve(&mut engine, 0..2000);
    assert!(engine.cache.stats().ready_blocks > 32, "{:?}", engine.cache.stats());
    engine.close();
}

#[test]
fn a_limit_that_is_raised_lets_the_cache_grow_on() {
    // Four blocks on a page.
    for growth in [Growth::OnDemand, Growth::Ahead { blocks: 8, worker: Worker::manual() }] {
        let machine = Machine::new(1, 1, small());
        let limit = MemoryLimit::new(2 * PAGE);
        let memory = MemoryRules { limit: Some(limit.clone()), ..MemoryRules::default() };
        let options = KvCacheOptions { memory, growth, ..options(small(), 32, 0) };
        let worker = options.growth.worker().cloned();
        let mut engine = machine.rig.engine_with(options);
        let long = Prompt::new(1, 12 * 4);
        let refused = engine.admit(&long).unwrap_err();
        assert!(matches!(refused, Refused::NoRoom(_)), "{refused:?}");
        assert_eq!(engine.cache.stats().ready_blocks, 8);
        let refused = engine.admit(&long).unwrap_err();
        assert!(matches!(refused, Refused::NoRoom(_)) && refused.is_retryable(), "{refused:?}");
        assert_eq!(limit.stats().used_bytes, 2 * PAGE);
        limit.set(5 * PAGE);
        let live = engine.computed(&long);
        assert!((12..=20).contains(&engine.cache.stats().ready_blocks));
        drop(live);
        engine.drain().unwrap();
        while worker.as_ref().is_some_and(Worker::poll) {}
        assert!(limit.stats().used_bytes <= 5 * PAGE);
        engine.close();
        assert_eq!(limit.stats().used_bytes, 0);
        machine.assert_clean();
    }
}

#[test]
fn devices_under_one_limit_have_what_fits_on_all() {
    for growth in [Growth::OnDemand, Growth::Ahead { blocks: 0, worker: Worker::manual() }] {
        // Eight half blocks on a page of each device.
        let machine = Machine::new(1, 2, small());
        let memory =
            MemoryRules { limit: Some(MemoryLimit::new(2 * PAGE)), ..MemoryRules::default() };
        let options = KvCacheOptions { memory, growth, ..options(small(), 32, 0) };
        let worker = options.growth.worker().cloned();
        let mut engine = machine.rig.engine_with(options);
        let refused = engine.admit(&Prompt::new(1, 12 * 4)).unwrap_err();
        assert!(matches!(refused, Refused::NoRoom(_)) && refused.is_retryable(), "{refused:?}");
        while worker.as_ref().is_some_and(Worker::poll) {}
        assert_eq!(engine.cache.stats().ready_blocks, 8);
        engine.serve(&Prompt::new(1, 8 * 4));
        machine.close(engine);
    }
}
