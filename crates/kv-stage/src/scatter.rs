//! The one thing that staging wants of a kernel: few words, written to many places.

use std::fmt;

use cuda_driver::{DeviceError, DeviceSpan, PinnedSpan, Stream};

/// Bytes of a word.
pub const SCATTER_WORD_BYTES: u64 = 16;

/// Words of a staging buffer, and where each goes: `out[index[i]] = data[i]`.
///
/// Made by [`Step::submit`](crate::Step::submit) only, for a buffer that is not written again before
/// everything enqueued during the call has completed.
#[derive(Clone, Copy, Debug)]
pub struct Scatter<'a> {
    pub(crate) out: DeviceSpan,
    pub(crate) source: PinnedSpan<'a>,
    pub(crate) index_offset: u64,
    pub(crate) count: u32,
}

impl Scatter<'_> {
    /// Where the words go; its address is a multiple of [`SCATTER_WORD_BYTES`].
    #[must_use]
    pub fn out(&self) -> DeviceSpan {
        self.out
    }

    /// The pinned memory that holds words and indices.
    #[must_use]
    pub fn source(&self) -> PinnedSpan<'_> {
        self.source
    }

    /// Where the words begin in it, in bytes; aligned to a word.
    #[must_use]
    pub fn data_offset(&self) -> u64 {
        0
    }

    /// Where the indices (`u32`, counted in words from the start of `out`) begin in it, in bytes;
    /// aligned to 4. No index is there twice, and none is beyond the end of `out`.
    #[must_use]
    pub fn index_offset(&self) -> u64 {
        self.index_offset
    }

    /// Number of words, at least 1.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }
}

/// A kernel that does a [`Scatter`]; `kv-kernels` has one.
pub trait ScatterKernel: fmt::Debug + Send + Sync {
    /// Enqueues it.
    ///
    /// # Ordering
    /// On `stream` and nowhere else; waits for nothing.
    ///
    /// # Errors
    /// [`ScatterError`]. Something may have been enqueued nevertheless.
    fn scatter(&self, stream: &Stream, scatter: &Scatter<'_>) -> Result<(), ScatterError>;
}

/// Why words were not scattered.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScatterError {
    /// The kernel's own checks found something wrong.
    #[error("the scatter kernel refused its arguments")]
    Refused,
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
