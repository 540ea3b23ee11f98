//! A mirror of the cache, built from events alone, beside what the pool holds.

use crate::prelude::*;
use kv_pool::policy::RecordId;

/// When a block of the pool may be told of: not before the first of these steps is complete, and at once when
/// the second one is.
type Bounds = (u64, u64);

#[derive(Debug)]
pub struct Mirror {
    reader: EventReader,
    /// Where the names are, as the events say; in order, since whoever compares them with a pool uses its blocks in that order.
    names: BTreeSet<(BlockHash, Tier)>,
    /// The same of groups beside the first.
    further: BTreeSet<(GroupId, BlockHash, Tier)>,
    /// What each name follows that was told of once, as far as its place is known; `None` at the start of a prefix.
    /// Names that an engine gives can follow several.
    parents: HashMap<(GroupId, BlockHash), HashSet<Option<BlockHash>>>,
    /// What a name with the salt and the same name without it differ by, of each salt with which an engine has named blocks:
    /// what the salted ones follow has both.
    salts: BTreeSet<u128>,
    hasher: BlockHasher,
    /// Of each group, whether a lookup finds content by what comes before it.
    chained: Vec<bool>,
    /// Tokens of a name.
    unit: u32,
    /// The blocks of the pool that have names, as of the last look.
    bounds: HashMap<(RecordId, BlockHash), (Location, Bounds)>,
    /// Events were lost, and the mirror was not repaired.
    lost: bool,
}

/// What a reading met.
#[derive(Debug, Default)]
pub struct Met {
    pub lost: bool,
    pub repaired: bool,
    pub cleared: bool,
    pub moved: bool,
    pub withheld: bool,
    pub withdrawn: bool,
    /// Content was cached behind content that is nowhere.
    pub orphans: bool,
    /// A lower tier lost something.
    pub below: bool,
}

impl Mirror {
    pub fn new(manager: &Manager) -> Self {
        let reader = manager.events().unwrap();
        let options = manager.options();
        let unit = options.groups.iter().map(|group| group.block_tokens).min().unwrap();
        let kinds = options.groups.iter().map(|group| group.kind);
        Self {
            reader,
            names: BTreeSet::new(),
            further: BTreeSet::new(),
            parents: HashMap::new(),
            salts: BTreeSet::new(),
            hasher: options.hasher,
            chained: kinds.map(|kind| kind == GroupKind::Full).collect(),
            unit,
            bounds: HashMap::new(),
            lost: false,
        }
    }

    /// Begins anew.
    pub fn reopen(&mut self, manager: &Manager) {
        self.reader = manager.events().unwrap();
        self.lost = false;
    }

    /// Notes names that the pool has got since the last look, from `earliest` on or a later step that is staged.
    /// Whether names have gone that were not told of.
    pub fn look(&mut self, manager: &Manager, earliest: u64) -> bool {
        let latest = manager.last_plan().step;
        let completed = manager.completed_step();
        let mut before = std::mem::take(&mut self.bounds);
        for view in manager.pool(GroupId(0)).unwrap().snapshot().blocks {
            let Some(name) = view.hash else { continue };
            let key = (view.block, name);
            let at = view.location;
            let bounds = match before.remove(&key) {
                // Content that is computed again where its owner may use it gives the name to that.
                Some((before, bounds)) if before == at || earliest == 0 => bounds,
                _ => (earliest, latest),
            };
            self.bounds.insert(key, (at, bounds));
        }
        before.values().any(|&(_, (earliest, _))| earliest > completed)
    }

    /// Takes in all events, and compares the mirror with the pool.
    pub fn read(&mut self, manager: &Manager) -> Met {
        let withdrawn = self.look(manager, 0);
        let mut met = Met { withdrawn, ..Met::default() };
        let mut events = Vec::new();
        if let Err(EventsLost { events: count }) = self.reader.read(&mut events) {
            assert!(count > 0 && events.is_empty());
            (met.lost, self.lost) = (true, true);
            return met;
        }
        if std::mem::take(&mut self.lost) {
            met.repaired = true;
            assert_eq!(events[0], CacheEvent::Cleared, "the repair begins anew");
            assert_parents_first(&events[1..]);
        }
        for event in events {
            match event {
                CacheEvent::Stored(stored) => self.store(&stored),
                CacheEvent::Removed { group, names, tier } => {
                    for name in names {
                        if group != GroupId(0) {
                            assert!(self.further.remove(&(group, name, tier)), "{name:?}");
                            continue;
                        }
                        assert!(self.names.remove(&(name, tier)), "{name:?} was not there");
                        met.below |= tier > Tier::Secondary;
                    }
                }
                CacheEvent::Moved { from, to } => {
                    for name in &to.names {
                        if to.group != GroupId(0) {
                            assert!(self.further.remove(&(to.group, *name, from)), "{name:?}");
                            continue;
                        }
                        assert!(self.names.remove(&(*name, from)), "{name:?} moved");
                    }
                    self.store(&to);
                    met.moved = true;
                }
                CacheEvent::Cleared => {
                    self.names.clear();
                    self.further.clear();
                    met.cleared = true;
                }
                other => panic!("{other:?}"),
            }
        }
        self.check_chains();
        (met.withheld, met.orphans) = self.compare(manager);
        met
    }

    /// Whether it has been told of a name, in any tier.
    fn knows(&self, group: GroupId, name: BlockHash) -> bool {
        Tier::ALL.into_iter().any(|tier| match group {
            GroupId(0) => self.names.contains(&(name, tier)),
            group => self.further.contains(&(group, name, tier)),
        })
    }

    /// How many of these names a lookup finds in the pool of the first group; `None` if that is not known for events that
    /// were lost.
    pub fn score(&self, names: &[BlockHash]) -> Option<usize> {
        let near = [Tier::Primary, Tier::Secondary];
        let there = |name: &&BlockHash| near.iter().any(|&at| self.names.contains(&(**name, at)));
        (!self.lost).then(|| names.iter().take_while(there).count())
    }

    /// Of all that a mirror has been told, it knows what that follows: a lookup finds it.
    fn check_chains(&self) {
        let names = self.names.iter().map(|&(name, _)| (GroupId(0), name));
        for key in names.chain(self.further.iter().map(|&(group, name, _)| (group, name))) {
            if self.chained[usize::from(key.0.0)]
                && let Some(parents) = self.parents.get(&key)
            {
                let other = |of: BlockHash, salt: &u128| BlockHash::from_u128(of.to_u128() ^ salt);
                let known = |of: &Option<BlockHash>| {
                    let known = |of| self.knows(key.0, of);
                    of.is_none_or(|of| {
                        known(of) || self.salts.iter().any(|salt| known(other(of, salt)))
                    })
                };
                assert!(parents.iter().any(known), "{key:?} is told of behind what is nowhere");
            }
        }
    }

    fn store(&mut self, stored: &StoredBlocks) {
        let StoredBlocks { names, token_ids, block_tokens, content, .. } = stored;
        let len = *block_tokens as usize;
        assert!(token_ids.is_empty() || token_ids.len() == names.len() * len);
        if let (Some(content), true) = (content, token_ids.is_empty()) {
            self.salts.extend(salt_of(&self.hasher, &content.salt));
        }
        let (mut parent, group) = (stored.parent, stored.group);
        if let (Some(before), true) = (parent, self.chained[usize::from(group.0)]) {
            assert!(self.knows(group, before), "{names:?} come before what they follow");
        }
        for (at, &name) in names.iter().enumerate() {
            let new = match stored.group {
                GroupId(0) => self.names.insert((name, stored.tier)),
                group => self.further.insert((group, name, stored.tier)),
            };
            assert!(new, "{name:?} is there already");
            if stored.is_placed() {
                _ = self.parents.entry((group, name)).or_default().insert(parent)
            } else {
                _ = self.parents.remove(&(group, name))
            }
            if content.is_none() && !token_ids.is_empty() && *block_tokens == self.unit {
                let ids = &token_ids[at * len..][..len];
                let named = |parent: Option<BlockHash>, generation: u64| {
                    let mask = mask(generation);
                    let parent = parent.map_or(0, |parent| parent.to_u128() ^ mask);
                    BlockHash::chain(BlockHash::from_u128(parent), ids).to_u128() ^ mask
                };
                let mut generations = 0..100;
                let is_named = generations.any(|at| named(parent, at) == name.to_u128());
                assert!(is_named, "the ids are others");
            }
            parent = Some(name);
        }
    }

    /// Whether a lookup finds a block of the first group's pool behind whatever it is known to follow.
    fn is_found(&self, name: BlockHash, before: Option<BlockHash>) -> Option<bool> {
        let known = |of: &Option<BlockHash>| of.is_none_or(|of| self.knows(GroupId(0), of));
        match self.parents.get(&(GroupId(0), name)) {
            Some(parents) => Some(parents.iter().all(known)),
            None => before.map(|parent| self.knows(GroupId(0), parent)),
        }
    }

    /// Whether blocks were there that the mirror may not know of yet, and such that no lookup finds.
    fn compare(&self, manager: &Manager) -> (bool, bool) {
        let completed = manager.completed_step();
        let mut there = HashMap::new();
        let (mut withheld, mut orphans) = (false, false);
        let blocks = manager.pool(GroupId(0)).unwrap().snapshot().blocks;
        let bearers: HashMap<_, _> = blocks.iter().map(|view| (view.block, view.hash)).collect();
        for view in &blocks {
            let Some(name) = view.hash else { continue };
            let before = view.parent.and_then(|before| bearers.get(&before).copied().flatten());
            there.insert(name, view.location.tier);
            let (_, (earliest, latest)) = self.bounds[&(view.block, name)];
            let told = self.names.contains(&(name, view.location.tier));
            let found = self.is_found(name, before);
            if completed >= latest && found == Some(true) {
                assert!(told, "{name:?} is not told of");
            }
            orphans |= found == Some(false);
            if completed < earliest {
                assert!(!told, "{name:?} is told of before step {earliest} is complete");
                withheld = true;
            }
        }
        let mut below = [0; 2];
        for &(group, name, tier) in &self.further {
            if tier > Tier::Secondary {
                below[tier.index() - 2] += 1;
                let found = manager.find_below(group, name);
                assert!(found.is_some_and(|found| found <= tier), "{name:?} is not in {tier:?}");
                continue;
            }
            // What the pool has beside may be told of later.
            let found = manager.pool(group).unwrap().find_and_pin(name, tier);
            assert!(found.is_some(), "{name:?} is not there in group {}", group.0);
        }
        for &(name, tier) in &self.names {
            if tier > Tier::Secondary {
                below[tier.index() - 2] += 1;
                let found = manager.find_below(kv_manager::GroupId(0), name);
                assert!(found.is_some_and(|found| found <= tier), "{name:?} is not in {tier:?}");
                continue;
            }
            assert_eq!(there.get(&name), Some(&tier), "{name:?} is not there");
        }
        // What follows content that is nowhere is not found there either.
        let names = manager.lower_stats().names;
        assert!(
            below.into_iter().zip(names).all(|(told, names)| told <= names),
            "{below:?} of {names:?}"
        );
        (withheld, orphans)
    }
}

/// In a repair, no content is told of before the content that it follows in the same tier, whatever its group keeps.
fn assert_parents_first(events: &[CacheEvent]) {
    let mut awaited = HashSet::new();
    for event in events {
        let CacheEvent::Stored(stored) = event else { panic!("{event:?} in a repair") };
        let key = |name| (stored.group, stored.tier, name);
        for &name in &stored.names {
            assert!(!awaited.contains(&key(name)), "{name:?} comes behind what follows it");
        }
        // Parents that were told of before are not told of again.
        awaited.extend(stored.parent.map(key));
    }
}

/// What an engine's names with a salt differ by from those without it. Tenants have keys, which say of which kind the salt is.
fn salt_of(hasher: &BlockHasher, salt: &[u8]) -> Option<u128> {
    let salted = match salt.first()? {
        1 => hasher.chain_with(BlockHash::ROOT, &[], &[ExtraKey::Other(salt)]),
        _ => hasher.salted(salt),
    };
    Some(salted.to_u128())
}

/// What sets the names of a generation apart: other upper 64 bits.
pub fn mask(generation: u64) -> u128 {
    match generation {
        0 => 0,
        generation => BlockHash::salted(&generation.to_le_bytes()).to_u128() >> 64 << 64,
    }
}
