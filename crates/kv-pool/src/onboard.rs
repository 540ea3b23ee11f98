//! Onboarding: content comes back from the secondary tier.

use crate::claim::ClaimedBlock;
use crate::pin::BlockPin;
use crate::state::State;
use crate::{BlockId, Location, OnboardError, SlotIndex};

/// Content on its way from a secondary slot to a primary one.
///
/// The caller copies, then commits. Dropped without a commit, the pin and the block are released
/// and the content stays where it was.
#[derive(Debug)]
#[must_use = "the content stays where it is unless its copy is committed"]
pub struct Onboard {
    source: BlockPin,
    target: ClaimedBlock,
}

/// What a committed onboarding leaves the caller with.
#[derive(Debug)]
pub enum Onboarded {
    /// The content lies in the primary tier now, for everybody. The secondary slot is released.
    Moved(BlockPin),
    /// Somebody else has the secondary block pinned, so it stays where it is and keeps its name.
    /// The caller has a copy of its own, which no lookup finds.
    Copied {
        /// The copy, in the primary tier.
        copy: ClaimedBlock,
        /// The block that it was copied from.
        source: BlockPin,
    },
}

/// Why an onboarding did not begin, with what it was to begin with.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct OnboardRefused {
    /// The reason.
    pub reason: OnboardError,
    /// The pin, unharmed.
    pub pin: BlockPin,
    /// The claimed block, unharmed.
    pub target: ClaimedBlock,
}

impl Onboard {
    pub(crate) fn new(source: BlockPin, target: ClaimedBlock) -> Self {
        Self { source, target }
    }

    /// The secondary slot that holds the content.
    #[must_use]
    pub fn from(&self) -> SlotIndex {
        self.source.slot()
    }

    /// The primary slot that it goes to.
    #[must_use]
    pub fn to(&self) -> SlotIndex {
        self.target.slot()
    }

    /// Says that the copy is done, or enqueued where every later use of either slot comes after
    /// it. Whether anybody else has the block pinned is decided, and acted upon, in one step: a
    /// pinned block never moves (H8).
    pub fn commit(self) -> Onboarded {
        let Self { source, target } = self;
        let pool = source.pool().clone();
        let (source_block, target_block) = (source.block(), target.block());
        let mut state = pool.shared.state.lock();
        state.counters.onboarded += 1;
        if state.blocks[source_block.index()].references != 1 {
            drop(state);
            return Onboarded::Copied { copy: target, source };
        }
        let location = move_to(&mut state, source_block, target_block);
        drop(state);
        // Both hold what they held before, at other slots.
        source.into_block();
        target.into_block();
        Onboarded::Moved(BlockPin::counted(&pool, source_block, location))
    }
}

/// Gives `source` the slot of the claimed block `target`, and releases that with the other slot.
fn move_to(state: &mut State, source: BlockId, target: BlockId) -> Location {
    state.swap_locations(source, target);
    state.rest(target);
    state.blocks[source.index()].location
}
