//! Published defects as they were, two holds of the lock for what must be one, so that loom
//! can show that it finds such. They are in no build but its.

use crate::RecordId;
use crate::blocks::{BlockPhase, Flag};
use crate::hold::BlockAt;
use crate::state::Claim;
use crate::{BlockHash, BlockPool, Claimed, Pinned, Tier};

impl BlockPool {
    /// The block that the next claim in a tier would take, as far as it has been used before.
    #[must_use]
    pub fn broken_peek(&self, tier: Tier) -> Option<RecordId> {
        let mut guard = self.shared.state.lock();
        let state = &mut *guard;
        let queues = &mut state.tiers[tier.index()].queues;
        let id = queues.pop(&mut state.blocks)?;
        let class = state.blocks.class(id);
        queues.push_front(&mut state.blocks, id, class);
        Some(id)
    }

    /// Takes the block of a peek, whatever has become of it meanwhile (H10).
    pub fn broken_claim(&self, peeked: RecordId) -> Claimed {
        let mut state = self.shared.state.lock();
        let evicted = state.blocks.is(peeked, Flag::NAMED);
        state.take_out(peeked);
        if evicted {
            state.unname(peeked);
        }
        state.put(peeked, BlockPhase::Claimed);
        let location = state.blocks.location(peeked);
        let claim = Claim::new(peeked, location.id, evicted);
        let hold = state.spares.take_single(&self.shared);
        drop(state);
        Claimed::one(hold, location.tier, claim)
    }

    /// Finds a block and, if nobody has it pinned, takes it out of its queue; then counts the
    /// reference. In between another owner's last reference may bring it back there (H9).
    #[must_use]
    pub fn broken_find_and_pin(&self, hash: BlockHash, tier: Tier) -> Option<Pinned> {
        let mut state = self.shared.state.lock();
        let block = state.find(hash)?;
        let location = state.blocks.location(block);
        if location.tier != tier {
            return None;
        }
        if state.blocks.place(block) != BlockPhase::Pinned {
            state.take_out(block);
            state.blocks.set_references(block, 0);
            state.put(block, BlockPhase::Pinned);
        }
        drop(state);

        let mut state = self.shared.state.lock();
        let references = match state.blocks.place(block) {
            BlockPhase::Pinned => state.blocks.references(block) + 1,
            _ => 1,
        };
        state.blocks.set_references(block, references);
        state.put(block, BlockPhase::Pinned);
        let hold = state.spares.take_single(&self.shared);
        drop(state);
        Some(Pinned::one(hold, BlockAt::new(block, location)))
    }
}
