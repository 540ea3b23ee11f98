//! cudarc's objects in the form that this crate takes, and this crate's memory in the form that
//! cudarc takes.
//!
//! A program that has a cudarc `CudaContext` gets a [`Device`] on it from [`device`], and a [`Stream`]
//! of a `CudaStream` from [`stream()`]; both keep cudarc's object alive. Memory goes the other way: any
//! [`DeviceSpan`], of a buffer or of mapped addresses, is [lent](lend) to cudarc as a slice that
//! cudarc does not free.
//!
//! ```no_run
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use cuda_driver::{CudaDriver, DeviceBuffer, interop};
//! use cudarc::driver::CudaContext;
//!
//! fn main() -> Result<(), Box<dyn Error>> {
//!     let theirs = CudaContext::new(0)?;
//!     let their_stream = theirs.new_stream()?;
//!     let device = interop::device(Arc::new(CudaDriver::load()?), &theirs)?;
//!     let memory = DeviceBuffer::alloc(&device, 4096)?;
//!     // SAFETY: `memory` outlives the slice and cudarc's work on it, and any bytes are `f32`s.
//!     let mut lent = unsafe { interop::lend::<f32>(&their_stream, memory.span()) }?;
//!     their_stream.memcpy_htod(&[1.0; 1024], &mut lent.view_mut())?;
//!     assert_eq!(their_stream.clone_dtoh(&lent.slice(1000..))?, [1.0; 24]);
//!     Ok(())
//! }
//! ```
//!
//! # Order
//! cudarc orders only the work that it enqueues on its own slices. It does not see work that others
//! enqueue on its streams, and this crate does not see cudarc's work. Before memory is unmapped or
//! freed, record an [`Event`](crate::Event) on the adopted stream after cudarc's last use, and wait
//! for it.
//!
//! Another driver object than a [`CudaDriver`] takes cudarc's handles as numbers, `cu_ctx()` and `cu_stream()`:
//! [`Device::adopt`].
//! cudarc's contexts are usually primary contexts. [`Device::open`] then finds the same context
//! without this module.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaViewMut, DeviceRepr, result, sys};

use super::CudaDriver;
use crate::device::Owner;
use crate::{Device, DeviceError, DeviceSpan, DriverError, ErrorCode, ResidencyError, Stream};

/// The `CUcontext` of a cudarc context.
fn context_handle(context: &CudaContext) -> u64 {
    context.cu_ctx() as u64
}

/// The `CUstream` of a cudarc stream; 0 is the legacy default stream.
fn stream_handle(stream: &CudaStream) -> u64 {
    stream.cu_stream() as u64
}

/// A device on a context that the host program made with cudarc, which stays alive as long as the
/// device and every handle made from it.
///
/// # Errors
/// [`DeviceError::Driver`] when the context cannot be bound.
pub fn device(driver: Arc<CudaDriver>, context: &Arc<CudaContext>) -> Result<Device, DeviceError> {
    let owner = Owner::of(Arc::clone(context));
    // SAFETY: cudarc's context is live as long as its object, which the device holds; both are of the
    // one driver library that cudarc loads, as `CudaDriver` does through it.
    unsafe { Device::adopt_of(driver, context_handle(context), owner) }
}

/// A stream that the host program made with cudarc, which stays alive as long as the result.
///
/// # Errors
/// `INVALID_CONTEXT` when it is of another context than `device`'s, `INVALID_HANDLE` for the default stream
/// of each thread.
#[track_caller]
pub fn stream(device: &Device, stream: &Arc<CudaStream>) -> Result<Stream, DeviceError> {
    if context_handle(stream.context()) != device.context() {
        let call = "cuStreamGetCtx";
        return Err(DriverError::new(call, ErrorCode::INVALID_CONTEXT).into());
    }
    let owner = Owner::of(Arc::clone(stream));
    // SAFETY: cudarc's stream is live as long as its object, which the result holds.
    unsafe { Stream::adopt_of(device, stream_handle(stream), owner) }
}

/// Memory lent to cudarc: a `CudaSlice` that is not freed when it is dropped.
///
/// It hands out the slice by reference only, and mutable access as a view. Dropping the slice
/// itself would free memory that has another owner.
///
/// # Drop
/// Makes the slice's stream wait, on the device, for the work that cudarc has recorded on the
/// slice. Does not wait on the host.
pub struct LentSlice<T> {
    slice: ManuallyDrop<CudaSlice<T>>,
}

/// Lends memory to cudarc, as a slice of `stream`.
///
/// # Safety
/// - until the result is dropped and cudarc's work on it has completed, the range is mapped or
///   allocated, and accessible to `stream`'s device;
/// - bytes that are read through the result as a `T`, on the host or by a kernel, were written as
///   values of type `T`;
/// - work of others on the same range is ordered before or after cudarc's.
///
/// # Errors
/// [`ResidencyError`].
pub unsafe fn lend<T: DeviceRepr>(
    stream: &Arc<CudaStream>,
    span: DeviceSpan,
) -> Result<LentSlice<T>, ResidencyError> {
    let length = elements::<T>(span)?;
    let _restored = Restored::new();
    // `upgrade_device_ptr` makes the same events, and panics if it cannot.
    if let Err(error) = stream.context().new_event(None) {
        let code = ErrorCode(error.0 as u32);
        return Err(ResidencyError::Cudarc(DriverError::new("cuEventCreate", code)));
    }
    // SAFETY: the caller promises memory of so many elements, for as long as cudarc uses it.
    let slice = unsafe { stream.upgrade_device_ptr(span.address(), length) };
    Ok(LentSlice { slice: ManuallyDrop::new(slice) })
}

/// Number of elements in the memory.
fn elements<T>(span: DeviceSpan) -> Result<usize, ResidencyError> {
    let (align, element_bytes) = (align_of::<T>() as u64, size_of::<T>() as u64);
    let (address, bytes) = (span.address(), span.bytes());
    if !address.is_multiple_of(align) {
        return Err(ResidencyError::Misaligned { address, align });
    }
    if element_bytes == 0 || !bytes.is_multiple_of(element_bytes) {
        return Err(ResidencyError::Length { bytes, element_bytes });
    }
    Ok((bytes / element_bytes) as usize)
}

impl<T> LentSlice<T> {
    /// All of it, to be written.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.as_view_mut()
    }
}

impl<T> Deref for LentSlice<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

impl<T> fmt::Debug for LentSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentSlice").field("elements", &self.slice.len()).finish_non_exhaustive()
    }
}

impl<T> Drop for LentSlice<T> {
    fn drop(&mut self) {
        let _restored = Restored::new();
        // SAFETY: taken here and nowhere else, and the field is not used afterwards.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // The address; the memory stays its owner's.
        let _ = slice.leak();
    }
}

/// Remembers the current context of this thread, because cudarc binds its own and leaves it
/// current. A drop restores the remembered context.
struct Restored {
    /// Null for none.
    before: Option<sys::CUcontext>,
}

impl Restored {
    /// Called where a cudarc object exists, so that its library is loaded.
    fn new() -> Self {
        let before = result::ctx::get_current().ok();
        Self { before: before.map(|context| context.unwrap_or(std::ptr::null_mut())) }
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        let Some(before) = self.before else { return };
        // SAFETY: it was current on this thread when `new` ran, so it was live then; should its
        // owner have destroyed it since, the driver answers with an error. Null unbinds.
        if unsafe { result::ctx::set_current(before) }.is_err() {
            tracing::warn!("the previous context could not be restored");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_whole_and_aligned() {
        // SAFETY: nothing is enqueued with them.
        let span = |address, bytes| unsafe { DeviceSpan::from_raw(address, bytes) }.unwrap();
        assert_eq!(elements::<f32>(span(0x1000, 4096)), Ok(1024));
        assert_eq!(elements::<u8>(span(0x1001, 3)), Ok(3));
        assert_eq!(elements::<u8>(span(0x1001, 0)), Ok(0));
        let refused = ResidencyError::Misaligned { address: 0x1002, align: 4 };
        assert_eq!(elements::<f32>(span(0x1002, 4096)), Err(refused));
        let refused = ResidencyError::Length { bytes: 4098, element_bytes: 4 };
        assert_eq!(elements::<f32>(span(0x1000, 4098)), Err(refused));
        let refused = ResidencyError::Length { bytes: 16, element_bytes: 0 };
        assert_eq!(elements::<()>(span(0x1000, 16)), Err(refused));
    }
}
