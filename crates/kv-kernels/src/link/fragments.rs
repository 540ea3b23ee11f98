//! The pieces of blocks that lie together on both sides, for the copy engine.

use cuda_driver::{BatchCopy, DeviceError, DriverResult, ErrorCode, Stream, guard};

use super::{HostDirection, HostLink, TransportError};
use crate::PagedKv;

/// The tensor that holds a plane, and where the plane begins.
pub(super) fn plane_place(paged: &PagedKv, layer: u64, kv: u64) -> (u64, u64) {
    let (layout, shape) = (paged.layout(), paged.shape());
    let tensor = layout.tensors().index(shape, layer, kv);
    let start = paged.tensors()[tensor as usize].address();
    (tensor, start + layout.plane_offset(layer, kv))
}

/// Copies between tensors and one memory of the host, to which copies are appended.
pub(super) struct Fragments<'a> {
    copies: &'a mut Vec<BatchCopy>,
    /// The tensor of the last one; `None` where that is of another memory of the host.
    tensor: Option<u64>,
}

impl<'a> Fragments<'a> {
    pub(super) fn new(copies: &'a mut Vec<BatchCopy>) -> Self {
        Self { copies, tensor: None }
    }

    /// Appends a copy, or makes the last one longer where the two lie together in one tensor and in the host's memory.
    /// Two tensors may touch as well, but are two allocations, of which a driver makes no single copy.
    pub(super) fn push(&mut self, tensor: u64, copy: BatchCopy) {
        let before = self.tensor.replace(tensor);
        let is_same = guard!("kernels.copies-of-one-tensor", before == Some(tensor), else true);
        match self.copies.last_mut() {
            Some(last)
                if is_same
                    && last.destination + last.bytes == copy.destination
                    && last.source + last.bytes == copy.source =>
            {
                last.bytes += copy.bytes;
            }
            _ => self.copies.push(copy),
        }
    }
}

impl HostLink {
    /// Enqueues copies on `stream`: by one call, or by one for each where the driver has no batches or
    /// the stream is the legacy default one, which takes none.
    ///
    /// # Safety
    /// - every range lies in pinned memory of the host that stays allocated, and that nobody accesses
    ///   where it is written, until the copies have run, or in device memory.
    pub(super) unsafe fn copy_all(
        &mut self,
        stream: &Stream,
        direction: HostDirection,
        copies: &[BatchCopy],
    ) -> Result<(), TransportError> {
        let raw = stream.raw();
        if raw != 0 && !self.no_batches && copies.len() > 1 {
            // SAFETY: the caller's promise; the stream is live, as long as its handle.
            let batch =
                self.device().run(|driver| unsafe { driver.memcpy_batch_async(copies, raw) });
            match batch {
                Err(DeviceError::Driver(error)) if error.code == ErrorCode::NOT_SUPPORTED => {
                    self.no_batches = true;
                }
                answer => return Ok(answer?),
            }
        }
        Ok(self.device().run(|driver| {
            copies.iter().try_for_each(|copy| -> DriverResult<()> {
                let BatchCopy { destination, source, bytes } = *copy;
                match direction {
                    // SAFETY: as above.
                    HostDirection::ToHost => unsafe {
                        driver.memcpy_dtoh_async(destination, source, bytes, raw)
                    },
                    // SAFETY: as above.
                    HostDirection::ToPages => unsafe {
                        driver.memcpy_htod_async(destination, source, bytes, raw)
                    },
                }
            })
        })?)
    }
}
