//! What the threads do, and what must hold while they do it.

use std::sync::Arc;

use kv_pool::{
    BlockHash, BlockPin, BlockPool, ClaimedBlock, Onboarded, PoolConfig, Priority, Registration,
    Tier,
};
use shuttle::thread;

use crate::memory::{Harm, Memory};

const CONTENTS: u64 = 10;

/// A pool and how much happens on it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub primary: u64,
    pub secondary: u64,
    pub threads: u32,
    pub steps: usize,
}

struct Worker {
    pool: BlockPool,
    memory: Arc<Memory>,
    id: u32,
    random: u64,
    blocks: Vec<ClaimedBlock>,
    pins: Vec<(BlockPin, u64)>,
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
            0..20 => self.claim(),
            20..40 => self.register(),
            40..46 => self.drop_block(),
            46..60 => self.find(),
            60..68 => self.find_remote(),
            68..73 => self.clone_pin(),
            73..83 => self.onboard(),
            83..86 => self.epoch(),
            86..88 => self.remove(),
            _ => self.release(),
        }
        for (pin, content) in &self.pins {
            none(self.memory.shared(pin, *content));
        }
    }

    /// What a thread writes to a block before the block has a name.
    fn mark(&self) -> u64 {
        u64::MAX - u64::from(self.id)
    }

    fn claim(&mut self) {
        let count = 1 + self.below(2) as usize;
        let Ok(blocks) = self.pool.claim(count) else { return self.give_way() };
        assert_eq!(blocks.len(), count, "all or none");
        for mut block in blocks {
            none(self.memory.take(&block, self.id));
            if let Some(offload) = block.take_offload() {
                self.memory.offload(&offload);
                if self.below(6) > 0 {
                    offload.commit();
                }
            }
            self.memory.write(&block, self.mark());
            self.blocks.push(block);
        }
    }

    /// Somebody must, when all wait for blocks.
    fn give_way(&mut self) {
        self.release();
        self.drop_block();
    }

    fn block(&mut self) -> Option<ClaimedBlock> {
        let block = self.blocks.pop()?;
        none(self.memory.own(&block, self.mark()));
        Some(block)
    }

    fn drop_block(&mut self) {
        let Some(block) = self.block() else { return };
        none(self.memory.give(&block, self.id));
        drop(block);
    }

    fn register(&mut self) {
        let Some(block) = self.block() else { return };
        let content = self.below(CONTENTS);
        self.register_as(block, content);
    }

    fn register_as(&mut self, block: ClaimedBlock, content: u64) {
        self.memory.write(&block, content);
        none(self.memory.give(&block, self.id));
        let priority = Priority::new([0, 30, 35, 80][self.below(4) as usize]).unwrap();
        match block.register(name(content as u32), priority) {
            Registration::New(pin) => self.pins.push((pin, content)),
            Registration::Duplicate { existing, own } => {
                self.pins.push((existing, content));
                none(self.memory.take(&own, self.id));
                self.memory.write(&own, self.mark());
                self.blocks.push(own);
            }
        }
    }

    fn find(&mut self) {
        let first = self.below(CONTENTS) as u32;
        let names: Vec<_> = (first..first + 3).map(name).collect();
        let pins = self.pool.match_prefix(&names).into_iter();
        self.pins.extend(pins.zip(u64::from(first)..));
    }

    fn find_remote(&mut self) {
        let content = self.below(CONTENTS);
        let pin = self.pool.find_and_pin(name(content as u32), Tier::Secondary);
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
        self.pool.release(pins.into_iter().map(|(pin, _)| pin).collect());
    }

    fn epoch(&mut self) {
        let epoch = self.pool.begin_epoch();
        if self.below(3) > 0 {
            self.pool.complete_epoch(epoch).unwrap();
        }
    }

    fn remove(&mut self) {
        let content = self.below(CONTENTS) as u32;
        self.pool.remove(name(content));
    }

    fn onboard(&mut self) {
        let far = |(pin, _): &(BlockPin, u64)| pin.location().tier == Tier::Secondary;
        let Some(at) = self.pins.iter().position(far) else { return };
        let Some(target) = self.block() else { return };
        let (pin, content) = self.pins.swap_remove(at);
        let onboard = self.pool.begin_onboard(pin, target).unwrap();
        self.memory.onboard(&onboard);
        none(self.memory.give_target(&onboard, self.id));
        match onboard.commit() {
            Onboarded::Moved(pin) => self.pins.push((pin, content)),
            Onboarded::Copied { copy, source } => {
                self.pins.push((source, content));
                none(self.memory.take(&copy, self.id));
                none(self.memory.own(&copy, content));
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

/// One program: what each thread does is given by the seed, the order by the scheduler.
pub fn play(seed: u64, shape: Shape) {
    let config =
        PoolConfig { secondary_blocks: shape.secondary, ..PoolConfig::primary_only(shape.primary) };
    let pool = BlockPool::new(&config).unwrap();
    let memory = Arc::new(Memory::new(shape.primary as usize, shape.secondary as usize));
    let threads: Vec<_> = (1..=shape.threads)
        .map(|id| {
            let mut worker = Worker {
                pool: pool.clone(),
                memory: Arc::clone(&memory),
                id,
                random: (seed << 8 | u64::from(id)).wrapping_mul(0x9E37_79B9_7F4A_7C15),
                blocks: Vec::new(),
                pins: Vec::new(),
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
    let epoch = pool.begin_epoch();
    pool.complete_epoch(epoch).unwrap();
    check(&pool, &memory);
}

fn check(pool: &BlockPool, memory: &Memory) {
    pool.check_integrity().unwrap();
    let stats = pool.stats();
    assert_eq!(stats.counters.misuses, 0);
    for tier in [stats.primary, stats.secondary] {
        assert_eq!(tier.claimable(), tier.slots, "{stats:?}");
    }
    for content in 0..CONTENTS {
        if let Some(pin) = pool.match_prefix(&[name(content as u32)]).pin(0) {
            none(memory.shared(&pin, content));
        }
    }
}
