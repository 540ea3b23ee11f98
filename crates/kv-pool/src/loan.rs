//! Loans: pins of readers in other processes, which may die without giving them back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::guard;
use crate::hold::BlockAt;
use crate::{BlockHash, BlockPool, Location, PoolView, Tier};

/// The name of a loan, which a reader in another process can be told. No two loans of a process have the same
/// number, whatever pools they are of.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct LoanId(pub u64);

/// Blocks that a reader in another process may read until the loan ends.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Loan {
    /// Its name.
    pub id: LoanId,
    /// Where the blocks lie, in the order of the names that were asked for.
    pub blocks: Vec<Location>,
}

/// All loans that have not ended, by number. The references are counted in the pool.
pub(crate) type Loans = HashMap<u64, Vec<BlockAt>>;

impl BlockPool {
    /// Finds the longest prefix of `hashes` that is cached in `tier` and pins it, in one step, on behalf of a reader
    /// that cannot hold a pin: one in another process. `None` if not even the first is there.
    ///
    /// The loan ends by [`end_loan`](BlockPool::end_loan). Whoever lends ends it also for a reader that is never heard
    /// of again, once that cannot read any more: the pool cannot know.
    #[must_use]
    pub fn lend(&self, hashes: &[BlockHash], tier: Tier) -> Option<Loan> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut state = self.shared.state.lock();
        let mut blocks = Vec::new();
        for &hash in hashes {
            let Some(block) = state.find(hash) else { break };
            let location = state.blocks.location(block);
            if location.tier != tier
                || !guard!("pool.loan-within-quota", state.may_use(block), else true)
            {
                break;
            }
            state.pin(block);
            blocks.push(BlockAt::new(block, location));
        }
        if blocks.is_empty() {
            return None;
        }
        let id = guard!(
            "pool.loan-numbers-are-of-the-process",
            // No other memory is published with it.
            LoanId(NEXT.fetch_add(1, Ordering::Relaxed)),
            else LoanId(state.loans.len() as u64 + 1)
        );
        let locations = blocks.iter().map(|at| at.location()).collect();
        state.loans.insert(id.0, blocks);
        Some(Loan { id, blocks: locations })
    }

    /// Ends a loan: its blocks may be evicted and moved again. `false` if there is no such loan, or it has ended.
    pub fn end_loan(&self, id: LoanId) -> bool {
        let mut state = self.shared.state.lock();
        let Some(blocks) = state.loans.remove(&id.0) else { return false };
        blocks.iter().rev().for_each(|at| state.unpin(at.block()));
        true
    }
}

impl PoolView {
    /// Loans that have not ended.
    #[must_use]
    pub fn loans(&self) -> usize {
        self.shared.state.lock().loans.len()
    }
}
