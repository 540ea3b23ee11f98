//! Every driver call in a sequence's life fails, at every position: nothing is half mapped, the
//! accounts are right, and everything works again once the fault is over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{Machine, PAGE, machine, refusals};
use cuda_driver::{Device, DeviceError, DriverError, ErrorCode, Fence};
use cuda_vmm::limit::{AdmissionPolicy, MemoryFigures, MemoryProbe};
use cuda_vmm::pages::{CloseStep, PagePool, PagePoolOptions};
use cuda_vmm::sequences::{Layout, RoomError, Sequence, SequenceSpace, SpaceOptions};
use cuda_vmm::worker::{Fault, Health};
use cuda_vmm::{MemoryRules, Worker, WorkerOptions};

const TOKEN: u64 = PAGE / 2;
const PLANES: u64 = 3;

struct Life {
    machine: Machine,
    pages: PagePool,
    worker: Worker,
    space: SequenceSpace,
    layout: Layout,
}

fn life(layout: Layout) -> Life {
    let machine = machine();
    // Four rows of three planes, or twelve rows of one, less one page.
    let pages = machine.pages(14);
    let worker = Worker::manual();
    let options = SpaceOptions {
        sequences: 2,
        planes: PLANES,
        token_bytes: TOKEN,
        tokens_max: 8,
        layout,
        look_ahead_tokens: 1,
        prepared_pages: 1,
        ..SpaceOptions::default()
    };
    let space = SequenceSpace::new(&pages, &worker, options).unwrap();
    Life { machine, pages, worker, space, layout }
}

/// Repeats a call that failed once: the fault was ordered for one call.
#[track_caller]
fn again<T, E: std::fmt::Debug>(mut action: impl FnMut() -> Result<T, E>) -> T {
    action().or_else(|_| action()).unwrap()
}

impl Life {
    fn work(&self) {
        for _ in 0..200 {
            self.worker.poll();
        }
    }

    #[track_caller]
    fn check(&self) {
        let stats = self.space.stats();
        let held = stats.mapped_bytes
            + stats.parked_bytes
            + stats.retiring_bytes
            + stats.quarantined_bytes;
        assert_eq!(stats.in_transit_bytes, 0, "{stats:?}");
        assert_eq!(stats.reserved_bytes, held + stats.unmapped_bytes, "{stats:?}");
        assert_eq!(self.pages.stats().in_use * PAGE, held, "{stats:?}");
    }

    /// Writes the last token of every plane.
    fn touch(&self, sequence: &Sequence) {
        let stream = again(|| cuda_driver::Stream::new(&self.machine.device));
        for plane in 0..PLANES {
            let view = sequence.plane(plane).unwrap();
            let last = view.tokens() - 1;
            again(|| stream.fill(view.span(last..last + 1).unwrap(), 1));
        }
        again(|| stream.synchronize());
    }

    /// Admits, extends, finishes, adopts, takes from parked seats, and trims.
    fn run(&self) {
        let extend = |sequence: &mut Sequence, tokens| {
            again(|| {
                let extended = sequence.extend_blocking(tokens);
                self.check();
                extended
            });
            self.touch(sequence);
        };
        let mut first = self.space.admit(1).unwrap();
        extend(&mut first, 3);
        self.worker.poll();
        self.check();
        let mut second = self.space.admit(1).unwrap();
        extend(&mut second, 2);
        // The host waits for all work, so that a fence after it has completed.
        let stream = again(|| cuda_driver::Stream::new(&self.machine.device));
        let done = || {
            let done = again(|| Fence::record(&stream));
            again(|| stream.synchronize());
            [done]
        };
        first.finish(&done());
        self.worker.poll();
        self.check();
        // Takes rows from the first sequence's seat, which is parked.
        extend(&mut second, if self.layout == Layout::PlaneMajor { 7 } else { 8 });
        // A seat with a page in quarantine is given out once the worker has unmapped the page.
        let admit = |tokens| {
            again(|| {
                self.worker.poll();
                self.space.admit(tokens)
            })
        };
        let third = admit(1);
        third.finish(&done());
        self.worker.poll();
        self.check();
        again(|| self.space.trim(2 * PAGE));
        self.check();
        second.finish(&done());
        let fourth = admit(5);
        fourth.finish(&done());
        again(|| self.space.trim(u64::MAX));
        self.check();
        self.work();
        assert!(self.space.health() == Health::Healthy, "{:?}", self.space.health());
        assert_eq!(self.space.stats().quarantined_bytes, 0);
        assert!(self.machine.sim.findings().is_empty(), "{:?}", self.machine.sim.findings());
    }

    fn calls(&self) -> BTreeMap<&'static str, u64> {
        self.machine.sim.calls()
    }

    /// Closes the space, and checks that nothing is left but addresses that may have been freed.
    fn close(self) {
        let Self { machine, pages, worker, space, .. } = self;
        let report = space.close(&[]).unwrap().wait().unwrap();
        assert_eq!(report.leaked_bytes, 0, "{:?}", report.errors);
        // A call that certainly did nothing is made again when the device ends.
        let kept = report.errors.iter().any(|refused| {
            let error = refused.error.driver_error();
            let may_be_made =
                error.call == "cuMemAddressFree" && error.code != ErrorCode::OUT_OF_MEMORY;
            refused.step == CloseStep::FreeAddresses && may_be_made
        });
        assert_eq!(pages.stats().in_use, 0);
        worker.close();
        drop(pages);
        let Machine { sim, device } = machine;
        drop(device);
        let left = sim.check_leaks();
        if kept {
            assert_eq!((left.reservations, left.mappings, left.physical_bytes), (1, 0, 0));
        } else {
            assert!(left.is_clean(), "left behind: {left}");
        }
    }
}

/// The calls of a life without faults, by name, and the number of earlier calls for each.
fn positions(layout: Layout) -> Vec<(&'static str, u64)> {
    let life = life(layout);
    let before = life.calls();
    life.run();
    let Life { space, .. } = &life;
    assert!(space.stats().adopted > 0, "the run must adopt memory");
    let after = {
        let sim = life.machine.sim.clone();
        life.close();
        sim.calls()
    };
    let new = |(call, count): (&'static str, u64)| {
        let count = count - before.get(call).copied().unwrap_or(0);
        // Calls that end handles. If the driver refuses them, the driver leaks, not this crate.
        let handles = ["cuStreamDestroy", "cuEventDestroy", "cuDevicePrimaryCtxRelease"];
        (count > 0 && !handles.contains(&call)).then_some((call, count))
    };
    after.into_iter().filter_map(new).collect()
}

#[test]
fn each_call_fails_at_each_position_and_nothing_is_lost() {
    let mut failed = BTreeMap::new();
    for layout in [Layout::PlaneMajor, Layout::TokenMajor] {
        for (call, count) in positions(layout) {
            // Contexts are bound around every call, so a sample of the positions suffices.
            let stride = if call.starts_with("cuCtx") { 7 } else { 1 };
            for nth in (1..=count).step_by(stride) {
                for &code in refusals(call) {
                    let life = life(layout);
                    life.machine.sim.fail_nth(call, nth, code);
                    life.run();
                    life.close();
                    *failed.entry(call).or_insert(0) += 1;
                }
            }
        }
    }
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"] {
        assert!(failed.get(call).copied().unwrap_or(0) > 8, "{call} was hardly tried: {failed:?}");
    }
}

#[test]
fn a_row_is_mapped_in_all_planes_or_none() {
    for (call, nth) in (1..=3).flat_map(|nth| [("cuMemMap", nth), ("cuMemSetAccess", nth)]) {
        let life = life(Layout::PlaneMajor);
        let mut sequence = life.space.admit(2).unwrap();
        life.machine.sim.fail_nth(call, nth, ErrorCode::INVALID_VALUE);
        let error = sequence.extend_blocking(2).unwrap_err();
        let refused = DeviceError::Driver(DriverError::new(call, ErrorCode::INVALID_VALUE));
        let fault = Fault::Device(refused);
        let cause = Some(fault.clone());
        assert_eq!(error, RoomError::NotReady { asked_tokens: 2, ready_tokens: 0, cause });
        assert_eq!(life.space.health(), Health::Degraded { cause: fault });
        assert_eq!((life.space.stats().mapped_bytes, life.pages.stats().in_use), (0, 0));
        life.check();
        life.work();
        assert!(life.space.health() == Health::Healthy);
        sequence.extend_to(2).unwrap();
        sequence.finish(&[]);
        life.close();
    }
}

#[test]
fn a_quarantined_page_stops_its_seat_alone_until_it_is_unmapped() {
    let life = life(Layout::PlaneMajor);
    let mut first = life.space.admit(2).unwrap();
    // Access to the second plane is refused, and the first page cannot be unmapped again, now or
    // later.
    life.machine.sim.fail_nth("cuMemSetAccess", 2, ErrorCode::INVALID_VALUE);
    for nth in [3, 4] {
        life.machine.sim.fail_nth("cuMemUnmap", nth, ErrorCode::INVALID_VALUE);
    }
    first.extend_blocking(2).unwrap_err();
    assert_eq!(life.space.stats().quarantined_bytes, PAGE);
    life.check();
    let cause = Fault::Quarantined { index: 0 };
    let error = first.extend_blocking(2).unwrap_err();
    let cause = Some(cause);
    assert_eq!(error, RoomError::NotReady { asked_tokens: 2, ready_tokens: 0, cause });
    let mut second = life.space.admit(2).unwrap();
    second.extend_blocking(2).unwrap();
    life.work();
    assert_eq!(life.space.stats().quarantined_bytes, 0);
    assert!(life.space.health() == Health::Healthy);
    first.extend_to(2).unwrap();
    first.finish(&[]);
    second.finish(&[]);
    life.close();
}

#[test]
fn a_lost_device_fails_the_space_and_lets_it_close() {
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
        let life = life(Layout::PlaneMajor);
        let mut sequence = life.space.admit(2).unwrap();
        sequence.extend_blocking(2).unwrap();
        life.machine.sim.fail_nth(call, 2, ErrorCode::ILLEGAL_ADDRESS);
        let error = sequence.extend_blocking(8).unwrap_err();
        let RoomError::Failed { cause: Fault::Lost(lost), .. } = error else { panic!("{error:?}") };
        assert_eq!(lost.driver_error().code, ErrorCode::ILLEGAL_ADDRESS);
        let cause = Fault::Lost(lost);
        assert_eq!(life.space.health(), Health::Failed { cause: cause.clone() });
        // The sequence keeps its memory, and the next call that needs more names the obstacle.
        sequence.extend_to(2).unwrap();
        assert!(matches!(sequence.extend_to(8), Err(RoomError::Failed { .. })));
        assert_eq!(life.space.trim(1).unwrap_err(), cause);
        life.worker.poll();
        life.check();
        sequence.finish(&[]);
        life.close();
    }
}

#[test]
fn a_seat_with_a_quarantined_page_is_not_given_to_who_needs_that_page() {
    // The worker has not reached the page yet, or has, and was refused again.
    for refused_again in [false, true] {
        quarantined_seat(refused_again);
    }
}

fn quarantined_seat(refused_again: bool) {
    let life = life(Layout::PlaneMajor);
    let mut first = life.space.admit(2).unwrap();
    life.machine.sim.fail_nth("cuMemSetAccess", 2, ErrorCode::INVALID_VALUE);
    life.machine.sim.fail_nth("cuMemUnmap", 3, ErrorCode::INVALID_VALUE);
    first.extend_blocking(2).unwrap_err();
    assert_eq!((first.seat(), life.space.stats().quarantined_bytes), (0, PAGE));
    first.finish(&[]);
    if refused_again {
        life.machine.sim.fail_nth("cuMemUnmap", 1, ErrorCode::INVALID_VALUE);
        life.worker.poll();
        assert_eq!(life.space.stats().quarantined_bytes, PAGE);
    }
    // Both seats are free and empty.
    let mut second = life.space.admit(2).unwrap();
    assert_eq!(second.seat(), 1);
    second.extend_blocking(2).unwrap();
    assert!(life.space.admit(2).is_err());
    life.work();
    let third = life.space.admit(2).unwrap();
    life.work();
    assert_eq!((third.seat(), third.ready_tokens() >= 2), (0, true));
    second.finish(&[]);
    third.finish(&[]);
    life.close();
}

/// Panics when it is asked the next time, if it is told to.
#[derive(Debug, Default)]
struct Startled(AtomicBool);

impl MemoryProbe for Startled {
    fn figures(&self, device: &Device) -> Result<MemoryFigures, DeviceError> {
        assert!(!self.0.load(Ordering::Relaxed), "asked to panic");
        let (free_bytes, total_bytes) = device.memory_info()?;
        Ok(MemoryFigures { free_bytes, total_bytes, others_bytes: None })
    }
}

#[test]
fn a_panic_in_the_work_is_a_state_and_an_error_of_the_next_call() {
    for spawn in [false, true] {
        let (machine, probe) = (machine(), Arc::new(Startled::default()));
        let worker =
            if spawn { Worker::spawn(WorkerOptions::default()).unwrap() } else { Worker::manual() };
        let admission = AdmissionPolicy::with_probe(0, probe.clone());
        let rules = MemoryRules { limit: None, admission: Some(admission) };
        let options = PagePoolOptions { page_bytes: None, capacity_pages: 16 };
        let pages = PagePool::with_rules(&machine.device, options, rules).unwrap();
        let options = SpaceOptions {
            sequences: 2,
            planes: 2,
            token_bytes: PAGE / 4,
            tokens_max: 8,
            ..SpaceOptions::default()
        };
        let space = SequenceSpace::new(&pages, &worker, options).unwrap();
        let mut sequence = space.admit(4).unwrap();
        sequence.extend_blocking(4).unwrap();
        probe.0.store(true, Ordering::Relaxed);
        assert!(matches!(sequence.extend_to(5), Err(RoomError::NotReady { .. })));
        if !spawn {
            worker.poll();
        }
        while space.health() == Health::Healthy {
            std::thread::yield_now();
        }
        let cause = Fault::Panicked { message: "asked to panic".into() };
        assert_eq!(space.health(), Health::Failed { cause: cause.clone() });
        sequence.extend_to(4).unwrap();
        let failed = RoomError::Failed { asked_tokens: 5, ready_tokens: 4, cause: cause.clone() };
        assert_eq!(sequence.extend_to(5).unwrap_err(), failed);
        assert_eq!(sequence.extend_blocking(5).unwrap_err(), failed);
        assert_eq!(space.trim(1).unwrap_err(), cause);
        sequence.finish(&[]);
        let report = space.close(&[]).unwrap().wait().unwrap();
        assert!(report.is_clean(), "{:?}", report.errors);
        worker.close();
        drop(pages);
        machine.assert_clean();
    }
}
