//! How far a sequence's KV reaches: for certain, and at most, while outcomes are open.

use kv_pool::guard;

use crate::CommitError;
use crate::plan::Start;

/// One step of a sequence, until it is complete and its ids are known.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Staged {
    step: u64,
    /// The certain end of the KV before the step.
    start: u64,
    /// Tokens whose ids were not known when the step was staged: drafts, or what an open step decides.
    unknown: u32,
    /// The step's first tokens were known.
    led: bool,
    /// Its ids have not been committed.
    awaits: bool,
    /// Tokens that were known before its ids were committed; `u64::MAX` while none of its ids is known.
    known_before: u64,
}

/// The steps of a sequence that are not over, in their order: those whose ids are known come before those whose ids are
/// to come.
#[derive(Clone, Debug)]
#[repr(C)]
struct Steps {
    /// The first ones. No more are in flight with one step of overlap.
    near: [Staged; 2],
    /// Those behind them; `None` for a sequence that never had more.
    far: Option<Box<Far>>,
}

/// Steps behind the first ones.
#[derive(Clone, Debug, Default)]
struct Far(Vec<Staged>);

impl Default for Steps {
    fn default() -> Self {
        Self { near: [Staged::NONE; 2], far: None }
    }
}

impl Steps {
    fn iter(&self) -> impl Iterator<Item = &Staged> {
        let far = self.far.iter().flat_map(|far| &far.0);
        self.near.iter().filter(|staged| staged.is_there()).chain(far)
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut Staged> {
        let far = self.far.iter_mut().flat_map(|far| &mut far.0);
        self.near.iter_mut().filter(|staged| staged.is_there()).chain(far)
    }

    /// The place of the next step. The first ones that are [over](Staged::is_over) are forgotten.
    #[inline]
    fn next(&mut self, completed: u64) -> &mut Staged {
        if self.far.is_some() || !self.near[0].is_over(completed) {
            return self.next_behind(completed);
        }
        // The common case: the first one goes, and without overlap there is no second one.
        let second = self.near[1];
        self.near[0] = second;
        if second.is_over(completed) {
            self.near[1] = Staged::NONE;
            return &mut self.near[0];
        }
        &mut self.near[1]
    }

    #[inline(never)]
    fn next_behind(&mut self, completed: u64) -> &mut Staged {
        self.prune(completed);
        if let Some(at) = self.near.iter().position(|near| !near.is_there()) {
            return &mut self.near[at];
        }
        let far = &mut self.far.get_or_insert_default().0;
        let at = far.len();
        far.push(Staged::NONE);
        &mut far[at]
    }

    fn prune(&mut self, completed: u64) {
        while self.near[0].is_there() && self.near[0].is_over(completed) {
            let far = self.far.as_mut().map(|far| &mut far.0).filter(|far| !far.is_empty());
            self.near = [self.near[1], far.map_or(Staged::NONE, |far| far.remove(0))];
        }
    }
}

/// What a step computes of a sequence, as its plan says it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Staging {
    pub(crate) start: Start,
    pub(crate) tokens: u32,
    /// Those of them, the last ones, that may be rejected.
    pub(crate) drafts: u32,
    /// With which entry of a recurrent group the step begins, as [`BatchRow::input`](crate::BatchRow::input) says it.
    pub(crate) input: u32,
}

impl Staged {
    /// None: steps are counted from 1.
    const NONE: Self =
        Self { step: 0, start: 0, unknown: 0, led: false, awaits: false, known_before: 0 };

    #[inline]
    fn is_there(&self) -> bool {
        self.step > 0
    }

    /// Whether it is complete and has nothing to come; true of none.
    #[inline]
    fn is_over(&self, completed: u64) -> bool {
        !self.awaits && self.step <= completed
    }
}

/// What is to be computed again after a step has failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Redo {
    /// The certain end of the KV.
    pub(crate) from: u64,
    /// Tokens that are known still.
    pub(crate) known: u64,
}

/// The ends of a sequence's KV.
///
/// `resolved` tokens have KV, or a staged step writes it for certain. At [`upper`](Self::upper) the KV
/// ends if every open outcome is the longest.
///
/// Every step of a sequence reads and writes them, so they lie in the order in which they are asked for.
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub(crate) struct Ends {
    resolved: u64,
    /// The sum of `unknown` over the steps whose ids are to come.
    unknown: u64,
    /// Tokens that the next step stages.
    pub(crate) next: u32,
    /// Tokens of the step that was staged last, before its drafts.
    sure: u32,
    /// The entry with the state behind `resolved` tokens; of no meaning while the end is uncertain.
    entry: u32,
    staged: Steps,
    /// The last step that was staged, which is known after its entry is forgotten.
    last: u64,
    /// Results of steps up to this one change nothing.
    stale: u64,
}

/// A cache line of steps, behind half of one.
const _: () = assert!(size_of::<[Staged; 2]>() == 64 && std::mem::offset_of!(Ends, staged) == 32);

impl Ends {
    /// The ends of a sequence whose first tokens are cached.
    pub(crate) fn cached(tokens: u64) -> Self {
        Self { resolved: tokens, ..Self::default() }
    }

    #[inline]
    pub(crate) fn resolved(&self) -> u64 {
        self.resolved
    }

    #[inline]
    pub(crate) fn upper(&self) -> u64 {
        self.resolved + self.unknown
    }

    /// The first step whose ids are to come.
    pub(crate) fn awaits(&self) -> Option<u64> {
        self.staged.iter().find(|staged| staged.awaits).map(|staged| staged.step)
    }

    /// Whether ids of a staged step are to come.
    pub(crate) fn is_open(&self) -> bool {
        self.awaits().is_some()
    }

    /// Whether the end of the KV depends on an outcome that is not known.
    pub(crate) fn is_uncertain(&self) -> bool {
        self.unknown > 0
    }

    /// How many of the next `tokens` tokens may be rejected, of a sequence of which `known` tokens are known. The first one
    /// stands, known or sampled by a step in flight.
    pub(crate) fn drafts_of(&self, tokens: u32, known: u64) -> u32 {
        tokens.saturating_sub(self.led(tokens, known).max(1))
    }

    /// How many of the next `tokens` tokens are known.
    #[inline]
    fn led(&self, tokens: u32, known: u64) -> u32 {
        if self.is_uncertain() {
            return 0;
        }
        known.saturating_sub(self.resolved).min(tokens.into()) as u32
    }

    /// [`resolved`](Self::resolved) once the next tokens are staged, at most.
    #[inline]
    pub(crate) fn resolved_with_next(&self) -> u64 {
        self.resolved + if self.is_uncertain() { 0 } else { self.next.into() }
    }

    /// The entry with the state that the KV ends with, which is entry 0 from now on.
    pub(crate) fn take_entry(&mut self) -> usize {
        if self.is_uncertain() { 0 } else { std::mem::take(&mut self.entry) as usize }
    }

    /// Stages the next tokens in `step`, of a sequence of which `known` tokens are known. Steps up to `completed` are
    /// complete, and those of them that have nothing to come are forgotten.
    #[inline]
    pub(crate) fn stage(&mut self, step: u64, known: u64, completed: u64) -> Staging {
        let tokens = std::mem::take(&mut self.next);
        let (resolved, upper) = (self.resolved, self.upper());
        let led = self.led(tokens, known);
        let drafts = tokens.saturating_sub(led.max(1));
        let (start, input) = match self.is_uncertain() {
            true => (Start::Open { resolved, upper }, self.sure),
            false => (Start::At(resolved), self.entry),
        };
        (self.sure, self.entry, self.last) = (tokens - drafts, 0, step);
        let unknown = tokens - led;
        self.resolved += u64::from(guard!("manager.drafts-are-uncertain", led, else tokens));
        let awaits = upper + u64::from(tokens) >= known;
        // What is not known is at the end, so its step is waited for.
        self.unknown += u64::from(unknown);
        let (known_before, led) = (u64::MAX, led > 0);
        *self.staged.next(completed) =
            Staged { step, start: resolved, unknown, led, awaits, known_before };
        Staging { start, tokens, drafts, input }
    }

    /// Skips tokens whose KV has been found elsewhere.
    pub(crate) fn skip(&mut self, tokens: u64) {
        self.resolved += tokens;
    }

    /// Whether the results of `step` change nothing, because the sequence has been changed since.
    pub(crate) fn is_stale(&self, step: u64) -> bool {
        step <= self.stale
    }

    /// Checks that `step` is the first whose ids are to come, and that `count` ids can have come out of it.
    fn check_open(&self, step: u64, count: u64) -> Result<(), CommitError> {
        let mut open = self.staged.iter().filter(|staged| staged.awaits);
        let Some(first) = open.next() else { return Err(CommitError::NotStaged { step }) };
        if first.step != step {
            let here = open.any(|staged| staged.step == step);
            return Err(if here {
                CommitError::OutOfOrder { step, first: first.step }
            } else {
                CommitError::NotStaged { step }
            });
        }
        let max = u64::from(first.unknown) + u64::from(first.led);
        if count > max {
            return Err(CommitError::TooManyIds { step, ids: count, max });
        }
        Ok(())
    }

    /// [`upper`](Self::upper) behind one id that comes out of `step`, if that is the first of the steps in flight and its ids
    /// are to come.
    #[inline]
    pub(crate) fn upper_behind_one(&self, step: u64) -> Option<u64> {
        let first = &self.staged.near[0];
        let behind = || self.upper() - u64::from(first.unknown) + u64::from(!first.led);
        (first.awaits && first.step == step).then(behind)
    }

    /// The common case of [`commit`](Self::commit): one id came out of `step`, which is the first of the steps in flight.
    /// Whether it is the common case; else nothing has changed.
    #[inline]
    pub(crate) fn commit_first(&mut self, step: u64, known: u64) -> bool {
        let first = &mut self.staged.near[0];
        if !first.awaits || first.step != step {
            return false;
        }
        // A step computes a token at least, so an id comes out of it, at least.
        (first.awaits, first.known_before) = (false, known);
        self.unknown -= u64::from(first.unknown);
        self.resolved += u64::from(!first.led);
        self.entry = 0;
        true
    }

    /// Takes in that `count` ids came out of `step`, when `known` tokens were known. Whether something was computed behind
    /// an id that is none of the sequence's: by a later step, or by this one if that id was to be its first token.
    pub(crate) fn commit(
        &mut self,
        step: u64,
        count: u64,
        known: u64,
    ) -> Result<bool, CommitError> {
        self.check_open(step, count)?;
        let mut open = self.staged.iter_mut().filter(|staged| staged.awaits);
        let Some(staged) = open.next() else { return Err(CommitError::NotStaged { step }) };
        let is_last = open.next().is_none();
        if is_last {
            // Each id but the last is an accepted draft's.
            self.entry = count.saturating_sub(1) as u32;
        }
        staged.awaits = false;
        staged.known_before = if count > 0 { known } else { u64::MAX };
        self.unknown -= u64::from(staged.unknown);
        // Of a step that began with known tokens, the last id has no KV; the others are accepted drafts.
        self.resolved += if staged.led { count.saturating_sub(1) } else { count };
        // Every step that is waited for has sampled an id, at least.
        let stands = staged.led && is_last;
        Ok(guard!("manager.nothing-behind-an-ignored-id", count == 0 && !stands, else false))
    }

    /// Tokens whose KV was written by steps that are complete and have not failed, at least.
    pub(crate) fn written(&self) -> u64 {
        self.staged.iter().map(|staged| staged.start).fold(self.resolved, u64::min)
    }

    /// The latest step that the sequence is in and that was not forgotten.
    pub(crate) fn latest(&self) -> Option<u64> {
        self.staged.iter().map(|staged| staged.step).max()
    }

    /// Forgets steps that are complete and have nothing to come.
    pub(crate) fn prune(&mut self, completed: u64) {
        self.staged.prune(completed);
    }

    /// Ends the KV after at most `tokens` tokens, of which `known` are known. The results of steps that were
    /// staged are stale.
    pub(crate) fn truncate(&mut self, tokens: u64, known: u64) {
        self.resolved = self.resolved.min(tokens);
        self.stale = guard!(
            "manager.a-cut-makes-forgotten-steps-stale",
            self.last,
            else self.latest().unwrap_or(self.stale)
        );
        (self.next, self.unknown, self.entry) = (0, 0, 0);
        // Their failure still concerns what they wrote before the cut.
        for staged in self.staged.iter_mut() {
            staged.awaits = false;
            if staged.known_before >= known {
                staged.known_before = u64::MAX;
            }
        }
    }

    /// What the failure of `step` leaves of a sequence of which `known` tokens are known; `None` if the
    /// sequence was not in the step.
    pub(crate) fn redo(&self, step: u64, known: u64) -> Option<Redo> {
        let failed = self.staged.iter().find(|staged| staged.step == step)?;
        Some(self.redo_from(failed.start, step, known))
    }

    /// What is left if KV from token `from` on is wrong in `step` and those after it.
    pub(crate) fn redo_from(&self, from: u64, step: u64, known: u64) -> Redo {
        // Ids that the engine has added itself stay, unless they follow ids of a void step.
        let later = self.staged.iter().filter(|staged| staged.step >= step);
        let known = later.map(|staged| staged.known_before).fold(known, u64::min);
        Redo { from: from.min(self.resolved).min(known), known }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn staged(ends: &mut Ends, step: u64, tokens: u32, known: u64) {
        ends.next = tokens;
        ends.stage(step, known, 0);
    }

    #[test]
    fn a_chunk_of_a_prompt_resolves_when_it_is_staged() {
        let mut ends = Ends::default();
        staged(&mut ends, 1, 5, 8);
        assert_eq!((ends.resolved(), ends.upper(), ends.is_open()), (5, 5, false));
        staged(&mut ends, 2, 3, 8);
        assert_eq!((ends.resolved(), ends.upper(), ends.is_open()), (8, 8, true));
        assert_eq!(
            ends.commit(2, 2, 8),
            Err(CommitError::TooManyIds { step: 2, ids: 2, max: 1 }),
            "without drafts one id comes out"
        );
        ends.commit(2, 1, 8).unwrap();
        assert_eq!((ends.resolved(), ends.upper()), (8, 8), "the sampled token has no KV yet");
    }

    #[test]
    fn steps_that_overlap_resolve_as_their_results_arrive() {
        let mut ends = Ends::cached(8);
        staged(&mut ends, 1, 1, 9);
        staged(&mut ends, 2, 1, 9);
        assert_eq!((ends.resolved(), ends.upper()), (9, 10));
        assert_eq!(ends.commit(2, 1, 9), Err(CommitError::OutOfOrder { step: 2, first: 1 }));
        ends.commit(1, 1, 9).unwrap();
        assert_eq!((ends.resolved(), ends.upper()), (9, 10));
        ends.commit(2, 1, 10).unwrap();
        assert_eq!((ends.resolved(), ends.upper()), (10, 10));
        assert_eq!(ends.commit(2, 1, 11), Err(CommitError::NotStaged { step: 2 }));
    }

    #[test]
    fn drafts_count_from_the_upper_bound_until_they_are_judged() {
        let mut ends = Ends::cached(8);
        staged(&mut ends, 1, 4, 9); // one known token and three drafts
        assert_eq!((ends.resolved(), ends.upper()), (9, 12));
        staged(&mut ends, 2, 4, 9);
        assert_eq!((ends.resolved(), ends.upper()), (9, 16));
        ends.commit(1, 2, 9).unwrap(); // one draft accepted, and one id more
        assert_eq!((ends.resolved(), ends.upper()), (10, 14));
        ends.commit(2, 4, 11).unwrap();
        assert_eq!((ends.resolved(), ends.upper()), (14, 14), "known are 15");
    }

    #[test]
    fn a_failed_step_takes_back_what_came_after_it() {
        let mut ends = Ends::cached(8);
        staged(&mut ends, 1, 1, 9);
        staged(&mut ends, 2, 1, 9);
        ends.commit(1, 1, 9).unwrap();
        ends.commit(2, 1, 10).unwrap();
        assert_eq!(ends.redo(2, 11), Some(Redo { from: 9, known: 10 }));
        assert_eq!(ends.redo(1, 11), Some(Redo { from: 8, known: 9 }));
        ends.prune(1);
        assert_eq!(ends.redo(1, 11), None, "a complete step does not fail");
    }
}
