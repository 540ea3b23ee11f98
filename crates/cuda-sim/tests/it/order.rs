//! Streams, events, and what a waiting host can rely on.

use std::collections::BTreeSet;

use crate::common::*;
use cuda_driver::{Driver, DriverError, ErrorCode, KernelArgs, LaunchConfig};
use cuda_sim::{FindingKind, Pace, SimConfig};

#[test]
fn two_launches_of_one_graph_never_run_at_once() {
    let sim = paced(Pace::Slowest, 1);
    let (a, b) = (sim.stream_create(false).unwrap(), sim.stream_create(false).unwrap());
    let memory = sim.mem_alloc(4).unwrap();
    fill(&sim, memory, 1, 4, a).unwrap();
    sync(&sim, a).unwrap();
    let graph = sim.graph_create().unwrap();
    let (config, args) = (LaunchConfig::linear(1, 32), KernelArgs::new().arg(memory));
    let add = kernel(&sim, "add_one");
    // SAFETY: handles are looked up, here and below, and the argument is the kernel's.
    unsafe { sim.graph_add_kernel_node(graph, add, &config, &args) }.unwrap();
    // SAFETY: as above.
    let exec = unsafe { sim.graph_instantiate(graph) }.unwrap();
    for stream in [a, b] {
        // SAFETY: as above.
        unsafe { sim.graph_launch(exec, stream) }.unwrap();
    }
    // The second launch waits for the first, although it is in another stream.
    sim.hold(a);
    assert_eq!(sim.run_all(), 0);
    sim.release_hold(a);
    sync(&sim, b).unwrap();
    assert_eq!(download(&sim, memory, 1, b).unwrap(), [3]);
    assert_eq!(sim.findings(), []);
}

/// The conformance suite of `cuda-driver` compares the calls with a card, one by one.
#[test]
fn what_may_wait_ends_the_captures_of_its_thread_or_of_the_device() {
    let sim = paced(Pace::Fastest, 1);
    let (stream, waits, other) = (
        sim.stream_create(false).unwrap(),
        sim.stream_create(true).unwrap(),
        sim.stream_create(false).unwrap(),
    );
    let (event, context) = (sim.event_create(false).unwrap(), sim.ctx_get_current().unwrap());
    // SAFETY: handles are looked up, here and below.
    let begin = |stream| unsafe { sim.stream_begin_capture(stream) }.unwrap();
    // SAFETY: as above.
    let end = |stream| unsafe { sim.stream_end_capture(stream) }.map_err(|error| error.code);
    let on_other_thread = |call: &(dyn Fn() -> Result<(), DriverError> + Sync)| {
        std::thread::scope(|scope| {
            let works = || {
                // SAFETY: as above.
                unsafe { sim.ctx_set_current(context) }.unwrap();
                call()
            };
            scope.spawn(works).join().unwrap()
        })
    };
    let unsupported = ErrorCode::STREAM_CAPTURE_UNSUPPORTED;
    begin(stream);
    assert_eq!(on_other_thread(&|| query(&sim, event).map(drop)), Ok(()));
    assert_eq!(on_other_thread(&|| sync(&sim, other)), Ok(()));
    end(stream).unwrap();
    begin(stream);
    assert_eq!(code(query(&sim, event)), unsupported);
    assert_eq!(end(stream), Err(ErrorCode::STREAM_CAPTURE_INVALIDATED));
    begin(stream);
    assert_eq!(code(on_other_thread(&|| sim.ctx_synchronize())), unsupported);
    assert_eq!(end(stream), Err(ErrorCode::STREAM_CAPTURE_INVALIDATED));
    let memory = sim.mem_alloc(4).unwrap();
    begin(stream);
    fill(&sim, memory, 1, 4, 0).unwrap();
    end(stream).unwrap();
    begin(waits);
    assert_eq!(code(fill(&sim, memory, 1, 4, 0)), ErrorCode(906));
    assert_eq!(end(waits), Err(ErrorCode::STREAM_CAPTURE_INVALIDATED));
    sync(&sim, other).unwrap();
}

#[test]
fn a_captured_stream_takes_launches_and_nothing_else() {
    let sim = paced(Pace::Fastest, 1);
    let stream = sim.stream_create(false).unwrap();
    let memory = sim.mem_alloc(4).unwrap();
    fill(&sim, memory, 1, 4, stream).unwrap();
    sync(&sim, stream).unwrap();
    let (config, args) = (LaunchConfig::linear(1, 32), KernelArgs::new().arg(memory));
    let add = kernel(&sim, "add_one");
    for (fills, added) in [(false, 2), (true, 0)] {
        // SAFETY: handles are looked up, here and below, and the argument is the kernel's.
        unsafe { sim.stream_begin_capture(stream) }.unwrap();
        for _ in 0..2 {
            // SAFETY: as above.
            unsafe { sim.launch_kernel(add, &config, &args, stream) }.unwrap();
        }
        if fills {
            let refused = fill(&sim, memory, 9, 4, stream).unwrap_err();
            assert_eq!(refused.code, ErrorCode::STREAM_CAPTURE_UNSUPPORTED);
        }
        // SAFETY: as above.
        let graph = unsafe { sim.stream_end_capture(stream) };
        assert_eq!(download(&sim, memory, 1, stream).unwrap(), [if fills { 3 } else { 1 }]);
        match graph {
            Ok(graph) => {
                // SAFETY: as above.
                let exec = unsafe { sim.graph_instantiate(graph) }.unwrap();
                // SAFETY: as above.
                unsafe { sim.graph_launch(exec, stream) }.unwrap();
                assert_eq!(download(&sim, memory, 1, stream).unwrap(), [1 + added]);
            }
            Err(error) => {
                assert!(fills, "{error}");
                assert_eq!(error.code, ErrorCode::STREAM_CAPTURE_INVALIDATED);
            }
        }
        assert_eq!(sim.findings(), []);
    }
}

#[test]
fn unordered_streams_take_both_orders_within_a_hundred_seeds() {
    for blocking in [false, true] {
        let last = |seed| {
            let sim = paced(Pace::Random, seed);
            let streams = [0; 2].map(|_| sim.stream_create(blocking).unwrap());
            let device = sim.mem_alloc(1).unwrap();
            fill(&sim, device, 1, 1, streams[0]).unwrap();
            fill(&sim, device, 2, 1, streams[1]).unwrap();
            sim.ctx_synchronize().unwrap();
            download(&sim, device, 1, streams[0]).unwrap()[0]
        };
        assert_eq!((0..100).map(last).collect::<BTreeSet<u8>>(), BTreeSet::from([1, 2]));
    }
}

#[test]
fn a_seed_replays() {
    let trace = |seed| {
        let sim = paced(Pace::Random, seed);
        let streams: Vec<u64> = (0..4).map(|_| sim.stream_create(false).unwrap()).collect();
        let device = sim.mem_alloc(1).unwrap();
        for (value, &stream) in streams.iter().cycle().take(40).enumerate() {
            fill(&sim, device, value as u8, 1, stream).unwrap();
        }
        let observer = sim.stream_create(false).unwrap();
        (0..10).map(|_| download(&sim, device, 1, observer).unwrap()[0]).collect::<Vec<_>>()
    };
    assert_eq!(trace(5), trace(5));
    assert!((0..10).any(|seed| trace(seed) != trace(5)));
}

#[test]
fn nothing_runs_before_the_host_waits_and_no_more_than_it_waits_for() {
    let sim = paced(Pace::Random, 3);
    let (first, second) = (sim.stream_create(false).unwrap(), sim.stream_create(false).unwrap());
    let host = pinned(&sim, 2);
    let device = sim.mem_alloc(2).unwrap();
    host_write(host, &[9, 9]);
    fill(&sim, device, 1, 2, first).unwrap();
    // SAFETY: pinned memory that the host does not touch until the copies have run.
    unsafe { sim.memcpy_dtoh_async(host, device, 1, first) }.unwrap();
    for _ in 0..50 {
        fill(&sim, device, 2, 1, second).unwrap();
    }
    assert_eq!(host_read(host, 2), [9, 9]);
    sync(&sim, first).unwrap();
    // SAFETY: the handle is looked up.
    assert!(!unsafe { sim.stream_query(second) }.unwrap(), "the other stream ran dry");
}

#[test]
fn a_held_stream_stands_still_and_a_wait_for_it_ends() {
    let sim = paced(Pace::Slowest, 0);
    let stream = sim.stream_create(false).unwrap();
    let device = sim.mem_alloc(1).unwrap();
    fill(&sim, device, 1, 1, stream).unwrap();
    sim.hold(stream);
    assert_eq!(sim.run_all(), 0);
    assert_eq!(code(sync(&sim, stream)), ErrorCode::LAUNCH_TIMEOUT);
    assert_eq!(code(download(&sim, device, 1, stream)), ErrorCode::LAUNCH_TIMEOUT);
    assert_eq!(code(free(&sim, device)), ErrorCode::LAUNCH_TIMEOUT);
    assert!(sim.findings().iter().all(|finding| finding.kind == FindingKind::CannotComplete));
    assert_eq!(sim.findings().len(), 3);
    sim.release_hold(stream);
    assert_eq!(download(&sim, device, 1, stream).unwrap(), [1]);
    assert!(!sim.step());
}

#[test]
fn kernels_run_in_the_order_of_their_stream() {
    let seen: BTreeSet<Vec<u32>> = (0..200)
        .map(|seed| {
            let sim = paced(Pace::Random, seed);
            let streams = [0; 2].map(|_| sim.stream_create(false).unwrap());
            let (device, host) = (sim.mem_alloc(1).unwrap(), pinned(&sim, 1));
            let list = Notes::new(&sim);
            host_write(host, b"?");
            fill(&sim, device, b'!', 1, streams[0]).unwrap();
            // SAFETY: the host reads the byte after the stream has ended.
            unsafe { sim.memcpy_dtoh_async(host, device, 1, streams[0]) }.unwrap();
            list.enqueue(&sim, streams[0], 1);
            list.enqueue(&sim, streams[0], 2);
            list.enqueue(&sim, streams[1], 3);
            assert!(list.numbers().is_empty(), "nothing runs when it is enqueued");
            sync(&sim, streams[0]).unwrap();
            assert_eq!(host_read(host, 1), b"!");
            assert!(list.numbers().len() >= 2);
            sim.ctx_synchronize().unwrap();
            list.numbers()
        })
        .collect();
    assert_eq!(seen, [[1, 2, 3], [1, 3, 2], [3, 1, 2]].map(|order| order.to_vec()).into());
}

#[test]
fn at_the_slowest_pace_no_query_moves_the_device() {
    for seed in 0..20 {
        let sim = seeded(seed);
        sim.set_pace(Pace::Slowest);
        let stream = sim.stream_create(false).unwrap();
        let event = sim.event_create(false).unwrap();
        let device = sim.mem_alloc(4).unwrap();
        fill(&sim, device, 7, 4, stream).unwrap();
        record(&sim, event, stream).unwrap();
        for _ in 0..100 {
            assert!(!query(&sim, event).unwrap());
        }
        assert!(sim.step() && sim.step(), "the fill and the record");
        assert!(query(&sim, event).unwrap());
    }
}

#[test]
fn at_the_slowest_pace_a_wait_runs_what_it_waits_for_and_no_more() {
    for seed in 0..20 {
        let sim = seeded(seed);
        sim.set_pace(Pace::Slowest);
        let [first, second, other] = [(); 3].map(|()| sim.stream_create(false).unwrap());
        let [before, after] = [(); 2].map(|()| sim.event_create(false).unwrap());
        let device = sim.mem_alloc(4).unwrap();
        // Three operations are ordered before `after`: a fill and a record on `first`, then the
        // wait and the record on `second`. The later work on `first` and all work on `other` are
        // not.
        fill(&sim, device, 1, 4, first).unwrap();
        record(&sim, before, first).unwrap();
        fill(&sim, device, 3, 4, first).unwrap();
        fill(&sim, device, 4, 4, other).unwrap();
        wait(&sim, second, before).unwrap();
        record(&sim, after, second).unwrap();
        // SAFETY: `after` is alive.
        unsafe { sim.event_synchronize(after) }.unwrap();
        assert!(query(&sim, before).unwrap());
        assert_eq!(sim.run_all(), 2, "the two fills that the host did not wait for");
    }
}

#[test]
fn at_the_slowest_pace_default_streams_are_waited_for_too() {
    let sim = seeded(1);
    sim.set_pace(Pace::Slowest);
    let blocking = sim.stream_create(true).unwrap();
    let device = sim.mem_alloc(4).unwrap();
    fill(&sim, device, 1, 4, 0).unwrap();
    fill(&sim, device, 2, 4, blocking).unwrap();
    fill(&sim, device, 3, 4, 0).unwrap();
    assert_eq!(download(&sim, device, 4, 0).unwrap(), [3; 4]);
    assert_eq!(sim.run_all(), 0);
}

#[test]
fn at_the_fastest_pace_all_has_run_when_the_call_returns() {
    let sim = seeded(1);
    sim.set_pace(Pace::Fastest);
    let stream = sim.stream_create(false).unwrap();
    let event = sim.event_create(false).unwrap();
    let device = sim.mem_alloc(4).unwrap();
    fill(&sim, device, 7, 4, stream).unwrap();
    record(&sim, event, stream).unwrap();
    assert!(query(&sim, event).unwrap());
    assert_eq!(sim.run_all(), 0);
}

#[test]
fn at_the_slowest_pace_the_seed_orders_what_a_wait_runs() {
    let last = |seed| {
        let sim = seeded(seed);
        sim.set_pace(Pace::Slowest);
        let [first, second] = [(); 2].map(|()| sim.stream_create(false).unwrap());
        let device = sim.mem_alloc(4).unwrap();
        fill(&sim, device, 1, 4, first).unwrap();
        fill(&sim, device, 2, 4, second).unwrap();
        sim.ctx_synchronize().unwrap();
        download(&sim, device, 1, 0).unwrap()[0]
    };
    let seen: BTreeSet<u8> = (0..20).map(last).collect();
    assert_eq!(seen, BTreeSet::from([1, 2]));
}

#[test]
fn at_the_slowest_pace_a_program_that_polls_ends() {
    let sim = seeded(1);
    sim.set_pace(Pace::Slowest);
    let [stream, other] = [(); 2].map(|()| sim.stream_create(false).unwrap());
    let event = sim.event_create(false).unwrap();
    let device = sim.mem_alloc(4).unwrap();
    fill(&sim, device, 7, 4, stream).unwrap();
    fill(&sim, device, 8, 4, other).unwrap();
    record(&sim, event, stream).unwrap();
    let polls = (0..1u32 << 20).take_while(|_| !query(&sim, event).unwrap()).count();
    assert!((2 << 16..=3 << 16).contains(&polls), "{polls} queries");
}

#[test]
fn at_the_slowest_pace_destroyed_streams_and_kernels_are_waited_for() {
    let sim = machine(SimConfig { devices: 2, ..SimConfig::default() });
    sim.set_pace(Pace::Slowest);
    let [gone, stream] = [(); 2].map(|()| sim.stream_create(false).unwrap());
    let event = sim.event_create(false).unwrap();
    let device = sim.mem_alloc(4).unwrap();
    fill(&sim, device, 1, 4, gone).unwrap();
    record(&sim, event, gone).unwrap();
    // SAFETY: the stream is alive, and nothing uses it afterwards.
    unsafe { sim.stream_destroy(gone) }.unwrap();
    wait(&sim, stream, event).unwrap();
    let list = Notes::new(&sim);
    list.enqueue(&sim, stream, 1);
    // The wait covers no work of other devices or streams.
    bind(&sim, 1);
    let far = sim.mem_alloc(4).unwrap();
    let elsewhere = sim.stream_create(false).unwrap();
    fill(&sim, far, 1, 4, elsewhere).unwrap();
    sync(&sim, stream).unwrap();
    assert_eq!(list.numbers(), [1]);
    assert_eq!(sim.run_all(), 1, "the fill on the other device");
}

#[test]
fn at_the_slowest_pace_a_device_waits_for_the_other() {
    let sim = machine(SimConfig { devices: 2, ..SimConfig::default() });
    sim.set_pace(Pace::Slowest);
    let near = sim.mem_alloc(4).unwrap();
    let (first, event) = (sim.stream_create(false).unwrap(), sim.event_create(false).unwrap());
    fill(&sim, near, 1, 4, first).unwrap();
    record(&sim, event, first).unwrap();
    fill(&sim, near, 2, 4, first).unwrap();
    bind(&sim, 1);
    let second = sim.stream_create(false).unwrap();
    wait(&sim, second, event).unwrap();
    sim.ctx_synchronize().unwrap();
    assert_eq!(sim.run_all(), 1, "the second fill of the first device");
}

#[test]
fn at_the_fastest_pace_work_runs_when_its_hold_is_released() {
    let sim = seeded(1);
    let stream = sim.stream_create(false).unwrap();
    let device = sim.mem_alloc(4).unwrap();
    fill(&sim, device, 7, 4, stream).unwrap();
    sim.set_pace(Pace::Fastest);
    assert_eq!(sim.run_all(), 0, "what was pending has run");
    sim.hold(stream);
    fill(&sim, device, 8, 4, stream).unwrap();
    sim.release_hold(stream);
    assert_eq!(sim.run_all(), 0);
}
