//! What counts as a proof that memory has no users any more, and what does not.

use crate::common::{Machine, PAGE, machine, machine_with, recorded, take};
use cuda_driver::{Device, DeviceError, ErrorCode, Fence, Stream};
use cuda_sim::Pace;
use cuda_vmm::pages::{PageState, Reservation, ReservationOptions, RetireError};
use cuda_vmm::sequences::{SequenceSpace, SpaceOptions};
use cuda_vmm::{
    ElasticPool, ElasticPoolOptions, EpochGate, MemoryRules, Worker,
    gate::{CoverError, Unrest, UsersUnknown},
};

#[test]
fn an_empty_list_is_no_proof_once_an_address_was_given_out() {
    let machine = machine();
    let pool = machine.pool(PAGE, 10, 10);
    let stream = machine.stream();
    machine.sim.hold(stream.raw());
    stream.fill(pool.block_span(5).unwrap(), 5).unwrap();
    assert_eq!(pool.shrink_to(1, &[]), Err(UsersUnknown { fences: 0, foreign: 0 }));
    assert_eq!((pool.ready_blocks(), pool.poll_retired().unmapped_pages), (10, 0));
    // The work's own fence is a proof.
    pool.shrink_to(1, &[recorded(&stream)]).unwrap();
    assert_eq!(pool.poll_retired().unmapped_pages, 0);
    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    assert_eq!(pool.poll_retired().unmapped_pages, 9);
    assert!(pool.close(&[recorded(&stream)]).wait().unwrap().is_clean());
    drop(stream);
    machine.assert_clean();
}

#[test]
fn an_empty_list_will_do_before_that_and_where_leases_are_taken() {
    let machine = machine();
    let unseen = machine.pool(PAGE, 4, 4);
    assert_eq!(unseen.shrink_to(1, &[]).map(|shrink| shrink.retiring_pages), Ok(3));
    assert_eq!(unseen.poll_retired().unmapped_pages, 3);
    let leased = machine.pool(PAGE, 4, 4);
    let lease = leased.gate().lease();
    assert!(leased.block_span(3).is_ok());
    assert_eq!(leased.shrink_to(1, &[]).map(|shrink| shrink.retiring_pages), Ok(3));
    assert_eq!(leased.poll_retired().unmapped_pages, 0);
    machine.end(lease);
    assert_eq!(leased.poll_retired().unmapped_pages, 3);
    for pool in [unseen, leased] {
        assert!(pool.close(&[]).try_complete().unwrap().is_clean());
    }
    machine.assert_clean();
}

/// A fence after no work, on a separate stream.
fn fence_of(machine: &Machine, device: i32) -> Fence {
    let device = Device::open(machine.device.driver().clone(), device).unwrap();
    recorded(&Stream::new(&device).unwrap())
}

#[test]
fn a_fence_of_a_device_that_cannot_access_the_memory_is_no_proof() {
    let machine = machine_with(3, 0);
    let others = machine_with(1, 0);
    let pool = machine.pool(PAGE, 4, 4);
    assert!(pool.block_span(3).is_ok());
    // Another device of this machine, and the device with the same ordinal on another machine.
    for fence in [fence_of(&machine, 1), fence_of(&others, 0)] {
        assert_eq!(pool.shrink_to(1, &[fence]), Err(UsersUnknown { fences: 1, foreign: 1 }));
    }
    let own = machine.stream();
    pool.shrink_to(1, &[recorded(&own)]).unwrap();
    assert!(pool.close(&[recorded(&own)]).wait().unwrap().is_clean());

    // A named peer has access.
    let options = ReservationOptions { bytes: 2 * PAGE, page_bytes: None, peers: vec![1] };
    let space = Reservation::new(&machine.device, options).unwrap();
    let pages = machine.pages(2);
    space.map_range(0, take(&pages, 2)).unwrap();
    assert!(space.mapped_span(0..2).is_ok());
    // With peers, no single wait covers all users, so pages with unknown users would never be at
    // rest.
    let stranger = space.retire(0..1, &[fence_of(&machine, 2)]).map(drop);
    assert_eq!(stranger, Err(RetireError::UsersUnknown(UsersUnknown { fences: 1, foreign: 1 })));
    let nobody = space.retire(0..1, &[]).map(drop);
    assert_eq!(nobody, Err(RetireError::UsersUnknown(UsersUnknown { fences: 0, foreign: 0 })));
    assert!(matches!(space.page_state(0), PageState::Mapped(_)), "{:?}", space.page_state(0));
    let peer = fence_of(&machine, 1);
    peer.wait().unwrap();
    assert_eq!(space.retire(1..2, &[peer]).unwrap().try_complete().unwrap().pages.len(), 1);
    // Closing consumes the last handle, so it reports the reason.
    assert_eq!(space.close(&[]).wait().unwrap_err().reason, Unrest::Unknown);

    // A dropped lease has the same effect until fences cover its work.
    let options = ReservationOptions { bytes: 2 * PAGE, page_bytes: None, peers: vec![1] };
    let space = Reservation::new(&machine.device, options).unwrap();
    space.map_range(0, take(&pages, 1)).unwrap();
    assert!(space.mapped_span(0..1).is_ok());
    let gate = space.gate().clone();
    drop(gate.lease());
    let refused = space.close(&[]).wait().unwrap_err();
    assert_eq!(refused.reason, Unrest::Dropped { leases: 1 });
    let fences = || Ok::<_, DeviceError>(vec![recorded(&own), fence_of(&machine, 1)]);
    gate.cover_dropped(fences).unwrap();
    assert_eq!(refused.request.wait().unwrap().unmapped, 1);
}

#[test]
fn a_fence_of_a_device_that_cannot_access_the_memory_is_refused_whatever_else_covers_its_uses() {
    let machine = machine_with(2, 0);
    let others = machine_with(1, 0);
    let (own, pages) = (machine.stream(), machine.pages(2));
    let options = SpaceOptions {
        sequences: 1,
        planes: 1,
        token_bytes: PAGE,
        tokens_max: 2,
        ..SpaceOptions::default()
    };
    let space = SequenceSpace::new(&machine.pages(2), &Worker::manual(), options).unwrap();
    let mut sequence = space.admit(2).unwrap();
    sequence.extend_blocking(2).unwrap();
    let retires = machine.reservation(2);
    retires.map_range(0, take(&pages, 2)).unwrap();
    let [unseen, seen, leased] = [0; 3].map(|_| machine.pool(PAGE, 4, 4));
    assert!(seen.block_span(3).is_ok() && leased.block_span(3).is_ok());
    machine.end(leased.gate().lease());
    for stranger in [fence_of(&machine, 1), fence_of(&others, 0)] {
        let fences = [recorded(&own), stranger];
        let refused = UsersUnknown { fences: 2, foreign: 1 };
        for pool in [&unseen, &seen, &leased] {
            assert_eq!(pool.shrink_to(1, &fences), Err(refused));
            assert_eq!((pool.ready_blocks(), pool.stats().retiring_bytes), (4, 0));
        }
        assert_eq!(retires.retire(0..2, &fences).map(drop), Err(refused.into()));
        assert!(matches!(retires.page_state(0), PageState::Mapped(_)));
        assert_eq!(sequence.shrink_to(1, &fences), Err(refused));
        assert_eq!((sequence.tokens(), sequence.ready_tokens()), (2, 2));
        assert_eq!(
            refused.to_string(),
            "1 of 2 fences are of devices that cannot access the memory: \
             give fences of its own device and of its peers"
        );
    }
    // An end cannot be refused, but such a fence covers nothing. Who says later who the users were
    // can be.
    let _ = sequence.plane(0).unwrap();
    sequence.finish(&[fence_of(&machine, 1)]);
    let fences = [recorded(&own), fence_of(&machine, 1)];
    assert_eq!(space.recover(&fences), Err(UsersUnknown { fences: 2, foreign: 1 }));
    assert_eq!((space.stats().abandoned, space.recover(&fences[..1])), (1, Ok(1)));
}

#[test]
fn a_lease_is_not_closed_by_fences_of_devices_that_cannot_access_the_memory() {
    let machine = machine_with(2, 0);
    let others = machine_with(1, 0);
    let pool = machine.pool(PAGE, 4, 4);
    let stream = machine.stream();
    let mut lease = pool.gate().lease();
    machine.sim.hold(stream.raw());
    stream.fill(pool.block_span(3).unwrap(), 5).unwrap();
    // Another device of this machine, and the device with the same ordinal on another machine.
    for fence in [fence_of(&machine, 1), fence_of(&others, 0)] {
        fence.wait().unwrap();
        let refused = lease.submitted(&[fence]).unwrap_err();
        assert_eq!((refused.fences, pool.gate().open_leases()), (1, 1));
        lease = refused.lease;
    }
    // One fence that covers the work suffices, whatever other fences are given.
    let other = fence_of(&machine, 1);
    lease.submitted(&[other.clone(), recorded(&stream)]).unwrap();
    assert_eq!(pool.shrink_to(1, &[]).map(|shrink| shrink.retiring_pages), Ok(3));
    assert_eq!(pool.poll_retired().unmapped_pages, 0);
    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    // All that were given are waited for.
    other.wait().unwrap();
    assert_eq!(pool.poll_retired().unmapped_pages, 3);
    assert!(pool.close(&[]).try_complete().unwrap().is_clean());
    drop((stream, other));
    machine.assert_clean();
}

#[test]
fn dropped_leases_are_covered_for_each_device_whose_memory_the_gate_guards() {
    let machine = machine_with(3, 0);
    let gate = EpochGate::new();
    let pool = |ordinal| {
        let device = Device::open(machine.device.driver().clone(), ordinal).unwrap();
        let options = ElasticPoolOptions {
            block_bytes: PAGE,
            capacity_blocks: 2,
            page_bytes: None,
            initial_blocks: 2,
        };
        ElasticPool::with_rules(&device, options, gate.clone(), MemoryRules::default()).unwrap()
    };
    let pools = [pool(0), pool(1)];
    drop(gate.lease());
    for strange in [vec![0], vec![1, 2], vec![2]] {
        let record =
            || Ok::<_, DeviceError>(strange.iter().map(|&at| fence_of(&machine, at)).collect());
        let CoverError::Uncovered { fences } = gate.cover_dropped(record).unwrap_err() else {
            panic!("the fences were recorded")
        };
        assert_eq!(fences.len(), strange.len());
    }
    let [first, second] = pools;
    let closing = first.close(&[]).try_complete().unwrap_err();
    assert_eq!(closing.reason, Unrest::Dropped { leases: 1 });
    assert!(closing.request.wait().unwrap().is_clean());
    // Memory that no longer exists needs no cover.
    gate.cover_dropped(|| Ok::<_, DeviceError>(vec![fence_of(&machine, 1)])).unwrap();
    assert!(second.close(&[]).wait().unwrap().is_clean());
    drop(gate);
    machine.assert_clean();
}

#[test]
fn pages_retired_with_no_proof_stay_until_somebody_waits_for_the_device() {
    let machine = machine();
    machine.sim.set_pace(Pace::Slowest);
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    let stream = machine.stream();
    space.map_range(0, take(&pages, 8)).unwrap();
    stream.fill(space.mapped_span(0..8).unwrap(), 5).unwrap();
    let retiring = space.retire(0..2, &[]).unwrap();
    assert_eq!(space.poll_retired().pages.len(), 0);
    let error = retiring.try_complete().unwrap_err();
    assert_eq!(error.reason, Unrest::Unknown);
    assert!(matches!(space.page_state(0), PageState::Retiring(_)));
    assert_eq!(error.request.wait().unwrap().pages.len(), 2);
    stream.synchronize().unwrap();
    stream.fill(space.mapped_span(2..8).unwrap(), 5).unwrap();
    let error = space.close(&[]).try_complete().unwrap_err();
    assert_eq!((error.reason, machine.calls("cuMemUnmap")), (Unrest::Unknown, 2));
    assert_eq!(error.request.wait().unwrap().unmapped, 6);
    // No work was left that could run on unmapped memory.
    stream.synchronize().unwrap();
    drop((pages, stream));
    machine.assert_clean();
}

#[test]
fn a_pool_that_closes_waits_for_the_users_of_its_ready_blocks_too() {
    let machine = machine();
    machine.sim.set_pace(Pace::Slowest);
    let pool = machine.pool(PAGE, 8, 8);
    let (stream, idle) = (machine.stream(), machine.stream());
    stream.fill(pool.block_span(1).unwrap(), 5).unwrap();
    pool.shrink_to(4, &[recorded(&idle)]).unwrap();
    // The fence of the blocks given up does not cover the other blocks.
    idle.synchronize().unwrap();
    let error = pool.close(&[]).try_complete().unwrap_err();
    assert_eq!((error.reason, machine.calls("cuMemUnmap")), (Unrest::Unknown, 0));
    assert_eq!(error.request.wait().unwrap().unmapped, 8);
    stream.synchronize().unwrap();
    drop((stream, idle));
    machine.assert_clean();
}

#[test]
fn a_sequence_with_unknown_users_gives_nothing_up_and_its_seat_is_abandoned() {
    let machine = machine();
    machine.sim.set_pace(Pace::Slowest);
    let (pages, worker) = (machine.pages(16), Worker::manual());
    let options = SpaceOptions {
        sequences: 1,
        planes: 1,
        token_bytes: PAGE,
        tokens_max: 8,
        ..SpaceOptions::default()
    };
    let space = SequenceSpace::new(&pages, &worker, options).unwrap();
    let stream = machine.stream();
    let work = || (0..100).for_each(|_| _ = worker.poll());
    let mut sequence = space.admit(8).unwrap();
    sequence.extend_blocking(8).unwrap();
    stream.fill(sequence.plane(0).unwrap().span(0..8).unwrap(), 3).unwrap();
    assert_eq!(sequence.shrink_to(1, &[]), Err(UsersUnknown { fences: 0, foreign: 0 }));
    assert_eq!((sequence.tokens(), sequence.ready_tokens()), (8, 8));
    sequence.finish(&[]);
    work();
    assert!(space.admit(1).is_err());
    assert_eq!(space.trim(u64::MAX).unwrap().unmapped_bytes, 0);
    assert_eq!(space.recover(&[]), Err(UsersUnknown { fences: 0, foreign: 0 }));
    assert_eq!((space.stats().abandoned, space.recover(&[recorded(&stream)])), (1, Ok(1)));
    work();
    assert!(space.admit(1).is_err(), "the fill has not run");
    stream.synchronize().unwrap();
    work();
    let mut sequence = space.admit(8).unwrap();
    sequence.extend_to(8).unwrap();
    stream.fill(sequence.plane(0).unwrap().span(0..8).unwrap(), 3).unwrap();
    drop(sequence);
    let error = space.close(&[]).unwrap().try_complete().unwrap_err();
    assert_eq!((error.reason, machine.calls("cuMemUnmap")), (Unrest::Unknown, 0));
    assert!(error.request.wait().unwrap().is_clean());
    stream.synchronize().unwrap();
    drop((pages, stream, worker));
    machine.assert_clean();
}

#[test]
fn who_asks_for_rest_leaves_the_error_of_the_work_to_who_asks_for_its_result() {
    let machine = machine();
    let pool = machine.pool(PAGE, 10, 10);
    let stream = machine.stream();
    stream.fill(pool.block_span(5).unwrap(), 5).unwrap();
    let fence = recorded(&stream);
    machine.sim.lose_device(0, 0, ErrorCode::ILLEGAL_ADDRESS);
    pool.shrink_to(1, std::slice::from_ref(&fence)).unwrap();
    // On a lost device no work runs, so the pages can be unmapped.
    assert_eq!(pool.poll_retired().unmapped_pages, 9);
    assert!(fence.is_complete().is_err(), "the work was never done");
    assert!(fence.wait().is_err(), "the work was never done");
}
