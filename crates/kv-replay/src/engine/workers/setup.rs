//! What the manager's process and a worker agree on before the first plan, and the account at the end.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use kv_cache::kv_manager::{GroupId, Survivors, WorkerId};
use kv_cache::{SharedMemory, TransportChoice};
use kv_pool::{BlockHash, Tier};
use serde::{Deserialize, Serialize};

use super::error::FrameError;
use crate::config::{Life, RunConfig, Verify};
use crate::disk::{DiskConfig, DiskReport};
use crate::shape::{Dtype, KvModelShape};

/// The device that a worker opens.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Open {
    /// The devices of all workers.
    pub(super) device: String,
    /// The worker, counted from 0.
    pub(super) worker: u16,
    /// Timing profile of a simulated device.
    pub(super) profile: Option<String>,
    /// Memory of a simulated device.
    pub(super) device_bytes: u64,
    /// Pinned memory of a simulated machine.
    pub(super) pinned_bytes: u64,
    /// Seed of a simulated device.
    pub(super) seed: u64,
}

/// An open device.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Opened {
    pub(super) name: String,
    /// Its ordinal; the device of a simulation is the worker's own.
    pub(super) ordinal: i32,
    pub(super) simulated: bool,
    pub(super) free_bytes: u64,
}

/// A worker's share of the model, and the sizes of its buffers.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Share {
    /// Layers with attention.
    layers: u32,
    kv_heads: u32,
    head_size: u32,
    dtype: String,
    /// Tokens of the window of the layers but the first `full_layers`.
    window: Option<u32>,
    full_layers: u32,
    state_layers: u32,
    state_tokens: u32,
    draft_layers: u32,
    /// Draft tokens behind each sampled one.
    drafts: u32,
    /// Granules that the groups share, and blocks of each in every group.
    shared: Option<(u32, Vec<u32>)>,
    block_tokens: u32,
    device_blocks: u64,
    /// Device blocks of the first group that get memory at once.
    pub(super) mapped_blocks: u64,
    host_blocks: u64,
    max_batch: u32,
    step_tokens: u32,
    /// The longest request, in blocks.
    pub(super) blocks_per_sequence: u64,
    transport: String,
    /// Seed of the tier below the host.
    tier_faults: Option<u64>,
    /// Files below the host.
    disk: Option<Files>,
    /// Whether anything is read.
    reads: bool,
}

impl Share {
    /// A share with the layers and heads of `config`.
    pub(super) fn new(config: &RunConfig, blocks_per_sequence: u64) -> Self {
        let KvModelShape { layers, kv_heads, head_size, dtype } = config.shape;
        Self {
            layers,
            kv_heads,
            head_size,
            dtype: dtype.name().to_owned(),
            window: config.window,
            full_layers: config.full_layers,
            state_layers: config.state_layers,
            state_tokens: config.state_tokens,
            draft_layers: config.draft_layers,
            drafts: config.life.drafts,
            shared: None,
            block_tokens: config.block_tokens,
            device_blocks: config.device_blocks,
            mapped_blocks: config.device_blocks,
            host_blocks: config.host_blocks,
            max_batch: config.max_batch,
            step_tokens: config.step_tokens,
            blocks_per_sequence,
            transport: config.transport.name().to_owned(),
            tier_faults: config.tier_faults,
            disk: None,
            reads: config.verify != Verify::None,
        }
    }

    /// Gives one of several workers files of its own, if the run has files.
    pub(super) fn give_files(&mut self, config: &RunConfig, worker: u16, workers: u16) {
        // What is in them is of no use for another division of the model.
        let share = format!(", worker {worker} of {workers} by {:?}", config.place);
        let own = config.disk.as_ref().map(|disk| disk.of_worker(worker, workers, share));
        self.disk = own.as_ref().map(Files::of);
    }

    /// Has the next process with this share begin with empty files.
    pub(super) fn forget_files(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.fresh = true;
        }
    }

    /// The same with memory that the groups share. All workers divide it alike.
    pub(super) fn sharing(self, memory: Option<&SharedMemory>) -> Self {
        let Some(memory) = memory else { return self };
        let blocks = super::super::groups::blocks_of(memory);
        let device_blocks = blocks.first().map_or(self.device_blocks, |&blocks| blocks.into());
        let shared = Some((memory.granules, memory.granule_blocks.clone()));
        Self { shared, device_blocks, mapped_blocks: device_blocks, ..self }
    }

    /// The memory that the groups share.
    pub(super) fn shared(&self) -> Option<SharedMemory> {
        let (granules, granule_blocks) = self.shared.clone()?;
        Some(SharedMemory { granules, granule_blocks })
    }

    /// The options of a run with this share as its whole model.
    pub(super) fn config(&self) -> Result<RunConfig, FrameError> {
        let Self { layers, kv_heads, head_size, .. } = *self;
        let unknown = |found: &String, expected| FrameError::Unexpected {
            found: format!("{found:?}"),
            expected,
        };
        let dtype = self.dtype.parse::<Dtype>();
        let dtype = dtype.map_err(|_| unknown(&self.dtype, "an element type"))?;
        let transport = self.transport.parse::<TransportChoice>();
        let transport = transport.map_err(|_| unknown(&self.transport, "a transport"))?;
        Ok(RunConfig {
            shape: KvModelShape { layers, kv_heads, head_size, dtype },
            window: self.window,
            full_layers: self.full_layers,
            state_layers: self.state_layers,
            state_tokens: self.state_tokens,
            draft_layers: self.draft_layers,
            life: Life { drafts: self.drafts, ..Life::default() },
            block_tokens: self.block_tokens,
            device_blocks: self.device_blocks,
            host_blocks: self.host_blocks,
            max_batch: self.max_batch,
            step_tokens: self.step_tokens,
            transport,
            tier_faults: self.tier_faults,
            disk: self.disk.as_ref().map(Files::config),
            verify: if self.reads { Verify::Full } else { Verify::None },
            ..RunConfig::default()
        })
    }
}

/// Files below the host of a worker.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Files {
    /// A path may be no text.
    folder: Vec<u8>,
    bytes: u64,
    bytes_per_second: Option<u64>,
    fresh: bool,
    share: String,
}

impl Files {
    fn of(disk: &DiskConfig) -> Self {
        let DiskConfig { bytes, bytes_per_second, fresh, .. } = *disk;
        let (folder, share) = (disk.folder.as_os_str().as_bytes().to_vec(), disk.share.clone());
        Self { folder, bytes, bytes_per_second, fresh, share }
    }

    fn config(&self) -> DiskConfig {
        let folder = OsStr::from_bytes(&self.folder).into();
        let mut disk = DiskConfig::new(folder, self.bytes);
        (disk.bytes_per_second, disk.fresh) = (self.bytes_per_second, self.fresh);
        disk.share.clone_from(&self.share);
        disk
    }
}

/// A worker that can be sent plans.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Ready {
    /// Memory of each group.
    pub(super) memory: Vec<Memory>,
    /// Blocks that each tier below the host has had since before: their groups, and both halves of their names.
    survivors: Vec<Vec<(u16, u64, u64)>>,
}

impl Ready {
    pub(super) fn new(memory: Vec<Memory>, survivors: &[Survivors]) -> Self {
        let halves = |&(group, name): &(GroupId, BlockHash)| {
            let name = name.to_u128();
            (group.0, (name >> 64) as u64, name as u64)
        };
        let survivors = survivors.iter().map(|of| of.blocks.iter().map(halves).collect());
        Self { memory, survivors: survivors.collect() }
    }

    pub(super) fn survivors(&self, worker: u16) -> Result<Vec<Survivors>, FrameError> {
        let tiers = [Tier::Third, Tier::Fourth];
        if self.survivors.len() > tiers.len() {
            let found = format!("{} tiers", self.survivors.len());
            return Err(FrameError::Unexpected { found, expected: "two at most" });
        }
        let name = |&(group, high, low): &(u16, u64, u64)| {
            (GroupId(group), BlockHash::from_u128(u128::from(high) << 64 | u128::from(low)))
        };
        let of = |(blocks, tier): (&Vec<_>, _)| {
            let blocks = blocks.iter().map(name).collect();
            Survivors { worker: WorkerId(worker), tier, blocks }
        };
        Ok(self.survivors.iter().zip(tiers).map(of).collect())
    }
}

/// Memory of a worker: blocks of a group that have some.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(super) struct Memory {
    pub(super) device_blocks: u64,
    pub(super) host_blocks: u64,
}

impl Memory {
    /// What both have.
    pub(super) fn meet(self, other: Self) -> Self {
        let device_blocks = self.device_blocks.min(other.device_blocks);
        Self { device_blocks, host_blocks: self.host_blocks.min(other.host_blocks) }
    }
}

/// What a worker has done in all.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Account {
    pub(super) driver_calls: BTreeMap<String, u64>,
    /// Batches and blocks of each transport, in the order of `TransportStats::by_name`.
    pub(super) transports: [(u64, u64); 4],
    pub(super) copied_bytes: u64,
    pub(super) pinned_after_warmup: Option<u64>,
    /// What a simulated device has found: how much, and the first.
    pub(super) findings: Option<(usize, String)>,
    /// What came of the worker's files.
    pub(super) disk: Option<DiskReport>,
}
