//! Pins: cached prefixes that stay on the device, whoever uses them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_pool::BlockHash;

use crate::group::Group;
use crate::hit::{Found, Founds};
use crate::{BudgetError, Manager};

/// A cached prefix that stays on the device as long as this lives, used or not.
#[derive(Debug)]
#[must_use = "dropping it ends the pin"]
pub struct PinnedPrefix {
    /// What is held of each group.
    held: Founds,
    /// Blocks of all prefixes of the manager.
    all: Arc<AtomicU64>,
}

impl PinnedPrefix {
    /// Blocks that it holds, of all groups.
    #[must_use]
    pub fn len(&self) -> usize {
        blocks_of(&self.held) as usize
    }

    /// Whether nothing of the prefix was on the device.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for PinnedPrefix {
    fn drop(&mut self) {
        // The count bounds later pins only; the pool orders what becomes of the blocks.
        self.all.fetch_sub(blocks_of(&self.held), Ordering::Relaxed);
    }
}

fn blocks_of(held: &[Found]) -> u64 {
    held.iter().map(|found| found.locations().count() as u64).sum()
}

impl Manager {
    /// Keeps a prefix on the device: as much of it as is there, in every group, for a sequence to go on behind it,
    /// and up to a block that its tenant may not hold ([`TenantQuota`](kv_pool::tenants::TenantQuota)). So a pin takes nothing of the
    /// blocks that are reserved for other tenants. To bring content back from host memory first,
    /// [`prefetch`](Self::prefetch) it.
    ///
    /// All pins together hold no more than [`pinned_blocks_max`](crate::ManagerOptions::pinned_blocks_max)
    /// blocks. A block that two pins hold counts twice. What becomes void, because a step has failed or by a
    /// [`reset`](Self::reset), is held until the pin ends, and found by nobody.
    ///
    /// # Errors
    /// [`BudgetError::Pins`]; nothing was pinned.
    pub fn pin(&mut self, names: &[BlockHash]) -> Result<PinnedPrefix, BudgetError> {
        let near = self.reach_near(names, u64::MAX);
        // Nothing is pinned before it is known that all of it may be: what is given back could not be claimed.
        let blocks = |group: &Group| {
            let blocks = group.whole_blocks(near);
            group.needed_names(names, blocks, 0).count() as u64
        };
        let (more, pinned) = (self.groups.iter().map(blocks).sum(), self.pinned_blocks());
        let max = self.options.pinned_blocks_max;
        if more > max.saturating_sub(pinned) {
            return Err(BudgetError::Pins { more, pinned, max });
        }
        let held = self.pinned_hit(names, near).found;
        let more = blocks_of(&held);
        self.pinned.fetch_add(more, Ordering::Relaxed);
        Ok(PinnedPrefix { held, all: Arc::clone(&self.pinned) })
    }

    /// Blocks that pins hold, each counted as often as it is pinned.
    #[must_use]
    pub fn pinned_blocks(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }
}
