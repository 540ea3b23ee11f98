//! The pool: every operation is one hold of one lock.

use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use crate::guard;
use crate::hold::Hold;
use crate::pin::release_in_order;
use crate::state::{Claim, PoolState};
use crate::stats::PinCost;
use crate::sync::Arc;
use crate::tenants::{Tenant, TenantRoom};
use crate::{
    BlockHash, ClaimError, Claimed, ConfigError, Epoch, HandleError, Location, Pinned, PoolConfig,
    PoolView, RecordId, Retention, TenantError, TenantId, Tier,
};

/// A pool of KV blocks in one or two tiers. Clones are handles of the same pool.
///
/// # Ordering
///
/// The pool knows nothing of devices. It is told of device work by epochs: a block that is
/// released is handed out again only when the epoch that was current at its release is
/// [complete](BlockPool::complete_epoch). Without epochs, released is free at once.
///
/// All state lies behind one lock, which each operation takes once. The only code of the caller that runs
/// under it is its [clock](crate::clock::Clock), its [eviction policies](crate::policy::EvictionPolicy) and its
/// [store policy](crate::store::StorePolicy). The lock is not held when an operation returns, so pins and claims may
/// be dropped anywhere.
#[derive(Clone)]
pub struct BlockPool {
    view: PoolView,
}

/// What may be asked of a pool by all who have a view of it.
impl Deref for BlockPool {
    type Target = PoolView;

    fn deref(&self) -> &PoolView {
        &self.view
    }
}

impl fmt::Debug for BlockPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.view.fmt(f)
    }
}

impl BlockPool {
    /// A pool in which no block has content.
    ///
    /// # Errors
    /// [`ConfigError`] names the number that cannot be.
    pub fn new(config: &PoolConfig) -> Result<Self, ConfigError> {
        Self::builder(config).build()
    }

    pub(crate) fn with_state(config: &PoolConfig, state: PoolState) -> Self {
        Self { view: PoolView::new(state, config.primary_blocks) }
    }

    /// A view for those who may look at this pool and not change it.
    #[must_use]
    pub fn view(&self) -> PoolView {
        self.view.clone()
    }

    /// Begins a stretch of device work. Blocks that are released from now on may be used by it.
    pub fn begin_epoch(&self) -> Epoch {
        let mut state = self.shared.state.lock();
        state.current += 1;
        Epoch { pool: state.mark, number: state.current }
    }

    /// Says that all device work of `epoch` and of those before it is done: what was released
    /// during them can be claimed. Completing an epoch again does nothing.
    ///
    /// # Errors
    /// [`HandleError::Epoch`] if another pool has begun the epoch.
    pub fn complete_epoch(&self, epoch: Epoch) -> Result<(), HandleError> {
        let mut state = self.shared.state.lock();
        if guard!("pool.epoch-of-this-pool", epoch.pool != state.mark, else false) {
            return Err(HandleError::Epoch { epoch });
        }
        state.complete(epoch.number);
        Ok(())
    }

    /// Finds the last of these names that is cached, in any tier, and pins its block, in one step; its position
    /// in the list. For content that stands for all before it, such as a recurrent state.
    #[must_use]
    pub fn match_last(&self, hashes: &[BlockHash]) -> Option<(usize, Pinned)> {
        let mut state = self.shared.state.lock();
        state.counters.lookups += 1;
        for (at, &hash) in hashes.iter().enumerate().rev() {
            let Some(block) = state.find(hash) else { continue };
            if !state.may_use(block) {
                continue;
            }
            let found = state.blocks.at(block);
            state.note_found(&[found]);
            state.pin(block);
            state.counters.hits += 1;
            return Some((at, Pinned::one(state.spares.take_single(&self.shared), found)));
        }
        None
    }

    /// Finds `count` primary blocks that nobody uses and takes them, in one step: all or none.
    ///
    /// Blocks without content come first, then cached ones by priority and age. Their content is
    /// lost, unless the claimed block carries an [`Offload`](crate::moves::Offload).
    ///
    /// # Errors
    /// [`ClaimError::Exhausted`]; nothing was evicted then.
    pub fn claim(&self, count: usize) -> Result<Claimed, ClaimError> {
        self.claim_by(Tier::Primary, TenantId::NOBODY, count)
    }

    /// The same for a tenant, whose quota bounds what it may hold. Cached blocks that are kept for
    /// other tenants are passed over.
    ///
    /// # Errors
    /// As [`claim`](BlockPool::claim), and [`ClaimError::Tenant`].
    pub fn claim_for(&self, tenant: TenantId, count: usize) -> Result<Claimed, ClaimError> {
        self.claim_by(Tier::Primary, tenant, count)
    }

    /// The same in any tier. Content of other tiers than the primary is lost.
    ///
    /// # Errors
    /// As [`claim`](BlockPool::claim).
    pub fn claim_in(&self, tier: Tier, count: usize) -> Result<Claimed, ClaimError> {
        self.claim_by(tier, TenantId::NOBODY, count)
    }

    /// Whether `count` primary blocks can be claimed now, and no tenant has a bound that is to be looked at. Then as many
    /// can be had, however many of them are pinned where their content is cached. Other threads may take some first.
    #[must_use]
    pub fn has_ample(&self, count: usize) -> bool {
        let state = self.shared.state.lock();
        state.watch.tenancy.is_none() && state.tier(Tier::Primary).claimable() >= count
    }

    /// Whether a tenant can claim `count` blocks of a tier now: what [`claim_for`](BlockPool::claim_for) and
    /// [`claim_in`](BlockPool::claim_in) would answer, and nothing changes. For claims in several pools, of which all
    /// or none are to be made: a claim that is given back has evicted what it took. Other threads may take the
    /// blocks first.
    ///
    /// # Errors
    /// As [`claim_for`](BlockPool::claim_for).
    pub fn check_claim(
        &self,
        tier: Tier,
        tenant: TenantId,
        count: usize,
    ) -> Result<(), ClaimError> {
        let state = self.shared.state.lock();
        let by = state.tenant(tenant)?;
        state.check_claimable(tier, by, count)
    }

    /// Whether the quotas let a tenant claim `count` primary blocks once the content with these names is pinned, which
    /// may be of several lists, in a tier that has `resized` blocks more than now, or fewer. Nothing changes. Whether there
    /// are as many blocks is not looked at; see [`check_claim`](BlockPool::check_claim).
    ///
    /// # Errors
    /// [`TenantError`].
    pub fn check_quota(
        &self,
        tenant: TenantId,
        pins: &[&[BlockHash]],
        count: usize,
        resized: i64,
    ) -> Result<(), TenantError> {
        let state = self.shared.state.lock();
        let by = state.tenant(tenant)?;
        let Some(tenancy) = &state.watch.tenancy else { return Ok(()) };
        let mut pinned: Vec<(Tenant, u64)> = Vec::new();
        let found = pins.iter().copied().flatten().filter_map(|&hash| state.find(hash));
        for block in found.filter(|&block| state.is_unused_near(block)) {
            let owner = Tenant(state.blocks.tenant(block));
            // Mostly, one tenant has all of a prefix.
            match pinned.iter_mut().find(|(of, _)| *of == owner) {
                Some((_, count)) => *count += 1,
                None => pinned.push((owner, 1)),
            }
        }
        tenancy.tenants.check((by, Tier::Primary), count as u64, &pinned, resized)
    }

    /// Blocks of a tier that a tenant may hold, at most.
    ///
    /// # Errors
    /// [`TenantError::Foreign`].
    pub fn tenant_room(&self, tenant: TenantId, tier: Tier) -> Result<TenantRoom, TenantError> {
        let state = self.shared.state.lock();
        let by = state.tenant(tenant)?;
        let capacity = u64::from(state.tier(tier).capacity);
        let Some(tenancy) = &state.watch.tenancy else {
            return Ok(TenantRoom { own: u64::MAX, now: u64::MAX, ever: capacity });
        };
        Ok(tenancy.tenants.room(by, tier, capacity))
    }

    fn claim_by(&self, tier: Tier, by: TenantId, count: usize) -> Result<Claimed, ClaimError> {
        let mut state = self.shared.state.lock();
        let by = state.tenant(by)?;
        state.check_claimable(tier, by, count)?;
        if count == 1 {
            let claim = state.claim_one(tier, by);
            #[cfg(all(feature = "sabotage", debug_assertions))]
            state.sabotage.next_caller();
            let Some(claim) = claim else { return Err(state.exhausted(tier, 1)) };
            let hold = state.spares.take_single(&self.shared);
            return Ok(Claimed::one(hold, tier, claim));
        }
        let claims = state.claim_list(&self.shared, tier, by, count);
        drop(state);
        Ok(Claimed::list(tier, claims))
    }

    /// Finds one primary block that nobody uses and takes it, in one step: as
    /// [`claim`](BlockPool::claim), without a list.
    ///
    /// # Errors
    /// As [`claim`](BlockPool::claim).
    #[inline]
    pub fn claim_one(&self) -> Result<Claimed, ClaimError> {
        let mut outcome = Err(ClaimError::Exhausted { requested: 1, claimable: 0, retiring: 0 });
        let claim = self.claim_one_with(&mut outcome);
        let hold = outcome?;
        let Some(claim) = claim else { unreachable!("a hold is for a claim") };
        Ok(Claimed::one(hold, Tier::Primary, claim))
    }

    /// A block, with a hold for it or the reason that there is none; what does not fit into registers
    /// is written apart.
    #[inline(never)]
    fn claim_one_with(&self, outcome: &mut Result<Arc<Hold>, ClaimError>) -> Option<Claim> {
        let mut state = self.shared.state.lock();
        if let Err(error) = state.check_claimable(Tier::Primary, Tenant::NOBODY, 1) {
            *outcome = Err(error);
            return None;
        }
        let claim = state.claim_one(Tier::Primary, Tenant::NOBODY);
        #[cfg(all(feature = "sabotage", debug_assertions))]
        state.sabotage.next_caller();
        *outcome = match claim {
            Some(_) => Ok(state.spares.take_single(&self.shared)),
            None => Err(state.exhausted(Tier::Primary, 1)),
        };
        claim
    }

    /// Says what held blocks are worth from their release on: their priority, and for how long.
    /// Without this, a block keeps the priority that it was named with, and a block that is used again
    /// keeps it for good. Blocks of another pool are left alone.
    pub fn retain(&self, pins: &Pinned, retention: impl Into<Retention>) {
        if guard!("pool.retains-own-pins", !pins.belongs_to(self), else false) {
            return;
        }
        let retention = retention.into();
        let mut state = self.shared.state.lock();
        for at in pins.blocks() {
            state.set_retention(at.block(), retention);
        }
    }

    /// Where cached content lies, without a pin: it may be elsewhere as soon as anybody claims or moves blocks. For an
    /// owner who has the pool alone, and for hints. A pin of unused content, however short, keeps its block from
    /// being claimed until its epoch is complete.
    #[must_use]
    pub fn locate(&self, hash: BlockHash) -> Option<(RecordId, Location)> {
        let state = self.shared.state.lock();
        let block = state.find(hash)?;
        state.may_use(block).then(|| (block, state.blocks.location(block)))
    }

    /// How many blocks of a prefix are cached, in whatever tier, without a pin; see [`locate`](Self::locate).
    #[must_use]
    pub fn prefix_len(&self, hashes: &[BlockHash]) -> usize {
        let mut state = self.shared.state.lock();
        let mut found = Vec::new();
        state.find_prefix(hashes, &mut found);
        state.usable(&found)
    }

    /// What a pin of these contents would take, without a pin; see [`locate`](Self::locate).
    #[must_use]
    pub fn pin_cost(&self, hashes: &[BlockHash]) -> PinCost {
        let state = self.shared.state.lock();
        let mut cost = PinCost::default();
        for block in hashes.iter().filter_map(|&hash| state.find(hash)) {
            let far = state.blocks.location(block).tier != Tier::Primary;
            cost.unused += usize::from(state.is_unused_near(block));
            cost.far += usize::from(far);
            cost.far_unused += usize::from(far && state.is_unused(block));
        }
        cost
    }

    /// What cached content is worth, with the whole of its duration. A pin of unused content ends its duration:
    /// ask before, and [retain](Self::retain) the pin, to look at content without a change of its worth.
    #[must_use]
    pub fn retention(&self, hash: BlockHash) -> Option<Retention> {
        let state = self.shared.state.lock();
        let block = state.find(hash)?;
        let priority = state.blocks.priority(block);
        Some(Retention { priority, duration: state.watch.duration(block) })
    }

    /// What a [store policy](crate::store) is told of cached content. A pool without policies does not count how
    /// often blocks are found. Reads the clock.
    #[must_use]
    pub fn candidate(&self, hash: BlockHash) -> Option<crate::store::Candidate> {
        let mut state = self.shared.state.lock();
        let block = state.find(hash)?;
        state.watch.now();
        Some(state.candidate(block))
    }

    /// Gives unused blocks whose duration is over the default priority; how many there were. Reads
    /// the clock once for each block that it looks at. To be called once a step or so.
    pub fn refresh(&self) -> usize {
        self.shared.state.lock().refresh()
    }

    /// Reads the clock, for what is measured in coarse time: the ages that policies are told.
    pub fn tick(&self) -> Duration {
        self.shared.state.lock().watch.now()
    }

    /// Releases lists from last to first, in one step, so that of one request's blocks the tail is
    /// evicted before the head. Lists of another pool are released to theirs.
    pub fn release(&self, pins: Vec<Pinned>) {
        release_in_order(self, pins);
    }
}
