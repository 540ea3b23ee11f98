//! The one thing that staging wants of a kernel: few words, written to many places.

use std::fmt;

use cuda_driver::{DeviceError, DeviceSpan, PinnedSpan, ReaderError, Stream};

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

    /// The pinned memory that holds words and indices, for the stream that the scatter is enqueued on.
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

/// The few words of a staging buffer, always at the same places of it, so that their launch can be made
/// ready beforehand: up to [`WORDS_MAX`](Self::WORDS_MAX) words at its start, their indices at
/// [`INDEX_OFFSET`](Self::INDEX_OFFSET), and how many there are, a `u32`, at
/// [`COUNT_OFFSET`](Self::COUNT_OFFSET).
#[derive(Clone, Copy, Debug)]
pub struct ScatterPacket<'a> {
    pub(crate) out: DeviceSpan,
    pub(crate) source: PinnedSpan<'a>,
    pub(crate) words_max: u32,
}

impl ScatterPacket<'_> {
    /// Words of a packet, at most.
    pub const WORDS_MAX: u32 = 240;
    /// Where the indices (`u32`) begin, in bytes.
    pub const INDEX_OFFSET: u64 = Self::WORDS_MAX as u64 * SCATTER_WORD_BYTES;
    /// Where the number of words is, in bytes.
    pub const COUNT_OFFSET: u64 = Self::INDEX_OFFSET + Self::WORDS_MAX as u64 * 4;
    /// Bytes of a packet.
    pub const BYTES: u64 = Self::COUNT_OFFSET + 4;

    /// Where the words go; its address is a multiple of [`SCATTER_WORD_BYTES`].
    #[must_use]
    pub fn out(&self) -> DeviceSpan {
        self.out
    }

    /// The pinned memory at whose start the packet is, for the stream of the step.
    #[must_use]
    pub fn source(&self) -> PinnedSpan<'_> {
        self.source
    }

    /// The most words that the launches will have.
    #[must_use]
    pub fn words_max(&self) -> u32 {
        self.words_max
    }
}

/// Launches for the packets of one staging buffer, which differ in nothing but what the packet holds.
pub trait PreparedScatter: fmt::Debug + Send + Sync {
    /// Enqueues one; `source` begins where that of the [`ScatterPacket`] did.
    ///
    /// # Ordering
    /// On `stream` and nowhere else; waits for nothing.
    ///
    /// # Errors
    /// [`ScatterError`]. Something may have been enqueued nevertheless.
    fn launch(&self, stream: &Stream, source: PinnedSpan<'_>) -> Result<(), ScatterError>;
}

/// A kernel that does a [`Scatter`]; `kv-kernels` has one.
pub trait ScatterKernel: fmt::Debug + Send + Sync {
    /// Makes launches of `packet` ready; none where the kernel has no such, and every step is then a
    /// [`Scatter`]. Called in the first steps that use a staging buffer.
    ///
    /// # Errors
    /// [`ScatterError`]; the step is then sent as a `Scatter`.
    fn prepare(
        &self,
        packet: &ScatterPacket<'_>,
    ) -> Result<Option<Box<dyn PreparedScatter>>, ScatterError> {
        let _ = packet;
        Ok(None)
    }

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
    /// The source is for another stream.
    #[error(transparent)]
    Reader(#[from] ReaderError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
