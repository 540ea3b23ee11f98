//! Sequences that leave for another process, and such that come from one.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kv_pool::{BlockHash, BlockId, Claimed, Tier, guard};
use kv_tier::GroupFormat;
use smallvec::SmallVec;

use crate::group::Group;
use crate::growing::Memory;
use crate::hit::{Extent, Extents, Found, Hit};
use crate::ready::Queue;
use crate::request::{Answer, Request};
use crate::rows::{Home, RowLease};
use crate::{AdmitError, ChangeError, GroupId, Manager, Missing, Sequence, SequenceError};

/// A sequence on its way to another process, whose blocks nobody writes.
///
/// Drop it when the transfer has ended, however it ended: its blocks are released then. A deadline that has
/// passed is no end (rule of tickets): as long as a transport may read the blocks, keep it.
#[must_use = "dropping it releases the blocks that a transfer reads"]
pub struct Export {
    sequence: Sequence,
    formats: Vec<GroupFormat>,
    /// Of each group.
    blocks: Vec<Vec<(usize, BlockId)>>,
}

/// A refused export, with the sequence, which is unharmed.
#[derive(thiserror::Error)]
#[error("the sequence was not exported: {reason}")]
pub struct ExportRefused {
    /// The reason.
    pub reason: ChangeError,
    /// The sequence.
    pub sequence: Sequence,
}

kv_pool::one_line_debug!(ExportRefused);

/// One line, however many blocks it has.
impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

/// One line, however many blocks it has.
impl fmt::Debug for Adoption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adoption")
            .field("sequence", &self.number)
            .field("tokens", &self.tokens)
            .field("blocks", &self.block_count())
            .finish_non_exhaustive()
    }
}

impl Export {
    /// The ids of the tokens; `None` if the engine names its blocks itself.
    #[must_use]
    pub fn ids(&self) -> Option<&[u32]> {
        self.sequence.ids()
    }

    /// What stands behind placeholders among them: the [inputs](crate::Content::inputs) of the request that adopts them.
    #[must_use]
    pub fn inputs(&self) -> &[(u64, Vec<u8>)] {
        self.sequence.inputs()
    }

    /// Tokens that have KV.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.sequence.resolved()
    }

    /// Tokens that have KV of a draft model: what [`Adoption::set_draft_tokens`] is told in the other process.
    #[must_use]
    pub fn draft_tokens(&self) -> u64 {
        self.sequence.draft_end()
    }

    /// What the blocks of each group are: [`Manager::adopt`] takes no others.
    #[must_use]
    pub fn formats(&self) -> &[GroupFormat] {
        &self.formats
    }

    /// The device blocks of a group that a sequence needs to go on behind these tokens, each with its place, in
    /// the order of the places; none for a group that there is not. All workers have completed writing them.
    ///
    /// Of a group that keeps all, these are the blocks of all tokens. Of a window, the sinks and the blocks that
    /// the next token reads. Of a state, at place 0 the one behind these tokens.
    #[must_use]
    pub fn blocks(&self, group: GroupId) -> &[(usize, BlockId)] {
        self.blocks.get(usize::from(group.0)).map_or(&[], Vec::as_slice)
    }
}

/// The blocks of a sequence that a transfer fills.
///
/// Give it back by [`Manager::adopted`] when the transfer has ended. Dropping it says that the transfer has
/// ended and nothing of it is right: the sequence can then be reserved and staged, and computes its tokens itself. While it lives, nobody else is given the blocks, even if the sequence
/// is dropped.
#[must_use = "dropping it says that nothing writes the blocks any more"]
pub struct Adoption {
    number: u64,
    /// The rows of its manager, which identify it.
    home: Home,
    lent: Vec<Lent>,
    tokens: u64,
    draft_tokens: u64,
    /// The sequence has it, too: dropped after the blocks, it says that the transfer has ended.
    arrives: Arc<()>,
}

/// Consecutive blocks of a group that a transfer fills.
struct Lent {
    group: GroupId,
    /// The place of the first.
    first: usize,
    blocks: Arc<Claimed>,
}

impl Adoption {
    /// The device blocks of a group to be filled, each with its place, in the order of the places: those that the
    /// [export](Export::blocks) has at the same places, but for what is cached here. They may be written when the
    /// step that is staged next is complete: its copies and scrubs may have to read or write them before.
    pub fn blocks(&self, group: GroupId) -> impl Iterator<Item = (usize, BlockId)> + '_ {
        let lent = self.lent.iter().filter(move |lent| lent.group == group);
        lent.flat_map(|lent| (lent.first..).zip(lent.blocks.ids()))
    }

    /// Blocks to be filled, of all groups together.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.lent.iter().map(|lent| lent.blocks.len()).sum()
    }

    /// Tokens that have KV when all blocks are filled.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Says of how many tokens the KV of a draft model arrives, as its [export](Export::draft_tokens) has it. Without the
    /// call, of none: the draft model computes all of them again. Blocks behind them hold nothing.
    pub fn set_draft_tokens(&mut self, tokens: u64) {
        self.draft_tokens = tokens;
    }
}

impl Manager {
    /// What the blocks of each group are.
    #[must_use]
    pub fn formats(&self) -> Vec<GroupFormat> {
        self.groups.iter().map(|group| group.format()).collect()
    }

    /// The first tokens of a sequence whose KV all workers have completed writing, at least: what of it may leave before the
    /// rest is computed. 0 for a sequence that is to be told something first, by the next call for it, and while loads or copies
    /// fill its blocks.
    #[must_use]
    pub fn written(&self, sequence: &mut Sequence) -> u64 {
        let is_well = self.check_whole(sequence).is_ok()
            && !sequence.is_suspended()
            && sequence.arrives.is_none()
            && sequence.load.is_none()
            && sequence.copied <= self.steps.completed();
        let has_heard = guard!(
            "manager.what-failed-does-not-leave",
            sequence.failures_seen == self.steps.failures().count(),
            else true
        );
        if !is_well || !has_heard {
            return 0;
        }
        sequence.ends.prune(self.steps.completed());
        // What others compute, it has pinned before it is there.
        let read = sequence.depends.iter().filter(|(step, _)| *step > self.steps.completed());
        let read = read.map(|&(_, token)| token);
        guard!(
            "manager.what-is-computed-does-not-leave",
            read.fold(sequence.ends.written(), u64::min),
            else sequence.ends.resolved()
        )
    }

    /// Takes a sequence out of this manager, for another process to [adopt](Self::adopt).
    ///
    /// # Errors
    /// [`ExportRefused`], with the sequence. [`Writing`](ChangeError::Writing) until all steps that write its KV are
    /// complete: pending blocks do not leave.
    pub fn export(&mut self, mut sequence: Sequence) -> Result<Export, Box<ExportRefused>> {
        if let Err(error) = self.look_at_loaded(&mut sequence) {
            return Err(Box::new(ExportRefused { reason: error.into(), sequence }));
        }
        sequence.ends.prune(self.steps.completed());
        let read = sequence.depends.iter().map(|&(step, _)| step);
        let read = read.filter(|&step| step > self.steps.completed()).max();
        // What came from host memory, or was copied on write, is there when the plan that says so is complete.
        let copied = Some(sequence.copied).filter(|&step| step > self.steps.completed());
        if let Some(step) = sequence.ends.latest().max(read).max(copied) {
            let reason = ChangeError::Writing { step };
            return Err(Box::new(ExportRefused { reason, sequence }));
        }
        self.settle_states(&mut sequence);
        let all_resolved = sequence.ends.resolved();
        let mut all = Vec::with_capacity(self.groups.len());
        for (group, held) in self.groups.iter().zip(sequence.held.iter_mut()) {
            let resolved = if group.is_draft { sequence.draft.end } else { all_resolved };
            held.blocks.truncate(group.blocks_for(resolved));
            let (sinks, first) = group.needed_places(resolved);
            let needed = |(place, _): &(usize, _)| *place < sinks || *place >= first;
            let places = held.blocks.ids_from(0).into_iter().enumerate().filter(needed);
            all.push(places.filter_map(|(place, id)| Some((place, id?))).collect());
        }
        sequence.row = None;
        sequence.frontier = None;
        Ok(Export { sequence, formats: self.formats(), blocks: all })
    }

    /// Admits a request whose first `tokens` tokens have KV in another process, and returns the blocks that
    /// a transfer is to fill: those that are not cached here. `there` says what the blocks of each group are in the
    /// other process, as its [export](Export::formats) has it.
    ///
    /// The sequence can be staged once the transfer has ended and [`adopted`](Self::adopted) was called; if
    /// all is cached here, at once.
    ///
    /// With one group that keeps all, nothing of what is cached here is transferred. With others, that holds for groups that
    /// keep all, as far as it lies on the device and is not being computed, and all of the others is transferred.
    ///
    /// The request does not wait for a prefix; one that is not admitted is as it was. Besides the errors of [`admit`](Self::admit), [`AdmitError::Format`] if the
    /// groups here are others, and, but for one group that keeps all, [`AdmitError::Behind`] if not even the last token of
    /// the request is left to be computed.
    pub fn adopt(
        &mut self,
        request: &mut Request,
        tokens: u64,
        there: &[GroupFormat],
    ) -> (Answer, Option<Adoption>) {
        self.adopt_in(&mut Memory::default(), request, tokens, there)
    }

    pub(crate) fn adopt_in(
        &mut self,
        memory: &mut Memory<'_>,
        request: &mut Request,
        tokens: u64,
        there: &[GroupFormat],
    ) -> (Answer, Option<Adoption>) {
        let here = self.formats();
        let differs = |&at: &usize| here.get(at) != there.get(at);
        if let Some(at) = (0..here.len().max(there.len())).find(differs) {
            let (here, there) = (here.get(at).copied(), there.get(at).copied());
            return (Answer::Refused(AdmitError::Format { group: at, here, there }), None);
        }
        let waits = std::mem::replace(&mut request.waits, false);
        let (answer, adoption) = self.adopt_prompt(memory, request, tokens);
        guard!("manager.refused-adoptions-change-nothing", request.waits = waits);
        self.count(&answer);
        (answer, adoption)
    }

    fn adopt_prompt(
        &mut self,
        memory: &mut Memory<'_>,
        request: &mut Request,
        tokens: u64,
    ) -> (Answer, Option<Adoption>) {
        if let Some(answer) = self.turned_away(request, &Queue::default()) {
            return (answer, None);
        }
        let prompt = request.tokens();
        // A state cannot go back, and a window that ends further ahead begins further ahead.
        let max = if self.groups.alone().is_some() { u64::MAX } else { prompt.saturating_sub(1) };
        if tokens > max {
            return (Answer::Refused(AdmitError::Behind { tokens, max }), None);
        }
        let tokens = tokens.min(prompt);
        if self.finds(memory, request, tokens) {
            return (self.admit_one(memory, request), None);
        }
        let Some(row) = self.home.lease() else { return (Answer::NoRow, None) };
        let cached = tokens.min(request.wanted().1);
        let (mut sequence, firsts) = match self.admit_before(memory, request, row, cached, tokens) {
            Ok(admitted) => admitted,
            Err(missing) => return (Answer::NoRoom(missing), None),
        };
        let adoption = self.lend_all(&mut sequence, tokens, &firsts);
        (Answer::Admitted(sequence), Some(adoption))
    }

    /// Admits a request whose sequence a transfer fills up to `tokens` tokens, with what is cached of the first `cached`
    /// ones, and says the first place that is filled of each group. Nothing is pinned before there is room for all of it.
    fn admit_before(
        &mut self,
        memory: &mut Memory<'_>,
        request: &mut Request,
        row: RowLease,
        cached: u64,
        tokens: u64,
    ) -> Result<(Sequence, SmallVec<[usize; 4]>), Missing> {
        let (names, prompt) = (request.wanted().0, request.tokens());
        let (common, firsts) = self.cached_here(names, cached);
        let extent = |(group, &first): (&Group, &usize)| {
            let gone = group.gone_before(tokens).len();
            Extent { gone, ..group.extent_of(names, first, first..first) }
        };
        let extents: Extents = self.groups.iter().zip(&firsts).map(extent).collect();
        let (of, due) = ((request.tenant, names), self.groups.nothing_due(self.leaves(1)));
        let counts = self.groups.to_claim(&extents, prompt, tokens);
        let price = self.price_in(memory, of, &extents, counts, &due)?;
        let found = |(group, &first): (&Group, &usize)| {
            let head = group.look(names, 0, first, false);
            Found { gone: group.gone_before(tokens), ..Found::head(head) }
        };
        let found = self.groups.iter().zip(&firsts).map(found).collect();
        let hit = Hit { tokens: common, found, ..Hit::default() };
        let claimed = self.pay(request.tenant, &price)?;
        Ok((self.admit_next(request, row, hit, claimed), firsts))
    }

    /// What a sequence that a transfer fills goes on behind, of the first `cached` tokens: so many tokens, and so many first blocks
    /// of each group. Of a group that does not keep all, or a draft model's, none.
    fn cached_here(&self, names: &[BlockHash], cached: u64) -> (u64, SmallVec<[usize; 4]>) {
        let mut firsts = self.groups.cached_first(names, cached);
        let alone = self.groups.alone().filter(|group| !group.is_draft);
        let common = alone.map_or(0, |group| group.tokens_of(firsts[0]));
        for (group, first) in self.groups.iter().zip(&mut firsts) {
            // A step that fails takes back what it has computed, and nothing that arrives goes on behind that.
            let is_ready = |place: &usize| {
                let at = group.pool.locate(group.name_at(names, *place));
                at.is_some_and(|(record, at)| {
                    at.tier == Tier::Primary
                        && group.pending(record, self.steps.completed()).is_none()
                })
            };
            let (from, end) = (group.whole_blocks(common), if group.is_draft { 0 } else { *first });
            *first = from + (from..end).take_while(is_ready).count();
        }
        (common, firsts)
    }

    /// Lends the blocks of a sequence that a transfer fills up to `tokens` tokens: of each group those from the
    /// given place on that are needed then.
    fn lend_all(&self, sequence: &mut Sequence, tokens: u64, firsts: &[usize]) -> Adoption {
        let mut lent = Vec::new();
        for ((group, held), &from) in self.groups.iter().zip(sequence.held.iter_mut()).zip(firsts) {
            let (sinks, first) = group.needed_places(tokens);
            for places in [from..sinks, first.max(from)..group.blocks_for(tokens)] {
                if !places.is_empty() {
                    let blocks = held.blocks.lend(places.start, places.end);
                    lent.push(Lent { group: group.id, first: places.start, blocks });
                }
            }
        }
        sequence.ends.next = 0;
        sequence.frontier = None;
        let arrives = Arc::default();
        sequence.arrives = Some(Arc::clone(&arrives));
        let (number, home) = (sequence.number, self.home.clone());
        Adoption { number, home, lent, tokens, draft_tokens: 0, arrives }
    }

    /// Checks that no transfer fills the blocks of a sequence. Of one whose [`Adoption`] was dropped, nothing is right.
    pub(crate) fn look_at_arriving(
        &mut self,
        sequence: &mut Sequence,
    ) -> Result<(), SequenceError> {
        let Some(arrives) = &mut sequence.arrives else { return Ok(()) };
        // Its other holder is gone for good, and the blocks that it had lent with it.
        if guard!("manager.a-dropped-adoption-ends", Arc::get_mut(arrives).is_none(), else true) {
            return Err(SequenceError::Arriving);
        }
        sequence.end_transfer();
        if self.groups.alone().is_none() {
            self.cut(sequence, 0);
        }
        Ok(())
    }

    /// Takes in the end of a transfer: the first `right` of its blocks, counted through the groups in their order,
    /// hold what they should. The sequence computes its tokens from there on, and these blocks get their names.
    /// Returns where its KV ends.
    ///
    /// Where a group does not keep all, a part is of no use: unless all blocks are right, the KV ends at 0. A
    /// request that is admitted anew finds what is cached.
    ///
    /// # Errors
    /// [`SequenceError`], and [`SequenceError::Foreign`] for the transfer of another sequence. The transfer
    /// has ended all the same.
    pub fn adopted(
        &mut self,
        sequence: &mut Sequence,
        adoption: Adoption,
        right: usize,
    ) -> Result<u64, SequenceError> {
        let count = adoption.block_count();
        let right = right.min(count);
        let Adoption { number, home, lent, tokens, draft_tokens, arrives } = adoption;
        let first = lent.first().map_or(0, |lent| lent.first);
        drop((lent, arrives));
        self.check_whole(sequence)?;
        let is_of = number == sequence.number && self.home.is(&home);
        if guard!("manager.adoptions-are-of-their-manager", !is_of, else number != sequence.number)
        {
            return Err(SequenceError::Foreign);
        }
        sequence.end_transfer();
        self.look_at(sequence)?;
        let filled = match self.groups.alone() {
            Some(group) => group.tokens_of(first + right).min(tokens),
            None if guard!("manager.a-part-is-of-no-use", right == count, else true) => tokens,
            None => return Ok(self.cut(sequence, 0)),
        };
        let before = sequence.ends.resolved();
        if guard!("manager.arrivals-follow-their-prefix", before < sequence.cached_tokens(), else false)
        {
            // A failed step has spoilt what comes before, and the sequence was told.
            return Ok(before);
        }
        // The last token is computed in any case: its output is wanted.
        let last = sequence.known.tokens().saturating_sub(1);
        sequence.ends.skip(filled.min(last).saturating_sub(before));
        let (end, marks) = (sequence.ends.resolved(), sequence.marks());
        sequence.draft.end = draft_tokens.min(end);
        for (group, held) in self.groups.iter().zip(sequence.held.iter_mut()) {
            // A state that arrives where a checkpoint is due is one.
            held.turn = group.turn(end.saturating_sub(1), marks);
        }
        let mut names = Vec::new();
        self.name_new(sequence, self.steps.completed(), &mut names);
        // The transfer was waited for, so it is complete.
        self.lower.want_stored(&names);
        Ok(sequence.ends.resolved())
    }
}

impl Group {
    /// Places of a window without a block before a transfer fills it up to `tokens` tokens.
    fn gone_before(&self, tokens: u64) -> Range<usize> {
        let (sinks, first) = self.needed_places(tokens);
        sinks..first
    }
}
