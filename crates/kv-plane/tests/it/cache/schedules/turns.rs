//! Requests, the next tokens of sequences, and what else becomes of them.

use kv_plane::manager::{AdmitError, DraftError, ReserveError as Refusal, SuspendError};
use kv_pool::Priority;

use super::play::{Play, Wish};
use super::run::{Facts, Output, Run};
use super::workers::Hands;

use crate::prelude::*;

impl<H: Hands> Play<H> {
    /// A sequence that no transfer fills.
    fn pick(&mut self) -> Option<usize> {
        let there: Vec<usize> =
            (0..self.runs.len()).filter(|&at| !self.runs[at].arriving).collect();
        if there.is_empty() { None } else { Some(self.random.pick(&there)) }
    }

    /// Makes up a request.
    fn wish(&mut self) -> Wish {
        let of = self.cache.options().groups[0];
        let most = of.blocks_per_sequence_max * of.shape.block_tokens();
        let largest = self.groups.iter().map(|group| group.shape.block_tokens()).max().unwrap();
        let random = &mut self.random;
        let longest = if random.chance(3) { most + 2 } else { most * 2 / 3 };
        let tokens = random.from(1, longest.into()) as usize;
        // Few different prompts, most of which begin alike; some go on from what runs now, and like that.
        let running = self.runs.get(random.index(self.runs.len() + 2));
        let before = match running {
            Some(run) => Some((run.facts, run.ids.clone())),
            None if self.history.is_empty() || random.chance(30) => None,
            None => Some(self.history[random.index(self.history.len())].clone()),
        };
        let same = before.is_some() && random.chance(80);
        let (facts, mut ids) = before.unwrap_or((Facts { tenant: 0, shared: 0 }, Vec::new()));
        let facts = if same {
            facts
        } else {
            let shared = if random.chance(40) { random.from(0, 3) * u64::from(largest) } else { 0 };
            Facts { tenant: random.index(self.tenants.len()), shared }
        };
        if let Some(run) = self.runs.iter().find(|run| run.left() > 1).filter(|_| random.chance(25))
        {
            // The same once more, while it is being computed.
            return Wish { facts: run.facts, ids: run.ids.clone() };
        }
        ids.truncate(tokens);
        if random.chance(30) {
            ids.truncate(random.from(0, ids.len() as u64) as usize);
        }
        let other = random.from(0, 2) as u32 * 100;
        ids.extend((ids.len()..tokens).map(|at| at as u32 + other));
        Wish { facts, ids }
    }

    pub(super) fn request(&self, wish: &Wish) -> Request {
        let mut request = Request::new(wish.ids.clone());
        request.content.shared_tokens = wish.facts.shared;
        request.tenant = self.tenants[wish.facts.tenant];
        request
    }

    pub(super) fn admit(&mut self) {
        while self.queue.len() < self.random.from(0, 2) as usize {
            let wish = self.wish();
            let mut request = self.request(&wish);
            request.waits = self.random.chance(60);
            request.by_layers = self.random.chance(60);
            if self.random.chance(15) {
                request.hit_max = self.random.from(0, request.tokens());
            }
            self.queue.push_back((wish, request));
        }
        if self.random.chance(5) {
            self.queue.pop_front();
        }
        let budget = if self.random.chance(50) { 64 } else { self.random.from(0, 10) };
        let Admission { admitted, refused, waiting, no_room } =
            match self.cache.admit(&mut self.queue, budget) {
                Ok(admission) => admission,
                Err(error) => return self.trouble(error),
            };
        for ((wish, request), sequence) in admitted {
            let run = Run::new(self.next_number, sequence, wish.facts, wish.ids);
            self.enter(run, request.hit_max);
            self.saw("an admission");
        }
        for (_, error) in refused {
            let bound = matches!(error, AdmitError::NeverFitsTenant { .. });
            self.saw_if(bound, "a request beyond its tenant's bound");
        }
        for (_, waiting) in waiting {
            self.saw(match waiting {
                Waiting::Prefix { .. } => "a request that waits",
                Waiting::Load { .. } => "a request that waits for a load",
                Waiting::Bound(_) => "a tenant at its bound",
            });
        }
        match no_room {
            Some((_, NoRoom::Row)) => self.saw("no row"),
            Some((_, NoRoom::Blocks(_))) => self.saw("no room for a request"),
            Some((_, NoRoom::Bound(_))) => panic!("a request at a bound waits"),
            None => {}
        }
    }

    /// Takes in a sequence that was admitted, of which nothing was found but what was computed before.
    pub(super) fn enter(&mut self, mut run: Run, hit_max: u64) {
        let cached = run.sequence.cached_tokens();
        assert!(cached < run.ids.len() as u64 && cached <= hit_max, "{cached} tokens were found");
        assert_eq!(run.sequence.resolved(), cached);
        run.fill(cached, self.generation);
        for at in 0..cached {
            assert!(
                self.computed.contains(&run.key(at)),
                "token {at} of {cached} was not computed"
            );
        }
        self.next_number += 1;
        self.saw_if(cached > 0, "a hit");
        self.saw_if(run.load.is_some(), "an admission before its load had ended");
        self.runs.push(run);
    }

    /// Reserves the next tokens of most sequences.
    pub(super) fn go_on(&mut self) {
        for at in (0..self.runs.len()).rev() {
            // One before may have made room by this one.
            if at < self.runs.len() && self.random.chance(85) {
                self.reserve(at);
            }
        }
    }

    fn reserve(&mut self, at: usize) {
        let left = self.runs[at].left();
        let tokens = match left {
            0 => return self.supply(at),
            1 => 1,
            _ => self.random.from(1, left),
        };
        let most = self.drafts_max();
        let drafts = tokens == left && most > 0 && self.random.chance(self.habits.drafts);
        let tokens = tokens + if drafts { self.random.from(1, most) } else { 0 };
        let run = &mut self.runs[at];
        let resolved = run.sequence.resolved();
        let reserved = match self.cache.reserve(&mut run.sequence, tokens as u32) {
            Ok(Room::Given(reserved)) => reserved,
            Ok(Room::Lacks(_)) => return self.no_room(),
            Err(ReserveError::Refused(Refusal::Sequence(error))) => return self.refused(at, error),
            Err(ReserveError::Refused(Refusal::TooLong { .. })) => {
                return self.leave(at);
            }
            Err(ReserveError::Refused(error)) => panic!("{error:?}"),
            Err(error) => return self.trouble(error),
        };
        run.note_load(true);
        let adopted = reserved.adopted_tokens;
        if adopted > 0 {
            assert!(run.outputs.is_empty(), "adopted while ids are to come");
            run.fill(resolved + adopted, self.generation);
        }
        let open = !run.outputs.is_empty();
        assert_eq!(run.sequence.resolved(), resolved + adopted);
        self.saw_if(adopted > 0, "an adoption");
        self.saw_if(open, "a reservation with ids to come");
        self.reserve_draft(at);
    }

    /// Has the draft model compute some tokens in the next step, or none.
    fn reserve_draft(&mut self, at: usize) {
        if !self.has_draft_model() || self.random.chance(30) {
            return;
        }
        let run = &mut self.runs[at];
        let upper = run.sequence.upper() + u64::from(run.sequence.next());
        let left = upper - run.sequence.draft_end();
        let tokens = match self.random.index(3) {
            0 => self.random.from(0, left + 3),
            1 => left,
            _ => self.random.from(0, 4),
        };
        match self.cache.reserve_draft(&mut run.sequence, tokens as u32) {
            Ok(Room::Given(())) => {}
            Ok(Room::Lacks(_)) | Err(ReserveError::Refused(Refusal::TooLong { .. })) => {
                self.saw("no room for a draft model");
            }
            Err(error) => self.trouble(error),
        }
    }

    /// An engine makes room by taking a sequence back.
    fn no_room(&mut self) {
        self.saw("no room for a token");
        let Some(victim) = self.pick() else { return };
        match self.random.index(3) {
            0 => self.suspend(victim),
            1 => self.leave(victim),
            _ => {}
        }
    }

    /// A sequence has ended: its ids are the beginning of later prompts.
    fn leave(&mut self, at: usize) {
        let Run { facts, ids, .. } = self.runs.remove(at);
        if self.history.len() < 4 {
            self.history.push((facts, ids));
        } else {
            let at = self.random.index(4);
            self.history[at] = (facts, ids);
        }
    }

    pub(super) fn commit_some(&mut self) {
        for at in (0..self.runs.len()).rev() {
            while at < self.runs.len() && !self.random.chance(self.habits.lags) {
                if !self.commit(at) {
                    break;
                }
            }
            if at < self.runs.len() && self.random.chance(60) {
                self.commit_draft(at);
            }
        }
    }

    /// Takes in the ids that came out of a step; whether there may be more.
    fn commit(&mut self, at: usize) -> bool {
        let run = &mut self.runs[at];
        if let Some(Output { step, ids }) = run.stale.pop() {
            match self.cache.commit(&mut run.sequence, step, &ids) {
                Ok(Committed::Stale) => self.saw("stale ids"),
                Ok(Committed::Redo { from }) => {
                    self.refused(at, kv_plane::manager::SequenceError::Redo { from });
                }
                Err(CommitError::Sequence(error)) => self.refused(at, error),
                other => panic!("{other:?}"),
            }
            return true;
        }
        let Some(Output { step, ids }) = run.outputs.front().cloned() else { return false };
        match self.cache.commit(&mut run.sequence, step, &ids) {
            Ok(Committed::Taken) => {
                run.outputs.pop_front();
                run.note_load(true);
                self.saw("a commit");
                true
            }
            Ok(Committed::Redo { from }) => {
                self.refused(at, kv_plane::manager::SequenceError::Redo { from });
                false
            }
            Err(CommitError::Sequence(error)) => {
                self.refused(at, error);
                false
            }
            other => panic!("{other:?}"),
        }
    }

    /// Says how far the draft model has come.
    fn commit_draft(&mut self, at: usize) {
        let run = &mut self.runs[at];
        if run.sequence.is_suspended() || run.arriving {
            return;
        }
        let Some((step, tokens)) = run.drafted.pop_front() else { return };
        let before = run.sequence.draft_end();
        let end = tokens.end.min(run.sequence.resolved()).min(run.sequence.known());
        if tokens.start > before || end < before {
            return;
        }
        match self.cache.commit_draft(&mut run.sequence, step, end) {
            Ok(Committed::Taken) => self.saw("an end of a draft model"),
            Ok(Committed::Redo { from }) => {
                self.refused(at, kv_plane::manager::SequenceError::Redo { from });
            }
            Err(DraftError::Sequence(error)) => self.refused(at, error),
            // Of a prefix that is being loaded, nothing is certain.
            Err(DraftError::Beyond { .. }) if run.sequence.loads().is_some() => {}
            other => panic!("{other:?}"),
        }
    }

    /// Something else than the next token.
    pub(super) fn change(&mut self) {
        if self.random.chance(35) {
            return self.change_cache();
        }
        let Some(at) = self.pick() else { return };
        match self.random.index(11) {
            0 | 1 => self.leave(at),
            2 | 3 => self.truncate(at),
            4 => self.extend(at),
            5 | 6 => self.fork(at),
            7 => self.suspend(at),
            8 | 9 => self.resume(at),
            _ => self.depart(at),
        }
    }

    fn truncate(&mut self, at: usize) {
        let run = &mut self.runs[at];
        let known = run.sequence.known();
        let tokens = match self.random.index(6) {
            0 => 0,
            1 => known,
            2 | 3 => known / 4 * 4,
            _ => self.random.from(0, known),
        };
        let end = match self.cache.truncate(&mut run.sequence, tokens) {
            Ok(end) => end,
            Err(ChangeError::Sequence(error)) => return self.refused(at, error),
            Err(error) => panic!("{error:?}"),
        };
        assert_eq!((run.sequence.known(), run.sequence.resolved()), (tokens, end));
        // Whether what a cut takes away was loaded right is not said any more.
        run.note_load(end >= run.sequence.cached_tokens());
        run.cut();
        self.saw("a cut");
        self.supply(at);
    }

    /// Sees to it that there is a token to go on with: behind a cut, the last one's output is not known.
    fn supply(&mut self, at: usize) {
        if self.runs[at].left() == 0 && self.random.chance(90) {
            self.extend(at);
        }
    }

    fn extend(&mut self, at: usize) {
        let base = self.random.from(0, 2) as u32 * 100;
        let more: Vec<u32> = (base..=base + self.random.from(0, 4) as u32).collect();
        let run = &mut self.runs[at];
        match self.cache.extend(&mut run.sequence, &more) {
            Ok(()) => {
                assert!(run.outputs.is_empty());
                run.ids.extend(more);
                run.note_load(true);
                self.saw("a next turn");
            }
            Err(ChangeError::Sequence(error)) => self.refused(at, error),
            Err(ChangeError::Later) => assert!(!run.outputs.is_empty()),
            Err(error) => panic!("{error:?}"),
        }
    }

    fn fork(&mut self, at: usize) {
        let run = &mut self.runs[at];
        let twin = match self.cache.fork(&mut run.sequence) {
            Ok(twin) => twin,
            Err(ChangeError::Sequence(error)) => return self.refused(at, error),
            Err(ChangeError::Later) => return assert!(!run.outputs.is_empty()),
            Err(ChangeError::NoRow { .. }) => return self.saw("no row"),
            Err(error) => panic!("{error:?}"),
        };
        assert!(run.outputs.is_empty());
        run.note_load(true);
        run.drafted.clear();
        let values = run.values.clone();
        let twin = Run::new(self.next_number, twin, run.facts, run.ids.clone());
        self.next_number += 1;
        self.runs.push(Run { values, ..twin });
        self.saw("a fork");
    }

    fn suspend(&mut self, at: usize) {
        let run = &mut self.runs[at];
        match self.cache.suspend(&mut run.sequence) {
            Ok(()) => {
                let waits = !run.outputs.is_empty();
                run.note_load(true);
                run.drafted.clear();
                self.saw_if(waits, "a suspension that waits for ids");
                self.saw("a suspension");
            }
            Err(SuspendError::Sequence(error)) => self.refused(at, error),
            Err(SuspendError::NoRoom(_)) => {}
            Err(error) => panic!("{error:?}"),
        }
    }

    fn resume(&mut self, at: usize) {
        let run = &mut self.runs[at];
        let was_here = run.sequence.row().is_some();
        match self.cache.resume(&mut run.sequence) {
            Ok(Room::Given(end)) => {
                assert_eq!(end, run.sequence.resolved());
                // One that has not left goes on, unless a step that it was in has failed.
                if !was_here || run.sequence.awaits().is_none() {
                    run.cut();
                }
                self.saw("a resumption");
            }
            Err(ResumeError::Refused(SuspendError::Sequence(error))) => self.refused(at, error),
            Err(ResumeError::Refused(SuspendError::NotSuspended)) => {}
            Ok(Room::Lacks(_)) => {
                // What failed steps have spoilt is forgotten all the same.
                if run.sequence.row().is_none() {
                    run.cut();
                }
            }
            Err(error) => self.trouble(error),
        }
    }

    /// A change that concerns no sequence of the engine's choice.
    fn change_cache(&mut self) {
        match self.random.index(8) {
            0 if self.random.chance(10 * self.habits.resets) => {
                self.cache.reset();
                self.generation += 1;
                self.saw("a reset");
            }
            1 => self.set_budget(),
            2 if self.tenants.len() > 1 => {
                let tenants = self.tenants[1..].to_vec();
                let tenant = self.random.pick(&tenants);
                self.bound(tenant);
            }
            3..6 => self.hint(),
            6 if !self.runs.is_empty() => {
                let at = self.random.index(self.runs.len());
                let priority = Priority::new(self.random.from(0, 100) as u8).unwrap();
                self.cache.retain(&self.runs[at].sequence, priority);
            }
            7 => self.end_transfer(),
            _ => {}
        }
    }

    fn set_budget(&mut self) {
        let whole = self.random.chance(60);
        let options = self.cache.options();
        if let Some(memory) = &options.shared {
            let most = memory.granules;
            let granules = if whole { most } else { self.random.from(2, most.into()) as u32 };
            let set = self.cache.set_granules(granules);
            return self.saw_if(set.is_ok(), "a budget of granules");
        }
        let tiers = [
            (Tier::Primary, options.groups[0].device_blocks.into()),
            (Tier::Secondary, options.groups[0].host_blocks.into()),
        ];
        let (tier, most) = self.random.pick(&tiers);
        let blocks = if whole { most } else { self.random.from(0, most) };
        let set = self.cache.set_budget(GroupId(0), tier, blocks);
        self.saw_if(set.is_ok(), "a budget");
    }

    /// Content comes back from host memory before anybody asks for it, or is forgotten.
    fn hint(&mut self) {
        let group = GroupId(self.random.index(self.groups.len()) as u16);
        let blocks = self.cache.manager().pool(group).unwrap().snapshot().blocks;
        let forgets = self.random.chance(20);
        let far = |tier| forgets || tier != Tier::Primary;
        let names: Vec<_> = blocks
            .iter()
            .filter(|view| far(view.location.tier))
            .filter_map(|view| view.hash)
            .collect();
        if names.is_empty() {
            return;
        }
        let name = self.random.pick(&names);
        if forgets {
            assert!(self.cache.forget(&[name]) >= 1);
            return self.saw("a name that was forgotten");
        }
        match self.cache.prefetch(&[name]) {
            Ok(back) => self.saw_if(back > 0, "a prefetch"),
            Err(error) => self.trouble(error),
        }
    }
}
