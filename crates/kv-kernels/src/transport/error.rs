//! Why a transfer between the host and the pages was refused or ended early.

use cuda_driver::{CopyError, DeviceError, OutOfBounds};

use crate::{BlocksError, KernelError, PagedKvError};

/// Why a transfer to or from the host was not enqueued, or not all of it.
///
/// What is refused for its numbers is refused before anything is enqueued. What the driver refuses may
/// come halfway: then the stream given still waits for all that was enqueued, so that memory may be
/// released or used again in stream order, and the bytes of the destination are undefined.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A quantity, a device or a launch.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Pairs of blocks.
    #[error(transparent)]
    Blocks(#[from] BlocksError),
    /// The chunk does not lie in the pinned memory.
    #[error("the chunk does not lie in the pinned memory")]
    HostRange(#[source] OutOfBounds),
    /// There is an event for each of another number of layers.
    #[error("{events} layer events for {layers} layers")]
    LayerEvents {
        /// Events given.
        events: u32,
        /// Layers of the paged memory.
        layers: u32,
    },
    /// Memory for measuring could not be described.
    #[error("the pages to measure with were refused")]
    Pages(#[from] PagedKvError),
    /// What measuring needs could not be copied to the device.
    #[error("the mapping to measure with was not copied")]
    Copy(#[from] CopyError),
    /// The driver refused a call.
    #[error("the driver refused a step of the transfer")]
    Device(#[from] DeviceError),
}
