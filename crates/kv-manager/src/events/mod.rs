//! Events: what is cached, told in order to routers and other hosts.
//!
//! An [`EventReader`] turns the logs of the block pools into [`CacheEvent`]s, on whichever thread reads. It
//! publishes a block when the step that writes it is complete on all workers, and never one that was withdrawn
//! before. A reader that lags is told so, and its next read begins with all content that is found then.

mod chains;
mod feed;

use std::collections::HashMap;
use std::sync::Arc;

use kv_pool::events::{EventReader as PoolReader, PoolEvent, Reading};
use kv_pool::policy::RecordId;
use kv_pool::{BlockHash, Tier, guard};
use kv_tier::{GroupKind, HostChange};

use chains::Chains;
pub(crate) use feed::{Below, Feed, LowerNote, Noting};
use feed::{LowerKey, Note};

use crate::rows::Home;
use crate::{Content, GroupId, Manager};

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
    /// [known](Self::is_placed). In a group that keeps all, it was told of before.
    pub parent: Option<BlockHash>,
    /// Tokens of the prefix before the first of these blocks. `None` if that is not known: a tier has had the content since before
    /// its workers began, and nobody has loaded it.
    pub first_token: Option<u64>,
    /// The token ids of all these blocks, one block after the other: `names.len() * block_tokens`. Empty if they are not
    /// known, and if the engine names its blocks itself.
    pub token_ids: Vec<u32>,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// What the content depends on beside the token ids, such as the adapter. `None` if on nothing, and if that is not known:
    /// the content was never asked for but by [names alone](Manager::prefetch).
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
/// A reader that takes the events in in their order knows what lookups find. In a group that keeps all, a lookup ends at the
/// first block that is nowhere: what follows it is told of as removed with it, and as stored again when it is back, though it lay
/// where it was.
///
/// A mirror holds names by group and tier. It is a set: `Stored` adds to it, `Removed` takes away, `Moved` does
/// both, `Cleared` empties it. Tiers of the manager's pools hold a name once among them; a lower tier holds copies
/// beside.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum CacheEvent {
    /// Lookups find these blocks in this tier, and all workers have completed writing them.
    Stored(StoredBlocks),
    /// Lookups do not find these names in this tier any more, because they have left it or what comes before them is gone.
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

impl CacheEvent {
    /// What it says of host memory; none if it happens elsewhere.
    #[must_use]
    pub fn in_host(&self) -> Option<HostChange> {
        let blocks = |group, names: &[_]| names.iter().map(|&name| (group, name)).collect();
        Some(match self {
            Self::Stored(to) | Self::Moved { to, .. } if to.tier == Tier::Secondary => {
                HostChange::Come(blocks(to.group, &to.names))
            }
            Self::Moved { from: Tier::Secondary, to } => {
                HostChange::Gone(blocks(to.group, &to.names))
            }
            Self::Removed { group, tier: Tier::Secondary, names } => {
                HostChange::Gone(blocks(*group, names))
            }
            Self::Cleared => HostChange::Cleared,
            _ => return None,
        })
    }
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
    chains: Chains,
    /// The entry of a block that has come to a tier and is not published there.
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
    /// It is in this tier, in this block, for the first time or elsewhere before.
    Stored {
        record: RecordId,
        tier: Tier,
    },
    Removed,
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
            chains: Chains::default(),
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
            into.push(CacheEvent::Cleared);
            self.begin(feed);
            self.chains.tell(feed, into);
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
        self.publish(feed);
        self.read_lower(feed);
        self.chains.tell(feed, into);
        Ok(into.len() - before)
    }

    /// Takes all content as it is now, and follows the events from there on.
    fn begin(&mut self, feed: &Feed) {
        self.restart(feed, feed.lower_log.next());
        for (group, notes) in feed.groups.iter().enumerate() {
            // Without a log the manager has no feed.
            let Some(log) = notes.pool.events() else { continue };
            let snapshot = notes.pool.snapshot();
            self.pools.push(Position { log, from: snapshot.next_event });
            for view in &snapshot.blocks {
                let record = view.block;
                let (name, tier) = match (view.hash, view.expected) {
                    (Some(name), _) => (name, view.location.tier),
                    (None, Some((name, from))) => (name, from.tier),
                    (None, None) => continue,
                };
                match notes.note(record).is_some_and(|note| note.step > feed.completed) {
                    true => self.push_stored(group, record, name, tier),
                    false => self.put(feed, (group, name), record, tier),
                }
            }
        }
        // In the same order in every run: of several names that one follows, the first is told of.
        let mut below: Vec<_> = feed.lower.iter().collect();
        below.sort_unstable_by_key(|&(key, _)| *key);
        for (&key, lower) in below {
            self.put_below(feed, key, &lower.note);
        }
    }

    fn go_on_after_clear(&mut self, feed: &Feed) {
        self.restart(feed, feed.clear.lower);
        for (position, log) in self.pools.iter_mut().zip(&feed.clear.readers) {
            *position = Position { log: log.clone(), from: 0 };
        }
    }

    /// Forgets all that was taken in, and goes on with this event of the lower tiers.
    fn restart(&mut self, feed: &Feed, lower: u64) {
        (self.clears, self.lower) = (feed.clear.count, lower);
        self.queue.clear();
        self.chains = Chains::default();
        self.open.clear();
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
            PoolEvent::Removed { block, hash, .. } => {
                self.void(group, block);
                self.queue.push(Entry { group, name: hash, what: What::Removed });
            }
            PoolEvent::Moved { block, hash, to, .. } => {
                self.void(group, block);
                self.push_stored(group, block, hash, to.tier);
            }
            _ => {}
        }
    }

    /// Takes back what was not told yet of where a block is.
    fn void(&mut self, group: usize, record: RecordId) {
        if let Some(at) = self.open.remove(&(group, record)) {
            guard!("manager.the-withdrawn-is-not-told", self.queue[at].what = What::Void);
        }
    }

    fn push_stored(&mut self, group: usize, record: RecordId, name: BlockHash, tier: Tier) {
        self.open.insert((group, record), self.queue.len());
        self.queue.push(Entry { group, name, what: What::Stored { record, tier } });
    }

    /// Takes in what is in the queue, in order, but blocks whose step is not complete.
    fn publish(&mut self, feed: &Feed) {
        self.open.clear();
        let mut kept = 0;
        for at in 0..self.queue.len() {
            let Entry { group, name, what } = self.queue[at];
            let notes = &feed.groups[group];
            match what {
                What::Void => {}
                What::Stored { record, .. }
                    if guard!(
                        "manager.told-when-complete",
                        notes.note(record).is_some_and(|note| note.step > feed.completed),
                        else notes.note(record).is_none()
                    ) =>
                {
                    self.open.insert((group, record), kept);
                    self.queue[kept] = self.queue[at];
                    kept += 1;
                }
                What::Stored { record, tier } => self.put(feed, (group, name), record, tier),
                What::Removed => self.chains.take((group, name), None),
            }
        }
        self.queue.truncate(kept);
    }

    /// Takes in what lower tiers have stored and removed, as it is now.
    fn read_lower(&mut self, feed: &Feed) {
        for &key in feed.lower_log.from(self.lower).0 {
            let (group, tier, name) = key;
            match feed.lower.get(&key) {
                Some(lower) => self.put_below(feed, key, &lower.note),
                None => self.chains.take((group, name), Some(tier)),
            }
        }
        self.lower = feed.lower_log.next();
    }

    fn put_below(&mut self, feed: &Feed, (group, tier, name): LowerKey, note: &Note) {
        let chained = feed.groups[group].shape.is_chained();
        self.chains.put((group, name), (tier, None), note.parents(), chained);
    }

    /// Notes content of a tier of the pool, whose step is complete.
    fn put(&mut self, feed: &Feed, key: (usize, BlockHash), record: RecordId, tier: Tier) {
        let notes = &feed.groups[key.0];
        let note = notes.note(record).filter(|note| note.name == Some(key.1));
        let parents = note.into_iter().flat_map(Note::parents);
        self.chains.put(key, (tier, Some(record)), parents, notes.shape.is_chained());
    }
}
