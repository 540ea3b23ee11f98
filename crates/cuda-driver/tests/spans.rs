//! Spans of memory whose owner is gone, and of another driver's memory: every safe call refuses them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use cuda_driver::{
    AccessDesc, AddressRange, CopyError, Device, DeviceBuffer, DeviceSpan, HostAllocFlags,
    PhysicalMemory, PinnedBuffer, ReaderError, Stream,
};
use cuda_sim::{SimConfig, SimDriver};

const BYTES: u64 = 4096;

struct Machine {
    sim: SimDriver,
    device: Device,
    stream: Stream,
}

fn machine() -> Machine {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    let stream = Stream::new(&device).unwrap();
    Machine { sim, device, stream }
}

/// What every safe call that takes a span answers, and the address for kernels.
fn answers(on: &Machine, span: DeviceSpan) -> Vec<Result<(), CopyError>> {
    let Machine { device, stream, .. } = on;
    let own = DeviceBuffer::alloc(device, BYTES).unwrap();
    let host = PinnedBuffer::alloc(device, BYTES, HostAllocFlags::CACHED).unwrap();
    let mut bytes = vec![0; BYTES as usize];
    vec![
        stream.copy_to_device(span, &host, 0),
        stream.copy_to_host(&host, 0, span),
        stream.copy_on_device(span, own.span()),
        stream.copy_on_device(own.span(), span),
        stream.copy_between((device, span), (device, own.span())),
        stream.copy_between((device, own.span()), (device, span)),
        stream.fill(span, 1),
        stream.upload(span, &bytes),
        stream.download(&mut bytes, span),
        span.address_on(stream).map(drop).map_err(CopyError::from),
    ]
}

/// Nothing reached the device, which is well.
fn assert_untouched(on: &Machine) {
    on.stream.synchronize().unwrap();
    assert_eq!((on.sim.findings(), on.device.poison()), (vec![], None));
}

#[test]
fn a_span_is_refused_when_its_buffer_was_dropped() {
    let on = machine();
    let memory = DeviceBuffer::alloc(&on.device, 2 * BYTES).unwrap();
    let span = memory.span().slice(BYTES, BYTES).unwrap();
    assert_eq!(answers(&on, span), vec![Ok(()); 10]);
    drop(memory);
    let gone = CopyError::from(ReaderError::Gone { address: span.address(), bytes: BYTES });
    assert_eq!(answers(&on, span), vec![Err(gone); 10]);
    // Nor is it taken for a span of memory that is at the same place by now.
    on.device.free_retired().unwrap();
    let next = DeviceBuffer::alloc(&on.device, 2 * BYTES).unwrap();
    on.stream.fill(next.span(), 7).unwrap();
    assert_eq!(answers(&on, span), vec![Err(gone); 10]);
    let mut bytes = [0; 2 * BYTES as usize];
    on.stream.download(&mut bytes, next.span()).unwrap();
    assert_eq!(bytes, [7; 2 * BYTES as usize]);
    assert_untouched(&on);
}

#[test]
fn a_span_is_refused_when_its_addresses_were_given_back() {
    let on = machine();
    let page = PhysicalMemory::granularity(&on.device).unwrap();
    for drops in [true, false] {
        let memory = PhysicalMemory::create(&on.device, page).unwrap();
        let range = AddressRange::reserve(&on.device, page).unwrap();
        range.map(0, &memory).unwrap();
        range.set_access(0, page, &[AccessDesc { device: 0 }]).unwrap();
        let span = range.span(0, BYTES).unwrap();
        assert_eq!(answers(&on, span), vec![Ok(()); 10]);
        on.stream.synchronize().unwrap();
        range.unmap(0, page).unwrap();
        match drops {
            true => drop(range),
            false => range.free().unwrap(),
        }
        let gone = CopyError::from(ReaderError::Gone { address: span.address(), bytes: BYTES });
        assert_eq!(answers(&on, span), vec![Err(gone); 10]);
    }
    assert_untouched(&on);
}

#[test]
fn a_span_of_another_driver_is_refused() {
    let (on, other) = (machine(), machine());
    let memory = DeviceBuffer::alloc(&other.device, BYTES).unwrap();
    let refused = CopyError::from(ReaderError::OtherDriver { stream: on.stream.raw() });
    assert_eq!(answers(&on, memory.span()), vec![Err(refused); 10]);
    assert_untouched(&on);
    assert_untouched(&other);
}
