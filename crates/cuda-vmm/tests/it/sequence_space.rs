//! Contiguous sequences: mapped ahead, adopted as a whole, unmapped under pressure, all counted.

use std::collections::BTreeMap;

use crate::common::{DEVICE_PAGES, Machine, PAGE, machine, recorded};
use cuda_vmm::pages::{PagePool, PagePoolOptions};
use cuda_vmm::sequences::{Layout, RoomError, Sequence, SequenceSpace, SpaceOptions};
use cuda_vmm::worker::{Fault, Health};
use cuda_vmm::{MemoryLimit, MemoryRules, Worker};

/// A page of a plane holds four tokens.
const TOKEN: u64 = PAGE / 4;

fn options() -> SpaceOptions {
    SpaceOptions {
        sequences: 3,
        planes: 2,
        token_bytes: TOKEN,
        tokens_max: 16,
        ..SpaceOptions::default()
    }
}

struct Setup {
    machine: Machine,
    pages: PagePool,
    worker: Worker,
    space: SequenceSpace,
}

fn setup(options: SpaceOptions, capacity_pages: u64) -> Setup {
    let machine = machine();
    let pages = machine.pages(capacity_pages);
    let worker = Worker::manual();
    let space = SequenceSpace::new(&pages, &worker, options).unwrap();
    Setup { machine, pages, worker, space }
}

impl Setup {
    /// Lets the worker do everything it can.
    fn work(&self) {
        for _ in 0..10_000 {
            if !self.worker.poll() {
                return;
            }
        }
        panic!("the worker does not finish");
    }

    #[track_caller]
    fn check(&self) {
        assert_adds_up(&self.space, &self.pages);
    }

    #[track_caller]
    fn close(self) {
        self.check();
        let Self { machine, pages, worker, space } = self;
        let report = space.close(&[]).unwrap().wait().unwrap();
        assert!(report.is_clean(), "{:?}", report.errors);
        assert_eq!(pages.stats().in_use, 0);
        worker.close();
        drop(pages);
        machine.assert_clean();
    }
}

#[track_caller]
fn assert_adds_up(space: &SequenceSpace, pages: &PagePool) {
    let stats = space.stats();
    let held = stats.mapped_bytes
        + stats.parked_bytes
        + stats.in_transit_bytes
        + stats.retiring_bytes
        + stats.quarantined_bytes;
    assert_eq!(stats.reserved_bytes, held + stats.unmapped_bytes, "{stats:?}");
    assert_eq!(stats.mapped_bytes, stats.used_bytes + stats.waste_bytes, "{stats:?}");
    let pool = pages.stats();
    assert_eq!(pool.in_use * PAGE, held, "{stats:?} {pool:?}");
    assert_eq!(pool.live, pool.idle + pool.in_use);
    assert_eq!(stats.in_transit_bytes + stats.retiring_bytes, 0, "nothing is in transit");
}

fn calls(machine: &Machine) -> BTreeMap<&'static str, u64> {
    machine.sim.calls()
}

#[test]
fn in_steady_state_a_step_calls_no_driver() {
    let t = setup(SpaceOptions { look_ahead_tokens: 4, ..options() }, 64);
    let mut sequence = t.space.admit(1).unwrap();
    t.work();
    for tokens in 1..=16 {
        let before = calls(&t.machine);
        sequence.extend_to(tokens).unwrap();
        assert_eq!(calls(&t.machine), before);
        t.work();
        // Never more than the look-ahead and the rest of a page.
        assert!(sequence.ready_tokens() < tokens + 4 + 4);
        t.check();
    }
    let stats = t.space.stats();
    assert_eq!((stats.stalls, stats.used_bytes), (0, 16 * 2 * TOKEN));
    assert_eq!(
        sequence.extend_to(17).unwrap_err(),
        RoomError::TooLong { asked_tokens: 17, tokens_max: 16 }
    );
    sequence.finish(&[]);
    t.close();
}

#[test]
fn what_is_not_there_is_refused_counted_and_then_there() {
    let t = setup(options(), 64);
    let mut sequence = t.space.admit(0).unwrap();
    t.work();
    let refused = RoomError::NotReady { asked_tokens: 5, ready_tokens: 0, cause: None };
    assert_eq!(sequence.extend_to(5), Err(refused.clone()));
    // Both rows in one step.
    assert!(t.worker.poll());
    assert_eq!(sequence.ready_tokens(), 8);
    t.work();
    sequence.extend_to(5).unwrap();
    assert_eq!(t.space.stats().stalls, 1);
    // Without the worker.
    sequence.extend_blocking(13).unwrap();
    assert_eq!((sequence.tokens(), sequence.ready_tokens()), (13, 16));
    let stats = t.space.stats();
    assert_eq!((stats.stalls, stats.mapped_bytes), (2, 8 * PAGE));
    assert!(!stats.stall_time.is_zero(), "the simulated machine's clock ran");
    drop(sequence);
    t.close();
}

#[test]
fn a_step_maps_rows_side_by_side_and_grants_access_to_them_at_once() {
    let options = SpaceOptions { layout: Layout::TokenMajor, tokens_max: 64, ..options() };
    let t = setup(options, 64);
    t.work();
    let before = t.machine.sim.calls();
    let sequence = t.space.admit(32).unwrap();
    t.work();
    assert_eq!(sequence.ready_tokens(), 32);
    let after = t.machine.sim.calls();
    let made = |call| after.get(call).unwrap_or(&0) - before.get(call).unwrap_or(&0);
    let rows = made("cuMemMap");
    assert_eq!((made("cuMemCreate"), rows), (16, 16));
    // Eight pages a step.
    assert_eq!(made("cuMemSetAccess"), 2);
    // The worker binds the context once for each step, not for each call.
    let bound = made("cuCtxSetCurrent");
    assert!(bound < rows, "{bound} times for {rows} pages");
    sequence.finish(&[]);
    t.close();
}

#[test]
fn a_step_maps_fewer_rows_of_one_sequence_when_several_want_some() {
    let t = setup(options(), 64);
    t.work();
    let sequences: Vec<_> = (0..3).map(|_| t.space.admit(8).unwrap()).collect();
    let ready = || sequences.iter().map(Sequence::ready_tokens).collect::<Vec<_>>();
    // Two planes: a step has four rows. So each sequence gets one row while three want some, and
    // two rows while two want some.
    for expected in [[4, 0, 0], [8, 0, 0], [8, 8, 0]] {
        assert!(t.worker.poll());
        assert_eq!(ready(), expected);
    }
    t.work();
    assert_eq!(ready(), [8, 8, 8]);
    sequences.into_iter().for_each(|sequence| sequence.finish(&[]));
    t.close();
}

#[test]
fn of_several_that_want_memory_the_one_that_needs_it_first_gets_it_first() {
    let t = setup(SpaceOptions { look_ahead_tokens: 4, ..options() }, 64);
    let [mut later, mut sooner] = [1, 1].map(|tokens| t.space.admit(tokens).unwrap());
    t.work();
    let ready = |all: [&Sequence; 2]| all.map(Sequence::ready_tokens);
    assert_eq!(ready([&later, &sooner]), [8, 8]);
    later.extend_to(5).unwrap();
    sooner.extend_to(8).unwrap();
    assert!(t.worker.poll());
    assert_eq!(ready([&later, &sooner]), [8, 12]);
    t.work();
    assert_eq!(ready([&later, &sooner]), [12, 12]);
    later.finish(&[]);
    sooner.finish(&[]);
    t.close();
}

#[test]
fn a_batch_notes_every_demand_and_tells_the_first_refusal() {
    let t = setup(options(), 64);
    let mut sequences: Vec<_> = (0..3).map(|_| t.space.admit(4).unwrap()).collect();
    t.work();
    t.space.extend(sequences.iter_mut().zip([4, 4, 4])).unwrap();
    let error = t.space.extend(sequences.iter_mut().zip([4, 5, 6])).unwrap_err();
    assert_eq!((error.first, error.refused), (1, 2));
    t.work();
    t.space.extend(sequences.iter_mut().zip([4, 5, 6])).unwrap();
    let pages: Vec<_> = sequences.iter().map(Sequence::ready_tokens).collect();
    assert_eq!(pages, [4, 8, 8]);
    sequences.into_iter().for_each(|sequence| sequence.finish(&[]));
    t.close();
}

#[test]
fn each_layout_puts_a_token_where_its_formula_says() {
    for layout in [Layout::PlaneMajor, Layout::TokenMajor] {
        let t = setup(SpaceOptions { layout, ..options() }, 64);
        let first = t.space.admit(0).unwrap();
        let mut sequence = t.space.admit(16).unwrap();
        sequence.extend_blocking(16).unwrap();
        let (strides, base) = (t.space.strides(), t.space.span().address());
        for plane in 0..2 {
            let view = sequence.plane(plane).unwrap();
            assert_eq!(view.tokens(), 16);
            assert_eq!(view.token_stride(), strides.token);
            for token in 0..16 {
                let span = view.span(token..token + 1).unwrap();
                let offset = plane * strides.plane
                    + sequence.seat() * strides.sequence
                    + token * strides.token;
                assert_eq!((span.address(), span.bytes()), (base + offset, TOKEN));
            }
            assert_eq!(view.address(), view.span(0..16).unwrap().address());
            let packed = view.span(0..16).unwrap().bytes() == 16 * TOKEN;
            assert_eq!(packed, layout == Layout::PlaneMajor);
            let beyond = RoomError::NotReady { asked_tokens: 17, ready_tokens: 16, cause: None };
            assert_eq!(view.span(3..17), Err(beyond));
        }
        let none = RoomError::NoPlane { plane: 2, planes: 2 };
        assert_eq!(sequence.plane(2), Err(none));
        assert_eq!(first.plane(0).unwrap().tokens(), 0);
        sequence.finish(&[]);
        first.finish(&[]);
        t.close();
    }
}

#[test]
fn the_next_sequence_adopts_what_fits_best_without_a_driver_call() {
    let t = setup(options(), 64);
    let mut sequences: Vec<_> = (0..3).map(|_| t.space.admit(0).unwrap()).collect();
    for (sequence, tokens) in sequences.iter_mut().zip([4, 16, 8]) {
        sequence.extend_blocking(tokens).unwrap();
    }
    sequences.into_iter().for_each(|sequence| sequence.finish(&[]));
    t.work();
    assert_eq!(t.space.stats().parked, 3);
    let before = calls(&t.machine);
    let mut taken: Vec<_> = [5, 9, 16].map(|tokens| t.space.admit(tokens).unwrap()).into();
    let seats: Vec<_> = taken.iter().map(Sequence::seat).collect();
    // Eight tokens are the smallest that is enough for five; then sixteen; then only four are left.
    assert_eq!(seats, [2, 1, 0]);
    taken[0].extend_to(5).unwrap();
    taken[1].extend_to(9).unwrap();
    assert_eq!(calls(&t.machine), before);
    assert!(taken[2].extend_to(16).is_err());
    let stats = t.space.stats();
    assert_eq!((stats.admitted, stats.adopted), (6, 3));
    assert_eq!(stats.adopted_bytes, (2 + 8 + 4) * PAGE);
    let full = RoomError::NoSeat { sequences: 3, live: 3, busy: 0 };
    assert_eq!(t.space.admit(1).unwrap_err(), full);
    taken.into_iter().for_each(|sequence| sequence.finish(&[]));
    t.close();
}

#[test]
fn nothing_is_adopted_or_unmapped_while_its_work_runs() {
    let t = setup(SpaceOptions { sequences: 1, ..options() }, 64);
    let stream = t.machine.stream();
    let mut sequence = t.space.admit(4).unwrap();
    sequence.extend_blocking(4).unwrap();
    let span = sequence.plane(1).unwrap().span(0..4).unwrap();
    t.machine.sim.hold(stream.raw());
    stream.fill(span, 7).unwrap();
    sequence.finish(&[recorded(&stream)]);
    t.work();
    let busy = RoomError::NoSeat { sequences: 1, live: 0, busy: 1 };
    assert_eq!(t.space.admit(1).unwrap_err(), busy);
    assert_eq!(t.space.trim(u64::MAX).unwrap().unmapped_bytes, 0);
    t.machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    t.space.admit(1).unwrap().finish(&[]);
    let report = t.space.trim(u64::MAX).unwrap();
    assert_eq!((report.unmapped_bytes, report.released_bytes), (2 * PAGE, 2 * PAGE));
    assert!(t.machine.sim.findings().is_empty(), "{:?}", t.machine.sim.findings());
    drop(stream);
    t.close();
}

#[test]
fn parked_memory_goes_to_who_needs_it_oldest_first_and_from_the_end() {
    // Eight pages in all: four rows.
    let t = setup(options(), 8);
    let mut sequences: Vec<_> = (0..3).map(|_| t.space.admit(0).unwrap()).collect();
    sequences[0].extend_blocking(8).unwrap();
    sequences[1].extend_blocking(8).unwrap();
    let mut last = sequences.pop().unwrap();
    sequences.into_iter().for_each(|sequence| sequence.finish(&[]));
    t.work();
    assert_eq!(t.space.stats().parked_bytes, 8 * PAGE);
    last.extend_blocking(4).unwrap();
    assert_eq!(t.machine.calls("cuMemUnmap"), 2);
    // One row of the older seat is left. The shorter request finds it.
    let young = t.space.admit(8).unwrap();
    assert_eq!((young.seat(), young.ready_tokens()), (1, 8));
    let old = t.space.admit(3).unwrap();
    assert_eq!((old.seat(), old.ready_tokens()), (0, 4));
    t.check();
    // Everything is in use now.
    let error = last.extend_blocking(12).unwrap_err();
    let fault = Fault::Limit { bytes: 2 * PAGE };
    let cause = Some(fault.clone());
    assert_eq!(error, RoomError::NotReady { asked_tokens: 12, ready_tokens: 4, cause });
    t.work();
    assert_eq!(t.space.health(), Health::Degraded { cause: fault });
    old.finish(&[]);
    young.finish(&[]);
    t.work();
    assert!(t.space.health() == Health::Healthy);
    last.extend_to(12).unwrap();
    last.finish(&[]);
    t.close();
}

#[test]
fn a_device_without_memory_degrades_the_space_until_there_is_some() {
    let t = setup(SpaceOptions { prepared_pages: 2, ..options() }, u64::MAX);
    // Another pool has all pages but one.
    let others = t.machine.pages(u64::MAX);
    let taken = others.take_many(DEVICE_PAGES - 1).unwrap();
    t.work();
    assert!(t.space.health() == Health::Healthy, "no sequence has asked for memory yet");
    let mut sequence = t.space.admit(4).unwrap();
    t.work();
    let fault = Fault::OutOfMemory { bytes: 2 * PAGE };
    assert_eq!(t.space.health(), Health::Degraded { cause: fault.clone() });
    let cause = Some(fault);
    let refused = RoomError::NotReady { asked_tokens: 4, ready_tokens: 0, cause };
    assert_eq!(sequence.extend_to(4).unwrap_err(), refused);
    assert_eq!(sequence.extend_blocking(4).unwrap_err(), refused);
    assert_eq!(t.space.stats().mapped_bytes, 0);
    // The worker tries again without a request.
    drop(taken);
    t.work();
    t.work();
    assert!(t.space.health() == Health::Healthy);
    sequence.extend_to(4).unwrap();
    sequence.finish(&[]);
    drop(others);
    t.close();
}

#[test]
fn no_more_is_parked_than_may_be_and_the_pool_is_kept_stocked() {
    let t = setup(SpaceOptions { parked_pages_max: 4, prepared_pages: 3, ..options() }, 64);
    t.work();
    assert_eq!(t.pages.stats().idle, 3);
    let mut sequence = t.space.admit(16).unwrap();
    sequence.extend_blocking(16).unwrap();
    t.work();
    sequence.finish(&[]);
    t.work();
    assert_eq!(t.space.stats().parked_bytes, 4 * PAGE);
    assert!(t.pages.stats().idle >= 3);
    t.check();
    let before = t.pages.stats().live;
    let report = t.space.trim(2 * PAGE).unwrap();
    assert_eq!((report.unmapped_bytes, report.released_bytes), (0, 2 * PAGE));
    assert_eq!(t.pages.stats().live, before - 2);
    t.close();
}

#[test]
fn dropping_a_sequence_takes_the_safe_side() {
    let t = setup(options(), 64);
    // Never exposed: free at once.
    let mut hidden = t.space.admit(4).unwrap();
    hidden.extend_blocking(4).unwrap();
    drop(hidden);
    assert_eq!((t.space.stats().parked, t.space.stats().abandoned), (1, 0));
    // Exposed, and its users are unknown.
    let mut seen = t.space.admit(4).unwrap();
    seen.extend_blocking(4).unwrap();
    let stream = t.machine.stream();
    stream.fill(seen.plane(0).unwrap().span(0..4).unwrap(), 1).unwrap();
    drop(seen);
    t.work();
    assert_eq!((t.space.stats().parked, t.space.stats().abandoned), (0, 1));
    assert_eq!(t.space.trim(u64::MAX).unwrap().unmapped_bytes, 0);
    assert_eq!(t.space.recover(&[recorded(&stream)]), Ok(1));
    assert_eq!(t.space.stats().abandoned, 0);
    stream.synchronize().unwrap();
    assert_eq!(t.space.trim(u64::MAX).unwrap().unmapped_bytes, 2 * PAGE);
    // With leases, they cover every use.
    let lease = t.space.gate().lease();
    let mut leased = t.space.admit(4).unwrap();
    leased.extend_blocking(4).unwrap();
    let _ = leased.plane(0).unwrap();
    drop(leased);
    assert_eq!(t.space.trim(u64::MAX).unwrap().unmapped_bytes, 0);
    t.machine.end(lease);
    assert_eq!(t.space.trim(u64::MAX).unwrap().unmapped_bytes, 2 * PAGE);
    drop(stream);
    t.close();
}

#[test]
fn a_live_space_is_not_closed_and_closing_waits_for_all_users() {
    let t = setup(options(), 64);
    let stream = t.machine.stream();
    let mut sequence = t.space.admit(4).unwrap();
    sequence.extend_blocking(4).unwrap();
    let still = t.space.close(&[]).unwrap_err();
    assert_eq!(still.live, 1);
    let space = still.space;
    t.machine.sim.hold(stream.raw());
    stream.fill(sequence.plane(0).unwrap().span(0..4).unwrap(), 1).unwrap();
    sequence.finish(&[recorded(&stream)]);
    // Closing waits for the fence that the sequence was finished with, although it is not passed
    // again.
    let closing = space.close(&[]).unwrap().try_complete().unwrap_err().request;
    t.machine.sim.release_hold(stream.raw());
    let report = closing.wait().unwrap();
    assert!(report.is_clean(), "{:?}", report.errors);
    assert_eq!((report.unmapped, report.leaked_bytes), (2, 0));
    assert!(t.machine.sim.findings().is_empty());
    drop((stream, t.pages, t.worker));
    t.machine.assert_clean();
}

#[test]
fn dropping_a_space_at_rest_leaks_nothing_and_its_sequences_outlive_it() {
    let t = setup(options(), 64);
    let mut early = t.space.admit(4).unwrap();
    early.extend_blocking(4).unwrap();
    let mut late = t.space.admit(8).unwrap();
    late.extend_blocking(4).unwrap();
    let _ = early.plane(0).unwrap();
    let stream = t.machine.stream();
    early.finish(&[recorded(&stream)]);
    stream.synchronize().unwrap();
    drop(stream);
    drop(t.space);
    // Nobody will ever map more for it, so it is not told to retry.
    let failed = RoomError::Failed { asked_tokens: 8, ready_tokens: 4, cause: Fault::Stopped };
    assert_eq!(late.extend_to(8), Err(failed.clone()));
    assert!(!t.worker.poll());
    late.extend_to(4).unwrap();
    assert_eq!((late.extend_to(8), late.extend_blocking(8)), (Err(failed.clone()), Err(failed)));
    assert!(t.worker.health() == Health::Healthy, "the worker works for others");
    late.finish(&[]);
    assert_eq!(t.pages.stats().in_use, 0);
    drop((t.pages, t.worker));
    t.machine.assert_clean();
}

#[test]
fn a_closed_worker_is_told_and_sequences_can_still_be_extended_by_hand() {
    let t = setup(options(), 64);
    let mut sequence = t.space.admit(4).unwrap();
    t.worker.clone().close();
    let cause = Fault::Stopped;
    let failed = RoomError::Failed { asked_tokens: 4, ready_tokens: 0, cause };
    assert_eq!(sequence.extend_to(4).unwrap_err(), failed);
    sequence.extend_blocking(4).unwrap();
    sequence.extend_to(4).unwrap();
    sequence.finish(&[]);
    t.close();
}

#[test]
fn what_is_given_up_is_unmapped_at_rest_unless_it_is_wanted_again() {
    let t = setup(options(), 64);
    let stream = t.machine.stream();
    let mut sequence = t.space.admit(16).unwrap();
    sequence.extend_blocking(16).unwrap();
    t.machine.sim.hold(stream.raw());
    stream.fill(sequence.plane(0).unwrap().span(0..16).unwrap(), 3).unwrap();
    sequence.shrink_to(5, &[recorded(&stream)]).unwrap();
    t.work();
    // Out of use at once, but mapped as long as the work runs.
    assert_eq!((sequence.tokens(), sequence.ready_tokens()), (5, 8));
    assert_eq!(sequence.plane(0).unwrap().tokens(), 8);
    assert_eq!(t.space.stats().mapped_bytes, 8 * PAGE);
    // A second shrink keeps the users of the first.
    let idle = t.machine.stream();
    sequence.shrink_to(4, &[recorded(&idle)]).unwrap();
    t.work();
    assert_eq!(t.space.stats().mapped_bytes, 8 * PAGE);
    sequence.extend_to(9).unwrap();
    t.machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    idle.synchronize().unwrap();
    t.work();
    assert_eq!((t.space.stats().mapped_bytes, sequence.ready_tokens()), (6 * PAGE, 12));
    t.check();
    sequence.extend_to(12).unwrap();
    assert_eq!(t.space.stats().stalls, 1);
    assert!(sequence.extend_to(13).is_err());
    t.work();
    sequence.extend_to(13).unwrap();
    sequence.shrink_to(14, &[recorded(&idle)]).unwrap();
    assert_eq!(sequence.tokens(), 13);
    sequence.shrink_to(0, &[recorded(&idle)]).unwrap();
    idle.synchronize().unwrap();
    t.work();
    assert_eq!(t.space.stats().mapped_bytes, 0);
    t.machine.sim.hold(stream.raw());
    sequence.extend_blocking(4).unwrap();
    stream.fill(sequence.plane(0).unwrap().span(0..4).unwrap(), 3).unwrap();
    // The end waits for everything that the shrink waited for.
    sequence.shrink_to(0, &[recorded(&stream)]).unwrap();
    sequence.finish(&[recorded(&idle)]);
    idle.synchronize().unwrap();
    assert_eq!(t.space.trim(u64::MAX).unwrap().unmapped_bytes, 0);
    t.machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    assert_eq!(t.space.trim(u64::MAX).unwrap().unmapped_bytes, 2 * PAGE);
    assert!(t.machine.sim.findings().is_empty(), "{:?}", t.machine.sim.findings());
    drop((stream, idle));
    t.close();
}

fn limited(machine: &Machine, limit: &MemoryLimit) -> PagePool {
    let options = PagePoolOptions { page_bytes: None, capacity_pages: 64 };
    let rules = MemoryRules { limit: Some(limit.clone()), admission: None };
    PagePool::with_rules(&machine.device, options, rules).unwrap()
}

#[test]
fn a_lowered_limit_gets_parked_memory_back_and_leaves_what_is_in_use() {
    let machine = machine();
    let limit = MemoryLimit::new(u64::MAX);
    let (pages, worker) = (limited(&machine, &limit), Worker::manual());
    let space = SequenceSpace::new(&pages, &worker, options()).unwrap();
    let mut sequences: Vec<_> = (0..2).map(|_| space.admit(8).unwrap()).collect();
    sequences.iter_mut().for_each(|one| one.extend_blocking(8).unwrap());
    let mut live = sequences.pop().unwrap();
    sequences.pop().unwrap().finish(&[]);
    while worker.poll() {}
    // The worker sees the change.
    limit.set(6 * PAGE);
    while worker.poll() {}
    assert_eq!((limit.stats().used_bytes, space.stats().parked_bytes), (6 * PAGE, 2 * PAGE));
    // A caller that asks for memory releases it too.
    limit.set(3 * PAGE);
    let reclaimed = limit.reclaim();
    assert_eq!((reclaimed.parked_bytes, reclaimed.over_by), (2 * PAGE, PAGE));
    assert_eq!((space.stats().mapped_bytes, live.ready_tokens()), (4 * PAGE, 8));
    let error = live.extend_blocking(9).unwrap_err();
    assert!(matches!(error, RoomError::NotReady { .. }), "{error}");
    limit.set(6 * PAGE);
    live.extend_blocking(9).unwrap();
    assert_adds_up(&space, &pages);
    live.finish(&[]);
    assert!(space.close(&[]).unwrap().wait().unwrap().is_clean());
    drop(pages);
    assert_eq!(limit.stats().used_bytes, 0);
    machine.assert_clean();
}

#[test]
fn spaces_under_one_limit_take_each_others_parked_memory() {
    let machine = machine();
    let limit = MemoryLimit::new(4 * PAGE);
    let worker = Worker::manual();
    let spaces: Vec<_> = (0..2)
        .map(|_| {
            let pages = limited(&machine, &limit);
            SequenceSpace::new(&pages, &worker, options()).unwrap()
        })
        .collect();
    for turn in [0, 1, 0, 1] {
        let mut sequence = spaces[turn].admit(8).unwrap();
        sequence.extend_blocking(8).unwrap();
        assert_eq!(limit.stats().used_bytes, 4 * PAGE);
        assert_eq!(spaces[1 - turn].stats().parked_bytes, 0);
        sequence.finish(&[]);
        while worker.poll() {}
    }
    for space in spaces {
        assert!(space.health() == Health::Healthy);
        assert!(space.close(&[]).unwrap().wait().unwrap().is_clean());
    }
    machine.assert_clean();
}

/// A sequence that needs one row on a seat with four, while the pages of all other seats are in
/// use.
fn adopted_too_much(parked_pages_max: u64) -> (Setup, Sequence) {
    let t = setup(SpaceOptions { parked_pages_max, ..options() }, 8);
    let mut long = t.space.admit(16).unwrap();
    t.work();
    long.extend_to(16).unwrap();
    let _ = long.plane(0).unwrap();
    let stream = t.machine.stream();
    long.finish(&[recorded(&stream)]);
    stream.synchronize().unwrap();
    let mut short = t.space.admit(3).unwrap();
    short.extend_to(3).unwrap();
    (t, short)
}

#[test]
fn what_was_adopted_and_not_asked_for_goes_to_those_who_need_it() {
    let (t, mut short) = adopted_too_much(u64::MAX);
    t.work();
    let stats = t.space.stats();
    assert_eq!((stats.mapped_bytes, stats.spare_bytes), (8 * PAGE, 6 * PAGE));
    // Not more than it asked for, although more is mapped.
    assert_eq!((short.ready_tokens(), short.plane(0).unwrap().tokens()), (4, 4));
    let mut other = t.space.admit(9).unwrap();
    t.work();
    other.extend_to(9).unwrap();
    t.check();
    assert_eq!((t.space.stats().spare_bytes, t.pages.stats().live), (0, 8));
    // The row is lost until another sequence has rows to spare.
    assert!(matches!(short.extend_to(5), Err(RoomError::NotReady { .. })));
    other.finish(&[]);
    short.extend_blocking(5).unwrap();
    t.check();
    short.finish(&[]);
    t.close();
}

#[test]
fn what_was_adopted_and_is_asked_for_in_time_stays() {
    let (t, mut short) = adopted_too_much(u64::MAX);
    short.extend_to(9).unwrap();
    let mut other = t.space.admit(9).unwrap();
    t.work();
    assert_eq!((short.ready_tokens(), other.ready_tokens()), (12, 4));
    assert!(matches!(other.extend_to(9), Err(RoomError::NotReady { cause: Some(_), .. })));
    short.finish(&[]);
    other.finish(&[]);
    t.close();
}

#[test]
fn what_is_to_spare_counts_as_parked() {
    let (t, short) = adopted_too_much(2);
    t.work();
    let stats = t.space.stats();
    assert_eq!((stats.mapped_bytes, stats.spare_bytes), (4 * PAGE, 2 * PAGE));
    let report = t.space.trim(u64::MAX).unwrap();
    assert_eq!(report.released_bytes, 6 * PAGE);
    assert_eq!((t.space.stats().mapped_bytes, short.ready_tokens()), (2 * PAGE, 4));
    t.check();
    short.finish(&[]);
    t.close();
}

#[test]
fn a_sequence_that_got_shorter_first_gives_its_memory_up_too() {
    let t = setup(options(), 64);
    let mut sequence = t.space.admit(16).unwrap();
    sequence.extend_blocking(16).unwrap();
    sequence.extend_to(3).unwrap();
    t.work();
    assert_eq!(t.space.stats().mapped_bytes, 8 * PAGE);
    // More tokens than it has: their number stays, and so does memory for as many.
    sequence.shrink_to(5, &[]).unwrap();
    t.work();
    assert_eq!((sequence.tokens(), sequence.ready_tokens()), (3, 8));
    assert_eq!(t.space.stats().mapped_bytes, 4 * PAGE);
    sequence.shrink_to(3, &[]).unwrap();
    t.work();
    assert_eq!((sequence.tokens(), t.space.stats().mapped_bytes), (3, 2 * PAGE));
    sequence.shrink_to(u64::MAX, &[]).unwrap();
    sequence.extend_to(4).unwrap();
    sequence.finish(&[]);
    t.close();
}

#[test]
fn what_is_given_up_is_not_to_spare() {
    let t = setup(options(), 64);
    let stream = t.machine.stream();
    let mut first = t.space.admit(16).unwrap();
    first.extend_blocking(16).unwrap();
    first.finish(&[]);
    t.work();
    let mut second = t.space.admit(16).unwrap();
    second.extend_to(16).unwrap();
    t.machine.sim.hold(stream.raw());
    stream.fill(second.plane(0).unwrap().span(0..16).unwrap(), 3).unwrap();
    second.shrink_to(4, &[recorded(&stream)]).unwrap();
    // The memory was at rest when the sequence came, but the sequence has used it since.
    assert_eq!(t.space.stats().spare_bytes, 0);
    assert_eq!(t.space.trim(u64::MAX).unwrap().unmapped_bytes, 0);
    t.machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    t.work();
    assert_eq!(t.space.stats().mapped_bytes, 2 * PAGE);
    assert!(t.machine.sim.findings().is_empty(), "{:?}", t.machine.sim.findings());
    second.finish(&[recorded(&stream)]);
    stream.synchronize().unwrap();
    drop(stream);
    t.close();
}
