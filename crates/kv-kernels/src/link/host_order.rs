//! Where the host's end of a transfer stands in the order of device work.

use std::fmt;

use cuda_driver::Fence;

use super::Transport;

/// From when on the host's chunks of a transfer may be accessed, by
/// [`HostLink::start_chunks`](super::HostLink::start_chunks).
///
/// It is the caller's word about chunks alone: pages are always accessed in the order of the stream.
#[derive(Clone, Copy, Debug, Default)]
pub enum HostReady<'a> {
    /// When what was enqueued on the stream before has completed.
    #[default]
    InStream,
    /// At once. Chunks to read were written by the host, or by device work that has completed; nothing
    /// on the device still uses chunks that are to be written. Transfers that were started before count
    /// as device work until they have arrived.
    Now,
    /// When the work before a fence has completed, such as that of an earlier [`HostArrival::fence`].
    /// Later transfers of the same direction wait for it too.
    After(&'a Fence),
}

/// The end of a transfer that was started: its fence completes when every byte has arrived.
///
/// Of a transfer to the host, the bytes are in the host's memory then; of one to the pages, they are in
/// the pages, and the host's memory may be written again. It is complete, too, when the transfer had
/// nothing to move and the stream's earlier work has completed.
///
/// Nothing waits when it is dropped, and nothing is cancelled: it is the only way to learn that bytes
/// have arrived at the host.
#[derive(Clone)]
#[must_use = "without it nothing tells when the bytes have arrived"]
pub struct HostArrival {
    pub(super) fence: Fence,
    pub(super) transport: Transport,
    pub(super) bytes: u64,
}

impl HostArrival {
    /// The fence after the last byte, to ask, to wait for, and for [`HostReady::After`].
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// The way that the bytes go.
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Bytes that move; skipped tokens, and tokens without a slot, are not among them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl fmt::Debug for HostArrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostArrival")
            .field("transport", &self.transport)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// How a transfer stands in the order of its stream.
#[derive(Clone, Copy, Debug)]
pub(super) enum HostOrder<'a> {
    /// As one operation.
    Strict,
    /// The pages in the order of the stream; the host's end from then on, and until a fence that the
    /// caller records on the stream of the last step.
    Started(HostReady<'a>),
}
