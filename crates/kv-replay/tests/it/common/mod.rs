//! What several modules share.

#![allow(dead_code, reason = "each program uses a part")]

use std::path::Path;
use std::process::{Command, Output};

use kv_replay::config::RunConfig;
use kv_replay::device::{OpenDevices, SimSizes, open};
use kv_replay::generate::{GenerateOptions, generate};
use kv_replay::trace::{Request, Trace};
use serde_json::Value;

pub(crate) mod nodes;

/// A good line of a trace.
pub(crate) const GOOD: &str =
    r#"{"timestamp": 5, "input_length": 700, "output_length": 52, "hash_ids": [0, 1]}"#;

/// The program. It finds no GPU, even on a machine with GPUs.
pub(crate) fn program() -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_kv-replay"));
    program.env("CUDA_VISIBLE_DEVICES", "-1");
    program
}

/// Runs the program in a folder, with arguments that are divided by spaces.
pub(crate) fn kv_replay(folder: &Path, args: &str) -> Output {
    program().current_dir(folder).args(args.split_whitespace()).output().unwrap()
}

pub(crate) fn error_of(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A request that arrives at once, and shares its prompt with those of the same first id.
pub(crate) fn request(input_length: u64, output_length: u64, first_id: u64) -> Request {
    let hash_ids = (first_id..first_id + input_length.div_ceil(512)).collect();
    Request { timestamp_ms: 0, input_length, output_length, hash_ids, tenant: None }
}

/// A generated workload of requests with no more than so many tokens, and answers with no more than so many.
pub(crate) fn generated(requests: u64, seed: u64, (input_max, output_max): (u64, u64)) -> Trace {
    let mut trace = generate(&GenerateOptions { requests, seed }).unwrap();
    for request in &mut trace.requests {
        request.input_length = request.input_length.min(input_max);
        request.hash_ids.truncate(request.input_length.div_ceil(512) as usize);
        request.output_length = request.output_length.min(output_max);
    }
    trace
}

/// Simulated devices for a run.
pub(crate) fn devices(device: &str, config: &RunConfig) -> OpenDevices {
    open(&device.parse().unwrap(), SimSizes::for_config(config)).unwrap()
}

/// Closes devices, and looks for what a run has left there.
#[track_caller]
pub(crate) fn leave(devices: OpenDevices) {
    let sim = devices.sim.clone().unwrap();
    drop(devices);
    assert!(sim.check_leaks().is_clean(), "{:?}", sim.check_leaks());
}
