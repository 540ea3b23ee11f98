//! Two devices that use each other's memory.

use crate::races::harness::{LANES, Run, Stream, planted, race};

/// A stream of the first device, and one of the second, which is in use from then on.
fn near_and_far(run: &Run) -> (Stream, Stream) {
    run.use_device(0);
    let near = run.stream();
    run.use_device(1);
    (near, run.stream())
}

#[test]
fn a_peer_copy_reads_what_the_other_device_writes() {
    planted(|run| {
        let source = run.alloc(64);
        let (near, far) = near_and_far(run);
        let to = run.alloc(64);
        let first = run.fill(source, 64, near);
        run.order(near, far);
        let second = run.peer_copy((1, to), (0, source), 64, far);
        race(first.writes(), second.reads()).over(source, 64).hazard("H19")
    });
}

#[test]
fn a_device_writes_what_a_peer_copy_still_reads() {
    planted(|run| {
        let source = run.alloc(64);
        let (near, far) = near_and_far(run);
        let to = run.alloc(64);
        let first = run.peer_copy((1, to), (0, source), 64, far);
        run.order(far, near);
        let second = run.fill(source, 64, near);
        race(first.reads(), second.writes()).over(source, 64).hazard("H19")
    });
}

#[test]
fn a_device_reads_what_a_peer_copy_brings() {
    planted(|run| {
        let source = run.alloc(64);
        let (near, far) = near_and_far(run);
        let (to, end) = (run.alloc(64), run.alloc(64));
        // The sending device enqueues the copy. The receiving device does not know when it ends.
        let first = run.peer_copy((1, to), (0, source), 64, near);
        run.order(near, far);
        let second = run.copy_kernel(end, to, 64, far);
        race(first.writes(), second.reads()).over(to, 64).hazard("H19")
    });
}

#[test]
fn a_kernel_reads_what_a_kernel_of_its_peer_writes() {
    planted(|run| {
        run.enable_peers();
        run.use_device(0);
        let memory = run.alloc(4 * LANES);
        let (near, far) = near_and_far(run);
        let first = run.store_kernel(memory, near);
        run.order(near, far);
        let second = run.load_kernel(memory, far);
        race(first.writes(), second.reads()).over(memory, 4 * LANES).hazard("H19")
    });
}

#[test]
fn a_kernel_writes_what_a_kernel_of_its_peer_reads() {
    planted(|run| {
        run.enable_peers();
        run.use_device(0);
        let memory = run.alloc(4 * LANES);
        let (near, far) = near_and_far(run);
        let first = run.load_kernel(memory, far);
        run.order(far, near);
        let second = run.store_kernel(memory, near);
        race(first.reads(), second.writes()).over(memory, 4 * LANES).hazard("H19")
    });
}

#[test]
fn a_page_that_both_devices_have_access_to() {
    planted(|run| {
        let address = run.addresses();
        run.map(address, run.page());
        run.set_access(address, &[0, 1]);
        let (near, far) = near_and_far(run);
        let to = run.alloc(64);
        let first = run.fill(address + 4096, 64, near);
        run.order(near, far);
        let second = run.copy_kernel(to, address + 4096, 64, far);
        race(first.writes(), second.reads()).over(address + 4096, 64).hazard("H19")
    });
}

#[test]
fn a_bounce_through_pinned_memory_without_an_event() {
    planted(|run| {
        let (host, source) = (run.pinned(64), run.alloc(64));
        let (near, far) = near_and_far(run);
        let to = run.alloc(64);
        let first = run.download(host, source, 64, near);
        run.order(near, far);
        let second = run.upload(to, host, 64, far);
        race(first.writes(), second.reads()).over(host, 64).hazard("H19")
    });
}

#[test]
fn atomics_of_two_devices_at_the_scope_of_one() {
    planted(|run| {
        run.enable_peers();
        run.use_device(0);
        let memory = run.alloc(4 * LANES);
        let (near, far) = near_and_far(run);
        let first = run.add_as("add_words_of_the_system", memory, near);
        run.order(near, far);
        let second = run.add_kernel(memory, far);
        race(first.writes(), second.writes()).over(memory, 4).hazard("H19")
    });
}

/// Each GPU makes its own atomic operations in memory of the host, whatever their scope. What another
/// writes between the two halves of one is lost.
#[test]
fn atomics_of_one_device_in_memory_of_the_host_that_another_writes() {
    for writes in ["add_words_of_the_system", "set_a_word_of_the_system"] {
        planted(|run| {
            let memory = run.pinned(64);
            let (near, far) = near_and_far(run);
            let first = run.add_as("add_words_of_the_system", memory, near);
            run.order(near, far);
            let second = run.add_as(writes, memory, far);
            race(first.writes(), second.writes()).over(memory, 4).hazard("H19")
        });
    }
}
