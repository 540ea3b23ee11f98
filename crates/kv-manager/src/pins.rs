//! Cached prefixes that stay on the device, whoever uses them, and content that comes nearer before a request asks for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_pool::tenants::TenantId;
use kv_pool::{BlockHash, BlockId, Pinned, Tier, guard};

use crate::group::{Group, Writer};
use crate::growing::Memory;
use crate::hit::{Found, Founds};
use crate::price::Counts;
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
        let near = self.groups.reach_near(names, u64::MAX);
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
        let held = self.groups.pinned_hit(names, near).found;
        let more = blocks_of(&held);
        self.pinned.fetch_add(more, Ordering::Relaxed);
        Ok(PinnedPrefix { held, all: Arc::clone(&self.pinned) })
    }

    /// Blocks that pins hold, each counted as often as it is pinned.
    #[must_use]
    pub fn pinned_blocks(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Brings content nearer before a request asks for it: what a sequence needs that goes on behind the longest prefix which
    /// every group can serve. Content in host memory comes back to the device, as far as there are blocks without content
    /// there. What follows it in a tier below is loaded into host memory, as far as tickets are left.
    /// How many blocks are on their way, of all groups.
    ///
    /// `names` are those of the smallest blocks of any group, from the start of a prefix on: readers of events are told that each
    /// comes behind the one before it.
    pub fn prefetch(&mut self, names: &[BlockHash]) -> usize {
        self.prefetch_in(&mut Memory::default(), names)
    }

    pub(crate) fn prefetch_in(&mut self, memory: &mut Memory<'_>, names: &[BlockHash]) -> usize {
        let loading = self.prefetch_below(names);
        let end = self.groups.reach(names, u64::MAX);
        let groups = 0..guard!("manager.hints-are-for-all-groups", self.groups.len(), else 1);
        loading + groups.map(|group| self.prefetch_host(memory, group, names, end)).sum::<usize>()
    }

    /// The same of what a group has in host memory of a prefix of `end` tokens. Nothing else is pinned: what is given back
    /// could not be claimed in this step.
    fn prefetch_host(
        &mut self,
        memory: &mut Memory<'_>,
        index: usize,
        names: &[BlockHash],
        end: u64,
    ) -> usize {
        let group = &self.groups[index];
        let is_far = |name: &BlockHash| group.is_cached(*name) && !group.is_near(*name);
        let needed = group.needed_names(names, group.whole_blocks(end), 0).map(|(_, name)| name);
        let mut far: Vec<_> = needed.filter(is_far).collect();
        let groups = 0..self.groups.len();
        let only = |count| -> Counts {
            groups.clone().map(|group| if group == index { count } else { 0 }).collect()
        };
        let (of, nothing) = ((TenantId::NOBODY, &[][..]), self.groups.nothing_found());
        let due = self.groups.nothing_due(false);
        if !memory.is_there() {
            drop(self.price_in(memory, of, &nothing, only(far.len()), &due));
        }
        far.truncate(self.groups[index].pool.empty());
        let priced = self.price(of, &nothing, only(far.len()), &due);
        if far.is_empty() || memory.has_failed || priced.is_err() {
            return 0;
        }
        let mut prefix = Pinned::default();
        for name in far {
            let found = self.groups[index].pool.find_and_pin(name, Tier::Secondary);
            // Lists of one pool are joined.
            drop(prefix.append(found.unwrap_or_default()));
        }
        let count = prefix.len();
        let Ok(mut claimed) = self.claim(memory, TenantId::NOBODY, only(count)) else { return 0 };
        // The content's tenant is not known here, so the next one finds the block scrubbed.
        let blocks = claimed[index].ids().map(BlockId::index);
        self.groups[index].note_writer(blocks, Writer::Unknown);
        let brought = self.brought(index, prefix, &mut claimed[index]);
        if brought.is_ok() { count } else { 0 }
    }
}
