//! The pool, written down as slowly and plainly as possible: every choice is a search of all blocks.

use kv_pool::{PoolConfig, PoolCounters, PoolStats, TierStats};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Level {
    Primary,
    Secondary,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Now {
    Absent,
    /// Unused. Of blocks that are otherwise equal, the one with the lower number goes first.
    Unused(i64),
    Released {
        epoch: u64,
        order: i64,
    },
    Claimed,
    Pinned(u32),
    /// Released while a copy reads its slot.
    Draining,
    /// On its way to the secondary tier with this content, unless that was removed.
    Moving(Option<u32>),
}

#[derive(Clone, Debug)]
pub struct Block {
    pub level: Level,
    pub slot: usize,
    pub content: Option<u32>,
    pub priority: u8,
    pub now: Now,
    /// A copy of what lay in its slot before may not have read it yet.
    pub copying: bool,
}

/// What a claim must yield.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Claimed {
    pub block: usize,
    pub slot: usize,
    pub evicted: bool,
    pub moving: Option<usize>,
}

pub struct Model {
    pub blocks: Vec<Block>,
    pub counters: PoolCounters,
    pub begun: u64,
    pub completed: u64,
    ready: usize,
    least: u8,
    time: i64,
}

impl Model {
    pub fn new(config: &PoolConfig) -> Self {
        let block = |level, slot| Block {
            level,
            slot,
            content: None,
            priority: 35,
            now: Now::Absent,
            copying: false,
        };
        let mut model = Self {
            blocks: (0..config.primary_blocks as usize)
                .map(|slot| block(Level::Primary, slot))
                .chain((0..config.secondary_blocks as usize).map(|s| block(Level::Secondary, s)))
                .collect(),
            counters: PoolCounters::default(),
            begun: 0,
            completed: 0,
            ready: 0,
            least: config.offload_min_priority.get(),
            time: 0,
        };
        model.add(config.primary_ready as usize);
        for block in config.primary_blocks as usize..model.blocks.len() {
            model.blocks[block].now = Now::Unused(model.tick());
        }
        model
    }

    fn tick(&mut self) -> i64 {
        self.time += 1;
        self.time
    }

    pub fn add(&mut self, upto: usize) {
        for block in self.ready..upto {
            self.blocks[block].now = Now::Unused(self.tick());
        }
        self.ready = self.ready.max(upto);
    }

    pub fn count(&self, level: Level, which: impl Fn(&Block) -> bool) -> usize {
        self.blocks.iter().filter(|block| block.level == level && which(block)).count()
    }

    pub fn claimable(&self) -> usize {
        self.count(Level::Primary, |block| matches!(block.now, Now::Unused(_)))
    }

    pub fn retiring(&self) -> usize {
        self.count(Level::Primary, |b| matches!(b.now, Now::Released { .. } | Now::Draining))
    }

    /// The unused block of a tier that goes first: without content, low priority, long unused.
    fn next(&self, level: Level) -> Option<usize> {
        let rank = |block: &Block| match block.now {
            Now::Unused(order) if block.level == level => {
                Some((block.content.is_some(), block.content.map_or(0, |_| block.priority), order))
            }
            _ => None,
        };
        let ranked = self.blocks.iter().enumerate().filter_map(|(id, b)| Some((rank(b)?, id)));
        ranked.min().map(|(_, id)| id)
    }

    pub fn claim(&mut self, count: usize) -> Option<Vec<Claimed>> {
        if self.claimable() < count {
            return None;
        }
        self.counters.claimed += count as u64;
        Some((0..count).map(|_| self.claim_one()).collect())
    }

    fn claim_one(&mut self) -> Claimed {
        let victim = self.next(Level::Primary).unwrap();
        let slot = self.blocks[victim].slot;
        let Some(content) = self.blocks[victim].content.take() else {
            return self.claimed(victim, slot, false, None);
        };
        self.counters.evicted += 1;
        let keep = self.blocks[victim].priority >= self.least;
        let Some(target) = self.next(Level::Secondary).filter(|_| keep) else {
            self.counters.dropped += 1;
            return self.claimed(victim, slot, true, None);
        };
        self.counters.dropped += u64::from(self.blocks[target].content.take().is_some());
        self.swap(victim, target);
        self.blocks[victim].now = Now::Moving(Some(content));
        self.blocks[target].copying = true;
        self.claimed(target, slot, true, Some(victim))
    }

    fn claimed(
        &mut self,
        block: usize,
        slot: usize,
        evicted: bool,
        moving: Option<usize>,
    ) -> Claimed {
        self.blocks[block].now = Now::Claimed;
        Claimed { block, slot, evicted, moving }
    }

    fn swap(&mut self, one: usize, other: usize) {
        let (a, b) = (self.blocks[one].clone(), self.blocks[other].clone());
        (self.blocks[one].level, self.blocks[one].slot) = (b.level, b.slot);
        (self.blocks[other].level, self.blocks[other].slot) = (a.level, a.slot);
    }

    /// Nobody uses the block any more.
    fn rest(&mut self, block: usize) {
        let order = self.tick();
        if self.blocks[block].copying {
            self.blocks[block].now = Now::Draining;
        } else if self.begun > self.completed {
            self.blocks[block].now = Now::Released { epoch: self.begun, order };
        } else {
            self.unused(block);
        }
    }

    fn unused(&mut self, block: usize) {
        let order = self.tick();
        // The last one released without content is the next one claimed.
        let order = if self.blocks[block].content.is_some() { order } else { -order };
        self.blocks[block].now = Now::Unused(order);
    }

    pub fn complete(&mut self, upto: u64) {
        self.completed = self.completed.max(upto);
        let mut over: Vec<(i64, usize)> = Vec::new();
        for (id, block) in self.blocks.iter().enumerate() {
            match block.now {
                Now::Released { epoch, order } if epoch <= self.completed => over.push((order, id)),
                _ => {}
            }
        }
        over.sort_unstable();
        for (_, id) in over {
            self.unused(id);
        }
    }

    /// The block that lookups of this content find.
    pub fn find(&self, content: u32) -> Option<usize> {
        self.blocks.iter().position(|block| block.content == Some(content))
    }

    pub fn pin(&mut self, block: usize) {
        self.blocks[block].now = match self.blocks[block].now {
            Now::Pinned(pins) => Now::Pinned(pins + 1),
            _ => Now::Pinned(1),
        };
    }

    pub fn unpin(&mut self, block: usize) {
        match self.blocks[block].now {
            Now::Pinned(1) => self.rest(block),
            Now::Pinned(pins) => self.blocks[block].now = Now::Pinned(pins - 1),
            now => panic!("the driver holds no pin of {block}, which is {now:?}"),
        }
    }

    pub fn release_claimed(&mut self, block: usize) {
        assert_eq!(self.blocks[block].now, Now::Claimed);
        self.rest(block);
    }

    /// The block that has the name already, if it keeps it. It is pinned then.
    pub fn register(&mut self, block: usize, content: u32, priority: u8) -> Option<usize> {
        if let Some(existing) = self.find(content) {
            let found = &self.blocks[existing];
            if found.level == Level::Primary || matches!(found.now, Now::Pinned(_)) {
                self.counters.duplicates += 1;
                self.pin(existing);
                return Some(existing);
            }
            self.forget(existing);
        }
        self.counters.registered += 1;
        let new = &mut self.blocks[block];
        (new.content, new.priority, new.now) = (Some(content), priority, Now::Pinned(1));
        None
    }

    fn forget(&mut self, block: usize) {
        self.counters.dropped += 1;
        self.blocks[block].content = None;
        if let Now::Unused(_) = self.blocks[block].now {
            self.unused(block);
        }
    }

    pub fn remove(&mut self, content: u32) -> bool {
        let mut any = false;
        for block in &mut self.blocks {
            if block.now == Now::Moving(Some(content)) {
                block.now = Now::Moving(None);
                any = true;
            }
        }
        if let Some(block) = self.find(content) {
            self.forget(block);
            any = true;
        }
        any
    }

    /// The copy that reads the slot of `holder` has ended.
    fn end_copy(&mut self, holder: usize) {
        self.blocks[holder].copying = false;
        if self.blocks[holder].now == Now::Draining {
            self.rest(holder);
        }
    }

    pub fn commit_offload(&mut self, block: usize, holder: usize) {
        let Now::Moving(content) = self.blocks[block].now else { panic!("not on its way") };
        match content.filter(|&content| self.find(content).is_none()) {
            Some(content) => {
                self.blocks[block].content = Some(content);
                self.counters.offloaded += 1;
            }
            None => self.counters.dropped += 1,
        }
        self.rest(block);
        self.end_copy(holder);
    }

    pub fn abort_offload(&mut self, block: usize, holder: usize) {
        self.counters.dropped += 1;
        self.rest(block);
        self.end_copy(holder);
    }

    /// Whether the content moved; it is copied otherwise.
    pub fn onboard(&mut self, source: usize, target: usize) -> bool {
        self.counters.onboarded += 1;
        let alone = self.blocks[source].now == Now::Pinned(1);
        if alone {
            self.swap(source, target);
            self.rest(target);
        }
        alone
    }

    pub fn stats(&self) -> PoolStats {
        let tier = |level| {
            let count = |which: &dyn Fn(&Block) -> bool| self.count(level, which) as u64;
            TierStats {
                slots: count(&|block| block.now != Now::Absent),
                empty: count(&|b| matches!(b.now, Now::Unused(_)) && b.content.is_none()),
                cached: count(&|b| matches!(b.now, Now::Unused(_)) && b.content.is_some()),
                retiring: count(&|b| matches!(b.now, Now::Released { .. } | Now::Draining)),
                pinned: count(&|block| matches!(block.now, Now::Pinned(_))),
                claimed: count(&|block| matches!(block.now, Now::Claimed | Now::Moving(_))),
            }
        };
        PoolStats {
            primary: tier(Level::Primary),
            secondary: tier(Level::Secondary),
            further: [TierStats::default(); 2],
            counters: self.counters,
        }
    }
}
