//! The gain of mapping ahead of need, compared with mapping on demand and with the bare driver
//! calls, in one run.
//!
//! `cargo bench -p cuda-vmm --bench vmm_gpu`, on a machine with a GPU of 40 GiB or more. The shape
//! is that of an 8-billion-parameter model: 128 KiB of KV per token over all layers, 16 tokens per
//! page of 2 MiB. With `KV_TRACE=FILE` (lines of JSON with `input_length` and `output_length`) it
//! also computes the waste of page sizes and layouts over a trace, on the simulated device, without
//! a GPU. `KV_DEVICE=sim` runs everything there, only to check that it runs: the times mean nothing
//! then.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a failed measurement ends with its location")]

mod adopt;
mod growth;
mod raw;
mod step;
mod waste;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use cuda_driver::{CudaDriver, Device};
use cuda_sim::{SimConfig, SimDriver};

/// KV of one token, all layers.
const TOKEN_BYTES: u64 = 128 << 10;

fn main() -> ExitCode {
    let mut measured = false;
    match open() {
        Ok(device) => {
            println!("{}\n", device.info().name);
            step::measure(&device);
            growth::measure(&device);
            adopt::measure(&device);
            measured = true;
        }
        Err(reason) => eprintln!("no GPU was measured: {reason}"),
    }
    if let Some(trace) = std::env::var_os("KV_TRACE") {
        waste::compute(trace.as_ref());
        measured = true;
    }
    if measured { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn open() -> Result<Device, String> {
    if std::env::var_os("KV_DEVICE").is_some_and(|name| name == "sim") {
        let config = SimConfig { device_bytes: 80 << 30, ..SimConfig::default() };
        let driver = SimDriver::new(config).map_err(|error| error.to_string())?;
        return Device::open(Arc::new(driver), 0).map_err(|error| error.to_string());
    }
    let driver = CudaDriver::load().map_err(|error| error.to_string())?;
    Device::open(Arc::new(driver), 0).map_err(|error| format!("{error}: {error:?}"))
}

/// The value below which `percent` of the values lie.
fn percentile(values: &mut [Duration], percent: usize) -> Duration {
    values.sort_unstable();
    values[(values.len() - 1) * percent / 100]
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
