//! Two calls that nothing orders: of every kind, in both directions, of streams, devices and the host.

use cuda_sim::SimConfig;

use crate::common::PAGE;
use crate::races::harness::{
    Edge, LANES, Run, Side, Stream, config, planted, planted_on, race, without_waits,
};

/// Number of bytes that a kernel from PTX uses.
const WORDS: u64 = 4 * LANES;

/// More than the detector's pages of 256 KiB.
const LARGE: u64 = 1 << 20;

/// Pageable memory. A call copies it, and returns before the bytes arrive at the device.
static PAGEABLE: [u8; 64] = [7; 64];

/// The memory that the calls of a pair use.
struct Room {
    /// Of device 0.
    x: u64,
    y: u64,
    z: u64,
    /// Of device 1.
    far: u64,
    /// A page of device 0 that both devices may use.
    page: u64,
    host: u64,
    registered: u64,
    /// Pinned memory of device 0's context alone.
    own: u64,
}

impl Room {
    fn new(run: &Run) -> Self {
        run.enable_peers();
        run.use_device(1);
        let far = run.alloc(LARGE);
        run.use_device(0);
        let page = run.addresses();
        run.map(page, run.page());
        run.set_access(page, &[0, 1]);
        let [x, y, z] = [(); 3].map(|()| run.alloc(LARGE));
        let (host, own) = (run.pinned(4096), run.own_pinned(64));
        Self { x, y, z, far, page, host, registered: run.registered(64), own }
    }
}

/// A call in a stream, or of the host, and how it uses the bytes.
type Step = fn(&Run, &Room, Stream) -> Side;

/// A hazard, and two calls. Their lines are in the report of a race that is not as it should be.
type Pair = (Option<&'static str>, Step, Step);

/// Each pair is a race between operations of two streams, which an event mends.
#[track_caller]
fn in_streams(streams: fn(&Run) -> (Stream, Stream), pairs: &[Pair]) {
    for &(hazard, first, second) in pairs {
        planted(|run| {
            let room = Room::new(run);
            let (a, b) = streams(run);
            let one = first(run, &room, a);
            run.order(a, b);
            race(one, second(run, &room, b)).hazard(hazard)
        });
    }
}

/// Each pair is a race between an operation of a stream of `device` and a call of the host, which a wait
/// mends. If `faults`, an operation that runs late meets no memory.
#[track_caller]
fn before_the_host(config: &SimConfig, device: u32, faults: bool, pairs: &[Pair]) {
    for &(hazard, first, second) in pairs {
        planted_on(config, |run| {
            let room = Room::new(run);
            run.use_device(device);
            let a = run.stream();
            let one = first(run, &room, a);
            run.host_waits(a);
            let found = race(one, second(run, &room, a)).hazard(hazard);
            if faults { found.faults_late() } else { found }
        });
    }
}

const H23: Option<&str> = Some("H23");
const H19: Option<&str> = Some("H19");

#[test]
fn copies_and_fills() {
    in_streams(
        |run| (run.stream(), run.stream()),
        &[
            (
                H23,
                |r, m, s| r.fill(m.x, 4096, s).writes(),
                |r, m, s| r.fill(m.x + 100, 4, s).writes(),
            ),
            (
                H23,
                |r, m, s| r.fill(m.x, 64, s).writes(),
                |r, m, s| r.copy(m.y, m.x + 32, 64, s).reads(),
            ),
            (
                H23,
                |r, m, s| r.copy(m.y, m.x, 256, s).reads(),
                |r, m, s| r.fill(m.x + 255, 1, s).writes(),
            ),
            (
                H23,
                |r, m, s| r.upload(m.x, m.host, 64, s).writes(),
                |r, m, s| r.copy(m.y, m.x, 64, s).reads(),
            ),
            (
                H23,
                |r, m, s| r.upload(m.x, PAGEABLE.as_ptr() as u64, 64, s).writes(),
                |r, m, s| r.copy(m.y, m.x, 64, s).reads(),
            ),
            (
                H23,
                |r, m, s| r.fill(m.x, 64, s).writes(),
                |r, m, s| r.download_pageable(m.x + 8, 8, s).reads(),
            ),
        ],
    );
}

#[test]
fn downloads_and_batches() {
    in_streams(
        |run| (run.stream(), run.stream()),
        &[
            (
                H23,
                |r, m, s| r.download(m.host, m.x, 64, s).reads(),
                |r, m, s| r.fill(m.x, 64, s).writes(),
            ),
            (
                H23,
                |r, m, s| r.download(m.host, m.x, 64, s).writes(),
                |r, m, s| r.download(m.host + 16, m.y, 16, s).writes(),
            ),
            (
                H23,
                |r, m, s| r.download(m.host, m.x, 64, s).writes(),
                |r, m, s| r.upload(m.y, m.host, 64, s).reads(),
            ),
            (
                H23,
                |r, m, s| r.upload(m.y, m.host, 64, s).reads(),
                |r, m, s| r.download(m.host, m.x, 64, s).writes(),
            ),
            (
                H23,
                |r, m, s| r.fill(m.z + 128, 64, s).writes(),
                |r, m, s| {
                    let both = [(m.z, m.x, 64), (m.z + 160, m.y, 64)];
                    r.batch(&both, s).writing(m.z + 160, 64).writes()
                },
            ),
            (
                H23,
                |r, m, s| {
                    let both = [(m.z, m.x, 64), (m.z + 64, m.y, 64)];
                    r.batch(&both, s).reading(m.y, 64).reads()
                },
                |r, m, s| r.fill(m.y, 64, s).writes(),
            ),
            (
                H23,
                |r, m, s| r.copy(m.x, m.y, LARGE, s).writes(),
                |r, m, s| r.fill(m.x, LARGE, s).writes(),
            ),
        ],
    );
}

#[test]
fn kernels_and_graphs() {
    in_streams(
        |run| (run.stream(), run.stream()),
        &[
            (
                None,
                |r, m, s| r.copy_kernel(m.y, m.x, 64, s).writes(),
                |r, m, s| r.copy_kernel(m.z, m.y + 16, 8, s).reads(),
            ),
            (
                None,
                |r, m, s| r.copy_kernel(m.y, m.x, 64, s).reads(),
                |r, m, s| r.copy_kernel(m.x + 8, m.z, 8, s).writes(),
            ),
            (
                H23,
                |r, m, s| r.copy_kernel(m.y, m.x, 64, s).reads(),
                |r, m, s| r.upload(m.x, m.host, 64, s).writes(),
            ),
            (
                H23,
                |r, m, s| r.copy_kernel(m.y, m.x, 64, s).writes(),
                |r, m, s| r.download(m.host, m.y, 64, s).reads(),
            ),
            (
                H23,
                |r, m, s| r.ptx("store_words", m.x + 64, s).writes(),
                |r, m, s| r.copy(m.y, m.x, 4096, s).reads(),
            ),
            (
                H23,
                |r, m, s| r.ptx("load_words", m.x + 64, s).reads(),
                |r, m, s| r.fill(m.x + 72, 1, s).writes(),
            ),
            (
                H23,
                |r, m, s| r.fill(m.x, 4096, s).writes(),
                |r, m, s| r.ptx("load_words", m.x + 64, s).reads(),
            ),
            (
                None,
                |r, m, s| r.ptx("store_words", m.x, s).writes(),
                |r, m, s| r.ptx("store_words", m.x + WORDS / 2, s).writes(),
            ),
            (
                H23,
                |r, m, s| r.store_graph(m.x, s).writes(),
                |r, m, s| r.copy(m.y, m.x, WORDS, s).reads(),
            ),
            (
                H23,
                |r, m, s| r.copy(m.y, m.x, WORDS, s).reads(),
                |r, m, s| r.store_graph(m.x, s).writes(),
            ),
            (
                None,
                |r, m, s| r.store_graph(m.x, s).writes(),
                |r, m, s| r.store_graph(m.x, s).writes(),
            ),
            // A kernel whose name starts like a call's is no copy.
            (
                None,
                |r, m, s| r.ptx("store_words", m.x, s).writes(),
                |r, m, s| r.ptx("cumulate", m.x, s).reads(),
            ),
        ],
    );
}

#[test]
fn atomics() {
    in_streams(
        |run| (run.stream(), run.stream()),
        &[
            (
                None,
                |r, m, s| r.ptx("add_words", m.x, s).writes(),
                |r, m, s| r.ptx("load_words", m.x, s).reads(),
            ),
            (
                None,
                |r, m, s| r.ptx("add_words", m.x, s).writes(),
                |r, m, s| r.ptx("add_wide", m.x, s).writes(),
            ),
            (
                None,
                |r, m, s| r.ptx("add_words", m.x, s).writes(),
                |r, m, s| r.ptx("add_words_of_the_block", m.x, s).writes(),
            ),
            (
                H23,
                |r, m, s| r.copy(m.y, m.x, 8, s).reads(),
                |r, m, s| r.ptx("add_words", m.x, s).writes(),
            ),
        ],
    );
}

#[test]
fn default_streams() {
    const FILLS: Pair =
        (H23, |r, m, s| r.fill(m.x, 64, s).writes(), |r, m, s| r.fill(m.x, 64, s).writes());
    in_streams(|run| (run.default_stream(0), run.stream()), &[FILLS]);
    in_streams(|run| (run.stream(), run.default_stream(0)), &[FILLS]);
    in_streams(|run| (run.blocking(), run.blocking()), &[FILLS]);
    // Work of the default stream that came before orders nothing.
    let after_default = |run: &Run| {
        let (a, b) = (run.blocking(), run.blocking());
        run.fill(run.alloc(64), 64, run.default_stream(0));
        (a, b)
    };
    in_streams(after_default, &[FILLS]);
    let reads_far: Step = |r, m, s| r.peer_copy((1, m.far), (0, m.x), 64, s).reads();
    let fills: Step = |r, m, s| r.fill(m.x, 64, s).writes();
    in_streams(|run| (run.default_stream(0), run.default_stream(1)), &[(H19, fills, reads_far)]);
    let blocking_there = |run: &Run| {
        run.use_device(1);
        (run.blocking(), run.default_stream(0))
    };
    in_streams(blocking_there, &[(H19, reads_far, fills)]);
}

/// A stream of the first device, and one of the second, which is in use from then on.
fn near_and_far(run: &Run) -> (Stream, Stream) {
    let near = run.stream();
    run.use_device(1);
    (near, run.stream())
}

#[test]
fn two_devices() {
    in_streams(
        near_and_far,
        &[
            (
                H19,
                |r, m, s| r.fill(m.x, 64, s).writes(),
                |r, m, s| r.peer_copy((1, m.far), (0, m.x), 64, s).reads(),
            ),
            // The sending device enqueues the copy. The receiving device does not know when it ends.
            (
                H19,
                |r, m, s| r.peer_copy((1, m.far), (0, m.x), 64, s).writes(),
                |r, m, s| r.copy_kernel(m.far + 4096, m.far, 64, s).reads(),
            ),
            (
                H19,
                |r, m, s| r.ptx("store_words", m.x, s).writes(),
                |r, m, s| r.ptx("load_words", m.x, s).reads(),
            ),
            (
                H19,
                |r, m, s| r.fill(m.page + 4096, 64, s).writes(),
                |r, m, s| r.copy_kernel(m.far, m.page + 4096, 64, s).reads(),
            ),
            (
                H19,
                |r, m, s| r.download(m.host, m.x, 64, s).writes(),
                |r, m, s| r.upload(m.far, m.host, 64, s).reads(),
            ),
            (
                H19,
                |r, m, s| r.ptx("add_words_of_the_system", m.x, s).writes(),
                |r, m, s| r.ptx("add_words", m.x, s).writes(),
            ),
            // Each GPU makes its own atomic operations in memory of the host, whatever their scope.
            // What another writes between the two halves of one is lost.
            (
                H19,
                |r, m, s| r.ptx("add_words_of_the_system", m.host, s).writes(),
                |r, m, s| r.ptx("add_words_of_the_system", m.host, s).writes(),
            ),
            (
                H19,
                |r, m, s| r.ptx("add_words_of_the_system", m.host, s).writes(),
                |r, m, s| r.ptx("set_a_word_of_the_system", m.host, s).writes(),
            ),
        ],
    );
    let far_and_near = |run: &Run| {
        let (near, far) = near_and_far(run);
        (far, near)
    };
    in_streams(
        far_and_near,
        &[
            (
                H19,
                |r, m, s| r.peer_copy((1, m.far), (0, m.x), 64, s).reads(),
                |r, m, s| r.fill(m.x, 64, s).writes(),
            ),
            (
                H19,
                |r, m, s| r.ptx("load_words", m.x, s).reads(),
                |r, m, s| r.ptx("store_words", m.x, s).writes(),
            ),
        ],
    );
}

#[test]
fn the_host_and_a_stream() {
    let (h13, h14, h21) = (Some("H13"), Some("H14"), Some("H21"));
    before_the_host(
        &config(),
        0,
        false,
        &[
            (
                h13,
                |r, m, s| r.upload(m.x, m.host, 64, s).reads(),
                |r, m, _| r.host_writes(m.host + 8, 4).writes(),
            ),
            (
                h14,
                |r, m, s| r.copy_kernel(m.x, m.host, 64, s).reads(),
                |r, m, _| r.host_writes(m.host, 64).writes(),
            ),
            (
                h14,
                |r, m, s| r.ptx("load_words", m.host, s).reads(),
                |r, m, _| r.host_writes(m.host, 4).writes(),
            ),
            (
                h21,
                |r, m, s| r.download(m.host, m.x, 64, s).writes(),
                |r, m, _| r.host_reads(m.host, 64).reads(),
            ),
            (
                h21,
                |r, m, s| r.ptx("store_words", m.host, s).writes(),
                |r, m, _| r.host_reads(m.host + 4, 4).reads(),
            ),
            (
                None,
                |r, m, s| r.download(m.host, m.x, 64, s).writes(),
                |r, m, _| r.host_writes(m.host + 63, 1).writes(),
            ),
            (
                h21,
                |r, m, s| r.download(m.registered, m.x, 64, s).writes(),
                |r, m, _| r.host_reads(m.registered, 64).reads(),
            ),
        ],
    );
}

#[test]
fn memory_that_ends_without_a_wait() {
    let h3 = Some("H3");
    before_the_host(
        &config(),
        0,
        true,
        &[
            (h3, |r, m, s| r.copy(m.x, m.page, 64, s).reads(), |r, m, _| r.unmap(m.page).ends()),
            (
                h3,
                |r, m, s| {
                    let both = [(m.x, m.y, 64), (m.page, m.y, 64)];
                    r.batch(&both, s).writing(m.page, 64).writes()
                },
                |r, m, _| r.unmap(m.page).ends(),
            ),
            (h3, |r, m, s| r.fill(m.page, PAGE, s).writes(), |r, m, _| r.unmap(m.page).ends()),
        ],
    );
    // The call waits for the device that owns the memory alone.
    before_the_host(
        &config(),
        1,
        true,
        &[
            (
                h3,
                |r, m, s| r.upload(m.far, m.registered, 64, s).reads(),
                |r, m, _| r.unregister(m.registered).ends(),
            ),
            (
                h3,
                |r, m, s| r.download(m.own, m.far, 64, s).writes(),
                |r, m, _| r.free_host(m.own).ends(),
            ),
        ],
    );
    before_the_host(
        &without_waits(),
        0,
        false,
        &[
            (h3, |r, m, s| r.copy(m.x, m.y, 64, s).reads(), |r, m, _| r.free(m.y).ends()),
            (
                h3,
                |r, m, s| r.ptx("store_words", m.x + 1024, s).writes(),
                |r, m, _| r.free(m.x).ends(),
            ),
            (
                h3,
                |r, m, s| r.upload(m.x, m.host, 64, s).reads(),
                |r, m, _| r.free_host(m.host).ends(),
            ),
            (
                h3,
                |r, m, s| r.download(m.registered, m.x, 64, s).writes(),
                |r, m, _| r.unregister(m.registered).ends(),
            ),
        ],
    );
}

#[test]
fn two_mappings_of_one_page_of_memory() {
    planted(|run| {
        let (a, b) = (run.stream(), run.stream());
        let page = run.page();
        let [x, y] = [(); 2].map(|()| {
            let address = run.addresses();
            run.map(address, page);
            run.set_access(address, &[0]);
            address
        });
        let first = run.fill(x, 64, a);
        run.order(a, b);
        let second = run.fill(y + 32, 64, b);
        // The report has the address of the side that ran later.
        let range = (x.min(y), x.max(y) + 96 - x.min(y));
        race(first.writes(), second.writes()).over(range.0, range.1).hazard("H23").varies()
    });
}

const NOT_FOUND: &str = "the host did not find it complete before";

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
        let found = race(first.writes(), second.reads()).hazard("H21");
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
        let found = race(first.writes(), second.reads()).hazard("H21");
        found.nearest(NOT_FOUND, after, recorded)
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
        race(first.writes(), second.reads()).hazard("H21")
    });
}
