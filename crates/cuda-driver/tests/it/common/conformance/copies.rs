//! Copies and fills: results, and refused ranges.

use cuda_driver::ErrorCode;

use super::bound::Bound;
use super::{Case, Needs, Subject, cases, refused};
use crate::common::pattern;

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    pageable_memory_travels_both_ways,
    pinned_memory_travels_to_the_device_and_back,
    a_large_pageable_copy_keeps_its_bytes,
    a_pageable_source_may_change_after_the_call,
    copies_on_the_device_keep_their_bytes,
    copies_at_odd_addresses_keep_their_bytes,
    a_copy_onto_itself_changes_nothing,
    fills_stay_in_their_range,
    pinned_memory_is_filled_as_device_memory,
    pinned_memory_is_copied_as_device_memory,
    no_bytes_are_no_copy_and_no_fill_at_any_address,
    a_fill_outside_an_allocation_is_refused,
    a_copy_outside_an_allocation_is_refused,
    a_copy_over_two_mappings_keeps_its_bytes,
    a_fill_over_two_mappings_stays_in_its_range,
    a_fill_into_a_hole_is_refused,
    a_fill_of_addresses_without_memory_is_refused,
    a_refused_copy_leaves_the_stream_idle,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    a_fill_of_pageable_memory_is_refused,
    a_copy_from_or_to_host_memory_at_null_is_refused,
    host_memory_of_a_copy_may_be_device_memory,
    a_fill_without_access_is_refused,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("the driver follows such host addresses, and lets such a fill lose the device");
    a_copy_from_beyond_the_host_is_refused,
    a_fill_that_wraps_around_is_refused,
];

const INVALID: ErrorCode = ErrorCode::INVALID_VALUE;

/// Room for allocations to be neighbours on a GPU, which gives them parts of 2 MiB blocks.
const LARGE: u64 = 4 << 20;

fn pageable_memory_travels_both_ways(on: &Subject) {
    let bound = on.bind();
    let (memory, data) = (bound.alloc(5000), pattern(1, 5000));
    bound.write(*memory, &data);
    assert!(bound.read(*memory, 5000) == data);
}

fn pinned_memory_travels_to_the_device_and_back(on: &Subject) {
    let bound = on.bind();
    let (memory, up, down) = (bound.alloc(4096), bound.pinned(4096), bound.pinned(4096));
    let other = bound.alloc(4096);
    bound.write(*other, &pattern(2, 4096));
    bound.memcpy_dtoh_async(*up, *other, 4096, 0).unwrap();
    bound.memcpy_htod_async(*memory, *up, 4096, 0).unwrap();
    bound.memcpy_dtoh_async(*down, *memory, 4096, 0).unwrap();
    bound.memcpy_htod_async(*other, *down, 4096, 0).unwrap();
    assert!(bound.read(*other, 4096) == pattern(2, 4096));
}

fn a_large_pageable_copy_keeps_its_bytes(on: &Subject) {
    let bound = on.bind();
    let (memory, data) = (bound.alloc(9 << 20), pattern(3, 9 << 20));
    bound.write(*memory, &data);
    assert!(bound.read(*memory, 9 << 20) == data);
}

fn a_pageable_source_may_change_after_the_call(on: &Subject) {
    let bound = on.bind();
    let (memory, stream) = (bound.alloc(1000), bound.stream());
    let stall = bound.stall(*stream);
    let mut source = vec![1u8; 1000];
    let host = source.as_mut_ptr().expose_provenance() as u64;
    bound.memcpy_htod_async(*memory, host, 1000, *stream).unwrap();
    source.fill(2);
    stall.release();
    assert_eq!(bound.read(*memory, 1000), [1; 1000]);
    assert_eq!(source, [2; 1000]);
}

fn copies_on_the_device_keep_their_bytes(on: &Subject) {
    let bound = on.bind();
    let (from, to, data) = (bound.alloc(5000), bound.alloc(5000), pattern(4, 5000));
    bound.write(*from, &data);
    bound.memcpy_dtod_async(*to, *from, 5000, 0).unwrap();
    assert!(bound.read(*to, 5000) == data);
}

fn copies_at_odd_addresses_keep_their_bytes(on: &Subject) {
    let bound = on.bind();
    let (from, to, data) = (bound.alloc(500), bound.alloc(500), pattern(5, 500));
    bound.write(*from, &data);
    bound.memset_d8_async(*to, 0, 500, 0).unwrap();
    bound.memcpy_dtod_async(*to + 13, *from + 7, 101, 0).unwrap();
    let seen = bound.read(*to, 500);
    assert_eq!(seen[13..114], data[7..108]);
    assert!(seen[..13].iter().chain(&seen[114..]).all(|&byte| byte == 0));
}

fn a_copy_onto_itself_changes_nothing(on: &Subject) {
    let bound = on.bind();
    let (memory, data) = (bound.alloc(500), pattern(6, 500));
    bound.write(*memory, &data);
    assert_eq!(bound.memcpy_dtod_async(*memory, *memory, 500, 0), Ok(()));
    assert!(bound.read(*memory, 500) == data);
}

fn fills_stay_in_their_range(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(300);
    bound.memset_d8_async(*memory, 1, 300, 0).unwrap();
    bound.memset_d8_async(*memory + 101, 2, 99, 0).unwrap();
    let seen = bound.read(*memory, 300);
    assert!(seen[101..200].iter().all(|&byte| byte == 2));
    assert!(seen[..101].iter().chain(&seen[200..]).all(|&byte| byte == 1));
}

fn pinned_memory_is_filled_as_device_memory(on: &Subject) {
    let bound = on.bind();
    let (host, memory) = (bound.pinned(4096), bound.alloc(4096));
    assert_eq!(bound.memset_d8_async(*host, 9, 4096, 0), Ok(()));
    bound.memcpy_htod_async(*memory, *host, 4096, 0).unwrap();
    assert_eq!(bound.read(*memory, 4096), [9; 4096]);
}

fn pinned_memory_is_copied_as_device_memory(on: &Subject) {
    let bound = on.bind();
    let (host, memory) = (bound.pinned(4096), bound.alloc(4096));
    bound.write(*memory, &pattern(7, 4096));
    assert_eq!(bound.memcpy_dtod_async(*host, *memory, 4096, 0), Ok(()));
    bound.memset_d8_async(*memory, 0, 4096, 0).unwrap();
    assert_eq!(bound.memcpy_dtod_async(*memory, *host, 4096, 0), Ok(()));
    assert!(bound.read(*memory, 4096) == pattern(7, 4096));
}

fn no_bytes_are_no_copy_and_no_fill_at_any_address(on: &Subject) {
    let bound = on.bind();
    let (memory, other, host) = (bound.alloc(64), bound.alloc(64), bound.pinned(64));
    for (to, from) in [(*memory, *other), (0x1000, 0x2000)] {
        assert_eq!(bound.memset_d8_async(to, 1, 0, 0), Ok(()));
        assert_eq!(bound.memcpy_dtod_async(to, from, 0, 0), Ok(()));
    }
    for (device, at) in [(*memory, *host), (0, 0)] {
        assert_eq!(bound.memcpy_htod_async(device, at, 0, 0), Ok(()));
        assert_eq!(bound.memcpy_dtoh_async(at, device, 0, 0), Ok(()));
    }
}

fn a_fill_outside_an_allocation_is_refused(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(LARGE);
    refused(bound.memset_d8_async(*memory, 0, LARGE + 1, 0), INVALID);
    refused(bound.memset_d8_async(*memory + LARGE - 1, 0, 2, 0), INVALID);
    refused(bound.memset_d8_async(*memory - 1, 0, 2, 0), INVALID);
    for never in [0, 0x1000] {
        refused(bound.memset_d8_async(never, 0, 64, 0), INVALID);
    }
    let freed = bound.mem_alloc(LARGE).unwrap();
    bound.mem_free(freed).unwrap();
    refused(bound.memset_d8_async(freed, 0, 64, 0), INVALID);
}

fn a_fill_that_wraps_around_is_refused(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(64);
    refused(bound.memset_d8_async(*memory, 0, u64::MAX, 0), INVALID);
}

fn a_copy_outside_an_allocation_is_refused(on: &Subject) {
    let bound = on.bind();
    let (memory, host) = (bound.alloc(LARGE), bound.pinned(4096));
    for (outside, bytes) in [(*memory + LARGE - 1, 2), (0, 64)] {
        refused(bound.memcpy_htod_async(outside, *host, bytes, 0), INVALID);
        refused(bound.memcpy_dtoh_async(*host, outside, bytes, 0), INVALID);
        refused(bound.memcpy_dtod_async(*memory, outside, bytes, 0), INVALID);
    }
    let (second, long) = (bound.alloc(LARGE), bound.alloc(4 * LARGE));
    refused(bound.memcpy_dtod_async(*long, *memory, LARGE + 1, 0), INVALID);
    refused(bound.memcpy_dtod_async(*memory, *long, LARGE + 1, 0), INVALID);
    // Over two allocations.
    refused(bound.memcpy_dtod_async(*long, (*memory).min(*second), 2 * LARGE, 0), INVALID);
}

/// Two pages, mapped from two handles side by side, and usable.
fn seam(bound: &Bound<'_>, check: impl FnOnce(u64)) {
    let range = bound.range(4);
    let handles = [bound.physical(1), bound.physical(1)];
    range.map_usable(1, 1, *handles[0]);
    range.map_usable(2, 1, *handles[1]);
    check(range.at(2));
}

fn a_copy_over_two_mappings_keeps_its_bytes(on: &Subject) {
    let bound = on.bind();
    seam(&bound, |middle| {
        let data = pattern(8, 1000);
        bound.write(middle - 499, &data);
        assert!(bound.read(middle - 499, 1000) == data);
    });
}

fn a_fill_over_two_mappings_stays_in_its_range(on: &Subject) {
    let bound = on.bind();
    seam(&bound, |middle| {
        bound.memset_d8_async(middle - 100, 1, 200, 0).unwrap();
        bound.memset_d8_async(middle - 10, 2, 20, 0).unwrap();
        let seen = bound.read(middle - 100, 200);
        assert!(seen[90..110].iter().all(|&byte| byte == 2));
        assert!(seen[..90].iter().chain(&seen[110..]).all(|&byte| byte == 1));
    });
}

fn a_fill_into_a_hole_is_refused(on: &Subject) {
    let bound = on.bind();
    let page = bound.page();
    seam(&bound, |middle| {
        refused(bound.memset_d8_async(middle - page - 1, 0, 2, 0), INVALID);
        refused(bound.memset_d8_async(middle - page, 0, 3 * page, 0), INVALID);
    });
}

fn a_fill_of_addresses_without_memory_is_refused(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(1), bound.physical(1));
    refused(bound.memset_d8_async(range.base, 0, 64, 0), INVALID);
    range.map_usable(0, 1, *handle);
    refused(bound.memset_d8_async(range.at(1) - 1, 0, 2, 0), INVALID);
    bound.memset_d8_async(range.base, 0, 64, 0).unwrap();
    bound.ctx_synchronize().unwrap();
    range.unmap(0, 1).unwrap();
    refused(bound.memset_d8_async(range.base, 0, 64, 0), INVALID);
}

fn a_refused_copy_leaves_the_stream_idle(on: &Subject) {
    let bound = on.bind();
    let stream = bound.stream();
    refused(bound.memset_d8_async(0x1000, 0, 64, *stream), INVALID);
    assert_eq!(bound.stream_query(*stream), Ok(true));
    let memory = bound.alloc(64);
    bound.memset_d8_async(*memory, 1, 64, *stream).unwrap();
    assert_eq!(bound.stream_synchronize(*stream), Ok(()));
}

fn a_fill_of_pageable_memory_is_refused(on: &Subject) {
    let bound = on.bind();
    let pageable = vec![0u8; 4096];
    let address = pageable.as_ptr().addr() as u64;
    refused(bound.memset_d8_async(address, 0, 64, 0), INVALID);
}

fn a_copy_from_or_to_host_memory_at_null_is_refused(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(64);
    refused(bound.memcpy_htod_async(*memory, 0, 64, 0), INVALID);
    refused(bound.memcpy_dtoh_async(0, *memory, 64, 0), INVALID);
}

fn host_memory_of_a_copy_may_be_device_memory(on: &Subject) {
    let bound = on.bind();
    let (from, to) = (bound.alloc(64), bound.alloc(64));
    bound.memset_d8_async(*from, 5, 64, 0).unwrap();
    assert_eq!(bound.memcpy_htod_async(*to, *from, 64, 0), Ok(()));
    assert_eq!(bound.read(*to, 64), [5; 64]);
    bound.memset_d8_async(*from, 6, 64, 0).unwrap();
    assert_eq!(bound.memcpy_dtoh_async(*to, *from, 64, 0), Ok(()));
    assert_eq!(bound.read(*to, 64), [6; 64]);
}

fn a_fill_without_access_is_refused(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(1), bound.physical(1));
    range.map(0, 1, *handle).unwrap();
    refused(bound.memset_d8_async(range.base, 0, 64, 0), INVALID);
}

fn a_copy_from_beyond_the_host_is_refused(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(64);
    refused(bound.memcpy_htod_async(*memory, u64::MAX - 3, 64, 0), INVALID);
    refused(bound.memcpy_dtoh_async(u64::MAX - 3, *memory, 64, 0), INVALID);
}
