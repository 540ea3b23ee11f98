//! Programs ordered by the host: by waits, by queries answered yes, and by frees that wait.

use crate::common::PAGE;
use crate::races::harness::{LANES, Run, ordered, ordered_on, without_waits};

/// A stream copies to pinned memory, and `know` makes the copy known to the host. Then the host
/// reads the copied bytes, and another stream writes the source.
fn known_by(know: impl Fn(&Run, crate::races::harness::Stream)) {
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
fn a_wait_for_the_stream() {
    known_by(|run, a| {
        if run.edge() {
            run.sync(a);
        }
    });
}

#[test]
fn a_wait_for_the_device() {
    known_by(|run, _| run.sync_device(if run.edge() { 0 } else { 1 }));
}

#[test]
fn a_wait_for_an_event() {
    known_by(|run, a| {
        let (event, later) = (run.event(), run.event());
        run.record(event, a);
        if run.edge() {
            run.sync_event(event);
        }
        run.record(later, a);
    });
}

#[test]
fn a_query_of_the_stream() {
    known_by(|run, a| {
        run.sim.run_all();
        if run.edge() {
            assert!(run.query_stream(a));
        }
    });
}

#[test]
fn a_query_of_an_event() {
    known_by(|run, a| {
        let event = run.event();
        run.record(event, a);
        run.sim.run_all();
        if run.edge() {
            assert!(run.query(event));
        }
    });
}

#[test]
fn a_query_of_an_event_of_another_stream_that_waited() {
    known_by(|run, a| {
        let (b, event) = (run.stream(), run.event());
        run.order(a, b);
        run.record(event, b);
        run.sim.run_all();
        if run.edge() {
            assert!(run.query(event));
        }
    });
}

#[test]
fn a_wait_for_another_stream_that_waited() {
    known_by(|run, a| {
        let b = run.stream();
        run.order(a, b);
        if run.edge() {
            run.sync(b);
        }
    });
}

#[test]
fn a_wait_for_another_device_that_waited() {
    known_by(|run, a| {
        run.use_device(1);
        let far = run.stream();
        run.order(a, far);
        if run.edge() {
            run.sync_device(1);
        }
        run.use_device(0);
    });
}

/// The elapsed time between an event behind the copy and an event of another stream.
fn known_by_time(is_start: bool) {
    known_by(|run, a| {
        let (event, other) = (run.event(), run.event());
        run.record(event, a);
        run.record(other, run.stream());
        run.sim.run_all();
        let (start, end) = if is_start { (event, other) } else { (other, event) };
        if run.edge() {
            // SAFETY: handles are looked up.
            unsafe { cuda_driver::Driver::event_elapsed_time(&run.sim, start, end) }.unwrap();
        }
    });
}

#[test]
fn a_time_that_elapsed_since_an_event() {
    known_by_time(true);
}

#[test]
fn a_time_that_elapsed_until_an_event() {
    known_by_time(false);
}

#[test]
fn a_stream_destroyed_and_a_wait_for_the_device() {
    known_by(|run, a| {
        run.destroy(a);
        if run.edge() {
            run.sync_device(0);
        }
    });
}

#[test]
fn a_copy_to_pageable_memory_behind_it() {
    known_by(|run, a| {
        let other = run.alloc(64);
        if run.edge() {
            run.download_pageable(other, 64, a);
        }
    });
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
fn numbers_of_streams_that_are_gone_are_used_again() {
    ordered(|run| {
        let memory = run.alloc(64);
        for _ in 0..4 {
            let gone = run.stream();
            run.fill(memory, 64, gone);
            if run.edge() {
                run.sync(gone);
            }
            run.destroy(gone);
        }
        run.fill(memory, 64, run.stream());
    });
}

#[test]
fn the_host_writes_before_the_upload() {
    ordered(|run| {
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        let before = run.edge();
        if before {
            run.host_writes(host, 64);
        }
        run.upload(memory, host, 64, a);
        if !before {
            run.host_writes(host, 64);
        }
    });
}

#[test]
fn the_host_reads_while_a_copy_reads() {
    ordered(|run| {
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        run.upload(memory, host, 64, a);
        if run.edge() {
            run.host_reads(host, 64);
        } else {
            run.host_writes(host, 64);
        }
    });
}

#[test]
fn a_ring_of_two_buffers() {
    ordered(|run| {
        let (a, memory) = (run.stream(), run.alloc(64));
        let ring = [(); 2].map(|()| (run.pinned(64), run.event()));
        for step in 0..6 {
            let (host, event) = ring[step % 2];
            if step >= 2 && run.edge() {
                run.sync_event(event);
            }
            run.host_writes(host, 64);
            run.copy_kernel(memory, host, 64, a);
            run.record(event, a);
        }
    });
}

#[test]
fn the_host_between_two_devices() {
    ordered(|run| {
        let (host, source, near) = (run.pinned(64), run.alloc(64), run.stream());
        run.use_device(1);
        let (to, far) = (run.alloc(64), run.stream());
        run.download(host, source, 64, near);
        if run.edge() {
            run.sync(near);
        }
        run.upload(to, host, 64, far);
    });
}

#[test]
fn what_comes_before_a_wait_stays_known() {
    ordered(|run| {
        let (a, b, memory) = (run.stream(), run.stream(), run.alloc(64));
        run.fill(memory, 64, a);
        if run.edge() {
            run.sync(a);
        }
        // The host knew it when `b` got its work, regardless of later calls.
        run.fill(run.alloc(64), 64, a);
        run.fill(memory, 64, b);
        run.fill(memory, 64, b);
    });
}

#[test]
fn a_free_after_a_wait() {
    ordered_on(&without_waits(), |run| {
        let (x, y, a) = (run.alloc(64), run.alloc(64), run.stream());
        run.copy(x, y, 64, a);
        if run.edge() {
            run.sync(a);
        }
        run.free(x);
    });
}

#[test]
fn pinned_memory_freed_after_a_wait() {
    ordered_on(&without_waits(), |run| {
        let (host, x, a) = (run.pinned(64), run.alloc(64), run.stream());
        run.upload(x, host, 64, a);
        if run.edge() {
            run.sync(a);
        }
        run.free_host(host);
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
        run.use_device(0);
        let (host, memory, a) = (run.pinned(64), run.alloc(64), run.stream());
        run.download(host, memory, 64, a);
        if run.edge() {
            end(run, ended);
        }
        run.host_reads(host, 64);
    });
}

#[test]
fn a_free_waits() {
    waits_by(
        |run| run.alloc(64),
        |run, memory| {
            run.free(memory);
        },
    );
}

#[test]
fn a_free_waits_for_the_other_device() {
    let prepare = |run: &Run| {
        run.use_device(1);
        run.alloc(64)
    };
    waits_by(prepare, |run, memory| {
        run.free(memory);
    });
}

#[test]
fn a_free_of_pinned_memory_waits() {
    waits_by(
        |run| run.own_pinned(64),
        |run, host| {
            run.free_host(host);
        },
    );
}

#[test]
fn a_free_of_portable_memory_waits_for_the_other_device() {
    let prepare = |run: &Run| {
        run.use_device(1);
        run.pinned(64)
    };
    waits_by(prepare, |run, host| {
        run.free_host(host);
    });
}

#[test]
fn an_unregister_waits() {
    waits_by(
        |run| run.registered(64),
        |run, host| {
            run.unregister(host);
        },
    );
}

#[test]
fn an_unload_waits() {
    let prepare = |run: &Run| run.kernel("store_words", run.stream()).1;
    waits_by(prepare, |run, module| {
        run.unload(module);
    });
}

#[test]
fn the_end_of_a_context_waits() {
    ordered(|run| {
        let a = run.stream();
        run.use_device(1);
        let (host, memory) = (run.pinned(64), run.alloc(64));
        run.peer_copy((1, memory), (1, run.alloc(64)), 64, a);
        run.destroy(a);
        if run.edge() {
            run.release_context(0);
        }
        run.use_device(1);
        run.download(host, memory, 64, run.stream());
    });
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

#[test]
fn a_page_unmapped_after_a_wait_and_mapped_elsewhere() {
    ordered(|run| {
        let (from, to, page) = (run.addresses(), run.addresses(), run.page());
        let (a, b) = (run.stream(), run.stream());
        run.map(from, page);
        run.set_access(from, &[0]);
        run.fill(from, PAGE, a);
        // Complete on the device, but without the wait the host does not know.
        run.sim.run_all();
        if run.edge() {
            run.sync(a);
        }
        run.unmap(from);
        run.map(to, page);
        run.set_access(to, &[0]);
        run.fill(to, PAGE, b);
    });
}

#[test]
fn a_page_mapped_again_where_it_was() {
    ordered(|run| {
        let (address, page, a) = (run.addresses(), run.page(), run.stream());
        for _ in 0..3 {
            run.map(address, page);
            run.set_access(address, &[0]);
            run.fill(address, PAGE, a);
            run.sim.run_all();
            if run.edge() {
                run.sync(a);
            }
            run.unmap(address);
        }
    });
}

#[test]
fn a_module_unloaded_after_a_wait() {
    ordered_on(&without_waits(), |run| {
        let (x, a) = (run.alloc(4 * LANES), run.stream());
        let (function, module) = run.kernel("store_words", a);
        run.launch_loaded("store_words", function, x, a);
        if run.edge() {
            run.sync(a);
        }
        run.unload(module);
    });
}

#[test]
fn a_module_unloaded_after_a_wait_for_its_graph() {
    ordered_on(&without_waits(), |run| {
        let (x, a) = (run.alloc(4 * LANES), run.stream());
        let (function, module) = run.kernel("store_words", a);
        let exec = run.graph(function, x);
        run.launch_graph("store_words", exec, a);
        if run.edge() {
            run.sync(a);
        }
        run.unload(module);
    });
}
