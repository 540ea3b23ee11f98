//! A decode loop that stages block tables and lengths one step ahead of the device.
//!
//! `cargo run -p kv-stage --example decode` runs on the simulated device.

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::sync::Arc;

use cuda_driver::{Device, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_stage::{
    BatchOptions, BatchTable, BlockId, DeviceBatch, Row, StagingOptions, StagingPool, TableEntry,
};

const SEQUENCES: u32 = 8;
const BLOCK_TOKENS: u32 = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // On a GPU: `cuda_driver::CudaDriver::load()?`.
    let driver = SimDriver::new(SimConfig::default())?;
    driver.register_kernels(kv_stage::references());
    let device = Device::open(Arc::new(driver), 0)?;
    let stream = Stream::new(&device)?;

    let table = BatchTable {
        width: 64,
        block_tokens: BLOCK_TOKENS,
        null_block: BlockId::from(0),
        is_state: false,
    };
    let options = BatchOptions {
        rows: SEQUENCES,
        sequences_max: SEQUENCES,
        tokens_max: SEQUENCES,
        tables: vec![table],
        arrays: vec![],
    };
    let pool = StagingPool::new(&device, StagingOptions::overlapped(options.buffer_bytes(), 1))?;
    let mut batch = DeviceBatch::new(&pool, options)?;

    let (mut lengths, mut blocks) = ([0; SEQUENCES as usize], 0);
    for iteration in 0..100 {
        for (row, length) in (0..).map(Row::new).zip(&lengths) {
            if length % BLOCK_TOKENS == 0 {
                blocks += 1;
                batch.edit(0, row, length / BLOCK_TOKENS, &[TableEntry::from(blocks)])?;
            }
        }
        // Waits only when the device is more than one step behind.
        let mut step = batch.step_wait(&stream)?;
        for (row, length) in (0..).map(Row::new).zip(&mut lengths) {
            step.row(row, (*length).into(), (*length).into(), 1)?;
            *length += 1;
        }
        let staged = step.submit()?;
        let (_table, _lengths) = (staged.buffers.tables[0].block_table, staged.buffers.lengths);
        // Enqueue the model on `stream` here: the buffers hold this step until the next submit.
        if iteration % 25 == 0 {
            println!("step {iteration}: {} bytes", staged.bytes);
        }
    }
    drop(batch);
    pool.close()?;
    Ok(())
}
