//! The host tier of a manager, shared with readers in other threads.

use std::sync::Arc;

use kv_pool::Tier;
use kv_tier::{HostBlocks, HostShare, HostShareWriter, ShareOptions, SharedGroup, UNPLANNED};

use crate::{BlockCopy, GroupId, Manager};

impl Manager {
    /// Shares the host tier with readers in other threads. `memory` is that of each group, in their order, in this process;
    /// `format` is that of [`TierTransfers::new`](crate::TierTransfers::new). The host blocks of the memory are those of the
    /// options, also where some of them can be used only later. Once it is shared, further calls answer the same share.
    ///
    /// When a worker is [lost](Self::lose_worker) or [joins](Self::join_worker), the share ends: nothing is lent any more.
    ///
    /// None for memory of another number of groups, and of a manager with several workers: each has a part of a block.
    pub fn share_host(
        &mut self,
        format: u64,
        memory: Vec<Arc<dyn HostBlocks>>,
    ) -> Option<Arc<HostShare>> {
        if let Some(share) = self.groups.share() {
            return Some(Arc::clone(share.share()));
        }
        if memory.len() != self.groups.len() || self.steps.workers().count() != 1 {
            return None;
        }
        let groups = self.groups.iter().zip(&self.options.groups).zip(memory);
        let groups = groups.map(|((group, options), memory)| {
            let (pool, blocks) = (group.pool.clone(), options.pool.secondary_blocks);
            SharedGroup { pool, blocks, memory }
        });
        let (completed, staged) = (self.steps.completed(), self.steps.latest_staged());
        let options = ShareOptions { groups: groups.collect(), format, completed, staged };
        let share = HostShareWriter::new(options);
        note_copies(&share, &self.plan.next().copies, UNPLANNED);
        self.groups.set_share(&share);
        Some(Arc::clone(share.share()))
    }

    /// Has readers of the [shared](Self::share_host) host tier read a group's blocks in this memory from now on: it was grown or
    /// shrunk. False, and nothing is changed, if nothing is shared, and for another group or another length of blocks.
    pub fn set_shared_memory(&self, group: GroupId, memory: Arc<dyn HostBlocks>) -> bool {
        self.groups.share().is_some_and(|share| share.set_memory(group, memory))
    }
}

/// Says by which step's plan host blocks are copied to.
pub(crate) fn note_copies(share: &HostShareWriter, copies: &[BlockCopy], step: u64) {
    for copy in copies.iter().filter(|copy| copy.to.tier == Tier::Secondary) {
        share.plan(copy.group, copy.to.id, step);
    }
}
