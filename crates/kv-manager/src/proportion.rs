//! Work in proportion: no call of a step looks at more in a larger cache, or beside more sequences, tenants and requests.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};

use kv_pool::retention::Retention;
use kv_pool::store::StoreAll;
use kv_pool::tenants::{TenantId, TenantQuota};
use kv_pool::{BlockHash, PoolConfig, Tier};
use kv_tier::GroupKind;

use crate::growing::Memory;
use crate::{
    Answer, Completion, GroupId, GroupOptions, LowerOptions, Manager, ManagerOptions, NoRoom,
    Outcome, Request, Sequence, WorkerId,
};

thread_local! {
    /// Names that are made or looked up, prompts and granules that are looked at. The block pools count their own.
    static LOOKS: Cell<u64> = const { Cell::new(0) };
}

pub(crate) fn looks(count: usize) {
    LOOKS.set(LOOKS.get() + count as u64);
}

pub(crate) fn looked() -> u64 {
    LOOKS.get()
}

const BLOCK: u32 = 4;
/// Tokens of a waiting request.
const WAITING: u32 = 64;

/// How much there is of everything.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) blocks: u64,
    /// Sequences that run, tenants, and requests that wait.
    pub(crate) others: u32,
    pub(crate) several: bool,
}

pub(crate) struct Fixture {
    pub(crate) manager: Manager,
    tenants: Vec<TenantId>,
    running: Vec<Sequence>,
    next_id: u32,
    looks: BTreeMap<&'static str, u64>,
}

fn options(size: Size) -> ManagerOptions {
    let pool = PoolConfig { secondary_blocks: 64, ..PoolConfig::primary_only(size.blocks) };
    let full =
        GroupOptions { blocks_per_sequence_max: 128, ..GroupOptions::new(BLOCK, pool.clone()) };
    let window = GroupOptions { kind: GroupKind::Window { tokens: 8, sinks: 0 }, ..full.clone() };
    let lower = LowerOptions::default();
    ManagerOptions {
        sequences_max: size.others + 64,
        lower: LowerOptions { tiers: 1, stores_open_max: 1, ticket_blocks_max: 8, ..lower },
        ..ManagerOptions::of(if size.several { vec![full, window] } else { vec![full] })
    }
}

impl Fixture {
    pub(crate) fn new(size: Size) -> Self {
        let mut manager = Manager::new(options(size)).unwrap();
        manager.set_store_policy(Tier::Third, Box::new(StoreAll)).unwrap();
        let tenants = (0..size.others).map(|_| manager.add_tenant().unwrap()).collect();
        let (running, looks) = (Vec::new(), BTreeMap::new());
        let mut fixture = Self { manager, tenants, running, next_id: 0, looks };
        // Half of the memory is cached.
        for _ in 0..size.blocks / 2 / 64 {
            let mut sequences = vec![fixture.admit(64 * BLOCK, TenantId::NOBODY)];
            fixture.step(&mut sequences);
        }
        for at in 0..size.others as usize {
            let sequence = fixture.admit(BLOCK + 1, fixture.tenants[at]);
            fixture.running.push(sequence);
        }
        let mut running = std::mem::take(&mut fixture.running);
        fixture.decode(&mut running);
        fixture.running = running;
        fixture
    }

    fn ids(&mut self, tokens: u32) -> Vec<u32> {
        self.next_id += tokens;
        (self.next_id - tokens..self.next_id).collect()
    }

    fn admit(&mut self, tokens: u32, tenant: TenantId) -> Sequence {
        let mut request = Request::new(self.ids(tokens));
        (request.tenant, request.waits) = (tenant, false);
        match self.manager.admit_one(&mut Memory::default(), &mut request) {
            Answer::Admitted(sequence) => sequence,
            other => panic!("{other:?}"),
        }
    }

    fn step(&mut self, sequences: &mut [Sequence]) -> u64 {
        let step = self.manager.begin_step().unwrap();
        let mut batch: Vec<_> = sequences.iter_mut().collect();
        let number = self.manager.stage(&step, &mut batch).unwrap().step;
        self.manager.finish_step(step).unwrap();
        let done = Completion { worker: WorkerId(0), step: number, outcome: Outcome::Done };
        self.manager.complete(done).unwrap();
        number
    }

    fn decode(&mut self, sequences: &mut [Sequence]) {
        let number = self.step(sequences);
        for sequence in sequences {
            self.manager.commit(sequence, number, &[1]).unwrap();
        }
    }

    fn count<T>(&mut self, what: &'static str, act: impl FnOnce(&mut Self) -> T) -> T {
        let before = LOOKS.get();
        let done = act(self);
        let looks = LOOKS.get() - before;
        self.looks.insert(what, looks);
        done
    }

    /// The names of a prompt that is cached.
    fn cached(&self) -> Vec<BlockHash> {
        let (mut parent, hasher) = (BlockHash::ROOT, self.manager.options().hasher);
        let ids: Vec<u32> = (0..64 * BLOCK).collect();
        let chain = |ids: &[u32]| {
            parent = hasher.chain(parent, ids);
            parent
        };
        ids.chunks_exact(BLOCK as usize).map(chain).collect()
    }

    fn admissions(&mut self, others: u32) {
        let mut waiting: VecDeque<_> =
            (0..others).map(|_| Request::new(self.ids(WAITING))).collect();
        let budget = u64::from(WAITING);
        self.count("an admission", |of| drop(of.manager.admit(&mut waiting, budget)));
        self.count("the next admission", |of| drop(of.manager.admit(&mut waiting, budget)));
        // The first is named, and lacks room.
        let mut large = Request::new(self.ids(120 * BLOCK));
        large.waits = false;
        self.manager.prepare(&mut large).unwrap();
        let free = self.manager.groups[0].pool.claimable();
        self.manager.groups.iter_mut().for_each(|group| group.set_watermark(free - 8));
        waiting.push_front(large);
        let admission =
            self.count("an admission without room", |of| of.manager.admit(&mut waiting, u64::MAX));
        assert!(matches!(admission.no_room, Some((0, NoRoom::Blocks(_)))), "{admission:?}");
        self.manager.groups.iter_mut().for_each(|group| group.set_watermark(0));
        // A tenant at its bound.
        let (tenant, quota) = (self.tenants[0], TenantQuota { held_max: 17, ..TenantQuota::NONE });
        self.manager.set_quota(GroupId(0), tenant, Tier::Primary, quota).unwrap();
        let mut bound = VecDeque::from([0; 2].map(|_| Request::new(self.ids(WAITING))));
        bound.iter_mut().for_each(|request| request.tenant = tenant);
        let admission =
            self.count("a request beyond a bound", |of| of.manager.admit(&mut bound, u64::MAX));
        assert_eq!(admission.waiting.len(), 2);
    }

    fn sequences(&mut self) {
        let mut one = self.running.pop().unwrap();
        self.count("a reservation", |of| of.manager.reserve(&mut one, 1).unwrap().given().unwrap());
        let mut batch = [one];
        let number = self.count("a step", |of| of.step(&mut batch));
        let [mut one] = batch;
        self.count("a commit", |of| of.manager.commit(&mut one, number, &[1]).unwrap());
        self.count("a next turn", |of| of.manager.extend(&mut one, &[2; 8]).unwrap());
        let twin = self.count("a fork", |of| of.manager.fork(&mut one).unwrap());
        self.count("a drop", |_| drop(twin));
        self.count("a cut", |of| of.manager.truncate(&mut one, 5).unwrap());
        self.count("a suspension", |of| of.manager.suspend(&mut one).unwrap());
        self.step(&mut []);
        self.count("a resumption", |of| of.manager.resume(&mut one).unwrap().given().unwrap());
        self.count("a hint", |of| of.manager.retain(&one, Retention::default()));
    }

    fn names(&mut self) {
        let names = self.cached();
        self.count("a pin that is refused", |of| assert!(of.manager.pin(&names).is_err()));
        self.count("a prefetch", |of| of.manager.prefetch(&names));
        self.count("a name that is forgotten", |of| of.manager.forget(&names[60..]));
    }
}

/// At how much each call looks.
fn looks_at(size: Size) -> BTreeMap<&'static str, u64> {
    let mut fixture = Fixture::new(size);
    fixture.admissions(size.others);
    fixture.sequences();
    fixture.names();
    fixture.looks
}

#[test]
fn no_call_of_a_step_looks_at_everything() {
    for several in [false, true] {
        let small = looks_at(Size { blocks: 1 << 12, others: 16, several });
        let wide = looks_at(Size { blocks: 1 << 18, others: 16, several });
        let many = looks_at(Size { blocks: 1 << 18, others: 4096, several });
        for (what, &before) in &small {
            let most = before + 4;
            assert!(wide[what] <= most, "{what}: {before}, {} in a larger cache", wide[what]);
            assert!(many[what] <= most, "{what}: {before}, {} beside more", many[what]);
        }
        assert!(small.values().any(|&looks| looks > 8), "nothing was counted: {small:?}");
    }
}
