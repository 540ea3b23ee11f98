//! The host tier of an engine in this process, which a node serves beside its own memory.

use std::sync::Arc;

use kv_pool::guard;
use kv_tier::{HostLoan, HostShare, RecordKey};

use crate::message::{HEAD_MAX, Located, Span};

/// The host tier, at the addresses behind the node's own memory.
#[derive(Debug)]
pub(crate) struct HostTier {
    pub(crate) share: Arc<HostShare>,
    /// The first address.
    pub(crate) first: u64,
}

/// Bytes of blocks that one call reads for their headers, at most, and bytes of headers that one answer has.
const SUMMED_MAX: usize = 256 << 20;
const HEADS_MAX: usize = 8 << 20;

/// Bytes between a node's memory and the host tier, of which no block is: what is read as one lies in one of the two.
const GAP: u64 = 4096;

/// Where the host tier begins that a node with so many bytes of memory [shares](crate::Node::share).
#[must_use]
pub fn host_tier_address(memory_bytes: u64) -> u64 {
    memory_bytes.saturating_add(GAP)
}

impl HostTier {
    /// Borrows the longest run of blocks, of so many bytes at most, and says where each lies. Reads those whose headers nobody has
    /// asked for.
    pub(crate) fn lend(
        &self,
        keys: &[RecordKey],
        bytes_max: u64,
    ) -> Option<(HostLoan, Vec<Located>)> {
        let largest = self.share.block_bytes_max().max(1);
        let most = usize::try_from(bytes_max).unwrap_or(usize::MAX).min(SUMMED_MAX) / largest;
        let format = self.share.format();
        let is_own = |key: &&RecordKey| guard!("remote.lends-records-of-its-format", key.format == format, else true);
        let own = keys.iter().take(most).take_while(is_own).map(|key| (key.group, key.name));
        let loan = self.share.lend(&own.collect::<Vec<_>>())?;
        let mut heads = 0;
        let located = loan.blocks().iter().enumerate().map_while(|(at, of)| {
            let head = loan.header(at).ok().filter(|head| head.len() <= HEAD_MAX)?;
            heads += head.len();
            let span = Span { address: self.first + of.address, bytes: of.bytes as u32 };
            let located = Located { span, generation: of.write, sum: 0, head: Some(head) };
            (heads <= HEADS_MAX).then_some(located)
        });
        let located: Vec<_> = located.collect();
        (!located.is_empty()).then_some((loan, located))
    }
}
