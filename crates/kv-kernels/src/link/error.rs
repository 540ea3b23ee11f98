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
    /// The chunk does not lie in the pinned memory.
    #[error("the chunk of a transfer does not lie in its pinned memory")]
    HostRange(#[source] OutOfBounds),
    /// There is an event for each of another number of layers.
    #[error("a transfer of {layers} layers has {events} layer events")]
    LayerEvents {
        /// Events given.
        events: u32,
        /// Layers of the paged memory.
        layers: u32,
    },
    /// More than can be made, or done.
    #[error("{count} {what}, of at most {most}")]
    TooMany {
        /// What there are too many of: `"layers"` or `"rounds"`.
        what: &'static str,
        /// How many were asked for.
        count: u64,
        /// How many there can be.
        most: u64,
    },
    /// A transfer of a sequence goes the other way than the first.
    #[error("transfer {index} of the sequence goes the other way than the first")]
    Directions {
        /// Which one, from 0.
        index: usize,
    },
    /// Two chunks of a sequence that are written share bytes of the host's memory.
    #[error("chunks {first} and {second} of the sequence share bytes of the host's memory")]
    ChunksOverlap {
        /// The one that comes first in the sequence, from 0.
        first: usize,
        /// The other one.
        second: usize,
    },
    /// A transfer of a sequence was refused for its numbers.
    #[error("transfer {index} of the sequence was refused")]
    InSequence {
        /// Which one, from 0.
        index: usize,
        /// Why.
        #[source]
        error: Box<TransportError>,
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

impl TransportError {
    pub(super) fn in_sequence(self, index: usize) -> Self {
        Self::InSequence { index, error: Box::new(self) }
    }

    /// The error of the only transfer of a sequence.
    pub(super) fn of_one(self) -> Self {
        match self {
            Self::InSequence { error, .. } => *error,
            error => error,
        }
    }
}

cuda_driver::messages::one_line_debug!(TransportError);
