//! Staging: the plan of a step.

use kv_pool::BlockHash;

use crate::budget::Reach;
use crate::feed::Noting;
use crate::group::names_of;
use crate::manager::InFlight;
use crate::plan::{BatchRow, Start, StepPlan};
use crate::sequence::retention_of;
use crate::steps::Latest;
use crate::{Manager, OpenStep, Sequence, StageError};

impl Manager {
    /// Makes the plan of a step: everything that has been decided since the last plan, and a batch of
    /// the given sequences, each with the tokens that were [reserved](Manager::reserve) for it.
    ///
    /// Full blocks of known tokens that the step writes get their names: requests of later steps find
    /// them, because workers carry out plans in order.
    ///
    /// # Errors
    /// [`StageError`]; nothing was staged then.
    pub fn stage(
        &mut self,
        step: &OpenStep,
        batch: &mut [&mut Sequence],
    ) -> Result<&StepPlan, StageError> {
        let number = step.number();
        let staged = self.open(step).ok_or(StageError::NotOpen { step: number })?;
        if staged {
            return Err(StageError::StagedAlready { step: number });
        }
        for (index, sequence) in batch.iter_mut().enumerate() {
            self.look_at_running(sequence)
                .map_err(|source| StageError::Sequence { index, source })?;
            if sequence.ends.next == 0 {
                return Err(StageError::NothingReserved { index });
            }
            let known = sequence.known.tokens();
            if known <= sequence.ends.resolved() && !sequence.ends.is_open() {
                return Err(StageError::NothingKnown { index, known });
            }
        }
        let mut names = self.spare_names.pop().unwrap_or_default();
        for sequence in batch {
            let Some(row) = sequence.row() else { continue };
            sequence.ends.prune(self.completed);
            sequence.depends.retain(|(on, _)| *on > self.completed);
            let (resolved, upper) = (sequence.ends.resolved(), sequence.ends.upper());
            let start = match sequence.ends.is_uncertain() {
                true => Start::Open { resolved, upper },
                false => Start::At(resolved),
            };
            self.push_batch(BatchRow { row, start, tokens: sequence.ends.next });
            sequence.ends.stage(number, sequence.known.tokens());
            self.name_new(sequence, number, &mut names);
            self.follow_frontier(sequence);
        }
        self.plan_stores();
        *self.latest.lock() = Latest::Open { staged: true };
        std::mem::swap(&mut self.plan, &mut self.staged);
        self.plan.clear();
        (self.staged.step, self.staged.after) = (number, self.latest_staged);
        if !self.staged.copies.is_empty() {
            self.copied = number;
        }
        self.latest_staged = number;
        self.stats.steps += 1;
        let reach = Reach::of(&self.staged);
        self.in_flight.push_back(InFlight {
            step: number,
            ends: number,
            names,
            reach,
            failed: false,
        });
        self.stage_tickets();
        // Nobody may be left to carry it out.
        self.advance();
        Ok(&self.staged)
    }

    /// Whether blocks are full and certain that have not been offered to the prefix index.
    pub(crate) fn has_unnamed(&self, sequence: &Sequence) -> bool {
        // Every step asks this of every sequence, so without a division.
        let certain = certain(sequence);
        let mut each = self.groups.iter().zip(&sequence.held);
        each.any(|(group, held)| certain >= group.tokens_of(held.named + 1))
    }

    /// Names the blocks whose ids are known and whose KV `step` writes, or an earlier one, and notes the
    /// names that are new.
    pub(crate) fn name_new(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        names: &mut Vec<(usize, BlockHash)>,
    ) {
        let unnamed = self.has_unnamed(sequence);
        if !unnamed || sequence.known.generation() != self.namer.generation {
            return;
        }
        let certain = certain(sequence);
        let Sequence { held, known, retention, prompt_tokens, .. } = sequence;
        for (index, (group, held)) in self.groups.iter_mut().zip(held).enumerate() {
            let (first, full) = (held.named, group.full_blocks(certain));
            if first >= full {
                continue;
            }
            let all = known.names();
            let parent = (first * group.stride).checked_sub(1).map(|before| all[before]);
            let block_tokens = u64::from(group.block_tokens);
            let worth =
                |at| retention_of(retention.as_deref(), *prompt_tokens, at as u64 * block_tokens);
            let own = names_of(all, group.stride, first, full);
            let mut noting =
                Noting::new(self.home.feed(), index, step, (first, &own), parent, known);
            let (written, before) = (&mut group.written, names.len());
            held.blocks.name(first, &own, parent, worth, |record, name| {
                written[record.index()] = step;
                names.push((index, name));
                noting.named(record, name);
            });
            let twice = full - first - (names.len() - before);
            self.stats.twice_tokens += twice as u64 * block_tokens;
            held.named = full;
        }
    }

    /// Notes the block of a prompt that is computed next, for requests that could wait for it.
    pub(crate) fn follow_frontier(&self, sequence: &mut Sequence) {
        if sequence.frontier.is_none() {
            return;
        }
        let names = sequence.known.names();
        let block_tokens = u64::from(self.namer.block_tokens);
        let full = (sequence.prompt_tokens / block_tokens) as usize;
        let next = (certain(sequence) / block_tokens) as usize;
        let current = sequence.known.generation() == self.namer.generation;
        sequence.frontier = match (sequence.frontier.take(), names.get(next)) {
            (Some(lease), Some(&name)) if next < full && current => {
                lease.advance((next, name));
                Some(lease)
            }
            _ => None,
        };
    }
}

/// Tokens whose ids are known and that have KV for certain.
fn certain(sequence: &Sequence) -> u64 {
    sequence.known.tokens().min(sequence.ends.resolved())
}
