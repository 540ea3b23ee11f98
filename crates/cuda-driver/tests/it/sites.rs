//! The lines of driver calls, as a driver sees them, and the bytes of the host's accesses.

use std::sync::Arc;

use cuda_driver::host_pages::HostPages;
use cuda_driver::{
    AccessDesc, AddressRange, Device, DeviceBuffer, DeviceError, DeviceSpan, DriverError,
    ErrorCode, Event, Fence, FencePool, HostAccess, HostAllocFlags, HostRegisterFlags, KernelArgs,
    LaunchConfig, Module, PhysicalMemory, PinnedBuffer, Stream, site,
};
use cuda_sim::{Pace, SimConfig, SimDriver};

use crate::common::kernel;
use kv_testkit::{Watch, from_here};

const BYTES: u64 = 4096;
const PAGE: u64 = 2 << 20;

struct Machine {
    sim: SimDriver,
    watch: Watch,
    device: Device,
    stream: Stream,
    memory: DeviceBuffer,
    pinned: PinnedBuffer,
}

impl Machine {
    fn new() -> Self {
        let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
        let watch = Watch::default();
        let device = Device::open(watch.over(Arc::new(sim.clone())), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let memory = DeviceBuffer::alloc(&device, BYTES).unwrap();
        let pinned = PinnedBuffer::alloc(&device, BYTES, HostAllocFlags::CACHED).unwrap();
        watch.accesses();
        Self { sim, watch, device, stream, memory, pinned }
    }

    /// A second device of the same driver object.
    fn peer(&self) -> Device {
        Device::open(Arc::clone(self.device.driver()), 1).unwrap()
    }
}

/// Checks that the work was asked for on this line, all of it directly.
macro_rules! direct {
    ($watch:expr, $call:literal, $work:expr) => {{
        let (outcome, through) = from_here!($watch, $call, $work);
        assert!(!through, "{} came through these crates", $call);
        outcome
    }};
}

#[test]
fn work_of_a_stream_names_the_programs_line() {
    let m = Machine::new();
    let (watch, stream, span, pinned) = (&m.watch, &m.stream, m.memory.span(), &m.pinned);
    let half = |place: u64| span.slice(place * BYTES / 2, BYTES / 2).unwrap();
    let (low, high) = (half(0), half(1));
    direct!(watch, "cuMemcpyHtoDAsync", stream.copy_to_device(span, pinned, 0)).unwrap();
    direct!(watch, "cuMemcpyDtoHAsync", stream.copy_to_host(pinned, 0, span)).unwrap();
    direct!(watch, "cuMemcpyDtoDAsync", stream.copy_on_device(low, high)).unwrap();
    direct!(watch, "cuMemsetD8Async", stream.fill(span, 1)).unwrap();
    let mut bytes = vec![0; BYTES as usize];
    direct!(watch, "cuMemcpyHtoDAsync", stream.upload(span, &bytes)).unwrap();
    direct!(watch, "cuMemcpyDtoHAsync", stream.download(&mut bytes, span)).unwrap();
    direct!(watch, "cuStreamQuery", stream.is_idle()).unwrap();
    direct!(watch, "cuStreamSynchronize", stream.synchronize()).unwrap();
    let other = direct!(watch, "cuStreamCreate", Stream::new(&m.device)).unwrap();
    // SAFETY: a live stream of the device, which outlives what is made of it.
    direct!(watch, "cuStreamGetCtx", unsafe { Stream::adopt(&m.device, other.raw()) }).unwrap();
}

#[test]
fn waits_and_records_name_the_programs_line() {
    let m = Machine::new();
    let (watch, stream) = (&m.watch, &m.stream);
    let other = Stream::new(&m.device).unwrap();
    let first = direct!(watch, "cuEventCreate", Event::with_timing(&m.device)).unwrap();
    let second = Event::with_timing(&m.device).unwrap();
    direct!(watch, "cuEventCreate", Event::new(&m.device)).unwrap();
    direct!(watch, "cuEventRecord", first.record(stream)).unwrap();
    direct!(watch, "cuStreamWaitEvent", other.wait(&first)).unwrap();
    direct!(watch, "cuStreamWaitEvent", other.wait_for(stream, &second)).unwrap();
    direct!(watch, "cuEventQuery", second.is_complete()).unwrap();
    direct!(watch, "cuEventSynchronize", second.synchronize()).unwrap();
    direct!(watch, "cuEventElapsedTime", second.elapsed_ms_since(&first)).unwrap();
    direct!(watch, "cuCtxSynchronize", m.device.synchronize()).unwrap();
    // Of the default stream, which takes another way.
    // SAFETY: the default stream is always there.
    let default = unsafe { Stream::adopt(&m.device, 0) }.unwrap();
    direct!(watch, "cuStreamWaitEvent", other.wait_for(&default, &second)).unwrap();

    let mut pool = FencePool::default();
    direct!(watch, "cuEventCreate", pool.prepare(&m.device, 1)).unwrap();
    let fence = direct!(watch, "cuEventRecord", pool.record(stream)).unwrap();
    direct!(watch, "cuStreamWaitEvent", fence.hold_back(&other)).unwrap();
    direct!(watch, "cuEventQuery", fence.is_at_rest()).unwrap();
    let fence = direct!(watch, "cuEventRecord", Fence::record(stream)).unwrap();
    let fence = direct!(watch, "cuEventRecord", fence.renew(stream)).unwrap();
    direct!(watch, "cuEventSynchronize", fence.wait()).unwrap();
    let fence = || Fence::without_event(stream);
    direct!(watch, "cuStreamQuery", Fence::are_at_rest(&[fence()])).unwrap();
    direct!(watch, "cuStreamSynchronize", fence().wait_for_rest()).unwrap();
}

#[test]
fn launches_name_the_programs_line() {
    let m = Machine::new();
    m.sim.register_kernels(&[kernel::REFERENCE]);
    let (watch, stream) = (&m.watch, &m.stream);
    let module =
        direct!(watch, "cuModuleLoadDataEx", Module::load(&m.device, kernel::PTX)).unwrap();
    let kernel = direct!(watch, "cuModuleGetFunction", module.kernel(kernel::NAME)).unwrap();
    let args = KernelArgs::new().arg(m.memory.address()).arg(7u32).arg(4u32);
    let (config, args) = (&LaunchConfig::linear(1, 32), &args);
    // SAFETY: the parameters of the kernel, which writes device memory.
    direct!(watch, "cuLaunchKernel", unsafe { kernel.launch(stream, config, args) }).unwrap();
    let made =
        // SAFETY: as above.
        direct!(watch, "cuGraphInstantiate", unsafe { kernel.prepare(config, args) }).unwrap();
    // SAFETY: as above.
    direct!(watch, "cuGraphLaunch", unsafe { made.launch(stream) }).unwrap();
    let nothing = || Ok::<(), DeviceError>(());
    let graph = direct!(watch, "cuStreamBeginCapture", stream.capture(nothing)).unwrap();
    // SAFETY: it has no kernel.
    direct!(watch, "cuGraphLaunch", unsafe { graph.launch(stream) }).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn memory_names_the_line_that_pins_maps_and_frees_it() {
    let m = Machine::new();
    let (watch, device) = (&m.watch, &m.device);
    let cached = HostAllocFlags::CACHED;
    let memory = direct!(watch, "cuMemAlloc", DeviceBuffer::alloc(device, BYTES)).unwrap();
    direct!(watch, "cuMemFree", memory.free()).unwrap();
    drop(DeviceBuffer::alloc(device, BYTES).unwrap());
    direct!(watch, "cuMemFree", device.free_retired()).unwrap();
    let pinned =
        direct!(watch, "cuMemHostAlloc", PinnedBuffer::alloc(device, BYTES, cached)).unwrap();
    drop(pinned);
    // Freed by the allocation that comes next.
    drop(direct!(watch, "cuMemFreeHost", DeviceBuffer::alloc(device, BYTES)).unwrap());
    let memory = cuda_driver::host_pages::HostMemory::Driver(cached);
    drop(direct!(watch, "cuMemHostAlloc", PinnedBuffer::pin(device, BYTES, memory)).unwrap());
    let (flags, pages) = (HostRegisterFlags::SHARED, HostPages::map(BYTES, false, None).unwrap());
    let region = Box::new(pages);
    let own = direct!(watch, "cuMemHostRegister", PinnedBuffer::register(device, region, flags));
    drop(own.unwrap());
    direct!(watch, "cuMemHostUnregister", device.free_retired()).unwrap();
    direct!(watch, "cuMemGetInfo", device.memory_info()).unwrap();
    let at = m.memory.address();
    // SAFETY: nothing is enqueued with the span.
    direct!(watch, "cuPointerGetAttributes", unsafe { DeviceSpan::of_device(device, at, BYTES) })
        .unwrap();
}

#[test]
fn mappings_name_the_line_that_changes_them() {
    let m = Machine::new();
    let (watch, device) = (&m.watch, &m.device);
    let range = direct!(watch, "cuMemAddressReserve", AddressRange::reserve(device, PAGE)).unwrap();
    let page = direct!(watch, "cuMemCreate", PhysicalMemory::create(device, PAGE)).unwrap();
    direct!(watch, "cuMemMap", range.map(0, &page)).unwrap();
    let access = [AccessDesc { device: 0 }];
    direct!(watch, "cuMemSetAccess", range.set_access(0, PAGE, &access)).unwrap();
    direct!(watch, "cuMemUnmap", range.unmap(0, PAGE)).unwrap();
    direct!(watch, "cuMemRelease", page.release()).unwrap();
    direct!(watch, "cuMemAddressFree", range.free()).unwrap();
    direct!(watch, "cuMemGetAllocationGranularity", PhysicalMemory::granularity(device)).unwrap();
}

#[test]
fn work_of_two_devices_names_the_programs_line() {
    let m = Machine::new();
    let peer = m.peer();
    let (watch, device, there) = (&m.watch, &m.device, DeviceBuffer::alloc(&peer, BYTES).unwrap());
    let (to, from) = ((&peer, there.span()), (device, m.memory.span()));
    direct!(watch, "cuDeviceCanAccessPeer", device.can_access(&peer)).unwrap();
    direct!(watch, "cuCtxEnablePeerAccess", device.enable_access_to(&peer)).unwrap();
    direct!(watch, "cuMemcpyPeerAsync", m.stream.copy_between(to, from)).unwrap();
    let (far, event) = (Stream::new(&peer).unwrap(), Event::new(device).unwrap());
    direct!(watch, "cuStreamWaitEvent", far.wait_for(&m.stream, &event)).unwrap();
    far.synchronize().unwrap();
}

/// What is dropped is destroyed for the place of the drop in this crate, unless somebody noted another.
#[test]
fn drops_name_this_crate_or_the_place_around_them() {
    let m = Machine::new();
    let event = Event::new(&m.device).unwrap();
    m.watch.take();
    drop(event);
    for (call, site) in m.watch.take() {
        let site = site.unwrap();
        assert!(site.at.file().ends_with("src/stream.rs"), "{call} came from {site}");
    }
    let event = Event::new(&m.device).unwrap();
    m.watch.take();
    let line = line!() + 1;
    let around = site::enter();
    drop(event);
    drop(around);
    let calls = m.watch.take();
    assert!(calls.iter().any(|(call, _)| *call == "cuEventDestroy"), "{calls:?}");
    for (call, site) in calls {
        let site = site.unwrap();
        assert_eq!((site.at.file(), site.at.line()), (file!(), line), "{call} came from {site}");
        assert!(site.through.unwrap().file().ends_with("src/stream.rs"), "{call} came from {site}");
    }
}

#[test]
fn closing_a_device_names_the_line_that_closes_it() {
    let Machine { watch, device, stream, memory, pinned, .. } = Machine::new();
    drop((stream, memory, pinned));
    direct!(watch, "cuMemFree", device.close()).unwrap();
}

#[test]
fn calls_within_calls_name_the_outermost_and_the_innermost_line() {
    #[track_caller]
    fn outer(stream: &Stream, span: DeviceSpan) -> u32 {
        let _site = site::enter();
        // A closure has a place of its own.
        let inner = || stream.fill(span, 1).map(|()| line!()).unwrap();
        inner()
    }
    let m = Machine::new();
    m.watch.take();
    let (inner, line) = (outer(&m.stream, m.memory.span()), line!());
    let calls = m.watch.take();
    assert!(calls.iter().any(|(call, _)| *call == "cuMemsetD8Async"), "{calls:?}");
    for (_, site) in calls {
        let site = site.unwrap();
        let through = site.through.unwrap();
        assert_eq!((site.at.file(), site.at.line()), (file!(), line));
        assert_eq!((through.file(), through.line()), (file!(), inner));
        let both = format!("{}:{line} (through {}:{inner})", file!(), file!());
        assert_eq!(site.to_string(), both);
    }
    assert_eq!(site::current(), None);
}

#[test]
fn a_place_inside_another_ends_before_it() {
    let outer = site::enter();
    let before = site::current().unwrap();
    let inner = site::enter();
    let within = site::current().unwrap();
    assert_eq!((within.at, within.through.map(|at| at.line())), (before.at, Some(line!() - 2)));
    drop(inner);
    assert_eq!((site::current(), before.through), (Some(before), None));
    drop(outer);
    assert_eq!(site::current(), None);
}

#[test]
fn a_place_ends_with_its_call_whatever_the_outcome() {
    let m = Machine::new();
    let fill = || m.stream.fill(m.memory.span(), 1);
    m.sim.fail_nth("cuMemsetD8Async", 1, ErrorCode::UNKNOWN);
    fill().unwrap_err();
    assert_eq!(site::current(), None, "after a refusal");
    let panics =
        || m.device.run(|_| -> Result<(), DriverError> { panic!("as a caller's closure may") });
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).unwrap_err();
    assert_eq!(site::current(), None, "after a panic");
    let calls = m.device.run(|_| {
        let here = site::current();
        let there = std::thread::scope(|scope| scope.spawn(site::current).join().unwrap());
        Ok((here, there))
    });
    let (here, there) = calls.unwrap();
    assert!(here.is_some_and(|site| site.at.file() == file!()), "{here:?}");
    assert_eq!(there, None, "on another thread");
}

#[test]
fn code_that_is_called_back_has_places_of_its_own() {
    let m = Machine::new();
    m.watch.take();
    let outer = site::enter();
    let line = {
        let _site = site::leave();
        m.stream.fill(m.memory.span(), 1).map(|()| line!()).unwrap()
    };
    assert_eq!(site::current().map(|site| site.through), Some(None));
    drop(outer);
    m.watch.check("cuMemsetD8Async", (file!(), line));
}

/// The accesses that `work` told of, which all were made for one line of this file.
fn accesses(watch: &Watch, work: impl FnOnce()) -> Vec<HostAccess> {
    watch.accesses();
    watch.take();
    work();
    for (call, site) in watch.take() {
        let site = site.unwrap();
        assert_eq!(site.at.file(), file!(), "{call} came from {site}");
    }
    watch.accesses()
}

#[test]
fn accesses_to_pinned_memory_are_told_with_their_bytes() {
    let Machine { watch, device, mut pinned, .. } = Machine::new();
    let start = pinned.host_address();
    let access = |offset, bytes, writes| HostAccess { address: start + offset, bytes, writes };
    let told = accesses(&watch, || pinned.write_at(8, &[1; 16]).unwrap());
    assert_eq!(told, [access(8, 16, true)]);
    let told = accesses(&watch, || pinned.read_at(BYTES - 4, &mut [0; 4]).unwrap());
    assert_eq!(told, [access(BYTES - 4, 4, false)]);
    // SAFETY: no work was enqueued.
    let told = accesses(&watch, || unsafe { pinned.slice_mut() }.fill(2));
    assert_eq!(told, [access(0, BYTES, true)]);
    // What is refused, and what has no bytes, touches nothing.
    let told = accesses(&watch, || {
        pinned.write_at(BYTES, &[1]).unwrap_err();
        pinned.read_at(BYTES, &mut [0]).unwrap_err();
        pinned.write_at(BYTES, &[]).unwrap();
        pinned.read_at(0, &mut []).unwrap();
    });
    assert_eq!(told, []);
    let told = accesses(&watch, || {
        pinned = PinnedBuffer::alloc(&device, 2 * BYTES, HostAllocFlags::CACHED).unwrap();
    });
    assert_eq!(
        told,
        [HostAccess { address: pinned.host_address(), bytes: 2 * BYTES, writes: true }]
    );
}

#[test]
fn accesses_are_told_before_they_are_made() {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    let seen = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let first_byte = Arc::clone(&seen);
    let driver = cuda_driver::CountingDriver::new(Arc::new(sim)).watching_accesses(move |access| {
        let byte = std::ptr::with_exposed_provenance::<u8>(access.address as usize);
        // SAFETY: a live pinned allocation, which only this thread accesses.
        first_byte.lock().push(unsafe { byte.read_volatile() });
    });
    let device = Device::open(Arc::new(driver), 0).unwrap();
    let mut pinned = PinnedBuffer::alloc(&device, BYTES, HostAllocFlags::CACHED).unwrap();
    seen.lock().clear();
    pinned.write_at(0, &[5]).unwrap();
    pinned.write_at(0, &[6]).unwrap();
    pinned.read_at(0, &mut [0]).unwrap();
    assert_eq!(*seen.lock(), [0, 5, 6]);
}

/// Copies of borrowed bytes go through memory of this crate's, piece by piece: each piece is written
/// before its copy is enqueued, and read after its copy was waited for.
#[test]
fn accesses_to_memory_lent_to_a_copy_are_told() {
    const PIECE: u64 = 4 << 20;
    let m = Machine::new();
    m.sim.set_pace(Pace::Slowest);
    let memory = DeviceBuffer::alloc(&m.device, PIECE + 100).unwrap();
    let mut bytes = vec![1; (PIECE + 100) as usize];
    let order = |work: &mut dyn FnMut()| {
        m.watch.take();
        m.watch.accesses();
        work();
        let wanted = ["host", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuStreamSynchronize"];
        let calls = m.watch.take().into_iter().map(|(call, _)| call);
        let told = m.watch.accesses();
        assert!(told.iter().all(|access| access.address == told[0].address), "{told:?}");
        let told: Vec<(u64, bool)> =
            told.iter().map(|access| (access.bytes, access.writes)).collect();
        (calls.filter(|call| wanted.contains(call)).collect::<Vec<_>>(), told)
    };
    let (calls, told) = order(&mut || m.stream.upload(memory.span(), &bytes).unwrap());
    assert_eq!(calls, ["host", "cuMemcpyHtoDAsync", "cuStreamSynchronize"].repeat(2));
    assert_eq!(told, [(PIECE, true), (100, true)]);
    let (calls, told) = order(&mut || m.stream.download(&mut bytes, memory.span()).unwrap());
    assert_eq!(calls, ["cuMemcpyDtoHAsync", "cuStreamSynchronize", "host"].repeat(2));
    assert_eq!(told, [(PIECE, false), (100, false)]);
}
