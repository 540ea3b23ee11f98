//! A step: which sequences it has, what it writes and reads of them, and how it ends.

use super::play::Play;
use super::run::{Computed, Run, state_key};
use super::work::{GroupWork, Read, RowWork, Work, rings};
use super::workers::{Act, Hands};

use crate::prelude::*;

/// Completed steps between two in which a worker fails: nobody starts one that fails again and again.
const BETWEEN_FAILURES: u64 = 3;

impl<H: Hands> Play<H> {
    /// Stages what has tokens reserved, or a part of it, computes it, and ends the step in some way.
    pub(super) fn step(&mut self, step: OpenStep) {
        let is_ready = |run: &Run| run.sequence.next() > 0 && run.left() > 0;
        let ready = (0..self.runs.len()).filter(|&at| is_ready(&self.runs[at]));
        let ready: Vec<usize> = ready.collect();
        let mut chosen: Vec<usize> = ready.into_iter().filter(|_| self.random.chance(90)).collect();
        if self.random.chance(30) {
            chosen.reverse();
        }
        let computed: Vec<Computed> = chosen
            .iter()
            .map(|&at| self.runs[at].computed(self.generation, &mut self.random))
            .collect();
        let work = Arc::new(self.work(&chosen, &computed, step.number()));
        if !self.stage(&step, (&chosen, computed), &work) {
            return self.after_refusal(step);
        }
        if let Err(error) = self.hands.enqueue(&mut self.cache, &work) {
            drop(step);
            return self.trouble(error);
        }
        if self.random.chance(self.habits.drops) {
            drop(step);
            return self.saw("a dropped step");
        }
        let number = step.number();
        if self.finish(step) {
            self.hands.finished(number, work);
            self.saw("a step");
        }
    }

    /// A step that was not staged with its batch goes on without, or is dropped.
    fn after_refusal(&mut self, step: OpenStep) {
        if self.random.chance(50) {
            self.finish(step);
        }
    }

    /// Stages the chosen sequences; whether their work is to be enqueued.
    fn stage(
        &mut self,
        step: &OpenStep,
        (chosen, computed): (&[usize], Vec<Computed>),
        work: &Arc<Work>,
    ) -> bool {
        let number = step.number();
        let mut all: Vec<_> = self.runs.iter_mut().map(Some).collect();
        let mut batch = Vec::new();
        for &at in chosen {
            batch.extend(all[at].take().map(|run| &mut run.sequence));
        }
        let staged = self.hands.stage(&mut self.cache, step, &mut batch, work);
        let refusal = match staged {
            Ok(()) => None,
            Err(StepError::Refused(StageError::Sequence { index, reason })) => {
                self.refused(chosen[index], reason);
                return false;
            }
            Err(error) => Some(error),
        };
        let plan = self.cache.manager().last_plan();
        if plan.step == number {
            self.staged += 1;
            for ((batch, computed), &at) in plan.batch.iter().zip(&computed).zip(chosen) {
                let run = &self.runs[at];
                assert_eq!(Some(batch.row), run.sequence.row(), "sequence {}", run.number);
                let drafts = computed.end - computed.sure;
                assert_eq!(u64::from(batch.drafts), drafts, "sequence {}", run.number);
            }
            let drafts = plan.draft_batch.len() as u64;
            self.saw_many(drafts, "a draft model that computes");
            for (computed, &at) in computed.into_iter().zip(chosen) {
                self.saw_if(computed.right < computed.end, "a draft that was rejected");
                self.runs[at].staged(number, computed);
                let run = &self.runs[at];
                self.computed.extend((0..run.values.len() as u64).map(|at| run.key(at)));
            }
            self.look_at_windows(chosen);
        }
        if let Some(error) = refusal {
            self.trouble(error);
            return false;
        }
        true
    }

    fn look_at_windows(&mut self, chosen: &[usize]) {
        let moved = |run: &Run| {
            let mut groups = (0..self.groups.len() as u16).map(GroupId);
            groups.any(|group| {
                let mut places = 0..run.sequence.block_count(group);
                places.any(|place| run.sequence.block(group, place).is_none())
            })
        };
        let moved = chosen.iter().any(|&at| moved(&self.runs[at]));
        self.saw_if(moved, "a window that has moved");
    }

    /// What a step of these sequences writes and reads.
    fn work(&mut self, chosen: &[usize], computed: &[Computed], number: u64) -> Work {
        let mut rows = Vec::new();
        let mut groups: Vec<_> = self.groups.iter().map(|_| GroupWork::default()).collect();
        for (row, (&at, computed)) in chosen.iter().zip(computed).enumerate() {
            let run = &self.runs[at];
            let Computed { start, right, end, .. } = *computed;
            rows.push(RowWork {
                number: run.number,
                row: run.sequence.row().unwrap().index() as u32,
                accepted: (right < end).then_some((right - start) as u32),
                load: run.load.clone(),
            });
            for (group, of) in self.groups.clone().iter().enumerate() {
                let noise = self.random.number();
                let line = Line { run: &self.runs[at], computed, row, noise };
                match of.kind {
                    GroupKind::State { .. } => {
                        self.add_states(group, &line, &mut groups[group]);
                        self.saw_if(start > 0, "a state that is read");
                    }
                    _ => line.add(of, &mut groups[group]),
                }
            }
        }
        let ring = self.staged % rings(self.cache.options());
        Work { ring, rows, groups, act: self.act(chosen.is_empty(), number) }
    }

    /// What goes wrong in a step.
    fn act(&mut self, is_empty: bool, number: u64) -> Option<(kv_plane::manager::WorkerId, Act)> {
        let completed = self.cache.manager().completed_step();
        let may = self.crew > 0 && !is_empty && completed > self.failing + BETWEEN_FAILURES;
        if !may || !self.random.chance(self.habits.fails) {
            return None;
        }
        self.failing = number;
        self.saw("a worker that failed");
        let worker = self.random.index(self.crew.into()) as u16;
        let act = self.random.pick(&[Act::Ends, Act::Refuses, Act::Fails]);
        Some((kv_plane::manager::WorkerId(worker), act))
    }
}

/// What a step computes of a sequence, in some row of its batch.
struct Line<'a> {
    run: &'a Run,
    computed: &'a Computed,
    row: usize,
    /// What is written where nothing is right.
    noise: u64,
}

impl Line<'_> {
    fn key(&self, at: u64) -> u64 {
        match self.computed.values.get(at as usize) {
            Some(&value) => self.run.facts.key(at, value),
            None => mix(self.noise ^ at),
        }
    }

    /// Adds what is written of a group of tokens, and what is read of it behind that.
    fn add(&self, of: &GroupOptions, work: &mut GroupWork) {
        let Computed { start, right, end, drafted, .. } = self.computed;
        let (written, read) = if of.draft_model {
            (drafted.clone(), drafted.start.max(drafted.end.min(*right)))
        } else {
            (*start..*end, *right)
        };
        work.keys.extend(written.map(|at| self.key(at)));
        work.lengths.push(read as u32);
        let block_tokens = u64::from(of.shape.block_tokens());
        let is_read = |first: u64| match of.kind {
            GroupKind::Window { tokens, sinks } => {
                let window = start.saturating_sub(u64::from(tokens) - 1);
                first + block_tokens > window || first < sinks.into()
            }
            _ => true,
        };
        for column in 0..read.div_ceil(block_tokens) {
            let first = column * block_tokens;
            if is_read(first) {
                let keys = (first..read.min(first + block_tokens)).map(|at| self.key(at));
                let (row, column) = (self.row, column as usize);
                work.read.push(Read { row, column, keys: keys.collect() });
            }
        }
    }
}

impl<H: Hands> Play<H> {
    /// Adds the states that a step leaves of a sequence, and the one that it begins with.
    fn add_states(&self, group: usize, line: &Line<'_>, work: &mut GroupWork) {
        let Computed { start, sure, end, right, .. } = *line.computed;
        let entries = self.cache.manager().block_ids(GroupId(group as u16), &line.run.sequence);
        for (entry, behind) in (sure..=end).enumerate() {
            let block = entries.get(entry).and_then(|entry| entry.block());
            work.slots.push(block.map_or(Slot::NONE, |block| block.slot(1, 0)));
            let key = line.key(behind - 1);
            work.keys.push(if behind <= right { state_key(key) } else { key });
        }
        work.lengths.push(1);
        if start > 0 {
            let keys = vec![state_key(line.key(start - 1))];
            work.read.push(Read { row: line.row, column: 0, keys });
        }
    }
}
