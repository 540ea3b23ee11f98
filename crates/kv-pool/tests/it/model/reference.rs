//! The pool, written down as slowly and plainly as possible: every choice is a search of all blocks.
//!
//! This file has the state and what happens to a single block; `operations.rs` has what callers ask.

use kv_pool::{
    BlockHash, PoolConfig,
    stats::{EvictionAges, PoolCounters, PoolStats, TierStats},
    tenants::TenantQuota,
};

pub const PRIMARY: usize = 0;
pub const SECONDARY: usize = 1;
pub const DEFAULT_PRIORITY: u8 = 35;
/// Block ids that were never used go after those that were, of blocks without content.
pub const NEVER_USED: i64 = 1 << 40;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Now {
    Absent,
    /// Unused. Of blocks that are otherwise equal, the one with the lower number goes first.
    Unused(i64),
    /// Unused, and passed over when its turn came, because others follow it.
    Shadowed(i64),
    /// Unused, and passed over when its turn came, because it is kept for its tenant.
    PassedOver(i64),
    Released {
        epoch: u64,
        order: i64,
    },
    Claimed,
    Pinned(u32),
    /// Released while a copy reads its block id.
    Draining,
    /// On its way to the secondary tier. The name comes back on arrival, unless it is removed, or given
    /// to other content, before.
    Moving {
        content: Option<u32>,
        from: (usize, usize),
    },
}

impl Now {
    pub fn is_unused(self) -> bool {
        matches!(self, Self::Unused(_) | Self::Shadowed(_) | Self::PassedOver(_))
    }
}

#[derive(Clone, Debug)]
pub struct Block {
    pub tier: usize,
    pub block_id: usize,
    pub content: Option<u32>,
    pub priority: u8,
    /// How long the priority lasts after the release.
    pub duration: Option<u64>,
    /// When it ends.
    pub expiry: Option<u64>,
    /// It has the lowest priority until the next pin.
    pub over: bool,
    pub now: Now,
    pub parent: Option<usize>,
    /// It was named as what follows other content, whether that is there or not.
    pub chained: bool,
    pub depth: u16,
    pub tenant: usize,
    /// It was in use at least once.
    pub appeared: bool,
    /// What the pool took for the time when it became unused, with content.
    pub unused_at: u64,
    /// Since when it is cached, to tell a tenant's oldest.
    pub cached_since: Option<i64>,
    /// Since when it waits for those that follow it, for it was a tenant's oldest before.
    pub followed_since: Option<i64>,
}

/// What happened to content, as readers of the log are told.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Happened {
    Stored { block: usize, name: BlockHash, parent: BlockHash, at: (usize, usize), priority: u8 },
    Removed { block: usize, name: BlockHash, at: (usize, usize) },
    Moved { block: usize, name: BlockHash, from: (usize, usize), to: (usize, usize) },
    Changed { block: usize, name: BlockHash, from: u8, to: u8 },
}

/// What a claim must yield.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ModelClaim {
    pub block: usize,
    pub block_id: usize,
    pub evicted: bool,
    /// The secondary block id that what lay there is to be moved to.
    pub moving: Option<usize>,
}

pub struct Model {
    pub blocks: Vec<Block>,
    pub counters: PoolCounters,
    pub ages: EvictionAges,
    pub begun: u64,
    pub completed: u64,
    /// Quotas for the primary tier; the first is nobody's.
    pub tenants: Vec<TenantQuota>,
    pub events: Vec<Happened>,
    /// Primary block ids that a copy of evicted content may not have read yet.
    pub reading: Vec<usize>,
    pub time: u64,
    /// How often the clock must have been read.
    pub reads: u64,
    /// The time that the pool has read last.
    now: u64,
    /// Blocks that have left with content, since their last user let go of them.
    pub seen_leaving: u64,
    /// Of each tier, the block ids that may be handed out.
    pub budgets: [usize; 4],
    pub least: u8,
    ticks: i64,
}

pub fn name(content: u32) -> BlockHash {
    BlockHash::chain(BlockHash::ROOT, &[content])
}

impl Block {
    /// The content whose name the block bears, also on its way.
    pub fn bears(&self) -> Option<u32> {
        match self.now {
            Now::Moving { content, .. } => content,
            _ => self.content,
        }
    }
}

impl Model {
    pub fn new(config: &PoolConfig) -> Self {
        let sizes = [
            config.primary_blocks,
            config.secondary_blocks,
            config.further_blocks[0],
            config.further_blocks[1],
        ];
        let mut blocks = Vec::new();
        for (tier, &size) in sizes.iter().enumerate() {
            blocks.extend((0..size as usize).map(|block_id| Block {
                tier,
                block_id,
                content: None,
                priority: DEFAULT_PRIORITY,
                duration: None,
                over: false,
                expiry: None,
                now: Now::Absent,
                parent: None,
                chained: false,
                depth: 0,
                tenant: 0,
                appeared: false,
                unused_at: 0,
                cached_since: None,
                followed_since: None,
            }));
        }
        let mut model = Self {
            blocks,
            counters: PoolCounters::default(),
            ages: EvictionAges::default(),
            begun: 0,
            completed: 0,
            tenants: vec![TenantQuota::NONE],
            events: Vec::new(),
            reading: Vec::new(),
            time: 0,
            reads: 0,
            now: 0,
            seen_leaving: 0,
            budgets: sizes.map(|size| size as usize),
            least: config.offload_min_priority.get(),
            ticks: 0,
        };
        for block in model.ids() {
            model.blocks[block].now = Now::Unused(NEVER_USED + model.tick());
        }
        model
    }

    pub fn tick(&mut self) -> i64 {
        self.ticks += 1;
        self.ticks
    }

    pub fn read_clock(&mut self) -> u64 {
        self.reads += 1;
        self.now = self.time;
        self.time
    }

    pub fn at(&self, block: usize) -> (usize, usize) {
        (self.blocks[block].tier, self.blocks[block].block_id)
    }

    pub fn is_unused(&self, block: usize) -> bool {
        self.blocks[block].now.is_unused()
    }

    pub fn ids(&self) -> std::ops::Range<usize> {
        0..self.blocks.len()
    }

    pub fn count(&self, tier: usize, which: impl Fn(&Block) -> bool) -> usize {
        self.blocks.iter().filter(|block| block.tier == tier && which(block)).count()
    }

    pub fn claimable(&self, tier: usize) -> usize {
        self.count(tier, |block| block.now.is_unused())
    }

    pub fn retiring(&self, tier: usize) -> usize {
        self.count(tier, |b| matches!(b.now, Now::Released { .. } | Now::Draining))
    }

    pub fn children(&self, block: usize) -> usize {
        self.blocks.iter().filter(|other| other.parent == Some(block)).count()
    }

    /// The block that lookups of this content find.
    pub fn find(&self, content: u32) -> Option<usize> {
        self.blocks.iter().position(|block| block.content == Some(content))
    }

    /// The block that bears the name of this content, which may be on its way.
    pub fn bearer(&self, content: u32) -> Option<usize> {
        self.blocks.iter().position(|block| block.bears() == Some(content))
    }

    /// Whether a copy of evicted content may still read the block id of a block.
    pub fn is_read(&self, block: usize) -> bool {
        let (tier, block_id) = self.at(block);
        tier == PRIMARY && self.reading.contains(&block_id)
    }

    /// Blocks of a tenant in the primary tier: in use, and cached.
    pub fn shares(&self, tenant: usize) -> (u64, u64) {
        let own = |block: &Block| block.tenant == tenant;
        let unused = |block: &Block| block.now.is_unused();
        let held = self.count(PRIMARY, |b| own(b) && !unused(b) && b.now != Now::Absent);
        let cached = self.count(PRIMARY, |b| own(b) && unused(b) && b.content.is_some());
        (held as u64, cached as u64)
    }

    /// Whether a cached block of the primary tier is kept for its owner.
    pub fn is_kept(&self, block: usize, by: usize) -> bool {
        let Block { tenant, tier, .. } = self.blocks[block];
        let (held, cached) = self.shares(tenant);
        tier == PRIMARY && tenant != by && held + cached <= self.tenants[tenant].reserved
    }

    /// Whether the tenant of a block may hold it, if nobody does yet.
    pub fn may_use(&self, block: usize) -> bool {
        let Block { tenant, tier, .. } = self.blocks[block];
        !self.is_unused(block) || tier != PRIMARY || self.check_tenant(tenant, 1).is_ok()
    }

    /// The unused block of a tier that goes first: without content, low priority, passed over before,
    /// long unused; if there is none, the one that was passed over first for those that follow it.
    /// Whether it is such. Those that were passed over for their tenants are `allowed` or not there.
    fn next(&self, tier: usize, allowed: impl Fn(usize) -> bool) -> Option<(usize, bool)> {
        let rank = |id: usize| {
            let block = &self.blocks[id];
            let named = block.content.is_some();
            let class = (named, if named { block.priority } else { 0 });
            match block.now {
                _ if block.tier != tier => None,
                Now::Unused(order) => Some((class, true, order)),
                Now::PassedOver(order) if allowed(id) => Some((class, false, order)),
                _ => None,
            }
        };
        let passed = |id: usize| match self.blocks[id].now {
            Now::Shadowed(order) if self.blocks[id].tier == tier => Some(order),
            _ => None,
        };
        let first = self.ids().filter_map(|id| Some((rank(id)?, id))).min();
        let last = || self.ids().filter_map(|id| Some((passed(id)?, id))).min();
        match first {
            Some((_, id)) => Some((id, false)),
            None => last().map(|(_, id)| (id, true)),
        }
    }

    /// Takes the next block of a tier for `by`.
    pub fn claim_one(&mut self, tier: usize, by: usize) -> Option<ModelClaim> {
        self.counters.claimed += 1;
        loop {
            let (victim, last) = self.next(tier, |id| !self.is_kept(id, by))?;
            if self.blocks[victim].content.is_none() {
                return Some(self.claimed(victim, by, false, None));
            }
            let passed = matches!(self.blocks[victim].now, Now::PassedOver(_));
            if self.is_kept(victim, by) && !passed {
                self.blocks[victim].now = Now::PassedOver(self.tick());
                continue;
            }
            if tier == PRIMARY
                && self.blocks[victim].priority >= self.least
                && let Some(target) = self.make_room()
            {
                return Some(self.displace(victim, target, by));
            }
            if self.children(victim) > 0 && !last {
                self.blocks[victim].now = Now::Shadowed(self.tick());
                continue;
            }
            self.counters.dropped += 1;
            self.count_evicted(victim);
            self.unname(victim);
            return Some(self.claimed(victim, by, true, None));
        }
    }

    /// Counts content that loses its primary block, and how long it was unused.
    pub fn count_evicted(&mut self, block: usize) {
        if self.blocks[block].tier == PRIMARY {
            let age = self.now - self.blocks[block].unused_at;
            self.counters.evicted += 1;
            self.ages.evicted += 1;
            self.ages.total_ms += age;
            self.ages.max_ms = self.ages.max_ms.max(age);
        }
    }

    /// A block of the secondary tier without content.
    pub fn make_room(&mut self) -> Option<usize> {
        loop {
            let (block, last) = self.next(SECONDARY, |_| true)?;
            if self.blocks[block].content.is_some() {
                if self.children(block) > 0 && !last {
                    self.blocks[block].now = Now::Shadowed(self.tick());
                    continue;
                }
                self.unname(block);
                self.counters.dropped += 1;
            }
            return Some(block);
        }
    }

    pub fn displace(&mut self, victim: usize, target: usize, by: usize) -> ModelClaim {
        self.count_evicted(victim);
        let from = self.at(victim);
        self.swap(victim, target);
        let content = self.blocks[victim].content.take().unwrap();
        self.blocks[victim].now = Now::Moving { content: Some(content), from };
        (self.blocks[victim].cached_since, self.blocks[victim].followed_since) = (None, None);
        self.reading.push(from.1);
        self.claimed(target, by, true, Some(self.blocks[victim].block_id))
    }

    pub fn claimed(
        &mut self,
        block: usize,
        by: usize,
        evicted: bool,
        moving: Option<usize>,
    ) -> ModelClaim {
        let claimed = &mut self.blocks[block];
        claimed.appeared = true;
        (claimed.now, claimed.tenant, claimed.depth) = (Now::Claimed, by, 0);
        (claimed.priority, claimed.duration) = (DEFAULT_PRIORITY, None);
        ModelClaim { block, block_id: claimed.block_id, evicted, moving }
    }

    pub fn swap(&mut self, one: usize, other: usize) {
        let (a, b) = (self.at(one), self.at(other));
        (self.blocks[one].tier, self.blocks[one].block_id) = b;
        (self.blocks[other].tier, self.blocks[other].block_id) = a;
    }

    /// Whether a block lies beyond the budget of its tier.
    pub fn is_beyond(&self, block: usize) -> bool {
        let (tier, block_id) = self.at(block);
        block_id >= self.budgets[tier]
    }

    /// Nobody uses the block any more.
    pub fn rest(&mut self, block: usize) {
        let Block { duration, expiry, priority, content, .. } = self.blocks[block];
        if let (Some(duration), None, Some(_)) = (duration, expiry, content)
            && priority != DEFAULT_PRIORITY
        {
            self.blocks[block].expiry = Some(self.read_clock() + duration);
        }
        if self.is_read(block) {
            self.blocks[block].now = Now::Draining;
        } else if self.begun > self.completed {
            let order = self.tick();
            self.blocks[block].now = Now::Released { epoch: self.begun, order };
        } else {
            self.unused(block);
        }
    }

    pub fn unused(&mut self, block: usize) {
        if self.is_beyond(block) {
            return self.leave(block);
        }
        let order = self.tick();
        if self.blocks[block].content.is_none() {
            // The last one released without content is the next one claimed.
            self.blocks[block].now = Now::Unused(-order);
            return;
        }
        self.blocks[block].now = Now::Unused(order);
        self.blocks[block].unused_at = self.now;
        self.blocks[block].cached_since.get_or_insert(order);
        self.give_way(self.blocks[block].tenant, self.blocks[block].tier);
    }

    /// Drops what a tenant has cached beyond its quota.
    pub fn give_way(&mut self, tenant: usize, tier: usize) {
        while tier == PRIMARY && self.shares(tenant).1 > self.tenants[tenant].cached_max {
            let own = |id: &usize| {
                let block = &self.blocks[*id];
                block.tenant == tenant && block.tier == tier && block.cached_since.is_some()
            };
            let all: Vec<usize> = self.ids().filter(own).collect();
            let waits = |id: &usize| self.blocks[*id].followed_since.is_some();
            let (mut followed, mut own): (Vec<_>, Vec<_>) = all.into_iter().partition(waits);
            own.sort_by_key(|&id| self.blocks[id].cached_since);
            let leaf = own.iter().position(|&id| self.children(id) == 0);
            for &id in &own[..leaf.unwrap_or(own.len())] {
                self.blocks[id].followed_since = Some(self.tick());
                followed.push(id);
            }
            followed.sort_by_key(|&id| self.blocks[id].followed_since);
            self.forget(leaf.map_or_else(|| followed[0], |at| own[at]));
        }
    }

    pub fn pin(&mut self, block: usize) {
        if std::mem::take(&mut self.blocks[block].over) {
            self.set_priority(block, DEFAULT_PRIORITY);
        }
        let pinned = &mut self.blocks[block];
        if let Now::Pinned(pins) = pinned.now {
            pinned.now = Now::Pinned(pins + 1);
            return;
        }
        pinned.now = Now::Pinned(1);
        (pinned.duration, pinned.expiry) = (None, None);
        (pinned.cached_since, pinned.followed_since) = (None, None);
    }

    pub fn unpin(&mut self, block: usize) {
        match self.blocks[block].now {
            Now::Pinned(1) => self.rest(block),
            Now::Pinned(pins) => self.blocks[block].now = Now::Pinned(pins - 1),
            now => panic!("the driver holds no pin of {block}, which is {now:?}"),
        }
    }

    pub fn link(&mut self, block: usize, parent: usize) {
        if block == parent {
            return;
        }
        self.blocks[block].parent = Some(parent);
        self.blocks[block].depth = self.blocks[parent].depth.saturating_add(1);
    }

    /// Takes a block out of its chain, on both sides.
    pub fn cut(&mut self, block: usize) {
        self.unlink(block);
        for other in &mut self.blocks {
            if other.parent == Some(block) {
                other.parent = None;
            }
        }
    }

    /// Has a block follow no other.
    pub fn unlink(&mut self, block: usize) {
        let parent = self.blocks[block].parent.take();
        self.blocks[block].chained = false;
        let Some(parent) = parent.filter(|&parent| self.children(parent) == 0) else { return };
        // Its turn has come up before: it is the next of its priority, and of its tenant's.
        if self.blocks[parent].followed_since.take().is_some() {
            self.blocks[parent].cached_since = Some(-self.tick());
        }
        if let Now::Shadowed(_) = self.blocks[parent].now {
            self.blocks[parent].now = Now::Unused(-self.tick());
        }
    }

    /// Takes the name from a block, with all that was said of the content, and nothing else.
    pub fn take_name(&mut self, block: usize) {
        // Nobody was told of a move before its end.
        let (content, at) = match &mut self.blocks[block].now {
            Now::Moving { content, from } => (content.take(), *from),
            _ => (self.blocks[block].content.take(), self.at(block)),
        };
        self.events.push(Happened::Removed { block, name: name(content.unwrap()), at });
        let unnamed = &mut self.blocks[block];
        if std::mem::take(&mut unnamed.over) {
            unnamed.priority = DEFAULT_PRIORITY;
        }
        (unnamed.duration, unnamed.expiry) = (None, None);
        (unnamed.cached_since, unnamed.followed_since) = (None, None);
    }

    pub fn unname(&mut self, block: usize) {
        self.take_name(block);
        self.cut(block);
    }

    pub fn forget(&mut self, block: usize) {
        self.unname(block);
        self.counters.dropped += 1;
        if self.is_unused(block) {
            self.unused(block);
        }
    }

    pub fn set_priority(&mut self, block: usize, to: u8) {
        let from = std::mem::replace(&mut self.blocks[block].priority, to);
        if let Some(content) = self.blocks[block].bears()
            && from != to
        {
            self.events.push(Happened::Changed { block, name: name(content), from, to });
        }
    }

    pub fn stats(&self) -> PoolStats {
        let tier = |tier| {
            let count = |which: &dyn Fn(&Block) -> bool| self.count(tier, which) as u64;
            let unused = |b: &Block| b.now.is_unused();
            TierStats {
                blocks: count(&|block| block.now != Now::Absent),
                beyond: count(&|b| b.now != Now::Absent && b.block_id >= self.budgets[tier]),
                empty: count(&|b| unused(b) && b.content.is_none()),
                cached: count(&|b| unused(b) && b.content.is_some()),
                retiring: self.retiring(tier) as u64,
                pinned: count(&|block| matches!(block.now, Now::Pinned(_))),
                claimed: count(&|block| matches!(block.now, Now::Claimed | Now::Moving { .. })),
            }
        };
        PoolStats {
            primary: tier(PRIMARY),
            secondary: tier(SECONDARY),
            further: [tier(2), tier(3)],
            counters: self.counters,
        }
    }
}
