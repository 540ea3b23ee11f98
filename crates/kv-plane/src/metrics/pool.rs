//! Metrics of a block pool.

use kv_pool::stats::PoolStats;

use super::Exposition;

impl Exposition {
    /// Adds what a pool has done and what its blocks are doing: for programs that use `kv-pool` without `kv-manager`, whose
    /// statistics have the blocks of its pools.
    pub fn pool(&mut self, stats: &PoolStats) -> &mut Self {
        let tiers = [("device", stats.primary), ("host", stats.secondary)];
        for (tier, of) in tiers {
            for (state, blocks) in [
                ("free", of.empty),
                ("cached", of.cached),
                ("in_use", of.pinned + of.claimed),
                ("retiring", of.retiring),
            ] {
                let labels = [("tier", tier), ("state", state)];
                self.gauge("kv_cache_blocks", BLOCKS_HELP, &labels, blocks);
            }
        }
        let counts = &stats.counters;
        for (name, help, count) in [
            ("kv_cache_block_lookups_total", "Blocks looked up by prefix.", counts.lookups),
            ("kv_cache_block_hits_total", "Blocks that a lookup by prefix found.", counts.hits),
            (
                "kv_cache_blocks_evicted_total",
                "Cached blocks that lost their device memory.",
                counts.evicted,
            ),
            (
                "kv_cache_policy_faults_total",
                "Eviction policies that are called no more.",
                counts.policy_faults,
            ),
        ] {
            self.counter(name, help, &[], count);
        }
        self
    }
}

pub(super) const BLOCKS_HELP: &str = "Blocks of a tier by what they are doing now.";
