//! The blocks of a store or load: handles that copy bytes, check them, and end once.

use std::fmt;
use std::sync::{Arc, OnceLock};

use kv_pool::{BlockHash, BlockId};
use parking_lot::{Mutex, RwLock};

use super::HostBlocks;
use super::frame::{Label, TRAILER_BYTES};
use crate::GroupId;

/// Why a block was not stored or loaded.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, thiserror::Error)]
#[non_exhaustive]
pub enum BlockFault {
    /// The tier does not have it.
    #[error("the tier does not have the block")]
    Missing,
    /// The tier could not read or write it.
    #[error("the tier failed")]
    Failed,
    /// Fewer bytes came than it has.
    #[error("the block came short")]
    Short,
    /// Its bytes are not those that were stored.
    #[error("the block's checksum is wrong")]
    Checksum,
    /// It is the record of another name, group, or format of cache.
    #[error("the record is of another block or format")]
    Foreign,
    /// The worker has taken back its memory.
    #[error("the transfer was fenced")]
    Fenced,
}

impl BlockFault {
    /// All faults.
    pub const ALL: [Self; 6] =
        [Self::Missing, Self::Failed, Self::Short, Self::Checksum, Self::Foreign, Self::Fenced];

    /// The fault's place among [all](Self::ALL).
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// The blocks of one ticket at a worker.
#[derive(Debug)]
pub(crate) struct Batch {
    host: Arc<dyn HostBlocks>,
    /// Set when the worker takes its memory back. Held while bytes are copied, so that no copy goes on
    /// after that.
    fenced: RwLock<bool>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    left: usize,
    wrong: Vec<(u32, BlockFault)>,
}

impl Batch {
    pub(crate) fn new(host: Arc<dyn HostBlocks>, blocks: usize) -> Arc<Self> {
        let state = Mutex::new(State { left: blocks, wrong: Vec::new() });
        Arc::new(Self { host, fenced: RwLock::new(false), state })
    }

    /// The blocks that are wrong, once all have ended.
    pub(crate) fn ended(&self) -> Option<Vec<(u32, BlockFault)>> {
        let mut state = self.state.lock();
        (state.left == 0).then(|| std::mem::take(&mut state.wrong))
    }

    /// Takes the memory back: no byte of it is read or written after this call.
    pub(crate) fn fence(&self) {
        *self.fenced.write() = true;
    }
}

/// One block of a batch.
#[derive(Debug)]
struct Slot {
    batch: Arc<Batch>,
    /// Its position in the batch.
    index: u32,
    block: BlockId,
    label: Label,
    ended: bool,
}

impl Slot {
    /// Calls `copy` unless the memory was taken back.
    fn with_host<T>(&self, copy: impl FnOnce(&dyn HostBlocks) -> T) -> Result<T, BlockFault> {
        let fenced = self.batch.fenced.read();
        match *fenced {
            true => Err(BlockFault::Fenced),
            false => Ok(copy(&*self.batch.host)),
        }
    }

    /// All bytes of the block.
    fn bytes(&self) -> Result<Vec<u8>, BlockFault> {
        let mut bytes = vec![0; self.batch.host.block_bytes()];
        match self.with_host(|host| host.read(self.block, 0, &mut bytes))? {
            true => Ok(bytes),
            false => Err(BlockFault::Failed),
        }
    }

    fn end(&mut self, outcome: Result<(), BlockFault>) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let mut state = self.batch.state.lock();
        state.left -= 1;
        if let Err(fault) = outcome {
            state.wrong.push((self.index, fault));
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.end(Err(BlockFault::Failed));
    }
}

/// A block to be stored. Its record has [`len`](Self::len) bytes.
///
/// Dropping it says that it was not stored.
#[must_use = "dropping it says that the block was not stored"]
pub struct BlockSource {
    slot: Slot,
    trailer: OnceLock<[u8; TRAILER_BYTES]>,
}

/// A block to be loaded: takes the record that was stored under its name.
///
/// Dropping it says that it was not loaded.
#[must_use = "dropping it says that the block was not loaded"]
pub struct BlockSink {
    slot: Slot,
    trailer: [u8; TRAILER_BYTES],
    /// The end of the bytes that were written without a gap.
    written: usize,
}

impl BlockSource {
    pub(crate) fn new(batch: &Arc<Batch>, index: u32, block: BlockId, label: Label) -> Self {
        let batch = Arc::clone(batch);
        let slot = Slot { batch, index, block, label, ended: false };
        Self { slot, trailer: OnceLock::new() }
    }

    /// The block's name, which it is found by.
    #[must_use]
    pub fn name(&self) -> BlockHash {
        self.slot.label.name
    }

    /// The block's group. Blocks of two groups may have the same name.
    #[must_use]
    pub fn group(&self) -> GroupId {
        self.slot.label.group
    }

    /// Bytes of the record.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a record has a trailer at least")]
    pub fn len(&self) -> usize {
        self.slot.batch.host.block_bytes() + TRAILER_BYTES
    }

    /// Copies bytes of the record, from `offset` on, into `into`. The first call that reads the trailer reads the
    /// whole block once, for its checksum.
    ///
    /// # Errors
    /// [`BlockFault::Fenced`], and [`BlockFault::Short`] for bytes beyond the record.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), BlockFault> {
        let bytes = self.len() - TRAILER_BYTES;
        let end = offset.checked_add(into.len()).filter(|&end| end <= self.len());
        let end = end.ok_or(BlockFault::Short)?;
        let (body, tail) = into.split_at_mut(end.min(bytes).saturating_sub(offset));
        if !body.is_empty()
            && !self.slot.with_host(|host| host.read(self.slot.block, offset, body))?
        {
            return Err(BlockFault::Failed);
        }
        if !tail.is_empty() {
            let from = offset.max(bytes) - bytes;
            let trailer = self.trailer()?;
            tail.copy_from_slice(&trailer[from..from + tail.len()]);
        }
        Ok(())
    }

    /// The whole record.
    ///
    /// # Errors
    /// [`BlockFault::Fenced`].
    pub fn record(&self) -> Result<Vec<u8>, BlockFault> {
        let mut record = self.slot.bytes()?;
        let trailer = *self.trailer.get_or_init(|| self.slot.label.trailer(&record));
        record.extend_from_slice(&trailer);
        Ok(record)
    }

    fn trailer(&self) -> Result<[u8; TRAILER_BYTES], BlockFault> {
        if let Some(trailer) = self.trailer.get() {
            return Ok(*trailer);
        }
        let trailer = self.slot.label.trailer(&self.slot.bytes()?);
        Ok(*self.trailer.get_or_init(|| trailer))
    }

    /// Says that the whole record is kept, so that a load finds it.
    pub fn done(mut self) {
        self.slot.end(Ok(()));
    }

    /// Says that the block was not stored.
    pub fn failed(mut self, fault: BlockFault) {
        self.slot.end(Err(fault));
    }
}

impl BlockSink {
    pub(crate) fn new(batch: &Arc<Batch>, index: u32, block: BlockId, label: Label) -> Self {
        let batch = Arc::clone(batch);
        let slot = Slot { batch, index, block, label, ended: false };
        Self { slot, trailer: [0; TRAILER_BYTES], written: 0 }
    }

    /// The block's name.
    #[must_use]
    pub fn name(&self) -> BlockHash {
        self.slot.label.name
    }

    /// The block's group.
    #[must_use]
    pub fn group(&self) -> GroupId {
        self.slot.label.group
    }

    /// Bytes of the record.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a record has a trailer at least")]
    pub fn len(&self) -> usize {
        self.slot.batch.host.block_bytes() + TRAILER_BYTES
    }

    /// Takes bytes of the record, from `offset` on.
    ///
    /// # Errors
    /// [`BlockFault::Fenced`], and [`BlockFault::Foreign`] for bytes beyond the record.
    pub fn write_at(&mut self, offset: usize, from: &[u8]) -> Result<(), BlockFault> {
        let bytes = self.len() - TRAILER_BYTES;
        let end = offset.checked_add(from.len()).filter(|&end| end <= self.len());
        let end = end.ok_or(BlockFault::Foreign)?;
        let (body, tail) = from.split_at(end.min(bytes).saturating_sub(offset));
        if !body.is_empty()
            && !self.slot.with_host(|host| host.write(self.slot.block, offset, body))?
        {
            return Err(BlockFault::Failed);
        }
        if !tail.is_empty() {
            let at = offset.max(bytes) - bytes;
            self.trailer[at..at + tail.len()].copy_from_slice(tail);
        }
        if offset <= self.written {
            self.written = self.written.max(end);
        }
        Ok(())
    }

    /// Says that the record was written. Reads the block once, and compares its name, its group, the format of the
    /// cache and the checksum: only then the block counts as loaded (H21, H32).
    ///
    /// # Errors
    /// What is wrong with it. The block has ended all the same.
    pub fn done(mut self) -> Result<(), BlockFault> {
        let checked = self.check();
        self.slot.end(checked);
        checked
    }

    fn check(&self) -> Result<(), BlockFault> {
        if self.written < self.len() {
            return Err(BlockFault::Short);
        }
        self.slot.label.check(&self.slot.bytes()?, &self.trailer)
    }

    /// Says that the block was not loaded.
    pub fn failed(mut self, fault: BlockFault) {
        self.slot.end(Err(fault));
    }
}

impl fmt::Debug for BlockSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockSource").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl fmt::Debug for BlockSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("BlockSink");
        shown.field("name", &self.name()).field("written", &self.written).finish_non_exhaustive()
    }
}
