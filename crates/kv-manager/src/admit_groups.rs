//! Admission to several groups, or to one that does not keep all: one hit for all, and blocks of all or none.

use kv_pool::tenants::TenantId;
use kv_pool::{Admitted, Claimed, Location, Pinned, Tier, guard};
use smallvec::SmallVec;

use crate::admit::{Answer, Request};
use crate::blocks::Blocks;
use crate::group::{Group, Held, Marks};
use crate::hit::{Extent, Extents, Found, Hit};
use crate::lower::{Entering, OpenLoad};
use crate::price::{Counts, Due, Price};
use crate::ready::{Not, Queue};
use crate::rows::RowLease;
use crate::sequence::{Depends, note_depends};
use crate::shared::Moves;
use crate::{BlockCopy, Manager, Missing, Sequence};

/// What a sequence gets of all groups.
#[derive(Default)]
pub(crate) struct Gotten {
    pub(crate) held: SmallVec<[Held; 1]>,
    /// Blocks of these that came from host memory.
    pub(crate) far: usize,
    /// Tokens of these blocks, in the group that has most of them.
    pub(crate) far_tokens: u64,
    pub(crate) depends: Depends,
    /// Tokens of the prefix that was found, what loads bring included.
    pub(crate) tokens: u64,
    /// The open loads that bring the rest of it.
    pub(crate) load: OpenLoad,
}

/// What a request would find.
struct Sight {
    tokens: u64,
    entering: Option<Entering>,
    extents: Extents,
}

impl Sight {
    /// Whether a part of it does not lie on the device.
    fn is_far(&self) -> bool {
        self.extents.iter().any(|extent| extent.far > 0)
    }
}

/// A request that is to be admitted, and what it has pinned.
struct Planned {
    at: usize,
    row: RowLease,
    hit: Hit,
    /// Whether a part of that is in host memory.
    is_far: bool,
    chunk: u64,
    counts: Counts,
}

/// Requests that are admitted together: as many as possible find and pin their prefixes before anything is claimed, so
/// that no request evicts what another has found.
struct Call {
    queue: Queue,
    answers: Vec<Answer>,
    planned: Vec<Planned>,
    /// What those are to claim, and the granules that move before.
    due: Due,
    moves: Moves,
    /// Tokens of the budget.
    left: u64,
    /// The same in whole blocks of the smallest size, which a request takes for the rest of its prompt.
    blocks_left: u64,
    /// Nothing was planned yet.
    is_first: bool,
}

impl Manager {
    fn call(&self, requests: usize, budget: u64) -> Call {
        Call {
            queue: Queue::default(),
            answers: Vec::with_capacity(requests),
            planned: Vec::new(),
            due: self.nothing_due(self.leaves(0)),
            moves: Moves::default(),
            left: budget,
            blocks_left: budget.div_ceil(self.namer.block_tokens.into()),
            is_first: true,
        }
    }

    /// Admits requests in order, as [`admit`](Self::admit) says.
    pub(crate) fn admit_to_groups(&mut self, requests: &mut [Request], budget: u64) -> Vec<Answer> {
        let mut call = self.call(requests.len(), budget);
        for at in 0..requests.len() {
            if call.left == 0 || call.blocks_left == 0 {
                self.look_ahead(&mut requests[at..]);
                break;
            }
            let answer = match self.turned_away(&mut requests[at], &call.queue) {
                Some(answer) => answer,
                None => match self.plan_next(at, requests, &mut call) {
                    Err(not) => not.into(),
                    Ok(planned) => {
                        call.planned.push(planned);
                        // Until it is admitted.
                        call.answers.push(Answer::NoRow);
                        continue;
                    }
                },
            };
            let ends = match &answer {
                Answer::NoRoom(missing) => !call.queue.passes(requests[at].tenant, missing),
                Answer::NoRow => true,
                _ => false,
            };
            call.answers.push(answer);
            if ends {
                break;
            }
        }
        self.admit_planned(requests, &mut call);
        call.answers
    }

    /// Plans the admission of a request behind those before it, or says why not.
    fn plan_next(
        &mut self,
        at: usize,
        requests: &mut [Request],
        call: &mut Call,
    ) -> Result<Planned, Not> {
        let mut sight = self.sight(&requests[at]);
        if let Some(waiting) = call.queue.computes(self, &requests[at], sight.tokens) {
            return Err(Not::Turn(waiting));
        }
        let row = self.home.lease().ok_or(Not::Row)?;
        if sight.is_far() && call.planned.iter().any(|planned| planned.is_far) {
            // What it finds in host memory may come back for an earlier one: a second pin would keep it there.
            self.admit_planned(requests, call);
            sight = self.sight(&requests[at]);
        }
        let is_far = sight.is_far();
        let mut plan = self.plan_request(sight, &requests[at], call);
        if matches!(plan, Err(Not::Room(_))) && !call.due.is_exact_for(requests[at].tenant) {
            self.admit_planned(requests, call);
            plan = self.plan_request(self.sight(&requests[at]), &requests[at], call);
        }
        let (hit, chunk, price) = plan?;
        let request = &requests[at];
        call.queue.enter(self, request, hit.tokens);
        call.due.add(request.tenant, &price.counts);
        call.moves = price.moves;
        call.left -= chunk;
        let rest = request.tokens() - hit.tokens;
        let rest = rest.div_ceil(self.namer.block_tokens.into());
        call.blocks_left = call.blocks_left.saturating_sub(rest);
        call.is_first = false;
        Ok(Planned { at, row, hit, is_far, chunk, counts: price.counts })
    }

    /// What a request finds, pinned, the tokens of its first chunk, and what it claims; nothing is pinned if it cannot be
    /// admitted.
    fn plan_request(
        &self,
        sight: Sight,
        request: &Request,
        call: &Call,
    ) -> Result<(Hit, u64, Price), Not> {
        if let Some(waiting) = call.queue.computes(self, request, sight.tokens) {
            return Err(Not::Turn(waiting));
        }
        let (sight, chunk, price) = self.fitting(sight, request, call).map_err(Not::Room)?;
        let tokens = sight.tokens;
        let hit = self.pinned_sight(sight, request);
        let extents = hit.extents();
        let counts = self.to_claim(&extents, request.tokens(), tokens + chunk);
        let is_as_priced = hit.tokens == tokens && counts == price.counts;
        if guard!("manager.prices-what-is-pinned", is_as_priced, else true) {
            return Ok((hit, chunk, price));
        }
        // Other threads have pinned or released some of it meanwhile.
        let (chunk, price) =
            self.price_chunk(request, (hit.tokens, &extents), call).map_err(Not::Room)?;
        Ok((hit, chunk, price))
    }

    /// Admits what was planned.
    fn admit_planned(&mut self, requests: &mut [Request], call: &mut Call) {
        self.move_granules(&std::mem::take(&mut call.moves));
        for planned in std::mem::take(&mut call.planned) {
            let (at, tenant) = (planned.at, requests[planned.at].tenant);
            call.answers[at] = match self.take_each(tenant, &planned.counts) {
                Ok(claimed) => {
                    Answer::Admitted(self.admit_next(&mut requests[at], planned, claimed))
                }
                Err(missing) => Answer::NoRoom(missing),
            };
        }
        call.due = self.nothing_due(call.due.leaves);
    }

    /// Admits a request with the blocks that were claimed for it.
    fn admit_next(
        &mut self,
        request: &mut Request,
        planned: Planned,
        claimed: SmallVec<[Claimed; 4]>,
    ) -> Sequence {
        let Planned { row, hit, chunk, .. } = planned;
        // Blocks that are kept for it would be copied to the device instead of moved.
        self.end_wait(request);
        let gotten = self.take_over(request.tenant, hit, claimed, request.marks());
        let mut sequence = self.sequence(request, row, gotten);
        sequence.ends.next = u32::try_from(chunk).unwrap_or(u32::MAX);
        sequence
    }

    /// What a request would find.
    fn sight(&self, request: &Request) -> Sight {
        let (names, most) = self.wanted(request);
        let entering = if request.enters() { self.entering(names, most) } else { None };
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
        let (names, prompt) = (self.wanted(request).0, request.tokens());
        let counts = self.to_claim(&sight.extents, prompt, (sight.tokens + 1).min(prompt));
        let due = self.nothing_due(self.leaves(1));
        sight.tokens >= tokens
            && self.price((request.tenant, names), &sight.extents, counts, &due).is_ok()
    }

    /// What a request would find, with its first chunk and what it claims, if there is room for it. A state that is copied
    /// takes a block more than one that is computed, and what is found may lie in more granules than it fills. So where
    /// nothing runs, and nothing comes back, a request that has no room beside its prefix goes without.
    fn fitting(
        &self,
        sight: Sight,
        request: &Request,
        call: &Call,
    ) -> Result<(Sight, u64, Price), Missing> {
        let priced = self.price_chunk(request, (sight.tokens, &sight.extents), call);
        let missing = match priced {
            Ok((chunk, price)) => return Ok((sight, chunk, price)),
            Err(missing) => missing,
        };
        let stays = call.due.leaves || !call.is_first || !missing.is_final() || sight.tokens == 0;
        if guard!("manager.the-first-goes-without-its-prefix", stays, else true) {
            return Err(missing);
        }
        let extents: Extents = self.groups.iter().map(|_| Extent::default()).collect();
        match self.price_chunk(request, (0, &extents), call) {
            Ok((chunk, price)) => Ok((Sight { tokens: 0, entering: None, extents }, chunk, price)),
            Err(_) => Err(missing),
        }
    }

    /// The tokens of a prompt's first chunk behind what it finds, and what it claims: as many as are left of the budget,
    /// up to the first checkpoint, and in groups with a window as many as there is room for.
    fn price_chunk(
        &self,
        request: &Request,
        (tokens, extents): (u64, &[Extent]),
        call: &Call,
    ) -> Result<(u64, Price), Missing> {
        let (names, prompt) = (self.wanted(request).0, request.tokens());
        let marks = request.marks();
        let ends = self.groups.iter().map(|group| group.next_checkpoint(tokens, marks));
        let most = (ends.fold(prompt, u64::min) - tokens).min(call.left).min(u32::MAX.into());
        let price = |chunk| {
            let counts = self.to_claim(extents, prompt, tokens + chunk);
            let price = self.price((request.tenant, names), extents, counts, &call.due)?;
            Ok((chunk, price))
        };
        let missing = match price(most) {
            Ok(all) => return Ok(all),
            Err(missing) => missing,
        };
        if most <= 1
            || !self.groups.iter().any(Group::is_window)
            || !call.due.is_exact_for(request.tenant)
        {
            return Err(missing);
        }
        let (mut fits, mut refused) = (price(1)?, most);
        // A longer chunk never needs less.
        while fits.0 + 1 < refused {
            match price(fits.0 + (refused - fits.0) / 2) {
                Ok(longer) => fits = longer,
                Err(_) => refused = fits.0 + (refused - fits.0) / 2,
            }
        }
        Ok(fits)
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

    /// Whether admission leaves blocks for running sequences; `leased` rows are not theirs.
    pub(crate) fn leaves(&self, leased: usize) -> bool {
        self.options.sequences_max as usize - self.home.free_rows() > leased
    }

    /// What a sequence has that goes on behind a hit, with the blocks that were claimed for it.
    pub(crate) fn take_over(
        &mut self,
        tenant: TenantId,
        hit: Hit,
        all: SmallVec<[Claimed; 4]>,
        marks: Marks,
    ) -> Gotten {
        let Hit { tokens, found: all_found, load } = hit;
        let mut gotten = Gotten { tokens, load, ..Gotten::default() };
        for (index, (found, mut claimed)) in all_found.into_iter().zip(all).enumerate() {
            self.plan_claimed(index, tenant, &mut claimed);
            gotten.far += found.far();
            gotten.far_tokens = gotten.far_tokens.max(self.groups[index].tokens_of(found.far()));
            self.note_pending(index, &found, tokens, &mut gotten.depends);
            // What a load brings has no name here before it has ended.
            let full = self.groups[index].full_blocks(tokens);
            let named = found.loading().next().map_or(full, |place| place.min(full));
            let mut held = Held { named, ..Held::default() };
            held.turn = if self.groups[index].is_window() {
                0
            } else {
                self.groups[index].next_checkpoint(tokens, marks)
            };
            held.blocks = if self.groups[index].is_state() {
                self.state_from(index, found, claimed)
            } else {
                self.blocks_from(index, found, claimed)
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
            let copy = BlockCopy { group, from, to, tokens, written_by };
            guard!("manager.checkpoints-are-copied", self.plan.copies.push(copy));
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

    /// Notes on which steps the content of what was found in a group depends, for a sequence that goes on behind `tokens`
    /// tokens.
    pub(crate) fn note_pending(
        &self,
        group: usize,
        found: &Found,
        tokens: u64,
        depends: &mut Depends,
    ) {
        let group = &self.groups[group];
        let places = (0..found.head.len()).chain(found.tail_first..found.end());
        let records = found.head.records().chain(found.tail.records());
        for (place, record) in places.zip(records) {
            let pending = group.pending(record, self.completed);
            let Some(step) = guard!("manager.depends-on-what-it-finds-later", pending, else None)
            else {
                continue;
            };
            let token = group.first_token(place, tokens);
            note_depends(depends, step, token);
        }
    }
}

fn take_first(claimed: &mut Claimed, count: usize) -> Claimed {
    let rest = claimed.split_off(count);
    std::mem::replace(claimed, rest)
}

impl Group {
    /// The first token that is wrong if the content of a block is, which a sequence of `tokens` tokens goes on
    /// behind.
    pub(crate) fn first_token(&self, place: usize, tokens: u64) -> u64 {
        let before = guard!("manager.a-failed-state-takes-a-token-back", 1, else 0);
        if self.is_state() { tokens.saturating_sub(before) } else { self.tokens_of(place) }
    }
}

#[cfg(test)]
mod tests {
    use kv_pool::PoolConfig;

    use super::*;
    use crate::ManagerOptions;

    #[test]
    fn what_goes_between_the_look_and_the_pin_is_claimed() {
        let pool = PoolConfig::primary_only(32);
        let options = ManagerOptions { block_tokens: 4, pool, ..ManagerOptions::default() };
        let mut manager = Manager::new(options).unwrap();
        let mut requests = [Request::new((0..41).collect())];
        let mut first = manager.admit(&mut requests, u64::MAX);
        let Some(Answer::Admitted(sequence)) = first.last_mut() else { panic!("{first:?}") };
        let step = manager.begin_step().unwrap();
        manager.stage(&step, &mut [sequence]).unwrap();
        let mut request = Request::new((0..50).collect());
        assert_eq!(manager.prepare(&mut request), Ok(None));
        let sight = manager.sight(&request);
        assert_eq!(sight.tokens, 40);
        let names = manager.names_of(&request).to_vec();
        // As a pin of another thread takes what the tenant may hold.
        manager.forget(&names[5..]);
        let call = manager.call(1, u64::MAX);
        let (hit, chunk, price) = manager.plan_request(sight, &request, &call).ok().unwrap();
        assert_eq!((hit.tokens, chunk), (20, 30));
        assert_eq!(price.counts[..], [13 - 5], "blocks for all that is not found");
    }
}
