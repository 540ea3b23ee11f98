//! Sequences that leave for another process, and such that come from one.

use super::engine::Engine;
use super::run::{Run, blocks_of};
use super::truth::{Facts, Kind};
use crate::prelude::*;

/// A sequence that another process reads.
#[derive(Debug)]
pub struct Departure {
    export: Export,
    facts: Rc<Facts>,
    kv: Vec<u64>,
}

/// A sequence that a transfer fills.
#[derive(Debug)]
pub struct Arrival {
    key: u64,
    adoption: Adoption,
    /// Tokens with KV of a draft model.
    drafted: u64,
    facts: Rc<Facts>,
    /// The KV of all its tokens.
    kv: Vec<u64>,
    /// The last step that was staged before.
    behind: u64,
}

impl Engine {
    pub fn transfer(&mut self) {
        match self.random.below(4) {
            0 => self.depart(),
            1 => self.end_departure(),
            2 => self.arrive(),
            _ => self.end_arrival(),
        }
    }

    fn depart(&mut self) {
        let Some(at) = self.pick() else { return };
        let run = self.runs.remove(at);
        let open = run.is_open();
        match self.manager.export(run.sequence) {
            Ok(export) => {
                assert!(!open && !run.must_redo && !run.lost && !run.tainted);
                let kv = run.ideal.kv;
                assert_eq!(export.tokens(), kv.len() as u64);
                let lags = self.size.has_draft_model() && export.draft_tokens() < export.tokens();
                self.saw_if(lags, "a departure with a draft model behind");
                self.departures.push(Departure { export, facts: run.ideal.facts, kv });
                self.saw("a departure");
                self.saw_if(!self.size.further.is_empty(), "a departure of several groups");
            }
            Err(refused) => {
                let ExportRefused { reason, sequence } = *refused;
                self.runs.insert(at, Run { sequence, ..run });
                match reason {
                    ChangeError::Sequence(error) => self.refused(at, error),
                    ChangeError::Writing { step } => {
                        assert!(open || step > self.completed(), "step {step} is complete");
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    fn end_departure(&mut self) {
        let Some(Departure { export, facts, kv }) = self.departures.pop() else { return };
        for worker in self.workers.iter().flatten() {
            worker.check_all(&export, &facts, &kv);
        }
        drop(export);
    }

    fn arrive(&mut self) {
        let mut wish = self.wish();
        let length = wish.ideal.ids.len() as u64;
        let tokens = self.random.from(1, length + 2);
        let formats = self.manager.formats();
        let (answer, adoption) = self.manager.adopt(&mut wish.request, tokens, &formats);
        let Answer::Admitted(sequence) = answer else {
            assert!(adoption.is_none());
            return;
        };
        let several = !self.size.further.is_empty();
        assert!(!several || tokens < length, "the last token is to be computed");
        let mut ideal = wish.ideal.clone();
        ideal.fill(length, self.generation);
        let (key, facts) = (self.next_key, Rc::clone(&wish.ideal.facts));
        let resolved = sequence.resolved();
        let block_tokens = self.size.block_tokens;
        let all = tokens.min(length).div_ceil(block_tokens as u64) as usize;
        let first = adoption.as_ref().and_then(|adoption| adoption.blocks(GroupId(0)).next());
        let hits = match adoption {
            Some(_) => first.map_or(all, |(place, _)| place),
            None => resolved as usize / block_tokens,
        };
        self.enter(wish, sequence, hits);
        let Some(mut adoption) = adoption else {
            assert!(resolved >= tokens.min(length) || adopted_end(tokens, length) <= resolved);
            return;
        };
        assert_eq!(adoption.tokens(), tokens.min(length));
        assert!(several || hits * block_tokens == resolved as usize);
        assert!(!several || resolved == 0);
        let drafted = self.random.from(0, adoption.tokens());
        adoption.set_draft_tokens(drafted);
        self.runs.last_mut().unwrap().arriving = true;
        let behind = self.latest_staged();
        self.arrivals.push(Arrival { key, adoption, drafted, facts, kv: ideal.kv, behind });
        self.saw("an arrival");
        self.saw_if(several, "an arrival in several groups");
    }

    fn end_arrival(&mut self) {
        // What was evicted leaves the blocks with the plan that is staged next.
        let carried = self.workers.iter().flatten().map(|worker| worker.carried).min();
        let ready = |arrival: &Arrival| carried.is_some_and(|carried| carried > arrival.behind);
        let Some(at) = self.arrivals.iter().position(ready) else { return };
        let Arrival { key, adoption, drafted, facts, kv, .. } = self.arrivals.swap_remove(at);
        let groups = 0..=self.size.further.len() as u16;
        let of = |group| adoption.blocks(GroupId(group)).map(move |(at, id)| (group, at, id));
        let blocks: Vec<_> = groups.flat_map(of).collect();
        assert_eq!(blocks.len(), adoption.block_count());
        let several = !self.size.further.is_empty();
        let right = if several && self.random.chance(60) {
            blocks.len()
        } else {
            self.random.index(blocks.len() + 1)
        };
        let first = if several { 0 } else { blocks[0].1 };
        for worker in self.workers.iter_mut().flatten() {
            worker.receive(&blocks, (right, drafted), &facts, &kv[..adoption.tokens() as usize]);
        }
        let Some(at) = self.runs.iter().position(|run| run.key == key) else {
            self.saw("an arrival of a dropped sequence");
            return;
        };
        let tokens = adoption.tokens();
        let filled = match (several, right == blocks.len()) {
            (false, _) => ((first + right) * self.size.block_tokens) as u64,
            (true, right) => u64::from(right) * tokens,
        };
        let run = &mut self.runs[at];
        let before = run.sequence.resolved();
        run.arriving = false;
        let end = match self.manager.adopted(&mut run.sequence, adoption, right) {
            Ok(end) => end,
            Err(error @ (SequenceError::Lost { .. } | SequenceError::Redo { .. })) => {
                return self.refused(at, error);
            }
            Err(error) => panic!("{error:?}"),
        };
        self.accepted(at);
        let run = &mut self.runs[at];
        if before < (first * self.size.block_tokens) as u64 {
            assert_eq!(end, before, "a cut sequence has no use for what arrives behind the cut");
        } else {
            let last = run.known.len() as u64 - 1;
            assert_eq!(end, filled.min(tokens).min(last).max(before));
            run.ideal.kv.extend(&kv[before as usize..end as usize]);
        }
        if self.size.has_draft_model() && several && end > 0 {
            assert_eq!(run.sequence.draft_end(), drafted.min(end));
        }
        if several && end == 0 {
            run.blocks.clear();
        }
        assert_eq!(blocks_of(&run.sequence), run.blocks, "an arrival changes no block");
        run.check();
    }

    /// The worker's memory of all processes is gone, so nothing arrives or is read.
    pub fn end_transfers(&mut self) {
        self.departures.clear();
        self.arrivals.clear();
    }
}

/// Tokens that can have KV of `tokens` that are asked for: the last of all is computed.
fn adopted_end(tokens: u64, length: u64) -> u64 {
    tokens.min(length - 1)
}

impl super::worker::Worker {
    /// Checks what a sequence that leaves takes along: of every group all that a step reads behind it, and no
    /// block but those.
    pub fn check_all(&self, export: &Export, facts: &Facts, kv: &[u64]) {
        for (group, size) in self.groups.iter().enumerate() {
            let blocks = export.blocks(GroupId(group as u16));
            let mut places = Vec::new();
            let end = if size.draft { export.draft_tokens() } else { kv.len() as u64 };
            for at in self.read(group, end) {
                let (place, offset) = self.place_of(group, at);
                let found = blocks.iter().find(|(there, _)| *there == place);
                let &(_, id) = found.unwrap_or_else(|| panic!("group {group}: no place {place}"));
                let expected = facts.cell(Kind::Token, at, kv[at as usize]) << 8 >> 8;
                let found = facts.seen(self.cell_of(group, id, offset), at, size.block_tokens);
                assert_eq!(found, expected, "group {group}: token {at} of a sequence that leaves");
                places.push(place);
            }
            places.dedup();
            // A window of one token reads nothing, and its last block goes on being written.
            let more = blocks.len() - places.len();
            assert!(
                more <= usize::from(matches!(size.kind, GroupKind::Window { .. })),
                "{blocks:?}"
            );
        }
    }

    /// A transfer writes blocks of groups, each for its place, of which the first `right` are what they should be.
    pub fn receive(
        &mut self,
        blocks: &[(u16, usize, BlockId)],
        (right, drafted): (usize, u64),
        facts: &Facts,
        kv: &[u64],
    ) {
        for (index, &(group, place, id)) in blocks.iter().enumerate() {
            let group = usize::from(group);
            let block_tokens = self.groups[group].block_tokens;
            let is_state = matches!(self.groups[group].kind, GroupKind::State { .. });
            for offset in 0..if is_state { 1 } else { block_tokens } {
                let at = if is_state { kv.len() - 1 } else { place * block_tokens + offset };
                let there = index < right && (!self.groups[group].draft || (at as u64) < drafted);
                let cell = match kv.get(at).filter(|_| there) {
                    Some(&value) => facts.cell(Kind::Token, at as u64, value),
                    None => facts.cell(Kind::Void, at as u64, at as u64),
                };
                self.write_cell(group, id, offset, cell);
            }
        }
    }
}
