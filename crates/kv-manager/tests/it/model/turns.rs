//! The next tokens of the engine's sequences, and what comes of them.

use super::engine::Engine;
use super::run::{Run, blocks_of};
use crate::prelude::*;

impl Engine {
    pub fn pick(&mut self) -> Option<usize> {
        if self.runs.is_empty() { None } else { Some(self.random.index(self.runs.len())) }
    }

    /// Takes in the end of a call that could not be made for what the sequence is; whether it is that.
    pub fn refused(&mut self, at: usize, error: SequenceError) {
        let run = &mut self.runs[at];
        match error {
            SequenceError::Redo { from } => {
                run.set_back(from, &self.failures);
                self.saw("a redo");
            }
            SequenceError::Lost { .. } => {
                assert!(run.lost, "sequence {} is not lost", run.key);
                self.runs.remove(at);
                self.saw("a lost sequence");
            }
            SequenceError::Arriving => assert!(run.arriving),
            SequenceError::Loading { ticket } => {
                assert_eq!(run.sequence.loads(), Some(ticket));
                self.saw("a call that waits for a load to end");
            }
            SequenceError::Suspended => assert!(run.sequence.is_suspended()),
            other => panic!("{other:?}"),
        }
    }

    /// What a call that was made says of the sequence.
    pub fn accepted(&self, at: usize) {
        let run = &self.runs[at];
        assert!(!run.must_redo, "sequence {} was not told of a failed step", run.key);
        assert!(!run.lost, "sequence {} was not told of a lost worker", run.key);
    }

    /// Reserves the next tokens of a sequence or of all.
    pub fn go_on(&mut self) {
        if self.random.chance(50) {
            let Some(at) = self.pick() else { return };
            self.reserve(at);
            return;
        }
        for at in (0..self.runs.len()).rev() {
            if self.random.chance(80) {
                self.reserve(at);
            }
        }
    }

    fn reserve(&mut self, at: usize) {
        let run = &self.runs[at];
        // An engine knows the next id, or that a step samples it.
        let left = run.left();
        let tokens = match left {
            0 => return,
            1 => 1,
            _ => self.random.from(1, left),
        };
        let most = self.size.drafts_max();
        let drafts = tokens == left && most > 0 && self.random.chance(self.habits.drafts);
        let tokens = tokens + if drafts { self.random.from(1, most) } else { 0 };
        let run = &self.runs[at];
        let before = (run.view(&self.manager), run.blocks.clone());
        let (resolved, upper) = (run.sequence.resolved(), run.sequence.upper());
        let run = &mut self.runs[at];
        let reserved = match self.manager.reserve(&mut run.sequence, tokens as u32) {
            Ok(Room::Given(reserved)) => reserved,
            Err(ReserveError::Sequence(error)) => return self.refused(at, error),
            Ok(Room::Lacks(no_room)) => {
                if let NoRoom::Blocks(missing) = &no_room
                    && let ClaimError::Exhausted { requested, claimable, .. } = missing.reason
                {
                    assert!(requested > claimable, "{missing:?}");
                }
                run.view(&self.manager).check_kept(&before.0);
                return self.no_room(at);
            }
            Err(ReserveError::TooLong { blocks, max }) => {
                assert!(blocks > max);
                assert_eq!(run.view(&self.manager), before.0);
                let run = self.runs.remove(at);
                self.leave(run);
                return;
            }
            Err(error) => panic!("{error:?}"),
        };
        self.accepted(at);
        let run = &mut self.runs[at];
        let adopted = reserved.adopted_tokens;
        if adopted > 0 {
            assert!(!run.is_open(), "adopted while ids are to come");
            run.ideal.fill(resolved + adopted, self.generation);
            let end = (resolved + adopted).min(run.hit_max);
            assert_eq!(end, resolved + adopted, "more than may come from the cache");
        }
        let run = &self.runs[at];
        assert_eq!(run.sequence.resolved(), resolved + adopted);
        assert!(run.sequence.next() > 0 && u64::from(run.sequence.next()) <= tokens);
        self.check_blocks(at, &before.1, resolved, upper, reserved);
        self.reserve_draft(at);
        self.saw_if(adopted > 0, "an adoption");
        self.saw_if(reserved.copied, "a copy on write");
        self.saw_if(self.runs[at].is_open(), "a reservation with ids to come");
    }

    /// Has the draft model compute some tokens in the next step, or none.
    fn reserve_draft(&mut self, at: usize) {
        if !self.size.has_draft_model() || self.random.chance(30) {
            return;
        }
        let run = &self.runs[at];
        let upper = run.sequence.upper() + u64::from(run.sequence.next());
        let left = upper - run.sequence.draft_end();
        let tokens = match self.random.below(3) {
            0 => self.random.from(0, left + 3),
            1 => left,
            _ => self.random.from(0, 4),
        };
        let run = &mut self.runs[at];
        let before = run.view(&self.manager);
        match self.manager.reserve_draft(&mut run.sequence, tokens as u32) {
            Ok(Room::Given(())) => {}
            Ok(Room::Lacks(_)) | Err(ReserveError::TooLong { .. }) => {
                run.view(&self.manager).check_kept(&before);
                self.saw("no room for a draft model");
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Says how far the draft model has come.
    fn commit_draft(&mut self, at: usize) {
        if self.random.chance(30) {
            return self.commit_late_draft(at);
        }
        let run = &mut self.runs[at];
        if run.drafted.is_empty() || run.tainted || run.sequence.is_suspended() || run.arriving {
            return;
        }
        let (step, tokens) = run.drafted.remove(0);
        let before = run.sequence.draft_end();
        let certain = run.sequence.resolved().min(run.sequence.known());
        let end = tokens.end.min(certain);
        if tokens.start > before || end < before {
            return;
        }
        match self.manager.commit_draft(&mut run.sequence, step, end) {
            Ok(Committed::Taken) => {}
            Ok(Committed::Redo { from }) => return self.refused(at, SequenceError::Redo { from }),
            Err(DraftError::Sequence(error)) => return self.refused(at, error),
            // Of a prefix that is being loaded, nothing is certain.
            Err(DraftError::Beyond { .. }) => {
                return assert!(run.sequence.loads().is_some());
            }
            other => panic!("{other:?}"),
        }
        self.accepted(at);
        assert_eq!(self.runs[at].sequence.draft_end(), end);
        self.saw("an end of a draft model");
        self.saw_if(step <= self.completed(), "an end of a draft model after its step");
    }

    /// What the draft model has computed before a cut changes nothing, however late it comes.
    fn commit_late_draft(&mut self, at: usize) {
        let before = self.runs[at].view(&self.manager);
        let run = &mut self.runs[at];
        let Some((step, tokens)) = run.late_drafted.pop() else { return };
        let end = run.sequence.draft_end();
        match self.manager.commit_draft(&mut run.sequence, step, tokens.end) {
            Ok(Committed::Stale) => {}
            Ok(Committed::Redo { from }) => return self.refused(at, SequenceError::Redo { from }),
            Err(DraftError::Sequence(error)) => return self.refused(at, error),
            other => panic!("{other:?}"),
        }
        assert_eq!((run.view(&self.manager), run.sequence.draft_end()), (before, end));
        self.accepted(at);
        self.saw("a late end of a draft model");
    }

    /// Checks which blocks a sequence has got that had `before`, and whose KV ended at `resolved`.
    fn check_blocks(
        &mut self,
        at: usize,
        before: &[BlockId],
        resolved: u64,
        upper: u64,
        reserved: Reserved,
    ) {
        let sequence = &self.runs[at].sequence;
        let blocks = blocks_of(sequence);
        let block_tokens = self.size.block_tokens as u64;
        let adopted = resolved + reserved.adopted_tokens;
        let mut claimed = Vec::new();
        for (index, &id) in blocks.iter().enumerate() {
            let first = index as u64 * block_tokens;
            let is_adopted = first >= resolved && first < adopted;
            let is_copied = reserved.copied && upper / block_tokens == index as u64;
            match before.get(index) {
                Some(&was) if was == id => {}
                Some(_) => {
                    assert!(is_adopted || is_copied, "{before:?} to {blocks:?}: {reserved:?}");
                    claimed.extend(is_copied.then_some(id));
                }
                None if is_adopted => {}
                None => claimed.push(id),
            }
        }
        let end = upper + reserved.adopted_tokens + u64::from(sequence.next());
        let needed = (end as usize).div_ceil(self.size.block_tokens);
        assert_eq!(blocks.len(), needed.max(before.len()), "{reserved:?}");
        if self.size.further.is_empty() {
            assert_eq!(claimed.len(), reserved.blocks, "{reserved:?}")
        } else {
            assert!(claimed.len() <= reserved.blocks, "{reserved:?}")
        }
        self.check_claimed(&claimed);
        self.runs[at].blocks = blocks;
    }

    fn no_room(&mut self, at: usize) {
        self.saw("no room for a token");
        // An engine makes room by taking a sequence back.
        let victim = self.random.index(self.runs.len());
        match self.random.below(3) {
            0 => self.suspend(victim),
            1 => drop(self.runs.remove(victim)),
            _ => _ = at,
        }
    }

    /// The sequence has ended: its ids are the beginning of later prompts.
    pub fn leave(&mut self, run: Run) {
        let ids = run.ideal.ids.clone();
        if self.history.len() < 4 {
            self.history.push(ids);
        } else {
            let at = self.random.index(4);
            self.history[at] = ids;
        }
        self.saw_if(run.is_open(), "a drop with ids to come");
        drop(run);
    }

    pub fn commit_some(&mut self) {
        for at in (0..self.runs.len()).rev() {
            if self.random.chance(70) {
                self.commit(at);
            }
            if at < self.runs.len() && self.random.chance(60) {
                self.mirror.look(&self.manager, 0);
                self.commit_draft(at);
                let latest = self.latest_staged();
                self.mirror.look(&self.manager, latest);
            }
        }
    }

    /// Whether a worker has carried out a step.
    fn is_carried(&self, step: u64) -> bool {
        let carried = self.workers.iter().flatten().map(|worker| worker.carried);
        carried.max().is_some_and(|carried| carried >= step)
    }

    fn commit(&mut self, at: usize) {
        let run = &mut self.runs[at];
        if let Some(old) = run.stale.pop() {
            return self.commit_stale(at, old.step, &old.ids);
        }
        let Some(output) = run.outputs.front().cloned() else {
            return self.commit_to_no_step(at);
        };
        if !self.is_carried(output.step) {
            return;
        }
        if self.random.chance(10) {
            self.commit_wrongly(at);
            return;
        }
        let mut ids = output.ids.clone();
        if output.void && self.random.chance(40) {
            // Mostly nothing comes back of a void step before its failure is known.
            if !self.runs[at].must_redo {
                return;
            }
        }
        let garbled = output.void && self.random.chance(40);
        if garbled {
            ids.iter_mut().for_each(|id| *id += 7);
        }
        // An engine may stop at an id in the middle.
        let leaves = self.runs[at].sequence.is_suspended();
        let last = self.runs[at].outputs.len() == 1;
        let stops = !output.void && !leaves && self.random.chance(8);
        if stops {
            // A state goes back to any draft of the last step, and to none that a later step has gone on behind.
            let most = if self.size.has_state() && !last { 0 } else { ids.len() };
            ids.truncate(self.random.index(most + 1));
        }
        // Something was computed behind the end that is ignored.
        let ends = ids.is_empty() && !(last && output.led);
        self.mirror.look(&self.manager, 0);
        let run = &mut self.runs[at];
        let names = run.names_behind(&run.ideal.facts, &ids);
        let tokens = run.tokens(&ids, &names);
        match self.manager.commit(&mut run.sequence, output.step, tokens) {
            Ok(Committed::Taken) => {
                self.mirror.look(&self.manager, output.step);
            }
            Ok(Committed::Redo { from }) => {
                return self.refused(at, SequenceError::Redo { from });
            }
            Err(CommitError::Sequence(error)) => return self.refused(at, error),
            other => panic!("{other:?}"),
        }
        self.accepted(at);
        let run = &mut self.runs[at];
        if !ids.is_empty() {
            run.commits.push((output.step, run.known.len() as u64));
        }
        run.known.extend(&ids);
        run.tainted |= garbled;
        run.outputs.pop_front();
        if leaves && run.outputs.is_empty() {
            self.has_left(at);
        }
        let run = &mut self.runs[at];
        if ends {
            run.cut();
            self.saw("an end that was ignored");
            return self.supply(at);
        }
        self.saw_if(garbled, "garbage was committed");
        self.check_commit(at, output.step, stops);
        if stops {
            self.stop(at);
        }
    }

    /// Checks a sequence whose ids of a step were committed, all of them or the first ones.
    fn check_commit(&mut self, at: usize, step: u64, stops: bool) {
        let run = &self.runs[at];
        assert_eq!(blocks_of(&run.sequence), run.blocks, "a commit changes no block");
        let resolved = run.sequence.resolved();
        if run.outputs.is_empty() && !stops && !run.tainted {
            assert_eq!(resolved, run.ideal.kv.len() as u64, "all ids are known");
        }
        let known = self.completed() >= step;
        self.saw_if(known, "a commit after the step was complete");
        self.saw_if(self.runs[at].is_open(), "a commit with later ids to come");
    }

    /// A commit of a step that the sequence is not in.
    fn commit_to_no_step(&mut self, at: usize) {
        let run = &mut self.runs[at];
        let none = run.tokens(&[], &[]);
        match self.manager.commit(&mut run.sequence, 1 << 40, none) {
            Err(CommitError::NotStaged { .. }) => self.accepted(at),
            Err(CommitError::Sequence(error)) => self.refused(at, error),
            Ok(Committed::Redo { from }) => self.refused(at, SequenceError::Redo { from }),
            other => panic!("{other:?}"),
        }
    }

    /// The engine has not taken all ids of a step: those of the steps behind it mean nothing.
    fn stop(&mut self, at: usize) {
        self.saw("a stop in the middle");
        let run = &mut self.runs[at];
        let cuts = self.random.chance(50);
        let late = !run.outputs.is_empty();
        if cuts {
            let known = run.sequence.known();
            match self.manager.truncate(&mut run.sequence, known) {
                Ok(end) => assert_eq!(end, run.sequence.resolved()),
                Err(error) => panic!("{error:?}"),
            }
        } else if let Some(next) = run.outputs.pop_front() {
            // No id of the next step is taken, so those of the steps behind it are stale.
            let nothing = run.tokens(&[], &[]);
            let taken = self.manager.commit(&mut run.sequence, next.step, nothing).unwrap();
            assert_eq!(taken, Committed::Taken);
            run.stale.push(next);
        }
        let run = &mut self.runs[at];
        let (known, resolved) = (run.sequence.known(), run.sequence.resolved());
        assert_eq!(known, run.known.len() as u64);
        run.forget_commits();
        run.ideal.cut(known, resolved);
        run.stale.extend(run.outputs.drain(..));
        if cuts || late {
            run.void_drafts();
        }
        // What the draft model was given behind is not what was taken.
        run.drafted.iter_mut().for_each(|(_, tokens)| tokens.end = tokens.end.min(resolved));
        run.blocks = blocks_of(&run.sequence);
        self.supply(at);
    }

    fn commit_stale(&mut self, at: usize, step: u64, ids: &[u32]) {
        let before = self.runs[at].view(&self.manager);
        let run = &mut self.runs[at];
        let count = ids.len();
        let tokens = run.tokens(ids, &[]);
        match self.manager.commit(&mut run.sequence, step, tokens) {
            Ok(Committed::Stale) => {
                assert_eq!(run.view(&self.manager), before, "{count} stale ids");
                self.saw("stale ids");
                self.accepted(at);
            }
            Ok(Committed::Redo { from }) => self.refused(at, SequenceError::Redo { from }),
            Err(CommitError::Sequence(error)) => self.refused(at, error),
            other => panic!("{other:?}"),
        }
    }

    /// Commits that cannot be.
    fn commit_wrongly(&mut self, at: usize) {
        let before = self.runs[at].view(&self.manager);
        let run = &mut self.runs[at];
        let outputs: Vec<u64> = run.outputs.iter().map(|output| output.step).collect();
        let named = run.ideal.facts.named;
        let too_many = vec![1; 100];
        let none = run.tokens(&[], &[]);
        let refused = match outputs.get(1) {
            Some(&second) if self.random.chance(50) => {
                self.manager.commit(&mut run.sequence, second, none)
            }
            _ if !named => self.manager.commit(&mut run.sequence, outputs[0], &too_many),
            _ => self.manager.commit(&mut run.sequence, outputs[0], &[1]),
        };
        match refused {
            Err(CommitError::OutOfOrder { .. } | CommitError::TooManyIds { .. }) => {}
            Err(CommitError::Tokens(_)) if named => {}
            Err(CommitError::Sequence(error)) => return self.refused(at, error),
            Ok(Committed::Redo { from }) => return self.refused(at, SequenceError::Redo { from }),
            other => panic!("{other:?}"),
        }
        self.accepted(at);
        assert_eq!(self.runs[at].view(&self.manager), before);
        self.saw("a commit that was refused");
    }
}
