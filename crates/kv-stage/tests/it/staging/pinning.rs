//! Slabs, size classes, and memory that is pinned in the background.

use cuda_driver::host_pages::{HostMemory, HostPagesOptions, MemoryNode, PinError};
use cuda_driver::{CopyError, ErrorCode, HostAllocFlags};
use kv_stage::{
    Pinning, PoolOptions, StagingOptions, StagingPool, SubmittedView,
    error::{AcquireError, StagingError},
};
use kv_testkit::pattern;

use crate::machine::Machine;

fn class(buffer_bytes: u64, buffers_max: usize) -> StagingOptions {
    StagingOptions { buffer_bytes, buffers_max }
}

/// Six buffers of 1,000 bytes in three slabs, and one of 9,000.
fn options(pinning: Pinning) -> PoolOptions {
    let classes = vec![class(9000, 1), class(1000, 6)];
    PoolOptions { slab_bytes: 2048, pinning, ..PoolOptions::new(classes) }
}

/// Takes every buffer of at least `bytes` bytes, writes to all of each, and checks what arrives.
fn fill_all(machine: &Machine, pool: &StagingPool, bytes: u64) -> usize {
    let mut buffers = Vec::new();
    while let Ok(buffer) = pool.acquire_bytes(bytes) {
        buffers.push(buffer);
    }
    let numbers = 0..buffers.len() as u64;
    for (number, buffer) in numbers.clone().zip(&mut buffers) {
        let length = buffer.bytes() as usize;
        buffer.bytes_mut().copy_from_slice(&pattern(number, length));
    }
    for (number, buffer) in numbers.zip(buffers.drain(..)) {
        let target = machine.memory(buffer.bytes());
        let send = |view: &SubmittedView<'_>| view.copy_to_device(target.span(), 0);
        let length = buffer.bytes() as usize;
        buffer.submit(&machine.stream, send).unwrap();
        assert_eq!(machine.read(target.span()), pattern(number, length), "buffer {number}");
    }
    pool.drain().unwrap();
    pool.peak_live()
}

#[test]
fn few_slabs_hold_all_buffers_and_none_overlaps_another() {
    let machine = Machine::new(1);
    let pool = StagingPool::with_classes(&machine.device, &options(Pinning::AtOnce)).unwrap();
    assert_eq!((machine.calls("cuMemHostRegister"), machine.calls("cuMemHostAlloc")), (4, 0));
    // Whole pages: three for the large buffer, one for two small ones.
    assert_eq!((pool.pinned_bytes(), machine.sim.pinned_bytes()), (6 << 12, 6 << 12));
    assert_eq!(fill_all(&machine, &pool, 0), 7);
    assert_eq!((pool.unpinned(), pool.pin_next()), (0, Ok(false)));
    pool.close().unwrap();
    assert_eq!(machine.sim.pinned_bytes(), 0);
}

#[test]
fn the_smallest_buffer_that_is_free_and_large_enough_is_given() {
    let machine = Machine::new(2);
    let classes = vec![class(4096, 1), class(64, 2), class(512, 1)];
    let pool = StagingPool::with_classes(&machine.device, &PoolOptions::new(classes)).unwrap();
    assert_eq!(pool.buffer_bytes(), 4096);
    let sizes = [0, 64, 1, 65].map(|bytes| pool.acquire_bytes(bytes).unwrap());
    assert_eq!(sizes.each_ref().map(|buffer| buffer.bytes()), [64, 64, 512, 4096]);
    let none = |bytes, live, max| {
        let refused = pool.acquire_bytes(bytes).map(drop);
        assert_eq!(refused, Err(AcquireError::Exhausted { live, max }));
    };
    none(0, 4, 4);
    none(65, 2, 2);
    none(513, 1, 1);
    let refused = pool.acquire_bytes(4097).map(drop);
    assert_eq!(refused, Err(AcquireError::TooLarge { bytes: 4097, largest_bytes: 4096 }));
    drop(sizes);
    assert_eq!(pool.acquire().unwrap().bytes(), 4096);

    // No device work makes a buffer larger: a waiting call refuses at once, also while small
    // buffers are being read.
    let large = pool.acquire_bytes_wait(4097).map(drop);
    assert_eq!(large, Err(AcquireError::TooLarge { bytes: 4097, largest_bytes: 4096 }));

    // A waiting call waits for a buffer that is large enough, not for the oldest one.
    let other = cuda_driver::Stream::new(&machine.device).unwrap();
    let (stuck, target) = (machine.memory(64), machine.memory(64));
    machine.sim.hold(other.raw());
    let small = pool.acquire_bytes(64).unwrap();
    small.submit(&other, |view| view.copy_to_device(stuck.span(), 0)).unwrap();
    for bytes in [4096, 512] {
        let large = pool.acquire_bytes(bytes).unwrap();
        large.submit(&machine.stream, |view| view.copy_to_device(target.span(), 0)).unwrap();
    }
    let beyond = pool.acquire_bytes_wait(u64::MAX).map(drop);
    assert!(matches!(beyond, Err(AcquireError::TooLarge { .. })), "{beyond:?}");
    assert!(pool.acquire_bytes_wait(65).unwrap().bytes() > 64);
    assert!(!other.is_idle().unwrap());
    machine.sim.release_hold(other.raw());
    pool.close().unwrap();
}

#[test]
fn pinning_on_call_adds_a_slab_at_a_time() {
    let machine = Machine::new(3);
    let pool = StagingPool::with_classes(&machine.device, &options(Pinning::OnCall)).unwrap();
    assert_eq!((machine.calls("cuMemHostRegister"), pool.unpinned()), (2, 4));
    let held = [0; 2].map(|_| pool.acquire_bytes(1000).unwrap());
    let large = pool.acquire_bytes(1000).unwrap();
    let refused = pool.acquire_bytes(1).map(drop);
    assert_eq!(refused, Err(AcquireError::Exhausted { live: 3, max: 3 }));
    assert_eq!(pool.pin_next(), Ok(true));
    assert_eq!((pool.unpinned(), pool.acquire_bytes(1).unwrap().bytes()), (2, 1000));
    // A refusal takes nothing away, leaves nothing behind, and may be temporary.
    for call in ["cuEventCreate", "cuMemHostRegister", "cuMemHostGetDevicePointer"] {
        let pinned = machine.sim.pinned_bytes();
        machine.sim.fail_nth(call, 1, ErrorCode::OUT_OF_MEMORY);
        let Err(StagingError::Device(refused)) = pool.finish_pinning() else { panic!("{call}") };
        assert!(refused.is_out_of_memory());
        assert_eq!((pool.unpinned(), pool.pinning_refused()), (2, Some(PinError::Device(refused))));
        assert_eq!(machine.sim.pinned_bytes(), pinned);
        drop(pool.acquire_bytes(1).unwrap());
    }
    pool.finish_pinning().unwrap();
    assert_eq!((pool.unpinned(), pool.pinning_refused()), (0, None));
    drop((held, large));
    assert_eq!(fill_all(&machine, &pool, 0), 7);
    pool.close().unwrap();
    assert_eq!(machine.sim.pinned_bytes(), 0);
}

#[test]
fn pinning_in_the_background_ends_with_everything_pinned() {
    let machine = Machine::new(4);
    let pool = StagingPool::with_classes(&machine.device, &options(Pinning::Background)).unwrap();
    // A buffer of each size is there from the start.
    assert!(pool.acquire_bytes(1).is_ok() && pool.acquire_bytes(9000).is_ok());
    pool.finish_pinning().unwrap();
    assert_eq!((pool.unpinned(), machine.calls("cuMemHostRegister")), (0, 4));
    assert_eq!(fill_all(&machine, &pool, 0), 7);
    pool.close().unwrap();
    assert_eq!(machine.sim.pinned_bytes(), 0);
}

#[test]
fn a_thread_in_the_background_pins_everything_by_itself() {
    let machine = Machine::new(4);
    let pool = StagingPool::with_classes(&machine.device, &options(Pinning::Background)).unwrap();
    let since = std::time::Instant::now();
    while pool.unpinned() > 0 {
        assert!(since.elapsed().as_secs() < 60, "{} are left", pool.unpinned());
        std::thread::yield_now();
    }
    assert_eq!((pool.pinning_refused(), fill_all(&machine, &pool, 0)), (None, 7));
    pool.close().unwrap();
}

#[test]
fn a_pool_that_goes_while_it_is_pinned_takes_everything_with_it() {
    for closes in [true, false] {
        for round in 0..20 {
            let machine = Machine::new(round);
            let classes = vec![class(256, 64)];
            let options = PoolOptions {
                slab_bytes: 256,
                pinning: Pinning::Background,
                ..PoolOptions::new(classes)
            };
            let pool = StagingPool::with_classes(&machine.device, &options).unwrap();
            let held = pool.acquire().unwrap();
            if closes {
                pool.close().unwrap();
                assert_eq!(machine.sim.pinned_bytes(), 4096, "what is held");
                drop(held);
                machine.device.free_retired().unwrap();
                assert_eq!(machine.sim.pinned_bytes(), 0);
            } else {
                // The thread has the pool for a slab at most, and then drops it.
                drop((pool, held));
                while machine.sim.pinned_bytes() > 0 {
                    machine.device.free_retired().unwrap();
                    std::thread::yield_now();
                }
            }
        }
    }
}

#[test]
fn pools_that_cannot_be_are_refused() {
    let machine = Machine::new(5);
    let refused = |classes: Vec<StagingOptions>| {
        let options = PoolOptions::new(classes);
        match StagingPool::with_classes(&machine.device, &options).map(drop) {
            Err(StagingError::Options { buffer_bytes, buffers_max }) => (buffer_bytes, buffers_max),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(vec![]), (0, 0));
    assert_eq!(refused(vec![class(64, 1), class(64, 0)]), (64, 0));
    assert_eq!(refused(vec![class(64, 1), class(0, 1)]), (0, 1));
    assert_eq!(refused(vec![class(1 << 62, 1), class(1 << 62, 1)]), (1 << 62, 1));
    assert_eq!(refused(vec![class(u64::MAX, 1)]), (u64::MAX, 1));
    assert_eq!((machine.calls("cuMemHostAlloc"), machine.calls("cuMemHostRegister")), (0, 0));
}

#[test]
fn slabs_lie_in_the_memory_that_was_asked_for_as_far_as_there_is() {
    let driver = |flags| HostMemory::Driver(flags);
    let write_combined = HostAllocFlags { write_combined: true, ..HostAllocFlags::default() };
    let pages = |huge, node| HostMemory::Pages(HostPagesOptions { huge, node });
    let memories = [
        PoolOptions::MEMORY,
        driver(HostAllocFlags::CACHED),
        driver(write_combined),
        pages(false, MemoryNode::Any),
        pages(true, MemoryNode::Number(900)),
    ];
    for memory in memories {
        let machine = Machine::new(7);
        let classes = vec![class(1 << 20, 6), class(1000, 2)];
        let options = PoolOptions { slab_bytes: 4 << 20, memory, ..PoolOptions::new(classes) };
        let pool = StagingPool::with_classes(&machine.device, &options).unwrap();
        let got = pool.memory();
        let (driver, huge) = (got.driver_bytes, got.huge_bytes + got.advised_bytes);
        assert_eq!(driver + huge + got.ordinary_bytes, pool.pinned_bytes());
        match memory {
            HostMemory::Driver(_) => {
                assert_eq!((driver, machine.calls("cuMemHostAlloc")), (pool.pinned_bytes(), 3))
            }
            HostMemory::Pages(options) => {
                assert_eq!((driver, machine.calls("cuMemHostRegister")), (0, 3));
                assert!(options.huge || huge == 0, "{got:?}");
                assert!(got.ordinary_bytes >= 4096, "a small slab has no use for a huge page");
            }
            _ => unreachable!("the list is above"),
        }
        assert_eq!(got.beside_device_bytes, 0, "a simulated device is beside no node");
        assert_eq!(fill_all(&machine, &pool, 0), 8);
        pool.close().unwrap();
        assert_eq!(machine.sim.pinned_bytes(), 0);
    }
}

#[test]
fn a_driver_that_registers_nothing_allocates_the_slabs() {
    let machine = Machine::new(8);
    for nth in 1..=2 {
        machine.sim.fail_nth("cuMemHostRegister", nth, ErrorCode::NOT_SUPPORTED);
    }
    let options = PoolOptions { slab_bytes: 1000, ..PoolOptions::new(vec![class(1000, 2)]) };
    let pool = StagingPool::with_classes(&machine.device, &options).unwrap();
    assert_eq!((pool.memory().driver_bytes, pool.pinned_bytes()), (2000, 2000));
    assert_eq!(fill_all(&machine, &pool, 0), 2);
}

#[test]
fn memory_that_the_system_does_not_have_is_refused() {
    let machine = Machine::new(9);
    let options = PoolOptions { slab_bytes: 1 << 50, ..PoolOptions::new(vec![class(1 << 50, 1)]) };
    let refused = StagingPool::with_classes(&machine.device, &options).map(drop);
    assert!(
        matches!(refused, Err(StagingError::Memory { bytes, .. }) if bytes == 1 << 50),
        "{refused:?}"
    );
    assert_eq!(machine.sim.pinned_bytes(), 0);
}

#[test]
fn a_copy_stays_inside_its_buffer_though_the_slab_goes_on() {
    let machine = Machine::new(6);
    let pool = machine.pool(256, 4);
    let target = machine.memory(256);
    for (offset, ok) in [(0, true), (1, false), (u64::MAX, false)] {
        let buffer = pool.acquire_wait().unwrap();
        let sent =
            buffer.submit(&machine.stream, |view| view.copy_to_device(target.span(), offset));
        assert_eq!(sent.is_ok(), ok, "offset {offset}");
    }
    let mut buffer = pool.acquire_wait().unwrap();
    assert!(buffer.write_at(250, &[1; 7]).is_err());
    assert!(buffer.write_at(u64::MAX, &[1; 7]).is_err());
    buffer.write_at(250, &[1; 6]).unwrap();
    let whole: Result<(), CopyError> = Ok(());
    assert_eq!(buffer.submit(&machine.stream, |_| whole).map_err(drop), Ok(()));
}
