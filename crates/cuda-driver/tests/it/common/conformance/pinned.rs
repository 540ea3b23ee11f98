//! Pinned host memory.

use cuda_driver::{ErrorCode, HostAllocFlags};

use super::{Case, Needs, Subject, cases, refused};

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    host_memory_is_pinned_and_freed,
    no_bytes_are_pinned_at_no_address,
    far_too_many_bytes_are_not_pinned,
    pinned_memory_is_page_aligned,
    plain_pinned_memory_has_one_address,
    portable_pinned_memory_has_one_address,
    mapped_pinned_memory_has_one_address,
    write_combined_memory_has_one_address,
    memory_of_all_flags_has_one_address,
    an_interior_address_has_a_device_address,
    an_address_past_the_end_has_no_device_address,
    pageable_memory_has_no_device_address,
    null_has_no_device_address,
    device_memory_has_no_host_address,
    freed_pinned_memory_has_no_device_address,
    freeing_pinned_memory_waits_for_copies,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    freeing_pinned_memory_twice_is_refused,
    freeing_inside_pinned_memory_is_refused,
    freeing_null_pinned_memory_is_no_error,
    freeing_pageable_memory_as_pinned_is_refused,
    freeing_device_memory_as_pinned_is_refused,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("a driver may read memory of the process that is no more");
    a_copy_from_freed_pinned_memory_is_refused,
    a_copy_into_freed_pinned_memory_is_refused,
    a_copy_past_the_end_of_pinned_memory_is_refused,
];

fn host_memory_is_pinned_and_freed(on: &Subject) {
    let bound = on.bind();
    let host = bound.mem_host_alloc(4096, HostAllocFlags::CACHED).unwrap();
    assert_ne!(host, 0);
    assert_eq!(bound.mem_free_host(host), Ok(()));
}

fn no_bytes_are_pinned_at_no_address(on: &Subject) {
    assert_eq!(on.bind().mem_host_alloc(0, HostAllocFlags::CACHED), Ok(0));
}

fn far_too_many_bytes_are_not_pinned(on: &Subject) {
    refused(on.bind().mem_host_alloc(1 << 50, HostAllocFlags::CACHED), ErrorCode::OUT_OF_MEMORY);
}

fn pinned_memory_is_page_aligned(on: &Subject) {
    let bound = on.bind();
    for bytes in [1, 5000, 3 << 20] {
        assert_eq!(*bound.pinned(bytes) % 4096, 0, "{bytes}");
    }
}

/// Whatever the flags, the device's address is the host's, and copies go both ways.
fn has_one_address(on: &Subject, flags: HostAllocFlags) {
    let bound = on.bind();
    let host = bound.mem_host_alloc(4096, flags).unwrap();
    assert_eq!(bound.mem_host_get_device_pointer(host), Ok(host));
    let memory = bound.alloc(4096);
    bound.memset_d8_async(host, 3, 4096, 0).unwrap();
    bound.memcpy_htod_async(*memory, host, 4096, 0).unwrap();
    assert_eq!(bound.read(*memory, 4096), [3; 4096]);
    bound.mem_free_host(host).unwrap();
}

fn plain_pinned_memory_has_one_address(on: &Subject) {
    has_one_address(on, HostAllocFlags::default());
}

fn portable_pinned_memory_has_one_address(on: &Subject) {
    has_one_address(on, HostAllocFlags { portable: true, ..HostAllocFlags::default() });
}

fn mapped_pinned_memory_has_one_address(on: &Subject) {
    has_one_address(on, HostAllocFlags { device_map: true, ..HostAllocFlags::default() });
}

fn write_combined_memory_has_one_address(on: &Subject) {
    has_one_address(on, HostAllocFlags { write_combined: true, ..HostAllocFlags::default() });
}

fn memory_of_all_flags_has_one_address(on: &Subject) {
    has_one_address(on, HostAllocFlags { write_combined: true, ..HostAllocFlags::CACHED });
}

fn an_interior_address_has_a_device_address(on: &Subject) {
    let bound = on.bind();
    let host = bound.pinned(8192);
    assert_eq!(bound.mem_host_get_device_pointer(*host + 5000), Ok(*host + 5000));
}

fn an_address_past_the_end_has_no_device_address(on: &Subject) {
    let bound = on.bind();
    let host = bound.pinned(2 << 20);
    let answer = bound.mem_host_get_device_pointer(*host + (2 << 20));
    refused(answer, ErrorCode::INVALID_VALUE);
}

fn pageable_memory_has_no_device_address(on: &Subject) {
    let bound = on.bind();
    let pageable = vec![0u8; 4096];
    let answer = bound.mem_host_get_device_pointer(pageable.as_ptr().addr() as u64);
    refused(answer, ErrorCode::INVALID_VALUE);
}

fn null_has_no_device_address(on: &Subject) {
    refused(on.bind().mem_host_get_device_pointer(0), ErrorCode::INVALID_VALUE);
}

fn device_memory_has_no_host_address(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(4096);
    refused(bound.mem_host_get_device_pointer(*memory), ErrorCode::INVALID_VALUE);
}

fn freed_pinned_memory_has_no_device_address(on: &Subject) {
    let bound = on.bind();
    let host = bound.mem_host_alloc(2 << 20, HostAllocFlags::CACHED).unwrap();
    bound.mem_free_host(host).unwrap();
    refused(bound.mem_host_get_device_pointer(host), ErrorCode::INVALID_VALUE);
}

fn freeing_pinned_memory_waits_for_copies(on: &Subject) {
    let bound = on.bind();
    let (stream, memory) = (bound.stream(), bound.alloc(64 << 20));
    let host = bound.mem_host_alloc(64 << 20, HostAllocFlags::CACHED).unwrap();
    bound.memset_d8_async(host, 9, 64 << 20, *stream).unwrap();
    bound.memcpy_htod_async(*memory, host, 64 << 20, *stream).unwrap();
    bound.mem_free_host(host).unwrap();
    bound.stream_synchronize(*stream).unwrap();
    assert!(bound.read(*memory, 64 << 20).iter().all(|&byte| byte == 9));
}

fn freeing_pinned_memory_twice_is_refused(on: &Subject) {
    let bound = on.bind();
    let host = bound.mem_host_alloc(4096, HostAllocFlags::CACHED).unwrap();
    bound.mem_free_host(host).unwrap();
    refused(bound.mem_free_host(host), ErrorCode::INVALID_VALUE);
}

fn freeing_inside_pinned_memory_is_refused(on: &Subject) {
    let bound = on.bind();
    let host = bound.pinned(8192);
    refused(bound.mem_free_host(*host + 4096), ErrorCode::INVALID_VALUE);
}

fn freeing_null_pinned_memory_is_no_error(on: &Subject) {
    assert_eq!(on.bind().mem_free_host(0), Ok(()));
}

fn freeing_pageable_memory_as_pinned_is_refused(on: &Subject) {
    let bound = on.bind();
    let pageable = vec![0u8; 4096];
    refused(bound.mem_free_host(pageable.as_ptr().addr() as u64), ErrorCode::INVALID_VALUE);
}

fn freeing_device_memory_as_pinned_is_refused(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(4096);
    refused(bound.mem_free_host(*memory), ErrorCode::INVALID_VALUE);
}

fn a_copy_from_freed_pinned_memory_is_refused(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(4096);
    let host = bound.mem_host_alloc(4096, HostAllocFlags::CACHED).unwrap();
    bound.mem_free_host(host).unwrap();
    refused(bound.memcpy_htod_async(*memory, host, 4096, 0), ErrorCode::INVALID_VALUE);
}

fn a_copy_into_freed_pinned_memory_is_refused(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(4096);
    let host = bound.mem_host_alloc(4096, HostAllocFlags::CACHED).unwrap();
    bound.mem_free_host(host).unwrap();
    refused(bound.memcpy_dtoh_async(host, *memory, 4096, 0), ErrorCode::INVALID_VALUE);
}

fn a_copy_past_the_end_of_pinned_memory_is_refused(on: &Subject) {
    let bound = on.bind();
    let (memory, host) = (bound.alloc(8192), bound.pinned(4096));
    refused(bound.memcpy_htod_async(*memory, *host, 4097, 0), ErrorCode::INVALID_VALUE);
    refused(bound.memcpy_dtoh_async(*host + 4095, *memory, 2, 0), ErrorCode::INVALID_VALUE);
}
