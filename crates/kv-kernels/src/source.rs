//! Memory that a kernel only reads, wherever it lies.

use cuda_driver::{CopyError, DeviceSpan, PinnedSpan, Stream};

/// Memory that a kernel reads: of a device, or pinned on the host.
///
/// # Ordering
/// Either is read when the kernel runs. Pinned memory must keep its bytes until an event recorded
/// after the launch has completed.
#[derive(Clone, Copy, Debug)]
pub enum KernelSource<'a> {
    /// Memory of the kernels' device, or of a peer to which access is enabled.
    Device(DeviceSpan),
    /// Pinned host memory, which the kernel reads over the bus.
    Pinned(PinnedSpan<'a>),
}

impl KernelSource<'_> {
    /// The address by which a kernel on `stream` reaches the first byte.
    ///
    /// # Errors
    /// [`CopyError`] for pinned memory that is for another stream, and for device memory whose owner was dropped.
    pub(crate) fn address(self, stream: &Stream) -> Result<u64, CopyError> {
        match self {
            Self::Device(span) => span.address_on(stream),
            Self::Pinned(span) => span.device_address(stream),
        }
    }

    /// The address as a number, for comparing places.
    pub(crate) fn place(self) -> u64 {
        match self {
            Self::Device(span) => span.address(),
            Self::Pinned(span) => span.raw_address(),
        }
    }

    /// Length in bytes.
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::Device(span) => span.bytes(),
            Self::Pinned(span) => span.bytes(),
        }
    }
}

impl From<DeviceSpan> for KernelSource<'_> {
    fn from(span: DeviceSpan) -> Self {
        Self::Device(span)
    }
}

impl<'a> From<PinnedSpan<'a>> for KernelSource<'a> {
    fn from(span: PinnedSpan<'a>) -> Self {
        Self::Pinned(span)
    }
}
