//! A program that already has a CUDA context and a stream lets this crate use both.
//!
//! `cargo run -p cuda-driver --example adopt` runs on the simulated device. With `-- cuda` it runs on the first GPU,
//! and the context and the stream are cudarc's.

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, Driver, Stream};
use cuda_sim::{SimConfig, SimDriver};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    match std::env::args().nth(1).as_deref() {
        #[cfg(feature = "cuda")]
        Some("cuda") => with_cudarc(),
        _ => with_raw_handles(),
    }
}

/// The program has raw handles, from whatever bindings it uses.
fn with_raw_handles() -> Result<(), Box<dyn std::error::Error>> {
    let driver = Arc::new(SimDriver::new(SimConfig::default())?);
    let context = driver.device_primary_ctx_retain(0)?;
    // SAFETY: the context was retained above.
    unsafe { driver.ctx_set_current(context) }?;
    let raw_stream = driver.stream_create(false)?;

    // SAFETY: the context is released below, after the device and its handles are dropped.
    let device = unsafe { Device::adopt(Arc::clone(&driver) as Arc<dyn Driver>, context) }?;
    // SAFETY: the stream is destroyed below, after `stream` is dropped.
    let stream = unsafe { Stream::adopt(&device, raw_stream) }?;
    fill_and_read(&device, &stream)?;
    drop(stream);
    drop(device);

    // The program's context and stream are still its own, and still current on this thread.
    assert_eq!(driver.ctx_get_current()?, context);
    // SAFETY: nothing uses the stream any more.
    unsafe { driver.stream_destroy(raw_stream) }?;
    // SAFETY: nothing uses the context any more.
    unsafe { driver.device_primary_ctx_release(0) }?;
    assert!(driver.check_leaks().is_clean());
    Ok(())
}

/// The program has a context and a stream of cudarc. The adopting handles keep both alive, so this is safe.
#[cfg(feature = "cuda")]
fn with_cudarc() -> Result<(), Box<dyn std::error::Error>> {
    use cuda_driver::{CudaDriver, interop};

    let context = cudarc::driver::CudaContext::new(0)?;
    let their_stream = context.new_stream()?;
    let device = interop::device(Arc::new(CudaDriver::load()?), &context)?;
    let stream = interop::stream(&device, &their_stream)?;
    fill_and_read(&device, &stream)
}

/// Uses the adopted context and stream like any others.
fn fill_and_read(device: &Device, stream: &Stream) -> Result<(), Box<dyn std::error::Error>> {
    let memory = DeviceBuffer::alloc(device, 4096)?;
    stream.fill(memory.span(), 7)?;
    let mut bytes = [0; 4096];
    stream.download(&mut bytes, memory.span())?;
    assert_eq!(bytes, [7; 4096]);
    println!("4,096 bytes on {}, through an adopted context and stream", device.info().name);
    Ok(())
}
