//! Scenarios for every device: the simulated one and a GPU. Sizes follow the granularity.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_driver::{Device, Stream};
use cuda_vmm::pages::{MapRefusal, PagePool, PagePoolOptions, Reservation, ReservationOptions};
use cuda_vmm::{ElasticPool, ElasticPoolOptions};

use super::{close, pattern, recorded, take};

/// A scenario for the given device.
pub(crate) type Scenario = fn(&Device);

/// Every scenario, by name.
pub(crate) const ALL: &[(&str, Scenario)] = &[
    ("grow_write_shrink_and_grow_again", grow_write_shrink_and_grow_again),
    ("nothing_is_left_after_closing", nothing_is_left_after_closing),
    ("same_page_twice_and_another_page", same_page_twice_and_another_page),
    ("one_page_under_several_addresses", one_page_under_several_addresses),
    ("retired_pages_wait_for_running_work", retired_pages_wait_for_running_work),
    ("threads_grow_and_write_at_once", threads_grow_and_write_at_once),
    ("a_range_is_moved_to_other_addresses", a_range_is_moved_to_other_addresses),
];

const BLOCKS: u64 = 16;

/// Four blocks on three pages.
fn straddling_pool(device: &Device, initial_blocks: u64) -> ElasticPool {
    let page = pages(device, 0).page_bytes();
    let options = ElasticPoolOptions {
        block_bytes: page / 4 * 3,
        capacity_blocks: BLOCKS,
        page_bytes: None,
        initial_blocks,
    };
    ElasticPool::new(device, options).unwrap()
}

fn pages(device: &Device, capacity_pages: u64) -> PagePool {
    PagePool::new(device, PagePoolOptions { page_bytes: None, capacity_pages }).unwrap()
}

fn reservation(device: &Device, count: u64) -> Reservation {
    let bytes = count * pages(device, 0).page_bytes();
    Reservation::new(device, ReservationOptions { bytes, ..Default::default() }).unwrap()
}

fn write(pool: &ElasticPool, stream: &Stream, block: u64, tag: u64) {
    let bytes = pattern(tag, pool.block_bytes());
    stream.upload(pool.block_span(block).unwrap(), &bytes).unwrap();
}

#[track_caller]
fn assert_holds(pool: &ElasticPool, stream: &Stream, block: u64, tag: u64) {
    let mut seen = vec![0; pool.block_bytes() as usize];
    stream.download(&mut seen, pool.block_span(block).unwrap()).unwrap();
    assert!(seen == pattern(tag, pool.block_bytes()), "block {block} lost the bytes of {tag}");
}

fn grow_write_shrink_and_grow_again(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let pool = straddling_pool(device, 1);
    for size in 1..=BLOCKS {
        let first = pool.ready_blocks();
        let ready = pool.grow_to(size).unwrap();
        (first..ready).for_each(|block| write(&pool, &stream, block, block));
        if first == 1 {
            write(&pool, &stream, 0, 0);
        }
    }
    (0..BLOCKS).for_each(|block| assert_holds(&pool, &stream, block, block));

    let shrink = pool.shrink_to(5, &[recorded(&stream)]).unwrap();
    assert_eq!(shrink.retiring_pages, 8);
    stream.synchronize().unwrap();
    assert_eq!(pool.poll_retired().unmapped_pages, 8);
    // Kept blocks are unchanged, including the block that shares its last page with the next one.
    (0..5).for_each(|block| assert_holds(&pool, &stream, block, block));
    assert_eq!(pool.grow_to(BLOCKS).unwrap(), BLOCKS);
    (5..BLOCKS).for_each(|block| write(&pool, &stream, block, 100 + block));
    (0..5).for_each(|block| assert_holds(&pool, &stream, block, block));
    (5..BLOCKS).for_each(|block| assert_holds(&pool, &stream, block, 100 + block));
    close(pool);
}

fn nothing_is_left_after_closing(device: &Device) {
    let cycle = || {
        let stream = Stream::new(device).unwrap();
        let pool = straddling_pool(device, BLOCKS);
        let bytes = pool.stats().mapped_bytes;
        write(&pool, &stream, BLOCKS - 1, 3);
        pool.shrink_to(3, &[recorded(&stream)]).unwrap();
        close(pool);
        bytes
    };
    // In the first cycle the driver takes the memory that it keeps for itself.
    let bytes = cycle();
    let (free_before, _) = device.memory_info().unwrap();
    for _ in 0..4 {
        cycle();
    }
    let (free_after, _) = device.memory_info().unwrap();
    assert!(
        free_after + bytes > free_before,
        "{} bytes fewer are free after four pools of {bytes}",
        free_before - free_after
    );
}

fn same_page_twice_and_another_page(device: &Device) {
    let (stock, space) = (pages(device, 2), reservation(device, 4));
    let page = stock.take().unwrap();
    let (held, shared) = (page.id(), page.share());
    assert_eq!(space.map_range(1, [shared.clone()]).unwrap(), 1);
    assert_eq!(space.map_range(1, [shared.clone()]).unwrap(), 0);
    let error = space.map_range(1, [stock.take().unwrap()]).unwrap_err();
    assert_eq!(error.reason, MapRefusal::Occupied { index: 1, held });
    assert_eq!(error.pages.len(), 1);
    let report = space.close(&[]).wait().unwrap();
    assert!(report.is_clean(), "{:?}", report.errors);
}

fn one_page_under_several_addresses(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (stock, space) = (pages(device, 1), reservation(device, 4));
    let shared = stock.take().unwrap().share();
    space.map_range(0, [shared.clone(), shared.clone()]).unwrap();
    space.map_range(3, [shared]).unwrap();
    let bytes = pattern(11, stock.page_bytes());
    stream.upload(space.mapped_span(3..4).unwrap(), &bytes).unwrap();
    let mut seen = vec![0; bytes.len()];
    for index in [0, 1] {
        stream.download(&mut seen, space.mapped_span(index..index + 1).unwrap()).unwrap();
        assert!(seen == bytes, "page {index} holds other bytes");
    }
    assert!(space.close(&[]).wait().unwrap().is_clean());
}

fn retired_pages_wait_for_running_work(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let pool = straddling_pool(device, BLOCKS);
    for _ in 0..20 {
        pool.grow_to(BLOCKS).unwrap();
        let lease = pool.gate().lease();
        let spans: Vec<_> = (0..BLOCKS).map(|block| pool.block_span(block).unwrap()).collect();
        // Shrinks while the batch on the CPU still has the addresses.
        pool.shrink_to(0, &[]).unwrap();
        assert_eq!(pool.poll_retired().unmapped_pages, 0);
        for span in spans.iter().cycle().take(200) {
            stream.fill(*span, 5).unwrap();
        }
        let done = recorded(&stream);
        lease.submitted(std::slice::from_ref(&done)).unwrap();
        // An early poll unmaps nothing, but must never fault.
        let early = pool.poll_retired().unmapped_pages;
        done.wait().unwrap();
        assert_eq!(early + pool.poll_retired().unmapped_pages, 12);
    }
    close(pool);
    stream.synchronize().unwrap();
}

fn threads_grow_and_write_at_once(device: &Device) {
    const THREADS: usize = 8;
    let pool = straddling_pool(device, 0);
    let (start, next) = (Barrier::new(THREADS), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let stream = Stream::new(device).unwrap();
                start.wait();
                loop {
                    let block = next.fetch_add(1, Ordering::Relaxed);
                    if block >= BLOCKS {
                        return;
                    }
                    pool.grow_to(block + 1).unwrap();
                    write(&pool, &stream, block, 7 * block);
                }
            });
        }
    });
    let stream = Stream::new(device).unwrap();
    (0..BLOCKS).for_each(|block| assert_holds(&pool, &stream, block, 7 * block));
    assert_eq!(pool.pages().stats().in_use, 12);
    close(pool);
}

fn a_range_is_moved_to_other_addresses(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (stock, space) = (pages(device, 3), reservation(device, 8));
    space.map_range(0, take(&stock, 3)).unwrap();
    let span = space.mapped_span(0..3).unwrap();
    let bytes = pattern(5, span.bytes());
    stream.upload(span, &bytes).unwrap();
    let report = space.retire(0..3, &[recorded(&stream)]).unwrap().wait().unwrap();
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    // The memory keeps its bytes, wherever it is mapped.
    space.map_range(5, report.pages).unwrap();
    let mut seen = vec![0; bytes.len()];
    stream.download(&mut seen, space.mapped_span(5..8).unwrap()).unwrap();
    assert!(seen == bytes, "the bytes changed with the addresses");
    assert!(space.close(&[recorded(&stream)]).wait().unwrap().is_clean());
}
