//! Streams: order, waiting, and the legacy default stream.

use cuda_driver::ErrorCode;

use super::{Case, Needs, Subject, cases, refused};

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    a_stream_without_work_is_idle,
    the_default_stream_has_a_second_name,
    a_stream_tells_its_context,
    a_stalled_stream_is_idle_once_it_is_released,
    work_of_one_stream_runs_in_order,
    a_destroyed_stream_still_runs_its_work,
    independent_streams_do_not_wait_nor_for_the_default_stream,
    the_default_stream_and_blocking_ones_wait_for_each_other,
    many_streams_can_live_at_once,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    the_default_stream_cannot_be_destroyed,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("a driver follows the handle of a stream");
    a_number_that_is_no_stream_is_refused,
    a_destroyed_stream_is_refused,
];

fn a_stream_without_work_is_idle(on: &Subject) {
    let bound = on.bind();
    let (stream, blocking) = (bound.stream(), bound.blocking_stream());
    for stream in [*stream, *blocking, 0] {
        assert_eq!(bound.stream_query(stream), Ok(true));
        assert_eq!(bound.stream_synchronize(stream), Ok(()));
    }
}

fn the_default_stream_has_a_second_name(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(64);
    bound.memset_d8_async(*memory, 4, 64, 1).unwrap();
    assert_eq!(bound.stream_synchronize(1), Ok(()));
    assert_eq!(bound.read(*memory, 64), [4; 64]);
}

fn a_stream_tells_its_context(on: &Subject) {
    let bound = on.bind();
    let (stream, blocking) = (bound.stream(), bound.blocking_stream());
    for stream in [*stream, *blocking, 0] {
        assert_eq!(bound.stream_get_ctx(stream), Ok(bound.context));
    }
}

fn a_stalled_stream_is_idle_once_it_is_released(on: &Subject) {
    let bound = on.bind();
    let stream = bound.stream();
    let stall = bound.stall(*stream);
    assert_eq!(bound.stream_query(*stream), Ok(false));
    stall.release();
    assert_eq!(bound.stream_synchronize(*stream), Ok(()));
    assert_eq!(bound.stream_query(*stream), Ok(true));
}

fn work_of_one_stream_runs_in_order(on: &Subject) {
    let bound = on.bind();
    let (stream, memory, copy) = (bound.stream(), bound.alloc(1 << 20), bound.alloc(1 << 20));
    for byte in 1..=9 {
        bound.memset_d8_async(*memory, byte, 1 << 20, *stream).unwrap();
        bound.memcpy_dtod_async(*copy, *memory, 1 << 20, *stream).unwrap();
    }
    bound.memset_d8_async(*memory, 0, 1 << 20, *stream).unwrap();
    bound.stream_synchronize(*stream).unwrap();
    assert!(bound.read(*copy, 1 << 20).iter().all(|&byte| byte == 9));
}

fn a_destroyed_stream_still_runs_its_work(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(64);
    bound.write(*memory, &[0; 64]);
    let stream = bound.stream_create(false).unwrap();
    let stall = bound.stall(stream);
    bound.memset_d8_async(*memory, 8, 64, stream).unwrap();
    assert_eq!(bound.stream_destroy(stream), Ok(()));
    stall.release();
    bound.ctx_synchronize().unwrap();
    assert_eq!(bound.read(*memory, 64), [8; 64]);
}

fn independent_streams_do_not_wait_nor_for_the_default_stream(on: &Subject) {
    let bound = on.bind();
    let (one, other, memory) = (bound.stream(), bound.stream(), bound.alloc(64));
    for (held, free) in [(*one, *other), (*one, 0), (0, *one)] {
        let stall = bound.stall(held);
        bound.memset_d8_async(*memory, 1, 64, free).unwrap();
        assert_eq!(bound.stream_synchronize(free), Ok(()));
        assert_eq!(bound.stream_query(held), Ok(false));
        stall.release();
        bound.ctx_synchronize().unwrap();
    }
}

fn the_default_stream_and_blocking_ones_wait_for_each_other(on: &Subject) {
    let bound = on.bind();
    let (blocking, memory) = (bound.blocking_stream(), bound.alloc(64));
    for (held, waiting) in [(*blocking, 0), (0, *blocking)] {
        let stall = bound.stall(held);
        bound.memset_d8_async(*memory, 1, 64, waiting).unwrap();
        assert_eq!(bound.stream_query(waiting), Ok(false));
        stall.release();
        assert_eq!(bound.stream_query(waiting), Ok(true));
    }
}

fn many_streams_can_live_at_once(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(200);
    let streams: Vec<_> = (0..200).map(|_| bound.stream()).collect();
    for (i, stream) in streams.iter().enumerate() {
        bound.memset_d8_async(*memory + i as u64, i as u8, 1, **stream).unwrap();
    }
    bound.ctx_synchronize().unwrap();
    assert_eq!(bound.read(*memory, 200), (0..200).collect::<Vec<u8>>());
}

fn the_default_stream_cannot_be_destroyed(on: &Subject) {
    let bound = on.bind();
    refused(bound.stream_destroy(0), ErrorCode::INVALID_HANDLE);
    assert_eq!(bound.stream_synchronize(0), Ok(()));
}

fn a_number_that_is_no_stream_is_refused(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(64);
    refused(bound.stream_query(0xBAD), ErrorCode::INVALID_HANDLE);
    refused(bound.stream_synchronize(0xBAD), ErrorCode::INVALID_HANDLE);
    refused(bound.stream_get_ctx(0xBAD), ErrorCode::INVALID_HANDLE);
    refused(bound.memset_d8_async(*memory, 0, 64, 0xBAD), ErrorCode::INVALID_HANDLE);
}

fn a_destroyed_stream_is_refused(on: &Subject) {
    let bound = on.bind();
    let stream = bound.stream_create(false).unwrap();
    bound.stream_destroy(stream).unwrap();
    refused(bound.stream_query(stream), ErrorCode::INVALID_HANDLE);
    refused(bound.stream_destroy(stream), ErrorCode::INVALID_HANDLE);
}
