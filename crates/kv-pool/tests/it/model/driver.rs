//! Does the same random things to the pool and to the reference, and compares all that can be seen.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use crate::common::CountedClock;
use crate::common::mirror::Mirror;
use crate::common::one::One;
use kv_pool::{
    BlockPool, Claimed, Epoch, Loan, Location, Pinned, PoolConfig, Priority, Tier,
    events::{BlockUse, BlockView, EventReader, PoolEvent, Reading},
    moves::{Offload, Onboard},
    tenants::{TenantId, TenantQuota},
};

use super::reference::{Block, Happened, Model, ModelClaim, Now, name};

pub const CONTENTS: u64 = 24;
const PRIORITIES: [u8; 8] = [0, 5, 29, 30, 35, 35, 80, 100];
/// How often all that a snapshot shows is compared; counts and places are after every step.
const SNAPSHOT_EVERY: u64 = 8;

pub struct Random(u64);

impl Random {
    /// SplitMix64: any seed will do.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (value ^ (value >> 31)) % bound
    }

    pub fn pick<T>(&mut self, from: &mut Vec<T>) -> Option<T> {
        let bound = from.len() as u64;
        (bound > 0).then(|| from.swap_remove(self.below(bound) as usize))
    }

    pub fn one_of<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    pub fn content(&mut self) -> u32 {
        self.below(CONTENTS) as u32
    }

    pub fn priority(&mut self) -> u8 {
        self.one_of(&PRIORITIES)
    }

    pub fn duration(&mut self) -> Option<u64> {
        (self.below(3) == 0).then(|| self.below(40))
    }
}

/// How often each outcome was met that a run must have met.
pub struct Seen([u64; OUTCOMES.len()]);

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(OUTCOMES.iter().zip(&self.0)).finish()
    }
}

/// What a run must have met, or it shows nothing about it.
pub const OUTCOMES: [&str; 31] = [
    "claim refused",
    "claim refused to a tenant",
    "moved up",
    "moved down",
    "copied",
    "move refused",
    "secondary copy gave way",
    "computed again on its way",
    "removed on its way",
    "removed on its way with successors",
    "left a block id that a copy reads",
    "pinned while retiring",
    "passed over for its successors",
    "passed over for its tenant",
    "found less than there is",
    "priority ended",
    "over",
    "events lost",
    "tenant gave way",
    "removed with successors",
    "evicted in the common case",
    "named in the common case",
    "left beyond a budget",
    "left beyond a budget with its content moved down",
    "left beyond a budget after what follows it",
    "in use beyond a budget",
    "let go of with content beyond a budget",
    "brought back by a budget",
    "a budget was refused",
    "named behind others",
    "a duplicate stayed claimed",
];

impl Default for Seen {
    fn default() -> Self {
        Self([0; OUTCOMES.len()])
    }
}

impl Seen {
    pub fn saw(&mut self, outcome: &str, times: u64) {
        let at = OUTCOMES.iter().position(|known| *known == outcome).unwrap();
        self.0[at] += times;
    }

    pub fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, more)| *sum += more);
    }

    pub fn missing(&self) -> Vec<&'static str> {
        let counts = OUTCOMES.into_iter().zip(self.0);
        counts.filter(|(_, count)| *count == 0).map(|(outcome, _)| outcome).collect()
    }
}

/// Owners of the same references, as the clones of one pin are.
pub type Owner = Rc<()>;

pub struct Coming {
    pub onboard: Onboard,
    pub source: usize,
    pub target: usize,
    pub owner: Owner,
}

pub struct Driver {
    pub random: Random,
    pub pool: BlockPool,
    pub clock: CountedClock,
    pub model: Model,
    pub capacities: [u64; 4],
    pub tenants: Vec<TenantId>,
    pub held: Vec<(Claimed, ModelClaim)>,
    pub held_lists: Vec<(Claimed, Vec<ModelClaim>)>,
    pub pins: Vec<(Pinned, usize, Owner)>,
    pub pin_lists: Vec<(Pinned, Vec<usize>, Owner)>,
    pub offloads: Vec<Offload>,
    pub coming: Vec<Coming>,
    pub loans: Vec<(Loan, Vec<usize>)>,
    pub epochs: Vec<Epoch>,
    pub seen: Seen,
    /// `None` in pools without a log of events.
    reader: Option<EventReader>,
    /// Of a log that keeps all events of a step.
    mirror: Option<Mirror>,
    /// A pool without a log, tenants and tiers below, for which there are shorter ways.
    common: bool,
    log: u64,
    read: u64,
    steps: u64,
}

impl Driver {
    pub fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let (logged, common) = (seed % 4 < 2, seed % 4 == 3);
        let primary_blocks = 1 + random.below(12);
        let config = PoolConfig {
            primary_blocks,
            secondary_blocks: if common { 0 } else { random.below(8) },
            further_blocks: [random.below(3), random.below(2)],
            offload_min_priority: Priority::new(random.one_of(&[0, 30, 30, 80])).unwrap(),
        };
        let (clock, log) = (CountedClock::default(), random.one_of(&[4, 64, 1024]));
        let builder = BlockPool::builder(&config).clock(clock.clone());
        let builder = if logged { builder.events(log as usize) } else { builder };
        let pool = builder.build().unwrap();
        let mut driver = Self {
            reader: pool.events(),
            mirror: pool.events().filter(|_| log == 1024).map(Mirror::new),
            common,
            pool,
            clock,
            model: Model::new(&config),
            capacities: [
                primary_blocks,
                config.secondary_blocks,
                config.further_blocks[0],
                config.further_blocks[1],
            ],
            tenants: vec![TenantId::NOBODY],
            held: Vec::new(),
            held_lists: Vec::new(),
            pins: Vec::new(),
            pin_lists: Vec::new(),
            offloads: Vec::new(),
            coming: Vec::new(),
            loans: Vec::new(),
            epochs: Vec::new(),
            seen: Seen::default(),
            log,
            read: 0,
            steps: 0,
            random,
        };
        let tenants = if common { 0 } else { driver.random.one_of(&[0, 0, 1, 2, 3]) };
        for _ in 0..tenants {
            driver.tenants.push(driver.pool.add_tenant().unwrap());
            driver.model.tenants.push(TenantQuota::NONE);
        }
        driver
    }

    pub fn step(&mut self) {
        match self.random.below(204) {
            0..14 => self.claim(),
            14..22 => self.claim_list(),
            22..32 => self.take_offload(),
            32..46 => self.end_offload(),
            46..60 => self.register(),
            60..70 => self.register_list(),
            70..80 => self.drop_claimed(),
            80..104 => self.release(),
            104..124 => self.drop_list(),
            124..128 => self.clone_pin(),
            128..134 => self.change_list(),
            134..141 => self.match_prefix(),
            141..147 => self.find_and_pin(),
            147..157 => self.begin_move(),
            157..167 => self.end_move(),
            167..170 => self.remove(),
            170..172 => self.begin_epoch(),
            172..180 => self.complete_epoch(),
            180..182 => self.set_budget(),
            182..185 => self.retain(),
            185..190 => self.pass_time(),
            190..192 => self.set_quota(),
            192..196 => self.loan(),
            _ => self.overtake(),
        }
        self.steps += 1;
        self.compare();
    }

    /// Gives everything back; then every block id must be unused.
    pub fn finish(mut self) -> Seen {
        while !self.coming.is_empty() {
            self.end_move();
        }
        while !self.offloads.is_empty() {
            self.end_offload();
        }
        for (blocks, claims) in std::mem::take(&mut self.held_lists) {
            self.drop_claimed_list(blocks, &claims);
        }
        while !self.held.is_empty() {
            self.drop_claimed();
        }
        while !self.pins.is_empty() {
            self.release();
        }
        while !self.pin_lists.is_empty() {
            self.drop_list();
        }
        while !self.loans.is_empty() {
            self.end_loan();
        }
        while !self.epochs.is_empty() {
            self.complete_epoch();
        }
        self.compare();
        self.compare_all();
        let stats = self.pool.stats();
        for (tier, &budget) in Tier::ALL.into_iter().zip(&self.model.budgets) {
            assert_eq!(self.pool.blocks_end(tier), budget as u64, "all that was in use has left");
        }
        for tier in [stats.primary, stats.secondary, stats.further[0], stats.further[1]] {
            assert_eq!(tier.claimable(), tier.blocks, "{stats:?}");
        }
        self.seen.saw("let go of with content beyond a budget", self.model.seen_leaving);
        if self.common {
            self.seen.saw("evicted in the common case", stats.counters.evicted);
            self.seen.saw("named in the common case", stats.counters.registered);
        }
        self.seen
    }

    fn compare(&mut self) {
        let stats = self.model.stats();
        assert_eq!(self.pool.stats(), stats);
        assert_eq!(self.pool.eviction_ages(), self.model.ages);
        assert_eq!(self.pool.claimable() as u64, stats.primary.claimable());
        assert_eq!(self.pool.empty() as u64, stats.primary.empty);
        assert_eq!(self.clock.reads(), self.model.reads);
        for tier in Tier::ALL {
            assert_eq!(self.pool.blocks_end(tier), self.model.end(tier.index()) as u64);
        }
        for (pin, block, _) in &self.pins {
            self.same_place(pin.block().index(), pin.location(), *block);
        }
        for (pins, blocks, _) in &self.pin_lists {
            assert_eq!(pins.len(), blocks.len());
            for ((record, location), block) in pins.records().zip(pins.locations()).zip(blocks) {
                self.same_place(record.index(), location, *block);
            }
        }
        self.compare_events();
        self.compare_mirror();
        if self.steps.is_multiple_of(SNAPSHOT_EVERY) {
            self.compare_all();
        }
    }

    pub fn same_place(&self, real: usize, location: Location, block: usize) {
        let seen = (location.tier.index(), location.id.index());
        assert_eq!((real, seen), (block, self.model.at(block)));
    }

    fn compare_all(&self) {
        self.pool.check_integrity().unwrap();
        let snapshot = self.pool.snapshot();
        let events = if self.reader.is_some() { self.model.events.len() } else { 0 };
        assert_eq!(snapshot.next_event, events as u64);
        assert_eq!(snapshot.stats, self.model.stats());
        for view in &snapshot.blocks {
            self.compare_block(view);
        }
        assert_eq!(self.pool.loans(), self.loans.len());
        for (number, &tenant) in self.tenants.iter().enumerate() {
            if self.tenants.len() > 1 {
                let counts = self.pool.tenant_counts(tenant, Tier::Primary).unwrap();
                assert_eq!((counts.held, counts.cached), self.model.shares(number));
            }
        }
    }

    fn compare_block(&self, view: &BlockView) {
        let id = view.block.index();
        self.same_place(id, view.location, id);
        let block: &Block = &self.model.blocks[id];
        let usage = match block.now {
            Now::Absent | Now::Unused(_) | Now::Shadowed(_) | Now::PassedOver(_) => {
                BlockUse::Unused
            }
            Now::Released { .. } | Now::Draining => BlockUse::Retiring,
            Now::Claimed | Now::Moving { .. } => BlockUse::Claimed,
            Now::Pinned(pins) => BlockUse::Pinned(pins),
        };
        assert_eq!((view.usage, view.hash), (usage, block.content.map(name)), "{view:?}");
        assert_eq!(view.children as usize, self.model.children(id), "{view:?}");
        assert_eq!(view.parent.map(|parent| parent.index()), block.parent, "{view:?}");
        assert_eq!(view.expiry, block.expiry.map(Duration::from_millis), "{view:?}");
        if block.content.is_some() {
            let seen = (view.priority.get(), view.depth, usize::from(view.tenant.number()));
            assert_eq!(seen, (block.priority, block.depth, block.tenant), "{view:?}");
        }
    }

    /// A reader who knows nothing but the events knows every name, where its content lies, and what it
    /// is worth. Content on its way lies for him where it came from.
    fn compare_mirror(&mut self) {
        let Some(mirror) = &mut self.mirror else { return };
        mirror.follow();
        let mut names = 0;
        for (id, block) in self.model.blocks.iter().enumerate() {
            let Some(content) = block.bears() else { continue };
            let place = match block.now {
                Now::Moving { from, .. } => from,
                _ => (block.tier, block.block_id),
            };
            let known = mirror.names.get(&name(content));
            let known = known.map(|&(id, location, worth)| (id.index(), at(location), worth.get()));
            assert_eq!(known, Some((id, place, block.priority)), "content {content}");
            names += 1;
        }
        assert_eq!(mirror.names.len(), names);
    }

    /// Reads now and then, so that the log overtakes the reader sometimes.
    fn compare_events(&mut self) {
        if self.random.below(4) > 0 {
            return;
        }
        let mut readings = Vec::new();
        let Some(reader) = &mut self.reader else { return };
        reader.read(self.random.below(20) as usize, &mut readings);
        for reading in readings {
            match reading {
                Reading::Event { sequence, event } => {
                    assert_eq!(sequence, self.read);
                    assert_eq!(happened(event), self.model.events[sequence as usize]);
                    self.read += 1;
                }
                Reading::Lost { first, count } => {
                    let oldest = self.model.events.len() as u64 - self.log;
                    assert_eq!((first, first + count), (self.read, oldest));
                    self.read = oldest;
                    self.seen.saw("events lost", 1);
                }
            }
        }
    }
}

fn at(location: Location) -> (usize, usize) {
    (location.tier.index(), location.id.index())
}

fn happened(event: PoolEvent) -> Happened {
    match event {
        PoolEvent::Stored { block, hash, parent, location, priority } => Happened::Stored {
            block: block.index(),
            name: hash,
            parent,
            at: at(location),
            priority: priority.get(),
        },
        PoolEvent::Removed { block, hash, location } => {
            Happened::Removed { block: block.index(), name: hash, at: at(location) }
        }
        PoolEvent::Moved { block, hash, from, to } => {
            Happened::Moved { block: block.index(), name: hash, from: at(from), to: at(to) }
        }
        PoolEvent::PriorityChanged { block, hash, from, to } => {
            Happened::Changed { block: block.index(), name: hash, from: from.get(), to: to.get() }
        }
        other => panic!("{other:?} is not known here"),
    }
}
