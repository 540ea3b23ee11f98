//! Loans: pins of readers in other processes, which may die without giving them back.

pub use crate::error::LoanError;

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::nanos;
use crate::guard;
use crate::hold::BlockAt;
use crate::{BlockHash, BlockPool, Location, Tier};

/// The name of a loan, which a reader in another process can be told.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct LoanId(u64);

impl LoanId {
    /// The number; no two loans of a process have the same, whatever pools they are of.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }

    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // No other memory is published with it.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The loan of a number that was sent elsewhere and has come back.
    #[must_use]
    pub const fn from_number(number: u64) -> Self {
        Self(number)
    }
}

/// Blocks that a reader in another process may read until the loan ends.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Loan {
    /// Its name.
    pub id: LoanId,
    /// Where the blocks lie, in the order of the names that were asked for.
    pub blocks: Vec<Location>,
    /// When it may be taken back, by the pool's clock.
    pub deadline: Duration,
}

/// All loans that have not ended. The references are counted in the pool.
#[derive(Debug, Default)]
pub(crate) struct Loans {
    open: HashMap<u64, (u64, Vec<BlockAt>)>,
    by_deadline: BTreeSet<(u64, u64)>,
}

impl BlockPool {
    /// Finds the longest prefix of `hashes` that is cached in `tier` and pins it for at least
    /// `duration`, in one step, on behalf of a reader that cannot hold a pin: one in another process.
    /// `None` if not even the first is there.
    ///
    /// The loan ends by [`end_loan`](BlockPool::end_loan), or by
    /// [`end_overdue_loans`](BlockPool::end_overdue_loans) if the reader is never heard of again.
    #[must_use]
    pub fn lend(&self, hashes: &[BlockHash], tier: Tier, duration: Duration) -> Option<Loan> {
        let mut state = self.shared.state.lock();
        let (mut deadline, mut blocks) = (None, Vec::new());
        for &hash in hashes {
            let Some(block) = state.find(hash) else { break };
            let location = state.blocks.location(block);
            if location.tier != tier
                || !guard!("pool.loan-within-quota", state.may_use(block), else true)
            {
                break;
            }
            // Before the first pin: the clock is the caller's, and may panic.
            deadline.get_or_insert_with(|| state.watch.now().saturating_add(duration));
            state.pin(block);
            blocks.push(BlockAt::new(block, location));
        }
        let deadline = deadline?;
        let loans = &mut state.loans;
        let id = guard!(
            "pool.loan-numbers-are-of-the-process",
            LoanId::next().0,
            else loans.open.len() as u64 + 1
        );
        let locations = blocks.iter().map(|at: &BlockAt| at.location()).collect();
        loans.open.insert(id, (nanos(deadline), blocks));
        loans.by_deadline.insert((nanos(deadline), id));
        Some(Loan { id: LoanId(id), blocks: locations, deadline })
    }

    /// Ends a loan: its blocks may be evicted and moved again.
    ///
    /// # Errors
    /// [`LoanError::Unknown`] if there is no such loan, or it has ended.
    pub fn end_loan(&self, id: LoanId) -> Result<(), LoanError> {
        let mut state = self.shared.state.lock();
        let ended = state.loans.open.remove(&id.0);
        let Some((deadline, blocks)) = ended else { return Err(LoanError::Unknown { loan: id }) };
        state.loans.by_deadline.remove(&(deadline, id.0));
        for at in blocks.iter().rev() {
            state.unpin(at.block());
        }
        Ok(())
    }

    /// Takes back the loans whose deadline has come, and says which.
    ///
    /// To be called when their readers cannot read any more: when the transport has revoked their
    /// access, or fails what they read. The pool cannot know.
    pub fn end_overdue_loans(&self) -> Vec<LoanId> {
        let mut state = self.shared.state.lock();
        let now = nanos(state.watch.now());
        let mut ended = Vec::new();
        while let Some(&(deadline, id)) = state.loans.by_deadline.first() {
            if deadline > now {
                break;
            }
            state.loans.by_deadline.remove(&(deadline, id));
            let blocks = state.loans.open.remove(&id).map_or_else(Vec::new, |(_, blocks)| blocks);
            for at in blocks.iter().rev() {
                state.unpin(at.block());
            }
            ended.push(LoanId(id));
        }
        ended
    }

    /// Loans that have not ended.
    #[must_use]
    pub fn loans(&self) -> usize {
        self.shared.state.lock().loans.open.len()
    }
}
