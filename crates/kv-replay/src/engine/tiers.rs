//! The tier in memory below the host, which does everything wrong at times.

use kv_cache::LowerTiers;
use kv_cache::kv_manager::tiers::{BlockFault, FaultRules, MemoryTier, MemoryTierOptions};
use kv_cache::kv_manager::{LowerOptions, Manager};

use crate::config::RunConfig;
use crate::report::{RunReport, TiersReport};

/// The tiers of a run. Worker number `worker` has a seed of its own.
pub(super) fn tiers(config: &RunConfig, worker: u64) -> LowerTiers {
    let Some(seed) = config.tier_faults else { return LowerTiers::default() };
    let mut tiers = LowerTiers::new(b"kv-replay");
    tiers.rules = LowerOptions { stores_open_max: 4, ..LowerOptions::default() };
    let records_max = usize::try_from(config.host_blocks.saturating_mul(8)).unwrap_or(usize::MAX);
    let faults = FaultRules::all(seed.wrapping_mul(64).wrapping_add(worker));
    tiers.push(move || {
        let options = MemoryTierOptions { records_max, faults, ..MemoryTierOptions::default() };
        Box::new(MemoryTier::new(options))
    });
    tiers
}

/// Names of the faults that a manager counts, in the order of [`BlockFault::ALL`].
const FAULTS: [&str; BlockFault::ALL.len()] =
    ["missing", "failed", "short", "checksum", "foreign", "fenced", "late"];

/// Records what came of the tiers below the host.
pub(super) fn note(report: &mut RunReport, config: &RunConfig, manager: &Manager) {
    if config.tier_faults.is_none() {
        return;
    }
    let stats = manager.lower_stats();
    let faults = FAULTS.into_iter().zip(stats.faults).filter(|(_, count)| *count > 0);
    report.tiers = Some(TiersReport {
        blocks_stored: stats.stored_blocks[0],
        blocks_unstored: stats.unstored_blocks,
        blocks_loaded: stats.loaded_blocks[0],
        blocks_void: stats.void_blocks,
        names_dropped: stats.dropped_names[0],
        faults: faults.collect(),
        waits: stats.waits,
        waits_late: stats.late,
        quarantined_at_end: stats.quarantined_blocks + stats.ticket_blocks,
    });
}
