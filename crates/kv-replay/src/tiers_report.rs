//! The results of a run that concern the tiers below the device.

use std::collections::BTreeMap;

use serde::Serialize;

/// What of the evicted blocks was not stored in host memory.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct StoresReport {
    /// Name of the rule for what to store below the device.
    pub store: &'static str,
    /// Number of evicted blocks that the rule has refused: they were dropped.
    pub blocks_refused: u64,
    /// Number of refused blocks that were asked for while host memory would have had them still; of a large host
    /// tier estimated from a sample.
    pub blocks_regretted: u64,
}

/// What came of a tier below host memory, at all workers together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TiersReport {
    /// Blocks that every worker stored.
    pub blocks_stored: u64,
    /// Blocks that the rule for what to store has refused.
    pub blocks_refused: u64,
    /// Refused blocks that were computed again since, as far as the rule remembers them.
    pub blocks_regretted: u64,
    /// Blocks that some worker did not store.
    pub blocks_unstored: u64,
    /// Blocks that came back right at every worker: hits below host memory.
    pub blocks_loaded: u64,
    /// Blocks on their way that were forgotten, or whose worker was lost.
    pub blocks_void: u64,
    /// Names that the tier dropped by itself.
    pub names_dropped: u64,
    /// Blocks of loads that were wrong at some worker, by fault. Each was a miss.
    pub faults: BTreeMap<&'static str, u64>,
    /// Blocks that the tier had for a request, and that were computed because that was to be faster.
    pub blocks_declined: u64,
    /// Number of times that a request waited for a load.
    pub waits: u64,
    /// Number of these waits that a deadline ended.
    pub waits_late: u64,
    /// Host blocks that tickets held when the run had ended.
    pub quarantined_at_end: u64,
}
