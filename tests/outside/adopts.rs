//! A program that chooses cudarc's version, bindings and linking itself, and uses our crates too.

use std::sync::Arc;

use cuda_driver::{CudaDriver, DeviceBuffer, interop};
use cudarc::driver::CudaContext;

/// Adopts a context and a stream, and lends memory back.
pub fn adopts() -> Result<(), Box<dyn std::error::Error>> {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let device = interop::device(Arc::new(CudaDriver::load()?), &context)?;
    let adopted = interop::stream(&device, &stream)?;
    let memory = DeviceBuffer::alloc(&device, 4096)?;
    adopted.fill(memory.span(), 7)?;
    adopted.synchronize()?;
    // SAFETY: `memory` outlives the slice and cudarc's work on it, and any bytes are valid `u8`s.
    let lent = unsafe { interop::lend::<u8>(&stream, memory.span()) }?;
    assert_eq!(stream.clone_dtoh(&*lent)?, [7; 4096]);
    Ok(())
}
