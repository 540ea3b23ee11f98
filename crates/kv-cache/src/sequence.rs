//! A sequence: one request's blocks, in order, and its row of the block table.

use std::ops::Range;
use std::sync::Arc;

use kv_pool::{
    BlockHash, BlockId, Claimed, Naming, Pinned,
    retention::{Retention, RetentionPolicy},
    tenants::TenantId,
};

use kv_stage::{BlockTable, Row, error::TableError};

use crate::rows::RowLease;

/// The blocks of one request, from its first token on.
///
/// Dropping a sequence releases its blocks, from last to first, so that the tail of a prefix is
/// evicted before its head. The device may still be using them, so they are handed out again only
/// when the open step, or else the last one, has completed.
#[derive(Debug)]
#[must_use = "dropping a sequence releases its blocks"]
pub struct Sequence {
    pub(crate) row: RowLease,
    pub(crate) blocks: Blocks,
    pub(crate) tokens: u64,
    /// Tokens at admission.
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) onboarded_blocks: usize,
    /// Blocks from the first on that have been offered to the prefix index.
    pub(crate) sealed: usize,
    pub(crate) tenant: TenantId,
    pub(crate) retention: Option<Arc<RetentionPolicy>>,
}

/// Consecutive blocks of a sequence with the same kind of handle.
#[derive(Debug)]
pub(crate) enum Run {
    /// Blocks that other sequences may hold too, and that no sequence writes.
    Shared(Pinned),
    /// Blocks that this sequence alone reads and writes.
    Own(Claimed),
}

impl Run {
    fn len(&self) -> usize {
        match self {
            Self::Shared(pinned) => pinned.len(),
            Self::Own(claimed) => claimed.len(),
        }
    }

    fn id(&self, index: usize) -> Option<BlockId> {
        match self {
            Self::Shared(pinned) => pinned.ids().nth(index),
            Self::Own(claimed) => claimed.ids().nth(index),
        }
    }
}

/// A sequence's blocks in their order: mostly a list of shared ones, then a list of its own.
///
/// A drop releases the blocks from last to first.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    runs: Vec<Run>,
    /// Empty; kept for its capacity.
    emptied: Vec<Run>,
}

impl Blocks {
    pub(crate) fn len(&self) -> usize {
        self.runs.iter().map(Run::len).sum()
    }

    pub(crate) fn id(&self, mut index: usize) -> Option<BlockId> {
        for run in &self.runs {
            match index.checked_sub(run.len()) {
                Some(behind) => index = behind,
                None => return run.id(index),
            }
        }
        None
    }

    /// Calls `each` for the blocks at `wanted` positions, as far as there are any.
    pub(crate) fn for_each_id<E>(
        &self,
        wanted: Range<usize>,
        mut each: impl FnMut(usize, BlockId) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut start = 0;
        for run in &self.runs {
            let len = run.len();
            let passed = wanted.start.saturating_sub(start).min(len);
            let positions = start + passed..wanted.end;
            match run {
                Run::Shared(pinned) => {
                    let mut ids = positions.zip(pinned.ids().skip(passed));
                    ids.try_for_each(|(index, id)| each(index, id))?;
                }
                Run::Own(claimed) => {
                    let mut ids = positions.zip(claimed.ids().skip(passed));
                    ids.try_for_each(|(index, id)| each(index, id))?;
                }
            }
            start += len;
        }
        Ok(())
    }

    /// Writes the ids of the blocks from `first` on to a row of the block table.
    pub(crate) fn write_row(
        &self,
        table: &mut BlockTable,
        row: Row,
        first: usize,
    ) -> Result<(), TableError> {
        let mut start = 0;
        for run in &self.runs {
            let len = run.len();
            let passed = first.saturating_sub(start).min(len);
            let at = start + passed;
            match run {
                Run::Shared(pinned) => {
                    table.set_run(row, at, pinned.ids().skip(passed).map(BlockId::as_i32))?;
                }
                Run::Own(claimed) => {
                    table.set_run(row, at, claimed.ids().skip(passed).map(BlockId::as_i32))?;
                }
            }
            start += len;
        }
        Ok(())
    }

    /// Adds blocks behind all others.
    pub(crate) fn push(&mut self, run: Run) {
        let left = match (self.runs.last_mut(), run) {
            (_, run) if run.len() == 0 => None,
            (Some(Run::Shared(last)), Run::Shared(more)) => {
                last.append(more).err().map(Run::Shared)
            }
            (Some(Run::Own(last)), Run::Own(more)) => last.append(more).err().map(Run::Own),
            (_, run) => Some(run),
        };
        self.runs.extend(left);
    }

    /// Names the sequence's own blocks from `first` on by `hashes`, by position. `naming` returns a
    /// block's retention and the number of blocks from there on with the same retention. `shares`
    /// says whether to change over to a block that has the name already.
    pub(crate) fn seal(
        &mut self,
        first: usize,
        hashes: &[BlockHash],
        naming: impl Fn(usize) -> (Retention, usize),
        shares: impl Fn(&Pinned) -> bool,
    ) {
        let mut runs = std::mem::replace(&mut self.runs, std::mem::take(&mut self.emptied));
        let mut start = 0;
        for run in runs.drain(..) {
            let end = start + run.len();
            match run {
                Run::Own(mut own) if first < end && start < hashes.len() => {
                    let mut at = start.max(first);
                    let mut unnamed = own.split_off(at - start);
                    self.push(Run::Own(own));
                    let rest = unnamed.split_off(end.min(hashes.len()) - at);
                    while !unnamed.is_empty() {
                        at += self.seal_next(&mut unnamed, at, hashes, &naming, &shares);
                    }
                    self.push(Run::Own(rest));
                }
                run => self.push(run),
            }
            start = end;
        }
        self.emptied = runs;
    }

    /// Seals the first blocks of `unnamed`, which begins with block `at`, and returns their number.
    fn seal_next(
        &mut self,
        unnamed: &mut Claimed,
        at: usize,
        hashes: &[BlockHash],
        naming: &impl Fn(usize) -> (Retention, usize),
        shares: &impl Fn(&Pinned) -> bool,
    ) -> usize {
        let (retention, alike) = naming(at);
        let count = unnamed.len().min(alike.max(1));
        let parent = at.checked_sub(1).map(|before| hashes[before]);
        let naming = Naming { parent, retention };
        let Ok(registered) = unnamed.register_new(&hashes[at..at + count], naming) else {
            // There are as many blocks as names.
            self.push(Run::Own(std::mem::take(unnamed)));
            return count;
        };
        let named = registered.named.len();
        self.push(Run::Shared(registered.named));
        let Some(existing) = registered.existing else { return named };
        let own = unnamed.take_first().unwrap_or_default();
        self.push(if shares(&existing) { Run::Shared(existing) } else { Run::Own(own) });
        named + 1
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        while let Some(run) = self.runs.pop() {
            drop(run);
        }
    }
}

impl Sequence {
    /// Tokens that the sequence has room for, in its blocks.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The first tokens that were found in the cache. Do not compute them, and never write them,
    /// since other sequences may be reading them.
    #[must_use]
    pub fn cached_tokens(&self) -> u64 {
        self.cached_tokens
    }

    /// Blocks that came back from host memory for this sequence.
    #[must_use]
    pub fn onboarded_blocks(&self) -> usize {
        self.onboarded_blocks
    }

    /// Number of blocks.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// The device block that holds logical block `index`.
    #[must_use]
    pub fn block(&self, index: usize) -> Option<u32> {
        self.blocks.id(index).map(|id| id.index() as u32)
    }

    /// Its row of the block table.
    #[must_use]
    pub fn row(&self) -> Row {
        self.row.row()
    }

    /// The tenant whose block counts include this sequence.
    #[must_use]
    pub fn tenant(&self) -> TenantId {
        self.tenant
    }

    /// The retention of block `index` once it is cached, and the number of blocks from there on
    /// that are known to have the same.
    pub(crate) fn retention_of(&self, index: usize, block_tokens: u64) -> (Retention, usize) {
        let Some(policy) = &self.retention else { return (Retention::default(), usize::MAX) };
        let first = index as u64 * block_tokens;
        let retention = match first < self.prompt_tokens {
            true => policy.at(first).unwrap_or_default(),
            false => policy.decode(),
        };
        (retention, 1)
    }
}
