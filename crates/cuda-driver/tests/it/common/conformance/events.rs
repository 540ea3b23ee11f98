//! Events: completion, waits between streams, and elapsed time.

use cuda_driver::ErrorCode;

use super::{Case, Needs, Subject, cases, refused};

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    an_event_never_recorded_is_complete,
    a_recorded_event_completes,
    an_event_is_recorded_on_the_default_stream,
    an_event_behind_a_stall_is_not_complete,
    an_event_before_a_stall_is_complete,
    a_second_record_replaces_the_first,
    a_wait_holds_the_other_stream,
    a_wait_takes_the_record_of_its_time,
    a_stream_may_wait_for_its_own_event,
    an_event_may_be_destroyed_while_it_is_pending,
    a_destroyed_event_still_orders_its_waiters,
    elapsed_time_is_between_two_recorded_timers,
    elapsed_time_is_not_ready_before_the_end,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    the_null_event_is_refused,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("a driver follows the handle of an event");
    a_number_that_is_no_event_is_refused,
    a_destroyed_event_is_refused,
];

fn an_event_never_recorded_is_complete(on: &Subject) {
    let bound = on.bind();
    let (stream, event) = (bound.stream(), bound.event());
    assert_eq!(bound.event_query(*event), Ok(true));
    assert_eq!(bound.event_query(*bound.timer()), Ok(true));
    assert_eq!(bound.event_synchronize(*event), Ok(()));
    assert_eq!(bound.stream_wait_event(*stream, *event), Ok(()));
    assert_eq!(bound.stream_synchronize(*stream), Ok(()));
}

fn a_recorded_event_completes(on: &Subject) {
    let bound = on.bind();
    let (stream, event, memory) = (bound.stream(), bound.event(), bound.alloc(64));
    bound.memset_d8_async(*memory, 1, 64, *stream).unwrap();
    bound.event_record(*event, *stream).unwrap();
    assert_eq!(bound.event_synchronize(*event), Ok(()));
    assert_eq!(bound.event_query(*event), Ok(true));
    assert_eq!(bound.stream_query(*stream), Ok(true));
}

fn an_event_is_recorded_on_the_default_stream(on: &Subject) {
    let bound = on.bind();
    let event = bound.event();
    assert_eq!(bound.event_record(*event, 0), Ok(()));
    assert_eq!(bound.event_synchronize(*event), Ok(()));
}

fn an_event_behind_a_stall_is_not_complete(on: &Subject) {
    let bound = on.bind();
    let (stream, event) = (bound.stream(), bound.event());
    let stall = bound.stall(*stream);
    bound.event_record(*event, *stream).unwrap();
    assert_eq!(bound.event_query(*event), Ok(false));
    stall.release();
    assert_eq!(bound.event_query(*event), Ok(true));
}

fn an_event_before_a_stall_is_complete(on: &Subject) {
    let bound = on.bind();
    let (stream, event) = (bound.stream(), bound.event());
    bound.event_record(*event, *stream).unwrap();
    bound.stream_synchronize(*stream).unwrap();
    let stall = bound.stall(*stream);
    assert_eq!(bound.event_query(*event), Ok(true));
    assert_eq!(bound.event_synchronize(*event), Ok(()));
    stall.release();
}

fn a_second_record_replaces_the_first(on: &Subject) {
    let bound = on.bind();
    let (stream, event) = (bound.stream(), bound.event());
    bound.event_record(*event, *stream).unwrap();
    bound.event_synchronize(*event).unwrap();
    let stall = bound.stall(*stream);
    bound.event_record(*event, *stream).unwrap();
    assert_eq!(bound.event_query(*event), Ok(false));
    stall.release();
}

fn a_wait_holds_the_other_stream(on: &Subject) {
    let bound = on.bind();
    let (writer, waiter, event, memory) =
        (bound.stream(), bound.stream(), bound.event(), bound.alloc(64));
    let stall = bound.stall(*writer);
    bound.memset_d8_async(*memory, 1, 64, *writer).unwrap();
    bound.event_record(*event, *writer).unwrap();
    bound.stream_wait_event(*waiter, *event).unwrap();
    bound.memset_d8_async(*memory, 2, 64, *waiter).unwrap();
    assert_eq!(bound.stream_query(*waiter), Ok(false));
    stall.release();
    bound.ctx_synchronize().unwrap();
    assert_eq!(bound.read(*memory, 64), [2; 64]);
}

fn a_wait_takes_the_record_of_its_time(on: &Subject) {
    let bound = on.bind();
    let (held, waiter, event, memory) =
        (bound.stream(), bound.stream(), bound.event(), bound.alloc(64));
    bound.event_record(*event, *held).unwrap();
    bound.stream_wait_event(*waiter, *event).unwrap();
    bound.stream_synchronize(*held).unwrap();
    let stall = bound.stall(*held);
    bound.event_record(*event, *held).unwrap();
    bound.memset_d8_async(*memory, 2, 64, *waiter).unwrap();
    assert_eq!(bound.stream_synchronize(*waiter), Ok(()));
    assert_eq!(bound.event_query(*event), Ok(false));
    stall.release();
}

fn a_stream_may_wait_for_its_own_event(on: &Subject) {
    let bound = on.bind();
    let (stream, event) = (bound.stream(), bound.event());
    bound.event_record(*event, *stream).unwrap();
    assert_eq!(bound.stream_wait_event(*stream, *event), Ok(()));
    assert_eq!(bound.stream_synchronize(*stream), Ok(()));
}

fn an_event_may_be_destroyed_while_it_is_pending(on: &Subject) {
    let bound = on.bind();
    let stream = bound.stream();
    let event = bound.event_create(false).unwrap();
    let stall = bound.stall(*stream);
    bound.event_record(event, *stream).unwrap();
    assert_eq!(bound.event_destroy(event), Ok(()));
    assert_eq!(bound.stream_query(*stream), Ok(false), "destroying waited");
    stall.release();
    assert_eq!(bound.stream_synchronize(*stream), Ok(()));
}

fn a_destroyed_event_still_orders_its_waiters(on: &Subject) {
    let bound = on.bind();
    let (held, waiter, memory) = (bound.stream(), bound.stream(), bound.alloc(64));
    let event = bound.event_create(false).unwrap();
    let stall = bound.stall(*held);
    bound.event_record(event, *held).unwrap();
    bound.stream_wait_event(*waiter, event).unwrap();
    bound.event_destroy(event).unwrap();
    bound.memset_d8_async(*memory, 1, 64, *waiter).unwrap();
    assert_eq!(bound.stream_query(*waiter), Ok(false));
    stall.release();
    assert_eq!(bound.stream_synchronize(*waiter), Ok(()));
}

fn elapsed_time_is_between_two_recorded_timers(on: &Subject) {
    let bound = on.bind();
    let (stream, memory) = (bound.stream(), bound.alloc(16 << 20));
    let (start, end, unrecorded) = (bound.timer(), bound.timer(), bound.timer());
    bound.event_record(*start, *stream).unwrap();
    bound.memset_d8_async(*memory, 1, 16 << 20, *stream).unwrap();
    bound.event_record(*end, *stream).unwrap();
    bound.event_synchronize(*end).unwrap();
    let elapsed_ms = bound.event_elapsed_time(*start, *end).unwrap();
    assert!(elapsed_ms.is_finite() && elapsed_ms >= 0.0, "{elapsed_ms}");
    assert_eq!(bound.event_elapsed_time(*start, *start), Ok(0.0));
    assert_eq!(bound.event_elapsed_time(*end, *start), Ok(-elapsed_ms));

    let plain = bound.event();
    bound.event_record(*plain, 0).unwrap();
    bound.event_synchronize(*plain).unwrap();
    for none in [&plain, &unrecorded] {
        refused(bound.event_elapsed_time(**none, *end), ErrorCode::INVALID_HANDLE);
        refused(bound.event_elapsed_time(*start, **none), ErrorCode::INVALID_HANDLE);
    }
}

fn elapsed_time_is_not_ready_before_the_end(on: &Subject) {
    let bound = on.bind();
    let (stream, start, end) = (bound.stream(), bound.timer(), bound.timer());
    bound.event_record(*start, *stream).unwrap();
    let stall = bound.stall(*stream);
    bound.event_record(*end, *stream).unwrap();
    refused(bound.event_elapsed_time(*start, *end), ErrorCode::NOT_READY);
    stall.release();
    assert!(bound.event_elapsed_time(*start, *end).unwrap() >= 0.0);
}

fn the_null_event_is_refused(on: &Subject) {
    let bound = on.bind();
    let stream = bound.stream();
    refused(bound.event_record(0, *stream), ErrorCode::INVALID_HANDLE);
    refused(bound.event_query(0), ErrorCode::INVALID_HANDLE);
    refused(bound.event_synchronize(0), ErrorCode::INVALID_HANDLE);
    refused(bound.stream_wait_event(*stream, 0), ErrorCode::INVALID_HANDLE);
    refused(bound.event_destroy(0), ErrorCode::INVALID_HANDLE);
    refused(bound.event_elapsed_time(0, 0), ErrorCode::INVALID_HANDLE);
}

fn a_number_that_is_no_event_is_refused(on: &Subject) {
    let bound = on.bind();
    refused(bound.event_query(0xBAD), ErrorCode::INVALID_HANDLE);
    refused(bound.event_record(0xBAD, 0), ErrorCode::INVALID_HANDLE);
    refused(bound.stream_wait_event(0, 0xBAD), ErrorCode::INVALID_HANDLE);
}

fn a_destroyed_event_is_refused(on: &Subject) {
    let bound = on.bind();
    let event = bound.event_create(false).unwrap();
    bound.event_destroy(event).unwrap();
    refused(bound.event_synchronize(event), ErrorCode::INVALID_HANDLE);
    refused(bound.event_destroy(event), ErrorCode::INVALID_HANDLE);
}
