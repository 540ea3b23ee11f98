//! The host beside copies and kernels that use pinned memory.

use crate::races::harness::{Edge, LANES, planted, race};

const NOT_FOUND: &str = "the host did not find it complete before";

#[test]
fn the_host_writes_the_source_of_a_copy() {
    planted(|run| {
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        run.host_writes(host, 64);
        let first = run.upload(memory, host, 64, a);
        run.host_waits(a);
        let second = run.host_writes(host + 8, 4);
        race(first.reads(), second.writes()).over(host + 8, 4).hazard("H13")
    });
}

#[test]
fn the_host_writes_what_a_kernel_reads() {
    planted(|run| {
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        run.host_writes(host, 64);
        let first = run.copy_kernel(memory, host, 64, a);
        run.host_waits(a);
        let second = run.host_writes(host, 64);
        race(first.reads(), second.writes()).over(host, 64).hazard("H14")
    });
}

#[test]
fn the_host_writes_what_ptx_reads() {
    planted(|run| {
        let (host, a) = (run.pinned(4 * LANES), run.stream());
        let first = run.load_kernel(host, a);
        run.host_waits(a);
        let second = run.host_writes(host, 4);
        race(first.reads(), second.writes()).over(host, 4).hazard("H14")
    });
}

#[test]
fn the_host_reads_before_the_bytes_arrive() {
    planted(|run| {
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        let first = run.download(host, memory, 64, a);
        run.host_waits(a);
        let second = run.host_reads(host, 64);
        race(first.writes(), second.reads()).over(host, 64).hazard("H21")
    });
}

#[test]
fn the_host_reads_what_a_kernel_writes() {
    planted(|run| {
        let (host, a) = (run.pinned(4 * LANES), run.stream());
        let first = run.store_kernel(host, a);
        run.host_waits(a);
        let second = run.host_reads(host + 4, 4);
        race(first.writes(), second.reads()).over(host + 4, 4).hazard("H21")
    });
}

#[test]
fn the_host_reads_after_a_query_that_said_not_ready() {
    planted(|run| {
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        let event = run.event();
        let first = run.download(host, memory, 64, a);
        let recorded = run.record(event, a);
        // Whether or not the copy is complete, queries of its event answer late.
        run.sim.delay_event(event, 1);
        run.sim.run_all();
        assert!(!run.query(event));
        if run.mend(Edge::HostWait(a.handle)) {
            assert!(run.query(event));
        }
        let second = run.host_reads(host, 64);
        let found = race(first.writes(), second.reads()).over(host, 64).hazard("H21");
        found.nearest(NOT_FOUND, event, recorded)
    });
}

#[test]
fn the_host_asked_for_an_event_of_before() {
    planted(|run| {
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        let (before, after) = (run.event(), run.event());
        run.record(before, a);
        let first = run.download(host, memory, 64, a);
        let recorded = run.record(after, a);
        run.sim.run_all();
        let mended = run.mend(Edge::HostWait(a.handle));
        assert!(run.query(if mended { after } else { before }));
        let second = run.host_reads(host, 64);
        let found = race(first.writes(), second.reads()).over(host, 64).hazard("H21");
        found.nearest(NOT_FOUND, after, recorded)
    });
}

#[test]
fn the_host_asked_for_another_stream() {
    planted(|run| {
        let (host, memory, a, b) = (run.pinned(64), run.alloc(128), run.stream(), run.stream());
        let first = run.download(host, memory, 64, a);
        run.fill(memory + 64, 64, b);
        run.sim.run_all();
        let mended = run.mend(Edge::HostWait(a.handle));
        assert!(run.query_stream(if mended { a } else { b }));
        let second = run.host_reads(host, 64);
        race(first.writes(), second.reads()).over(host, 64).hazard("H21")
    });
}

#[test]
fn the_host_waited_for_an_event_of_before() {
    planted(|run| {
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        let event = run.event();
        let mended = run.mend(Edge::HostWait(a.handle));
        if !mended {
            run.record(event, a);
        }
        let first = run.upload(memory, host, 64, a);
        if mended {
            run.record(event, a);
        }
        run.sync_event(event);
        let second = run.host_writes(host, 64);
        race(first.reads(), second.writes()).over(host, 64).hazard("H13")
    });
}

#[test]
fn the_host_waited_for_the_other_device() {
    planted(|run| {
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        run.use_device(1);
        let first = run.download(host, memory, 64, a);
        let mended = run.mend(Edge::HostWait(a.handle));
        run.sync_device(if mended { 0 } else { 1 });
        let second = run.host_reads(host, 64);
        race(first.writes(), second.reads()).over(host, 64).hazard("H21")
    });
}

#[test]
fn the_host_waited_for_the_default_stream() {
    planted(|run| {
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        let first = run.download(host, memory, 64, a);
        let mended = run.mend(Edge::HostWait(a.handle));
        run.sync(if mended { a } else { run.default_stream(0) });
        let second = run.host_reads(host, 64);
        race(first.writes(), second.reads()).over(host, 64).hazard("H21")
    });
}

#[test]
fn the_host_writes_over_bytes_that_arrive() {
    planted(|run| {
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        let first = run.download(host, memory, 64, a);
        run.host_waits(a);
        let second = run.host_writes(host + 63, 1);
        race(first.writes(), second.writes()).over(host + 63, 1)
    });
}

#[test]
fn the_host_reads_memory_that_it_registered() {
    planted(|run| {
        let (host, memory, a) = (run.registered(64), run.alloc(64), run.stream());
        let first = run.download(host, memory, 64, a);
        run.host_waits(a);
        let second = run.host_reads(host, 64);
        race(first.writes(), second.reads()).over(host, 64).hazard("H21")
    });
}

#[test]
fn the_host_reads_what_the_default_stream_brings() {
    planted(|run| {
        let (host, memory) = (run.pinned(64), run.alloc(64));
        let default = run.default_stream(0);
        let first = run.download(host, memory, 64, default);
        run.host_waits(default);
        let second = run.host_reads(host, 64);
        race(first.writes(), second.reads()).over(host, 64).hazard("H21")
    });
}
