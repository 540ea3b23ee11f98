//! Records accesses, to find two unordered accesses to the same byte.
//!
//! The record covers words of four bytes. It covers single bytes in words with smaller accesses.
//! Most words store a last writer and two readers. That is enough if all threads of a block meet at
//! each barrier, because a later writer is not both of the readers. A [`Crowd`] replaces the entry
//! of a word that is accessed atomically, or that many threads read in a kernel where part of a
//! block can meet. A crowd stores every access that some later access may not be ordered after.

use cuda_driver::guard;

use std::collections::HashMap;
use std::rc::Rc;

/// Number of bytes covered by one page of records, as a power of two.
const PAGE_SHIFT: u32 = 10;

/// Number of words of a page.
const PAGE_WORDS: usize = 1 << (PAGE_SHIFT - 2);

/// Maximum number of pages. Beyond it all records are dropped and recording starts again.
const PAGES_MAX: usize = 1 << 17;

/// Number of entries of the cache in front of the page table.
const CACHE: usize = 256;

/// Maximum number of stretches of one launch.
const STRETCHES_MAX: usize = 1 << 28;

/// The part of a thread's run between two of its barriers.
#[derive(Clone, Copy, Debug, Default)]
struct Stretch {
    thread: u32,
    /// Number of meetings of the whole block before it.
    meetings: u32,
}

/// Number of a stretch, from 1 on; 0 if accesses are not recorded. The numbers of one thread
/// ascend.
pub(super) type StretchId = u32;

/// For each thread of a block, its last stretch that is ordered before, or 0.
pub(super) type KnownStretches = Rc<[StretchId]>;

/// All stretches of a launch, and the running one.
#[derive(Debug, Default)]
pub(super) struct Stretches {
    all: Vec<Stretch>,
    block_threads: u32,
    /// Whether a part of a block's threads can meet without the rest.
    parts_meet: bool,
    /// Number of the running block's first thread in the launch.
    first: u32,
    now: Stretch,
    known: Option<KnownStretches>,
}

impl Stretches {
    pub(super) fn new(block_threads: u32, parts_meet: bool) -> Self {
        let all = vec![Stretch::default()];
        Self { all, block_threads, parts_meet, ..Self::default() }
    }

    /// Starts a new stretch of the thread with this number in the launch, after `meetings` of its
    /// block.
    pub(super) fn begin(&mut self, thread: u32, meetings: u32) -> StretchId {
        if self.all.len() >= STRETCHES_MAX {
            return 0;
        }
        self.all.push(Stretch { thread, meetings });
        (self.all.len() - 1) as StretchId
    }

    /// Continues stretch `id` of a thread, which knows the stretches `known` of the others.
    pub(super) fn enter(&mut self, id: StretchId, known: Option<KnownStretches>) {
        self.now = self.all[id as usize];
        self.first = self.now.thread - self.now.thread % self.block_threads.max(1);
        self.known = known;
    }

    /// The number of the stretch's thread in the launch.
    pub(super) fn thread(&self, id: StretchId) -> u32 {
        self.all[id as usize].thread
    }

    /// Whether the whole stretch `earlier` is ordered before the running one, or belongs to the
    /// same thread.
    #[inline]
    fn is_before(&self, earlier: StretchId) -> bool {
        let Stretch { thread, meetings } = self.all[earlier as usize];
        if thread == self.now.thread {
            return true;
        }
        let place = thread.wrapping_sub(self.first);
        place < self.block_threads
            && (meetings < self.now.meetings
                || self.known.as_ref().is_some_and(|known| {
                    guard!("sim.partial-barrier", earlier <= known[place as usize], else true)
                }))
    }

    fn is_of_other_block(&self, id: StretchId) -> bool {
        self.thread(id).wrapping_sub(self.first) >= self.block_threads
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Use {
    Read,
    Write,
    /// An access that takes part in synchronisation, or an atomic operation.
    Strong {
        writes: bool,
        kind: StrongKind,
    },
}

/// What decides with which others an access that takes part in synchronisation does not conflict.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct StrongKind {
    pub(super) of_block: bool,
    /// Its length. Each access is aligned to it, so accesses of one length are of the same bytes.
    pub(super) bytes: u8,
}

impl StrongKind {
    /// Whether an access of this kind does not conflict with one of another kind, which is of
    /// another block or not.
    fn meets(self, other: Self, of_other_block: bool) -> bool {
        let is_beyond = of_other_block && (self.of_block || other.of_block);
        guard!("sim.atomics-of-one-size", self.bytes == other.bytes, else true)
            && guard!("sim.atomics-of-block", !is_beyond, else true)
    }
}

/// The accesses to a word: its writer and two readers. Two special values of `writer` say that the
/// accesses are stored elsewhere.
#[derive(Clone, Copy, Debug, Default)]
struct Word {
    writer: StretchId,
    reader: StretchId,
    other_reader: StretchId,
}

/// Special value of `writer`: `reader` is an index into the records of bytes.
const SPLIT: StretchId = StretchId::MAX;
/// Special value of `writer`: `reader` is an index into the crowds.
const CROWD: StretchId = StretchId::MAX - 1;

/// Accesses of one kind, none of which is ordered before everything that may follow.
#[derive(Clone, Debug, Default)]
struct Unordered(Vec<StretchId>);

/// All accesses to a word or byte that may still conflict with a later one.
#[derive(Clone, Debug, Default)]
struct Crowd {
    writer: StretchId,
    readers: Unordered,
    strong: Vec<StrongGroup>,
}

/// Accesses of one kind that take part in synchronisation.
#[derive(Clone, Debug)]
struct StrongGroup {
    kind: StrongKind,
    readers: Unordered,
    writers: Unordered,
}

/// The records of split and crowded words.
#[derive(Debug, Default)]
struct Others {
    splits: Vec<[Word; 4]>,
    crowds: Vec<Crowd>,
}

/// The last accesses to each word.
#[derive(Debug)]
pub(super) struct Conflicts {
    pages: Vec<[Word; PAGE_WORDS]>,
    others: Others,
    table: HashMap<u64, u32>,
    cache: Box<[(u64, u32); CACHE]>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Conflict {
    pub(super) with: StretchId,
    pub(super) wrote: bool,
}

impl Conflicts {
    pub(super) fn new() -> Self {
        let cache = Box::new([(u64::MAX, 0); CACHE]);
        Self { pages: Vec::new(), others: Others::default(), table: HashMap::new(), cache }
    }

    pub(super) fn clear(&mut self) {
        if !self.pages.is_empty() {
            self.pages.clear();
            self.others.splits.clear();
            self.others.crowds.clear();
            self.table.clear();
            self.cache.fill((u64::MAX, 0));
        }
    }

    /// Records an access of stretch `id`, the running one, inside one page. Returns a conflicting
    /// access, if any.
    #[inline]
    pub(super) fn access(
        &mut self,
        stretches: &Stretches,
        id: StretchId,
        (address, bytes): (u64, u32),
        how: Use,
    ) -> Option<Conflict> {
        if id == 0 {
            return None;
        }
        let page = self.page(address >> PAGE_SHIFT);
        let (page, others) = (&mut self.pages[page], &mut self.others);
        let first = (address as usize >> 2) & (PAGE_WORDS - 1);
        if guard!("sim.bytes-of-a-word", bytes < 4, else bytes == 0) {
            let start = address as usize & 3;
            let range = start..(start + bytes as usize).min(4);
            return page[first].access_bytes(others, stretches, id, range, how);
        }
        let last = (first + (bytes as usize >> 2)).min(PAGE_WORDS);
        let mut found = None;
        for word in &mut page[first..last] {
            found = word.access(others, stretches, id, how).or(found);
        }
        found
    }

    #[inline]
    fn page(&mut self, key: u64) -> usize {
        let place = key as usize % CACHE;
        let (cached, index) = self.cache[place];
        let index = if cached == key { index } else { self.find_page(key, place) };
        index as usize
    }

    #[cold]
    fn find_page(&mut self, key: u64, place: usize) -> u32 {
        let index = match self.table.get(&key) {
            Some(&index) => index,
            None => {
                if self.pages.len() >= PAGES_MAX {
                    self.clear();
                }
                self.pages.push([Word::default(); PAGE_WORDS]);
                let index = (self.pages.len() - 1) as u32;
                self.table.insert(key, index);
                index
            }
        };
        self.cache[place] = (key, index);
        index
    }
}

impl Word {
    #[inline]
    fn access(
        &mut self,
        others: &mut Others,
        stretches: &Stretches,
        id: StretchId,
        how: Use,
    ) -> Option<Conflict> {
        let conflicts =
            |earlier: StretchId| earlier != 0 && earlier != id && !stretches.is_before(earlier);
        if self.writer >= CROWD || matches!(how, Use::Strong { .. }) {
            return self.access_special(others, stretches, id, how);
        }
        let mut found = None;
        if conflicts(self.writer) {
            found = Some(Conflict { with: self.writer, wrote: true });
        }
        if how == Use::Write {
            for reader in [self.reader, self.other_reader] {
                if conflicts(reader) {
                    found = found.or(Some(Conflict { with: reader, wrote: false }));
                }
            }
            self.writer = id;
        } else if !conflicts(self.reader) {
            self.reader = id;
        } else if !stretches.parts_meet
            || guard!("sim.third-reader", !conflicts(self.other_reader), else true)
        {
            self.other_reader = id;
        } else {
            return self.access_special(others, stretches, id, how);
        }
        found
    }

    fn access_bytes(
        &mut self,
        others: &mut Others,
        stretches: &Stretches,
        id: StretchId,
        bytes: std::ops::Range<usize>,
        how: Use,
    ) -> Option<Conflict> {
        if self.writer != SPLIT {
            let mut parts = [*self; 4];
            if self.writer == CROWD {
                let crowd = others.crowds[self.reader as usize].clone();
                for part in &mut parts[1..] {
                    *part = others.add(crowd.clone());
                }
            }
            others.splits.push(parts);
            let reader = (others.splits.len() - 1) as StretchId;
            *self = Self { writer: SPLIT, reader, other_reader: 0 };
        }
        let mut found = None;
        for byte in bytes {
            let mut part = others.splits[self.reader as usize][byte];
            found = part.access(others, stretches, id, how).or(found);
            others.splits[self.reader as usize][byte] = part;
        }
        found
    }

    /// Records an access to a word that has, or now needs, a crowd or byte records.
    #[cold]
    fn access_special(
        &mut self,
        others: &mut Others,
        stretches: &Stretches,
        id: StretchId,
        how: Use,
    ) -> Option<Conflict> {
        if self.writer == SPLIT {
            return self.access_bytes(others, stretches, id, 0..4, how);
        }
        if self.writer != CROWD {
            let readers = [self.reader, self.other_reader].into_iter().filter(|&id| id != 0);
            let readers = Unordered(readers.collect());
            *self = others.add(Crowd { writer: self.writer, readers, ..Crowd::default() });
        }
        others.crowds[self.reader as usize].access(stretches, id, how)
    }
}

impl Others {
    /// Stores a crowd, and returns the word entry that refers to it.
    fn add(&mut self, crowd: Crowd) -> Word {
        self.crowds.push(crowd);
        let reader = (self.crowds.len() - 1) as StretchId;
        Word { writer: CROWD, reader, other_reader: 0 }
    }
}

impl Crowd {
    fn access(&mut self, stretches: &Stretches, id: StretchId, how: Use) -> Option<Conflict> {
        let Self { writer, readers, strong } = self;
        let wrote = |with| Conflict { with, wrote: true };
        let read = |with| Conflict { with, wrote: false };
        let unordered = Some(*writer).filter(|&by| by != 0 && !stretches.is_before(by));
        let by_writer = unordered.map(wrote);
        match how {
            Use::Read => {
                readers.add(stretches, id);
                by_writer.or_else(|| {
                    strong.iter().find_map(|group| group.writers.unordered(stretches)).map(wrote)
                })
            }
            Use::Strong { writes, kind } => {
                let found = by_writer
                    .or_else(|| readers.unordered(stretches).filter(|_| writes).map(read))
                    .or_else(|| {
                        strong.iter().find_map(|group| group.clash(stretches, kind, writes))
                    });
                let group = StrongGroup::of(strong, kind);
                let list = if writes { &mut group.writers } else { &mut group.readers };
                list.add(stretches, id);
                found
            }
            Use::Write => {
                *writer = id;
                let mut strong_lists = strong.iter();
                let found = by_writer.or_else(|| {
                    strong_lists.find_map(|group| group.writers.unordered(stretches)).map(wrote)
                });
                let found = found.or_else(|| readers.unordered(stretches).map(read));
                let found = found.or_else(|| {
                    strong.iter().find_map(|group| group.readers.unordered(stretches)).map(read)
                });
                // Accesses ordered before this write are covered by the write.
                let lists =
                    strong.iter_mut().flat_map(|group| [&mut group.readers, &mut group.writers]);
                for list in lists.chain([readers]) {
                    list.0.retain(|&earlier| !stretches.is_before(earlier));
                }
                found
            }
        }
    }
}

impl StrongGroup {
    /// The accesses of a kind.
    fn of(groups: &mut Vec<Self>, kind: StrongKind) -> &mut Self {
        let place = groups.iter().position(|group| group.kind == kind).unwrap_or_else(|| {
            let (readers, writers) = (Unordered::default(), Unordered::default());
            groups.push(Self { kind, readers, writers });
            groups.len() - 1
        });
        &mut groups[place]
    }

    /// An access of the group that conflicts with one of `kind`, of the running stretch.
    fn clash(&self, stretches: &Stretches, kind: StrongKind, writes: bool) -> Option<Conflict> {
        let find = |list: &Unordered| {
            list.0.iter().copied().find(|&earlier| {
                let is_other = stretches.is_of_other_block(earlier);
                !stretches.is_before(earlier) && !self.kind.meets(kind, is_other)
            })
        };
        let wrote = find(&self.writers).map(|with| Conflict { with, wrote: true });
        wrote.or_else(|| {
            find(&self.readers).filter(|_| writes).map(|with| Conflict { with, wrote: false })
        })
    }
}

impl Unordered {
    /// An access that is not ordered before the running stretch.
    fn unordered(&self, stretches: &Stretches) -> Option<StretchId> {
        self.0.iter().copied().find(|&earlier| !stretches.is_before(earlier))
    }

    /// Adds the running stretch, and removes those ordered before it. A single stretch is kept for
    /// all other blocks, because nothing orders this block after them.
    fn add(&mut self, stretches: &Stretches, id: StretchId) {
        if self.0.last() == Some(&id) {
            return;
        }
        let mut has_other_block = false;
        self.0.retain(|&earlier| {
            let is_other = stretches.is_of_other_block(earlier);
            let keep = if is_other { !has_other_block } else { !stretches.is_before(earlier) };
            has_other_block |= is_other;
            keep
        });
        // If only whole blocks meet, any two threads of a block represent the whole block.
        let most = 2 + usize::from(has_other_block);
        if !stretches.parts_meet && self.0.len() >= most {
            self.0.pop();
        }
        self.0.push(id);
    }
}
