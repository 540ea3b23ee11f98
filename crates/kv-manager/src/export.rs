//! Sequences that leave for another process, and such that come from one.

use std::sync::Arc;

use kv_pool::{BlockId, Claimed};

use crate::admit::{Answer, Request};
use crate::rows::Home;
use crate::{AdmitError, Manager, Sequence, SequenceError};

/// A sequence on its way to another process, whose blocks nobody writes.
///
/// Drop it when the transfer has ended, however it ended: its blocks are released then. A deadline that has
/// passed is no end (rule of tickets): as long as a transport may read the blocks, keep it.
#[derive(Debug)]
#[must_use = "dropping it releases the blocks that a transfer reads"]
pub struct Export {
    sequence: Sequence,
    blocks: Vec<BlockId>,
}

/// Why a sequence was not exported.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The sequence cannot go on as it is.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
    /// Sequences leave managers with one group of full attention only.
    #[error("a sequence of {groups} groups of layers does not leave")]
    Groups {
        /// Groups of the manager.
        groups: usize,
    },
    /// Ids of a step are to come, or a step that writes its KV is not complete.
    #[error("step {step} writes its KV and is not complete")]
    Later {
        /// The latest of these steps.
        step: u64,
    },
}

/// A refused export, with the sequence, which is unharmed.
#[derive(thiserror::Error)]
#[error("the sequence was not exported")]
pub struct ExportRefused {
    /// The reason.
    #[source]
    pub reason: ExportError,
    /// The sequence.
    pub sequence: Sequence,
}

kv_pool::one_line_debug!(ExportError, ExportRefused);

impl Export {
    /// The ids of the tokens; `None` if the engine names its blocks itself.
    #[must_use]
    pub fn ids(&self) -> Option<&[u32]> {
        self.sequence.ids()
    }

    /// Tokens that have KV.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.sequence.resolved()
    }

    /// The device blocks of these tokens, in order. All workers have completed writing them.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }
}

/// The blocks of a sequence that a transfer fills.
///
/// Give it back by [`Manager::adopted`] when the transfer has ended. Dropping it says that the transfer has
/// ended and nothing of it is right. While it lives, nobody else is given the blocks, even if the sequence
/// is dropped.
#[derive(Debug)]
#[must_use = "dropping it says that nothing writes the blocks any more"]
pub struct Adoption {
    number: u64,
    /// The rows of its manager, which identify it.
    home: Home,
    blocks: Arc<Claimed>,
    /// The first block to be filled, of the sequence's blocks.
    first: usize,
    tokens: u64,
}

impl Adoption {
    /// The position of the first block to be filled: those before it are cached here.
    #[must_use]
    pub fn first(&self) -> usize {
        self.first
    }

    /// The device blocks to be filled, in order. They may be written when the step that is staged next is
    /// complete: its copies and scrubs may have to read or write them before.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        self.blocks.ids()
    }

    /// Tokens that have KV when all blocks are filled.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }
}

impl Manager {
    /// Takes a sequence out of this manager, for another process to [adopt](Self::adopt).
    ///
    /// # Errors
    /// [`ExportRefused`], with the sequence. [`Later`](ExportError::Later) until all steps that write its KV are
    /// complete: pending blocks do not leave.
    pub fn export(&mut self, mut sequence: Sequence) -> Result<Export, Box<ExportRefused>> {
        if !self.keeps_all {
            let reason = ExportError::Groups { groups: self.groups.len() };
            return Err(Box::new(ExportRefused { reason, sequence }));
        }
        if let Err(error) = self.look_at_running(&mut sequence) {
            return Err(Box::new(ExportRefused { reason: error.into(), sequence }));
        }
        sequence.ends.prune(self.completed);
        let read = sequence.depends.iter().map(|&(step, _)| step);
        let read = read.filter(|&step| step > self.completed).max();
        // What came from host memory, or was copied on write, is there when the plan that says so is complete.
        let copied = Some(sequence.copied).filter(|&step| step > self.completed);
        if let Some(step) = sequence.ends.latest().max(read).max(copied) {
            let reason = ExportError::Later { step };
            return Err(Box::new(ExportRefused { reason, sequence }));
        }
        let count = self.groups[0].blocks_for(sequence.ends.resolved());
        let mut blocks = Vec::with_capacity(count);
        sequence.held[0].blocks.truncate(count);
        sequence.held[0].blocks.for_each_id(0, |id| blocks.extend(id));
        sequence.row = None;
        sequence.frontier = None;
        Ok(Export { sequence, blocks })
    }

    /// Admits a request whose first `tokens` tokens have KV in another process, and returns the blocks that
    /// a transfer is to fill: those that are not cached here.
    ///
    /// The sequence can be staged once the transfer has ended and [`adopted`](Self::adopted) was called; if
    /// all is cached here, at once.
    ///
    /// Answers like [`admit`](Self::admit), without waiting for a prefix.
    pub fn adopt(&mut self, request: &mut Request, tokens: u64) -> (Answer, Option<Adoption>) {
        if !self.keeps_all {
            let error = AdmitError::Groups { groups: self.groups.len() };
            return (Answer::Refused(error), None);
        }
        request.waits = false;
        let tokens = tokens.min(request.tokens());
        let Some(answer) = self.admit(std::slice::from_mut(request), u64::MAX).pop() else {
            return (Answer::NoRow, None);
        };
        let Answer::Admitted(mut sequence) = answer else { return (answer, None) };
        let first = sequence.held[0].named;
        let end = self.groups[0].blocks_for(tokens);
        if end <= first || sequence.ends.resolved() >= tokens {
            return (Answer::Admitted(sequence), None);
        }
        let blocks = sequence.held[0].blocks.lend(first, end);
        sequence.ends.next = 0;
        sequence.frontier = None;
        sequence.arrives = true;
        let (number, home) = (sequence.number, self.home.clone());
        let adoption = Adoption { number, home, blocks, first, tokens };
        (Answer::Admitted(sequence), Some(adoption))
    }

    /// Takes in the end of a transfer: the first `right` of its blocks hold what they should. The sequence
    /// computes its tokens from there on, and these blocks get their names. Returns where its KV ends.
    ///
    /// # Errors
    /// [`SequenceError`], and [`SequenceError::Foreign`] for the transfer of another sequence. The transfer
    /// has ended all the same.
    pub fn adopted(
        &mut self,
        sequence: &mut Sequence,
        adoption: Adoption,
        right: usize,
    ) -> Result<u64, SequenceError> {
        let Adoption { number, home, blocks, first, tokens } = adoption;
        let right = right.min(blocks.len());
        drop(blocks);
        self.check_whole(sequence)?;
        if number != sequence.number || !self.home.is(&home) {
            return Err(SequenceError::Foreign);
        }
        sequence.arrives = false;
        sequence.held[0].blocks.claim_all_back();
        self.look_at(sequence)?;
        let group = &self.groups[0];
        let (begins, filled) = (group.tokens_of(first), group.tokens_of(first + right));
        let before = sequence.ends.resolved();
        if before < begins {
            // A failed step has spoilt what comes before, and the sequence was told.
            return Ok(before);
        }
        // The last token is computed in any case: its output is wanted.
        let last = sequence.known.tokens().saturating_sub(1);
        sequence.ends.skip(filled.min(tokens).min(last).saturating_sub(before));
        let mut names = Vec::new();
        self.name_new(sequence, self.completed, &mut names);
        Ok(sequence.ends.resolved())
    }
}
