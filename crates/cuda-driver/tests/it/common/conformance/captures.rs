//! What a thread may do while it captures a stream.

use cuda_driver::{DriverError, DriverResult, ErrorCode, HostAllocFlags, HostRegisterFlags};

use super::bound::Bound;
use super::registered::Pages;
use super::{Case, Needs, Subject, cases, refused};

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    a_call_that_may_wait_ends_the_capture_of_its_thread,
    a_call_that_waits_for_nothing_leaves_a_capture_alone,
    a_refused_call_ends_every_capture_of_its_thread,
    the_default_stream_is_not_used_while_a_stream_is_captured_that_waits_for_it,
];

const UNSUPPORTED: ErrorCode = ErrorCode::STREAM_CAPTURE_UNSUPPORTED;
const INVALIDATED: ErrorCode = ErrorCode::STREAM_CAPTURE_INVALIDATED;

/// What calls answered during a capture, and its end after each.
struct Answers<'b> {
    bound: &'b Bound<'b>,
    expected: (Result<(), ErrorCode>, Result<(), ErrorCode>),
    /// The calls that answered something else, with what they answered.
    wrong: Vec<String>,
}

impl<'b> Answers<'b> {
    fn new(bound: &'b Bound<'b>, expected: (Result<(), ErrorCode>, Result<(), ErrorCode>)) -> Self {
        Self { bound, expected, wrong: Vec::new() }
    }

    /// Makes a call while a stream is captured.
    fn of<T>(&mut self, name: &str, call: impl FnOnce() -> DriverResult<T>) -> DriverResult<T> {
        let stream = self.bound.stream();
        self.bound.stream_begin_capture(*stream).unwrap();
        let answer = call();
        let end = self.bound.stream_end_capture(*stream);
        let code = |error: DriverError| error.code;
        let seen = (
            answer.as_ref().map(|_| ()).map_err(|error| error.code),
            end.map(|graph| self.bound.graph_destroy(graph).unwrap()).map_err(code),
        );
        if seen != self.expected {
            self.wrong
                .push(format!("{name} answered {:?}, the end of the capture {:?}", seen.0, seen.1));
        }
        answer
    }

    #[track_caller]
    fn check(self) {
        let Self { expected, wrong, .. } = self;
        assert!(wrong.is_empty(), "expected {expected:?}, but\n{}", wrong.join("\n"));
    }
}

fn a_call_that_may_wait_ends_the_capture_of_its_thread(on: &Subject) {
    const FLAGS: HostAllocFlags = HostAllocFlags::CACHED;
    const SHARED: HostRegisterFlags = HostRegisterFlags::SHARED;
    let bound = on.bind();
    let (other, event, graph) = (bound.stream(), bound.event(), bound.graph());
    bound.event_record(*event, *other).unwrap();
    bound.event_synchronize(*event).unwrap();
    let memory = bound.mem_alloc(64).unwrap();
    let host = bound.mem_host_alloc(64, FLAGS).unwrap();
    let pages = [Pages::new(1), Pages::new(1)];
    bound.mem_host_register(pages[0].at(0), 4096, SHARED).unwrap();
    let mut answers = Answers::new(&bound, (Err(UNSUPPORTED), Err(INVALIDATED)));
    let allocated = answers.of("cuMemAlloc", || bound.mem_alloc(64));
    let freed = answers.of("cuMemFree", || bound.mem_free(memory));
    let pinned = answers.of("cuMemHostAlloc", || bound.mem_host_alloc(64, FLAGS));
    let unpinned = answers.of("cuMemFreeHost", || bound.mem_free_host(host));
    let (first, second) = (pages[0].at(0), pages[1].at(0));
    let unregistered = answers.of("cuMemHostUnregister", || bound.mem_host_unregister(first));
    let registered =
        answers.of("cuMemHostRegister", || bound.mem_host_register(second, 4096, SHARED));
    let _ = answers.of("cuEventQuery", || bound.event_query(*event));
    let _ = answers.of("cuEventSynchronize", || bound.event_synchronize(*event));
    let _ = answers.of("cuStreamQuery of another stream", || bound.stream_query(*other));
    let _ =
        answers.of("cuStreamSynchronize of another stream", || bound.stream_synchronize(*other));
    let _ = answers.of("cuCtxSynchronize", || bound.ctx_synchronize());
    let made = bound.graph_instantiate(*graph).unwrap();
    let instance = answers.of("cuGraphInstantiate", || bound.graph_instantiate(*graph));
    let destroyed = answers.of("cuGraphExecDestroy", || bound.graph_exec_destroy(made));
    let left = [destroyed.is_err().then_some(made), instance.ok()];
    left.into_iter().flatten().for_each(|instance| bound.graph_exec_destroy(instance).unwrap());
    // What a refused call has left, and what one has made that was not.
    let frees = [freed.is_err().then_some(memory), allocated.ok()];
    frees.into_iter().flatten().for_each(|address| bound.mem_free(address).unwrap());
    let frees = [unpinned.is_err().then_some(host), pinned.ok()];
    frees.into_iter().flatten().for_each(|host| bound.mem_free_host(host).unwrap());
    let pinned = [unregistered.is_err().then_some(first), registered.is_ok().then_some(second)];
    pinned.into_iter().flatten().for_each(|host| bound.mem_host_unregister(host).unwrap());
    answers.check();
}

fn a_call_that_waits_for_nothing_leaves_a_capture_alone(on: &Subject) {
    let bound = on.bind();
    let (other, event, host) = (bound.stream(), bound.event(), bound.pinned(64));
    let (memory, module) = (bound.alloc(64), bound.module());
    let (range, handle) = (bound.range(1), bound.physical(1));
    let (page, prop) = (bound.page(), bound.prop());
    let mut answers = Answers::new(&bound, (Ok(()), Ok(())));
    let _ = answers.of("cuMemGetInfo", || bound.mem_get_info());
    let _ = answers.of("cuPointerGetAttributes", || bound.pointer_get_attributes(*memory));
    let _ = answers.of("cuMemHostGetDevicePointer", || bound.mem_host_get_device_pointer(*host));
    let _ = answers.of("cuEventRecord in another stream", || bound.event_record(*event, *other));
    let _ = answers
        .of("cuStreamWaitEvent of another stream", || bound.stream_wait_event(*other, *event));
    let _ = answers
        .of("cuMemsetD8Async in another stream", || bound.memset_d8_async(*memory, 0, 64, *other));
    let _ = answers.of("cuMemcpyDtoHAsync in another stream", || {
        bound.memcpy_dtoh_async(*host, *memory, 64, *other)
    });
    let _ = answers.of("cuStreamCreate and cuStreamDestroy", || {
        bound.stream_create(false).and_then(|stream| bound.stream_destroy(stream))
    });
    let _ = answers.of("cuEventCreate and cuEventDestroy", || {
        bound.event_create(false).and_then(|event| bound.event_destroy(event))
    });
    let _ = answers.of("cuMemAddressReserve and cuMemAddressFree", || {
        let base = bound.mem_address_reserve(page, 0, 0)?;
        bound.mem_address_free(base, page)
    });
    let _ = answers.of("cuMemCreate and cuMemRelease", || {
        bound.mem_create(page, prop).and_then(|handle| bound.mem_release(handle))
    });
    let mapped = answers.of("cuMemMap", || range.map(0, 1, *handle));
    let _ = answers.of("cuMemSetAccess", || range.give_access(0, 1));
    let unmapped = answers.of("cuMemUnmap", || range.unmap(0, 1));
    if mapped.is_ok() && unmapped.is_err() {
        range.unmap(0, 1).unwrap();
    }
    let _ = answers.of("cuModuleGetFunction", || {
        bound.module_get_function(*module, crate::common::kernel::NAME)
    });
    answers.check();
    bound.stream_synchronize(*other).unwrap();
}

fn a_refused_call_ends_every_capture_of_its_thread(on: &Subject) {
    let bound = on.bind();
    let (streams, event) = ([bound.stream(), bound.stream()], bound.event());
    for stream in &streams {
        bound.stream_begin_capture(**stream).unwrap();
    }
    refused(bound.event_query(*event), UNSUPPORTED);
    for stream in &streams {
        refused(bound.stream_end_capture(**stream), INVALIDATED);
    }
    assert_eq!(bound.event_query(*event), Ok(true));
}

fn the_default_stream_is_not_used_while_a_stream_is_captured_that_waits_for_it(on: &Subject) {
    let bound = on.bind();
    let (memory, waits, waits_not) = (bound.alloc(64), bound.blocking_stream(), bound.stream());
    bound.stream_begin_capture(*waits).unwrap();
    // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT.
    refused(bound.memset_d8_async(*memory, 0, 64, 0), ErrorCode(906));
    refused(bound.stream_end_capture(*waits), INVALIDATED);
    bound.stream_begin_capture(*waits_not).unwrap();
    assert_eq!(bound.memset_d8_async(*memory, 0, 64, 0), Ok(()));
    let graph = bound.stream_end_capture(*waits_not).unwrap();
    bound.graph_destroy(graph).unwrap();
}
