//! Admission to several groups, or to one that does not keep all: one hit for all, and blocks of all or none.

use std::collections::HashSet;

use kv_pool::{Admitted, Claimed, Location, Pinned, Tier, tenants::TenantId};
use smallvec::SmallVec;

use crate::admit::{Answer, Request, Waiting};
use crate::blocks::Blocks;
use crate::group::{Group, Held};
use crate::hit::{Extent, Extents, Found, Hit};
use crate::rows::RowLease;
use crate::shared::{Wanted, Wants};
use crate::{BlockCopy, Manager, Missing};

/// What a sequence gets of all groups.
#[derive(Default)]
pub(crate) struct Gotten {
    pub(crate) held: SmallVec<[Held; 1]>,
    /// Blocks of these that came from host memory.
    pub(crate) far: usize,
    /// Tokens of these blocks, in the group that has most of them.
    pub(crate) far_tokens: u64,
    /// The steps that its blocks depend on, each with the first token of its blocks.
    pub(crate) depends: Vec<(u64, u64)>,
}

impl Manager {
    /// Admits those requests, in order, that were prepared and have rows. `answers` has one for every request;
    /// those behind the first for which there is no room, or behind the budget, are taken off.
    pub(crate) fn admit_to_groups(
        &mut self,
        requests: &mut [Request],
        prepared: Vec<(usize, RowLease)>,
        budget: u64,
        answers: &mut Vec<Answer>,
    ) {
        let leaves = self.leaves(prepared.len());
        let places: Vec<_> = prepared.iter().map(|&(at, _)| at).collect();
        let mut hits: Vec<Option<Result<Hit, Missing>>> = prepared.iter().map(|_| None).collect();
        let (mut left, mut nexts) = (budget, HashSet::new());
        for (index, (at, row)) in prepared.into_iter().enumerate() {
            if left == 0 {
                return answers.truncate(at);
            }
            let hit = match hits[index].take() {
                Some(hit) => hit,
                None => self.hit_beside(&self.left_for_running(leaves), &requests[at]),
            };
            let mut hit = match hit {
                Ok(hit) => hit,
                Err(missing) => {
                    answers.truncate(at);
                    return answers.push(Answer::NoRoom(missing));
                }
            };
            // An earlier request of this call computes the same block.
            if let Some(next) = self.next_block(&requests[at], hit.tokens)
                && !nexts.insert(next)
                && requests[at].waits
            {
                answers[at] = Answer::Waiting(Waiting::Prefix { tokens: hit.tokens });
                continue;
            }
            let (prompt, tenant) = (requests[at].tokens(), requests[at].tenant);
            let mut chunk = self.first_chunk(&hit, prompt, left, leaves);
            if let (0, Ok(chunk)) = (index, &chunk) {
                // Those behind it are pinned before anything is claimed, so no request evicts what another has
                // found, as far as that leaves room.
                let wants = self.wanted_of_all(&hit, prompt, hit.tokens + chunk, leaves);
                for (hit, &at) in hits.iter_mut().zip(&places).skip(1) {
                    let found = self.hit_beside(&wants, &requests[at]);
                    // A group that shares memory may get more of it, and is asked in its turn.
                    *hit = Some(found).filter(|found| found.is_ok() || self.shared.is_none());
                }
            }
            if !self.has_room_for(&hit, prompt, chunk.as_ref().map_or(0, |chunk| *chunk), leaves) {
                // Those behind it give back what they have found.
                hits.iter_mut().for_each(|hit| *hit = None);
                chunk = self.first_chunk(&hit, prompt, left, leaves);
            }
            let tokens = hit.tokens;
            let load = std::mem::take(&mut hit.load);
            let claimed = chunk.and_then(|chunk| {
                let ends = (prompt, tokens + chunk);
                Ok((chunk, self.claim_for(tenant, &hit, ends, leaves)?))
            });
            let (chunk, claimed) = match claimed {
                Ok(claimed) => claimed,
                Err(missing) => {
                    answers.truncate(at);
                    return answers.push(Answer::NoRoom(missing));
                }
            };
            // Blocks that are kept for it would be copied to the device instead of moved.
            self.end_wait(&mut requests[at]);
            let gotten = self.take_over(tenant, hit, claimed, prompt);
            let mut sequence = self.sequence(&mut requests[at], tokens, gotten);
            sequence.row = Some(row);
            if load.blocks() > 0 {
                self.begin_layers(&mut sequence, load);
            }
            self.write_rows(&sequence);
            sequence.ends.next = u32::try_from(chunk).unwrap_or(u32::MAX);
            left -= chunk;
            answers[at] = Answer::Admitted(sequence);
        }
    }

    /// What a request finds, pinned, if that leaves room for `wants` in every group and for its own first chunk;
    /// without room, it has none behind them either.
    fn hit_beside(&self, wants: &Wants, request: &Request) -> Result<Hit, Missing> {
        let (names, most) = self.wanted(request);
        let entering = match request.enters() {
            true => self.entering(names, most),
            false => None,
        };
        let tokens = match &entering {
            Some(entering) => entering.tokens,
            None => self.reach(names, most),
        };
        let loads = |index: usize| entering.as_ref().map_or([0; 2], |of| of.loads[index]);
        let shares = self.shared.is_some();
        let each = || self.groups.iter().enumerate();
        let extent =
            |(index, group): (usize, &Group)| group.extent(names, tokens, loads(index), shares);
        let extents: Extents = each().map(extent).collect();
        let prompt = request.tokens();
        self.foresee(&extents, (prompt, (tokens + 1).min(prompt)), wants)?;
        if entering.is_none() {
            return Ok(self.pinned_hit(names, tokens));
        }
        let found = each().map(|(at, group)| group.found_before_loads(names, tokens, loads(at)));
        let found: SmallVec<[Found; 4]> = found.collect();
        Ok(match self.open_loads(names, tokens, &found) {
            Some(load) => Hit { tokens, found, load },
            None => self.hit(names, most),
        })
    }

    /// Checks, before anything is pinned, that a sequence can go on behind what it finds: that beside `wants`, each
    /// group has the blocks that are claimed for a prompt whose first chunk ends behind `end` tokens. A pin that is
    /// given back cannot be claimed until the step is complete, though nobody has used it: who asked in every
    /// step, in vain, would keep the running sequences from blocks that are theirs. A tenant's quota is not looked at.
    pub(crate) fn foresee(
        &self,
        extents: &[Extent],
        (prompt, end): (u64, u64),
        wants: &[Wanted],
    ) -> Result<(), Missing> {
        let wanted = |((group, extent), wants): ((&Group, &Extent), &Wanted)| Wanted {
            count: wants.count.saturating_add(group.to_claim(extent, prompt, end)),
            leave: wants.leave,
        };
        let each = self.groups.iter().zip(extents);
        let wanted: Wants = each.clone().zip(wants).map(wanted).collect();
        if self.shared.is_some() {
            return self.check_room_beside(extents, &wanted);
        }
        for ((group, extent), wanted) in each.zip(&wanted) {
            let room = group.pool.claimable().saturating_sub(wanted.leave);
            let needed = extent.unused.saturating_add(wanted.count);
            if needed > room {
                return Err(group.exhausted(needed, room));
            }
        }
        Ok(())
    }

    /// What admission leaves of each group for running sequences.
    pub(crate) fn left_for_running(&self, leaves: bool) -> Wants {
        let left = |group: &Group| Wanted { count: 0, leave: group.leave(leaves) };
        self.groups.iter().map(left).collect()
    }

    /// Tokens of a prompt's first chunk behind a hit: `left` at most, up to the first checkpoint, and as many as
    /// the groups with a window have room for.
    fn first_chunk(&self, hit: &Hit, prompt: u64, left: u64, leaves: bool) -> Result<u64, Missing> {
        let mut chunk = (prompt - hit.tokens).min(left).min(u32::MAX.into());
        let shares = self.shared.is_some();
        for (group, found) in self.groups.iter().zip(&hit.found) {
            if group.is_state() {
                chunk = chunk.min(group.next_checkpoint(hit.tokens, prompt) - hit.tokens);
            } else if group.is_window() && !shares {
                let room = group.pool.claimable().saturating_sub(group.leave(leaves));
                let places = group.whole_blocks(hit.tokens) + room.saturating_sub(found.far());
                chunk = chunk.min(group.tokens_of(places).saturating_sub(hit.tokens));
                if chunk == 0 {
                    return Err(group.exhausted(found.far() + 1, room));
                }
            }
        }
        match shares {
            true => self.largest_chunk(chunk, |chunk| {
                self.wanted_of_all(hit, prompt, hit.tokens + chunk, leaves)
            }),
            false => Ok(chunk),
        }
    }

    /// What is to be claimed of each group for a prompt whose first chunk ends behind `end` tokens.
    fn wanted_of_all(&self, hit: &Hit, prompt: u64, end: u64, leaves: bool) -> Wants {
        let wanted = |(group, found): (&Group, &Found)| Wanted {
            count: group.to_claim(&found.extent(), prompt, end),
            leave: group.leave(leaves),
        };
        self.groups.iter().zip(&hit.found).map(wanted).collect()
    }

    /// Whether admission leaves blocks for running sequences; `leased` rows are not theirs.
    pub(crate) fn leaves(&self, leased: usize) -> bool {
        self.options.sequences_max as usize - self.home.free_rows() > leased
    }

    fn has_room_for(&self, hit: &Hit, prompt: u64, chunk: u64, leaves: bool) -> bool {
        let end = hit.tokens + chunk;
        if self.shared.is_some() {
            // The chunk is one that there is room for.
            return chunk > 0;
        }
        let mut each = self.groups.iter().zip(&hit.found);
        chunk > 0
            && each.all(|(group, found)| self.check(group, found, prompt, end, leaves).is_ok())
    }

    /// Checks that a group has room for a prompt whose first chunk ends behind `end` tokens; how many blocks that
    /// takes.
    fn check(
        &self,
        group: &Group,
        found: &Found,
        prompt: u64,
        end: u64,
        leaves: bool,
    ) -> Result<usize, Missing> {
        let count = group.to_claim(&found.extent(), prompt, end);
        let leave = group.leave(leaves);
        let claimable = group.pool.claimable();
        let room = claimable.saturating_sub(leave);
        if count.saturating_add(leave) > claimable {
            return Err(group.exhausted(count, room));
        }
        Ok(count)
    }

    /// Claims what a sequence needs of each group that goes on behind a hit, and takes over what was found.
    pub(crate) fn get(
        &mut self,
        tenant: TenantId,
        hit: Hit,
        prompt: u64,
        end: u64,
        leaves: bool,
    ) -> Result<Gotten, Missing> {
        let claimed = self.claim_for(tenant, &hit, (prompt, end), leaves)?;
        Ok(self.take_over(tenant, hit, claimed, prompt))
    }

    /// Claims what a sequence needs of each group that goes on behind a hit: blocks for its whole prompt, or up to
    /// `end` in a window. All or nothing.
    fn claim_for(
        &mut self,
        tenant: TenantId,
        hit: &Hit,
        (prompt, end): (u64, u64),
        leaves: bool,
    ) -> Result<SmallVec<[Claimed; 4]>, Missing> {
        if self.shared.is_some() {
            self.make_room(&self.wanted_of_all(hit, prompt, end, leaves))?;
        }
        let mut counts: SmallVec<[usize; 4]> = SmallVec::new();
        for (group, found) in self.groups.iter().zip(&hit.found) {
            let count = self.check(group, found, prompt, end, leaves)?;
            // A claim evicts, so none is made where another one cannot succeed.
            group.check_claimable(Tier::Primary, tenant, count)?;
            counts.push(count);
        }
        let mut all: SmallVec<[Claimed; 4]> = SmallVec::new();
        for (group, &count) in self.groups.iter().zip(&counts) {
            all.push(match count {
                0 => Claimed::default(),
                count => group.take(tenant, count)?,
            });
        }
        Ok(all)
    }

    /// What a sequence has that goes on behind a hit, with the blocks that were claimed for it.
    fn take_over(
        &mut self,
        tenant: TenantId,
        hit: Hit,
        all: SmallVec<[Claimed; 4]>,
        prompt: u64,
    ) -> Gotten {
        let mut gotten = Gotten::default();
        for (index, (found, mut claimed)) in hit.found.into_iter().zip(all).enumerate() {
            self.plan_claimed(index, tenant, &mut claimed);
            gotten.far += found.far();
            gotten.far_tokens = gotten.far_tokens.max(self.groups[index].tokens_of(found.far()));
            self.note_depends(index, &found, hit.tokens, &mut gotten.depends);
            // What a load brings has no name here before it has ended.
            let full = self.groups[index].full_blocks(hit.tokens);
            let named = found.loading().next().map_or(full, |place| place.min(full));
            let mut held = Held { named, ..Held::default() };
            held.turn = match self.groups[index].is_window() {
                true => 0,
                false => self.groups[index].next_checkpoint(hit.tokens, prompt),
            };
            held.blocks = match self.groups[index].is_state() {
                true => self.state_from(index, found, claimed),
                false => self.blocks_from(index, found, claimed),
            };
            gotten.held.push(held);
        }
        gotten
    }

    /// A running state that begins as a checkpoint, if there is one.
    fn state_from(&mut self, group: usize, found: Found, claimed: Claimed) -> Blocks {
        let group = &self.groups[group];
        let at = found.tail.locations().zip(found.tail.records()).next();
        if let (Some((from, record)), Some(to)) = (at, claimed.ids().next()) {
            let written_by = group.pending(record, self.completed).unwrap_or(0);
            let to = Location { tier: Tier::Primary, id: to };
            let (group, tokens) = (group.id, group.block_tokens);
            self.plan.copies.push(BlockCopy { group, from, to, tokens, written_by });
        }
        // The copy comes before every later use of the checkpoint, in the order of the plans.
        let mut blocks = Blocks::default();
        blocks.push_own(claimed);
        blocks
    }

    fn blocks_from(&mut self, group: usize, found: Found, mut claimed: Claimed) -> Blocks {
        let gone = found.tail_first - found.head.len() - found.head_loads;
        let mut blocks = self.brought(group, found.head, &mut claimed);
        blocks.push_own(take_first(&mut claimed, found.head_loads));
        blocks.push_gone(gone);
        blocks.append(self.brought(group, found.tail, &mut claimed));
        blocks.push_own(take_first(&mut claimed, found.tail_loads));
        let behind = claimed.split_off(found.gone.start.saturating_sub(blocks.len()));
        blocks.push_own(claimed);
        blocks.push_gone(found.gone.len());
        blocks.push_own(behind);
        blocks
    }

    /// Blocks with names, those in host memory brought back to the first of `claimed`.
    fn brought(&mut self, group: usize, prefix: Pinned, claimed: &mut Claimed) -> Blocks {
        let far = prefix.locations().filter(|at| at.tier != Tier::Primary).count();
        let claimed = take_first(claimed, far);
        match self.hold(group, vec![Admitted { prefix, claimed, partial: None }]) {
            Ok(mut held) => held.pop().unwrap_or_default(),
            // The pool has found these blocks itself.
            Err(error) => unreachable!("the pool refused its own blocks: {error}"),
        }
    }

    fn note_depends(
        &self,
        group: usize,
        found: &Found,
        tokens: u64,
        depends: &mut Vec<(u64, u64)>,
    ) {
        let group = &self.groups[group];
        let places = (0..found.head.len()).chain(found.tail_first..found.end());
        let records = found.head.records().chain(found.tail.records());
        for (place, record) in places.zip(records) {
            let Some(step) = group.pending(record, self.completed) else { continue };
            let token = group.first_token(place, tokens);
            match depends.iter_mut().find(|(on, _)| *on == step) {
                Some((_, first)) => *first = token.min(*first),
                None => depends.push((step, token)),
            }
        }
    }
}

fn take_first(claimed: &mut Claimed, count: usize) -> Claimed {
    let rest = claimed.split_off(count);
    std::mem::replace(claimed, rest)
}

impl Group {
    /// Blocks that admission leaves for running sequences.
    fn leave(&self, leaves: bool) -> usize {
        if leaves { self.watermark } else { 0 }
    }

    /// Blocks to be claimed behind what was found, for a prompt whose first chunk ends behind `end` tokens.
    fn to_claim(&self, found: &Extent, prompt: u64, end: u64) -> usize {
        if self.is_state() {
            return 1;
        }
        let end = if self.is_window() { end } else { prompt };
        found.far + self.blocks_for(end).saturating_sub(found.end + found.gone)
    }

    /// The first token that is wrong if the content of a block is, which a sequence of `tokens` tokens goes on
    /// behind.
    pub(crate) fn first_token(&self, place: usize, tokens: u64) -> u64 {
        if self.is_state() { tokens.saturating_sub(1) } else { self.tokens_of(place) }
    }
}
