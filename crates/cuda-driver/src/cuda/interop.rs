//! Handles of cudarc's objects, in the form that this crate takes.
//!
//! A program that has a cudarc `CudaContext` keeps it and lends it: the handle goes to
//! [`Device::adopt`](crate::Device::adopt), and the handle of a `CudaStream` to
//! [`Stream::adopt`](crate::Stream::adopt). Both are `unsafe`, because the cudarc object must
//! outlive everything made from it. cudarc's contexts are primary contexts, so
//! [`Device::open`](crate::Device::open) finds the same one without any of this.
//!
//! ```no_run
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use cuda_driver::{CudaDriver, Device, Stream, interop};
//! use cudarc::driver::CudaContext;
//!
//! fn main() -> Result<(), Box<dyn Error>> {
//!     let theirs = CudaContext::new(0)?;
//!     let their_stream = theirs.new_stream()?;
//!     let driver = CudaDriver::probe()?;
//!     // SAFETY: a live context of the one driver library; declared first, so dropped last.
//!     let device = unsafe { Device::adopt(driver, interop::context_handle(&theirs)) }?;
//!     // SAFETY: a live stream of that context, which outlives `stream` too.
//!     let stream = unsafe { Stream::adopt(&device, interop::stream_handle(&their_stream)) }?;
//!     stream.synchronize()?;
//!     Ok(())
//! }
//! ```
//!
//! cudarc does not see work that others enqueue on its streams: its slices take no notice of it
//! when they are dropped. Order such work with events, or synchronise the stream.

use cudarc::driver::{CudaContext, CudaStream};

/// The `CUcontext` of a cudarc context.
#[must_use]
pub fn context_handle(context: &CudaContext) -> u64 {
    context.cu_ctx() as u64
}

/// The `CUstream` of a cudarc stream; 0 is the legacy default stream.
#[must_use]
pub fn stream_handle(stream: &CudaStream) -> u64 {
    stream.cu_stream() as u64
}
