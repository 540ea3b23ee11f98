//! What a worker reads and writes in groups beside the first.

use super::truth::{Cell, Kind};
use super::worker::{Job, Line, Worker};
use crate::prelude::*;

const VALUE: u64 = (1 << 40) - 1;

impl Worker {
    /// The cell of a token in a group, through its block table.
    fn place(&self, group: usize, batch: &BatchRow, at: u64) -> usize {
        let size = &self.groups[group];
        let row = self.replica.row(GroupId(group as u16), batch.row).unwrap();
        let (place, offset) = self.place_of(group, at);
        let Some(block) = row[place].block() else {
            panic!("group {group}: token {at} of row {} has no block", batch.row)
        };
        self.check_owned(group, block);
        block.index() * size.block_tokens + offset
    }

    /// The place of a token's block in a group, and the token's position in it.
    pub fn place_of(&self, group: usize, at: u64) -> (usize, usize) {
        let size = &self.groups[group];
        match size.kind {
            GroupKind::State { .. } => (0, 0),
            _ => (at as usize / size.block_tokens, at as usize % size.block_tokens),
        }
    }

    /// The cell of an entry of a row of states.
    fn state(&self, group: usize, batch: &BatchRow, entry: u64) -> usize {
        let row = self.replica.row(GroupId(group as u16), batch.row).unwrap();
        let Some(block) = row[entry as usize].block() else {
            panic!("group {group}: row {} has no state {entry}", batch.row)
        };
        self.check_owned(group, block);
        block.index() * self.groups[group].block_tokens
    }

    /// The entry with the state that a row begins with behind `start` tokens, as a worker finds it.
    fn input(&self, batch: &BatchRow, start: u64) -> u64 {
        let input = u64::from(batch.input);
        match batch.start {
            Start::At(_) => input,
            Start::Open { .. } => start - self.rows[batch.row.index()].start - input,
        }
    }

    fn cell_in(&self, group: usize, batch: &BatchRow, at: u64) -> Cell {
        if self.groups[group].is_state() {
            self.memory[group][self.state(group, batch, self.input(batch, at + 1))]
        } else {
            self.memory[group][self.place(group, batch, at)]
        }
    }

    /// The tokens before `start` whose KV a step reads that begins there; of a state, the last one.
    pub fn read(&self, group: usize, start: u64) -> Vec<u64> {
        match self.groups[group].kind {
            GroupKind::Window { tokens, sinks } => {
                let first = start.saturating_sub(u64::from(tokens) - 1);
                (0..start).filter(|&at| at >= first || at < sinks.into()).collect()
            }
            GroupKind::State { .. } => start.checked_sub(1).into_iter().collect(),
            _ => (0..start).collect(),
        }
    }

    /// Checks the table of a group and all that a row reads there.
    pub fn check_further(&self, group: usize, batch: &BatchRow, line: &Line, step: u64) {
        let row = batch.row;
        let entries = self.replica.row(GroupId(group as u16), row).unwrap();
        let ids = line.further[group - 1].iter().map(|&id| TableEntry::from(id));
        let ids: Vec<_> = ids.collect();
        let kind = self.groups[group].kind;
        assert_eq!(entries[..ids.len()], ids, "step {step}, row {row}, {kind:?}");
        assert!(
            entries[ids.len()..].iter().all(|&id| id == TableEntry::NONE),
            "step {step}, row {row}"
        );
        let start = if self.groups[group].draft { line.draft_end } else { line.start };
        for at in self.read(group, start) {
            let expected = line.facts.cell(Kind::Token, at, line.kv[at as usize]) << 8 >> 8;
            let block_tokens = self.groups[group].block_tokens;
            let found = line.facts.seen(self.cell_in(group, batch, at), at, block_tokens);
            assert_eq!(
                found, expected,
                "group {group} ({kind:?}), step {step}, row {row}, sequence {}: token {at} of {} is \
                 {found:#x}, not {expected:#x}; {batch:?}",
                line.key, line.start
            );
        }
    }

    /// Writes garbage wherever the plan allows.
    pub fn garble_further(&mut self, group: usize, batch: &BatchRow, line: &Line) {
        let (from, upper) = match batch.start {
            Start::At(start) => (start, start),
            Start::Open { resolved, upper } => (resolved, upper),
        };
        let size = self.groups[group];
        let tokens =
            if size.draft { line.drafts.clone() } else { from..upper + u64::from(batch.tokens) };
        for at in tokens {
            let cell = if size.is_state() {
                self.state(group, batch, at % (1 + u64::from(batch.drafts)))
            } else {
                self.place(group, batch, at)
            };
            let noise = self.random.number();
            self.memory[group][cell] = line.facts.cell(Kind::Void, at, noise);
        }
    }

    /// Writes the KV of a row's tokens, or its state behind them, each from what the group has of the one before.
    pub fn compute_further(&mut self, group: usize, job: &Job, index: usize) {
        if self.groups[group].is_state() {
            return self.compute_states(group, job, index);
        }
        if self.groups[group].draft {
            return self.compute_drafts(group, job, index);
        }
        let (batch, line) = (&job.plan.batch[index], &job.lines[index]);
        let right = line.kv.len() as u64;
        let reads = !matches!(self.groups[group].kind, GroupKind::Window { tokens: 1, .. });
        for (at, &id) in (line.start..).zip(&line.ids) {
            let before = match at.checked_sub(1) {
                Some(before) if reads => self.cell_in(group, batch, before) & VALUE,
                Some(before) => line.kv.get(before as usize).copied().unwrap_or(0),
                None => 0,
            };
            let kind = if at < right { Kind::Token } else { Kind::Draft };
            let value = line.facts.value(at, before, id, job.generation);
            if !job.void && at < right {
                assert_eq!(value, line.kv[at as usize], "token {at} of sequence {}", line.key);
            }
            let cell = self.place(group, batch, at);
            self.memory[group][cell] = line.facts.cell(kind, at, value);
        }
    }

    /// Writes the KV of the tokens that the draft model computes of a row: those that are right, and its own behind them.
    fn compute_drafts(&mut self, group: usize, job: &Job, index: usize) {
        let (batch, line) = (&job.plan.batch[index], &job.lines[index]);
        for at in line.drafts.clone() {
            let cell = match line.kv.get(at as usize) {
                Some(&value) => line.facts.cell(Kind::Token, at, value),
                None => line.facts.cell(Kind::Draft, at, self.random.number()),
            };
            let place = self.place(group, batch, at);
            self.memory[group][place] = cell;
        }
    }

    /// Writes the states behind a row's tokens: one behind those before its drafts, and one behind each draft.
    fn compute_states(&mut self, group: usize, job: &Job, index: usize) {
        let (batch, line) = (&job.plan.batch[index], &job.lines[index]);
        let right = line.kv.len() as u64;
        let mut before = match line.start.checked_sub(1) {
            // A void step may have ended anywhere.
            Some(_) if job.void => 0,
            Some(last) => self.cell_in(group, batch, last) & VALUE,
            None => 0,
        };
        let sure = u64::from(batch.tokens - batch.drafts);
        for (at, &id) in (line.start..).zip(&line.ids) {
            let kind = if at < right { Kind::Token } else { Kind::Draft };
            let value = line.facts.value(at, before, id, job.generation);
            if !job.void && at < right {
                assert_eq!(value, line.kv[at as usize], "token {at} of sequence {}", line.key);
            }
            if let Some(entry) = (at + 1 - line.start).checked_sub(sure) {
                let cell = self.state(group, batch, entry);
                self.memory[group][cell] = line.facts.cell(kind, at, value);
            }
            before = value;
        }
    }
}
