//! A policy for KV caches: evicts what promises the fewest hits for the time that it would stay.

mod ages;
mod buckets;
mod cohorts;
mod kind;
mod memory;
mod rates;

use cohorts::{Cohorts, NONE};
use kind::{Kind, SHARED_FROM};
use memory::{Memories, Memory};

use super::error::{check_blocks, table};
use super::{BlockFacts, EvictionPolicy, PolicyError, PolicyTime};
use crate::{BlockHash, RecordId};

/// What is remembered by default: names of evicted content for each block, and at least so many.
const REMEMBERED_PER_BLOCK: u64 = 8;
const REMEMBERED_MIN: u64 = 1 << 15;

/// Cohorts in the ring: one for each block, and at least so many.
const COHORTS_MIN: usize = 1 << 12;

/// Blocks that become evictable from one renewal of the densities to the next.
const RENEWAL: u32 = 2000;

/// Cohorts of which one lookup can be seen to leave a part.
const TOUCHED_MAX: usize = 32;

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
    /// The low half of its content's name.
    name: u64,
    /// Number of its cohort, in all phases but [`Phase::Absent`] and [`Phase::New`].
    cohort: u32,
    /// Neighbours in the list of its cohort.
    before: u32,
    after: u32,
    phase: Phase,
    /// How often it was found, also before it was last evicted.
    found: u8,
    /// Turns of its conversation before this one.
    turns: u8,
}

/// Evicts the block that promises the fewest hits for the time that it would stay.
///
/// # What it knows of blocks
///
/// Blocks are told apart by how often they were found, by how many turns their conversation has
/// had, and by three special cases: blocks that are not full, which a longer prompt replaces; blocks
/// found so often that many conversations share them; and the rest of a chain that a later request
/// followed only in part, which shows that the conversation goes on another way. What is known of
/// a block is remembered when it is evicted, for some time, so that a conversation that comes back
/// too late is known when it does; a new block takes the turns of its conversation from its parent.
///
/// # What it learns
///
/// For each of these kinds it counts, at each age, how many blocks reach that age and how many are
/// found at it. Evicted blocks are counted on while they are remembered, so that the policy's own
/// choices don't bend what it learns. Older counts fade.
///
/// # What it does with it
///
/// A block's density is the greatest quotient, over all times that it might be kept for, of the
/// chance to be found by then and the time that it is expected to stay. Thus a block just before the
/// usual think time is worth more than one just used, and one long after it little. The chance of
/// the next moment would be too greedy a measure: it condemns whatever will be wanted in a minute.
/// It is the index of Gittins (1979) for one reward; hit density as a measure is from LHD
/// (Beckmann, Chen and Cidon, 2018), which takes the mean over a lifetime instead of the best end.
///
/// Blocks that one request used form cohorts that are ranked whole; inside a cohort the first to
/// become evictable goes first: tails before heads.
///
/// # Cost
///
/// Constant time for each operation, amortised, and no search: cohorts of one kind and class of
/// age are together, and a bit for each such class, in the order of their density, shows the lowest.
/// Every 2,000 releases the densities are made anew. Nothing is random.
///
/// Tables take 24 bytes a block for links and names, 40 to 80 for cohorts and 8 for each name that
/// is remembered: some 130 to 170 bytes a block. Priorities are not looked at: see [`Prioritized`](super::Prioritized).
#[derive(Debug)]
pub struct HitDensity {
    nodes: Vec<Node>,
    cohorts: Cohorts,
    memories: Memories,
    /// For each kind, the cohort that was made last, and the use that its blocks have in common.
    latest: [(u32, PolicyTime); kind::KINDS],
    /// Numbers of the cohorts of which the last lookup found blocks, and when it was.
    touched: [u32; TOUCHED_MAX],
    touched_len: usize,
    touched_at: PolicyTime,
    advanced_ms: u64,
    until_renewal: u32,
    evictable: usize,
}

impl HitDensity {
    /// A policy for blocks with indices below `blocks`, which remembers the names of eight times as
    /// many, and of at least 32,768.
    ///
    /// # Errors
    ///
    /// [`PolicyError`] if there are too many, or no memory for the tables.
    pub fn new(blocks: u64) -> Result<Self, PolicyError> {
        let names = blocks.saturating_mul(REMEMBERED_PER_BLOCK).max(REMEMBERED_MIN);
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
            found: 0,
            turns: 0,
        };
        Ok(Self {
            nodes: table(len, absent, blocks)?,
            cohorts: Cohorts::new(len.max(COHORTS_MIN), blocks)?,
            memories: Memories::new(names, blocks)?,
            latest: [(0, PolicyTime::default()); kind::KINDS],
            touched: [0; TOUCHED_MAX],
            touched_len: 0,
            touched_at: PolicyTime::default(),
            advanced_ms: 0,
            until_renewal: RENEWAL,
            evictable: 0,
        })
    }

    /// Counts a release; makes the densities anew when it is time.
    fn count_release(&mut self) {
        self.until_renewal -= 1;
        if self.until_renewal == 0 {
            self.until_renewal = RENEWAL;
            self.cohorts.renew();
        }
    }

    /// Draws the conclusions from a lookup that is over, and lets cohorts grow older.
    fn settle(&mut self, now: PolicyTime) {
        if now.lookups != self.touched_at.lookups {
            for index in 0..std::mem::take(&mut self.touched_len) {
                self.cohorts.left(self.touched[index], self.touched_at.ms);
            }
            self.touched_at = now;
        }
        // No age is told apart more finely than that.
        let due = now.ms.saturating_sub(self.advanced_ms) >= ages::UNIT_MS;
        if due && self.cohorts.advance(now.ms) {
            self.advanced_ms = now.ms;
        }
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
            let cohort = self.cohorts.at(place);
            cohort.members = cohort.members.saturating_sub(1);
            cohort.alive = cohort.alive.saturating_sub(u32::from(!is_alive));
        }
    }

    /// Makes `block` a member of the cohort of its kind and use. `None` if there is none to be had.
    fn join(&mut self, block: RecordId, facts: &BlockFacts) -> Option<()> {
        let Node { found, turns, .. } = self.nodes[block.index()];
        let kind = Kind::of(facts.full, found, turns);
        let (latest, used) = self.latest[kind.index()];
        let known = self.cohorts.place_of(latest);
        let place = match known {
            Some(place) if used == facts.used && self.cohorts.at(place).kind == kind => place,
            // Without a free place blocks are taken to be as old as those before them.
            _ => self.cohorts.open(kind, facts.used.ms).or(known)?,
        };
        let number = self.cohorts.number(place);
        self.latest[kind.index()] = (number, facts.used);
        self.nodes[block.index()].cohort = number;
        self.cohorts.joined(place);
        Some(())
    }

    /// What is known of content that is cached anew: what is remembered of it, or else the turns of
    /// the conversation that it continues.
    fn recall(&mut self, facts: &BlockFacts) -> (u8, u8) {
        if let Some(memory) = self.memories.take(low_half(facts.hash)) {
            if let Some(place) = self.cohorts.place_of(memory.cohort) {
                self.cohorts.found(place, facts.used.ms);
            }
            return (memory.found.saturating_add(1), memory.turns.saturating_add(1));
        }
        let parent = facts.parent.and_then(|parent| self.nodes.get(parent.index()));
        let turns = match parent {
            Some(node) if node.phase != Phase::Absent && node.found < SHARED_FROM => node.turns,
            _ => 0,
        };
        (0, turns)
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
        let (found, turns) = self.recall(facts);
        let name = low_half(facts.hash);
        let phase = Phase::New;
        self.nodes[block.index()] =
            Node { name, cohort: 0, before: NONE, after: NONE, phase, found, turns };
    }

    fn found(&mut self, block: RecordId, now: PolicyTime) {
        let Some(&node) = self.nodes.get(block.index()) else { return };
        if node.phase == Phase::Absent {
            return;
        }
        self.settle(now);
        if !matches!(node.phase, Phase::New | Phase::Found)
            && let Some(place) = self.cohorts.place_of(node.cohort)
        {
            self.withdraw(block);
            self.cohorts.found(place, now.ms);
            self.touch(node.cohort);
            self.nodes[block.index()].phase = Phase::Found;
        }
        let node = &mut self.nodes[block.index()];
        node.found = node.found.saturating_add(1);
        node.turns = node.turns.saturating_add(1);
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
        match self.join(block, facts) {
            Some(()) => self.offer(block, facts.has_children, false),
            None => self.nodes[block.index()].phase = Phase::Absent,
        }
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
        self.settle(now);
        let place = self.cohorts.lowest()?;
        let block = RecordId(self.cohorts.at(place).front);
        self.withdraw(block);
        self.part(block, true);
        let node = &mut self.nodes[block.index()];
        node.phase = Phase::Absent;
        let memory = Memory { cohort: node.cohort, found: node.found, turns: node.turns };
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

fn low_half(hash: BlockHash) -> u64 {
    hash.to_u128() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(name: u64, lookups: u64, ms: u64) -> BlockFacts {
        let used = PolicyTime { lookups, ms };
        BlockFacts { used, ..BlockFacts::new(BlockHash::from_u128(u128::from(name))) }
    }

    fn block(index: u32) -> RecordId {
        RecordId::from_index(index)
    }

    fn store(policy: &mut HitDensity, index: u32, facts: &BlockFacts) {
        policy.stored(block(index), facts);
        policy.evictable(block(index), facts);
    }

    #[test]
    fn tables_are_as_small_as_documented() {
        assert_eq!(size_of::<Node>(), 24);
        assert_eq!(size_of::<cohorts::Cohort>(), 40);
    }

    #[test]
    fn before_anything_is_learned_the_order_is_that_of_lru() {
        let mut policy = HitDensity::new(4).unwrap();
        for (index, ms) in [(2, 0), (0, 1000), (3, 10_000), (1, 100_000)] {
            store(&mut policy, index, &facts(u64::from(index), 1 + ms, ms));
        }
        let now = PolicyTime { lookups: 1_000_000, ms: 101_000 };
        let order: Vec<_> =
            std::iter::from_fn(|| policy.victim(now)).map(RecordId::index).collect();
        assert_eq!(order, [2, 0, 3, 1]);
    }

    #[test]
    fn what_a_request_left_of_a_chain_is_told_apart_when_its_lookup_is_over() {
        let mut policy = HitDensity::new(8).unwrap();
        for index in 0..3 {
            store(&mut policy, index, &facts(u64::from(index), 1, 0));
        }
        store(&mut policy, 3, &facts(3, 2, 0));
        let kind_of = |policy: &mut HitDensity, index: usize| {
            let number = policy.nodes[index].cohort;
            let place = policy.cohorts.place_of(number).unwrap();
            policy.cohorts.at(place).kind
        };
        let fresh = Kind::of(true, 0, 0);
        let lookup = PolicyTime { lookups: 3, ms: 10 };
        policy.found(block(0), lookup);
        assert_eq!(kind_of(&mut policy, 1), fresh);
        policy.found(block(1), lookup);
        assert_eq!(kind_of(&mut policy, 2), fresh);
        // The next lookup shows that the one before found no more; what that used is told apart, too.
        policy.found(block(3), PolicyTime { lookups: 4, ms: 20 });
        assert_eq!((kind_of(&mut policy, 2), kind_of(&mut policy, 3)), (Kind::LEFT, fresh));
        policy.evictable(block(1), &facts(1, 3, 10));
        assert_eq!(kind_of(&mut policy, 1), Kind::of(true, 1, 1));
    }

    #[test]
    fn a_conversation_is_known_when_it_comes_back() {
        let mut policy = HitDensity::new(4).unwrap();
        store(&mut policy, 0, &facts(9, 1, 0));
        policy.found(block(0), PolicyTime { lookups: 2, ms: 0 });
        policy.evictable(block(0), &facts(9, 2, 0));
        assert_eq!(policy.victim(PolicyTime { lookups: 3, ms: 50 }), Some(block(0)));
        policy.stored(block(1), &facts(9, 4, 60));
        let again = policy.nodes[1];
        assert_eq!((again.found, again.turns), (2, 2));
        // Its next block is new, and belongs to the same conversation.
        policy.stored(block(2), &BlockFacts { parent: Some(block(1)), ..facts(10, 4, 60) });
        let next = policy.nodes[2];
        assert_eq!((next.found, next.turns), (0, 2));
        // Told nothing of a parent, it is new altogether.
        policy.stored(block(3), &facts(11, 4, 60));
        assert_eq!((policy.nodes[3].found, policy.nodes[3].turns), (0, 0));
    }
}
