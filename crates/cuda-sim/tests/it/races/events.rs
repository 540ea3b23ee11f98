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
        let found = race(first.writes(), second.writes()).hazard("H23");
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
        let found = race(first.writes(), second.writes()).hazard("H23");
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
        let found = race(first.writes(), second.writes()).hazard("H23");
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
        let found = race(first.writes(), second.writes()).hazard("H23");
        found.nearest(NOT_WAITED, event, again)
    });
}
