//! Scenarios for a driver with two devices that can access each other's memory.

use std::sync::Arc;

use cuda_driver::host_pages::{HostMemory, HostPagesOptions};
use cuda_driver::{
    AccessDesc, AddressRange, CopyError, DeviceBuffer, DeviceError, Driver, DriverError, ErrorCode,
    Event, KernelArgs, LaunchConfig, Module, PeerAttribute, PeerCopy, PhysicalMemory, PinnedBuffer,
    Stream,
};

use super::{Scenario, contents, kernel, open, pattern};

/// Every scenario, by name.
pub(crate) const ALL: &[(&str, Scenario)] = &[
    ("handles_bind_their_own_device", handles_bind_their_own_device),
    ("peer_access_is_enabled_once", peer_access_is_enabled_once),
    ("peer_copies_carry_the_bytes", peer_copies_carry_the_bytes),
    ("copies_go_between_devices_in_a_streams_order", copies_go_between_devices_in_a_streams_order),
    (
        "a_stream_waits_for_the_work_of_another_device",
        a_stream_waits_for_the_work_of_another_device,
    ),
    ("a_mapping_names_the_devices_that_see_it", a_mapping_names_the_devices_that_see_it),
    (
        "registered_memory_outlives_all_devices_copies",
        registered_memory_outlives_all_devices_copies,
    ),
    ("a_stream_of_another_device_is_refused", a_stream_of_another_device_is_refused),
];

fn handles_bind_their_own_device(driver: &Arc<dyn Driver>) {
    let [first, second] = [0, 1].map(|ordinal| open(driver, ordinal));
    assert_ne!(first.info().uuid, second.info().uuid);
    // SAFETY: the context lives as long as `second`, and is unbound before.
    unsafe { driver.ctx_set_current(second.context()) }.unwrap();
    {
        // All of these belong to the device that is not current.
        let stream = Stream::new(&first).unwrap();
        let buffer = DeviceBuffer::alloc(&first, 4096).unwrap();
        stream.fill(buffer.span(), 6).unwrap();
        assert_eq!(contents(&stream, &buffer), [6; 4096]);
        Event::new(&first).unwrap().record(&stream).unwrap();
        buffer.free().unwrap();
        // SAFETY: a live stream, which is refused because it is the other device's.
        let refused = unsafe { Stream::adopt(&second, stream.raw()) }.unwrap_err();
        assert_eq!(refused.driver_error().code, ErrorCode::INVALID_CONTEXT);
        let recorded = Event::new(&second).unwrap().record(&stream).unwrap_err();
        assert_eq!(recorded.driver_error().code, ErrorCode::INVALID_HANDLE);
    }
    assert_eq!(driver.ctx_get_current(), Ok(second.context()));
    // SAFETY: 0 unbinds.
    unsafe { driver.ctx_set_current(0) }.unwrap();
}

fn peer_access_is_enabled_once(driver: &Arc<dyn Driver>) {
    let [first, second] = [0, 1].map(|ordinal| open(driver, ordinal));
    assert_eq!(driver.device_can_access_peer(0, 1), Ok(true));
    // SAFETY: `second` outlives these calls.
    let enable = || first.run(|driver| unsafe { driver.ctx_enable_peer_access(second.context()) });
    // SAFETY: as above.
    let disable =
        || first.run(|driver| unsafe { driver.ctx_disable_peer_access(second.context()) });
    let refused = |call, code| Err::<(), _>(DeviceError::Driver(DriverError::new(call, code)));
    enable().unwrap();
    let again = refused("cuCtxEnablePeerAccess", ErrorCode::PEER_ACCESS_ALREADY_ENABLED);
    assert_eq!(enable(), again);

    let stream = Stream::new(&first).unwrap();
    let [near, far] = [&first, &second].map(|device| DeviceBuffer::alloc(device, 4096).unwrap());
    let data = pattern(1, 4096);
    stream.upload(near.span(), &data).unwrap();
    stream.copy_on_device(far.span(), near.span()).unwrap();
    stream.synchronize().unwrap();
    assert!(contents(&Stream::new(&second).unwrap(), &far) == data);

    disable().unwrap();
    let again = refused("cuCtxDisablePeerAccess", ErrorCode::PEER_ACCESS_NOT_ENABLED);
    assert_eq!(disable(), again);
    assert_eq!(first.poison(), None);
}

fn peer_copies_carry_the_bytes(driver: &Arc<dyn Driver>) {
    let [first, second] = [0, 1].map(|ordinal| open(driver, ordinal));
    let stream = Stream::new(&first).unwrap();
    let [near, far] = [&first, &second].map(|device| DeviceBuffer::alloc(device, 4096).unwrap());
    let data = pattern(2, 4096);
    stream.upload(near.span(), &data).unwrap();
    let copy = PeerCopy {
        destination: far.address(),
        destination_context: second.context(),
        source: near.address(),
        source_context: first.context(),
        bytes: 4096,
    };
    // SAFETY: live contexts and stream; both ranges are device memory.
    first.run(|driver| unsafe { driver.memcpy_peer_async(copy, stream.raw()) }).unwrap();
    // The reader is on the other device: an event of this one orders it.
    let copied = Event::new(&first).unwrap();
    copied.record(&stream).unwrap();
    let reader = Stream::new(&second).unwrap();
    reader.wait(&copied).unwrap();
    assert!(contents(&reader, &far) == data);
}

fn copies_go_between_devices_in_a_streams_order(driver: &Arc<dyn Driver>) {
    let [first, second] = [0, 1].map(|ordinal| open(driver, ordinal));
    assert_eq!(first.can_access(&second), Ok(true));
    assert_eq!(first.peer_attribute(&second, PeerAttribute::ACCESS_SUPPORTED), Ok(1));
    let [near, far] = [&first, &second].map(|device| DeviceBuffer::alloc(device, 4097).unwrap());
    let data = pattern(4, 4097);
    for access in [false, true] {
        if access {
            first.enable_access_to(&second).unwrap();
            first.enable_access_to(&second).unwrap(); // a second time is no error
        }
        for on in [&first, &second] {
            let stream = Stream::new(on).unwrap();
            stream.upload(near.span(), &data).unwrap();
            let cleared = Stream::new(&second).unwrap();
            cleared.fill(far.span(), 0).unwrap();
            cleared.synchronize().unwrap();
            stream.copy_between((&second, far.span()), (&first, near.span())).unwrap();
            assert!(contents(&stream, &far) == data);
        }
    }
    let stream = Stream::new(&first).unwrap();
    let short = near.span().slice(0, 4096).unwrap();
    let refused = stream.copy_between((&second, far.span()), (&first, short)).unwrap_err();
    assert_eq!(refused, CopyError::Lengths { destination: 4097, source_bytes: 4096 });
    let none = near.span().slice(7, 0).unwrap();
    stream.copy_between((&second, none), (&first, none)).unwrap();
    // SAFETY: access was enabled above, and nothing is under way.
    first.run(|driver| unsafe { driver.ctx_disable_peer_access(second.context()) }).unwrap();
}

/// From a thread with no context, the one's and the other's; and of default streams, which are of the context that
/// is current.
fn a_stream_waits_for_the_work_of_another_device(driver: &Arc<dyn Driver>) {
    const BYTES: u64 = 16 << 20;
    let [first, second] = [0, 1].map(|ordinal| open(driver, ordinal));
    let [near, far] = [&first, &second].map(|device| DeviceBuffer::alloc(device, BYTES).unwrap());
    let event = Event::new(&first).unwrap();
    // SAFETY: 0 is the default stream.
    let default = |device| unsafe { Stream::adopt(device, 0) }.unwrap();
    let streams = [
        [Stream::new(&first).unwrap(), Stream::new(&second).unwrap()],
        [default(&first), Stream::new(&second).unwrap()],
        [Stream::new(&first).unwrap(), default(&second)],
    ];
    for (writer, reader) in streams.iter().map(|[writer, reader]| (writer, reader)) {
        for (byte, current) in (1..).zip([0, first.context(), second.context()]) {
            // SAFETY: nothing, or a context that outlives the binding.
            unsafe { driver.ctx_set_current(current) }.unwrap();
            for _ in 0..8 {
                writer.fill(near.span(), 0).unwrap();
            }
            writer.fill(near.span(), byte).unwrap();
            reader.wait_for(writer, &event).unwrap();
            reader.copy_between((&second, far.span()), (&first, near.span())).unwrap();
            assert_eq!(driver.ctx_get_current(), Ok(current));
            assert!(contents(reader, &far).iter().all(|&seen| seen == byte));
        }
    }
    // SAFETY: 0 unbinds.
    unsafe { driver.ctx_set_current(0) }.unwrap();
    let [[writer, reader], ..] = &streams;
    // The event is not of the stream that it is to be recorded on.
    let refused = writer.wait_for(reader, &event).unwrap_err();
    assert_eq!(refused.driver_error().code, ErrorCode::INVALID_HANDLE);
    let other = Event::new(&second).unwrap();
    writer.wait_for(reader, &other).unwrap();
    assert_eq!((first.poison(), second.poison()), (None, None));
}

fn a_mapping_names_the_devices_that_see_it(driver: &Arc<dyn Driver>) {
    let [first, second] = [0, 1].map(|ordinal| open(driver, ordinal));
    let page = PhysicalMemory::granularity(&first).unwrap();
    let range = AddressRange::reserve(&first, page).unwrap();
    let memory = PhysicalMemory::create(&first, page).unwrap();
    range.map(0, &memory).unwrap();
    range.set_access(0, page, &[0, 1].map(|device| AccessDesc { device })).unwrap();
    let span = range.span(0, 1000).unwrap();
    let data = pattern(3, 1000);
    Stream::new(&second).unwrap().upload(span, &data).unwrap();
    let mut seen = vec![0; 1000];
    Stream::new(&first).unwrap().download(&mut seen, span).unwrap();
    assert!(seen == data);
    range.unmap(0, page).unwrap();
}

/// Unregistering waits for one device only; the handles see to the others.
fn registered_memory_outlives_all_devices_copies(driver: &Arc<dyn Driver>) {
    const BYTES: u64 = 4 << 20;
    let [first, second] = [0, 1].map(|ordinal| open(driver, ordinal));
    let pages = HostMemory::Pages(HostPagesOptions::HUGE_BESIDE_DEVICE);
    let mut buffer = PinnedBuffer::pin(&first, BYTES, pages).unwrap();
    let data = pattern(5, BYTES as usize);
    buffer.write_at(0, &data).unwrap();
    let stream = Stream::new(&second).unwrap();
    let targets: Vec<_> = (0..16).map(|_| DeviceBuffer::alloc(&second, BYTES).unwrap()).collect();
    for target in &targets {
        stream.copy_to_device(target.span(), &buffer, 0).unwrap();
    }
    drop(buffer);
    assert_eq!(first.free_retired(), Ok(1));
    for target in &targets {
        assert!(contents(&stream, target) == data);
    }
    assert_eq!((first.poison(), second.poison()), (None, None));
}

/// A default stream too, which has the number of the other device's: the driver would take the wrong one in silence.
fn a_stream_of_another_device_is_refused(driver: &Arc<dyn Driver>) {
    let [first, second] = [0, 1].map(|ordinal| open(driver, ordinal));
    let event = Event::new(&first).unwrap();
    let memory = DeviceBuffer::alloc(&first, 64).unwrap();
    let kernel = Module::load(&first, kernel::PTX).unwrap().kernel(kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(memory.address()).arg(1u32).arg(4u32);
    let config = LaunchConfig::linear(1, 4);
    // SAFETY: three parameters of these sizes; the kernel accesses no host memory.
    let prepared = unsafe { kernel.prepare(&config, &args) }.unwrap();
    let graph = Stream::new(&first).unwrap().capture(|| Ok::<_, DeviceError>(())).unwrap();
    // SAFETY: 0 is the default stream.
    let default = unsafe { Stream::adopt(&second, 0) }.unwrap();
    for stream in [Stream::new(&second).unwrap(), default] {
        let refused = |call| Err(DeviceError::OtherDevice { call, device: 0, stream: 1 });
        assert_eq!(event.record(&stream), refused("cuEventRecord"));
        assert_eq!(stream.wait_for(&stream, &event), refused("cuEventRecord"));
        // SAFETY: as above.
        assert_eq!(unsafe { kernel.launch(&stream, &config, &args) }, refused("cuLaunchKernel"));
        // SAFETY: as above.
        assert_eq!(unsafe { prepared.launch(&stream) }, refused("cuGraphLaunch"));
        // SAFETY: nothing was captured.
        assert_eq!(unsafe { graph.launch(&stream) }, refused("cuGraphLaunch"));
    }
    assert_eq!((first.poison(), second.poison()), (None, None));
}
