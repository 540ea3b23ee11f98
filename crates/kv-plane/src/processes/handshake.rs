//! What the manager's process and a worker agree on before the first plan.

use std::iter;

use kv_manager::{GroupId, Survivors, WorkerId};
use kv_pool::{BlockHash, Tier};
use kv_tier::GroupKind;
use kv_tier::codec::{Fields, KEY_BYTES, Writer};

use super::error::FrameError;
use crate::{GroupOptions, KvCacheOptions};

/// More groups than any model has.
const GROUPS_MAX: usize = 1 << 16;

/// Who a worker is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Open {
    pub(super) worker: u16,
    pub(super) workers: u16,
    /// Whether it takes the place of another process.
    pub(super) replaces: bool,
}

impl Open {
    pub(super) fn put(self, into: &mut Vec<u8>) {
        in_writer(into, |out| {
            out.u16(self.worker);
            out.u16(self.workers);
            out.u8(self.replaces.into());
        });
    }

    pub(super) fn take(from: &[u8]) -> Result<Self, FrameError> {
        let mut from = Fields::new(from);
        let open =
            Self { worker: from.u16()?, workers: from.u16()?, replaces: from.flag("replaces")? };
        from.end()?;
        Ok(open)
    }
}

/// Numbers of a cache that a worker has like its manager.
const OF_CACHE: [&str; 4] = ["groups", "most sequences", "most tokens of a step", "granules"];

/// Numbers of each group that a worker has like its manager.
const OF_GROUP: [&str; 7] = [
    "tokens of a block",
    "blocks of a row",
    "kind of layers (0 full, 1 window, 2 state)",
    "tokens of a window or before a checkpoint",
    "sinks or drafts",
    "draft model (1 for one)",
    "blocks of a granule",
];

/// What a worker begins with.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Begin {
    /// Device blocks of the first group that get memory at once.
    pub(super) device_blocks: u64,
    /// The numbers of the manager's cache, and of each of its groups.
    alike: Vec<u64>,
}

impl Begin {
    pub(super) fn new(options: &KvCacheOptions, device_blocks: u64) -> Self {
        let shared = options.shared.as_ref();
        let granules = shared.map_or(0, |shared| shared.granules);
        let groups = options.groups.len() as u64;
        let of_cache = [options.sequences_max, options.step_tokens_max, granules].map(u64::from);
        let of_group = |(group, of): (GroupId, &GroupOptions)| {
            let (kind, first, second) = match of.kind {
                GroupKind::Full => (0, 0, 0),
                GroupKind::Window { tokens, sinks } => (1, tokens, sinks),
                GroupKind::State { checkpoint_tokens, drafts } => (2, checkpoint_tokens, drafts),
            };
            let granule =
                shared.and_then(|shared| shared.granule_blocks.get(usize::from(group.0))).copied();
            let (tokens, blocks) = (of.shape.block_tokens(), of.width());
            let draft_model = of.draft_model.into();
            [tokens, blocks, kind, first, second, draft_model, granule.unwrap_or(0)].map(u64::from)
        };
        let of_groups = options.numbered().flat_map(of_group);
        let alike = [groups].into_iter().chain(of_cache).chain(of_groups).collect();
        Self { device_blocks, alike }
    }

    /// The first number that another cache has differently: what it is, here and there.
    pub(super) fn difference(&self, other: &Self) -> Option<(String, u64, u64)> {
        let there = other.alike.iter().copied().chain(iter::repeat(0));
        let mut pairs = self.alike.iter().copied().zip(there).enumerate();
        let (at, (here, there)) = pairs.find(|(_, (here, there))| here != there)?;
        let what = match at.checked_sub(OF_CACHE.len()) {
            None => OF_CACHE[at].to_owned(),
            Some(at) => {
                format!("group {}, {}", at / OF_GROUP.len(), OF_GROUP[at % OF_GROUP.len()])
            }
        };
        Some((what, here, there))
    }

    pub(super) fn put(&self, into: &mut Vec<u8>) {
        in_writer(into, |out| {
            out.u64(self.device_blocks);
            out.list(&self.alike, |out, &number| out.u64(number));
        });
    }

    pub(super) fn take(from: &[u8]) -> Result<Self, FrameError> {
        let mut from = Fields::new(from);
        let device_blocks = from.u64()?;
        let most = OF_CACHE.len() + OF_GROUP.len() * GROUPS_MAX;
        let alike = from.list(most, 8, Fields::u64)?;
        from.end()?;
        Ok(Self { device_blocks, alike })
    }
}

/// Bytes that a snapshot of the tables of these options has at most, as a message.
pub(super) fn snapshot_bytes(options: &KvCacheOptions) -> u64 {
    let rows = u64::from(options.sequences_max);
    let tables = options.groups.iter().map(|of| rows.saturating_mul(of.width().into()));
    let granules = options.shared.as_ref().map_or(0, |shared| shared.granules.into());
    let entries = tables.fold(granules, u64::saturating_add);
    let heads = (options.groups.len() as u64 + 1) * 64;
    entries.saturating_mul(4).saturating_add(heads)
}

/// What a worker has when it is ready for plans.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Ready {
    /// Of each group.
    pub(super) memory: Vec<Memory>,
    /// Blocks that each tier below the host has had since before.
    survivors: Vec<Vec<(GroupId, BlockHash)>>,
}

impl Ready {
    pub(super) fn new(memory: Vec<Memory>, survivors: &[Survivors]) -> Self {
        Self { memory, survivors: survivors.iter().map(|of| of.blocks.clone()).collect() }
    }

    pub(super) fn put(&self, into: &mut Vec<u8>) {
        in_writer(into, |out| {
            out.list(&self.memory, |out, memory| memory.write(out));
            out.list(&self.survivors, |out, blocks| out.list(blocks, Writer::key));
        });
    }

    /// What a worker of a cache of so many groups says.
    pub(super) fn take(from: &[u8], groups: usize) -> Result<Self, FrameError> {
        let mut from = Fields::new(from);
        let memory = from.list(GROUPS_MAX, 16, Memory::read)?;
        if memory.len() != groups {
            return Err(FrameError::Groups { found: memory.len(), expected: groups });
        }
        // Two tiers lie below the host at most.
        let survivors = from.list(2, 4, |from| from.list(usize::MAX, KEY_BYTES, Fields::key))?;
        from.end()?;
        Ok(Self { memory, survivors })
    }

    pub(super) fn survivors(self, worker: WorkerId) -> impl Iterator<Item = Survivors> {
        let tiers = self.survivors.into_iter().zip([Tier::Third, Tier::Fourth]);
        tiers.map(move |(blocks, tier)| Survivors { worker, tier, blocks })
    }
}

/// Memory of a worker: blocks of a group that have some.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Memory {
    pub(super) device_blocks: u64,
    pub(super) host_blocks: u64,
}

impl Memory {
    /// All that there can be, of each group.
    pub(super) fn of(options: &KvCacheOptions) -> Vec<Self> {
        let of = |group: &GroupOptions| Self {
            device_blocks: group.device_blocks.into(),
            host_blocks: group.host_blocks.into(),
        };
        options.groups.iter().map(of).collect()
    }

    pub(super) fn write(&self, out: &mut Writer) {
        out.u64(self.device_blocks);
        out.u64(self.host_blocks);
    }

    pub(super) fn read(from: &mut Fields<'_>) -> Result<Self, FrameError> {
        Ok(Self { device_blocks: from.u64()?, host_blocks: from.u64()? })
    }

    pub(super) fn meet(self, other: Self) -> Self {
        let device_blocks = self.device_blocks.min(other.device_blocks);
        Self { device_blocks, host_blocks: self.host_blocks.min(other.host_blocks) }
    }
}

/// Appends fields to a body.
pub(super) fn in_writer(into: &mut Vec<u8>, write: impl FnOnce(&mut Writer)) {
    let mut out = Writer(std::mem::take(into));
    write(&mut out);
    *into = out.0;
}
