//! Loads by layers: sequences that are admitted while their prefix comes from a tier below host memory.
//!
//! Such a sequence has device blocks for what a load brings. Each worker copies a layer there as soon as the layer is
//! in host memory and right, and the engine waits for it before it launches that layer. What comes out of its steps is
//! taken in once the load has ended at all workers. If a block is wrong at any, the sequence is set back to it.
//! Until then nothing from the load on is named, so no other sequence reads it.

use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use kv_pool::{BlockHash, Claimed, Pinned};

use super::{Lower, Ticket};
use crate::admit::Request;
use crate::ends::Redo;
use crate::plan::LayerLoad;
use crate::tiers::BlockFault;
use crate::{GroupId, Manager, Sequence, TicketId, WorkerId};

/// What became of a load: whether each of its blocks is wrong, once that is known of all workers.
type Loaded = Arc<OnceLock<Vec<bool>>>;

/// Blocks of one ticket in a row, which a sequence was admitted with.
#[derive(Debug)]
struct Part {
    ticket: TicketId,
    loaded: Loaded,
    /// The first block, in the ticket.
    from: usize,
    /// The first block, in the sequence.
    place: usize,
    count: usize,
}

/// The loads that a sequence was admitted with: consecutive blocks of its prefix.
#[derive(Debug, Default)]
pub(crate) struct OpenLoad {
    parts: SmallVec<[Part; 2]>,
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

    /// Whether all have ended, and a plan copies what they have brought: the copies of later plans come behind these.
    fn has_ended(&self, staged: u64) -> bool {
        staged > self.after && self.parts.iter().all(|part| part.loaded.get().is_some())
    }

    /// The place behind the blocks that are right.
    fn right_end(&self) -> usize {
        let mut end = 0;
        for part in &self.parts {
            let wrong = part.loaded.get().map_or(&[][..], |wrong| &wrong[..]);
            let right = wrong.iter().skip(part.from).take(part.count).take_while(|wrong| !**wrong);
            let right = right.count();
            end = part.place + right;
            if right < part.count {
                break;
            }
        }
        end
    }

    fn end(&self) -> usize {
        self.parts.last().map_or(0, |part| part.place + part.count)
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
    pub fn loads(&self) -> Option<TicketId> {
        let parts = &self.load.as_ref()?.parts;
        let open = parts.iter().find(|part| part.loaded.get().is_none());
        open.or(parts.last()).map(|part| part.ticket)
    }
}

impl Manager {
    /// Whether a request can be admitted while loads bring what follows the cached part of its prefix: if all of it
    /// that is below is on its way, by plans that were staged before.
    pub(super) fn enters(&self, request: &Request) -> bool {
        if !self.keeps_all {
            return false;
        }
        let near = self.groups[0].pool.prefix_len(self.names_of(request));
        let arriving = self.open_load(request, near).blocks();
        let is_below = |name: &BlockHash| {
            let key = (GroupId::default(), *name);
            self.lower.arriving.contains_key(&key) || self.lower.tier_with(key).is_some()
        };
        arriving > 0 && !self.names_of(request).get(near + arriving).is_some_and(is_below)
    }

    /// The loads that bring what follows the first `near` blocks of a request's prefix.
    pub(crate) fn open_load(&self, request: &Request, near: usize) -> OpenLoad {
        let first_token = self.groups[0].tokens_of(near);
        let mut load = OpenLoad { first_token, ..OpenLoad::default() };
        for (place, &name) in self.names_of(request).iter().enumerate().skip(near) {
            let Some((ticket, at)) = self.lower.brings(name) else { break };
            match load.parts.last_mut() {
                Some(part) if part.ticket == ticket.id && part.from + part.count == at => {
                    part.count += 1;
                }
                _ => {
                    let (ticket, loaded) = (ticket.id, Loaded::default());
                    load.parts.push(Part { ticket, loaded, from: at, place, count: 1 });
                }
            }
        }
        load
    }

    /// Has the next plan copy what the loads of an admitted sequence bring.
    pub(crate) fn begin_layers(&mut self, sequence: &mut Sequence, mut load: OpenLoad) {
        for part in &mut load.parts {
            let ticket = self.lower.open.iter_mut().find(|open| open.id == part.ticket);
            let Some(ticket) = ticket else { continue };
            let new = || Readers { loaded: Loaded::default(), first: NEXT, last: NEXT };
            let readers = ticket.readers.get_or_insert_with(new);
            readers.last = NEXT;
            part.loaded = Arc::clone(&readers.loaded);
            let from = ticket.claimed.iter().flat_map(Claimed::ids).skip(part.from);
            for (index, from) in from.take(part.count).enumerate() {
                let Some(to) = sequence.held[0].blocks.id(part.place + index) else { continue };
                let (ticket, group) = (part.ticket, GroupId::default());
                self.plan.layer_loads.push(LayerLoad { ticket, group, from, to });
            }
        }
        self.lower.stats.entered += 1;
        load.after = self.latest_staged;
        sequence.copied = self.latest_staged + 1;
        sequence.load = Some(Box::new(load));
    }

    /// The plan of step `step` has copies of what open tickets bring.
    pub(crate) fn stage_layers(&mut self, step: u64) {
        for readers in self.lower.open.iter_mut().filter_map(|open| open.readers.as_mut()) {
            readers.first = readers.first.min(step);
            readers.last = readers.last.min(step);
        }
        self.lower.read.iter_mut().for_each(|read| read.last = read.last.min(step));
    }

    /// A worker has completed a step. What it copied of loads that it has not settled is not known to be right.
    pub(crate) fn end_unsettled(&mut self, worker: WorkerId, step: u64) {
        for ticket in &self.lower.open {
            if let Some(readers) = &ticket.readers
                && readers.first <= step
                && ticket.left.contains(&worker)
            {
                // An end that comes later changes nothing.
                drop(readers.loaded.set(vec![true; ticket.names.len()]));
            }
        }
    }

    /// Takes in that the loads of a sequence have ended; what is to be computed again if they are wrong.
    pub(crate) fn end_layers(&mut self, sequence: &mut Sequence) -> Option<Redo> {
        let staged = self.latest_staged;
        let load = sequence.load.take_if(|load| load.has_ended(staged))?;
        let (right, end) = (load.right_end(), load.end());
        let held = &mut sequence.held[0];
        // They are found in host memory, and get their names on the device when that copy has gone.
        let group = &self.groups[0];
        held.named = held.named.max(right.min(group.full_blocks(sequence.ends.resolved())));
        let from = group.tokens_of(right);
        if right == end || from >= sequence.ends.upper() {
            return None;
        }
        self.lower.stats.redone += 1;
        // All its steps have read what was loaded.
        Some(sequence.ends.redo_from(from, 0, sequence.known.tokens()))
    }
}

impl Lower {
    /// The load that brings a name, which a plan before has begun, and the block's position there, unless it is wrong.
    fn brings(&self, name: BlockHash) -> Option<(&Ticket, usize)> {
        let id = *self.arriving.get(&(GroupId::default(), name))?;
        let ticket = self.open.iter().find(|open| open.id == id && open.staged)?;
        let at = ticket.names.iter().position(|of| *of == name)?;
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
        self.read.retain(|read| read.last > step);
    }
}
