//! What can go wrong, one enum for each family of operations.

use crate::{Epoch, Location, TenantError, Tier};

pub(crate) use kv_errors::one_line_debug;

/// Why no blocks were claimed. Nothing was evicted then.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// There are not enough blocks that nobody uses.
    #[error(
        "{requested} blocks were asked for, {claimable} can be claimed \
         and {retiring} more once the work that uses them is complete"
    )]
    Exhausted {
        /// Blocks asked for.
        requested: usize,
        /// Blocks that could have been claimed.
        claimable: usize,
        /// Released blocks whose epoch is not complete yet. Of these, the ones beyond the tier's budget do not
        /// come back.
        retiring: usize,
    },
    /// The tier was made without blocks, so that no wait helps. A pool says [`Exhausted`](Self::Exhausted); those say this that
    /// know what the tier is for.
    #[error(
        "{requested} blocks were asked for of the {tier:?} tier, which was made without blocks"
    )]
    NoTier {
        /// The tier.
        tier: Tier,
        /// Blocks asked for.
        requested: usize,
    },
    /// The tenant may not hold so many.
    #[error("no blocks claimed: the tenant has no room for them")]
    Tenant(#[from] TenantError),
}

/// Handles and epochs that do not belong together: content is not named, no content is moved to another tier, or no epoch
/// completed. What was given is unharmed.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HandleError {
    /// There are fewer blocks than names.
    #[error("{names} names for {blocks} claimed blocks")]
    Names {
        /// Names given.
        names: usize,
        /// Blocks that could be named.
        blocks: usize,
    },
    /// The list that named blocks were to be added to has blocks of another pool.
    #[error("the list to add named blocks to belongs to another pool")]
    OtherPool,
    /// Another pool has begun that epoch.
    #[error("epoch {} was begun by another pool", epoch.number())]
    Epoch {
        /// The epoch that was named.
        epoch: Epoch,
    },
    /// The pinned block is in the tier of the target already.
    #[error("the block to onboard is already at {location:?}")]
    SameTier {
        /// Where it is.
        location: Location,
    },
    /// The pinned and the claimed blocks belong to two pools, or to none.
    #[error("the pinned blocks and the target belong to different pools")]
    DifferentPools,
    /// There is not one target for each block.
    #[error("{sources} pinned blocks cannot move to {targets} claimed blocks")]
    Lengths {
        /// Pinned blocks.
        sources: usize,
        /// Claimed blocks.
        targets: usize,
    },
    /// The target still carries the content of an evicted block, or a copy of that is under way.
    #[error("the target's evicted content must be offloaded or dropped first")]
    TargetNotEmpty,
}

/// Why a tier keeps the budget that it had.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// The tier was made for fewer blocks.
    #[error("{requested} blocks are more than the {capacity} that the {tier:?} tier was made for")]
    OverCapacity {
        /// The tier.
        tier: Tier,
        /// The budget asked for.
        requested: u64,
        /// The most that is possible.
        capacity: u64,
    },
    /// More blocks are kept for tenants.
    #[error(
        "{requested} blocks of the {tier:?} tier are fewer than the {reserved} that are kept for tenants"
    )]
    BelowReserved {
        /// The tier.
        tier: Tier,
        /// The budget asked for.
        requested: u64,
        /// Blocks that are kept for all tenants together.
        reserved: u64,
    },
    /// The tier is given its memory by granules.
    #[error("the {tier:?} tier is given granules, not a number of blocks")]
    Divided {
        /// The tier.
        tier: Tier,
    },
    /// The tier is not given its memory by granules.
    #[error("the {tier:?} tier was not divided into granules")]
    Undivided {
        /// The tier.
        tier: Tier,
    },
    /// The tier has no such granule.
    #[error("granule {granule} of the {tier:?} tier, which has {granules}")]
    NoGranule {
        /// The tier.
        tier: Tier,
        /// The granule asked for.
        granule: u64,
        /// Granules that it was made for.
        granules: u64,
    },
    /// Blocks of the granule are in use.
    #[error("{in_use} blocks of granule {granule} of the {tier:?} tier are in use")]
    InUse {
        /// The tier.
        tier: Tier,
        /// The granule.
        granule: u64,
        /// Blocks of it in use.
        in_use: u32,
    },
}

/// A rule that the pool's own state breaks: a defect of the pool. Its text says which, and where.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct IntegrityError(pub(crate) String);

one_line_debug!(ClaimError, HandleError, BudgetError, IntegrityError);
