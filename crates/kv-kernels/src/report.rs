//! What kernels tell of indices that only the device could see to be out of range.

use cuda_driver::{CopyError, Device, DeviceBuffer, DeviceError, DriverError, ErrorCode, Stream};

/// A small buffer on the device in which launches count the indices that they had to pass over.
///
/// Slots and block ids that live only on the device cannot be checked before a launch. The kernels
/// never follow one that is out of range; a launch that is given a report also says so.
///
/// # Ordering
/// Launches add to the report when they run, on any stream. [`take`](DeviceReport::take) sees the
/// launches that its stream has been ordered after.
#[derive(Debug)]
pub struct DeviceReport {
    /// # Invariants
    /// 16 bytes: how many, and the complement of the lowest place, both 0 while there is none.
    buffer: DeviceBuffer,
}

/// Indices that were out of range and were passed over.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("the device passed over {count} indices out of range, the first at place {first}")]
pub struct OutOfRange {
    /// How many, over all launches since the report was last empty.
    pub count: u64,
    /// The lowest place at which one stood, in the array that its launch read it from.
    pub first: u64,
}

impl DeviceReport {
    /// An empty report.
    ///
    /// # Ordering
    /// Waits on the host for all work on `stream`, so that launches on any stream may use it.
    ///
    /// # Errors
    /// When the memory cannot be had, or the device is lost.
    #[track_caller]
    pub fn new(stream: &Stream) -> Result<Self, DeviceError> {
        let buffer = DeviceBuffer::alloc(stream.device(), REPORT_BYTES)?;
        match stream.upload(buffer.span(), &[0; REPORT_BYTES as usize]) {
            Ok(()) => Ok(Self { buffer }),
            Err(error) => Err(device_error(error)),
        }
    }

    /// The device that launches which use the report run on.
    pub(crate) fn device(&self) -> &Device {
        self.buffer.device()
    }

    /// What was out of range, if anything, since the report was last empty; empties it.
    ///
    /// # Ordering
    /// Waits on the host for all work on `stream`. A launch on another stream that is not ordered
    /// before or after this call may lose its count.
    ///
    /// # Errors
    /// The error of the work, if it failed.
    #[track_caller]
    pub fn take(&self, stream: &Stream) -> Result<Option<OutOfRange>, DeviceError> {
        let mut bytes = [0; REPORT_BYTES as usize];
        stream.download(&mut bytes, self.buffer.span()).map_err(device_error)?;
        let [count, lowest] = bytemuck::cast::<[u8; 16], [u64; 2]>(bytes);
        if count == 0 {
            return Ok(None);
        }
        stream.upload(self.buffer.span(), &[0; REPORT_BYTES as usize]).map_err(device_error)?;
        Ok(Some(OutOfRange { count, first: !lowest }))
    }

    pub(crate) fn address(&self) -> u64 {
        self.buffer.address()
    }
}

/// Bytes of a report.
const REPORT_BYTES: u64 = 16;

fn device_error(error: CopyError) -> DeviceError {
    match error {
        CopyError::Device(error) => error,
        // The report is of another driver object than the stream: its owner is here, and both sides have its length.
        _ => DriverError::new("cuMemcpyDtoHAsync", ErrorCode::INVALID_CONTEXT).into(),
    }
}

cuda_driver::messages::one_line_debug!(OutOfRange);
