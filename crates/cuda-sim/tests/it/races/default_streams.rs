//! The legacy default stream is ordered with blocking streams of its device, and with no others.

use crate::races::harness::{Edge, planted, race};

#[test]
fn a_stream_that_does_not_block_after_the_default_stream() {
    planted(|run| {
        let (default, b) = (run.default_stream(0), run.stream());
        let memory = run.alloc(64);
        let first = run.fill(memory, 64, default);
        run.order(default, b);
        let second = run.fill(memory, 64, b);
        race(first.writes(), second.writes()).over(memory, 64).hazard("H23")
    });
}

#[test]
fn the_default_stream_after_a_stream_that_does_not_block() {
    planted(|run| {
        let (a, default) = (run.stream(), run.default_stream(0));
        let (memory, to) = (run.alloc(64), run.alloc(64));
        let first = run.fill(memory, 64, a);
        run.order(a, default);
        let second = run.copy(to, memory, 64, default);
        race(first.writes(), second.reads()).over(memory, 64).hazard("H23")
    });
}

#[test]
fn an_event_of_the_default_stream_that_nobody_waits_for() {
    planted(|run| {
        let (default, b, event) = (run.default_stream(0), run.stream(), run.event());
        let memory = run.alloc(64);
        let first = run.fill(memory, 64, default);
        let recorded = run.record(event, default);
        if run.mend(Edge::StreamWait(0, b.handle)) {
            run.wait(b, event);
        }
        let second = run.fill(memory, 64, b);
        let found = race(first.writes(), second.writes()).over(memory, 64).hazard("H23");
        found.nearest("does not wait for it before", event, recorded)
    });
}

#[test]
fn two_streams_that_both_block() {
    planted(|run| {
        let (a, b) = (run.blocking(), run.blocking());
        let memory = run.alloc(64);
        let first = run.fill(memory, 64, a);
        run.order(a, b);
        let second = run.fill(memory, 64, b);
        race(first.writes(), second.writes()).over(memory, 64).hazard("H23")
    });
}

#[test]
fn work_of_the_default_stream_that_came_before_orders_nothing() {
    planted(|run| {
        let (a, default, b) = (run.blocking(), run.default_stream(0), run.blocking());
        let (memory, other) = (run.alloc(64), run.alloc(64));
        run.fill(other, 64, default);
        let first = run.fill(memory, 64, a);
        run.order(a, b);
        let second = run.fill(memory, 64, b);
        race(first.writes(), second.writes()).over(memory, 64).hazard("H23")
    });
}

#[test]
fn the_default_streams_of_two_devices() {
    planted(|run| {
        let (near, far) = (run.default_stream(0), run.default_stream(1));
        let memory = run.alloc(64);
        run.use_device(1);
        let to = run.alloc(64);
        let first = run.fill(memory, 64, near);
        let event = run.event();
        if run.mend(Edge::StreamWait(0, 0)) {
            run.record(event, near);
            run.wait(far, event);
        }
        let second = run.peer_copy((1, to), (0, memory), 64, far);
        race(first.writes(), second.reads()).over(memory, 64).hazard("H19")
    });
}

#[test]
fn a_blocking_stream_and_the_default_stream_of_another_device() {
    planted(|run| {
        let memory = run.alloc(64);
        let default = run.default_stream(0);
        run.use_device(1);
        let (to, far) = (run.alloc(64), run.blocking());
        let first = run.peer_copy((1, to), (0, memory), 64, far);
        run.order(far, default);
        let second = run.fill(memory, 64, default);
        race(first.reads(), second.writes()).over(memory, 64).hazard("H19")
    });
}
