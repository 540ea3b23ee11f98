//! `cuMemAlloc` and `cuMemFree`.

use std::sync::Arc;

use cuda_driver::{
    AccessDesc, AddressRange, Device, DeviceBuffer, DeviceSpan, ErrorCode, HostAllocFlags,
    MemoryKind, OutOfBounds, PhysicalMemory, PinnedBuffer, ResidencyError,
};

use super::{Case, Needs, Subject, cases, refused};

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    memory_is_allocated_and_freed,
    no_bytes_are_not_allocated,
    one_byte_is_allocated,
    more_than_the_device_has_is_out_of_memory_and_no_loss,
    addresses_are_aligned,
    allocations_do_not_overlap,
    allocations_keep_their_bytes,
    freeing_another_address_than_an_allocations_is_refused,
    allocations_lower_free_memory_until_they_are_freed,
    physical_memory_lowers_free_memory,
    reservations_take_no_memory,
    memory_is_freed_by_another_thread,
    freeing_waits_for_the_work,
    an_address_tells_what_lies_there,
    a_span_is_looked_up_over_all_of_its_range,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    freeing_null_is_no_error_and_freeing_host_memory_is,
];

const BIG: u64 = 256 << 20;

fn memory_is_allocated_and_freed(on: &Subject) {
    let bound = on.bind();
    let memory = bound.mem_alloc(4096).unwrap();
    assert_ne!(memory, 0);
    assert_eq!(bound.mem_free(memory), Ok(()));
}

fn no_bytes_are_not_allocated(on: &Subject) {
    refused(on.bind().mem_alloc(0), ErrorCode::INVALID_VALUE);
}

fn one_byte_is_allocated(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(1);
    bound.memset_d8_async(*memory, 200, 1, 0).unwrap();
    assert_eq!(bound.read(*memory, 1), [200]);
}

fn more_than_the_device_has_is_out_of_memory_and_no_loss(on: &Subject) {
    let bound = on.bind();
    let (_, total) = bound.mem_get_info().unwrap();
    for bytes in [total + 1, 1 << 45, u64::MAX] {
        refused(bound.mem_alloc(bytes), ErrorCode::OUT_OF_MEMORY);
    }
    let memory = bound.alloc(64);
    bound.memset_d8_async(*memory, 1, 64, 0).unwrap();
    assert_eq!(bound.read(*memory, 64), [1; 64]);
}

fn addresses_are_aligned(on: &Subject) {
    let bound = on.bind();
    for bytes in [1, 100, 4097, 3 << 20] {
        assert_eq!(*bound.alloc(bytes) % 256, 0, "{bytes}");
    }
}

fn allocations_do_not_overlap(on: &Subject) {
    let bound = on.bind();
    let all: Vec<_> = (0..20).map(|i| (bound.alloc(1000 + i), 1000 + i)).collect();
    let mut ranges: Vec<_> = all.iter().map(|(memory, bytes)| (**memory, *bytes)).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{ranges:?}");
}

fn allocations_keep_their_bytes(on: &Subject) {
    let bound = on.bind();
    let all: Vec<_> = (0..8).map(|_| bound.alloc(777)).collect();
    for (byte, memory) in all.iter().enumerate() {
        bound.memset_d8_async(**memory, byte as u8, 777, 0).unwrap();
    }
    for (byte, memory) in all.iter().enumerate() {
        assert_eq!(bound.read(**memory, 777), [byte as u8; 777]);
    }
}

fn freeing_another_address_than_an_allocations_is_refused(on: &Subject) {
    let bound = on.bind();
    let freed = bound.mem_alloc(4096).unwrap();
    bound.mem_free(freed).unwrap();
    refused(bound.mem_free(freed), ErrorCode::INVALID_VALUE);
    let memory = bound.alloc(4 << 20);
    for inside in [*memory + 256, *memory + (4 << 20) - 1] {
        refused(bound.mem_free(inside), ErrorCode::INVALID_VALUE);
    }
    refused(bound.mem_free(0x1000), ErrorCode::INVALID_VALUE);
    let (range, handle) = (bound.range(1), bound.physical(1));
    refused(bound.mem_free(range.base), ErrorCode::INVALID_VALUE);
    range.map_usable(0, 1, *handle);
    refused(bound.mem_free(range.base), ErrorCode::INVALID_VALUE);
}

fn allocations_lower_free_memory_until_they_are_freed(on: &Subject) {
    let bound = on.bind();
    let (before, total) = bound.mem_get_info().unwrap();
    let memory = bound.mem_alloc(BIG).unwrap();
    let (during, same_total) = bound.mem_get_info().unwrap();
    assert_eq!(total, same_total);
    assert!(before - during >= BIG, "{before} {during}");
    bound.mem_free(memory).unwrap();
    let (after, _) = bound.mem_get_info().unwrap();
    assert!(after >= during + BIG, "{during} {after}");
}

fn physical_memory_lowers_free_memory(on: &Subject) {
    let bound = on.bind();
    let (before, _) = bound.mem_get_info().unwrap();
    let handle = bound.physical(8);
    let (during, _) = bound.mem_get_info().unwrap();
    assert!(before - during >= 8 * bound.page(), "{before} {during}");
    drop(handle);
    let (after, _) = bound.mem_get_info().unwrap();
    assert!(after > during, "{during} {after}");
}

fn reservations_take_no_memory(on: &Subject) {
    let bound = on.bind();
    let (before, _) = bound.mem_get_info().unwrap();
    let _range = bound.range(4096);
    assert_eq!(bound.mem_get_info().unwrap().0, before);
}

fn memory_is_freed_by_another_thread(on: &Subject) {
    let bound = on.bind();
    let memory = bound.mem_alloc(64).unwrap();
    let (driver, context) = (&on.driver, bound.context);
    let freed = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            // SAFETY: retained by the thread that waits for this one.
            unsafe { driver.ctx_set_current(context) }.unwrap();
            // SAFETY: nothing uses the memory.
            unsafe { driver.mem_free(memory) }
        });
        other.join().unwrap()
    });
    assert_eq!(freed, Ok(()));
}

fn freeing_waits_for_the_work(on: &Subject) {
    let bound = on.bind();
    let (stream, copy) = (bound.stream(), bound.alloc(32 << 20));
    let memory = bound.mem_alloc(32 << 20).unwrap();
    bound.memset_d8_async(memory, 6, 32 << 20, *stream).unwrap();
    bound.memcpy_dtod_async(*copy, memory, 32 << 20, *stream).unwrap();
    bound.mem_free(memory).unwrap();
    assert_eq!(bound.stream_query(*stream), Ok(true));
    assert!(bound.read(*copy, 32 << 20).iter().all(|&byte| byte == 6));
}

fn freeing_null_is_no_error_and_freeing_host_memory_is(on: &Subject) {
    let bound = on.bind();
    assert_eq!(bound.mem_free(0), Ok(()));
    refused(bound.mem_free(*bound.pinned(4096)), ErrorCode::INVALID_VALUE);
    let pageable = vec![0u8; 4096];
    refused(bound.mem_free(pageable.as_ptr().addr() as u64), ErrorCode::INVALID_VALUE);
}

/// What the driver says of an address.
fn looked_up(device: &Device, address: u64, bytes: u64) -> Result<DeviceSpan, ResidencyError> {
    // SAFETY: nothing is enqueued with the span.
    unsafe { DeviceSpan::of_device(device, address, bytes) }
}

fn an_address_tells_what_lies_there(on: &Subject) {
    let bound = on.bind();
    let memory = bound.alloc(4096);
    for at in [*memory, *memory + 1, *memory + 4095] {
        let found = bound.pointer_get_attributes(at).unwrap();
        assert_eq!((found.kind, found.device), (Some(MemoryKind::Device), bound.device));
        assert!(found.start <= at && at < found.start + found.bytes, "{found:?}");
    }
    let (range, handle) = (bound.range(2), bound.physical(1));
    range.map_usable(0, 1, *handle);
    let found = bound.pointer_get_attributes(range.base + 5).unwrap();
    assert_eq!((found.kind, found.device), (Some(MemoryKind::Device), bound.device));
    assert!(found.start <= range.base && range.base + 5 < found.start + found.bytes, "{found:?}");
    let pinned = bound.mem_host_alloc(4096, HostAllocFlags::CACHED).unwrap();
    let found = bound.pointer_get_attributes(pinned + 8).unwrap();
    assert_eq!(found.kind, Some(MemoryKind::Host));
    bound.mem_free_host(pinned).unwrap();
    let local = 0u8;
    for nothing in [0x1000, &raw const local as u64] {
        assert_eq!(bound.pointer_get_attributes(nothing).unwrap().kind, None, "{nothing:#x}");
    }
}

fn a_span_is_looked_up_over_all_of_its_range(on: &Subject) {
    let device = Device::open(Arc::clone(&on.driver), 0).unwrap();
    let memory = DeviceBuffer::alloc(&device, 3 << 20).unwrap();
    let at = memory.span().address();
    let span = looked_up(&device, at + 16, 1 << 20).unwrap();
    assert_eq!((span.address(), span.bytes()), (at + 16, 1 << 20));
    assert_eq!(looked_up(&device, 7, 0).unwrap().bytes(), 0);

    // Two neighbouring mappings, and nothing after them.
    let page = PhysicalMemory::granularity(&device).unwrap();
    let range = AddressRange::reserve(&device, 3 * page).unwrap();
    let pages = [0, 1].map(|n| (n * page, PhysicalMemory::create(&device, page).unwrap()));
    let rights = [AccessDesc { device: 0 }];
    for (offset, physical) in &pages {
        range.map(*offset, physical).unwrap();
        range.set_access(*offset, page, &rights).unwrap();
    }
    let base = range.span(0, page).unwrap().address();
    looked_up(&device, base + 1, 2 * page - 1).unwrap();
    assert_eq!(
        looked_up(&device, base, 2 * page + 1),
        Err(ResidencyError::Unknown { address: base + 2 * page })
    );
    for (offset, _) in &pages {
        range.unmap(*offset, page).unwrap();
    }

    let pinned = PinnedBuffer::alloc(&device, 4096, HostAllocFlags::CACHED).unwrap();
    let address = pinned.device_address();
    let kind = MemoryKind::Host;
    assert_eq!(looked_up(&device, address, 64), Err(ResidencyError::Kind { address, kind }));
    assert_eq!(looked_up(&device, 0x1000, 1), Err(ResidencyError::Unknown { address: 0x1000 }));
    assert_eq!(
        looked_up(&device, u64::MAX, 2),
        Err(OutOfBounds { offset: u64::MAX, bytes: 2, capacity: u64::MAX }.into())
    );
}
