//! Known defects of RAII handles of a driver, shown to be absent here.
//!
//! They were found in another binding, 0.19 of `cudarc`: a slice dropped where its context is not
//! current is not freed, or freed in another context; an error kept for later makes a drop skip its
//! waits and free all the same; and the source of a copy between devices may be freed before the
//! copy has run.

use std::sync::Arc;

use cuda_driver::{
    DeviceBuffer, Driver, ErrorCode, Event, HostAllocFlags, PeerCopy, PinnedBuffer, Stream,
};

use super::{Scenario, contents, open, pattern};

/// Those that one device shows.
pub(crate) const SINGLE: &[(&str, Scenario)] = &[
    ("trap_a_drop_on_an_unbound_thread_frees", trap_a_drop_on_an_unbound_thread_frees),
    ("trap_b_an_error_is_not_kept_for_later", trap_b_an_error_is_not_kept_for_later),
    ("trap_b_an_error_skips_no_wait", trap_b_an_error_skips_no_wait),
];

/// Those that need two.
pub(crate) const PAIRS: &[(&str, Scenario)] = &[
    ("trap_a_drop_under_another_context_frees", trap_a_drop_under_another_context_frees),
    ("trap_c_a_peer_copys_source_outlives_the_copy", trap_c_a_peer_copys_source_outlives_the_copy),
    (
        "trap_c_a_peer_copys_destination_outlives_the_copy",
        trap_c_a_peer_copys_destination_outlives_the_copy,
    ),
];

const BYTES: u64 = 64 << 20;

fn trap_a_drop_on_an_unbound_thread_frees(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let buffer = DeviceBuffer::alloc(&device, BYTES).unwrap();
    let pinned = PinnedBuffer::alloc(&device, 4096, HostAllocFlags::CACHED).unwrap();
    let stream = Stream::new(&device).unwrap();
    let event = Event::new(&device).unwrap();
    let (before, _) = device.memory_info().unwrap();
    let unbound = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            assert_eq!(driver.ctx_get_current(), Ok(0));
            drop((buffer, pinned, stream, event));
            let freed = device.free_retired();
            (freed, driver.ctx_get_current())
        });
        other.join().unwrap()
    });
    assert_eq!(unbound, (Ok(2), Ok(0)));
    let (after, _) = device.memory_info().unwrap();
    assert!(after >= before + BYTES, "{before} {after}: nothing was freed");
}

fn trap_a_drop_under_another_context_frees(driver: &Arc<dyn Driver>) {
    let [first, second] = [0, 1].map(|ordinal| open(driver, ordinal));
    let buffer = DeviceBuffer::alloc(&first, BYTES).unwrap();
    // SAFETY: 0 is the default stream of the device's context.
    let default = unsafe { Stream::adopt(&first, 0) }.unwrap();
    default.fill(buffer.span(), 1).unwrap();
    let (before, _) = first.memory_info().unwrap();
    // SAFETY: the context lives as long as `second`, and is unbound before.
    unsafe { driver.ctx_set_current(second.context()) }.unwrap();
    drop((buffer, default));
    assert_eq!(first.free_retired(), Ok(1));
    assert_eq!(driver.ctx_get_current(), Ok(second.context()));
    // SAFETY: 0 unbinds.
    unsafe { driver.ctx_set_current(0) }.unwrap();
    let (after, _) = first.memory_info().unwrap();
    assert!(after >= before + BYTES, "{before} {after}: nothing was freed");
    assert_eq!((first.poison(), second.poison()), (None, None));
}

fn trap_b_an_error_is_not_kept_for_later(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let refused = DeviceBuffer::alloc(&device, 1 << 45).unwrap_err();
    assert_eq!(refused.driver_error().code, ErrorCode::OUT_OF_MEMORY);
    device.synchronize().unwrap();
    Stream::new(&device).unwrap().synchronize().unwrap();
    assert_eq!(device.poison(), None);
}

fn trap_b_an_error_skips_no_wait(driver: &Arc<dyn Driver>) {
    let device = open(driver, 0);
    let stream = Stream::new(&device).unwrap();
    let [source, copy] = [0; 2].map(|_| DeviceBuffer::alloc(&device, BYTES).unwrap());
    stream.fill(source.span(), 5).unwrap();
    for _ in 0..8 {
        stream.copy_on_device(copy.span(), source.span()).unwrap();
    }
    device.run(|driver| driver.mem_alloc(1 << 45)).unwrap_err();
    drop(source);
    assert_eq!(device.free_retired(), Ok(1));
    assert!(stream.is_idle().unwrap(), "freed under the copies");
    assert!(contents(&stream, &copy).iter().all(|&byte| byte == 5));
}

/// Copies `source` of device 0 into `destination` of device 1, in `stream` of either.
fn copy_across(stream: &Stream, destination: &DeviceBuffer, source: &DeviceBuffer) {
    let copy = PeerCopy {
        destination: destination.address(),
        destination_context: destination.device().context(),
        source: source.address(),
        source_context: source.device().context(),
        bytes: BYTES,
    };
    // SAFETY: live contexts and stream; both ranges are device memory.
    let enqueue = |driver: &dyn Driver| unsafe { driver.memcpy_peer_async(copy, stream.raw()) };
    stream.device().run(enqueue).unwrap();
}

/// The copy runs in a stream of the destination's device, which knows nothing of the source.
fn trap_c_a_peer_copys_source_outlives_the_copy(driver: &Arc<dyn Driver>) {
    let [first, second] = [0, 1].map(|ordinal| open(driver, ordinal));
    let stream = Stream::new(&second).unwrap();
    let source = DeviceBuffer::alloc(&first, BYTES).unwrap();
    let copy = DeviceBuffer::alloc(&second, BYTES).unwrap();
    let data = pattern(3, BYTES as usize);
    Stream::new(&first).unwrap().upload(source.span(), &data).unwrap();
    for _ in 0..8 {
        copy_across(&stream, &copy, &source);
    }
    drop(source);
    // Whatever is allocated next frees the source first, and would get its memory.
    let next = DeviceBuffer::alloc(&first, BYTES).unwrap();
    Stream::new(&first).unwrap().fill(next.span(), 0xEE).unwrap();
    assert!(contents(&stream, &copy) == data, "the source was reused under the copy");
}

fn trap_c_a_peer_copys_destination_outlives_the_copy(driver: &Arc<dyn Driver>) {
    let [first, second] = [0, 1].map(|ordinal| open(driver, ordinal));
    let stream = Stream::new(&first).unwrap();
    let source = DeviceBuffer::alloc(&first, BYTES).unwrap();
    let copy = DeviceBuffer::alloc(&second, BYTES).unwrap();
    stream.fill(source.span(), 4).unwrap();
    for _ in 0..8 {
        copy_across(&stream, &copy, &source);
    }
    drop(copy);
    let next = DeviceBuffer::alloc(&second, BYTES).unwrap();
    let other = Stream::new(&second).unwrap();
    other.fill(next.span(), 0xEE).unwrap();
    other.synchronize().unwrap();
    stream.synchronize().unwrap();
    assert!(contents(&other, &next).iter().all(|&byte| byte == 0xEE), "written after the free");
    assert_eq!((first.poison(), second.poison()), (None, None));
}
