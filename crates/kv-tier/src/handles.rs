//! The blocks of a store or load: handles that copy bytes, check them, and end once.

use std::fmt;
use std::sync::{Arc, OnceLock};

use kv_pool::{BlockHash, BlockId, GroupId, guard};
use parking_lot::{Mutex, RwLock};

use crate::frame::{PIECE, Sections, sum_of};
use crate::{Direction, HostBlocks, LentBlock, LowerTier, RecordKey, Transfer};

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
    /// It had not come when a step needed it that could wait no longer. The worker has taken back its memory.
    #[error("the block is late")]
    Late,
}

impl BlockFault {
    /// All faults.
    pub const ALL: [Self; 7] = [
        Self::Missing,
        Self::Failed,
        Self::Short,
        Self::Checksum,
        Self::Foreign,
        Self::Fenced,
        Self::Late,
    ];

    /// Its name in reports and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Failed => "failed",
            Self::Short => "short",
            Self::Checksum => "checksum",
            Self::Foreign => "foreign",
            Self::Fenced => "fenced",
            Self::Late => "late",
        }
    }

    /// The fault's place among [all](Self::ALL).
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// The blocks of one ticket at a worker, which a tier stores or loads.
#[derive(Debug)]
pub struct Batch {
    host: Arc<dyn HostBlocks>,
    direction: Direction,
    /// Where each block is in host memory.
    places: Vec<BlockId>,
    sections: Sections,
    /// Set when the worker takes its memory back. Held while bytes are copied, so that no copy goes on
    /// after that.
    fenced: RwLock<bool>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    left: usize,
    blocks: Vec<Arrived>,
    wrong: Vec<(u32, BlockFault)>,
    /// Of these, how many of their first sections are right.
    right: Vec<(u32, usize)>,
    /// Blocks whose memory a tier has borrowed.
    lent: Vec<u32>,
}

/// How much of a block is in host memory and right.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Arrived {
    /// So many of its first [sections](HostBlocks::section_bytes). They stay as they are.
    Sections(usize),
    /// All of it. Its transfer has ended.
    Right,
    /// Its transfer has ended, and it is not right.
    Wrong,
}

impl Batch {
    /// Has a tier begin a store or a load of blocks of `host`, the host memory of the transfer's group. The blocks hold what is to
    /// be stored, or may be written, from now on until the batch has [ended](Self::ended). `format` is that of the worker's records
    /// ([`record_format`](crate::record_format)). A record of another format is not read.
    pub fn begin(
        transfer: &Transfer,
        host: &Arc<dyn HostBlocks>,
        format: u64,
        tier: &mut dyn LowerTier,
    ) -> Arc<Self> {
        let &Transfer { group, direction, ref blocks, .. } = transfer;
        let state = State {
            left: blocks.len(),
            blocks: vec![Arrived::Sections(0); blocks.len()],
            wrong: Vec::new(),
            right: Vec::new(),
            lent: Vec::new(),
        };
        let batch = Arc::new(Self {
            host: Arc::clone(host),
            direction,
            places: blocks.iter().map(|&(_, block)| block).collect(),
            sections: Sections::new(host.block_bytes(), host.section_bytes()),
            fenced: RwLock::new(false),
            state: Mutex::new(state),
        });
        let slots = blocks.iter().zip(0..).map(|(&(name, block), index)| {
            let key = RecordKey { format, group, name };
            Slot { batch: Arc::clone(&batch), index, block, key }
        });
        match direction {
            Direction::Store => tier.store(slots.map(BlockSource::new).collect()),
            Direction::Load => tier.load(slots.map(BlockSink::new).collect()),
        }
        batch
    }

    /// Which way the blocks go.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Where each block is in host memory.
    #[must_use]
    pub fn places(&self) -> &[BlockId] {
        &self.places
    }

    /// The blocks that are wrong, by their position, once all have ended and the memory of all is back; to be asked until then. What
    /// is not right of a block that was to be loaded is overwritten with zeros before: whoever gets the memory next finds nothing of its
    /// former owners there.
    pub fn ended(&self) -> Option<Vec<(u32, BlockFault)>> {
        let mut state = self.state.lock();
        let is_back = guard!("tier.tickets-end-with-their-loans", state.lent.is_empty(), else true);
        if state.left > 0 || !is_back {
            return None;
        }
        let (wrong, right) = (std::mem::take(&mut state.wrong), std::mem::take(&mut state.right));
        drop(state);
        if self.direction == Direction::Load {
            guard!("tier.wrong-bytes-are-cleared", self.clear_wrong(&right));
        }
        Some(wrong)
    }

    /// Overwrites with zeros what is behind the first sections of blocks that are right: the memory has bytes of former owners there, or
    /// of a record that is another one's.
    fn clear_wrong(&self, right: &[(u32, usize)]) {
        let zeros = [0; PIECE];
        for &(index, right) in right {
            let Some(&block) = self.places.get(index as usize) else { continue };
            let rest = self.sections.end_of(right)..self.sections.block_bytes;
            for start in rest.clone().step_by(PIECE) {
                // Memory that is not there any more has no bytes.
                let _ = self.host.write(block, start, &zeros[..PIECE.min(rest.end - start)]);
            }
        }
    }

    /// Whether a tier has [borrowed](LentBlock) memory of it.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        !self.state.lock().lent.is_empty()
    }

    pub(crate) fn is_fenced(&self) -> bool {
        *self.fenced.read()
    }

    /// Takes in that a block's memory is back.
    pub(crate) fn give_back(&self, index: u32) {
        let mut state = self.state.lock();
        if let Some(at) = state.lent.iter().position(|of| *of == index) {
            state.lent.swap_remove(at);
        }
    }

    /// How much of a host block is there; `None` if it is none of the batch.
    #[must_use]
    pub fn arrived(&self, block: BlockId) -> Option<Arrived> {
        let index = self.places.iter().position(|of| *of == block)?;
        self.state.lock().blocks.get(index).copied()
    }

    /// Takes the memory back: no byte of it is read or written after this call, but by what it was lent to.
    pub fn fence(&self) {
        *self.fenced.write() = true;
    }

    /// Takes the memory back, and ends the blocks that have not ended as late.
    pub fn give_up(&self) {
        guard!("tier.given-up-is-fenced", self.fence());
        let blocks = self.state.lock().blocks.len();
        (0..blocks as u32).for_each(|index| self.end(index, Err(BlockFault::Late)));
    }

    /// Ends a block, unless it has ended.
    fn end(&self, index: u32, outcome: Result<(), BlockFault>) {
        let mut state = self.state.lock();
        let Some(&Arrived::Sections(right)) = state.blocks.get(index as usize) else { return };
        let ended = if outcome.is_ok() { Arrived::Right } else { Arrived::Wrong };
        state.blocks[index as usize] = ended;
        state.left -= 1;
        if let Err(fault) = outcome {
            state.wrong.push((index, fault));
            state.right.push((index, right));
        }
    }
}

/// One block of a batch.
#[derive(Debug)]
struct Slot {
    batch: Arc<Batch>,
    /// Its position in the batch.
    index: u32,
    block: BlockId,
    key: RecordKey,
}

impl Slot {
    fn sections(&self) -> Sections {
        self.batch.sections
    }

    /// Bytes of the record.
    fn record_bytes(&self) -> usize {
        self.sections().header_bytes() + self.sections().block_bytes
    }

    /// Calls `copy` unless the memory was taken back.
    fn with_host(&self, copy: impl FnOnce(&dyn HostBlocks) -> bool) -> Result<(), BlockFault> {
        let fenced = self.batch.fenced.read();
        if guard!("tier.the-fenced-touch-nothing", *fenced, else false) {
            return Err(BlockFault::Fenced);
        }
        copy(&*self.batch.host).then_some(()).ok_or(BlockFault::Failed)
    }

    /// Lends the memory of the block, unless it was taken back or has ended.
    fn lend(&self) -> Result<LentBlock, BlockFault> {
        let fenced = self.batch.fenced.read();
        if *fenced {
            return Err(BlockFault::Fenced);
        }
        let pieces = self.batch.host.pieces(self.block);
        let whole = pieces.iter().map(|piece| piece.bytes).sum::<usize>();
        if whole != self.sections().block_bytes {
            return Err(BlockFault::Missing);
        }
        self.batch.state.lock().lent.push(self.index);
        Ok(LentBlock::new(&self.batch, self.index, pieces))
    }

    /// Reads bytes of the block.
    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BlockFault> {
        self.with_host(|host| host.read(self.block, offset, into))
    }

    /// Says that so many sections are right.
    fn note_right(&self, sections: usize) {
        if let Some(Arrived::Sections(known)) =
            self.batch.state.lock().blocks.get_mut(self.index as usize)
        {
            *known = sections;
        }
    }

    fn end(&self, outcome: Result<(), BlockFault>) {
        self.batch.end(self.index, outcome);
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
    header: OnceLock<Vec<u8>>,
}

/// A block to be loaded: takes the record that was stored under its name.
///
/// Each [section](HostBlocks::section_bytes) is checked as soon as its last byte is written, if all bytes before were
/// written. A tier that writes a record from its beginning on, in pieces as they come, lets engines begin with the first
/// layers before the last have come.
///
/// Dropping it says that it was not loaded.
#[must_use = "dropping it says that the block was not loaded"]
pub struct BlockSink {
    slot: Slot,
    header: Vec<u8>,
    /// The checksums of the sections, once the header was found right.
    sums: Option<Vec<u64>>,
    /// Sections that were found right. They are not written again.
    right: usize,
    /// The end of the bytes that were written without a gap.
    written: usize,
    /// What was found wrong.
    fault: Option<BlockFault>,
}

impl BlockSource {
    fn new(slot: Slot) -> Self {
        Self { slot, header: OnceLock::new() }
    }

    /// The block's name, which it is found by.
    #[must_use]
    pub fn name(&self) -> BlockHash {
        self.slot.key.name
    }

    /// The block's group. Blocks of two groups may have the same name.
    #[must_use]
    pub fn group(&self) -> GroupId {
        self.slot.key.group
    }

    /// What tells the record from all others: for tiers that workers of several formats share.
    #[must_use]
    pub fn key(&self) -> RecordKey {
        self.slot.key
    }

    /// Bytes of the record.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a record has a header at least")]
    pub fn len(&self) -> usize {
        self.slot.record_bytes()
    }

    /// Bytes of the record's [header](Self::header).
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        self.slot.sections().header_bytes()
    }

    /// Copies bytes of the record, from `offset` on, into `into`. The first call that reads of the header reads the
    /// whole block once, for its checksums.
    ///
    /// # Errors
    /// [`BlockFault::Fenced`], and [`BlockFault::Short`] for bytes beyond the record.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), BlockFault> {
        let header_bytes = self.slot.sections().header_bytes();
        let end = offset.checked_add(into.len()).filter(|&end| end <= self.len());
        let end = end.ok_or(BlockFault::Short)?;
        let (head, body) = into.split_at_mut(end.min(header_bytes).saturating_sub(offset));
        if !head.is_empty() {
            head.copy_from_slice(&self.header()?[offset..offset + head.len()]);
        }
        if !body.is_empty() {
            let from = offset.max(header_bytes) - header_bytes;
            self.slot.read(from, body)?;
        }
        Ok(())
    }

    /// The whole record.
    ///
    /// # Errors
    /// [`BlockFault::Fenced`].
    pub fn record(&self) -> Result<Vec<u8>, BlockFault> {
        let mut record = vec![0; self.len()];
        self.read_at(0, &mut record)?;
        Ok(record)
    }

    /// The beginning of the record, which has the checksums of all that follows. The first call reads the whole block once.
    ///
    /// # Errors
    /// [`BlockFault::Fenced`].
    pub fn header(&self) -> Result<&[u8], BlockFault> {
        if let Some(header) = self.header.get() {
            return Ok(header);
        }
        let read = |offset, into: &mut [u8]| self.slot.read(offset, into);
        let header = self.slot.key.header(self.slot.sections(), read)?;
        Ok(self.header.get_or_init(|| header))
    }

    /// Lends the memory of the block: the record without its [header](Self::header). It holds what is to be stored as long
    /// as it is not [taken back](LentBlock::is_fenced).
    ///
    /// # Errors
    /// [`BlockFault::Fenced`], and [`BlockFault::Missing`] for memory that is not lent.
    pub fn lend(&self) -> Result<LentBlock, BlockFault> {
        self.slot.lend()
    }

    /// Says that the whole record is kept, so that a load finds it.
    pub fn done(self) {
        self.slot.end(Ok(()));
    }

    /// Says that the block was not stored.
    pub fn failed(self, fault: BlockFault) {
        self.slot.end(Err(fault));
    }
}

impl BlockSink {
    fn new(slot: Slot) -> Self {
        let header = vec![0; slot.sections().header_bytes()];
        Self { slot, header, sums: None, right: 0, written: 0, fault: None }
    }

    /// The block's name.
    #[must_use]
    pub fn name(&self) -> BlockHash {
        self.slot.key.name
    }

    /// The block's group.
    #[must_use]
    pub fn group(&self) -> GroupId {
        self.slot.key.group
    }

    /// What tells the record from all others: for tiers that workers of several formats share.
    #[must_use]
    pub fn key(&self) -> RecordKey {
        self.slot.key
    }

    /// Bytes of the record.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a record has a header at least")]
    pub fn len(&self) -> usize {
        self.slot.record_bytes()
    }

    /// Takes bytes of the record, from `offset` on, and checks the sections that are complete with them: their
    /// block's name, its group, the format of the cache and the checksum. What was found right before stays.
    ///
    /// # Errors
    /// What is wrong with the record; [`BlockFault::Fenced`]; [`BlockFault::Foreign`] for bytes beyond the record.
    pub fn write_at(&mut self, offset: usize, from: &[u8]) -> Result<(), BlockFault> {
        let header_bytes = self.header.len();
        let end = offset.checked_add(from.len()).filter(|&end| end <= self.len());
        let end = end.ok_or(BlockFault::Foreign)?;
        let (head, body) = from.split_at(end.min(header_bytes).saturating_sub(offset));
        if !head.is_empty() && self.sums.is_none() {
            self.header[offset..offset + head.len()].copy_from_slice(head);
        }
        let at = offset.max(header_bytes) - header_bytes;
        // Others may read what was found right.
        let right = guard!("tier.right-sections-stay", self.right, else 0);
        let right = self.slot.sections().end_of(right).saturating_sub(at);
        let body = body.get(right..).unwrap_or_default();
        let (block, at) = (self.slot.block, at + right);
        self.slot.with_host(|host| body.is_empty() || host.write(block, at, body))?;
        if offset <= self.written {
            self.written = self.written.max(end);
        }
        let checked = self.check_written();
        self.fault = self.fault.or(checked.err());
        checked
    }

    /// Bytes of the record's header, behind which its block comes.
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        self.header.len()
    }

    /// Lends the memory of the block, for the whole record without its header to be written there. What is there is looked
    /// at when it has [landed](Self::landed).
    ///
    /// # Errors
    /// [`BlockFault::Fenced`], and [`BlockFault::Missing`] for memory that is not lent, which is so if a part of the
    /// record was written before.
    pub fn lend(&self) -> Result<LentBlock, BlockFault> {
        // Others may read what was found right.
        if self.written > 0 {
            return Err(BlockFault::Missing);
        }
        self.slot.lend()
    }

    /// Takes in that the memory which was [lent](Self::lend) has the record's block, gives it back, and checks all
    /// sections, as [`write_at`](Self::write_at) does for what it writes.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at); [`BlockFault::Foreign`] for memory of another block, or a header of another length.
    pub fn landed(&mut self, lent: LentBlock, header: &[u8]) -> Result<(), BlockFault> {
        let is_of = lent.is_of(&self.slot.batch, self.slot.index);
        let fits = guard!("tier.lands-in-its-block", is_of, else true)
            && header.len() == self.header.len()
            && self.written == 0;
        drop(lent);
        if !fits {
            return Err(BlockFault::Foreign);
        }
        self.header.copy_from_slice(header);
        self.written = self.len();
        let checked = self.check_written();
        self.fault = self.fault.or(checked.err());
        checked
    }

    /// Checks the sections that are written and were not checked.
    fn check_written(&mut self) -> Result<(), BlockFault> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        let sections = self.slot.sections();
        let Some(written) = self.written.checked_sub(self.header.len()) else { return Ok(()) };
        let sums = match &self.sums {
            Some(sums) => sums,
            None => self.sums.insert(self.slot.key.check(sections, &self.header)?),
        };
        while let Some(sum) = sums.get(self.right) {
            let range = sections.section(self.right);
            if written < range.end {
                break;
            }
            let found = sum_of(range, |offset, into| self.slot.read(offset, into))?;
            let is_wrong = found != *sum;
            if guard!("tier.records-have-their-sums", is_wrong, else false) {
                return Err(BlockFault::Checksum);
            }
            self.right += 1;
            self.slot.note_right(self.right);
        }
        Ok(())
    }

    /// Says that the record was written. The block counts as loaded if all its sections were found right (H21, H32).
    ///
    /// # Errors
    /// What is wrong with it. The block has ended all the same.
    pub fn done(mut self) -> Result<(), BlockFault> {
        let checked = self.check();
        self.slot.end(checked);
        checked
    }

    fn check(&mut self) -> Result<(), BlockFault> {
        self.check_written()?;
        if self.written < self.len() {
            return Err(BlockFault::Short);
        }
        Ok(())
    }

    /// Says that the block was not loaded.
    pub fn failed(self, fault: BlockFault) {
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
