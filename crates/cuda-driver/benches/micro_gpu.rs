//! What single driver calls and operations take on a GPU, beside what the simulated machine predicts
//! for the same program.
//!
//! `cargo bench -p cuda-driver --bench micro_gpu`, on a machine with a GPU of 12 GiB or more and as
//! much host memory. The program runs twice in this process: on device 0 of the driver, timed by the
//! clock, and on a simulated machine, timed by its virtual clock. With two GPUs or more, copies
//! between the first two are measured too. The profile is that of the card, or the file that
//! `KV_PROFILE` names. Every figure is a median. Without a GPU the predictions are printed alone.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_driver::{
    AccessDesc, AllocationProp, CudaDriver, Device, DeviceBuffer, Driver, DriverResult, Event,
    HostAllocFlags, Kernel, KernelArgs, KernelReference, LaunchConfig, Module, PeerCopy,
    PinnedBuffer, ReferenceError, Stream,
};
use cuda_sim::{Profile, SimConfig, SimDriver};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// How near a prediction is to count as right, in parts of what was measured.
const NEAR: f64 = 0.15;

/// `nothing()`, and `read_words(from, groups, to)`, which reads `groups` times 16 bytes and writes
/// only if their exclusive or is a number that it never is. `groups` is a multiple of four times the
/// number of threads.
const PTX: &str = "
.version 7.0
.target sm_80
.address_size 64

.visible .entry nothing()
{
    ret;
}

.visible .entry read_words(
    .param .u64 from,
    .param .u64 groups,
    .param .u64 to
)
{
    .reg .pred %p<3>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<32>;

    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [groups];
    ld.param.u64 %rd3, [to];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mad.lo.u32 %r5, %r1, %r2, %r3;
    cvt.u64.u32 %rd4, %r5;
    mul.wide.u32 %rd5, %r4, %r2;
    shl.b64 %rd6, %rd5, 4;
    mov.u64 %rd7, 0;
    cvta.to.global.u64 %rd8, %rd1;
    shl.b64 %rd9, %rd4, 4;
    add.u64 %rd10, %rd8, %rd9;
LOOP:
    setp.ge.u64 %p1, %rd4, %rd2;
    @%p1 bra END;
    add.u64 %rd11, %rd10, %rd6;
    add.u64 %rd12, %rd11, %rd6;
    add.u64 %rd13, %rd12, %rd6;
    ld.global.v2.u64 {%rd14, %rd15}, [%rd10];
    ld.global.v2.u64 {%rd16, %rd17}, [%rd11];
    ld.global.v2.u64 {%rd18, %rd19}, [%rd12];
    ld.global.v2.u64 {%rd20, %rd21}, [%rd13];
    xor.b64 %rd22, %rd14, %rd15;
    xor.b64 %rd23, %rd16, %rd17;
    xor.b64 %rd24, %rd18, %rd19;
    xor.b64 %rd25, %rd20, %rd21;
    xor.b64 %rd26, %rd22, %rd23;
    xor.b64 %rd27, %rd24, %rd25;
    xor.b64 %rd28, %rd26, %rd27;
    xor.b64 %rd7, %rd7, %rd28;
    add.u64 %rd10, %rd13, %rd6;
    shl.b64 %rd29, %rd5, 2;
    add.u64 %rd4, %rd4, %rd29;
    bra LOOP;
END:
    setp.ne.u64 %p2, %rd7, 81985529216486895;
    @%p2 bra DONE;
    cvta.to.global.u64 %rd30, %rd3;
    st.global.u64 [%rd30], %rd7;
DONE:
    ret;
}
";

/// What `read_words` means to the simulated machine, which would take minutes thread by thread.
const READ_WORDS: KernelReference = KernelReference {
    name: "read_words",
    run: |memory, _, args| {
        let word = |index| args.get::<u64>(index).ok_or(ReferenceError::Argument { index });
        let (from, bytes) = (word(0)?, word(1)? * 16);
        (0..bytes).step_by(MIB as usize).try_for_each(|offset| {
            memory.load(from + offset, MIB.min(bytes - offset)).map(drop).map_err(Into::into)
        })
    },
};

const NOTHING: KernelReference = KernelReference { name: "nothing", run: |_, _, _| Ok(()) };

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match compare() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("not measured to the end: {error}: {error:?}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the table; false when there was no GPU.
fn compare() -> Outcome<bool> {
    let measured = match CudaDriver::load() {
        Ok(driver) => Some(measure_gpu(Arc::new(driver))?),
        Err(reason) => {
            eprintln!("no GPU, predictions alone: {reason}");
            None
        }
    };
    let (name, devices) =
        measured.as_ref().map_or(("no GPU", 2), |gpu| (gpu.name.as_str(), gpu.devices));
    let profile = profile(name)?;
    println!("{name}, predicted with the profile {}\n", profile.name);
    let sim = SimDriver::new(SimConfig {
        devices: devices as u32,
        device_bytes: 64 * GIB,
        pinned_bytes: 8 * GIB,
        profile,
        ..SimConfig::default()
    })?;
    sim.register_kernels(&[NOTHING, READ_WORDS]);
    let predicted = Program::new(Arc::new(sim), 1)?.run(devices)?;
    print(measured.as_ref().map(|gpu| gpu.rows.as_slice()), &predicted);
    Ok(measured.is_some())
}

struct Gpu {
    name: String,
    devices: i32,
    rows: Vec<Row>,
}

fn measure_gpu(driver: Arc<dyn Driver>) -> Outcome<Gpu> {
    let devices = driver.device_get_count()?.min(2);
    let program = Program::new(driver, 7)?;
    let name = program.device.info().name.clone();
    Ok(Gpu { name, devices, rows: program.run(devices)? })
}

fn profile(name: &str) -> Outcome<Profile> {
    if let Ok(path) = std::env::var("KV_PROFILE") {
        return Ok(Profile::parse(&std::fs::read_to_string(path)?)?);
    }
    Ok(if name.contains("H200") { Profile::h200_pair() } else { Profile::h100() })
}

fn print(measured: Option<&[Row]>, predicted: &[Row]) {
    println!("| what | measured, us | GB/s | predicted, us | GB/s | predicted / measured |");
    println!("|---|---|---|---|---|---|");
    let (mut near, mut count) = (0, 0);
    for (index, there) in predicted.iter().enumerate() {
        let here = measured.and_then(|rows| rows.get(index));
        let ratio = here.map(|here| there.nanos / here.nanos);
        count += u32::from(ratio.is_some());
        near += u32::from(ratio.is_some_and(|ratio| (ratio - 1.0).abs() <= NEAR));
        println!(
            "| {} | {} | {} | {} | {} | {} |",
            there.what,
            here.map_or("-".to_owned(), Row::micros),
            here.map_or("-".to_owned(), Row::rate),
            there.micros(),
            there.rate(),
            ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
        );
    }
    println!(
        "\n{near} of {count} predictions lie within {:.0} % of what was measured",
        NEAR * 100.0
    );
}

/// What is timed of virtual memory, in this order.
const PAGE_CALLS: [&str; 9] = [
    "reserve 64 GiB",
    "page: create",
    "page: map",
    "page: set access",
    "page: unmap",
    "page: set access, all in one call",
    "page: unmap, all in one call",
    "page: release",
    "free the reservation",
];

/// One figure.
struct Row {
    what: String,
    nanos: f64,
    /// Bytes that pass in this time.
    bytes: Option<u64>,
}

impl Row {
    fn micros(&self) -> String {
        format!("{:.2}", self.nanos / 1e3)
    }

    fn rate(&self) -> String {
        self.bytes.map_or(String::new(), |bytes| format!("{:.1}", bytes as f64 / self.nanos))
    }
}

/// The program, which does not know which driver it runs on.
struct Program {
    device: Device,
    stream: Stream,
    rounds: usize,
    start: Instant,
}

impl Program {
    fn new(driver: Arc<dyn Driver>, rounds: usize) -> Outcome<Self> {
        let device = Device::open(driver, 0)?;
        let stream = Stream::new(&device)?;
        Ok(Self { device, stream, rounds, start: Instant::now() })
    }

    fn now(&self) -> Duration {
        self.device.virtual_now().unwrap_or_else(|| self.start.elapsed())
    }

    /// Nanoseconds of `work`, by `count`: the median of the rounds after one that warms up.
    fn median(&self, count: u64, mut work: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
        let mut times = Vec::with_capacity(self.rounds);
        for round in 0..=self.rounds {
            let begun = self.now();
            work()?;
            let time = self.now().saturating_sub(begun).as_nanos() as f64;
            if round > 0 {
                times.push(time / count as f64);
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    fn run(&self, devices: i32) -> Outcome<Vec<Row>> {
        let mut rows = Vec::new();
        self.big_copies(&mut rows)?;
        self.loops_of_copies(&mut rows)?;
        self.device_work(&mut rows)?;
        self.events(&mut rows)?;
        self.kernels(&mut rows)?;
        for (mib, count) in [(2, 64), (16, 16), (64, 4)] {
            self.pages(&mut rows, mib * MIB, count)?;
        }
        self.host_memory(&mut rows)?;
        if devices > 1 {
            self.peers(&mut rows)?;
        }
        Ok(rows)
    }

    fn big_copies(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let pinned = || PinnedBuffer::alloc(&self.device, GIB, HostAllocFlags::CACHED);
        let (down, up) = (pinned()?, pinned()?);
        let memory = DeviceBuffer::alloc(&self.device, 2 * GIB)?;
        let [to, from] = [memory.span().slice(0, GIB)?, memory.span().slice(GIB, GIB)?];
        let other = Stream::new(&self.device)?;
        self.stream.fill(memory.span(), 1)?;
        let nanos = self.median(1, || {
            self.stream.copy_to_device(to, &down, 0)?;
            Ok(self.stream.synchronize()?)
        })?;
        push(rows, "host to device, 1 GiB pinned", nanos, GIB);
        let nanos = self.median(1, || {
            self.stream.copy_to_host(&up, 0, from)?;
            Ok(self.stream.synchronize()?)
        })?;
        push(rows, "device to host, 1 GiB pinned", nanos, GIB);
        let nanos = self.median(1, || {
            self.stream.copy_to_device(to, &down, 0)?;
            other.copy_to_host(&up, 0, from)?;
            Ok(self.device.synchronize()?)
        })?;
        push(rows, "both at once, bytes one way", nanos, GIB);
        Ok(())
    }

    fn loops_of_copies(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        const COUNT: u64 = 2048;
        let slot = 2 * MIB;
        // As many places as fit into 512 MiB: large blocks would need 4 GiB on both sides.
        let places = 256;
        let host = PinnedBuffer::alloc(&self.device, places * slot, HostAllocFlags::CACHED)?;
        let memory = DeviceBuffer::alloc(&self.device, places * slot)?;
        self.stream.fill(memory.span(), 1)?;
        for kib in [4, 16, 32, 64, 128, 512, 2048] {
            let bytes = kib * KIB;
            let nanos = self.median(COUNT, || {
                for index in 0..COUNT {
                    let offset = index % places * slot;
                    let to = memory.span().slice(offset, bytes)?;
                    self.stream.copy_to_device(to, &host, offset)?;
                }
                Ok(self.stream.synchronize()?)
            })?;
            push(rows, &format!("loop of 2,048 copies to the device, {kib} KiB"), nanos, bytes);
        }
        for kib in [4, 64, 2048] {
            let bytes = kib * KIB;
            let nanos = self.median(COUNT, || {
                for index in 0..COUNT {
                    let offset = index % places * slot;
                    let from = memory.span().slice(offset, bytes)?;
                    self.stream.copy_to_host(&host, offset, from)?;
                }
                Ok(self.stream.synchronize()?)
            })?;
            push(rows, &format!("loop of 2,048 copies to the host, {kib} KiB"), nanos, bytes);
        }
        let to = memory.span().slice(0, slot)?;
        let nanos = self.median(1, || {
            self.stream.copy_to_device(to, &host, 0)?;
            Ok(self.stream.synchronize()?)
        })?;
        push(rows, "one copy to the device and a wait, 2 MiB", nanos, slot);
        Ok(())
    }

    fn device_work(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let memory = DeviceBuffer::alloc(&self.device, 8 * GIB)?;
        self.stream.fill(memory.span(), 1)?;
        for (name, bytes, count) in [
            ("copy on the device, 4 GiB, bytes read and written", 4 * GIB, 1),
            ("loop of 100 copies on the device, 1 MiB", MIB, 100),
        ] {
            let [to, from] = [memory.span().slice(0, bytes)?, memory.span().slice(4 * GIB, bytes)?];
            let nanos = self.median(count, || {
                for _ in 0..count {
                    self.stream.copy_on_device(to, from)?;
                }
                Ok(self.stream.synchronize()?)
            })?;
            push(rows, name, nanos, 2 * bytes);
        }
        let gib = memory.span().slice(0, GIB)?;
        let nanos = self.median(1, || {
            self.stream.fill(gib, 2)?;
            Ok(self.stream.synchronize()?)
        })?;
        push(rows, "fill, 1 GiB", nanos, GIB);
        let kernel = self.kernel("read_words")?;
        let scratch = DeviceBuffer::alloc(&self.device, 8)?;
        let args = KernelArgs::new().arg(gib.address()).arg(GIB / 16).arg(scratch.address());
        let nanos = self.median(4, || {
            for _ in 0..4 {
                // SAFETY: the arguments are those of `read_words`, and name device memory alone.
                unsafe { kernel.launch(&self.stream, &LaunchConfig::linear(2048, 256), &args) }?;
            }
            Ok(self.stream.synchronize()?)
        })?;
        push(rows, "kernel that reads 1 GiB", nanos, GIB);
        let begun = Event::with_timing(&self.device)?;
        let ended = Event::with_timing(&self.device)?;
        begun.record(&self.stream)?;
        self.stream.copy_on_device(memory.span().slice(4 * GIB, GIB)?, gib)?;
        ended.record(&self.stream)?;
        ended.synchronize()?;
        let nanos = f64::from(ended.elapsed_ms_since(&begun)?) * 1e6;
        push(rows, "copy on the device, 1 GiB, by events", nanos, 2 * GIB);
        drop((memory, scratch));
        self.device.free_retired()?;
        Ok(())
    }

    fn kernel(&self, name: &str) -> Outcome<Kernel> {
        Ok(Module::load(&self.device, PTX)?.kernel(name)?)
    }

    /// `count` times the same call, without what the handles do around it.
    fn calls(
        &self,
        count: u64,
        mut call: impl FnMut(&dyn Driver) -> DriverResult<()>,
    ) -> Outcome<f64> {
        self.median(count, || {
            Ok(self.device.run(|driver| (0..count).try_for_each(|_| call(driver)))?)
        })
    }

    fn events(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let event = Event::new(&self.device)?;
        let (raw, stream) = (event.raw(), self.stream.raw());
        // SAFETY: event and stream are live, and of this driver.
        let nanos = self.calls(1000, |driver| unsafe { driver.event_record(raw, stream) })?;
        push(rows, "event record", nanos, None);
        self.device.synchronize()?;
        let nanos = self.calls(1000, |driver| {
            // SAFETY: the event is live, and of this driver.
            unsafe { driver.event_query(raw) }.map(drop)
        })?;
        push(rows, "event query", nanos, None);
        Ok(())
    }

    fn kernels(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let kernel = self.kernel("nothing")?;
        let (one, args) = (LaunchConfig::linear(1, 32), KernelArgs::new());
        let nanos = self.median(1000, || {
            for _ in 0..1000 {
                // SAFETY: the kernel has no parameters and touches no memory.
                unsafe { kernel.launch(&self.stream, &one, &args) }?;
            }
            Ok(self.stream.synchronize()?)
        })?;
        push(rows, "loop of 1,000 empty kernels", nanos, None);
        let nanos = self.median(100, || {
            for _ in 0..100 {
                // SAFETY: as above.
                unsafe { kernel.launch(&self.stream, &one, &args) }?;
                self.stream.synchronize()?;
            }
            Ok(())
        })?;
        push(rows, "empty kernel and a wait", nanos, None);
        Ok(())
    }

    /// `count` pages: each call for one page at a time, and for all in one call.
    fn pages(&self, rows: &mut Vec<Row>, page: u64, count: u64) -> Outcome<()> {
        let mut times: [Vec<f64>; PAGE_CALLS.len()] = Default::default();
        for _ in 0..=self.rounds {
            let laps = self.device.run(|driver| self.page_laps(driver, page, count))?;
            times.iter_mut().zip(laps).for_each(|(times, lap)| times.push(lap));
        }
        for (name, mut times) in PAGE_CALLS.iter().zip(times) {
            let of_page = name.strip_prefix("page: ");
            // What is of no page is the same for every page.
            if of_page.is_none() && page > 2 * MIB {
                continue;
            }
            times.remove(0);
            times.sort_by(f64::total_cmp);
            let name = of_page
                .map_or((*name).to_owned(), |call| format!("{} MiB page: {call}", page / MIB));
            push(rows, &name, times[times.len() / 2], None);
        }
        Ok(())
    }

    /// Nanoseconds of each of [`PAGE_CALLS`].
    fn page_laps(
        &self,
        driver: &dyn Driver,
        page: u64,
        count: u64,
    ) -> DriverResult<[f64; PAGE_CALLS.len()]> {
        let prop = AllocationProp::on(0);
        let access = [AccessDesc { device: 0 }];
        let mut last = self.now();
        let mut lap = |calls: u64| {
            let now = self.now();
            let nanos = now.saturating_sub(last).as_nanos() as f64 / calls as f64;
            last = now;
            nanos
        };
        let base = driver.mem_address_reserve(64 * GIB, 0, 0)?;
        let reserved = lap(1);
        let handles = (0..count).map(|_| driver.mem_create(page, prop));
        let handles: Vec<u64> = handles.collect::<Result<_, _>>()?;
        let created = lap(count);
        let places = || (0..count).map(|index| base + index * page).zip(&handles);
        // SAFETY: the handles were created above and are released below.
        let map = |address, handle| unsafe { driver.mem_map(address, page, 0, handle) };
        places().try_for_each(|(address, &handle)| map(address, handle))?;
        let mapped = lap(count);
        places().try_for_each(|(address, _)| driver.mem_set_access(address, page, &access))?;
        let opened = lap(count);
        places().try_for_each(|(address, _)| driver.mem_unmap(address, page))?;
        let unmapped = lap(count);
        places().try_for_each(|(address, &handle)| map(address, handle))?;
        lap(1);
        driver.mem_set_access(base, count * page, &access)?;
        let opened_all = lap(count);
        driver.mem_unmap(base, count * page)?;
        let unmapped_all = lap(count);
        // SAFETY: each handle is released once and used no more.
        handles.iter().try_for_each(|&handle| unsafe { driver.mem_release(handle) })?;
        let released = lap(count);
        driver.mem_address_free(base, 64 * GIB)?;
        let freed = lap(1);
        Ok([reserved, created, mapped, opened, unmapped, opened_all, unmapped_all, released, freed])
    }

    fn host_memory(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        for mib in [1, 16, 256] {
            let (mut alloc, mut free) = (Vec::new(), Vec::new());
            for _ in 0..=self.rounds {
                let (took, gave) = self.device.run(|driver| {
                    let begun = self.now();
                    let host = driver.mem_host_alloc(mib * MIB, HostAllocFlags::CACHED)?;
                    let allocated = self.now();
                    // SAFETY: the memory was allocated above, and nothing refers to it.
                    unsafe { driver.mem_free_host(host) }?;
                    Ok((allocated - begun, self.now() - allocated))
                })?;
                alloc.push(took.as_nanos() as f64);
                free.push(gave.as_nanos() as f64);
            }
            for (name, mut times) in [("allocate", alloc), ("free", free)] {
                times.remove(0);
                times.sort_by(f64::total_cmp);
                let name = format!("{name} {mib} MiB of pinned memory");
                push(rows, &name, times[times.len() / 2], None);
            }
        }
        Ok(())
    }

    fn peers(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let other = Device::open(self.device.driver().clone(), 1)?;
        if self.device.driver().device_can_access_peer(0, 1)? {
            // SAFETY: the context is that of `other`, which is alive.
            self.device.run(|driver| unsafe { driver.ctx_enable_peer_access(other.context()) })?;
        }
        let here = DeviceBuffer::alloc(&self.device, 256 * MIB)?;
        let there = DeviceBuffer::alloc(&other, 256 * MIB)?;
        self.stream.fill(here.span(), 1)?;
        for bytes in [64 * KIB, MIB, 16 * MIB, 256 * MIB] {
            let copy = PeerCopy {
                destination: there.address(),
                destination_context: other.context(),
                source: here.address(),
                source_context: self.device.context(),
                bytes,
            };
            let stream = self.stream.raw();
            let nanos = self.median(20, || {
                self.device.run(|driver| {
                    // SAFETY: both buffers are device memory of these contexts, and alive.
                    (0..20).try_for_each(|_| unsafe { driver.memcpy_peer_async(copy, stream) })
                })?;
                Ok(self.stream.synchronize()?)
            })?;
            push(rows, &format!("copy between devices, {} KiB", bytes / KIB), nanos, bytes);
        }
        Ok(())
    }
}

fn push(rows: &mut Vec<Row>, what: &str, nanos: f64, bytes: impl Into<Option<u64>>) {
    rows.push(Row { what: what.to_owned(), nanos, bytes: bytes.into() });
}
