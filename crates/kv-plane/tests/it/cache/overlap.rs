//! A step of a warm cache allocates no memory of any kind, and uses few staging buffers.

use crate::prelude::*;

const ALLOCATING: [&str; 10] = [
    "cuMemAlloc",
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemAddressReserve",
    "cuEventCreate",
    "cuStreamCreate",
    "cuModuleLoadDataEx",
];

#[test]
fn warm_steps_allocate_nothing_and_keep_few_buffers() {
    for depth in 1..=4 {
        let sim = sim(config());
        let counting = Arc::new(CountingDriver::new(Arc::new(sim.clone())));
        let rig = rig(&(counting.clone() as Arc<dyn Driver>), 1, small());
        // The running requests get the blocks that they grow into.
        let options = with_first(options(small(), 48, 32), |group| group.watermark_blocks = 4);
        let options = KvCacheOptions { overlap_depth: depth, ..options };
        let mut engine = rig.engine_with(options);
        sim.set_pace(Pace::Slowest);
        let waits = || counting.calls().get("cuEventSynchronize").copied().unwrap_or(0);
        let allocations = || {
            let calls = counting.calls();
            let counts = ALLOCATING.map(|name| calls.get(name).copied().unwrap_or(0));
            (counts, counting.pinned_bytes_allocated())
        };
        let mut lives: Vec<Live> = Vec::new();
        let (mut warm, mut seed) = (None, 0);
        for step in 0..400_u32 {
            if lives.len() == 4 {
                drop(lives.remove(0));
            }
            // A request may have to wait for the steps that use the blocks it needs.
            match engine.admit(&Prompt::new(seed % 8, 30)) {
                Ok(live) => {
                    lives.push(live);
                    seed += 1;
                }
                Err(error) => assert!(error.is_retryable(), "{error}"),
            }
            let mut all: Vec<&mut Live> = lives.iter_mut().collect();
            let begun = engine.begin().unwrap();
            let before = waits();
            engine.enqueue(begun, &mut all).unwrap();
            // Only the beginning of a step waits, for one that is the depth behind: a buffer is free.
            assert_eq!(waits(), before, "at depth {depth}");
            if step == 100 {
                warm = Some(allocations());
            }
        }
        assert_eq!(Some(allocations()), warm, "at depth {depth}");
        let staging = engine.cache.parts()[0].staging();
        assert_eq!(staging.peak_live(), depth as usize + 1);
        let stats = engine.decided();
        assert!(stats.onboarded_blocks > 0 && stats.offloaded_blocks > 0, "{stats:?}");
        drop(lives);
        engine.close();
    }
}
