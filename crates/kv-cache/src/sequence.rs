//! A sequence: one request's blocks, in order, and its row of the block table.

use std::sync::Arc;

use kv_pool::{BlockPin, BlockPool, ClaimedBlock, Retention, RetentionPolicy, SlotIndex, TenantId};

use crate::rows::RowLease;

/// The blocks of one request, from its first token on.
///
/// Dropping a sequence releases its blocks, from last to first, so that the tail of a prefix is
/// evicted before its head. The device may still be working on them: they are handed out again only
/// when the step that is open now, or was last, has completed.
#[derive(Debug)]
#[must_use = "dropping a sequence releases its blocks"]
pub struct Sequence {
    pub(crate) pool: BlockPool,
    pub(crate) row: RowLease,
    pub(crate) blocks: Vec<Held>,
    pub(crate) tokens: u64,
    /// Tokens that it was admitted with.
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) onboarded_blocks: usize,
    /// Blocks from the first on that have been offered to the prefix index.
    pub(crate) sealed: usize,
    pub(crate) tenant: TenantId,
    pub(crate) retention: Option<Arc<RetentionPolicy>>,
}

/// How a sequence holds a block.
#[derive(Debug)]
pub(crate) enum Held {
    /// Content with a name, which others may hold as well and nobody writes.
    Shared(BlockPin),
    /// A block that this sequence alone reads and writes.
    Own(ClaimedBlock),
}

impl Held {
    pub(crate) fn slot(&self) -> SlotIndex {
        match self {
            Self::Shared(pin) => pin.slot(),
            Self::Own(block) => block.slot(),
        }
    }
}

impl Sequence {
    /// Tokens that the sequence has room for, in its blocks.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Of these, the first ones that were found in the cache: not to be computed, and never to be
    /// written, for other sequences may be reading them.
    #[must_use]
    pub fn cached_tokens(&self) -> u64 {
        self.cached_tokens
    }

    /// Blocks that came back from host memory for this sequence.
    #[must_use]
    pub fn onboarded_blocks(&self) -> usize {
        self.onboarded_blocks
    }

    /// How many blocks it has.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// The device block that holds logical block `index`.
    #[must_use]
    pub fn block(&self, index: usize) -> Option<u32> {
        self.blocks.get(index).map(|held| held.slot().index() as u32)
    }

    /// Its row of the block table.
    #[must_use]
    pub fn row(&self) -> usize {
        self.row.row()
    }

    /// Whose blocks it holds.
    #[must_use]
    pub fn tenant(&self) -> TenantId {
        self.tenant
    }

    /// What block `index` is worth when nobody uses it any more.
    pub(crate) fn retention_of(&self, index: usize, block_tokens: u64) -> Retention {
        let Some(policy) = &self.retention else { return Retention::default() };
        let first = index as u64 * block_tokens;
        match first < self.prompt_tokens {
            true => policy.at(first).unwrap_or_default(),
            false => policy.decode(),
        }
    }

    /// Puts `held` in the place of what `hold` took from block `index`.
    pub(crate) fn replace(&mut self, index: usize, renew: impl FnOnce(Held) -> Held) {
        if index >= self.blocks.len() {
            return;
        }
        let held = self.blocks.swap_remove(index);
        self.blocks.push(renew(held));
        let last = self.blocks.len() - 1;
        self.blocks.swap(index, last);
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        // A block of its own has no content that could be found, so no place in the order.
        let shared = |held| match held {
            Held::Shared(pin) => Some(pin),
            Held::Own(_) => None,
        };
        self.pool.release(self.blocks.drain(..).filter_map(shared).collect());
    }
}
