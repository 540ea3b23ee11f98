//! What the manager's process and a worker agree on before the first plan.

use kv_manager::{GroupId, Survivors, WorkerId};
use kv_pool::{BlockHash, Tier};
use kv_tier::codec::{FieldError, Fields, KEY_BYTES, Writer};

use super::error::FrameError;
use crate::KvCacheOptions;

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

/// What a worker begins with.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Begin {
    /// Device blocks of the first group that get memory at once.
    pub(super) device_blocks: u64,
    /// Of each group, tokens of a block, and blocks of a row of its table.
    pub(super) groups: Vec<(u32, u32)>,
}

impl Begin {
    pub(super) fn new(options: &KvCacheOptions, device_blocks: u64) -> Self {
        let groups = options.groups().map(|of| (of.shape.block_tokens(), of.width()));
        Self { device_blocks, groups: groups.collect() }
    }

    pub(super) fn put(&self, into: &mut Vec<u8>) {
        in_writer(into, |out| {
            out.u64(self.device_blocks);
            out.list(&self.groups, |out, &(tokens, columns)| {
                out.u32(tokens);
                out.u32(columns);
            });
        });
    }

    pub(super) fn take(from: &[u8]) -> Result<Self, FrameError> {
        let mut from = Fields::new(from);
        let device_blocks = from.u64()?;
        let groups =
            from.list(GROUPS_MAX, 8, |from| Ok::<_, FieldError>((from.u32()?, from.u32()?)))?;
        from.end()?;
        Ok(Self { device_blocks, groups })
    }
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
