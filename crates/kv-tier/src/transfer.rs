//! A store to a tier below host memory, or a load from it, as values.

use kv_pool::{BlockHash, BlockId, GroupId, Tier};

/// A store or a load that ends later, on all workers. Later ones have greater numbers; the first is 1.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct TicketId(pub u64);

/// Which way blocks go.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Direction {
    /// From host memory to the tier.
    Store,
    /// From the tier to host memory.
    Load,
}

/// A batch of blocks that go between host memory and a tier below it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Transfer {
    /// Its ticket.
    pub ticket: TicketId,
    /// The tier below host memory: [`Tier::Third`], or [`Tier::Fourth`] for the farther one.
    pub tier: Tier,
    /// The group that the blocks belong to.
    pub group: GroupId,
    /// Which way they go.
    pub direction: Direction,
    /// Each block's name, and its place in host memory.
    pub blocks: Vec<(BlockHash, BlockId)>,
}
