//! The handles of `cuda-driver` on a simulated device: they leave nothing behind.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use cuda_driver::{
    AccessDesc, AddressRange, Device, DeviceBuffer, DeviceError, ErrorCode, Event, HostAllocFlags,
    PhysicalMemory, PinnedBuffer, Stream,
};
use cuda_sim::{FindingKind, SimConfig, SimDriver};

fn open() -> (SimDriver, Device) {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    (sim, device)
}

#[test]
fn a_round_trip_through_every_handle_leaves_nothing_behind() {
    let (sim, device) = open();
    {
        let stream = Stream::new(&device).unwrap();
        let event = Event::with_timing(&device).unwrap();
        let buffer = DeviceBuffer::alloc(&device, 1024).unwrap();
        let mut host = PinnedBuffer::alloc(&device, 1024, HostAllocFlags::CACHED).unwrap();
        host.write_at(0, &[7; 1024]).unwrap();
        let page = PhysicalMemory::granularity(&device).unwrap();
        let range = AddressRange::reserve(&device, page).unwrap();
        let memory = PhysicalMemory::create(&device, page).unwrap();
        range.map(0, &memory).unwrap();
        range.set_access(0, page, &[AccessDesc { device: 0 }]).unwrap();
        let mapped = range.span(0, 1024).unwrap();
        stream.copy_to_device(buffer.span(), &host, 0).unwrap();
        stream.copy_on_device(mapped, buffer.span()).unwrap();
        event.record(&stream).unwrap();
        event.synchronize().unwrap();
        let mut back = [0; 1024];
        stream.download(&mut back, mapped).unwrap();
        assert_eq!(back, [7; 1024]);
        range.unmap(0, page).unwrap();
    }
    drop(device);
    assert!(sim.findings().is_empty(), "{:?}", sim.findings());
    assert!(sim.check_leaks().is_clean());
}

#[test]
fn handles_are_dropped_on_a_thread_without_a_context() {
    let (sim, device) = open();
    let stream = Stream::new(&device).unwrap();
    let buffer = DeviceBuffer::alloc(&device, 64).unwrap();
    stream.fill(buffer.span(), 3).unwrap();
    std::thread::spawn(move || drop((buffer, stream, device))).join().unwrap();
    assert!(sim.findings().is_empty(), "{:?}", sim.findings());
    assert!(sim.check_leaks().is_clean());
}

#[test]
fn a_fault_poisons_the_handle_and_clean_up_still_finishes() {
    let (sim, device) = open();
    let stream = Stream::new(&device).unwrap();
    let page = PhysicalMemory::granularity(&device).unwrap();
    let range = AddressRange::reserve(&device, page).unwrap();
    let memory = PhysicalMemory::create(&device, page).unwrap();
    range.map(0, &memory).unwrap();
    range.set_access(0, page, &[AccessDesc { device: 0 }]).unwrap();
    stream.fill(range.span(0, page).unwrap(), 1).unwrap();
    // Not ordered after the fill, which has not run.
    range.unmap(0, page).unwrap();
    let DeviceError::Driver(error) = stream.synchronize().unwrap_err() else {
        panic!("the first error comes from the driver")
    };
    assert_eq!(error.code, ErrorCode::ILLEGAL_ADDRESS);
    assert_eq!(device.poison(), Some(error));
    drop((memory, range, stream, device));
    let kinds: Vec<_> = sim.findings().iter().map(|finding| finding.kind).collect();
    assert_eq!(kinds, [FindingKind::IllegalAccess]);
    assert!(sim.check_leaks().is_clean());
}
