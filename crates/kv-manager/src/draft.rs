//! A draft model: its KV ends where its own steps have come to, not where the model's has.

use kv_pool::guard;
use smallvec::SmallVec;

use crate::growing::Memory;
use crate::reserve::{Need, Stop, need};
use crate::stage::certain;
use crate::{Committed, DraftError, Manager, ReserveError, Room, Sequence, SequenceError};

/// How far the KV of a draft model reaches, of one sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct DraftEnd {
    /// Tokens that have KV, or get it for certain from a step that is staged.
    pub(crate) end: u64,
    /// Where the tokens end that the next step computes.
    pub(crate) upto: u64,
    /// The last step that computes any.
    latest: u64,
    /// What steps up to this one have computed is not the sequence's any more.
    stale: u64,
    /// Steps that are not complete, each with the end before what was committed of it.
    open: SmallVec<[(u64, u64); 2]>,
}

impl DraftEnd {
    /// The end of a sequence whose first tokens are cached.
    pub(crate) fn cached(tokens: u64) -> Self {
        Self { end: tokens, ..Self::default() }
    }

    /// What the next step computes: from which token on, and how many.
    pub(crate) fn stage(&mut self, step: u64) -> Option<(u64, u32)> {
        let tokens =
            std::mem::take(&mut self.upto).checked_sub(self.end).filter(|&left| left > 0)?;
        self.latest = step;
        Some((self.end, u32::try_from(tokens).unwrap_or(u32::MAX)))
    }

    /// Tokens whose KV was written by steps that are complete and have not failed, at least.
    pub(crate) fn written(&self) -> u64 {
        self.open.iter().map(|&(_, before)| before).fold(self.end, u64::min)
    }

    /// Forgets steps that are complete.
    pub(crate) fn prune(&mut self, completed: u64) {
        self.open.retain(|(step, _)| *step > completed);
    }

    /// Ends the KV after at most `tokens` tokens.
    pub(crate) fn truncate(&mut self, tokens: u64) {
        self.upto = 0;
        guard!("manager.cuts-take-drafts-along", self.end = self.end.min(tokens));
    }

    /// What is not committed yet stays with blocks that a twin shares, and is not copied with them.
    pub(crate) fn fork(&mut self) -> Self {
        self.upto = 0;
        guard!("manager.drafts-before-a-fork-are-stale", self.stale = self.latest);
        self.clone()
    }

    /// Takes back what was committed of a step that has failed.
    pub(crate) fn fail(&mut self, step: u64) {
        let failed = self.open.iter().filter(|(open, _)| *open == step);
        self.end = failed.map(|&(_, before)| before).fold(self.end, u64::min);
    }
}

impl Manager {
    /// Has the next step compute `tokens` tokens of a sequence by the [draft model](crate::GroupOptions::draft_model), from
    /// the [end](Sequence::draft_end) of its KV on; 0 for none. The step's plan has them in
    /// [`draft_batch`](crate::StepPlan::draft_batch). Without groups of a draft model, nothing is computed.
    ///
    /// The end is the one at [`stage`](Self::stage): what is committed before then is not computed again. Under overlap, a
    /// draft model computes again what it has computed in steps whose outcome is open. Of two calls before a step is staged,
    /// the last one counts, and what changes the sequence otherwise takes the call back, as it does with
    /// [`reserve`](Self::reserve), without which the sequence is in no step.
    ///
    /// Without room, a sequence can go on without drafts.
    ///
    /// # Errors
    /// [`ReserveError`]; nothing has changed.
    pub fn reserve_draft(
        &mut self,
        sequence: &mut Sequence,
        tokens: u32,
    ) -> Result<Room<()>, ReserveError> {
        Stop::answered(self.reserve_draft_in(&mut Memory::default(), sequence, tokens))
    }

    pub(crate) fn reserve_draft_in(
        &mut self,
        memory: &mut Memory<'_>,
        sequence: &mut Sequence,
        tokens: u32,
    ) -> Result<(), Stop> {
        self.look_at_running(sequence)?;
        if !self.groups.has_draft() {
            return Ok(());
        }
        let from = sequence.draft.end;
        let mut needs: SmallVec<[Need; 4]> = SmallVec::new();
        for (group, held) in self.groups.iter().zip(sequence.held.iter_mut()) {
            needs.push(if group.is_draft {
                need(group, held, (from, tokens), (0, 0))?
            } else {
                Need::default()
            });
        }
        let claimed = self.claim_all(memory, sequence, &mut needs)?;
        self.hold_claimed(sequence, &needs, claimed);
        sequence.draft.upto = from.saturating_add(tokens.into());
        Ok(())
    }

    /// Takes in that the KV of a draft model ends at token `end` of a sequence, right up to there: `step` has computed it, as
    /// a part of what was [reserved](Self::reserve_draft) for it, or steps before. Full blocks up to there get their names in
    /// its groups.
    ///
    /// What a step has computed before a [fork](Self::fork), a cut or a suspension is to be committed before it, too: later it
    /// is [stale](Committed::Stale).
    ///
    /// Tokens are certain whose ids are known, and that the model itself has KV for: what a step computes of a prompt once it
    /// is staged, and of drafts what [`commit`](Self::commit) has taken. A draft model that was given other tokens than these
    /// has computed fewer.
    ///
    /// # Errors
    /// [`DraftError`]; the sequence is as it was.
    pub fn commit_draft(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        end: u64,
    ) -> Result<Committed, DraftError> {
        if !self.groups.has_draft() {
            return Err(DraftError::NoDraftModel);
        }
        match self.look_at_running(sequence) {
            Ok(()) => {}
            Err(SequenceError::Redo { from }) => return Ok(Committed::Redo { from }),
            Err(error) => return Err(error.into()),
        }
        if sequence.ends.is_stale(step) || step <= sequence.draft.stale && step > 0 {
            return Ok(Committed::Stale);
        }
        let last = sequence.draft.latest;
        if step == 0 || step > last {
            return Err(DraftError::NotStaged { step, last });
        }
        let (certain, before) = (certain(sequence), sequence.draft.end);
        if end > certain {
            return Err(DraftError::Beyond { end, certain });
        }
        if end < before {
            return Err(DraftError::Back { end, before });
        }
        sequence.draft.end = end;
        // A later step may begin, by its plan, before here: if it fails, it has spoilt these blocks too.
        let with = self.steps.in_flight_from(last).filter(|&step| step == last);
        if with.is_some() {
            sequence.draft.open.push((last, before));
        }
        self.name_with(sequence, with, last);
        Ok(Committed::Taken)
    }

    /// Names blocks that a step in flight makes true, or one that is complete: then nothing can be withdrawn.
    pub(crate) fn name_with(&mut self, sequence: &mut Sequence, with: Option<u64>, step: u64) {
        let mut names = self.steps.take_names(with);
        self.name_certain(sequence, with.unwrap_or(step), &mut names);
        if with.is_none() {
            self.lower.want_stored(&names);
        }
        self.steps.keep_names(with, names);
    }
}
