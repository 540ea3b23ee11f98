//! Tables of block ids on the device: rows gathered, offsets in place of ids.

pub use crate::block_offsets::BlockOffsets;
pub use crate::gather::GatherRows;
pub use crate::host_offsets::{
    HostGatherError, HostOffsets, PackedOffsets, block_offsets_on_host, copy_block_offsets,
};
