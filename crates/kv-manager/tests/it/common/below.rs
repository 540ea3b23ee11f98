//! A manager with a tier below host memory, whose workers are as quick and as right as a test says.

#![allow(dead_code, reason = "each test uses a part")]

use crate::prelude::*;

pub(crate) const WAIT: Duration = Duration::from_millis(100);

/// A manager with one tier below the host, and the time.
pub(crate) struct Rig {
    pub(crate) manager: Manager,
    pub(crate) clock: ManualClock,
    pub(crate) workers: u16,
    /// Tickets that plans have brought and nobody has settled.
    pub(crate) transfers: Vec<Transfer>,
    pub(crate) forgets: Vec<Forget>,
}

pub(crate) fn lower() -> LowerOptions {
    LowerOptions { tiers: 1, wait_max: WAIT, ..LowerOptions::default() }
}

impl Rig {
    pub(crate) fn new(device: u64, host: u64) -> Self {
        Self::with(ManagerOptions { lower: lower(), ..options(device, host) })
    }

    pub(crate) fn with(options: ManagerOptions) -> Self {
        let (clock, workers) = (ManualClock::new(), options.workers);
        let manager = Manager::with_pool(options, |builder| builder.clock(clock.clone())).unwrap();
        Self { manager, clock, workers, transfers: Vec::new(), forgets: Vec::new() }
    }

    /// A whole step, which all workers complete.
    pub(crate) fn step(&mut self, batch: &mut [&mut Sequence]) -> StepPlan {
        let step = self.manager.begin_step().unwrap();
        let plan = self.manager.stage(&step, batch).unwrap().clone();
        self.manager.finish_step(step).unwrap();
        for worker in (0..self.workers).map(WorkerId) {
            let completion = Completion { worker, step: plan.step, outcome: Outcome::Done };
            self.manager.complete(completion).unwrap();
        }
        self.transfers.extend(plan.transfers.iter().cloned());
        self.forgets.extend(&plan.forgets);
        plan
    }

    pub(crate) fn ask(&mut self, ids: Range<u32>) -> (Request, Answer) {
        let mut request = Request::new(ids.collect());
        let answer = self.again(&mut request);
        (request, answer)
    }

    /// A prompt that is computed.
    pub(crate) fn computed(&mut self, ids: Range<u32>) -> Sequence {
        let mut sequence = admitted(self.ask(ids).1);
        self.step(&mut [&mut sequence]);
        sequence
    }

    /// The same of one that goes at once.
    pub(crate) fn pass(&mut self, ids: Range<u32>) {
        drop(self.computed(ids));
    }

    /// The blocks of the first group.
    pub(crate) fn pool(&self) -> PoolView {
        self.manager.pool(GroupId(0)).unwrap()
    }

    pub(crate) fn again(&mut self, request: &mut Request) -> Answer {
        self.manager.ask_all(std::slice::from_mut(request), u64::MAX).pop().unwrap()
    }

    pub(crate) fn settle(&mut self, worker: u16, ticket: TicketId, wrong: &[(u32, BlockFault)]) {
        let settled = Settled { worker: WorkerId(worker), ticket, wrong: wrong.to_vec() };
        self.manager.settle(&settled).unwrap();
    }

    /// Settles loads of the first worker, without a fault.
    pub(crate) fn settle_loads(&mut self, loads: &[Transfer]) {
        loads.iter().for_each(|load| self.settle(0, load.ticket, &[]));
    }

    /// A step of nobody, so much later.
    pub(crate) fn wait(&mut self, time: Duration) {
        self.clock.advance(time);
        self.step(&mut []);
    }

    /// Settles all tickets, without a fault.
    pub(crate) fn settle_all(&mut self) {
        for transfer in std::mem::take(&mut self.transfers) {
            (0..self.workers).for_each(|worker| self.settle(worker, transfer.ticket, &[]));
        }
    }

    /// Computes a prompt and has it stored below; its names.
    pub(crate) fn store(&mut self, ids: Range<u32>) -> Vec<BlockHash> {
        self.pass(ids);
        let plan = self.step(&mut []);
        let names = plan.transfers.iter().flat_map(|transfer| &transfer.blocks);
        let names = names.map(|(name, _)| *name).collect();
        self.settle_all();
        names
    }

    /// The same, and it is below alone.
    pub(crate) fn store_away(&mut self, ids: Range<u32>) -> Vec<BlockHash> {
        let names = self.store(ids);
        self.push_out();
        names
    }

    /// The same, and a request that waits for it; the names of what is stored, the request, and its load.
    pub(crate) fn stored_and_loading(
        &mut self,
        stored: Range<u32>,
        wanted: Range<u32>,
    ) -> (Vec<BlockHash>, Request, Transfer) {
        let names = self.store_away(stored);
        let mut request = request(wanted);
        let load = self.load(&mut request);
        (names, request, load)
    }

    /// Has everything leave the device and the host.
    pub(crate) fn push_out(&mut self) {
        let pool = self.manager.options().groups[0].pool.clone();
        self.manager.set_store_policy(Tier::Third, Box::new(StoreNone)).unwrap();
        for turn in 0..2 + pool.secondary_blocks / pool.primary_blocks {
            let first = 100_000 * (turn as u32 + 1);
            self.pass(first..first + pool.primary_blocks as u32 * BLOCK);
            self.step(&mut []);
        }
        self.manager.set_store_policy(Tier::Third, Box::new(StoreAll)).unwrap();
    }

    /// A ticket that a request waits for.
    pub(crate) fn load(&mut self, request: &mut Request) -> Transfer {
        let Answer::Waiting(Waiting::Load { ticket, .. }) = self.again(request) else { panic!() };
        let plan = self.step(&mut []);
        let load = plan.transfers.iter().find(|transfer| transfer.ticket == ticket).unwrap();
        assert_eq!(load.direction, Direction::Load);
        load.clone()
    }

    pub(crate) fn is_stored(&self, name: BlockHash) -> bool {
        self.manager.find_below(GroupId(0), name) == Some(Tier::Third)
    }

    pub(crate) fn found(&self, name: BlockHash) -> Option<Tier> {
        let pool = self.pool();
        let here = |tier: &Tier| pool.find_and_pin(name, *tier).is_some();
        [Tier::Primary, Tier::Secondary].into_iter().find(here)
    }
}

/// Blocks of the first group.
pub(crate) fn blocks_of(names: &[BlockHash]) -> Vec<(GroupId, BlockHash)> {
    names.iter().map(|&name| (GroupId(0), name)).collect()
}

#[derive(Debug)]
pub(crate) struct StoreNone;

impl StorePolicy for StoreNone {
    fn name(&self) -> &'static str {
        "test"
    }

    fn stores(&mut self, _: Tier, _: &Candidate) -> bool {
        false
    }
}

pub(crate) fn request(ids: Range<u32>) -> Request {
    Request::new(ids.collect())
}

pub(crate) fn by_layers(ids: Range<u32>) -> Request {
    let mut wanted = request(ids);
    wanted.by_layers = true;
    wanted
}
