//! Admission: one hit of a request in all groups, and blocks of all or none.

use std::collections::{HashSet, VecDeque};

use kv_pool::tenants::TenantId;
use kv_pool::{BlockHash, Claimed, Tier, guard};
use smallvec::SmallVec;

use crate::draft::DraftEnd;
use crate::ends::Ends;
use crate::group::Group;
use crate::growing::Memory;
use crate::hit::{Extent, Extents, Founds, Hit};
use crate::holding::Holding;
use crate::lower::Entering;
use crate::pace::Pace;
use crate::price::{Counts, Due, Price};
use crate::ready::{Not, Queue};
use crate::request::{Admission, Answer, NoRoom, Request, Waiting, Wanted};
use crate::rows::RowLease;
use crate::sequence::Origin;
use crate::shared::Moves;
use crate::take_over::Gotten;
use crate::{Manager, Missing, Sequence};

/// Requests in their order.
trait Line {
    fn count(&self) -> usize;
    /// The request at a position below [`count`](Self::count).
    fn at(&mut self, position: usize) -> &mut Request;
}

impl<R: AsMut<Request>> Line for VecDeque<R> {
    fn count(&self) -> usize {
        self.len()
    }

    fn at(&mut self, position: usize) -> &mut Request {
        self[position].as_mut()
    }
}

impl Line for Request {
    fn count(&self) -> usize {
        1
    }

    fn at(&mut self, _: usize) -> &mut Request {
        self
    }
}

/// Whether a tenant can have so much of each group beside what is due: by its own bound, or with all that others have.
type Judge<T> =
    dyn Fn(&Manager, (TenantId, &[BlockHash]), &[Extent], Counts, &Due) -> Result<T, Missing>;

/// What comes of the requests of a call. One is the rule, and needs no list.
pub(crate) type Answers = SmallVec<[Answer; 1]>;

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

/// What a request has pinned, and is to claim.
struct Fit {
    hit: Hit,
    /// Whether a part of that does not lie on the device.
    is_far: bool,
    /// Tokens of its first chunk.
    chunk: u64,
    counts: Counts,
}

/// Blocks that lay in host memory when a call began, and their tokens in the group that has most of them.
#[derive(Clone, Copy, Default)]
struct Far {
    blocks: usize,
    tokens: u64,
}

/// A request that is to be admitted.
struct Planned {
    at: usize,
    row: RowLease,
    fit: Fit,
    /// What has come back for earlier requests of the call, and so for this one too.
    back: Far,
}

/// Requests that are admitted together: as many as possible find and pin their prefixes before anything is claimed, so
/// that no request evicts what another has found.
struct Call {
    queue: Queue,
    answers: Answers,
    planned: SmallVec<[Planned; 1]>,
    /// What those are to claim, and the granules that move before.
    due: Due,
    moves: Moves,
    /// Tokens of the budget.
    left: u64,
    /// The same in whole blocks of the smallest size, of which a chunk takes those that it touches.
    blocks_left: u64,
    /// Nothing was planned yet.
    is_first: bool,
    /// Blocks of each group that come back from host memory for those that are planned.
    coming: HashSet<(usize, BlockHash)>,
    /// Those that have come back for earlier ones.
    came_back: HashSet<(usize, BlockHash)>,
}

impl Manager {
    /// Admits as many requests of a queue, in order, as rows, memory and a step's budget of tokens allow, and takes them
    /// out of it, with those that can never be admitted. `R` is a [`Request`], or what an engine keeps with it, such as
    /// `(id, Request)`.
    ///
    /// A request that waits for [a prefix or a load](Waiting), or for what its own tenant may hold, stops nobody behind it
    /// but those of the same tenant. The first without room stops all: requests are admitted in their order. A request that
    /// is not admitted takes nothing and changes nothing that is cached, and what becomes of it does not depend on the
    /// requests behind. Those behind it, or behind the budget, are not looked at, but for as many as loads may be open, whose
    /// loads begin unless their tenants are at their bounds.
    ///
    /// The prefix is looked up for the whole prompt, but for its last token, whose output is wanted, and is as
    /// long as all groups can serve. Room is judged by the whole prompt, which gets its blocks at once, and in
    /// groups with a window by its first chunk, which is as long as there is room for; beside them, the
    /// [watermark](crate::GroupOptions::watermark_blocks) is left for running sequences. Prefixes are
    /// pinned before any block is claimed, so no request evicts what another has found; only as far as
    /// what is found leaves room for the requests before it, whatever their tenants may hold. Prefix blocks in
    /// host memory are brought back, once for all requests that share them. For that, the requests before one that shares
    /// such blocks claim theirs first, which may evict from host memory what that one alone has found there.
    ///
    /// An admitted sequence has the first chunk of its prompt [reserved](Sequence::next): what is left of
    /// the budget, at most, and up to the first checkpoint of a recurrent state. What others have left of a block is not
    /// begun with.
    pub fn admit<R: AsMut<Request>>(
        &mut self,
        queue: &mut VecDeque<R>,
        budget: u64,
    ) -> Admission<R> {
        self.admit_in(&mut Memory::default(), queue, budget)
    }

    pub(crate) fn admit_in<R: AsMut<Request>>(
        &mut self,
        memory: &mut Memory<'_>,
        queue: &mut VecDeque<R>,
        budget: u64,
    ) -> Admission<R> {
        let answers = self.answers(memory, queue, budget);
        if memory.has_failed {
            return Admission::default();
        }
        answers.iter().for_each(|answer| self.count(answer));
        drained(queue, answers)
    }

    /// What comes of one request that has the whole budget; it is not counted.
    pub(crate) fn admit_one(&mut self, memory: &mut Memory<'_>, request: &mut Request) -> Answer {
        self.answers(memory, request, u64::MAX).pop().unwrap_or(Answer::NoRow)
    }

    /// What comes of the first requests of a line, up to the first for which there is no room, or beyond the budget.
    fn answers(&mut self, memory: &mut Memory<'_>, line: &mut dyn Line, budget: u64) -> Answers {
        let mut call = self.call(budget);
        for at in 0..line.count() {
            let is_full = call.left == 0 || call.blocks_left == 0;
            if guard!("manager.names-no-more-than-may-enter", is_full, else false) {
                self.look_ahead(line, at, &call.queue);
                break;
            }
            let answer = match self.turned_away(line.at(at), &call.queue) {
                Some(answer) => answer,
                None => match self.plan_next(memory, at, line, &mut call) {
                    // Until it is admitted.
                    Ok(()) => {
                        call.answers.push(Answer::NoRow);
                        continue;
                    }
                    Err(Not::Turn(waiting)) => Answer::Waiting(waiting),
                    Err(Not::Row) => Answer::NoRow,
                    // It is asked for again in the next call.
                    Err(Not::Room(_)) if memory.has_failed => break,
                    Err(Not::Room(missing)) => Answer::NoRoom(missing),
                },
            };
            let ends = match &answer {
                Answer::NoRoom(missing) => !call.queue.passes(line.at(at).tenant, missing),
                Answer::NoRow => true,
                _ => false,
            };
            call.answers.push(answer);
            if ends {
                guard!(
                    "manager.loads-begin-behind-no-room",
                    self.look_ahead(line, at + 1, &call.queue)
                );
                break;
            }
        }
        self.admit_planned(line, &mut call);
        // What was admitted stays so.
        memory.has_failed &=
            !call.answers.iter().any(|answer| matches!(answer, Answer::Admitted(_)));
        call.answers
    }

    fn call(&self, budget: u64) -> Call {
        Call {
            queue: Queue::default(),
            answers: Answers::new(),
            planned: SmallVec::new(),
            due: self.groups.nothing_due(self.leaves(0)),
            moves: Moves::default(),
            left: budget,
            blocks_left: budget.div_ceil(self.namer.unit()),
            is_first: true,
            coming: HashSet::new(),
            came_back: HashSet::new(),
        }
    }

    /// Begins the loads of requests whose turn has not come: of as many as loads may be open, and of no tenant that holds
    /// as much as it may. One that has no names yet is the last, since to name a long prompt takes a part of a step.
    fn look_ahead(&mut self, line: &mut dyn Line, from: usize, queue: &Queue) {
        for at in (from..line.count()).take(self.lower.loads_ahead()) {
            let (tenant, is_named) =
                (line.at(at).tenant, matches!(line.at(at).tokens, Wanted::Known(_)));
            let waits = queue.bar(tenant).is_some() || self.groups.is_at_bound(tenant);
            if guard!("manager.loads-nothing-for-tenants-at-their-bound", waits, else false) {
                continue;
            }
            // Its answer comes when it is asked for.
            drop(self.prepare(line.at(at)));
            if !is_named {
                break;
            }
        }
    }

    /// Plans the admission of a request behind those before it, or says why not.
    fn plan_next(
        &mut self,
        memory: &mut Memory<'_>,
        at: usize,
        line: &mut dyn Line,
        call: &mut Call,
    ) -> Result<(), Not> {
        if !self.plan_at_ease(memory, at, line.at(at), call)? {
            self.plan_in_need(memory, at, line, call)?;
        }
        let is_last = at + 1 == line.count();
        let (request, Some(planned)) = (line.at(at), call.planned.last_mut()) else {
            return Ok(());
        };
        if !call.came_back.is_empty() {
            planned.back = self.among(&call.came_back, request, planned.fit.hit.tokens);
        }
        let fit = &planned.fit;
        if !is_last {
            call.queue.enter(&self.namer, request, fit.hit.tokens);
        }
        call.due.add(request.tenant, &fit.counts);
        call.left -= fit.chunk;
        let blocks = fit.chunk.div_ceil(self.namer.unit());
        call.blocks_left = call.blocks_left.saturating_sub(blocks);
        call.is_first = false;
        if fit.is_far {
            self.note_coming(&mut call.coming, request, &planned.fit.hit);
        }
        Ok(())
    }

    /// The same where there is room whatever the request finds, and nobody whose bounds are to be looked at: then nothing
    /// has to be known of what it finds before that is pinned. False, and nothing done, where that is not so.
    fn plan_at_ease(
        &mut self,
        memory: &Memory<'_>,
        at: usize,
        request: &Request,
        call: &mut Call,
    ) -> Result<bool, Not> {
        let prompt = request.tokens();
        let has_ample = |(index, group): (usize, &Group)| {
            // A state is copied from a checkpoint that is there.
            let most = if group.is_state() { 2 } else { group.blocks_for(prompt) };
            let leave = if call.due.leaves { group.watermark() } else { 0 };
            let wanted = call.due.of(index).saturating_add(most);
            group.pool.has_ample(wanted.saturating_add(leave))
                // Memory is asked for before anything is pinned.
                && (memory.is_there()
                    || guard!(
                        "manager.asks-for-memory-before-it-pins",
                        wanted <= group.pool.empty(),
                        else true
                    ))
        };
        if self.shared.is_some()
            || request.enters()
            || !call.coming.is_empty()
            || !self.groups.iter().enumerate().all(has_ample)
        {
            return Ok(false);
        }
        let (names, most) = request.wanted();
        // Where one group decides, and nobody before it computes what it finds, there is nothing to agree on.
        let alone = self.groups.alone().is_some();
        let tokens = if alone && call.is_first { most } else { self.groups.reach(names, most) };
        if let Some(waiting) = call.queue.computes(&self.namer, request, tokens) {
            return Err(Not::Turn(waiting));
        }
        let row = self.home.lease().ok_or(Not::Row)?;
        let hit = self.groups.pinned_hit(names, tokens);
        let extents = self.groups.extents(&hit);
        let chunk = self.longest_chunk(request, hit.tokens, call);
        let counts = self.groups.to_claim(&extents, prompt, hit.tokens + chunk);
        let is_far = extents.iter().any(|extent| extent.far > 0);
        let fit = Fit { hit, is_far, chunk, counts };
        call.planned.push(Planned { at, row, fit, back: Far::default() });
        Ok(true)
    }

    /// The same where room is short, or shared: what it finds is priced before it is pinned.
    fn plan_in_need(
        &mut self,
        memory: &mut Memory<'_>,
        at: usize,
        line: &mut dyn Line,
        call: &mut Call,
    ) -> Result<(), Not> {
        let mut sight = self.sight(line.at(at));
        if let Some(waiting) = call.queue.computes(&self.namer, line.at(at), sight.tokens) {
            return Err(Not::Turn(waiting));
        }
        let row = self.home.lease().ok_or(Not::Row)?;
        let shared = match sight.is_far() && !call.coming.is_empty() {
            true => self.among(&call.coming, line.at(at), sight.tokens).blocks,
            false => 0,
        };
        if guard!("manager.far-prefixes-wait-for-shared-ones-alone", shared > 0, else !call.coming.is_empty())
        {
            // It comes back for an earlier one: a second pin would keep it there.
            self.admit_planned(line, call);
            sight = self.sight(line.at(at));
        }
        let mut fit = self.grown_fit(memory, sight, line.at(at), call);
        if matches!(fit, Err(Not::Room(_))) && !call.due.is_exact_for(line.at(at).tenant) {
            self.admit_planned(line, call);
            fit = self.grown_fit(memory, self.sight(line.at(at)), line.at(at), call);
        }
        let (fit, moves) = fit?;
        call.moves = moves;
        call.planned.push(Planned { at, row, fit, back: Far::default() });
        Ok(())
    }

    /// The same, with more memory where its owner has some.
    fn grown_fit(
        &mut self,
        memory: &mut Memory<'_>,
        sight: Sight,
        request: &Request,
        call: &Call,
    ) -> Result<(Fit, Moves), Not> {
        if memory.is_there() {
            return self.fit(sight, request, call);
        }
        let within_bound =
            |manager: &Self,
             of: (TenantId, &[BlockHash]),
             extents: &[Extent],
             counts,
             due: &Due| { manager.groups.within_bound(of, extents, counts, due) };
        let (sight, _, bounded) = self.fitting(sight, request, call, &within_bound)?;
        self.grow_for(memory, &sight.extents, &bounded.wanted)?;
        match self.fit(sight, request, call) {
            Err(Not::Room(missing)) if self.grow_beside_kept(memory, &missing)? => {
                self.fit(self.sight(request), request, call)
            }
            fit => fit,
        }
    }

    /// What a request finds, pinned, the tokens of its first chunk, and what it claims; nothing is pinned if it cannot be
    /// admitted.
    fn fit(&self, sight: Sight, request: &Request, call: &Call) -> Result<(Fit, Moves), Not> {
        if let Some(waiting) = call.queue.computes(&self.namer, request, sight.tokens) {
            return Err(Not::Turn(waiting));
        }
        let (sight, mut chunk, mut price) = self.fitting(sight, request, call, &Manager::price)?;
        let tokens = sight.tokens;
        let hit = self.pinned_sight(sight, request);
        let extents = self.groups.extents(&hit);
        let counts = self.groups.to_claim(&extents, request.tokens(), tokens + chunk);
        let is_as_priced = hit.tokens == tokens && counts == price.counts;
        if !guard!("manager.prices-what-is-pinned", is_as_priced, else true) {
            // Other threads have pinned or released some of it meanwhile.
            (chunk, price) =
                self.longest(request, (hit.tokens, &extents), call, &Manager::price)?;
        }
        let is_far = extents.iter().any(|extent| extent.far > 0);
        let Price { counts, moves } = price;
        Ok((Fit { hit, is_far, chunk, counts }, moves))
    }

    /// Admits what was planned.
    fn admit_planned(&mut self, line: &mut dyn Line, call: &mut Call) {
        self.move_granules(&std::mem::take(&mut call.moves));
        for planned in call.planned.drain(..) {
            let (at, request) = (planned.at, line.at(planned.at));
            call.answers[at] = match self.groups.take_each(request.tenant, &planned.fit.counts) {
                Ok(claimed) => {
                    let Planned { row, fit: Fit { hit, chunk, .. }, back, .. } = planned;
                    let mut sequence = self.admit_next(request, row, hit, claimed);
                    sequence.onboarded_blocks = sequence.onboarded_blocks.max(back.blocks);
                    sequence.host_tokens = sequence.host_tokens.max(back.tokens);
                    sequence.ends.next = u32::try_from(chunk).unwrap_or(u32::MAX);
                    Answer::Admitted(sequence)
                }
                Err(missing) => Answer::NoRoom(missing),
            };
        }
        call.came_back.extend(call.coming.drain());
        call.due = self.groups.nothing_due(call.due.leaves);
    }

    /// Admits a request with what it has found and the blocks that were claimed for it.
    pub(crate) fn admit_next(
        &mut self,
        request: &mut Request,
        row: RowLease,
        hit: Hit,
        claimed: SmallVec<[Claimed; 4]>,
    ) -> Sequence {
        // Blocks that are kept for it would be copied to the device instead of moved.
        self.lower.end_wait(request);
        let gotten = self.take_over(request.tenant, hit, claimed, request.marks());
        self.sequence(request, row, gotten)
    }

    /// What a request would find.
    fn sight(&self, request: &Request) -> Sight {
        let (names, most) = request.wanted();
        let entering = if request.enters() { self.entering(names, most) } else { None };
        let tokens = match &entering {
            Some(entering) => entering.tokens,
            None => self.groups.reach(names, most),
        };
        let loads = |index: usize| entering.as_ref().map_or([0; 2], |of| of.loads[index]);
        let extent = |(index, group): (usize, &Group)| group.extent(names, tokens, loads(index));
        let extents = self.groups.iter().enumerate().map(extent).collect();
        Sight { tokens, entering, extents }
    }

    /// Notes what comes back from host memory for a request.
    fn note_coming(&self, coming: &mut HashSet<(usize, BlockHash)>, request: &Request, hit: &Hit) {
        let names = request.wanted().0;
        for (index, (group, found)) in self.groups.iter().zip(&hit.found).enumerate() {
            let places = (0..found.head.len()).chain(found.tail_first..);
            let far = places.zip(found.locations()).filter(|(_, at)| at.tier != Tier::Primary);
            coming.extend(far.map(|(place, _)| (index, group.name_at(names, place))));
        }
    }

    /// How much of a request's prefix of so many tokens has come back.
    fn among(
        &self,
        came_back: &HashSet<(usize, BlockHash)>,
        request: &Request,
        tokens: u64,
    ) -> Far {
        let (names, mut far) = (request.wanted().0, Far::default());
        for (index, group) in self.groups.iter().enumerate() {
            let needed = group.needed_names(names, group.whole_blocks(tokens), 0);
            let blocks = needed.filter(|&(_, name)| came_back.contains(&(index, name))).count();
            far.blocks += blocks;
            far.tokens = far.tokens.max(group.tokens_of(blocks));
        }
        far
    }

    /// Whether a request finds so many tokens, and there is room behind them.
    pub(crate) fn finds(
        &mut self,
        memory: &mut Memory<'_>,
        request: &Request,
        tokens: u64,
    ) -> bool {
        let sight = self.sight(request);
        let (names, prompt) = (request.wanted().0, request.tokens());
        let counts = self.groups.to_claim(&sight.extents, prompt, (sight.tokens + 1).min(prompt));
        let due = self.groups.nothing_due(self.leaves(0));
        sight.tokens >= tokens
            && self.price_in(memory, (request.tenant, names), &sight.extents, counts, &due).is_ok()
    }

    /// What a request would find, with its first chunk and what it claims, if `judge` allows that. A state that is copied
    /// takes a block more than one that is computed, and what is found may lie in more granules than it fills. So where
    /// nothing runs, and nothing comes back, a request that has no room beside its prefix goes without.
    fn fitting<T>(
        &self,
        sight: Sight,
        request: &Request,
        call: &Call,
        judge: &Judge<T>,
    ) -> Result<(Sight, u64, T), Missing> {
        let judged = self.longest(request, (sight.tokens, &sight.extents), call, judge);
        let missing = match judged {
            Ok((chunk, fits)) => return Ok((sight, chunk, fits)),
            Err(missing) => missing,
        };
        let stays = call.due.leaves || !call.is_first || !missing.is_final() || sight.tokens == 0;
        if guard!("manager.the-first-goes-without-its-prefix", stays, else true) {
            return Err(missing);
        }
        let extents = self.groups.nothing_found();
        match self.longest(request, (0, &extents), call, judge) {
            Ok((chunk, fits)) => Ok((Sight { tokens: 0, entering: None, extents }, chunk, fits)),
            Err(_) => Err(missing),
        }
    }

    /// The tokens of a prompt's first chunk behind what it finds, and what it claims: as many as are left of the budget,
    /// up to the first checkpoint, and in groups with a window as many as `judge` allows.
    fn longest<T>(
        &self,
        request: &Request,
        (tokens, extents): (u64, &[Extent]),
        call: &Call,
        judge: &Judge<T>,
    ) -> Result<(u64, T), Missing> {
        let (names, prompt) = (request.wanted().0, request.tokens());
        let most = self.longest_chunk(request, tokens, call);
        let judged = |chunk| {
            let counts = self.groups.to_claim(extents, prompt, tokens + chunk);
            Ok((chunk, judge(self, (request.tenant, names), extents, counts, &call.due)?))
        };
        let missing = match judged(most) {
            Ok(all) => return Ok(all),
            Err(missing) => missing,
        };
        if most <= 1
            || !self.groups.iter().any(|group| group.is_window())
            || !call.due.is_exact_for(request.tenant)
        {
            return Err(missing);
        }
        let (mut fits, mut refused) = (judged(1)?, most);
        // A longer chunk never needs less.
        while fits.0 + 1 < refused {
            match judged(fits.0 + (refused - fits.0) / 2) {
                Ok(longer) => fits = longer,
                Err(_) => refused = fits.0 + (refused - fits.0) / 2,
            }
        }
        Ok(fits)
    }

    /// The tokens behind so many of a prompt that a step computes at most: as many as are left of the budget, up to the
    /// first checkpoint.
    fn longest_chunk(&self, request: &Request, tokens: u64, call: &Call) -> u64 {
        let marks = request.marks();
        let ends = self.groups.iter().map(|group| group.next_checkpoint(tokens, marks));
        let end = ends.fold(request.tokens(), u64::min);
        (end - tokens).min(call.left).min(u32::MAX.into())
    }

    /// What a request finds, pinned.
    fn pinned_sight(&self, sight: Sight, request: &Request) -> Hit {
        let (names, most) = request.wanted();
        let Sight { tokens, entering: Some(entering), .. } = sight else {
            return self.groups.pinned_hit(names, sight.tokens);
        };
        let each = self.groups.iter().zip(&entering.loads);
        let found = each.map(|(group, &loads)| group.found_before_loads(names, tokens, loads));
        let found: Founds = found.collect();
        match self.open_loads(names, tokens, &found) {
            Some(load) => Hit { tokens, found, load },
            None => self.groups.hit(names, most),
        }
    }

    /// Whether admission leaves blocks for running sequences; `leased` rows are not theirs.
    pub(crate) fn leaves(&self, leased: usize) -> bool {
        self.options.sequences_max as usize - self.home.free_rows() > leased
    }

    /// The sequence of an admitted request, in its row.
    fn sequence(&mut self, request: &mut Request, row: RowLease, gotten: Gotten) -> Sequence {
        let marks = request.marks();
        let Wanted::Known(mut known) = std::mem::replace(&mut request.tokens, Wanted::Taken) else {
            unreachable!("an admitted request has names")
        };
        let group = &self.groups[0];
        let most = group.tokens_of(group.table.width());
        known.reserve(&self.namer, request.tokens_max.min(most));
        let Gotten { held, far, far_tokens, depends, tokens: cached, load } = gotten;
        self.stats.prompt_tokens += known.tokens();
        self.stats.cached_tokens += cached;
        let frontier = self.namer.enter(&known, cached);
        let mut sequence = Sequence {
            number: self.steps.number_sequence(),
            era: self.steps.era(),
            home: self.home.clone(),
            row: Some(row),
            held: Holding::new(held),
            origin: Origin::of(request, marks, cached),
            known,
            pace: Pace::NONE,
            ends: Ends::cached(cached),
            draft: DraftEnd::cached(cached),
            onboarded_blocks: far,
            host_tokens: far_tokens,
            depends,
            offered: 0,
            copied: self.plan.copied_by(),
            failures_seen: self.steps.failures().count(),
            frontier,
            load: None,
            arrives: None,
            suspended: false,
            reuse: request.reuse,
        };
        if load.blocks() > 0 {
            self.begin_layers(&mut sequence, load);
        }
        self.write_rows(&sequence);
        sequence
    }
}

/// Takes what was admitted or refused out of a queue.
fn drained<R>(queue: &mut VecDeque<R>, answers: Answers) -> Admission<R> {
    let (mut admission, mut kept) = (Admission::default(), 0);
    for answer in answers {
        let Some(request) = queue.pop_front() else { break };
        match answer {
            Answer::Admitted(sequence) => {
                admission.admitted.push((request, sequence));
                continue;
            }
            Answer::Refused(error) => {
                admission.refused.push((request, error));
                continue;
            }
            Answer::Waiting(waiting) => admission.waiting.push((kept, waiting)),
            Answer::NoRoom(missing) if missing.is_bound() => {
                admission.waiting.push((kept, Waiting::Bound(missing)));
            }
            Answer::NoRoom(missing) => {
                admission.no_room.get_or_insert((kept, NoRoom::Blocks(missing)));
            }
            Answer::NoRow => {
                admission.no_room.get_or_insert((kept, NoRoom::Row));
            }
        }
        // Behind those that were not looked at, for a moment.
        queue.push_back(request);
        kept += 1;
    }
    queue.rotate_right(kept);
    admission
}

#[cfg(test)]
mod tests {
    use kv_pool::PoolConfig;

    use super::*;
    use crate::ManagerOptions;

    #[test]
    fn each_request_of_a_call_counts_what_came_back_for_several() {
        let pool = PoolConfig { secondary_blocks: 16, ..PoolConfig::primary_only(16) };
        let options = ManagerOptions::new(4, pool);
        let mut manager = Manager::new(options).unwrap();
        for ids in [0..17, 100..161] {
            let Answer::Admitted(mut sequence) =
                manager.admit_one(&mut Memory::default(), &mut Request::new(ids.collect()))
            else {
                panic!("there is room")
            };
            let open = manager.begin_step().unwrap();
            let step = manager.stage(&open, &mut [&mut sequence]).unwrap().step;
            manager.finish_step(open).unwrap();
            drop(sequence);
            let done = crate::Completion {
                worker: crate::WorkerId(0),
                step,
                outcome: crate::Outcome::Done,
            };
            manager.complete(done).unwrap();
        }
        let request = |own: u32| Request::new((0..16).chain([own, own + 1]).collect());
        let mut queue: VecDeque<_> = [200, 300, 400].map(request).into();
        let admitted = manager.admit(&mut queue, u64::MAX).admitted;
        let counts: Vec<_> = admitted.iter().map(|of| of.1.onboarded_blocks()).collect();
        assert_eq!((counts, manager.stats().onboarded_blocks), (vec![4, 4, 4], 4));
    }

    #[test]
    fn what_goes_between_the_look_and_the_pin_is_claimed() {
        let pool = PoolConfig::primary_only(32);
        let options = ManagerOptions::new(4, pool);
        let mut manager = Manager::new(options).unwrap();
        let mut first = Request::new((0..41).collect());
        let first = manager.admit_one(&mut Memory::default(), &mut first);
        let Answer::Admitted(mut sequence) = first else { panic!("{first:?}") };
        let step = manager.begin_step().unwrap();
        manager.stage(&step, &mut [&mut sequence]).unwrap();
        let mut request = Request::new((0..50).collect());
        assert_eq!(manager.prepare(&mut request), Ok(None));
        let sight = manager.sight(&request);
        assert_eq!(sight.tokens, 40);
        let names = request.findable(&manager.namer).to_vec();
        // As a pin of another thread takes what the tenant may hold.
        manager.forget(&names[5..]);
        let call = manager.call(u64::MAX);
        let (fit, _) = manager.fit(sight, &request, &call).ok().unwrap();
        assert_eq!((fit.hit.tokens, fit.chunk), (20, 30));
        assert_eq!(fit.counts[..], [13 - 5], "blocks for all that is not found");
    }
}
