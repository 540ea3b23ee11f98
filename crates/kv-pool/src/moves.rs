//! Moves of content between tiers: out of the primary tier by its eviction, and anywhere by request.

use crate::HandleError;

use crate::blocks::Flag;
use crate::guard;
use crate::state::{Claim, Move};
use crate::sync::Arc;
use crate::view::Shared;
use crate::{BlockId, BlockPool, Claimed, Location, Pinned, Tier};

/// Evicted content on its way from a primary block to a secondary one.
///
/// The caller copies, then commits. Lookups find the content again after the commit. Dropped
/// without a commit, the content is given up. Until either, nobody is handed one of the two block ids,
/// except for the one who claimed the primary one.
#[derive(Debug)]
#[must_use = "evicted content is lost unless its copy is committed"]
pub struct Offload {
    /// `None` only when the move has ended.
    pool: Option<Arc<Shared>>,
    pub(crate) moved: Move,
}

impl Offload {
    /// The primary block that holds the content.
    #[must_use]
    pub fn from(&self) -> BlockId {
        self.moved.from
    }

    /// The secondary block that it goes to.
    #[must_use]
    pub fn to(&self) -> BlockId {
        self.moved.to
    }

    /// Says that the copy is done, or enqueued where every later use of either block comes after it.
    pub fn commit(mut self) {
        if let Some(pool) = self.pool.take() {
            pool.state.lock().commit_offload(self.moved);
        }
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.state.lock().abort_offload(self.moved);
        }
    }
}

/// Takes the move out of a claim, which has it.
pub(crate) fn take_offload(pool: &Arc<Shared>, claim: &mut Claim, moved: Move) -> Offload {
    *claim = claim.without_offload();
    Offload { pool: Some(Arc::clone(pool)), moved }
}

/// Pinned content on its way to claimed blocks of another tier, each to the block in the same position.
///
/// The caller copies, then commits. Dropped without a commit, both lists are released and the content
/// stays where it was.
#[derive(Debug)]
#[must_use = "the content stays where it is unless its copy is committed"]
pub struct Onboard {
    source: Pinned,
    target: Claimed,
}

/// What a committed move leaves the caller with.
///
/// Content that nobody else has pinned lies in the target's tier now, for everybody, and the block that it
/// left is released. Content that another owner has pinned stays where it is and keeps its name; the
/// caller has a copy of its own, which no lookup finds.
#[derive(Debug)]
pub struct Onboarded {
    /// The content, in the order of the list that was to be moved. What has moved lies in the target's tier.
    pub pinned: Pinned,
    /// A copy of each block of `pinned` that has not moved, in their order, in the target's tier.
    pub copies: Claimed,
}

/// Why a move did not begin, with what it was to begin with.
#[derive(thiserror::Error)]
#[error("{reason}")]
pub struct OnboardRefused {
    /// The reason.
    pub reason: HandleError,
    /// The pinned blocks, unharmed.
    pub pinned: Pinned,
    /// The claimed blocks, unharmed.
    pub target: Claimed,
}

crate::error::one_line_debug!(OnboardRefused);

impl Onboard {
    /// The copies to be made: where each block lies, and where it goes.
    pub fn pairs(
        &self,
    ) -> impl DoubleEndedIterator + ExactSizeIterator<Item = (Location, Location)> + '_ {
        let tier = self.target.tier();
        let to = self.target.ids().map(move |id| Location { tier, id });
        self.source.locations().zip(to)
    }

    /// Says that the copies are done, or enqueued where every later use of either block comes after
    /// them. From here on the pool hands the target's blocks to everybody who looks the content up, or
    /// registers the same content. Whether anybody else has a block pinned is decided, and acted upon, in one step: a pinned block never moves (H8).
    pub fn commit(self) -> Onboarded {
        let Self { source: mut pinned, target: mut copies } = self;
        let Some(pool) = pinned.pool().cloned() else { return Onboarded { pinned, copies } };
        let tier = copies.tier();
        let mut state = pool.state.lock();
        if tier == Tier::Primary {
            state.counters.onboarded += pinned.len() as u64;
        }
        // A clone of this list counts like any other's.
        if let Some(blocks) = pinned.sole_blocks() {
            let mut blocks = blocks.iter_mut();
            copies.hand_over(&mut state, |state, target| {
                let Some(at) = blocks.next() else { return false };
                let block = at.block();
                let alone = guard!(
                    "pool.pinned-content-does-not-move",
                    state.blocks.references(block) == 1,
                    else true
                );
                if alone {
                    let from = at.location().tier;
                    let down = from == Tier::Primary && tier == Tier::Secondary;
                    state.counters.offloaded += u64::from(down);
                    let left = at.location();
                    state.swap_locations(block, target);
                    state.emit_moved(block, left);
                    state.rest(target);
                    *at = state.blocks.at(block);
                }
                alone
            });
        }
        drop(state);
        Onboarded { pinned, copies }
    }
}

impl BlockPool {
    /// Begins to bring pinned content into claimed blocks of another tier, each into the one in the same
    /// position: from host memory to the primary tier, or any other way.
    ///
    /// The caller makes the [copies](Onboard::pairs), then commits.
    ///
    /// # Errors
    /// [`OnboardRefused`] holds the reason and both lists.
    pub fn begin_onboard(
        &self,
        source: Pinned,
        target: Claimed,
    ) -> Result<Onboard, Box<OnboardRefused>> {
        let tier = target.tier();
        let own = source.belongs_to(self) && target.belongs_to(self);
        let refusal = if guard!("pool.move-within-one-pool", !own, else false) {
            Some(HandleError::DifferentPools)
        } else if source.len() != target.len() {
            Some(HandleError::Lengths { sources: source.len(), targets: target.len() })
        } else if let Some(location) = source.locations().find(|location| location.tier == tier) {
            Some(HandleError::SameTier { location })
        } else if target.any_claim(|claim| claim.offload().is_some())
            || guard!("pool.no-move-into-what-is-copied", self.is_being_copied(&target), else false)
        {
            Some(HandleError::TargetNotEmpty)
        } else {
            None
        };
        match refusal {
            Some(reason) => Err(Box::new(OnboardRefused { reason, pinned: source, target })),
            None => Ok(Onboard { source, target }),
        }
    }

    /// Whether a copy of evicted content may still read one of the blocks. If not, none will.
    fn is_being_copied(&self, target: &Claimed) -> bool {
        if !target.any_claim(|claim| claim.evicted()) {
            return false;
        }
        let state = self.shared.state.lock();
        target.any_claim(|claim| state.blocks.is(claim.block(), Flag::COPYING))
    }
}
