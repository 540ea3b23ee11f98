//! Memory of the program that is registered with the driver.

use std::alloc::Layout;

use cuda_driver::{DeviceAttribute, ErrorCode, HostRegisterFlags};

use super::bound::Bound;
use super::{Case, Needs, Subject, cases, refused};
use crate::common::pattern;

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    registering_is_supported,
    memory_is_registered_and_unregistered_again_and_again,
    registered_memory_alone_has_one_address_whatever_the_flags,
    registered_memory_travels_both_ways,
    a_copy_of_registered_memory_reads_when_it_runs,
    unregistered_memory_is_copied_when_the_call_is_made,
    registered_memory_is_filled_as_device_memory,
    neighbours_are_registered_apart,
    no_bytes_are_not_registered,
    memory_is_not_registered_twice_in_whole_or_in_part,
    allocated_pinned_memory_is_not_registered,
    any_bytes_are_registered_and_no_others,
    memory_that_is_not_registered_is_not_unregistered,
    unregistering_waits_for_copies,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    null_and_device_memory_are_not_registered,
    another_address_than_a_registrations_is_not_unregistered,
    registering_needs_a_context,
    unregistering_needs_no_context,
    a_copy_or_fill_over_two_registrations_is_refused,
    a_fill_past_registered_memory_is_refused,
    registered_memory_is_not_freed_as_allocated,
    a_copy_over_registered_and_pageable_memory_is_refused,
];

pub(crate) const PAIR_PROCESS: &[Case] = cases![Needs::PairProcess;
    unregistering_does_not_wait_for_another_device,
];

pub(crate) const PAIRS: &[Case] = cases![Needs::Pair;
    memory_registered_on_one_device_has_an_address_on_the_other,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("the driver takes memory for pageable whose first byte is not pinned");
    a_copy_that_ends_in_registered_memory_is_refused,
];

const SHARED: HostRegisterFlags = HostRegisterFlags::SHARED;
const PAGE: u64 = 4096;

/// Pages of the program, of zeros; unregistered by the case.
pub(super) struct Pages {
    first: *mut u8,
    layout: Layout,
}

impl Pages {
    pub(super) fn new(pages: u64) -> Self {
        let layout = Layout::from_size_align((pages * PAGE) as usize, PAGE as usize).unwrap();
        // SAFETY: the layout has a size.
        let first = unsafe { std::alloc::alloc_zeroed(layout) };
        assert!(!first.is_null());
        let _ = first.expose_provenance();
        Self { first, layout }
    }

    pub(super) fn at(&self, offset: u64) -> u64 {
        self.first.addr() as u64 + offset
    }

    /// Writes all of it, while no operation uses it.
    fn write(&self, data: &[u8]) {
        assert_eq!(data.len(), self.layout.size());
        // SAFETY: as long as the allocation, to which there is no reference.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.first, data.len()) };
    }

    /// All of it, while no operation writes it.
    fn read(&self) -> Vec<u8> {
        let mut data = vec![0; self.layout.size()];
        // SAFETY: as long as the allocation, which is initialised.
        unsafe { std::ptr::copy_nonoverlapping(self.first, data.as_mut_ptr(), data.len()) };
        data
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.first, self.layout) };
    }
}

/// All of `pages`, registered.
fn register(bound: &Bound<'_>, pages: &Pages) {
    bound.mem_host_register(pages.at(0), pages.layout.size() as u64, SHARED).unwrap();
}

fn registering_is_supported(on: &Subject) {
    let answer = on.driver.device_get_attribute(0, DeviceAttribute::HOST_REGISTER_SUPPORTED);
    assert_eq!(answer, Ok(1));
}

fn memory_is_registered_and_unregistered_again_and_again(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(4));
    for _ in 0..3 {
        register(&bound, &pages);
        assert_eq!(bound.mem_host_unregister(pages.at(0)), Ok(()));
    }
}

fn registered_memory_alone_has_one_address_whatever_the_flags(on: &Subject) {
    for flags in [SHARED, HostRegisterFlags::default()] {
        let (bound, pages) = (on.bind(), Pages::new(4));
        bound.mem_host_register(pages.at(0), 2 * PAGE, flags).unwrap();
        for inside in [0, 5000] {
            assert_eq!(bound.mem_host_get_device_pointer(pages.at(inside)), Ok(pages.at(inside)));
        }
        let past = bound.mem_host_get_device_pointer(pages.at(2 * PAGE));
        bound.mem_host_unregister(pages.at(0)).unwrap();
        refused(past, ErrorCode::INVALID_VALUE);
        refused(bound.mem_host_get_device_pointer(pages.at(0)), ErrorCode::INVALID_VALUE);
    }
}

fn registered_memory_travels_both_ways(on: &Subject) {
    let (bound, up, down) = (on.bind(), Pages::new(3), Pages::new(3));
    let (stream, memory, data) = (bound.stream(), bound.alloc(3 * PAGE), pattern(4, 12288));
    up.write(&data);
    register(&bound, &up);
    register(&bound, &down);
    bound.memcpy_htod_async(*memory, up.at(0), 3 * PAGE, *stream).unwrap();
    bound.memcpy_dtoh_async(down.at(0), *memory, 3 * PAGE, *stream).unwrap();
    bound.stream_synchronize(*stream).unwrap();
    bound.mem_host_unregister(up.at(0)).unwrap();
    bound.mem_host_unregister(down.at(0)).unwrap();
    assert!(down.read() == data);
}

/// What `memory` gets of `pages` when they are rewritten between the call and its running.
fn rewritten(bound: &Bound<'_>, pages: &Pages) -> Vec<u8> {
    let (stream, memory) = (bound.stream(), bound.alloc(PAGE));
    pages.write(&[1; PAGE as usize]);
    let stall = bound.stall(*stream);
    bound.memcpy_htod_async(*memory, pages.at(0), PAGE, *stream).unwrap();
    pages.write(&[2; PAGE as usize]);
    stall.release();
    bound.stream_synchronize(*stream).unwrap();
    bound.read(*memory, PAGE as usize)
}

fn a_copy_of_registered_memory_reads_when_it_runs(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(1));
    register(&bound, &pages);
    let arrived = rewritten(&bound, &pages);
    bound.mem_host_unregister(pages.at(0)).unwrap();
    assert_eq!(arrived, [2; PAGE as usize]);
}

fn unregistered_memory_is_copied_when_the_call_is_made(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(1));
    register(&bound, &pages);
    bound.mem_host_unregister(pages.at(0)).unwrap();
    assert_eq!(rewritten(&bound, &pages), [1; PAGE as usize]);
}

fn registered_memory_is_filled_as_device_memory(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(1));
    register(&bound, &pages);
    bound.memset_d8_async(pages.at(0), 6, PAGE, 0).unwrap();
    bound.stream_synchronize(0).unwrap();
    bound.mem_host_unregister(pages.at(0)).unwrap();
    assert_eq!(pages.read(), [6; PAGE as usize]);
}

fn neighbours_are_registered_apart(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(2));
    bound.mem_host_register(pages.at(0), PAGE, SHARED).unwrap();
    bound.mem_host_register(pages.at(PAGE), PAGE, SHARED).unwrap();
    bound.mem_host_unregister(pages.at(0)).unwrap();
    assert_eq!(bound.mem_host_get_device_pointer(pages.at(PAGE)), Ok(pages.at(PAGE)));
    bound.mem_host_unregister(pages.at(PAGE)).unwrap();
}

fn no_bytes_are_not_registered(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(1));
    refused(bound.mem_host_register(pages.at(0), 0, SHARED), ErrorCode::INVALID_VALUE);
}

fn memory_is_not_registered_twice_in_whole_or_in_part(on: &Subject) {
    // Of six pages, the third and fourth are registered.
    for (page, pages_asked) in [(2, 2), (3, 1), (0, 6)] {
        let (bound, pages) = (on.bind(), Pages::new(6));
        bound.mem_host_register(pages.at(2 * PAGE), 2 * PAGE, SHARED).unwrap();
        let answer = bound.mem_host_register(pages.at(page * PAGE), pages_asked * PAGE, SHARED);
        let unregistered = bound.mem_host_unregister(pages.at(2 * PAGE));
        refused(answer, ErrorCode::HOST_MEMORY_ALREADY_REGISTERED);
        assert_eq!(unregistered, Ok(()));
    }
}

fn allocated_pinned_memory_is_not_registered(on: &Subject) {
    let bound = on.bind();
    let host = bound.pinned(2 * PAGE);
    refused(bound.mem_host_register(*host, 2 * PAGE, SHARED), ErrorCode::INVALID_VALUE);
}

fn any_bytes_are_registered_and_no_others(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(2));
    bound.mem_host_register(pages.at(100), 1000, SHARED).unwrap();
    for (offset, known) in [(0, false), (100, true), (1099, true), (1100, false), (PAGE, false)] {
        let answer = bound.mem_host_get_device_pointer(pages.at(offset));
        assert_eq!(answer.is_ok(), known, "{offset}");
    }
    bound.mem_host_register(pages.at(2000), 100, SHARED).unwrap();
    bound.mem_host_unregister(pages.at(100)).unwrap();
    bound.mem_host_unregister(pages.at(2000)).unwrap();
}

fn memory_that_is_not_registered_is_not_unregistered(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(1));
    refused(bound.mem_host_unregister(pages.at(0)), ErrorCode::HOST_MEMORY_NOT_REGISTERED);
    register(&bound, &pages);
    bound.mem_host_unregister(pages.at(0)).unwrap();
    refused(bound.mem_host_unregister(pages.at(0)), ErrorCode::HOST_MEMORY_NOT_REGISTERED);
}

fn unregistering_waits_for_copies(on: &Subject) {
    const BYTES: u64 = 64 << 20;
    let (bound, pages) = (on.bind(), Pages::new(BYTES / PAGE));
    let (stream, memory) = (bound.stream(), bound.alloc(BYTES));
    register(&bound, &pages);
    bound.memset_d8_async(pages.at(0), 9, BYTES, *stream).unwrap();
    bound.memcpy_htod_async(*memory, pages.at(0), BYTES, *stream).unwrap();
    bound.mem_host_unregister(pages.at(0)).unwrap();
    drop(pages);
    bound.stream_synchronize(*stream).unwrap();
    assert!(bound.read(*memory, BYTES as usize).iter().all(|&byte| byte == 9));
}

fn null_and_device_memory_are_not_registered(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(2 * PAGE);
    for other in [0, *memory] {
        refused(bound.mem_host_register(other, 2 * PAGE, SHARED), ErrorCode::INVALID_VALUE);
    }
}

fn another_address_than_a_registrations_is_not_unregistered(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(2));
    let (memory, host) = (bound.alloc(PAGE), bound.pinned(PAGE));
    register(&bound, &pages);
    let others = [0, *memory, *host, pages.at(PAGE)];
    let answers = others.map(|other| bound.mem_host_unregister(other));
    bound.mem_host_unregister(pages.at(0)).unwrap();
    for answer in answers {
        refused(answer, ErrorCode::INVALID_VALUE);
    }
}

fn registering_needs_a_context(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(1));
    bound.ctx_set_current(0).unwrap();
    let answer = bound.mem_host_register(pages.at(0), PAGE, SHARED);
    bound.make_current();
    refused(answer, ErrorCode::INVALID_CONTEXT);
}

fn unregistering_needs_no_context(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(1));
    register(&bound, &pages);
    bound.ctx_set_current(0).unwrap();
    assert_eq!(bound.mem_host_unregister(pages.at(0)), Ok(()));
}

fn a_copy_or_fill_over_two_registrations_is_refused(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(2));
    let (memory, host) = (bound.alloc(2 * PAGE), pages.at(1000));
    for page in [0, PAGE] {
        bound.mem_host_register(pages.at(page), PAGE, SHARED).unwrap();
    }
    refused(bound.memcpy_htod_async(*memory, host, PAGE, 0), ErrorCode::INVALID_VALUE);
    refused(bound.memcpy_dtoh_async(host, *memory, PAGE, 0), ErrorCode::INVALID_VALUE);
    refused(bound.memset_d8_async(host, 1, PAGE, 0), ErrorCode::INVALID_VALUE);
    bound.ctx_synchronize().unwrap();
    for page in [0, PAGE] {
        bound.mem_host_unregister(pages.at(page)).unwrap();
    }
}

fn a_fill_past_registered_memory_is_refused(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(2));
    bound.mem_host_register(pages.at(0), PAGE, SHARED).unwrap();
    let answer = bound.memset_d8_async(pages.at(0), 1, PAGE + 1, 0);
    bound.mem_host_unregister(pages.at(0)).unwrap();
    refused(answer, ErrorCode::INVALID_VALUE);
}

/// The copy of another device then finds no memory, and that device is lost.
fn unregistering_does_not_wait_for_another_device(on: &Subject) {
    const BYTES: u64 = 64 << 20;
    let first = on.bind();
    let pages = Pages::new(BYTES / PAGE);
    register(&first, &pages);
    let second = on.bind_device(1);
    let (stream, memory) = (second.stream(), second.alloc(BYTES));
    let stall = second.stall(*stream);
    second.memcpy_htod_async(*memory, pages.at(0), BYTES, *stream).unwrap();
    first.make_current();
    assert_eq!(first.mem_host_unregister(pages.at(0)), Ok(()));
    second.make_current();
    assert_eq!(second.stream_query(*stream), Ok(false), "the other device has yet to copy");
    first.expect_loss();
    second.expect_loss();
    stall.release();
    assert!(second.stream_synchronize(*stream).unwrap_err().code.is_sticky());
}

fn memory_registered_on_one_device_has_an_address_on_the_other(on: &Subject) {
    let first = on.bind();
    let pages = Pages::new(1);
    register(&first, &pages);
    let second = on.bind_device(1);
    assert_eq!(second.mem_host_get_device_pointer(pages.at(0)), Ok(pages.at(0)));
    let answer = second.mem_host_register(pages.at(0), PAGE, SHARED);
    assert_eq!(second.mem_host_unregister(pages.at(0)), Ok(()));
    refused(answer, ErrorCode::HOST_MEMORY_ALREADY_REGISTERED);
}

fn registered_memory_is_not_freed_as_allocated(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(1));
    register(&bound, &pages);
    let answer = bound.mem_free_host(pages.at(0));
    bound.mem_host_unregister(pages.at(0)).unwrap();
    refused(answer, ErrorCode::INVALID_VALUE);
}

fn a_copy_over_registered_and_pageable_memory_is_refused(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(4));
    let memory = bound.alloc(4 * PAGE);
    bound.mem_host_register(pages.at(0), 2 * PAGE, SHARED).unwrap();
    let up = bound.memcpy_htod_async(*memory, pages.at(PAGE), 2 * PAGE, 0);
    let down = bound.memcpy_dtoh_async(pages.at(PAGE), *memory, 2 * PAGE, 0);
    bound.mem_host_unregister(pages.at(0)).unwrap();
    refused(up, ErrorCode::INVALID_VALUE);
    refused(down, ErrorCode::INVALID_VALUE);
}

fn a_copy_that_ends_in_registered_memory_is_refused(on: &Subject) {
    let (bound, pages) = (on.bind(), Pages::new(2));
    let memory = bound.alloc(2 * PAGE);
    bound.mem_host_register(pages.at(PAGE), PAGE, SHARED).unwrap();
    let answer = bound.memcpy_htod_async(*memory, pages.at(0), 2 * PAGE, 0);
    bound.mem_host_unregister(pages.at(PAGE)).unwrap();
    refused(answer, ErrorCode::INVALID_VALUE);
}
