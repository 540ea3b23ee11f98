//! What is forgotten: one block, those of a key, or all.

use super::{Job, SlotFile};
use crate::io::Act;
use crate::slots::Key;
use crate::stats::{Miss, Unstored};

impl SlotFile {
    /// Forgets a block that another record takes the place of.
    pub(super) fn replace(&mut self, block: Key) -> bool {
        let Some(slot) = self.slots.remove(block) else { return false };
        self.touch(slot, None);
        if self.punches && !self.punching.contains(&slot) {
            self.punching.insert(slot);
            let bytes = self.heading.geometry.slot_bytes as usize;
            let offset = self.heading.geometry.slot(slot);
            self.submit(Job::Punch(slot), Act::Punch, offset, bytes, None);
        }
        true
    }

    pub(super) fn forget_block(&mut self, block: Key) {
        let is_it = |group, name| (group, name) == block;
        for source in self.take_stores(|source| is_it(source.group(), source.name())) {
            self.fail_store(source, Unstored::Forgotten);
        }
        // What is being written comes to nothing.
        let written = self.jobs.values_mut().filter_map(|job| match job {
            Job::Store(store) => Some(&mut **store),
            _ => None,
        });
        let parked = self.parked.values_mut().map(|(store, _)| store);
        for store in written.chain(parked).chain(self.table.stores_mut()) {
            store.void |= store.kept.block() == block;
        }
        self.stats.forgotten += u64::from(self.replace(block));
    }

    fn take_stores(
        &mut self,
        which: impl Fn(&kv_manager::tiers::BlockSource) -> bool,
    ) -> Vec<kv_manager::tiers::BlockSource> {
        let (gone, stay) = std::mem::take(&mut self.stores).into_iter().partition(which);
        self.stores = Vec::into(stay);
        gone
    }

    /// Forgets all blocks whose records are encrypted with a key, and says so with the next
    /// [`poll`](kv_manager::tiers::LowerTier::poll). With the key destroyed, they could not be read anyway.
    pub fn forget_key(&mut self, number: u64) {
        for store in self.table.stores_mut() {
            store.void |= store.kept.key == Some(number);
        }
        for job in self.jobs.values_mut() {
            if let Job::Store(store) = job {
                store.void |= store.kept.key == Some(number);
            }
        }
        for (store, _) in self.parked.values_mut() {
            store.void |= store.kept.key == Some(number);
        }
        for block in self.slots.of_key(number) {
            self.replace(block);
            self.stats.forgotten += 1;
            self.dropped.push(block);
        }
    }

    pub(super) fn clear_all(&mut self) {
        for source in std::mem::take(&mut self.stores) {
            self.fail_store(source, Unstored::Forgotten);
        }
        for sink in std::mem::take(&mut self.loads) {
            self.miss(sink, Miss::Forgotten);
        }
        // Entries of an earlier epoch are not believed, so the table needs no change.
        self.heading.epoch += 1;
        self.heading_due = 2;
        self.stats.forgotten += self.slots.clear().len() as u64;
        if self.punches && !self.punching_all {
            self.punching_all = true;
            let geometry = self.heading.geometry;
            let offset = geometry.slot(0);
            let bytes = (geometry.bytes() - offset) as usize;
            self.submit(Job::PunchAll, Act::Punch, offset, bytes, None);
        }
    }
}
