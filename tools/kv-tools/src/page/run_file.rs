//! The JSON report of a run, as far as the page shows it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::ReportError;
use kv_replay::report::TenantReport;
use kv_replay::series::Series;

/// The report of a run: fields of [`RunReport`](kv_replay::report::RunReport). What an older version has not written is 0.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(crate) struct RunFile {
    /// What the page calls the run: the name of its file.
    #[serde(default)]
    pub(crate) name: String,
    pub(crate) requests: u64,
    pub(crate) finished: u64,
    pub(crate) iterations: u64,
    pub(crate) device: String,
    pub(crate) block_lookups: u64,
    pub(crate) block_hits: u64,
    #[serde(default)]
    pub(crate) cancelled: u64,
    #[serde(default)]
    pub(crate) corrupt_blocks: u64,
    #[serde(default)]
    pub(crate) verified_blocks: u64,
    #[serde(default)]
    pub(crate) blocks_evicted: u64,
    #[serde(default)]
    pub(crate) blocks_offloaded: u64,
    #[serde(default)]
    pub(crate) blocks_onboarded: u64,
    #[serde(default)]
    pub(crate) blocks_refused: u64,
    #[serde(default)]
    pub(crate) blocks_regretted: u64,
    #[serde(default)]
    pub(crate) preemptions: u64,
    #[serde(default)]
    pub(crate) prompt_tokens: u64,
    #[serde(default)]
    pub(crate) generated_tokens: u64,
    #[serde(default)]
    pub(crate) prefix_tokens_reused: u64,
    #[serde(default)]
    pub(crate) device_blocks: u64,
    #[serde(default)]
    pub(crate) host_blocks: u64,
    #[serde(default)]
    pub(crate) disk_slots: u64,
    #[serde(default)]
    pub(crate) max_batch: u32,
    #[serde(default)]
    pub(crate) policy: String,
    #[serde(default)]
    pub(crate) store: String,
    #[serde(default)]
    pub(crate) wall_s: f64,
    #[serde(default)]
    pub(crate) predicted_s: Option<f64>,
    #[serde(default)]
    pub(crate) shape: BTreeMap<String, serde_json::Value>,
    #[serde(default)]
    pub(crate) tenants: BTreeMap<String, TenantReport>,
    #[serde(default)]
    pub(crate) open_loop: Option<serde_json::Value>,
    #[serde(default)]
    pub(crate) verify: String,
    #[serde(default)]
    pub(crate) series: Option<Series>,
}

impl RunFile {
    /// Reads the JSON report of a run.
    ///
    /// # Errors
    ///
    /// [`ReportError`], naming the file.
    pub(crate) fn read(path: &Path) -> Result<Self, ReportError> {
        let at = || PathBuf::from(path);
        let bytes =
            std::fs::read(path).map_err(|source| ReportError::Read { path: at(), source })?;
        let run: Self = serde_json::from_slice(&bytes)
            .map_err(|source| ReportError::NoReport { path: at(), source })?;
        if run.series.as_ref().is_some_and(|series| !series.is_whole()) {
            return Err(ReportError::Torn { path: at() });
        }
        let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(Self { name, ..run })
    }

    /// Whether devices were also busy with comparing what they hold.
    pub(crate) fn verifies(&self) -> bool {
        !matches!(&self.verify[..], "" | "none")
    }

    /// Share of block lookups that hit.
    pub(crate) fn hit_rate(&self) -> f64 {
        share(self.block_hits, self.block_lookups)
    }
}

/// `part` of `all`, from 0 to 1; 0 of nothing.
pub(super) fn share(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}
