//! Memory is mapped ahead of need by a worker: the calls of a step find it mapped.

use crate::prelude::*;

/// Every call for virtual memory, and the one that asks how much there is.
const MEMORY_CALLS: [&str; 9] = [
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemGetAllocationGranularity",
    "cuMemGetInfo",
];

fn memory_calls(calls: &BTreeMap<&'static str, u64>) -> u64 {
    MEMORY_CALLS.iter().filter_map(|call| calls.get(call)).sum()
}

fn ahead(blocks: u32, worker: &Worker) -> KvCacheOptions {
    let growth = Growth::Ahead { blocks, worker: worker.clone() };
    KvCacheOptions { growth, ..options(small(), 96, 32) }
}

/// Requests come, grow and go, until the cache is as large as it may be and long after; returns the
/// calls for memory that admissions, extensions and steps made.
fn live_through(engine: &mut Engine, machine: &Machine, between: impl Fn()) -> u64 {
    let mut made = 0;
    let mut lives: Vec<Live> = Vec::new();
    for seed in 0..80 {
        between();
        let before = memory_calls(&machine.sim.calls());
        if lives.len() == 4 {
            drop(lives.remove(0));
        }
        lives.push(engine.admit(&Prompt::new(seed, 13)).unwrap());
        for live in &mut lives {
            engine.extend(live, 100 + seed, 3).unwrap();
        }
        engine.run_all(&mut lives);
        made += memory_calls(&machine.sim.calls()) - before;
    }
    made
}

#[test]
fn admitting_extending_and_running_make_no_call_for_memory() {
    for devices in [1, 2] {
        let machine = Machine::new(0, devices, small());
        // The same requests, on demand.
        let on_demand = KvCacheOptions { growth: Growth::OnDemand, ..ahead(0, &Worker::manual()) };
        let mut engine = machine.rig.engine_with(on_demand);
        let inline = live_through(&mut engine, &machine, || {});
        let (demanded, offloaded) = (engine.cache.stats(), engine.decided().offloaded_blocks);
        engine.close();
        assert_eq!(demanded.ready_blocks, 96);
        assert!(demanded.growth_stalls > 10 && demanded.pages_inline > 0, "{demanded:?}");
        // For each page it was created and mapped, for each growth access was granted.
        assert!(inline > 2 * demanded.pages_inline, "{inline} calls");

        let worker = Worker::manual();
        let mut engine = machine.rig.engine_with(ahead(16, &worker));
        assert_eq!(engine.cache.stats().ready_blocks, 0);
        let made = live_through(&mut engine, &machine, || while worker.poll() {});
        assert_eq!(made, 0, "calls for memory on the step path");
        let stats = engine.cache.stats();
        assert_eq!((stats.growth_stalls, stats.pages_inline), (0, 0));
        assert_eq!(stats.pages_ahead, demanded.pages_inline);
        // What the engine sees is the same.
        assert_eq!(stats.ready_blocks, demanded.ready_blocks);
        assert_eq!(engine.decided().offloaded_blocks, offloaded);
        assert!(offloaded > 0);
        machine.close(engine);
    }
}

#[test]
fn a_worker_that_is_late_or_gone_costs_calls_and_nothing_else() {
    let machine = Machine::new(1, 2, small());
    let worker = Worker::manual();
    let mut engine = machine.rig.engine_with(ahead(16, &worker));
    let mut live = engine.computed(&Prompt::new(1, 9));
    let stats = engine.cache.stats();
    assert_eq!((stats.growth_stalls, stats.pages_ahead), (1, 0));
    assert!(stats.pages_inline > 0);
    worker.close();
    engine.extend(&mut live, 2, 40).unwrap();
    engine.run(&mut [&mut live]).unwrap();
    assert_eq!(engine.cache.stats().growth_stalls, 2);
    drop(live);
    machine.close(engine);
}

#[test]
fn a_worker_that_failed_is_told_by_the_next_admission() {
    let machine = Machine::new(1, 1, small());
    let worker = Worker::manual();
    let mut engine = machine.rig.engine_with(ahead(16, &worker));
    machine.sim.fail_nth("cuMemCreate", 2, ErrorCode::ILLEGAL_ADDRESS);
    while worker.poll() {}
    let error = engine.admit(&Prompt::new(1, 9)).unwrap_err();
    assert!(matches!(error, Refused::Memory(DemandError::Ahead(_))), "{error:?}");
    engine.try_close().unwrap();
}

#[test]
fn memory_that_runs_out_ends_growth_ahead_and_the_cache_goes_on() {
    let machine = Machine::new(1, 1, small());
    let own = {
        let engine = machine.rig.engine_with(options(small(), 96, 32));
        let own = machine.sim.device_used_bytes(0);
        engine.try_close().unwrap();
        own
    };
    let device_bytes = own + 5 * crate::machine::PAGE;
    let machine = Machine::with(cuda_sim::SimConfig { device_bytes, ..config() }, small());
    let worker = Worker::manual();
    let mut engine = machine.rig.engine_with(ahead(64, &worker));
    for seed in 0..30 {
        while worker.poll() {}
        engine.serve(&Prompt::new(seed, 9 * 4));
    }
    assert_eq!(engine.cache.stats().ready_blocks, 20);
    // The device is asked no more than once again for what it does not have.
    let asked = machine.calls("cuMemCreate");
    let mut live = engine.admit(&Prompt::new(99, 15 * 4)).unwrap();
    for _ in 0..3 {
        worker.poll();
    }
    engine.run(&mut [&mut live]).unwrap();
    assert!(machine.calls("cuMemCreate") <= asked + 1);
    drop(live);
    engine.close();
    assert_eq!(machine.sim.findings(), []);
}

#[test]
fn a_thread_maps_ahead_while_every_byte_stays_right() {
    for devices in [1, 2] {
        let machine = Machine::new(3, devices, small());
        let worker = Worker::spawn(WorkerOptions::default()).unwrap();
        let mut engine = machine.rig.engine_with(ahead(16, &worker));
        live_through(&mut engine, &machine, || {});
        let stats = engine.cache.stats();
        assert_eq!(stats.ready_blocks, 96);
        let pages = u64::from(devices) * 96 / 4 / u64::from(devices);
        assert_eq!(stats.pages_ahead + stats.pages_inline, pages, "{stats:?}");
        engine.close();
        worker.close();
        machine.assert_clean();
    }
}
