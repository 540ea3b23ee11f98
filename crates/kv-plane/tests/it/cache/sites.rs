//! The reports of a cache to its driver: the program's line behind each call, and the bytes of
//! lists that the host writes.

use kv_testkit::{Watch, from_here};

use crate::prelude::*;

/// An engine of few device blocks, whose requests evict each other's to the host.
fn engine(watch: &Watch, choice: TransportChoice) -> Engine {
    let rig = rig(&watch.over(Arc::new(sim(config()))), 1, small());
    rig.engine_with(by(choice, options(small(), 16, 32)))
}

#[test]
fn steps_name_the_programs_line() {
    for choice in TransportChoice::ALL {
        let watch = Watch::default();
        let mut engine = engine(&watch, choice);
        for round in 0..6 {
            let mut live = engine.admit(&Prompt::new(round % 3, 60)).unwrap();
            let cache = &mut engine.cache;
            let step = cache.begin_step().unwrap();
            let batch = &mut [&mut live.sequence];
            let add = &mut |_: usize, step: &mut BatchStep<'_>| step.array(0, &[7_u64; 3]);
            let (staged, through) = from_here!(watch, "host", cache.stage_with(&step, batch, add));
            staged.unwrap();
            assert!(through, "{choice}: it is enqueued by lines of these crates");
            from_here!(watch, "cuEventRecord", cache.finish_step(step)).0.unwrap();
            drop(live);
            from_here!(watch, "cuEventSynchronize", cache.drain()).0.unwrap();
        }
        let stats = engine.decided();
        assert!(stats.offloaded_blocks > 0 && stats.onboarded_blocks > 0, "{stats:?}");
        let cache = engine.cache;
        from_here!(watch, "cuMemUnmap", cache.close()).0.unwrap();
    }
}

#[test]
fn caches_and_their_growth_name_the_programs_line() {
    let (watch, sim) = (Watch::default(), Arc::new(sim(config())));
    // Nothing completes before it is waited for.
    sim.set_pace(Pace::Slowest);
    let rig = rig(&watch.over(sim), 1, small());
    let (streams, options) = (rig.streams(), options(small(), 16, 32));
    let (cache, _) = from_here!(watch, "cuMemHostAlloc", KvCache::new(&streams, options));
    let mut cache = cache.unwrap();
    // Memory is mapped for the blocks when they are first wanted.
    let queue = &mut VecDeque::from([Request::new(Prompt::new(1, 20).tokens)]);
    let mut admission = from_here!(watch, "cuMemMap", cache.admit(queue, 20)).0.unwrap();
    let Some((_, mut sequence)) = admission.admitted.pop() else { panic!("{admission:?}") };
    let reserved = from_here!(watch, "cuMemMap", cache.reserve(&mut sequence, 60)).0;
    reserved.unwrap().given().unwrap();
    cache.reserve(&mut sequence, 20).unwrap().given().unwrap();
    // As many as may be in flight; the next one has to wait.
    for _ in 0..2 {
        let step = cache.begin_step().unwrap();
        cache.stage(&step, &mut [&mut sequence]).unwrap();
        cache.finish_step(step).unwrap();
        decode(&mut cache, &mut sequence);
    }
    drop(from_here!(watch, "cuEventSynchronize", cache.begin_step()).0.unwrap());
}

/// The list of a transfer is as long as the blocks that travel, whatever the buffer holds.
#[test]
fn a_list_of_blocks_tells_as_many_pairs_as_it_has() {
    let watch = Watch::default();
    let choice = TransportChoice::Only(Transport::DirectKernel);
    let mut engine = engine(&watch, choice);
    let (mut lists, mut batch) = (0, None);
    for round in 0..6 {
        let mut live = engine.admit(&Prompt::new(round % 3, 60)).unwrap();
        let moved =
            |engine: &Engine| engine.cache.stats().transports.by_name().map(|(_, way)| way.blocks);
        let before = moved(&engine);
        let step = engine.begin().unwrap();
        watch.accesses();
        engine.cache.stage(&step, &mut [&mut live.sequence]).unwrap();
        let told = watch.accesses();
        let moved = moved(&engine).iter().sum::<u64>() - before.iter().sum::<u64>();
        assert!(told.iter().all(|access| access.writes), "{told:?}");
        // The batch, as where nothing travels, and before it lists of what left and what came.
        let batch = *batch.get_or_insert(told.len());
        let (before, _) = told.split_at(told.len() - batch);
        assert_eq!(before.iter().map(|access| access.bytes).sum::<u64>() / 8, moved, "{told:?}");
        lists += before.len();
        engine.cache.finish_step(step).unwrap();
        drop(live);
        engine.drain().unwrap();
    }
    assert!(lists > 2, "{lists}");
    engine.try_close().unwrap();
}
