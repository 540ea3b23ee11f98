//! Programs that are ordered, in ways that the random programs of `race_programs` do not try. Without any
//! one of the edges there is a race.

use cuda_driver::Driver;

use crate::races::harness::{LANES, Run, Stream, ordered};

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
        unsafe { run.sim.event_destroy(event) }.unwrap();
        run.fill(memory, 64, b);
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
        run.ptx("add_words_of_the_system", memory, near);
        run.ptx("add_words_of_the_system", memory, far);
        run.order(far, near);
        run.ptx("load_words", memory, near);
    });
}

/// Each GPU makes its own updates there. What another only polls is the old word or the new one.
#[test]
fn a_poll_of_a_word_of_the_host_that_another_device_updates() {
    ordered(|run| {
        let (memory, near) = (run.pinned(64), run.stream());
        run.use_device(1);
        let far = run.stream();
        run.ptx("add_words_of_the_system", memory, near);
        run.ptx("poll_a_word_of_the_system", memory, far);
        run.ptx("add_words_of_the_system", memory, near);
        run.order(near, far);
        run.ptx("add_words_of_the_system", memory, far);
    });
}

/// A stream copies to pinned memory, and `know` makes the copy known to the host. Then the host
/// reads the copied bytes, and another stream writes the source.
fn known_by(know: impl Fn(&Run, Stream)) {
    ordered(|run| {
        let (a, b) = (run.stream(), run.stream());
        let (host, memory) = (run.pinned(64), run.alloc(64));
        run.fill(run.alloc(64), 64, b);
        run.download(host, memory, 64, a);
        know(run, a);
        run.host_reads(host, 64);
        run.fill(memory, 64, b);
    });
}

#[test]
fn a_time_that_elapsed_since_or_until_an_event() {
    for is_start in [true, false] {
        known_by(|run, a| {
            let (event, other) = (run.event(), run.event());
            run.record(event, a);
            run.record(other, run.stream());
            run.sim.run_all();
            let (start, end) = if is_start { (event, other) } else { (other, event) };
            if run.edge() {
                // SAFETY: handles are looked up.
                unsafe { run.sim.event_elapsed_time(start, end) }.unwrap();
            }
        });
    }
}

#[test]
fn a_wait_that_another_thread_made() {
    known_by(|run, a| {
        let (sim, waits) = (run.sim.clone(), run.edge());
        let waiter = std::thread::spawn(move || {
            if waits {
                crate::common::sync(&sim, a.handle).unwrap();
            }
        });
        waiter.join().unwrap();
    });
}

#[test]
fn registered_memory_given_back_after_a_wait() {
    ordered(|run| {
        let host = run.registered(64);
        run.use_device(1);
        let (x, far) = (run.alloc(64), run.stream());
        run.upload(x, host, 64, far);
        run.sim.run_all();
        if run.edge() {
            run.sync(far);
        }
        run.unregister(host);
    });
}

/// A copy in a stream. Then a call with an implicit wait, after which the host reads the copied
/// bytes.
fn waits_by(prepare: impl Fn(&Run) -> u64, end: impl Fn(&Run, u64)) {
    ordered(|run| {
        let ended = prepare(run);
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        run.download(host, memory, 64, a);
        if run.edge() {
            end(run, ended);
        }
        run.host_reads(host, 64);
    });
}

#[test]
fn an_unregister_and_an_unload_wait() {
    waits_by(
        |run| run.registered(64),
        |run, host| {
            run.unregister(host);
        },
    );
    waits_by(
        |run| run.kernel("store_words", run.stream()).1,
        |run, module| {
            run.unload(module);
        },
    );
}

#[test]
fn a_context_begins_again() {
    ordered(|run| {
        run.use_device(1);
        let (memory, y, b) = (run.alloc(64), run.alloc(64), run.stream());
        for _ in 0..3 {
            run.use_device(0);
            let a = run.stream();
            run.peer_copy((1, memory), (1, y), 64, a);
            run.destroy(a);
            if run.edge() {
                run.release_context(0);
            }
            run.peer_copy((1, y), (1, memory), 64, b);
            run.sync(b);
        }
    });
}
