//! A policy for KV caches: evicts what promises the fewest hits for the time that it would stay.

mod ages;
mod census;
mod kind;
mod lists;
mod memory;
mod ranking;
mod rates;
mod traits;

use ages::{Clock, Gap, Tick};
use census::Census;
use kind::Kind;
use lists::{Lists, Phase};
use memory::{Memories, Memory};
use ranking::Ranking;
use rates::Rates;
use traits::{Order, Traits};

use super::{BlockFacts, EvictionPolicy, PolicyTime, ReuseHint, check_blocks};
use crate::{BlockHash, ConfigError, Priority, RecordId};

/// What is remembered by default: one name of evicted content for two blocks, and at least so many.
const BLOCKS_PER_NAME: u64 = 2;
const NAMES_MIN: u64 = 1 << 15;

/// Lookups of which is known what they have shown.
const LOOKUPS_KNOWN: usize = 64;

/// New blocks of a request that are many: more than a question and an answer have.
const MANY_ADDED: u32 = 4;

/// What one lookup has shown.
#[derive(Clone, Copy, Debug)]
struct Lookup {
    at: u64,
    /// Blocks with content that nothing was known of.
    added: u32,
    /// The mean time between uses of the last block that was known.
    pace: Gap,
}

impl Lookup {
    const fn at(at: u64) -> Self {
        Self { at, added: 0, pace: Gap::UNKNOWN }
    }
}

/// Evicts the block that promises the fewest hits for the time that it would stay. `docs/EVICTION.md` in the repository
/// says what it knows of blocks, what it learns, and why that is what it decides by.
///
/// Each kind of blocks has a list in the order of last use, and of each list the oldest and the newest block are
/// compared. Blocks with a priority other than the default go before or after all these, the lowest priority
/// and the least recently released first. Evicted blocks are counted on while they are remembered, so that the
/// policy's own choices don't bend what it learns.
///
/// Constant time for each operation, amortised, and no search. Nothing is random. Tables take 16 bytes a block and 4 for
/// names of evicted content, of which there is room for at least 32,768; the counts take some 110 KB.
#[derive(Debug)]
pub(super) struct HitDensity {
    lists: Lists,
    memories: Memories,
    rates: Box<Rates>,
    ranking: Box<Ranking>,
    clock: Clock,
    now: Tick,
    /// What late lookups have shown, each in the place of its number modulo their count.
    lookups: Box<[Lookup; LOOKUPS_KNOWN]>,
    /// The last victim, until its name is told.
    evicted: Option<(RecordId, Memory)>,
    census: Census,
}

impl HitDensity {
    /// A policy for blocks with indices below `blocks`, which remembers the names of half as
    /// many evicted blocks, and of at least 32,768.
    pub(super) fn new(blocks: u64) -> Result<Self, ConfigError> {
        let len = check_blocks(blocks)?;
        let names = (blocks / BLOCKS_PER_NAME).max(NAMES_MIN) as usize;
        let (lists, memories) = (Lists::new(len, blocks)?, Memories::new(names, blocks)?);
        let places = lists.blocks() + memories.len();
        Ok(Self {
            lists,
            memories,
            rates: Box::new(Rates::new()),
            ranking: Box::new(Ranking::new()),
            clock: Clock::new(len),
            now: Tick::ZERO,
            lookups: Box::new([Lookup::at(0); LOOKUPS_KNOWN]),
            evicted: None,
            census: Census::new(places),
        })
    }

    /// What is known of the lookup at `at`.
    fn lookup(&mut self, at: u64) -> &mut Lookup {
        let lookup = &mut self.lookups[(at % LOOKUPS_KNOWN as u64) as usize];
        if lookup.at != at {
            *lookup = Lookup::at(at);
        }
        lookup
    }

    /// The traits of a block, as far as its facts decide on them.
    fn with_facts(&mut self, traits: Traits, facts: &BlockFacts) -> Traits {
        if facts.priority == Priority::DEFAULT {
            let added = self.lookup(facts.used.lookups).added;
            traits.full(facts.full).many_added(added >= MANY_ADDED)
        } else {
            traits.with_priority(facts.priority)
        }
    }

    /// Counts a release, and some of the blocks and names that wait to be found.
    fn count_release(&mut self) {
        for _ in 0..self.census.release() {
            let Some(place) = self.census.next() else {
                self.rates.renew();
                self.ranking.expire();
                if self.census.begin() {
                    self.clock.begin_round();
                }
                break;
            };
            let waits = match place.checked_sub(self.lists.blocks()) {
                None => self.waiting(RecordId(place as u32)),
                Some(name) => self.memories.at(name, self.now),
            };
            if let Some(Memory { traits, used }) = waits
                && let Order::Learned(kind) = traits.order()
            {
                self.rates.waits(kind, used.age_at(self.now), self.census.weight());
            }
        }
    }

    /// What is known of a cached block.
    fn waiting(&mut self, block: RecordId) -> Option<Memory> {
        let is_cached = self.lists.phase(block) != Phase::Absent;
        is_cached.then(|| Memory {
            used: self.lists.used_lately(block, self.now),
            traits: self.lists.traits(block),
        })
    }

    /// Notes that the lookup at `at` found a block, of which this was known: what is known of it from then on.
    fn count_found(&mut self, Memory { traits, used }: Memory, at: u64) -> Traits {
        let age = used.age_at(self.now);
        if let Order::Learned(kind) = traits.order() {
            self.rates.found(kind, age);
        }
        let traits = traits.found_after(Gap::of(age));
        self.lookup(at).pace = traits.gap();
        traits
    }

    /// Notes that a block will not be seen any more.
    fn count_lost(&mut self, Memory { traits, used }: Memory) {
        if let Order::Learned(kind) = traits.order() {
            self.rates.lost(kind, used.age_at(self.now));
        }
    }

    /// The block of default priority that is worth least.
    fn least_worth(&mut self) -> Option<RecordId> {
        loop {
            let (list, end) = self.ranking.lowest(&mut self.lists, &self.rates, self.now)?;
            if let Some(block) = self.lists.leaf_at(list, end) {
                return Some(block);
            }
        }
    }

    /// Gives up the last victim, if its name was not told.
    fn forget_evicted(&mut self) {
        if let Some((_, memory)) = self.evicted.take() {
            self.count_lost(memory);
        }
    }
}

impl EvictionPolicy for HitDensity {
    fn name(&self) -> &'static str {
        "hit_density"
    }

    fn stored(&mut self, block: RecordId, facts: &BlockFacts) {
        if block.index() >= self.lists.blocks() {
            return;
        }
        self.removed(block);
        let at = facts.used.lookups;
        self.now = self.clock.tick(at);
        let traits = match self.memories.take(facts.hash) {
            Some(memory) => self.count_found(memory, at),
            None => {
                let lookup = self.lookup(at);
                lookup.added = lookup.added.saturating_add(1);
                Traits::new(0, lookup.pace)
            }
        };
        let traits = self.with_facts(traits, facts);
        self.lists.hold(block, traits, self.now);
    }

    fn found(&mut self, block: RecordId, now: PolicyTime) {
        if self.lists.phase(block) == Phase::Absent {
            return;
        }
        self.now = self.clock.tick(now.lookups);
        let memory = Memory { traits: self.lists.traits(block), used: self.lists.used(block) };
        let traits = self.count_found(memory, now.lookups);
        self.lists.hold(block, traits, self.now);
    }

    fn hinted(&mut self, block: RecordId, hint: ReuseHint, _now: PolicyTime) {
        let kind = match hint {
            ReuseHint::BackIn(time) => Kind::back_in(time.as_millis()),
            ReuseHint::SharedHead => Kind::SHARED_HEAD,
            // Pools give it the lowest priority.
            ReuseHint::Over => return,
        };
        if self.lists.phase(block) == Phase::Held {
            let traits = self.lists.traits(block).hinted(kind);
            self.lists.hold(block, traits, self.lists.used(block));
        }
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        if block.index() >= self.lists.blocks() {
            return;
        }
        match self.lists.phase(block) {
            Phase::Listed | Phase::Aside => return self.children(block, facts.has_children),
            Phase::Absent => self.stored(block, facts),
            Phase::Held => {}
        }
        self.count_release();
        let traits = self.with_facts(self.lists.traits(block), facts);
        self.lists.offer(block, traits, facts.has_children);
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        self.lists.set_children(block, has_children);
    }

    fn held(&mut self, block: RecordId) {
        if matches!(self.lists.phase(block), Phase::Listed | Phase::Aside) {
            self.lists.withdraw(block, Phase::Held);
        }
    }

    fn removed(&mut self, block: RecordId) {
        if let Some(memory) = self.waiting(block) {
            self.lists.withdraw(block, Phase::Absent);
            self.count_lost(memory);
        }
    }

    fn victim(&mut self, now: PolicyTime) -> Option<RecordId> {
        const BELOW_DEFAULT: u128 = (1 << Priority::DEFAULT.get()) - 1;
        self.forget_evicted();
        self.now = self.clock.tick(now.lookups);
        let block = self.lists.of_priority(BELOW_DEFAULT);
        let block = block.or_else(|| self.least_worth());
        let block = block.or_else(|| self.lists.of_priority(u128::MAX))?;
        let memory = Memory { traits: self.lists.traits(block), used: self.lists.used(block) };
        self.lists.withdraw(block, Phase::Absent);
        self.evicted = Some((block, memory));
        Some(block)
    }

    fn evicted(&mut self, block: RecordId, hash: BlockHash) {
        let Some((_, memory)) = self.evicted.take_if(|(evicted, _)| *evicted == block) else {
            return;
        };
        if matches!(memory.traits.order(), Order::Learned(_))
            && let Some(forgotten) = self.memories.insert(hash, memory, self.now)
        {
            self.count_lost(forgotten);
        }
    }

    fn len(&self) -> usize {
        self.lists.evictable()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(name: u64, lookups: u64) -> BlockFacts {
        let used = PolicyTime { lookups, ms: 0 };
        BlockFacts { used, ..BlockFacts::new(BlockHash::from_u128(u128::from(name))) }
    }

    fn block(index: u32) -> RecordId {
        RecordId::from_index(index)
    }

    fn at(lookups: u64) -> PolicyTime {
        PolicyTime { lookups, ms: 0 }
    }

    fn store(policy: &mut HitDensity, index: u32, facts: &BlockFacts) {
        policy.stored(block(index), facts);
        policy.evictable(block(index), facts);
    }

    fn order(policy: &mut HitDensity, lookups: u64) -> Vec<usize> {
        std::iter::from_fn(|| policy.victim(at(lookups))).map(RecordId::index).collect()
    }

    #[test]
    fn before_anything_is_learned_the_order_is_that_of_lru() {
        let mut policy = HitDensity::new(4).unwrap();
        for (index, lookups) in [(2, 1), (0, 1000), (3, 10_000), (1, 30_000)] {
            store(&mut policy, index, &facts(u64::from(index), lookups));
        }
        assert_eq!(order(&mut policy, 31_000), [2, 0, 3, 1]);
    }

    #[test]
    fn what_is_old_stays_old_however_much_is_looked_up_without_a_release() {
        for late in [1 << 16, 1 << 32, 1 << 48] {
            let mut policy = HitDensity::new(4).unwrap();
            store(&mut policy, 0, &facts(0, 1));
            store(&mut policy, 1, &facts(1, late - 500));
            assert_eq!(order(&mut policy, late + 10), [0, 1], "after {late} lookups");
        }
    }

    #[test]
    fn a_conversation_is_known_when_it_comes_back() {
        let mut policy = HitDensity::new(4).unwrap();
        store(&mut policy, 0, &facts(9, 1));
        policy.found(block(0), at(101));
        policy.evictable(block(0), &facts(9, 101));
        assert_eq!(policy.victim(at(300)), Some(block(0)));
        policy.evicted(block(0), facts(9, 0).hash);
        policy.stored(block(1), &facts(9, 1101));
        let gap = |lookups| {
            let mut clock = Clock::new(4);
            Gap::of(clock.tick(0).age_at(clock.tick(lookups)))
        };
        let (pace, known) = (gap(100).then(gap(1000)), policy.lists.traits(block(1)));
        assert_eq!(known, Traits::new(2, pace));
        // Its next block is new, and belongs to the same conversation.
        policy.stored(block(2), &facts(10, 1101));
        assert_eq!(policy.lists.traits(block(2)), Traits::new(0, pace));
        // In another lookup it is new altogether.
        policy.stored(block(3), &facts(11, 1200));
        assert_eq!(policy.lists.traits(block(3)), Traits::new(0, Gap::UNKNOWN));
    }

    #[test]
    fn a_victim_whose_name_is_not_told_is_forgotten() {
        let mut policy = HitDensity::new(2).unwrap();
        store(&mut policy, 0, &facts(9, 1));
        assert_eq!(policy.victim(at(2)), Some(block(0)));
        policy.evicted(block(1), facts(9, 0).hash);
        assert_eq!(policy.victim(at(3)), None);
        policy.evicted(block(0), facts(9, 0).hash);
        policy.stored(block(1), &facts(9, 10));
        assert_eq!(policy.lists.traits(block(1)), Traits::new(0, Gap::UNKNOWN));
    }

    #[test]
    fn a_hint_is_worth_what_such_hints_were_worth() {
        let mut policy = HitDensity::new(2).unwrap();
        let second = ReuseHint::BackIn(std::time::Duration::from_secs(1));
        let minute = ReuseHint::BackIn(std::time::Duration::from_secs(60));
        for round in 1..3000_u64 {
            let at = PolicyTime { lookups: 10 * round, ms: 0 };
            // What is to come back in a second does, what is to come back in a minute never does.
            policy.found(block(0), at);
            policy.stored(block(1), &BlockFacts { used: at, ..facts(round + 9, 10 * round) });
            policy.hinted(block(0), second, at);
            policy.hinted(block(1), minute, at);
            policy.evictable(block(1), &facts(round + 9, 10 * round));
            if round == 1 {
                policy.stored(block(0), &facts(1, 10));
            }
            policy.evictable(block(0), &facts(1, 10 * round));
            if round + 1 < 3000 {
                policy.held(block(0));
                policy.removed(block(1));
            }
        }
        assert_eq!(order(&mut policy, 29_993), [1, 0]);
    }
}
