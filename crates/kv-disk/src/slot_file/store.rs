//! Stores: a slot is written, then its entry in the table, and only then the block is found.

use cuda_driver::guard;
use kv_tier::BlockSource;
use xxhash_rust::xxh3::xxh3_64;

use super::{Job, Memory, SlotFile, Store, Waiting};
use crate::io::{Act, Body, Io};
use crate::layout::{ENTRY_BYTES, bytes_of};
use crate::seal::{self, SEAL_BYTES};
use crate::slots::Kept;
use crate::stats::{Off, Unstored};

impl SlotFile {
    /// Begins or ends a store; returns one that has to wait for a slot.
    pub(super) fn begin_store(&mut self, (source, key): Waiting) -> Option<Waiting> {
        let (block, now) = ((source.group(), source.name()), self.rules.clock.now());
        if self.key_of(block) != key {
            self.fail_store(source, Unstored::Forgotten);
            return None;
        }
        // What is encrypted is one piece, whose parts say nothing.
        let (length, head) = match key {
            Some(_) => (source.len() + SEAL_BYTES, Some(0)),
            None => (source.len(), u32::try_from(source.header_bytes()).ok()),
        };
        let room = self.heading.geometry.slot_bytes;
        let fits = head.and_then(|head| Some((head, bytes_of(length as u64, head)?)));
        let Some((head, bytes)) = fits.filter(|&(_, bytes)| bytes <= room) else {
            self.fail_store(source, Unstored::TooLong);
            return None;
        };
        if !self.daily.allows(now, bytes) {
            self.fail_store(source, Unstored::Daily);
            return None;
        }
        let Some(buffer) = self.write_buffers.pop() else { return Some((source, key)) };
        let mut memory = Memory { buffer, body: None, bytes: bytes as usize };
        let (group, name, generation) = (block.0, block.1, self.next_generation);
        let kept = Kept { name, group, generation, length: length as u64, head, sum: 0, key };
        let Some(kept) = self.fill(&source, kept, &mut memory) else {
            self.write_buffers.push(memory.buffer);
            self.fail_store(source, Unstored::Refused);
            return None;
        };
        let Some((slot, evicted)) = self.slots.claim() else {
            self.write_buffers.push(memory.buffer);
            if !self.jobs.is_empty() || !self.parked.is_empty() {
                // One of those that are open gives its slot back.
                return Some((source, key));
            }
            self.fail_store(source, Unstored::NoSlot);
            return None;
        };
        if let Some(evicted) = evicted {
            self.stats.evicted += 1;
            guard!("disk.tells-what-made-room-first", self.dropped.lock().push(evicted));
        }
        guard!("disk.finds-the-old-record-meanwhile", {}, else { self.replace(block); });
        let entry = self.slot_entry(slot.slot, &kept).to_bytes();
        memory.buffer.bytes_mut()[..ENTRY_BYTES].copy_from_slice(&entry);
        self.next_generation += 1;
        self.daily.take(bytes);
        self.write_rate.take(bytes);
        let (epoch, uncopied) = (self.heading.epoch, memory.body.is_some());
        let store = Store { source, slot, kept, epoch, uncopied, void: false };
        if self.punching.contains(&store.slot.slot) {
            self.parked.insert(store.slot.slot, (store, memory));
        } else {
            self.write_slot(store, memory);
        }
        None
    }

    /// Puts the record behind the place of its entry: its header, and its block, which stays where it is if the disk can read
    /// it there. A record with a key is encrypted. None if it cannot be had.
    fn fill(&self, source: &BlockSource, kept: Kept, memory: &mut Memory) -> Option<Kept> {
        let Memory { buffer, body, bytes } = memory;
        let (head, at) = (kept.head as usize, kept.block_at());
        let header = ENTRY_BYTES..ENTRY_BYTES + head;
        if kept.is_paged() && self.direct {
            *body = source.lend().ok().and_then(|lent| Body::new(lent, false));
        }
        let memory = match body {
            Some(_) => &mut buffer.bytes_mut()[..at],
            None => &mut buffer.bytes_mut()[..*bytes],
        };
        let end = at + source.len() - head;
        source.read_at(0, &mut memory[header.clone()]).ok()?;
        // The buffer had another block before.
        guard!("disk.clears-before-a-block", memory[header.end..at].fill(0));
        if body.is_none() {
            source.read_at(head, &mut memory[at..end]).ok()?;
            memory[end..].fill(0);
        }
        let Some(number) = guard!("disk.encrypts", kept.key, else None) else {
            return Some(Kept { sum: xxh3_64(&memory[header]), ..kept });
        };
        let record = &mut memory[ENTRY_BYTES..ENTRY_BYTES + kept.length as usize];
        let keys = self.rules.keys.as_ref()?;
        let sealed = seal::seal(keys, number, self.binding(&kept), record);
        sealed.then(|| Kept { sum: xxh3_64(record), ..kept })
    }

    pub(super) fn write_slot(&mut self, store: Store, memory: Memory) {
        let Memory { buffer, body, bytes } = memory;
        let offset = self.heading.geometry.slot(store.slot.slot);
        let (token, act, buffer) = (0, Act::Write, Some(buffer));
        let io = Io { token, act, offset, bytes, buffer, body };
        self.submit_with(Job::Store(Box::new(store)), io);
    }

    /// Has a store begin again. Its slot holds nothing that anybody knows of.
    pub(super) fn again(&mut self, store: Store) {
        if self.is_void(&store) {
            return self.end_unwritten(store, Unstored::Forgotten);
        }
        let Store { source, slot, kept, .. } = store;
        self.slots.set(slot.slot, None);
        self.touch(slot.slot, None);
        drop(slot);
        self.stores.push_front((source, kept.key));
    }

    fn is_void(&self, store: &Store) -> bool {
        let is_void = store.void || store.epoch != self.heading.epoch;
        guard!("disk.voids-forgotten-stores", is_void, else false)
    }

    /// Takes in that a slot was written, or not, and whether its memory was taken back meanwhile.
    pub(super) fn end_write(&mut self, store: Store, whole: bool, fenced: bool) {
        if guard!("disk.fails-stores-cut-short", !whole, else false) {
            return self.end_unwritten(store, Unstored::Failed);
        }
        if self.off.is_some() {
            return self.end_unwritten(store, Unstored::Off);
        }
        if self.is_void(&store) {
            return self.end_unwritten(store, Unstored::Forgotten);
        }
        if guard!("disk.drops-fenced-stores", fenced, else false) {
            // It may have been another block's by the time that the disk read it.
            return self.end_unwritten(store, Unstored::Refused);
        }
        let slot = store.slot.slot;
        self.slots.set(slot, Some(store.kept));
        guard!(
            "disk.ends-stores-after-the-table",
            self.touch(slot, Some(store)),
            else {
                self.touch(slot, None);
                self.publish(store);
            }
        );
    }

    /// Has a block be found, and ends its store.
    fn publish(&mut self, store: Store) {
        let Store { source, slot, kept, uncopied, .. } = store;
        // What was there under the name has been found until now.
        self.replace(kept.block());
        self.slots.publish(slot);
        self.stats.stored += 1;
        self.stats.stored_bytes += kept.length;
        self.stats.uncopied += u64::from(uncopied);
        source.done();
    }

    /// Takes in that a page of the table was written, or not.
    pub(super) fn end_page(&mut self, page: u64, whole: bool) {
        let stores = self.table.end(page);
        if !whole {
            // It is written again, until it is stuck.
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
                self.publish(store);
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
