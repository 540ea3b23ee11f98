//! What the threads do, in an order of the machine's or of a model checker's, and what must hold while they do it.

#![allow(dead_code, reason = "each test program uses a part")]

use std::sync::Arc;
use std::time::Duration;
#[cfg(not(any(loom, shuttle)))]
use std::{sync::Mutex, thread};

use kv_pool::{
    BlockHash, BlockId, BlockPool, Claimed, Loan, Naming, Pinned, PoolConfig, Priority, Tier,
    clock::ManualClock,
    retention::Retention,
    stats::PoolCounters,
    tenants::{TenantId, TenantQuota},
};
#[cfg(shuttle)]
use shuttle::{sync::Mutex, thread};

use super::memory::{Harm, Memory};
use super::one::{Moved, One, OneClaimed, OneMove, Registration};

const CONTENTS: u64 = 10;
/// The owner of block ids without memory, and what is read there.
const UNMAPPED: u32 = 1_000;

/// A pool and how much happens on it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub primary: u64,
    pub secondary: u64,
    pub threads: u32,
    pub steps: usize,
}

/// Content and where it lies, with what keeps it there.
struct Held {
    pins: Pinned,
    first: u64,
}

/// What all threads share beside the pool.
struct World {
    pool: BlockPool,
    memory: Memory,
    clock: ManualClock,
    tenant: TenantId,
    /// Lists that one thread has pinned and another one releases.
    handed_on: Mutex<Vec<Held>>,
    primary: u64,
    /// Block ids of the primary tier that have no memory. Who has the lock may change the budget.
    unmapped: Mutex<Vec<BlockId>>,
}

struct Worker {
    world: Arc<World>,
    id: u32,
    random: u64,
    blocks: Vec<Claimed>,
    pins: Vec<(Pinned, u64)>,
    loans: Vec<(Loan, u64)>,
}

fn name(content: u32) -> BlockHash {
    BlockHash::from_u128(content.into())
}

#[track_caller]
fn none(harm: Option<Harm>) {
    assert_eq!(harm, None);
}

impl Worker {
    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % bound
    }

    fn step(&mut self) {
        match self.below(100) {
            0..16 => self.claim(),
            16..32 => self.register(),
            32..38 => self.drop_block(),
            38..48 => self.find(),
            48..53 => self.find_remote(),
            53..57 => self.clone_pin(),
            57..66 => self.onboard(),
            66..69 => self.epoch(),
            69..71 => self.remove(),
            71..77 => self.write_list(),
            77..81 => self.take_over(),
            81..84 => self.lend(),
            84..87 => self.end_loans(),
            87..90 => self.move_down(),
            90..92 => self.pass_time(),
            92..95 => self.swing(),
            _ => self.release(),
        }
        for (pin, content) in &self.pins {
            none(self.world.memory.shared(pin, *content));
        }
        for (loan, first) in &self.loans {
            for (&at, content) in loan.blocks.iter().zip(*first..) {
                none(self.world.memory.holds(at, content));
            }
        }
    }

    /// Finds a sequence, writes what is not cached, and hands one of two owners on.
    fn write_list(&mut self) {
        let first = self.below(CONTENTS);
        let names: Vec<_> = (first..first + 2).map(|content| name(content as u32)).collect();
        let tenant = [TenantId::NOBODY, self.world.tenant][self.below(2) as usize];
        let mut pins = self.world.pool.match_prefix(&names);
        self.check_list(&pins, first);
        let found = pins.len();
        let Ok(mut claimed) = self.world.pool.claim_for(tenant, names.len() - found) else {
            drop(pins);
            return self.give_way();
        };
        while let Some(offload) = claimed.take_offload() {
            self.world.memory.offload(&offload);
            offload.commit();
        }
        for (block_id, content) in claimed.ids().zip(first + found as u64..) {
            self.world.memory.fill(block_id, content);
        }
        let retention = Retention {
            priority: Priority::new(80).unwrap(),
            duration: Some(Duration::from_millis(self.below(4))),
        };
        let naming = Naming { parent: found.checked_sub(1).map(|at| names[at]), retention };
        let written = claimed.register(&names[found..], naming).unwrap();
        pins.append(written).unwrap();
        self.check_list(&pins, first);
        let other = Held { pins: pins.clone(), first };
        self.world.handed_on.lock().unwrap().push(other);
        self.check_list(&pins, first);
    }

    fn check_list(&self, pins: &Pinned, first: u64) {
        for (at, content) in pins.locations().zip(first..) {
            none(self.world.memory.holds(at, content));
        }
    }

    /// Releases what another thread has pinned, or a part of it.
    fn take_over(&mut self) {
        let held = self.world.handed_on.lock().unwrap().pop();
        let Some(Held { mut pins, first }) = held else { return };
        self.check_list(&pins, first);
        match self.below(3) {
            0 => pins.truncate(1),
            1 => {
                let singles = pins.into_iter().zip(first..).take(1);
                return self.pins.extend(singles);
            }
            _ => {}
        }
        self.check_list(&pins, first);
    }

    fn lend(&mut self) {
        let first = self.below(CONTENTS);
        let names = [name(first as u32), name(first as u32 + 1)];
        let loan = self.world.pool.lend(&names, Tier::Secondary);
        self.loans.extend(loan.map(|loan| (loan, first)));
    }

    fn end_loans(&mut self) {
        for (loan, _) in self.loans.drain(..) {
            assert!(self.world.pool.end_loan(loan.id));
        }
    }

    fn move_down(&mut self) {
        let content = self.below(CONTENTS);
        let pin = self.world.pool.find_and_pin(name(content as u32), Tier::Primary);
        let (Some(pin), Ok(target)) = (pin, self.world.pool.claim_in(Tier::Secondary, 1)) else {
            return;
        };
        let onboard = self.world.pool.begin_onboard(pin, target).unwrap();
        self.world.memory.move_content(&onboard);
        let (pin, copy) = match onboard.commit_one() {
            Moved::Moved(pin) => (pin, None),
            Moved::Copied { copy, source } => (source, Some(copy)),
        };
        none(self.world.memory.shared(&pin, content));
        drop(copy);
        self.pins.push((pin, content));
    }

    fn pass_time(&mut self) {
        self.world.clock.advance(Duration::from_millis(1));
        self.world.pool.refresh();
    }

    /// Takes blocks from the primary tier, and the memory of those that have left, or gives both back.
    fn swing(&mut self) {
        let world = Arc::clone(&self.world);
        let mut unmapped = world.unmapped.lock().unwrap();
        if !unmapped.is_empty() || self.below(4) == 0 {
            return world.map_all(&mut unmapped);
        }
        // One block is kept for a tenant.
        let budget = 1 + self.below(world.primary);
        let mut withdrawn = world.pool.set_budget(Tier::Primary, budget).unwrap();
        while let Some(offload) = withdrawn.leaving.take_offload() {
            world.memory.offload(&offload);
            offload.commit();
        }
        drop(withdrawn);
        let gone = world.pool.blocks_end(Tier::Primary)..world.primary;
        for id in gone.map(|id| BlockId::new(id as u32).unwrap()) {
            none(world.memory.take_id(id, UNMAPPED));
            world.memory.fill(id, UNMAPPED.into());
            unmapped.push(id);
        }
    }

    /// What a thread writes to a block before the block has a name.
    fn mark(&self) -> u64 {
        u64::MAX - u64::from(self.id)
    }

    fn claim(&mut self) {
        let count = 1 + self.below(2) as usize;
        let Ok(blocks) = self.world.pool.claim(count) else { return self.give_way() };
        assert_eq!(blocks.len(), count, "all or none");
        for mut block in blocks {
            none(self.world.memory.take(&block, self.id));
            if let Some(offload) = block.take_offload() {
                self.world.memory.offload(&offload);
                if self.below(6) > 0 {
                    offload.commit();
                }
            }
            self.world.memory.write(&block, self.mark());
            self.blocks.push(block);
        }
    }

    /// Somebody must, when all wait for blocks.
    fn give_way(&mut self) {
        self.release();
        self.drop_block();
    }

    fn block(&mut self) -> Option<Claimed> {
        let block = self.blocks.pop()?;
        none(self.world.memory.own(&block, self.mark()));
        Some(block)
    }

    fn drop_block(&mut self) {
        let Some(block) = self.block() else { return };
        none(self.world.memory.give(&block, self.id));
        drop(block);
    }

    fn register(&mut self) {
        let Some(block) = self.block() else { return };
        let content = self.below(CONTENTS);
        self.register_as(block, content);
    }

    fn register_as(&mut self, block: Claimed, content: u64) {
        self.world.memory.write(&block, content);
        none(self.world.memory.give(&block, self.id));
        let priority = Priority::new([0, 30, 35, 80][self.below(4) as usize]).unwrap();
        match block.register_one(name(content as u32), priority) {
            Registration::New(pin) => self.pins.push((pin, content)),
            Registration::Duplicate(own) => {
                none(self.world.memory.take(&own, self.id));
                self.world.memory.write(&own, self.mark());
                self.blocks.push(own);
            }
        }
    }

    fn find(&mut self) {
        let first = self.below(CONTENTS) as u32;
        let names: Vec<_> = (first..first + 3).map(name).collect();
        let pins = self.world.pool.match_prefix(&names).into_iter();
        self.pins.extend(pins.zip(u64::from(first)..));
    }

    fn find_remote(&mut self) {
        let content = self.below(CONTENTS);
        let pin = self.world.pool.find_and_pin(name(content as u32), Tier::Secondary);
        if let Some(pin) = pin {
            assert_eq!(pin.location().tier, Tier::Secondary);
            self.pins.push((pin, content));
        }
    }

    fn clone_pin(&mut self) {
        let Some((pin, content)) = self.pins.last() else { return };
        let again = (pin.clone(), *content);
        self.pins.push(again);
    }

    fn release(&mut self) {
        let keep = self.pins.len() - self.pins.len().min(1 + self.below(3) as usize);
        let pins = self.pins.split_off(keep);
        self.world.pool.release(pins.into_iter().map(|(pin, _)| pin).collect());
    }

    fn epoch(&mut self) {
        let epoch = self.world.pool.begin_epoch();
        if self.below(3) > 0 {
            self.world.pool.complete_epoch(epoch).unwrap();
        }
    }

    fn remove(&mut self) {
        let content = self.below(CONTENTS) as u32;
        self.world.pool.remove(name(content));
    }

    fn onboard(&mut self) {
        let far = |(pin, _): &(Pinned, u64)| pin.location().tier == Tier::Secondary;
        let Some(at) = self.pins.iter().position(far) else { return };
        let Some(target) = self.block() else { return };
        let (pin, content) = self.pins.swap_remove(at);
        let onboard = self.world.pool.begin_onboard(pin, target).unwrap();
        self.world.memory.onboard(&onboard);
        none(self.world.memory.give_target(&onboard, self.id));
        match onboard.commit_one() {
            Moved::Moved(pin) => self.pins.push((pin, content)),
            Moved::Copied { copy, source } => {
                self.pins.push((source, content));
                none(self.world.memory.take(&copy, self.id));
                none(self.world.memory.own(&copy, content));
                self.register_as(copy, content);
            }
        }
    }

    fn finish(mut self) {
        self.end_loans();
        while !self.blocks.is_empty() {
            self.drop_block();
        }
    }
}

impl World {
    fn map_all(&self, unmapped: &mut Vec<BlockId>) {
        for id in unmapped.drain(..) {
            none(self.memory.give_id(id, UNMAPPED));
        }
        drop(self.pool.set_budget(Tier::Primary, self.primary).unwrap());
    }

    fn new(shape: Shape) -> Self {
        let config = PoolConfig {
            secondary_blocks: shape.secondary,
            ..PoolConfig::primary_only(shape.primary)
        };
        let clock = ManualClock::new();
        let pool = BlockPool::builder(&config).clock(clock.clone()).events(16).build().unwrap();
        let tenant = pool.add_tenant().unwrap();
        let quota = TenantQuota { held_max: shape.primary, cached_max: 2, reserved: 1 };
        pool.set_quota(tenant, Tier::Primary, quota).unwrap();
        let memory = Memory::new(shape.primary as usize, shape.secondary as usize);
        let (handed_on, unmapped) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
        Self { pool, primary: shape.primary, memory, clock, tenant, handed_on, unmapped }
    }

    fn check(&self) {
        self.pool.check_integrity().unwrap();
        let stats = self.pool.stats();
        assert_eq!(stats.counters.misuses, 0);
        for tier in [stats.primary, stats.secondary] {
            assert_eq!(tier.claimable(), tier.blocks, "{stats:?}");
        }
        let counts = self.pool.tenant_counts(self.tenant, Tier::Primary).unwrap();
        assert!(counts.held == 0 && counts.cached <= 2, "{counts:?}");
        for content in 0..=CONTENTS {
            if let Some(pin) = self.pool.match_prefix(&[name(content as u32)]).pin(0) {
                none(self.memory.shared(&pin, content));
            }
        }
    }
}

/// One program: what each thread does is given by the seed, the order by who runs the threads. What came of it.
pub fn play(seed: u64, shape: Shape) -> PoolCounters {
    let world = Arc::new(World::new(shape));
    let threads: Vec<_> = (1..=shape.threads)
        .map(|id| {
            let mut worker = Worker {
                world: Arc::clone(&world),
                id,
                random: (seed << 8 | u64::from(id)).wrapping_mul(0x9E37_79B9_7F4A_7C15),
                blocks: Vec::new(),
                pins: Vec::new(),
                loans: Vec::new(),
            };
            thread::spawn(move || {
                (0..shape.steps).for_each(|_| worker.step());
                worker.finish();
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    world.handed_on.lock().unwrap().clear();
    world.map_all(&mut world.unmapped.lock().unwrap());
    let epoch = world.pool.begin_epoch();
    world.pool.complete_epoch(epoch).unwrap();
    world.check();
    world.pool.counters()
}
