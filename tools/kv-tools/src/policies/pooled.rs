//! Simulates eviction policies in a cache with a fixed number of blocks.

use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyTime, ReuseHint};
use kv_pool::{BlockHash, Priority, policy::RecordId};

use super::evict::Eviction;
use super::{Capacity, Lookups, Policy, RequestBlocks, TraceBlock};

/// A multiplier that distributes numbers over names: 2^64 divided by the golden ratio.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// The content of one cache entry.
#[derive(Clone, Copy)]
struct Cached {
    content: TraceBlock,
    facts: BlockFacts,
    /// Number of cached blocks with this one as their parent.
    children: u32,
    held: bool,
}

/// The cache: the block in each entry.
pub(super) struct Slots {
    policy: Box<dyn EvictionPolicy>,
    /// For each block, its entry in the cache.
    slot_of: Vec<Option<RecordId>>,
    cached: Vec<Option<Cached>>,
    free: Vec<RecordId>,
    /// Whether the policy is told about children, so that no block is evicted before those that
    /// follow it.
    tails_first: bool,
}

impl Slots {
    /// An empty cache with this policy.
    pub(super) fn new(lookups: &Lookups<'_>, capacity: Capacity, policy: Eviction) -> Self {
        // A cache with room for every block of the trace never evicts, so more entries would change
        // nothing.
        let slots = capacity.blocks().min(lookups.distinct());
        let policy = policy.make(slots as u64);
        Self {
            // The trace's own tables, which are in memory already, are larger.
            policy: policy.expect("a policy for no more blocks than the trace has"),
            slot_of: vec![None; lookups.distinct()],
            cached: vec![None; slots],
            free: (0..slots as u32).rev().map(RecordId::from_index).collect(),
            tails_first: false,
        }
    }

    /// Keeps blocks from being evicted before those that follow them, as a pool does.
    pub(super) fn tails_first(self) -> Self {
        Self { tails_first: true, ..self }
    }

    pub(super) fn slot_of(&self, block: TraceBlock) -> Option<RecordId> {
        self.slot_of[block.index()]
    }

    /// Tells the policy that a lookup found a cached block. The block is held from now on.
    pub(super) fn find(&mut self, slot: RecordId, now: PolicyTime) {
        let Some(cached) = &mut self.cached[slot.index()] else { return };
        cached.facts.found += 1;
        cached.facts.used = now;
        cached.facts.priority = Priority::DEFAULT;
        self.policy.found(slot, now);
        if !std::mem::replace(&mut cached.held, true) {
            self.policy.held(slot);
        }
    }

    /// Caches `content`, which is not cached yet, evicting another block if necessary. The block is
    /// held from now on. Returns `None` if all blocks are held.
    pub(super) fn insert(&mut self, content: TraceBlock, facts: BlockFacts) -> Option<RecordId> {
        self.policy.missed(facts.hash, facts.used);
        if self.free.is_empty() {
            self.evict(facts.used)?;
            while self.policy.overdue() > 0 {
                self.evict(facts.used)?;
            }
        }
        let slot = self.free.pop()?;
        // The parent may be the evicted block.
        let parent = facts.parent.filter(|parent| self.cached[parent.index()].is_some());
        let facts = BlockFacts { parent, ..facts };
        if let Some(parent) = parent
            && self.count_child(parent, |children| children + 1) == Some(1)
            && self.tails_first
        {
            self.policy.children(parent, true);
        }
        self.slot_of[content.index()] = Some(slot);
        self.cached[slot.index()] = Some(Cached { content, facts, children: 0, held: true });
        self.policy.stored(slot, &facts);
        Some(slot)
    }

    /// Holds a cached block.
    fn hold(&mut self, slot: RecordId) {
        if let Some(cached) = &mut self.cached[slot.index()]
            && !std::mem::replace(&mut cached.held, true)
        {
            self.policy.held(slot);
        }
    }

    /// Marks entry `slot` as no longer held.
    pub(super) fn release(&mut self, slot: RecordId) {
        let Some(cached) = &mut self.cached[slot.index()] else { return };
        if std::mem::take(&mut cached.held) {
            cached.facts.has_children = self.tails_first && cached.children > 0;
            self.policy.evictable(slot, &cached.facts);
        }
    }

    /// Gives a hint about a chain of blocks that are held, from the last one to the first, as a pool does.
    fn hint(&mut self, held: impl Iterator<Item = RecordId>, hint: ReuseHint, now: PolicyTime) {
        let mut after = None;
        for slot in held {
            let Some(cached) = &self.cached[slot.index()] else { return };
            let follows = after.is_some_and(|after: RecordId| {
                self.cached[after.index()].is_some_and(|after| after.facts.parent == Some(slot))
            });
            if hint == ReuseHint::Over && cached.children > u32::from(follows) {
                // Other sessions begin with it.
                return;
            }
            after = Some(slot);
            if hint == ReuseHint::Over
                && let Some(cached) = &mut self.cached[slot.index()]
            {
                cached.facts.priority = Priority::MIN;
            }
            self.policy.hinted(slot, hint, now);
        }
    }

    fn evict(&mut self, now: PolicyTime) -> Option<()> {
        let slot = self.policy.victim(now)?;
        let evicted = self.cached[slot.index()].take()?;
        self.policy.evicted(slot, evicted.facts.hash);
        self.slot_of[evicted.content.index()] = None;
        self.free.push(slot);
        if let Some(parent) = evicted.facts.parent
            && self.count_child(parent, |children| children.saturating_sub(1)) == Some(0)
        {
            self.policy.children(parent, false);
        }
        Some(())
    }

    fn count_child(&mut self, slot: RecordId, change: impl FnOnce(u32) -> u32) -> Option<u32> {
        let cached = self.cached[slot.index()].as_mut()?;
        cached.children = change(cached.children);
        Some(cached.children)
    }
}

/// Serves requests block by block, as in the literature: a block is looked up, cached and evictable
/// before the next one, unless the policy is told about children and it has some.
pub(super) struct BlockByBlock(pub(super) Slots);

impl Policy for BlockByBlock {
    fn serve(&mut self, request: &RequestBlocks<'_>) -> u64 {
        let mut hits = 0;
        for (depth, &block) in request.blocks.iter().enumerate() {
            let before = depth.checked_sub(1).filter(|_| self.0.tails_first);
            let parent = before.and_then(|before| self.0.slot_of(request.blocks[before]));
            let facts = facts(request, depth, parent);
            let slot = match self.0.slot_of(block) {
                Some(slot) => {
                    self.0.find(slot, facts.used);
                    hits += 1;
                    Some(slot)
                }
                None => self.0.insert(block, facts),
            };
            if let Some(slot) = slot {
                self.0.release(slot);
            }
        }
        if let Some(hint) = request.hint
            && self.0.tails_first
        {
            self.hint(request, hint);
        }
        hits
    }
}

impl BlockByBlock {
    /// Takes the blocks of a request that are still cached in hand once more, for a hint.
    fn hint(&mut self, request: &RequestBlocks<'_>, hint: ReuseHint) {
        let slots = request.blocks.iter().rev().filter_map(|&block| self.0.slot_of(block));
        let slots: Vec<_> = slots.collect();
        slots.iter().for_each(|&slot| self.0.hold(slot));
        self.0.hint(slots.iter().copied(), hint, time_of(request));
        slots.into_iter().for_each(|slot| self.0.release(slot));
    }
}

/// Serves requests as a pool does: a request holds its blocks until it is done, and releases them
/// from last to first. Blocks with cached children stay. Hits are still counted block by block.
pub(super) struct RequestByRequest {
    slots: Slots,
    held: Vec<RecordId>,
}

impl RequestByRequest {
    pub(super) fn new(slots: Slots) -> Self {
        Self { slots: slots.tails_first(), held: Vec::new() }
    }

    fn release_all(&mut self) {
        while let Some(slot) = self.held.pop() {
            self.slots.release(slot);
        }
    }
}

impl Policy for RequestByRequest {
    fn serve(&mut self, request: &RequestBlocks<'_>) -> u64 {
        let (mut hits, mut parent) = (0, None);
        for (depth, &block) in request.blocks.iter().enumerate() {
            let facts = facts(request, depth, parent);
            let slot = match self.slots.slot_of(block) {
                Some(slot) => {
                    self.slots.find(slot, facts.used);
                    hits += 1;
                    Some(slot)
                }
                None => self.slots.insert(block, facts).or_else(|| {
                    // A request larger than the cache loses its own tail.
                    self.release_all();
                    self.slots.insert(block, facts)
                }),
            };
            self.held.extend(slot);
            parent = slot;
        }
        if let Some(hint) = request.hint {
            let held = self.held.iter().rev().copied();
            self.slots.hint(held, hint, time_of(request));
        }
        self.release_all();
        hits
    }
}

fn time_of(request: &RequestBlocks<'_>) -> PolicyTime {
    PolicyTime { lookups: request.first_lookup as u64, ms: request.request.timestamp_ms }
}

pub(super) fn facts(
    request: &RequestBlocks<'_>,
    depth: usize,
    parent: Option<RecordId>,
) -> BlockFacts {
    let before = depth as u64 * request.block_tokens;
    let tokens = request.request.input_length.saturating_sub(before).min(request.block_tokens);
    let number = request.blocks[depth].index() as u64 + 1;
    BlockFacts {
        parent,
        depth: depth as u32,
        tokens: tokens as u32,
        full: tokens == request.block_tokens,
        used: time_of(request),
        ..BlockFacts::new(BlockHash::from_u128(u128::from(number.wrapping_mul(SPREAD))))
    }
}
