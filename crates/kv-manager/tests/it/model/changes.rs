//! What becomes of sequences beside their next tokens.

use super::engine::Engine;
use super::run::{Run, blocks_of};
use crate::prelude::*;

impl Engine {
    /// Something else than the next token.
    pub fn change(&mut self) {
        let Some(at) = self.pick() else { return };
        match self.random.below(10) {
            0..2 => {
                let run = self.runs.remove(at);
                self.leave(run);
            }
            2..4 => self.truncate(at),
            4 => self.extend(at),
            5..7 => self.fork(at),
            7 => self.suspend(at),
            _ => self.resume(at),
        }
    }

    /// Content comes back from host memory before anybody asks for it, or is forgotten.
    pub fn hint(&mut self) {
        if let Some(at) = self.pick().filter(|_| self.random.chance(10)) {
            let priority = Priority::new(self.random.below(100) as u8).unwrap();
            self.manager.retain(&self.runs[at].sequence, priority);
            return self.saw("a retention of a sequence");
        }
        let blocks = self.manager.pool(GroupId(0)).unwrap().snapshot().blocks;
        let far = |at: Location| at.tier != Tier::Primary;
        let forgets = self.random.chance(20);
        let named = blocks.iter().filter(|view| forgets || far(view.location));
        let names: Vec<_> = named.filter_map(|view| view.hash).collect();
        if names.is_empty() {
            return;
        }
        let name = names[self.random.index(names.len())];
        if forgets {
            assert!(self.manager.forget(&[name]) >= 1);
            self.forgotten.push(name);
            return self.saw("a name that was forgotten");
        }
        let back = self.manager.prefetch(&[name]);
        assert!(back <= 1 + self.size.further.len());
        self.saw_if(back > 0, "a prefetch");
    }

    fn truncate(&mut self, at: usize) {
        let before = self.runs[at].view(&self.manager);
        let run = &mut self.runs[at];
        let known = run.sequence.known();
        let resolved = run.sequence.resolved();
        let block_tokens = self.size.block_tokens as u64;
        let tokens = match self.random.below(8) {
            0 => 0,
            1 => known,
            2 => known + 1,
            3..5 => known / block_tokens * block_tokens,
            _ => self.random.from(0, known),
        };
        match self.manager.truncate(&mut run.sequence, tokens) {
            Ok(end) => assert_eq!(end, run.sequence.resolved()),
            Err(ChangeError::Sequence(error)) => return self.refused(at, error),
            Err(ChangeError::Beyond { .. }) => {
                assert!(tokens > known);
                assert_eq!(run.view(&self.manager), before);
                return;
            }
            Err(error) => panic!("{error:?}"),
        }
        self.accepted(at);
        let open = self.runs[at].is_open();
        let run = &mut self.runs[at];
        let input_cut = run.ideal.later.iter().any(|&at| at >= tokens);
        assert_eq!(run.sequence.known(), tokens);
        run.forget_commits();
        run.cut();
        let end = self.runs[at].sequence.resolved();
        self.saw_if(end < resolved.min(tokens), "a cut that goes back further");
        self.saw_if(end > 0 && end < resolved.min(tokens), "a cut back to a checkpoint or window");
        self.saw("a cut");
        self.saw_if(input_cut, "an input that was cut");
        self.saw_if(open, "a cut with ids to come");
        self.supply(at);
    }

    /// Sees to it that there is a token to go on with: behind a cut, the last one's output is not known.
    pub fn supply(&mut self, at: usize) {
        if self.runs[at].left() == 0 && self.random.chance(90) {
            self.extend(at);
        }
    }

    fn extend(&mut self, at: usize) {
        let before = self.runs[at].view(&self.manager);
        let count = self.random.from(1, 6) as usize;
        let base = self.random.below(3) as u32 * 100;
        let run = &mut self.runs[at];
        let more: Vec<u32> = (0..count).map(|index| base + index as u32).collect();
        // A picture, say, where nothing was said of before.
        let (known, offset) = (run.known.len() as u64, self.random.below(count as u64));
        let is_new = run.ideal.facts.inputs.iter().all(|(at, _)| *at != known + offset);
        let input = (is_new && !run.tainted && !run.is_open() && self.random.chance(30))
            .then(|| (offset, self.random.below(2) as u8));
        let mut ideal = run.ideal.clone();
        if let Some((at, content)) = input {
            ideal.add_input(known + at, content);
        }
        let inputs: Vec<_> = input.iter().map(|&(at, content)| (at, vec![content])).collect();
        let names = run.names_behind(&ideal.facts, &more);
        let tokens = match run.tokens(&more, &names) {
            Tokens::Ids(ids) if input.is_some() => Tokens::With { ids, inputs: &inputs },
            tokens => tokens,
        };
        match self.manager.extend(&mut run.sequence, tokens) {
            Ok(()) => {}
            Err(ChangeError::Sequence(error)) => return self.refused(at, error),
            Err(ChangeError::Later) => {
                assert!(run.is_open());
                assert_eq!(run.view(&self.manager), before);
                return;
            }
            Err(error) => panic!("{error:?}"),
        }
        assert!(!run.is_open());
        run.ideal = ideal;
        run.known.extend(&more);
        if run.tainted {
            // Garbage is before it, so all of it is forgotten.
            run.ideal.ids.extend(more);
        } else {
            run.ideal.ids.clone_from(&run.known);
        }
        self.accepted(at);
        self.saw("a next turn");
        self.saw_if(input.is_some(), "a turn with an input");
    }

    fn fork(&mut self, at: usize) {
        let before = self.runs[at].view(&self.manager);
        let reserved = self.runs[at].sequence.next();
        let run = &mut self.runs[at];
        let twin = match self.manager.fork(&mut run.sequence) {
            Ok(twin) => twin,
            Err(ChangeError::Sequence(error)) => return self.refused(at, error),
            Err(error) => {
                match error {
                    ChangeError::Later => assert!(run.is_open()),
                    ChangeError::NoRow { .. } => assert_eq!(self.manager.free_rows(), 0),
                    other => panic!("{other:?}"),
                }
                assert_eq!(run.view(&self.manager), before);
                return;
            }
        };
        assert!(!run.is_open());
        assert_eq!(twin.draft_end(), run.sequence.draft_end());
        let drafted = !run.drafted.is_empty();
        run.void_drafts();
        assert_eq!(blocks_of(&run.sequence), run.blocks, "a fork replaces no block");
        let resolved = run.sequence.resolved();
        assert_eq!((twin.resolved(), twin.known()), (resolved, run.sequence.known()));
        assert_eq!((twin.next(), run.sequence.next()), (0, 0), "it is to be reserved again");
        let blocks = blocks_of(&twin);
        assert_eq!(blocks, run.blocks[..blocks.len()], "a twin shares every block");
        assert_eq!(blocks.len(), (resolved as usize).div_ceil(self.size.block_tokens));
        let twin = Run {
            key: self.next_key,
            sequence: twin,
            ideal: run.ideal.clone(),
            known: run.known.clone(),
            tainted: run.tainted,
            outputs: VecDeque::new(),
            stale: Vec::new(),
            steps: run.steps.clone(),
            must_redo: false,
            lost: false,
            arriving: false,
            blocks,
            commits: run.commits.clone(),
            drafted: Vec::new(),
            late_drafted: Vec::new(),
            hit_max: run.hit_max,
        };
        self.next_key += 1;
        self.accepted(at);
        self.saw("a fork");
        self.saw_if(drafted, "a fork of what a draft model has computed");
        self.saw_if(self.size.has_state(), "a fork of a state");
        self.saw_if(reserved > 0, "a fork of a sequence with tokens reserved");
        self.runs.push(twin);
    }

    pub fn suspend(&mut self, at: usize) {
        let before = self.runs[at].view(&self.manager);
        let run = &mut self.runs[at];
        match self.manager.suspend(&mut run.sequence) {
            Ok(()) => {}
            Err(SuspendError::Sequence(error)) => return self.refused(at, error),
            Err(error) => {
                match error {
                    SuspendError::NoRoom(_) => {}
                    other => panic!("{other:?}"),
                }
                assert_eq!(run.view(&self.manager), before);
                return self.saw("a suspension that was refused");
            }
        }
        assert!(run.sequence.is_suspended() && run.sequence.next() == 0);
        self.accepted(at);
        if !self.runs[at].is_open() {
            return self.has_left(at);
        }
        let run = &self.runs[at];
        assert_eq!(
            (run.sequence.row(), blocks_of(&run.sequence)),
            (before.row(), run.blocks.clone())
        );
        self.saw("a suspension that waits for ids");
    }

    /// A suspended sequence has left the device.
    pub fn has_left(&mut self, at: usize) {
        let run = &mut self.runs[at];
        assert!(run.sequence.is_suspended() && run.sequence.row().is_none());
        assert_eq!(run.sequence.block_count(GroupId(0)), 0);
        run.blocks.clear();
        self.saw("a suspension");
    }

    fn resume(&mut self, at: usize) {
        let before = self.runs[at].view(&self.manager);
        let run = &mut self.runs[at];
        let resolved = run.sequence.resolved();
        let end = match self.manager.resume(&mut run.sequence) {
            Ok(Room::Given(end)) => end,
            Err(SuspendError::Sequence(SequenceError::Redo { .. })) => {
                panic!("a resume says by its answer where it begins again")
            }
            Err(SuspendError::Sequence(error)) => return self.refused(at, error),
            refused => {
                match refused {
                    Err(SuspendError::NotSuspended) => assert!(!run.sequence.is_suspended()),
                    Ok(Room::Lacks(NoRoom::Row)) => assert_eq!(self.manager.free_rows(), 0),
                    Ok(Room::Lacks(_)) => {}
                    other => panic!("{other:?}"),
                }
                let changed = run.view(&self.manager) != before;
                if run.sequence.is_suspended() && (run.must_redo || changed) {
                    return self.set_back_unheard(at);
                }
                assert_eq!(run.view(&self.manager), before);
                return;
            }
        };
        assert!(end <= resolved && !run.sequence.is_suspended());
        assert_eq!(end, run.sequence.resolved());
        if before.row().is_some() && run.must_redo {
            run.set_back(end, &self.failures);
            self.accepted(at);
            return self.saw("a suspension that a failure takes back");
        }
        if before.row().is_some() {
            assert!(run.is_open() && blocks_of(&run.sequence) == run.blocks);
            run.view(&self.manager).check_kept(&before);
            self.accepted(at);
            return self.saw("a suspension that is taken back");
        }
        self.saw("a resumption");
        self.saw_if(end < resolved, "a resumption that begins again");
        let further = !self.size.further.is_empty() && end > 0;
        self.saw_if(further, "a resumption in several groups");
        let run = &mut self.runs[at];
        run.check_forgotten(&self.failures);
        run.must_redo = false;
        run.steps.retain(|step| !self.failures.told.contains(step));
        run.blocks.clear();
        run.cut();
        let hits = (end as usize).div_ceil(self.size.block_tokens).min(run.blocks.len());
        let claimed = run.blocks[hits..].to_vec();
        self.check_claimed(&claimed);
        self.accepted(at);
    }

    /// A resume that had no room has set the sequence back all the same.
    fn set_back_unheard(&mut self, at: usize) {
        let run = &mut self.runs[at];
        let from = run.sequence.resolved();
        run.set_back(from, &self.failures);
        self.saw("a resumption set back without room");
    }
}
