//! The pool: every operation is one hold of one lock.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::claim::ClaimedBlock;
use crate::integrity;
use crate::onboard::{Onboard, OnboardRefused};
use crate::pin::BlockPin;
use crate::state::{Place, State};
use crate::stats::{PoolStats, TierStats};
use crate::{
    BlockHash, ClaimError, ConfigError, Epoch, EpochError, GrowError, IntegrityError, OnboardError,
    PoolConfig, Tier,
};

/// A pool of KV blocks in one or two tiers. Clones are handles of the same pool.
///
/// # Ordering
///
/// The pool knows nothing of devices. It is told of device work by epochs: a block that is
/// released is handed out again only when the epoch that was current at its release is
/// [complete](BlockPool::complete_epoch). Without epochs, released is free at once.
///
/// All state lies behind one lock, which each operation takes once and during which no code of the
/// caller runs. The lock is not held when an operation returns, so pins and claims may be dropped
/// anywhere.
#[derive(Clone)]
pub struct BlockPool {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) state: Mutex<State>,
    primary_blocks: u64,
}

impl BlockPool {
    /// A pool in which no block has content.
    ///
    /// # Errors
    /// [`ConfigError`] names the number that cannot be.
    pub fn new(config: &PoolConfig) -> Result<Self, ConfigError> {
        config.check()?;
        let &PoolConfig { primary_blocks, secondary_blocks, .. } = config;
        let blocks = primary_blocks + secondary_blocks;
        let state = State::new(config).map_err(|_| ConfigError::OutOfMemory { blocks })?;
        let state = Mutex::new(state);
        Ok(Self { shared: Arc::new(Shared { state, primary_blocks }) })
    }

    /// Says that the primary tier has memory for its slots below `upto` now. Slots that had memory
    /// before keep it.
    ///
    /// # Errors
    /// [`GrowError::OverCapacity`].
    pub fn add_primary_slots(&self, upto: u64) -> Result<(), GrowError> {
        let capacity = self.shared.primary_blocks;
        if upto > capacity {
            return Err(GrowError::OverCapacity { requested: upto, capacity });
        }
        self.shared.state.lock().add_primary_slots(upto);
        Ok(())
    }

    /// Begins a stretch of device work. Blocks that are released from now on may be used by it.
    pub fn begin_epoch(&self) -> Epoch {
        let mut state = self.shared.state.lock();
        state.current = Epoch(state.current.0 + 1);
        state.current
    }

    /// Says that all device work of `epoch` and of those before it is done: what was released
    /// during them can be claimed. Completing an epoch again does nothing.
    ///
    /// # Errors
    /// [`EpochError::NotBegun`].
    pub fn complete_epoch(&self, epoch: Epoch) -> Result<(), EpochError> {
        let mut state = self.shared.state.lock();
        if epoch > state.current {
            return Err(EpochError::NotBegun { epoch, latest: state.current });
        }
        state.complete(epoch);
        Ok(())
    }

    /// Finds the longest prefix of `hashes` that is cached, and pins its blocks, in one step.
    ///
    /// `hashes` are the chained hashes of consecutive blocks from the first on. The pins may name
    /// blocks of both tiers; those of the secondary tier must be [onboarded] before use.
    ///
    /// [onboarded]: BlockPool::begin_onboard
    #[must_use]
    pub fn match_prefix(&self, hashes: &[BlockHash]) -> Vec<BlockPin> {
        let mut state = self.shared.state.lock();
        let mut pins = Vec::new();
        for hash in hashes {
            let Some(&block) = state.index.get(hash) else { break };
            state.pin(block);
            pins.push(BlockPin::counted(self, block, state.blocks[block.index()].location));
        }
        state.counters.lookups += hashes.len() as u64;
        state.counters.hits += pins.len() as u64;
        pins
    }

    /// Finds cached content in one tier and pins it, in one step: what a reader in another process
    /// does, whose transfer must not meet a moved block. `None` if it is not in that tier.
    #[must_use]
    pub fn find_and_pin(&self, hash: BlockHash, tier: Tier) -> Option<BlockPin> {
        let mut state = self.shared.state.lock();
        let block = *state.index.get(&hash)?;
        let location = state.blocks[block.index()].location;
        if location.tier != tier {
            return None;
        }
        state.pin(block);
        Some(BlockPin::counted(self, block, location))
    }

    /// Finds `count` primary blocks that nobody uses and takes them, in one step: all or none.
    ///
    /// Blocks without content come first, then cached ones by priority and age. Their content is
    /// lost, unless the claimed block carries an [`Offload`](crate::Offload).
    ///
    /// # Errors
    /// [`ClaimError::Exhausted`]; nothing was evicted then.
    pub fn claim(&self, count: usize) -> Result<Vec<ClaimedBlock>, ClaimError> {
        let mut state = self.shared.state.lock();
        let claimable = state.queues[Tier::Primary.index()].len();
        if count > claimable {
            let retiring = state.retiring.len(Tier::Primary);
            return Err(ClaimError::Exhausted { requested: count, claimable, retiring });
        }
        let claims = state.claim(count);
        #[cfg(all(feature = "sabotage", debug_assertions))]
        state.sabotage.next_caller();
        Ok(claims.into_iter().map(|claim| ClaimedBlock::new(self, claim)).collect())
    }

    /// Releases pins from last to first, in one step, so that of one request's blocks the tail is
    /// evicted before the head. Pins of another pool are released to theirs.
    pub fn release(&self, pins: Vec<BlockPin>) {
        let (ours, others): (Vec<_>, Vec<_>) =
            pins.into_iter().partition(|pin| pin.belongs_to(self));
        let mut state = self.shared.state.lock();
        for pin in ours.into_iter().rev() {
            state.unpin(pin.into_block());
        }
        drop(state);
        others.into_iter().rev().for_each(drop);
    }

    /// Begins to bring pinned content of the secondary tier into a claimed primary block.
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
        } else if source.location().tier != Tier::Secondary {
            Some(OnboardError::NotSecondary { location: source.location() })
        } else if target.has_offload() {
            Some(OnboardError::TargetNotEmpty)
        } else {
            None
        };
        match refusal {
            Some(reason) => Err(Box::new(OnboardRefused { reason, pin: source, target })),
            None => Ok(Onboard::new(source, target)),
        }
    }

    /// Takes content out of the index, so that no lookup finds it. Those who have it pinned keep
    /// it; content that is being offloaded is given up when its [`Offload`](crate::Offload) ends.
    /// Whether there was any.
    pub fn remove(&self, hash: BlockHash) -> bool {
        self.shared.state.lock().remove(hash)
    }

    /// What the pool holds and has done, as of one moment. Takes time in proportion to the blocks.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let state = self.shared.state.lock();
        let mut tiers = [TierStats::default(); 2];
        for block in &state.blocks {
            let tier = &mut tiers[block.location.tier.index()];
            match block.place {
                Place::Absent => continue,
                Place::Queued(_) if block.hash.is_some() => tier.cached += 1,
                Place::Queued(_) => tier.empty += 1,
                Place::Retiring(_) => tier.retiring += 1,
                Place::Pinned => tier.pinned += 1,
                Place::Claimed | Place::Moving => tier.claimed += 1,
            }
            tier.slots += 1;
        }
        let [primary, secondary] = tiers;
        PoolStats { primary, secondary, counters: state.counters }
    }

    /// The counters alone, in constant time.
    #[must_use]
    pub fn counters(&self) -> crate::PoolCounters {
        self.shared.state.lock().counters
    }

    /// Primary blocks that a claim can take at once, in constant time. Other threads may take them
    /// first: [`claim`](BlockPool::claim) alone decides.
    #[must_use]
    pub fn claimable(&self) -> usize {
        self.shared.state.lock().queues[Tier::Primary.index()].len()
    }

    /// Primary blocks that a claim can take without evicting anything, in constant time.
    #[must_use]
    pub fn empty(&self) -> usize {
        self.shared.state.lock().queues[Tier::Primary.index()].empty()
    }

    /// Checks every list, count, slot and name against each other, for tests and diagnosis. Takes
    /// time in proportion to the blocks.
    ///
    /// # Errors
    /// The first [`IntegrityError`] found: a defect of this crate.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        integrity::check(&self.shared.state.lock())
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl fmt::Debug for BlockPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut view = f.debug_struct("BlockPool");
        view.field("primary_blocks", &self.shared.primary_blocks);
        match self.shared.state.try_lock() {
            Some(state) => view.field("counters", &state.counters).finish(),
            None => view.finish_non_exhaustive(),
        }
    }
}
