//! Commits: the ids that came out of a step.

use crate::{CommitError, Manager, Sequence, SequenceError, Tokens};
use kv_pool::guard;

/// What became of committed ids.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Committed {
    /// They follow the sequence's known tokens.
    Taken,
    /// The sequence has been truncated, suspended or set back since the step was staged: the ids
    /// change nothing.
    Stale,
    /// A step has failed that the sequence was in, or whose blocks it reads, or a load that it was
    /// [admitted with](crate::Request::by_layers). The ids are void, as are those
    /// from void steps before. The sequence has been set back: its KV ends at `from`.
    ///
    /// Or no id was committed of a step behind whose sampled token a later step, or that step itself, has computed a
    /// recurrent state, which cannot go back by that token. The KV ends at `from`.
    Redo {
        /// The first token to be computed again.
        from: u64,
    },
}

impl Manager {
    /// Takes in the token ids that came out of a step: the accepted drafts, then the id that was sampled
    /// behind them. None is possible: an end that the engine has ignored. Steps that were staged later have gone on behind
    /// that end, so their results are [stale](Committed::Stale).
    ///
    /// An engine that keeps fewer ids than came out, and some, has to say so where a later step was staged, which has gone on
    /// behind the others: it [truncates](Self::truncate) the sequence to what is known. No call can tell these ids from drafts
    /// that were rejected. With a recurrent state, it truncates instead of committing them.
    ///
    /// What stands behind placeholder ids among them is said with them, by [`Tokens::With`].
    ///
    /// The commits of a sequence come in the order of its steps. They may come after later steps were
    /// staged. A step that computes part of a prompt only needs no commit.
    ///
    /// Blocks that are full with these ids get their names.
    ///
    /// # Errors
    /// [`CommitError`]; the sequence is as it was.
    pub fn commit<'a>(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        tokens: impl Into<Tokens<'a>>,
    ) -> Result<Committed, CommitError> {
        let tokens = tokens.into();
        if let Tokens::Ids(&[id]) = tokens
            && self.take_id(sequence, step, id)
        {
            return Ok(Committed::Taken);
        }
        self.take_ids(sequence, step, tokens)
    }

    /// The common case: one id, of a sequence that goes on as before. Whether it is the common case; else nothing has
    /// changed.
    #[inline]
    fn take_id(&mut self, sequence: &mut Sequence, step: u64, id: u32) -> bool {
        let known = sequence.known.tokens();
        if self.pace(sequence).is_none() || !sequence.ends.commit_first(step, known) {
            return false;
        }
        self.add_id(sequence, step, id);
        true
    }

    /// Adds the id that came out of a step, and names what it completes, of a sequence that goes on as before.
    #[inline]
    pub(crate) fn add_id(&mut self, sequence: &mut Sequence, step: u64, id: u32) {
        sequence.known.push(&self.namer, id);
        if sequence.pace.quiet_row(sequence.ends.resolved()).is_none() {
            self.name_next(sequence, step);
        }
    }

    /// Names what a commit may have completed, of a sequence that goes on as before.
    #[inline(never)]
    fn name_next(&mut self, sequence: &mut Sequence, step: u64) {
        if self.has_unnamed(sequence) {
            self.name_committed(sequence, step);
        }
        self.set_pace(sequence);
    }

    #[inline(never)]
    fn take_ids(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        tokens: Tokens<'_>,
    ) -> Result<Committed, CommitError> {
        match self.look_at(sequence) {
            Ok(()) => {}
            Err(SequenceError::Redo { from }) => {
                self.leave_when_resolved(sequence);
                return Ok(Committed::Redo { from });
            }
            Err(error) => return Err(error.into()),
        }
        let is_stale = sequence.ends.is_stale(step);
        if guard!("manager.results-before-a-cut-are-stale", is_stale, else false) {
            return Ok(Committed::Stale);
        }
        if let Some(ticket) = guard!("manager.commits-wait-for-loads", sequence.loads(), else None)
        {
            return Err(SequenceError::Loading { ticket }.into());
        }
        sequence.known.check(&self.namer, &tokens)?;
        let (known, upper) = (sequence.known.tokens(), sequence.ends.upper());
        let ended = sequence.ends.commit(step, tokens.len(), known)?;
        sequence.known.add(&self.namer, tokens);
        if ended {
            // A state, and KV behind the end, are of tokens that are none of the sequence's.
            let resolved = sequence.ends.resolved();
            let from = self.cut_behind(sequence, upper);
            self.leave_when_resolved(sequence);
            let is_whole = from == resolved;
            return Ok(if is_whole { Committed::Taken } else { Committed::Redo { from } });
        }
        if self.has_unnamed(sequence) {
            self.name_committed(sequence, step);
        }
        self.leave_when_resolved(sequence);
        Ok(Committed::Taken)
    }

    /// Names the blocks that are full with the ids of a step.
    #[inline(never)]
    fn name_committed(&mut self, sequence: &mut Sequence, step: u64) {
        // A later step may begin, by its plan, before where this one has ended: if it fails, it has
        // spoilt these blocks too.
        let latest = guard!("manager.a-later-step-spoils", sequence.ends.latest(), else None);
        let step = latest.map_or(step, |latest| latest.max(step));
        // Of a step that is complete already, nothing can be withdrawn.
        let with = guard!(
            "manager.commits-names-are-withdrawn",
            self.steps.in_flight_from(step),
            else None
        );
        self.name_with(sequence, with, step);
    }
}
