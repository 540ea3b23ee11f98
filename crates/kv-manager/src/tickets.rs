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

/// Why what a worker said of a ticket was not taken in.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TicketError {
    /// There is no such worker.
    #[error("there is no worker {}: {workers} workers carry out the plans", worker.0)]
    NoWorker {
        /// The worker named.
        worker: WorkerId,
        /// How many there are.
        workers: usize,
    },
    /// The worker was given up. What it still says is not believed.
    #[error("worker {} is lost", worker.0)]
    Lost {
        /// The worker.
        worker: WorkerId,
    },
    /// The worker has settled the ticket before, or never had it.
    #[error("worker {} has no open ticket {}", worker.0, ticket.0)]
    NotOpen {
        /// The worker.
        worker: WorkerId,
        /// The ticket named.
        ticket: TicketId,
    },
    /// A block is named that the ticket does not have.
    #[error("block {index} of ticket {} is wrong, which has {blocks}", ticket.0)]
    NoBlock {
        /// The ticket.
        ticket: TicketId,
        /// The block named.
        index: u32,
        /// Blocks of the ticket.
        blocks: usize,
    },
    /// The worker has told its survivors before.
    #[error("worker {} has told before what its {tier:?} tier has", worker.0)]
    Again {
        /// The worker.
        worker: WorkerId,
        /// The tier.
        tier: Tier,
    },
    /// There is no such tier below host memory.
    #[error("there is no {tier:?} tier below host memory: there are {tiers}")]
    NoTier {
        /// The tier named.
        tier: Tier,
        /// Tiers that there are.
        tiers: usize,
    },
}

kv_pool::one_line_debug!(TicketError);
