//! Sequences that leave for another process, and such that come from one.

use std::rc::Rc;

use kv_manager::{Adoption, Answer, Export, ExportError, ExportRefused, SequenceError};
use kv_pool::BlockId;

use crate::engine::Engine;
use crate::run::{Run, blocks_of};
use crate::truth::{Facts, Kind};

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
    facts: Rc<Facts>,
    /// The KV of all its tokens.
    kv: Vec<u64>,
    /// The last step that was staged before.
    behind: u64,
}

impl Engine {
    pub fn transfer(&mut self) {
        if !self.size.further.is_empty() {
            return;
        }
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
                self.departures.push(Departure { export, facts: run.ideal.facts, kv });
                self.saw("a departure");
            }
            Err(refused) => {
                let ExportRefused { reason, sequence } = *refused;
                self.runs.insert(at, Run { sequence, ..run });
                match reason {
                    ExportError::Sequence(error) => self.refused(at, error),
                    ExportError::Later { step } => {
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
            worker.check_all(export.blocks(), &facts, &kv);
        }
        drop(export);
    }

    fn arrive(&mut self) {
        let mut wish = self.wish();
        let length = wish.ideal.ids.len() as u64;
        let tokens = self.random.from(1, length + 2);
        let (answer, adoption) = self.manager.adopt(&mut wish.request, tokens);
        let Answer::Admitted(sequence) = answer else {
            assert!(adoption.is_none());
            return;
        };
        let mut ideal = wish.ideal.clone();
        ideal.fill(length, self.generation);
        let (key, facts) = (self.next_key, Rc::clone(&wish.ideal.facts));
        let resolved = sequence.resolved();
        self.enter(wish, sequence);
        let Some(adoption) = adoption else {
            assert!(resolved >= tokens.min(length) || adopted_end(tokens, length) <= resolved);
            return;
        };
        assert_eq!(adoption.tokens(), tokens.min(length));
        assert_eq!(adoption.first() * self.size.block_tokens, resolved as usize);
        self.runs.last_mut().unwrap().arriving = true;
        let behind = self.latest_staged();
        self.arrivals.push(Arrival { key, adoption, facts, kv: ideal.kv, behind });
        self.saw("an arrival");
    }

    fn end_arrival(&mut self) {
        // What was evicted leaves the blocks with the plan that is staged next.
        let carried = self.workers.iter().flatten().map(|worker| worker.carried).min();
        let ready = |arrival: &Arrival| carried.is_some_and(|carried| carried > arrival.behind);
        let Some(at) = self.arrivals.iter().position(ready) else { return };
        let Arrival { key, adoption, facts, kv, .. } = self.arrivals.swap_remove(at);
        let blocks: Vec<BlockId> = adoption.blocks().collect();
        let right = self.random.index(blocks.len() + 1);
        let first = adoption.first();
        for worker in self.workers.iter_mut().flatten() {
            worker.receive(&blocks, right, first, &facts, &kv);
        }
        let Some(at) = self.runs.iter().position(|run| run.key == key) else {
            self.saw("an arrival of a dropped sequence");
            return;
        };
        let filled = ((first + right) * self.size.block_tokens) as u64;
        let tokens = adoption.tokens();
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

impl crate::worker::Worker {
    /// Checks the KV of a sequence in these blocks.
    pub fn check_all(&self, blocks: &[BlockId], facts: &Facts, kv: &[u64]) {
        for (at, &value) in kv.iter().enumerate() {
            let id = blocks[at / facts.block_tokens as usize];
            let expected = facts.cell(Kind::Token, at as u64, value) << 8 >> 8;
            let found = self.cell_of(id, at % facts.block_tokens as usize) << 8 >> 8;
            assert_eq!(found, expected, "token {at} of a sequence that leaves");
        }
    }

    /// A transfer writes blocks, of which the first `right` are what they should be.
    pub fn receive(
        &mut self,
        blocks: &[BlockId],
        right: usize,
        first: usize,
        facts: &Facts,
        kv: &[u64],
    ) {
        let block_tokens = facts.block_tokens as usize;
        for (index, &id) in blocks.iter().enumerate() {
            for offset in 0..block_tokens {
                let at = (first + index) * block_tokens + offset;
                let cell = match kv.get(at).filter(|_| index < right) {
                    Some(&value) => facts.cell(Kind::Token, at as u64, value),
                    None => facts.cell(Kind::Void, at as u64, at as u64),
                };
                self.write_cell(id, offset, cell);
            }
        }
    }
}
