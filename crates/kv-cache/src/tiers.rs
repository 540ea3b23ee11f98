//! Tiers below host memory: which there are, and what a worker does with them.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use cuda_driver::PinnedBuffer;
use kv_manager::tiers::{HostBlocks, LowerTier, TierTransfers};
use kv_manager::{Dropped, LowerOptions, Settled, StepPlan, Transfer, WorkerId};
use kv_pool::{BlockHash, BlockId, Location, Tier};

use crate::{KvCache, KvCacheOptions, KvWorker};

/// Makes a tier for a worker.
type Make = Arc<dyn Fn() -> Box<dyn LowerTier> + Send + Sync>;

/// The tiers below host memory.
///
/// # Examples
///
/// ```
/// use kv_cache::LowerTiers;
/// use kv_cache::kv_manager::tiers::{MemoryTier, MemoryTierOptions};
///
/// let mut tiers = LowerTiers::new(b"llama-3-8b, revision 4");
/// tiers.push(|| Box::new(MemoryTier::new(MemoryTierOptions::default())));
/// assert_eq!(tiers.len(), 1);
/// ```
#[derive(Clone, Default)]
pub struct LowerTiers {
    make: Vec<Make>,
    model: Vec<u8>,
    /// How they are used. The number of tiers is that of [`push`](Self::push).
    pub rules: LowerOptions,
}

impl LowerTiers {
    /// No tier yet, for records of this model: its name, its weights, and the share of it that this process holds. What
    /// was stored for another model is not read.
    #[must_use]
    pub fn new(model: &[u8]) -> Self {
        Self { model: model.to_vec(), ..Self::default() }
    }

    /// Adds a tier behind those that there are; two at most. `make` is called once for each worker.
    pub fn push(&mut self, make: impl Fn() -> Box<dyn LowerTier> + Send + Sync + 'static) {
        self.make.push(Arc::new(make));
    }

    /// Number of tiers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.make.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.make.is_empty()
    }

    /// What a manager has to know of them.
    #[must_use]
    pub fn options(&self) -> LowerOptions {
        let tiers = u8::try_from(self.make.len()).unwrap_or(u8::MAX);
        LowerOptions { tiers, ..self.rules }
    }
}

impl fmt::Debug for LowerTiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("LowerTiers");
        shown.field("tiers", &self.len()).field("rules", &self.rules).finish_non_exhaustive()
    }
}

/// The tiers of a worker, and transfers that wait for copies of their blocks.
#[derive(Debug)]
pub(crate) struct WorkerTiers {
    transfers: TierTransfers,
    /// Transfers that are not begun, each with the step whose copies are the last to touch its blocks.
    waiting: VecDeque<(u64, Transfer)>,
    /// Of each host block, the last step that copies to it or from it.
    copied: Vec<u64>,
    /// The last step that is complete.
    completed: u64,
}

impl WorkerTiers {
    pub(crate) fn new(options: &KvCacheOptions, layouts: &str) -> Self {
        let LowerTiers { make, model, .. } = &options.tiers;
        let tiers = make.iter().map(|make| make()).collect::<Vec<_>>();
        // The same in every process: what the bytes of a block mean.
        let meaning = [model, layouts.as_bytes()].map(|part| BlockHash::salted(part).to_u128());
        let format = BlockHash::salted(&meaning.map(u128::to_le_bytes).concat()).to_u128() as u64;
        let blocks = if tiers.is_empty() { 0 } else { options.host_blocks as usize };
        Self {
            transfers: TierTransfers::new(tiers, format),
            waiting: VecDeque::new(),
            copied: vec![0; blocks],
            completed: 0,
        }
    }

    /// Number of tiers.
    pub(crate) fn len(&self) -> usize {
        self.transfers.tiers()
    }

    /// Notes a copy of a plan.
    pub(crate) fn note_copy(&mut self, step: u64, ends: [Location; 2]) {
        let host = ends.into_iter().find(|end| end.tier == Tier::Secondary);
        if let Some(copied) = host.and_then(|end| self.copied.get_mut(end.id.index())) {
            *copied = step;
        }
    }

    /// Takes in what a plan says of these tiers, behind its [copies](Self::note_copy).
    pub(crate) fn take(&mut self, plan: &StepPlan) {
        self.transfers.forget(&plan.forgets);
        for transfer in &plan.transfers {
            let copied =
                |(_, block): &(BlockHash, BlockId)| self.copied.get(block.index()).copied();
            let last = transfer.blocks.iter().filter_map(copied).max().unwrap_or(0);
            self.waiting.push_back((last, transfer.clone()));
        }
    }

    pub(crate) fn note_completed(&mut self, step: u64) {
        self.completed = step;
    }

    /// Takes all memory back: what is open here ends nowhere. Copies from before end with the step behind `step`.
    pub(crate) fn restore(&mut self, step: u64) {
        self.fence();
        self.copied.fill(step.saturating_add(1));
        self.completed = step;
    }

    fn fence(&mut self) {
        self.transfers.fence();
        self.waiting.clear();
    }

    /// Drops the tiers.
    pub(crate) fn close(&mut self) {
        self.fence();
        self.transfers = TierTransfers::new(Vec::new(), 0);
    }

    /// Begins the transfers whose copies are complete.
    fn begin_ready(&mut self, host: impl FnOnce() -> Arc<dyn HostBlocks>) {
        let completed = self.completed;
        if !self.waiting.iter().any(|(step, _)| *step <= completed) {
            return;
        }
        let (host, transfers) = (host(), &mut self.transfers);
        self.waiting.retain(|(step, transfer)| {
            if *step > completed {
                return true;
            }
            if let Err(error) = transfers.begin(transfer, &host) {
                tracing::error!(%error, "a plan that was checked");
            }
            false
        });
    }
}

/// The host blocks of all parts as one.
#[derive(Debug)]
struct Pinned {
    parts: Vec<PinnedPart>,
    block_bytes: usize,
}

/// One part's piece of each host block.
#[derive(Debug)]
pub(crate) struct PinnedPart {
    pub(crate) slabs: Vec<Arc<PinnedBuffer>>,
    pub(crate) blocks_per_slab: usize,
    pub(crate) block_bytes: usize,
}

impl Pinned {
    /// Calls `copy` for each piece of a range of a block, with its slab, its offset there, and its range of the
    /// caller's bytes.
    fn pieces(
        &self,
        block: BlockId,
        offset: usize,
        bytes: usize,
        mut copy: impl FnMut(&PinnedBuffer, u64, std::ops::Range<usize>) -> bool,
    ) -> bool {
        let Some(end) = offset.checked_add(bytes).filter(|&end| end <= self.block_bytes) else {
            return false;
        };
        let mut first = 0;
        for part in &self.parts {
            let (here, there) = (offset.max(first), end.min(first + part.block_bytes));
            if here < there {
                let slab = part.slabs.get(block.index() / part.blocks_per_slab.max(1));
                let within = block.index() % part.blocks_per_slab.max(1);
                let at = (within * part.block_bytes + here - first) as u64;
                let range = here - offset..there - offset;
                if !slab.is_some_and(|slab| copy(slab, at, range)) {
                    return false;
                }
            }
            first += part.block_bytes;
        }
        true
    }
}

impl HostBlocks for Pinned {
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        let bytes = into.len();
        self.pieces(block, offset, bytes, |slab, at, range| {
            slab.read_at(at, &mut into[range]).is_ok()
        })
    }

    fn write(&self, block: BlockId, offset: usize, from: &[u8]) -> bool {
        self.pieces(block, offset, from.len(), |slab, at, range| {
            slab.write_shared(at, &from[range]).is_ok()
        })
    }
}

impl KvWorker {
    /// Begins stores and loads whose copies are complete, lets the tiers below host memory work, and appends the
    /// tickets that have ended, and names that tiers have dropped: what the manager is to
    /// [be told](kv_manager::Manager::settle). To be called as often as steps are [polled](Self::poll).
    pub fn poll_transfers(
        &mut self,
        worker: WorkerId,
        settled: &mut Vec<Settled>,
        dropped: &mut Vec<Dropped>,
    ) {
        if self.tiers.len() == 0 {
            return;
        }
        let Self { tiers, parts, .. } = self;
        tiers.begin_ready(|| {
            let parts: Vec<_> = parts.iter().map(crate::Part::pinned_host).collect();
            let block_bytes = parts.iter().map(|part| part.block_bytes).sum();
            Arc::new(Pinned { parts, block_bytes })
        });
        tiers.transfers.poll(worker, settled, dropped);
    }

    /// Stores and loads that have not ended here.
    #[must_use]
    pub fn open_transfers(&self) -> usize {
        self.tiers.transfers.open() + self.tiers.waiting.len()
    }
}

impl KvCache {
    /// Tells the manager what has become of stores and loads.
    pub(crate) fn take_transfers(&mut self) {
        let (mut settled, mut dropped) = (Vec::new(), Vec::new());
        self.worker.poll_transfers(WorkerId(0), &mut settled, &mut dropped);
        for dropped in &dropped {
            if let Err(error) = self.manager.dropped(dropped) {
                tracing::error!(%error, "names of a tier that the manager does not know");
            }
        }
        for settled in &settled {
            if let Err(error) = self.manager.settle(settled) {
                tracing::error!(%error, "a ticket that the manager does not know");
            }
        }
    }
}
