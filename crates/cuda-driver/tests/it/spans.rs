//! Spans of memory whose owner is gone, and of another driver's memory: every safe call refuses them.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use cuda_driver::{
    AccessDesc, AddressRange, CopyError, CountingDriver, Device, DeviceBuffer, DeviceSpan, Driver,
    HostAllocFlags, PhysicalMemory, PinnedBuffer, Stream,
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
        span.address_on(stream).map(drop),
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
    let gone = CopyError::Gone { address: span.address(), bytes: BYTES };
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
    for drops in [true, false] {
        let (_memory, range) = mapped(&on.device);
        let span = range.span(0, BYTES).unwrap();
        assert_eq!(answers(&on, span), vec![Ok(()); 10]);
        on.stream.synchronize().unwrap();
        range.unmap(0, range.bytes()).unwrap();
        match drops {
            true => drop(range),
            false => range.free().unwrap(),
        }
        let gone = CopyError::Gone { address: span.address(), bytes: BYTES };
        assert_eq!(answers(&on, span), vec![Err(gone); 10]);
    }
    assert_untouched(&on);
}

#[test]
fn a_span_of_another_driver_is_refused() {
    let (on, other) = (machine(), machine());
    let memory = DeviceBuffer::alloc(&other.device, BYTES).unwrap();
    let refused = CopyError::OtherDriver { stream: on.stream.raw() };
    assert_eq!(answers(&on, memory.span()), vec![Err(refused); 10]);
    assert_untouched(&on);
    assert_untouched(&other);
}

/// A driver over a simulated one of 8 MiB that stays in the first `call` until it is told to go on. Tells every call, that
/// one as well.
fn staying_in(call: &'static str) -> (Arc<dyn Driver>, Receiver<&'static str>, Sender<()>) {
    let config = SimConfig { device_bytes: 8 << 20, ..SimConfig::default() };
    let upstream = Arc::new(SimDriver::new(config).unwrap());
    let ((tell, told), (go_on, may_go_on)) = (channel(), channel());
    let ends = Mutex::new((tell, Some(may_go_on)));
    let driver = CountingDriver::watched(upstream, move |name| {
        // Not under the lock: other calls go on meanwhile.
        let stays = {
            let mut ends = ends.lock().unwrap();
            ends.0.send(name).unwrap();
            if name == call { ends.1.take() } else { None }
        };
        // An end that is gone is told as well.
        stays.map(|stays| stays.recv());
    });
    (Arc::new(driver), told, go_on)
}

/// Half a minute: an answer that has not come by then does not come.
const EVER: Duration = Duration::from_secs(30);
/// Long enough for a call that nothing holds up.
const SOON: Duration = Duration::from_millis(500);

/// A page of memory, and addresses at which it is mapped.
fn mapped(device: &Device) -> (PhysicalMemory, AddressRange) {
    let page = PhysicalMemory::granularity(device).unwrap();
    let memory = PhysicalMemory::create(device, page).unwrap();
    let range = AddressRange::reserve(device, page).unwrap();
    range.map(0, &memory).unwrap();
    range.set_access(0, page, &[AccessDesc { device: 0 }]).unwrap();
    (memory, range)
}

#[test]
fn the_end_of_addresses_waits_for_no_stream() {
    for uploads in [true, false] {
        let (driver, told, go_on) = staying_in("cuStreamSynchronize");
        let device = Device::open(driver, 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let (_memory, range) = mapped(&device);
        let span = range.span(0, BYTES).unwrap();
        let (ended, end) = channel();
        thread::scope(|scope| {
            let copies = scope.spawn(move || match uploads {
                true => stream.upload(span, &[7; BYTES as usize]),
                false => stream.download(&mut [0; BYTES as usize], span),
            });
            while told.recv_timeout(EVER).unwrap() != "cuStreamSynchronize" {}
            // Memory that is mapped keeps its addresses; the end of their owner is what is asked for.
            scope.spawn(move || {
                drop(range);
                ended.send(())
            });
            let before = end.recv_timeout(EVER);
            go_on.send(()).unwrap();
            copies.join().unwrap().unwrap();
            before.unwrap();
        });
    }
}

#[test]
fn memory_is_not_freed_during_a_call_that_uses_it() {
    let (driver, told, go_on) = staying_in("cuMemsetD8Async");
    let device = Device::open(driver, 0).unwrap();
    let stream = Stream::new(&device).unwrap();
    let memory = DeviceBuffer::alloc(&device, BYTES).unwrap();
    let span = memory.span();
    thread::scope(|scope| {
        let fills = scope.spawn(move || stream.fill(span, 1));
        while told.recv_timeout(EVER).unwrap() != "cuMemsetD8Async" {}
        let frees = scope.spawn(move || memory.free());
        let mut freed = false;
        while let Ok(call) = told.recv_timeout(SOON) {
            freed |= call == "cuMemFree";
        }
        go_on.send(()).unwrap();
        fills.join().unwrap().unwrap();
        frees.join().unwrap().unwrap();
        assert!(!freed, "freed before the call that uses it had returned");
        assert!(told.try_iter().any(|call| call == "cuMemFree"));
    });
}

#[test]
fn addresses_are_not_given_back_during_a_call_that_uses_them() {
    for drops in [true, false] {
        let (driver, told, go_on) = staying_in("cuMemsetD8Async");
        let device = Device::open(driver, 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let (_memory, range) = mapped(&device);
        let span = range.span(0, BYTES).unwrap();
        thread::scope(|scope| {
            let fills = scope.spawn(move || stream.fill(span, 1));
            while told.recv_timeout(EVER).unwrap() != "cuMemsetD8Async" {}
            // Refused in the end, since memory is mapped there; when it is asked for is the question.
            let ends = scope.spawn(move || if drops { drop(range) } else { _ = range.free() });
            let mut freed = false;
            while let Ok(call) = told.recv_timeout(SOON) {
                freed |= call == "cuMemAddressFree";
            }
            go_on.send(()).unwrap();
            fills.join().unwrap().unwrap();
            ends.join().unwrap();
            assert!(!freed, "given back before the call that uses them had returned");
            assert!(told.try_iter().any(|call| call == "cuMemAddressFree"));
        });
    }
}

/// Dropped memory is freed by the next allocation, and by `free_retired` before it returns: also where another thread has
/// begun to free it.
#[test]
fn memory_that_another_thread_is_freeing_is_free_when_a_call_returns() {
    const MIB: u64 = 1 << 20;
    for allocates in [true, false] {
        let (driver, told, go_on) = staying_in("cuMemFree");
        let device = Device::open(driver, 0).unwrap();
        let [small, large] =
            [MIB, 6 * MIB].map(|bytes| DeviceBuffer::alloc(&device, bytes).unwrap());
        drop((small, large));
        thread::scope(|scope| {
            let frees = scope.spawn(|| device.free_retired());
            while told.recv_timeout(EVER).unwrap() != "cuMemFree" {}
            let other = scope.spawn(|| match allocates {
                true => DeviceBuffer::alloc(&device, 6 * MIB).map(|buffer| buffer.bytes()),
                false => device.free_retired().and_then(|_| Ok(device.memory_info()?.0)),
            });
            // What it does without waiting for the other thread, it has done by then.
            while told.recv_timeout(SOON).is_ok() {}
            go_on.send(()).unwrap();
            let free = if allocates { 6 * MIB } else { 8 * MIB };
            assert_eq!(other.join().unwrap(), Ok(free), "nothing is in use");
            assert_eq!(frees.join().unwrap(), Ok(2));
        });
    }
}

#[test]
fn an_allocation_does_not_wait_for_a_thread_that_frees_what_it_does_not_need() {
    let (driver, told, go_on) = staying_in("cuMemFree");
    let device = Device::open(driver, 0).unwrap();
    drop(DeviceBuffer::alloc(&device, BYTES).unwrap());
    let (device, (allocated, end)) = (&device, channel());
    thread::scope(|scope| {
        let frees = scope.spawn(|| device.free_retired());
        while told.recv_timeout(EVER).unwrap() != "cuMemFree" {}
        scope.spawn(move || {
            let memory = DeviceBuffer::alloc(device, BYTES);
            let pinned = PinnedBuffer::alloc(device, BYTES, HostAllocFlags::CACHED);
            allocated.send((memory.map(drop), pinned.map(drop)))
        });
        let before = end.recv_timeout(EVER);
        go_on.send(()).unwrap();
        assert_eq!(frees.join().unwrap(), Ok(1));
        assert_eq!(before, Ok((Ok(()), Ok(()))), "it waited for the other thread");
    });
}
