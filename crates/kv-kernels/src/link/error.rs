//! Why a transfer between the host and the pages was refused or ended early.

use cuda_driver::{CopyError, DeviceError, OutOfBounds};

use crate::{KernelError, error::PagedKvError};

/// Why a transfer to or from the host was not enqueued, or not all of it.
///
/// What is refused for its numbers is refused before anything is enqueued. What the driver refuses may
/// come halfway: then the stream given still waits for all that was enqueued, so that memory may be
/// released or used again in stream order, and the bytes of the destination are undefined. Only after
/// [`Unordered`](TransportError::Unordered) it does not.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A quantity, a device or a launch.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The list of pairs does not lie in the pinned memory.
    #[error("the pairs of a transfer do not lie in their pinned memory")]
    HostRange(#[source] OutOfBounds),
    /// More timings than a profile is measured with.
    #[error("{count} rounds, of at most {most}")]
    TooManyRounds {
        /// How many were asked for.
        count: u32,
        /// How many there can be.
        most: u32,
    },
    /// Memory for measuring could not be described.
    #[error("the pages to measure with were refused")]
    Pages(#[from] PagedKvError),
    /// What measuring needs could not be copied to the device.
    #[error("the mapping to measure with was not copied")]
    Copy(#[source] CopyError),
    /// A transfer was refused halfway, and the driver refused all that would have made the stream, or the
    /// host, wait for what was enqueued before. That may still run: its memory may be released or used
    /// again when [`Device::synchronize`](cuda_driver::Device::synchronize) has succeeded. The next
    /// transfer of the link begins with that.
    #[error("nothing waits for what a refused transfer has enqueued")]
    Unordered {
        /// Why the transfer was refused.
        #[source]
        error: Box<TransportError>,
    },
    /// The driver refused a call.
    #[error("the driver refused a call of a transfer over the link")]
    Device(#[from] DeviceError),
}

impl From<CopyError> for TransportError {
    /// The memory of a transfer is not for its stream.
    fn from(error: CopyError) -> Self {
        KernelError::from(error).into()
    }
}

cuda_driver::messages::one_line_debug!(TransportError);
