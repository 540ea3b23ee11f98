//! Memory, modules and contexts that end, and memory that begins, while work uses them.

use cuda_driver::ErrorCode;
use cuda_sim::Pace;

use crate::races::harness::{
    Edge, LANES, PACES, check_race, config, edge_of, planted, planted_on, race, run_at,
    without_waits,
};

/// Number of bytes that a kernel from PTX uses.
const WORDS: u64 = 4 * LANES;

#[test]
fn unmapped_under_a_kernel() {
    planted(|run| {
        let (page, a) = (run.mapped_page(), run.stream());
        let first = run.ptx("load_words", page + 4096, a);
        run.host_waits(a);
        let second = run.unmap(page);
        // A late kernel stops at the first word without memory.
        let found = race(first.reads(), second.ends()).over(page + 4096, WORDS).hazard("H3");
        found.faults_late().varies()
    });
}

#[test]
fn unmapped_under_work_that_others_have_written_over() {
    let sim = run_at(&config(), Pace::Random, |run| {
        let (page, a, b) = (run.mapped_page(), run.stream(), run.stream());
        let first = run.fill(page, 64, a);
        let over = run.fill(page, 64, b);
        run.sim.run_all();
        let unmapped = run.unmap(page);
        let races = run.sim.races();
        assert_eq!(races.len(), 3, "{races:#?}");
        let both = race(first.writes(), over.writes()).over(page, 64).hazard("H23");
        check_race(&races[0], &both, "the two");
        // The range that the first of them touched was reported before, and forgotten.
        let whole = race(first.uses(), unmapped.ends()).over(page, 256 << 10).hazard("H3");
        check_race(&races[1], &whole, "the first");
        let exact = race(over.writes(), unmapped.ends()).over(page, 64).hazard("H3");
        check_race(&races[2], &exact, "the last");
    });
    assert_eq!(sim.findings().len(), 3);
}

#[test]
fn mapped_after_the_launch() {
    planted(|run| {
        let (address, page, a) = (run.addresses(), run.page(), run.stream());
        // Held, so that the kernel finds the memory at every pace.
        run.sim.hold(a.handle);
        let mended = run.mend(Edge::HostFirst(a.handle));
        let map = || {
            run.map(address, page);
            run.set_access(address, &[0])
        };
        let before = mended.then(map);
        let first = run.ptx("store_words", address, a);
        let mapped = before.unwrap_or_else(map);
        run.sim.release_hold(a.handle);
        race(first.writes(), mapped.maps()).over(address, WORDS).hazard("H1")
    });
}

#[test]
fn given_access_after_the_launch() {
    planted(|run| {
        let (address, page, a) = (run.addresses(), run.page(), run.stream());
        run.sim.hold(a.handle);
        run.map(address, page);
        let mended = run.mend(Edge::HostFirst(a.handle));
        let before = mended.then(|| run.set_access(address, &[0]));
        let first = run.ptx("load_words", address, a);
        let second = before.unwrap_or_else(|| run.set_access(address, &[0]));
        run.sim.release_hold(a.handle);
        race(first.reads(), second.maps()).over(address, WORDS).hazard("H1")
    });
}

#[test]
fn unmapped_and_mapped_again_under_a_kernel() {
    planted(|run| {
        let (address, a) = (run.mapped_page(), run.stream());
        let next = run.page();
        let first = run.ptx("load_words", address, a);
        run.host_waits(a);
        let second = run.unmap(address);
        run.map(address, next);
        run.set_access(address, &[0]);
        race(first.reads(), second.ends()).over(address, WORDS).hazard("H3")
    });
}

#[test]
fn a_module_unloaded_under_a_launch() {
    planted_on(&without_waits(), |run| {
        let (x, a) = (run.alloc(WORDS), run.stream());
        let (function, module) = run.kernel("store_words", a);
        let first = run.launch_loaded("store_words", function, x, a);
        run.host_waits(a);
        let second = run.unload(module);
        race(first.uses(), second.ends()).hazard("H3")
    });
}

#[test]
fn work_of_a_context_that_ended_is_over() {
    planted_on(&without_waits(), |run| {
        let a = run.stream();
        run.use_device(1);
        let (x, y) = (run.alloc(64), run.alloc(64));
        let first = run.peer_copy((1, x), (1, y), 64, a);
        run.host_waits(a);
        run.destroy(a);
        let second = run.release_context(0);
        // The end of the other context ends the memory, which nothing uses any more.
        run.release_context(1);
        race(first.uses(), second.ends()).hazard("H3").loses_objects()
    });
}

#[test]
fn work_that_a_context_waited_for_is_not_over_when_the_context_ended() {
    for pace in PACES {
        run_at(&without_waits(), pace, |run| {
            let a = run.stream();
            run.use_device(1);
            let (memory, far, event) = (run.alloc(64), run.stream(), run.event());
            let first = run.fill(memory, 64, far);
            run.record(event, far);
            let waits = run.wait(a, event);
            let ended = run.release_context(0);
            run.use_device(1);
            let freed = run.free(memory);
            let races = run.sim.races();
            assert_eq!(races.len(), 2, "{races:#?}");
            let under_work = race(waits.uses(), ended.ends()).hazard("H3");
            check_race(&races[0], &under_work, "the context");
            let under_fill = race(first.writes(), freed.ends()).over(memory, 64).hazard("H3");
            check_race(&races[1], &under_fill, "the memory");
        });
    }
}

#[test]
fn a_context_that_begins_again_has_not_waited_for_what_the_ended_one_waited_for() {
    for pace in PACES {
        run_at(&without_waits(), pace, |run| {
            run.use_device(1);
            let (x, y, far, event) = (run.alloc(64), run.alloc(64), run.stream(), run.event());
            let first = run.fill(x, 64, far);
            run.record(event, far);
            run.use_device(0);
            run.wait(run.default_stream(0), event);
            run.release_context(0);
            run.use_device(0);
            let second = run.peer_copy((1, y), (1, x), 64, run.blocking());
            run.sim.run_all();
            let races = run.sim.races();
            assert_eq!(races.len(), 2, "{races:#?}");
            let read = race(first.writes(), second.reads()).over(x, 64).hazard("H19");
            check_race(&races[1], &read, "the new context");
        });
    }
}

#[test]
fn a_page_moves_to_other_addresses_under_its_user() {
    for pace in PACES {
        let sim = run_at(&config(), pace, |run| {
            let (from, to, page) = (run.addresses(), run.addresses(), run.page());
            let (a, b, x) = (run.stream(), run.stream(), run.alloc(64));
            run.map(from, page);
            run.set_access(from, &[0]);
            let user = run.copy(x, from, 64, a);
            // The device has finished, but the host does not know it.
            run.sim.run_all();
            let unmapped = run.unmap(from);
            run.map(to, page);
            run.set_access(to, &[0]);
            let next = run.fill(to, 64, b);
            run.sim.run_all();
            let races = run.sim.races();
            assert_eq!(races.len(), 2, "{races:#?}");
            let ended = race(user.reads(), unmapped.ends()).over(from, 64).hazard("H3");
            check_race(&races[0], &ended, "the unmapping");
            assert_eq!(edge_of(&races[0]), Edge::HostWait(a.handle));
            let reused = race(user.reads(), next.writes()).over(to, 64).hazard("H23");
            check_race(&races[1], &reused, "the next user");
            assert_eq!(edge_of(&races[1]), Edge::StreamWait(a.handle, b.handle));
        });
        assert_eq!(sim.findings().len(), 2);
    }
}

#[test]
fn a_context_ends_under_the_work_of_another_device() {
    planted(|run| {
        let source = run.alloc(64);
        run.use_device(1);
        let (to, far) = (run.alloc(64), run.stream());
        let first = run.peer_copy((1, to), (0, source), 64, far);
        // The context's memory ends with it, and it waits only for its own work.
        run.host_waits(far);
        let second = run.release_context(0);
        race(first.reads(), second.ends())
            .over(source, 64)
            .hazard("H3")
            .faults_late()
            .loses_objects()
    });
}

#[test]
fn what_a_lost_device_used_may_end() {
    for pace in PACES {
        let sim = run_at(&without_waits(), pace, |run| {
            let (page, host, a) = (run.mapped_page(), run.pinned(64), run.stream());
            run.upload(page, host, 64, a);
            run.sim.run_all();
            // Work of a lost device never runs, so it needs no wait; a wait would fail.
            run.sim.lose_device(0, 0, ErrorCode::ILLEGAL_ADDRESS);
            run.unmap(page);
        });
        assert_eq!(sim.findings(), []);
    }
}

#[test]
fn memory_given_back_and_registered_again_under_work() {
    planted(|run| {
        let host = run.registered(64);
        run.use_device(1);
        let (memory, far) = (run.alloc(64), run.stream());
        let first = run.upload(memory, host, 64, far);
        run.host_waits(far);
        let second = run.unregister(host);
        run.use_device(0);
        run.register(host, 64);
        // A second unregister changes nothing: the copy had to be over before the first.
        run.unregister(host);
        run.register(host, 64);
        race(first.reads(), second.ends()).over(host, 64).hazard("H3")
    });
}

#[test]
fn a_module_unloaded_under_a_graph() {
    planted_on(&without_waits(), |run| {
        let (x, a) = (run.alloc(WORDS), run.stream());
        let (function, module) = run.kernel("store_words", a);
        let exec = run.graph(function, x);
        let first = run.launch_graph("store_words", exec, a);
        run.host_waits(a);
        let second = run.unload(module);
        race(first.uses(), second.ends()).hazard("H3")
    });
}
