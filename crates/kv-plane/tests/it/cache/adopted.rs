//! A cache in tensors that the engine allocated, in the formats of all engines.

use crate::prelude::*;

const BLOCKS: u64 = 12;

/// Tensors of every format.
fn every_format() -> impl Iterator<Item = Tensors> {
    KvFormat::ALL.into_iter().map(Tensors::new)
}

/// A machine whose cache lies in such tensors.
fn machine(tensors: Tensors) -> Machine {
    let mut machine = Machine::new(1, 1, tensors.shape());
    machine.rig.tensors = Some(tensors);
    machine
}

/// What an engine does with a cache: shares, evicts, brings back, forks, suspends and resumes.
fn live_on(engine: &mut Engine) {
    let bt = engine.block_tokens();
    let system = Prompt::new(1, 3 * bt);
    let mut first = engine.computed(&system.then(2, 3));
    // Its last block is shared, and then copied.
    let mut twin = engine.fork(&mut first).unwrap();
    engine.extend(&mut first, 5, 2).unwrap();
    engine.extend(&mut twin, 6, 2).unwrap();
    engine.run(&mut [&mut first, &mut twin]).unwrap();
    engine.drain().unwrap();
    drop(twin);
    engine.suspend(&mut first).unwrap();
    // Others take all blocks meanwhile.
    for seed in [7, 8] {
        engine.serve(&Prompt::new(seed, (BLOCKS - 1) * bt));
    }
    engine.resume(&mut first).unwrap().given().unwrap();
    engine.run(&mut [&mut first]).unwrap();
    // Both tiers shrink and grow while it runs.
    engine.cache.set_budget(GroupId(0), Tier::Primary, BLOCKS - 3).unwrap();
    engine.cache.set_budget(GroupId(0), Tier::Secondary, 20).unwrap();
    engine.extend(&mut first, 10, bt).unwrap();
    engine.run(&mut [&mut first]).unwrap();
    engine.drain().unwrap();
    engine.cache.set_budget(GroupId(0), Tier::Primary, BLOCKS).unwrap();
    engine.cache.set_budget(GroupId(0), Tier::Secondary, 32).unwrap();
    let mut second: Live = engine.admit(&system.then(9, 4)).unwrap();
    assert_eq!(second.sequence.cached_tokens(), 3 * bt);
    engine.run(&mut [&mut first, &mut second]).unwrap();
    engine.assert_intact();
}

#[test]
fn every_format_holds_a_cache() {
    for tensors in every_format() {
        for choice in TransportChoice::ALL {
            let machine = machine(tensors);
            let stream = Stream::new(&machine.rig.devices[0]).unwrap();
            let (memory, paged) = tensors.make(&stream, BLOCKS);
            let whole = paged.layout().has_whole_blocks(paged.shape());
            let options = by(choice, options(*paged.shape(), BLOCKS as u32, 32));
            let made = KvCache::over(std::slice::from_ref(&stream), vec![paged], options);
            if choice == TransportChoice::EachBlock && !whole {
                let refused = std::error::Error::source(&made.unwrap_err()).unwrap().to_string();
                assert!(refused.contains("several pieces"), "{refused}");
                continue;
            }
            let mut engine = Engine::over(made.unwrap(), memory);
            live_on(&mut engine);
            let decided = engine.decided();
            assert!(decided.copied_on_write > 0 && decided.suspended_blocks > 0, "{tensors:?}");
            engine.close();
            drop(stream);
            machine.assert_clean();
        }
    }
}

#[test]
fn every_scenario_of_a_cache_plays_in_every_format() {
    // With gaps behind blocks, where there may be some.
    for tensors in every_format().map(|tensors| tensors.padded().unwrap_or(tensors)) {
        for (_, scenario) in scenarios::all() {
            let machine = machine(tensors);
            scenario(&machine.rig);
            machine.assert_clean();
        }
    }
}

#[test]
fn tensors_of_another_shape_size_or_number_are_refused() {
    let machine = Machine::new(1, 2, small());
    let streams = machine.rig.streams();
    let tensors = Tensors::new(KvFormat::FlashInferNhd);
    let made = || tensors.make(&streams[0], BLOCKS);
    let (_first, paged) = made();
    let right = options(*paged.shape(), BLOCKS as u32, 0);
    let refused = |streams: &[Stream], paged: Vec<PagedKv>, options: &KvCacheOptions| {
        let error = KvCache::over(streams, paged, options.clone()).unwrap_err();
        std::error::Error::source(&error).unwrap().to_string()
    };
    let said = refused(&streams[..1], vec![paged], &options(small(), BLOCKS as u32, 0));
    assert!(said.starts_with("the adopted tensors of group 0 hold"), "{said}");
    let (_memory, paged) = made();
    let many = options(*paged.shape(), BLOCKS as u32 + 1, 0);
    let said = refused(&streams[..1], vec![paged], &many);
    assert_eq!(said, "the adopted tensors of group 0 have 12 blocks, and the cache 13");
    let said = refused(&streams[..1], vec![], &right);
    assert_eq!(said, "0 adopted descriptions for 1 devices with layers");
    let (_memory, paged) = made();
    let said = refused(&streams[1..], vec![paged], &right);
    assert_eq!(said, "adopted description 0 is of another device than the compute stream there");
}
