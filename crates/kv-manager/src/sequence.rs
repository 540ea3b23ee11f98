//! A sequence: one request's blocks, how far they are filled, and its row of the block table.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kv_pool::{
    BlockHash, BlockId, guard,
    retention::{Retention, RetentionPolicy},
    tenants::TenantId,
};
use smallvec::SmallVec;

use crate::draft::DraftEnd;
use crate::ends::Ends;
use crate::events::Noting;
use crate::group::{Marks, names_of};
use crate::holding::Holding;
use crate::lower::OpenLoad;
use crate::names::{FrontierLease, Known};
use crate::pace::Pace;
use crate::rows::{Home, RowLease};
use crate::steps::Era;
use crate::{GroupId, Request, Reuse, Row};

/// Steps that content depends on, each with the first token that is wrong if it fails.
pub(crate) type Depends = SmallVec<[(u64, u64); 2]>;

/// Notes that content is wrong from a token on if a step fails.
pub(crate) fn note_depends(depends: &mut Depends, step: u64, token: u64) {
    match depends.iter_mut().find(|(on, _)| *on == step) {
        Some((_, first)) => *first = token.min(*first),
        None => depends.push((step, token)),
    }
}

/// A request that has been admitted, from its first token on.
///
/// Dropping it cancels it and releases its blocks, whatever step it is in. The devices may still be using
/// them, so they are handed out again when the open step, or else the last one, is complete. Full blocks with
/// names stay cached.
///
/// A decode step touches the first three cache lines only, because a scheduler's caches are cold when it comes back to
/// its sequences. One says where the KV ends, where the tail block does, and the row: it is all that `reserve` reads.
/// The next one has the steps in flight, and the third one where the ids are.
#[must_use = "dropping a sequence releases its blocks"]
#[repr(C, align(64))]
pub struct Sequence {
    /// What the calls of a decode step may take for granted.
    pub(crate) pace: Pace,
    pub(crate) ends: Ends,
    pub(crate) known: Known,
    /// The rows of its manager, which identify it.
    pub(crate) home: Home,
    /// `None` while it is off the device.
    pub(crate) row: Option<RowLease>,
    /// Failed steps that this sequence has heard of.
    pub(crate) failures_seen: usize,
    pub(crate) suspended: bool,
    /// A transfer fills its blocks, as long as its [adoption](crate::Adoption) has this, too.
    pub(crate) arrives: Option<Arc<()>>,
    /// What loads bring of its prefix, until it has heard of their end.
    pub(crate) load: Option<Box<OpenLoad>>,
    /// What it has of each group.
    pub(crate) held: Holding,
    pub(crate) frontier: Option<FrontierLease>,
    /// How far the KV of a draft model reaches.
    pub(crate) draft: DraftEnd,
    /// Tokens whose blocks of the first group were offered to the prefix index: what came of it is counted once.
    pub(crate) offered: u64,
    /// Steps that were not complete when this sequence pinned blocks that they name.
    pub(crate) depends: Depends,
    /// Counts the sequences of a manager.
    pub(crate) number: u64,
    /// When it was admitted, or the sequence that it is a twin of.
    pub(crate) era: Era,
    pub(crate) origin: Origin,
    pub(crate) onboarded_blocks: usize,
    /// Tokens found that lay in host memory.
    pub(crate) host_tokens: u64,
    /// The step whose plan makes the last copy to its blocks, or an earlier one.
    pub(crate) copied: u64,
    pub(crate) reuse: Reuse,
}

/// What a sequence was asked for with, and what was found for it. A twin has the same.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    marks: Marks,
    /// The longest prefix that may come from the cache, in tokens.
    hit_max: u64,
    cached_tokens: u64,
    tenant: TenantId,
    retention: Option<Arc<RetentionPolicy>>,
}

impl Origin {
    /// That of a request of which so many tokens were found.
    pub(crate) fn of(request: &Request, marks: Marks, cached_tokens: u64) -> Self {
        let &Request { tenant, hit_max, ref retention, .. } = request;
        Self { marks, hit_max, cached_tokens, tenant, retention: retention.clone() }
    }

    pub(crate) fn hit_max(&self) -> u64 {
        self.hit_max
    }

    /// The retention of the block that begins with token `first`, once it is cached, and the number of blocks from there on
    /// that are known to have the same.
    pub(crate) fn worth(&self, first: u64) -> (Retention, usize) {
        let Some(policy) = &self.retention else { return (Retention::default(), usize::MAX) };
        let is_prompt = first < self.marks.prompt;
        let retention =
            if is_prompt { policy.at(first).unwrap_or_default() } else { policy.decode() };
        (retention, 1)
    }
}

/// The first cache line ends where the steps in flight begin, and the third one behind the place of the ids.
const _: () = {
    assert!(align_of::<Sequence>() == 64 && std::mem::offset_of!(Sequence, ends) == 32);
    assert!(std::mem::offset_of!(Sequence, known) + Known::HEAD_BYTES == 192);
};

impl Sequence {
    pub(crate) fn marks(&self) -> Marks {
        self.origin.marks
    }

    /// The [generation](crate::Manager::generation) of its names: after another reset, it names nothing.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.known.generation()
    }

    /// Tokens whose ids are known.
    #[must_use]
    pub fn known(&self) -> u64 {
        self.known.tokens()
    }

    /// The ids of the known tokens; `None` if the engine names its blocks itself.
    #[must_use]
    pub fn ids(&self) -> Option<&[u32]> {
        self.known.ids()
    }

    /// What stands behind placeholders among its tokens, with the positions of their first ones: what its request has said,
    /// and what came [with ids](crate::Tokens::With) since. A request for the same content gives it as
    /// [`Content::inputs`](crate::Content::inputs).
    #[must_use]
    pub fn inputs(&self) -> &[(u64, Vec<u8>)] {
        self.known.content().map_or(&[], |content| &content.inputs)
    }

    /// A number for all that the KV of the first `tokens` tokens depends on beside the model: their ids, or the names of the
    /// blocks that they fill, the adapter, and what stands behind placeholders. The same at every manager, with whatever salt.
    #[must_use]
    pub fn fingerprint(&self, tokens: u64) -> u128 {
        self.known.fingerprint(tokens)
    }

    /// Tokens that have KV, or get it for certain from a step that is staged.
    #[must_use]
    pub fn resolved(&self) -> u64 {
        self.ends.resolved()
    }

    /// Where the KV ends if every draft of the open steps is accepted.
    #[must_use]
    pub fn upper(&self) -> u64 {
        self.ends.upper()
    }

    /// Tokens that have KV of a [draft model](crate::GroupOptions::draft_model), or get it for certain from a step that is
    /// staged; at most [`resolved`](Self::resolved).
    #[must_use]
    pub fn draft_end(&self) -> u64 {
        self.draft.end
    }

    /// The first staged step whose ids are to be [committed](crate::Manager::commit).
    #[must_use]
    pub fn awaits(&self) -> Option<u64> {
        self.ends.awaits()
    }

    /// Tokens that are known and that no staged step computes: what is left of a prompt, or the token that
    /// was sampled last.
    #[must_use]
    pub fn to_compute(&self) -> u64 {
        self.known().saturating_sub(self.upper())
    }

    /// Tokens that the next [`stage`](crate::Manager::stage) computes.
    #[must_use]
    #[inline]
    pub fn next(&self) -> u32 {
        self.ends.next
    }

    /// Tokens that the next [`stage`](crate::Manager::stage) computes by a draft model.
    #[must_use]
    #[inline]
    pub fn next_draft(&self) -> u64 {
        self.draft.upto.saturating_sub(self.draft.end)
    }

    /// Tokens of the prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        self.origin.marks.prompt
    }

    /// The first tokens that were found in the cache. They are not computed.
    #[must_use]
    pub fn cached_tokens(&self) -> u64 {
        self.origin.cached_tokens
    }

    /// Blocks that came back from host memory at admission.
    #[must_use]
    pub fn onboarded_blocks(&self) -> usize {
        self.onboarded_blocks
    }

    /// Places of blocks that it has in a group, those of blocks that are needed no more included.
    #[must_use]
    pub fn block_count(&self, group: GroupId) -> usize {
        self.held.get(usize::from(group.0)).map_or(0, |held| held.blocks.len())
    }

    /// The device block of a group at place `index`; `None` for a block that is needed no more.
    #[must_use]
    pub fn block(&self, group: GroupId, index: usize) -> Option<BlockId> {
        self.held.get(usize::from(group.0))?.blocks.id(index)
    }

    /// Its row of the block table; `None` while it is off the device.
    #[must_use]
    #[inline]
    pub fn row(&self) -> Option<Row> {
        self.row.as_ref().map(RowLease::row)
    }

    /// The tenant whose block counts include this sequence.
    #[must_use]
    pub fn tenant(&self) -> TenantId {
        self.origin.tenant
    }

    /// Whether it is suspended: off the device, or about to leave it with the last ids that are to come.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.suspended
    }
}

impl Sequence {
    /// Ends the KV after at most `tokens` tokens.
    pub(crate) fn end_at(&mut self, tokens: u64) {
        self.ends.truncate(tokens, self.known.tokens());
        self.draft.truncate(tokens);
        self.offered = self.offered.min(tokens);
    }

    /// No transfer fills its blocks any more: they are its own again.
    pub(crate) fn end_transfer(&mut self) {
        self.arrives = None;
        self.held.iter_mut().for_each(|held| held.blocks.claim_all_back());
    }
}

/// One line, however many blocks it has.
impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks: SmallVec<[usize; 4]> = self.held.iter().map(|held| held.blocks.len()).collect();
        f.debug_struct("Sequence")
            .field("number", &self.number)
            .field("row", &self.row().map(Row::index))
            .field("known", &self.known())
            .field("resolved", &self.resolved())
            .field("upper", &self.upper())
            .field("next", &self.next())
            .field("blocks", &blocks)
            .field("suspended", &self.suspended)
            .finish_non_exhaustive()
    }
}

impl Drop for Sequence {
    /// A block whose name another one bore when it became full takes the name over, if that one has left the
    /// cache since: so it stays cached.
    fn drop(&mut self) {
        let all_written = self.ends.written();
        let draft_written = self.draft.written().min(all_written);
        let Self { held, known, origin, home, number, era, .. } = self;
        for (index, (held, shape)) in held.iter_mut().zip(home.shapes()).enumerate() {
            let (first, block_tokens) = (held.blocks.shared_len(), u64::from(shape.block_tokens));
            let written = if shape.is_draft { draft_written } else { all_written };
            // What a step in flight writes has its name from the step, or none.
            let end = guard!("manager.twins-take-over-what-is-written", written, else u64::MAX);
            let end = held.named.min((end / block_tokens) as usize);
            if first >= end {
                continue;
            }
            let names = names_of(known.names(), shape.stride, first, end);
            let before = (first * shape.stride).checked_sub(1);
            let parent = before.map(|before| known.names()[before]);
            let worth = |index| origin.worth(index as u64 * block_tokens);
            home.name_valid((*number, era, known.generation()), &names, |part| {
                let (first, parent) = (first + part.start, parent_of(&names, &part, parent));
                let part = (first, &names[part]);
                let mut noting = Noting::new(home.feed(), index, 0, part, parent, known);
                let named = |record, name| noting.named(record, name);
                let parent = parent.filter(|_| shape.is_chained());
                held.blocks.name(first, part.1, parent, worth, named);
            });
        }
        self.tell_reuse();
    }
}

/// The name before a part of `names`, before which comes `parent`.
pub(crate) fn parent_of(
    names: &[BlockHash],
    part: &Range<usize>,
    parent: Option<BlockHash>,
) -> Option<BlockHash> {
    part.start.checked_sub(1).map(|before| names[before]).or(parent)
}
