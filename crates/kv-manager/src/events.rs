//! Events: what is cached, told in order to routers and other hosts.
//!
//! An [`EventReader`] turns the logs of the block pools into [`CacheEvent`]s, on whichever thread reads. It
//! publishes a block when the step that writes it is complete on all workers, and never one that was withdrawn
//! before. A reader that lags is told so, and its next read begins with all content that there is then.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use kv_pool::events::{EventReader as PoolReader, PoolEvent, Reading};
use kv_pool::policy::RecordId;
use kv_pool::{BlockHash, Tier};

use crate::feed::{Feed, GroupNotes, LowerEvent, Note};
use crate::rows::Home;
use crate::{Content, GroupId, GroupKind, Manager};

/// Consecutive blocks of one prefix, in one tier.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct StoredBlocks {
    /// The group that they are blocks of.
    pub group: GroupId,
    /// What the layers of the group keep of a sequence.
    pub kind: GroupKind,
    /// Where they lie.
    pub tier: Tier,
    /// Their names, in the order of the prefix. Each but the first follows the one before. In a group with larger
    /// blocks than others, a block has the name of its last part, of as many tokens as the smallest block. A
    /// recurrent state has the name of all tokens that it is behind.
    pub names: Vec<BlockHash>,
    /// The name of the block before the first; `None` at the start of a prefix, and if it is not
    /// [known](Self::is_placed). It may not be cached.
    pub parent: Option<BlockHash>,
    /// Tokens of the prefix before the first of these blocks. `None` if that is not known: a tier dropped the content
    /// while it was loaded, or has had it since before its workers began.
    pub first_token: Option<u64>,
    /// The token ids of all these blocks, one block after the other: `names.len() * block_tokens`. Empty if they are not
    /// known, and if the engine names its blocks itself.
    pub token_ids: Vec<u32>,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// What the content depends on beside the token ids, such as the adapter; `None` if on nothing.
    pub content: Option<Arc<Content>>,
}

impl StoredBlocks {
    /// Whether it is known where in a prefix they are: behind a block, or at the start. It is not known of what a tier below
    /// host memory has had since before its workers began, until it is loaded.
    #[must_use]
    pub fn is_placed(&self) -> bool {
        self.parent.is_some() || self.first_token.is_some()
    }
}

/// Something that happened to what is cached.
///
/// A mirror holds names by group and tier. It is a set: `Stored` adds to it, `Removed` takes away, `Moved` does
/// both, `Cleared` empties it. Tiers of the manager's pools hold a name once among them; a lower tier holds copies
/// beside.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum CacheEvent {
    /// Lookups find these blocks in this tier, and all workers have completed writing them.
    Stored(StoredBlocks),
    /// Lookups do not find these names in this tier any more.
    Removed {
        /// The group of the blocks.
        group: GroupId,
        /// Where they lay.
        tier: Tier,
        /// Their names.
        names: Vec<BlockHash>,
    },
    /// These blocks lie in another tier from now on. Steps that are staged later read them there.
    Moved {
        /// Where they lay.
        from: Tier,
        /// The blocks, where they lie now.
        to: StoredBlocks,
    },
    /// Nothing that was stored before is found any more, in any group and tier: after a
    /// [reset](Manager::reset), the loss of a worker, and before the content that a new reader begins with.
    Cleared,
}

/// A reader came too late.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error(
    "{events} events were overwritten before they were read; the next read begins with all content"
)]
pub struct EventsLost {
    /// Events that are lost, as the pools count them: a block's each.
    pub events: u64,
}

kv_pool::one_line_debug!(EventsLost);

/// Reads what happened to the cached content of a [`Manager`], in order, on any thread.
///
/// While it reads, blocks get no names: a step that fills a block waits for it.
#[derive(Debug)]
pub struct EventReader {
    home: Home,
    /// The reader of each group's pool; empty before the first read, and after a loss.
    pools: Vec<Position>,
    lower: u64,
    /// How often content was cleared that this reader knows of.
    clears: u64,
    queue: Vec<Entry>,
    /// The entry of a block that is not published, or moved.
    open: HashMap<(usize, RecordId), usize>,
    readings: Vec<Reading>,
}

/// Where a reader is in the log of a pool.
#[derive(Debug)]
struct Position {
    log: PoolReader,
    /// Events before this number are known.
    from: u64,
}

/// An event that a reader has taken from a log and not handed out.
#[derive(Clone, Copy, Debug)]
struct Entry {
    group: usize,
    name: BlockHash,
    what: What,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Stored {
        record: RecordId,
        tier: Tier,
    },
    Removed {
        tier: Tier,
    },
    Moved {
        record: RecordId,
        from: Tier,
        to: Tier,
    },
    /// Nothing is to be told of it.
    Void,
}

impl Manager {
    /// A reader of what happens to cached content; `None` if the manager keeps no
    /// [events](crate::ManagerOptions::events_max). What it reads first is [`CacheEvent::Cleared`] and all content
    /// that there is then.
    #[must_use]
    pub fn events(&self) -> Option<EventReader> {
        let clears = self.home.feed()?.clear.count;
        Some(EventReader {
            home: self.home.clone(),
            pools: Vec::new(),
            lower: 0,
            clears,
            queue: Vec::new(),
            open: HashMap::new(),
            readings: Vec::new(),
        })
    }
}

impl EventReader {
    /// Appends all that has happened since the last call to `into`, and says how many events that are.
    ///
    /// The first read, and the one after a loss, appends [`CacheEvent::Cleared`] and all content that there is:
    /// events after it fit exactly. That read looks at all blocks.
    ///
    /// # Errors
    /// [`EventsLost`]; nothing was appended. What the reader has told may be wrong until the next read.
    pub fn read(&mut self, into: &mut Vec<CacheEvent>) -> Result<usize, EventsLost> {
        // What the caller has read before may be published already, so nothing is joined to it.
        let mut new = Vec::new();
        let read = self.read_new(&mut new);
        into.append(&mut new);
        read
    }

    fn read_new(&mut self, into: &mut Vec<CacheEvent>) -> Result<usize, EventsLost> {
        let before = into.len();
        let home = self.home.clone();
        let Some(feed) = home.feed() else { return Ok(0) };
        let feed = &*feed;
        if self.pools.is_empty() {
            self.begin(feed, into);
            return Ok(into.len() - before);
        }
        if self.clears != feed.clear.count {
            self.go_on_after_clear(feed);
            into.push(CacheEvent::Cleared);
        }
        let lost = self.take_in(feed) + feed.lower_log.from(self.lower).1;
        if lost > 0 {
            self.pools.clear();
            into.truncate(before);
            return Err(EventsLost { events: lost });
        }
        self.publish(feed, into);
        self.read_lower(feed, into);
        Ok(into.len() - before)
    }

    /// Takes all content as it is now, and follows the events from there on.
    fn begin(&mut self, feed: &Feed, into: &mut Vec<CacheEvent>) {
        self.queue.clear();
        self.open.clear();
        self.clears = feed.clear.count;
        self.lower = feed.lower_log.next();
        into.push(CacheEvent::Cleared);
        for (group, notes) in feed.groups.iter().enumerate() {
            // Without a log the manager has no feed.
            let Some(log) = notes.pool.events() else { continue };
            let snapshot = notes.pool.snapshot();
            self.pools.push(Position { log, from: snapshot.next_event });
            let (mut complete, mut pending) = (Vec::new(), Vec::new());
            for view in &snapshot.blocks {
                let record = view.block;
                let (name, tier) = match (view.hash, view.expected) {
                    (Some(name), _) => (name, view.location.tier),
                    (None, Some((name, from))) => (name, from.tier),
                    (None, None) => continue,
                };
                match notes.note(record).is_some_and(|note| note.step > feed.completed) {
                    true => pending.push((record, name, tier)),
                    false => complete.push((record, name, tier)),
                }
            }
            let parent = |record| notes.note(record).and_then(|note| note.parent);
            for (record, name, tier) in in_chains(complete, |of| of.1, |of| parent(of.0)) {
                push_block(into, None, notes, record, name, tier);
            }
            for (record, name, tier) in in_chains(pending, |of| of.1, |of| parent(of.0)) {
                self.push_stored(group, record, name, tier);
            }
        }
        let lower = feed.lower.iter().collect();
        for (&key, lower) in in_chains(
            lower,
            |(key, _)| **key,
            |(key, lower)| lower.note.parent.map(|parent| (key.0, key.1, parent)),
        ) {
            push_told(into, None, &feed.groups[key.0], key.1, (key.2, &lower.note, &lower.tokens));
        }
    }

    fn go_on_after_clear(&mut self, feed: &Feed) {
        self.clears = feed.clear.count;
        self.queue.clear();
        self.open.clear();
        for (position, log) in self.pools.iter_mut().zip(&feed.clear.readers) {
            *position = Position { log: log.clone(), from: 0 };
        }
        self.lower = feed.clear.lower;
    }

    /// Takes in all events of the pools; how many were lost. Names that were withdrawn before they were
    /// published are out of the queue then: the lock keeps blocks from getting names meanwhile, and steps from
    /// being completed.
    fn take_in(&mut self, feed: &Feed) -> u64 {
        let mut lost = 0;
        let mut readings = std::mem::take(&mut self.readings);
        for group in 0..feed.groups.len().min(self.pools.len()) {
            loop {
                readings.clear();
                if self.pools[group].log.read(1024, &mut readings) == 0 {
                    break;
                }
                for reading in &readings {
                    match *reading {
                        Reading::Lost { count, .. } => lost += count,
                        Reading::Event { sequence, .. } if sequence < self.pools[group].from => {}
                        Reading::Event { event, .. } => self.take(group, event),
                    }
                }
            }
        }
        self.readings = readings;
        lost
    }

    fn take(&mut self, group: usize, event: PoolEvent) {
        match event {
            PoolEvent::Stored { block, hash, location, .. } => {
                self.push_stored(group, block, hash, location.tier);
            }
            PoolEvent::Removed { block, hash, location } => {
                let tier = location.tier;
                let known = match self.open.remove(&(group, block)) {
                    None => Some(tier),
                    Some(at) => match std::mem::replace(&mut self.queue[at].what, What::Void) {
                        // It was never published.
                        What::Stored { .. } | What::Void => None,
                        What::Moved { from, .. } => Some(from),
                        What::Removed { tier } => Some(tier),
                    },
                };
                if let Some(tier) = known {
                    self.queue.push(Entry { group, name: hash, what: What::Removed { tier } });
                }
            }
            PoolEvent::Moved { block, hash, from, to } => {
                // What was not told yet is told once, at its last place, and behind what moved there before.
                let untold = self.open.remove(&(group, block));
                let untold =
                    untold.map(|at| std::mem::replace(&mut self.queue[at].what, What::Void));
                if let Some(What::Stored { .. }) = untold {
                    return self.push_stored(group, block, hash, to.tier);
                }
                let from = match untold {
                    Some(What::Moved { from: first, .. }) => first,
                    _ => from.tier,
                };
                self.open.insert((group, block), self.queue.len());
                let what = What::Moved { record: block, from, to: to.tier };
                self.queue.push(Entry { group, name: hash, what });
            }
            _ => {}
        }
    }

    fn push_stored(&mut self, group: usize, record: RecordId, name: BlockHash, tier: Tier) {
        self.open.insert((group, record), self.queue.len());
        self.queue.push(Entry { group, name, what: What::Stored { record, tier } });
    }

    /// Hands out what is in the queue, in order, but blocks whose step is not complete.
    fn publish(&mut self, feed: &Feed, into: &mut Vec<CacheEvent>) {
        self.open.clear();
        let mut kept = 0;
        for at in 0..self.queue.len() {
            let Entry { group, name, what } = self.queue[at];
            let notes = &feed.groups[group];
            match what {
                What::Void => {}
                What::Stored { record, .. }
                    if notes.note(record).is_some_and(|note| note.step > feed.completed) =>
                {
                    self.open.insert((group, record), kept);
                    self.queue[kept] = self.queue[at];
                    kept += 1;
                }
                What::Stored { record, tier } => {
                    push_block(into, None, notes, record, name, tier);
                }
                What::Moved { from, to, .. } if from == to => {}
                What::Moved { record, from, to } => {
                    push_block(into, Some(from), notes, record, name, to);
                }
                What::Removed { tier } => push_removed(into, notes.id, tier, name),
            }
        }
        self.queue.truncate(kept);
    }

    fn read_lower(&mut self, feed: &Feed, into: &mut Vec<CacheEvent>) {
        let mut gone = HashSet::new();
        for &(key, event) in feed.lower_log.from(self.lower).0 {
            match (event, feed.lower.get(&key)) {
                (LowerEvent::Stored, Some(lower)) => {
                    let content = (key.2, &lower.note, &*lower.tokens);
                    push_told(into, None, &feed.groups[key.0], key.1, content);
                }
                // It has gone since: neither is told.
                (LowerEvent::Stored, None) => {
                    gone.insert(key);
                }
                (LowerEvent::Removed, _) if gone.remove(&key) => {}
                (LowerEvent::Removed, _) => {
                    push_removed(into, feed.groups[key.0].id, key.1, key.2);
                }
            }
        }
        self.lower = feed.lower_log.next();
    }
}

/// Puts content in an order in which each follows the one before it in its prefix, if that is there too. Routers that
/// keep prefixes as trees do not know where to put what comes before its parent.
fn in_chains<T, K: Copy + Eq + Hash>(
    found: Vec<T>,
    name: impl Fn(&T) -> K,
    parent: impl Fn(&T) -> Option<K>,
) -> Vec<T> {
    let there: HashSet<K> = found.iter().map(&name).collect();
    let mut children: HashMap<K, Vec<T>> = HashMap::new();
    let (mut next, mut ordered) = (Vec::new(), Vec::with_capacity(found.len()));
    for content in found {
        match parent(&content).filter(|parent| there.contains(parent)) {
            Some(parent) => children.entry(parent).or_default().push(content),
            None => next.push(content),
        }
    }
    while let Some(content) = next.pop() {
        next.extend(children.remove(&name(&content)).unwrap_or_default());
        ordered.push(content);
    }
    ordered
}

/// Adds a block to the events.
fn push_block(
    into: &mut Vec<CacheEvent>,
    moved_from: Option<Tier>,
    notes: &GroupNotes,
    record: RecordId,
    name: BlockHash,
    tier: Tier,
) {
    let unknown = Note::default();
    let note = notes.note(record).filter(|note| note.name == Some(name)).unwrap_or(&unknown);
    let tokens = if note.name.is_some() { notes.tokens(record) } else { &[] };
    push_told(into, moved_from, notes, tier, (name, note, tokens));
}

/// Adds content to the events: to the last one, if it follows the last block of that.
fn push_told(
    into: &mut Vec<CacheEvent>,
    moved_from: Option<Tier>,
    notes: &GroupNotes,
    tier: Tier,
    (name, note, tokens): (BlockHash, &Note, &[u32]),
) {
    let last = match (into.last_mut(), moved_from) {
        (Some(CacheEvent::Stored(last)), None) => Some(last),
        (Some(CacheEvent::Moved { from, to }), Some(here)) if *from == here => Some(to),
        _ => None,
    };
    if let Some(last) = last
        && last.group == notes.id
        && last.tier == tier
        && last.names.last().is_some_and(|last| note.parent == Some(*last))
        && last.token_ids.is_empty() == tokens.is_empty()
        && last.content == note.content
    {
        last.names.push(name);
        last.token_ids.extend_from_slice(tokens);
        return;
    }
    let stored = stored(notes, tier, name, note, tokens);
    into.push(match moved_from {
        None => CacheEvent::Stored(stored),
        Some(from) => CacheEvent::Moved { from, to: stored },
    });
}

fn push_removed(into: &mut Vec<CacheEvent>, group: GroupId, tier: Tier, name: BlockHash) {
    match into.last_mut() {
        Some(CacheEvent::Removed { group: g, tier: t, names }) if (*g, *t) == (group, tier) => {
            names.push(name);
        }
        _ => into.push(CacheEvent::Removed { group, tier, names: vec![name] }),
    }
}

fn stored(
    notes: &GroupNotes,
    tier: Tier,
    name: BlockHash,
    note: &Note,
    tokens: &[u32],
) -> StoredBlocks {
    StoredBlocks {
        group: notes.id,
        kind: notes.kind,
        tier,
        names: vec![name],
        parent: note.parent,
        first_token: note.index.map(|index| u64::from(index) * u64::from(notes.block_tokens)),
        token_ids: tokens.to_vec(),
        block_tokens: notes.block_tokens,
        content: note.content.clone(),
    }
}
