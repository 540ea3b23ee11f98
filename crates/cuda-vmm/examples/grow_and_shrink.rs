//! A pool of blocks grows and shrinks under a batch, on the simulated device.
//!
//! `cargo run -p cuda-vmm --example grow_and_shrink`

#![allow(clippy::print_stdout, reason = "a program for the terminal")]

use std::sync::Arc;

use cuda_driver::{Device, Fence, Stream};
use cuda_sim::{SimConfig, SimDriver};
use cuda_vmm::{ElasticPool, ElasticPoolOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // On a machine with a GPU: `Device::open(Arc::new(cuda_driver::CudaDriver::load()?), 0)`.
    let device = Device::open(Arc::new(SimDriver::new(SimConfig::default())?), 0)?;
    let stream = Stream::new(&device)?;
    let pool = ElasticPool::new(
        &device,
        ElasticPoolOptions {
            block_bytes: 256 << 10,
            capacity_blocks: 4_096,
            page_bytes: None,
            initial_blocks: 8,
        },
    )?;
    println!("addresses for 4,096 blocks, memory for {}", pool.ready_blocks());
    println!("grown to {} blocks", pool.grow_to(100)?);

    // A batch holds a lease from before it reads an address until its work is enqueued.
    let lease = pool.gate().lease();
    stream.fill(pool.block_span(99)?, 7)?;
    let shrink = pool.shrink_to(8, &[])?;
    println!("{} blocks are ready, {} pages wait", shrink.ready_blocks, shrink.retiring_pages);
    println!("while the lease is open {} pages are unmapped", pool.poll_retired().unmapped_pages);
    lease.submitted(&[Fence::record(&stream)?])?;
    stream.synchronize()?;
    println!("after the work {} pages are unmapped", pool.poll_retired().unmapped_pages);

    let report = pool.close(&[]).wait()?;
    println!("closed: {} pages released, {} bytes leaked", report.released, report.leaked_bytes);
    Ok(())
}
