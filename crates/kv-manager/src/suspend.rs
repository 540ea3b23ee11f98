//! Suspension to host memory, and the way back.

use std::ops::Range;

use kv_pool::{BlockHash, BlockId, Claimed, Tier, guard, tenants::TenantId};
use smallvec::SmallVec;

use crate::blocks::Blocks;
use crate::group::{Group, Held, Marks, far, names_of, near};
use crate::growing::Memory;
use crate::hit::{Extent, Extents, Found, Founds, Hit};
use crate::plan::CopyFor;
use crate::price::{Due, Price};
use crate::sequence::note_depends;
use crate::{BlockCopy, Manager, Missing, NoRoom, Room, Sequence, SequenceError, SuspendError};

/// What a suspended sequence has of a group in host memory.
#[derive(Debug, Default)]
pub(crate) struct Away {
    /// Blocks with the content of its blocks from `first` on.
    host: Claimed,
    first: usize,
    /// Those of these blocks that were needed no more: they have no host blocks.
    gone: Range<usize>,
    /// The tokens that it had then.
    tokens: u64,
}

impl Manager {
    /// Takes a sequence off the device. Blocks without a name, the partly filled last one among them, are
    /// copied to host memory, room for which is claimed first. Blocks with names stay cached, where later
    /// requests find them, and may be evicted.
    ///
    /// While ids of its steps are to come, the sequence stays on the device, in no later step, until the
    /// last of them is [committed](Self::commit). A [`resume`](Self::resume) before that takes the call back.
    ///
    /// The blocks can be claimed by others when the step that is open then is complete, or else the last
    /// one. The sequence gives back its row.
    ///
    /// # Errors
    /// [`SuspendError`]; the sequence is as it was.
    pub fn suspend(&mut self, sequence: &mut Sequence) -> Result<(), SuspendError> {
        self.look_at_loaded(sequence)?;
        let (upper, draft_end) = (sequence.ends.upper(), sequence.draft.end);
        let mut counts: SmallVec<[usize; 4]> = SmallVec::new();
        for (group, held) in self.groups.iter().zip(sequence.held.iter()) {
            let end = if group.is_draft { draft_end } else { upper };
            let count = held.blocks.unnamed(group.blocks_for(end)).count();
            // A claim evicts, so none is made where another one cannot succeed.
            let checked = group.check_claimable(Tier::Secondary, TenantId::NOBODY, count);
            guard!("manager.suspensions-evict-when-all-fits", checked?, else drop(checked));
            counts.push(count);
        }
        let mut hosts: SmallVec<[Claimed; 4]> = SmallVec::new();
        for (group, count) in self.groups.iter().zip(counts) {
            hosts.push(match count {
                0 => Claimed::default(),
                count => group
                    .pool
                    .claim_in(Tier::Secondary, count)
                    .map_err(|reason| Missing { group: group.id, reason })?,
            });
        }
        for (held, host) in sequence.held.iter_mut().zip(hosts) {
            held.away.host = host;
        }
        sequence.ends.next = 0;
        sequence.draft.upto = 0;
        sequence.suspended = true;
        self.leave_when_resolved(sequence);
        Ok(())
    }

    /// Takes a suspended sequence off the device, unless ids of its steps are to come, or it has left.
    pub(crate) fn leave_when_resolved(&mut self, sequence: &mut Sequence) {
        let is_open =
            guard!("manager.leaves-with-its-last-ids", sequence.ends.is_open(), else false);
        if !sequence.suspended || sequence.row.is_none() || is_open {
            return;
        }
        self.settle_states(sequence);
        let all_resolved = sequence.ends.resolved();
        let written_by = sequence.ends.latest().unwrap_or(0);
        for (group, held) in self.groups.iter().zip(sequence.held.iter_mut()) {
            let resolved = if group.is_draft { sequence.draft.end } else { all_resolved };
            let (first, end) = (held.blocks.shared_len(), group.blocks_for(resolved));
            let gone = held.blocks.gone();
            held.away.gone = gone.start.max(first)..gone.end.max(first);
            // There was room for the longest outcome.
            drop(held.away.host.split_off(held.blocks.unnamed(end).count()));
            let ids = held.blocks.ids_from(first);
            for (to, index) in held.away.host.ids().zip(held.blocks.unnamed(end)) {
                let Some(&Some(from)) = ids.get(index - first) else { continue };
                let Some(tokens) = group.filled(index, resolved) else { continue };
                let (from, to) = (near(from), far(to));
                let copy = BlockCopy { group: group.id, from, to, tokens, written_by };
                guard!("manager.suspends-by-copy", self.plan.copy(CopyFor::Suspension, copy));
            }
            // Every later use of the blocks comes later in the plans than these copies.
            held.blocks = Blocks::default();
            held.away.first = first;
            held.away.tokens = resolved;
        }
        sequence.end_at(all_resolved);
        sequence.frontier = None;
        sequence.row = None;
    }

    /// Brings a suspended sequence back to the device, and returns where its KV ends for certain. That is where it
    /// ended before, unless named blocks have left the cache meanwhile: then it ends behind the longest prefix that all
    /// groups can serve. If a step has failed that the sequence was in, ids that came out
    /// of void steps are forgotten: see how many tokens are [known](Sequence::known).
    ///
    /// Without room, the sequence is suspended as it was, but for what failed steps have spoilt.
    ///
    /// # Errors
    /// [`SuspendError`]; the same holds.
    pub fn resume(&mut self, sequence: &mut Sequence) -> Result<Room<u64>, SuspendError> {
        self.resume_in(&mut Memory::default(), sequence)
    }

    pub(crate) fn resume_in(
        &mut self,
        memory: &mut Memory<'_>,
        sequence: &mut Sequence,
    ) -> Result<Room<u64>, SuspendError> {
        self.check_whole(sequence)?;
        if !sequence.suspended {
            return Err(SuspendError::NotSuspended);
        }
        match self.look_at(sequence) {
            // It is told by what is returned.
            Ok(()) | Err(SequenceError::Redo { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        if sequence.row.is_some() {
            // It has not left yet.
            sequence.held.iter_mut().for_each(|held| held.away.host = Claimed::default());
            sequence.suspended = false;
            return Ok(Room::Given(sequence.ends.resolved()));
        }
        let Some(row) = self.home.lease() else { return Ok(Room::Lacks(NoRoom::Row)) };
        let end = match self.come_back(memory, sequence) {
            Ok(end) => end,
            Err(missing) => return Ok(Room::Lacks(missing.into())),
        };
        sequence.suspended = false;
        sequence.row = Some(row);
        self.write_rows(sequence);
        sequence.copied = self.plan.copied_by();
        sequence.end_at(end);
        Ok(Room::Given(end))
    }

    /// Has a suspended sequence hold device blocks again: with what is in host memory if everything before it is there, or
    /// else behind the longest prefix that all groups can serve. Where its KV ends then.
    fn come_back(
        &mut self,
        memory: &mut Memory<'_>,
        sequence: &mut Sequence,
    ) -> Result<u64, Missing> {
        let resolved = sequence.ends.resolved();
        let known = &sequence.known;
        let names = self.namer.current(known);
        let draft_end = sequence.draft.end.min(resolved);
        let end_of = |group: &Group| if group.is_draft { draft_end } else { resolved };
        // Nothing is pinned before all of it is there: what is given back could not be claimed for the rest.
        let most = resolved.min(known.tokens().saturating_sub(1));
        let each = self.groups.iter().zip(sequence.held.iter());
        let before = each.map(|(group, held)| group.extent_before(held, names, end_of(group)));
        let before = before.collect::<Option<Extents>>();
        let whole = before.is_some();
        let (end, extents) = match before {
            Some(before) => (resolved, before),
            None => {
                let end = self.groups.reach(names, most);
                let extent = |group: &Group| group.extent(names, end, [0; 2]);
                (end, self.groups.iter().map(extent).collect())
            }
        };
        let due = self.groups.nothing_due(self.leaves(1));
        let of = (sequence.tenant(), names);
        // One group gets blocks for all tokens at once, as at admission.
        let all = self.groups.alone().map(|_| resolved);
        let ends = (all.unwrap_or(end), end);
        let (mut price, begins_again) = self.price_resumption(memory, of, &extents, ends, &due)?;
        let each = self.groups.iter().zip(sequence.held.iter());
        let found = each.map(|(group, held)| group.find_before(held, names, end_of(group)));
        let most = if begins_again { 0 } else { most };
        let whole = if whole && !begins_again { found.collect::<Option<Founds>>() } else { None };
        let (hit, is_whole) = match whole {
            Some(found) => (Hit { tokens: resolved, found, ..Hit::default() }, true),
            None => (self.groups.hit(names, most), false),
        };
        let end = hit.tokens;
        let extents = self.groups.extents(&hit);
        let all = if begins_again { 0 } else { all.unwrap_or(end) };
        let counts = self.groups.to_claim(&extents, all, end);
        if counts != price.counts {
            // Other threads have pinned or released some of it meanwhile.
            price = self.price_in(memory, (sequence.tenant(), &[]), &extents, counts, &due)?;
        }
        let claimed = self.pay(sequence.tenant(), &price)?;
        self.hold_again(sequence, hit, claimed, is_whole);
        Ok(end)
    }

    /// Has a suspended sequence hold what it goes on behind, and plans the copies from host memory if it is all that it had.
    fn hold_again(
        &mut self,
        sequence: &mut Sequence,
        hit: Hit,
        claimed: SmallVec<[Claimed; 4]>,
        is_whole: bool,
    ) {
        let (end, marks) = (hit.tokens, sequence.marks());
        let draft_end = sequence.draft.end.min(end);
        let firsts: SmallVec<[usize; 4]> = hit.found.iter().map(Found::end).collect();
        let gotten =
            self.take_over(sequence.tenant(), hit, claimed, Marks { prompt: end, ..marks });
        if !is_whole {
            // What was found has all of it.
            sequence.draft.end = end;
        }
        for (step, token) in gotten.depends {
            note_depends(&mut sequence.depends, step, token);
        }
        let held = sequence.held.iter_mut().zip(gotten.held);
        for ((group, (own, mut back)), first) in self.groups.iter().zip(held).zip(firsts) {
            // The copies come before every later use of the host blocks, in the order of the plans.
            let host = std::mem::take(&mut own.away.host);
            if is_whole {
                let end = if group.is_draft { draft_end } else { end };
                let copies = group.copies_back(own, &back, &host, end);
                copies.into_iter().for_each(|copy| self.plan.copy(CopyFor::Return, copy));
            }
            let named_end = if group.is_draft { sequence.draft.end } else { end };
            back.named = group.full_blocks(named_end).min(first);
            back.turn = group.turn(end, marks);
            *own = back;
        }
    }

    /// What a resumption behind `end` tokens claims, with room for `all`, and whether it begins again: as at admission, it
    /// goes without what it had where nothing runs that could give room beside that.
    fn price_resumption(
        &mut self,
        memory: &mut Memory<'_>,
        of: (TenantId, &[BlockHash]),
        extents: &[Extent],
        (all, end): (u64, u64),
        due: &Due,
    ) -> Result<(Price, bool), Missing> {
        let counts = self.groups.to_claim(extents, all, end);
        let missing = match self.price_in(memory, of, extents, counts, due) {
            Ok(price) => return Ok((price, false)),
            Err(missing) => missing,
        };
        let stays = due.leaves || end == 0 || !missing.is_final();
        if stays || !self.has_room_for(memory, of.0, all, due) {
            return Err(missing);
        }
        let nothing = self.groups.nothing_found();
        let counts = self.groups.to_claim(&nothing, 0, 0);
        Ok((self.price_in(memory, of, &nothing, counts, due)?, true))
    }
}

impl Group {
    /// The copies from host memory of a suspended sequence's blocks, whose KV ends behind `end` tokens, to the places where
    /// it comes back.
    fn copies_back(
        &self,
        own: &Held,
        back: &Held,
        host: &Claimed,
        end: u64,
    ) -> SmallVec<[BlockCopy; 4]> {
        let places = (own.away.first..).filter(|place| !own.away.gone.contains(place));
        let ids = back.blocks.ids_from(own.away.first);
        let copy = |(from, index): (BlockId, usize)| {
            let (from, to) = (far(from), near((*ids.get(index - own.away.first)?)?));
            // The end of a draft model may have gone back behind the suspension, with a step that has failed.
            let tokens = self.filled(index, end)?;
            Some(BlockCopy { group: self.id, from, to, tokens, written_by: 0 })
        };
        host.ids().zip(places).filter_map(copy).collect()
    }

    /// How much a suspended sequence needs before its blocks in host memory, to go on behind `end` tokens; `None` if
    /// not all of it is there.
    fn extent_before(&self, held: &Held, names: &[BlockHash], end: u64) -> Option<Extent> {
        let [head, tail, gone] = self.places_before(held, names, end)?;
        // All together: the first of them may leave its tenant no room for the last.
        let both = [&head, &tail].map(|of| names_of(names, self.stride, of.start, of.end)).concat();
        let there = self.pool.prefix_len(&both) == both.len();
        let gone = gone.len();
        there.then(|| Extent { gone, ..self.extent_of(names, head.end, tail) })
    }

    /// The same, pinned, of a sequence that [has](Self::extent_before) all of it; `None` if a part has gone meanwhile.
    fn find_before(&self, held: &Held, names: &[BlockHash], end: u64) -> Option<Found> {
        let [first, last, gone] = self.places_before(held, names, end)?;
        let head = self.look(names, first.start, first.end, false);
        let tail = self.look(names, last.start, last.end, false);
        let all = head.len() == first.len() && tail.len() == last.len();
        all.then_some(Found { head, tail_first: last.start, tail, gone, ..Found::default() })
    }

    /// The places of these blocks, the first ones and the last ones, and behind them those of blocks that are needed no more.
    fn places_before(
        &self,
        held: &Held,
        names: &[BlockHash],
        end: u64,
    ) -> Option<[Range<usize>; 3]> {
        if self.is_state() {
            let last = self.whole_blocks(end);
            return match held.away.host.is_empty() && end > 0 {
                // It goes on behind its checkpoint.
                true if self.tokens_of(last) == end && last * self.stride <= names.len() => {
                    Some([0..0, last - 1..last, 0..0])
                }
                false if held.away.tokens == end => Some([const { 0..0 }; 3]),
                _ => None,
            };
        }
        let blocks = self.blocks_for(end);
        let first = held.away.first.min(blocks);
        if first * self.stride > names.len() || !self.covers(&held.away.gone, end) {
            return None;
        }
        let gone = held.away.gone.start.min(blocks)..held.away.gone.end.min(blocks);
        if !self.is_window() {
            return Some([0..first, first..first, gone]);
        }
        let sinks = self.sink_blocks().min(first);
        Some([0..sinks, self.first_read(end).max(sinks).min(first)..first, gone])
    }
}

#[cfg(test)]
mod tests {
    use kv_pool::PoolConfig;

    use crate::blocks::LOOKS;
    use crate::growing::Memory;
    use crate::{Answer, Manager, ManagerOptions, Request, Room};

    /// Ids that are looked at while a sequence of so many blocks without names is suspended and resumed.
    fn looks(blocks: u32, groups: usize) -> usize {
        let pool = PoolConfig { secondary_blocks: 4096, ..PoolConfig::primary_only(4096) };
        let mut options = ManagerOptions::new(4, pool);
        options.groups.resize(groups, options.groups[0].clone());
        let mut manager = Manager::new(options).unwrap();
        let mut request = Request::new((0..4 * blocks).collect());
        let answer = manager.admit_one(&mut Memory::default(), &mut request);
        let Answer::Admitted(mut sequence) = answer else { panic!("{answer:?}") };
        // Weights that have changed: what it computes gets no names.
        manager.reset();
        let step = manager.begin_step().unwrap();
        manager.stage(&step, &mut [&mut sequence]).unwrap();
        manager.finish_step(step).unwrap();
        manager.commit(&mut sequence, 1, &[0]).unwrap();
        LOOKS.set(0);
        manager.suspend(&mut sequence).unwrap();
        let step = manager.begin_step().unwrap();
        manager.stage(&step, &mut []).unwrap();
        manager.finish_step(step).unwrap();
        assert_eq!(manager.last_plan().copies.len() as u64, manager.stats().suspended_blocks);
        assert_eq!(manager.resume(&mut sequence), Ok(Room::Given(u64::from(4 * blocks))));
        LOOKS.get()
    }

    #[test]
    fn a_sequence_that_is_suspended_again_and_again_notes_each_step_once() {
        let pool = PoolConfig { secondary_blocks: 32, ..PoolConfig::primary_only(32) };
        let mut manager = Manager::new(ManagerOptions::new(4, pool)).unwrap();
        let admit = |manager: &mut Manager| {
            let mut request = Request::new((0..17).collect());
            match manager.admit_one(&mut Memory::default(), &mut request) {
                Answer::Admitted(sequence) => sequence,
                answer => panic!("{answer:?}"),
            }
        };
        let mut first = admit(&mut manager);
        let step = manager.begin_step().unwrap();
        manager.stage(&step, &mut [&mut first]).unwrap();
        manager.finish_step(step).unwrap();
        let mut second = admit(&mut manager);
        for _ in 0..3 {
            assert_eq!(second.depends[..], [(1, 0)]);
            manager.suspend(&mut second).unwrap();
            assert_eq!(manager.resume(&mut second), Ok(Room::Given(16)));
        }
        assert_eq!(second.depends[..], [(1, 0)]);
    }

    #[test]
    fn a_suspension_looks_at_each_block_a_few_times_however_many_there_are() {
        for groups in [1, 2] {
            for blocks in [64, 1024] {
                let looks = looks(blocks, groups);
                let most = 4 * groups * blocks as usize;
                assert!(looks <= most, "{looks} of at most {most} for {blocks} blocks");
            }
        }
    }
}
