//! Pinned host memory.

use cuda_driver::{ErrorCode, HostAllocFlags};

use super::{Case, Needs, Subject, cases, refused};

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    host_memory_is_pinned_and_freed,
    no_bytes_are_pinned_at_no_address,
    far_too_many_bytes_are_not_pinned,
    pinned_memory_is_page_aligned,
    pinned_memory_has_one_address_whatever_the_flags,
    addresses_of_pinned_memory_alone_have_a_device_address,
    freeing_pinned_memory_waits_for_copies,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    freeing_what_is_not_pinned_is_refused_except_null,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("a driver may read memory of the process that is no more");
    a_copy_outside_pinned_memory_is_refused,
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

/// The device's address is the host's, and copies go both ways.
fn pinned_memory_has_one_address_whatever_the_flags(on: &Subject) {
    let plain = HostAllocFlags::default();
    for flags in [
        plain,
        HostAllocFlags { portable: true, ..plain },
        HostAllocFlags { device_map: true, ..plain },
        HostAllocFlags { write_combined: true, ..plain },
        HostAllocFlags { write_combined: true, ..HostAllocFlags::CACHED },
    ] {
        let bound = on.bind();
        let host = bound.mem_host_alloc(4096, flags).unwrap();
        assert_eq!(bound.mem_host_get_device_pointer(host), Ok(host), "{flags:?}");
        let memory = bound.alloc(4096);
        bound.memset_d8_async(host, 3, 4096, 0).unwrap();
        bound.memcpy_htod_async(*memory, host, 4096, 0).unwrap();
        assert_eq!(bound.read(*memory, 4096), [3; 4096], "{flags:?}");
        bound.mem_free_host(host).unwrap();
    }
}

fn addresses_of_pinned_memory_alone_have_a_device_address(on: &Subject) {
    const BYTES: u64 = 2 << 20;
    let bound = on.bind();
    let (host, memory, pageable) = (bound.pinned(BYTES), bound.alloc(4096), vec![0u8; 4096]);
    assert_eq!(bound.mem_host_get_device_pointer(*host + 5000), Ok(*host + 5000));
    for other in [*host + BYTES, *memory, pageable.as_ptr().addr() as u64, 0] {
        refused(bound.mem_host_get_device_pointer(other), ErrorCode::INVALID_VALUE);
    }
    let freed = bound.mem_host_alloc(BYTES, HostAllocFlags::CACHED).unwrap();
    bound.mem_free_host(freed).unwrap();
    refused(bound.mem_host_get_device_pointer(freed), ErrorCode::INVALID_VALUE);
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

fn freeing_what_is_not_pinned_is_refused_except_null(on: &Subject) {
    let bound = on.bind();
    assert_eq!(bound.mem_free_host(0), Ok(()));
    let freed = bound.mem_host_alloc(4096, HostAllocFlags::CACHED).unwrap();
    bound.mem_free_host(freed).unwrap();
    refused(bound.mem_free_host(freed), ErrorCode::INVALID_VALUE);
    let (host, memory, pageable) = (bound.pinned(8192), bound.alloc(4096), vec![0u8; 4096]);
    for other in [*host + 4096, *memory, pageable.as_ptr().addr() as u64] {
        refused(bound.mem_free_host(other), ErrorCode::INVALID_VALUE);
    }
}

fn a_copy_outside_pinned_memory_is_refused(on: &Subject) {
    let bound = on.bind();
    let freed = bound.mem_host_alloc(4096, HostAllocFlags::CACHED).unwrap();
    bound.mem_free_host(freed).unwrap();
    let (memory, host) = (bound.alloc(8192), bound.pinned(4096));
    for (host, bytes) in [(freed, 4096), (*host, 4097), (*host + 4095, 2)] {
        refused(bound.memcpy_htod_async(*memory, host, bytes, 0), ErrorCode::INVALID_VALUE);
        refused(bound.memcpy_dtoh_async(host, *memory, bytes, 0), ErrorCode::INVALID_VALUE);
    }
}
