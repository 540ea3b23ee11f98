//! The host tier of an engine in this process, which a node serves beside its own memory.

use std::sync::Arc;

use kv_manager::{CacheEvent, HostLoan, HostShare};
use kv_pool::Tier;

use crate::message::{HEAD_MAX, Located, Span};
use crate::wire::Key as Block;

/// The host tier, at the addresses behind the node's own memory.
#[derive(Debug)]
pub(crate) struct HostTier {
    pub(crate) share: Arc<HostShare>,
    /// The first address.
    pub(crate) first: u64,
}

impl HostTier {
    /// Borrows the longest run of blocks, and says where each lies. Reads those whose headers nobody has asked for.
    pub(crate) fn lend(&self, blocks: &[Block]) -> Option<(HostLoan, Vec<Located>)> {
        let loan = self.share.lend(blocks)?;
        let located = loan.blocks().iter().map_while(|of| {
            let head = loan.header(of).ok().filter(|head| head.len() <= HEAD_MAX)?;
            let span = Span { address: self.first + of.address, bytes: of.bytes as u32 };
            Some(Located { span, generation: of.write, sum: 0, head: Some(head) })
        });
        let located: Vec<_> = located.collect();
        (!located.is_empty()).then_some((loan, located))
    }
}

/// What an event says of the host tier.
#[derive(Debug)]
pub(crate) enum Hosted {
    Come(Vec<Block>),
    Gone(Vec<Block>),
    Cleared,
}

impl Hosted {
    /// None for what happens elsewhere.
    pub(crate) fn of(event: &CacheEvent) -> Option<Self> {
        let blocks = |group, names: &[_]| names.iter().map(|&name| (group, name)).collect();
        Some(match event {
            CacheEvent::Stored(to) | CacheEvent::Moved { to, .. } if to.tier == Tier::Secondary => {
                Self::Come(blocks(to.group, &to.names))
            }
            CacheEvent::Moved { from: Tier::Secondary, to } => {
                Self::Gone(blocks(to.group, &to.names))
            }
            CacheEvent::Removed { group, tier: Tier::Secondary, names } => {
                Self::Gone(blocks(*group, names))
            }
            CacheEvent::Cleared => Self::Cleared,
            _ => return None,
        })
    }
}
