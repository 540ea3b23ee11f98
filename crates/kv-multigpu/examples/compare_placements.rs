//! Compares the strategies that place a model on two GPUs of different size.

#![allow(clippy::print_stdout, reason = "an example prints")]

use kv_multigpu::place::{
    GpuCapacity, KvReplication, LayerShape, Link, LinkMatrix, ModelShape, Placement, Strategy,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let layer = LayerShape {
        weight_bytes: 400 << 20,
        kv_block_bytes: 64 << 10,
        output_token_bytes: 8 << 10,
    };
    let model = ModelShape::uniform(48, layer, 4096)?;
    let gpu = |id, free_bytes| GpuCapacity {
        uuid: [id; 16],
        free_bytes,
        memory_bytes_per_second: 3_350_000_000_000,
    };
    let gpus = [gpu(1, 40 << 30), gpu(2, 20 << 30)];
    let link = Link { latency_ns: 5_000, bytes_per_second: 397_000_000_000 };
    let links = LinkMatrix::uniform(gpus.len(), link)?;
    for strategy in Strategy::ALL {
        match Placement::layers(&model, &gpus, &links, strategy) {
            Ok(placement) => println!("{}\n", placement.explain()),
            Err(error) => println!("{}: {error}\n", strategy.name()),
        }
    }
    let sharded = Placement::sharded(&model, &gpus, &links, 64, 8, KvReplication::Refuse)?;
    println!("{}", sharded.explain());
    Ok(())
}
