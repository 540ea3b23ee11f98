//! What may be asked of a pool, also of one that somebody else runs.

use std::fmt;

use crate::blocks::Flag;
use crate::guard;
use crate::hold::BlockAt;
use crate::integrity;
use crate::state::PoolState;
use crate::stats::{EvictionAges, PoolCounters, PoolStats};
use crate::sync::{Arc, Mutex, MutexGuard};
use crate::{BlockHash, IntegrityError, Pinned, RecordId, Tier};

/// A view of a pool that belongs to another owner, such as a cache: statistics, events, and lookups that
/// pin what they find. Clones are views of the same pool.
///
/// Nothing can be claimed, named, removed or given back through a view, no epoch begun or completed and
/// no memory added: what the owner has in use stays in use. A pin that was taken through a view keeps its
/// blocks from being evicted, as every pin does, until it is dropped.
///
/// ```compile_fail,E0599
/// use kv_pool::{BlockPool, PoolConfig};
///
/// let pool = BlockPool::new(&PoolConfig::primary_only(8))?;
/// let view = pool.view();
/// let epoch = view.begin_epoch();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PoolView {
    pub(crate) shared: Arc<Shared>,
    _handles: Arc<Handles>,
}

/// What a pool's handles, its claims and its pins have in common.
pub(crate) struct Shared {
    pub(crate) state: Mutex<PoolState>,
    primary_blocks: u64,
}

/// Counts the handles of a pool. Spare holds and lists lie in the pool and own it, so it would outlive its
/// users: with the last handle they go.
struct Handles(Arc<Shared>);

impl Drop for Handles {
    fn drop(&mut self) {
        guard!("pool.spares-go-with-the-last-handle", self.drop_spares());
    }
}

impl Handles {
    fn drop_spares(&self) {
        let spare = self.0.state.lock().spares.close();
        drop(spare);
    }
}

impl PoolView {
    pub(crate) fn new(state: PoolState, primary_blocks: u64) -> Self {
        let shared = Arc::new(Shared { state: Mutex::new(state), primary_blocks });
        Self { _handles: Arc::new(Handles(Arc::clone(&shared))), shared }
    }

    /// Finds the longest prefix of `hashes` that is cached, and pins its blocks, in one step.
    ///
    /// `hashes` are the chained hashes of consecutive blocks from the first on. The pins may name
    /// blocks of both tiers; those of the secondary tier must be [onboarded] before use. The prefix
    /// ends where a tenant [may not hold](crate::tenants::TenantQuota) what is cached.
    ///
    /// [onboarded]: crate::BlockPool::begin_onboard
    #[must_use]
    pub fn match_prefix(&self, hashes: &[BlockHash]) -> Pinned {
        let mut state = self.shared.state.lock();
        state.counters.lookups += hashes.len() as u64;
        let Some(&first) = hashes.first() else { return Pinned::default() };
        let Some(block) = state.bearer(first) else {
            state.note_miss(first);
            return Pinned::default();
        };
        self.pin_found(state, hashes, block)
    }

    /// Pins a prefix that begins with `block`. Not inlined: a lookup that finds nothing is to do nothing
    /// for it.
    #[inline(never)]
    fn pin_found(
        &self,
        mut state: MutexGuard<'_, PoolState>,
        hashes: &[BlockHash],
        block: RecordId,
    ) -> Pinned {
        if let [hash] = hashes {
            if !state.blocks.is(block, Flag::NAMED)
                || !guard!("pool.finds-within-quota", state.may_use(block), else true)
            {
                state.note_miss(*hash);
                return Pinned::default();
            }
            let at = state.blocks.at(block);
            state.note_found(&[at]);
            state.pin(block);
            state.counters.hits += 1;
            return Pinned::one(state.spares.take_single(&self.shared), at);
        }
        let pins = Pinned::counted(&mut state, &self.shared, |state, pins| {
            pins.reserve(hashes.len());
            state.pin_prefix(hashes, pins);
        });
        state.counters.hits += pins.len() as u64;
        pins
    }

    /// Finds cached content in one tier and pins it, in one step: what a reader in another process
    /// does, whose transfer must not meet a moved block. `None` if it is not in that tier.
    #[must_use]
    pub fn find_and_pin(&self, hash: BlockHash, tier: Tier) -> Option<Pinned> {
        let mut state = self.shared.state.lock();
        let block = state.find(hash)?;
        let location = state.blocks.location(block);
        if location.tier != tier || !state.may_use(block) {
            return None;
        }
        state.pin(block);
        let hold = state.spares.take_single(&self.shared);
        drop(state);
        Some(Pinned::one(hold, BlockAt::new(block, location)))
    }

    /// What the pool holds and has done, as of one moment, in constant time.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.shared.state.lock().stats()
    }

    /// The counters alone, in constant time.
    #[must_use]
    pub fn counters(&self) -> PoolCounters {
        self.shared.state.lock().counters
    }

    /// How long evicted content had been unused, in constant time.
    #[must_use]
    pub fn eviction_ages(&self) -> EvictionAges {
        self.shared.state.lock().ages
    }

    /// Primary blocks that a claim can take at once, in constant time. Other threads may take them
    /// first: [`claim`](crate::BlockPool::claim) alone decides.
    #[must_use]
    pub fn claimable(&self) -> usize {
        self.shared.state.lock().tier(Tier::Primary).claimable()
    }

    /// Primary blocks that a claim can take without evicting anything, in constant time.
    #[must_use]
    pub fn empty(&self) -> usize {
        self.shared.state.lock().tier(Tier::Primary).empty()
    }

    /// Checks every list, count, block id and name against each other, for tests and diagnosis. Takes
    /// time in proportion to the blocks.
    ///
    /// # Errors
    /// The first [`IntegrityError`] found: a defect of this crate.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        integrity::check(&self.shared.state.lock())
    }

    pub(crate) fn is(&self, other: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, other)
    }
}

impl fmt::Debug for PoolView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut view = f.debug_struct("BlockPool");
        view.field("primary_blocks", &self.primary_blocks);
        // The writer is the caller's: it does not run under the lock.
        let counters = self.state.try_lock().map(|state| state.counters);
        match counters {
            Some(counters) => view.field("counters", &counters).finish(),
            None => view.finish_non_exhaustive(),
        }
    }
}
