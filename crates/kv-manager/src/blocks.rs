//! A sequence's blocks of one group, in order: runs of blocks that are held in the same way.

use std::ops::Range;
use std::sync::Arc;

use kv_pool::{
    BlockHash, BlockId, Claimed, Naming, Pinned, guard, policy::RecordId, retention::Retention,
};
use smallvec::SmallVec;

/// Consecutive blocks with the same kind of handle.
#[derive(Debug)]
enum Run {
    /// Blocks with names. Other sequences may hold them, and none writes them.
    Shared(Pinned),
    /// Blocks that this sequence alone reads and writes.
    Own(Claimed),
    /// Blocks of a list without names that forks hold together, and none writes.
    Twin(Arc<Claimed>, Range<usize>),
    /// Places of blocks that are needed no more.
    Gone(usize),
}

impl Run {
    fn len(&self) -> usize {
        match self {
            Self::Shared(pinned) => pinned.len(),
            Self::Own(claimed) => claimed.len(),
            Self::Twin(_, range) => range.len(),
            Self::Gone(count) => *count,
        }
    }

    fn id(&self, index: usize) -> Option<BlockId> {
        looked_at(index + 1);
        match self {
            Self::Shared(pinned) => pinned.ids().nth(index),
            Self::Own(claimed) => claimed.ids().nth(index),
            Self::Twin(claimed, range) => claimed.ids().take(range.end).nth(range.start + index),
            Self::Gone(_) => None,
        }
    }

    fn truncate(&mut self, len: usize) {
        match self {
            Self::Shared(pinned) => pinned.truncate(len),
            Self::Own(claimed) => drop(claimed.split_off(len)),
            Self::Twin(_, range) => range.end = range.end.min(range.start + len),
            Self::Gone(count) => *count = len.min(*count),
        }
    }

    /// The same blocks, as the sequence's own if nobody else holds them.
    fn claimed_back(self) -> Self {
        let Self::Twin(twins, range) = self else { return self };
        match Arc::try_unwrap(twins) {
            Ok(mut all) => {
                drop(all.split_off(range.end));
                Self::Own(all.split_off(range.start))
            }
            Err(twins) => Self::Twin(twins, range),
        }
    }

    fn add_ids<I: From<Option<BlockId>>>(&self, from: usize, ids: &mut Vec<I>) {
        looked_at(self.len());
        let id = |id| I::from(Some(id));
        match self {
            Self::Shared(pinned) => ids.extend(pinned.ids().skip(from).map(id)),
            Self::Own(claimed) => ids.extend(claimed.ids().skip(from).map(id)),
            Self::Twin(claimed, range) => {
                ids.extend(claimed.ids().take(range.end).skip(range.start + from).map(id));
            }
            Self::Gone(count) => ids.extend((from..*count).map(|_| I::from(None))),
        }
    }
}

#[cfg(test)]
std::thread_local! {
    /// Ids that lists were looked through for, so that tests can count them.
    pub(crate) static LOOKS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// So many ids of a list are looked through.
#[inline]
fn looked_at(_ids: usize) {
    #[cfg(test)]
    LOOKS.set(LOOKS.get() + _ids);
}

/// Names of blocks from place `first` on, `parent` before them, and what a block is worth: the retention of the block at a place,
/// and of how many blocks from there on it is known.
struct Offer<'a, W> {
    first: usize,
    names: &'a [BlockHash],
    parent: Option<BlockHash>,
    worth: W,
}

impl<W: Fn(usize) -> (Retention, usize)> Offer<'_, W> {
    /// Gives the first of the sequence's own blocks the names from the one `at` on, and adds them to those that have names. Which
    /// name is next: that of a block whose name another one bears, if blocks are left.
    fn take(
        &self,
        mut at: usize,
        own: &mut Claimed,
        onto: &mut Pinned,
        named: &mut impl FnMut(RecordId, BlockHash),
    ) -> usize {
        while at < self.names.len() && !own.is_empty() {
            let (retention, alike) = (self.worth)(self.first + at);
            let count = own.len().min(alike.max(1)).min(self.names.len() - at);
            let parent = at.checked_sub(1).map(|before| self.names[before]).or(self.parent);
            let names = &self.names[at..at + count];
            let Ok(new) = own.register_onto(names, Naming { parent, retention }, onto) else {
                unreachable!("there are as many blocks as names, and of the same pool")
            };
            for (record, &name) in onto.records().skip(onto.len() - new).zip(names) {
                named(record, name);
            }
            at += new;
            if new < count {
                break;
            }
        }
        at
    }
}

/// A sequence's blocks: mostly a list of shared ones, then a list of its own.
///
/// A drop releases the blocks from last to first, so that the tail of a prefix is evicted before its
/// head.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Blocks {
    len: usize,
    /// The first of the last blocks that are the sequence's own.
    own_from: usize,
    runs: SmallVec<[Run; 3]>,
}

impl Blocks {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The first of the last blocks that the sequence may write.
    pub(crate) fn own_from(&self) -> usize {
        self.own_from
    }

    /// Whether the sequence may write block `index`.
    pub(crate) fn is_own(&self, index: usize) -> bool {
        index >= self.own_from
    }

    pub(crate) fn id(&self, index: usize) -> Option<BlockId> {
        let (run, at) = self.find(index)?;
        self.runs[run].id(at)
    }

    /// Adds the ids of the blocks from `first` on to a list, in order; none for those that are needed no more.
    pub(crate) fn add_ids<I: From<Option<BlockId>>>(&self, first: usize, ids: &mut Vec<I>) {
        let mut start = 0;
        for run in &self.runs {
            let len = run.len();
            if start + len > first {
                run.add_ids(first.saturating_sub(start), ids);
            }
            start += len;
        }
    }

    /// The same ids as a list, for places that are looked up one after the other: [`id`](Self::id) looks at all before
    /// one.
    pub(crate) fn ids_from(&self, first: usize) -> Vec<Option<BlockId>> {
        let mut ids = Vec::with_capacity(self.len.saturating_sub(first));
        self.add_ids(first, &mut ids);
        ids
    }

    pub(crate) fn push_shared(&mut self, pinned: Pinned) {
        self.push(Run::Shared(pinned));
    }

    pub(crate) fn push_own(&mut self, claimed: Claimed) {
        let count = claimed.len();
        match self.runs.last_mut() {
            Some(Run::Own(last)) => match last.append(claimed) {
                Ok(()) => self.len += count,
                Err(claimed) => self.push(Run::Own(claimed)),
            },
            _ => self.push(Run::Own(claimed)),
        }
    }

    /// Makes room for so many blocks with names, for lists that none leaves from the front.
    pub(crate) fn reserve_shared(&mut self, blocks: usize) {
        if let [.., Run::Shared(shared)] | [.., Run::Shared(shared), _] = &mut self.runs[..] {
            shared.reserve(blocks);
        }
    }

    /// Adds places of blocks that are not needed.
    pub(crate) fn push_gone(&mut self, count: usize) {
        self.push(Run::Gone(count));
    }

    /// Releases the blocks from `first` up to `end`, which are needed no more. The others keep their places.
    pub(crate) fn retire(&mut self, first: usize, end: usize) {
        if self.retire_next(first, end) {
            return;
        }
        let behind = self.split_off(end);
        let gone = self.split_off(first);
        self.push_gone(gone.len());
        drop(gone);
        self.append(behind);
        self.find_own();
    }

    /// The common case, without the list being taken apart: blocks with names, right behind those that went before.
    fn retire_next(&mut self, first: usize, end: usize) -> bool {
        let Some((at, 0)) = self.find(first) else { return false };
        let [Run::Gone(before), Run::Shared(kept), ..] = &mut self.runs[at..] else { return false };
        let count = end.saturating_sub(first + *before);
        if count >= kept.len() {
            return false;
        }
        let behind = kept.split_off(count);
        drop(std::mem::replace(kept, behind));
        *before += count;
        true
    }

    /// Releases the blocks from `len` on, the last one first.
    pub(crate) fn truncate(&mut self, len: usize) {
        while self.len > len {
            let Some(mut last) = self.runs.pop() else { break };
            let start = self.len - last.len();
            self.len = start;
            if start < len {
                last.truncate(len - start);
                self.push(last);
            }
        }
        self.find_own();
    }

    /// Takes the blocks from `at` on.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        let mut behind: SmallVec<[Run; 3]> = SmallVec::new();
        while self.len > at {
            let Some(mut last) = self.runs.pop() else { break };
            let start = self.len - last.len();
            self.len = start;
            if start >= at {
                behind.push(last);
                continue;
            }
            let rest = match &mut last {
                Run::Shared(pinned) => Run::Shared(pinned.split_off(at - start)),
                Run::Own(claimed) => Run::Own(claimed.split_off(at - start)),
                Run::Twin(claimed, range) => {
                    let cut = range.start + at - start;
                    let rest = Run::Twin(Arc::clone(claimed), cut..range.end);
                    range.end = cut;
                    rest
                }
                Run::Gone(count) => {
                    let rest = Run::Gone(*count + start - at);
                    *count = at - start;
                    rest
                }
            };
            behind.push(rest);
            self.push(last);
            break;
        }
        self.find_own();
        let mut rest = Self::default();
        while let Some(run) = behind.pop() {
            rest.push(run);
        }
        rest
    }

    /// Adds all blocks of `more` behind those that are there.
    pub(crate) fn append(&mut self, mut more: Self) {
        for run in std::mem::take(&mut more.runs) {
            self.push(run);
        }
        more.len = 0;
    }

    /// Makes block `index` the sequence's own if no fork holds it any more. Whether it is its own.
    pub(crate) fn claim_back(&mut self, index: usize) -> bool {
        let Some((run, at)) = self.find(index) else { return false };
        if let Run::Twin(_, range) = &self.runs[run]
            && at == 0
            && range.len() == 1
        {
            let twin = std::mem::replace(&mut self.runs[run], Run::Own(Claimed::default()));
            self.runs[run] = twin.claimed_back();
            self.find_own();
        }
        self.is_own(index)
    }

    /// Makes the first block the sequence's own, without its name, if nobody else holds it. Whether it is its own.
    pub(crate) fn unname_first(&mut self) -> bool {
        let behind = self.split_off(1);
        for run in std::mem::take(&mut self.runs) {
            self.len = 0;
            self.push(match run {
                Run::Shared(named) => named.unname().map_or_else(Run::Shared, Run::Own),
                other => other,
            });
        }
        self.append(behind);
        self.find_own();
        self.is_own(0)
    }

    /// Lends the own blocks from `first` up to `end` to a transfer: they are not written before they are
    /// [claimed back](Self::claim_all_back), and not released before the transfer has ended.
    pub(crate) fn lend(&mut self, first: usize, end: usize) -> Arc<Claimed> {
        let behind = self.split_off(end);
        let mut lent = self.split_off(first);
        let mut all = Claimed::default();
        for run in std::mem::take(&mut lent.runs) {
            if let Run::Own(own) = run {
                // Blocks of one admission are of one pool and tier.
                let appended = all.append(own);
                debug_assert!(appended.is_ok());
            }
        }
        lent.len = 0;
        let lent = Arc::new(all);
        self.push(Run::Twin(Arc::clone(&lent), 0..lent.len()));
        self.append(behind);
        self.find_own();
        lent
    }

    /// Makes block `index` the first; those before it follow.
    pub(crate) fn bring_first(&mut self, index: usize) {
        let behind = self.split_off(index + 1);
        let mut all = self.split_off(index);
        all.append(std::mem::take(self));
        all.append(behind);
        all.find_own();
        *self = all;
    }

    /// Makes all blocks the sequence's own that nobody else holds any more and that have no names.
    pub(crate) fn claim_all_back(&mut self) {
        for run in std::mem::take(&mut self.runs) {
            self.len -= run.len();
            let run = run.claimed_back();
            self.push(run);
        }
        self.find_own();
    }

    /// Puts a block of the sequence's own in the place of the shared block `index`, and returns what held
    /// that.
    pub(crate) fn replace(&mut self, index: usize, own: Claimed) -> Self {
        let behind = self.split_off(index + 1);
        let replaced = self.split_off(index);
        self.push(Run::Own(own));
        self.append(behind);
        self.find_own();
        replaced
    }

    /// Gives the sequence's own blocks from `first` on the names `names`, by position, and reports the
    /// blocks that have got theirs. A block whose name another block bears stays as it is.
    ///
    /// `worth` returns the retention of a block, and of how many blocks from there on it is known.
    pub(crate) fn name(
        &mut self,
        first: usize,
        names: &[BlockHash],
        parent: Option<BlockHash>,
        worth: impl Fn(usize) -> (Retention, usize),
        mut named: impl FnMut(RecordId, BlockHash),
    ) {
        let offer = Offer { first, names, parent, worth };
        let mut at = 0;
        if let [.., Run::Shared(onto), Run::Own(own)] = &mut self.runs[..]
            && self.len - own.len() == first
        {
            // The common case, without a list being taken apart: right behind blocks with names.
            at = offer.take(0, own, onto, &mut named);
            self.own_from = first + at;
            // The next block keeps its place as one of the sequence's own.
            at += usize::from(at < names.len() && !own.is_empty());
            if own.is_empty() {
                self.runs.pop();
            }
        }
        if at < names.len() {
            self.name_runs(at, &offer, named);
        }
    }

    /// The same of the names from the one `at` on, wherever the blocks are.
    fn name_runs<W: Fn(usize) -> (Retention, usize)>(
        &mut self,
        mut at: usize,
        offer: &Offer<'_, W>,
        mut named: impl FnMut(RecordId, BlockHash),
    ) {
        // What comes before the block in the middle of a list is named first, so a list is cut seldom.
        let mut behind = self.split_off(offer.first + at);
        let mut onto = self.pop_shared();
        for run in std::mem::take(&mut behind.runs) {
            let Run::Own(mut own) = run else {
                at += run.len();
                self.push_shared(std::mem::take(&mut onto));
                self.push(run);
                continue;
            };
            loop {
                at = offer.take(at, &mut own, &mut onto, &mut named);
                if at >= offer.names.len() || own.is_empty() {
                    break;
                }
                self.push_shared(std::mem::take(&mut onto));
                self.push(Run::Own(own.take_first().unwrap_or_default()));
                at += 1;
            }
            at += own.len();
            self.push_shared(std::mem::take(&mut onto));
            self.push(Run::Own(own));
        }
        self.push_shared(onto);
        behind.len = 0;
    }

    /// The same blocks for a fork, the first `full` and the one behind them if there are more: from now on
    /// no holder writes them without [claiming them back](Self::claim_back). The others stay.
    pub(crate) fn fork(&mut self, full: usize, blocks: usize) -> Self {
        let rest = self.split_off(blocks);
        let tail = self.split_off(full);
        let mut twin = Self::default();
        for part in [std::mem::take(self), tail] {
            let mut part = part;
            for run in std::mem::take(&mut part.runs) {
                let run = match run {
                    Run::Own(own) => {
                        let len = own.len();
                        Run::Twin(Arc::new(own), 0..len)
                    }
                    run => run,
                };
                twin.push(match &run {
                    Run::Shared(pinned) => Run::Shared(pinned.clone()),
                    Run::Twin(twins, range) => Run::Twin(Arc::clone(twins), range.clone()),
                    Run::Gone(count) => Run::Gone(*count),
                    Run::Own(_) => unreachable!("own blocks became twins"),
                });
                self.push(run);
            }
            part.len = 0;
        }
        self.append(rest);
        self.find_own();
        twin
    }

    /// Blocks from the first on that were named, or are needed no more.
    pub(crate) fn shared_len(&self) -> usize {
        let settled = |run: &&Run| matches!(run, Run::Shared(_) | Run::Gone(_));
        let shared = self.runs.iter().take_while(settled);
        shared.map(Run::len).sum()
    }

    /// The places from the first block without a name on, up to `end`, of blocks that are needed.
    pub(crate) fn unnamed(&self, end: usize) -> impl Iterator<Item = usize> + use<> {
        let gone = guard!("manager.gone-places-stay-gone", self.gone(), else 0..0);
        (self.shared_len()..end).filter(move |place| !gone.contains(place))
    }

    /// The places of blocks that are needed no more.
    pub(crate) fn gone(&self) -> Range<usize> {
        let mut start = 0;
        for run in &self.runs {
            if let Run::Gone(count) = run {
                return start..start + count;
            }
            start += run.len();
        }
        0..0
    }

    /// How many of the blocks before a place have names.
    pub(crate) fn shared_before(&self, place: usize) -> usize {
        let (mut start, mut shared) = (0, 0);
        for run in &self.runs {
            let within = place.saturating_sub(start).min(run.len());
            shared += if matches!(run, Run::Shared(_)) { within } else { 0 };
            start += run.len();
        }
        shared
    }

    /// All blocks with names, for hints.
    pub(crate) fn shared(&self) -> impl DoubleEndedIterator<Item = &Pinned> + Clone {
        self.runs.iter().filter_map(|run| match run {
            Run::Shared(pinned) => Some(pinned),
            _ => None,
        })
    }

    /// Takes the last run, if its blocks have names.
    fn pop_shared(&mut self) -> Pinned {
        match self.runs.pop() {
            Some(Run::Shared(pinned)) => {
                self.len -= pinned.len();
                pinned
            }
            other => {
                self.runs.extend(other);
                Pinned::default()
            }
        }
    }

    fn find(&self, index: usize) -> Option<(usize, usize)> {
        let mut at = index;
        for (run, blocks) in self.runs.iter().enumerate() {
            match at.checked_sub(blocks.len()) {
                Some(behind) => at = behind,
                None => return Some((run, at)),
            }
        }
        None
    }

    fn push(&mut self, run: Run) {
        let len = run.len();
        if len == 0 {
            return;
        }
        let shared = !matches!(run, Run::Own(_));
        let left = match (self.runs.last_mut(), run) {
            (Some(Run::Shared(last)), Run::Shared(more)) => {
                last.append(more).err().map(Run::Shared)
            }
            (Some(Run::Own(last)), Run::Own(more)) => last.append(more).err().map(Run::Own),
            (Some(Run::Twin(last, range)), Run::Twin(more, behind))
                if Arc::ptr_eq(last, &more) && range.end == behind.start =>
            {
                range.end = behind.end;
                None
            }
            (Some(Run::Gone(last)), Run::Gone(more)) => {
                *last += more;
                None
            }
            (_, run) => Some(run),
        };
        self.runs.extend(left);
        self.len += len;
        if shared {
            self.own_from = self.len;
        }
    }

    fn find_own(&mut self) {
        let own = self.runs.iter().rev().take_while(|run| matches!(run, Run::Own(_)));
        self.own_from = self.len - own.map(Run::len).sum::<usize>();
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        while let Some(run) = self.runs.pop() {
            drop(run);
        }
    }
}
