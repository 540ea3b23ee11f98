//! Many threads on one pool: no block id has two owners, and what is pinned is neither moved nor
//! overwritten.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Barrier, Mutex};
use std::thread;

use crate::common::memory::{Harm, Memory};
use crate::common::{Moved, One, OneClaimed, OneMove, Registration};
use crate::common::{cache, cache_secondary, checked, claim, find, name, pool, write};
use kv_pool::{BlockPool, Claimed, Pinned, Priority, Tier};

/// Claims in steps of `count` until the pool is empty, from `threads` threads at once.
fn claim_all(pool: &BlockPool, threads: usize, count: usize) -> Vec<Claimed> {
    let start = Barrier::new(threads);
    let claim_until_empty = || {
        start.wait();
        let mut blocks = Vec::new();
        while let Ok(more) = pool.claim(count) {
            assert_eq!(more.len(), count, "all or none");
            blocks.extend(more);
        }
        blocks
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(claim_until_empty)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn threads_that_claim_until_empty_get_each_block_id_once() {
    for (round, count) in [1, 1, 3, 7, 1, 2].into_iter().cycle().take(60).enumerate() {
        let pool = pool(257, 0);
        for content in 0..(round as u32 % 50) {
            cache(&pool, content, Priority::DEFAULT);
        }
        let blocks = claim_all(&pool, 4, count);
        let mut block_ids: Vec<_> = blocks.iter().map(|block| block.block_id().index()).collect();
        block_ids.sort_unstable();
        block_ids.dedup();
        assert_eq!(block_ids.len(), blocks.len());
        assert_eq!(pool.claimable(), 257 - blocks.len());
        assert!(pool.claimable() < count);
        checked(&pool);
    }
}

#[test]
fn a_block_is_pinned_by_a_reader_or_taken_for_an_offload_but_never_both() {
    for _ in 0..400 {
        let pool = pool(1, 1);
        cache_secondary(&pool, 1);
        cache(&pool, 2, Priority::DEFAULT);
        let start = Barrier::new(2);
        let (offload, pin) = thread::scope(|scope| {
            let evictor = scope.spawn(|| {
                start.wait();
                claim(&pool).take_offload()
            });
            let reader = scope.spawn(|| {
                start.wait();
                pool.find_and_pin(name(1), Tier::Secondary)
            });
            (evictor.join().unwrap(), reader.join().unwrap())
        });
        assert!(offload.is_some() != pin.is_some(), "{offload:?} and {pin:?}");
        checked(&pool);
    }
}

#[test]
fn a_reader_that_comes_during_an_onboarding_keeps_its_block_id() {
    for _ in 0..400 {
        let pool = pool(2, 1);
        cache_secondary_beside(&pool, 1);
        let onboard = pool.begin_onboard(find(&pool, 1).unwrap(), claim(&pool)).unwrap();
        let start = Barrier::new(2);
        let (onboarded, reader) = thread::scope(|scope| {
            let onboarder = scope.spawn(|| {
                start.wait();
                onboard.commit_one()
            });
            let reader = scope.spawn(|| {
                start.wait();
                pool.find_and_pin(name(1), Tier::Secondary)
            });
            (onboarder.join().unwrap(), reader.join().unwrap())
        });
        let moved = matches!(onboarded, Moved::Moved(_));
        assert!(moved != reader.is_some(), "{onboarded:?} and {reader:?}");
        checked(&pool);
    }
}

/// Like `cache_secondary`, in a pool with another primary block.
fn cache_secondary_beside(pool: &BlockPool, content: u32) {
    let other = claim(pool);
    cache_secondary(pool, content);
    drop(other);
}

const WORKERS: usize = 4;
const ROUNDS: usize = 25;
const STEPS: usize = 4_000;
const CONTENTS: u64 = 40;

/// What one thread does: anything that an engine or a reader does, in any order.
struct Worker<'a> {
    pool: &'a BlockPool,
    memory: &'a Memory,
    harms: &'a Mutex<Vec<Harm>>,
    id: u32,
    random: u64,
    blocks: Vec<Claimed>,
    pins: Vec<(Pinned, u64)>,
}

impl Worker<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % bound
    }

    fn saw(&self, harm: Option<Harm>) {
        if let Some(harm) = harm {
            self.harms.lock().unwrap().push(harm);
        }
    }

    fn step(&mut self) {
        match self.below(100) {
            0..25 => self.claim(),
            25..45 => self.register(),
            45..52 => self.drop_block(),
            52..65 => self.find(),
            65..70 => self.clone_pin(),
            70..80 => self.onboard(),
            80..81 => self.begin_epoch(),
            81..83 => self.complete_epochs(),
            _ => self.release(),
        }
        for (pin, content) in &self.pins {
            self.saw(self.memory.shared(pin, *content));
        }
    }

    fn begin_epoch(&self) {
        self.pool.begin_epoch();
    }

    fn complete_epochs(&self) {
        let latest = self.pool.begin_epoch();
        self.pool.complete_epoch(latest).unwrap();
    }

    fn claim(&mut self) {
        let count = 1 + self.below(2) as usize;
        let Ok(blocks) = self.pool.claim(count) else { return self.give_way() };
        assert_eq!(blocks.len(), count, "all or none");
        for mut block in blocks {
            self.saw(self.memory.take(&block, self.id));
            if let Some(offload) = block.take_offload() {
                self.memory.offload(&offload);
                if self.below(8) > 0 {
                    offload.commit();
                }
            }
            let mark = u64::MAX - u64::from(self.id);
            self.memory.write(&block, mark);
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
        self.saw(self.memory.own(&block, u64::MAX - u64::from(self.id)));
        Some(block)
    }

    fn drop_block(&mut self) {
        let Some(block) = self.block() else { return };
        self.saw(self.memory.give(&block, self.id));
        drop(block);
    }

    fn register(&mut self) {
        let Some(block) = self.block() else { return };
        let content = self.below(CONTENTS);
        self.register_as(block, content);
    }

    fn register_as(&mut self, block: Claimed, content: u64) {
        self.memory.write(&block, content);
        self.saw(self.memory.give(&block, self.id));
        match block.register_one(name(content as u32), Priority::DEFAULT) {
            Registration::New(pin) => self.pins.push((pin, content)),
            // Not released between the two, so nobody else can have had it.
            Registration::Duplicate { existing, own } => {
                self.pins.push((existing, content));
                self.saw(self.memory.take(&own, self.id));
                self.memory.write(&own, u64::MAX - u64::from(self.id));
                self.blocks.push(own);
            }
        }
    }

    fn find(&mut self) {
        let first = self.below(CONTENTS) as u32;
        if self.below(2) == 0 {
            let pin = self.pool.find_and_pin(name(first), Tier::Secondary);
            self.pins.extend(pin.map(|pin| (pin, u64::from(first))));
        } else {
            let names: Vec<_> = (first..first + 3).map(name).collect();
            let pins = self.pool.match_prefix(&names).into_iter();
            self.pins.extend(pins.zip(u64::from(first)..));
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
        self.pool.release(pins.into_iter().map(|(pin, _)| pin).collect());
    }

    fn onboard(&mut self) {
        let far = |(pin, _): &(Pinned, u64)| pin.location().tier == Tier::Secondary;
        let Some(at) = self.pins.iter().position(far) else { return };
        let Some(target) = self.block() else { return };
        let (pin, content) = self.pins.swap_remove(at);
        let onboard = self.pool.begin_onboard(pin, target).unwrap();
        self.memory.onboard(&onboard);
        // The block stays this thread's until the commit. Only then may another take its block id.
        self.saw(self.memory.give_target(&onboard, self.id));
        match onboard.commit_one() {
            Moved::Moved(pin) => self.pins.push((pin, content)),
            Moved::Copied { copy, source } => {
                self.pins.push((source, content));
                self.saw(self.memory.take(&copy, self.id));
                self.saw(self.memory.own(&copy, content));
                self.register_as(copy, content);
            }
        }
    }

    fn finish(mut self) {
        while !self.blocks.is_empty() {
            self.drop_block();
        }
    }
}

#[test]
fn mixed_work_of_many_threads_never_meets_a_foreign_block_id() {
    let (pool, memory) = (pool(24, 8), Memory::new(24, 8));
    let harms = Mutex::new(Vec::new());
    let torn = Mutex::new(Vec::new());
    let barrier = Barrier::new(WORKERS);
    thread::scope(|scope| {
        for id in 1..=WORKERS as u32 {
            let mut worker = Worker {
                pool: &pool,
                memory: &memory,
                harms: &harms,
                id,
                random: u64::from(id) * 0x9E37_79B9,
                blocks: Vec::new(),
                pins: Vec::new(),
            };
            let (barrier, torn) = (&barrier, &torn);
            scope.spawn(move || {
                let mut alive = true;
                for _ in 0..ROUNDS {
                    // A thread that panics still comes to the barrier, or the others never leave it.
                    let steps = AssertUnwindSafe(|| (0..STEPS).for_each(|_| worker.step()));
                    alive = alive && catch_unwind(steps).is_ok();
                    // All stand still while one looks.
                    if barrier.wait().is_leader() {
                        torn.lock().unwrap().extend(worker.pool.check_integrity().err());
                    }
                    barrier.wait();
                }
                assert!(alive, "a step panicked");
                worker.finish();
            });
        }
    });
    assert_eq!(*harms.lock().unwrap(), []);
    assert_eq!(*torn.lock().unwrap(), []);
    let epoch = pool.begin_epoch();
    pool.complete_epoch(epoch).unwrap();
    checked(&pool);
    let stats = pool.stats();
    assert_eq!((stats.primary.claimable(), stats.secondary.claimable()), (24, 8), "{stats:?}");
    let counters = stats.counters;
    assert!(counters.offloaded > 0 && counters.onboarded > 0 && counters.hits > 0, "{counters:?}");
}

#[test]
fn pins_taken_and_given_back_by_many_threads_hold_the_block() {
    let pool = pool(2, 0);
    let block_id = write(&pool, 1).block_id();
    let barrier = Barrier::new(WORKERS);
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                barrier.wait();
                for _ in 0..5_000 {
                    // The block is off the queue as long as anybody has it, and back at zero.
                    let Some(pin) = find(&pool, 1) else {
                        panic!("evicted while a block was free")
                    };
                    assert_eq!(pin.block_id(), block_id);
                    if let Ok(other) = pool.claim(1) {
                        assert_ne!(other.ids().next().unwrap(), block_id);
                    }
                    drop(pin.clone());
                }
            });
        }
    });
    assert_eq!(pool.claimable(), 2);
    checked(&pool);
}
