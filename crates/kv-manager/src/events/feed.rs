//! What is noted of named blocks for readers of events: their tokens, and the step that they are true from.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use kv_pool::events::EventReader as PoolReader;
use kv_pool::policy::RecordId;
use kv_pool::{BlockHash, BlockPool, Tier, guard};
use parking_lot::MutexGuard;

use crate::group::{Group, Shape};
use crate::names::Known;
use crate::options::repeated;
use crate::{Content, GroupId, OptionsError};

/// What is noted of a block's content, beside its token ids.
#[derive(Clone, Debug, Default)]
pub(super) struct Note {
    pub(super) name: Option<BlockHash>,
    pub(super) parent: Option<BlockHash>,
    /// What comes before it in [other requests](Known::other_before).
    pub(super) other: Option<BlockHash>,
    /// It is published when this step is complete.
    pub(super) step: u64,
    /// Which block of its prefix it is; `None` if that is not known.
    pub(super) index: Option<u32>,
    /// Whether the token ids are known.
    ids: bool,
    pub(super) content: Option<Arc<Content>>,
}

impl Note {
    /// What is noted of block `name` of a sequence of which `known` is known, at this place of a group that keeps all or not;
    /// `parent` is the name before.
    fn of(
        known: &Known,
        (index, block_tokens): (usize, u32),
        (parent, name): (Option<BlockHash>, BlockHash),
        chained: bool,
    ) -> Self {
        let before = known.other_before((index, block_tokens), parent).filter(|_| chained);
        Self {
            name: Some(name),
            parent,
            other: guard!("manager.follows-with-and-without-salt", before, else None),
            index: u32::try_from(index).ok(),
            content: known.content().cloned(),
            ..Self::default()
        }
    }

    /// The names that it follows.
    pub(super) fn parents(&self) -> impl Iterator<Item = BlockHash> {
        self.parent.into_iter().chain(self.other)
    }
}

/// What is noted of the blocks of a group, by the block that bears the content, in whichever tier of the pool.
#[derive(Debug)]
pub(super) struct GroupNotes {
    pub(super) shape: Shape,
    pub(super) pool: BlockPool,
    notes: Vec<Note>,
    /// The token ids of all blocks, `[records, block_tokens]`.
    tokens: Vec<u32>,
}

impl GroupNotes {
    fn new(group: &Group) -> Result<Self, OptionsError> {
        let records = group.records();
        let tokens = repeated(0, records.saturating_mul(group.block_tokens as usize))?;
        let notes = repeated(Note::default(), records)?;
        Ok(Self { shape: **group, pool: group.pool.clone(), notes, tokens })
    }

    pub(super) fn note(&self, record: RecordId) -> Option<&Note> {
        self.notes.get(record.index())
    }

    /// The token ids of a block; none if the engine names its blocks itself.
    pub(super) fn tokens(&self, record: RecordId) -> &[u32] {
        let (index, len) = (record.index(), self.shape.block_tokens as usize);
        let known = self.notes.get(index).is_some_and(|note| note.ids);
        let tokens = self.tokens.get(index * len..(index + 1) * len);
        tokens.filter(|_| known).unwrap_or_default()
    }

    fn set(&mut self, record: RecordId, note: Note, tokens: &[u32]) {
        let (index, len) = (record.index(), self.shape.block_tokens as usize);
        let (Some(place), Some(ids)) =
            (self.notes.get_mut(index), self.tokens.get_mut(index * len..(index + 1) * len))
        else {
            return;
        };
        let known = tokens.len() == len;
        if known {
            ids.copy_from_slice(tokens);
        }
        *place = Note { ids: known, ..note };
    }
}

/// Content in a tier below the pool's.
#[derive(Clone, Debug)]
pub(crate) struct LowerNote {
    pub(super) note: Note,
    pub(super) tokens: Box<[u32]>,
}

impl LowerNote {
    pub(crate) fn parent(&self) -> Option<BlockHash> {
        self.note.parent
    }

    /// Content of which nothing is known but its name.
    fn unplaced(name: BlockHash) -> Self {
        Self { note: Note { name: Some(name), ..Note::default() }, tokens: Box::default() }
    }

    /// What who asks for block `index` of a prefix knows of it: `known`, unless it names the block alone.
    pub(crate) fn asked(
        known: Option<&Known>,
        (index, block_tokens): (usize, u32),
        (parent, name): (Option<BlockHash>, BlockHash),
        chained: bool,
    ) -> Self {
        let Some(known) = known else {
            let index = u32::try_from(index).ok();
            return Self {
                note: Note { parent, index, ..Self::unplaced(name).note },
                tokens: Box::default(),
            };
        };
        let note = Note::of(known, (index, block_tokens), (parent, name), chained);
        Self { note, tokens: known.ids_of(index, block_tokens).into() }
    }
}

/// What has become of content in a tier below the pool's.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Below {
    /// It is being stored, and this block of the pool bears it.
    Storing(RecordId),
    /// A copy is complete, on all workers.
    Stored,
    /// It has been there since before its workers began.
    Survived,
    Removed,
}

/// A place in a lower tier: group, tier, name.
pub(super) type LowerKey = (usize, Tier, BlockHash);

/// The places where the latest events of the lower tiers have happened. Events are numbered from 0.
#[derive(Debug, Default)]
pub(super) struct LowerLog {
    ring: VecDeque<LowerKey>,
    next: u64,
}

impl LowerLog {
    fn push(&mut self, capacity: usize, key: LowerKey) {
        while self.ring.len() >= capacity.max(1) {
            self.ring.pop_front();
        }
        self.ring.push_back(key);
        self.next += 1;
    }

    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// The events from number `from` on, and how many before them are lost.
    pub(super) fn from(&self, from: u64) -> (impl Iterator<Item = &LowerKey>, u64) {
        let oldest = self.next - self.ring.len() as u64;
        let skip = from.saturating_sub(oldest) as usize;
        (self.ring.iter().skip(skip), oldest.saturating_sub(from))
    }
}

/// Where readers go on after all content was forgotten.
#[derive(Debug, Default)]
pub(super) struct Clear {
    /// How often that was.
    pub(super) count: u64,
    /// Readers of each group's pool, from that moment on.
    pub(super) readers: Vec<PoolReader>,
    pub(super) lower: u64,
}

/// What the manager and its sequences tell the readers of events beside the logs of the pools.
///
/// Its lock is held while blocks get names, while all content is forgotten, and while a reader reads: so a
/// reader finds a note of every name in the logs. It is taken before a pool's.
#[derive(Debug)]
pub(crate) struct Feed {
    pub(super) groups: Vec<GroupNotes>,
    /// The latest step that all workers have completed.
    pub(super) completed: u64,
    pub(super) clear: Clear,
    /// What is complete in lower tiers.
    pub(super) lower: HashMap<LowerKey, LowerNote>,
    /// What is being stored there.
    storing: HashMap<LowerKey, LowerNote>,
    pub(super) lower_log: LowerLog,
    capacity: usize,
}

impl Feed {
    /// What is kept for readers of at most `capacity` events that were not read.
    pub(crate) fn new(groups: &[Group], capacity: usize) -> Result<Self, OptionsError> {
        Ok(Self {
            groups: groups.iter().map(GroupNotes::new).collect::<Result<_, _>>()?,
            completed: 0,
            clear: Clear::default(),
            lower: HashMap::new(),
            storing: HashMap::new(),
            lower_log: LowerLog::default(),
            capacity,
        })
    }

    /// All workers have completed the steps up to this one.
    pub(crate) fn complete(&mut self, step: u64) {
        self.completed = step;
    }

    /// Has readers forget everything that has happened so far.
    pub(crate) fn note_clear(&mut self) {
        self.lower.clear();
        self.storing.clear();
        self.clear = Clear {
            count: self.clear.count + 1,
            readers: self.groups.iter().filter_map(|group| group.pool.events()).collect(),
            lower: self.lower_log.next(),
        };
    }
}

/// Notes the blocks of one sequence that get names.
pub(crate) struct Noting<'a> {
    feed: Option<MutexGuard<'a, Feed>>,
    group: usize,
    step: u64,
    /// The names that are offered, from block `index` on.
    names: &'a [BlockHash],
    index: usize,
    parent: Option<BlockHash>,
    known: &'a Known,
}

impl<'a> Noting<'a> {
    /// Notes blocks of a sequence of which `known` is known. Their `names` are those of the blocks from
    /// `first` on, `parent` is the name before. They are true when `step` is complete.
    pub(crate) fn new(
        feed: Option<MutexGuard<'a, Feed>>,
        group: usize,
        step: u64,
        (first, names): (usize, &'a [BlockHash]),
        parent: Option<BlockHash>,
        known: &'a Known,
    ) -> Self {
        Self { feed, group, step, names, index: first, parent, known }
    }

    /// Notes that a block got the next of the names that is `name`.
    #[inline]
    pub(crate) fn named(&mut self, record: RecordId, name: BlockHash) {
        let Some(feed) = &mut self.feed else { return };
        let Some(group) = feed.groups.get_mut(self.group) else { return };
        while let Some((&next, rest)) = self.names.split_first() {
            let (index, parent) = (self.index, self.parent);
            (self.names, self.index, self.parent) = (rest, index + 1, Some(next));
            // Blocks between bear no name, since others bear theirs.
            if next != name {
                continue;
            }
            let at = (index, group.shape.block_tokens);
            let note = Note::of(self.known, at, (parent, name), group.shape.is_chained());
            let tokens = self.known.ids_of(index, group.shape.block_tokens);
            let note = Note { step: self.step, ..note };
            group.set(record, note, tokens);
            return;
        }
    }
}

impl Feed {
    /// Has readers told of what has become of a block's content in a lower tier, if that is news to them.
    pub(crate) fn note_below(
        &mut self,
        tier: Tier,
        (GroupId(group), name): (GroupId, BlockHash),
        now: Below,
    ) {
        let key = (usize::from(group), tier, name);
        let is_news = match now {
            Below::Storing(record) => {
                let Some(notes) = self.groups.get(key.0) else { return };
                let note = notes.note(record).filter(|note| note.name == Some(name));
                let Some(note) = note.cloned() else { return };
                self.storing.insert(key, LowerNote { note, tokens: notes.tokens(record).into() });
                false
            }
            Below::Stored => {
                let stored = self.storing.remove(&key);
                stored.is_some_and(|note| self.lower.insert(key, note).is_none())
            }
            Below::Survived => self.lower.insert(key, LowerNote::unplaced(name)).is_none(),
            Below::Removed => {
                self.storing.remove(&key);
                self.lower.remove(&key).is_some()
            }
        };
        if is_news {
            self.lower_log.push(self.capacity, key);
        }
    }

    /// Notes that a block of the pool got the name of content that came back from a lower tier, as it was `asked` for. The lock
    /// is held since before the block got it.
    pub(crate) fn loaded(&mut self, group: usize, tier: Tier, record: RecordId, asked: LowerNote) {
        let below = asked.note.name.and_then(|name| self.lower.get_mut(&(group, tier, name)));
        let LowerNote { note, tokens } = match below {
            Some(below) => {
                // Readers that begin later are told its place there, too.
                if below.note.index.is_none() {
                    *below = asked;
                }
                below.clone()
            }
            None => asked,
        };
        if let Some(notes) = self.groups.get_mut(group) {
            notes.set(record, Note { step: 0, ..note }, &tokens);
        }
    }
}
