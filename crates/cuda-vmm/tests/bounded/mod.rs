//! An allocator that gives the process no more than 1 GiB at once: a size that asks for more ends the
//! test, and not the machine.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

const MOST: usize = 1 << 30;

struct Bounded;

#[global_allocator]
static BOUNDED: Bounded = Bounded;

/// Bytes that are in use. A counter, so `Relaxed`.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Whether `bytes` more may be used; counts them if so.
fn take(bytes: usize) -> bool {
    let more = |used: usize| used.checked_add(bytes).filter(|&used| used <= MOST);
    USED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
}

fn give_back(bytes: usize) {
    USED.fetch_sub(bytes, Ordering::Relaxed);
}

// SAFETY: every method is the system allocator's, called with the same arguments, or gives nothing.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        give_back(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`, which is the same, and
        // `memory` came from the system allocator, as all memory that this one gives.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc_zeroed`, which is the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !take(size) {
            return std::ptr::null_mut();
        }
        give_back(layout.size());
        // SAFETY: as for `dealloc`, and the caller keeps the contract of `GlobalAlloc::realloc`.
        unsafe { System.realloc(memory, layout, size) }
    }
}
