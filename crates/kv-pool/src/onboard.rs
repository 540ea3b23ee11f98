//! Moves of pinned content to another tier, most of all from host memory to the primary one.

use crate::blocks::Flag;
use crate::claim::ClaimedBlock;
use crate::pin::BlockPin;
use crate::state::State;
use crate::{BlockId, BlockPool, Location, OnboardError, SlotIndex};

/// Pinned content on its way to a claimed block of another tier.
///
/// The caller copies, then commits. Dropped without a commit, the pin and the block are released
/// and the content stays where it was.
#[derive(Debug)]
#[must_use = "the content stays where it is unless its copy is committed"]
pub struct Onboard {
    source: BlockPin,
    target: ClaimedBlock,
}

/// What a committed move leaves the caller with.
#[derive(Debug)]
pub enum Onboarded {
    /// The content lies in the target's tier now, for everybody. The slot that it had is released.
    Moved(BlockPin),
    /// Somebody else has the block pinned, so it stays where it is and keeps its name.
    /// The caller has a copy of its own, which no lookup finds.
    Copied {
        /// The copy, in the target's tier.
        copy: ClaimedBlock,
        /// The block that it was copied from.
        source: BlockPin,
    },
}

/// Why a move did not begin, with what it was to begin with.
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
    /// The slot that holds the content.
    #[must_use]
    pub fn from(&self) -> SlotIndex {
        self.source.slot()
    }

    /// The slot that it goes to.
    #[must_use]
    pub fn to(&self) -> SlotIndex {
        self.target.slot()
    }

    /// The tier and slot that hold the content.
    #[must_use]
    pub fn source(&self) -> Location {
        self.source.location()
    }

    /// The tier and slot that it goes to.
    #[must_use]
    pub fn target(&self) -> Location {
        self.target.location()
    }

    /// Says that the copy is done, or enqueued where every later use of either slot comes after
    /// it. From here on the pool hands the target's slot to everybody who looks the content up, and to
    /// those who register the same content as [`Duplicate`](crate::Registration::Duplicate). Whether anybody else has the block pinned is decided, and acted upon, in one step: a
    /// pinned block never moves (H8).
    pub fn commit(self) -> Onboarded {
        let Self { mut source, target } = self;
        let (from, to) = (source.location(), target.location());
        let (source_block, target_block) = (source.block(), target.block());
        let Some(pool) = source.pool().cloned() else {
            return Onboarded::Copied { copy: target, source };
        };
        let mut state = pool.state.lock();
        if to.tier < from.tier {
            state.counters.onboarded += 1;
        }
        // A clone of this pin counts like any other's.
        let alone = source.is_sole() && state.blocks.references(source_block) == 1;
        if !alone || !source.relocate(to) {
            drop(state);
            return Onboarded::Copied { copy: target, source };
        }
        if to.tier > from.tier {
            state.counters.offloaded += 1;
        }
        move_to(&mut state, source_block, target_block);
        drop(state);
        // What the claimed block held is released with the slot that the content has left.
        target.into_block();
        Onboarded::Moved(source)
    }
}

/// Gives `source` the slot of the claimed block `target`, and releases that with the other slot.
fn move_to(state: &mut State, source: BlockId, target: BlockId) {
    let from = state.blocks.location(source);
    state.swap_locations(source, target);
    state.emit_moved(source, from);
    state.rest(target);
}

impl BlockPool {
    /// Begins to bring pinned content into a claimed block of another tier: from host memory to the
    /// primary tier, or any other way.
    ///
    /// The caller copies from the first slot to the second, then commits.
    ///
    /// # Errors
    /// [`OnboardRefused`] holds the reason, the pin and the block.
    pub fn begin_onboard(
        &self,
        source: BlockPin,
        target: ClaimedBlock,
    ) -> Result<Onboard, Box<OnboardRefused>> {
        let refusal = if !source.belongs_to(self) || !target.belongs_to(self) {
            Some(OnboardError::DifferentPools)
        } else if source.location().tier == target.location().tier {
            Some(OnboardError::SameTier { location: source.location() })
        } else if target.has_offload() || self.is_being_copied(&target) {
            Some(OnboardError::TargetNotEmpty)
        } else {
            None
        };
        match refusal {
            Some(reason) => Err(Box::new(OnboardRefused { reason, pin: source, target })),
            None => Ok(Onboard { source, target }),
        }
    }

    /// Whether a copy of evicted content may still read the block. If not, none will.
    fn is_being_copied(&self, target: &ClaimedBlock) -> bool {
        target.evicted() && self.shared.state.lock().blocks.is(target.block(), Flag::COPYING)
    }
}
