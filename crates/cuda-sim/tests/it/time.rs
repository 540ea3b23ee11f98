//! Virtual time: what overlaps, what waits, and the cost of calls. Real time has no influence.

use std::time::Duration;

use crate::common::*;
use cuda_driver::{Driver, PeerCopy};
use cuda_sim::{Curve, Pace, Profile, RaceCheck, Rate, SimConfig, SimDriver};

const NONE: Duration = Duration::ZERO;
const MIB: u64 = 1 << 20;

/// A machine with round numbers: 1 GB/s over the link (a byte per nanosecond), 10 GB/s on the
/// device, 10 µs for a copy call, 100 µs between devices, and everything else free.
fn round() -> Profile {
    Profile {
        htod: Rate::mb_per_s(1000),
        dtoh: Rate::mb_per_s(1000),
        pageable: Rate::mb_per_s(500),
        htod_setup: NONE,
        dtoh_setup: NONE,
        shared_setup: NONE,
        duplex_percent: 100,
        dtod: Rate::mb_per_s(10_000),
        dtod_setup: NONE,
        peer: Curve::new(&[(0, micros(100))]),
        kernel_load: Rate::mb_per_s(10_000),
        kernel_store: Rate::mb_per_s(5_000),
        fill: Rate::mb_per_s(5_000),
        kernel_host_load: Rate::mb_per_s(1000),
        kernel_host_store: Rate::mb_per_s(1000),
        kernel_overhead: micros(3),
        launch_call: NONE,
        htod_call: micros(10),
        dtoh_call: micros(10),
        dtod_call: micros(10),
        fill_call: micros(10),
        event_record_call: NONE,
        query_call: NONE,
        context_call: NONE,
        other_call: NONE,
        start_latency: NONE,
        kernel_start_latency: NONE,
        event_wait_latency: NONE,
        wait_latency: NONE,
        device_alloc: NONE,
        device_free: NONE,
        context_create: NONE,
        module_load: NONE,
        pinned_alloc: Curve::default(),
        ..Profile::h100()
    }
}

/// The same machine, but copy and fill calls cost the host nothing.
fn free_calls() -> Profile {
    Profile { htod_call: NONE, dtoh_call: NONE, dtod_call: NONE, fill_call: NONE, ..round() }
}

fn micros(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

fn with(profile: Profile, seed: u64) -> SimDriver {
    let races = RaceCheck::Report;
    machine(SimConfig { profile, seed, devices: 2, races, ..SimConfig::default() })
}

/// The host's time for `work`.
fn took(sim: &SimDriver, work: impl FnOnce()) -> Duration {
    let begun = sim.virtual_now();
    work();
    sim.virtual_now() - begun
}

fn fetch_async(sim: &SimDriver, host: u64, from: u64, bytes: u64, stream: u64) {
    // SAFETY: tests pass pinned memory that lives until the machine ends.
    unsafe { sim.memcpy_dtoh_async(host, from, bytes, stream) }.unwrap();
}

/// Runs a check for several seeds: the time must not depend on the scheduler's order.
fn for_seeds(check: impl Fn(&SimDriver)) {
    (0..20).for_each(|seed| check(&with(round(), seed)));
}

#[test]
fn copies_in_one_direction_serialise_and_in_opposite_ones_overlap() {
    for_seeds(|sim| {
        let (a, b) = (sim.stream_create(false).unwrap(), sim.stream_create(false).unwrap());
        let (device, host) = (sim.mem_alloc(2 * MIB).unwrap(), pinned(sim, 2 * MIB));
        let both_down = took(sim, || {
            upload_async(sim, device, host, MIB, a).unwrap();
            upload_async(sim, device + MIB, host + MIB, MIB, b).unwrap();
            sim.ctx_synchronize().unwrap();
        });
        // The first copy starts when its call is over, the second when the first has ended.
        assert_eq!(both_down, micros(10) + Duration::from_nanos(2 * MIB));
        let both_ways = took(sim, || {
            upload_async(sim, device, host, MIB, a).unwrap();
            fetch_async(sim, host + MIB, device + MIB, MIB, b);
            sim.ctx_synchronize().unwrap();
        });
        assert_eq!(both_ways, micros(20) + Duration::from_nanos(MIB));
    });
}

#[test]
fn two_engines_share_the_link_and_hide_each_others_set_up() {
    for (copy_engines, setups) in [(1, 2), (2, 1)] {
        let profile = Profile { copy_engines, htod_setup: micros(100), htod_call: NONE, ..round() };
        let sim = with(profile, 0);
        let (a, b) = (sim.stream_create(false).unwrap(), sim.stream_create(false).unwrap());
        let (device, host) = (sim.mem_alloc(2 * MIB).unwrap(), pinned(&sim, 2 * MIB));
        let time = took(&sim, || {
            upload_async(&sim, device, host, MIB, a).unwrap();
            upload_async(&sim, device + MIB, host + MIB, MIB, b).unwrap();
            sim.ctx_synchronize().unwrap();
        });
        assert_eq!(time, micros(100) * setups + Duration::from_nanos(2 * MIB));
    }
}

#[test]
fn each_direction_has_its_own_set_up() {
    let profile = Profile { htod_setup: micros(100), dtoh_setup: micros(30), ..free_calls() };
    let sim = with(profile, 0);
    let stream = sim.stream_create(false).unwrap();
    let (device, host) = (sim.mem_alloc(MIB).unwrap(), pinned(&sim, MIB));
    let down = took(&sim, || {
        (0..3).for_each(|_| upload_async(&sim, device, host, 1000, stream).unwrap());
        sync(&sim, stream).unwrap();
    });
    assert_eq!(down, micros(101) * 3);
    let up = took(&sim, || {
        (0..3).for_each(|_| fetch_async(&sim, host, device, 1000, stream));
        sync(&sim, stream).unwrap();
    });
    assert_eq!(up, micros(31) * 3);
}

#[test]
fn copies_both_ways_take_turns_at_the_shared_part_of_their_set_up() {
    let profile = Profile {
        htod_setup: micros(10),
        dtoh_setup: micros(8),
        shared_setup: micros(7),
        ..free_calls()
    };
    let sim = with(profile, 0);
    let (a, b) = (sim.stream_create(false).unwrap(), sim.stream_create(false).unwrap());
    let (device, host) = (sim.mem_alloc(MIB).unwrap(), pinned(&sim, MIB));
    let each_way = |pairs: u64, down: bool, up: bool| {
        took(&sim, || {
            for _ in 0..pairs {
                if down {
                    upload_async(&sim, device, host, 1000, a).unwrap();
                }
                if up {
                    fetch_async(&sim, host + 2000, device + 2000, 1000, b);
                }
            }
            sim.ctx_synchronize().unwrap();
        })
    };
    assert_eq!(each_way(4, true, false), micros(4 * 11), "one way it is not seen");
    assert_eq!(each_way(4, false, true), micros(4 * 9));
    // Eight set-ups in turn; the last copy continues with the rest of its set-up and its bytes.
    assert_eq!(each_way(4, true, true), micros(8 * 7 + 2));
    assert_eq!(each_way(9, true, true) - each_way(4, true, true), micros(5 * 14));
}

#[test]
fn a_copy_is_slowed_while_one_goes_the_other_way() {
    let profile = Profile { duplex_percent: 150, ..free_calls() };
    let sim = with(profile, 0);
    let (a, b) = (sim.stream_create(false).unwrap(), sim.stream_create(false).unwrap());
    let (device, host) = (sim.mem_alloc(2 * MIB).unwrap(), pinned(&sim, 2 * MIB));
    let both = |down: u64, up: u64| {
        took(&sim, || {
            upload_async(&sim, device, host, down, a).unwrap();
            fetch_async(&sim, host + MIB, device + MIB, up, b);
            sim.ctx_synchronize().unwrap();
        })
    };
    // The second copy does 200 µs of its work during the first one's 300 µs, and the rest alone.
    assert_eq!(both(300_000, 300_000), micros(400));
    assert_eq!(both(300_000, 100_000), micros(300), "it ends at 150");
    assert_eq!(both(100_000, 40_000), micros(100));
}

#[test]
fn fills_have_a_rate_and_kernels_a_start_of_their_own() {
    let profile =
        Profile { fill: Rate::mb_per_s(1000), kernel_start_latency: micros(9), ..free_calls() };
    let sim = with(profile, 0);
    let memory = sim.mem_alloc(MIB).unwrap();
    let time = took(&sim, || {
        fill(&sim, memory, 1, 50_000, 0).unwrap();
        sim.ctx_synchronize().unwrap();
    });
    assert_eq!(time, micros(50));
    let kernels = |count: u64| {
        let function = kernel(&sim, "add_one");
        took(&sim, || {
            let args = cuda_driver::KernelArgs::new().arg(memory);
            (0..count).for_each(|_| launch(&sim, function, &args, 0).unwrap());
            sim.ctx_synchronize().unwrap();
        })
    };
    // 3 µs each. The later launches hide their start latency. One byte takes less than 1 ns.
    assert_eq!(kernels(1), micros(12));
    assert_eq!(kernels(4), micros(21));
}

#[test]
fn the_host_goes_on_while_the_device_works() {
    for_seeds(|sim| {
        let stream = sim.stream_create(false).unwrap();
        let (device, host) = (sim.mem_alloc(MIB).unwrap(), pinned(sim, MIB));
        assert_eq!(took(sim, || upload_async(sim, device, host, MIB, stream).unwrap()), micros(10));
        sim.advance_host(micros(500));
        // Half of the copy is over when the host starts to wait.
        let rest = Duration::from_nanos(MIB) - micros(500);
        assert_eq!(took(sim, || sync(sim, stream).unwrap()), rest);
        assert_eq!(took(sim, || sync(sim, stream).unwrap()), NONE);
        // An idle device starts at the time of the call, not at the time when it became idle.
        sim.advance_host(micros(10_000));
        let again = took(sim, || {
            upload_async(sim, device, host, 1000, stream).unwrap();
            sync(sim, stream).unwrap();
        });
        assert_eq!(again, micros(11));
    });
}

#[test]
fn a_wait_for_an_event_orders_two_streams_in_time() {
    for_seeds(|sim| {
        let (a, b) = (sim.stream_create(false).unwrap(), sim.stream_create(false).unwrap());
        let event = sim.event_create(false).unwrap();
        let (device, host) = (sim.mem_alloc(2 * MIB).unwrap(), pinned(sim, 2 * MIB));
        let time = took(sim, || {
            upload_async(sim, device, host, MIB, a).unwrap();
            record(sim, event, a).unwrap();
            wait(sim, b, event).unwrap();
            fetch_async(sim, host + MIB, device, MIB, b);
            sync(sim, b).unwrap();
        });
        assert_eq!(time, micros(10) + Duration::from_nanos(2 * MIB));
    });
}

#[test]
fn a_stream_goes_on_some_time_after_the_event_of_another() {
    let profile = Profile { event_wait_latency: micros(4), ..free_calls() };
    let sim = with(profile, 0);
    let (a, b) = (sim.stream_create(false).unwrap(), sim.stream_create(false).unwrap());
    let event = sim.event_create(false).unwrap();
    let (device, host) = (sim.mem_alloc(MIB).unwrap(), pinned(&sim, MIB));
    // A copy of 20 µs, and one of 30 µs behind its event in `second`, enqueued `later`.
    let both = |second: u64, later: Duration| {
        took(&sim, || {
            upload_async(&sim, device, host, 20_000, a).unwrap();
            record(&sim, event, a).unwrap();
            sim.advance_host(later);
            wait(&sim, second, event).unwrap();
            fetch_async(&sim, host, device, 30_000, second);
            sim.ctx_synchronize().unwrap();
        })
    };
    assert_eq!(both(b, NONE), micros(20 + 4 + 30));
    assert_eq!(both(a, NONE), micros(20 + 30), "its own event costs a stream nothing");
    assert_eq!(both(b, micros(22)), micros(20 + 4 + 30), "it counts from the event's end");
    assert_eq!(both(b, micros(40)), micros(40 + 30), "long over");
}

#[test]
fn every_kind_of_copy_has_a_call_of_its_own() {
    let profile = Profile {
        htod_call: micros(1),
        dtoh_call: micros(2),
        dtod_call: micros(3),
        fill_call: micros(4),
        ..round()
    };
    let sim = with(profile, 0);
    let (device, host) = (sim.mem_alloc(MIB).unwrap(), pinned(&sim, MIB));
    assert_eq!(took(&sim, || upload_async(&sim, device, host, 8, 0).unwrap()), micros(1));
    assert_eq!(took(&sim, || fetch_async(&sim, host, device, 8, 0)), micros(2));
    // SAFETY: device addresses are looked up.
    let copy = || unsafe { sim.memcpy_dtod_async(device + 64, device, 8, 0) }.unwrap();
    assert_eq!(took(&sim, copy), micros(3));
    assert_eq!(took(&sim, || fill(&sim, device, 1, 8, 0).unwrap()), micros(4));
}

#[test]
fn the_default_stream_waits_for_blocking_streams_in_time() {
    for (blocking, serial) in [(true, true), (false, false)] {
        for_seeds(|sim| {
            let stream = sim.stream_create(blocking).unwrap();
            let (device, host) = (sim.mem_alloc(2 * MIB).unwrap(), pinned(sim, 2 * MIB));
            let time = took(sim, || {
                upload_async(sim, device, host, MIB, stream).unwrap();
                fetch_async(sim, host + MIB, device + MIB, MIB, 0);
                sim.ctx_synchronize().unwrap();
            });
            let calls = micros(if serial { 10 } else { 20 });
            assert_eq!(time, calls + Duration::from_nanos(if serial { 2 * MIB } else { MIB }));
        });
    }
}

#[test]
fn events_tell_virtual_time_and_a_query_that_is_answered_is_not_before_them() {
    for_seeds(|sim| {
        let stream = sim.stream_create(false).unwrap();
        let (start, end) = (sim.event_create(true).unwrap(), sim.event_create(true).unwrap());
        let (device, host) = (sim.mem_alloc(MIB).unwrap(), pinned(sim, MIB));
        let time = took(sim, || {
            record(sim, start, stream).unwrap();
            upload_async(sim, device, host, MIB, stream).unwrap();
            record(sim, end, stream).unwrap();
            while !query(sim, end).unwrap() {}
        });
        assert_eq!(time, micros(10) + Duration::from_nanos(MIB));
        // SAFETY: handles are looked up.
        let elapsed_ms = unsafe { sim.event_elapsed_time(start, end) }.unwrap();
        // From the record, which completes at once, to the end of the copy, whose call came in
        // between.
        assert_eq!(elapsed_ms, time.as_nanos() as f32 / 1e6);
    });
}

#[test]
fn a_kernel_costs_what_it_moves() {
    for_seeds(|sim| {
        let copy_kernel = |to, from, bytes| {
            took(sim, || {
                launch_copy(sim, (to, from), bytes, 0).unwrap();
                sim.ctx_synchronize().unwrap();
            })
        };
        let (device, host) = (sim.mem_alloc(4 * MIB).unwrap(), pinned(sim, MIB));
        fill(sim, device, 1, 4 * MIB, 0).unwrap();
        sim.ctx_synchronize().unwrap();
        // 100,000 bytes read at 10 GB/s and written at 5 GB/s, after 3 µs.
        assert_eq!(copy_kernel(device + 2 * MIB, device, 100_000), micros(3 + 10 + 20));
        // From pinned memory at the link's rate. The writes overlap with the reads.
        assert_eq!(copy_kernel(device, host, 100_000), micros(3 + 100));
        assert_eq!(copy_kernel(host, device, 100_000), micros(3 + 100));
    });
}

#[test]
fn kernels_share_the_device_and_copies_run_beside_them() {
    for_seeds(|sim| {
        let streams: Vec<u64> = (0..3).map(|_| sim.stream_create(false).unwrap()).collect();
        let (device, host) = (sim.mem_alloc(4 * MIB).unwrap(), pinned(sim, MIB));
        fill(sim, device, 1, 4 * MIB, 0).unwrap();
        sim.ctx_synchronize().unwrap();
        let time = took(sim, || {
            upload_async(sim, device + 3 * MIB, host, 70_000, streams[2]).unwrap();
            launch_copy(sim, (device + MIB, device), 100_000, streams[0]).unwrap();
            launch_copy(sim, (device + 2 * MIB, device), 100_000, streams[1]).unwrap();
            sim.ctx_synchronize().unwrap();
        });
        assert_eq!(time, micros(10) + micros(3 + 10 + 20) * 2 + micros(4));
    });
}

#[test]
fn copies_between_devices_and_pageable_copies_cost_what_the_profile_says() {
    let sim = with(round(), 0);
    let destination_context = bind(&sim, 1);
    let destination = sim.mem_alloc(MIB).unwrap();
    let source_context = bind(&sim, 0);
    let source = sim.mem_alloc(MIB).unwrap();
    fill(&sim, source, 1, MIB, 0).unwrap();
    sim.ctx_synchronize().unwrap();
    let copy = PeerCopy { destination, destination_context, source, source_context, bytes: 1000 };
    let peer = took(&sim, || {
        // SAFETY: contexts and device addresses are looked up.
        unsafe { sim.memcpy_peer_async(copy, 0) }.unwrap();
        sim.ctx_synchronize().unwrap();
    });
    assert_eq!(peer, micros(110));
    // Two nanoseconds per byte, during the call.
    assert_eq!(took(&sim, || upload(&sim, source, &[1; 1000], 0).unwrap()), micros(12));
    assert_eq!(took(&sim, || drop(download(&sim, source, 1000, 0).unwrap())), micros(12));
}

#[test]
fn calls_cost_what_was_measured_on_an_h100() {
    let sim = with(Profile::h100(), 0);
    let nanos = Duration::from_nanos;
    let address = reserve(&sim, 64);
    let mut handles = Vec::new();
    let created = took(&sim, || handles.push(sim.mem_create(PAGE, prop(0)).unwrap()));
    assert_eq!(created, nanos(11_800));
    let mapped = took(&sim, || map(&sim, address, PAGE, 0, handles[0]).unwrap());
    assert_eq!(mapped, nanos(1_700));
    let access = [cuda_driver::AccessDesc { device: 0 }];
    let opened = took(&sim, || sim.mem_set_access(address, PAGE, &access).unwrap());
    assert_eq!(opened, nanos(29_300));
    let three = address + PAGE;
    for page in 0..3 {
        handles.push(sim.mem_create(PAGE, prop(0)).unwrap());
        map(&sim, three + page * PAGE, PAGE, 0, handles[1 + page as usize]).unwrap();
    }
    let opened = took(&sim, || sim.mem_set_access(three, 3 * PAGE, &access).unwrap());
    assert_eq!(opened, nanos(3 * 29_300 * 153 / 100));
    let unmapped = took(&sim, || sim.mem_unmap(address, PAGE).unwrap());
    assert_eq!(unmapped, nanos(27_200));
    let released = took(&sim, || release(&sim, handles[0]).unwrap());
    assert_eq!(released, nanos(20_500));
    let unmapped = took(&sim, || sim.mem_unmap(address, 8 * PAGE).unwrap());
    assert_eq!(unmapped, nanos(3 * 27_200 * 113 / 100));
    assert_eq!(took(&sim, || _ = pinned(&sim, 16 * MIB)), Duration::from_micros(5600));
    assert_eq!(took(&sim, || _ = reserve(&sim, 1)), micros(31));
    let event = sim.event_create(false).unwrap();
    assert_eq!(took(&sim, || record(&sim, event, 0).unwrap()), nanos(1_200));
    sim.ctx_synchronize().unwrap();
    assert_eq!(took(&sim, || assert!(query(&sim, event).unwrap())), nanos(360));
}

#[test]
fn loops_of_small_copies_take_what_they_took_on_an_h100() {
    // Bytes of a block, and the measured GB/s of a loop of 2,048 copies, in wall time.
    for (kib, measured) in
        [(4, 1.6), (16, 5.9), (32, 10.6), (64, 17.5), (128, 26.5), (512, 42.9), (2048, 51.3)]
    {
        let sim = with(Profile::h100(), 1);
        let stream = sim.stream_create(false).unwrap();
        let (device, host) = (sim.mem_alloc(2 * MIB).unwrap(), pinned(&sim, 2 * MIB));
        let count = 64;
        let time = took(&sim, || {
            for _ in 0..count {
                upload_async(&sim, device, host, kib << 10, stream).unwrap();
            }
            sync(&sim, stream).unwrap();
        });
        let rate = ((count * kib) << 10) as f64 / time.as_nanos() as f64;
        assert!((rate / measured - 1.0).abs() < 0.06, "{kib} KiB: {rate} beside {measured} GB/s");
    }
}

/// The time of a program whose streams are largely unordered.
fn race(seed: u64) -> Duration {
    let sim = with(Profile::h100(), seed);
    let (device, host) = (sim.mem_alloc(MIB).unwrap(), pinned(&sim, MIB));
    let streams: Vec<u64> = (0..4).map(|i| sim.stream_create(i % 2 == 0).unwrap()).collect();
    let event = sim.event_create(false).unwrap();
    fill(&sim, device, 1, MIB, 0).unwrap();
    for round in 0..50 {
        let stream = streams[round % 4];
        upload_async(&sim, device, host, 1000 * round as u64, stream).unwrap();
        fetch_async(&sim, host, device, 5000, streams[(round + 1) % 4]);
        record(&sim, event, stream).unwrap();
        wait(&sim, streams[(round + 2) % 4], event).unwrap();
        query(&sim, event).unwrap();
    }
    sim.ctx_synchronize().unwrap();
    sim.virtual_now()
}

#[test]
fn one_seed_has_one_time() {
    for seed in 0..20 {
        assert_eq!(race(seed), race(seed), "seed {seed}");
    }
}

#[test]
fn a_device_handle_tells_virtual_time_through_a_counting_driver() {
    use cuda_driver::{CountingDriver, Device};
    use std::sync::Arc;

    let sim = SimDriver::new(SimConfig { profile: round(), ..SimConfig::default() }).unwrap();
    let device = Device::open(Arc::new(CountingDriver::new(Arc::new(sim.clone()))), 0).unwrap();
    sim.advance_host(micros(7));
    assert_eq!(device.virtual_now(), Some(sim.virtual_now()));
    assert_eq!(device.virtual_now(), Some(micros(7)));
}

#[test]
fn computation_keeps_the_device_busy_while_copies_over_the_link_go_on() {
    let sim = with(free_calls(), 0);
    // In the order in which it was enqueued.
    sim.set_pace(Pace::Fastest);
    let (device, host) = (sim.mem_alloc(MIB).unwrap(), pinned(&sim, MIB));
    let streams: Vec<u64> = (0..2).map(|_| sim.stream_create(true).unwrap()).collect();
    // SAFETY: handles are looked up.
    let wait_for = |stream| unsafe { sim.stream_synchronize(stream) }.unwrap();
    sim.compute(streams[0], micros(500));
    // A byte takes a nanosecond.
    upload_async(&sim, device, host, 100_000, streams[1]).unwrap();
    wait_for(streams[1]);
    assert_eq!(sim.virtual_now(), micros(100));
    // A fill needs the device, which is busy: 100,000 bytes take 20 us.
    fill(&sim, device, 1, 100_000, streams[1]).unwrap();
    wait_for(streams[1]);
    assert_eq!(sim.virtual_now(), micros(520));
    sim.compute(streams[0], micros(30));
    sim.compute(12_345, micros(1_000_000));
    sim.ctx_synchronize().unwrap();
    assert_eq!(sim.virtual_now(), micros(550));
}

#[test]
fn at_the_pace_of_the_clock_a_query_sees_what_has_ended_by_then() {
    let sim = with(free_calls(), 0);
    sim.set_pace(Pace::Timed);
    let (stream, other) = (sim.stream_create(true).unwrap(), sim.stream_create(true).unwrap());
    // SAFETY: handles are looked up.
    let idle = |stream| unsafe { sim.stream_query(stream) }.unwrap();
    let events = [sim.event_create(false).unwrap(), sim.event_create(false).unwrap()];
    sim.compute(stream, micros(50));
    record(&sim, events[0], stream).unwrap();
    sim.compute(stream, micros(50));
    record(&sim, events[1], stream).unwrap();
    assert!(!query(&sim, events[0]).unwrap() && !idle(stream));
    assert!(idle(other));
    // The query that found nothing has moved the clock by no more than itself.
    assert!(sim.virtual_now() < micros(1));
    sim.advance_host(micros(50));
    assert!(query(&sim, events[0]).unwrap() && !query(&sim, events[1]).unwrap());
    // SAFETY: handles are looked up.
    unsafe { sim.event_synchronize(events[1]) }.unwrap();
    assert_eq!(sim.virtual_now(), micros(100));
    assert!(idle(stream));
    // A loop of queries ends.
    sim.compute(stream, Duration::from_nanos(500));
    record(&sim, events[0], stream).unwrap();
    assert!((0..600).any(|_| query(&sim, events[0]).unwrap()));
}

#[test]
fn the_record_says_when_operations_were_ready_and_ended_and_whom_they_awaited() {
    for_seeds(|sim| {
        let (a, b) = (sim.stream_create(false).unwrap(), sim.stream_create(false).unwrap());
        let (device, host) = (sim.mem_alloc(2 * MIB).unwrap(), pinned(sim, 2 * MIB));
        let event = sim.event_create(true).unwrap();
        sim.keep_times(5);
        let (begun, waited_before) = (sim.virtual_now(), sim.virtual_waited());
        upload_async(sim, device, host, MIB, a).unwrap();
        record(sim, event, a).unwrap();
        wait(sim, b, event).unwrap();
        fetch_async(sim, host + MIB, device + MIB, 1000, b);
        sim.ctx_synchronize().unwrap();
        // All but the two calls that cost something.
        let waited = sim.virtual_waited() - waited_before;
        assert_eq!(waited, sim.virtual_now() - begun - micros(20));
        let kept = sim.take_times();
        let of = |stream, name: &str| {
            let mut found = kept.iter().filter(|op| op.stream == stream && op.name.contains(name));
            *found.next().unwrap_or_else(|| panic!("{name} in {kept:?}"))
        };
        let (up, waited, down) = (of(a, "HtoD"), of(b, "Wait"), of(b, "DtoH"));
        let sent = begun + micros(10) + Duration::from_nanos(MIB);
        assert_eq!((up.ready, up.end), (begun + micros(10), sent));
        assert_eq!((up.to_device, up.to_host, up.awaits), (MIB, 0, None));
        // The wait was enqueued at once, and ends with what it waits for.
        assert_eq!((waited.ready, waited.end, waited.awaits), (begun + micros(10), sent, Some(a)));
        assert_eq!((down.ready, down.end), (sent, sent + micros(1)));
        assert_eq!((down.to_device, down.to_host), (0, 1000));
        assert_eq!(sim.take_times(), [], "they are taken once");
    });
}

#[test]
fn the_record_keeps_no_more_than_it_may_and_changes_no_time() {
    let total = |limit| {
        let sim = with(round(), 3);
        let stream = sim.stream_create(false).unwrap();
        let (device, host) = (sim.mem_alloc(MIB).unwrap(), pinned(&sim, MIB));
        sim.keep_times(limit);
        let time = took(&sim, || {
            (0..9).for_each(|_| upload_async(&sim, device, host, 1000, stream).unwrap());
            sim.ctx_synchronize().unwrap();
        });
        (time, sim.take_times().len())
    };
    let (time, none) = total(0);
    assert_eq!((total(4), none), ((time, 4), 0));
}
