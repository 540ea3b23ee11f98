//! Looks at the device memory that blocks in use take, by group.

use kv_plane::manager::{GroupId, Manager};

use crate::config::RunConfig;
use crate::memory::{MemoryReport, SharedReport};
use crate::report::RunReport;
use crate::shape::ShapeError;

pub(super) fn begin(
    report: &mut RunReport,
    config: &RunConfig,
    manager: &Manager,
) -> Result<(), ShapeError> {
    let mut memory = MemoryReport::new(config)?;
    memory.shared = manager.options().shared.as_ref().map(|shared| {
        let blocks = memory.groups.iter().zip(&shared.granule_blocks);
        let bytes = blocks.map(|(group, &of)| group.block_bytes.saturating_mul(of.into()));
        SharedReport {
            granules: shared.granules,
            granule_blocks: shared.granule_blocks.clone(),
            granule_bytes: bytes.max().unwrap_or(0),
            ..SharedReport::default()
        }
    });
    if memory.shared.is_some() {
        report.device_blocks = manager.options().groups[0].pool.primary_blocks;
    }
    report.memory = Some(memory);
    Ok(())
}

pub(super) fn note(report: &mut RunReport, manager: &Manager) {
    let Some(memory) = &mut report.memory else { return };
    let used = (0..).map_while(|id| manager.pool(GroupId(id))).map(|pool| {
        let blocks = pool.stats().primary;
        blocks.pinned + blocks.claimed
    });
    memory.note(&used.collect::<Vec<_>>());
    if let Some(shared) = &mut memory.shared {
        let owned = manager.granules().iter().flatten().count() as u64;
        shared.peak_granules = shared.peak_granules.max(owned);
        if report.budget_changes > 0 {
            let before = shared.fewest_granules.unwrap_or(u64::MAX);
            shared.fewest_granules = Some(owned.min(before));
        }
        let stats = manager.stats();
        (shared.granted, shared.taken) = (stats.granted_granules, stats.taken_granules);
    }
}

/// Blocks of the first group that are in use or cached.
pub(super) fn filled(manager: &Manager) -> u64 {
    let Some(pool) = manager.pool(GroupId(0)) else { return 0 };
    let blocks = pool.stats().primary;
    // Of memory that groups share, only blocks of granules that the group has can be handed out.
    let beyond = if manager.granules().is_empty() { blocks.beyond } else { 0 };
    blocks.blocks.saturating_sub(beyond + blocks.empty)
}
