//! The trailer of a stored block: what it is, and a checksum over all of it.

use kv_pool::BlockHash;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::BlockFault;
use crate::GroupId;

/// Bytes that a record has behind the bytes of its block.
pub const TRAILER_BYTES: usize = 64;

/// The layout of the trailer. Another layout has another one.
const MAGIC: [u8; 8] = *b"KVTIER01";
const NAME: usize = 8;
const FORMAT: usize = 24;
const LENGTH: usize = 32;
const GROUP: usize = 40;
const CHECKSUM: usize = TRAILER_BYTES - 8;

/// What a record is of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Label {
    pub(crate) name: BlockHash,
    pub(crate) group: GroupId,
    /// What decides the meaning of the bytes beside the name: model, shape, layout, share.
    pub(crate) format: u64,
}

impl Label {
    /// The trailer of a block with these bytes.
    pub(crate) fn trailer(&self, bytes: &[u8]) -> [u8; TRAILER_BYTES] {
        let mut trailer = [0; TRAILER_BYTES];
        trailer[..NAME].copy_from_slice(&MAGIC);
        trailer[NAME..FORMAT].copy_from_slice(&self.name.to_u128().to_le_bytes());
        trailer[FORMAT..LENGTH].copy_from_slice(&self.format.to_le_bytes());
        trailer[LENGTH..GROUP].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        trailer[GROUP..GROUP + 2].copy_from_slice(&self.group.0.to_le_bytes());
        let checksum = xxh3_64_with_seed(&trailer[..CHECKSUM], xxh3_64(bytes));
        trailer[CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
        trailer
    }

    /// Checks that a trailer is that of this block, with these bytes.
    pub(crate) fn check(
        &self,
        bytes: &[u8],
        trailer: &[u8; TRAILER_BYTES],
    ) -> Result<(), BlockFault> {
        let expected = self.trailer(bytes);
        if *trailer == expected {
            return Ok(());
        }
        // A record of something else that is right in itself is told apart from a spoilt one.
        let label = |of: &[u8; TRAILER_BYTES]| of[NAME..CHECKSUM].to_vec();
        let whole = trailer[..NAME] == MAGIC && label(trailer) != label(&expected);
        Err(if whole { BlockFault::Foreign } else { BlockFault::Checksum })
    }
}
