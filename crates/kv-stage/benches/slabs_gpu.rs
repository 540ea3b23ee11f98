//! Time until the slabs of a large host tier are usable, by threads, pages and size of a slab, beside
//! one allocation of the driver.
//!
//! `cargo bench -p kv-stage --bench slabs_gpu`. The tier has `KV_SLABS_GIB` GiB (4 by default). For each
//! way of pinning: when the first slab, half of the slabs and all of them are usable, and the time to
//! give them back. The driver allocates at most 8 GiB. The first row is apart: a virtual machine may get
//! its memory by the first access. Then what a host thread that sends small copies notices of the pinning
//! in the background, and the rate of copies from the first and the last slab. `KV_DEVICE=sim` runs it on the
//! simulated device, only to check that it runs: the times mean nothing then.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_driver::host_pages::{HostMemory, HostPagesOptions, MemoryNode};
use cuda_driver::{
    CudaDriver, Device, DeviceBuffer, Driver, Event, HostAllocFlags, PinnedBuffer, Stream,
};
use cuda_sim::{SimConfig, SimDriver};
use kv_stage::{PinnedSlabs, SlabsOptions};

/// Bytes of a block: 16 tokens of 32 layers of 8 heads of 128, bf16.
const BLOCK_BYTES: u64 = 2 << 20;

fn main() -> ExitCode {
    match open() {
        Ok(device) => {
            println!("{}, host node {:?}", device.info().name, device.host_node());
            let bench = Bench::new(device);
            bench.ways();
            bench.beside_copies();
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("nothing was measured: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn simulated() -> bool {
    std::env::var_os("KV_DEVICE").is_some_and(|name| name == "sim")
}

fn open() -> Result<Device, String> {
    let driver: Arc<dyn Driver> = if simulated() {
        Arc::new(SimDriver::new(SimConfig::default()).map_err(|error| error.to_string())?)
    } else {
        Arc::new(CudaDriver::load().map_err(|error| error.to_string())?)
    };
    Device::open(driver, 0).map_err(|error| format!("{error:?}"))
}

struct Bench {
    device: Device,
    bytes: u64,
}

fn pages(huge: bool) -> HostMemory {
    HostMemory::Pages(HostPagesOptions { huge, node: MemoryNode::BesideDevice })
}

impl Bench {
    fn new(device: Device) -> Self {
        let gib = std::env::var("KV_SLABS_GIB").ok().map_or(4, |gib| gib.parse().unwrap());
        Self { device, bytes: if simulated() { 64 << 20 } else { gib << 30 } }
    }

    fn slabs(&self, slab_mib: u64, memory: HostMemory, threads: usize) -> PinnedSlabs {
        let slab_bytes_max = if simulated() { 8 << 20 } else { slab_mib << 20 };
        let options = SlabsOptions {
            slab_bytes_max,
            memory,
            threads,
            ..SlabsOptions::new(BLOCK_BYTES, self.bytes / BLOCK_BYTES)
        };
        PinnedSlabs::new(&self.device, &options).unwrap()
    }

    fn ways(&self) {
        let gib = self.bytes as f64 / f64::from(1 << 30);
        println!(
            "\n| pinning {gib:.2} GiB | threads | slab, MiB | returned, ms | first slab, ms | half, ms | all, ms | GiB/s | given back, ms |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        for (name, huge, threads, slab_mib) in [
            ("huge pages, for the first time", true, 16, 512),
            ("huge pages", true, 16, 512),
            ("huge pages", true, 16, 64),
            ("huge pages", true, 16, 128),
            ("huge pages", true, 16, 2048),
            ("huge pages", true, 4, 512),
            ("huge pages", true, 1, 512),
            ("ordinary pages", false, 16, 512),
            ("ordinary pages", false, 4, 512),
            ("huge pages", true, 16, 512),
        ] {
            let begun = Instant::now();
            let mut slabs = self.slabs(slab_mib, pages(huge), threads);
            let returned = begun.elapsed();
            let [first, half, all] = wait_for(&mut slabs, begun);
            let got = slabs.memory();
            let begun = Instant::now();
            slabs.close().unwrap();
            let given = begun.elapsed();
            let rate = gib / all.as_secs_f64();
            let [returned, first, half, all, given] = [returned, first, half, all, given].map(ms);
            println!(
                "| {name} | {threads} | {slab_mib} | {returned:.2} | {first:.0} | {half:.0} | {all:.0} | {rate:.1} | {given:.0} |"
            );
            if huge && got.huge_bytes + got.advised_bytes == 0 {
                println!("| no huge pages: {got:?} | | | | | | | | |");
            }
        }
        let bytes = self.bytes.min(8 << 30);
        let begun = Instant::now();
        let pinned = PinnedBuffer::alloc(&self.device, bytes, HostAllocFlags::CACHED).unwrap();
        let all = begun.elapsed();
        let begun = Instant::now();
        drop(pinned);
        self.device.free_retired().unwrap();
        let given = ms(begun.elapsed());
        let gib = bytes as f64 / f64::from(1 << 30);
        let (rate, all) = (gib / all.as_secs_f64(), ms(all));
        println!(
            "| {gib:.2} GiB by the driver | 1 | - | {all:.0} | {all:.0} | {all:.0} | {all:.0} | {rate:.1} | {given:.0} |"
        );
    }

    /// What a thread that sends copies of 64 KiB, each with an event, notices of 16 threads that pin.
    fn beside_copies(&self) {
        println!("\n| copy of 64 KiB and event, host, µs | copies | p50 | p99 | worst |");
        println!("|---|---|---|---|---|");
        let source = PinnedBuffer::alloc(&self.device, 64 << 10, HostAllocFlags::CACHED).unwrap();
        let mut copies = Copies::new(&self.device, &source);
        let alone = Instant::now();
        let mut times = Vec::new();
        while alone.elapsed() < Duration::from_millis(if simulated() { 10 } else { 1000 }) {
            times.push(copies.one());
        }
        report("alone", times);
        for (slab_mib, threads) in [(512, 16), (128, 16), (32, 16), (512, 4)] {
            let begun = Instant::now();
            let mut slabs = self.slabs(slab_mib, pages(true), threads);
            let (mut times, mut polls) = (Vec::new(), Vec::new());
            while slabs.slabs().len() < slabs.slabs_wanted() {
                let begun = Instant::now();
                slabs.poll().unwrap();
                polls.push(begun.elapsed());
                times.push(copies.one());
            }
            let all = ms(begun.elapsed());
            report(&format!("{threads} threads pin slabs of {slab_mib} MiB, {all:.0} ms"), times);
            report("poll of the slabs meanwhile", polls);
            if slab_mib == 512 && threads == 16 {
                self.rates(&slabs);
            }
            slabs.close().unwrap();
        }
    }

    fn rates(&self, slabs: &PinnedSlabs) {
        let stream = Stream::new(&self.device).unwrap();
        let (start, end) =
            (Event::with_timing(&self.device).unwrap(), Event::with_timing(&self.device).unwrap());
        let ends = [slabs.slabs().first().unwrap(), slabs.slabs().last().unwrap()];
        for (name, slab) in ["first", "last"].into_iter().zip(ends) {
            let target = DeviceBuffer::alloc(&self.device, slab.bytes()).unwrap();
            for direction in ["to the device", "to the host"] {
                start.record(&stream).unwrap();
                for _ in 0..4 {
                    match direction {
                        "to the device" => stream.copy_to_device(target.span(), slab, 0).unwrap(),
                        _ => stream.copy_to_host(slab, 0, target.span()).unwrap(),
                    }
                }
                end.record(&stream).unwrap();
                end.synchronize().unwrap();
                let took = f64::from(end.elapsed_ms_since(&start).unwrap());
                let rate = 4.0 * slab.bytes() as f64 / took / 1e6;
                println!("| {name} slab, {direction}: {rate:.1} GB/s | | | | |");
            }
        }
    }
}

/// Small copies from one buffer, a few in flight.
struct Copies<'a> {
    stream: Stream,
    source: &'a PinnedBuffer,
    target: DeviceBuffer,
    events: Vec<Event>,
    next: usize,
}

impl<'a> Copies<'a> {
    fn new(device: &Device, source: &'a PinnedBuffer) -> Self {
        Self {
            stream: Stream::new(device).unwrap(),
            source,
            target: DeviceBuffer::alloc(device, source.bytes()).unwrap(),
            events: (0..8).map(|_| Event::new(device).unwrap()).collect(),
            next: 0,
        }
    }

    /// Enqueues a copy and an event; the time of these two calls. Waits before for the copy eight before it.
    fn one(&mut self) -> Duration {
        let event = &self.events[self.next % self.events.len()];
        if self.next >= self.events.len() {
            event.synchronize().unwrap();
        }
        self.next += 1;
        let begun = Instant::now();
        self.stream.copy_to_device(self.target.span(), self.source, 0).unwrap();
        event.record(&self.stream).unwrap();
        begun.elapsed()
    }
}

/// When the first slab, half of the slabs and all of them were usable.
fn wait_for(slabs: &mut PinnedSlabs, begun: Instant) -> [Duration; 3] {
    let wanted = slabs.slabs_wanted();
    [1, wanted.div_ceil(2), wanted].map(|count| {
        while slabs.poll().unwrap() < count {
            std::thread::yield_now();
        }
        begun.elapsed()
    })
}

fn report(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: f64| ms(times[((times.len() - 1) as f64 * share) as usize]) * 1e3;
    let (p50, p99, worst) = (at(0.5), at(0.99), at(1.0));
    println!("| {name} | {} | {p50:.2} | {p99:.2} | {worst:.1} |", times.len());
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
