//! Forks: sequences that share all blocks so far.

use kv_pool::guard;
use smallvec::SmallVec;

use crate::group::Held;
use crate::holding::Holding;
use crate::pace::Pace;
use crate::{ChangeError, Manager, Sequence};

impl Manager {
    /// A twin of a sequence, with a row of its own, that shares every block of it. Nothing is copied
    /// before one of them writes a block that both hold (H25). What was reserved for the next step is to be
    /// reserved again, since it may be in such a block.
    ///
    /// # Errors
    /// [`ChangeError`]. [`Later`](ChangeError::Later) while ids of the sequence's steps are to come.
    pub fn fork(&mut self, sequence: &mut Sequence) -> Result<Sequence, ChangeError> {
        self.look_at_loaded(sequence)?;
        if guard!("manager.forks-wait-for-ids", sequence.ends.is_open(), else false) {
            return Err(ChangeError::Later);
        }
        self.settle_states(sequence);
        let rows = self.options.sequences_max;
        let row = self.home.lease().ok_or(ChangeError::NoRow { rows })?;
        let resolved = sequence.ends.resolved();
        let mut held = SmallVec::new();
        for (group, own) in self.groups.iter_mut().zip(sequence.held.iter_mut()) {
            let end = if group.is_draft { sequence.draft.end } else { resolved };
            let all = group.blocks_for(end);
            let full = if group.is_state() { all } else { group.full_blocks(end) };
            // A twin of a state has its next checkpoint where the other has it.
            let turn = if group.is_state() { own.turn } else { 0 };
            let blocks = own.blocks.fork(full, all);
            let twin = Held { named: own.named, blocks, turn, ..Held::default() };
            group.write_row(&mut self.plan, row.row(), &twin, 0);
            held.push(twin);
        }
        guard!("manager.forks-take-reservations-back", sequence.ends.next = 0);
        let ends = sequence.ends.clone();
        let own = sequence.era.clone();
        let era = guard!("manager.twins-are-of-one-era", own, else self.steps.era());
        Ok(Sequence {
            number: self.steps.number_sequence(),
            era,
            home: sequence.home.clone(),
            row: Some(row),
            held: Holding::new(held),
            pace: Pace::NONE,
            known: sequence.known.clone(),
            ends,
            draft: sequence.draft.fork(),
            origin: sequence.origin.clone(),
            onboarded_blocks: 0,
            host_tokens: 0,
            depends: sequence.depends.clone(),
            offered: sequence.offered,
            copied: sequence.copied,
            failures_seen: sequence.failures_seen,
            frontier: None,
            load: None,
            arrives: None,
            suspended: false,
            reuse: sequence.reuse,
        })
    }
}
