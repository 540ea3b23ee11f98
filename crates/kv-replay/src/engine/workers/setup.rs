//! What the manager's process and a worker agree on before the first plan, and the account at the end.

use std::collections::BTreeMap;

use kv_plane::SharedMemory;
use serde::{Deserialize, Serialize};

use crate::config::RunConfig;
use crate::disk::DiskReport;
use crate::engine::groups;

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Open {
    /// The devices of all workers.
    pub(super) device: String,
    pub(super) worker: u16,
    pub(super) profile: Option<String>,
    pub(super) device_bytes: u64,
    pub(super) pinned_bytes: u64,
    pub(super) seed: u64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Opened {
    pub(super) name: String,
    /// Its ordinal; the device of a simulation is the worker's own.
    pub(super) ordinal: i32,
    pub(super) simulated: bool,
    pub(super) free_bytes: u64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Share {
    /// The options of a run with this share as its whole model.
    pub(super) config: RunConfig,
    /// Granules that the groups share, and blocks of each in every group.
    shared: Option<(u32, Vec<u32>)>,
    /// The longest request, in blocks.
    pub(super) blocks_per_sequence: u64,
}

impl Share {
    /// A share with the layers and heads of `config`.
    pub(super) fn new(config: &RunConfig, blocks_per_sequence: u64) -> Self {
        let config = RunConfig { disk: None, ..config.clone() };
        Self { config, shared: None, blocks_per_sequence }
    }

    pub(super) fn give_files(&mut self, config: &RunConfig, worker: u16, workers: u16) {
        // What is in them is of no use for another division of the model.
        let share = format!(", worker {worker} of {workers} by {:?}", config.place);
        self.config.disk = config.disk.as_ref().map(|disk| disk.of_worker(worker, workers, share));
    }

    /// The same with memory that the groups share. All workers divide it alike.
    pub(super) fn sharing(mut self, memory: Option<&SharedMemory>) -> Self {
        let Some(memory) = memory else { return self };
        if let Some(&blocks) = groups::blocks_of(memory).first() {
            self.config.device_blocks = blocks.into();
        }
        self.shared = Some((memory.granules, memory.granule_blocks.clone()));
        self
    }

    pub(super) fn shared(&self) -> Option<SharedMemory> {
        let (granules, granule_blocks) = self.shared.clone()?;
        Some(SharedMemory { granules, granule_blocks })
    }
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Account {
    pub(super) driver_calls: BTreeMap<String, u64>,
    /// Batches and blocks of each transport, in the order of `TransportStats::by_name`.
    pub(super) transports: [(u64, u64); 4],
    pub(super) copied_bytes: u64,
    pub(super) pinned_after_warmup: Option<u64>,
    /// What a simulated device has found: how much, and the first.
    pub(super) findings: Option<(usize, String)>,
    pub(super) disk: Option<DiskReport>,
}
