//! Requests of an async runtime on two GPUs, each through the GPU's own thread.
//!
//! `cargo run -p kv-multigpu --example async_requests` runs on simulated GPUs, and with `-- cuda` on those of
//! the machine.

#![allow(clippy::print_stdout, reason = "a program that says what it does")]

use std::error::Error;
use std::sync::Arc;

use cuda_driver::{CopyError, CudaDriver, Device, DeviceBuffer, Driver, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_multigpu::DeviceRegistry;
use kv_multigpu::threads::{DeviceThread, DeviceThreadOptions, Refusal};

type Failure = Box<dyn Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let driver: Arc<dyn Driver> = match std::env::args().nth(1).as_deref() {
        Some("cuda") => CudaDriver::probe()?,
        _ => Arc::new(SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() })?),
    };
    let registry = DeviceRegistry::new(driver)?;
    let mut threads = Vec::new();
    for ordinal in 0..registry.count() {
        let options = DeviceThreadOptions { tasks_max: 4, ..DeviceThreadOptions::default() };
        threads.push(Arc::new(DeviceThread::spawn(&registry.device(ordinal)?, options)?));
    }
    let requests = (0..32).map(|number| {
        let thread = Arc::clone(&threads[number as usize % threads.len()]);
        tokio::spawn(async move { request(&thread, number).await })
    });
    for request in requests.collect::<Vec<_>>() {
        request.await??;
    }
    for thread in &threads {
        thread.close()?;
    }
    drop(threads);
    let closed = registry.close_all();
    println!("32 requests served; closed: {closed:?}");
    Ok(())
}

/// Puts the request's work into its GPU's queue, and waits for room where that is full.
async fn request(thread: &DeviceThread, number: u8) -> Result<(), Failure> {
    let mut task = move |device: &Device| compute(device, number);
    let answer = loop {
        match thread.submit(task) {
            // The runtime may go on with this request in any of its threads from here.
            Ok(completion) => break completion.await??,
            Err(full) if matches!(full.refusal, Refusal::Full { .. }) => {
                task = full.task;
                thread.room().await;
            }
            Err(refused) => return Err(refused.refusal.into()),
        }
    };
    assert_eq!(answer, [number; 4]);
    Ok(())
}

/// Runs on the GPU's thread, which may wait without holding up the runtime.
fn compute(device: &Device, number: u8) -> Result<[u8; 4], CopyError> {
    let stream = Stream::new(device)?;
    let memory = DeviceBuffer::alloc(device, 4)?;
    stream.fill(memory.span(), number)?;
    let mut answer = [0; 4];
    stream.download(&mut answer, memory.span())?;
    Ok(answer)
}
