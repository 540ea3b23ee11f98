//! Content that comes nearer before a request asks for it.

use kv_pool::tenants::TenantId;
use kv_pool::{BlockHash, Pinned, Tier, guard};

use crate::Manager;
use crate::growing::Memory;
use crate::manager::Writer;
use crate::price::Counts;

impl Manager {
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
        let end = self.reach(names, u64::MAX);
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
        let is_far = |name: &BlockHash| {
            group.pool.locate(*name).is_some_and(|(_, at)| at.tier != Tier::Primary)
        };
        let needed = group.needed_names(names, group.whole_blocks(end), 0).map(|(_, name)| name);
        let mut far: Vec<_> = needed.filter(is_far).collect();
        let groups = 0..self.groups.len();
        let only = |count| -> Counts {
            groups.clone().map(|group| if group == index { count } else { 0 }).collect()
        };
        let (of, nothing) = ((TenantId::NOBODY, &[][..]), self.nothing_found());
        let due = self.nothing_due(false);
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
        let writers = &mut self.groups[index].writers;
        if !writers.is_empty() {
            // The content's tenant is not known here, so the next one finds the block scrubbed.
            claimed[index].ids().for_each(|id| writers[id.index()] = Writer::Unknown);
        }
        let brought = self.brought(index, prefix, &mut claimed[index]);
        if brought.is_ok() { count } else { 0 }
    }
}
