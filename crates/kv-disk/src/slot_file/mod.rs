//! One file of slots, as a tier that works when it is polled.

mod forget;
#[cfg(test)]
pub(crate) mod golden;
mod load;
mod open;
mod store;

pub use open::Place;
pub(crate) use open::{Old, check_rules, judge};

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use cuda_driver::guard;
use kv_pool::{BlockHash, GroupId, Pinned};
use kv_tier::{BlockFault, BlockSink, BlockSource, LowerTier};
use parking_lot::Mutex;

use crate::io::{Act, Backend, Body, Buffer, Ended, FileIo, Io, PAGE_BYTES};
use crate::layout::{ENTRIES_A_PAGE, ENTRY_BYTES, Entry, Heading, block_at, bytes_of};
use crate::limits::{Daily, Rate};
use crate::slots::{ClaimedSlot, Kept, Key, Slots};
use crate::stats::{DiskStats, Miss, Off, Unstored};
use crate::table::Table;
use crate::{Keys, SlotRules};

/// Pages of the table that are written at a time, beside slots. Each has a buffer.
const PAGES_OPEN_MAX: u32 = 64;

/// A file of slots as a tier: works in the calls of [`poll`](LowerTier::poll), without a thread of its own.
///
/// # Ordering
/// A block that is stored is found when its slot and its entry in the table are written. What is forgotten is found no
/// more from that call on; it stays forgotten when the file is opened again once the tier is [idle](Self::is_idle). The
/// same holds for [`clear`](LowerTier::clear), and stores that begin after it end behind it.
#[derive(Debug)]
pub struct SlotFile {
    io: Box<dyn FileIo>,
    heading: Heading,
    rules: SlotRules,
    slots: Slots,
    table: Table<Store>,
    /// How often the heading is to be written: at both its places, so that one that is spoilt later loses nothing.
    heading_due: u8,
    heading_open: bool,
    loads: VecDeque<BlockSink>,
    stores: VecDeque<Waiting>,
    /// What is open at the file, by token.
    jobs: HashMap<u64, Job>,
    next_token: u64,
    next_generation: u64,
    /// Memory of reads and writes: for writes as many as may be open at a time, for reads twice as many, so that the disk
    /// goes on while what it has brought is looked at.
    read_buffers: Vec<Buffer>,
    write_buffers: Vec<Buffer>,
    read_rate: Rate,
    write_rate: Rate,
    daily: Daily,
    /// Slots that are being given back to the file system, and what is to be written there then.
    punching: HashSet<u64>,
    parked: HashMap<u64, (Store, Memory)>,
    /// All slots are.
    punching_all: bool,
    punches: bool,
    /// The system moves bytes from and to the memory of blocks without a copy.
    direct: bool,
    failures: u32,
    off: Option<Off>,
    /// The file is off and could not be told what was forgotten. It is tried again when more is, and at the end.
    stuck: bool,
    /// What it has dropped by itself, known from that moment on: before a store ends that this has made room for.
    dropped: Arc<Mutex<Vec<Key>>>,
    survivors: Vec<Key>,
    stats: DiskStats,
    /// Reads that are open at the disk.
    reads_open: usize,
    /// What has ended and was not looked at.
    ended: VecDeque<Ended>,
    /// Kept to avoid allocation.
    reaped: Vec<Ended>,
}

/// A store that is being written.
#[derive(Debug)]
pub(crate) struct Store {
    source: BlockSource,
    slot: ClaimedSlot,
    kept: Kept,
    epoch: u64,
    /// The disk has read its block where it is.
    uncopied: bool,
    /// It was forgotten meanwhile.
    void: bool,
}

/// A load that is being read. Its slot is held meanwhile.
#[derive(Debug)]
struct Load {
    sink: BlockSink,
    pin: Pinned,
    slot: u64,
    kept: Kept,
}

/// The memory of a slot that is read or written: so many bytes of a buffer, and behind them a block where it is.
#[derive(Debug)]
struct Memory {
    buffer: Buffer,
    body: Option<Body>,
    bytes: usize,
}

impl Kept {
    /// Where the record's block begins in the slot.
    fn block_at(&self) -> usize {
        block_at(self.length, self.head) as usize
    }

    /// The end of the record in the slot.
    fn end(&self) -> usize {
        self.block_at() + (self.length - u64::from(self.head)) as usize
    }

    /// Bytes of the slot that it has. A record that was stored or restored fits.
    fn bytes(&self) -> usize {
        bytes_of(self.length, self.head).map_or(usize::MAX, |bytes| bytes as usize)
    }

    /// Whether the block has whole pages of its own.
    fn is_paged(&self) -> bool {
        self.head > 0
            && self.block_at().is_multiple_of(PAGE_BYTES)
            && self.end().is_multiple_of(PAGE_BYTES)
    }
}

#[derive(Debug)]
enum Job {
    Load(Box<Load>),
    Store(Box<Store>),
    Table(u64),
    Heading,
    Punch(u64),
    PunchAll,
}

impl SlotFile {
    /// Which way the file is reached.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.io.backend()
    }

    /// Why the file is off, if it is.
    #[must_use]
    pub fn off(&self) -> Option<Off> {
        self.off
    }

    /// Counts of the file.
    #[must_use]
    pub fn stats(&self) -> DiskStats {
        DiskStats {
            slots: self.heading.geometry.slots,
            used_slots: if self.off == Some(Off::Failing) { 0 } else { self.slots.used() },
            off: self.off.is_some().into(),
            ..self.stats
        }
    }

    /// The blocks that it has dropped and [`poll`](LowerTier::poll) has not told of, for another thread to look at.
    pub(crate) fn dropped(&self) -> Arc<Mutex<Vec<Key>>> {
        Arc::clone(&self.dropped)
    }

    /// Slots that a store can have now: those that no load and no store holds.
    #[must_use]
    pub fn claimable_slots(&self) -> u64 {
        self.slots.claimable()
    }

    /// Whether nothing is open or waits, so that the file says what the tier says, unless it is off and could not be written.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let waits = !(self.loads.is_empty() && self.stores.is_empty() && self.parked.is_empty());
        self.jobs.is_empty() && !waits && (self.is_settled() || self.stuck)
    }

    /// Whether the file says what the tier says.
    pub(crate) fn is_settled(&self) -> bool {
        self.heading_due == 0 && self.table.is_clean()
    }

    /// Whether operations are open at the file, one of which will end.
    #[must_use]
    pub fn has_open(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Works: begins what can be begun, and takes in what has ended. If nothing has and something is open, waits for
    /// that, at most `wait`.
    pub fn work(&mut self, mut wait: Duration) {
        while self.turn(std::mem::take(&mut wait)) {}
    }

    /// Begins what can be begun, and takes in one operation that has ended, for which it waits as [`work`](Self::work) does.
    /// Whether there was one.
    pub(crate) fn turn(&mut self, wait: Duration) -> bool {
        // The disk has its next operation before what it has brought is looked at.
        self.begin_ready();
        let wait = if self.ended.is_empty() { wait } else { Duration::ZERO };
        self.io.ended(wait, &mut self.reaped);
        let reads = self.reaped.iter().filter(|ended| ended.io.act == Act::Read).count();
        self.reads_open -= reads.min(self.reads_open);
        let some = !self.reaped.is_empty();
        self.ended.extend(self.reaped.drain(..));
        if some {
            self.begin_ready();
        }
        let Some(ended) = self.ended.pop_front() else { return false };
        self.end(ended);
        true
    }

    /// Begins what can be begun: what others wait for first.
    fn begin_ready(&mut self) {
        // Also in a file that is off: what is forgotten is not to come back.
        let tells = guard!("disk.tells-a-file-that-is-off", !self.stuck, else {
            self.stuck |= self.off.is_some();
            !self.stuck
        });
        if tells {
            let slots = self.rules.read_depth.saturating_add(self.rules.write_depth);
            let jobs_max = slots.saturating_add(PAGES_OPEN_MAX) as usize;
            self.write_heading();
            // A store of a new epoch has not ended before the epoch has begun in the file.
            while self.heading_due == 0
                && !self.heading_open
                && self.jobs.len() < jobs_max
                && let Some(page) = self.table.begin()
            {
                self.write_page(page);
            }
        }
        let now = self.rules.clock.now();
        while !self.loads.is_empty()
            && !self.read_buffers.is_empty()
            && self.reads_open < self.rules.read_depth as usize
            && self.read_rate.allows(now)
            && let Some(sink) = self.loads.pop_front()
        {
            self.begin_load(sink);
        }
        let depth = self.rules.write_depth as usize;
        while !self.stores.is_empty() && !self.punching_all {
            // Reads go first: beside those that wait, one write at a time goes on.
            let writing = depth - self.write_buffers.len().min(depth);
            let reads_wait = !self.loads.is_empty() && self.reads_open > 0;
            let may = !self.write_buffers.is_empty() && (!reads_wait || writing == 0);
            if !may || !self.write_rate.allows(now) {
                break;
            }
            let Some(waiting) = self.stores.pop_front() else { break };
            if let Some(later) = self.begin_store(waiting) {
                self.stores.push_front(later);
                break;
            }
        }
    }

    fn submit(&mut self, job: Job, act: Act, offset: u64, bytes: usize, buffer: Option<Buffer>) {
        self.submit_with(job, Io { token: 0, act, offset, bytes, buffer, body: None });
    }

    fn submit_with(&mut self, job: Job, io: Io) {
        let token = self.next_token;
        self.next_token += 1;
        self.jobs.insert(token, job);
        self.io.begin(Io { token, ..io });
    }

    fn write_heading(&mut self) {
        if self.heading_due == 0 || self.heading_open {
            return;
        }
        self.heading_open = true;
        self.heading.sequence += 1;
        let mut buffer = Buffer::new(PAGE_BYTES);
        buffer.bytes_mut().copy_from_slice(&self.heading.to_page());
        self.submit(Job::Heading, Act::Write, self.heading.place(), PAGE_BYTES, Some(buffer));
    }

    fn write_page(&mut self, page: u64) {
        let mut buffer = Buffer::new(PAGE_BYTES);
        let first = page * ENTRIES_A_PAGE;
        for (slot, bytes) in (first..).zip(buffer.bytes_mut().chunks_exact_mut(ENTRY_BYTES)) {
            if let Some(kept) = self.slots.kept(slot) {
                bytes.copy_from_slice(&self.entry(slot, kept).to_bytes());
            }
        }
        let offset = self.heading.geometry.table_page(page);
        self.submit(Job::Table(page), Act::Write, offset, PAGE_BYTES, Some(buffer));
    }

    fn entry(&self, slot: u64, kept: &Kept) -> Entry {
        let &Kept { name, group, generation, length, head, sum, key } = kept;
        let Heading { file, model, epoch, .. } = self.heading;
        Entry { name, group, file, model, epoch, generation, slot, length, head, sum, key }
    }

    /// What a slot says of its record. The name of an encrypted one is in the table alone, which is written anew when it is
    /// forgotten: it follows from the block's tokens, so that prompts can be tried.
    fn slot_entry(&self, slot: u64, kept: &Kept) -> Entry {
        let entry = self.entry(slot, kept);
        match guard!("disk.hides-names-of-keys", kept.key, else None) {
            Some(_) => Entry { name: BlockHash::from_u128(0), ..entry },
            None => entry,
        }
    }

    /// The key that a block's record is to be encrypted with.
    fn key_of(&self, (group, name): Key) -> Option<u64> {
        self.rules.keys.as_ref()?.key_of(group, name)
    }

    /// Has the table say again what a slot holds.
    fn touch(&mut self, slot: u64, store: Option<Store>) {
        self.table.touch(slot / ENTRIES_A_PAGE, store);
    }

    fn end(&mut self, ended: Ended) {
        let Ended { io, result } = ended;
        let Some(job) = self.jobs.remove(&io.token) else { return };
        if self.refuses_memory(&io, &result) {
            return self.copy_instead(job, io.buffer);
        }
        self.note(&io, &result);
        let whole = matches!(result, Ok(bytes) if bytes == io.bytes);
        self.stuck |= self.off.is_some() && !whole && matches!(job, Job::Table(_) | Job::Heading);
        match job {
            Job::Load(load) => self.end_load(*load, io.buffer, io.body, &result),
            Job::Store(store) => {
                self.write_buffers.extend(io.buffer);
                let fenced = io.body.is_some_and(|body| body.is_fenced());
                self.end_write(*store, whole, fenced);
            }
            Job::Table(page) => self.end_page(page, whole),
            Job::Heading => {
                self.heading_open = false;
                // One that was not written is written again, until it is stuck.
                self.heading_due = self.heading_due.saturating_sub(whole.into());
            }
            Job::Punch(slot) => {
                self.punching.remove(&slot);
                self.punches &= whole;
                if let Some((store, memory)) = self.parked.remove(&slot) {
                    self.write_slot(store, memory);
                }
            }
            Job::PunchAll => {
                self.punching_all = false;
                self.punches &= whole;
            }
        }
        if self.off.is_some() {
            self.give_up();
        }
    }

    /// Whether the system has refused to move bytes from or to the memory of a block, which is no fault of the disk.
    fn refuses_memory(&mut self, io: &Io, result: &io::Result<usize>) -> bool {
        let error = result.as_ref().err().and_then(io::Error::raw_os_error);
        let refuses = io.body.is_some() && matches!(error, Some(libc::EFAULT | libc::EINVAL));
        if refuses && self.direct {
            tracing::warn!(?result, "host memory is not moved without a copy");
        }
        self.direct &= !refuses;
        refuses
    }

    /// Begins a load or a store again, with a copy.
    fn copy_instead(&mut self, job: Job, buffer: Option<Buffer>) {
        match job {
            Job::Load(load) => {
                self.read_buffers.extend(buffer);
                self.loads.push_front(load.sink);
            }
            Job::Store(store) => {
                self.write_buffers.extend(buffer);
                self.again(*store);
            }
            Job::Table(_) | Job::Heading | Job::Punch(_) | Job::PunchAll => {}
        }
        if self.off.is_some() {
            self.give_up();
        }
    }

    /// Counts an operation that has ended, and turns the file off when it is of no use.
    fn note(&mut self, io: &Io, result: &io::Result<usize>) {
        if let Ok(bytes) = *result {
            match io.act {
                Act::Read => self.stats.read_bytes += bytes as u64,
                Act::Write => self.stats.written_bytes += bytes as u64,
                Act::Punch | Act::Sync => {}
            }
            if bytes >= io.bytes || io.act != Act::Write {
                self.failures = 0;
                return;
            }
        }
        self.stats.failed_operations += 1;
        // A file system without holes has none.
        if io.act == Act::Punch {
            return;
        }
        self.failures += 1;
        let off = match result.as_ref().map_err(io::Error::kind) {
            Err(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => Some(Off::Full),
            Err(io::ErrorKind::ReadOnlyFilesystem) => Some(Off::ReadOnly),
            _ => None,
        };
        let failures_max = self.rules.failures_max.max(1);
        let failing = guard!("disk.gives-up-what-fails", self.failures >= failures_max, else false);
        let off = off.filter(|_| io.act == Act::Write).or(failing.then_some(Off::Failing));
        if let Some(off) = off
            && self.off != Some(Off::Failing)
            && self.off != Some(off)
        {
            tracing::error!(?off, ?result, "a file of slots is off");
            self.off = Some(off);
            if off == Off::Failing {
                // What is forgotten from now on is still to be found, for the table to be told.
                self.dropped.lock().extend(self.slots.blocks());
            }
        }
    }

    /// Ends what a file that is off does not do any more.
    fn give_up(&mut self) {
        for (source, _) in std::mem::take(&mut self.stores) {
            self.fail_store(source, Unstored::Off);
        }
        for store in self.table.give_up() {
            self.end_unwritten(store, Unstored::Off);
        }
        for (_, (store, memory)) in std::mem::take(&mut self.parked) {
            self.write_buffers.push(memory.buffer);
            self.end_unwritten(store, Unstored::Off);
        }
        if self.off == Some(Off::Failing) {
            for sink in std::mem::take(&mut self.loads) {
                self.miss(sink, Miss::Off);
            }
        }
    }

    /// Gives up what has not begun, and tries for the last time to have the file say what was forgotten.
    pub(crate) fn give_up_waiting(&mut self) {
        self.stuck = false;
        for (source, _) in std::mem::take(&mut self.stores) {
            self.fail_store(source, Unstored::Off);
        }
        for sink in std::mem::take(&mut self.loads) {
            self.miss(sink, Miss::Off);
        }
    }

    fn miss(&mut self, sink: BlockSink, miss: Miss) {
        self.stats.misses[miss as usize] += 1;
        sink.failed(match miss {
            Miss::Absent | Miss::Forgotten | Miss::NoKey | Miss::Off => BlockFault::Missing,
            Miss::Short => BlockFault::Short,
            Miss::Torn => BlockFault::Checksum,
            Miss::Stale | Miss::Foreign => BlockFault::Foreign,
            Miss::Failed | Miss::Refused => BlockFault::Failed,
        });
    }

    /// Takes blocks that are to be stored when their turn comes.
    pub(crate) fn queue(&mut self, blocks: Vec<Waiting>) {
        for waiting in blocks {
            match self.off {
                None => self.stores.push_back(waiting),
                Some(_) => self.fail_store(waiting.0, Unstored::Off),
            }
        }
    }

    fn fail_store(&mut self, source: BlockSource, reason: Unstored) {
        self.stats.unstored[reason as usize] += 1;
        source.failed(BlockFault::Failed);
    }
}

/// A block that is to be stored, and the key that it had when it was given: its tenant may be forgotten before its turn
/// comes, and must not be taken for one without a key then.
pub(crate) type Waiting = (BlockSource, Option<u64>);

/// The same, by the keys of now.
pub(crate) fn waiting(keys: Option<&dyn Keys>, source: BlockSource) -> Waiting {
    let key = keys.and_then(|keys| keys.key_of(source.group(), source.name()));
    (source, key)
}

impl LowerTier for SlotFile {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        let keys = self.rules.keys.clone();
        self.queue(blocks.into_iter().map(|source| waiting(keys.as_deref(), source)).collect());
    }

    fn load(&mut self, blocks: Vec<BlockSink>) {
        for sink in blocks {
            match self.off {
                Some(Off::Failing) => self.miss(sink, Miss::Off),
                _ => self.loads.push_back(sink),
            }
        }
    }

    fn forget(&mut self, blocks: &[(GroupId, BlockHash)]) {
        blocks.iter().for_each(|&block| self.forget_block(block));
    }

    fn clear(&mut self) {
        self.clear_all();
    }

    fn poll(&mut self, dropped: &mut Vec<(GroupId, BlockHash)>) {
        self.work(Duration::ZERO);
        dropped.append(&mut self.dropped.lock());
    }

    fn survivors(&mut self, found: &mut Vec<(GroupId, BlockHash)>) {
        found.append(&mut self.survivors);
    }
}
