//! Why a cache hands no sequence over, or takes none.

use cuda_driver::{CopyError, DeviceError};
use kv_kernels::error::KernelError;
use kv_manager::ExportRefused;

use super::{HandoverId, SourceId};
use crate::DemandError;

/// Why a cache hands no sequence over, or takes none. What the other side does is none of these: then a
/// hand-over [ends](super::Ended) or [fails](super::Came::Failed).
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum HandoverError {
    /// It has more than one group, or layers on more than one device.
    #[error(
        "a cache of {groups} groups on {devices} devices hands nothing over: it has to be one of each"
    )]
    Cache {
        /// Its groups.
        groups: usize,
        /// Its devices with layers.
        devices: usize,
    },
    /// Its only group does not keep all, or is a draft model's.
    #[error(
        "a cache that keeps only a part of a sequence hands nothing over: its group has to be a full one"
    )]
    Kind,
    /// Its blocks are not one piece of memory each, as an engine's tensors may be.
    #[error(
        "blocks that are not one piece of memory are not handed over: use memory of the cache's own"
    )]
    Layout,
    /// A part of a block has more bytes than a record can have.
    #[error("{bytes} bytes of a block are too many for a record: use blocks of fewer tokens")]
    TooLarge {
        /// Its bytes.
        bytes: u64,
    },
    /// The node keeps shorter records.
    #[error(
        "the node keeps records of {record_bytes} bytes: what is handed over at a time has {bytes}"
    )]
    Records {
        /// Bytes of its records, at most.
        record_bytes: u64,
        /// Bytes of a layer of a block, or of a block from device to device.
        bytes: u32,
    },
    /// The node's memory is none of NIXL, or another device's.
    #[cfg(feature = "nixl")]
    #[error("the node is not over a NixlDeviceMemory of the cache's device: give it one")]
    NodeMemory,
    /// The prompt is longer than the cache.
    #[error(
        "a prompt of {tokens} tokens does not come: the cache has {blocks} blocks of {block_tokens}"
    )]
    TooLong {
        /// Its tokens.
        tokens: u64,
        /// Device blocks of the cache.
        blocks: u64,
        /// Tokens of each.
        block_tokens: u32,
    },
    /// It was made for another cache.
    #[error("the call was given another cache than the one that the hand-over was made for")]
    OtherCache,
    /// The number is that of a hand-over that has not ended here.
    #[error("hand-over {:#x} has not ended here: cancel it, or choose another number", id.0)]
    Again {
        /// The number.
        id: HandoverId,
    },
    /// There is no such source.
    #[error("nothing is taken from source {}, which was not added here", from.0)]
    NoSource {
        /// The source.
        from: SourceId,
    },
    /// The thread of a source was not started.
    #[error("the thread that takes from a node was not started")]
    Thread(#[from] std::io::Error),
    /// Bytes of a block were not copied.
    #[error("a block that is handed over was not copied")]
    Copy(#[from] CopyError),
    /// Blocks were not summed.
    #[error("blocks that are handed over were not summed")]
    Sums(#[from] KernelError),
    /// The device refused a stream, or a wait.
    #[error("a device refused a call of a hand-over")]
    Device(#[from] DeviceError),
    /// The sequence cannot leave now. It is in the error.
    #[error(transparent)]
    Export(#[from] Box<ExportRefused>),
    /// Memory for a sequence that comes could not be mapped, though some is left.
    #[error(transparent)]
    Memory(#[from] DemandError),
    /// The memory of a node's device could not be read or written by NIXL.
    #[cfg(feature = "nixl")]
    #[error("a hand-over from device to device is not possible")]
    Nixl(#[from] kv_nixl::NixlError),
}

cuda_driver::messages::one_line_debug!(HandoverError);
