//! Long programs, during which the detector forgets history that can no longer lead to a race.

use cuda_sim::Pace;

use crate::races::harness::{Run, check_race, config, race, run_at};

/// Number of calls and ranges above which history is swept (the limit is 2^16).
const MANY: u64 = 3 << 15;

/// Many operations on separate ranges, all known to the host to be complete at the end.
fn much_else(run: &Run) {
    let other = run.stream();
    let memory = run.alloc(64 * MANY);
    for block in 0..MANY {
        run.fill(memory + 64 * block, 32, other);
    }
    run.sync(other);
    for block in 0..MANY {
        run.fill(memory + 64 * block, 32, other);
    }
}

#[test]
fn what_nobody_waited_for_is_remembered() {
    run_at(&config(), Pace::Fastest, |run| {
        let (a, b, memory) = (run.stream(), run.stream(), run.alloc(64));
        let first = run.fill(memory, 64, a);
        // So that the call is neither the last of its stream nor the one before.
        for _ in 0..2 {
            run.fill(run.alloc(64), 64, a);
        }
        much_else(run);
        let second = run.fill(memory, 64, b);
        let found = race(first.writes(), second.writes()).hazard("H23");
        assert_eq!(run.sim.races().len(), 1);
        check_race(&run.sim.races()[0], &found, "many calls later");
    });
}

#[test]
fn what_the_host_did_is_remembered_while_older_work_is_pending() {
    run_at(&config(), Pace::Fastest, |run| {
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        run.sim.hold(a.handle);
        let first = run.upload(memory, host, 64, a);
        let second = run.host_writes(host, 64);
        much_else(run);
        run.sim.release_hold(a.handle);
        let found = race(first.reads(), second.writes()).hazard("H13");
        assert_eq!(run.sim.races().len(), 1);
        check_race(&run.sim.races()[0], &found, "many calls later");
    });
}

#[test]
fn what_the_host_waited_for_is_remembered_while_older_work_is_pending() {
    run_at(&config(), Pace::Fastest, |run| {
        let (a, b, memory) = (run.stream(), run.stream(), run.alloc(64));
        run.sim.hold(a.handle);
        let first = run.fill(memory, 64, a);
        let second = run.fill(memory, 64, b);
        run.sync(b);
        much_else(run);
        run.sim.release_hold(a.handle);
        let found = race(first.writes(), second.writes()).hazard("H23");
        assert_eq!(run.sim.races().len(), 1);
        check_race(&run.sim.races()[0], &found, "many calls later");
    });
}

#[test]
fn who_used_a_module_and_a_page_is_remembered() {
    let config = cuda_sim::SimConfig { implicit_waits: false, ..config() };
    run_at(&config, Pace::Fastest, |run| {
        let (page, memory, a) = (run.mapped_page(), run.alloc(4096), run.stream());
        let (function, module) = run.kernel("idle", a);
        let launched = run.launch_loaded("idle", function, memory, a);
        let b = run.stream();
        let copied = run.copy(memory + 1024, page, 64, b);
        // So that the calls are neither the last of their streams nor the ones before.
        for _ in 0..2 {
            run.fill(run.alloc(64), 64, a);
            run.fill(run.alloc(64), 64, b);
        }
        much_else(run);
        let unmapped = run.unmap(page);
        let unloaded = run.unload(module);
        let races = run.sim.races();
        assert_eq!(races.len(), 2);
        let page = race(copied.reads(), unmapped.ends()).hazard("H3");
        check_race(&races[0], &page, "the page");
        check_race(&races[1], &race(launched.uses(), unloaded.ends()).hazard("H3"), "the module");
    });
}

#[test]
fn ordered_work_stays_ordered() {
    let sim = run_at(&config(), Pace::Fastest, |run| {
        let (a, b, event) = (run.stream(), run.stream(), run.event());
        let (host, memory) = (run.pinned(64), run.alloc(64));
        run.host_writes(host, 64);
        run.upload(memory, host, 64, a);
        run.record(event, a);
        much_else(run);
        run.wait(b, event);
        run.download(host, memory, 64, b);
        run.sync(b);
        run.host_writes(host, 64);
    });
    assert_eq!(sim.findings(), []);
}
