//! What the manager and its workers say to each other of tiers below host memory.

use kv_pool::{BlockHash, Tier};
use kv_tier::{BlockFault, TicketId};

use crate::{GroupId, WorkerId};

/// What a tier below host memory is to forget.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Forget {
    /// A group's block of a name.
    Block(Tier, GroupId, BlockHash),
    /// Everything that was stored before.
    All(Tier),
}

impl Forget {
    /// The tier.
    #[must_use]
    pub fn tier(&self) -> Tier {
        match *self {
            Self::Block(tier, ..) | Self::All(tier) => tier,
        }
    }
}

/// What a worker says of a ticket that has ended there: no tier reads or writes its blocks any more.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Settled {
    /// Who says it.
    pub worker: WorkerId,
    /// The ticket.
    pub ticket: TicketId,
    /// Blocks that are not right, by their position in the transfer. All others are.
    pub wrong: Vec<(u32, BlockFault)>,
}

/// Blocks that a tier of a worker has dropped by itself.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Dropped {
    /// Who says it.
    pub worker: WorkerId,
    /// The tier.
    pub tier: Tier,
    /// The blocks, each by its group and name.
    pub blocks: Vec<(GroupId, BlockHash)>,
}

/// Blocks that a tier of a worker has had since before the worker began.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Survivors {
    /// Who says it.
    pub worker: WorkerId,
    /// The tier.
    pub tier: Tier,
    /// The blocks, each by its group and name.
    pub blocks: Vec<(GroupId, BlockHash)>,
}

/// Blocks that have come to a tier of a worker otherwise than by its stores.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Gained {
    /// Who says it.
    pub worker: WorkerId,
    /// The tier.
    pub tier: Tier,
    /// The blocks, each by its group and name.
    pub blocks: Vec<(GroupId, BlockHash)>,
}
