//! Events that are recorded or waited for too early, too late, in the wrong stream, or not at all.

use crate::races::harness::{Edge, planted, race};

const NOT_WAITED: &str = "does not wait for it before";
const STALE: &str = "which was recorded on the";
const LATE: &str = "but only after";

#[test]
fn recorded_too_early() {
    planted(|run| {
        let (a, b, event) = (run.stream(), run.stream(), run.event());
        let memory = run.alloc(64);
        let mended = run.mend(Edge::StreamWait(a.handle, b.handle));
        if !mended {
            run.record(event, a);
        }
        let first = run.fill(memory, 64, a);
        if mended {
            run.record(event, a);
        }
        let waited = run.wait(b, event);
        let second = run.fill(memory, 64, b);
        let found = race(first.writes(), second.writes()).over(memory, 64).hazard("H23");
        found.nearest(STALE, event, waited)
    });
}

#[test]
fn never_waited_for() {
    planted(|run| {
        let (a, b, event) = (run.stream(), run.stream(), run.event());
        let memory = run.alloc(64);
        let first = run.fill(memory, 64, a);
        let recorded = run.record(event, a);
        if run.mend(Edge::StreamWait(a.handle, b.handle)) {
            run.wait(b, event);
        }
        let second = run.fill(memory, 64, b);
        let found = race(first.writes(), second.writes()).over(memory, 64).hazard("H23");
        found.nearest(NOT_WAITED, event, recorded)
    });
}

#[test]
fn waited_for_too_late() {
    planted(|run| {
        let (a, b, event) = (run.stream(), run.stream(), run.event());
        let memory = run.alloc(64);
        let first = run.fill(memory, 64, a);
        let recorded = run.record(event, a);
        let mended = run.mend(Edge::StreamWait(a.handle, b.handle));
        if mended {
            run.wait(b, event);
        }
        let second = run.fill(memory, 64, b);
        let waited = run.wait(b, event);
        let found = race(first.writes(), second.writes()).over(memory, 64).hazard("H23");
        found.nearest(NOT_WAITED, event, recorded).nearest(LATE, event, waited)
    });
}

#[test]
fn recorded_again_after_the_wait() {
    planted(|run| {
        let (a, b, event) = (run.stream(), run.stream(), run.event());
        let (memory, other) = (run.alloc(64), run.alloc(64));
        run.fill(other, 64, a);
        run.record(event, a);
        run.wait(b, event);
        // The wait is for the earlier record.
        let first = run.fill(memory, 64, a);
        let again = run.record(event, a);
        if run.mend(Edge::StreamWait(a.handle, b.handle)) {
            run.wait(b, event);
        }
        let second = run.fill(memory, 64, b);
        let found = race(first.writes(), second.writes()).over(memory, 64).hazard("H23");
        found.nearest(NOT_WAITED, event, again)
    });
}

#[test]
fn recorded_again_on_another_stream() {
    planted(|run| {
        let (a, other, b, event) = (run.stream(), run.stream(), run.stream(), run.event());
        let memory = run.alloc(64);
        let first = run.fill(memory, 64, a);
        let recorded = run.record(event, a);
        if !run.mend(Edge::StreamWait(a.handle, b.handle)) {
            run.record(event, other);
        }
        run.wait(b, event);
        let second = run.fill(memory, 64, b);
        let found = race(first.writes(), second.writes()).over(memory, 64).hazard("H23");
        found.nearest(NOT_WAITED, event, recorded)
    });
}

#[test]
fn never_recorded() {
    planted(|run| {
        let (a, b, event) = (run.stream(), run.stream(), run.event());
        let memory = run.alloc(64);
        let first = run.fill(memory, 64, a);
        if run.mend(Edge::StreamWait(a.handle, b.handle)) {
            run.record(event, a);
        }
        run.wait(b, event);
        let second = run.fill(memory, 64, b);
        race(first.writes(), second.writes()).over(memory, 64).hazard("H23")
    });
}

#[test]
fn waited_for_by_the_wrong_stream() {
    planted(|run| {
        let (a, b, other, event) = (run.stream(), run.stream(), run.stream(), run.event());
        let memory = run.alloc(64);
        let first = run.fill(memory, 64, a);
        let recorded = run.record(event, a);
        let mended = run.mend(Edge::StreamWait(a.handle, b.handle));
        run.wait(if mended { b } else { other }, event);
        let second = run.fill(memory, 64, b);
        let found = race(first.writes(), second.writes()).over(memory, 64).hazard("H23");
        found.nearest(NOT_WAITED, event, recorded)
    });
}

#[test]
fn a_chain_over_three_streams_lacks_its_first_link() {
    planted(|run| {
        let (a, b, c) = (run.stream(), run.stream(), run.stream());
        let (memory, x, y) = (run.alloc(64), run.alloc(64), run.alloc(64));
        let link = run.event();
        let first = run.fill(memory, 64, a);
        run.fill(x, 64, b);
        run.record(link, b);
        run.wait(c, link);
        run.copy(y, x, 64, c);
        run.order(a, c);
        let second = run.fill(memory, 64, c);
        race(first.writes(), second.writes()).over(memory, 64).hazard("H23")
    });
}

#[test]
fn a_chain_over_three_streams_has_its_links_in_the_wrong_order() {
    planted(|run| {
        let (a, b, c) = (run.stream(), run.stream(), run.stream());
        let memory = run.alloc(64);
        let (one, two) = (run.event(), run.event());
        let first = run.fill(memory, 64, a);
        let recorded = run.record(one, a);
        // `c` waits for work of `b` from before `b` waited for `a`.
        run.record(two, b);
        run.wait(b, one);
        run.wait(c, two);
        if run.mend(Edge::StreamWait(a.handle, c.handle)) {
            run.wait(c, one);
        }
        let second = run.fill(memory, 64, c);
        let found = race(first.writes(), second.writes()).over(memory, 64).hazard("H23");
        found.nearest(NOT_WAITED, one, recorded)
    });
}

#[test]
fn one_direction_of_two_is_ordered() {
    planted(|run| {
        let (compute, store) = (run.stream(), run.stream());
        let (written, read) = (run.event(), run.event());
        let (host, block, hidden) = (run.pinned(64), run.alloc(64), run.alloc(64));
        run.copy_kernel(block, hidden, 64, compute);
        run.record(written, compute);
        run.wait(store, written);
        // The next step writes the block while the store still reads it.
        let first = run.download(host, block, 64, store);
        let recorded = run.record(read, store);
        if run.mend(Edge::StreamWait(store.handle, compute.handle)) {
            run.wait(compute, read);
        }
        let second = run.copy_kernel(block, hidden, 64, compute);
        let found = race(first.reads(), second.writes()).over(block, 64).hazard("H23");
        found.nearest(NOT_WAITED, read, recorded)
    });
}
