//! A worker without a device: memory, a copy of the block table, and plans that it carries out later, in
//! order.

use kv_tier::Arrived;

use super::tiers::{HostCells, Loads, faults_of, tiers_of};
use super::truth::{Cell, Facts, Kind, garbage, is_private_to_others, sampled};
use crate::prelude::*;

/// A plan, and what the engine hands a worker with it.
#[derive(Debug)]
pub struct Job {
    pub plan: StepPlan,
    pub lines: Vec<Line>,
    /// Weights of which generation compute the batch.
    pub generation: u64,
    /// The step or one before it fails, so nobody relies on its batch.
    pub void: bool,
    /// The worker that fails in this step.
    pub fails_at: Option<usize>,
    pub scrubs: bool,
    /// Whose each block is that loads bring layer by layer, unless it is nobody's any more.
    pub loads: Vec<Option<u64>>,
}

/// One sequence of a batch.
#[derive(Debug)]
pub struct Line {
    pub key: u64,
    pub facts: Rc<Facts>,
    /// The ids of the step's tokens: known ones, sampled ones and drafts.
    pub ids: Vec<u32>,
    /// The KV of the sequence behind the step.
    pub kv: Vec<u64>,
    /// The first token of the step.
    pub start: u64,
    /// Loads have not ended that the sequence was admitted with.
    pub loading: bool,
    /// Tokens that have KV of the draft model, and those that it computes in the step.
    pub draft_end: u64,
    pub drafts: Range<u64>,
    /// The sequence's blocks of the first group.
    pub blocks: Vec<BlockId>,
    /// Those of the others, at their places.
    pub further: Vec<Vec<Option<BlockId>>>,
}

impl Line {
    /// The sequence's blocks of a group.
    pub fn blocks_of(&self, group: GroupId) -> impl Iterator<Item = BlockId> + '_ {
        let first = self.blocks.iter().copied().filter(move |_| group == GroupId(0));
        let further = usize::from(group.0).checked_sub(1).map(|at| &self.further[at]);
        first.chain(further.into_iter().flatten().copied().flatten())
    }
}

/// What a worker knows of a row of the table.
#[derive(Clone, Debug, Default)]
pub struct RowState {
    key: u64,
    /// Where its last step began.
    pub start: u64,
    end: u64,
    void: bool,
}

#[derive(Debug)]
pub struct Worker {
    index: usize,
    block_tokens: usize,
    pub groups: Vec<GroupSize>,
    /// The device's memory, of each group.
    pub memory: Vec<Vec<Cell>>,
    /// The host's memory, of each group.
    host: Vec<Arc<HostCells>>,
    pub tiers: TierTransfers,
    pub loads: Loads,
    /// Blocks of the first group's that have memory.
    mapped: [usize; 2],
    pub replica: Replica,
    shared: Option<SharedMemory>,
    /// Whose each granule of shared memory is.
    pub owners: Vec<Option<GroupId>>,
    pub rows: Vec<RowState>,
    pub queue: VecDeque<Rc<Job>>,
    /// The last plan that was carried out.
    pub carried: u64,
    /// The last step that the manager was told of.
    pub reported: u64,
    /// Steps that have failed here, of which the manager is to be told.
    pub failed: VecDeque<u64>,
    pub random: Random,
}

impl Worker {
    pub fn new(index: usize, size: &Size, seed: u64) -> Self {
        let mut random = Random::new(mix(seed));
        let groups: Vec<_> = [size.first()].into_iter().chain(size.further.clone()).collect();
        let mut fresh = |group: &GroupSize, blocks: usize| -> Vec<Cell> {
            (0..blocks * group.block_tokens).map(|_| garbage(random.number())).collect()
        };
        let memory = groups.iter().map(|group| fresh(group, group.device)).collect();
        let host = groups
            .iter()
            .map(|group| Arc::new(HostCells::new(group.block_tokens, fresh(group, group.host))));
        let host = host.collect();
        Self {
            index,
            block_tokens: size.block_tokens,
            memory,
            host,
            tiers: tiers_of(size, &mut random),
            loads: Loads::default(),
            mapped: [size.device, size.host],
            replica: replica_of(size, &groups),
            groups,
            shared: size.shared.clone(),
            owners: size
                .shared
                .iter()
                .flat_map(|memory| vec![None; memory.granules as usize])
                .collect(),
            rows: vec![RowState::default(); size.rows],
            queue: VecDeque::new(),
            carried: 0,
            reported: 0,
            failed: VecDeque::new(),
            random,
        }
    }

    /// Makes the moves of a plan: what leaves a group has no content there any more, what comes to one has zeros.
    fn move_granules(&mut self, plan: &StepPlan) {
        let Some(memory) = self.shared.clone() else { return assert!(plan.moves.is_empty()) };
        for one in &plan.moves {
            assert_eq!(self.owners[one.granule as usize], one.from, "{one:?}");
            self.owners[one.granule as usize] = one.to;
            for (group, zeroes) in [(one.from, false), (one.to, true)] {
                let Some(group) = group.map(|group| usize::from(group.0)) else { continue };
                let cells = memory.granule_blocks[group] as usize * self.groups[group].block_tokens;
                let first = one.granule as usize * cells;
                for cell in &mut self.memory[group][first..first + cells] {
                    *cell = if zeroes { 0 } else { garbage(self.random.number()) };
                }
            }
        }
    }

    #[track_caller]
    pub fn check_owned(&self, group: usize, block: BlockId) {
        let at = Location { tier: Tier::Primary, id: block };
        assert!(self.owns(group, at), "block {block} of group {group}: {:?}", self.owners);
    }

    /// Whether a block of a group has memory, as far as that is shared.
    pub fn owns(&self, group: usize, at: Location) -> bool {
        let Some(memory) = self.shared.as_ref().filter(|_| at.tier == Tier::Primary) else {
            return true;
        };
        let granule = at.id.index() / memory.granule_blocks[group] as usize;
        self.owners[granule] == Some(GroupId(group as u16))
    }

    /// Begins with a snapshot, as a worker that was started anew.
    pub fn load(&mut self, snapshot: &Snapshot) {
        let mut bytes = Vec::new();
        snapshot.to_bytes(&mut bytes);
        assert_eq!(Message::from_bytes(&bytes), Ok(Message::Snapshot(snapshot.clone())));
        self.replica.restore(snapshot, &[u64::MAX; 8]).unwrap();
        self.owners.clone_from(&snapshot.granules);
        (self.carried, self.reported) = (snapshot.step, snapshot.step);
    }

    /// Has memory for the first blocks of the device and of the host, and for no others. What comes and
    /// goes has no content.
    pub fn map(&mut self, mapped: [usize; 2]) {
        let before = self.mapped;
        let mut host = self.host[0].lock();
        for (at, cells) in [&mut self.memory[0], &mut *host].into_iter().enumerate() {
            let (first, end) = (before[at].min(mapped[at]), before[at].max(mapped[at]));
            for cell in &mut cells[first * self.block_tokens..end * self.block_tokens] {
                *cell = garbage(self.random.number());
            }
        }
        drop(host);
        self.host[0].map(mapped[1]);
        self.mapped = mapped;
    }

    #[track_caller]
    fn check_mapped(&self, at: Location) {
        let mapped = self.mapped[at.tier.index()];
        assert!(at.id.index() < mapped, "{at:?} has no memory, of which there are {mapped} blocks");
    }

    /// Calls `change` with the cells of a block.
    fn cells<T>(&mut self, group: usize, at: Location, change: impl FnOnce(&mut [Cell]) -> T) -> T {
        if group == 0 {
            self.check_mapped(at);
        }
        if at.tier == Tier::Primary {
            self.check_owned(group, at.id);
        }
        let tokens = self.groups[group].block_tokens;
        let range = at.id.index() * tokens..(at.id.index() + 1) * tokens;
        match at.tier {
            Tier::Primary => change(&mut self.memory[group][range]),
            _ => change(&mut self.host[group].lock()[range]),
        }
    }

    /// Begins the transfers of a plan, whose copies are made.
    fn begin_transfers(&mut self, plan: &StepPlan) {
        let further = self.groups.iter().skip(1).map(|group| group.host as u64);
        let host: Vec<u64> = [self.mapped[1] as u64].into_iter().chain(further).collect();
        self.tiers.check(plan, &host, []).unwrap();
        self.tiers.forget(&plan.forgets);
        for transfer in &plan.transfers {
            let host: Arc<dyn HostBlocks> = self.host[usize::from(transfer.group.0)].clone();
            self.tiers.begin(transfer, &host).unwrap();
            self.loads.begin(transfer);
        }
    }

    /// Copies what loads bring, each cell once it is right, and gives up loads that are late.
    fn copy_layers(&mut self, job: &Job) {
        if job.plan.layer_loads.is_empty() {
            return;
        }
        let at = |tier, id| Location { tier, id };
        let patience = self.random.below(60);
        for turn in 0..=patience {
            let mut waits = false;
            for load in &job.plan.layer_loads {
                let arrived = self.tiers.arrived(load.ticket, load.from);
                let group = usize::from(load.group.0);
                let cells = match arrived {
                    Some(Arrived::Sections(cells)) => cells,
                    // What is wrong is copied, too: nobody relies on it.
                    _ => self.groups[group].block_tokens,
                };
                // The step is over when the manager can be told of all blocks of the ticket.
                waits |= arrived.is_some();
                let from = at(Tier::Secondary, load.from);
                let from = self.cells(group, from, |from| from.to_vec());
                self.cells(group, at(Tier::Primary, load.to), |to| {
                    to[..cells].copy_from_slice(&from[..cells]);
                });
                if waits && turn == patience {
                    self.tiers.give_up(load.ticket);
                }
            }
            self.loads.poll(self.index, &mut self.tiers);
            if !waits {
                break;
            }
        }
        for (load, key) in job.plan.layer_loads.iter().zip(&job.loads) {
            if self.loads.is_wrong(load.ticket, load.from) {
                self.loads.void.extend(key);
            }
        }
    }

    /// Whether a line reads what a load has not brought here.
    fn is_void(&self, line: &Line) -> bool {
        line.loading && self.loads.void.contains(&line.key)
    }

    pub fn cell_of(&self, group: usize, id: BlockId, offset: usize) -> Cell {
        self.check_there(group, id);
        self.memory[group][id.index() * self.groups[group].block_tokens + offset]
    }

    pub fn write_cell(&mut self, group: usize, id: BlockId, offset: usize, cell: Cell) {
        self.check_there(group, id);
        self.memory[group][id.index() * self.groups[group].block_tokens + offset] = cell;
    }

    fn check_there(&self, group: usize, id: BlockId) {
        if group == 0 {
            self.check_mapped(Location { tier: Tier::Primary, id });
        }
        self.check_owned(group, id);
    }

    /// Overwrites a block that nobody uses.
    pub fn poison(&mut self, group: usize, at: Location) {
        let noise = self.random.number();
        self.cells(group, at, |cells| cells.fill(garbage(noise)));
    }

    /// Whether a plan that is not carried out reads or writes a block outside of its batch.
    pub fn moves(&self, group: usize, at: Location) -> bool {
        let group = GroupId(group as u16);
        self.queue.iter().any(|job| {
            let mut copies = job.plan.copies.iter().filter(|copy| copy.group == group);
            let mut scrubs = job.plan.scrubs.iter().filter(|scrub| scrub.group == group);
            let loads = job.plan.layer_loads.iter().filter(|load| load.group == group);
            let mut loads =
                loads.flat_map(|load| [(Tier::Secondary, load.from), (Tier::Primary, load.to)]);
            copies.any(|copy| copy.from == at || copy.to == at)
                || loads.any(|(tier, id)| at == Location { tier, id })
                || at.tier == Tier::Primary && scrubs.any(|scrub| scrub.block == at.id)
        })
    }

    /// Carries out the next plan.
    pub fn carry_out(&mut self) {
        let Some(job) = self.queue.pop_front() else { return };
        // It has come as bytes.
        let plan = &job.plan;
        let mut bytes = Vec::new();
        plan.to_bytes(&mut bytes);
        assert_eq!(Message::from_bytes(&bytes), Ok(Message::Plan(plan.clone())));
        self.move_granules(plan);
        for at in 0..=plan.copies.len() {
            for scrub in plan.scrubs.iter().filter(|scrub| scrub.after as usize == at) {
                let block = Location { tier: Tier::Primary, id: scrub.block };
                self.cells(scrub.group.0.into(), block, |cells| cells.fill(0));
            }
            let Some(copy) = plan.copies.get(at) else { continue };
            let (group, tokens) = (usize::from(copy.group.0), copy.tokens as usize);
            let cells = self.cells(group, copy.from, |cells| cells[..tokens].to_vec());
            self.cells(group, copy.to, |to| to[..tokens].copy_from_slice(&cells));
        }
        self.begin_transfers(plan);
        self.copy_layers(&job);
        let memory = self.groups.iter().map(|group| (group.block_tokens as u32, u64::MAX));
        self.replica.check(plan, &memory.collect::<Vec<_>>()).unwrap();
        assert_eq!(plan.batch.len(), job.lines.len());
        let fails = job.fails_at == Some(self.index);
        if fails {
            self.failed.push_back(plan.step);
        }
        // Of a void step, another worker's batch may be right or not.
        let garbles = fails || job.void && self.random.chance(50);
        if !job.void {
            // All rows read before any writes: no row relies on what another one computes in this step.
            let right = |row: &usize| !self.is_void(&job.lines[*row]);
            (0..job.lines.len()).filter(right).for_each(|row| self.check(&job, row));
        }
        for row in 0..job.lines.len() {
            let garbles = garbles || self.is_void(&job.lines[row]);
            self.compute(&job, row, garbles);
        }
        if job.scrubs && !job.void {
            (0..job.lines.len()).for_each(|row| self.check_scrubbed(&job, row));
        }
        self.carried = plan.step;
    }

    fn entries(&self, row: usize) -> &[TableEntry] {
        self.replica.row(GroupId(0), Row::new(row as u32)).unwrap()
    }

    /// The cell of a token, through the block table.
    fn at(&self, row: usize, at: u64) -> usize {
        let entry = self.entries(row)[at as usize / self.block_tokens];
        let Some(block) = entry.block() else { panic!("token {at} of row {row} has no block") };
        self.check_mapped(Location { tier: Tier::Primary, id: block });
        self.check_owned(0, block);
        block.index() * self.block_tokens + at as usize % self.block_tokens
    }

    /// Checks the table and all that a row reads, before anything of the batch is written.
    fn check(&self, job: &Job, index: usize) {
        let (batch, line) = (&job.plan.batch[index], &job.lines[index]);
        let (row, step) = (batch.row.index(), job.plan.step);
        let worker = self.index;
        let ids: Vec<_> = line.blocks.iter().map(|&id| TableEntry::from(id)).collect();
        let entries = self.entries(row);
        assert_eq!(entries[..ids.len()], ids, "step {step}, row {row}: not the sequence's blocks");
        let behind = &entries[ids.len()..];
        assert!(
            behind.iter().all(|&id| id == TableEntry::NONE),
            "step {step}, row {row}: {behind:?} behind it"
        );
        match batch.start {
            Start::At(start) => assert_eq!(start, line.start, "step {step}, row {row}"),
            Start::Open { resolved, upper } => {
                let state = &self.rows[row];
                assert!(!state.void, "step {step}, row {row} begins where a void step ended");
                assert_eq!(
                    state.key, line.key,
                    "step {step}, row {row} begins where another ended"
                );
                assert_eq!(state.end, line.start, "step {step}, row {row}");
                assert!(resolved <= state.end && state.end <= upper, "step {step}: {batch:?}");
            }
        }
        for at in 0..line.start {
            let expected = line.facts.cell(Kind::Token, at, line.kv[at as usize]) << 8 >> 8;
            let found = line.facts.seen(self.memory[0][self.at(row, at)], at, self.block_tokens);
            assert_eq!(
                found, expected,
                "worker {worker}, step {step}, row {row}, sequence {}: token {at} of {} is \
                 {found:#x}, not {expected:#x}; {batch:?}",
                line.key, line.start
            );
        }
        for group in 1..self.groups.len() {
            self.check_further(group, batch, line, step);
        }
    }

    /// Writes the KV of a row's tokens, each from what the table says lies before it.
    fn compute(&mut self, job: &Job, index: usize, garbles: bool) {
        let (batch, line) = (&job.plan.batch[index], &job.lines[index]);
        let row = batch.row.index();
        let tokens = u64::from(batch.tokens);
        if garbles {
            // It may have begun anywhere that its plan allows.
            let (from, upper) = match batch.start {
                Start::At(start) => (start, start),
                Start::Open { resolved, upper } => (resolved, upper),
            };
            for at in from..upper + tokens {
                let (cell, noise) = (self.at(row, at), self.random.number());
                self.memory[0][cell] = line.facts.cell(Kind::Void, at, noise);
            }
            self.rows[row] = RowState { key: line.key, start: from, end: from, void: true };
            (1..self.groups.len()).for_each(|group| self.garble_further(group, batch, line));
            return;
        }
        (1..self.groups.len()).for_each(|group| self.compute_further(group, job, index));
        let right = line.kv.len() as u64;
        let mut last = 0;
        for (at, &id) in (line.start..).zip(&line.ids) {
            let kind = if at < right { Kind::Token } else { Kind::Draft };
            let before = match at.checked_sub(1) {
                Some(before) => self.memory[0][self.at(row, before)] & ((1 << 40) - 1),
                None => 0,
            };
            let value = line.facts.value(at, before, id, job.generation);
            let cell = self.at(row, at);
            self.memory[0][cell] = line.facts.cell(kind, at, value);
            if !job.void && at < right {
                assert_eq!(value, line.kv[at as usize], "token {at} of sequence {}", line.key);
                last = value;
            }
            if !job.void && at == right {
                assert_ne!(id, sampled(last), "a draft that is right was rejected");
            }
        }
        let start = line.start;
        self.rows[row] = RowState { key: line.key, start, end: right, void: job.void };
    }

    /// Checks that the blocks which a row writes hold nothing of other tenants.
    fn check_scrubbed(&self, job: &Job, index: usize) {
        let (batch, line) = (&job.plan.batch[index], &job.lines[index]);
        let row = batch.row.index();
        let end = line.start + u64::from(batch.tokens);
        for at in end..(line.blocks.len() * self.block_tokens) as u64 {
            let cell = self.memory[0][self.at(row, at)];
            assert!(
                !is_private_to_others(cell, line.facts.tenant, line.facts.salt),
                "step {}, row {row}: token {at} would read {cell:#x} of another tenant",
                job.plan.step
            );
        }
    }
}

fn replica_of(size: &Size, groups: &[GroupSize]) -> Replica {
    let tables = groups.iter().map(|group| (group.kind, group.width as u32));
    let replica = Replica::new(size.rows as u32, tables).unwrap();
    match &size.shared {
        Some(memory) => replica.sharing(memory).unwrap(),
        None => replica,
    }
}

/// How large a further group is.
#[derive(Clone, Copy, Debug)]
pub struct GroupSize {
    pub kind: GroupKind,
    pub block_tokens: usize,
    pub device: usize,
    pub host: usize,
    pub width: usize,
    /// Whether a draft model writes it.
    pub draft: bool,
}

impl GroupSize {
    pub fn is_state(&self) -> bool {
        matches!(self.kind, GroupKind::State { .. })
    }

    pub fn options(&self) -> GroupOptions {
        let pool = PoolConfig {
            secondary_blocks: self.host as u64,
            ..PoolConfig::primary_only(self.device as u64)
        };
        GroupOptions {
            kind: self.kind,
            blocks_per_sequence_max: self.width as u32,
            draft_model: self.draft,
            ..GroupOptions::new(self.block_tokens as u32, pool)
        }
    }
}

/// How large a worker is.
#[derive(Clone, Debug)]
pub struct Size {
    /// Tiers below the host.
    pub tiers: usize,
    /// A small cache with little trouble, for longer.
    pub swaps_much: bool,
    /// Records of each.
    pub records: usize,
    /// What they do wrong, beside the seed.
    pub faults: FaultRules,
    pub block_tokens: usize,
    pub device: usize,
    pub host: usize,
    pub rows: usize,
    pub width: usize,
    /// Groups beside the first.
    pub further: Vec<GroupSize>,
    /// Device memory that the groups share.
    pub shared: Option<SharedMemory>,
}

impl Size {
    pub fn random(random: &mut Random) -> Self {
        let block_tokens = [1, 2, 3, 4, 4, 8][random.index(6)];
        let host = if random.chance(30) { 0 } else { random.from(1, 12) };
        let tiers = if host > 0 && random.chance(60) { random.from(1, 2) as usize } else { 0 };
        // A small cache with little trouble, so that much goes out to the tiers below and comes back.
        let swaps_much = tiers > 0 && random.chance(40);
        let host = if swaps_much { host.min(5) } else { host };
        let device = random.from(6, if swaps_much { 9 } else { 24 });
        let faults = faults_of(random);
        Self {
            tiers,
            swaps_much,
            records: random.from(2, 60) as usize,
            faults,
            block_tokens,
            device: device as usize,
            host: host as usize,
            rows: random.from(2, 6) as usize,
            width: random.from(6, 12) as usize,
            further: Vec::new(),
            shared: None,
        }
    }

    /// Has the groups share their memory, in granules of any size.
    pub fn share(&mut self, random: &mut Random) {
        let groups = self.further.len() + 1;
        let granules = random.from(groups as u64 + 1, 24) as u32;
        let granule_blocks: Vec<_> = (0..groups).map(|_| random.from(1, 4) as u32).collect();
        let devices = [&mut self.device].into_iter();
        let devices = devices.chain(self.further.iter_mut().map(|group| &mut group.device));
        for (device, &blocks) in devices.zip(&granule_blocks) {
            *device = (granules * blocks) as usize;
        }
        self.shared = Some(SharedMemory { granules, granule_blocks });
    }

    pub fn first(&self) -> GroupSize {
        let &Self { block_tokens, device, host, width, .. } = self;
        GroupSize { kind: GroupKind::Full, block_tokens, device, host, width, draft: false }
    }

    /// Tokens of a name.
    pub fn unit(&self) -> usize {
        let further = self.further.iter().map(|group| group.block_tokens);
        further.fold(self.block_tokens, usize::min)
    }

    pub fn has_state(&self) -> bool {
        self.further.iter().any(GroupSize::is_state)
    }

    pub fn has_draft_model(&self) -> bool {
        self.further.iter().any(|group| group.draft)
    }

    /// The most drafts of a step.
    pub fn drafts_max(&self) -> u64 {
        let max = self.further.iter().filter_map(|group| match group.kind {
            GroupKind::State { drafts, .. } => Some(u64::from(drafts)),
            _ => None,
        });
        max.min().unwrap_or(4)
    }

    /// Blocks of a tier.
    pub fn of(&self, tier: Tier) -> u64 {
        match tier {
            Tier::Primary => self.device as u64,
            _ => self.host as u64,
        }
    }
}
