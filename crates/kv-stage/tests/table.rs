//! The persistent table keeps its address: readers of that address see every later edit.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

#[allow(dead_code, reason = "each test program uses a part")]
#[path = "support/rows.rs"]
mod rows;

use kv_stage::BlockTable;
use rows::row_at;

thread_local! {
    /// Number of allocations and reallocations of this thread.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counted;

fn count() {
    // Also called while a thread ends.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is passed to the system's allocator.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// An allocator may return the same address again, so an equal address alone proves nothing.
#[test]
fn a_table_allocates_nothing_after_it_was_made_and_keeps_its_address() {
    const SLOTS: usize = 8;
    const COLUMNS: usize = 64;
    let mut table = BlockTable::new(SLOTS, COLUMNS).unwrap();
    let (address, entries) = (table.as_slice().as_ptr(), table.as_slice().len());
    let before = ALLOCATIONS.get();
    for edit in 0..100_000usize {
        let (slot, column) = (edit * 7 % SLOTS, edit * 13 % COLUMNS);
        match edit % 5 {
            0 => table.set(row_at(slot), column, edit as i32).unwrap(),
            1 => table.set(row_at(slot), column, -1).unwrap(),
            2 if table.len(row_at(slot)).unwrap() < COLUMNS => {
                table.append(row_at(slot), 3).unwrap()
            }
            3 => table.truncate(row_at(slot), column).unwrap(),
            _ => table.clear_row(row_at(slot)).unwrap(),
        }
        assert_eq!((table.as_slice().as_ptr(), table.as_slice().len()), (address, entries));
    }
    assert_eq!(ALLOCATIONS.get(), before, "the table was moved, or grew");
}
