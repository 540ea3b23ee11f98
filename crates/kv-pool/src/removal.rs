//! Removal of content by name, by what it follows, and by tenant; and victims for a move downwards.

use crate::blocks::{BlockPhase, Flag};
use crate::guard;
use crate::hold::BlockAt;

use crate::RecordId;
use crate::state::PoolState;
use crate::{BlockHash, BlockPool, ClaimError, Pinned, TenantError, TenantId, Tier};

impl BlockPool {
    /// Takes content out of the index, so that no lookup finds it. Those who have it pinned keep
    /// it. Content that is being offloaded is given up, too: it does not come back when its
    /// [`Offload`](crate::moves::Offload) ends. Whether there was any.
    ///
    /// Content that follows it stays, and is found by prefix again once this content is.
    pub fn remove(&self, hash: BlockHash) -> bool {
        self.shared.state.lock().remove(hash)
    }

    /// Takes content and all that follows it out of the index, wherever it is, also on its way between
    /// tiers; how many blocks lost their names.
    ///
    /// Content follows what it was named after as long as that has kept its name, and again once a
    /// lookup has found the one after the other, or it was named after the other once more. What is not
    /// known to follow stays: content whose predecessor was evicted or removed before.
    ///
    /// For maintenance: holds the lock for a time in proportion to the blocks.
    pub fn remove_with_successors(&self, hash: BlockHash) -> usize {
        let mut state = self.shared.state.lock();
        let first =
            guard!("pool.removal-reaches-what-moves", state.bearer(hash), else state.find(hash));
        let Some(first) = first else { return 0 };
        let following = state.following(first);
        state.forget_all(&following)
    }

    /// Takes all content of a tenant out of the index; how many blocks lost their names.
    ///
    /// For maintenance: holds the lock for a time in proportion to the blocks.
    ///
    /// # Errors
    /// [`TenantError::Foreign`].
    pub fn remove_tenant(&self, tenant: TenantId) -> Result<usize, TenantError> {
        let mut state = self.shared.state.lock();
        let tenant = state.tenant(tenant)?;
        let blocks = &state.blocks;
        let own: Vec<_> = blocks.ids().filter(|&id| blocks.tenant(id) == tenant.0).collect();
        Ok(state.forget_all(&own))
    }

    /// Pins the next `count` victims of a tier that have content, all or none, so that they can be
    /// moved to another tier with [`begin_onboard`](BlockPool::begin_onboard). Blocks named in
    /// `protected` are passed over; where no policy decides, they keep their places in the tier's order.
    ///
    /// # Errors
    /// [`ClaimError::Exhausted`] if there are not so many; then nothing has changed.
    pub fn pin_victims(
        &self,
        tier: Tier,
        count: usize,
        protected: &[BlockHash],
    ) -> Result<Pinned, ClaimError> {
        let mut state = self.shared.state.lock();
        let marked = state.mark(tier, protected);
        let result = state.check_victims(tier, count, marked).map(|()| {
            if count == 0 {
                return Pinned::default();
            }
            Pinned::counted(&mut state, &self.shared, |state, pins| {
                state.take_victims(tier, count, pins);
            })
        });
        for &hash in protected {
            if let Some(id) = state.find(hash) {
                state.blocks.clear(id, Flag::MARK);
            }
        }
        result
    }
}

impl PoolState {
    /// Marks unused blocks of a tier by name; how many there are.
    fn mark(&mut self, tier: Tier, names: &[BlockHash]) -> usize {
        let mut marked = 0;
        for &hash in names {
            let Some(id) = self.find(hash) else { continue };
            let unused = matches!(self.blocks.place(id), BlockPhase::Queued | BlockPhase::Shadowed);
            if unused && self.blocks.tier(id) == tier && !self.blocks.is(id, Flag::MARK) {
                self.blocks.set(id, Flag::MARK);
                marked += 1;
            }
        }
        marked
    }

    fn check_victims(&self, tier: Tier, requested: usize, marked: usize) -> Result<(), ClaimError> {
        let state = self.tier(tier);
        let claimable = state.claimable() - state.empty() - marked;
        if requested <= claimable {
            return Ok(());
        }
        Err(ClaimError::Exhausted { requested, claimable, retiring: state.retiring() })
    }

    /// Pins the next `count` victims that are not marked. Marked ones keep their places.
    fn take_victims(&mut self, tier: Tier, count: usize, into: &mut Vec<BlockAt>) {
        let mut passed = Vec::new();
        while into.len() < count
            && let Some((id, turn)) = self.pop_cached(tier, None)
        {
            if self.blocks.is(id, Flag::MARK) {
                self.blocks.set(id, Flag::ASIDE);
                self.tiers[tier.index()].aside += 1;
                passed.push((id, turn));
            } else {
                self.untime(id);
                self.take_unnamed(id);
                into.push(self.blocks.at(id));
            }
        }
        self.put_back(&passed);
    }

    /// The block, and all that follow it.
    fn following(&self, first: RecordId) -> Vec<RecordId> {
        let blocks = &self.blocks;
        // Whether a block follows the first one, as far as that is known.
        let mut known: Vec<Option<bool>> = vec![None; blocks.len()];
        known[first.index()] = Some(true);
        let mut path = Vec::new();
        for id in blocks.ids() {
            let mut at = id;
            let follows = loop {
                if let Some(follows) = known[at.index()] {
                    break follows;
                }
                // Known from here on, so that a walk ends even in a ring.
                known[at.index()] = Some(false);
                path.push(at);
                match blocks.parent(at) {
                    Some(parent) => at = parent,
                    None => break false,
                }
            };
            for at in path.drain(..) {
                known[at.index()] = Some(follows);
            }
        }
        blocks.ids().filter(|id| known[id.index()] == Some(true)).collect()
    }

    fn forget_all(&mut self, ids: &[RecordId]) -> usize {
        let mut forgotten = 0;
        // Those that follow come after what they follow as often as not, so all links are cut first.
        for &id in ids {
            if self.blocks.bears_a_name(id) {
                self.forget(id);
                forgotten += 1;
            }
        }
        forgotten
    }
}
