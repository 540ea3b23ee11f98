//! The half of a cache that carries out plans: memory, tables, copies and streams of the devices of one
//! process.

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_driver::{DeviceError, Fence, Stream, guard};
use cuda_vmm::{EpochGate, Lease};
use kv_kernels::{BlockPair, PagedKv, link::HostDirection};
use kv_manager::{
    BlockCopy, BlockScrub, Checked, GroupId, Outcome, PlanError, Replica, Snapshot, StepPlan,
    WorkerId,
};
use kv_pool::{BlockId, Tier};
use kv_stage::{BatchStep, error::BatchError};
use smallvec::SmallVec;

use crate::awaited::Awaited;
use crate::group::GroupPart;
use crate::layers::OpenLayers;
use crate::part::Part;
use crate::runs::{COMPUTE, Kind, Runs};
use crate::shares::{Share, shares};
use crate::steps::check_tokens;
use crate::tiers::{WorkerTiers, check_rank};
use crate::{
    BuildError, CloseError, CloseErrors, GranuleError, GroupOptions, KvCacheOptions, OptionsError,
    StepError, TransportStats, WayBytes,
};

/// Carries out the plans of a [`Manager`](kv_manager::Manager) on the devices of this process.
///
/// A [`KvCache`](crate::KvCache) has one of its own. An engine whose scheduler runs in another process
/// makes one in each of its worker processes, sends it the plans as bytes, and sends the completions
/// back.
///
/// # Ordering
/// For each plan, in their order: [`carry_out`](Self::carry_out), the engine's work on the compute streams
/// of [`parts`](Self::parts), [`finish`](Self::finish). Later, [`poll`](Self::poll) or
/// [`wait`](Self::wait) says which steps are complete.
#[derive(Debug)]
pub struct KvWorker {
    pub(crate) options: KvCacheOptions,
    /// Its number, and how many there are.
    pub(crate) rank: (WorkerId, u16),
    /// Dropped before the leases below, so that memory in use stays mapped.
    pub(crate) parts: Vec<Part>,
    /// # Invariants
    /// A lease, or its fences, covers all work that may use the parts' memory, of steps and of
    /// copies.
    pub(crate) gate: EpochGate,
    /// The block tables of a manager in another process; none where that of this process has them.
    table: Replica,
    /// The step of the last plan that was carried out.
    latest: u64,
    /// The step whose work is being enqueued, with the lease that covers it.
    open: Option<(u64, Lease)>,
    /// Steps that were not yet seen to complete, oldest first.
    pub(crate) in_flight: VecDeque<InFlight>,
    /// The last step that was seen to complete, with all work before it.
    completed: u64,
    /// Fences after copies that no step in flight has taken over yet.
    arrived: Vec<Fence>,
    /// Of each group, copies and scrubs of the open step that are not enqueued yet, or not on all devices.
    runs: Vec<Runs>,
    /// Granules of shared memory that groups have got, and that may not be mapped for them yet.
    unmapped: Vec<(GroupId, u32)>,
    /// Whether every granule is given anew by the next plan, to whoever has it then, because plans were missed.
    gives_all: bool,
    /// Held while copies are enqueued and not all have a fence after them.
    pub(crate) copies: Option<Lease>,
    /// Of each group, blocks of copies that the compute streams do not wait for yet.
    pub(crate) awaited: Vec<Awaited>,
    /// Of whole blocks. What tiers below host memory have moved is not counted here.
    pub(crate) ways: WayBytes,
    pub(crate) tiers: WorkerTiers,
    pub(crate) layers: OpenLayers,
    /// Of each group, bytes of a block on all devices.
    block_bytes: Vec<u64>,
}

/// A step whose work is enqueued, with a fence after it on every device, and fences of copies before it.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) step: u64,
    pub(crate) fences: SmallVec<[Fence; 4]>,
    outcome: Outcome,
}

impl KvWorker {
    /// Memory, tables and streams for `options`, on the devices of `compute`, one stream each; see
    /// [`KvCache::new`](crate::KvCache::new). No block has memory before [`grow_to`](Self::grow_to).
    ///
    /// `rank` is the worker's number and how many there are: what one stores below the host is not found by another one.
    ///
    /// # Errors
    /// [`BuildError`]; nothing stays allocated.
    #[track_caller]
    pub fn new(
        compute: &[Stream],
        options: KvCacheOptions,
        rank: (WorkerId, u16),
    ) -> Result<Self, BuildError> {
        Self::with_memory(compute, None, options, rank)?.of_another_process()
    }

    /// The same over tensors that the engine allocated; see [`KvCache::over`](crate::KvCache::over).
    ///
    /// # Errors
    /// [`BuildError`]; nothing stays allocated.
    #[track_caller]
    pub fn over(
        compute: &[Stream],
        tensors: Vec<PagedKv>,
        options: KvCacheOptions,
        rank: (WorkerId, u16),
    ) -> Result<Self, BuildError> {
        Self::with_memory(compute, Some(tensors), options, rank)?.of_another_process()
    }

    /// The same with block tables of its own, as its manager's plans say.
    fn of_another_process(mut self) -> Result<Self, BuildError> {
        let groups = &self.options.groups;
        let groups = groups.iter().map(|group| (group.kind, group.blocks_per_sequence_max));
        let mut table = Replica::new(self.options.sequences_max, groups)?;
        if let Some(memory) = &self.options.shared {
            table = table.sharing(memory)?;
        }
        let drafts = self.options.numbered().filter(|(_, group)| group.draft_model);
        self.table = table.drafting(drafts.map(|(id, _)| id));
        Ok(self)
    }

    /// Without tables: it carries out what this process's own manager decides.
    #[track_caller]
    pub(crate) fn with_memory(
        compute: &[Stream],
        adopted: Option<Vec<PagedKv>>,
        options: KvCacheOptions,
        rank: (WorkerId, u16),
    ) -> Result<Self, BuildError> {
        let _site = cuda_driver::site::enter();
        guard!("cache.ranks-are-below-their-number", check_rank(rank)?);
        options.check(compute.len())?;
        // The plans may come from a manager in another process.
        options.manager().check()?;
        guard!("cache.devices-are-given-once", check_devices(&options, compute)?);
        check_placed(&options, compute)?;
        if adopted.is_some() && options.shared.is_some() {
            return Err(OptionsError::SharedAdopted.into());
        }
        let built = Self::build(compute, adopted, options, rank);
        if built.is_err() {
            for stream in compute {
                // An error here would hide the first one; the driver crate logs it.
                let _ = stream.device().free_retired();
            }
        }
        built
    }

    /// `options` has been checked.
    fn build(
        compute: &[Stream],
        adopted: Option<Vec<PagedKv>>,
        options: KvCacheOptions,
        rank: (WorkerId, u16),
    ) -> Result<Self, BuildError> {
        // See the invariant of `gate`.
        let gate = EpochGate::for_all_uses();
        let shares = shares_of_parts(&options, compute.len());
        let groups = &options.groups;
        if let Some(given) = &adopted {
            check_adopted(given, compute, &shares)?;
        }
        let mut adopted = adopted.map(Vec::into_iter);
        let pinning = options.pinning.of_one(shares.len() * groups.len());
        let mut parts = shares
            .into_iter()
            .map(|shares| {
                let adopted = adopted.as_mut().map(|all| all.take(groups.len()).collect());
                let compute = &compute[shares[0].device];
                Part::new(compute, shares, &options, (&gate, adopted), pinning)
            })
            .collect::<Result<Vec<_>, _>>()?;
        parts.iter_mut().try_for_each(|part| part.map_fixed(&options))?;
        // Last, because the driver's calls wait for it.
        for part in &mut parts {
            part.groups.iter_mut().try_for_each(|group| group.host.start())?;
        }
        let devices = compute.len().max(1) as u64;
        let layouts: Vec<_> = parts.iter().map(|part| part.host_format()).collect();
        let tiers = WorkerTiers::new(&options, &layouts.join(";"), (rank.0.0, rank.1));
        Ok(Self {
            parts,
            gate,
            table: Replica::default(),
            latest: 0,
            open: None,
            in_flight: VecDeque::with_capacity(options.overlap_depth as usize + 2),
            completed: 0,
            arrived: Vec::new(),
            runs: runs_of(groups, devices),
            unmapped: Vec::new(),
            gives_all: false,
            copies: None,
            awaited: groups.iter().map(|of| Awaited::new(of.device_blocks as usize)).collect(),
            ways: WayBytes::default(),
            tiers,
            layers: OpenLayers::default(),
            block_bytes: groups.iter().map(|of| of.shape.block_bytes()).collect(),
            rank,
            options,
        })
    }

    /// The options that it was built with.
    #[must_use]
    pub fn options(&self) -> &KvCacheOptions {
        &self.options
    }

    /// The devices' parts of the cache, in the order of the devices. A device without layers has no
    /// part.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Blocks of a group with memory on every device. Those of further groups have it from the start, as far as
    /// there is any.
    #[must_use]
    pub fn ready_blocks(&self, group: GroupId) -> u64 {
        let Some(options) = self.options.groups.get(usize::from(group.0)) else { return 0 };
        let ready = self.parts.iter().filter_map(|part| part.groups.get(usize::from(group.0)));
        let ready = ready.map(GroupPart::ready_blocks);
        let ready = guard!("cache.blocks-are-ready-on-all", ready.min(), else ready.max());
        let ready = ready.unwrap_or(0);
        ready.min(options.device_blocks.into())
    }

    /// Maps memory under the first `blocks` blocks of every device, or under as many as there is memory
    /// for; how many have memory then.
    ///
    /// # Errors
    /// [`GrowError`](cuda_vmm::GrowError) if the driver refuses though memory is left.
    #[track_caller]
    pub fn grow_to(&mut self, blocks: u64) -> Result<u64, cuda_vmm::GrowError> {
        let _site = cuda_driver::site::enter();
        self.grow_parts(blocks.min(self.options.first().device_blocks.into()))
    }

    /// Batches and blocks enqueued between the devices and host memory, by way, summed over the
    /// devices.
    #[must_use]
    pub fn transports(&self) -> TransportStats {
        let mut all = TransportStats::default();
        self.parts.iter().for_each(|part| {
            part.groups.iter().for_each(|group| all.add(&group.transports));
        });
        all
    }

    /// Bytes of the copies between the devices and host memory that plans have asked for.
    #[must_use]
    pub fn copied_bytes(&self) -> u64 {
        self.ways.device_to_host + self.ways.host_to_device
    }

    /// Takes the place that a snapshot describes: its plans come next. The memory of the blocks has no
    /// content for them.
    ///
    /// # Ordering
    /// Of steps that are in flight or open, nothing is told any more, since their numbers are not the
    /// snapshot's: the next step is complete after their work. Their copies that were refused are forgotten.
    ///
    /// # Errors
    /// [`StepError::Plan`] for a snapshot of another table, or one that names blocks which do not exist.
    /// [`StepError::Lent`] when a tier below host memory still reads or writes blocks by itself; the call can be made
    /// again. [`StepError::Device`] when no event could be recorded after the work of the open step; the call can
    /// be made again.
    #[track_caller]
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), StepError> {
        let _site = cuda_driver::site::enter();
        let device: SmallVec<[_; 4]> =
            self.options.groups.iter().map(|of| of.device_blocks.into()).collect();
        // Taken on before anything of the steps before is given up: a snapshot that is refused means nothing.
        let mut table = self.table.clone();
        guard!("cache.refused-snapshots-change-nothing", table.restore(snapshot, &device)?, else {
            self.in_flight.clear();
            table.restore(snapshot, &device)?
        });
        // Before another manager gives the blocks to others.
        let waited = self.options.tiers.rules.wait_max;
        let is_back = self.tiers.take_back(waited);
        if !guard!("cache.restoring-waits-for-lent-memory", is_back, else true) {
            return Err(StepError::Lent { waited });
        }
        self.runs.iter_mut().for_each(Runs::clear);
        self.forget_sent();
        self.layers.clear();
        // Nothing is enqueued that would use them, and the next plan gives all anew.
        guard!("cache.restoring-maps-nothing", self.unmapped.clear());
        self.leave(Outcome::Failed)?;
        let before = guard!("cache.restoring-ends-steps", 0, else self.in_flight.len());
        self.arrived.extend(self.in_flight.drain(before..).flat_map(|step| step.fences));
        // Steps before the snapshot are complete with the first one behind it.
        self.completed = guard!("cache.restored-copies-wait-for-work", 0, else snapshot.step);
        self.tiers.restore(snapshot.step);
        self.table = table;
        if self.options.shared.is_some() {
            // Plans that were missed may have given any granule to another group, and back: what copies have left
            // there, and work, is overwritten before the next plan's.
            self.fence_copies([true; 2])?;
            self.awaited.iter_mut().for_each(|awaited| (0..2).for_each(|lane| awaited.clear(lane)));
            self.gives_all = guard!("cache.restored-granules-are-the-next-plans", true, else {
                let owned = self.table.granules().iter().zip(0..);
                let owned: Vec<_> = owned.filter_map(|(owner, at)| Some(((*owner)?, at))).collect();
                owned.into_iter().for_each(|(group, granule)| self.give(group, granule));
                false
            });
        }
        let row_of = |group, row| self.table.row(group, row).unwrap_or_default();
        Ok(self.parts.iter_mut().try_for_each(|part| part.write_table(row_of))?)
    }

    /// Carries out a plan, up to its batch: changes the block table, enqueues copies and scrubs, and sends
    /// each device the batch, and the arrays that `add` sets. They lie in the parts'
    /// [`batch`](Part::batch).
    ///
    /// `add` is called once for each part, with its index, while the part's device is
    /// [kept current](cuda_driver::Device::while_current).
    ///
    /// # Ordering
    /// Waits on the host if the plan names host blocks that are still to be pinned, and if every staging
    /// buffer is still being read, which does not happen while no more than `overlap_depth` steps are in
    /// flight. Work that is enqueued on the compute streams after this call finds the arrays, and the
    /// blocks of the batch, in place. A copy waits for the copies that touch one of its blocks and, where the
    /// plan names a step that [may still write](BlockCopy::written_by) what it reads, for the work so far;
    /// the work waits for the copies that touch one of the batch's blocks. Whole blocks are copied, also where
    /// the plan asks for their first tokens.
    ///
    /// # Errors
    /// [`StepError::Plan`] for a plan that does not follow the last one or names what is not there, or host
    /// memory whose pinning was refused, and [`BatchError::Tokens`] for more than
    /// [`step_tokens_max`](KvCacheOptions::step_tokens_max) tokens, of the model or of the draft model: nothing has changed then,
    /// but that the step before this one is over.
    /// A plan that is missing cannot be made up for: the manager sends a [snapshot](Self::restore). After another error the step counts as
    /// failed: finish it as others, which enqueues the copies that were not enqueued. The next call sends the
    /// changes of the table. A step before this one that was neither finished nor can be ended now refuses
    /// the call: [`finish`](Self::finish) it, and make the call again.
    #[track_caller]
    pub fn carry_out<F>(&mut self, plan: &StepPlan, add: F) -> Result<(), StepError>
    where
        F: FnMut(usize, &mut BatchStep<'_>) -> Result<(), BatchError>,
    {
        let _site = cuda_driver::site::enter();
        self.check(plan)?;
        for batch in [&plan.batch, &plan.draft_batch] {
            let tokens = batch.iter().map(|row| u64::from(row.tokens));
            guard!(
                "cache.plans-fit-their-step",
                check_tokens(self.options.step_tokens_max, tokens)?
            );
        }
        guard!("cache.plans-wait-for-pinning", self.check_pinned(plan)?);
        // Of a step that is open, nobody has said that its work is enqueued.
        self.leave(Outcome::Failed)?;
        let memory = self.options.numbered();
        let memory: SmallVec<[_; 4]> =
            memory.map(|(id, of)| (of.shape.block_tokens(), self.ready_blocks(id))).collect();
        let mut lent = LentTable { table: std::mem::take(&mut self.table), worker: self };
        let plan = lent.table.check(plan, &memory)?;
        lent.worker.enqueue(plan, add)
    }

    /// The same for a plan of this process's own manager, which tells no lies.
    pub(crate) fn carry_out_own<F>(&mut self, plan: Checked<'_>, add: F) -> Result<(), StepError>
    where
        F: FnMut(usize, &mut BatchStep<'_>) -> Result<(), BatchError>,
    {
        self.leave(Outcome::Failed)?;
        // What a plan that was not carried out has changed would be missing for good.
        plan.check_follows(self.latest)?;
        self.enqueue(plan, add)
    }

    fn enqueue<F>(&mut self, plan: Checked<'_>, mut add: F) -> Result<(), StepError>
    where
        F: FnMut(usize, &mut BatchStep<'_>) -> Result<(), BatchError>,
    {
        self.latest = plan.step;
        self.open = Some((plan.step, self.gate.lease()));
        // First, because nothing refuses it: what is decided is done, whatever comes of the batch.
        self.decide_moves(plan);
        self.decide(&plan);
        self.tiers.take(&plan);
        self.layers.take(&plan, self.options.groups.iter().map(|of| of.shape.layers()));
        for part in &mut self.parts {
            part.edit(plan)?;
        }
        self.send_copies()?;
        self.await_copies(plan)?;
        for (index, part) in self.parts.iter_mut().enumerate() {
            part.stage(&plan, |step| add(index, step))?;
        }
        Ok(())
    }

    /// Checks a plan against the last one, the table and the tiers.
    fn check(&self, plan: &StepPlan) -> Result<(), PlanError> {
        plan.check_follows(self.table.step())?;
        let groups = &self.options.groups;
        self.tiers.check(plan)?;
        let blocks = |of: &GroupOptions| [of.device_blocks, of.host_blocks].map(u64::from);
        let blocks: SmallVec<[_; 4]> = groups.iter().map(blocks).collect();
        plan.check_blocks(&blocks)?;
        (0..groups.len()).try_for_each(|group| self.check_ready(GroupId(group as u16), plan))
    }

    /// Checks that what is copied or scrubbed of a group has memory. Ids in a row may have none any more.
    fn check_ready(&self, group: GroupId, plan: &StepPlan) -> Result<(), PlanError> {
        let copies = plan.copies.iter().filter(|copy| copy.group == group);
        let ends = copies.flat_map(|copy| [copy.from, copy.to]);
        let ids = ends.filter(|end| end.tier == Tier::Primary).map(|end| end.id);
        let scrubs = plan.scrubs.iter().filter(|scrub| scrub.group == group);
        let loads = plan.layer_loads.iter().filter(|load| load.group == group);
        let ids = ids.chain(scrubs.map(|scrub| scrub.block)).chain(loads.map(|load| load.to));
        let (step, tier, blocks) = (plan.step, Tier::Primary, self.ready_blocks(group));
        let is_beyond = |id: &BlockId| guard!("cache.plans-name-memory", id.index() as u64 >= blocks, else false);
        match ids.max().filter(is_beyond) {
            Some(id) => Err(PlanError::Block { step, tier, id, blocks }),
            None => Ok(()),
        }
    }

    fn forget_sent(&mut self) {
        let groups = self.parts.iter_mut().flat_map(|part| &mut part.groups);
        groups.for_each(|group| group.sent.clear());
    }

    /// Takes in which groups have got granules of shared memory.
    fn decide_moves(&mut self, plan: Checked<'_>) {
        if std::mem::take(&mut self.gives_all) {
            // Once each: zeros for an owner before this plan would fall on what the plan brings for the next one.
            let granules = self.options.shared.as_ref().map_or(0, |shared| shared.granules);
            let owned = (0..granules).filter_map(|granule| Some((plan.owner(granule)?, granule)));
            owned.for_each(|(group, granule)| self.give(group, granule));
            return;
        }
        for one in &plan.moves {
            // Only the last owner uses it in this plan.
            let owner = plan.owner(one.granule);
            if let Some(group) = owner.filter(|_| one.to == owner) {
                self.give(group, one.granule);
            }
        }
    }

    /// Has a granule mapped for a group, and zeroed before anything else is done to its blocks.
    fn give(&mut self, group: GroupId, granule: u32) {
        let Some(memory) = &self.options.shared else { return };
        let index = usize::from(group.0);
        let Some(&blocks) = memory.granule_blocks.get(index) else { return };
        self.unmapped.push((group, granule));
        let first = granule * blocks;
        for block in (first..first + blocks).filter_map(BlockId::new) {
            let pair = BlockPair { source: block, destination: block };
            guard!("cache.granules-are-zeroed", self.runs[index].push(Kind::Scrub, false, pair));
        }
    }

    /// Maps the granules that groups have got, on every device.
    fn map_granules(&mut self) -> Result<(), GranuleError> {
        for &(group, granule) in &self.unmapped {
            self.parts.iter_mut().try_for_each(|part| part.map_granule(group, granule))?;
        }
        self.unmapped.clear();
        Ok(())
    }

    /// Takes in the copies and scrubs of a plan, in their order. Those of the plans before were sent.
    fn decide(&mut self, plan: &StepPlan) {
        let mut scrubs = plan.scrubs.iter().peekable();
        let pair = |source: BlockId, destination: BlockId| BlockPair { source, destination };
        for at in 0..=plan.copies.len() {
            while let Some(&BlockScrub { group, block, .. }) =
                scrubs.next_if(|scrub| scrub.after as usize <= at)
            {
                self.runs[usize::from(group.0)].push(Kind::Scrub, false, pair(block, block));
            }
            let Some(&BlockCopy { group, from, to, written_by, .. }) = plan.copies.get(at) else {
                break;
            };
            let group = usize::from(group.0);
            let (kind, way) = match (from.tier, to.tier) {
                (Tier::Primary, Tier::Primary) => (Kind::Within, &mut self.ways.copy_on_write),
                (Tier::Primary, _) => {
                    (Kind::Carry(HostDirection::ToHost), &mut self.ways.device_to_host)
                }
                _ => (Kind::Carry(HostDirection::ToPages), &mut self.ways.host_to_device),
            };
            *way += self.block_bytes[group];
            self.tiers.note_copy(plan.step, group, [from, to]);
            if let Kind::Carry(direction) = kind {
                let block = if direction == HostDirection::ToHost { from.id } else { to.id };
                self.awaited[group].note(kind.lane(), block.index());
            }
            // What is complete on the devices is not waited for.
            let is_open = written_by > self.completed;
            let behind_work = guard!("cache.copies-come-behind-work", is_open, else false);
            self.runs[group].push(kind, behind_work, pair(from.id, to.id));
        }
    }

    fn hold_for_copies(&mut self) {
        self.copies.get_or_insert_with(|| self.gate.lease());
    }

    /// Maps the granules that groups have got, and enqueues the decided copies, on every device in the order of the decisions. After a refusal,
    /// copies that a device has already been sent are not sent to it again.
    pub(crate) fn send_copies(&mut self) -> Result<(), StepError> {
        self.map_granules()?;
        if self.runs.iter().all(Runs::is_empty) {
            return Ok(());
        }
        // Taken before the first copy, so that copies which are enqueued in part are waited for
        // too. What is done on the compute streams is covered by the step's own lease.
        if self.runs.iter().flat_map(Runs::as_slice).any(|run| run.kind.lane() != COMPUTE) {
            guard!("cache.copies-hold-a-lease", self.hold_for_copies());
        }
        for (group, runs) in self.runs.iter().enumerate().filter(|(_, runs)| !runs.is_empty()) {
            self.parts.iter_mut().try_for_each(|part| part.send(group, runs.as_slice()))?;
        }
        self.forget_sent();
        self.runs.iter_mut().for_each(Runs::clear);
        Ok(())
    }

    /// Makes the compute streams wait for the copies that touch blocks of the batch. The gate keeps fences
    /// of all copies, because no step covers them yet.
    fn await_copies(&mut self, plan: Checked<'_>) -> Result<(), StepError> {
        let mut needed = [false; 2];
        for part in &self.parts {
            for (needed, unawaited) in needed.iter_mut().zip(part.streams.unawaited()) {
                *needed |= unawaited;
            }
        }
        if needed != [false; 2] {
            let mut here = [false; 2];
            for (awaited, group) in self.awaited.iter().zip(self.options.numbered()) {
                let found = awaited.of_batch(plan, group);
                here = std::array::from_fn(|lane| here[lane] || found[lane]);
            }
            needed = std::array::from_fn(|lane| needed[lane] && here[lane]);
        }
        self.fence_copies(needed)?;
        for lane in (0..needed.len()).filter(|&lane| needed[lane]) {
            self.awaited.iter_mut().for_each(|awaited| awaited.clear(lane));
        }
        Ok(())
    }

    /// Records fences after all copies that have none yet, and makes the compute streams wait for the copies
    /// of the directions in `needed`.
    pub(crate) fn fence_copies(&mut self, needed: [bool; 2]) -> Result<(), DeviceError> {
        for part in &mut self.parts {
            part.fence_copies(needed, &mut self.arrived)?;
        }
        if let Some(lease) = self.copies.take() {
            guard!(
                "cache.gates-know-copies",
                drop(lease.submitted(&self.arrived)),
                else drop(lease)
            );
        }
        Ok(())
    }

    /// Says that the engine's work for the last plan is enqueued on the compute streams, or that it is not
    /// ([`Outcome::Failed`]): what its batch computes is void then.
    ///
    /// Copies of the plan that were refused are enqueued first: a step is not complete before its copies
    /// are.
    ///
    /// # Errors
    /// [`StepError::HostCopy`] when copies are refused again, [`StepError::Device`] when no event could be
    /// recorded after the work. The call can be made again.
    #[track_caller]
    pub fn finish(&mut self, outcome: Outcome) -> Result<(), StepError> {
        let _site = cuda_driver::site::enter();
        self.leave(outcome)
    }

    fn leave(&mut self, outcome: Outcome) -> Result<(), StepError> {
        if self.open.is_none() {
            return Ok(());
        }
        guard!("cache.copies-end-before-steps", self.send_copies()?);
        let all_waited = self.end_layers()?;
        let waited = guard!("cache.unwaited-layers-fail", all_waited, else true);
        let outcome = if waited { outcome } else { Outcome::Failed };
        self.fence_copies([false; 2])?;
        let recorded = self.parts.iter_mut().map(|part| part.streams.fence_after(COMPUTE));
        let mut fences = recorded.collect::<Result<SmallVec<[_; 4]>, DeviceError>>()?;
        let Some((step, lease)) = self.open.take() else { return Ok(()) };
        self.layers.clear();
        // The fences are of the parts' devices. A lease that is refused counts as dropped.
        drop(lease.submitted(&fences));
        // Blocks that these copies read or write are handed out again when the step is complete.
        let arrived = self.arrived.drain(..);
        guard!("cache.copies-fences-come-back", fences.extend(arrived), else drop(arrived));
        self.in_flight.push_back(InFlight { step, fences, outcome });
        Ok(())
    }

    /// Steps that were finished and not yet seen to complete.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The oldest step in flight, if it is complete on all devices, and what came of it.
    ///
    /// # Errors
    /// [`DeviceError`], the sticky error if work has failed.
    pub fn poll(&mut self) -> Result<Option<(u64, Outcome)>, DeviceError> {
        let Some(oldest) = self.in_flight.front() else { return Ok(None) };
        for fence in &oldest.fences {
            if !fence.is_complete()? {
                return Ok(None);
            }
        }
        Ok(self.take_oldest())
    }

    /// The same, after waiting on the host for the oldest step; `None` if no step is in flight.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    #[track_caller]
    pub fn wait(&mut self) -> Result<Option<(u64, Outcome)>, DeviceError> {
        let _site = cuda_driver::site::enter();
        let Some(oldest) = self.in_flight.front() else { return Ok(None) };
        for fence in &oldest.fences {
            guard!("cache.steps-wait-for-fences", fence.wait()?);
        }
        Ok(self.take_oldest())
    }

    pub(crate) fn has_failed(&self) -> bool {
        let failed = self.in_flight.iter().any(|step| step.outcome == Outcome::Failed);
        guard!("cache.failed-steps-end-first", failed, else false)
    }

    fn take_oldest(&mut self) -> Option<(u64, Outcome)> {
        let InFlight { step, fences, outcome } = self.in_flight.pop_front()?;
        self.completed = step;
        self.tiers.note_completed(step);
        fences.into_iter().for_each(|fence| self.keep_spare(fence));
        Some((step, outcome))
    }

    /// Keeps a fence that has completed, for its event to be recorded again.
    fn keep_spare(&mut self, fence: Fence) {
        // Two parts may be on one device: the one with fewer spares gets it.
        let on_device = |part: &&mut Part| part.device() == fence.device();
        let parts = self.parts.iter_mut().filter(on_device);
        if let Some(part) = parts.min_by_key(|part| part.streams.spare_count()) {
            part.streams.keep_spare(fence);
        }
    }

    /// Waits for all devices and releases everything: mappings, addresses, physical and pinned memory.
    ///
    /// # Ordering
    /// Waits on the host for the compute and transfer streams.
    ///
    /// # Errors
    /// Every refused call, of every device. With a device that cannot be waited for, the worker is dropped
    /// instead.
    #[track_caller]
    pub fn close(self) -> Result<(), CloseErrors> {
        let _site = cuda_driver::site::enter();
        // What is left of it is dropped before the place ends; an argument would be after it.
        let mut worker = self;
        // Ends the threads of tiers, which may hold pinned memory.
        worker.tiers.close();
        // All devices first: their work shares one gate.
        let restless: Vec<_> = worker
            .parts
            .iter()
            .filter(|part| !part.streams.come_to_rest())
            .map(|part| CloseError::NotAtRest { ordinal: part.device().ordinal() })
            .collect();
        if !restless.is_empty() {
            return Err(restless.into());
        }
        // Leases of copies and of an open step have no fence after their work: with them dropped, each part
        // waits for all work of its device before it unmaps anything.
        (worker.copies, worker.open) = (None, None);
        let errors: Vec<_> = worker.parts.into_iter().flat_map(Part::close).collect();
        if errors.is_empty() { Ok(()) } else { Err(errors.into()) }
    }
}

/// A worker without its block tables, which it has back behind a call that reads both, also when the engine's part of the
/// call panics.
struct LentTable<'a> {
    table: Replica,
    worker: &'a mut KvWorker,
}

impl Drop for LentTable<'_> {
    fn drop(&mut self) {
        let table = std::mem::take(&mut self.table);
        guard!("cache.panics-leave-the-tables", self.worker.table = table, else {
            if !std::thread::panicking() {
                self.worker.table = table;
            }
        });
    }
}

/// Checks that the streams are of one driver, and each of a device of its own, unless the options say otherwise.
fn check_devices(options: &KvCacheOptions, compute: &[Stream]) -> Result<(), OptionsError> {
    // By address: one driver's table of methods may exist twice.
    let driver = |stream: &Stream| Arc::as_ptr(stream.device().driver()).addr();
    let ordinal = |stream: &Stream| stream.device().ordinal();
    for (position, stream) in compute.iter().enumerate() {
        if driver(stream) != driver(&compute[0]) {
            return Err(OptionsError::TwoDrivers { position });
        }
        let before = compute[..position].iter().position(|of| ordinal(of) == ordinal(stream));
        if let Some(first) = before.filter(|_| !options.parts_share_devices) {
            let ordinal = ordinal(stream);
            return Err(OptionsError::DeviceTwice { first, second: position, ordinal });
        }
    }
    Ok(())
}

/// Checks that the placement is for these devices.
fn check_placed(options: &KvCacheOptions, compute: &[Stream]) -> Result<(), OptionsError> {
    let Some(placement) = &options.placement else { return Ok(()) };
    for (position, (gpu, stream)) in placement.gpus().iter().zip(compute).enumerate() {
        if gpu.uuid != stream.device().info().uuid {
            return Err(OptionsError::PlacedElsewhere { position });
        }
    }
    Ok(())
}

/// The shares of each device that has layers, of every group.
fn shares_of_parts(options: &KvCacheOptions, devices: usize) -> Vec<Vec<Share>> {
    let mut all: Vec<Vec<Share>> = Vec::new();
    for group in &options.groups {
        // Several groups have layers on every device: a placement is of one.
        let shares = shares(options, group, devices);
        all.resize_with(shares.len(), Vec::new);
        all.iter_mut().zip(shares).for_each(|(part, share)| part.push(share));
    }
    all
}

fn runs_of(groups: &[GroupOptions], devices: u64) -> Vec<Runs> {
    groups.iter().map(|group| Runs::of(group.shape.block_bytes() / devices)).collect()
}

/// Checks that there is a description for each device with layers and each group, of memory there.
fn check_adopted(
    given: &[PagedKv],
    compute: &[Stream],
    shares: &[Vec<Share>],
) -> Result<(), OptionsError> {
    let (given_parts, expected) = (given.len(), shares.iter().map(Vec::len).sum());
    if given_parts != expected {
        return Err(OptionsError::AdoptedParts { given: given_parts, expected });
    }
    for (position, (paged, share)) in given.iter().zip(shares.iter().flatten()).enumerate() {
        if paged.device() != compute[share.device].device() {
            return Err(OptionsError::AdoptedElsewhere { position });
        }
    }
    // The tensors of one description are apart. Addresses of two devices differ.
    let extents = given.iter().enumerate().flat_map(|(position, paged)| {
        let bytes = paged.extent_bytes();
        paged.tensors().iter().map(move |tensor| (tensor.address(), bytes, position))
    });
    let mut extents: Vec<_> = extents.collect();
    extents.sort_unstable();
    for pair in extents.windows(2) {
        let [(start, bytes, first), (address, _, second)] = *pair else { continue };
        if guard!("cache.tensors-are-apart", address - start < bytes, else false) {
            return Err(OptionsError::AdoptedOverlap { first, second, address });
        }
    }
    Ok(())
}
