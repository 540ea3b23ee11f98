//! Forks: sequences that share all blocks so far.

use crate::{ForkError, Manager, Sequence};

impl Manager {
    /// A twin of a sequence, with a row of its own, that shares every block of it. Nothing is copied
    /// before one of them writes a block that both hold (H25). What was reserved for the next step is to be
    /// reserved again, since it may be in such a block.
    ///
    /// # Errors
    /// [`ForkError`]. [`Later`](ForkError::Later) while ids of the sequence's steps are to come.
    pub fn fork(&mut self, sequence: &mut Sequence) -> Result<Sequence, ForkError> {
        self.look_at_running(sequence)?;
        if sequence.ends.is_open() {
            return Err(ForkError::Later);
        }
        let rows = self.options.sequences_max;
        let row = self.home.lease().ok_or(ForkError::NoRow { rows })?;
        let resolved = sequence.ends.resolved();
        let full = (resolved / u64::from(self.options.block_tokens)) as usize;
        let blocks = sequence.blocks.fork(full, self.blocks_for(resolved));
        self.write_row(row.row(), &blocks, 0);
        sequence.ends.next = 0;
        let ends = sequence.ends.clone();
        self.next_number += 1;
        Ok(Sequence {
            number: self.next_number - 1,
            home: sequence.home.clone(),
            row: Some(row),
            blocks,
            known: sequence.known.clone(),
            ends,
            named: sequence.named,
            prompt_tokens: sequence.prompt_tokens,
            hit_max: sequence.hit_max,
            cached_tokens: sequence.cached_tokens,
            onboarded_blocks: 0,
            depends: sequence.depends.clone(),
            copied: sequence.copied,
            failures_seen: sequence.failures_seen,
            frontier: None,
            arrives: false,
            suspended: None,
            tenant: sequence.tenant,
            retention: sequence.retention.clone(),
        })
    }
}
