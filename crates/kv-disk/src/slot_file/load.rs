//! Loads: a slot is read whole, and given to the worker only if every word of it is what was stored.

use std::io;

use kv_manager::tiers::{BlockFault, BlockSink};
use xxhash_rust::xxh3::xxh3_64;

use super::{Job, Load, SlotFile};
use crate::io::{Act, Buffer, PAGE_BYTES};
use crate::layout::{ENTRY_BYTES, Entry, EntryFault};
use crate::seal::{self, Binding, TAG_BYTES};
use crate::slots::Kept;
use crate::stats::Miss;

impl SlotFile {
    pub(super) fn begin_load(&mut self, sink: BlockSink) {
        let Some((pin, slot, kept)) = self.slots.find((sink.group(), sink.name())) else {
            return self.miss(sink, Miss::Absent);
        };
        let Some(buffer) = self.read_buffers.pop() else { return self.loads.push_front(sink) };
        let bytes = (ENTRY_BYTES + kept.length as usize).next_multiple_of(PAGE_BYTES);
        self.read_rate.take(bytes as u64);
        let offset = self.heading.geometry.slot(slot);
        let load = Box::new(Load { sink, pin, slot, kept });
        self.reads_open += 1;
        self.submit(Job::Load(load), Act::Read, offset, bytes, Some(buffer));
    }

    pub(super) fn end_load(
        &mut self,
        load: Load,
        buffer: Option<Buffer>,
        result: &io::Result<usize>,
    ) {
        let Load { sink, pin, slot, kept } = load;
        let Some(mut buffer) = buffer else { return self.miss(sink, Miss::Failed) };
        if self.slots.kept(slot) != Some(&kept) {
            self.miss(sink, Miss::Forgotten);
        } else {
            match self.check(slot, &kept, &mut buffer, result) {
                Ok(record) => self.give(sink, slot, record),
                Err(miss) => {
                    self.lose(slot);
                    self.miss(sink, miss);
                }
            }
        }
        drop(pin);
        self.read_buffers.push(buffer);
    }

    /// The record in a slot that was read.
    fn check<'a>(
        &self,
        slot: u64,
        kept: &Kept,
        buffer: &'a mut Buffer,
        result: &io::Result<usize>,
    ) -> Result<&'a [u8], Miss> {
        let length = kept.length as usize;
        let Ok(read) = *result else { return Err(Miss::Failed) };
        let bytes = buffer.bytes_mut();
        if read < ENTRY_BYTES + length || bytes.len() < ENTRY_BYTES + length {
            return Err(Miss::Short);
        }
        let found = Entry::parse(bytes).map_err(|fault| match fault {
            EntryFault::Empty => Miss::Stale,
            EntryFault::Checksum => Miss::Torn,
            EntryFault::Short => Miss::Short,
            EntryFault::Foreign | EntryFault::Version { .. } | EntryFault::Field => Miss::Foreign,
        })?;
        let expected = self.entry(slot, kept);
        if found != expected {
            let here = |entry: &Entry| (entry.file, entry.model, entry.slot);
            // A slot of this file holds what was there before, or what an older life of the process has written.
            return Err(if here(&found) == here(&expected) { Miss::Stale } else { Miss::Foreign });
        }
        let record = &mut bytes[ENTRY_BYTES..ENTRY_BYTES + length];
        if xxh3_64(record) != kept.sum {
            return Err(Miss::Torn);
        }
        let Some(number) = kept.key else { return Ok(record) };
        let opened = self.rules.keys.as_ref();
        let opened =
            opened.is_some_and(|keys| seal::open(keys, number, self.binding(kept), record));
        let text = length.checked_sub(TAG_BYTES).filter(|_| opened).ok_or(Miss::NoKey)?;
        Ok(&record[..text])
    }

    pub(super) fn binding(&self, kept: &Kept) -> Binding {
        let &Kept { name, group, generation, .. } = kept;
        Binding { group, name, model: self.heading.model, file: self.heading.file, generation }
    }

    fn give(&mut self, mut sink: BlockSink, slot: u64, record: &[u8]) {
        let taken = sink.write_at(0, record);
        let taken = match taken {
            Ok(()) => sink.done(),
            Err(fault) => {
                sink.failed(fault);
                Err(fault)
            }
        };
        match taken {
            Ok(()) => {
                self.stats.loaded += 1;
                self.stats.loaded_bytes += record.len() as u64;
            }
            Err(fault) => {
                self.stats.misses[Miss::Refused as usize] += 1;
                // No worker of this format will ever take it.
                if !matches!(fault, BlockFault::Fenced | BlockFault::Late) {
                    self.lose(slot);
                }
            }
        }
    }

    /// Gives up a record that is not what it should be.
    fn lose(&mut self, slot: u64) {
        let Some(block) = self.slots.kept(slot).map(Kept::block) else { return };
        self.slots.remove(block);
        self.touch(slot, None);
        self.dropped.push(block);
    }
}
