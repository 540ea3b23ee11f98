//! Admission: finds the cached prefixes of requests, and claims the blocks of the rest of their prompts.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::sync::Arc;

use crate::admit_groups::Gotten;
use crate::blocks::Blocks;
use crate::draft::DraftEnd;
use crate::ends::Ends;
use crate::group::{Held, Marks};
use crate::hit::Found;
use crate::holding::Holding;
use crate::lower::LoadWait;
use crate::names::Known;
use crate::pace::Pace;
use crate::ready::{Queue, Ready};
use crate::rows::RowLease;
use crate::{AdmitError, Content, GroupId, Manager, Missing, Reuse, Sequence, Tokens};
use kv_pool::{
    Admission, Admit, Admitted, BlockHash, BlockId, Budget, ClaimError, Claimed, HandleError,
    Pinned, Tier, guard,
    moves::Onboarded,
    retention::RetentionPolicy,
    tenants::{TenantError, TenantId},
};
use kv_tier::TicketId;

/// A request to be admitted. It keeps the names of its blocks, so that asking again is cheap.
///
/// # Examples
///
/// ```
/// use kv_manager::Request;
///
/// let mut request = Request::new(vec![1, 2, 3]);
/// request.tokens_max = 128;
/// assert_eq!(request.tokens(), 3);
/// ```
#[derive(Clone, Debug)]
pub struct Request {
    pub(crate) tokens: Wanted,
    /// What the content depends on beside token ids.
    pub content: Content,
    /// The tenant whose block counts include the sequence.
    pub tenant: TenantId,
    /// The priorities of the sequence's blocks once they are named, by token. Blocks found in the cache
    /// keep theirs.
    pub retention: Option<Arc<RetentionPolicy>>,
    /// What is known of the sequence's future.
    pub reuse: Reuse,
    /// Tokens that the sequence may come to have, if that is known: room for their ids is reserved.
    pub tokens_max: u64,
    /// The longest prefix that may be taken from the cache, in tokens; 0 looks nothing up.
    pub hit_max: u64,
    /// Whether it waits while another sequence computes the next block of its prefix, or while that is loaded,
    /// instead of computing the block as well.
    pub waits: bool,
    /// Whether it is admitted while loads bring a part of its prefix, once the worker has begun them, instead of when
    /// they have ended. The engine waits for each layer before it launches that layer. Until the loads have ended, ids
    /// that come out of its steps are not taken ([`Loading`](crate::SequenceError::Loading)), and if one is wrong or
    /// late, [`commit`](Manager::commit) answers [`Redo`](crate::Committed::Redo). Of no effect without
    /// [`waits`](Self::waits).
    pub by_layers: bool,
    /// The load that it waits for, or has waited for.
    pub(crate) load: Option<LoadWait>,
}

/// The tokens of a request, in the form that the latest call has left.
#[derive(Clone, Debug)]
pub(crate) enum Wanted {
    Ids(Vec<u32>),
    Named(u64, Vec<BlockHash>),
    /// With names, of a generation.
    Known(Known),
    /// A sequence has them.
    Taken,
}

impl Request {
    /// A prompt of these token ids, without a tenant, that uses whatever is cached and waits for prefixes
    /// that are being computed.
    #[must_use]
    pub fn new(ids: Vec<u32>) -> Self {
        Self::of(Wanted::Ids(ids))
    }

    /// The same for an engine that names its blocks itself: `tokens` tokens, and the names of all blocks
    /// that they fill.
    #[must_use]
    pub fn named(tokens: u64, names: Vec<BlockHash>) -> Self {
        Self::of(Wanted::Named(tokens, names))
    }

    fn of(tokens: Wanted) -> Self {
        Self {
            tokens,
            content: Content::default(),
            tenant: TenantId::NOBODY,
            retention: None,
            reuse: Reuse::default(),
            tokens_max: 0,
            hit_max: u64::MAX,
            waits: true,
            by_layers: false,
            load: None,
        }
    }

    /// Tokens of the prompt; 0 once it is admitted.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        match &self.tokens {
            Wanted::Ids(ids) => ids.len() as u64,
            Wanted::Named(tokens, _) => *tokens,
            Wanted::Known(known) => known.tokens(),
            Wanted::Taken => 0,
        }
    }

    pub(crate) fn marks(&self) -> Marks {
        Marks { prompt: self.tokens(), shared: self.content.shared_tokens }
    }

    /// Whether it is admitted with the loads that are open.
    pub(crate) fn enters(&self) -> bool {
        self.load.as_ref().is_some_and(|load| load.enters)
    }
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Waiting {
    /// Another sequence computes the next block of the same prefix, behind so many tokens.
    Prefix {
        /// Tokens of the prefix that are computed or being computed.
        tokens: u64,
    },
    /// A ticket brings what follows the cached part of its prefix from a tier below host memory.
    Load {
        /// The ticket.
        ticket: TicketId,
        /// Blocks of the ticket.
        blocks: u64,
    },
}

/// What came of a request.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "an answer is taken apart at once")]
pub enum Answer {
    /// It is a sequence now, with blocks for its whole prompt, or for the first chunk of it in groups with a
    /// window, and that chunk reserved.
    Admitted(Sequence),
    /// Nothing has changed. Ask again in a later step.
    Waiting(Waiting),
    /// So much is missing. No request behind it was looked at, not even of a tenant for whom it is
    /// [kept](kv_pool::tenants::TenantError::KeptForOthers): requests are admitted in their order, and an engine whose
    /// tenants are not to wait for each other asks for each in a call of its own.
    ///
    /// If it is the bound of the request's tenant
    /// ([`TenantError::HeldMax`](kv_pool::tenants::TenantError::HeldMax)), those of other tenants behind it were, and
    /// all of the same tenant have the same answer.
    NoRoom(Missing),
    /// All rows of the block table are in use. No request behind it was looked at.
    NoRow,
    /// It can never be admitted.
    Refused(AdmitError),
}

/// Asks the owner of the memory for blocks without content; how many blocks have memory then.
type Grow<'a, E> = &'a mut dyn FnMut(usize) -> Result<u64, E>;

/// Blocks of a sequence that is being admitted.
#[derive(Debug)]
enum Piece {
    Shared(Pinned),
    Own(Claimed),
    /// Blocks in host memory, and where they may go.
    Far(Pinned, Claimed),
    /// A block in host memory that an earlier sequence of the batch has found too, and where it may go.
    Again(BlockId, Claimed),
}

/// Blocks that a batch found in host memory.
#[derive(Debug, Default)]
struct Fars {
    /// Found by now, in a batch of several.
    seen: HashSet<BlockId>,
    /// Blocks found more than once, with a pin of each once its place is decided.
    shared: HashMap<BlockId, Pinned>,
}

impl Fars {
    /// Splits the blocks of an admission by tier.
    fn pieces(&mut self, admitted: Admitted, alone: bool) -> Vec<Piece> {
        let Admitted { mut prefix, mut claimed, .. } = admitted;
        let mut pieces = Vec::with_capacity(2);
        while let Some(tier) = first_tier(&prefix) {
            let alike = prefix.locations().take_while(|at| at.tier == tier).count();
            let near = tier == Tier::Primary;
            let again = |fars: &Self, id| !alone && fars.seen.contains(&id);
            let count = match prefix.ids().next() {
                Some(first) if !near && again(self, first) => 1,
                _ if near => alike,
                _ => prefix.ids().take(alike).take_while(|&id| !again(self, id)).count(),
            };
            let rest = prefix.split_off(count);
            let part = std::mem::replace(&mut prefix, rest);
            if near {
                pieces.push(Piece::Shared(part));
                continue;
            }
            // The pool has claimed a block for each of these.
            let rest = claimed.split_off(count);
            let target = std::mem::replace(&mut claimed, rest);
            let first = part.ids().next();
            match first {
                Some(id) if again(self, id) => {
                    // A second pin would keep the block in host memory.
                    self.shared.entry(id).or_default();
                    pieces.push(Piece::Again(id, target));
                }
                _ => {
                    self.seen.extend(part.ids().filter(|_| !alone));
                    pieces.push(Piece::Far(part, target));
                }
            }
        }
        pieces.push(Piece::Own(claimed));
        pieces
    }
}

impl Manager {
    /// Admits as many of the requests, in order, as rows, memory and a step's budget of tokens allow, and
    /// answers for each. Requests behind the first for which there is no room, or behind the budget, get no
    /// answer, but for what a [tenant's bound](Answer::NoRoom) leaves to other tenants. A request that is not
    /// admitted takes nothing and changes nothing that is cached, and no answer depends on the requests behind. What gets no
    /// answer is not looked at, but for as many requests as loads may be open, whose loads begin.
    ///
    /// The prefix is looked up for the whole prompt, but for its last token, whose output is wanted, and is as
    /// long as all groups can serve. Room is judged by the whole prompt, which gets its blocks at once, and in
    /// groups with a window by its first chunk, which is as long as there is room for; beside them, the
    /// [watermark](crate::ManagerOptions::watermark_blocks) is left for running sequences. Prefixes are
    /// pinned before any block is claimed, so no request evicts what another has found; in several groups, only as far as
    /// what is found leaves room for the requests before it, whatever their tenants may hold. Prefix blocks in
    /// host memory are brought back, once for all requests that share them.
    ///
    /// An admitted sequence has the first chunk of its prompt [reserved](Sequence::next): what is left of
    /// the budget, at most, and up to the first checkpoint of a recurrent state.
    pub fn admit(&mut self, requests: &mut [Request], budget: u64) -> Vec<Answer> {
        match self.admit_all::<Infallible>(requests, budget, None) {
            Ok(answers) => self.counted(answers),
        }
    }

    /// The same for an owner of memory that maps it when it is needed: before cached content is evicted,
    /// `grow` is asked for so many device blocks without content, and returns how many blocks have
    /// memory then, as for [`set_budget`](Self::set_budget).
    ///
    /// # Errors
    /// What `grow` returns. Nothing was admitted then.
    pub fn admit_growing<E>(
        &mut self,
        requests: &mut [Request],
        budget: u64,
        mut grow: impl FnMut(usize) -> Result<u64, E>,
    ) -> Result<Vec<Answer>, E> {
        let answers = self.admit_all(requests, budget, Some(&mut grow))?;
        Ok(self.counted(answers))
    }

    fn admit_all<E>(
        &mut self,
        requests: &mut [Request],
        budget: u64,
        mut grow: Option<Grow<'_, E>>,
    ) -> Result<Vec<Answer>, E> {
        if !self.keeps_all {
            return Ok(self.admit_to_groups(requests, budget));
        }
        let (mut queue, mut answers) = (Queue::default(), Vec::new());
        let (mut left, leave) = (budget, self.watermark(0));
        loop {
            let grow = grow.as_mut().map(|grow| &mut **grow as Grow<'_, E>);
            let behind = &mut requests[answers.len()..];
            let more = match self.admit_to_first(behind, (&mut left, leave), &mut queue, grow) {
                Ok(more) => more,
                // What was admitted stays so. Those behind are asked again.
                Err(_) if !answers.is_empty() => return Ok(answers),
                Err(error) => return Err(error),
            };
            // The pool knows what requests of a tenant need together. Whom that does not concern is asked again.
            let goes_on = match more.last() {
                Some(Answer::NoRoom(missing)) => {
                    queue.passes(requests[answers.len() + more.len() - 1].tenant, missing)
                }
                _ => false,
            };
            // Nearly always all, in one pass: no list is made anew.
            if answers.is_empty() {
                answers = more;
            } else {
                answers.extend(more);
            }
            if !goes_on || answers.len() == requests.len() {
                return Ok(answers);
            }
        }
    }

    /// Admits requests up to the first for which the pool has no room, where there is one group, which keeps all.
    fn admit_to_first<E>(
        &mut self,
        requests: &mut [Request],
        (left, leave): (&mut u64, usize),
        queue: &mut Queue,
        grow: Option<Grow<'_, E>>,
    ) -> Result<Vec<Answer>, E> {
        let blocks = left.div_ceil(u64::from(self.options.block_tokens));
        let to_write_max = usize::try_from(blocks).unwrap_or(usize::MAX);
        let budget_blocks = Budget { to_write_max, leave };
        let room = match grow {
            Some(_) => usize::try_from(self.groups[0].capacity).unwrap_or(usize::MAX),
            None => self.groups[0].pool.claimable().saturating_sub(budget_blocks.leave),
        };
        let Ready { mut answers, places, rows } = self.ready(requests, queue, to_write_max, room);
        let batch: Vec<_> = places.iter().map(|&at| self.asked(&requests[at])).collect();
        let mut admission = self.admit_to_pool(&batch, budget_blocks, grow)?;
        for (admitted, &at) in admission.admitted.iter_mut().zip(&places) {
            self.plan_claimed(0, requests[at].tenant, &mut admitted.claimed);
        }
        let count = admission.admitted.len();
        if let Some(&next) = places.get(count) {
            // What is behind the first that was not admitted has no answer.
            answers.truncate(next);
            answers.extend(
                admission
                    .refused
                    .map(|reason| Answer::NoRoom(Missing { group: GroupId::default(), reason })),
            );
        }
        let (mut kept, mut entered) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for ((mut admitted, &at), row) in admission.admitted.into_iter().zip(&places).zip(rows) {
            let found = Found::head(std::mem::take(&mut admitted.prefix));
            let named = found.end();
            let group = &self.groups[0];
            // The pool has claimed a block for each that comes back, and those behind.
            let far = named + admitted.claimed.len() - group.blocks_for(requests[at].tokens());
            let far_tokens = group.tokens_of(far);
            let mut gotten = Gotten { far, far_tokens, ..Gotten::default() };
            self.note_pending(0, &found, 0, &mut gotten.depends);
            admitted.prefix = found.head;
            if requests[at].enters() {
                gotten.load = self.open_load(&requests[at], named);
            }
            gotten.tokens = self.groups[0].tokens_of(named + gotten.load.blocks());
            self.end_wait(&mut requests[at]);
            kept.push(admitted);
            entered.push((at, row, named, gotten));
        }
        let held = match self.hold(0, kept) {
            Ok(held) => held,
            // The pool has found these blocks itself.
            Err(error) => unreachable!("the pool refused its own blocks: {error}"),
        };
        for ((at, row, named, mut gotten), blocks) in entered.into_iter().zip(held) {
            gotten.held.push(Held { named, blocks, ..Held::default() });
            let mut sequence = self.sequence(&mut requests[at], row, gotten);
            let chunk = (sequence.known.tokens() - sequence.ends.resolved()).min(*left);
            sequence.ends.next = u32::try_from(chunk).unwrap_or(u32::MAX);
            *left -= u64::from(sequence.ends.next);
            answers[at] = Answer::Admitted(sequence);
        }
        Ok(answers)
    }

    /// Has the pool admit as many of a batch as fit. Where blocks without content do not suffice, memory
    /// is asked for before any content is evicted.
    fn admit_to_pool<E>(
        &mut self,
        batch: &[Admit<'_>],
        budget: Budget,
        grow: Option<Grow<'_, E>>,
    ) -> Result<Admission, E> {
        let pool = &self.groups[0].pool;
        let Some(grow) = grow else { return Ok(pool.admit_fitting(batch, budget)) };
        match pool.admit_to_empty(batch, budget) {
            Ok(admitted) => return Ok(Admission { admitted, refused: None }),
            Err(ClaimError::Exhausted { requested, .. }) => {
                let ready = grow(requested.saturating_add(budget.leave))?;
                self.note_ready(ready);
            }
            Err(_) => {}
        }
        let mut admission = self.groups[0].pool.admit_fitting(batch, budget);
        // Blocks that are kept for other tenants need memory beside.
        let Some(ClaimError::Tenant(error)) = &admission.refused else { return Ok(admission) };
        let &TenantError::KeptForOthers { requested, unheld, kept, .. } = error else {
            return Ok(admission);
        };
        let missing = requested.saturating_add(kept).saturating_sub(unheld);
        let missing = usize::try_from(missing).unwrap_or(usize::MAX);
        let ready = grow(self.groups[0].pool.empty().saturating_add(missing))?;
        self.note_ready(ready);
        let admitted = admission.admitted.len();
        let written = |(admit, own): (&Admit<'_>, &Admitted)| admit.blocks - own.prefix.len();
        let written: usize = batch.iter().zip(&admission.admitted).map(written).sum();
        let to_write_max = budget.to_write_max.saturating_sub(written);
        let pool = &self.groups[0].pool;
        let more = pool.admit_fitting(&batch[admitted..], Budget { to_write_max, ..budget });
        admission.admitted.extend(more.admitted);
        admission.refused = more.refused;
        Ok(admission)
    }

    fn note_ready(&mut self, blocks: u64) {
        let blocks = blocks.min(self.options.pool.primary_blocks);
        let noted = self.set_budget(GroupId::default(), Tier::Primary, blocks);
        debug_assert!(noted.is_ok(), "{noted:?}");
    }

    /// Blocks that admission leaves for sequences that are running; `leased` rows are not theirs.
    pub(crate) fn watermark(&self, leased: usize) -> usize {
        if self.leaves(leased) { self.options.watermark_blocks as usize } else { 0 }
    }

    /// What is known of a request, unless the request has it and it is up to date.
    pub(crate) fn known(&self, request: &Request) -> Result<Option<Known>, AdmitError> {
        let (own, mut content) = (self.tenant_salt(request.tenant)?, request.content.clone());
        let salted_by_tenant = content.salt.is_empty();
        if salted_by_tenant {
            guard!("manager.tenants-have-salts", content.salt = own.to_vec());
        }
        let tokens = match &request.tokens {
            Wanted::Ids(ids) => Tokens::Ids(ids),
            Wanted::Named(count, names) => Tokens::Named { count: *count, names },
            Wanted::Known(known)
                if guard!(
                    "manager.renames-what-has-changed",
                    known.is_of(&self.namer)
                        && known.generation() == self.namer.generation
                        && known.has(&content, salted_by_tenant),
                    else true
                ) =>
            {
                return Ok(None);
            }
            Wanted::Known(known) => {
                return Ok(Some(known.renamed(&self.namer, content, salted_by_tenant)?));
            }
            Wanted::Taken => return Ok(None),
        };
        Ok(Some(Known::new(&self.namer, tokens, content, salted_by_tenant)?))
    }

    /// Names of a request that may be found in the cache.
    fn findable(&self, request: &Request, known: &Known) -> usize {
        let tokens = request.hit_max.min(known.tokens().saturating_sub(1));
        (tokens / u64::from(self.namer.block_tokens)) as usize
    }

    /// The names of a request that may be found in the cache.
    pub(crate) fn names_of<'a>(&self, request: &'a Request) -> &'a [BlockHash] {
        match &request.tokens {
            Wanted::Known(known) => &known.names()[..self.findable(request, known)],
            _ => &[],
        }
    }

    /// The names of a request, and how many of its tokens may be found in the cache.
    pub(crate) fn wanted<'a>(&self, request: &'a Request) -> (&'a [BlockHash], u64) {
        let Wanted::Known(known) = &request.tokens else { return (&[], 0) };
        (known.names(), request.hit_max.min(known.tokens().saturating_sub(1)))
    }

    /// The position and the name of the next block behind `tokens` tokens of a request that others could find.
    pub(crate) fn next_block(&self, request: &Request, tokens: u64) -> Option<(usize, BlockHash)> {
        let at = (tokens / u64::from(self.namer.block_tokens)) as usize;
        self.names_of(request).get(at).map(|&name| (at, name))
    }

    fn asked<'a>(&self, request: &'a Request) -> Admit<'a> {
        let Wanted::Known(known) = &request.tokens else { return Admit::default() };
        Admit {
            prefix: self.names_of(request),
            partial: &[],
            blocks: self.groups[0].blocks_for(known.tokens()),
            tenant: request.tenant,
        }
    }

    /// The sequence of an admitted request, in its row.
    pub(crate) fn sequence(
        &mut self,
        request: &mut Request,
        row: RowLease,
        gotten: Gotten,
    ) -> Sequence {
        let Wanted::Known(mut known) = std::mem::replace(&mut request.tokens, Wanted::Taken) else {
            unreachable!("an admitted request has names")
        };
        let group = &self.groups[0];
        let most = group.tokens_of(group.table.width());
        known.reserve(&self.namer, request.tokens_max.min(most));
        let Gotten { held, far, far_tokens, depends, tokens: cached, load } = gotten;
        self.stats.prompt_tokens += known.tokens();
        self.stats.cached_tokens += cached;
        self.next_number += 1;
        let next = (cached / u64::from(self.namer.block_tokens)) as usize;
        let frontier = known.names().get(next).map(|&name| self.frontiers.enter((next, name)));
        let mut sequence = Sequence {
            number: self.next_number - 1,
            era: self.eras.present(),
            home: self.home.clone(),
            row: Some(row),
            held: Holding::new(held),
            prompt_tokens: known.tokens(),
            shared_tokens: request.content.shared_tokens,
            hit_max: request.hit_max,
            known,
            pace: Pace::NONE,
            ends: Ends::cached(cached),
            draft: DraftEnd::cached(cached),
            cached_tokens: cached,
            onboarded_blocks: far,
            host_tokens: far_tokens,
            depends,
            copied: self.copied_by(),
            failures_seen: self.failures.count(),
            frontier,
            load: None,
            arrives: None,
            suspended: false,
            tenant: request.tenant,
            retention: request.retention.clone(),
            reuse: request.reuse,
        };
        if load.blocks() > 0 {
            self.begin_layers(&mut sequence, load);
        }
        self.write_rows(&sequence);
        sequence
    }

    /// Brings back what lies in host memory, and returns the blocks of each sequence.
    pub(crate) fn hold(
        &mut self,
        group: usize,
        admitted: Vec<Admitted>,
    ) -> Result<Vec<Blocks>, HandleError> {
        let mut fars = Fars::default();
        let alone = admitted.len() == 1;
        let all: Vec<_> =
            admitted.into_iter().map(|admitted| fars.pieces(admitted, alone)).collect();
        let hold = |pieces: Vec<Piece>| {
            let mut blocks = Blocks::default();
            for piece in pieces {
                self.hold_piece(group, &mut blocks, piece, &mut fars)?;
            }
            Ok(blocks)
        };
        all.into_iter().map(hold).collect()
    }

    fn hold_piece(
        &mut self,
        group: usize,
        blocks: &mut Blocks,
        piece: Piece,
        fars: &mut Fars,
    ) -> Result<(), HandleError> {
        match piece {
            Piece::Shared(pinned) => blocks.push_shared(pinned),
            Piece::Own(claimed) => blocks.push_own(claimed),
            Piece::Far(pinned, target) => {
                let from: Vec<_> =
                    if fars.shared.is_empty() { Vec::new() } else { pinned.ids().collect() };
                let onboarded = self.onboard(group, pinned, target)?;
                for (index, id) in from.into_iter().enumerate() {
                    if let Some(shared) = fars.shared.get_mut(&id) {
                        *shared = onboarded.pinned.pin(index).unwrap_or_default();
                    }
                }
                hold_onboarded(blocks, onboarded);
            }
            Piece::Again(id, target) => match fars.shared.get(&id).cloned().unwrap_or_default() {
                // The block that was claimed for it is given back.
                there if on_device(&there) => blocks.push_shared(there),
                there => hold_onboarded(blocks, self.onboard(group, there, target)?),
            },
        }
        Ok(())
    }

    /// Plans the copies of content in host memory to as many claimed blocks.
    fn onboard(
        &mut self,
        group: usize,
        pinned: Pinned,
        target: Claimed,
    ) -> Result<Onboarded, HandleError> {
        let group = &self.groups[group];
        let onboard = group.pool.begin_onboard(pinned, target).map_err(|refused| refused.reason)?;
        for (from, to) in onboard.pairs() {
            group.plan_copy(&mut self.plan, from, to, group.block_tokens);
            self.stats.onboarded_blocks += 1;
        }
        // Every later use of either block comes later in the plans.
        Ok(onboard.commit())
    }
}

fn first_tier(pinned: &Pinned) -> Option<Tier> {
    pinned.locations().next().map(|first| first.tier)
}

/// Whether work that reads device blocks can read all of these.
fn on_device(pinned: &Pinned) -> bool {
    !pinned.is_empty() && pinned.locations().all(|at| at.tier == Tier::Primary)
}

/// Adds the blocks that were brought back, in their order: moved blocks are shared, the others are copies.
fn hold_onboarded(blocks: &mut Blocks, onboarded: Onboarded) {
    let Onboarded { mut pinned, mut copies } = onboarded;
    while let Some(tier) = first_tier(&pinned) {
        let alike = pinned.locations().take_while(|at| at.tier == tier).count();
        let rest = pinned.split_off(alike);
        let part = std::mem::replace(&mut pinned, rest);
        if tier == Tier::Primary {
            blocks.push_shared(part);
        } else {
            let rest = copies.split_off(alike);
            blocks.push_own(std::mem::replace(&mut copies, rest));
        }
    }
}
