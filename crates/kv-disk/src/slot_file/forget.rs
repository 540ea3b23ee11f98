//! What is forgotten: one block, those of a key, or all.

use cuda_driver::guard;

use super::{Job, SlotFile, Waiting};
use crate::io::Act;
use crate::layout::ENTRIES_A_PAGE;
use crate::slots::{Kept, Key};
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
        self.stuck = false;
        self.fail_stores(|(source, _)| (source.group(), source.name()) == block);
        self.void_stores(|kept| kept.block() == block);
        self.stats.forgotten += u64::from(self.replace(block));
    }

    /// Has stores that have not begun fail.
    fn fail_stores(&mut self, which: impl Fn(&Waiting) -> bool) {
        let (gone, stay): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.stores).into_iter().partition(which);
        self.stores = Vec::into(stay);
        gone.into_iter().for_each(|(source, _)| self.fail_store(source, Unstored::Forgotten));
    }

    /// Has what is being written come to nothing.
    fn void_stores(&mut self, which: impl Fn(&Kept) -> bool) {
        let written = self.jobs.values_mut().filter_map(|job| match job {
            Job::Store(store) => Some(&mut **store),
            _ => None,
        });
        let parked = self.parked.values_mut().map(|(store, _)| store);
        for store in written.chain(parked).chain(self.table.stores_mut()) {
            store.void |= which(&store.kept);
        }
    }

    /// Forgets all blocks whose records are encrypted with a key or are to be, and says so with the next
    /// [`poll`](kv_tier::LowerTier::poll). With the key destroyed, they could not be read anyway. The file has none of
    /// their names any more once it is [idle](Self::is_idle).
    pub fn forget_key(&mut self, number: u64) {
        self.stuck = false;
        self.fail_stores(|(_, key)| *key == Some(number));
        guard!("disk.voids-stores-of-a-key", self.void_stores(|kept| kept.key == Some(number)));
        for block in self.slots.of_key(number) {
            self.replace(block);
            self.stats.forgotten += 1;
            self.dropped.lock().push(block);
        }
    }

    pub(super) fn clear_all(&mut self) {
        self.stuck = false;
        for (source, _) in std::mem::take(&mut self.stores) {
            self.fail_store(source, Unstored::Forgotten);
        }
        for sink in std::mem::take(&mut self.loads) {
            self.miss(sink, Miss::Forgotten);
        }
        // Entries of an earlier epoch are not believed, so the table needs no change but for names of keys.
        guard!(
            "disk.clears-names-of-keys",
            self.slots.with_keys().for_each(|slot| self.table.touch(slot / ENTRIES_A_PAGE, None))
        );
        self.heading.epoch += 1;
        self.heading_due = guard!("disk.writes-both-headings", 2, else 1);
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
