//! A decode loop that stages block tables and lengths one step ahead of the device.
//!
//! `cargo run -p kv-stage --example decode` runs on the simulated device.

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::sync::Arc;

use cuda_driver::{Device, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_stage::{BlockTable, Row, StagingOptions, StagingPool, StepStager};

const SEQUENCES: usize = 8;
const BLOCK_TOKENS: u32 = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // On a GPU: `cuda_driver::CudaDriver::load()?`.
    let driver = SimDriver::new(SimConfig::default())?;
    let device = Device::open(Arc::new(driver), 0)?;
    let stream = Stream::new(&device)?;

    let device_bytes = 64 << 10;
    let buffers = StagingOptions::overlapped(StepStager::buffer_bytes(device_bytes), 1);
    let pool = StagingPool::new(&device, buffers)?;
    let mut stager = StepStager::with_scatter(&device, &pool, device_bytes)?;

    let mut table = BlockTable::new(SEQUENCES, 64)?;
    let batch: Vec<Row> = (0..SEQUENCES as u32).map(Row::new).collect();
    let (mut lengths, mut blocks) = ([0u32; SEQUENCES], 0);
    for iteration in 0..100 {
        for (row, length) in batch.iter().zip(&mut lengths) {
            if *length % BLOCK_TOKENS == 0 {
                table.append(*row, blocks)?;
                blocks += 1;
            }
            *length += 1;
        }
        let width = lengths[0].div_ceil(BLOCK_TOKENS) as usize;
        // Waits only when the device is more than one step behind.
        let mut step = stager.begin_wait()?;
        let rows = step.block_rows(&table, &batch, width)?;
        let lens = step.array(&lengths)?;
        let staged = step.submit(&stream)?;
        let (_table, _lens) = (staged.span(rows)?, staged.span(lens)?);
        // Enqueue the model on `stream` here: both spans are valid there until the next submit.
        if iteration % 25 == 0 {
            println!("step {iteration}: {} bytes, {} words", staged.bytes(), staged.words());
        }
    }
    pool.close()?;
    Ok(())
}
