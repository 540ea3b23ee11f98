//! An engine that calls the manager in every order it allows, with workers that lag behind.

use kv_pool::store::{StoreByEvidence, StoreRules};

use super::foreign::Foreign;
use super::mirror::Mirror;
use super::run::{Failures, Run, blocks_of};
use super::tiers::lower_options;
use super::transfers::{Arrival, Departure};
use super::truth::Ideal;
use super::worker::{GroupSize, Job, Line, Size, Worker};
use crate::prelude::*;

/// A request that is not admitted yet.
#[derive(Debug)]
pub struct Wish {
    pub request: Request,
    pub ideal: Ideal,
}

/// A worker that is lost.
#[derive(Clone, Copy, Debug)]
struct Loss {
    worker: usize,
    /// The last step that it has said it has completed.
    reported: u64,
    fenced: bool,
}

/// How often the engine does what engines seldom do, in percent of its turns.
#[derive(Debug)]
pub struct Habits {
    pub fails: u64,
    pub loses: u64,
    pub resets: u64,
    pub drafts: u64,
    pub lags: u64,
    pub swings: u64,
}

impl Habits {
    fn random(swaps_much: bool, random: &mut Random) -> Self {
        let mut often = |most: u64| if random.chance(50) { 0 } else { random.from(1, most) };
        Self {
            fails: often(20),
            loses: if swaps_much { 0 } else { often(3) },
            resets: if swaps_much { 0 } else { often(4) },
            drafts: often(70),
            lags: if swaps_much { 0 } else { often(60) },
            swings: often(6),
        }
    }
}

#[derive(Debug)]
pub struct Engine {
    pub random: Random,
    pub manager: Manager,
    pub clock: ManualClock,
    pub size: Size,
    pub habits: Habits,
    pub tenants: Vec<TenantId>,
    pub generation: u64,
    pub open: Option<OpenStep>,
    staged: bool,
    pub runs: Vec<Run>,
    pub wishes: Vec<Wish>,
    pub next_key: u64,
    /// Ids of sequences before, for prompts that begin in the same way.
    pub history: Vec<Vec<u32>>,
    pub workers: Vec<Option<Worker>>,
    /// Blocks of the device and of the host that have memory, at every worker.
    pub mapped: [usize; 2],
    lost: Option<Loss>,
    /// The latest step that every worker has said it has completed.
    completed: u64,
    /// The latest step that was staged.
    latest: u64,
    /// Plans that not all workers have completed, as far as the manager knows.
    pub jobs: Vec<Rc<Job>>,
    pub failures: Failures,
    pub departures: Vec<Departure>,
    pub arrivals: Vec<Arrival>,
    pub foreign: Foreign,
    /// Names that no sequence may give to what it has, before another one is admitted.
    pub forgotten: Vec<BlockHash>,
    pub pins: Vec<PinnedPrefix>,
    pub mirror: Mirror,
    /// How often it is read, in percent of the turns.
    mirrors: u64,
    /// What was met, and how often.
    pub seen: BTreeMap<&'static str, u64>,
}

/// Groups beside the first, in half of all schedules.
fn further(size: &Size, random: &mut Random) -> Vec<GroupSize> {
    let count = if random.chance(50) { 0 } else { random.from(1, 3) };
    // The sizes of blocks divide each other.
    let tokens = size.block_tokens;
    let sizes = if tokens.is_multiple_of(2) {
        [tokens, tokens, tokens / 2, tokens * 2]
    } else {
        [tokens; 4]
    };
    let all = sizes.iter().fold(1, |all, &tokens| if tokens > all { tokens } else { all });
    let group = |_| {
        let tokens = sizes[random.index(4)];
        let kind = match random.below(5) {
            0 => GroupKind::Full,
            1..3 => GroupKind::Window {
                tokens: random.from(1, 3 * tokens as u64) as u32,
                sinks: if random.chance(60) { 0 } else { random.from(1, 2 * tokens as u64) as u32 },
            },
            _ => GroupKind::State {
                checkpoint_tokens: (all as u64 * random.from(1, 3)) as u32,
                drafts: random.below(5) as u32,
            },
        };
        let blocks = |blocks: u64| (blocks as usize * size.block_tokens).div_ceil(tokens);
        let device = blocks(random.from(5, 20)).max(size.rows + 1);
        let host = if random.chance(40) { 0 } else { random.from(1, 12) as usize };
        let width = (size.width * size.block_tokens).div_ceil(tokens);
        let draft = kind == GroupKind::Full && random.chance(40);
        GroupSize { kind, block_tokens: tokens, device, host, width, draft }
    };
    (0..count).map(group).collect()
}

/// The device blocks at a sequence's places in a group.
fn places_of(sequence: &Sequence, group: GroupId) -> Vec<Option<BlockId>> {
    let places = 0..sequence.block_count(group);
    places.map(|at| sequence.block(group, at)).collect()
}

/// The tokens that the draft model computes in a plan, of a row.
fn drafted(plan: &kv_manager::StepPlan, row: Row) -> std::ops::Range<u64> {
    let row = plan.draft_batch.iter().find(|batch| batch.row == row);
    row.map_or(0..0, |row| match row.start {
        Start::At(at) => at..at + u64::from(row.tokens),
        Start::Open { .. } => panic!("a draft model's start is known"),
    })
}

/// Adds up to two tenants, some of which may not hold many blocks.
fn add_tenants(manager: &mut Manager, device: u64, random: &mut Random) -> Vec<TenantId> {
    let mut tenants = vec![TenantId::NOBODY];
    for key in 0..random.below(3) {
        // A salt that is drawn would make schedules unlike that decide by names.
        let tenant = manager.add_tenant_with_key(&key.to_le_bytes()).unwrap();
        if random.chance(30) {
            let most = random.from(3, device);
            let quota = TenantQuota { held_max: most, ..TenantQuota::NONE };
            manager.set_quota(GroupId(0), tenant, Tier::Primary, quota).unwrap();
        }
        tenants.push(tenant);
    }
    tenants
}

/// A manager that stores everything below, or what the evidence is for.
fn manager(
    options: ManagerOptions,
    size: &Size,
    clock: &ManualClock,
    by_evidence: bool,
) -> Manager {
    let evidence = |blocks: u64| {
        let rules = StoreRules { cost: 0.2, ..StoreRules::new(blocks) };
        Box::new(StoreByEvidence::new(rules).unwrap())
    };
    let build = |builder: PoolBuilder| {
        let builder = builder.clock(clock.clone());
        if by_evidence { builder.store_policy(evidence(size.host as u64)) } else { builder }
    };
    let mut manager = Manager::with_pool(options, build).unwrap();
    for tier in [Tier::Third, Tier::Fourth].into_iter().take(size.tiers).filter(|_| by_evidence) {
        manager.set_store_policy(tier, evidence(8)).unwrap();
    }
    manager
}

impl Engine {
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(mix(seed));
        let mut size = Size::random(&mut random);
        size.further = further(&size, &mut random);
        if !size.further.is_empty() && random.chance(50) {
            size.share(&mut random);
        }
        let workers = random.from(1, 3) as usize;
        let steps_in_flight_max = random.from(1, 4) as u32;
        let mut groups = vec![size.first().options()];
        groups.extend(size.further.iter().map(GroupSize::options));
        groups[0].watermark_blocks = [0, 0, 1, 3][random.index(4)];
        let options = ManagerOptions {
            sequences_max: size.rows as u32,
            workers: workers as u16,
            steps_in_flight_max,
            pinned_blocks_max: random.below(8),
            scrubs: random.chance(50),
            lower: lower_options(size.tiers, &mut random),
            shared: size.shared.clone(),
            events_max: [1, 8, 32, 1024][random.index(4)],
            ..ManagerOptions::of(groups)
        };
        let clock = ManualClock::new();
        let mut manager = manager(options, &size, &clock, random.chance(30));
        if size.shared.is_none() && random.chance(20) {
            manager.set_budget(GroupId(0), Tier::Primary, 5).unwrap();
        }
        let tenants = add_tenants(&mut manager, size.device as u64, &mut random);
        let habits = Habits::random(size.swaps_much, &mut random);
        let mirrors = [3, 30, 100][random.index(3)];
        let noise = random.number();
        let workers = (0..workers).map(|at| Some(Worker::new(at, &size, noise))).collect();
        let mirror = Mirror::new(&manager);
        let foreign = Foreign::new(manager.options());
        Self {
            foreign,
            forgotten: Vec::new(),
            random,
            mirror,
            mirrors,
            manager,
            clock,
            mapped: [size.device, size.host],
            size,
            habits,
            tenants,
            generation: 0,
            open: None,
            staged: false,
            runs: Vec::new(),
            wishes: Vec::new(),
            next_key: 1,
            history: Vec::new(),
            workers,
            lost: None,
            completed: 0,
            latest: 0,
            jobs: Vec::new(),
            failures: Failures::default(),
            departures: Vec::new(),
            arrivals: Vec::new(),
            pins: Vec::new(),
            seen: BTreeMap::new(),
        }
    }

    pub fn saw(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    pub fn saw_if(&mut self, holds: bool, what: &'static str) {
        if holds {
            self.saw(what);
        }
    }

    /// One call, or a few that belong together.
    pub fn turn(&mut self) {
        match self.random.below(100) {
            0..12 => self.begin(),
            12..24 => self.stage(),
            24..34 if self.staged || self.random.chance(15) => self.finish(),
            24..34 => self.stage(),
            34..58 => self.work(),
            58..64 => self.admit(),
            64..82 => self.go_on(),
            82..93 => self.commit_some(),
            _ => self.change(),
        }
        if self.random.chance(self.habits.resets) && self.random.chance(10) {
            self.manager.reset();
            self.generation += 1;
            assert_eq!(self.manager.lower_stats().names, [0; 2], "a name of before");
            self.saw("a reset");
        }
        if self.random.chance(self.habits.loses) && self.random.chance(10) {
            self.lose();
        }
        if self.random.chance(10) {
            self.end_loss();
        }
        if self.random.chance(4) {
            self.hint();
            self.hint_more();
        }
        if self.random.chance(8) {
            self.transfer();
        }
        if self.random.chance(2) {
            self.confuse();
        }
        if self.random.chance(3) {
            self.manager.pool(GroupId(0)).unwrap().check_integrity().unwrap();
        }
        if self.random.chance(self.habits.swings) {
            self.swing();
        }
        if self.random.chance(30) {
            self.unmap();
        }
        self.tiers_work();
        if self.random.chance(self.mirrors) {
            self.compare_mirror();
        }
        self.check();
    }

    pub fn compare_mirror(&mut self) {
        if self.random.chance(2) {
            self.mirror.reopen(&self.manager);
        }
        let met = self.mirror.read(&self.manager);
        self.saw_if(met.lost, "events that were lost");
        self.saw_if(met.repaired, "events that were repaired");
        self.saw_if(met.cleared, "events of cleared content");
        self.saw_if(met.moved, "events of moved content");
        self.saw_if(met.below, "events of a lower tier");
        self.saw_if(met.withheld, "content that was withheld");
        self.saw_if(met.orphans, "content behind what is nowhere");
        self.saw_if(met.withdrawn, "content that was withdrawn before it was told");
    }

    pub fn begin(&mut self) {
        let in_flight = self.jobs.iter().filter(|job| job.plan.step > self.completed()).count();
        match self.manager.begin_step() {
            Ok(step) => {
                assert!(self.open.is_none());
                assert!(in_flight < self.manager.options().steps_in_flight_max as usize);
                (self.open, self.staged) = (Some(step), false);
            }
            Err(StepError::StillOpen { .. }) => assert!(self.open.is_some()),
            Err(StepError::Busy { in_flight: counted, oldest }) => {
                assert_eq!(counted, in_flight);
                assert_eq!(oldest, self.completed_or_first());
                self.saw("busy");
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    pub fn completed(&self) -> u64 {
        self.completed
    }

    pub fn latest_staged(&self) -> u64 {
        self.latest
    }

    /// Works out which steps all workers have completed, and forgets these.
    fn advance(&mut self) {
        let running = self.workers.iter().flatten().map(|worker| worker.reported);
        let unfenced = self.lost.filter(|loss| !loss.fenced).map(|loss| loss.reported);
        let latest = self.jobs.last().map_or(self.completed, |job| job.plan.step);
        let completed = running.chain(unfenced).min().unwrap_or(latest);
        self.completed = self.completed.max(completed);
        assert_eq!(self.manager.completed_step(), self.completed);
        let completed = self.completed;
        self.jobs.retain(|job| job.plan.step > completed);
        for run in &mut self.runs {
            run.steps.retain(|&step| step > completed || run.must_redo);
        }
    }

    fn completed_or_first(&self) -> u64 {
        let completed = self.completed();
        let mut later = self.jobs.iter().map(|job| job.plan.step).filter(|&step| step > completed);
        later.next().unwrap()
    }

    pub fn finish(&mut self) {
        let Some(step) = self.open.take() else { return };
        self.saw_if(!self.staged, "a step without a plan");
        if self.random.chance(20) {
            drop(step);
            self.saw("a dropped step");
        } else {
            self.manager.finish_step(step).unwrap();
        }
    }

    /// Stages what has tokens reserved, or a part of it.
    pub fn stage(&mut self) {
        let Some(step) = self.open.take() else { return };
        self.stage_in(&step);
        self.open = Some(step);
    }

    fn stage_in(&mut self, step: &OpenStep) {
        let number = step.number();
        if self.staged {
            let refused = self.manager.stage(step, &mut []).unwrap_err();
            assert_eq!(refused, StageError::StagedAlready { step: number });
            return;
        }
        let mut chosen: Vec<usize> = (0..self.runs.len())
            .filter(|&at| self.runs[at].sequence.next() > 0 && !self.runs[at].lost)
            .filter(|_| self.random.chance(90))
            .collect();
        if self.random.chance(30) {
            chosen.reverse();
        }
        self.check_write_ranges(&chosen);
        let mut batch: Vec<_> = Vec::new();
        // In the order that was chosen.
        let mut all: Vec<_> = self.runs.iter_mut().map(Some).collect();
        for &at in &chosen {
            batch.push(&mut all[at].take().unwrap().sequence);
        }
        let tokens: Vec<u32> = batch.iter().map(|sequence| sequence.next()).collect();
        self.mirror.look(&self.manager, 0);
        let plan = match self.manager.stage(step, &mut batch) {
            Ok(plan) => plan.clone(),
            Err(StageError::Sequence { index, reason: SequenceError::Redo { from } }) => {
                self.runs[chosen[index]].set_back(from, &self.failures);
                self.saw("a redo at stage");
                return;
            }
            Err(StageError::NothingKnown { index, .. }) => {
                let run = &self.runs[chosen[index]];
                assert!(run.left() == 0 && !run.is_open(), "sequence {} was refused", run.key);
                self.saw("nothing to go on with");
                return;
            }
            Err(error) => panic!("{error:?}"),
        };
        self.mirror.look(&self.manager, number);
        self.staged = true;
        self.take_plan(plan, &chosen, &tokens);
    }

    /// Works out what a plan means, and queues it at the workers.
    fn take_plan(&mut self, plan: kv_manager::StepPlan, chosen: &[usize], tokens: &[u32]) {
        let step = plan.step;
        assert!(self.jobs.last().is_none_or(|last| last.plan.step < step));
        let alive: Vec<usize> =
            (0..self.workers.len()).filter(|&at| self.workers[at].is_some()).collect();
        let mut fails_at = None;
        if self.random.chance(self.habits.fails) && !alive.is_empty() && !chosen.is_empty() {
            let worker = alive[self.random.index(alive.len())];
            fails_at = Some(worker);
            self.failures.untold.push((step, worker));
            self.saw("a failing step");
        }
        let void = !self.failures.untold.is_empty();
        self.note_plan(&plan);
        self.check_moves(&plan);
        let (mut lines, mut moved) = (Vec::new(), false);
        for ((&at, &tokens), batch) in chosen.iter().zip(tokens).zip(&plan.batch) {
            assert_eq!(batch.tokens, tokens);
            let run = &mut self.runs[at];
            assert_eq!(Some(batch.row), run.sequence.row());
            assert!(!run.must_redo, "sequence {} was not told of a failed step", run.key);
            let blocks = blocks_of(&run.sequence);
            assert_eq!(blocks, run.blocks, "staging changes no block");
            let start = run.ideal.kv.len() as u64;
            let ids = run.compute(batch, step, self.generation, &mut self.random);
            run.steps.push(step);
            if void && let Some(output) = run.outputs.back_mut().filter(|out| out.step == step) {
                output.void = true;
            }
            run.check();
            let groups = 1..=self.size.further.len() as u16;
            let further: Vec<_> =
                groups.map(|group| places_of(&run.sequence, GroupId(group))).collect();
            moved |= further.iter().flatten().any(Option::is_none);
            let (facts, kv) = (Rc::clone(&run.ideal.facts), run.ideal.kv.clone());
            let loading = run.sequence.loads().is_some();
            let drafts = drafted(&plan, batch.row);
            run.note_drafts(step, &drafts);
            let key = run.key;
            let draft_end = run.sequence.draft_end();
            let line =
                Line { key, facts, ids, kv, start, loading, draft_end, drafts, blocks, further };
            lines.push(line);
        }
        self.saw_if(moved, "a window that has moved");
        self.note_drafts(&plan, &lines);
        let scrubs = self.manager.options().scrubs;
        let owner = |load: &kv_manager::LayerLoad| {
            let mut runs = self.runs.iter().filter(|run| run.sequence.loads().is_some());
            let has = |run: &Run| match load.group {
                GroupId(0) => run.blocks.contains(&load.to),
                group => places_of(&run.sequence, group).contains(&Some(load.to)),
            };
            runs.find(|run| has(run)).map(|run| run.key)
        };
        let loads = plan.layer_loads.iter().map(owner).collect();
        let job = Job { plan, lines, generation: self.generation, void, fails_at, scrubs, loads };
        let job = Rc::new(job);
        for worker in self.workers.iter_mut().flatten() {
            worker.queue.push_back(Rc::clone(&job));
        }
        self.jobs.push(job);
        self.latest = step;
        self.advance();
        self.saw("a staged step");
        if self.random.chance(50) {
            self.poison();
        }
    }

    fn note_drafts(&mut self, plan: &kv_manager::StepPlan, lines: &[Line]) {
        let states = self.size.has_state() && plan.batch.iter().any(|row| row.drafts > 0);
        self.saw_if(states, "drafts of a state");
        let accepted = self.size.has_state()
            && plan.batch.iter().any(|row| row.input > 0 && matches!(row.start, Start::At(_)));
        self.saw_if(accepted, "a state behind accepted drafts");
        self.saw_if(!plan.draft_batch.is_empty(), "a draft model that computes");
        let lags = |line: &Line| line.drafts.start + 4 < line.start && line.drafts.end > 0;
        self.saw_if(lines.iter().any(lags), "a draft model that catches up");
    }

    fn note_plan(&mut self, plan: &kv_manager::StepPlan) {
        let between = |from, to| {
            let copies = plan.copies.iter();
            copies.filter(|copy| copy.from.tier == from && copy.to.tier == to).count() > 0
        };
        self.saw_if(between(Tier::Primary, Tier::Secondary), "copies to host memory");
        self.saw_if(between(Tier::Secondary, Tier::Primary), "copies from host memory");
        self.saw_if(!plan.scrubs.is_empty(), "scrubs");
        for (size, group) in self.size.further.clone().iter().zip(1..) {
            let state = matches!(size.kind, GroupKind::State { .. });
            let mut copies = plan.copies.iter().filter(|copy| copy.group == GroupId(group));
            self.saw_if(state && copies.next().is_some(), "a state that was copied");
            let mut loads = plan.transfers.iter().filter(|transfer| {
                (transfer.group, transfer.direction) == (GroupId(group), Direction::Load)
            });
            let window = matches!(size.kind, GroupKind::Window { .. });
            if loads.next().is_some() {
                self.saw_if(state, "a load of a state");
                self.saw_if(window, "a load of a window");
            }
            if plan.layer_loads.iter().any(|load| load.group == GroupId(group)) {
                self.saw_if(state, "a state loaded by layers");
                self.saw_if(window, "a window loaded by layers");
            }
        }
        let open = plan.batch.iter().any(|row| matches!(row.start, Start::Open { .. }));
        self.saw_if(open, "a start that the worker works out");
    }

    /// Overwrites memory that the pool says nobody uses.
    fn poison(&mut self) {
        for group in 0..=self.size.further.len() {
            let pool = self.manager.pool(GroupId(group as u16)).unwrap();
            for view in pool.snapshot().blocks {
                let empty = view.hash.is_none() && view.expected.is_none();
                let free = view.usage == BlockUse::Unused && empty;
                for worker in self.workers.iter_mut().flatten() {
                    let at = view.location;
                    let free = free && worker.owns(group, at);
                    if free && self.random.chance(50) && !worker.moves(group, at) {
                        worker.poison(group, at);
                    }
                }
            }
        }
    }

    /// A worker carries out plans, or tells of them.
    fn work(&mut self) {
        if self.random.chance(self.habits.lags) {
            return;
        }
        let at = self.random.index(self.workers.len());
        let Some(worker) = &mut self.workers[at] else { return };
        for _ in 0..=self.random.below(2) {
            worker.carry_out();
        }
        if self.random.chance(70) {
            self.report(at);
        }
    }

    /// A worker says how far it has come: of a failed step, one by one.
    pub fn report(&mut self, at: usize) {
        // What a worker has not settled before counts as wrong.
        if !self.random.chance(3) {
            self.tell_settled(at);
        }
        let Some(worker) = &mut self.workers[at] else { return };
        let id = WorkerId(at as u16);
        let failed = worker.failed.pop_front();
        let (step, outcome) = match failed {
            Some(step) => (step, Outcome::Failed),
            None => (worker.carried, Outcome::Done),
        };
        worker.reported = step;
        self.manager.complete(Completion { worker: id, step, outcome }).unwrap();
        if failed.is_some() {
            self.failures.untold.retain(|&(failing, _)| failing != step);
            let void: Vec<u64> = self.jobs.iter().map(|job| job.plan.step).collect();
            let new = |of: &u64| *of >= step && !self.failures.told.contains(of);
            let void: Vec<u64> = void.into_iter().filter(new).collect();
            for run in self.runs.iter_mut().filter(|run| !run.lost) {
                run.must_redo |= run.steps.iter().any(|in_it| void.contains(in_it));
            }
            self.failures.told.extend(void);
            self.saw("a failure that was told");
        }
        // Telling it again changes nothing.
        self.manager.complete(Completion { worker: id, step, outcome: Outcome::Done }).unwrap();
        self.advance();
    }

    fn lose(&mut self) {
        if self.lost.is_some() {
            return;
        }
        let at = self.random.index(self.workers.len());
        let id = WorkerId(at as u16);
        assert_eq!(
            self.manager.fence_worker(id),
            Err(CompletionError::NotLost { worker: id }),
            "it is not lost"
        );
        self.manager.lose_worker(id).unwrap();
        let reported = self.workers[at].take().map_or(0, |worker| worker.reported);
        self.lost = Some(Loss { worker: at, reported, fenced: false });
        self.saw_if(self.manager.lower_stats().quarantined_blocks > 0, "a ticket of a lost worker");
        assert_eq!(self.manager.lower_stats().names, [0; 2], "a lost worker has a share of each");
        self.failures.untold.retain(|&(_, worker)| worker != at);
        self.runs.iter_mut().for_each(|run| run.lost = true);
        let again = Completion { worker: id, step: 0, outcome: Outcome::Done };
        assert_eq!(self.manager.complete(again), Err(CompletionError::Lost { worker: id }));
        self.end_transfers();
        self.runs.retain(|run| !run.arriving);
        self.saw("a lost worker");
    }

    /// A lost worker is fenced, or another one takes its place.
    pub fn end_loss(&mut self) {
        let Some(loss) = &mut self.lost else { return };
        let (at, id) = (loss.worker, WorkerId(loss.worker as u16));
        if !loss.fenced {
            assert!(self.manager.join_worker(id).is_err(), "it is not fenced");
            self.manager.fence_worker(id).unwrap();
            loss.fenced = true;
            self.advance();
            return;
        }
        self.manager.join_worker(id).unwrap();
        let noise = self.random.number();
        let mut worker = Worker::new(at, &self.size, noise);
        worker.map(self.mapped);
        worker.load(&self.manager.snapshot());
        self.workers[at] = Some(worker);
        self.lost = None;
        self.advance();
        // What was computed meanwhile has no share there.
        self.runs.iter_mut().for_each(|run| run.lost = true);
        self.end_transfers();
        self.runs.retain(|run| !run.arriving);
        self.saw("a worker that joined");
    }

    /// Checks that blocks which `index` has got now are in no plan that is not complete.
    pub fn check_claimed(&self, claimed: &[BlockId]) {
        let completed = self.completed();
        for job in self.jobs.iter().filter(|job| job.plan.step > completed) {
            for line in &job.lines {
                let again = claimed.iter().find(|id| line.blocks.contains(id));
                let step = job.plan.step;
                assert_eq!(again, None, "step {step} uses it still, for sequence {}", line.key);
            }
        }
    }

    /// Checks that nobody else has, or finds, a block that a batch writes.
    fn check_write_ranges(&mut self, chosen: &[usize]) {
        let names: HashSet<BlockId> = if self.random.chance(25) {
            let blocks = self.manager.pool(GroupId(0)).unwrap().snapshot().blocks;
            let device = |at: Location| at.tier == Tier::Primary;
            let named = blocks.iter().filter(|view| view.hash.is_some());
            named.filter(|view| device(view.location)).map(|view| view.location.id).collect()
        } else {
            HashSet::new()
        };
        for &at in chosen {
            let run = &self.runs[at];
            let first = run.sequence.resolved() as usize / self.size.block_tokens;
            let end = run.sequence.upper() + u64::from(run.sequence.next());
            let end = (end as usize).div_ceil(self.size.block_tokens);
            for id in &run.blocks[first..end] {
                // A step in flight has written what is resolved there.
                for (other, one) in self.runs.iter().enumerate().filter(|(other, _)| *other != at) {
                    assert!(
                        !one.blocks.contains(id),
                        "sequence {} writes block {id} of sequence {} ({other})",
                        run.key,
                        one.key
                    );
                }
                if !run.lost && !run.must_redo {
                    assert!(
                        !names.contains(id),
                        "sequence {} writes the cached block {id}",
                        run.key
                    );
                }
            }
        }
    }

    fn check(&self) {
        for run in &self.runs {
            run.check();
        }
        let with_rows = self.runs.iter().filter(|run| run.sequence.row().is_some()).count();
        assert_eq!(self.manager.free_rows() + with_rows, self.size.rows);
        if self.forgotten.is_empty() {
            return;
        }
        for group in (0..=self.size.further.len() as u16).map(GroupId) {
            let blocks = self.manager.pool(group).unwrap().snapshot().blocks;
            let mut names = blocks.iter().filter_map(|view| view.hash);
            let found = names.find(|name| self.forgotten.contains(name));
            assert_eq!(found, None, "it was forgotten, in group {group:?}");
        }
    }

    /// Has all workers carry out and tell of all plans.
    pub fn carry_out_all(&mut self) {
        while !self.jobs.is_empty() {
            for at in 0..self.workers.len() {
                if let Some(worker) = &mut self.workers[at] {
                    worker.carry_out();
                }
                self.report(at);
            }
        }
    }

    /// Ends everything, and checks that nothing is left.
    pub fn end(mut self) -> BTreeMap<&'static str, u64> {
        self.finish();
        while self.lost.is_some() {
            self.end_loss();
        }
        self.end_transfers();
        self.runs.clear();
        self.wishes.clear();
        self.end_hints();
        for tier in [Tier::Primary, Tier::Secondary] {
            self.budget(tier, self.size.of(tier));
        }
        if let Some(memory) = &self.size.shared {
            self.manager.set_granules(memory.granules).unwrap();
        }
        // What was decided and not staged goes with the next plan.
        for _ in 0..2 {
            self.carry_out_all();
            self.begin();
            self.stage();
            self.finish();
        }
        self.carry_out_all();
        self.end_tickets();
        assert_eq!(self.manager.free_rows(), self.size.rows);
        let devices = self.size.further.iter().map(|group| group.device);
        for (group, device) in (0..).zip([self.size.device].into_iter().chain(devices)) {
            let pool = self.manager.pool(GroupId(group)).unwrap();
            pool.check_integrity().unwrap();
            for view in pool.snapshot().blocks {
                assert_eq!(view.usage, BlockUse::Unused, "group {group}: {view:?}");
            }
            assert_eq!(pool.claimable(), self.owned(group, device), "group {group}");
        }
        self.seen
    }
}
