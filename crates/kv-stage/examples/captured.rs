//! A captured CUDA graph that makes and reads the batch of each step, at addresses that stay.
//!
//! `cargo run -p kv-stage --example captured` runs on the simulated device.

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{GatherRows, KvKernels, error::KernelError};
use kv_stage::{
    BatchOptions, BatchTable, BlockId, DeviceBatch, Row, StagingOptions, StagingPool, TableEntry,
};

const WIDTH: u32 = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // On a GPU: `cuda_driver::CudaDriver::load()?`.
    let driver = SimDriver::new(SimConfig::default())?;
    driver.register_kernels(kv_stage::references());
    driver.register_kernels(kv_kernels::references());
    let device = Device::open(Arc::new(driver), 0)?;
    let stream = Stream::new(&device)?;
    let table = BatchTable {
        width: WIDTH,
        block_tokens: 16,
        null_block: BlockId::from(0),
        is_state: false,
    };
    let options = BatchOptions {
        rows: 8,
        sequences_max: 4,
        tokens_max: 64,
        tables: vec![table],
        arrays: vec![],
    };
    let pool = StagingPool::new(&device, StagingOptions::overlapped(options.buffer_bytes(), 1))?;
    let mut batch = DeviceBatch::new(&pool, options)?;

    // The model's part is a kernel that copies the batch's block table.
    let (kernels, seen) = (KvKernels::load(&device)?, DeviceBuffer::alloc(&device, 4 * 4 * 64)?);
    let index = DeviceBuffer::alloc(&device, 16)?;
    stream.upload(index.span(), bytemuck::cast_slice(&[0_u32, 1, 2, 3]))?;
    let reader = GatherRows {
        out: seen.span(),
        out_stride: u64::from(WIDTH),
        table: batch.buffers().tables[0].block_table,
        table_stride: u64::from(WIDTH),
        row_index: index.span(),
        rows: 4,
        width: WIDTH,
        table_rows: 4,
    };
    let graph = stream.capture(|| {
        batch.gather(&stream).map_err(KernelError::from)?;
        kernels.gather_rows(&stream, reader)
    })?;

    for token in 0..48_u16 {
        if token % 16 == 0 {
            let block = TableEntry::from(100 + token);
            batch.edit(0, Row::new(5), (token / 16).into(), &[block])?;
        }
        let mut step = batch.step_wait(&stream)?;
        step.row(Row::new(5), token.into(), token.into(), 1)?;
        step.submit_inputs()?;
        // SAFETY: the kernels and the memory of the graph live until the end of this function.
        unsafe { graph.launch(&stream) }?;
    }
    let mut table = vec![0; 4 * 4 * 64];
    stream.download(&mut table, seen.span())?;
    println!("blocks of the sequence: {:?}", &bytemuck::cast_slice::<u8, i32>(&table)[..4]);
    Ok(())
}
