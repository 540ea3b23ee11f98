//! Two devices: use of one device's objects with the other current, and peer access.

use std::sync::Arc;

use cuda_driver::{
    AccessDesc, AllocationProp, Device, DeviceBuffer, DeviceSpan, ErrorCode, HostAllocFlags,
    KernelArgs, LaunchConfig, PeerAttribute, PeerCopy, ResidencyError,
};

use super::bound::Bound;
use super::{Case, Needs, Subject, cases, refused};
use crate::common::{kernel, pattern};

pub(crate) const CASES: &[Case] = cases![Needs::Pair;
    two_devices_have_two_contexts,
    threads_hold_different_devices,
    each_device_has_its_own_memory,
    peers_can_reach_each_other,
    the_way_between_peers_is_described,
    an_unknown_attribute_of_a_way_is_refused,
    peer_access_is_enabled_and_disabled_in_turn,
    peer_access_is_of_one_direction,
    a_peer_copy_needs_no_access,
    a_peer_copy_works_from_either_side,
    a_peer_copy_within_one_device_keeps_to_its_memory,
    a_peer_copy_works_with_access,
    a_device_copy_crosses_with_access,
    a_kernel_writes_to_a_peer_with_access,
    an_event_is_not_recorded_on_another_devices_stream,
    a_stream_waits_for_another_devices_event,
    another_devices_objects_are_used_and_freed,
    a_span_over_another_devices_memory_is_that_devices,
    elapsed_time_between_devices_is_refused,
    a_kernel_is_not_launched_on_another_device,
    memory_is_created_on_the_other_device,
    a_mapping_is_seen_by_both_devices,
    a_mapping_is_seen_by_the_peer_alone,
    a_stream_tells_its_own_context_from_elsewhere,
    pinned_memory_serves_both_devices,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::PairProcess;
    a_kernel_that_writes_to_a_peer_without_access_loses_the_device,
    a_device_copy_crosses_without_access,
    a_fill_of_a_peers_memory_is_refused,
    a_copy_to_a_peers_memory_works,
    a_mapping_without_the_other_devices_access_is_refused,
    a_lost_device_takes_the_other_along,
    a_lost_device_takes_along_what_was_not_open,
    a_lost_process_is_not_mended_by_closing,
    another_devices_default_stream_is_not_reached,
    freeing_waits_for_a_peers_copies,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("a driver follows the handle of a context");
    a_peer_copy_between_unknown_contexts_is_refused,
    peer_access_to_an_unknown_context_is_refused,
];

/// Both devices; the first is current.
fn both(on: &Subject) -> [Bound<'_>; 2] {
    let second = on.bind_device(1);
    let first = on.bind_device(0);
    [first, second]
}

fn two_devices_have_two_contexts(on: &Subject) {
    let [first, second] = both(on);
    assert_ne!(first.context, second.context);
    assert_eq!(first.ctx_get_device(), Ok(0));
    second.make_current();
    assert_eq!(second.ctx_get_device(), Ok(1));
}

fn threads_hold_different_devices(on: &Subject) {
    let [first, second] = both(on);
    let other = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            // SAFETY: retained by the thread that waits for this one.
            unsafe { on.driver.ctx_set_current(second.context) }.unwrap();
            on.driver.ctx_get_device()
        });
        other.join().unwrap()
    });
    assert_eq!((first.ctx_get_device(), other), (Ok(0), Ok(1)));
}

fn each_device_has_its_own_memory(on: &Subject) {
    let [first, second] = both(on);
    second.make_current();
    let (before, _) = second.mem_get_info().unwrap();
    first.make_current();
    let memory = first.alloc(256 << 20);
    second.make_current();
    assert!(second.mem_get_info().unwrap().0 > before.saturating_sub(64 << 20));
    first.make_current();
    drop(memory);
}

fn peers_can_reach_each_other(on: &Subject) {
    assert_eq!(on.driver.device_can_access_peer(0, 1), Ok(true));
    assert_eq!(on.driver.device_can_access_peer(1, 0), Ok(true));
}

fn the_way_between_peers_is_described(on: &Subject) {
    for (from, to) in [(0, 1), (1, 0)] {
        let of = |which| on.driver.device_get_p2p_attribute(which, from, to).unwrap();
        assert_eq!(of(PeerAttribute::ACCESS_SUPPORTED), 1);
        assert!(of(PeerAttribute::PERFORMANCE_RANK) >= 0);
        assert!((0..=1).contains(&of(PeerAttribute::NATIVE_ATOMIC_SUPPORTED)));
    }
}

fn an_unknown_attribute_of_a_way_is_refused(on: &Subject) {
    for which in [0, 0x00FF_FFFF] {
        let answer = on.driver.device_get_p2p_attribute(PeerAttribute(which), 0, 1);
        refused(answer, ErrorCode::INVALID_VALUE);
    }
}

fn peer_access_is_enabled_and_disabled_in_turn(on: &Subject) {
    let [first, second] = both(on);
    let unasked = first.ctx_disable_peer_access(second.context);
    refused(unasked, ErrorCode::PEER_ACCESS_NOT_ENABLED);
    for _ in 0..3 {
        assert_eq!(first.ctx_enable_peer_access(second.context), Ok(()));
        let twice = first.ctx_enable_peer_access(second.context);
        refused(twice, ErrorCode::PEER_ACCESS_ALREADY_ENABLED);
        assert_eq!(first.ctx_disable_peer_access(second.context), Ok(()));
        let twice = first.ctx_disable_peer_access(second.context);
        refused(twice, ErrorCode::PEER_ACCESS_NOT_ENABLED);
    }
}

fn peer_access_is_of_one_direction(on: &Subject) {
    let [first, second] = both(on);
    first.ctx_enable_peer_access(second.context).unwrap();
    second.make_current();
    let back = second.ctx_disable_peer_access(first.context);
    refused(back, ErrorCode::PEER_ACCESS_NOT_ENABLED);
    assert_eq!(second.ctx_enable_peer_access(first.context), Ok(()));
}

/// Bytes on device 0, room for them on device 1, and a copy between. Device 0 is current.
fn crossing(
    [first, second]: &[Bound<'_>; 2],
    copy: impl FnOnce(PeerCopy) -> cuda_driver::DriverResult<()>,
) {
    second.make_current();
    let far = second.alloc(5000);
    first.make_current();
    let near = first.alloc(5000);
    first.write(*near, &pattern(1, 5000));
    let answer = copy(PeerCopy {
        destination: *far,
        destination_context: second.context,
        source: *near,
        source_context: first.context,
        bytes: 5000,
    });
    assert_eq!(answer, Ok(()));
    first.make_current();
    first.ctx_synchronize().unwrap();
    second.make_current();
    second.ctx_synchronize().unwrap();
    assert!(second.read(*far, 5000) == pattern(1, 5000));
    first.make_current();
}

fn a_peer_copy_needs_no_access(on: &Subject) {
    let both = both(on);
    crossing(&both, |copy| both[0].memcpy_peer_async(copy, *both[0].stream()));
}

fn a_peer_copy_works_from_either_side(on: &Subject) {
    let both = both(on);
    crossing(&both, |copy| {
        both[1].make_current();
        both[1].memcpy_peer_async(copy, *both[1].stream())
    });
}

fn a_peer_copy_works_with_access(on: &Subject) {
    let both = both(on);
    both[0].ctx_enable_peer_access(both[1].context).unwrap();
    crossing(&both, |copy| both[0].memcpy_peer_async(copy, 0));
}

fn a_device_copy_crosses_with_access(on: &Subject) {
    let both = both(on);
    both[0].ctx_enable_peer_access(both[1].context).unwrap();
    crossing(&both, |copy| both[0].memcpy_dtod_async(copy.destination, copy.source, copy.bytes, 0));
}

fn a_device_copy_crosses_without_access(on: &Subject) {
    let both = both(on);
    crossing(&both, |copy| both[0].memcpy_dtod_async(copy.destination, copy.source, copy.bytes, 0));
}

/// A copy from `source` to `destination` within the device of `bound`.
fn within(bound: &Bound<'_>, destination: u64, source: u64, bytes: u64) -> PeerCopy {
    let context = bound.context;
    PeerCopy { destination, destination_context: context, source, source_context: context, bytes }
}

fn a_peer_copy_within_one_device_keeps_to_its_memory(on: &Subject) {
    let [first, _second] = both(on);
    let (from, to) = (first.alloc(4 << 20), first.alloc(8 << 20));
    first.write(*from, &pattern(2, 500));
    assert_eq!(first.memcpy_peer_async(within(&first, *to, *from, 500), 0), Ok(()));
    assert!(first.read(*to, 500) == pattern(2, 500));
    assert_eq!(first.memcpy_peer_async(within(&first, *to, *to, 0), 0), Ok(()));
    let copy = within(&first, *to, *from, (4 << 20) + 1);
    refused(first.memcpy_peer_async(copy, 0), ErrorCode::INVALID_VALUE);
}

/// Launches the test kernel of device 0 so that it writes at `address`.
fn write_at(first: &Bound<'_>, address: u64) {
    let module = first.module_load_data(kernel::PTX, &mut String::new()).unwrap();
    let function = first.module_get_function(module, kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(address).arg(5u32).arg(64u32);
    first.launch_kernel(function, &LaunchConfig::linear(1, 64), &args, 0).unwrap();
    if first.ctx_synchronize().is_ok() {
        first.module_unload(module).unwrap();
    }
}

fn a_kernel_writes_to_a_peer_with_access(on: &Subject) {
    let [first, second] = both(on);
    first.ctx_enable_peer_access(second.context).unwrap();
    second.make_current();
    let far = second.alloc(256);
    first.make_current();
    write_at(&first, *far);
    second.make_current();
    assert!(second.read(*far, 256) == kernel::written(5, 64));
}

fn a_kernel_that_writes_to_a_peer_without_access_loses_the_device(on: &Subject) {
    let [first, second] = both(on);
    second.make_current();
    let far = second.alloc(256);
    first.make_current();
    first.expect_loss();
    second.expect_loss();
    write_at(&first, *far);
    refused(first.ctx_synchronize(), ErrorCode::ILLEGAL_ADDRESS);
}

fn a_fill_of_a_peers_memory_is_refused(on: &Subject) {
    let [first, second] = both(on);
    second.make_current();
    let far = second.alloc(256);
    first.make_current();
    refused(first.memset_d8_async(*far, 5, 256, 0), ErrorCode::INVALID_VALUE);
    first.ctx_enable_peer_access(second.context).unwrap();
    assert_eq!(first.memset_d8_async(*far, 5, 256, 0), Ok(()));
    assert_eq!(first.ctx_synchronize(), Ok(()));
    second.make_current();
    assert_eq!(second.read(*far, 256), [5; 256]);
}

fn a_copy_to_a_peers_memory_works(on: &Subject) {
    let [first, second] = both(on);
    second.make_current();
    let far = second.alloc(256);
    first.make_current();
    first.write(*far, &pattern(3, 256));
    assert!(first.read(*far, 256) == pattern(3, 256));
    second.make_current();
}

fn an_event_is_not_recorded_on_another_devices_stream(on: &Subject) {
    let [first, second] = both(on);
    let stream = first.stream();
    second.make_current();
    let event = second.event();
    refused(second.event_record(*event, *stream), ErrorCode::INVALID_HANDLE);
}

fn a_stream_waits_for_another_devices_event(on: &Subject) {
    let [first, second] = both(on);
    second.make_current();
    let (held, event) = (second.stream(), second.event());
    let stall = second.stall(*held);
    second.event_record(*event, *held).unwrap();
    first.make_current();
    let (stream, memory) = (first.stream(), first.alloc(64));
    assert_eq!(first.stream_wait_event(*stream, *event), Ok(()));
    first.memset_d8_async(*memory, 1, 64, *stream).unwrap();
    assert_eq!(first.stream_query(*stream), Ok(false));
    second.make_current();
    stall.release();
    first.make_current();
    assert_eq!(first.stream_synchronize(*stream), Ok(()));
}

fn another_devices_objects_are_used_and_freed(on: &Subject) {
    let [first, second] = both(on);
    let (stream, memory, event) = (first.stream(), first.alloc(64), first.event());
    let freed = first.mem_alloc(4096).unwrap();
    second.make_current();
    assert_eq!(second.memset_d8_async(*memory, 4, 64, *stream), Ok(()));
    assert_eq!(second.event_record(*event, *stream), Ok(()));
    assert_eq!(second.event_synchronize(*event), Ok(()));
    assert_eq!(second.event_query(*event), Ok(true));
    assert_eq!(second.stream_synchronize(*stream), Ok(()));
    assert_eq!(second.stream_query(*stream), Ok(true));
    assert_eq!(second.mem_free(freed), Ok(()));
    first.make_current();
    assert_eq!(first.read(*memory, 64), [4; 64]);
}

fn elapsed_time_between_devices_is_refused(on: &Subject) {
    let [first, second] = both(on);
    let start = first.timer();
    first.event_record(*start, 0).unwrap();
    first.event_synchronize(*start).unwrap();
    second.make_current();
    let end = second.timer();
    second.event_record(*end, 0).unwrap();
    second.event_synchronize(*end).unwrap();
    refused(second.event_elapsed_time(*start, *end), ErrorCode::INVALID_HANDLE);
}

fn a_kernel_is_not_launched_on_another_device(on: &Subject) {
    let [first, second] = both(on);
    second.make_current();
    let stream = second.stream();
    first.make_current();
    let (module, memory) = (first.module(), first.alloc(256));
    let function = first.module_get_function(*module, kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(*memory).arg(5u32).arg(64u32);
    let config = LaunchConfig::linear(1, 64);
    let answer = first.launch_kernel(function, &config, &args, *stream);
    refused(answer, ErrorCode::INVALID_HANDLE);
    second.make_current();
    let answer = second.launch_kernel(function, &config, &args, 0);
    refused(answer, ErrorCode::INVALID_HANDLE);
    first.make_current();
}

fn memory_is_created_on_the_other_device(on: &Subject) {
    let [first, _second] = both(on);
    let prop = AllocationProp::on(1);
    let handle = first.mem_create(first.page(), prop).unwrap();
    assert_eq!(first.mem_release(handle), Ok(()));
}

/// A page of device 0, with access of `devices`.
fn shared(first: &Bound<'_>, devices: &[i32], check: impl FnOnce(u64)) {
    let (range, handle) = (first.range(1), first.physical(1));
    range.map(0, 1, *handle).unwrap();
    let access: Vec<_> = devices.iter().map(|&device| AccessDesc { device }).collect();
    first.mem_set_access(range.base, range.bytes, &access).unwrap();
    check(range.base);
    first.make_current();
}

fn a_mapping_is_seen_by_both_devices(on: &Subject) {
    let [first, second] = both(on);
    shared(&first, &[0, 1], |address| {
        second.make_current();
        second.write(address, &pattern(7, 500));
        first.make_current();
        assert!(first.read(address, 500) == pattern(7, 500));
    });
}

fn a_mapping_is_seen_by_the_peer_alone(on: &Subject) {
    let [first, second] = both(on);
    shared(&first, &[1], |address| {
        second.make_current();
        second.write(address, &pattern(8, 500));
        assert!(second.read(address, 500) == pattern(8, 500));
    });
}

fn a_mapping_without_the_other_devices_access_is_refused(on: &Subject) {
    let [first, second] = both(on);
    shared(&first, &[0], |address| {
        second.make_current();
        refused(second.memset_d8_async(address, 0, 64, 0), ErrorCode::INVALID_VALUE);
    });
}

fn a_stream_tells_its_own_context_from_elsewhere(on: &Subject) {
    let [first, second] = both(on);
    let stream = first.stream();
    second.make_current();
    assert_eq!(second.stream_get_ctx(*stream), Ok(first.context));
    assert_eq!(second.stream_get_ctx(0), Ok(second.context));
    first.make_current();
}

/// With unified addressing every pinned allocation is portable.
fn pinned_memory_serves_both_devices(on: &Subject) {
    for flags in [HostAllocFlags::CACHED, HostAllocFlags::default()] {
        let [first, second] = both(on);
        let host = first.mem_host_alloc(4096, flags).unwrap();
        first.memset_d8_async(host, 6, 4096, 0).unwrap();
        first.ctx_synchronize().unwrap();
        second.make_current();
        let far = second.alloc(4096);
        assert_eq!(second.mem_host_get_device_pointer(host), Ok(host));
        assert_eq!(second.memcpy_htod_async(*far, host, 4096, 0), Ok(()));
        assert_eq!(second.read(*far, 4096), [6; 4096]);
        drop(far);
        first.make_current();
        first.mem_free_host(host).unwrap();
    }
}

/// The copies run in a stream of the device that does not hold the freed memory.
fn freeing_waits_for_a_peers_copies(on: &Subject) {
    const BYTES: u64 = 64 << 20;
    let [first, second] = both(on);
    let near = first.mem_alloc(BYTES).unwrap();
    first.memset_d8_async(near, 3, BYTES, 0).unwrap();
    first.ctx_synchronize().unwrap();
    second.make_current();
    let (far, stream) = (second.alloc(BYTES), second.stream());
    let copy = PeerCopy {
        destination: *far,
        destination_context: second.context,
        source: near,
        source_context: first.context,
        bytes: BYTES,
    };
    for _ in 0..32 {
        second.memcpy_peer_async(copy, *stream).unwrap();
    }
    first.make_current();
    first.mem_free(near).unwrap();
    second.make_current();
    assert_eq!(second.stream_query(*stream), Ok(true), "freed under the copies");
}

fn a_lost_device_takes_the_other_along(on: &Subject) {
    let [first, second] = both(on);
    first.expect_loss();
    write_at(&first, 0x1000);
    refused(first.ctx_synchronize(), ErrorCode::ILLEGAL_ADDRESS);
    second.expect_loss();
    second.make_current();
    refused(second.mem_alloc(64), ErrorCode::ILLEGAL_ADDRESS);
    refused(second.ctx_synchronize(), ErrorCode::ILLEGAL_ADDRESS);
}

fn a_lost_device_takes_along_what_was_not_open(on: &Subject) {
    let first = on.bind();
    first.expect_loss();
    write_at(&first, 0x1000);
    refused(first.ctx_synchronize(), ErrorCode::ILLEGAL_ADDRESS);
    refused(on.driver.device_primary_ctx_retain(1), ErrorCode::ILLEGAL_ADDRESS);
}

fn a_lost_process_is_not_mended_by_closing(on: &Subject) {
    let [first, second] = both(on);
    first.expect_loss();
    write_at(&first, 0x1000);
    refused(first.ctx_synchronize(), ErrorCode::ILLEGAL_ADDRESS);
    second.expect_loss();
    drop((first, second));
    refused(on.driver.device_primary_ctx_retain(1), ErrorCode::ILLEGAL_ADDRESS);
    refused(on.driver.device_primary_ctx_retain(0), ErrorCode::ILLEGAL_ADDRESS);
}

/// Stream 0 is of the current device, whoever's memory it works on.
fn another_devices_default_stream_is_not_reached(on: &Subject) {
    let [first, second] = both(on);
    let stall = first.stall(0);
    second.make_current();
    assert_eq!(second.stream_query(0), Ok(true));
    first.make_current();
    stall.release();
}

fn a_peer_copy_between_unknown_contexts_is_refused(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(64);
    let copy = PeerCopy { source_context: 0xBAD, ..within(&bound, *memory, *memory, 64) };
    refused(bound.memcpy_peer_async(copy, 0), ErrorCode::INVALID_CONTEXT);
}

/// What the driver says of an address.
fn looked_up(device: &Device, address: u64, bytes: u64) -> Result<DeviceSpan, ResidencyError> {
    // SAFETY: nothing is enqueued with the span.
    unsafe { DeviceSpan::of_device(device, address, bytes) }
}

fn peer_access_to_an_unknown_context_is_refused(on: &Subject) {
    refused(on.bind().ctx_enable_peer_access(0xBAD), ErrorCode::INVALID_CONTEXT);
}

fn a_span_over_another_devices_memory_is_that_devices(on: &Subject) {
    let [first, second] = [0, 1].map(|n| Device::open(Arc::clone(&on.driver), n).unwrap());
    let memory = DeviceBuffer::alloc(&second, 4096).unwrap();
    let address = memory.span().address();
    assert_eq!(looked_up(&second, address, 4096).unwrap(), memory.span());
    assert_eq!(
        looked_up(&first, address, 4096),
        Err(ResidencyError::OtherDevice { address, device: 0, found: 1 })
    );
}
