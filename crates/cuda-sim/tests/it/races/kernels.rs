//! Kernels by a reference and from their PTX, launches of graphs, and atomics.

use crate::races::harness::{LANES, planted, race};

/// Number of bytes that a kernel from PTX uses.
const WORDS: u64 = 4 * LANES;

#[test]
fn a_kernel_reads_what_a_kernel_writes() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (x, y, z) = (run.alloc(64), run.alloc(64), run.alloc(64));
        let first = run.copy_kernel(y, x, 64, a);
        run.order(a, b);
        let second = run.copy_kernel(z, y + 16, 8, b);
        race(first.writes(), second.reads()).over(y + 16, 8)
    });
}

#[test]
fn a_kernel_writes_what_a_kernel_reads() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (x, y, z) = (run.alloc(64), run.alloc(64), run.alloc(64));
        let first = run.copy_kernel(y, x, 64, a);
        run.order(a, b);
        let second = run.copy_kernel(x + 8, z, 8, b);
        race(first.reads(), second.writes()).over(x + 8, 8)
    });
}

#[test]
fn an_upload_writes_what_a_kernel_reads() {
    planted(|run| {
        let (compute, load) = (run.stream(), run.stream());
        let (host, x, y) = (run.pinned(64), run.alloc(64), run.alloc(64));
        let first = run.copy_kernel(y, x, 64, compute);
        run.order(compute, load);
        let second = run.upload(x, host, 64, load);
        race(first.reads(), second.writes()).over(x, 64).hazard("H23")
    });
}

#[test]
fn a_download_reads_what_a_kernel_writes() {
    planted(|run| {
        let (compute, store) = (run.stream(), run.stream());
        let (host, x, y) = (run.pinned(64), run.alloc(64), run.alloc(64));
        let first = run.copy_kernel(y, x, 64, compute);
        run.order(compute, store);
        let second = run.download(host, y, 64, store);
        race(first.writes(), second.reads()).over(y, 64).hazard("H23")
    });
}

#[test]
fn a_copy_reads_what_ptx_stores() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (x, y) = (run.alloc(4096), run.alloc(4096));
        let first = run.store_kernel(x + 64, a);
        run.order(a, b);
        let second = run.copy(y, x, 4096, b);
        race(first.writes(), second.reads()).over(x + 64, WORDS).hazard("H23")
    });
}

#[test]
fn a_fill_writes_what_ptx_loads() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let x = run.alloc(4096);
        let first = run.load_kernel(x + 64, a);
        run.order(a, b);
        let second = run.fill(x + 72, 1, b);
        race(first.reads(), second.writes()).over(x + 72, 1).hazard("H23")
    });
}

#[test]
fn ptx_loads_what_a_fill_writes() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let x = run.alloc(4096);
        let first = run.fill(x, 4096, a);
        run.order(a, b);
        let second = run.load_kernel(x + 64, b);
        race(first.writes(), second.reads()).over(x + 64, WORDS).hazard("H23")
    });
}

#[test]
fn ptx_stores_what_ptx_stores() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let x = run.alloc(4096);
        let first = run.store_kernel(x, a);
        run.order(a, b);
        let second = run.store_kernel(x + WORDS / 2, b);
        race(first.writes(), second.writes()).over(x + WORDS / 2, WORDS / 2)
    });
}

#[test]
fn a_plain_load_beside_atomics() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let x = run.alloc(4096);
        let first = run.add_kernel(x, a);
        run.order(a, b);
        let second = run.load_kernel(x, b);
        race(first.writes(), second.reads()).over(x, WORDS)
    });
}

#[test]
fn atomics_of_two_sizes() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let x = run.alloc(4096);
        let first = run.add_kernel(x, a);
        run.order(a, b);
        let second = run.add_as("add_wide", x, b);
        race(first.writes(), second.writes()).over(x, 8)
    });
}

#[test]
fn atomics_of_one_block_beside_those_of_the_device() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let x = run.alloc(4096);
        let first = run.add_kernel(x, a);
        run.order(a, b);
        let second = run.add_as("add_words_of_the_block", x, b);
        race(first.writes(), second.writes()).over(x, 4)
    });
}

#[test]
fn atomics_beside_a_copy_that_reads() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (x, y) = (run.alloc(4096), run.alloc(4096));
        let first = run.copy(y, x, 8, a);
        run.order(a, b);
        let second = run.add_kernel(x, b);
        race(first.reads(), second.writes()).over(x, 8).hazard("H23")
    });
}

#[test]
fn a_copy_reads_what_a_graph_writes() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (x, y) = (run.alloc(WORDS), run.alloc(WORDS));
        let first = run.store_graph(x, a);
        run.order(a, b);
        let second = run.copy(y, x, WORDS, b);
        race(first.writes(), second.reads()).over(x, WORDS).hazard("H23")
    });
}

#[test]
fn a_graph_writes_what_a_copy_reads() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (x, y) = (run.alloc(WORDS), run.alloc(WORDS));
        let first = run.copy(y, x, WORDS, a);
        run.order(a, b);
        let second = run.store_graph(x, b);
        race(first.reads(), second.writes()).over(x, WORDS).hazard("H23")
    });
}

#[test]
fn two_graphs_write_the_same() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let x = run.alloc(WORDS);
        let first = run.store_graph(x, a);
        run.order(a, b);
        let second = run.store_graph(x, b);
        race(first.writes(), second.writes()).over(x, WORDS)
    });
}

#[test]
fn a_kernel_with_a_name_like_that_of_a_call_is_no_copy() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let x = run.alloc(WORDS);
        let first = run.store_kernel(x, a);
        run.order(a, b);
        let second = run.cumulate_kernel(x, b);
        race(first.writes(), second.reads()).over(x, 4)
    });
}
