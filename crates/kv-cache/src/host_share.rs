//! The host tier, shared with readers in other threads.

use std::sync::Arc;

use kv_manager::GroupId;
use kv_tier::HostShare;

use crate::KvCache;

impl KvCache {
    /// Shares the host tier with readers in other threads, such as those that serve other hosts: blocks that are cached there are
    /// lent by name, and are neither evicted nor written meanwhile. Records of the blocks are those of
    /// [tiers below](crate::LowerTiers), for the same model.
    ///
    /// What is pinned later is lent, too. Memory beyond a [budget](Self::set_budget) is given back when nobody reads it any more. The
    /// share stays usable when the cache is dropped, and keeps the host memory then.
    #[must_use]
    pub fn share_host(&mut self) -> Arc<HostShare> {
        let groups = 0..self.manager.formats().len();
        let memory = groups.map(|group| self.worker.host_memory(GroupId(group as u16), u64::MAX));
        let memory = memory.collect();
        let Some(share) = self.manager.share_host(self.worker.tiers.format(), memory) else {
            unreachable!("there is memory of each group")
        };
        self.share.get_or_insert(share).clone()
    }

    /// Has blocks of a group be read where they are by now: the first so many.
    pub(crate) fn share_memory(&self, group: GroupId, blocks: u64) {
        if let Some(share) = &self.share {
            let is_read = share.set_memory(group, self.worker.host_memory(group, blocks));
            debug_assert!(is_read, "a group's blocks keep their length");
        }
    }
}
