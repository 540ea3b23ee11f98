//! Loads by layers: sequences that are admitted while their prefix comes from a tier below host memory.
//!
//! Such a sequence has device blocks for what a load brings. Each worker copies a layer there as soon as the layer is
//! in host memory and right, and the engine waits for it before it launches that layer. What comes out of its steps is
//! taken in once the load has ended at all workers. If a block is wrong at any, the sequence is set back to it.
//! Until then nothing from the load on is named, so no other sequence reads it.

use std::sync::{Arc, OnceLock};

use kv_tier::{BlockFault, TicketId};
use smallvec::SmallVec;

use kv_pool::{BlockHash, Claimed, Pinned, guard};

use super::{Key, Lower, Ticket};
use crate::ends::Redo;
use crate::group::{Group, Writer};
use crate::hit::Found;
use crate::plan::LayerLoad;
use crate::request::Request;
use crate::{GroupId, Manager, Sequence, WorkerId};

/// What became of a load: whether each of its blocks is wrong, once that is known of all workers.
type Loaded = Arc<OnceLock<Vec<bool>>>;

/// Blocks of one ticket in a row, which a sequence was admitted with.
#[derive(Debug)]
struct Part {
    group: GroupId,
    ticket: TicketId,
    loaded: Loaded,
    /// The first block, in the ticket.
    from: usize,
    /// The first block, in the prefix.
    place: usize,
    count: usize,
}

/// A prefix that is cached in part, of which open loads bring the rest.
#[derive(Debug)]
pub(crate) struct Entering {
    /// Tokens of the prefix.
    pub(crate) tokens: u64,
    /// Of each group, the blocks that loads bring: so many at the end of the first ones that it needs, and at
    /// the end of the last ones.
    pub(crate) loads: SmallVec<[[usize; 2]; 4]>,
}

/// The loads that a sequence was admitted with: blocks of its prefix.
#[derive(Debug, Default)]
pub(crate) struct OpenLoad {
    /// Group by group, in the order of their places.
    parts: Vec<Part>,
    /// The prefix that they complete.
    tokens: u64,
    /// The first token that they bring.
    first_token: u64,
    /// The last plan before the one that copies what they bring.
    after: u64,
}

/// What the sequences that were admitted with a load have of it.
#[derive(Debug)]
pub(super) struct Readers {
    loaded: Loaded,
    /// The first plan and the last one that copy its blocks to the device; [`NEXT`] for one that is not staged.
    first: u64,
    last: u64,
}

/// Host blocks of a load that has ended, until the plans are complete that copy them to the device.
#[derive(Debug)]
pub(super) struct Read {
    last: u64,
    _blocks: (Vec<Claimed>, Pinned),
}

const NEXT: u64 = u64::MAX;

impl OpenLoad {
    pub(crate) fn blocks(&self) -> usize {
        self.parts.iter().map(|part| part.count).sum()
    }

    /// The first ticket that is open, or else the last one.
    fn ticket(&self) -> Option<TicketId> {
        let open = self.parts.iter().find(|part| part.loaded.get().is_none());
        open.or(self.parts.last()).map(|part| part.ticket)
    }

    /// Whether all have ended, and a plan copies what they have brought: the copies of later plans come behind these.
    fn has_ended(&self, staged: u64) -> bool {
        guard!("manager.loads-end-with-a-plan", staged > self.after, else true)
            && self.parts.iter().all(|part| part.loaded.get().is_some())
    }

    /// The place behind the first blocks of a group that are right, and whether all are; `None` if it has none.
    fn right_of(&self, group: GroupId) -> Option<(usize, bool)> {
        let mut end = None;
        for part in self.parts.iter().filter(|part| part.group == group) {
            let wrong = part.loaded.get().map_or(&[][..], |wrong| &wrong[..]);
            let right = wrong.iter().skip(part.from).take(part.count).take_while(|wrong| !**wrong);
            let right = right.count();
            end = Some((part.place + right, right == part.count));
            if right < part.count {
                break;
            }
        }
        end
    }

    /// Adds the block at a place of a group's prefix, which a ticket brings.
    fn push(&mut self, group: GroupId, place: usize, (ticket, at): (&Ticket, usize)) {
        match self.parts.last_mut() {
            Some(part)
                if (part.group, part.ticket) == (group, ticket.id)
                    && (part.from + part.count, part.place + part.count) == (at, place) =>
            {
                part.count += 1;
            }
            _ => {
                let (ticket, loaded) = (ticket.id, Loaded::default());
                self.parts.push(Part { group, ticket, loaded, from: at, place, count: 1 });
            }
        }
    }
}

impl Sequence {
    /// The first token that a load brings which has not ended: what is computed behind it is not taken in yet.
    pub(crate) fn loads_from(&self) -> u64 {
        self.load.as_ref().map_or(u64::MAX, |load| load.first_token)
    }

    /// Whether loads have ended that it was admitted with, by plans up to `staged`, and it has not heard of it.
    pub(crate) fn has_loaded(&self, staged: u64) -> bool {
        self.load.as_ref().is_some_and(|load| load.has_ended(staged))
    }

    /// The ticket that brings a part of its prefix, if it was [admitted while that is
    /// loaded](crate::Request::by_layers), and it was not told since that the load has ended at all workers.
    #[must_use]
    #[inline]
    pub fn loads(&self) -> Option<TicketId> {
        // Every step of a sequence that decodes asks, and its pace lies where the step looks anyway.
        if self.pace.is_granted() {
            debug_assert!(self.load.is_none(), "{self:?}");
            return None;
        }
        self.load.as_ref()?.ticket()
    }
}

impl Manager {
    /// Whether a request can be admitted while loads bring what follows the cached part of its prefix: if all of it
    /// that is below is on its way, by plans that were staged before.
    pub(super) fn enters(&self, request: &Request) -> bool {
        let (names, most) = request.wanted();
        self.entering(names, most).is_some()
    }

    /// The prefix, of at most `most` tokens, that all groups can serve with what open loads bring. None if that is no
    /// further than what is cached, if a tier has more that is not on its way by a staged plan, or if what is
    /// cached of a group lies behind what a load brings: such a request waits until the load has ended.
    pub(crate) fn entering(&self, names: &[BlockHash], most: u64) -> Option<Entering> {
        if self.lower.arriving.is_empty() {
            return None;
        }
        let firsts = self.groups.cached_first(names, most);
        let end =
            |is_below: &dyn Fn(Key) -> bool| self.groups.reach_with(names, most, &firsts, is_below);
        let tokens = end(&|key| self.lower.brings(key).is_some());
        let is_below =
            |key| self.lower.arriving.contains_key(&key) || self.lower.tier_with(key).is_some();
        if tokens == end(&|_| false) || tokens < end(&is_below) {
            return None;
        }
        let each = self.groups.iter().zip(&firsts);
        let loads = each.map(|(group, &first)| group.uncached(names, tokens, first));
        Some(Entering { tokens, loads: loads.collect::<Option<_>>()? })
    }

    /// The loads that bring what was not found of a prefix of so many tokens; `None` if one has ended.
    pub(crate) fn open_loads(
        &self,
        names: &[BlockHash],
        tokens: u64,
        found: &[Found],
    ) -> Option<OpenLoad> {
        let mut load = OpenLoad { tokens, first_token: tokens, ..OpenLoad::default() };
        for (group, found) in self.groups.iter().zip(found) {
            for place in found.loading() {
                let name = group.name_at(names, place);
                load.push(group.id, place, self.lower.brings((group.id, name))?);
                load.first_token = load.first_token.min(group.tokens_of(place));
            }
        }
        Some(load)
    }

    /// Has the next plan copy what the loads of an admitted sequence bring.
    pub(crate) fn begin_layers(&mut self, sequence: &mut Sequence, mut load: OpenLoad) {
        for part in &mut load.parts {
            let Some(ticket) = self.lower.ticket(part.ticket) else { continue };
            let new = || Readers { loaded: Loaded::default(), first: NEXT, last: NEXT };
            let readers = ticket.readers.get_or_insert_with(new);
            readers.last = NEXT;
            part.loaded = Arc::clone(&readers.loaded);
            let group = usize::from(part.group.0);
            // A state is the only block of its group.
            let first = if self.groups[group].is_state() { 0 } else { part.place };
            let from = ticket.claimed.iter().flat_map(Claimed::ids).skip(part.from);
            let to = sequence.held[group].blocks.ids_from(first);
            for (from, to) in from.take(part.count).zip(to) {
                let Some(to) = to else { continue };
                let (ticket, group) = (part.ticket, part.group);
                self.plan.load(LayerLoad { ticket, group, from, to });
                // Parts of it are there before all of it is known to be right, whoever's it is.
                let of = &mut self.groups[usize::from(group.0)];
                guard!(
                    "manager.loaded-blocks-are-scrubbed",
                    of.note_writer([to.index()].into_iter(), Writer::Unknown)
                );
            }
        }
        self.lower.stats.entered += 1;
        load.after = self.steps.latest_staged();
        sequence.copied = self.steps.latest_staged() + 1;
        sequence.load = Some(Box::new(load));
    }

    /// Takes in that the loads of a sequence have ended; what is to be computed again if they are wrong.
    pub(crate) fn end_layers(&mut self, sequence: &mut Sequence) -> Option<Redo> {
        let staged = self.steps.latest_staged();
        let load = sequence.load.take_if(|load| load.has_ended(staged))?;
        let resolved = sequence.ends.resolved();
        let mut wrong_from = None;
        for (group, held) in self.groups.iter().zip(sequence.held.iter_mut()) {
            let of = guard!("manager.wrong-loads-of-all-groups", group.id, else GroupId::default());
            let Some((right, all)) = load.right_of(of) else { continue };
            // They are found in host memory, and get their names on the device when that copy has gone.
            held.named = held.named.max(right.min(group.full_blocks(resolved)));
            let from = (!all).then(|| group.first_token(right, load.tokens));
            wrong_from = wrong_from.into_iter().chain(from).min();
        }
        let from = wrong_from.filter(|&from| from < sequence.ends.upper())?;
        let from = guard!("manager.wrong-loads-set-back", Some(from), else None)?;
        self.lower.stats.redone += 1;
        // All its steps have read what was loaded.
        Some(sequence.ends.redo_from(from, 0, sequence.known.tokens()))
    }
}

impl Group {
    /// Of the blocks that a sequence needs behind `end` tokens, the first `first` of which are cached: how many are not, at
    /// the end of the first ones and at the end of the last ones. `None` if one is cached behind one that is not.
    fn uncached(&self, names: &[BlockHash], end: u64, first: usize) -> Option<[usize; 2]> {
        let [head, tail] = self.needed_ranges(end);
        let is_cached =
            |&place: &usize| place < first || self.is_cached(self.name_at(names, place));
        let behind = |places: std::ops::Range<usize>| {
            let cached = places.clone().take_while(is_cached).count();
            let uncached = places.skip(cached);
            let count = uncached.clone().count();
            (!uncached.clone().any(|place| is_cached(&place))).then_some(count)
        };
        Some([behind(head)?, behind(tail)?])
    }
}

impl Lower {
    /// The load that brings a name, which a plan before has begun, and the block's position there, unless it is wrong.
    fn brings(&self, key: Key) -> Option<(&Ticket, usize)> {
        let id = *self.arriving.get(&key)?;
        let ticket = self.open.iter().find(|open| open.id == id && open.staged)?;
        let at = ticket.names.iter().position(|of| *of == key.1)?;
        (ticket.faults[at].is_none()).then_some((ticket, at))
    }

    /// A load has ended. Its host blocks stay until they are copied.
    pub(super) fn end_read(
        &mut self,
        readers: Option<Readers>,
        faults: &[Option<BlockFault>],
        wrong: Vec<Claimed>,
        right: &Pinned,
    ) {
        let Some(Readers { loaded, last, .. }) = readers else { return };
        drop(loaded.set(faults.iter().map(Option::is_some).collect()));
        self.read.push(Read { last, _blocks: (wrong, right.clone()) });
    }

    /// All workers have completed the steps up to this one.
    pub(crate) fn note_completed(&mut self, step: u64) {
        let last = guard!("manager.loads-keep-host-blocks", step, else u64::MAX);
        self.read.retain(|read| read.last > last);
    }

    /// The plan of step `step` has copies of what open tickets bring.
    pub(crate) fn stage_layers(&mut self, step: u64) {
        for readers in self.open.iter_mut().filter_map(|open| open.readers.as_mut()) {
            readers.first = readers.first.min(step);
            readers.last = readers.last.min(step);
        }
        self.read.iter_mut().for_each(|read| read.last = read.last.min(step));
    }

    /// A worker has completed a step. What it copied of loads that it has not settled is not known to be right.
    pub(crate) fn end_unsettled(&mut self, worker: WorkerId, step: u64) {
        for ticket in &self.open {
            if let Some(readers) = &ticket.readers
                && readers.first <= step
                && ticket.left.contains(&worker)
            {
                // An end that comes later changes nothing.
                drop(readers.loaded.set(vec![true; ticket.names.len()]));
            }
        }
    }
}
