//! Memory that reads arrive in: it does not move, and is looked at only when nothing arrives there.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;

use cuda_driver::{DeviceBuffer, DeviceSpan, Fence, Stream, guard};
use parking_lot::Mutex;

use crate::NixlError;
use crate::agent::Kind;

/// Reads begin at multiples of it.
const ALIGN: usize = 4096;

/// Where a reader's landings are.
#[derive(Clone, Debug)]
pub(crate) enum Home {
    Host,
    /// On the device of this stream, on which what has come is used.
    Device(Stream),
}

impl Home {
    pub(crate) fn is_host(&self) -> bool {
        matches!(self, Self::Host)
    }

    /// Bytes that are read at a time, unless one span has more. On the host so many that a read's own cost is small, and so few that
    /// what has come is still in a cache when it is checked. On a device so many that a link of some hundred GB/s is busy.
    pub(crate) fn piece_bytes(&self) -> usize {
        match self {
            Self::Host => 512 << 10,
            Self::Device(_) => 32 << 20,
        }
    }
}

/// Bytes that have come.
pub(crate) enum Came<'a> {
    Host(&'a [u8]),
    Device(DeviceSpan),
}

/// So many bytes, which an agent may have registered.
#[derive(Debug)]
pub(crate) enum Landing {
    Host(HostLanding),
    Device {
        buffer: DeviceBuffer,
        stream: Stream,
        /// After the work of those who use what has come. Held for no driver call.
        used: Mutex<Option<Fence>>,
    },
}

impl Landing {
    /// So many bytes, at least one.
    pub(crate) fn new(home: &Home, bytes: usize) -> Result<Self, NixlError> {
        Ok(match home {
            Home::Host => Self::Host(HostLanding::new(bytes)?),
            Home::Device(stream) => Self::Device {
                buffer: DeviceBuffer::alloc(stream.device(), bytes.max(1) as u64)?,
                stream: stream.clone(),
                used: Mutex::default(),
            },
        })
    }

    /// Of which kind and device, and at which address it is.
    pub(crate) fn place(&self) -> (Kind, u64, usize) {
        match self {
            Self::Host(host) => (Kind::Host, 0, host.start.as_ptr() as usize),
            Self::Device { buffer, .. } => {
                // An ordinal is not negative.
                let ordinal = u64::try_from(buffer.device().ordinal()).unwrap_or(0);
                (Kind::Device, ordinal, buffer.address() as usize)
            }
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Host(host) => host.layout.size(),
            Self::Device { buffer, .. } => buffer.bytes() as usize,
        }
    }

    /// These bytes; none if there are not as many.
    ///
    /// # Safety
    /// Nothing writes them as long as the result lives.
    pub(crate) unsafe fn came(&self, bytes: Range<usize>) -> Option<Came<'_>> {
        Some(match self {
            // SAFETY: by the caller's promise.
            Self::Host(host) => Came::Host(unsafe { host.slice(bytes) }?),
            Self::Device { buffer, .. } => {
                let (offset, bytes) = (bytes.start as u64, bytes.len() as u64);
                Came::Device(buffer.span().slice(offset, bytes).ok()?)
            }
        })
    }

    /// Notes that those who use what has come have enqueued that. Meanwhile nobody asks whether they are done: it is
    /// not among the free ones yet.
    pub(crate) fn is_used(&self) {
        if let Self::Device { stream, used, .. } = self {
            let before = used.lock().take();
            let recorded = match before {
                Some(fence) => {
                    guard!("nixl.event-again", fence.renew(stream), else Fence::record(stream))
                }
                None => Fence::record(stream),
            };
            let fence = recorded.unwrap_or_else(|_| Fence::without_event(stream));
            *used.lock() = Some(fence);
        }
    }

    /// Whether they are done: it may be written again. Without an answer of the driver they are not.
    pub(crate) fn is_unused(&self) -> bool {
        let Self::Device { used, .. } = self else { return true };
        let used = used.lock().clone();
        let unanswered = guard!("nixl.unanswered-is-used", false, else true);
        used.is_none_or(|fence| fence.is_at_rest().unwrap_or(unanswered))
    }
}

/// Memory of the host.
#[derive(Debug)]
pub(crate) struct HostLanding {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it is memory, which is reached only by `slice`, whose caller promises that nothing writes it.
unsafe impl Send for HostLanding {}
// SAFETY: as above.
unsafe impl Sync for HostLanding {}

impl HostLanding {
    fn new(bytes: usize) -> Result<Self, NixlError> {
        let none = || NixlError::Memory { bytes: bytes as u64 };
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).map_err(|_| none())?;
        // SAFETY: the layout has at least one byte.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(none)?;
        Ok(Self { start, layout })
    }

    /// # Safety
    /// Nothing writes these bytes as long as the slice lives.
    unsafe fn slice(&self, bytes: Range<usize>) -> Option<&[u8]> {
        if bytes.start > bytes.end || bytes.end > self.layout.size() {
            return None;
        }
        // SAFETY: they are within the allocation, initialised by `alloc_zeroed`, and by the caller's promise not written.
        Some(unsafe {
            std::slice::from_raw_parts(self.start.as_ptr().wrapping_add(bytes.start), bytes.len())
        })
    }
}

impl Drop for HostLanding {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and not used any more.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cuda_driver::{Device, ErrorCode};
    use cuda_sim::{SimConfig, SimDriver};

    use super::*;

    #[test]
    fn a_landing_is_unused_when_its_work_is_known_to_be_over() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let landing = Landing::new(&Home::Device(stream.clone()), 64).unwrap();
        let Landing::Device { buffer, .. } = &landing else { unreachable!() };
        assert!(landing.is_unused(), "nothing has come yet");
        for refused in [None, Some("cuEventRecord"), None] {
            sim.hold(stream.raw());
            stream.fill(buffer.span(), 1).unwrap();
            if let Some(call) = refused {
                sim.fail_nth(call, 1, ErrorCode::UNKNOWN);
            }
            landing.is_used();
            assert!(!landing.is_unused());
            sim.release_hold(stream.raw());
            stream.synchronize().unwrap();
            // That without an event was given one by the question above.
            sim.fail_nth("cuEventQuery", 1, ErrorCode::UNKNOWN);
            assert!(!landing.is_unused(), "{refused:?}");
            assert!(landing.is_unused());
        }
        let created = sim.calls()["cuEventCreate"];
        for _ in 0..3 {
            landing.is_used();
            stream.synchronize().unwrap();
            assert!(landing.is_unused());
        }
        assert_eq!(sim.calls()["cuEventCreate"], created, "one event serves for piece after piece");
    }
}
