//! Budgets that fall while copies are refused, and while memory is mapped ahead of need.

use crate::prelude::*;

/// Runs one request alone; how many of its tokens were cached.
fn serve(engine: &mut Engine, seed: u32) -> u64 {
    engine.serve(&Prompt::new(seed, 17)).0
}

/// Serves a few prompts, and then one whose evictions the driver refuses to copy.
fn with_copies_refused(machine: &Machine, choice: TransportChoice) -> Engine {
    let pinning = HostPinning { threads: 0, slab_bytes_max: 4 * small().block_bytes() };
    let sizes = KvCacheOptions { pinning, ..options(small(), 8, 32) };
    let mut engine = machine.rig.engine_with(by(choice, sizes));
    (0..5).for_each(|seed| assert_eq!(serve(&mut engine, seed), 0));
    let mut live = engine.admit(&Prompt::new(5, 17)).unwrap();
    machine.sim.fail_nth("cuMemcpyDtoHAsync", 1, ErrorCode::UNKNOWN);
    assert!(engine.run(&mut [&mut live]).is_err(), "{choice}");
    drop(live);
    engine.drain().unwrap();
    engine
}

#[test]
fn copies_that_were_refused_keep_the_memory_that_they_name() {
    for choice in [TransportChoice::Only(Transport::CopyEngine), TransportChoice::EachBlock] {
        for tier in [Tier::Secondary, Tier::Primary] {
            let machine = Machine::new(1, 1, small());
            let mut engine = with_copies_refused(&machine, choice);
            engine.cache.set_budget(GroupId(0), tier, 4).unwrap();
            // The step that is begun gives memory back; the one that is staged makes the copies.
            let live = engine.computed(&Prompt::new(6, 9));
            engine.end(live);
            engine
                .cache
                .set_budget(GroupId(0), tier, if tier == Tier::Primary { 8 } else { 32 })
                .unwrap();
            for seed in 0..5 {
                serve(&mut engine, seed);
            }
            machine.close(engine);
        }
    }
}

#[test]
fn nothing_is_mapped_ahead_of_need_in_a_worker_that_gave_memory_back() {
    let machine = Machine::new(1, 1, small());
    let thread = Worker::manual();
    let growth = Growth::Ahead { blocks: 16, worker: thread.clone() };
    let sizes = KvCacheOptions { growth, ..options(small(), 96, 0) };
    let mut worker = machine.rig.worker(sizes);
    while thread.poll() {}
    assert_eq!(worker.ready_blocks(GroupId(0)), 16);
    assert!(worker.shrink_to(4));
    while thread.poll() {}
    assert_eq!(worker.ready_blocks(GroupId(0)), 4);
    worker.close().unwrap();
    machine.assert_clean();
}

#[test]
fn a_worker_maps_nothing_beyond_a_budget() {
    let machine = Machine::new(1, 1, small());
    let worker = Worker::manual();
    let growth = Growth::Ahead { blocks: 16, worker: worker.clone() };
    let sizes = KvCacheOptions { growth, ..options(small(), 96, 0) };
    let mut engine = machine.rig.engine_with(sizes);
    let work = || while worker.poll() {};
    let live = engine.computed(&Prompt::new(1, 60));
    work();
    drop(live);
    engine.drain().unwrap();
    let mapped = |machine: &Machine| machine.sim.device_used_bytes(0);
    let before = mapped(&machine);
    engine.cache.set_budget(GroupId(0), Tier::Primary, 4).unwrap();
    for _ in 0..4 {
        engine.empty_step();
        work();
    }
    assert_eq!(engine.cache.parts()[0].ready_blocks(), 4);
    assert!(mapped(&machine) < before, "{} of {before} bytes", mapped(&machine));
    machine.close(engine);
}

#[test]
fn the_block_that_padding_names_keeps_its_memory_without_any_budget() {
    let (machine, mut engine) = Machine::one(16, 0);
    engine.serve(&Prompt::new(1, 40));
    engine.cache.set_budget(GroupId(0), Tier::Primary, 0).unwrap();
    for _ in 0..4 {
        engine.empty_step();
    }
    assert_eq!(engine.cache.parts()[0].ready_blocks(), 1);
    machine.close(engine);
}

/// The bytes of device blocks, read without regard to the cache's streams.
fn bytes_of(engine: &Engine, blocks: impl Iterator<Item = BlockId>) -> Vec<u8> {
    let part = &engine.cache.parts()[0];
    let other = Stream::new(part.device()).unwrap();
    let read = |block: BlockId| {
        let mut bytes = vec![0; small().block_bytes() as usize];
        let span = part.paged().block_span(block.index() as u64).unwrap().unwrap();
        other.download(&mut bytes, span).unwrap();
        bytes
    };
    blocks.flat_map(read).collect()
}

#[test]
fn an_exported_sequence_has_what_came_back_by_a_copy_that_was_refused() {
    // Refused is a copy, or the event after all copies.
    for call in ["cuMemcpyHtoDAsync", "cuEventRecord"] {
        let machine = Machine::new(1, 1, small());
        machine.sim.set_pace(Pace::Slowest);
        let sizes = by(TransportChoice::EachBlock, options(small(), 16, 32));
        let mut engine = machine.rig.engine_with(sizes);
        let first = engine.computed(&Prompt::new(0, 17));
        engine.drain().unwrap();
        let full = (0..4).filter_map(|at| first.sequence.block(GroupId(0), at));
        let computed = bytes_of(&engine, full);
        drop(first);
        (1..6).for_each(|seed| assert_eq!(serve(&mut engine, seed), 0));
        // Its blocks come back from host memory with a step that fails.
        let live = engine.admit(&Prompt::new(0, 17)).unwrap();
        assert_eq!(live.sequence.onboarded_blocks(), 4);
        let mut other = engine.admit(&Prompt::new(50, 5)).unwrap();
        machine.sim.fail_nth(call, 1, ErrorCode::UNKNOWN);
        assert!(engine.run(&mut [&mut other]).is_err());
        drop(other);
        while engine.cache.manager().completed_step() < engine.cache.manager().last_plan().step {
            engine.empty_step();
        }
        let export = engine.cache.export(live.sequence).unwrap();
        let carried = bytes_of(&engine, export.blocks(GroupId(0)).iter().map(|&(_, id)| id));
        assert!(carried == computed, "{call}");
        drop(export);
        engine.try_close().unwrap();
        machine.assert_clean();
    }
}
