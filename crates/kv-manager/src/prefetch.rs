//! Content that comes nearer before a request asks for it.

use kv_pool::tenants::TenantId;
use kv_pool::{BlockHash, Pinned, Tier, guard};

use crate::Manager;
use crate::manager::Writer;

impl Manager {
    /// Brings content nearer before a request asks for it: what a sequence needs that goes on behind the longest prefix which
    /// every group can serve. Content in host memory comes back to the device, as far as there are blocks without content
    /// there. What follows it in a tier below is loaded into host memory, as far as tickets are left.
    /// How many blocks are on their way, of all groups.
    ///
    /// `names` are those of the smallest blocks of any group, from the start of a prefix on: readers of events are told that each
    /// comes behind the one before it.
    pub fn prefetch(&mut self, names: &[BlockHash]) -> usize {
        let loading = self.prefetch_below(names);
        let end = self.reach(names, u64::MAX);
        let groups = 0..guard!("manager.hints-are-for-all-groups", self.groups.len(), else 1);
        loading + groups.map(|group| self.prefetch_host(group, names, end)).sum::<usize>()
    }

    /// The same of what a group has in host memory of a prefix of `end` tokens. Nothing else is pinned: what is given back
    /// could not be claimed in this step.
    fn prefetch_host(&mut self, index: usize, names: &[BlockHash], end: u64) -> usize {
        let group = &self.groups[index];
        let is_far = |name: &BlockHash| {
            group.pool.locate(*name).is_some_and(|(_, at)| at.tier != Tier::Primary)
        };
        let needed = group.needed_names(names, group.whole_blocks(end), 0).map(|(_, name)| name);
        let far: Vec<_> = needed.filter(is_far).take(group.pool.empty()).collect();
        if far.is_empty()
            || group.check_claimable(Tier::Primary, TenantId::NOBODY, far.len()).is_err()
        {
            return 0;
        }
        let mut prefix = Pinned::default();
        for name in far {
            let found = group.pool.find_and_pin(name, Tier::Secondary);
            // Lists of one pool are joined.
            drop(prefix.append(found.unwrap_or_default()));
        }
        let count = prefix.len();
        let Ok(mut claimed) = self.claim(index, TenantId::NOBODY, count) else { return 0 };
        let writers = &mut self.groups[index].writers;
        if !writers.is_empty() {
            // The content's tenant is not known here, so the next one finds the block scrubbed.
            claimed.ids().for_each(|id| writers[id.index()] = Writer::Unknown);
        }
        let brought = self.brought(index, prefix, &mut claimed);
        if brought.is_ok() { count } else { 0 }
    }
}
