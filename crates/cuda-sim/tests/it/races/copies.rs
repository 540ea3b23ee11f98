//! Copies, fills and batches of two streams over the same bytes.

use crate::races::harness::{planted, race};

#[test]
fn a_fill_and_a_fill() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let memory = run.alloc(4096);
        let first = run.fill(memory, 4096, a);
        run.order(a, b);
        let second = run.fill(memory + 100, 4, b);
        race(first.writes(), second.writes()).over(memory + 100, 4).hazard("H23")
    });
}

#[test]
fn a_copy_reads_what_a_fill_writes() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (source, to) = (run.alloc(256), run.alloc(256));
        let first = run.fill(source, 64, a);
        run.order(a, b);
        let second = run.copy(to, source + 32, 64, b);
        race(first.writes(), second.reads()).over(source + 32, 32).hazard("H23")
    });
}

#[test]
fn a_fill_writes_what_a_copy_reads() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (source, to) = (run.alloc(256), run.alloc(256));
        let first = run.copy(to, source, 256, a);
        run.order(a, b);
        let second = run.fill(source + 255, 1, b);
        race(first.reads(), second.writes()).over(source + 255, 1).hazard("H23")
    });
}

#[test]
fn a_copy_reads_what_an_upload_brings() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (host, memory, to) = (run.pinned(64), run.alloc(64), run.alloc(64));
        let first = run.upload(memory, host, 64, a);
        run.order(a, b);
        let second = run.copy(to, memory, 64, b);
        race(first.writes(), second.reads()).over(memory, 64).hazard("H23")
    });
}

#[test]
fn a_copy_reads_what_comes_from_pageable_memory() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (memory, to) = (run.alloc(64), run.alloc(64));
        // The call copies the bytes, and returns before they arrive at the device.
        let source = [7u8; 64];
        let first = run.upload(memory, source.as_ptr() as u64, 64, a);
        run.order(a, b);
        let second = run.copy(to, memory, 64, b);
        race(first.writes(), second.reads()).over(memory, 64).hazard("H23")
    });
}

#[test]
fn a_download_to_pageable_memory_reads_what_a_fill_writes() {
    planted(|run| {
        let (a, b, memory) = (run.stream(), run.stream(), run.alloc(64));
        let first = run.fill(memory, 64, a);
        run.order(a, b);
        let second = run.download_pageable(memory + 8, 8, b);
        race(first.writes(), second.reads()).over(memory + 8, 8).hazard("H23")
    });
}

#[test]
fn a_fill_writes_what_a_download_reads() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (host, memory) = (run.pinned(64), run.alloc(64));
        let first = run.download(host, memory, 64, a);
        run.order(a, b);
        let second = run.fill(memory, 64, b);
        race(first.reads(), second.writes()).over(memory, 64).hazard("H23")
    });
}

#[test]
fn two_downloads_to_the_same_pinned_memory() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (host, x, y) = (run.pinned(64), run.alloc(64), run.alloc(64));
        let first = run.download(host, x, 64, a);
        run.order(a, b);
        let second = run.download(host + 16, y, 16, b);
        race(first.writes(), second.writes()).over(host + 16, 16).hazard("H23")
    });
}

#[test]
fn an_upload_reads_the_pinned_memory_that_a_download_fills() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (host, x, y) = (run.pinned(64), run.alloc(64), run.alloc(64));
        let first = run.download(host, x, 64, a);
        run.order(a, b);
        let second = run.upload(y, host, 64, b);
        race(first.writes(), second.reads()).over(host, 64).hazard("H23")
    });
}

#[test]
fn a_download_fills_the_pinned_memory_that_an_upload_reads() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (host, x, y) = (run.pinned(64), run.alloc(64), run.alloc(64));
        let first = run.upload(y, host, 64, a);
        run.order(a, b);
        let second = run.download(host, x, 64, b);
        race(first.reads(), second.writes()).over(host, 64).hazard("H23")
    });
}

#[test]
fn a_batch_writes_what_a_fill_writes() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (x, y, target) = (run.alloc(64), run.alloc(64), run.alloc(256));
        let first = run.fill(target + 128, 64, a);
        run.order(a, b);
        let second = run.batch(&[(target, x, 64), (target + 160, y, 64)], b);
        race(first.writes(), second.writes()).over(target + 160, 32).hazard("H23")
    });
}

#[test]
fn a_fill_writes_what_a_batch_reads() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (x, y, target) = (run.alloc(64), run.alloc(64), run.alloc(256));
        let first = run.batch(&[(target, x, 64), (target + 64, y, 64)], a);
        run.order(a, b);
        let second = run.fill(y, 64, b);
        race(first.reads(), second.writes()).over(y, 64).hazard("H23")
    });
}

#[test]
fn two_copies_over_many_pages() {
    // The detector works on pages of 256 KiB. The report names the first piece.
    const BYTES: u64 = 1 << 20;
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (x, target) = (run.alloc(BYTES), run.alloc(BYTES));
        let first = run.copy(target, x, BYTES, a);
        run.order(a, b);
        let second = run.fill(target, BYTES, b);
        race(first.writes(), second.writes()).over(target, BYTES).hazard("H23")
    });
}

#[test]
fn two_mappings_of_one_page_of_memory() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let page = run.page();
        let [x, y] = [(); 2].map(|()| {
            let address = run.addresses();
            run.map(address, page);
            run.set_access(address, &[0]);
            address
        });
        let first = run.fill(x, 64, a);
        run.order(a, b);
        let second = run.fill(y + 32, 64, b);
        // The report has the address of the side that ran later.
        let range = (x.min(y), x.max(y) + 96 - x.min(y));
        race(first.writes(), second.writes()).over(range.0, range.1).hazard("H23").varies()
    });
}
