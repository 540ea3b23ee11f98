//! Tables of block ids on the device: rows gathered, offsets in place of ids.

pub use crate::block_offsets::BlockOffsets;
pub use crate::gather::GatherRows;
