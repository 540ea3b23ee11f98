//! Admission to several groups, or to one that does not keep all: one hit for all, and blocks of all or none.

use std::borrow::Cow;
use std::collections::{HashSet, VecDeque};

use kv_pool::tenants::{TenantError, TenantId};
use kv_pool::{Admitted, BlockHash, ClaimError, Claimed, Location, Pinned, Tier};
use smallvec::SmallVec;

use crate::admit::{Answer, Request};
use crate::blocks::Blocks;
use crate::group::{Group, Held, Marks};
use crate::hit::{Extent, Extents, Found, Hit};
use crate::lower::Entering;
use crate::ready::{Prepared, Queue};
use crate::rows::RowLease;
use crate::shared::{Wanted, Wants};
use crate::{BlockCopy, Manager, Missing, Sequence};

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

/// What a request would find.
struct Sight {
    tokens: u64,
    entering: Option<Entering>,
    extents: Extents,
}

/// Requests that are admitted together.
struct Call {
    queue: Queue,
    /// Those behind the next that were looked at before anything was claimed: what came of it, and what they have pinned.
    ahead: VecDeque<(Prepared, Option<Hit>)>,
    leaves: bool,
    /// Tokens of the budget.
    left: u64,
    /// Nothing was claimed yet.
    is_first: bool,
}

impl Manager {
    /// Admits requests in order, as [`admit`](Self::admit) says.
    pub(crate) fn admit_to_groups(&mut self, requests: &mut [Request], budget: u64) -> Vec<Answer> {
        let mut call = Call {
            queue: Queue::default(),
            ahead: VecDeque::new(),
            leaves: self.leaves(0),
            left: budget,
            is_first: true,
        };
        let mut answers = Vec::with_capacity(requests.len());
        for at in 0..requests.len() {
            if call.left == 0 {
                self.look_ahead(&mut requests[at + call.ahead.len()..]);
                break;
            }
            let ahead = call.ahead.pop_front();
            // What cannot be its turn names nothing and loads nothing.
            let answer = match call.queue.bar(requests[at].tenant) {
                Some(missing) => Answer::NoRoom(missing),
                None => {
                    let (prepared, hit) =
                        ahead.unwrap_or_else(|| (self.prepare(&mut requests[at]), None));
                    match prepared {
                        Err(error) => Answer::Refused(error),
                        Ok(Some(waiting)) => Answer::Waiting(waiting),
                        Ok(None) => self.admit_next(&mut requests[at..], hit, &mut call),
                    }
                }
            };
            let ends = match &answer {
                Answer::NoRoom(missing) => !call.queue.passes(requests[at].tenant, missing),
                Answer::NoRow => true,
                _ => false,
            };
            answers.push(answer);
            if ends {
                break;
            }
        }
        answers
    }

    /// Admits the first of these requests, if it can be.
    fn admit_next(
        &mut self,
        requests: &mut [Request],
        hit: Option<Hit>,
        call: &mut Call,
    ) -> Answer {
        let (request, behind) = match requests {
            [request, behind @ ..] => (request, behind),
            [] => return Answer::NoRow,
        };
        let Some(row) = self.home.lease() else { return Answer::NoRow };
        let hit = match hit {
            Some(hit) => hit,
            None => {
                let sight = self.sight(request);
                if let Some(waiting) = call.queue.computes(self, request, sight.tokens) {
                    return Answer::Waiting(waiting);
                }
                match self.fitting(sight, request, call) {
                    Ok(sight) => self.pinned_sight(sight, request),
                    Err(missing) => return Answer::NoRoom(missing),
                }
            }
        };
        match self.admit_behind(hit, request, behind, row, call) {
            Ok(sequence) => Answer::Admitted(sequence),
            Err(missing) => Answer::NoRoom(missing),
        }
    }

    /// Admits a request behind its hit. The first of a call has those behind it find and pin their prefixes before
    /// anything is claimed, so no request evicts what another has found, as far as that leaves room.
    fn admit_behind(
        &mut self,
        mut hit: Hit,
        request: &mut Request,
        behind: &mut [Request],
        row: RowLease,
        call: &mut Call,
    ) -> Result<Sequence, Missing> {
        let tenant = request.tenant;
        let chunk = self.first_chunk(&hit, request, call.left, call.leaves)?;
        let end = hit.tokens + chunk;
        call.queue.enter(self, request, hit.tokens);
        if std::mem::take(&mut call.is_first) {
            let wants = self.wanted_of_all(&hit, request.tokens(), end, call.leaves);
            self.pin_ahead(behind, wants, chunk, call);
        }
        let load = std::mem::take(&mut hit.load);
        let marks = request.marks();
        let claimed = self.claim_for(tenant, &hit, (marks.prompt, end), call.leaves)?;
        // Blocks that are kept for it would be copied to the device instead of moved.
        self.end_wait(request);
        let tokens = hit.tokens;
        let gotten = self.take_over(tenant, hit, claimed, marks);
        let mut sequence = self.sequence(request, tokens, gotten);
        sequence.row = Some(row);
        if load.blocks() > 0 {
            self.begin_layers(&mut sequence, load);
        }
        self.write_rows(&sequence);
        sequence.ends.next = u32::try_from(chunk).unwrap_or(u32::MAX);
        call.left -= chunk;
        Ok(sequence)
    }

    /// Pins what requests find that may be admitted behind a first one, which is to claim `wants` and to compute `chunk`
    /// tokens: as far as the budget and the rows may suffice, and there is room for all together.
    fn pin_ahead(
        &mut self,
        requests: &mut [Request],
        mut wants: Wants,
        chunk: u64,
        call: &mut Call,
    ) {
        let (mut left, mut rows) = (call.left - chunk, self.home.free_rows());
        let mut nexts = HashSet::new();
        for request in requests {
            if left == 0 || rows == 0 {
                break;
            }
            let prepared = self.prepare(request);
            let mut ends = false;
            let mut hit = None;
            if let Ok(None) = prepared {
                let sight = self.sight(request);
                let next = self.next_block(request, sight.tokens).filter(|_| request.waits);
                let waits = call.queue.computes(self, request, sight.tokens).is_some()
                    || next.is_some_and(|next| !nexts.insert(next));
                let fits = !waits && self.check_sight(&sight, &wants, request).is_ok();
                if fits {
                    let (prompt, tokens) = (request.tokens(), sight.tokens);
                    let checkpoints = self.groups.iter().filter(|group| group.is_state());
                    let ends = checkpoints.map(|at| at.next_checkpoint(tokens, request.marks()));
                    left = left.saturating_sub(ends.fold(prompt, u64::min) - tokens);
                    rows -= 1;
                    for ((wants, group), extent) in
                        wants.iter_mut().zip(&self.groups).zip(&sight.extents)
                    {
                        wants.count += group.to_claim(extent, prompt, (tokens + 1).min(prompt));
                    }
                    hit = Some(self.pinned_sight(sight, request));
                }
                // A group that shares memory may get more of it, and is asked in its turn.
                ends = !waits && !fits && self.shared.is_none();
            }
            call.ahead.push_back((prepared, hit));
            if ends {
                break;
            }
        }
    }

    /// What a request would find.
    fn sight(&self, request: &Request) -> Sight {
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
        let extent =
            |(index, group): (usize, &Group)| group.extent(names, tokens, loads(index), shares);
        let extents = self.groups.iter().enumerate().map(extent).collect();
        Sight { tokens, entering, extents }
    }

    /// Whether a request finds so many tokens, and there is room behind them.
    pub(crate) fn finds(&self, request: &Request, tokens: u64) -> bool {
        let sight = self.sight(request);
        let wants = self.left_for_running(self.leaves(1));
        sight.tokens >= tokens && self.check_sight(&sight, &wants, request).is_ok()
    }

    /// What a request would find, if there is room for it. A state that is copied takes a block more than one that is
    /// computed. So where nothing runs, and nothing comes back, a request that has no room beside its prefix goes without.
    fn fitting(&self, sight: Sight, request: &Request, call: &Call) -> Result<Sight, Missing> {
        let wants = self.left_for_running(call.leaves);
        let Err(missing) = self.check_sight(&sight, &wants, request) else { return Ok(sight) };
        let is_final = matches!(
            missing.reason,
            ClaimError::Exhausted { retiring: 0, .. }
                | ClaimError::Tenant(
                    TenantError::HeldMax { .. } | TenantError::KeptForOthers { .. }
                )
        );
        if call.leaves || !call.is_first || !is_final || sight.tokens == 0 {
            return Err(missing);
        }
        let extents = self.groups.iter().map(|_| Extent::default()).collect();
        let nothing = Sight { tokens: 0, entering: None, extents };
        self.check_sight(&nothing, &wants, request).map_err(|_| missing).map(|()| nothing)
    }

    /// Checks that what a request would find leaves room for `wants` in every group and for its own first chunk.
    fn check_sight(&self, sight: &Sight, wants: &Wants, request: &Request) -> Result<(), Missing> {
        let (names, prompt) = (self.wanted(request).0, request.tokens());
        let ends = (prompt, (sight.tokens + 1).min(prompt));
        self.foresee((request.tenant, names), &sight.extents, ends, wants)
    }

    /// What a request finds, pinned.
    fn pinned_sight(&self, sight: Sight, request: &Request) -> Hit {
        let (names, most) = self.wanted(request);
        let Sight { tokens, entering: Some(entering), .. } = sight else {
            return self.pinned_hit(names, sight.tokens);
        };
        let each = self.groups.iter().zip(&entering.loads);
        let found = each.map(|(group, &loads)| group.found_before_loads(names, tokens, loads));
        let found: SmallVec<[Found; 4]> = found.collect();
        match self.open_loads(names, tokens, &found) {
            Some(load) => Hit { tokens, found, load },
            None => self.hit(names, most),
        }
    }

    /// Checks, before anything is pinned, that a sequence can go on behind what it finds: that beside `wants`, each
    /// group has the blocks that are claimed for a prompt whose first chunk ends behind `end` tokens, and that the quotas
    /// let its tenant have them. A pin that is given back cannot be claimed until the step is complete, though nobody has
    /// used it: who asked in every step, in vain, would keep the running sequences from blocks that are theirs.
    pub(crate) fn foresee(
        &self,
        (tenant, names): (TenantId, &[BlockHash]),
        extents: &[Extent],
        (prompt, end): (u64, u64),
        wants: &[Wanted],
    ) -> Result<(), Missing> {
        let each = self.groups.iter().zip(extents);
        let own: SmallVec<[usize; 4]> =
            each.clone().map(|(group, extent)| group.to_claim(extent, prompt, end)).collect();
        let wanted = |(wants, own): (&Wanted, &usize)| Wanted {
            count: wants.count.saturating_add(*own),
            leave: wants.leave,
        };
        let wanted: Wants = wants.iter().zip(&own).map(wanted).collect();
        if self.shared.is_some() {
            return self.check_room_beside((tenant, names), extents, &wanted);
        }
        for ((group, extent), wanted) in each.clone().zip(&wanted) {
            let room = group.pool.claimable().saturating_sub(wanted.leave);
            let needed = extent.unused.saturating_add(wanted.count);
            if needed > room {
                return Err(group.exhausted(needed, room));
            }
        }
        for ((group, extent), own) in each.zip(own) {
            group.check_quota(tenant, &group.pinned_names(names, extent), own, 0)?;
        }
        Ok(())
    }

    /// What admission leaves of each group for running sequences.
    pub(crate) fn left_for_running(&self, leaves: bool) -> Wants {
        let left = |group: &Group| Wanted { count: 0, leave: group.leave(leaves) };
        self.groups.iter().map(left).collect()
    }

    /// Tokens of a prompt's first chunk behind a hit: `left` at most, up to the first checkpoint, and as many as
    /// the groups with a window have room for, beside what else their tenant holds.
    fn first_chunk(
        &self,
        hit: &Hit,
        request: &Request,
        left: u64,
        leaves: bool,
    ) -> Result<u64, Missing> {
        let prompt = request.tokens();
        let mut chunk = (prompt - hit.tokens).min(left).min(u32::MAX.into());
        let shares = self.shared.is_some();
        for (group, found) in self.groups.iter().zip(&hit.found) {
            if group.is_state() {
                chunk = chunk.min(group.next_checkpoint(hit.tokens, request.marks()) - hit.tokens);
            } else if group.is_window() {
                let room = match shares {
                    true => usize::try_from(group.capacity).unwrap_or(usize::MAX),
                    false => group.pool.claimable().saturating_sub(group.leave(leaves)),
                };
                let tenants = group.room_of(request.tenant, shares);
                let places =
                    group.whole_blocks(hit.tokens) + room.min(tenants).saturating_sub(found.far());
                chunk = chunk.min(group.tokens_of(places).saturating_sub(hit.tokens));
                if chunk == 0 && tenants < room {
                    group.check_quota(request.tenant, &[], found.far() + 1, 0)?;
                }
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
        (marks, end): (Marks, u64),
        leaves: bool,
    ) -> Result<Gotten, Missing> {
        let claimed = self.claim_for(tenant, &hit, (marks.prompt, end), leaves)?;
        Ok(self.take_over(tenant, hit, claimed, marks))
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
            self.make_room(tenant, &self.wanted_of_all(hit, prompt, end, leaves))?;
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
        marks: Marks,
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
                false => self.groups[index].next_checkpoint(hit.tokens, marks),
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
    /// Checks that the quotas let a tenant claim so many blocks once content is pinned, in a pool that has `resized` blocks
    /// more than now, or fewer.
    pub(crate) fn check_quota(
        &self,
        tenant: TenantId,
        pins: &[Cow<'_, [BlockHash]>],
        count: usize,
        resized: i64,
    ) -> Result<(), Missing> {
        let pins: SmallVec<[&[BlockHash]; 2]> = pins.iter().map(AsRef::as_ref).collect();
        let checked = self.pool.check_quota(self.tenant(tenant), &pins, count, resized);
        checked.map_err(|reason| Missing { group: self.id, reason: reason.into() })
    }

    /// Blocks that a tenant may hold beside what it holds; where groups share memory, there may be more than now.
    fn room_of(&self, tenant: TenantId, shares: bool) -> usize {
        let room = self.pool.tenant_room(self.tenant(tenant), Tier::Primary);
        let room = room.map_or(0, |room| if shares { room.own } else { room.now });
        usize::try_from(room).unwrap_or(usize::MAX)
    }

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
