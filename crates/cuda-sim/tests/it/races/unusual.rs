//! Machines that are lost, machines whose check is on only for a while, and rare uses.

use std::sync::Arc;

use cuda_driver::{Driver, ErrorCode, HostAccess, HostAllocFlags, HostRegisterFlags};
use cuda_sim::{Pace, RaceCheck, RaceUse, SimConfig, SimDriver};

use crate::common::{bind, fill, machine, record, sync, wait};

fn config() -> SimConfig {
    SimConfig { races: RaceCheck::Report, pace: Pace::Slowest, ..SimConfig::default() }
}

fn reads(sim: &SimDriver, address: u64, bytes: u64) {
    sim.host_access(HostAccess { address, bytes, writes: false });
}

fn register(sim: &SimDriver, address: u64, bytes: u64) {
    // SAFETY: the tests register memory that outlives the machine.
    unsafe { sim.mem_host_register(address, bytes, HostRegisterFlags::SHARED) }.unwrap();
}

fn unregister(sim: &SimDriver, address: u64) {
    // SAFETY: registered before.
    unsafe { sim.mem_host_unregister(address) }.unwrap();
}

#[test]
fn a_lost_device_tells_nothing_of_what_it_would_have_waited_for() {
    for runs_first in [false, true] {
        let sim = machine(SimConfig { devices: 2, ..config() });
        bind(&sim, 1);
        let flags = HostAllocFlags { portable: true, ..HostAllocFlags::CACHED };
        let (host, memory) = (sim.mem_host_alloc(64, flags).unwrap(), sim.mem_alloc(64).unwrap());
        let (stream, event) = (sim.stream_create(false).unwrap(), sim.event_create(false).unwrap());
        // SAFETY: live memory of the machine.
        unsafe { sim.memcpy_dtoh_async(host, memory, 64, stream) }.unwrap();
        record(&sim, event, stream).unwrap();
        bind(&sim, 0);
        let waiting = sim.stream_create(false).unwrap();
        wait(&sim, waiting, event).unwrap();
        sim.lose_device(0, 0, ErrorCode::ILLEGAL_ADDRESS);
        if runs_first {
            sim.run_all();
        }
        reads(&sim, host, 64);
        sim.run_all();
        assert_eq!(sim.races().len(), 1, "{runs_first}: {:?}", sim.races());
    }
}

#[test]
fn orders_that_were_made_while_nobody_looked_are_not_missed_later() {
    // The first fill runs before nobody looks, or after that.
    for pace in [Pace::Fastest, Pace::Slowest] {
        let sim = machine(SimConfig { pace, ..config() });
        let (a, b) = (sim.stream_create(false).unwrap(), sim.stream_create(false).unwrap());
        let (memory, event) = (sim.mem_alloc(64).unwrap(), sim.event_create(false).unwrap());
        fill(&sim, memory, 1, 64, a).unwrap();
        sim.set_race_check(RaceCheck::Off);
        record(&sim, event, a).unwrap();
        wait(&sim, b, event).unwrap();
        sim.set_race_check(RaceCheck::Report);
        fill(&sim, memory, 2, 64, b).unwrap();
        sim.ctx_synchronize().unwrap();
        assert_eq!(sim.races(), []);
        // The check is on from here.
        fill(&sim, memory, 3, 64, a).unwrap();
        fill(&sim, memory, 4, 64, b).unwrap();
        sim.ctx_synchronize().unwrap();
        assert_eq!(sim.races().len(), 1);
    }
}

#[test]
fn many_pieces_of_one_pair_hide_no_other_pair() {
    let sim = machine(config());
    let streams = [(); 3].map(|()| sim.stream_create(false).unwrap());
    let (memory, source) = (sim.mem_alloc(1 << 16).unwrap(), sim.mem_alloc(1 << 16).unwrap());
    for block in 0..100 {
        fill(&sim, memory + 64 * block, 1, 16, streams[0]).unwrap();
    }
    let copies: Vec<_> = (0..100)
        .map(|block| cuda_driver::BatchCopy {
            destination: memory + 64 * block + 32,
            source: source + 64 * block,
            bytes: 16,
        })
        .collect();
    // SAFETY: device memory alone.
    unsafe { sim.memcpy_batch_async(&copies, streams[1]) }.unwrap();
    sim.run_all();
    fill(&sim, memory, 2, 1 << 16, streams[2]).unwrap();
    sim.ctx_synchronize().unwrap();
    let found: Vec<_> = sim.races().iter().map(|race| race.first.actor.stream().unwrap()).collect();
    assert_eq!(found.len(), 2, "{found:x?}");
    assert!(found.contains(&streams[0]) && found.contains(&streams[1]), "{found:x?}");
    assert_eq!(sim.races_unseen(), 0);
}

#[test]
fn calls_whose_place_is_unknown_are_told_apart_by_their_memory() {
    let sim = machine(config());
    let driver: Arc<dyn Driver> = Arc::new(sim.clone());
    let streams = [(); 2].map(|()| sim.stream_create(false).unwrap());
    for memory in [sim.mem_alloc(64).unwrap(), sim.mem_alloc(64).unwrap()] {
        for stream in streams {
            // SAFETY: device memory, and a live stream.
            unsafe { driver.memset_d8_async(memory, 1, 64, stream) }.unwrap();
        }
        sim.ctx_synchronize().unwrap();
    }
    assert_eq!(sim.races().len(), 2);
    assert!(sim.races().iter().all(|race| race.first.site.is_none()));
}

#[test]
fn an_access_of_the_host_counts_for_every_pinned_part_of_its_range() {
    let memory = vec![0_u8; 3 << 12].leak();
    let base = (memory.as_ptr().expose_provenance() as u64).next_multiple_of(4096);
    for (regions, access) in [
        // The range begins before the registered memory.
        (vec![(base + 4096, 4096)], (base, 8192)),
        // The range lies in two regions. The second one is used.
        (vec![(base, 4096), (base + 4096, 4096)], (base, 8192)),
    ] {
        let sim = machine(config());
        regions.iter().for_each(|&(start, bytes)| register(&sim, start, bytes));
        let (stream, device) = (sim.stream_create(false).unwrap(), sim.mem_alloc(64).unwrap());
        // SAFETY: registered above, and no other code uses it.
        unsafe { sim.memcpy_dtoh_async(base + 4096, device, 64, stream) }.unwrap();
        sim.run_all();
        reads(&sim, access.0, access.1);
        assert_eq!(sim.races().len(), 1, "{regions:x?}");
        assert_eq!((sim.races()[0].address, sim.races()[0].bytes), (base + 4096, 64));
        sync(&sim, stream).unwrap();
        regions.iter().for_each(|&(start, _)| unregister(&sim, start));
    }
}

#[test]
fn an_end_is_remembered_as_long_as_work_of_before_is_pending() {
    let memory = vec![0_u8; 3 << 12].leak();
    let base = (memory.as_ptr().expose_provenance() as u64).next_multiple_of(4096);
    let sim = machine(SimConfig { devices: 2, ..config() });
    register(&sim, base, 4096);
    bind(&sim, 1);
    let (stream, device) = (sim.stream_create(false).unwrap(), sim.mem_alloc(64).unwrap());
    // SAFETY: registered above, and no other code uses it.
    unsafe { sim.memcpy_dtoh_async(base, device, 64, stream) }.unwrap();
    bind(&sim, 0);
    unregister(&sim, base);
    register(&sim, base, 4096);
    for _ in 0..2000 {
        register(&sim, base + 4096, 4096);
        unregister(&sim, base + 4096);
    }
    sim.run_all();
    let races = sim.races();
    assert_eq!(races.len(), 1);
    assert_eq!((races[0].second.used, races[0].hazard), (RaceUse::End, Some("H3")));
    unregister(&sim, base);
}

#[test]
fn a_copy_that_was_refused_is_none_and_a_context_ends_once() {
    let sim = SimDriver::new(SimConfig { implicit_waits: false, ..config() }).unwrap();
    let context = sim.device_primary_ctx_retain(0).unwrap();
    // SAFETY: retained above.
    unsafe { sim.ctx_set_current(context) }.unwrap();
    let (stream, memory) = (sim.stream_create(false).unwrap(), sim.mem_alloc(64).unwrap());
    let mut host = [0_u8; 64];
    sim.hold(stream);
    // SAFETY: the copy is over or refused when the call returns.
    let refused = unsafe { sim.memcpy_dtoh_async(host.as_mut_ptr() as u64, memory, 64, stream) };
    assert_eq!(refused.unwrap_err().code, ErrorCode::LAUNCH_TIMEOUT);
    sim.release_hold(stream);
    // SAFETY: nothing of the context is used again.
    unsafe { sim.device_primary_ctx_release(0) }.unwrap();
    assert_eq!(sim.races(), [], "nothing was enqueued");
    let begin = || {
        let context = sim.device_primary_ctx_retain(0).unwrap();
        // SAFETY: retained just now, and released below.
        unsafe { sim.ctx_set_current(context) }.unwrap();
    };
    begin();
    fill(&sim, sim.mem_alloc(64).unwrap(), 1, 64, 0).unwrap();
    // SAFETY: nothing of the context is used again.
    unsafe { sim.device_primary_ctx_release(0) }.unwrap();
    let once = sim.races().len();
    assert!(once > 0, "the end does not wait");
    begin();
    // At a place of its own: races of the same two places are reported once.
    // SAFETY: as above.
    unsafe { sim.device_primary_ctx_release(0) }.unwrap();
    assert_eq!(sim.races().len(), once, "an empty context ends nothing");
}
