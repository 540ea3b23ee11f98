//! Programs ordered by streams, events and default streams. Without any one of the edges there is a
//! race.

use crate::common::PAGE;
use crate::races::harness::{LANES, Run, Stream, ordered};

/// An event recorded on one stream and waited for by the other, if the edge is enabled.
fn link(run: &Run, from: Stream, to: Stream) {
    run.order(from, to);
}

#[test]
fn one_stream() {
    ordered(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (x, y) = (run.alloc(64), run.alloc(64));
        run.fill(x, 64, a);
        run.copy(y, x, 64, if run.edge() { a } else { b });
    });
}

#[test]
fn an_event_in_each_direction() {
    ordered(|run| {
        let (compute, store) = (run.stream(), run.stream());
        let (host, block, hidden) = (run.pinned(64), run.alloc(64), run.alloc(64));
        run.copy_kernel(block, hidden, 64, compute);
        link(run, compute, store);
        run.download(host, block, 64, store);
        link(run, store, compute);
        run.copy_kernel(block, hidden, 64, compute);
    });
}

#[test]
fn a_chain_over_three_streams() {
    ordered(|run| {
        let (a, b, c) = (run.stream(), run.stream(), run.stream());
        let memory = run.alloc(64);
        run.fill(memory, 64, a);
        link(run, a, b);
        link(run, b, c);
        run.fill(memory, 64, c);
    });
}

#[test]
fn a_chain_over_three_streams_of_two_devices() {
    ordered(|run| {
        let (source, a) = (run.alloc(64), run.stream());
        let c = run.stream();
        run.use_device(1);
        let (to, b) = (run.alloc(64), run.stream());
        run.fill(source, 64, a);
        link(run, a, b);
        run.peer_copy((1, to), (0, source), 64, b);
        link(run, b, c);
        run.fill(source, 64, c);
    });
}

#[test]
fn disjoint_halves_of_one_buffer() {
    ordered(|run| {
        let (a, b) = (run.stream(), run.stream());
        let memory = run.alloc(4096);
        run.fill(memory, 2048, a);
        run.fill(memory + if run.edge() { 2048 } else { 2047 }, 2048, b);
    });
}

#[test]
fn interleaved_blocks_of_one_buffer() {
    ordered(|run| {
        let (a, b) = (run.stream(), run.stream());
        let memory = run.alloc(32 * 64);
        for block in 0..16 {
            run.fill(memory + 128 * block, 64, a);
        }
        let bytes = if run.edge() { 64 } else { 65 };
        for block in 0..15 {
            run.fill(memory + 128 * block + 64, bytes, b);
        }
    });
}

#[test]
fn reads_by_many_streams() {
    ordered(|run| {
        let source = run.alloc(64);
        let last = if run.edge() { (run.alloc(64), source) } else { (source, run.alloc(64)) };
        for _ in 0..8 {
            run.copy(run.alloc(64), source, 64, run.stream());
        }
        run.copy(last.0, last.1, 64, run.stream());
    });
}

#[test]
fn a_writer_waits_for_many_readers() {
    ordered(|run| {
        let (source, writer) = (run.alloc(64), run.stream());
        for _ in 0..4 {
            let reader = run.stream();
            run.copy(run.alloc(64), source, 64, reader);
            link(run, reader, writer);
        }
        run.fill(source, 64, writer);
    });
}

#[test]
fn an_event_recorded_again_after_a_wait_took_the_record() {
    ordered(|run| {
        let (a, b, event) = (run.stream(), run.stream(), run.event());
        let (memory, other) = (run.alloc(64), run.alloc(64));
        run.fill(memory, 64, a);
        run.record(event, a);
        if run.edge() {
            run.wait(b, event);
        }
        run.fill(other, 64, a);
        run.record(event, a);
        run.fill(memory, 64, b);
    });
}

#[test]
fn an_event_destroyed_after_a_wait_took_the_record() {
    ordered(|run| {
        let (a, b, event) = (run.stream(), run.stream(), run.event());
        let memory = run.alloc(64);
        run.fill(memory, 64, a);
        run.record(event, a);
        if run.edge() {
            run.wait(b, event);
        }
        // SAFETY: handles are looked up.
        unsafe { cuda_driver::Driver::event_destroy(&run.sim, event) }.unwrap();
        run.fill(memory, 64, b);
    });
}

#[test]
fn an_event_of_a_later_operation_orders_those_before_it() {
    ordered(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (x, y, z) = (run.alloc(64), run.alloc(64), run.alloc(64));
        run.fill(x, 64, a);
        run.fill(y, 64, a);
        run.fill(z, 64, a);
        link(run, a, b);
        run.fill(x, 64, b);
    });
}

#[test]
fn a_stream_that_was_destroyed_after_its_event_was_recorded() {
    ordered(|run| {
        let (a, b) = (run.stream(), run.stream());
        let memory = run.alloc(64);
        run.fill(memory, 64, a);
        link(run, a, b);
        run.destroy(a);
        run.fill(memory, 64, b);
    });
}

#[test]
fn the_default_stream_after_a_blocking_stream() {
    ordered(|run| {
        let a = if run.edge() { run.blocking() } else { run.stream() };
        let memory = run.alloc(64);
        run.fill(memory, 64, a);
        run.fill(memory, 64, run.default_stream(0));
    });
}

#[test]
fn a_blocking_stream_after_the_default_stream() {
    ordered(|run| {
        let b = if run.edge() { run.blocking() } else { run.stream() };
        let memory = run.alloc(64);
        run.fill(memory, 64, run.default_stream(0));
        run.fill(memory, 64, b);
    });
}

#[test]
fn work_of_the_default_stream_between_two_blocking_streams() {
    ordered(|run| {
        let (a, b) = (run.blocking(), run.blocking());
        let (memory, other) = (run.alloc(64), run.alloc(64));
        run.fill(memory, 64, a);
        if run.edge() {
            run.fill(other, 64, run.default_stream(0));
        }
        run.fill(memory, 64, b);
    });
}

#[test]
fn a_blocking_stream_that_was_destroyed_before_the_default_stream() {
    ordered(|run| {
        let a = if run.edge() { run.blocking() } else { run.stream() };
        let memory = run.alloc(64);
        run.fill(memory, 64, a);
        run.destroy(a);
        run.fill(memory, 64, run.default_stream(0));
    });
}

#[test]
fn an_event_of_the_default_stream_carries_the_blocking_streams() {
    ordered(|run| {
        let (a, default, b) = (run.blocking(), run.default_stream(0), run.stream());
        let memory = run.alloc(64);
        run.fill(memory, 64, a);
        link(run, default, b);
        run.fill(memory, 64, b);
    });
}

#[test]
fn an_event_between_the_default_streams_of_two_devices() {
    ordered(|run| {
        let memory = run.alloc(64);
        run.use_device(1);
        let to = run.alloc(64);
        run.fill(memory, 64, run.default_stream(0));
        link(run, run.default_stream(0), run.default_stream(1));
        run.peer_copy((1, to), (0, memory), 64, run.default_stream(1));
    });
}

#[test]
fn atomics_of_two_streams() {
    ordered(|run| {
        let (a, b) = (run.stream(), run.stream());
        let memory = run.alloc(4 * LANES);
        run.add_kernel(memory, a);
        if run.edge() {
            run.add_kernel(memory, b);
        } else {
            run.store_kernel(memory, b);
        }
    });
}

#[test]
fn atomics_of_two_devices_and_a_read_after_both() {
    ordered(|run| {
        run.enable_peers();
        run.use_device(0);
        let (memory, near) = (run.alloc(4 * LANES), run.stream());
        run.use_device(1);
        let far = run.stream();
        run.add_as("add_words_of_the_system", memory, near);
        run.add_as("add_words_of_the_system", memory, far);
        link(run, far, near);
        run.load_kernel(memory, near);
    });
}

/// Each GPU makes its own updates there. What another only polls is the old word or the new one.
#[test]
fn a_poll_of_a_word_of_the_host_that_another_device_updates() {
    ordered(|run| {
        let (memory, near) = (run.pinned(64), run.stream());
        run.use_device(1);
        let far = run.stream();
        run.add_as("add_words_of_the_system", memory, near);
        run.add_as("poll_a_word_of_the_system", memory, far);
        run.add_as("add_words_of_the_system", memory, near);
        link(run, near, far);
        run.add_as("add_words_of_the_system", memory, far);
    });
}

#[test]
fn a_graph_between_two_copies() {
    ordered(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (x, y) = (run.alloc(4 * LANES), run.alloc(4 * LANES));
        run.fill(x, 4 * LANES, a);
        link(run, a, b);
        run.store_graph(x, b);
        link(run, b, a);
        run.copy(y, x, 4 * LANES, a);
    });
}

#[test]
fn two_mappings_of_one_page_in_order() {
    ordered(|run| {
        let (a, b, page) = (run.stream(), run.stream(), run.page());
        let (x, y) = (run.addresses(), run.addresses());
        for address in [x, y] {
            run.map(address, page);
            run.set_access(address, &[0]);
        }
        run.fill(x, PAGE, a);
        link(run, a, b);
        run.fill(y, PAGE, b);
    });
}

#[test]
fn two_pages_are_two_memories() {
    ordered(|run| {
        let (a, b, x) = (run.stream(), run.stream(), run.page());
        let y = if run.edge() { run.page() } else { x };
        for (page, stream) in [(x, a), (y, b)] {
            let address = run.addresses();
            run.map(address, page);
            run.set_access(address, &[0]);
            run.fill(address, PAGE, stream);
        }
    });
}
