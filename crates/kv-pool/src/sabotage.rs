//! The published defect that this crate removes, for tests that show what it does.

use std::collections::VecDeque;

use crate::{PoolView, RecordId};

/// What peek-then-claim does in the worst interleaving: two callers peek, then both claim.
#[derive(Debug, Default)]
pub(crate) struct Sabotage {
    on: bool,
    second_caller: bool,
    peeked: VecDeque<RecordId>,
}

impl Sabotage {
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// What the second of two callers claims: blocks that the first one peeked at as well.
    pub(crate) fn stale(&mut self) -> Option<RecordId> {
        if self.on && self.second_caller { self.peeked.pop_front() } else { None }
    }

    pub(crate) fn peeked(&mut self, block: RecordId) {
        if self.on && !self.second_caller {
            self.peeked.push_back(block);
        }
    }

    /// A claim is over: the next one is the other caller's.
    pub(crate) fn next_caller(&mut self) {
        if !self.on {
            return;
        }
        self.second_caller = !self.second_caller;
        if !self.second_caller {
            self.peeked.clear();
        }
    }
}

impl PoolView {
    /// From here on every second claim is given blocks that the claim before it was given, as if
    /// both callers had peeked before either claimed (H10).
    ///
    /// Only in builds with debug assertions and the feature `sabotage`, for tests.
    pub fn sabotage_peek_then_claim(&self) {
        self.shared.state.lock().sabotage = Sabotage { on: true, ..Sabotage::default() };
    }
}
