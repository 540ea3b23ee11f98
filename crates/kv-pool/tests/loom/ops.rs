//! The operations that meet, and what must hold whenever they do.

use std::sync::Arc;

use crate::one::{Moved, One, OneClaimed, OneMove, Registration};
use kv_pool::{BlockHash, BlockId, BlockPool, Claimed, Pinned, PoolConfig, Priority, Tier};
use loom::sync::atomic::{AtomicU32, Ordering::Relaxed};
use loom::thread;

use crate::memory::{Harm, Memory};

/// Content that lies in the secondary tier when the threads start, if there is one.
pub const FAR: u32 = 1;
/// Content that lies in the primary tier.
pub const NEAR: u32 = 2;
/// The first of the contents that the threads write.
const WRITTEN: u32 = 10;

/// What is read where there is no memory.
const UNMAPPED: u64 = 99;

/// What one thread does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Op {
    /// Finds a prefix, reads it and gives it back.
    Find,
    /// Gives back a pin that it had from the start.
    Unpin,
    /// Clones such a pin, and gives both back.
    Clone,
    /// Claims a block, writes it and gives it back without a name.
    Claim,
    /// Claims a block, gives it a name that another thread may give too, and releases it.
    Register,
    /// Claims a block, and brings the evicted content to the secondary tier.
    Offload,
    /// The same, but the block is given back before the content has been copied.
    LateOffload,
    /// As a remote reader: finds content of the secondary tier and reads it.
    Remote,
    /// Finds content of the secondary tier and brings it back.
    Onboard,
    /// Takes content out of the index.
    Remove,
    /// Begins a stretch of device work and completes it.
    Epoch,
    /// Lends content of the secondary tier to a reader elsewhere, and ends the loan.
    Lend,
    /// Pins content of the primary tier, and moves it to the secondary one.
    MoveDown,
    /// Claims a block, and computes content there again that is cached, or on its way, before the
    /// content that it evicts has arrived.
    Overtake,
    /// Takes a block from the primary tier, and the memory of what has left, and gives both back.
    Budget,
}

impl Op {
    pub const ALL: &[Self] = &[
        Self::Find,
        Self::Unpin,
        Self::Clone,
        Self::Claim,
        Self::Register,
        Self::Offload,
        Self::LateOffload,
        Self::Remote,
        Self::Onboard,
        Self::Remove,
        Self::Epoch,
        Self::Lend,
        Self::MoveDown,
        Self::Overtake,
        Self::Budget,
    ];
}

pub struct World {
    pub pool: BlockPool,
    pub memory: Memory,
    primary: u64,
    /// Whether a thread is changing the budget: only one at a time knows which memory is there.
    budgeting: AtomicU32,
    /// Read where a thread holds something, so that others get a turn there.
    turn: AtomicU32,
}

pub fn name(content: u32) -> BlockHash {
    BlockHash::from_u128(content.into())
}

pub fn find(pool: &BlockPool, content: u32) -> Option<Pinned> {
    pool.match_prefix(&[name(content)]).pin(0)
}

#[track_caller]
fn none(harm: Option<Harm>) {
    assert_eq!(harm, None);
}

impl World {
    /// As many threads may hold the near content as there are `Unpin` and `Clone`.
    pub fn new(primary: u64, secondary: u64) -> Self {
        let config =
            PoolConfig { secondary_blocks: secondary, ..PoolConfig::primary_only(primary) };
        let pool = BlockPool::new(&config).unwrap();
        let memory = Memory::new(primary as usize, secondary as usize);
        let world =
            Self { pool, memory, primary, budgeting: AtomicU32::new(0), turn: AtomicU32::new(0) };
        world.cache(FAR);
        if secondary > 0 {
            let claims = world.pool.claim(primary as usize).unwrap();
            for mut block in claims {
                if let Some(offload) = block.take_offload() {
                    world.memory.offload(&offload);
                    offload.commit();
                }
            }
        }
        world.cache(NEAR);
        world
    }

    fn cache(&self, content: u32) {
        let block = self.pool.claim_one().unwrap();
        self.memory.write(&block, content.into());
        let Registration::New(pin) = block.register_one(name(content), Priority::DEFAULT) else {
            panic!("{content} is cached already")
        };
        drop(pin);
    }

    fn others_turn(&self) {
        self.turn.fetch_add(1, Relaxed);
    }

    pub fn read(&self, pin: &Pinned, content: u32) {
        none(self.memory.shared(pin, content.into()));
        self.others_turn();
        none(self.memory.shared(pin, content.into()));
    }

    fn own(&self, owner: u32) -> Option<Claimed> {
        let block = self.pool.claim_one().ok()?;
        none(self.memory.take(&block, owner));
        Some(block)
    }

    /// Writes a block that the thread has claimed, and sees that nobody else does.
    pub fn write(&self, block: &Claimed, content: u32) {
        self.memory.write(block, content.into());
        self.others_turn();
        none(self.memory.own(block, content.into()));
    }

    /// Takes, writes and gives back a block that the thread should have alone.
    pub fn own_it(&self, block: &Claimed, owner: u32) {
        none(self.memory.take(block, owner));
        self.write(block, WRITTEN + owner);
        self.give(block, owner);
    }

    fn give(&self, block: &Claimed, owner: u32) {
        none(self.memory.give(block, owner));
    }

    fn act(&self, op: Op, owner: u32, held: Option<Pinned>) {
        match op {
            Op::Find => {
                if let Some(pin) = find(&self.pool, NEAR) {
                    self.read(&pin, NEAR);
                }
            }
            Op::Unpin => {
                if let Some(pin) = held {
                    self.read(&pin, NEAR);
                }
            }
            Op::Clone => {
                if let Some(pin) = held {
                    let again = pin.clone();
                    drop(pin);
                    self.read(&again, NEAR);
                }
            }
            Op::Claim => {
                if let Some(block) = self.own(owner) {
                    self.write(&block, WRITTEN + owner);
                    self.give(&block, owner);
                }
            }
            Op::Register => self.register(owner),
            Op::Offload => self.offload(owner),
            Op::LateOffload => self.late_offload(owner),
            Op::Remote => {
                if let Some(pin) = self.pool.find_and_pin(name(FAR), Tier::Secondary) {
                    assert_eq!(pin.location().tier, Tier::Secondary);
                    self.read(&pin, FAR);
                    // A pinned block never moves (H8), even if what it left is not written yet.
                    let snapshot = self.pool.snapshot();
                    let view = snapshot.blocks.iter().find(|view| view.block == pin.block());
                    assert_eq!(view.map(|view| view.location), Some(pin.location()));
                }
            }
            Op::Onboard => self.onboard(owner),
            Op::Remove => {
                self.pool.remove(name(NEAR));
            }
            Op::Epoch => {
                let epoch = self.pool.begin_epoch();
                self.others_turn();
                self.pool.complete_epoch(epoch).unwrap();
            }
            Op::Lend => {
                let loan = self.pool.lend(&[name(FAR)], Tier::Secondary);
                if let Some(loan) = loan {
                    none(self.memory.holds(loan.blocks[0], FAR.into()));
                    self.others_turn();
                    none(self.memory.holds(loan.blocks[0], FAR.into()));
                    assert!(self.pool.end_loan(loan.id));
                }
            }
            Op::MoveDown => self.move_down(owner),
            Op::Overtake => self.overtake(owner),
            Op::Budget => self.budget(owner),
        }
    }

    fn move_down(&self, owner: u32) {
        let Some(pin) = self.pool.find_and_pin(name(NEAR), Tier::Primary) else { return };
        let before = self.memory.read(pin.location());
        let Ok(target) = self.pool.claim_in(Tier::Secondary, 1) else { return };
        let onboard = self.pool.begin_onboard(pin, target).unwrap();
        self.memory.move_content(&onboard);
        self.others_turn();
        let (pin, copy) = match onboard.commit_one() {
            Moved::Moved(pin) => (pin, None),
            Moved::Copied { copy, source } => (source, Some(copy)),
        };
        assert_eq!(self.memory.read(pin.location()), before, "thread {owner}");
        drop(copy);
    }

    fn register(&self, owner: u32) {
        let Some(block) = self.own(owner) else { return };
        self.write(&block, WRITTEN);
        self.give(&block, owner);
        match block.register_one(name(WRITTEN), Priority::DEFAULT) {
            Registration::New(pin) => self.read(&pin, WRITTEN),
            Registration::Duplicate(own) => self.own_it(&own, owner),
        }
    }

    fn offload(&self, owner: u32) {
        let Some(mut block) = self.own(owner) else { return };
        if let Some(offload) = block.take_offload() {
            self.memory.offload(&offload);
            self.others_turn();
            offload.commit();
        }
        self.write(&block, WRITTEN + owner);
        self.give(&block, owner);
    }

    fn overtake(&self, owner: u32) {
        let Some(mut block) = self.own(owner) else { return };
        let offload = block.take_offload();
        offload.iter().for_each(|offload| self.memory.offload(offload));
        self.write(&block, NEAR);
        self.give(&block, owner);
        match block.register_one(name(NEAR), Priority::DEFAULT) {
            Registration::New(pin) => self.read(&pin, NEAR),
            Registration::Duplicate(own) => self.own_it(&own, owner),
        }
        if let Some(offload) = offload {
            self.others_turn();
            offload.commit();
        }
    }

    fn budget(&self, owner: u32) {
        if self.budgeting.swap(1, Relaxed) == 1 {
            return;
        }
        let mut withdrawn = self.pool.set_budget(Tier::Primary, self.primary - 1).unwrap();
        while let Some(offload) = withdrawn.leaving.take_offload() {
            self.memory.offload(&offload);
            offload.commit();
        }
        drop(withdrawn);
        self.others_turn();
        let gone = self.pool.blocks_end(Tier::Primary)..self.primary;
        let gone: Vec<_> = gone.map(|id| BlockId::new(id as u32).unwrap()).collect();
        for &id in &gone {
            none(self.memory.take_id(id, owner));
            self.memory.fill(id, UNMAPPED);
        }
        self.others_turn();
        for &id in &gone {
            none(self.memory.give_id(id, owner));
        }
        drop(self.pool.set_budget(Tier::Primary, self.primary).unwrap());
        self.budgeting.swap(0, Relaxed);
    }

    fn late_offload(&self, owner: u32) {
        let Some(mut block) = self.own(owner) else { return };
        let offload = block.take_offload();
        self.give(&block, owner);
        drop(block);
        let Some(offload) = offload else { return };
        self.others_turn();
        self.memory.offload(&offload);
        offload.commit();
    }

    fn onboard(&self, owner: u32) {
        let Some(pin) = self.pool.find_and_pin(name(FAR), Tier::Secondary) else { return };
        let Some(target) = self.own(owner) else { return self.read(&pin, FAR) };
        let mut target = target;
        drop(target.take_offload());
        let onboard = self.pool.begin_onboard(pin, target).unwrap();
        self.memory.onboard(&onboard);
        self.others_turn();
        none(self.memory.give_target(&onboard, owner));
        match onboard.commit_one() {
            Moved::Moved(pin) => {
                assert_eq!(pin.location().tier, Tier::Primary);
                self.read(&pin, FAR);
            }
            Moved::Copied { copy, source } => {
                none(self.memory.take(&copy, owner));
                none(self.memory.own(&copy, FAR.into()));
                self.read(&source, FAR);
                self.give(&copy, owner);
            }
        }
    }

    pub fn check(&self) {
        self.pool.check_integrity().unwrap();
        assert_eq!(self.pool.counters().misuses, 0);
        let stats = self.pool.stats();
        for tier in [stats.primary, stats.secondary] {
            assert_eq!(tier.claimable(), tier.blocks, "{stats:?}");
        }
        for content in [FAR, NEAR, WRITTEN] {
            if let Some(pin) = find(&self.pool, content) {
                none(self.memory.shared(&pin, content.into()));
            }
        }
    }
}

/// What each thread has from the start: all that hold the near content share one count of owners.
fn prepare(ops: &[Op], world: &World) -> Vec<(Op, u32, Option<Pinned>)> {
    let mut shared = None;
    let mut prepared = Vec::new();
    for (&op, owner) in ops.iter().zip(1..) {
        let holds = matches!(op, Op::Unpin | Op::Clone);
        if holds && shared.is_none() {
            shared = find(&world.pool, NEAR);
        }
        prepared.push((op, owner, shared.clone().filter(|_| holds)));
    }
    prepared
}

/// Runs the operations at once, a thread each, and checks the pool when all are done.
pub fn run(ops: &[Op], primary: u64, secondary: u64) {
    let world = Arc::new(World::new(primary, secondary));
    let prepared = prepare(ops, &world);
    let threads: Vec<_> = prepared
        .into_iter()
        .map(|(op, owner, held)| {
            let world = Arc::clone(&world);
            thread::spawn(move || world.act(op, owner, held))
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    world.check();
}
