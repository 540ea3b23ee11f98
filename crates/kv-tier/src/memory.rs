//! A tier in ordinary memory, which can be late and wrong on request.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kv_pool::clock::{Clock, SystemClock};
use kv_pool::{BlockHash, GroupId};

use crate::{BlockFault, BlockSink, BlockSource, LowerTier};

/// How large and how fast a [`MemoryTier`] is.
#[derive(Clone, Debug)]
pub struct MemoryTierOptions {
    /// Records that it keeps; beyond these it drops the oldest.
    pub records_max: usize,
    /// How long a store or a load takes, by `clock`.
    pub latency: Duration,
    /// The clock of `latency`.
    pub clock: Arc<dyn Clock>,
    /// Pieces in which a record is loaded, one with each poll.
    pub load_pieces: u32,
    /// What it does wrong.
    pub faults: FaultRules,
}

impl Default for MemoryTierOptions {
    /// 1,024 records, each at once and in one piece, without a fault.
    fn default() -> Self {
        Self {
            records_max: 1024,
            latency: Duration::ZERO,
            clock: Arc::new(SystemClock::new()),
            load_pieces: 1,
            faults: FaultRules::default(),
        }
    }
}

/// How often a tier does what it should not, in percent of the blocks. Everything follows from the seed and the order
/// of calls.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct FaultRules {
    /// The seed.
    pub seed: u64,
    /// Blocks that are late by up to [`late_polls_max`](Self::late_polls_max) polls.
    pub late: u8,
    /// Polls by which a block is late at most.
    pub late_polls_max: u32,
    /// Blocks that fail, and say so.
    pub fails: u8,
    /// Blocks of which only a part is kept or delivered.
    pub tears: u8,
    /// Blocks with one bit changed.
    pub corrupts: u8,
    /// Loads that are answered with the record of another block.
    pub swaps: u8,
    /// Blocks that were stored and are not there.
    pub loses: u8,
}

impl FaultRules {
    /// All faults, each in 4 % of the blocks, and a fifth of the blocks late.
    #[must_use]
    pub const fn all(seed: u64) -> Self {
        let late_polls_max = 40;
        Self { seed, late: 20, late_polls_max, fails: 4, tears: 4, corrupts: 4, swaps: 4, loses: 4 }
    }
}

/// What a tier has done wrong so far.
#[derive(Debug, Default)]
pub struct FaultsMade {
    late: AtomicU64,
    failed: AtomicU64,
    torn: AtomicU64,
    corrupted: AtomicU64,
    swapped: AtomicU64,
    lost: AtomicU64,
}

impl FaultsMade {
    /// Each fault, by name, and how often it was made.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let Self { late, failed, torn, corrupted, swapped, lost } = self;
        let all = [
            ("late", late),
            ("failed", failed),
            ("torn", torn),
            ("corrupted", corrupted),
            ("swapped", swapped),
            ("lost", lost),
        ];
        all.map(|(name, count)| (name, count.load(Ordering::Relaxed))).into_iter()
    }
}

type Key = (GroupId, BlockHash);

/// A tier that keeps its records in ordinary memory, and works in [`poll`](LowerTier::poll).
#[derive(Debug)]
pub struct MemoryTier {
    options: MemoryTierOptions,
    records: HashMap<Key, Vec<u8>>,
    /// Names from the oldest on; some may be gone.
    order: VecDeque<Key>,
    jobs: VecDeque<Job>,
    polls: u64,
    random: u64,
    faults: Arc<FaultsMade>,
    dropped: Vec<Key>,
}

#[derive(Debug)]
struct Job {
    at: Duration,
    poll: u64,
    work: Work,
}

#[derive(Debug)]
enum Work {
    Store(BlockSource),
    Load(BlockSink),
    /// A load of this record, of which so many bytes were written.
    Rest(BlockSink, Vec<u8>, usize),
}

impl MemoryTier {
    /// A tier without records.
    #[must_use]
    pub fn new(options: MemoryTierOptions) -> Self {
        Self {
            random: options.faults.seed,
            options,
            records: HashMap::new(),
            order: VecDeque::new(),
            jobs: VecDeque::new(),
            polls: 0,
            faults: Arc::default(),
            dropped: Vec::new(),
        }
    }

    /// Counts of its faults, which stay readable when the tier is given away.
    #[must_use]
    pub fn faults(&self) -> Arc<FaultsMade> {
        Arc::clone(&self.faults)
    }

    /// Records that it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    fn happens(&mut self, percent: u8, count: impl Fn(&FaultsMade) -> &AtomicU64) -> bool {
        let happens = percent > 0 && self.next() % 100 < u64::from(percent);
        if happens {
            count(&self.faults).fetch_add(1, Ordering::Relaxed);
        }
        happens
    }

    fn push(&mut self, work: Work) {
        let at = self.options.clock.now().saturating_add(self.options.latency);
        let FaultRules { late, late_polls_max, .. } = self.options.faults;
        let is_late = self.happens(late, |made| &made.late);
        let late = if is_late { self.next() % (u64::from(late_polls_max) + 1) } else { 0 };
        self.jobs.push_back(Job { at, poll: self.polls + late, work });
    }

    fn store(&mut self, block: BlockSource) {
        let rules = self.options.faults;
        if self.happens(rules.fails, |made| &made.failed) {
            return block.failed(BlockFault::Failed);
        }
        let mut record = match block.record() {
            Ok(record) => record,
            Err(fault) => return block.failed(fault),
        };
        let key = (block.group(), block.name());
        if self.happens(rules.tears, |made| &made.torn) {
            // The beginning is new, and the rest is what was there before.
            let cut = (self.next() % record.len() as u64) as usize;
            record[cut..].fill(0);
        }
        if self.happens(rules.corrupts, |made| &made.corrupted) {
            self.corrupt(&mut record);
        }
        if !self.happens(rules.loses, |made| &made.lost) {
            self.keep(key, record);
        }
        block.done();
    }

    fn corrupt(&mut self, record: &mut [u8]) {
        let bit = self.next() % (record.len() as u64 * 8);
        record[(bit / 8) as usize] ^= 1 << (bit % 8);
    }

    fn keep(&mut self, key: Key, record: Vec<u8>) {
        if self.records.insert(key, record).is_none() {
            self.order.push_back(key);
        }
        while self.records.len() > self.options.records_max
            && let Some(oldest) = self.order.pop_front()
        {
            if self.records.remove(&oldest).is_some() {
                self.dropped.push(oldest);
            }
        }
    }

    fn load(&mut self, block: BlockSink) {
        let rules = self.options.faults;
        let mut key = (block.group(), block.name());
        if self.happens(rules.fails, |made| &made.failed) {
            return block.failed(BlockFault::Failed);
        }
        if !self.order.is_empty() && self.happens(rules.swaps, |made| &made.swapped) {
            let other = self.next() % self.order.len() as u64;
            key = self.order[other as usize];
        }
        let Some(mut record) = self.records.get(&key).cloned() else {
            return block.failed(BlockFault::Missing);
        };
        if self.happens(rules.tears, |made| &made.torn) {
            let cut = (self.next() % record.len() as u64) as usize;
            record.truncate(cut);
        }
        if !record.is_empty() && self.happens(rules.corrupts, |made| &made.corrupted) {
            self.corrupt(&mut record);
        }
        self.write_piece(block, record, 0);
    }

    /// Writes the next piece of a record; the others follow with later polls.
    fn write_piece(&mut self, mut block: BlockSink, record: Vec<u8>, from: usize) {
        let piece = block.len().div_ceil(self.options.load_pieces.max(1) as usize).max(1);
        let end = record.len().min(from.saturating_add(piece));
        match block.write_at(from, &record[from..end]) {
            Ok(()) if end < record.len() => {
                let (at, poll) = (Duration::ZERO, self.polls);
                self.jobs.push_back(Job { at, poll, work: Work::Rest(block, record, end) });
            }
            // Whatever is wrong with it, the handle has seen and told.
            Ok(()) => drop(block.done()),
            Err(fault) => block.failed(fault),
        }
    }
}

impl LowerTier for MemoryTier {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        blocks.into_iter().for_each(|block| self.push(Work::Store(block)));
    }

    fn load(&mut self, blocks: Vec<BlockSink>) {
        blocks.into_iter().for_each(|block| self.push(Work::Load(block)));
    }

    fn forget(&mut self, blocks: &[Key]) {
        for key in blocks {
            self.records.remove(key);
        }
        // Their places in the order are given up together, now and then.
        if self.order.len() > 2 * self.records.len() + blocks.len() {
            self.order.retain(|key| self.records.contains_key(key));
        }
    }

    fn clear(&mut self) {
        self.records.clear();
        self.order.clear();
    }

    fn poll(&mut self, dropped: &mut Vec<Key>) {
        self.polls += 1;
        let now = self.options.clock.now();
        for _ in 0..self.jobs.len() {
            let Some(job) = self.jobs.pop_front() else { break };
            match job {
                Job { at, poll, .. } if at > now || poll >= self.polls => self.jobs.push_back(job),
                Job { work: Work::Store(block), .. } => Self::store(self, block),
                Job { work: Work::Load(block), .. } => Self::load(self, block),
                Job { work: Work::Rest(block, record, from), .. } => {
                    self.write_piece(block, record, from);
                }
            }
        }
        dropped.append(&mut self.dropped);
    }
}
