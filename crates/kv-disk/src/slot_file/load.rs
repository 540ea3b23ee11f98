//! Loads: a slot is read whole, and given to the worker only if every word of it is what was stored.

use std::io;

use cuda_driver::guard;
use kv_tier::{BlockFault, BlockSink};
use xxhash_rust::xxh3::xxh3_64;

use super::{Job, Load, SlotFile};
use crate::io::{Act, Body, Buffer, Io};
use crate::layout::{ENTRY_BYTES, Entry, EntryFault};
use crate::seal::{self, Binding, SEAL_BYTES};
use crate::slots::Kept;
use crate::stats::Miss;

impl SlotFile {
    pub(super) fn begin_load(&mut self, sink: BlockSink) {
        let Some((pin, slot, kept)) = self.slots.find((sink.group(), sink.name())) else {
            return self.miss(sink, Miss::Absent);
        };
        // Its sums are no secret: who can write the file can make a record of a block that is to be encrypted.
        if guard!("disk.loads-need-their-key", kept.key != self.key_of(kept.block()), else false) {
            drop(pin);
            self.lose(slot);
            return self.miss(sink, Miss::NoKey);
        }
        let Some(buffer) = self.read_buffers.pop() else { return self.loads.push_front(sink) };
        let bytes = kept.bytes();
        self.read_rate.take(bytes as u64);
        // Another worker's record of this block may have another length.
        let fits = sink.header_bytes() == kept.head as usize && sink.len() as u64 == kept.length;
        let lent = (self.direct && kept.is_paged() && fits).then(|| sink.lend().ok()).flatten();
        let body = lent.and_then(|lent| Body::new(lent, true));
        let offset = self.heading.geometry.slot(slot);
        let load = Box::new(Load { sink, pin, slot, kept });
        self.reads_open += 1;
        let (token, act, buffer) = (0, Act::Read, Some(buffer));
        self.submit_with(Job::Load(load), Io { token, act, offset, bytes, buffer, body });
    }

    pub(super) fn end_load(
        &mut self,
        load: Load,
        buffer: Option<Buffer>,
        body: Option<Body>,
        result: &io::Result<usize>,
    ) {
        let Load { sink, pin, slot, kept } = load;
        let Some(mut buffer) = buffer else { return self.miss(sink, Miss::Failed) };
        let is_gone = self.slots.kept(slot) != Some(&kept);
        if guard!("disk.misses-forgotten-loads", is_gone, else false) {
            drop(body);
            self.miss(sink, Miss::Forgotten);
        } else {
            let block_bytes = body.as_ref().map_or(0, Body::len);
            match self.check(slot, &kept, (&mut buffer, block_bytes), result) {
                Ok(parts) => self.give(sink, slot, parts, body),
                Err(miss) => {
                    drop(body);
                    self.lose(slot);
                    self.miss(sink, miss);
                }
            }
        }
        drop(pin);
        self.read_buffers.push(buffer);
    }

    /// The record in a slot that was read, up to what was read into a block's own memory: its header, and its block. What
    /// the header says of the block is for the worker's handle to compare.
    fn check<'a>(
        &self,
        slot: u64,
        kept: &Kept,
        (buffer, block_bytes): (&'a mut Buffer, usize),
        result: &io::Result<usize>,
    ) -> Result<[&'a [u8]; 2], Miss> {
        let Ok(read) = *result else { return Err(Miss::Failed) };
        let bytes = buffer.bytes_mut();
        let here = kept.end().saturating_sub(block_bytes);
        if read < kept.end() || bytes.len() < here {
            return Err(Miss::Short);
        }
        let found = Entry::parse(bytes).map_err(|fault| match fault {
            EntryFault::Empty => Miss::Stale,
            EntryFault::Checksum => Miss::Torn,
            EntryFault::Short => Miss::Short,
            EntryFault::Foreign | EntryFault::Version { .. } | EntryFault::Field => Miss::Foreign,
        })?;
        let expected = self.slot_entry(slot, kept);
        if guard!("disk.compares-entry", found != expected, else false) {
            let here = |entry: &Entry| (entry.file, entry.model, entry.slot);
            // A slot of this file holds what was there before, or what an older life of the process has written.
            return Err(if here(&found) == here(&expected) { Miss::Stale } else { Miss::Foreign });
        }
        let (head, length) = (kept.head as usize, kept.length as usize);
        let summed = if head > 0 { head } else { length };
        let sum = xxh3_64(&bytes[ENTRY_BYTES..ENTRY_BYTES + summed]);
        if guard!("disk.compares-header", sum != kept.sum, else false) {
            return Err(Miss::Torn);
        }
        let Some(number) = kept.key else {
            let block = bytes.get(kept.block_at()..here).unwrap_or_default();
            return Ok([&bytes[ENTRY_BYTES..ENTRY_BYTES + head], block]);
        };
        let record = &mut bytes[ENTRY_BYTES..ENTRY_BYTES + length];
        let opened = self.rules.keys.as_ref();
        let opened =
            opened.is_some_and(|keys| seal::open(keys, number, self.binding(kept), record));
        let text = length.checked_sub(SEAL_BYTES).filter(|_| opened).ok_or(Miss::NoKey)?;
        Ok([&record[..text], &[]])
    }

    pub(super) fn binding(&self, kept: &Kept) -> Binding {
        let &Kept { name, group, generation, .. } = kept;
        Binding { group, name, model: self.heading.model, file: self.heading.file, generation }
    }

    fn give(
        &mut self,
        mut sink: BlockSink,
        slot: u64,
        [header, block]: [&[u8]; 2],
        body: Option<Body>,
    ) {
        let uncopied = u64::from(body.is_some());
        let taken = match body {
            Some(body) => guard!(
                "disk.compares-what-landed",
                sink.landed(body.into_lent(), header),
                else sink.write_at(0, header)
            ),
            None => sink.write_at(0, header).and_then(|()| sink.write_at(header.len(), block)),
        };
        let length = sink.len() as u64;
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
                self.stats.loaded_bytes += length;
                self.stats.uncopied += uncopied;
            }
            Err(fault) => {
                let torn = fault == BlockFault::Checksum;
                let miss = if torn { Miss::Torn } else { Miss::Refused };
                self.stats.misses[miss as usize] += 1;
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
        self.dropped.lock().push(block);
    }
}
