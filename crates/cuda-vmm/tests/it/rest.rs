//! Nothing is unmapped before its last user is done, whatever kind of user that is.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{Machine, PAGE, close_into, machine, one_seat, recorded, take};
use cuda_driver::Stream;
use cuda_sim::Pace;
use cuda_vmm::pages::{MapRefusal, NotMapped, PageState, Reservation};
use cuda_vmm::sequences::{Sequence, SequenceSpace};
use cuda_vmm::{
    EpochGate, Worker,
    gate::{CoverError, Unrest},
};

#[test]
fn pages_stay_mapped_until_the_event_completes() {
    let machine = machine();
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    let stream = machine.stream();
    space.map_range(0, take(&pages, 4)).unwrap();
    machine.sim.hold(stream.raw());
    stream.fill(space.mapped_span(1..3).unwrap(), 9).unwrap();
    let retiring = space.retire(1..3, &[recorded(&stream)]).unwrap();

    let refused = retiring.try_complete().unwrap_err();
    assert_eq!(refused.reason, Unrest::Events { pending: 1 });
    assert_eq!(refused.request.pages(), 1..3);
    assert_eq!(space.poll_retired().pages.len(), 0);
    assert_eq!(machine.calls("cuMemUnmap"), 0);

    // Neither mapped nor free: no new user finds the pages and nothing is mapped over them.
    assert!(matches!(space.page_state(1), PageState::Retiring(_)));
    assert_eq!(space.mapped_span(0..4), Err(NotMapped { index: 1 }));
    assert_eq!(space.retire(1..3, &[]).map(drop), Err(NotMapped { index: 1 }.into()));
    let error = space.map_range(0, take(&pages, 4)).unwrap_err();
    assert!(matches!(error.reason, MapRefusal::Occupied { index: 0, .. }));
    drop(error);
    let error = space.map_range(1, [pages.take().unwrap()]).unwrap_err();
    assert_eq!(error.reason, MapRefusal::Retiring { index: 1 });
    drop(error);
    let stats = space.stats();
    assert_eq!((stats.mapped_bytes, stats.retiring_bytes), (2 * PAGE, 2 * PAGE));

    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    let report = refused.request.try_complete().unwrap();
    assert_eq!((report.pages.len(), report.failed.len()), (2, 0));
    assert_eq!(space.page_state(1), PageState::Free);
    for page in report.pages {
        pages.give_back(page).unwrap();
    }
    space.map_range(1, take(&pages, 2)).unwrap();
    close_into(space, &pages);
    drop((pages, stream));
    machine.assert_clean();
}

#[test]
fn a_batch_on_the_cpu_counts_as_a_user() {
    let machine = machine();
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    let stream = machine.stream();
    space.map_range(0, take(&pages, 2)).unwrap();
    let batch = space.gate().lease();
    let other = space.gate().lease();
    let retiring = space.retire(0..2, &[]).unwrap();
    let later = space.gate().lease();

    let refused = retiring.try_complete().unwrap_err();
    assert_eq!(refused.reason, Unrest::Leases { open: 2 });
    machine.end(other);
    let refused = refused.request.try_complete().unwrap_err();
    assert_eq!(refused.reason, Unrest::Leases { open: 1 });

    // The batch is enqueued, with the old addresses, after the pages were retired.
    machine.sim.hold(stream.raw());
    stream.fill(space.span().slice(0, 2 * PAGE).unwrap(), 1).unwrap();
    batch.submitted(&[recorded(&stream)]).unwrap();
    let refused = refused.request.try_complete().unwrap_err();
    assert_eq!(refused.reason, Unrest::Events { pending: 1 });

    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    assert_eq!(refused.request.try_complete().unwrap().pages.len(), 2);
    assert_eq!(space.gate().open_leases(), 1);
    machine.end(later);
    close_into(space, &pages);
    drop((pages, stream));
    machine.assert_clean();
}

#[test]
fn one_gate_covers_several_reservations() {
    let machine = machine();
    let (pages, gate) = (machine.pages(8), EpochGate::new());
    let keys = machine.reservation_at(4, gate.clone());
    let values = machine.reservation_at(4, gate.clone());
    keys.map_range(0, [pages.take().unwrap()]).unwrap();
    values.map_range(0, [pages.take().unwrap()]).unwrap();
    let batch = gate.lease();
    let retiring = [keys.retire(0..1, &[]).unwrap(), values.retire(0..1, &[]).unwrap()];
    let retiring = retiring.map(|retiring| retiring.try_complete().unwrap_err().request);
    machine.end(batch);
    for retiring in retiring {
        assert_eq!(retiring.try_complete().unwrap().pages.len(), 1);
    }
    close_into(keys, &pages);
    close_into(values, &pages);
    drop(pages);
    machine.assert_clean();
}

/// Enqueues work under a lease and drops the lease, as an early return would.
fn work_and_drop(space: &Reservation, stream: &Stream) {
    let lease = space.gate().lease();
    stream.fill(space.mapped_span(0..2).unwrap(), 1).unwrap();
    drop(lease);
}

#[test]
fn the_work_of_a_dropped_lease_is_waited_for() {
    let machine = machine();
    machine.sim.set_pace(Pace::Slowest);
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    let stream = machine.stream();
    space.map_range(0, take(&pages, 4)).unwrap();
    // Memory retired before the lease was taken does not depend on its batch.
    let earlier = space.retire(3..4, &[]).unwrap().wait().unwrap();
    let other = space.retire(2..3, &[recorded(&stream)]).unwrap();
    work_and_drop(&space, &stream);
    stream.synchronize().unwrap();
    let other = other.try_complete().unwrap();
    work_and_drop(&space, &stream);
    let refused = space.retire(0..2, &[]).unwrap().try_complete().unwrap_err();
    assert_eq!(refused.reason, Unrest::Dropped { leases: 2 });
    assert_eq!((space.gate().open_leases(), space.poll_retired().pages.len()), (0, 0));
    let unmapped = refused.request.wait().unwrap();
    assert_eq!(unmapped.pages.len(), 2);
    stream.synchronize().unwrap();
    close_into(space, &pages);
    drop((earlier, other, unmapped, pages, stream));
    machine.assert_clean();
}

#[test]
fn fences_cover_the_work_of_dropped_leases() {
    let machine = machine();
    machine.sim.set_pace(Pace::Slowest);
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    let (stream, gate) = (machine.stream(), space.gate().clone());
    space.map_range(0, take(&pages, 2)).unwrap();
    gate.cover_dropped::<()>(|| panic!("there is nothing to cover")).unwrap();
    work_and_drop(&space, &stream);
    let dropped = Unrest::Dropped { leases: 1 };
    let retiring = space.retire(0..2, &[]).unwrap();
    // Neither an error nor an empty list of fences covers anything.
    let unrecorded = gate.cover_dropped(|| Err("refused")).unwrap_err();
    assert!(matches!(unrecorded, CoverError::Record("refused")), "{unrecorded:?}");
    let none = gate.cover_dropped::<()>(|| Ok(vec![])).unwrap_err();
    assert!(matches!(none, CoverError::Uncovered { fences } if fences.is_empty()));
    let refused = retiring.try_complete().unwrap_err();
    assert_eq!(refused.reason, dropped);
    // A lease that is dropped while the fences are recorded may have work after them.
    let late = gate.lease();
    gate.cover_dropped::<()>(|| {
        let fences = vec![recorded(&stream)];
        drop(late);
        Ok(fences)
    })
    .unwrap();
    let refused = refused.request.try_complete().unwrap_err();
    assert_eq!(refused.reason, Unrest::Events { pending: 1 });
    stream.synchronize().unwrap();
    // The late lease was taken after the pages were retired, but the gate cannot distinguish it
    // from the first.
    let refused = refused.request.try_complete().unwrap_err();
    assert_eq!(refused.reason, dropped);
    gate.cover_dropped::<()>(|| Ok(vec![recorded(&stream)])).unwrap();
    stream.synchronize().unwrap();
    let unmapped = refused.request.try_complete().unwrap();
    assert_eq!(unmapped.pages.len(), 2);
    gate.cover_dropped::<()>(|| panic!("all is covered")).unwrap();
    close_into(space, &pages);
    drop((unmapped, pages, stream));
    machine.assert_clean();
}

#[test]
fn waiting_ends_when_the_last_lease_and_event_do() {
    let machine = machine();
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    let stream = machine.stream();
    for _ in 0..200 {
        space.map_range(0, take(&pages, 2)).unwrap();
        let batch = space.gate().lease();
        let retiring = space.retire(0..2, &[]).unwrap();
        let (start, submitted) = (Barrier::new(2), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                start.wait();
                let report = retiring.wait().unwrap();
                assert!(submitted.load(Ordering::Relaxed), "unmapped under an open lease");
                assert_eq!(report.pages.len(), 2);
                report.pages.into_iter().try_for_each(|page| pages.give_back(page)).unwrap();
            });
            start.wait();
            stream.fill(space.span().slice(0, PAGE).unwrap(), 1).unwrap();
            submitted.store(true, Ordering::Relaxed);
            batch.submitted(&[recorded(&stream)]).unwrap();
            waiter.join().unwrap();
        });
    }
    close_into(space, &pages);
    drop((pages, stream));
    machine.assert_clean();
}

#[test]
fn a_dropped_retirement_is_completed_by_polling_and_only_once() {
    let machine = machine();
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    space.map_range(0, take(&pages, 3)).unwrap();
    let lease = space.gate().lease();
    drop(space.retire(0..1, &[]).unwrap());
    let kept = space.retire(1..3, &[]).unwrap();
    assert_eq!(space.poll_retired().pages.len(), 0);
    machine.end(lease);
    assert_eq!(space.poll_retired().pages.len(), 3);
    assert_eq!(kept.try_complete().unwrap().pages.len(), 0);
    assert_eq!(machine.calls("cuMemUnmap"), 3);
    close_into(space, &pages);
    drop(pages);
    machine.assert_clean();
}

#[test]
fn many_threads_complete_one_retirement_once() {
    for _ in 0..50 {
        let machine = machine();
        let (pages, space) = (machine.pages(8), machine.reservation(8));
        space.map_range(0, take(&pages, 8)).unwrap();
        for index in 0..8 {
            drop(space.retire(index..index + 1, &[]).unwrap());
        }
        let unmapped: usize = std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..4).map(|_| scope.spawn(|| space.poll_retired().pages.len())).collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).sum()
        });
        assert_eq!((unmapped, machine.calls("cuMemUnmap")), (8, 8));
        drop((space, pages));
        machine.assert_clean();
    }
}

#[test]
fn closing_is_refused_while_in_use_and_changes_nothing() {
    let machine = machine();
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    let stream = machine.stream();
    space.map_range(0, take(&pages, 2)).unwrap();
    machine.sim.hold(stream.raw());
    stream.fill(space.mapped_span(0..2).unwrap(), 1).unwrap();
    let lease = space.gate().lease();
    let refused = space.close(&[recorded(&stream)]).try_complete().unwrap_err();
    assert_eq!(refused.reason, Unrest::Events { pending: 1 });
    assert_eq!(machine.calls("cuMemUnmap"), 0);
    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    let refused = refused.request.try_complete().unwrap_err();
    assert_eq!(refused.reason, Unrest::Leases { open: 1 });
    machine.end(lease);
    let report = refused.request.wait().unwrap();
    assert!(report.is_clean());
    assert_eq!((report.unmapped, report.pages.len()), (2, 2));
    drop((report, pages, stream));
    machine.assert_clean();
}

#[test]
fn clean_up_finishes_quietly_on_a_lost_device() {
    let machine = machine();
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    let stream = machine.stream();
    space.map_range(0, take(&pages, 3)).unwrap();
    drop(space.retire(0..1, &[]).unwrap().try_complete().unwrap());
    let spare = pages.take().unwrap();
    machine.sim.fail_nth("cuStreamSynchronize", 1, cuda_driver::ErrorCode::ILLEGAL_ADDRESS);
    let event = recorded(&stream);
    assert!(stream.synchronize().is_err());
    assert!(machine.device.poison().is_some());

    let error = space.map_range(5, [spare]).unwrap_err();
    assert!(matches!(error.reason, MapRefusal::Device { .. }), "{error:?}");
    drop(error);
    let report = space.close(&[event]).try_complete().unwrap();
    assert!(report.is_clean(), "{:?}", report.errors);
    assert_eq!((report.unmapped, report.leaked_bytes), (2, 0));
    drop((report, pages, stream));
    machine.assert_clean();
}

#[test]
fn what_a_lost_device_refuses_of_a_clean_up_counts_as_done() {
    let machine = machine();
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    let stream = machine.stream();
    space.map_range(0, take(&pages, 3)).unwrap();
    let code = cuda_driver::ErrorCode::ILLEGAL_ADDRESS;
    machine.sim.fail_nth("cuStreamSynchronize", 1, code);
    assert!(stream.synchronize().is_err());
    // The device may return the error that lost it for every call.
    for call in ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"] {
        machine.sim.fail_nth(call, 1, code);
    }
    let report = space.close(&[]).try_complete().unwrap();
    assert!(report.is_clean(), "{:?}", report.errors);
    assert_eq!((report.unmapped, report.leaked_bytes), (3, 0));
    for page in report.pages {
        pages.give_back(page).unwrap();
    }
    assert_eq!(pages.trim(0), (3, vec![]));
}

/// A space of one seat whose sequence has given up its last rows, of which `long` still writes the
/// last. Each row has four tokens.
struct Shrunk {
    machine: Machine,
    worker: Worker,
    space: SequenceSpace,
    long: Stream,
    short: Stream,
}

fn shrunk() -> (Shrunk, Sequence) {
    let (machine, worker) = (machine(), Worker::manual());
    let space = one_seat(&machine.pages(8), &worker);
    let (long, short) = (machine.stream(), machine.stream());
    let mut sequence = space.admit(16).unwrap();
    sequence.extend_blocking(16).unwrap();
    machine.sim.hold(long.raw());
    long.fill(sequence.plane(0).unwrap().span(12..16).unwrap(), 3).unwrap();
    sequence.shrink_to(4, &[recorded(&long)]).unwrap();
    (Shrunk { machine, worker, space, long, short }, sequence)
}

impl Shrunk {
    fn work(&self) {
        while self.worker.poll() {}
    }

    /// The sequence wants its memory again, and the worker looks.
    fn want_again(&self, sequence: &mut Sequence) {
        sequence.extend_to(16).unwrap();
        self.work();
    }

    fn release(&self) {
        self.machine.sim.release_hold(self.long.raw());
        self.long.synchronize().unwrap();
        self.work();
    }

    /// Nobody gets the memory and none of it is unmapped before the long work ends.
    #[track_caller]
    fn assert_waits(self) {
        self.short.synchronize().unwrap();
        self.work();
        assert!(self.space.admit(16).is_err(), "the seat was given away under running work");
        assert_eq!(self.space.trim(u64::MAX).unwrap().unmapped_bytes, 0);
        self.release();
        assert_eq!(self.space.trim(u64::MAX).unwrap().unmapped_bytes, 4 * PAGE);
        assert!(self.machine.sim.findings().is_empty(), "{:?}", self.machine.sim.findings());
    }
}

#[test]
fn users_named_by_a_shrink_are_waited_for_by_the_end_of_a_sequence_that_grew_again() {
    let (t, mut sequence) = shrunk();
    t.want_again(&mut sequence);
    sequence.finish(&[recorded(&t.short)]);
    t.assert_waits();
}

#[test]
fn users_named_by_a_shrink_are_waited_for_by_a_later_one_though_the_sequence_grew_in_between() {
    let (t, mut sequence) = shrunk();
    t.want_again(&mut sequence);
    sequence.shrink_to(4, &[recorded(&t.short)]).unwrap();
    t.short.synchronize().unwrap();
    t.work();
    assert_eq!(t.space.stats().mapped_bytes, 4 * PAGE);
    t.release();
    assert_eq!(t.space.stats().mapped_bytes, PAGE);
    assert!(t.machine.sim.findings().is_empty(), "{:?}", t.machine.sim.findings());
}

#[test]
fn users_named_by_a_shrink_are_waited_for_by_a_recovery() {
    for again in [false, true] {
        let (t, mut sequence) = shrunk();
        if again {
            t.want_again(&mut sequence);
        }
        drop(sequence);
        assert_eq!((t.space.stats().abandoned, t.space.recover(&[recorded(&t.short)])), (1, Ok(1)));
        t.assert_waits();
    }
}

#[test]
fn users_named_by_a_shrink_are_waited_for_by_the_end_of_the_space() {
    for (dropped, again) in [(false, false), (false, true), (true, false), (true, true)] {
        let (t, mut sequence) = shrunk();
        if again {
            t.want_again(&mut sequence);
        }
        let fences = [recorded(&t.short)];
        if dropped {
            drop(sequence)
        } else {
            sequence.finish(&fences)
        }
        t.short.synchronize().unwrap();
        let closing = t.space.close(&fences).unwrap().try_complete().unwrap_err();
        assert_eq!(closing.reason, Unrest::Events { pending: 1 });
        t.machine.sim.release_hold(t.long.raw());
        t.long.synchronize().unwrap();
        assert!(closing.request.try_complete().unwrap().is_clean());
        assert!(t.machine.sim.findings().is_empty(), "{:?}", t.machine.sim.findings());
    }
}

#[test]
fn a_space_that_is_dropped_unmaps_what_is_at_rest_and_waits_for_nobody() {
    for released in [false, true] {
        let (t, mut sequence) = shrunk();
        t.want_again(&mut sequence);
        sequence.finish(&[recorded(&t.short)]);
        t.short.synchronize().unwrap();
        if released {
            t.machine.sim.release_hold(t.long.raw());
            t.long.synchronize().unwrap();
        }
        drop(t.space);
        assert_eq!(t.machine.calls("cuMemUnmap"), if released { 4 } else { 0 });
        t.machine.sim.release_hold(t.long.raw());
        t.long.synchronize().unwrap();
        assert!(t.machine.sim.findings().is_empty(), "{:?}", t.machine.sim.findings());
    }
}

#[test]
fn a_pool_that_closes_waits_for_all_users_of_its_parked_blocks() {
    // Block 7 is parked on a page with block 6, block 3 on one with block 2, and the pages between are
    // retired.
    for given_up in [&[7][..], &[7, 3]] {
        let machine = machine();
        let pool = machine.pool(PAGE / 2, 8, 8);
        let (long, short) = (machine.stream(), machine.stream());
        for (&left, stream) in given_up.iter().zip([&long, &short]) {
            machine.sim.hold(stream.raw());
            stream.fill(pool.block_span(left).unwrap(), 1).unwrap();
            pool.shrink_to(left, &[recorded(stream)]).unwrap();
        }
        machine.sim.release_hold(short.raw());
        short.synchronize().unwrap();
        assert_eq!(pool.poll_retired().unmapped_pages, 0);
        let closing = pool.close(&[recorded(&short)]);
        short.synchronize().unwrap();
        let refused = closing.try_complete().unwrap_err();
        assert_eq!(refused.reason, Unrest::Events { pending: 1 });
        machine.sim.release_hold(long.raw());
        long.synchronize().unwrap();
        assert!(refused.request.try_complete().unwrap().is_clean());
        assert!(machine.sim.findings().is_empty(), "{:?}", machine.sim.findings());
    }
}
