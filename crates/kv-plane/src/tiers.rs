//! Tiers below host memory: which there are, and what a worker does with them.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cuda_driver::{PinnedBuffer, guard};
use kv_manager::{
    Dropped, Gained, GroupId, LowerOptions, Manager, PlanError, Settled, StepPlan, Survivors,
    TierTransfers, WorkerId,
};
use kv_pool::ConfigError;
use kv_pool::store::{StoreByEvidence, StoreRules};
use kv_pool::{BlockHash, BlockId, Location, Tier};
use kv_tier::{
    Arrived, BlockFault, HostBlocks, HostPiece, LowerTier, TicketId, Transfer, record_format,
};

use crate::{KvCacheOptions, KvWorker, OptionsError, Part};

/// Makes a tier for a worker.
type Make = Arc<dyn Fn() -> Box<dyn LowerTier> + Send + Sync>;

/// The tiers below host memory.
///
/// # Examples
///
/// ```
/// use kv_plane::LowerTiers;
/// use kv_plane::tier::{MemoryTier, MemoryTierOptions};
///
/// let mut tiers = LowerTiers::new(b"llama-3-8b, revision 4");
/// tiers.push(|| Box::new(MemoryTier::new(MemoryTierOptions::default())));
/// assert_eq!(tiers.options().tiers, 1);
/// ```
#[derive(Clone, Default)]
pub struct LowerTiers {
    make: Vec<Make>,
    model: Vec<u8>,
    /// What is stored in each of them by evidence. `None` stores everything.
    pub store: [Option<StoreRules>; 2],
    /// How they are used. The number of tiers is that of [`push`](Self::push).
    pub rules: LowerOptions,
}

impl LowerTiers {
    /// No tier yet, for records of this model: its name, its weights, and the type of its KV. What was stored for another model is
    /// not read, nor by a worker with another layout or [rank](KvWorker::new).
    #[must_use]
    pub fn new(model: &[u8]) -> Self {
        Self { model: model.to_vec(), ..Self::default() }
    }

    /// Adds a tier behind those that there are; two at most. `make` is called once for each worker.
    pub fn push(&mut self, make: impl Fn() -> Box<dyn LowerTier> + Send + Sync + 'static) {
        self.make.push(Arc::new(make));
    }

    /// Has a manager that is made with these options store in each tier what `store` says.
    pub(crate) fn set_store_policies(&self, manager: &mut Manager) -> Result<(), ConfigError> {
        let tiers = [Tier::Third, Tier::Fourth].into_iter().zip(self.store).take(self.make.len());
        for (tier, rules) in tiers.filter_map(|(tier, rules)| Some((tier, rules?))) {
            let set = manager.set_store_policy(tier, Box::new(StoreByEvidence::new(rules)?));
            debug_assert!(set.is_ok(), "{set:?}");
        }
        Ok(())
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
        shown.field("tiers", &self.make.len()).field("rules", &self.rules).finish_non_exhaustive()
    }
}

/// The tiers of a worker, and transfers that wait for copies of their blocks.
#[derive(Debug)]
pub(crate) struct WorkerTiers {
    transfers: TierTransfers,
    /// Transfers that are not begun, each with the step whose copies are the last to touch its blocks.
    waiting: VecDeque<(u64, Transfer)>,
    /// Of the records of all tiers.
    format: u64,
    /// Of each group's host blocks, the last step that copies to it or from it.
    copied: Vec<Vec<u64>>,
    /// Host blocks of each group.
    host: Vec<u64>,
    /// The last step that is complete.
    completed: u64,
    /// What the manager is to be told, of a worker that is numbered then.
    settled: Vec<Settled>,
    dropped: Vec<Dropped>,
}

/// Checks the number of a worker, and how many there are.
pub(crate) fn check_rank((WorkerId(worker), workers): (WorkerId, u16)) -> Result<(), OptionsError> {
    if worker < workers { Ok(()) } else { Err(OptionsError::Rank { worker, workers }) }
}

impl WorkerTiers {
    pub(crate) fn new(options: &KvCacheOptions, layouts: &str, rank: (u16, u16)) -> Self {
        let LowerTiers { make, model, .. } = &options.tiers;
        let tiers = make.iter().map(|make| make()).collect::<Vec<_>>();
        let format = record_format(model, layouts, rank);
        let host: Vec<u64> = options.groups.iter().map(|group| group.host_blocks.into()).collect();
        let noted = |blocks: &u64| vec![0; if tiers.is_empty() { 0 } else { *blocks as usize }];
        let copied = host.iter().map(noted).collect();
        Self {
            transfers: TierTransfers::new(tiers, format),
            format,
            waiting: VecDeque::new(),
            copied,
            host,
            completed: 0,
            settled: Vec::new(),
            dropped: Vec::new(),
        }
    }

    /// That of the records of all tiers.
    pub(crate) fn format(&self) -> u64 {
        self.format
    }

    pub(crate) fn len(&self) -> usize {
        self.transfers.tiers()
    }

    pub(crate) fn check(&self, plan: &StepPlan) -> Result<(), PlanError> {
        self.transfers.check(plan, &self.host, self.waiting.iter().map(|(_, transfer)| transfer))
    }

    pub(crate) fn note_copy(&mut self, step: u64, group: usize, ends: [Location; 2]) {
        let host = ends.into_iter().find(|end| end.tier == Tier::Secondary);
        if let Some(copied) = host.and_then(|end| self.copied[group].get_mut(end.id.index())) {
            *copied = step;
        }
    }

    /// Takes in what a plan says of these tiers, behind its [copies](Self::note_copy).
    pub(crate) fn take(&mut self, plan: &StepPlan) {
        self.transfers.forget(&plan.forgets);
        for transfer in &plan.transfers {
            let copied = &self.copied[usize::from(transfer.group.0)];
            let copied = |(_, block): &(BlockHash, BlockId)| copied.get(block.index()).copied();
            let last = transfer.blocks.iter().filter_map(copied).max().unwrap_or(0);
            self.waiting.push_back((last, transfer.clone()));
        }
    }

    pub(crate) fn note_completed(&mut self, step: u64) {
        self.completed = self.completed.max(step);
    }

    /// How much of a host block is there that a load brings; `None` if no such load is open, begun or not.
    pub(crate) fn arrived(&self, ticket: TicketId, block: BlockId) -> Option<Arrived> {
        let waits = self.waiting.iter().any(|(_, transfer)| transfer.ticket == ticket);
        let waits = waits.then_some(Arrived::Sections(0));
        waits.or_else(|| self.transfers.arrived(ticket, block))
    }

    /// Bytes of a section of a group's host block.
    pub(crate) fn section_bytes(&self, group: GroupId, parts: &[Part]) -> u64 {
        let pieces = parts.iter().map(|part| part.of(group).pinned_host());
        Pinned::new(pieces.collect()).layer_bytes as u64
    }

    /// Ends a load with what it has brought.
    pub(crate) fn give_up(&mut self, ticket: TicketId) {
        self.transfers.give_up(ticket);
        let Self { waiting, settled, .. } = self;
        waiting.retain(|(_, transfer)| {
            let gone = transfer.ticket == ticket;
            if gone {
                settled.push(all_wrong(transfer, BlockFault::Late));
            }
            !gone
        });
    }

    /// Takes all memory back: what is open here ends nowhere. Whether tiers have given back what they had borrowed, within
    /// `wait`.
    pub(crate) fn take_back(&mut self, wait: Duration) -> bool {
        self.fence();
        self.transfers.await_lent(wait)
    }

    /// Begins anew, with all memory [taken back](Self::take_back). Copies from before end with the step behind `step`.
    pub(crate) fn restore(&mut self, step: u64) {
        let later = guard!("cache.restored-transfers-wait", step.saturating_add(1), else 0);
        self.copied.iter_mut().for_each(|copied| copied.fill(later));
        self.completed = step;
    }

    fn fence(&mut self) {
        self.transfers.fence();
        self.waiting.clear();
        self.settled.clear();
        self.dropped.clear();
    }

    pub(crate) fn close(&mut self) {
        self.fence();
        self.transfers = TierTransfers::new(Vec::new(), 0);
    }

    /// Begins the transfers whose copies are complete. One that cannot begin has ended, with nothing right.
    fn begin_ready(&mut self, host: impl Fn(GroupId) -> Arc<dyn HostBlocks>) {
        let Self { completed, transfers, waiting, settled, .. } = self;
        waiting.retain(|(step, transfer)| {
            if guard!("cache.transfers-wait-for-copies", *step > *completed, else false) {
                return true;
            }
            if let Err(error) = transfers.begin(transfer, &host(transfer.group)) {
                tracing::error!(%error, "a transfer of a plan that was not checked");
                settled.push(all_wrong(transfer, BlockFault::Failed));
            }
            false
        });
    }
}

/// What a worker says of a transfer that was not begun. The worker is numbered when it says so.
fn all_wrong(transfer: &Transfer, fault: BlockFault) -> Settled {
    let wrong = (0..transfer.blocks.len() as u32).map(|at| (at, fault)).collect();
    Settled { worker: WorkerId::default(), ticket: transfer.ticket, wrong }
}

/// The host blocks of a group, of all parts as one.
#[derive(Debug)]
struct Pinned {
    parts: Vec<PinnedPart>,
    block_bytes: usize,
    layer_bytes: usize,
}

/// The first so many of the host blocks of a group that are pinned.
pub(crate) fn pinned_memory(parts: &[Part], group: GroupId, blocks: u64) -> Arc<dyn HostBlocks> {
    let parts = parts.iter().map(|part| {
        let mut pinned = part.of(group).pinned_host();
        let slabs = blocks.div_ceil(pinned.blocks_per_slab.max(1) as u64);
        pinned.slabs.truncate(usize::try_from(slabs).unwrap_or(usize::MAX));
        pinned
    });
    Arc::new(Pinned::new(parts.collect()))
}

/// One part's piece of each host block.
#[derive(Debug)]
pub(crate) struct PinnedPart {
    pub(crate) slabs: Vec<Arc<PinnedBuffer>>,
    pub(crate) blocks_per_slab: usize,
    pub(crate) block_bytes: usize,
    pub(crate) layers: usize,
}

impl PinnedPart {
    fn layer_bytes(&self) -> usize {
        self.block_bytes / self.layers.max(1)
    }
}

impl Pinned {
    fn new(parts: Vec<PinnedPart>) -> Self {
        let block_bytes = parts.iter().map(|part| part.block_bytes).sum();
        // Devices with unequal shares of a layer are waited for together.
        let alike = parts.windows(2).all(|pair| pair[0].layer_bytes() == pair[1].layer_bytes());
        let layer_bytes = parts.first().filter(|_| alike).map(PinnedPart::layer_bytes);
        Self { parts, block_bytes, layer_bytes: layer_bytes.unwrap_or(block_bytes) }
    }

    /// Calls `copy` for each piece of a range of a block, with its slab, its offset there, and its range of the
    /// caller's bytes.
    fn each_piece(
        &self,
        block: BlockId,
        offset: usize,
        bytes: usize,
        mut copy: impl FnMut(&Arc<PinnedBuffer>, u64, std::ops::Range<usize>) -> bool,
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

    fn section_bytes(&self) -> usize {
        self.layer_bytes
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        let bytes = into.len();
        self.each_piece(block, offset, bytes, |slab, at, range| {
            slab.read_at(at, &mut into[range]).is_ok()
        })
    }

    fn write(&self, block: BlockId, offset: usize, from: &[u8]) -> bool {
        self.each_piece(block, offset, from.len(), |slab, at, range| {
            slab.write_shared(at, &from[range]).is_ok()
        })
    }

    fn pieces(&self, block: BlockId) -> Vec<HostPiece> {
        let mut pieces = Vec::with_capacity(self.parts.len());
        let all = self.each_piece(block, 0, self.block_bytes, |slab, offset, range| {
            pieces.push(HostPiece { memory: slab.clone(), offset, bytes: range.len() });
            true
        });
        if all { pieces } else { Vec::new() }
    }
}

impl KvWorker {
    /// Begins stores and loads whose copies are complete, lets the tiers below host memory work, and appends the
    /// tickets that have ended, and names that tiers have dropped: what the manager is to
    /// [be told](kv_manager::Manager::settle), before the steps that are [polled](Self::poll) next. To be called
    /// as often as these.
    pub fn poll_transfers(
        &mut self,
        worker: WorkerId,
        settled: &mut Vec<Settled>,
        dropped: &mut Vec<Dropped>,
    ) {
        self.work_tiers();
        self.take_ended(worker, settled, dropped);
    }

    /// Lets the tiers work, and keeps what the manager is to be told.
    pub(crate) fn work_tiers(&mut self) {
        let Self { tiers, parts, .. } = self;
        if tiers.len() == 0 {
            return;
        }
        tiers.begin_ready(|group| pinned_memory(parts, group, u64::MAX));
        tiers.transfers.poll(WorkerId::default(), &mut tiers.settled, &mut tiers.dropped);
    }

    /// Appends what the manager is to be told, which was kept. To be told before the steps that are polled next.
    pub(crate) fn take_ended(
        &mut self,
        worker: WorkerId,
        settled: &mut Vec<Settled>,
        dropped: &mut Vec<Dropped>,
    ) {
        let named = self.tiers.settled.drain(..).map(|of| Settled { worker, ..of });
        settled.extend(named);
        dropped.extend(self.tiers.dropped.drain(..).map(|of| Dropped { worker, ..of }));
    }

    /// What each tier has had since before it was made: what the manager is to be
    /// [told](kv_manager::Manager::take_survivors), once and before everything else.
    pub fn survivors(&mut self, worker: WorkerId) -> Vec<Survivors> {
        self.tiers.transfers.survivors(worker)
    }

    /// What has come to each tier by itself since the last call: what the manager is to be
    /// [told](kv_manager::Manager::take_gained), behind [`poll_transfers`](Self::poll_transfers).
    pub fn gained(&mut self, worker: WorkerId) -> Vec<Gained> {
        self.tiers.transfers.gained(worker)
    }

    /// Stores and loads that have not ended here.
    #[must_use]
    pub fn open_transfers(&self) -> usize {
        self.tiers.transfers.open() + self.tiers.waiting.len()
    }
}
