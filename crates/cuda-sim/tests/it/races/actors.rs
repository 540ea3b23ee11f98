//! Streams that are destroyed, and new streams that reuse their numbers.

use cuda_sim::Pace;

use crate::races::harness::{Edge, config, planted, race, run_at};

#[test]
fn a_stream_made_after_another_was_destroyed() {
    planted(|run| {
        let (a, memory) = (run.stream(), run.alloc(64));
        let first = run.fill(memory, 64, a);
        let b = run.stream();
        run.order(a, b);
        run.destroy(a);
        let second = run.fill(memory, 64, b);
        race(first.writes(), second.writes()).hazard("H23")
    });
}

#[test]
fn a_stream_made_while_the_host_knows_another_to_be_done() {
    planted(|run| {
        let (a, memory, other) = (run.stream(), run.alloc(64), run.alloc(64));
        run.fill(other, 64, a);
        run.sync(a);
        let b = run.stream();
        run.fill(run.alloc(64), 64, b);
        let first = run.fill(memory, 64, a);
        run.order(a, b);
        let second = run.fill(memory, 64, b);
        race(first.writes(), second.writes()).hazard("H23")
    });
}

#[test]
fn more_streams_than_are_told_apart_come_one_after_another() {
    let sim = run_at(&config(), Pace::Fastest, |run| {
        let memory = run.alloc(64);
        for _ in 0..66_000 {
            let stream = run.stream();
            run.fill(memory, 64, stream);
            run.sync(stream);
            run.destroy(stream);
        }
    });
    assert_eq!(sim.findings(), []);
    assert_eq!(sim.races_unseen(), 0);
}

#[test]
fn a_read_in_between_hides_no_write() {
    planted(|run| {
        let (a, b, c) = (run.stream(), run.stream(), run.stream());
        let (memory, x, y, event) = (run.alloc(64), run.alloc(64), run.alloc(64), run.event());
        let first = run.fill(memory, 64, a);
        let recorded = run.record(event, a);
        run.wait(b, event);
        run.copy(x, memory, 64, b);
        if run.mend(Edge::StreamWait(a.handle, c.handle)) {
            run.wait(c, event);
        }
        let second = run.copy(y, memory, 64, c);
        let found = race(first.writes(), second.reads()).hazard("H23");
        found.nearest("does not wait for it before", event, recorded)
    });
}

#[test]
fn atomics_in_between_hide_no_plain_write() {
    planted(|run| {
        let (a, b, c) = (run.stream(), run.stream(), run.stream());
        let (memory, event) = (run.alloc(4096), run.event());
        let first = run.ptx("store_words", memory, a);
        let recorded = run.record(event, a);
        run.wait(b, event);
        run.ptx("add_words", memory, b);
        if run.mend(Edge::StreamWait(a.handle, c.handle)) {
            run.wait(c, event);
        }
        let second = run.ptx("add_words", memory, c);
        let found = race(first.writes(), second.writes());
        found.nearest("does not wait for it before", event, recorded)
    });
}
