//! The tiers below the host: one in memory, which does everything wrong at times, files, and other nodes.

use std::sync::Mutex;

use kv_plane::LowerTiers;
use kv_plane::manager::{ComputeRate, GroupId, LowerOptions, Manager};
use kv_plane::tier::{
    BlockFault, FaultRules, LowerTier, MemoryTier, MemoryTierOptions, header_bytes,
};

use kv_pool::store::{StoreKind, StoreRules};

use super::RunError;
use crate::config::RunConfig;
use crate::report::{RunReport, TiersReport};
use crate::shape::KvModelShape;

/// How the tiers of a run are used.
fn rules(config: &RunConfig) -> LowerOptions {
    let compute = match (config.compute_rate, &config.disk) {
        (Some(rate), _) => ComputeRate::PerSecond(rate),
        (None, Some(_)) => ComputeRate::Measured,
        (None, None) => ComputeRate::Unknown,
    };
    let there = [config.tier_faults.is_some(), config.disk.is_some(), keeps_blocks(config)];
    let tiers = there.into_iter().map(u8::from).sum();
    LowerOptions { tiers, stores_open_max: 4, compute, ..LowerOptions::default() }
}

/// The tiers of workers in other processes, as their manager knows them.
pub(super) fn of_workers(config: &RunConfig) -> Result<LowerTiers, RunError> {
    let mut tiers = LowerTiers::new(b"kv-replay");
    tiers.rules = rules(config);
    if let Some(disk) = config.disk.as_ref().filter(|_| config.store == StoreKind::Evidence) {
        let at = usize::from(config.tier_faults.is_some());
        tiers.store[at] = Some(StoreRules::new(disk.slots(record_bytes(config)?)));
    }
    for _ in 0..tiers.rules.tiers {
        // Here is none: it is only counted.
        tiers.push(|| Box::new(no_room()));
    }
    Ok(tiers)
}

fn no_room() -> MemoryTier {
    MemoryTier::new(MemoryTierOptions { records_max: 0, ..MemoryTierOptions::default() })
}

/// The tiers of a run. Worker number `worker` has a seed of its own. With files, opens them: they are behind a tier
/// in memory, if there is one.
pub(super) fn tiers(config: &RunConfig, worker: u64) -> Result<LowerTiers, RunError> {
    let mut tiers = LowerTiers::new(b"kv-replay");
    tiers.rules = rules(config);
    if let Some(seed) = config.tier_faults {
        let records_max =
            usize::try_from(config.host_blocks.saturating_mul(8)).unwrap_or(usize::MAX);
        let faults = FaultRules::all(seed.wrapping_mul(64).wrapping_add(worker));
        tiers.push(move || {
            let options = MemoryTierOptions { records_max, faults, ..MemoryTierOptions::default() };
            Box::new(MemoryTier::new(options))
        });
    }
    if let Some(disk) = &config.disk {
        let opened = disk.open(record_bytes(config)?)?;
        if config.store == StoreKind::Evidence {
            tiers.store[usize::from(tiers.options().tiers)] =
                Some(StoreRules::new(opened.watch().stats().slots));
        }
        tiers.push(once(opened));
    }
    if let Some(node) = config.node.as_ref().filter(|_| keeps_blocks(config)) {
        tiers.push(once(node.start(record_bytes(config)?, host_bytes(config)?)?));
    }
    Ok(tiers)
}

/// Gives a tier to one worker: files and connections are one's. Another worker has a tier without room.
fn once(tier: impl LowerTier + 'static) -> impl Fn() -> Box<dyn LowerTier> + Send + Sync {
    let tier: Mutex<Option<Box<dyn LowerTier>>> = Mutex::new(Some(Box::new(tier)));
    move || {
        let first = tier.lock().ok().and_then(|mut tier| tier.take());
        first.unwrap_or_else(|| Box::new(no_room()))
    }
}

/// Whether this process is a node that keeps blocks for others.
pub(super) fn keeps_blocks(config: &RunConfig) -> bool {
    config.node.as_ref().is_some_and(|node| node.prefill == 0)
}

/// Bytes of the longest record of a run: of a block of attention, or of a state.
fn record_bytes(config: &RunConfig) -> Result<u64, RunError> {
    let block = config.shape.block_bytes(config.block_tokens)?;
    let state = KvModelShape { layers: config.state_layers.max(1), ..config.shape };
    let state = match config.state_layers {
        0 => 0,
        _ => state.block_bytes(config.state_tokens)?,
    };
    // A section for each layer of each device.
    let layers = config.shape.layers.max(config.state_layers) as usize;
    let header = header_bytes(layers.saturating_mul(DEVICES_MOST)) as u64;
    Ok(block.max(state).saturating_add(header))
}

/// Bytes of the host tier of a run, at most: of groups with blocks of the longest record each.
fn host_bytes(config: &RunConfig) -> Result<u64, RunError> {
    const GROUPS_MOST: u64 = 4;
    let blocks = config.host_blocks.saturating_mul(GROUPS_MOST);
    Ok(record_bytes(config)?.saturating_mul(blocks))
}

/// Events of a node's cache that are kept for the thread that tells the others: many steps' worth.
pub(super) fn events(config: &RunConfig) -> Option<usize> {
    const EVENTS: usize = 1 << 16;
    keeps_blocks(config).then_some(EVENTS)
}

const DEVICES_MOST: usize = 16;

/// Tokens that were loaded from files instead of computed.
pub(super) fn saved_tokens(config: &RunConfig, manager: &Manager) -> u64 {
    // Files are behind a tier in memory.
    let at = usize::from(config.tier_faults.is_some());
    // Every group loads the same tokens.
    let moved = manager.lower_blocks(GroupId::default()).unwrap_or_default();
    moved.loaded[at] * u64::from(config.block_tokens)
}

pub(super) fn note(report: &mut RunReport, config: &RunConfig, manager: &Manager) {
    if config.tier_faults.is_none() && config.disk.is_none() && !keeps_blocks(config) {
        return;
    }
    let stats = manager.lower_stats();
    let disk = config.disk.as_ref();
    report.disk = disk.and_then(|disk| disk.report(saved_tokens(config, manager)));
    report.remote = config.node.as_ref().and_then(|node| node.report(config.block_tokens));
    let names = BlockFault::ALL.map(BlockFault::name);
    let faults = names.into_iter().zip(stats.faults).filter(|(_, count)| *count > 0);
    report.tiers = Some(TiersReport {
        blocks_stored: stats.stored_blocks.iter().sum(),
        blocks_refused: stats.refused_blocks.iter().sum(),
        blocks_regretted: stats.regretted_blocks.iter().sum(),
        blocks_unstored: stats.unstored_blocks,
        blocks_loaded: stats.loaded_blocks.iter().sum(),
        blocks_void: stats.void_blocks,
        names_dropped: stats.dropped_names.iter().sum(),
        faults: faults.collect(),
        blocks_declined: stats.declined_blocks,
        waits: stats.waits,
        waits_late: stats.late,
        quarantined_at_end: stats.quarantined_blocks + stats.ticket_blocks,
    });
}
