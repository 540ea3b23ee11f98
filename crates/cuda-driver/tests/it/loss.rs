//! Refusals and lost devices: a lost device gets no call but clean-up, a handle of another driver
//! is refused, and every dropped object is cleaned up.

use std::any::Any;
use std::sync::Arc;

use cuda_driver::host_pages::HostPages;
use cuda_driver::{
    AccessDesc, AddressRange, CloseError, CopyError, Device, DeviceAttribute, DeviceBuffer,
    DeviceError, Driver, DriverError, ErrorCode, Event, HostAllocFlags, HostRegisterFlags, Kernel,
    KernelArgs, LaunchConfig, LiveHandles, Module, ModuleError, PeerAttribute, PhysicalMemory,
    PinnedBuffer, PreparedLaunch, Stream,
};
use cuda_sim::{LeakReport, SimConfig, SimDriver};

use crate::common::kernel;

const BYTES: u64 = 4096;

fn machine() -> (SimDriver, Device) {
    let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
    sim.register_kernels(&[kernel::REFERENCE]);
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    (sim, device)
}

fn device_error(error: CopyError) -> DeviceError {
    match error {
        CopyError::Device(error) => error,
        error => panic!("{error}"),
    }
}

/// A handle of each kind, of one device.
struct Handles {
    stream: Stream,
    events: [Event; 2],
    memory: DeviceBuffer,
    pinned: PinnedBuffer,
    page: u64,
    range: AddressRange,
    physical: PhysicalMemory,
    module: Module,
    kernel: Kernel,
    prepared: PreparedLaunch,
}

type Answers = Vec<(&'static str, Result<(), DeviceError>)>;

const CONFIG: LaunchConfig = LaunchConfig::linear(1, 4);

fn args(memory: &DeviceBuffer) -> KernelArgs {
    KernelArgs::new().arg(memory.address()).arg(1u32).arg(4u32)
}

impl Handles {
    fn new(device: &Device) -> Self {
        let page = PhysicalMemory::granularity(device).unwrap();
        let module = Module::load(device, kernel::PTX).unwrap();
        let kernel = module.kernel(kernel::NAME).unwrap();
        let memory = DeviceBuffer::alloc(device, BYTES).unwrap();
        // SAFETY: the kernel's three parameters.
        let prepared = unsafe { kernel.prepare(&CONFIG, &args(&memory)) }.unwrap();
        Self {
            stream: Stream::new(device).unwrap(),
            events: [Event::new(device).unwrap(), Event::with_timing(device).unwrap()],
            memory,
            pinned: PinnedBuffer::alloc(device, BYTES, HostAllocFlags::CACHED).unwrap(),
            page,
            range: AddressRange::reserve(device, page).unwrap(),
            physical: PhysicalMemory::create(device, page).unwrap(),
            module,
            kernel,
            prepared,
        }
    }

    /// What streams and events answer.
    fn order(&self) -> Answers {
        let Self { stream, events: [event, timed], memory, pinned, kernel, .. } = self;
        let (span, mut bytes) = (memory.span(), [0; BYTES as usize]);
        let copied = |answer: Result<(), CopyError>| answer.map_err(device_error);
        // SAFETY: the kernel's three parameters; it writes device memory only.
        let launched = unsafe { kernel.launch(stream, &CONFIG, &args(memory)) };
        // SAFETY: as above.
        let prepared = unsafe { kernel.prepare(&CONFIG, &args(memory)) }.map(drop);
        // SAFETY: as above.
        let again = unsafe { self.prepared.launch(stream) };
        vec![
            ("wait", stream.wait(event)),
            ("Stream::synchronize", stream.synchronize()),
            ("is_idle", stream.is_idle().map(drop)),
            ("copy_to_device", copied(stream.copy_to_device(span, pinned, 0))),
            ("copy_to_host", copied(stream.copy_to_host(pinned, 0, span))),
            ("copy_on_device", copied(stream.copy_on_device(span, span))),
            ("fill", copied(stream.fill(span, 1))),
            ("upload", copied(stream.upload(span, &bytes))),
            ("download", copied(stream.download(&mut bytes, span))),
            ("record", event.record(stream)),
            ("is_complete", event.is_complete().map(drop)),
            ("Event::synchronize", event.synchronize()),
            ("elapsed_ms_since", timed.elapsed_ms_since(timed).map(drop)),
            ("launch", launched),
            ("prepare", prepared),
            ("PreparedLaunch::launch", again),
            ("capture", stream.capture(|| Ok(())).map(drop)),
        ]
    }

    /// What the device, its memory and its mappings answer.
    fn made(&self, device: &Device) -> Answers {
        let Self { page, range, physical, .. } = self;
        let flags = HostAllocFlags::CACHED;
        vec![
            ("run", device.run(|_| unreachable!("a lost device is asked nothing"))),
            ("attribute", device.attribute(DeviceAttribute::PCI_BUS_ID).map(drop)),
            ("memory_info", device.memory_info().map(drop)),
            ("synchronize", device.synchronize()),
            ("Stream::new", Stream::new(device).map(drop)),
            ("Event::new", Event::new(device).map(drop)),
            ("with_timing", Event::with_timing(device).map(drop)),
            ("alloc", DeviceBuffer::alloc(device, BYTES).map(drop)),
            ("PinnedBuffer::alloc", PinnedBuffer::alloc(device, BYTES, flags).map(drop)),
            ("granularity", PhysicalMemory::granularity(device).map(drop)),
            ("reserve", AddressRange::reserve(device, *page).map(drop)),
            ("create", PhysicalMemory::create(device, *page).map(drop)),
            ("map", range.map(0, physical)),
            ("set_access", range.set_access(0, *page, &[AccessDesc { device: 0 }])),
        ]
    }

    /// What is answered of two devices, one of which is lost.
    fn pairs(&self, device: &Device, (healthy, other): (&Device, &Handles)) -> Answers {
        let (here, there) = (&self.stream, &other.stream);
        let (lost, well) = ((device, self.memory.span()), (healthy, other.memory.span()));
        let copied = |answer: Result<(), CopyError>| answer.map_err(device_error);
        let rank = PeerAttribute::PERFORMANCE_RANK;
        vec![
            ("can_access", device.can_access(healthy).map(drop)),
            ("peer_attribute", device.peer_attribute(healthy, rank).map(drop)),
            ("enable_access_to", device.enable_access_to(healthy)),
            ("wait_for, here", here.wait_for(there, &other.events[0])),
            ("wait_for, there", there.wait_for(here, &self.events[0])),
            ("copy_between, from", copied(there.copy_between(well, lost))),
            ("copy_between, to", copied(there.copy_between(lost, well))),
        ]
    }
}

#[test]
fn a_lost_device_is_asked_nothing_more_and_every_operation_names_the_cause() {
    let (sim, device) = machine();
    let healthy = Device::open(device.driver().clone(), 1).unwrap();
    let (handles, others) = (Handles::new(&device), Handles::new(&healthy));
    sim.lose_device(0, 0, ErrorCode::ILLEGAL_ADDRESS);
    let DeviceError::Driver(first) = handles.stream.synchronize().unwrap_err() else {
        panic!("the first error comes from the driver");
    };
    let before = sim.calls();
    let [order, made] = [handles.order(), handles.made(&device)];
    let pairs = handles.pairs(&device, (&healthy, &others));
    for (operation, answer) in order.into_iter().chain(made).chain(pairs) {
        assert_eq!(answer, Err(DeviceError::Poisoned { first }), "{operation}");
    }
    let again = Module::load(&device, kernel::PTX);
    assert!(again.is_err() && handles.module.kernel(kernel::NAME).is_err());
    assert_eq!(sim.calls(), before, "the driver would repeat the error to each of them");
    // Clean-up is tried all the same.
    drop(handles);
    assert_ne!(sim.calls(), before);
    drop((others, healthy, device));
    assert_eq!(sim.check_leaks(), LeakReport::default());
}

#[test]
fn a_launch_goes_to_no_stream_of_another_driver() {
    // Two machines of one seed give out the same numbers, so that a handle of the other would fit.
    let ((sim, ours), (_, theirs)) = (machine(), machine());
    let kernel = Module::load(&ours, kernel::PTX).unwrap().kernel(kernel::NAME).unwrap();
    let _own = Stream::new(&ours).unwrap();
    let stream = Stream::new(&theirs).unwrap();
    let memory = DeviceBuffer::alloc(&ours, 64).unwrap();
    let args = KernelArgs::new().arg(memory.address()).arg(1u32).arg(4u32);
    let config = LaunchConfig::linear(1, 4);
    // SAFETY: the kernel's three parameters; it writes device memory only.
    let launched = unsafe { kernel.launch(&stream, &config, &args) };
    // SAFETY: as above.
    let prepared = unsafe { kernel.prepare(&config, &args) }.unwrap();
    // SAFETY: as above.
    let prepared = unsafe { prepared.launch(&stream) };
    let refused = |call| Err(DriverError::new(call, ErrorCode::INVALID_HANDLE).into());
    assert_eq!((launched, prepared), (refused("cuLaunchKernel"), refused("cuGraphLaunch")));
    let launches = ["cuLaunchKernel", "cuGraphLaunch"].map(|call| sim.calls().get(call).copied());
    assert_eq!(launches, [None; 2], "the driver was not asked to follow the handle");
}

#[test]
fn a_wait_for_goes_to_no_stream_or_event_of_another_driver() {
    let ((_, ours), (_, theirs)) = (machine(), machine());
    let streams = [&ours, &theirs].map(|device| Stream::new(device).unwrap());
    let events = [&ours, &theirs].map(|device| Event::new(device).unwrap());
    let refused = Err(DriverError::new("cuEventRecord", ErrorCode::INVALID_HANDLE).into());
    assert_eq!(streams[0].wait_for(&streams[1], &events[0]), refused);
    assert_eq!(streams[0].wait_for(&streams[0], &events[1]), refused);
    assert_eq!(streams[0].wait_for(&streams[1], &events[1]), refused);
    let (ours, theirs) = ((&ours, 0), (&theirs, 0));
    let memory = [ours, theirs].map(|(device, _)| DeviceBuffer::alloc(device, 64).unwrap());
    let [mine, foreign] = [(ours.0, memory[0].span()), (theirs.0, memory[1].span())];
    for (to, from) in [(mine, foreign), (foreign, mine)] {
        let error = device_error(streams[0].copy_between(to, from).unwrap_err());
        assert_eq!(error.driver_error().code, ErrorCode::INVALID_CONTEXT);
    }
}

#[test]
fn dropped_memory_is_kept_for_the_next_attempt_where_the_context_cannot_be_bound() {
    let (sim, device) = machine();
    let used = sim.device_used_bytes(0);
    let pinned = PinnedBuffer::alloc(&device, BYTES, HostAllocFlags::CACHED).unwrap();
    drop((DeviceBuffer::alloc(&device, BYTES).unwrap(), pinned));
    assert_eq!(device.alive().retired, 2);
    sim.fail_nth("cuCtxSetCurrent", 1, ErrorCode::UNKNOWN);
    assert!(device.free_retired().is_err());
    assert_eq!(device.alive().retired, 2, "nothing was tried, so nothing is forgotten");
    assert_eq!(device.free_retired(), Ok(2));
    assert_eq!((device.alive().retired, sim.device_used_bytes(0)), (0, used));
    assert_eq!(sim.pinned_bytes(), 0);
}

#[test]
fn dropped_memory_is_kept_for_the_next_attempt_where_a_capture_refuses_to_free_it() {
    let (sim, device) = machine();
    let stream = Stream::new(&device).unwrap();
    let pages = HostPages::map(BYTES, false, None).unwrap();
    drop((
        DeviceBuffer::alloc(&device, BYTES).unwrap(),
        PinnedBuffer::alloc(&device, BYTES, HostAllocFlags::CACHED).unwrap(),
        PinnedBuffer::register(&device, Box::new(pages), HostRegisterFlags::SHARED).unwrap(),
    ));
    let before = device.alive().retired;
    // An allocation frees first what was dropped.
    let refused = stream.capture(|| DeviceBuffer::alloc(&device, BYTES).map(drop)).unwrap_err();
    assert_eq!(refused.driver_error().code, ErrorCode::STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(device.alive().retired, before, "nothing was freed, so nothing is forgotten");
    assert_eq!(device.free_retired(), Ok(before));
    // An error of the call alone, as often as it comes.
    let memory = DeviceBuffer::alloc(&device, BYTES).unwrap();
    for nth in 1..=2 {
        sim.fail_nth("cuMemFree", nth, ErrorCode::OUT_OF_MEMORY);
    }
    drop(memory);
    assert!(device.free_retired().is_err());
    assert_eq!((device.alive().retired, device.free_retired()), (1, Ok(1)));
    drop(stream);
    assert_eq!(sim.check_leaks(), LeakReport::default());
}

#[test]
fn objects_that_were_not_destroyed_for_certain_are_tried_again() {
    let (sim, device) = machine();
    let destroys = [
        "cuStreamDestroy",
        "cuEventDestroy",
        "cuModuleUnload",
        "cuGraphExecDestroy",
        "cuMemAddressFree",
        "cuMemRelease",
    ];
    let page = PhysicalMemory::granularity(&device).unwrap();
    let make = || {
        let kernel = Module::load(&device, kernel::PTX).unwrap().kernel(kernel::NAME).unwrap();
        let args = KernelArgs::new().arg(0u64).arg(1u32).arg(4u32);
        // SAFETY: the kernel's three parameters.
        let prepared = unsafe { kernel.prepare(&LaunchConfig::linear(1, 4), &args) }.unwrap();
        let range = AddressRange::reserve(&device, page).unwrap();
        let memory = PhysicalMemory::create(&device, page).unwrap();
        let order = (Stream::new(&device).unwrap(), Event::new(&device).unwrap());
        (order, prepared, kernel, range, memory)
    };
    let clean = sim.check_leaks();
    for call in destroys {
        // A module is unloaded with the memory of dropped buffers, whether or not anything is refused.
        let left = 1 + usize::from(call != "cuModuleUnload");
        let made = make();
        // The codes that say that the call did nothing. Any other may be of earlier work (`reused.rs`).
        let codes = [ErrorCode::OUT_OF_MEMORY, ErrorCode::STREAM_CAPTURE_UNSUPPORTED];
        for (made, code) in [(made, codes[0]), (make(), codes[1])] {
            sim.fail_nth(call, 1, code);
            drop(made);
            assert_eq!(device.alive().retired, left, "{call}");
            assert_eq!(device.free_retired(), Ok(left), "{call}");
        }
        assert_eq!(sim.check_leaks(), clean, "{call}");
    }
    // Nor is a call made where the context cannot be bound; the last handle of the device tries for all.
    let made = make();
    for nth in 1..=5 {
        sim.fail_nth("cuCtxSetCurrent", nth, ErrorCode::UNKNOWN);
    }
    drop(made);
    assert_eq!(device.alive().retired, 6);
    drop(device);
    assert_eq!(sim.check_leaks(), LeakReport::default());
}

#[test]
fn addresses_whose_end_was_refused_by_name_are_given_back_later() {
    let (sim, device) = machine();
    let page = PhysicalMemory::granularity(&device).unwrap();
    let range = AddressRange::reserve(&device, page).unwrap();
    sim.fail_nth("cuMemAddressFree", 1, ErrorCode::OUT_OF_MEMORY);
    let refused = range.free().unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
    assert_eq!(device.free_retired(), Ok(1));
    assert_eq!(sim.check_leaks(), LeakReport::default());
}

/// What a stream, a device and the close of both answer after one call of a capture was refused.
#[test]
fn a_capture_of_which_one_call_is_refused_leaves_its_stream_free_and_no_graph_in_silence() {
    let calls = [
        "cuStreamBeginCapture",
        "cuStreamEndCapture",
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
        "cuGraphInstantiate",
        "cuGraphDestroy",
    ];
    let code = ErrorCode::OUT_OF_MEMORY;
    for (call, nth) in calls.into_iter().flat_map(|call| (1..=8).map(move |nth| (call, nth))) {
        for fails in [false, true] {
            let (sim, device) = machine();
            let stream = Stream::new(&device).unwrap();
            sim.fail_nth(call, nth, code);
            let captured = stream.capture(|| {
                if fails {
                    Err(DeviceError::from(DriverError::new("of the closure", code)))
                } else {
                    Ok(())
                }
            });
            drop(captured);
            // An order that has not fallen due is one for a later call, and not the matter here.
            for _ in 0..8 {
                let _ = device.memory_info();
            }
            assert_eq!(stream.synchronize(), Ok(()), "{call} {nth}, fails: {fails}");
            drop(stream);
            device.free_retired().unwrap();
            let left = sim.check_leaks();
            let closed = device.close();
            let told = closed.is_err() || left == LeakReport::default();
            assert!(told, "{call} {nth}, fails: {fails}: {left}");
        }
    }
}

#[test]
fn a_capture_that_cannot_be_ended_is_reported_when_the_device_is_closed() {
    let (sim, device) = machine();
    let stream = Stream::new(&device).unwrap();
    for nth in 1..=2 {
        sim.fail_nth("cuStreamEndCapture", nth, ErrorCode::OUT_OF_MEMORY);
    }
    let refused = stream.capture(|| Ok::<_, DeviceError>(())).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
    drop(stream);
    let closed = device.close();
    assert!(matches!(closed, Err(CloseError::Refused(e)) if e.call == "cuStreamEndCapture"));
}

#[test]
fn memory_of_another_driver_is_not_mapped() {
    let ((sim, ours), (_, theirs)) = (machine(), machine());
    let page = PhysicalMemory::granularity(&ours).unwrap();
    let range = AddressRange::reserve(&ours, page).unwrap();
    // Two machines of one seed give out the same numbers, so that the handle would be one of ours.
    let [_own, foreign] =
        [&ours, &theirs].map(|device| PhysicalMemory::create(device, page).unwrap());
    let refused = Err(DriverError::new("cuMemMap", ErrorCode::INVALID_VALUE).into());
    assert_eq!(range.map(0, &foreign), refused);
    assert_eq!(sim.calls().get("cuMemMap"), None, "the driver was not asked to follow the handle");
}

#[test]
fn a_dropped_module_does_not_wait_for_the_device() {
    let (sim, device) = machine();
    let stream = Stream::new(&device).unwrap();
    let memory = DeviceBuffer::alloc(&device, BYTES).unwrap();
    let module = Module::load(&device, kernel::PTX).unwrap();
    sim.hold(stream.raw());
    stream.fill(memory.span(), 1).unwrap();
    drop(module);
    // A wait for the held stream would be one.
    assert_eq!(sim.findings(), []);
    sim.release_hold(stream.raw());
    assert_eq!(device.free_retired(), Ok(1));
    assert!(stream.is_idle().unwrap(), "unloading waits");
    assert_eq!(sim.check_leaks().modules, 0);
}

#[test]
fn pinned_memory_that_has_no_device_address_is_given_back_whatever_is_refused() {
    let (sim, device) = machine();
    let alloc = || PinnedBuffer::alloc(&device, BYTES, HostAllocFlags::CACHED).map(drop);
    sim.fail_nth("cuMemHostGetDevicePointer", 1, ErrorCode::UNKNOWN);
    assert!(alloc().is_err());
    assert_eq!(sim.pinned_bytes(), 0);
    sim.fail_nth("cuMemHostGetDevicePointer", 1, ErrorCode::UNKNOWN);
    sim.fail_nth("cuMemFreeHost", 1, ErrorCode::OUT_OF_MEMORY);
    assert!(alloc().is_err());
    device.free_retired().unwrap();
    assert_eq!(sim.pinned_bytes(), 0, "a call that did nothing is no leak");
    // Memory that may be gone is not freed again, and the refusal is reported in the end.
    sim.fail_nth("cuMemHostGetDevicePointer", 1, ErrorCode::UNKNOWN);
    sim.fail_nth("cuMemFreeHost", 1, ErrorCode::UNKNOWN);
    assert!(alloc().is_err());
    assert_eq!(device.free_retired(), Ok(0));
    assert!(matches!(device.close(), Err(CloseError::Refused(e)) if e.call == "cuMemFreeHost"));
}

/// A call that uses objects of two devices answers the loss of either.
#[test]
fn the_loss_of_one_device_of_a_call_does_not_lose_the_other() {
    type Call = fn(&[Stream; 2], &Event) -> Result<(), DeviceError>;
    let calls: [(&str, Call); 2] = [
        ("wait", |[here, _], event| here.wait(event)),
        ("wait_for", |[here, there], event| here.wait_for(there, event)),
    ];
    for (name, call) in calls {
        let (sim, here) = machine();
        let there = Device::open(Arc::clone(here.driver()), 1).unwrap();
        let streams = [&here, &there].map(|device| Stream::new(device).unwrap());
        let memory = DeviceBuffer::alloc(&here, BYTES).unwrap();
        let event = Event::new(&there).unwrap();
        event.record(&streams[1]).unwrap();
        sim.lose_device(1, 0, ErrorCode::ECC_UNCORRECTABLE);
        let first = call(&streams, &event).unwrap_err().driver_error();
        assert_eq!(first.code, ErrorCode::ECC_UNCORRECTABLE, "{name}");
        assert_eq!((here.poison(), there.poison()), (None, Some(first)), "{name}");
        streams[0].fill(memory.span(), 1).unwrap();
        streams[0].synchronize().unwrap();
        // Of devices that are both lost, each is.
        sim.lose_device(0, 0, ErrorCode::ILLEGAL_ADDRESS);
        streams[0].synchronize().unwrap_err();
        assert_eq!(
            here.poison().map(|first| first.code),
            Some(ErrorCode::ILLEGAL_ADDRESS),
            "{name}"
        );
    }
}

/// One call meets the loss of both of its devices.
#[test]
fn a_call_that_meets_two_losses_tells_both_devices() {
    let (sim, here) = machine();
    let there = Device::open(Arc::clone(here.driver()), 1).unwrap();
    let (stream, other) = (Stream::new(&here).unwrap(), Stream::new(&there).unwrap());
    let event = Event::new(&there).unwrap();
    event.record(&other).unwrap();
    for ordinal in [0, 1] {
        sim.lose_device(ordinal, 0, ErrorCode::ECC_UNCORRECTABLE);
    }
    stream.wait(&event).unwrap_err();
    assert!(here.poison().is_some() && there.poison().is_some());
}

/// What is there, and what is current: all that a refused call must leave as it was.
fn state(sim: &SimDriver, device: &Device) -> (LeakReport, LiveHandles, u64) {
    (sim.check_leaks(), device.alive(), sim.ctx_get_current().unwrap())
}

/// An operation, whose result is kept until the state was looked at.
type Makes = fn(&Handles, &Device) -> Result<Box<dyn Any>, DeviceError>;

fn kept<T: Any, E: Into<DeviceError>>(made: Result<T, E>) -> Result<Box<dyn Any>, DeviceError> {
    made.map(|made| Box::new(made) as Box<dyn Any>).map_err(Into::into)
}

const MAKES: [(&str, Makes); 13] = [
    ("Stream::new", |_, device| kept(Stream::new(device))),
    ("Event::new", |_, device| kept(Event::new(device))),
    ("with_timing", |_, device| kept(Event::with_timing(device))),
    ("alloc", |_, device| kept(DeviceBuffer::alloc(device, BYTES))),
    ("PinnedBuffer::alloc", |_, device| {
        kept(PinnedBuffer::alloc(device, BYTES, HostAllocFlags::CACHED))
    }),
    ("register", |_, device| {
        let pages = Box::new(HostPages::map(BYTES, false, None).unwrap());
        let made = PinnedBuffer::register(device, pages, HostRegisterFlags::SHARED);
        kept(made.map_err(|refused| refused.source))
    }),
    ("reserve", |on, device| kept(AddressRange::reserve(device, on.page))),
    ("create", |on, device| kept(PhysicalMemory::create(device, on.page))),
    ("Module::load", |_, device| {
        kept(Module::load(device, kernel::PTX).map_err(|error| match error {
            ModuleError::Load { source, .. } | ModuleError::Kernel { source, .. } => source,
            error => panic!("{error}"),
        }))
    }),
    // SAFETY: the kernel's three parameters.
    ("prepare", |on, _| kept(unsafe { on.kernel.prepare(&CONFIG, &args(&on.memory)) })),
    ("capture", |on, _| kept(on.stream.capture(|| Ok::<_, DeviceError>(())))),
    ("map", |on, _| kept(on.range.map(0, &on.physical))),
    ("wait_for", |on, _| kept(on.stream.wait_for(&on.stream, &on.events[0]))),
];

#[test]
fn a_call_that_is_refused_at_any_of_its_calls_of_the_driver_leaves_all_as_it_was() {
    for (name, makes) in MAKES {
        let (sim, device) = machine();
        let on = Handles::new(&device);
        let before = sim.calls();
        drop(makes(&on, &device));
        // Of each call of the driver, how often the operation and the end of its result make it.
        let made = sim
            .calls()
            .into_iter()
            .map(|(call, count)| (call, count - before.get(call).copied().unwrap_or(0)));
        let made: Vec<_> = made.filter(|(_, count)| *count > 0).collect();
        let mut refusals = 0;
        for (call, nth) in
            made.into_iter().flat_map(|(call, count)| (1..=count).map(move |nth| (call, nth)))
        {
            let (sim, device) = machine();
            let on = Handles::new(&device);
            let before = state(&sim, &device);
            sim.fail_nth(call, nth, ErrorCode::OUT_OF_MEMORY);
            let made = makes(&on, &device);
            if made.is_err() {
                refusals += 1;
                assert_eq!(state(&sim, &device), before, "{name}, {call} {nth}");
            }
        }
        assert!(refusals > 0, "{name} was never refused");
    }
}
