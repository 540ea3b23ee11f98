//! A loader overwrites pinned memory while a copy still reads it. The example prints the race
//! report.
//!
//! `cargo run -p cuda-sim --example race` shows the race. With `-- --mended` the loader waits
//! first, and there is no race.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program reports here")]

use std::io::IsTerminal;
use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, HostAllocFlags, PinnedBuffer, Stream};
use cuda_sim::{SimConfig, SimDriver};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mended = std::env::args().any(|arg| arg == "--mended");
    let sim = SimDriver::new(SimConfig::default())?;
    let device = Device::open(Arc::new(sim.clone()), 0)?;
    let stream = Stream::new(&device)?;
    let table = DeviceBuffer::alloc(&device, 4096)?;
    let mut staging = PinnedBuffer::alloc(&device, 4096, HostAllocFlags::CACHED)?;
    for step in 0..2 {
        staging.write_at(0, &[step; 4096])?;
        stream.copy_to_device(table.span(), &staging, 0)?;
        if mended {
            stream.synchronize()?;
        }
    }
    stream.synchronize()?;
    for race in sim.races() {
        eprintln!("{}", race.render(std::io::stderr().is_terminal()));
        println!("{}", race.to_json());
    }
    Ok(())
}
