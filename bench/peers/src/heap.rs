//! A heap that counts while it is told to, to see how often each pool asks for memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

/// The system's heap. While nobody counts, it costs one load of a flag that nobody writes, the same
/// for every contender.
pub struct CountingHeap;

static COUNTING: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicU64 = AtomicU64::new(0);
static LIVE_BYTES: AtomicI64 = AtomicI64::new(0);

/// What was asked of the heap while it counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Count {
    /// Calls that gave out memory: allocations and reallocations.
    pub calls: u64,
    /// Bytes given out less bytes given back.
    pub live_bytes: i64,
}

/// Counts what `work` asks of the heap, on all threads.
pub fn count<T>(work: impl FnOnce() -> T) -> (Count, T) {
    CALLS.store(0, Relaxed);
    LIVE_BYTES.store(0, Relaxed);
    COUNTING.store(true, Relaxed);
    let result = work();
    COUNTING.store(false, Relaxed);
    let count = Count { calls: CALLS.load(Relaxed), live_bytes: LIVE_BYTES.load(Relaxed) };
    (count, result)
}

#[cold]
fn given(bytes: usize) {
    CALLS.fetch_add(1, Relaxed);
    LIVE_BYTES.fetch_add(bytes as i64, Relaxed);
}

#[cold]
fn taken_back(bytes: usize) {
    LIVE_BYTES.fetch_sub(bytes as i64, Relaxed);
}

// SAFETY: every method hands its arguments to `System`, which is a `GlobalAlloc`, and returns what
// `System` returned; counting touches atomics alone, so it neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTING.load(Relaxed) {
            given(layout.size());
        }
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`, which is `System`'s too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if COUNTING.load(Relaxed) {
            given(layout.size());
        }
        // SAFETY: the caller keeps the contract of `alloc_zeroed`, which is `System`'s too.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if COUNTING.load(Relaxed) {
            given(size);
            taken_back(layout.size());
        }
        // SAFETY: `block` came from `System`, through `alloc` here, with this layout; the rest is
        // the contract of `realloc`, which the caller keeps.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if COUNTING.load(Relaxed) {
            taken_back(layout.size());
        }
        // SAFETY: `block` came from `System`, through `alloc` here, with this layout.
        unsafe { System.dealloc(block, layout) }
    }
}
