//! What can go wrong, one enum for each family of operations.

use crate::{BlockHash, Epoch, LoanId, Location, RecordId, TenantError, Tier};

/// Has errors print in `Debug`, which is what `?` in `main` prints, as in `Display`: in one line, with what
/// caused them behind a colon. For the errors of this crate and of those that stand on it.
#[doc(hidden)]
#[macro_export]
macro_rules! one_line_debug {
    ($($error:ty),+ $(,)?) => {$(
        impl std::fmt::Debug for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)?;
                let mut source = std::error::Error::source(self);
                while let Some(cause) = source {
                    write!(f, ": {cause}")?;
                    source = cause.source();
                }
                Ok(())
            }
        }
    )+};
}
pub(crate) use one_line_debug;

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

/// Why a loan was not ended.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LoanError {
    /// There is no such loan, or it has ended.
    #[error("there is no loan {}, or it has ended", loan.number())]
    Unknown {
        /// The loan that was named.
        loan: LoanId,
    },
}

/// Why content was not given names.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// There are fewer blocks than names.
    #[error("{names} names for {blocks} claimed blocks")]
    TooMany {
        /// Names given.
        names: usize,
        /// Blocks that could be named.
        blocks: usize,
    },
    /// The list that named blocks were to be added to has blocks of another pool.
    #[error("the list to add named blocks to belongs to another pool")]
    OtherPool,
}

/// Why an epoch was not completed.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EpochError {
    /// Another pool has begun that epoch.
    #[error("epoch {} was begun by another pool", epoch.number())]
    Foreign {
        /// The epoch that was named.
        epoch: Epoch,
    },
}

/// Why no content is moved to another tier. Pin and block come back unharmed.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OnboardError {
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

/// A rule that the pool's own state breaks: a defect of the pool.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum IntegrityError {
    /// A block is in a list that its state does not name, or missing from the one it names.
    #[error("block {} is {place}, but the lists say otherwise", block.index())]
    Phase {
        /// The block.
        block: RecordId,
        /// Its recorded state.
        place: String,
    },
    /// The count of unused blocks with content is wrong.
    #[error("{cached} unused blocks of the {tier:?} tier have content, {counted} were counted")]
    Cached {
        /// The tier.
        tier: Tier,
        /// What the pool counted.
        counted: usize,
        /// What is there.
        cached: usize,
    },
    /// A tier's lists hold more or fewer blocks than their count says.
    #[error("a list of the {tier:?} tier holds {counted} blocks, but its count says {recorded}")]
    Count {
        /// The tier.
        tier: Tier,
        /// Blocks in the list.
        counted: usize,
        /// Its recorded count.
        recorded: usize,
    },
    /// A block's references do not fit its state.
    #[error("block {} has {references} references and is {place}", block.index())]
    References {
        /// The block.
        block: RecordId,
        /// References counted.
        references: u32,
        /// Its recorded state.
        place: String,
    },
    /// The index and the blocks disagree about a hash.
    #[error("the index and the blocks disagree about {hash:?}")]
    Index {
        /// The hash.
        hash: BlockHash,
    },
    /// The index has more or fewer names than the blocks.
    #[error("{named} blocks have names, and the index has {indexed}")]
    Names {
        /// Blocks with a name.
        named: usize,
        /// Names in the index.
        indexed: usize,
    },
    /// A block counts more or fewer successors than it has, or waits for some without having any.
    #[error("block {} counts {recorded} successors, and has {counted}", block.index())]
    Children {
        /// The block.
        block: RecordId,
        /// What it counts.
        recorded: u32,
        /// What it has.
        counted: u32,
    },
    /// More or fewer blocks have lost the block that they followed than were counted.
    #[error("{counted} blocks have lost the one that they followed, {recorded} were counted")]
    Orphans {
        /// What the pool counted.
        recorded: usize,
        /// What is there.
        counted: usize,
    },
    /// A block lies beyond the budget of its tier and could be handed out, or has left it and lies within.
    #[error("block {} is {place} at block id {id} of the {tier:?} tier, whose budget is {budget}", block.index())]
    Budget {
        /// The block.
        block: RecordId,
        /// Its recorded state.
        place: String,
        /// The tier.
        tier: Tier,
        /// The block id.
        id: usize,
        /// Block ids that may be handed out.
        budget: u32,
    },
    /// Two records have the same block id.
    #[error("block id {id} of the {tier:?} tier belongs to two records")]
    SharedId {
        /// The tier.
        tier: Tier,
        /// The block id.
        id: usize,
    },
    /// The times at which priorities end are in the wrong order.
    #[error("the times at which priorities end are in the wrong order")]
    Expiries,
    /// A release was refused because its block was not held.
    #[error("{count} releases of blocks that were not held")]
    Misuse {
        /// How many.
        count: u64,
    },
}

one_line_debug!(
    ClaimError,
    LoanError,
    RegisterError,
    EpochError,
    OnboardError,
    BudgetError,
    IntegrityError
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenants::TenantId;

    #[test]
    fn debug_is_one_line_with_the_cause() {
        let error = ClaimError::Exhausted { requested: 3, claimable: 2, retiring: 1 };
        assert_eq!(format!("{error:?}"), error.to_string());
        let foreign = TenantError::Foreign { tenant: TenantId::NOBODY };
        let error = ClaimError::from(foreign.clone());
        assert_eq!(format!("{error:?}"), format!("{error}: {foreign}"));
        assert_eq!(format!("{error:#?}"), format!("{error:?}"));
    }
}
