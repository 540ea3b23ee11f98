//! Contexts: primary, current, and none at all.

use cuda_driver::{ErrorCode, HostAllocFlags};

use super::bound::Bound;
use super::{Case, Needs, Subject, cases, refused};
use crate::common::kernel;

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    a_new_thread_has_no_context,
    a_context_is_current_once_it_is_set_and_until_zero_is,
    the_current_context_is_the_threads_own,
    retaining_twice_gives_one_context,
    a_context_lives_until_its_last_release,
    a_release_too_many_is_refused,
    a_released_context_can_be_retained_anew,
    allocations_end_with_their_context,
    an_idle_context_synchronises,
    synchronising_waits_for_every_stream,
    a_context_is_not_its_own_peer,
];

pub(crate) const UNBOUND: &[Case] = cases![Needs::Device;
    unbound_calls_that_need_a_context_are_refused,
    unbound_virtual_memory_works,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    peer_access_to_no_context_is_refused,
    unbound_objects_can_be_destroyed,
    unbound_objects_can_be_used,
    unbound_pinned_memory_has_no_device_address,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("the handle is destroyed, and a driver follows it");
    a_destroyed_context_cannot_be_set,
    a_destroyed_context_that_is_current_is_told,
];

fn a_new_thread_has_no_context(on: &Subject) {
    let _bound = on.bind();
    let seen = std::thread::scope(|scope| scope.spawn(|| on.driver.ctx_get_current()).join());
    assert_eq!(seen.unwrap(), Ok(0));
}

fn a_context_is_current_once_it_is_set_and_until_zero_is(on: &Subject) {
    assert_eq!(on.driver.ctx_get_current(), Ok(0), "a case left its context");
    let bound = on.bind();
    assert_ne!(bound.context, 0);
    assert_eq!(bound.ctx_get_current(), Ok(bound.context));
    assert_eq!(bound.ctx_get_device(), Ok(0));
    bound.ctx_set_current(bound.context).unwrap();
    assert_eq!(bound.ctx_get_current(), Ok(bound.context));
    bound.ctx_set_current(0).unwrap();
    assert_eq!(bound.ctx_get_current(), Ok(0));
    bound.make_current();
}

fn the_current_context_is_the_threads_own(on: &Subject) {
    let bound = on.bind();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            // SAFETY: retained by the thread that waits for this one.
            unsafe { on.driver.ctx_set_current(bound.context) }.unwrap();
            on.driver.ctx_get_device()
        });
        assert_eq!(other.join().unwrap(), Ok(0));
        let third = scope.spawn(|| on.driver.ctx_get_current());
        assert_eq!(third.join().unwrap(), Ok(0));
    });
    assert_eq!(bound.ctx_get_current(), Ok(bound.context));
}

fn retaining_twice_gives_one_context(on: &Subject) {
    let bound = on.bind();
    assert_eq!(bound.device_primary_ctx_retain(0), Ok(bound.context));
    bound.device_primary_ctx_release(0).unwrap();
}

fn a_context_lives_until_its_last_release(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(4096);
    bound.device_primary_ctx_retain(0).unwrap();
    bound.device_primary_ctx_release(0).unwrap();
    bound.memset_d8_async(*memory, 7, 4096, 0).unwrap();
    assert_eq!(bound.read(*memory, 4096), [7; 4096]);
}

fn a_release_too_many_is_refused(on: &Subject) {
    drop(on.bind());
    // SAFETY: the context has ended, and nobody uses it.
    let answer = unsafe { on.driver.device_primary_ctx_release(0) };
    refused(answer, ErrorCode::INVALID_CONTEXT);
}

fn a_released_context_can_be_retained_anew(on: &Subject) {
    drop(on.bind());
    let bound = on.bind();
    let memory = bound.alloc(64);
    bound.memset_d8_async(*memory, 1, 64, 0).unwrap();
    assert_eq!(bound.read(*memory, 64), [1; 64]);
}

fn allocations_end_with_their_context(on: &Subject) {
    let bound = on.bind();
    let memory = bound.mem_alloc(4096).unwrap();
    drop(bound);
    let bound = on.bind();
    refused(bound.mem_free(memory), ErrorCode::INVALID_VALUE);
}

fn an_idle_context_synchronises(on: &Subject) {
    let bound = on.bind();
    assert_eq!([bound.ctx_synchronize(), bound.ctx_synchronize()], [Ok(()), Ok(())]);
}

fn synchronising_waits_for_every_stream(on: &Subject) {
    let bound = on.bind();
    let memory = [(); 3].map(|()| bound.alloc(1 << 20));
    let streams = [bound.stream(), bound.blocking_stream()];
    for (stream, memory) in [*streams[0], *streams[1], 0].into_iter().zip(&memory) {
        bound.memset_d8_async(**memory, 3, 1 << 20, stream).unwrap();
    }
    bound.ctx_synchronize().unwrap();
    for stream in [*streams[0], *streams[1], 0] {
        assert_eq!(bound.stream_query(stream), Ok(true));
    }
}

fn a_context_is_not_its_own_peer(on: &Subject) {
    let bound = on.bind();
    let enabled = bound.ctx_enable_peer_access(bound.context);
    refused(enabled, ErrorCode::PEER_ACCESS_UNSUPPORTED);
    let disabled = bound.ctx_disable_peer_access(bound.context);
    refused(disabled, ErrorCode::PEER_ACCESS_NOT_ENABLED);
}

fn peer_access_to_no_context_is_refused(on: &Subject) {
    let bound = on.bind();
    refused(bound.ctx_enable_peer_access(0), ErrorCode::INVALID_CONTEXT);
    refused(bound.ctx_disable_peer_access(0), ErrorCode::INVALID_CONTEXT);
}

/// Runs `case` with the context alive and not current.
fn unbound(on: &Subject, case: impl FnOnce(&Bound<'_>)) {
    let bound = on.bind();
    bound.ctx_set_current(0).unwrap();
    case(&bound);
    bound.make_current();
}

const NO_CONTEXT: ErrorCode = ErrorCode::INVALID_CONTEXT;

fn unbound_calls_that_need_a_context_are_refused(on: &Subject) {
    let outer = on.bind();
    let (memory, host) = (outer.alloc(64), outer.pinned(64));
    unbound(on, |bound| {
        refused(bound.ctx_get_device(), NO_CONTEXT);
        refused(bound.ctx_synchronize(), NO_CONTEXT);
        refused(bound.ctx_enable_peer_access(bound.context), NO_CONTEXT);
        refused(bound.stream_create(true), NO_CONTEXT);
        refused(bound.stream_create(false), NO_CONTEXT);
        refused(bound.event_create(true), NO_CONTEXT);
        refused(bound.mem_alloc(64), NO_CONTEXT);
        refused(bound.mem_get_info(), NO_CONTEXT);
        refused(bound.mem_host_alloc(64, HostAllocFlags::CACHED), NO_CONTEXT);
        refused(bound.module_load_data(kernel::PTX, &mut String::new()), NO_CONTEXT);
        refused(bound.memset_d8_async(*memory, 0, 64, 0), NO_CONTEXT);
        refused(bound.memcpy_htod_async(*memory, *host, 64, 0), NO_CONTEXT);
        refused(bound.memcpy_dtoh_async(*host, *memory, 64, 0), NO_CONTEXT);
        refused(bound.memcpy_dtod_async(*memory, *memory + 32, 32, 0), NO_CONTEXT);
        refused(bound.stream_query(0), NO_CONTEXT);
        refused(bound.stream_synchronize(0), NO_CONTEXT);
        refused(bound.stream_get_ctx(0), NO_CONTEXT);
    });
    outer.make_current();
}

fn unbound_virtual_memory_works(on: &Subject) {
    let driver = &on.driver;
    unbound(on, |bound| {
        let (page, prop) = (bound.page(), bound.prop());
        let base = driver.mem_address_reserve(page, 0, 0).unwrap();
        let handle = driver.mem_create(page, prop).unwrap();
        bound.mem_map(base, page, 0, handle).unwrap();
        driver.mem_set_access(base, page, &bound.access()).unwrap();
        driver.mem_unmap(base, page).unwrap();
        bound.mem_release(handle).unwrap();
        driver.mem_address_free(base, page).unwrap();
    });
}

fn unbound_objects_can_be_destroyed(on: &Subject) {
    let outer = on.bind();
    let memory = outer.mem_alloc(64).unwrap();
    let host = outer.mem_host_alloc(64, HostAllocFlags::CACHED).unwrap();
    let (stream, event) = (outer.stream_create(false).unwrap(), outer.event_create(true).unwrap());
    let module = outer.module_load_data(kernel::PTX, &mut String::new()).unwrap();
    unbound(on, |bound| {
        assert_eq!(bound.mem_free(memory), Ok(()));
        assert_eq!(bound.mem_free_host(host), Ok(()));
        assert_eq!(bound.stream_destroy(stream), Ok(()));
        assert_eq!(bound.event_destroy(event), Ok(()));
        assert_eq!(bound.module_unload(module), Ok(()));
    });
    outer.make_current();
}

fn unbound_pinned_memory_has_no_device_address(on: &Subject) {
    let outer = on.bind();
    let host = outer.pinned(64);
    unbound(on, |bound| refused(bound.mem_host_get_device_pointer(*host), NO_CONTEXT));
    outer.make_current();
}

fn unbound_objects_can_be_used(on: &Subject) {
    let outer = on.bind();
    let (stream, memory) = (outer.stream(), outer.alloc(64));
    let (event, module) = (outer.event(), outer.module());
    unbound(on, |bound| {
        assert_eq!(bound.memset_d8_async(*memory, 1, 64, *stream), Ok(()));
        assert_eq!(bound.stream_synchronize(*stream), Ok(()));
        assert_eq!(bound.stream_query(*stream), Ok(true));
        assert_eq!(bound.stream_get_ctx(*stream), Ok(bound.context));
        assert_eq!(bound.event_record(*event, *stream), Ok(()));
        assert_eq!(bound.event_synchronize(*event), Ok(()));
        assert_eq!(bound.event_query(*event), Ok(true));
        assert_eq!(bound.stream_wait_event(*stream, *event), Ok(()));
        assert!(bound.module_get_function(*module, kernel::NAME).is_ok());
    });
    outer.make_current();
}

fn a_destroyed_context_cannot_be_set(on: &Subject) {
    let context = on.bind().context;
    // SAFETY: the simulated device looks handles up.
    let answer = unsafe { on.driver.ctx_set_current(context) };
    refused(answer, ErrorCode::INVALID_CONTEXT);
}

fn a_destroyed_context_that_is_current_is_told(on: &Subject) {
    let context = on.driver.device_primary_ctx_retain(0).unwrap();
    // SAFETY: retained in the line before.
    unsafe { on.driver.ctx_set_current(context) }.unwrap();
    // SAFETY: the simulated device looks handles up.
    unsafe { on.driver.device_primary_ctx_release(0) }.unwrap();
    refused(on.driver.mem_alloc(64), ErrorCode::CONTEXT_IS_DESTROYED);
    // SAFETY: 0 unbinds.
    unsafe { on.driver.ctx_set_current(0) }.unwrap();
}
