//! Scenarios for a driver with one device.

use std::sync::Arc;

use cuda_driver::{
    AccessDesc, AddressRange, AllocationProp, Device, DeviceAttribute, DeviceBuffer, DeviceError,
    Driver, DriverError, ErrorCode, Event, HostAllocFlags, KernelArgs, LaunchConfig, Module,
    ModuleError, PhysicalMemory, PinnedBuffer, Stream,
};

use super::{Scenario, code, contents, kernel, open, pattern};

/// Every scenario, by name.
pub(crate) const ALL: &[(&str, Scenario)] = &[
    ("devices_tell_who_they_are", devices_tell_who_they_are),
    ("a_device_has_one_primary_context", a_device_has_one_primary_context),
    ("operations_leave_the_thread_as_it_was", operations_leave_the_thread_as_it_was),
    ("handles_are_dropped_on_another_thread", handles_are_dropped_on_another_thread),
    ("an_event_orders_two_streams", an_event_orders_two_streams),
    ("events_tell_completion_and_time", events_tell_completion_and_time),
    ("pinned_memory_travels_both_ways", pinned_memory_travels_both_ways),
    ("fills_and_copies_stay_in_their_span", fills_and_copies_stay_in_their_span),
    ("mapped_memory_is_used_and_given_back", mapped_memory_is_used_and_given_back),
    ("misuse_of_mappings_is_an_error_value", misuse_of_mappings_is_an_error_value),
    ("misuse_of_memory_is_an_error_value", misuse_of_memory_is_an_error_value),
    ("a_kernel_writes_what_it_should", a_kernel_writes_what_it_should),
    ("a_captured_graph_runs_when_it_is_launched", a_captured_graph_runs_when_it_is_launched),
    ("a_capture_that_ends_early_leaves_its_stream", a_capture_that_ends_early_leaves_its_stream),
    ("another_thread_works_on_during_a_capture", another_thread_works_on_during_a_capture),
    (
        "a_wait_for_the_device_ends_the_capture_of_any_thread",
        a_wait_for_the_device_ends_the_capture_of_any_thread,
    ),
    ("a_refused_module_says_why", a_refused_module_says_why),
    ("raw_handles_are_adopted_and_left_alone", raw_handles_are_adopted_and_left_alone),
];

fn devices_tell_who_they_are(driver: &Arc<dyn Driver>) {
    assert!(driver.driver_get_version().unwrap() >= 11_020, "virtual memory needs CUDA 11.2");
    let count = driver.device_get_count().unwrap();
    let mut seen = Vec::new();
    for ordinal in 0..count {
        let info = driver.device_get_info(ordinal).unwrap();
        assert!(!info.name.is_empty() && info.total_bytes > 0, "{info:?}");
        assert_eq!(info.pci_bus_id.matches(':').count(), 2, "{info:?}");
        assert!(!seen.contains(&info.uuid), "two devices with one UUID");
        seen.push(info.uuid);
    }
    assert_eq!(code(driver.device_get_info(count)), ErrorCode::INVALID_DEVICE);
    assert_eq!(code(driver.device_get_info(-1)), ErrorCode::INVALID_DEVICE);
    let device = open(driver, 0);
    assert_eq!(device.info().uuid, seen[0]);
    let attribute = |which| device.attribute(which).unwrap();
    assert_eq!(attribute(DeviceAttribute::MAX_THREADS_PER_BLOCK), 1024);
    assert_eq!(attribute(DeviceAttribute::UNIFIED_ADDRESSING), 1);
    assert_eq!(attribute(DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), 1);
    assert!(attribute(DeviceAttribute::COMPUTE_CAPABILITY_MAJOR) >= 8, "the kernels need 8.0");
    let unknown = driver.device_get_attribute(0, DeviceAttribute(0x00FF_FFFF));
    assert_eq!(code(unknown), ErrorCode::INVALID_VALUE);
    let (free, total) = device.memory_info().unwrap();
    assert!(0 < free && free <= total && total <= device.info().total_bytes, "{free} of {total}");
}

fn a_device_has_one_primary_context(driver: &Arc<dyn Driver>) {
    let first = driver.device_primary_ctx_retain(0).unwrap();
    let second = driver.device_primary_ctx_retain(0).unwrap();
    assert_ne!(first, 0);
    assert_eq!(first, second);
    // SAFETY: it was retained twice; nothing made from it is used after the last release.
    unsafe { driver.device_primary_ctx_release(0) }.unwrap();
    let device = open(driver, 0);
    assert_eq!(device.context(), first);
    // SAFETY: as above; the device keeps its own reference.
    unsafe { driver.device_primary_ctx_release(0) }.unwrap();
    device.synchronize().unwrap();
}

/// Uses every kind of handle once and drops them all.
fn use_everything(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let event = Event::new(device).unwrap();
    let buffer = DeviceBuffer::alloc(device, 4096).unwrap();
    let pinned = PinnedBuffer::alloc(device, 4096, HostAllocFlags::CACHED).unwrap();
    let page = PhysicalMemory::granularity(device).unwrap();
    let range = AddressRange::reserve(device, page).unwrap();
    let memory = PhysicalMemory::create(device, page).unwrap();
    let module = Module::load(device, kernel::PTX).unwrap();
    range.map(0, &memory).unwrap();
    range.set_access(0, page, &[AccessDesc { device: device.ordinal() }]).unwrap();
    stream.copy_to_device(buffer.span(), &pinned, 0).unwrap();
    stream.copy_on_device(range.span(0, 4096).unwrap(), buffer.span()).unwrap();
    event.record(&stream).unwrap();
    event.synchronize().unwrap();
    range.unmap(0, page).unwrap();
    // Each of these drops binds the context again.
    drop((module, memory, range, pinned, buffer, event, stream));
    device.free_retired().unwrap();
}

fn operations_leave_the_thread_as_it_was(driver: &Arc<dyn Driver>) {
    let current = || driver.ctx_get_current().unwrap();
    std::thread::scope(|scope| {
        let unbound = scope.spawn(|| {
            assert_eq!(current(), 0, "a new thread has no context");
            let device = open(driver, 0);
            assert_eq!(current(), 0, "opening a device");
            use_everything(&device);
            assert_eq!(current(), 0, "using it");
            drop(device);
            assert_eq!(current(), 0, "dropping it");
        });
        let bound = scope.spawn(|| {
            let context = driver.device_primary_ctx_retain(0).unwrap();
            // SAFETY: the context is retained until the end.
            unsafe { driver.ctx_set_current(context) }.unwrap();
            assert_eq!(driver.ctx_get_device(), Ok(0));
            use_everything(&open(driver, 0));
            assert_eq!(current(), context, "the thread's own context");
            // SAFETY: 0 unbinds.
            unsafe { driver.ctx_set_current(0) }.unwrap();
            // SAFETY: nothing made from the context is left.
            unsafe { driver.device_primary_ctx_release(0) }.unwrap();
        });
        unbound.join().unwrap();
        bound.join().unwrap();
    });
}

fn handles_are_dropped_on_another_thread(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let stream = Stream::new(&device).unwrap();
    let event = Event::new(&device).unwrap();
    let buffer = DeviceBuffer::alloc(&device, 1 << 20).unwrap();
    let pinned = PinnedBuffer::alloc(&device, 1 << 20, HostAllocFlags::CACHED).unwrap();
    let module = Module::load(&device, kernel::PTX).unwrap();
    let memory =
        PhysicalMemory::create(&device, PhysicalMemory::granularity(&device).unwrap()).unwrap();
    stream.copy_to_device(buffer.span(), &pinned, 0).unwrap();
    event.record(&stream).unwrap();
    std::thread::spawn(move || {
        // The copy may still be running: neither drop waits for it nor frees under it.
        drop((pinned, buffer, event, module, memory));
        stream.synchronize().unwrap();
        drop(stream);
        assert_eq!(device.free_retired(), Ok(3));
        assert_eq!(device.poison(), None);
    })
    .join()
    .unwrap();
    use_everything(&open(driver, 0));
}

fn an_event_orders_two_streams(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let [writer, reader] = [0; 2].map(|_| Stream::new(&device).unwrap());
    let [source, copy] = [0; 2].map(|_| DeviceBuffer::alloc(&device, 8 << 20).unwrap());
    writer.fill(source.span(), 0).unwrap();
    writer.synchronize().unwrap();
    for round in 1..=20 {
        for byte in [0xA0, 0xB0, round] {
            writer.fill(source.span(), byte).unwrap();
        }
        let written = Event::new(&device).unwrap();
        written.record(&writer).unwrap();
        reader.wait(&written).unwrap();
        reader.copy_on_device(copy.span(), source.span()).unwrap();
        let read = Event::new(&device).unwrap();
        read.record(&reader).unwrap();
        // The next round overwrites the source.
        writer.wait(&read).unwrap();
        let seen = contents(&reader, &copy);
        assert!(seen.iter().all(|&byte| byte == round), "round {round}");
        assert_eq!(written.is_complete(), Ok(true));
        assert_eq!(reader.is_idle(), Ok(true));
    }
}

fn events_tell_completion_and_time(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let stream = Stream::new(&device).unwrap();
    let buffer = DeviceBuffer::alloc(&device, 64 << 20).unwrap();
    let [start, end] = [0; 2].map(|_| Event::with_timing(&device).unwrap());
    let plain = Event::new(&device).unwrap();
    assert_eq!(plain.is_complete(), Ok(true), "never recorded");
    stream.wait(&plain).unwrap();
    start.record(&stream).unwrap();
    for _ in 0..4 {
        stream.fill(buffer.span(), 1).unwrap();
    }
    end.record(&stream).unwrap();
    plain.record(&stream).unwrap();
    end.synchronize().unwrap();
    assert!(start.is_complete().unwrap() && end.is_complete().unwrap());
    let elapsed_ms = end.elapsed_ms_since(&start).unwrap();
    assert!(elapsed_ms.is_finite() && elapsed_ms >= 0.0, "{elapsed_ms}");
    plain.synchronize().unwrap();
    let refused = plain.elapsed_ms_since(&start).unwrap_err().driver_error();
    assert_eq!(refused.code, ErrorCode::INVALID_HANDLE, "an event that keeps no time");
}

fn pinned_memory_travels_both_ways(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let stream = Stream::new(&device).unwrap();
    let buffer = DeviceBuffer::alloc(&device, 1 << 20).unwrap();
    let write_combined = HostAllocFlags { write_combined: true, ..HostAllocFlags::CACHED };
    for (tag, flags) in
        [HostAllocFlags::default(), HostAllocFlags::CACHED, write_combined].into_iter().enumerate()
    {
        let data = pattern(tag as u8, 1 << 20);
        let mut up = PinnedBuffer::alloc(&device, (1 << 20) + 4096, flags).unwrap();
        assert_eq!(up.host_address() % 4096, 0, "{flags:?}");
        assert_ne!(up.device_address(), 0, "{flags:?}");
        let mut head = [1; 64];
        up.read_at(0, &mut head).unwrap();
        assert_eq!(head, [0; 64], "new memory is cleared");
        up.write_at(4096, &data).unwrap();
        stream.copy_to_device(buffer.span(), &up, 4096).unwrap();
        let down = PinnedBuffer::alloc(&device, 1 << 20, flags).unwrap();
        stream.copy_to_host(&down, 0, buffer.span()).unwrap();
        stream.synchronize().unwrap();
        let mut seen = vec![0; 1 << 20];
        down.read_at(0, &mut seen).unwrap();
        assert!(seen == data, "{flags:?}");
    }
    assert_eq!(device.free_retired(), Ok(2), "earlier ones went with the allocations");
}

fn fills_and_copies_stay_in_their_span(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let stream = Stream::new(&device).unwrap();
    let [left, right] = [0; 2].map(|_| DeviceBuffer::alloc(&device, 4096).unwrap());
    assert_eq!(left.address() % 256, 0);
    let data = pattern(9, 4096);
    stream.upload(left.span(), &data).unwrap();
    stream.fill(right.span(), 0xEE).unwrap();
    let inner = right.span().slice(1001, 33).unwrap();
    stream.copy_on_device(inner, left.span().slice(77, 33).unwrap()).unwrap();
    stream.fill(right.span().slice(3000, 5).unwrap(), 0x11).unwrap();
    // No bytes are no operation.
    stream.fill(right.span().slice(4096, 0).unwrap(), 0x22).unwrap();
    let mut expected = vec![0xEE; 4096];
    expected[1001..1034].copy_from_slice(&data[77..110]);
    expected[3000..3005].fill(0x11);
    assert!(contents(&stream, &right) == expected);
    assert!(contents(&stream, &left) == data);
    left.free().unwrap();
}

fn mapped_memory_is_used_and_given_back(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let stream = Stream::new(&device).unwrap();
    let page = PhysicalMemory::granularity(&device).unwrap();
    let range = AddressRange::reserve(&device, 4 * page).unwrap();
    assert_eq!(range.span(0, page).unwrap().address() % page, 0);
    let [first, second] = [0; 2].map(|_| PhysicalMemory::create(&device, page).unwrap());
    range.map(page, &first).unwrap();
    range.map(2 * page, &second).unwrap();
    // One call over two mappings.
    range.set_access(page, 2 * page, &[AccessDesc { device: 0 }]).unwrap();
    let seam = range.span(2 * page - 500, 1000).unwrap();
    let data = pattern(5, 1000);
    stream.upload(seam, &data).unwrap();
    let mut seen = vec![0; 1000];
    stream.download(&mut seen, seam).unwrap();
    assert!(seen == data, "bytes were lost across the seam of two mappings");
    // The bytes are the memory's, not the addresses'.
    range.unmap(page, 2 * page).unwrap();
    range.map(0, &first).unwrap();
    // A released handle's memory lives on until it is unmapped.
    drop((first, second));
    range.set_access(0, page, &[AccessDesc { device: 0 }]).unwrap();
    stream.download(&mut seen[..500], range.span(page - 500, 500).unwrap()).unwrap();
    assert!(seen == data, "the first page moved with its bytes");
    range.unmap(0, page).unwrap();
    range.free().unwrap();
}

fn misuse_of_mappings_is_an_error_value(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let page = PhysicalMemory::granularity(&device).unwrap();
    let range = AddressRange::reserve(&device, 4 * page).unwrap();
    let [memory, other] = [0; 2].map(|_| PhysicalMemory::create(&device, page).unwrap());
    range.map(page, &memory).unwrap();
    let refused = |call| Err(DeviceError::Driver(DriverError::new(call, ErrorCode::INVALID_VALUE)));
    assert_eq!(range.map(page, &memory), refused("cuMemMap"), "the same page twice");
    assert_eq!(range.map(page, &other), refused("cuMemMap"), "a second page");
    assert_eq!(range.map(1, &other), refused("cuMemMap"), "not aligned");
    assert_eq!(range.map(4 * page, &other), refused("cuMemMap"), "outside");
    let access = [AccessDesc { device: 0 }];
    assert_eq!(range.set_access(0, 2 * page, &access), refused("cuMemSetAccess"), "a hole");
    range.unmap(2 * page, page).unwrap();
    range.unmap(0, 4 * page).unwrap();
    range.map(page, &memory).unwrap();
    let (base, bytes) = (range.span(0, 0).unwrap().address(), range.bytes());
    let raw = |calls: &dyn Fn(&dyn Driver) -> Result<(), DriverError>| {
        device.run(calls).map_err(|error| error.driver_error().code)
    };
    let invalid = Err(ErrorCode::INVALID_VALUE);
    assert_eq!(raw(&|d| d.mem_address_free(base, bytes)), invalid, "something is mapped");
    range.unmap(page, page).unwrap();
    assert_eq!(raw(&|d| d.mem_address_free(base, page)), invalid, "a part");
    range.free().unwrap();
    assert_eq!(raw(&|d| d.mem_address_free(base, bytes)), invalid, "a second time");
    let odd = PhysicalMemory::create(&device, page + 1).unwrap_err();
    assert_eq!(odd.driver_error().code, ErrorCode::INVALID_VALUE);
    let prop = AllocationProp::on(driver.device_get_count().unwrap());
    assert!(device.run(|d| d.mem_create(page, prop)).is_err(), "no such device");
    assert_eq!(device.poison(), None);
}

fn misuse_of_memory_is_an_error_value(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let invalid = DeviceError::Driver(DriverError::new("cuMemAlloc", ErrorCode::INVALID_VALUE));
    assert_eq!(DeviceBuffer::alloc(&device, 0).unwrap_err(), invalid);
    assert!(DeviceBuffer::alloc(&device, 1 << 50).unwrap_err().is_out_of_memory());
    assert!(PinnedBuffer::alloc(&device, 0, HostAllocFlags::CACHED).is_err());
    let buffer = DeviceBuffer::alloc(&device, 4096).unwrap();
    let address = buffer.address();
    buffer.free().unwrap();
    // SAFETY: the address is a device's and is only looked up.
    let again = device.run(|driver| unsafe { driver.mem_free(address) });
    assert_eq!(again.unwrap_err().driver_error().code, ErrorCode::INVALID_VALUE);
    let local = 0u64;
    let host = std::ptr::from_ref(&local) as u64;
    let pageable = device.run(|driver| driver.mem_host_get_device_pointer(host));
    assert_eq!(pageable.unwrap_err().driver_error().code, ErrorCode::INVALID_VALUE);
    std::thread::scope(|scope| {
        let unbound = scope.spawn(|| code(driver.mem_alloc(4096)));
        assert_eq!(unbound.join().unwrap(), ErrorCode::INVALID_CONTEXT);
    });
    assert_eq!(device.poison(), None);
}

fn a_kernel_writes_what_it_should(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let stream = Stream::new(&device).unwrap();
    let write = Module::load(&device, kernel::PTX).unwrap().kernel(kernel::NAME).unwrap();
    const COUNT: u32 = 1000;
    let buffer = DeviceBuffer::alloc(&device, 4 * u64::from(COUNT) + 64).unwrap();
    stream.fill(buffer.span(), 0x77).unwrap();
    let args = KernelArgs::new().arg(buffer.address()).arg(41u32).arg(COUNT);
    // SAFETY: a 64-bit and two 32-bit parameters, as declared; it writes device memory only.
    unsafe { write.launch(&stream, &LaunchConfig::linear(8, 128), &args) }.unwrap();
    let seen = contents(&stream, &buffer);
    assert!(seen[..4 * COUNT as usize] == kernel::written(41, COUNT));
    assert_eq!(seen[4 * COUNT as usize..], [0x77; 64], "the last block is cut at the count");
    // Host memory by the address that kernels know it by.
    let pinned = PinnedBuffer::alloc(&device, 64, HostAllocFlags::CACHED).unwrap();
    let args = KernelArgs::new().arg(pinned.device_address()).arg(7u32).arg(16u32);
    // SAFETY: as above; the host reads the pinned memory after the synchronisation only.
    unsafe { write.launch(&stream, &LaunchConfig::linear(1, 32), &args) }.unwrap();
    stream.synchronize().unwrap();
    let mut seen = vec![0; 64];
    pinned.read_at(0, &mut seen).unwrap();
    assert_eq!(seen, kernel::written(7, 16));
    let args = KernelArgs::new().arg(buffer.address()).arg(0u32).arg(0u32);
    // SAFETY: as above.
    let refused = unsafe { write.launch(&stream, &LaunchConfig::linear(1, 1025), &args) };
    assert_eq!(refused.unwrap_err().driver_error().code, ErrorCode::INVALID_VALUE);
}

fn a_captured_graph_runs_when_it_is_launched(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let (stream, other) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let buffer = DeviceBuffer::alloc(&device, 400).unwrap();
    let write = Module::load(&device, kernel::PTX).unwrap().kernel(kernel::NAME).unwrap();
    let launch = |value: u32, count: u32| {
        let args = KernelArgs::new().arg(buffer.address()).arg(value).arg(count);
        // SAFETY: three parameters of these sizes; the kernel accesses no host memory.
        unsafe { write.launch(&stream, &LaunchConfig::linear(1, 128), &args) }
    };
    stream.fill(buffer.span(), 0).unwrap();
    let graph = stream.capture(|| launch(3, 100).and_then(|()| launch(500, 10))).unwrap();
    assert_eq!(contents(&stream, &buffer), [0; 400], "it ran when it was captured");
    let mut expected = kernel::written(3, 100);
    expected[..40].copy_from_slice(&kernel::written(500, 10));
    for stream in [&stream, &other, &stream] {
        stream.fill(buffer.span(), 0).unwrap();
        // SAFETY: module and memory live until the stream has been waited for.
        unsafe { graph.launch(stream) }.unwrap();
        assert_eq!(contents(stream, &buffer), expected);
    }
    // Launches already enqueued still run.
    stream.fill(buffer.span(), 0).unwrap();
    // SAFETY: as above.
    unsafe { graph.launch(&stream) }.unwrap();
    drop(graph);
    assert_eq!(contents(&stream, &buffer), expected);
}

fn a_capture_that_ends_early_leaves_its_stream(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let stream = Stream::new(&device).unwrap();
    let buffer = DeviceBuffer::alloc(&device, 400).unwrap();
    let refused = stream.capture(|| stream.synchronize()).unwrap_err();
    assert_eq!(refused.driver_error().code, ErrorCode::STREAM_CAPTURE_UNSUPPORTED);
    // The closure may take no notice: the graph would lack what it asked for.
    let passed_over = stream.capture(|| {
        let _ = stream.is_idle();
        Ok::<_, DeviceError>(())
    });
    let code = passed_over.unwrap_err().driver_error().code;
    assert_eq!(code, ErrorCode::STREAM_CAPTURE_INVALIDATED);
    let given_up = stream.capture(|| Err(GivenUp(None))).unwrap_err();
    assert_eq!(given_up.0, None);
    // A panic, without its message.
    let panics = || std::panic::resume_unwind(Box::new("as asked"));
    let panicked = std::panic::AssertUnwindSafe(|| stream.capture::<GivenUp>(panics));
    assert!(std::panic::catch_unwind(panicked).is_err());
    stream.fill(buffer.span(), 7).unwrap();
    assert_eq!(contents(&stream, &buffer), [7; 400]);
}

/// Captures are of the mode `THREAD_LOCAL`: what may wait is refused to the thread that captures.
fn another_thread_works_on_during_a_capture(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let (stream, other) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let works = || -> Result<(), DeviceError> {
        let buffer = DeviceBuffer::alloc(&device, 400)?;
        let pinned = PinnedBuffer::alloc(&device, 400, HostAllocFlags::CACHED)?;
        let event = Event::new(&device)?;
        event.record(&other)?;
        event.synchronize()?;
        assert_eq!((event.is_complete()?, other.is_idle()?), (true, true));
        other.synchronize()?;
        drop(pinned);
        buffer.free()
    };
    let graph =
        stream.capture(|| std::thread::scope(|scope| scope.spawn(works).join().unwrap())).unwrap();
    // SAFETY: nothing was captured.
    unsafe { graph.launch(&stream) }.unwrap();
    stream.synchronize().unwrap();
}

fn a_wait_for_the_device_ends_the_capture_of_any_thread(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let stream = Stream::new(&device).unwrap();
    let waits = || std::thread::scope(|scope| scope.spawn(|| device.synchronize()).join().unwrap());
    let mut waited = Ok(());
    let ended = stream.capture(|| {
        waited = waits();
        Ok::<_, DeviceError>(())
    });
    let refused = |error: DeviceError| error.driver_error().code;
    assert_eq!(
        (waited.map_err(refused), ended.map(drop).map_err(refused)),
        (Err(ErrorCode::STREAM_CAPTURE_UNSUPPORTED), Err(ErrorCode::STREAM_CAPTURE_INVALIDATED))
    );
    assert_eq!(waits(), Ok(()));
}

/// Why a closure did not capture.
#[derive(Debug)]
struct GivenUp(Option<DeviceError>);

impl From<DeviceError> for GivenUp {
    fn from(error: DeviceError) -> Self {
        Self(Some(error))
    }
}

fn a_refused_module_says_why(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let refused = |ptx: &str| match Module::load(&device, ptx).unwrap_err() {
        ModuleError::Load { log, source } => (source.driver_error().code, log),
        other => panic!("{other}"),
    };
    let (code, log) = refused(&kernel::PTX.replace(".version 7.0", ".version 99.0"));
    assert_eq!(code, ErrorCode::UNSUPPORTED_PTX_VERSION, "{log}");
    assert!(!log.is_empty());
    let (code, log) = refused(&kernel::PTX.replace(".entry", "\0"));
    assert_eq!(code, ErrorCode::INVALID_IMAGE);
    assert!(!log.is_empty());
    let module = Module::load(&device, kernel::PTX).unwrap();
    for name in ["write_place", "write\0places"] {
        let ModuleError::Kernel { name: named, source } = module.kernel(name).unwrap_err() else {
            panic!("a kernel was asked for");
        };
        assert_eq!((named.as_str(), source.driver_error().code), (name, ErrorCode::NOT_FOUND));
    }
    assert_eq!(device.poison(), None);
}

fn raw_handles_are_adopted_and_left_alone(driver: &Arc<dyn Driver>) {
    let context = driver.device_primary_ctx_retain(0).unwrap();
    // SAFETY: the context is retained until the end of the scenario.
    unsafe { driver.ctx_set_current(context) }.unwrap();
    let theirs = driver.stream_create(false).unwrap();
    // SAFETY: 0 unbinds.
    unsafe { driver.ctx_set_current(0) }.unwrap();

    // SAFETY: a live context, which outlives the device.
    let device = unsafe { Device::adopt(Arc::clone(driver), context) }.unwrap();
    assert_eq!((device.ordinal(), device.context()), (0, context));
    // SAFETY: a live stream of that context, and its default stream.
    let adopt = |raw| unsafe { Stream::adopt(&device, raw) }.unwrap();
    let streams = [theirs, 0].map(adopt);
    for (stream, byte) in streams.iter().zip([3, 4]) {
        let buffer = DeviceBuffer::alloc(&device, 512).unwrap();
        stream.fill(buffer.span(), byte).unwrap();
        assert_eq!(contents(stream, &buffer), [byte; 512]);
    }
    drop((streams, device));
    assert_eq!(driver.ctx_get_current(), Ok(0));

    // What was lent still works, and is its owner's to destroy.
    // SAFETY: the context is live until its release below.
    unsafe { driver.ctx_set_current(context) }.unwrap();
    // SAFETY: the stream is live: adopting it did not pass it on.
    unsafe { driver.stream_synchronize(theirs) }.unwrap();
    // SAFETY: nobody else has the stream any more.
    unsafe { driver.stream_destroy(theirs) }.unwrap();
    // SAFETY: 0 unbinds.
    unsafe { driver.ctx_set_current(0) }.unwrap();
    // SAFETY: nothing made from the context is left.
    unsafe { driver.device_primary_ctx_release(0) }.unwrap();
}
