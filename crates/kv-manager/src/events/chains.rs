//! What of the cached content a lookup finds, as a reader of events has it.
//!
//! A lookup of a prefix ends at the first block that is nowhere, so what follows a block that has gone is found no more, though it
//! lies where it was; and it is found again once the block is back, under whichever owner. Routers that keep prefixes as trees
//! refuse what comes behind a parent that they do not know. So readers are told of what is found, and of the rest when it is.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use kv_pool::policy::RecordId;
use kv_pool::{BlockHash, Tier, guard};
use smallvec::SmallVec;

use super::feed::{Feed, GroupNotes, Note};
use super::{CacheEvent, StoredBlocks};
use crate::transfers::{LOWER, index_of};

/// A name in a group.
type Key = (usize, BlockHash);

/// The tiers that have a name: one of the pool's, and any below.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Places {
    pool: Option<Tier>,
    below: [bool; 2],
}

impl Places {
    const NONE: Self = Self { pool: None, below: [false; 2] };

    fn set_below(&mut self, tier: Tier, is_there: bool) {
        if let Some(below) = index_of(tier).and_then(|at| self.below.get_mut(at)) {
            *below = is_there;
        }
    }

    /// The tiers below of these that `other` is not in.
    fn below_without(self, other: Self) -> impl Iterator<Item = Tier> {
        let each = LOWER.into_iter().zip(self.below.into_iter().zip(other.below));
        each.filter(|(_, (here, other))| *here && !other).map(|(tier, _)| tier)
    }
}

/// Where content is new: in the pool's tier that it moved from, if it did, and where it is now, in the block that bears it.
type Come = (Option<Tier>, (Tier, Option<RecordId>));

/// A name that is somewhere, was told of, or is followed by such.
#[derive(Debug, Default)]
struct Node {
    /// What it follows: one name, but of names that an engine gives, which salts of requests are part of or not. None at the
    /// start of a prefix, and if its place is not known.
    parents: SmallVec<[Parent; 1]>,
    /// What follows it and is somewhere; nothing where content is not found by what comes before it.
    followers: SmallVec<[BlockHash; 2]>,
    /// The block of the pool that bears it.
    record: Option<RecordId>,
    there: Places,
    told: Places,
    found: bool,
    /// It is noted as changed.
    changed: bool,
}

/// A name that another one follows.
#[derive(Clone, Copy, Debug)]
struct Parent {
    name: BlockHash,
    /// Where it has the other one among its followers, of which a beginning that all have in common has very many.
    at: Option<usize>,
}

/// The content of all groups by what it follows.
#[derive(Debug, Default)]
pub(super) struct Chains {
    nodes: HashMap<Key, Node>,
    /// What has come or gone since readers were told, in order.
    changed: Vec<Key>,
}

impl Chains {
    /// Notes that content behind one of `parents` is in a tier of the pool, in this block, or in one below.
    pub(super) fn put(
        &mut self,
        key: Key,
        (tier, record): (Tier, Option<RecordId>),
        parents: impl Iterator<Item = BlockHash>,
        chained: bool,
    ) {
        let node = self.change(key);
        let is_new = node.there == Places::NONE;
        match record {
            Some(_) => (node.there.pool, node.record) = (Some(tier), record),
            None => node.there.set_below(tier, true),
        }
        // Of some content it is known later than that it is there.
        let known = if is_new { std::mem::take(&mut node.parents) } else { SmallVec::new() };
        for name in parents.chain(known.iter().map(|of| of.name)) {
            if !node.parents.iter().any(|of| of.name == name) {
                node.parents.push(Parent { name, at: None });
            }
        }
        if chained {
            self.list(key);
        }
    }

    /// Has what content follows know of it.
    fn list(&mut self, key: Key) {
        let count = self.nodes.get(&key).map_or(0, |node| node.parents.len());
        for nth in 0..count {
            let parent = |node: &Node| node.parents.get(nth).copied();
            let Some(Parent { name, at: None }) = self.nodes.get(&key).and_then(parent) else {
                continue;
            };
            let followers = &mut self.nodes.entry((key.0, name)).or_default().followers;
            let at = followers.len();
            followers.push(key.1);
            if let Some(node) = self.nodes.get_mut(&key) {
                node.parents[nth].at = Some(at);
            }
        }
    }

    /// Has what content follows forget it.
    fn unlist(&mut self, key: Key) {
        let count = self.nodes.get(&key).map_or(0, |node| node.parents.len());
        for nth in 0..count {
            let parent = self.nodes.get_mut(&key).and_then(|node| node.parents.get_mut(nth));
            let Some(Parent { name, at: Some(at) }) =
                parent.map(|of| Parent { at: of.at.take(), ..*of })
            else {
                continue;
            };
            let Some(before) = self.nodes.get_mut(&(key.0, name)) else { continue };
            #[cfg(test)]
            crate::proportion::looks(1);
            before.followers.swap_remove(at);
            // The last one has its place now.
            let Some(&moved) = before.followers.get(at) else { continue };
            let moved = self.nodes.get_mut(&(key.0, moved));
            let of = moved.and_then(|node| node.parents.iter_mut().find(|of| of.name == name));
            of.into_iter().for_each(|of| of.at = Some(at));
        }
    }

    /// Notes that content is not in a tier below any more, or in the pool.
    pub(super) fn take(&mut self, key: Key, below: Option<Tier>) {
        let node = self.change(key);
        match below {
            Some(tier) => node.there.set_below(tier, false),
            None => node.there.pool = None,
        }
        if node.there == Places::NONE {
            self.unlist(key);
        }
    }

    fn change(&mut self, key: Key) -> &mut Node {
        let node = self.nodes.entry(key).or_default();
        if !std::mem::replace(&mut node.changed, true) {
            self.changed.push(key);
        }
        node
    }

    /// Finds out what is found now, and appends what has changed for readers to `into`. What is found all the time is told of in
    /// another tier before it is gone from one, and nothing before what it follows.
    pub(super) fn tell(&mut self, feed: &Feed, into: &mut Vec<CacheEvent>) {
        self.judge(feed);
        let (mut come, mut left) = (Vec::new(), Vec::new());
        for &key in &self.changed {
            let Some(node) = self.nodes.get_mut(&key) else { continue };
            let now = if node.found { node.there } else { Places::NONE };
            let before = std::mem::replace(&mut node.told, now);
            node.changed = false;
            let mut new: SmallVec<[Come; 2]> = SmallVec::new();
            let mut gone: SmallVec<[Tier; 2]> = before.below_without(now).collect();
            match (before.pool, now.pool) {
                (Some(tier), None) => gone.push(tier),
                (from, Some(to)) if from != now.pool => new.push((from, (to, node.record))),
                _ => {}
            }
            new.extend(now.below_without(before).map(|tier| (None, (tier, None))));
            let gone = gone.into_iter().map(|tier| (key, tier));
            if now == Places::NONE {
                gone.for_each(|of| push_removed(feed, into, of));
            } else {
                left.extend(gone);
            }
            if !new.is_empty() {
                come.push((key, new));
            }
        }
        // Of several, one that readers know.
        let parent = |key: Key| {
            let mut parents =
                self.nodes.get(&key)?.parents.iter().map(|parent| (key.0, parent.name));
            let first = parents.clone().next();
            parents.find(|before| self.is_found(before)).or(first)
        };
        // What moves and what is new follow each other.
        let before = |key| guard!("manager.told-behind-what-it-follows", parent(key), else None);
        // The event that ends with a name, so far.
        let mut ends: HashMap<(Option<Tier>, Tier, Key), usize> = HashMap::new();
        for (key, tiers) in in_chains(come, |of| of.0, |of| before(of.0)) {
            let before = parent(key);
            for (from, (tier, record)) in tiers {
                let last = before.and_then(|parent| ends.remove(&(from, tier, parent)));
                let of = (key, before.map(|(_, parent)| parent));
                if let Some(at) = push(feed, into, (from, last), of, (tier, record)) {
                    ends.insert((from, tier, key), at);
                }
            }
        }
        left.into_iter().for_each(|of| push_removed(feed, into, of));
        self.sweep();
    }

    /// Finds out of everything that has changed, and of all that follows it, whether it is found.
    fn judge(&mut self, feed: &Feed) {
        let mut at = 0;
        while let Some(&key) = self.changed.get(at) {
            at += 1;
            let Some(node) = self.nodes.get(&key) else { continue };
            let behind = !feed.groups[key.0].shape.is_chained()
                || node.parents.is_empty()
                || node.parents.iter().any(|parent| self.is_found(&(key.0, parent.name)));
            let found = node.there != Places::NONE
                && guard!("manager.nothing-behind-a-gap-is-told", behind, else true);
            let Some(node) = self.nodes.get_mut(&key) else { continue };
            if std::mem::replace(&mut node.found, found) != found {
                // Those that were looked at before are looked at again.
                let followers = node.followers.clone();
                self.changed.extend(followers.into_iter().map(|name| (key.0, name)));
            }
        }
    }

    fn is_found(&self, key: &Key) -> bool {
        self.nodes.get(key).is_some_and(|node| node.found)
    }

    /// Forgets names of which there is nothing more to be told.
    fn sweep(&mut self) {
        while let Some(key) = self.changed.pop() {
            let is_over = |node: &Node| node.there == Places::NONE && node.followers.is_empty();
            if self.nodes.get(&key).is_some_and(is_over)
                && let Some(node) = self.nodes.remove(&key)
            {
                self.changed.extend(node.parents.iter().map(|parent| (key.0, parent.name)));
            }
        }
    }
}

/// Tells of content that is in a tier now, of the pool in this block or below, by the given event if it is of what comes before;
/// by which event.
fn push(
    feed: &Feed,
    into: &mut Vec<CacheEvent>,
    (moved_from, event): (Option<Tier>, Option<usize>),
    ((group, name), parent): (Key, Option<BlockHash>),
    (tier, record): (Tier, Option<RecordId>),
) -> Option<usize> {
    let notes = &feed.groups[group];
    let unknown = Note::default();
    let (note, tokens): (_, &[u32]) = match record {
        Some(record) => match notes.note(record).filter(|note| note.name == Some(name)) {
            Some(note) => (note, notes.tokens(record)),
            None => (&unknown, &[]),
        },
        None => {
            let lower = feed.lower.get(&(group, tier, name))?;
            (&lower.note, &lower.tokens)
        }
    };
    let last = match (event.and_then(|at| into.get_mut(at)), moved_from) {
        (Some(CacheEvent::Stored(last)), None) => Some(last),
        (Some(CacheEvent::Moved { from, to }), Some(here)) if *from == here => Some(to),
        _ => None,
    };
    if let Some(last) = last
        && last.group == notes.shape.id
        && last.tier == tier
        && last.names.last().is_some_and(|last| parent == Some(*last))
        && last.token_ids.is_empty() == tokens.is_empty()
        && last.content == note.content
    {
        last.names.push(name);
        last.token_ids.extend_from_slice(tokens);
        return event;
    }
    let stored = StoredBlocks { parent, ..stored(notes, tier, name, note, tokens) };
    into.push(match moved_from {
        None => CacheEvent::Stored(stored),
        Some(from) => CacheEvent::Moved { from, to: stored },
    });
    Some(into.len() - 1)
}

fn push_removed(feed: &Feed, into: &mut Vec<CacheEvent>, ((group, name), tier): (Key, Tier)) {
    let group = feed.groups[group].shape.id;
    match into.last_mut() {
        Some(CacheEvent::Removed { group: g, tier: t, names }) if (*g, *t) == (group, tier) => {
            names.push(name);
        }
        _ => into.push(CacheEvent::Removed { group, tier, names: vec![name] }),
    }
}

/// Puts content in an order in which each follows the one before it in its prefix, if that is there too. Names that an engine
/// gives may follow each other in a circle, as different requests have it; none of them is left out.
fn in_chains<T, K: Copy + Eq + Hash>(
    found: Vec<T>,
    name: impl Fn(&T) -> K,
    parent: impl Fn(&T) -> Option<K>,
) -> Vec<T> {
    let there: HashSet<K> = found.iter().map(&name).collect();
    let mut children: HashMap<K, Vec<(usize, T)>> = HashMap::new();
    let (mut next, mut ordered) = (Vec::new(), Vec::with_capacity(found.len()));
    for (at, content) in found.into_iter().enumerate().rev() {
        match parent(&content).filter(|parent| there.contains(parent)) {
            Some(parent) => children.entry(parent).or_default().push((at, content)),
            None => next.push((at, content)),
        }
    }
    while let Some((_, content)) = next.pop() {
        next.extend(children.remove(&name(&content)).unwrap_or_default());
        ordered.push(content);
    }
    // In the order in which they came, which is the same in every run.
    let mut circles: Vec<_> = children.into_values().flatten().collect();
    circles.sort_unstable_by_key(|(at, _)| *at);
    ordered.extend(circles.into_iter().map(|(_, content)| content));
    ordered
}

fn stored(
    notes: &GroupNotes,
    tier: Tier,
    name: BlockHash,
    note: &Note,
    tokens: &[u32],
) -> StoredBlocks {
    StoredBlocks {
        group: notes.shape.id,
        kind: notes.shape.kind,
        tier,
        names: vec![name],
        parent: note.parent,
        first_token: note.index.map(|index| u64::from(index) * u64::from(notes.shape.block_tokens)),
        token_ids: tokens.to_vec(),
        block_tokens: notes.shape.block_tokens,
        content: note.content.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many prompts as are cached may begin alike.
    #[test]
    fn what_one_of_many_followers_costs_does_not_depend_on_how_many_there_are() {
        let name = |name: u32| (0, BlockHash::from_u128(name.into()));
        let tier = (Tier::Third, None);
        let looks = |followers: u32| {
            let mut chains = Chains::default();
            let before = crate::proportion::looked();
            chains.put(name(0), tier, std::iter::empty(), true);
            (1..=followers)
                .for_each(|at| chains.put(name(at), tier, [name(0).1].into_iter(), true));
            // From both ends.
            for at in (1..=followers / 2).flat_map(|at| [at, followers + 1 - at]) {
                chains.take(name(at), Some(Tier::Third));
                let here = &chains.nodes[&name(0)].followers;
                for (place, &follower) in here.iter().enumerate() {
                    assert_eq!(chains.nodes[&(0, follower)].parents[0].at, Some(place));
                }
            }
            assert!(chains.nodes[&name(0)].followers.is_empty());
            (crate::proportion::looked() - before) / u64::from(followers)
        };
        assert_eq!(looks(8), looks(256));
    }

    #[test]
    fn what_follows_each_other_in_a_circle_is_not_left_out() {
        let before = |of: &u32| [None, Some(0), Some(3), Some(2), Some(3)][*of as usize];
        let mut ordered = in_chains(vec![4, 3, 2, 1, 0], |of| *of, before);
        assert_eq!(ordered[..2], [0, 1]);
        ordered.sort_unstable();
        assert_eq!(ordered, [0, 1, 2, 3, 4]);
    }
}
