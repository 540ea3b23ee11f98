//! Stores: a slot is written, then its entry in the table, and only then the block is found.

use kv_manager::tiers::BlockSource;
use xxhash_rust::xxh3::xxh3_64;

use super::{Job, SlotFile, Store};
use crate::io::{Act, Buffer, PAGE_BYTES};
use crate::layout::ENTRY_BYTES;
use crate::seal::{self, TAG_BYTES};
use crate::slots::Kept;
use crate::stats::{Off, Unstored};

impl SlotFile {
    /// Begins or ends a store; returns one that has to wait for a slot.
    pub(super) fn begin_store(&mut self, source: BlockSource) -> Option<BlockSource> {
        let (block, now) = ((source.group(), source.name()), self.rules.clock.now());
        let key = self.rules.keys.as_ref().and_then(|keys| keys.key_of(block.0, block.1));
        let length = source.len() + if key.is_some() { TAG_BYTES } else { 0 };
        let bytes = (ENTRY_BYTES + length).next_multiple_of(PAGE_BYTES);
        if bytes as u64 > self.heading.geometry.slot_bytes {
            self.fail_store(source, Unstored::TooLong);
            return None;
        }
        if !self.daily.allows(now, bytes as u64) {
            self.fail_store(source, Unstored::Daily);
            return None;
        }
        let Some(mut buffer) = self.write_buffers.pop() else { return Some(source) };
        let (group, name, generation) = (block.0, block.1, self.next_generation);
        let kept = Kept { name, group, generation, length: length as u64, sum: 0, key };
        let Some(kept) = self.fill(&source, kept, &mut buffer.bytes_mut()[..bytes]) else {
            self.write_buffers.push(buffer);
            self.fail_store(source, Unstored::Refused);
            return None;
        };
        let Some((slot, evicted)) = self.slots.claim() else {
            self.write_buffers.push(buffer);
            if !self.jobs.is_empty() || !self.parked.is_empty() {
                // One of those that are open gives its slot back.
                return Some(source);
            }
            self.fail_store(source, Unstored::NoSlot);
            return None;
        };
        if let Some(evicted) = evicted {
            self.stats.evicted += 1;
            self.dropped.push(evicted);
        }
        // What is there under the name is replaced.
        self.replace(block);
        let entry = self.entry(slot.slot, &kept).to_bytes();
        buffer.bytes_mut()[..ENTRY_BYTES].copy_from_slice(&entry);
        self.next_generation += 1;
        self.daily.take(bytes as u64);
        self.write_rate.take(bytes as u64);
        let store = Store { source, slot, kept, epoch: self.heading.epoch, void: false };
        match self.punching.contains(&store.slot.slot) {
            true => drop(self.parked.insert(store.slot.slot, (store, buffer, bytes))),
            false => self.write_slot(store, buffer, bytes),
        }
        None
    }

    /// Copies the record behind the place of its entry, and encrypts it if it has a key. None if it cannot be had.
    fn fill(&self, source: &BlockSource, kept: Kept, memory: &mut [u8]) -> Option<Kept> {
        let text = ENTRY_BYTES..ENTRY_BYTES + source.len();
        source.read_at(0, &mut memory[text.clone()]).ok()?;
        // The buffer had another block before.
        memory[text.end..].fill(0);
        let record = &mut memory[ENTRY_BYTES..ENTRY_BYTES + kept.length as usize];
        if let Some(number) = kept.key {
            let keys = self.rules.keys.as_ref()?;
            if !seal::seal(keys, number, self.binding(&kept), record) {
                return None;
            }
        }
        Some(Kept { sum: xxh3_64(record), ..kept })
    }

    pub(super) fn write_slot(&mut self, store: Store, buffer: Buffer, bytes: usize) {
        let offset = self.heading.geometry.slot(store.slot.slot);
        self.submit(Job::Store(Box::new(store)), Act::Write, offset, bytes, Some(buffer));
    }

    fn is_void(&self, store: &Store) -> bool {
        store.void || store.epoch != self.heading.epoch
    }

    /// Takes in that a slot was written, or not.
    pub(super) fn end_write(&mut self, store: Store, whole: bool) {
        if !whole {
            return self.end_unwritten(store, Unstored::Failed);
        }
        if self.off.is_some() {
            return self.end_unwritten(store, Unstored::Off);
        }
        if self.is_void(&store) {
            return self.end_unwritten(store, Unstored::Forgotten);
        }
        let slot = store.slot.slot;
        self.slots.set(slot, Some(store.kept));
        self.touch(slot, Some(store));
    }

    /// Takes in that a page of the table was written, or not.
    pub(super) fn end_page(&mut self, page: u64, whole: bool) {
        let stores = self.table.end(page);
        if !whole && self.off.is_none() {
            // It is written again, until the file is off.
            self.table.touch(page, None);
        }
        for store in stores {
            if !whole {
                self.end_unwritten(store, Unstored::Failed);
            } else if self.off == Some(Off::Failing) {
                self.end_unwritten(store, Unstored::Off);
            } else if self.is_void(&store) {
                self.end_unwritten(store, Unstored::Forgotten);
            } else {
                let Store { source, slot, kept, .. } = store;
                // Nobody stores a block twice at a time. If somebody did, the later one counts.
                self.replace(kept.block());
                self.slots.set(slot.slot, Some(kept));
                self.slots.publish(slot);
                self.stats.stored += 1;
                self.stats.stored_bytes += kept.length;
                source.done();
            }
        }
    }

    /// Ends a store that came to nothing, and gives its slot back, of which nobody knows what it holds.
    pub(super) fn end_unwritten(&mut self, store: Store, reason: Unstored) {
        let Store { source, slot, .. } = store;
        self.slots.set(slot.slot, None);
        self.touch(slot.slot, None);
        drop(slot);
        self.fail_store(source, reason);
    }
}
