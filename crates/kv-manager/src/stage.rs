//! Staging: the plan of a step.

use kv_pool::{BlockHash, guard};
use kv_tier::GroupKind;

use crate::ends::Staging;
use crate::events::Noting;
use crate::group::names_of;
use crate::host_share::note_copies;
use crate::plan::{BatchRow, Start, StepPlan};
use crate::sequence::parent_of;
use crate::steps::StepNames;
use crate::{Manager, OpenStep, Row, Sequence, StageError};

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
        let staged = self.steps.open(step).ok_or(StageError::NotOpen { step: number })?;
        if staged {
            return Err(StageError::StagedAlready { step: number });
        }
        for (index, sequence) in batch.iter_mut().enumerate() {
            if self.pace(sequence).is_none() {
                self.look_at_running(sequence)
                    .map_err(|reason| StageError::Sequence { index, reason })?;
            }
            if sequence.ends.next == 0 {
                return Err(StageError::NothingReserved { index });
            }
            let known = sequence.known.tokens();
            let ends = &sequence.ends;
            if !ends.is_uncertain() && known <= ends.resolved() && !ends.is_open() {
                return Err(StageError::NothingKnown { index, known });
            }
        }
        let mut names = self.steps.take_names(None);
        let computes = self.stage_all(batch, number, &mut names);
        self.stage_plan(number, computes, names);
        Ok(self.plan.last())
    }

    /// Adds the sequences to the plan; how many tokens they compute. Apart from all else, whose variables would take the
    /// registers.
    #[inline(never)]
    fn stage_all(&mut self, batch: &mut [&mut Sequence], step: u64, names: &mut StepNames) -> u64 {
        let mut computes = 0;
        for sequence in batch {
            computes += u64::from(sequence.ends.next);
            self.stage_one(sequence, step, names);
        }
        computes
    }

    /// Adds a sequence to the plan.
    #[inline]
    fn stage_one(&mut self, sequence: &mut Sequence, step: u64, names: &mut StepNames) {
        let known = sequence.known.tokens();
        let resolved = sequence.ends.resolved_with_next();
        let Some(row) = self.pace(sequence).and_then(|pace| pace.quiet_row(resolved)) else {
            return self.stage_and_name(sequence, step, names);
        };
        self.push_row(row, sequence.ends.stage(step, known, self.steps.completed()));
    }

    /// The same where blocks may get names or leave, and tells how the sequence goes on.
    #[inline(never)]
    fn stage_and_name(&mut self, sequence: &mut Sequence, step: u64, names: &mut StepNames) {
        let Some(row) = sequence.row() else { return };
        let completed = self.steps.completed();
        sequence.ends.prune(completed);
        self.retire_windows(sequence);
        sequence.depends.retain(|(on, _)| *on > completed);
        self.push_row(row, sequence.ends.stage(step, sequence.known.tokens(), completed));
        self.stage_draft(sequence, row, step);
        self.name_new(sequence, step, names);
        self.follow_frontier(sequence);
        self.set_pace(sequence);
    }

    #[inline]
    fn push_row(&mut self, row: Row, staged: Staging) {
        let Staging { start, tokens, drafts, input } = staged;
        self.plan.compute(BatchRow { row, start, tokens, drafts, input });
    }

    fn stage_draft(&mut self, sequence: &mut Sequence, row: Row, step: u64) {
        sequence.draft.prune(self.steps.completed());
        if let Some((from, tokens)) = sequence.draft.stage(step) {
            let row = BatchRow { row, start: Start::At(from), tokens, drafts: 0, input: 0 };
            self.plan.compute_draft(row);
        }
    }

    /// Makes what was decided the plan of step `number`, which computes so many tokens and makes these names true.
    #[inline(never)]
    fn stage_plan(&mut self, number: u64, tokens: u64, names: StepNames) {
        self.plan_stores();
        let plan = self.plan.stage(number);
        if let Some(share) = self.groups.share() {
            note_copies(share, &plan.copies, number);
        }
        if let Some(shared) = &mut self.shared {
            shared.staged(plan);
        }
        self.stats.steps += 1;
        self.steps.stage(plan, tokens, names);
        self.lower.stage_layers(number);
        self.stage_tickets();
        // Nobody may be left to carry it out.
        self.advance();
    }

    /// Whether blocks are full and certain that have not been offered to the prefix index.
    pub(crate) fn has_unnamed(&self, sequence: &mut Sequence) -> bool {
        certain(sequence) >= sequence.held.bounds(&self.groups).names_at
    }

    /// Names the blocks whose ids are known and whose KV `step` writes, or an earlier one, and notes the
    /// names that are new.
    pub(crate) fn name_new(&mut self, sequence: &mut Sequence, step: u64, names: &mut StepNames) {
        if self.has_unnamed(sequence) {
            self.name_certain(sequence, step, names);
        }
    }

    /// The same where the end of any group's KV may have moved.
    pub(crate) fn name_certain(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        names: &mut StepNames,
    ) {
        let all_certain = certain(sequence);
        if self.is_at_checkpoint(sequence, all_certain) {
            self.settle_states(sequence);
        }
        let marks = sequence.marks();
        let Sequence { held, known, ends, draft, origin, number, era, offered, .. } = sequence;
        for (index, (group, held)) in self.groups.iter_mut().zip(held.iter_mut()).enumerate() {
            let is_draft =
                guard!("manager.a-draft-models-end-is-its-own", group.is_draft, else false);
            let certain = if is_draft { all_certain.min(draft.end) } else { all_certain };
            // The place of the first block to be named, and of which blocks it has the content.
            let (place, first, full) = match group.is_state() {
                false => (held.named, held.named, group.full_blocks(certain)),
                true if certain < held.turn => continue,
                true => {
                    // It is the state behind the longest outcome of what is staged. What is reserved writes it.
                    let exact = certain == held.turn && ends.upper() == certain && ends.next == 0;
                    held.turn = group.next_checkpoint(certain, marks);
                    let full = group.whole_blocks(certain);
                    if !exact || !held.blocks.is_own(0) {
                        continue;
                    }
                    (0, full - 1, full)
                }
            };
            if first >= full {
                continue;
            }
            let all = known.names();
            let parent = (first * group.stride).checked_sub(1).map(|before| all[before]);
            let block_tokens = u64::from(group.block_tokens);
            let worth = |at: usize| origin.worth((at - place + first) as u64 * block_tokens);
            let own = names_of(all, group.stride, first, full);
            let counted = (*offered / block_tokens) as usize;
            let mut twice = 0;
            let chained = group.kind == GroupKind::Full;
            self.home.name_valid((*number, era, known.generation()), &own, |part| {
                let (at, parent) = (part.start, parent_of(&own, &part, parent));
                let part = (first + at, &own[part]);
                let mut noting = Noting::new(self.home.feed(), index, step, part, parent, known);
                let (parent, before) = (parent.filter(|_| chained), names.len());
                held.blocks.name(place + at, part.1, parent, worth, |record, name| {
                    guard!("manager.notes-who-writes", group.note_written(record, step));
                    names.push((index, name));
                    noting.named(record, name);
                });
                if names.len() - before < part.1.len() {
                    // What was offered before, and taken back since, was counted then.
                    let new = part.1.get(counted.saturating_sub(part.0)..).unwrap_or_default();
                    twice += twins(new, &names[before..]);
                }
            });
            // Room for all names, with those of the prompt.
            if chained && first as u64 * block_tokens <= marks.prompt {
                held.blocks.reserve_shared(known.names_room() / group.stride);
            }
            if index == 0 {
                self.stats.twice_tokens += twice * block_tokens;
                let here = full as u64 * block_tokens;
                guard!("manager.counts-tokens-once", *offered = (*offered).max(here));
            }
            held.named = group.full_blocks(certain);
        }
    }

    /// Whether a state is the one behind a checkpoint, and can be named.
    fn is_at_checkpoint(&self, sequence: &Sequence, certain: u64) -> bool {
        let ends = &sequence.ends;
        let mut each = self.groups.iter().zip(sequence.held.iter());
        ends.upper() == certain
            && ends.next == 0
            && each.any(|(group, held)| group.is_state() && held.turn == certain)
    }

    /// Makes the state that a sequence's KV ends with the first entry of its row, in every group, if no outcome is open.
    pub(crate) fn settle_states(&mut self, sequence: &mut Sequence) {
        let entry = sequence.ends.take_entry();
        if entry == 0 {
            return;
        }
        let row = sequence.row();
        for (group, held) in self.groups.iter_mut().zip(sequence.held.iter_mut()) {
            if !group.is_state() {
                continue;
            }
            guard!("manager.accepted-state-is-first", held.blocks.bring_first(entry));
            if let Some(row) = row {
                group.write_row(&mut self.plan, row, held, 0);
            }
        }
    }

    /// Releases the blocks of a sequence that no step reads any more, the open one included: those behind the
    /// windows of all tokens that a later step, or one that is not complete, can begin with (H27).
    pub(crate) fn retire_windows(&mut self, sequence: &mut Sequence) {
        let resolved = sequence.ends.resolved();
        if resolved < sequence.held.bounds(&self.groups).retires_at {
            return;
        }
        let Some(row) = sequence.row() else { return };
        for (group, held) in self.groups.iter_mut().zip(sequence.held.iter_mut()) {
            if !group.is_window() || resolved < held.turn {
                continue;
            }
            // A step that fails is computed again.
            let ends = &sequence.ends;
            let written =
                guard!("manager.windows-stay-for-steps", ends.written(), else ends.upper());
            let (sinks, first) = (group.sink_blocks(), group.first_read(written));
            let gone = held.blocks.gone().end.max(sinks);
            if first > gone && first <= held.blocks.len() {
                held.blocks.retire(sinks, first);
                group.table.clear(&mut self.plan, row, gone, first);
            }
            let next = group.tokens_of(first.max(sinks) + 1);
            held.turn = next.saturating_add(group.window_tokens() - 1);
        }
    }

    /// Notes the block of a prompt that is computed next, for requests that could wait for it.
    pub(crate) fn follow_frontier(&self, sequence: &mut Sequence) {
        if sequence.frontier.is_none() {
            return;
        }
        let (prompt, end) = (sequence.prompt_tokens(), certain(sequence));
        sequence.frontier = sequence
            .frontier
            .take()
            .and_then(|of| self.namer.advance(of, &sequence.known, prompt, end));
    }
}

/// How many blocks have not got the names that they were offered, in order; `named` have got theirs, or blocks before.
fn twins(offered: &[BlockHash], named: &[(usize, BlockHash)]) -> u64 {
    let mut named = named.iter().rev().map(|(_, name)| name).peekable();
    let twins = offered.iter().rev().filter(|name| named.next_if_eq(name).is_none());
    twins.count() as u64
}

/// Tokens whose ids are known and that have KV for certain, as far as no load is to bring it.
pub(crate) fn certain(sequence: &Sequence) -> u64 {
    let resolved = guard!("manager.names-what-has-kv", sequence.ends.resolved(), else u64::MAX);
    let loads_from = guard!("manager.names-nothing-loading", sequence.loads_from(), else u64::MAX);
    sequence.known.tokens().min(resolved).min(loads_from)
}
