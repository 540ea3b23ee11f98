//! A policy for KV caches: evicts what promises the fewest hits for the time that it would stay.

mod ages;
mod buckets;
mod cohorts;
mod kind;
mod memory;
mod rates;

use ages::Gap;
use cohorts::{Cohorts, NONE};
use kind::Kind;
use memory::{Memories, Memory};

use super::error::{check_blocks, table};
use super::{BlockFacts, EvictionPolicy, PolicyError, PolicyTime};
use crate::{BlockHash, RecordId};

/// What is remembered by default: one name of evicted content for two blocks, and at least so many.
const BLOCKS_PER_NAME: u64 = 2;
const NAMES_MIN: u64 = 1 << 15;

/// Cohorts in the ring: one for so many blocks, and at least so many.
const BLOCKS_PER_COHORT: usize = 16;
const COHORTS_MIN: usize = 1 << 15;

/// Blocks that become evictable from one renewal of the densities to the next: a quarter of all so
/// far, from 500 to 16,000.
const RENEWAL_MIN: u32 = 500;
const RENEWAL_MAX: u32 = 16_000;

/// Cohorts of which one lookup can be seen to leave a part, and those that one lookup's blocks join.
const TOUCHED_MAX: usize = 32;

/// Lookups of which is known what they added.
const LOOKUPS_KNOWN: usize = 64;

/// Where in its life a block is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Phase {
    /// Not cached.
    Absent,
    /// Held, and in no cohort yet.
    New,
    /// Held, and found since it joined its cohort.
    Found,
    /// Held, and not found since it joined its cohort.
    Held,
    /// Evictable: in the list of its cohort.
    Listed,
    /// Evictable but for its children: in no list.
    Aside,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    /// The lowest 32 bits of its content's name.
    name: u32,
    /// Number of its cohort, in all phases but [`Phase::Absent`] and [`Phase::New`].
    cohort: u32,
    /// Neighbours in the list of its cohort.
    before: u32,
    after: u32,
    phase: Phase,
    /// Whether it was ever found, also before it was last evicted.
    found: bool,
    /// The mean time between its uses; before it was found, that of the block before it.
    gap: Gap,
}

/// What one lookup has shown.
#[derive(Clone, Copy, Debug)]
struct Lookup {
    at: u64,
    /// Blocks with content that nothing was known of.
    added: u32,
    /// The mean time between uses of the last block that was known.
    gap: Gap,
}

/// Evicts the block that promises the fewest hits for the time that it would stay.
///
/// # What it knows of blocks
///
/// Blocks are told apart by whether they were ever found; by the mean gap between their uses, which a
/// new block takes from the block before it; and by how many blocks the request added that used them
/// last. There are two special cases: blocks that are not full, which a longer prompt replaces, and
/// the rest of a chain that a later request followed only in part, which shows that the conversation
/// goes on another way. The gap of a block is remembered when it is evicted, for some time, so that
/// a conversation that comes back too late is known when it does.
///
/// # What it learns
///
/// For each of these kinds it counts, at each age, how many blocks reach that age and how many are
/// found at it. Evicted blocks are counted on while they are remembered, so that the policy's own
/// choices don't bend what it learns. Older counts fade. Ages are counted in lookups, so that a busy
/// hour and a quiet one look alike, and no clock is read.
///
/// # What it does with it
///
/// A block's density is the greatest quotient, over all times that it might be kept for, of the
/// chance to be found by then and the time that it is expected to stay. Thus a block just before the
/// usual think time is worth more than one just used, and one long after it little. Where more is in
/// use than fits, blocks of a quick pace stay and others pass. The chance of the next moment would be
/// too greedy a measure: it condemns whatever will be wanted in a minute.
/// It is the index of Gittins (1979) for one reward; hit density as a measure is from LHD
/// (Beckmann, Chen and Cidon, 2018), which takes the mean over a lifetime instead of the best end.
///
/// Blocks that one request used form cohorts that are ranked whole; inside a cohort the first to
/// become evictable goes first: tails before heads. If there are more requests than cohorts, requests
/// share them.
///
/// # Cost
///
/// Constant time for each operation, amortised, and no search: cohorts of one kind and class of
/// age are together, and a bit for each such class, in the order of their density, shows the lowest.
/// From time to time, at most every 16,000 releases in the long run, the densities are made anew.
/// Nothing is random.
///
/// Tables take 20 bytes a block for links and names, 2.5 to 5 for cohorts and 4 for remembered names,
/// beside 1.8 MB for counts and the least of cohorts and names. Priorities are not looked at: see
/// [`Prioritized`](super::Prioritized).
#[derive(Debug)]
pub struct HitDensity {
    nodes: Vec<Node>,
    cohorts: Cohorts,
    memories: Memories,
    /// For each kind, the cohort that was made last, and the lookup that its blocks have in common.
    latest: Box<[(u32, u64)]>,
    /// What late lookups have shown, each in the place of its number modulo their count.
    lookups: [Lookup; LOOKUPS_KNOWN],
    /// Numbers of the cohorts of which the last lookup found blocks, and when it was.
    touched: [u32; TOUCHED_MAX],
    touched_len: usize,
    touched_at: u64,
    /// Numbers of the cohorts that blocks of the last lookup joined already.
    joined: [u32; TOUCHED_MAX],
    joined_len: usize,
    advanced_at: u64,
    /// Blocks that became evictable, and how many may until the next renewal.
    releases: u32,
    until_renewal: u32,
    evictable: usize,
}

impl HitDensity {
    /// A policy for blocks with indices below `blocks`, which remembers the names of half as
    /// many evicted blocks, and of at least 32,768.
    ///
    /// # Errors
    ///
    /// [`PolicyError`] if there are too many, or no memory for the tables.
    pub fn new(blocks: u64) -> Result<Self, PolicyError> {
        let names = (blocks / BLOCKS_PER_NAME).max(NAMES_MIN);
        Self::with_memory(blocks, names)
    }

    /// As [`new`](Self::new), remembering `names` evicted blocks. The less it remembers, the more
    /// conversations are new to it when they come back.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_memory(blocks: u64, names: u64) -> Result<Self, PolicyError> {
        let len = check_blocks(blocks)?;
        let names = usize::try_from(names).map_err(|_| PolicyError::OutOfMemory { blocks })?;
        let absent = Node {
            name: 0,
            cohort: 0,
            before: NONE,
            after: NONE,
            phase: Phase::Absent,
            found: false,
            gap: Gap::UNKNOWN,
        };
        let none = Lookup { at: 0, added: 0, gap: Gap::UNKNOWN };
        Ok(Self {
            nodes: table(len, absent, blocks)?,
            cohorts: Cohorts::new((len / BLOCKS_PER_COHORT).max(COHORTS_MIN), blocks)?,
            memories: Memories::new(names, blocks)?,
            latest: table(kind::KINDS, (0, 0), blocks)?.into_boxed_slice(),
            lookups: [none; LOOKUPS_KNOWN],
            touched: [0; TOUCHED_MAX],
            touched_len: 0,
            touched_at: 0,
            joined: [0; TOUCHED_MAX],
            joined_len: 0,
            advanced_at: 0,
            releases: 0,
            until_renewal: RENEWAL_MIN,
            evictable: 0,
        })
    }

    /// Counts a release; makes the densities anew when it is time.
    fn count_release(&mut self) {
        self.releases = self.releases.saturating_add(1);
        self.until_renewal -= 1;
        if self.until_renewal == 0 {
            self.until_renewal = (self.releases / 4).clamp(RENEWAL_MIN, RENEWAL_MAX);
            self.cohorts.renew();
        }
    }

    /// Draws the conclusions from a lookup that is over, and lets cohorts grow older.
    fn settle(&mut self, now: u64) {
        if now > self.touched_at {
            for index in 0..std::mem::take(&mut self.touched_len) {
                self.cohorts.left(self.touched[index], self.touched_at);
            }
            self.joined_len = 0;
            self.touched_at = now;
        }
        // No age is told apart more finely than that.
        let due = now.saturating_sub(self.advanced_at) >= ages::UNIT;
        if due && self.cohorts.advance(now) {
            self.advanced_at = now;
        }
    }

    /// What is known of the lookup at `at`.
    fn lookup(&mut self, at: u64) -> &mut Lookup {
        let lookup = &mut self.lookups[at as usize % LOOKUPS_KNOWN];
        if lookup.at != at {
            *lookup = Lookup { at, added: 0, gap: Gap::UNKNOWN };
        }
        lookup
    }

    /// Notes that a lookup found a block of that cohort.
    fn touch(&mut self, cohort: u32) {
        let touched = &self.touched[..self.touched_len];
        if self.touched_len < TOUCHED_MAX && touched.last() != Some(&cohort) {
            self.touched[self.touched_len] = cohort;
            self.touched_len += 1;
        }
    }

    /// Puts a block that may be evicted into its cohort's list, in front of all others or behind.
    fn list(&mut self, block: u32, in_front: bool) {
        let number = self.nodes[block as usize].cohort;
        let Some(place) = self.cohorts.place_of(number) else { return };
        let cohort = self.cohorts.at(place);
        let (before, after) = if in_front { (NONE, cohort.front) } else { (cohort.back, NONE) };
        match before {
            NONE => cohort.front = block,
            _ => self.nodes[before as usize].after = block,
        }
        match after {
            NONE => cohort.back = block,
            _ => self.nodes[after as usize].before = block,
        }
        let node = &mut self.nodes[block as usize];
        (node.before, node.after, node.phase) = (before, after, Phase::Listed);
        self.cohorts.update_bucket(place);
    }

    /// Takes a block out of its cohort's list.
    fn unlist(&mut self, block: u32) {
        let Node { before, after, cohort: number, .. } = self.nodes[block as usize];
        let Some(place) = self.cohorts.place_of(number) else { return };
        let cohort = self.cohorts.at(place);
        match before {
            NONE => cohort.front = after,
            _ => self.nodes[before as usize].after = after,
        }
        match after {
            NONE => cohort.back = before,
            _ => self.nodes[after as usize].before = before,
        }
        self.cohorts.update_bucket(place);
    }

    /// Takes a block out of the list that it is in, if any: it is evictable no more.
    fn withdraw(&mut self, block: RecordId) {
        let phase = self.nodes[block.index()].phase;
        if phase == Phase::Listed {
            self.unlist(block.0);
        }
        self.evictable -= usize::from(matches!(phase, Phase::Listed | Phase::Aside));
    }

    /// Makes a block that is held evictable in its cohort.
    fn offer(&mut self, block: RecordId, has_children: bool, in_front: bool) {
        self.evictable += 1;
        if has_children {
            self.nodes[block.index()].phase = Phase::Aside;
        } else {
            self.list(block.0, in_front);
        }
    }

    /// Ends the membership of `block` in its cohort.
    fn part(&mut self, block: RecordId, is_alive: bool) {
        if let Some(place) = self.cohorts.place_of(self.nodes[block.index()].cohort) {
            self.cohorts.parted(place, is_alive);
        }
    }

    /// Makes `block` a member of the cohort of its kind and lookup.
    fn join(&mut self, block: RecordId, facts: &BlockFacts) {
        let Node { found, gap, .. } = self.nodes[block.index()];
        let at = facts.used.lookups;
        let kind = Kind::of(facts.full, found, gap, self.lookup(at).added);
        let (latest, used) = self.latest[kind.index()];
        let shared = if self.cohorts.is_crowded() {
            self.nodes.len() / BLOCKS_PER_COHORT
        } else {
            ages::UNIT as usize
        };
        let known = self.cohorts.place_of(latest).filter(|&place| {
            let age = self.cohorts.age_at(place, at);
            self.cohorts.at(place).kind == kind && (used == at || age < shared as u64)
        });
        let place = match known {
            Some(place) => place,
            None => self.cohorts.open(kind, at),
        };
        if known.is_some() && used != at {
            self.cohorts.mix(place);
        }
        let number = self.cohorts.number(place);
        self.latest[kind.index()] = (number, at);
        self.nodes[block.index()].cohort = number;
        self.cohorts.joined(place);
        let joined = &self.joined[..self.joined_len];
        if at == self.touched_at && self.joined_len < TOUCHED_MAX && joined.last() != Some(&number)
        {
            self.joined[self.joined_len] = number;
            self.joined_len += 1;
        }
    }

    /// What is known of content that is cached anew: whether it was seen before, and its pace, or that
    /// of what comes before it.
    fn recall(&mut self, facts: &BlockFacts) -> (bool, Gap) {
        let at = facts.used.lookups;
        if let Some(memory) = self.memories.take(low_bits(facts.hash)) {
            let mut gap = memory.gap;
            if let Some(place) = self.cohorts.place_of(memory.cohort) {
                gap = gap.then(Gap::of_lookups(self.cohorts.age_at(place, at)));
                self.cohorts.found(place, at);
                self.touch(memory.cohort);
            }
            self.lookup(at).gap = gap;
            return (true, gap);
        }
        let parent = facts.parent.and_then(|parent| self.nodes.get(parent.index())).copied();
        let lookup = self.lookup(at);
        lookup.added += 1;
        let parent =
            parent.filter(|node| node.phase != Phase::Absent && lookup.gap == Gap::UNKNOWN);
        lookup.gap = parent.map_or(lookup.gap, |node| node.gap);
        let (added, gap) = (lookup.added, lookup.gap);
        if at == self.touched_at && kind::added_class(added) != kind::added_class(added - 1) {
            self.reclassify(added);
        }
        (false, gap)
    }

    /// Gives the cohorts that blocks of the last lookup joined the kind of a larger addition.
    fn reclassify(&mut self, added: u32) {
        for index in 0..self.joined_len {
            let number = self.joined[index];
            if let Some(kind) = self.cohorts.added(number, added) {
                self.latest[kind.index()] = (number, self.touched_at);
            }
        }
    }
}

impl EvictionPolicy for HitDensity {
    fn name(&self) -> &'static str {
        "hit_density"
    }

    fn stored(&mut self, block: RecordId, facts: &BlockFacts) {
        if block.index() >= self.nodes.len() {
            return;
        }
        self.removed(block);
        self.settle(facts.used.lookups);
        let (found, gap) = self.recall(facts);
        let name = low_bits(facts.hash);
        let phase = Phase::New;
        self.nodes[block.index()] =
            Node { name, cohort: 0, before: NONE, after: NONE, phase, found, gap };
    }

    fn found(&mut self, block: RecordId, now: PolicyTime) {
        let Some(&node) = self.nodes.get(block.index()) else { return };
        if node.phase == Phase::Absent {
            return;
        }
        self.settle(now.lookups);
        if !matches!(node.phase, Phase::New | Phase::Found)
            && let Some(place) = self.cohorts.place_of(node.cohort)
        {
            self.withdraw(block);
            let gap = Gap::of_lookups(self.cohorts.age_at(place, now.lookups));
            self.cohorts.found(place, now.lookups);
            self.touch(node.cohort);
            let known = if node.found { node.gap } else { Gap::UNKNOWN };
            let node = &mut self.nodes[block.index()];
            (node.phase, node.gap) = (Phase::Found, known.then(gap));
        }
        let node = &mut self.nodes[block.index()];
        node.found = true;
        let gap = node.gap;
        self.lookup(now.lookups).gap = gap;
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        let Some(node) = self.nodes.get(block.index()) else { return };
        match node.phase {
            Phase::Listed | Phase::Aside => return self.children(block, facts.has_children),
            Phase::Held => return self.offer(block, facts.has_children, true),
            Phase::Absent => self.stored(block, facts),
            Phase::Found => self.part(block, true),
            Phase::New => {}
        }
        self.count_release();
        self.join(block, facts);
        self.offer(block, facts.has_children, false);
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        match (self.nodes.get(block.index()).map(|node| node.phase), has_children) {
            (Some(Phase::Listed), true) => {
                self.unlist(block.0);
                self.nodes[block.index()].phase = Phase::Aside;
            }
            (Some(Phase::Aside), false) => self.list(block.0, true),
            _ => {}
        }
    }

    fn held(&mut self, block: RecordId) {
        let phase = self.nodes.get(block.index()).map(|node| node.phase);
        if matches!(phase, Some(Phase::Listed | Phase::Aside)) {
            self.withdraw(block);
            self.nodes[block.index()].phase = Phase::Held;
        }
    }

    fn removed(&mut self, block: RecordId) {
        let Some(phase) = self.nodes.get(block.index()).map(|node| node.phase) else { return };
        match phase {
            Phase::Absent | Phase::New => {}
            Phase::Found => self.part(block, true),
            Phase::Held | Phase::Listed | Phase::Aside => {
                self.withdraw(block);
                self.part(block, false);
            }
        }
        self.nodes[block.index()].phase = Phase::Absent;
    }

    fn victim(&mut self, now: PolicyTime) -> Option<RecordId> {
        self.settle(now.lookups);
        let place = self.cohorts.lowest()?;
        let block = RecordId(self.cohorts.at(place).front);
        self.withdraw(block);
        self.part(block, true);
        let node = &mut self.nodes[block.index()];
        node.phase = Phase::Absent;
        let memory = Memory { cohort: node.cohort, gap: node.gap };
        if let Some(forgotten) = self.memories.insert(node.name, memory)
            && let Some(place) = self.cohorts.place_of(forgotten)
        {
            let cohort = self.cohorts.at(place);
            cohort.alive = cohort.alive.saturating_sub(1);
        }
        Some(block)
    }

    fn len(&self) -> usize {
        self.evictable
    }
}

fn low_bits(hash: BlockHash) -> u32 {
    hash.to_u128() as u32
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

    fn kind_of(policy: &mut HitDensity, index: usize) -> Kind {
        let number = policy.nodes[index].cohort;
        let place = policy.cohorts.place_of(number).unwrap();
        policy.cohorts.at(place).kind
    }

    #[test]
    fn tables_are_as_small_as_documented() {
        assert_eq!(size_of::<Node>(), 20);
        assert_eq!(size_of::<cohorts::Cohort>(), 40);
    }

    #[test]
    fn before_anything_is_learned_the_order_is_that_of_lru() {
        let mut policy = HitDensity::new(4).unwrap();
        for (index, lookups) in [(2, 1), (0, 1000), (3, 10_000), (1, 100_000)] {
            store(&mut policy, index, &facts(u64::from(index), lookups));
        }
        let order: Vec<_> =
            std::iter::from_fn(|| policy.victim(at(101_000))).map(RecordId::index).collect();
        assert_eq!(order, [2, 0, 3, 1]);
    }

    #[test]
    fn what_a_request_left_of_a_chain_is_told_apart_when_its_lookup_is_over() {
        let mut policy = HitDensity::new(8).unwrap();
        for index in 0..3 {
            store(&mut policy, index, &facts(u64::from(index), 1));
        }
        store(&mut policy, 3, &facts(3, 4));
        let fresh = Kind::of(true, false, Gap::UNKNOWN, 3);
        policy.found(block(0), at(17));
        assert_eq!(kind_of(&mut policy, 1), fresh);
        policy.found(block(1), at(17));
        assert_eq!(kind_of(&mut policy, 2), fresh);
        // The next lookup shows that the one before found no more; what that used is told apart, too.
        policy.found(block(3), at(20));
        assert_eq!(kind_of(&mut policy, 2), Kind::LEFT);
        assert_eq!(kind_of(&mut policy, 3), Kind::of(true, false, Gap::UNKNOWN, 1));
        policy.evictable(block(1), &facts(1, 17));
        assert_eq!(kind_of(&mut policy, 1), Kind::of(true, true, Gap::of_lookups(16), 0));
    }

    #[test]
    fn blocks_of_one_request_are_of_the_kind_of_all_that_it_added() {
        let mut policy = HitDensity::new(8).unwrap();
        for index in 0..8 {
            store(&mut policy, index, &facts(u64::from(index), 1));
            let added = Kind::of(true, false, Gap::UNKNOWN, index + 1);
            assert_eq!(kind_of(&mut policy, 0), added);
            assert_eq!(kind_of(&mut policy, index as usize), added);
        }
        assert_eq!(policy.nodes[7].cohort, policy.nodes[0].cohort);
    }

    #[test]
    fn a_conversation_is_known_when_it_comes_back() {
        let mut policy = HitDensity::new(4).unwrap();
        store(&mut policy, 0, &facts(9, 1));
        policy.found(block(0), at(101));
        policy.evictable(block(0), &facts(9, 101));
        assert_eq!(policy.victim(at(300)), Some(block(0)));
        policy.stored(block(1), &facts(9, 1101));
        let pace = Gap::of_lookups(100).then(Gap::of_lookups(1000));
        assert_eq!((policy.nodes[1].found, policy.nodes[1].gap), (true, pace));
        // Its next block is new, and belongs to the same conversation.
        policy.stored(block(2), &BlockFacts { parent: Some(block(1)), ..facts(10, 1101) });
        assert_eq!((policy.nodes[2].found, policy.nodes[2].gap), (false, pace));
        // Told nothing of a parent, in another lookup, it is new altogether.
        policy.stored(block(3), &facts(11, 1200));
        assert_eq!((policy.nodes[3].found, policy.nodes[3].gap), (false, Gap::UNKNOWN));
    }

    /// More requests of one block than there are cohorts: they share some, and none is lost.
    #[test]
    fn requests_share_cohorts_when_there_are_too_few() {
        let blocks = 2 * COHORTS_MIN as u32;
        let mut policy = HitDensity::new(u64::from(blocks)).unwrap();
        for index in 0..blocks {
            store(&mut policy, index, &facts(u64::from(index), 1 + 20 * u64::from(index)));
        }
        assert!(policy.cohorts.is_crowded());
        let now = at(1 + 20 * u64::from(blocks));
        let mut order: Vec<_> =
            std::iter::from_fn(|| policy.victim(now)).map(RecordId::index).collect();
        order.sort_unstable();
        assert!(order.into_iter().eq(0..blocks as usize));
    }
}
