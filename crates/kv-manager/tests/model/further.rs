//! What a worker reads and writes in groups beside the first.

use kv_manager::{BatchRow, GroupId, GroupKind, Start};

use crate::truth::{Cell, Kind};
use crate::worker::{Job, Line, Worker};

const VALUE: u64 = (1 << 40) - 1;

impl Worker {
    /// The cell of a token in a group, through its block table. A state has one.
    fn place(&self, group: usize, batch: &BatchRow, at: u64) -> usize {
        let size = &self.groups[group];
        let row = self.replica.row_of(GroupId(group as u16), batch.row).unwrap();
        let (place, offset) = self.place_of(group, at);
        let block = row[place];
        assert!(block >= 0, "group {group}: token {at} of row {} has no block", batch.row);
        self.check_owned(group, block as usize);
        block as usize * size.block_tokens + offset
    }

    /// The place of a token's block in a group, and the token's position in it.
    pub fn place_of(&self, group: usize, at: u64) -> (usize, usize) {
        let size = &self.groups[group];
        match size.kind {
            GroupKind::State { .. } => (0, 0),
            _ => (at as usize / size.block_tokens, at as usize % size.block_tokens),
        }
    }

    fn cell_in(&self, group: usize, batch: &BatchRow, at: u64) -> Cell {
        self.memory[group][self.place(group, batch, at)]
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
        let entries = self.replica.row_of(GroupId(group as u16), row).unwrap();
        let ids = line.further[group - 1].iter().map(|id| id.map_or(-1, |id| id.as_i32()));
        let ids: Vec<_> = ids.collect();
        let kind = self.groups[group].kind;
        assert_eq!(entries[..ids.len()], ids, "step {step}, row {row}, {kind:?}");
        assert!(entries[ids.len()..].iter().all(|&id| id == -1), "step {step}, row {row}");
        for at in self.read(group, line.start) {
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
        for at in from..upper + u64::from(batch.tokens) {
            let (cell, noise) = (self.place(group, batch, at), self.random.next());
            self.memory[group][cell] = line.facts.cell(Kind::Void, at, noise);
        }
    }

    /// Writes the KV of a row's tokens, or its state behind them, each from what the group has of the one before.
    pub fn compute_further(&mut self, group: usize, job: &Job, index: usize) {
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
}
