//! What a step costs once the cache is warm: no memory of any kind, and few staging buffers.

use std::sync::Arc;

use cuda_driver::{CountingDriver, Driver};
use kv_cache::KvCacheOptions;

use crate::common::engine::{Live, Prompt, options};
use crate::machine::{config, rig, sim, small};

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
        let counting = Arc::new(CountingDriver::new(Arc::new(sim)));
        let rig = rig(&(counting.clone() as Arc<dyn Driver>), 1, small());
        let options = KvCacheOptions { overlap_depth: depth, ..options(small(), 48, 32) };
        let mut engine = rig.engine_with(options);
        let allocations = || {
            let calls = counting.calls();
            let counts = ALLOCATING.map(|name| calls.get(name).copied().unwrap_or(0));
            (counts, counting.pinned_bytes_allocated())
        };
        let mut lives: Vec<Live> = Vec::new();
        let mut warm = None;
        for step in 0..400_u32 {
            if lives.len() == 4 {
                drop(lives.remove(0));
            }
            // A request may have to wait for the steps that use the blocks it needs.
            match engine.admit(&Prompt::new(step % 9, 30)) {
                Ok(live) => lives.push(live),
                Err(error) => assert!(error.is_retryable(), "{error}"),
            }
            let mut all: Vec<&mut Live> = lives.iter_mut().collect();
            engine.run(&mut all).unwrap();
            if step == 100 {
                warm = Some(allocations());
            }
        }
        assert_eq!(Some(allocations()), warm, "at depth {depth}");
        let staging = engine.cache.parts()[0].staging();
        assert!(staging.peak_live() <= depth as usize + 1, "{} live", staging.peak_live());
        assert_eq!(staging.leaked(), 0);
        let stats = engine.cache.stats();
        assert!(stats.onboarded_blocks > 0 && stats.offloaded_blocks > 0, "{stats:?}");
        drop(lives);
        engine.close();
    }
}
