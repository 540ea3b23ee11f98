//! Room for the next tokens of running sequences, and copy-on-write.

use kv_pool::{Claimed, Pinned, guard};
use kv_tier::GroupKind;
use smallvec::SmallVec;

use crate::group::{Group, Held, near};
use crate::growing::Memory;
use crate::hit::Found;
use crate::plan::CopyFor;
use crate::price::Counts;
use crate::{BlockCopy, Manager, Missing, ReserveError, Room, Sequence, SequenceError};

/// What a sequence was given.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Reserved {
    /// Blocks that it got.
    pub blocks: usize,
    /// Whether its last block was shared, and is copied before the step writes it. The block's id in the
    /// table is another one.
    pub copied: bool,
    /// Tokens of its prompt that others have computed since it was admitted. They need not be computed.
    pub adopted_tokens: u64,
}

impl Manager {
    /// Gives a sequence room for the next `tokens` tokens: a chunk of its prompt, the token that was
    /// sampled last, or that and drafts behind it. The next [`stage`](Manager::stage) computes them.
    ///
    /// They count from the upper end of the sequence's KV, as if every open outcome were the longest.
    /// Of two calls before a step is staged, the last one counts.
    ///
    /// A prompt that is being computed goes over to blocks that others have computed meanwhile, if they
    /// begin where its KV ends: then the tokens count from behind these, and are no more than are left.
    ///
    /// # Errors
    /// [`ReserveError`]; the sequence is as it was.
    pub fn reserve(
        &mut self,
        sequence: &mut Sequence,
        tokens: u32,
    ) -> Result<Room<Reserved>, ReserveError> {
        self.reserve_in(&mut Memory::default(), sequence, tokens)
    }

    pub(crate) fn reserve_in(
        &mut self,
        memory: &mut Memory<'_>,
        sequence: &mut Sequence,
        tokens: u32,
    ) -> Result<Room<Reserved>, ReserveError> {
        let end = sequence.ends.upper().saturating_add(tokens.into());
        let room = self.pace(sequence).and_then(|pace| pace.room_for(tokens));
        match room {
            Some(room) if end <= room => {
                sequence.ends.next = tokens;
                Ok(Room::Given(Reserved::default()))
            }
            Some(_) if self.take_next(memory.is_there(), sequence, end) => {
                sequence.ends.next = tokens;
                Ok(Room::Given(Reserved { blocks: 1, ..Reserved::default() }))
            }
            _ => Stop::answered(self.reserve_blocks(memory, sequence, tokens)),
        }
    }

    /// The common case where a block is missing: one, of a group that keeps all, for a sequence that goes on as before.
    /// Only an empty one, unless content may be evicted. Whether it got it; else nothing has changed.
    #[inline(never)]
    pub(crate) fn take_next(&mut self, evicts: bool, sequence: &mut Sequence, end: u64) -> bool {
        let (group, have) = (&self.groups[0], sequence.held[0].blocks.len());
        let evicts_last = evicts || group.pool.empty() > 0;
        let is_next = self.groups.alone().is_some()
            && self.shared.is_none()
            && guard!("manager.memory-before-eviction", evicts_last, else true)
            && group.blocks_for(end) == have + 1
            && have < group.table.width();
        let Some(row) = sequence.row().filter(|_| is_next) else { return false };
        let Ok(mut claimed) = group.take(sequence.tenant(), 1) else { return false };
        let group = &mut self.groups[0];
        group.plan_claimed(&mut self.plan, sequence.tenant(), &mut claimed);
        group.table.append(&mut self.plan, row, have, &claimed);
        sequence.held[0].blocks.push_own(claimed);
        self.set_pace(sequence);
        true
    }

    /// The same where blocks may be missing, or might be found.
    #[inline(never)]
    fn reserve_blocks(
        &mut self,
        memory: &mut Memory<'_>,
        sequence: &mut Sequence,
        tokens: u32,
    ) -> Result<Reserved, Stop> {
        self.look_at_running(sequence)?;
        if (sequence.frontier.is_none() || self.groups.alone().is_none())
            && self.has_room(sequence, tokens)
        {
            sequence.ends.next = tokens;
            return Ok(Reserved::default());
        }
        // Nothing changes before all blocks are there.
        let computed = if sequence.frontier.is_some() && tokens > 0 {
            self.find_computed(memory, sequence, tokens)?
        } else {
            Pinned::default()
        };
        let adopted = self.groups[0].tokens_of(computed.len());
        let mut tokens = tokens;
        if adopted > 0 {
            let left = sequence.known.tokens() - sequence.ends.resolved() - adopted;
            tokens = tokens.min(u32::try_from(left).unwrap_or(u32::MAX));
        }
        let upper = sequence.ends.upper() + adopted;
        tokens = self.up_to_checkpoint(sequence, tokens)?;
        sequence.ends.prune(self.steps.completed());
        self.retire_windows(sequence);
        let mut needs: SmallVec<[Need; 4]> = SmallVec::new();
        let states = sequence.ends.drafts_of(tokens, sequence.known.tokens()) as usize + 1;
        for (group, held) in self.groups.iter().zip(sequence.held.iter_mut()) {
            if group.is_draft {
                // Where it writes is another end.
                needs.push(Need::room(group, held, upper.saturating_add(tokens.into()))?);
                continue;
            }
            needs.push(need(group, held, (upper, tokens), (computed.len(), states))?);
        }
        let claimed = self.claim_all(memory, sequence, &mut needs)?;
        if adopted > 0 {
            self.adopt_computed(sequence, computed);
        }
        let mut reserved = self.hold_claimed(sequence, &needs, claimed);
        reserved.adopted_tokens = adopted;
        sequence.ends.next = tokens;
        Ok(reserved)
    }

    /// Has a sequence hold what was claimed for it.
    pub(crate) fn hold_claimed(
        &mut self,
        sequence: &mut Sequence,
        needs: &[Need],
        claimed: SmallVec<[Claimed; 4]>,
    ) -> Reserved {
        let mut reserved = Reserved::default();
        for ((index, need), mut claimed) in needs.iter().enumerate().zip(claimed) {
            if need.count() == 0 {
                continue;
            }
            reserved.blocks += need.count();
            if let Some((last, filled)) = need.shared {
                reserved.copied = true;
                let behind = claimed.split_off(1);
                self.copy_on_write(index, sequence, last, filled, claimed);
                claimed = behind;
            }
            let row = sequence.row();
            let (group, held) = (&mut self.groups[index], &mut sequence.held[index]);
            if let (Some(row), None) = (row, need.shared) {
                group.table.append(&mut self.plan, row, need.have, &claimed);
            }
            held.blocks.push_own(claimed);
            if let (Some(row), Some((last, _))) = (row, need.shared) {
                group.write_row(&mut self.plan, row, held, last);
            }
        }
        reserved
    }

    /// Claims what a sequence needs of each group, or nothing, and counts a refusal.
    pub(crate) fn claim_all(
        &mut self,
        memory: &mut Memory<'_>,
        sequence: &mut Sequence,
        needs: &mut [Need],
    ) -> Result<SmallVec<[Claimed; 4]>, Missing> {
        let tenant = sequence.tenant();
        let mut claimed = self.claim(memory, tenant, counts(needs));
        if claimed.is_err()
            && guard!(
                "manager.goes-on-without-a-checkpoint",
                self.give_up_checkpoint(memory, sequence, needs),
                else false
            )
        {
            claimed = self.claim(memory, tenant, counts(needs));
        }
        self.stats.stalls.room += u64::from(claimed.is_err());
        claimed
    }

    /// Where there is no block for the copy of a checkpoint, has the sequence write on in the checkpoint's own block, if
    /// it alone holds that: a checkpoint is kept for others, and a sequence goes on without one. Whether it does.
    fn give_up_checkpoint(
        &mut self,
        memory: &mut Memory<'_>,
        sequence: &mut Sequence,
        needs: &mut [Need],
    ) -> bool {
        let copies = |(group, need): (&Group, &Need)| group.is_state() && need.shared.is_some();
        if !self.groups.iter().zip(&*needs).any(copies) {
            return false;
        }
        let mut fewer: SmallVec<[Need; 4]> = needs.iter().copied().collect();
        for (need, _) in
            fewer.iter_mut().zip(self.groups.iter()).filter(|(_, group)| group.is_state())
        {
            need.shared = None;
        }
        let (nothing, due) = (self.groups.nothing_found(), self.groups.nothing_due(false));
        if self.price_in(memory, (sequence.tenant(), &[]), &nothing, counts(&fewer), &due).is_err()
        {
            return false;
        }
        let mut goes_on = false;
        for ((need, fewer), held) in needs.iter_mut().zip(fewer).zip(sequence.held.iter_mut()) {
            if need.shared.is_some() && fewer.shared.is_none() && held.blocks.unname_first() {
                *need = fewer;
                goes_on = true;
            }
        }
        goes_on
    }

    /// Whether `tokens` more tokens fit into blocks that a sequence has and may write.
    fn has_room(&self, sequence: &mut Sequence, tokens: u32) -> bool {
        let upper = sequence.ends.upper();
        let bounds = sequence.held.bounds(&self.groups);
        guard!("manager.shared-room-is-no-room", bounds.writes_from <= upper, else true)
            && upper + u64::from(tokens) <= bounds.writes_to
            && tokens <= bounds.at_once
    }

    /// Of `tokens` more tokens, those up to the next checkpoint of a state.
    fn up_to_checkpoint(&self, sequence: &Sequence, tokens: u32) -> Result<u32, ReserveError> {
        let (known, upper) = (sequence.known.tokens(), sequence.ends.upper());
        let mut next = tokens;
        for group in self.groups.iter().filter(|group| group.is_state()) {
            let left = group.next_checkpoint(upper, sequence.marks()) - upper;
            next = next.min(u32::try_from(left).unwrap_or(u32::MAX));
        }
        let drafts = sequence.ends.drafts_of(next, known);
        for group in self.groups.iter() {
            if let GroupKind::State { drafts: max, .. } = group.kind
                && drafts > max
            {
                return Err(ReserveError::Drafts { drafts, max });
            }
        }
        Ok(next)
    }

    /// Puts `own` in the place of a shared block of a group, of which `filled` tokens are copied to it.
    fn copy_on_write(
        &mut self,
        group: usize,
        sequence: &mut Sequence,
        index: usize,
        filled: u32,
        own: Claimed,
    ) {
        let id = self.groups[group].id;
        let blocks = &mut sequence.held[group].blocks;
        if let (Some(from), Some(to)) = (blocks.id(index), own.ids().next()) {
            let written_by = sequence.ends.latest().unwrap_or(0);
            let (from, to) = (near(from), near(to));
            let copy = BlockCopy { group: id, from, to, tokens: filled, written_by };
            self.plan.copy(CopyFor::Write, copy);
        }
        // The copy comes before every later use of the block, in the order of the plans.
        drop(blocks.replace(index, own));
        sequence.copied = self.plan.copied_by();
    }

    /// Finds cached blocks that begin where the KV of a prompt ends. They are pinned once it is known that there is
    /// room for `tokens` tokens behind them.
    fn find_computed(
        &mut self,
        memory: &mut Memory<'_>,
        sequence: &mut Sequence,
        tokens: u32,
    ) -> Result<Pinned, Stop> {
        // What others have computed in one of several groups is not followed.
        let Some(group) = self.groups.alone() else { return Ok(Pinned::default()) };
        let resolved = sequence.ends.resolved();
        let first = group.full_blocks(resolved);
        // The last token is computed in any case: its output is wanted.
        let last = sequence.known.tokens().saturating_sub(1);
        let end = group.full_blocks(last.min(sequence.origin.hit_max()));
        let begins = resolved == group.tokens_of(first) && sequence.held[0].named == first;
        let names = self.namer.current(&sequence.known);
        if !begins || sequence.ends.is_uncertain() || first >= end || names.is_empty() {
            return Ok(Pinned::default());
        }
        let cached = &names[first..first + group.prefix_len(&names[first..end])];
        let found = first..first + cached.iter().take_while(|name| group.is_near(**name)).count();
        if found.is_empty() {
            return Ok(Pinned::default());
        }
        let upper = sequence.ends.upper() + group.tokens_of(found.len());
        let left = u32::try_from(sequence.known.tokens() - upper).unwrap_or(u32::MAX);
        let held = &mut sequence.held[0];
        let need = need(group, held, (upper, tokens.min(left)), (found.len(), 1))?;
        let extent = group.extent_of(names, 0, found.clone());
        let (of, due) = ((sequence.tenant(), names), self.groups.nothing_due(false));
        let counts = Counts::from_elem(need.count(), 1);
        let priced = self.price_in(memory, of, &[extent], counts, &due);
        self.stats.stalls.room += u64::from(priced.is_err());
        guard!("manager.adopts-when-there-is-room", drop(priced?), else drop(priced));
        Ok(self.groups[0].pool.match_prefix(&names[found]))
    }

    /// Goes over to cached blocks that begin where the KV of a prompt ends.
    fn adopt_computed(&mut self, sequence: &mut Sequence, found: Pinned) {
        let (first, count) = (sequence.held[0].named, found.len());
        let resolved = sequence.ends.resolved();
        let behind = Found { tail_first: first, tail: found, ..Found::default() };
        self.note_pending(0, &behind, resolved, &mut sequence.depends);
        let found = behind.tail;
        sequence.copied = self.plan.copied_by();
        let row = sequence.row();
        let (group, held) = (&mut self.groups[0], &mut sequence.held[0]);
        let mut behind = held.blocks.split_off(first);
        let rest = behind.split_off(count);
        held.blocks.push_shared(found);
        held.blocks.append(rest);
        // They were claimed for this prompt, and never written.
        drop(behind);
        held.named += count;
        if let Some(row) = row {
            group.write_row(&mut self.plan, row, held, first);
        }
        sequence.ends.skip(group.tokens_of(count));
        self.follow_frontier(sequence);
    }
}

/// Why a sequence gets no blocks.
pub(crate) enum Stop {
    Refused(ReserveError),
    Lacks(Missing),
}

impl Stop {
    pub(crate) fn answered<T>(reserved: Result<T, Self>) -> Result<Room<T>, ReserveError> {
        match reserved {
            Ok(given) => Ok(Room::Given(given)),
            Err(Self::Lacks(missing)) => Ok(Room::Lacks(missing.into())),
            Err(Self::Refused(error)) => Err(error),
        }
    }
}

impl From<Missing> for Stop {
    fn from(missing: Missing) -> Self {
        Self::Lacks(missing)
    }
}

impl From<ReserveError> for Stop {
    fn from(error: ReserveError) -> Self {
        Self::Refused(error)
    }
}

impl From<SequenceError> for Stop {
    fn from(error: SequenceError) -> Self {
        Self::Refused(error.into())
    }
}

/// What a reservation needs of a group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Need {
    /// Blocks that the sequence has, or goes over to.
    have: usize,
    /// Blocks behind them.
    missing: usize,
    /// A block that others hold and that is to be written, and the tokens that it is filled with.
    shared: Option<(usize, u32)>,
}

impl Need {
    /// What a sequence needs to have blocks for `end` tokens, without writing any.
    pub(crate) fn room(group: &Group, held: &Held, end: u64) -> Result<Self, ReserveError> {
        let (needed, max) = (group.blocks_for(end), group.table.width());
        if needed > max {
            return Err(ReserveError::TooLong { blocks: needed as u64, max: max as u64 });
        }
        let have = held.blocks.len();
        Ok(Self { have, missing: needed.saturating_sub(have), shared: None })
    }

    fn count(&self) -> usize {
        self.missing + usize::from(self.shared.is_some())
    }
}

/// Blocks to be claimed of each group.
fn counts(needs: &[Need]) -> Counts {
    needs.iter().map(Need::count).collect()
}

/// What a sequence needs of a group for `tokens` tokens behind `upper`, if it goes over to `adopted` blocks; of a state, so
/// many.
pub(crate) fn need(
    group: &Group,
    held: &mut Held,
    (upper, tokens): (u64, u32),
    (adopted, states): (usize, usize),
) -> Result<Need, ReserveError> {
    let end = upper.saturating_add(tokens.into());
    let needed = if group.is_state() { states } else { group.blocks_for(end) };
    let max = group.table.width();
    if needed > max {
        return Err(ReserveError::TooLong { blocks: needed as u64, max: max as u64 });
    }
    let last = group.full_blocks(upper);
    let filled = match group.is_state() {
        true if upper > 0 => group.block_tokens,
        true => 0,
        false => (upper - group.tokens_of(last)) as u32,
    };
    let is_others =
        filled > 0 && tokens > 0 && !held.blocks.is_own(last) && !held.blocks.claim_back(last);
    let shared = guard!("manager.copies-before-it-writes", is_others, else false);
    let have = match adopted {
        0 => held.blocks.len(),
        // Of a prompt that was extended, there may be more than it has blocks for.
        _ => held.blocks.len().max(held.named + adopted),
    };
    let missing = needed.saturating_sub(have);
    Ok(Need { have, missing, shared: shared.then_some((last, filled)) })
}
