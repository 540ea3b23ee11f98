//! Every way of blocks between device and host memory gives the same content.

use crate::prelude::*;

/// Results and cost of a workload.
struct Played {
    stats: ManagerStats,
    copied_bytes: u64,
    counters: PoolCounters,
    transports: TransportStats,
    /// Calls that move or launch something, and all calls.
    moving: u64,
    calls: u64,
}

/// Batches of requests that evict each other from device memory and come back.
fn play(choice: TransportChoice, devices: u32) -> Played {
    let (machine, mut engine) =
        Machine::with_engine(0, devices, by(choice, options(small(), 40, 80)));
    let before = machine.sim.calls();
    for round in 0..12_u32 {
        let prompts = [0, 1].map(|half| Prompt::new(1 + (2 * round + half) % 6, 60));
        let mut lives = engine.admit_batch(&prompts).unwrap();
        engine.run_all(&mut lives);
        drop(lives);
        engine.drain().unwrap();
    }
    let after = machine.sim.calls();
    let made =
        |name: &str| after.get(name).copied().unwrap_or(0) - before.get(name).copied().unwrap_or(0);
    let moving = ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemcpyBatchAsync", "cuLaunchKernel"];
    let played = Played {
        stats: engine.decided(),
        copied_bytes: engine.cache.stats().copied_bytes,
        counters: engine.pool().counters(),
        transports: engine.cache.stats().transports,
        moving: moving.into_iter().map(made).sum(),
        calls: after.keys().map(|name| made(name)).sum(),
    };
    machine.close(engine);
    played
}

#[test]
fn every_way_moves_the_same_blocks_and_batches_take_fewer_calls() {
    for devices in [1, 2] {
        let each = play(TransportChoice::EachBlock, devices);
        let blocks = each.stats.offloaded_blocks + each.stats.onboarded_blocks;
        assert!(each.stats.onboarded_blocks > 100, "{:?}", each.stats);
        assert_eq!(each.transports.each_block.blocks, blocks * u64::from(devices));
        for choice in TransportChoice::ALL {
            let played = play(choice, devices);
            assert_eq!((played.stats, played.counters), (each.stats, each.counters), "{choice}");
            assert_eq!(played.copied_bytes, blocks * small().block_bytes(), "{choice}");
            let ways = played.transports.by_name().map(|(_, carried)| carried);
            assert_eq!(ways.iter().map(|way| way.blocks).sum::<u64>(), blocks * u64::from(devices));
            assert_eq!(ways.iter().filter(|way| way.blocks > 0).count(), 1, "{choice}: {ways:?}");
            let batches: u64 = ways.iter().map(|way| way.batches).sum();
            match choice {
                TransportChoice::EachBlock => assert_eq!(batches, blocks * u64::from(devices)),
                // Scattered blocks take a hop each.
                TransportChoice::Only(Transport::TwoHop) => {
                    assert!(played.transports.two_hop.batches > 0)
                }
                _ => {
                    assert!(batches * 10 < blocks * u64::from(devices), "{choice}: {batches}");
                    let saved = each.moving - played.moving;
                    assert!(
                        saved > blocks * u64::from(devices) * 8 / 10,
                        "{choice}: {saved} saved"
                    );
                    assert!(played.calls < each.calls, "{choice}");
                }
            }
        }
    }
}

#[test]
fn a_kernel_that_cannot_be_had_is_done_without() {
    let machine = Machine::new(1, 1, small());
    let choice = TransportChoice::Only(Transport::DirectKernel);
    let mut engine = machine.rig.engine_with(by(choice, options(small(), 16, 32)));
    for (number, seed) in [1, 2, 1, 2, 1].into_iter().enumerate() {
        if number == 1 {
            // The kernel is compiled when the first blocks travel.
            machine.sim.fail_nth("cuModuleLoadDataEx", 1, ErrorCode::UNKNOWN);
        }
        engine.serve(&Prompt::new(seed, 60));
    }
    let transports = engine.cache.stats().transports;
    assert_eq!(transports.direct_kernel.blocks, 0);
    assert!(transports.each_block.blocks > 20, "{transports:?}");
    machine.close(engine);
}

#[test]
fn what_is_decided_in_steps_that_are_never_staged_does_not_pile_up() {
    let machine = Machine::new(1, 1, small());
    let mut engine =
        machine.rig.engine_with(by(TransportChoice::Quickest, options(small(), 16, 64)));
    for seed in [1, 2] {
        engine.serve(&Prompt::new(seed, 61));
    }
    let unsent = |engine: &Engine| {
        let stats = engine.decided();
        let sent: u64 = engine
            .cache
            .stats()
            .transports
            .by_name()
            .iter()
            .map(|(_, carried)| carried.blocks)
            .sum();
        stats.offloaded_blocks + stats.onboarded_blocks - sent
    };
    // Each evicts the other, and no step reads them.
    for round in 0..200_u32 {
        let step = engine.begin().unwrap();
        drop(engine.admit(&Prompt::new(1 + round % 2, 61)).unwrap());
        assert!(unsent(&engine) > 10);
        engine.cache.finish_step(step).unwrap();
        assert_eq!(unsent(&engine), 0);
        engine.drain().unwrap();
    }
    for seed in [1, 2] {
        let live = engine.admit(&Prompt::new(seed, 61)).unwrap();
        assert_eq!(live.sequence.cached_tokens(), 60);
        engine.end(live);
    }
    machine.close(engine);
}

#[test]
fn a_ring_that_there_is_no_memory_for_is_done_without() {
    let options = by(TransportChoice::Only(Transport::TwoHop), options(small(), 16, 32));
    let build = |machine: &Machine| KvCache::new(&machine.rig.streams(), options.clone());
    let healthy = Machine::new(1, 1, small());
    build(&healthy).unwrap().close().unwrap();
    let mut without = 0;
    for nth in 1..=healthy.calls("cuMemAlloc") {
        let machine = Machine::new(1, 1, small());
        machine.sim.fail_nth("cuMemAlloc", nth, ErrorCode::OUT_OF_MEMORY);
        let Ok(cache) = build(&machine) else { continue };
        let mut engine = Engine::with(cache);
        for seed in [1, 2, 1] {
            engine.serve(&Prompt::new(seed, 60));
        }
        let transports = engine.cache.stats().transports;
        assert!(transports.direct_kernel.blocks > 0, "{nth}: {transports:?}");
        without += 1;
        machine.close(engine);
    }
    assert_eq!(without, 2, "a ring for each direction");
}
