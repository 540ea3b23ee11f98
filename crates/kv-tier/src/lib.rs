//! What a tier below the host memory of a KV cache is.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod background;
/// Formats of the crates of this repository are written and read by it. It may change with any version.
#[doc(hidden)]
pub mod codec;
mod format;
mod frame;
mod handles;
mod host_share;
mod lent;
mod memory;
mod tier;
mod transfer;

pub use background::Background;
pub use format::{GroupFormat, GroupKind, RecordKey, record_format};
pub use frame::{check_record, header_bytes};
pub use handles::{Arrived, Batch, BlockFault, BlockSink, BlockSource};
pub use host_share::{
    HostChange, HostLoan, HostShare, HostShareWriter, LentHostBlock, ShareOptions, SharedGroup,
    UNPLANNED,
};
pub use lent::LentBlock;
pub use memory::{FaultRules, FaultsMade, MemoryTier, MemoryTierOptions};
pub use tier::{HostBlocks, HostPiece, LowerTier};
pub use transfer::{Direction, TicketId, Transfer};
