//! Generates a workload, replays it on two simulated devices with every byte verified.
//!
//! `cargo run --release -p kv-replay --example replay`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use kv_replay::config::RunConfig;
use kv_replay::device::{SimSizes, open};
use kv_replay::engine;
use kv_replay::generate::{GenerateOptions, generate};
use kv_replay::shape::KvModelShape;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let trace = generate(&GenerateOptions { requests: 20, seed: 7 })?;

    // Pools so small that blocks are evicted to host memory, and brought back.
    let shape = KvModelShape { layers: 2, ..RunConfig::default().shape };
    let (device_blocks, host_blocks) = (250, 300);
    let config = RunConfig { shape, device_blocks, host_blocks, ..RunConfig::default() };
    config.check()?;
    config.check_trace(&trace)?;

    // On GPUs: `"cuda:0,cuda:1".parse()?`.
    let devices = open(&"sim:2".parse()?, SimSizes::for_config(&config))?;
    let report = engine::run(&config, &trace, &devices, &mut ())?;
    println!("{}", report.summary());
    assert_eq!((report.finished, report.corrupt_blocks), (20, 0));
    Ok(())
}
