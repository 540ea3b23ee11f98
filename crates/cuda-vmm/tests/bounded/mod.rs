//! An allocator that limits the process to 1 GiB: a request for more ends the test instead of
//! exhausting the machine.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

const MOST: usize = 1 << 30;

struct Bounded;

#[global_allocator]
static BOUNDED: Bounded = Bounded;

/// Bytes in use. A counter, so `Relaxed`.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Counts `bytes` more if the limit allows them; returns whether it does.
fn take(bytes: usize) -> bool {
    let more = |used: usize| used.checked_add(bytes).filter(|&used| used <= MOST);
    USED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
}

fn give_back(bytes: usize) {
    USED.fetch_sub(bytes, Ordering::Relaxed);
}

// SAFETY: every method calls the system allocator with the same arguments, or returns null.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller meets the contract of `GlobalAlloc::alloc`, which is the same here.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        give_back(layout.size());
        // SAFETY: the caller meets the contract of `GlobalAlloc::dealloc`, which is the same here,
        // and `memory` came from the system allocator, like all memory of this allocator.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller meets the contract of `GlobalAlloc::alloc_zeroed`, which is the same
        // here.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !take(size) {
            return std::ptr::null_mut();
        }
        give_back(layout.size());
        // SAFETY: as for `dealloc`, and the caller meets the contract of `GlobalAlloc::realloc`.
        unsafe { System.realloc(memory, layout, size) }
    }
}
