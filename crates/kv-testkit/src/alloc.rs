//! An allocator that keeps each thread within a bound and counts what it asks for.
//!
//! A bound that is passed ends the program, instead of exhausting the machine: an unchecked size is a
//! failed test. It holds for what one thread has asked for and not given back, so that tests beside each
//! other do not add up.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Makes [`Bounded`] the allocator of a test program: `kv_testkit::allocator!(1 << 30);` beside the
/// first items of its root file.
#[macro_export]
macro_rules! allocator {
    ($bytes_max:expr) => {
        #[global_allocator]
        static BOUNDED: $crate::alloc::Bounded = $crate::alloc::Bounded::new($bytes_max);
    };
}

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<i64> = const { Cell::new(0) };
    static MORE: Cell<i64> = const { Cell::new(0) };
}

/// Lets this thread have `bytes` beyond the bound: for a test that leaks on purpose.
pub fn allow(bytes: i64) {
    MORE.set(bytes);
}

/// Allocations of this thread so far.
pub fn allocations() -> u64 {
    ALLOCATIONS.get()
}

/// Bytes that this thread has asked for, less those that it has given back.
pub fn bytes() -> i64 {
    BYTES.get()
}

/// The system's allocator, with a bound for each thread. See [`allocator!`](crate::allocator!).
#[derive(Debug)]
pub struct Bounded {
    bytes_max: i64,
}

impl Bounded {
    /// Refuses what would take a thread beyond `bytes_max`.
    pub const fn new(bytes_max: i64) -> Self {
        Self { bytes_max }
    }

    /// Counts an allocation of `size` bytes in place of `freed`; answers whether it is within the bound.
    fn take(&self, size: usize, freed: usize) -> bool {
        let (size, freed) = (i64::try_from(size).unwrap_or(i64::MAX), freed as i64);
        let bytes = BYTES.get().saturating_sub(freed).saturating_add(size);
        let fits = bytes <= self.bytes_max.saturating_add(MORE.get());
        if fits {
            ALLOCATIONS.set(ALLOCATIONS.get() + 1);
            BYTES.set(bytes);
        }
        fits
    }
}

// SAFETY: every method is the system allocator's with the same arguments, or refuses by null. The counters
// are constant-initialised and have no destructor, so touching them neither allocates nor fails.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !self.take(layout.size(), 0) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        BYTES.set(BYTES.get() - layout.size() as i64);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`, which is the same, and `memory`
        // came from the system allocator, as all memory that this one gives.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !self.take(layout.size(), 0) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc_zeroed`, which is the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !self.take(size, layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: as for `dealloc`, and the caller keeps the contract of `GlobalAlloc::realloc`.
        unsafe { System.realloc(memory, layout, size) }
    }
}
