//! Every driver call fails, at every position: nothing is half done, nothing is lost, every refusal
//! is reported.

use crate::common::{Machine, PAGE, close_into, machine, refusals, take};
use cuda_driver::{DeviceError, DriverError, ErrorCode};
use cuda_vmm::pages::{
    CloseStep, MapRefusal, Page, PageError, PagePool, PagePoolOptions, PageState, PhysicalPage,
    Reservation, ReservationOptions,
};
use cuda_vmm::sequences::{Sequence, SequenceSpace, SpaceOptions};
use cuda_vmm::{
    CloseReport, ElasticPool, ElasticPoolOptions, EpochGate, GrowError, MemoryLimit, MemoryRules,
    SpaceError, Worker,
};

fn refused(call: &'static str, code: ErrorCode) -> DeviceError {
    DeviceError::Driver(DriverError::new(call, code))
}

/// Four pages are mapped around one that is mapped already, in two runs.
const NEW: [u64; 4] = [0, 1, 3, 4];

#[test]
fn a_failed_mapping_leaves_no_trace() {
    let positions = (1..=4)
        .map(|nth| ("cuMemMap", nth, NEW[nth as usize - 1]))
        .chain([("cuMemSetAccess", 1, 0), ("cuMemSetAccess", 2, 3)]);
    for (call, nth, index) in positions {
        let machine = machine();
        let (pages, space) = (machine.pages(8), machine.reservation(8));
        let taken = take(&pages, 5);
        let offered: Vec<_> = taken.iter().map(|page| page.id()).collect();
        let shared: Vec<_> = taken.into_iter().map(|page| page.share()).collect();
        space.map_range(2, [shared[2].clone()]).unwrap();

        machine.sim.fail_nth(call, nth, ErrorCode::INVALID_VALUE);
        let error = space.map_range(0, shared.clone()).unwrap_err();
        let source = refused(call, ErrorCode::INVALID_VALUE);
        assert_eq!(error.reason, MapRefusal::Device { index, source });
        assert_eq!(error.quarantined, 0);
        assert_eq!(error.pages.iter().map(Page::id).collect::<Vec<_>>(), offered);
        drop(error);

        let mapped_before = if call == "cuMemMap" { nth - 1 } else { 4 };
        assert_eq!(machine.calls("cuMemUnmap"), mapped_before);
        assert!(NEW.iter().all(|&index| space.page_state(index) == PageState::Free));
        assert_eq!(space.stats().mapped_bytes, PAGE);
        assert_eq!(pages.stats().in_use, 5);

        // The second attempt succeeds.
        assert_eq!(space.map_range(0, shared.clone()).unwrap(), 4);
        drop(shared);
        close_into(space, &pages);
        assert_eq!((pages.stats().idle, pages.stats().live), (5, 5));
        drop(pages);
        machine.assert_clean();
    }
}

#[test]
fn a_page_that_cannot_be_unmapped_again_goes_into_quarantine() {
    for nth_unmap in 1..=3 {
        let machine = machine();
        let (pages, space) = (machine.pages(8), machine.reservation(8));
        machine.sim.fail_nth("cuMemSetAccess", 1, ErrorCode::INVALID_VALUE);
        machine.sim.fail_nth("cuMemUnmap", nth_unmap, ErrorCode::INVALID_VALUE);
        let error = space.map_range(2, take(&pages, 3)).unwrap_err();
        assert_eq!((error.quarantined, error.pages.len()), (1, 2));
        // Undone in reverse: the first unmapping is that of the last page.
        let stuck = 5 - nth_unmap;
        assert!(matches!(space.page_state(stuck), PageState::Quarantined(_)));
        assert_eq!(space.stats().quarantined_bytes, PAGE);
        for page in error.pages {
            pages.give_back(page).unwrap();
        }
        assert_eq!((pages.stats().idle, pages.stats().in_use), (2, 1));
        let error = space.map_range(stuck, [pages.take().unwrap()]).unwrap_err();
        assert_eq!(error.reason, MapRefusal::Quarantined { index: stuck });
        drop(error);

        let report = space.retry_quarantined();
        assert_eq!((report.pages.len(), report.failed.len()), (1, 0));
        assert_eq!(space.page_state(stuck), PageState::Free);
        drop(report);
        close_into(space, &pages);
        drop(pages);
        machine.assert_clean();
    }
}

#[test]
fn a_page_that_will_not_unmap_is_reported_and_kept() {
    for nth in 1..=3 {
        let machine = machine();
        let (pages, space) = (machine.pages(8), machine.reservation(8));
        space.map_range(0, take(&pages, 3)).unwrap();
        machine.sim.fail_nth("cuMemUnmap", nth, ErrorCode::INVALID_VALUE);
        let report = space.retire(0..3, &[]).unwrap().try_complete().unwrap();
        assert_eq!(report.pages.len(), 2);
        let failed: Vec<_> = report.failed.iter().map(|failure| failure.step).collect();
        assert_eq!(failed, [CloseStep::Unmap { index: nth - 1 }]);
        assert!(matches!(space.page_state(nth - 1), PageState::Quarantined(_)));
        drop(report);
        close_into(space, &pages);
        drop(pages);
        machine.assert_clean();
    }
}

#[test]
fn closing_takes_every_step_whichever_fails() {
    for nth in 1..=3 {
        let machine = machine();
        let pool = machine.pool(PAGE, 3, 3);
        machine.sim.fail_nth("cuMemUnmap", nth, ErrorCode::INVALID_VALUE);
        let report = pool.close(&[]).wait().unwrap();
        assert_eq!(report.errors.len(), 1);
        assert_eq!(report.errors[0].step, CloseStep::Unmap { index: nth - 1 });
        assert_eq!(report.errors[0].error, refused("cuMemUnmap", ErrorCode::INVALID_VALUE));
        assert_eq!((report.unmapped, report.released, report.leaked_bytes), (3, 3, 0));
        machine.assert_clean();
    }
    for nth in 1..=3 {
        // A call that certainly had no effect is repeated. Any other call may have released the
        // page, and is not repeated: the handle could belong to another page by then.
        for (code, left) in [(ErrorCode::OUT_OF_MEMORY, 0), (ErrorCode::INVALID_VALUE, PAGE)] {
            let machine = machine();
            let pool = machine.pool(PAGE, 3, 3);
            machine.sim.fail_nth("cuMemRelease", nth, code);
            let report = pool.close(&[]).wait().unwrap();
            assert_eq!(report.errors.len(), 1);
            assert!(matches!(report.errors[0].step, CloseStep::Release { .. }));
            assert_eq!((report.unmapped, report.released), (3, 3 - left / PAGE));
            assert_eq!(report.leaked_bytes, left);
            let found = machine.sim.check_leaks();
            assert_eq!((found.physical_bytes, found.mappings, found.reservations), (left, 0, 0));
        }
    }
    // Only addresses that could not be freed are left.
    let machine = machine();
    let pool = machine.pool(PAGE, 3, 3);
    machine.sim.fail_nth("cuMemAddressFree", 1, ErrorCode::INVALID_VALUE);
    let report = pool.close(&[]).wait().unwrap();
    assert_eq!(report.errors.len(), 1);
    assert_eq!(report.errors[0].step, CloseStep::FreeAddresses);
    assert_eq!((report.unmapped, report.released, report.leaked_bytes), (3, 3, 0));
    let left = machine.sim.check_leaks();
    assert_eq!((left.reservations, left.mappings, left.physical_bytes), (1, 0, 0));
}

#[test]
fn closing_reports_all_errors_in_the_order_of_its_steps() {
    let machine = machine();
    let pool = machine.pool(PAGE, 3, 3);
    // Unmapping page 1 fails twice, so the addresses cannot be freed either.
    for nth in [2, 4] {
        machine.sim.fail_nth("cuMemUnmap", nth, ErrorCode::INVALID_VALUE);
    }
    machine.sim.fail_nth("cuMemRelease", 3, ErrorCode::OUT_OF_MEMORY);
    let report = pool.close(&[]).wait().unwrap();
    let steps: Vec<_> = report.errors.iter().map(|error| error.step).collect();
    assert_eq!(steps.len(), 4, "{steps:?}");
    assert_eq!(
        steps[..3],
        [CloseStep::Unmap { index: 1 }, CloseStep::Unmap { index: 1 }, CloseStep::FreeAddresses,]
    );
    assert!(matches!(steps[3], CloseStep::Release { .. }));
    assert_eq!((report.unmapped, report.leaked_bytes), (2, PAGE));
    // Every handle was released nevertheless. One mapping and its memory stay.
    let left = machine.sim.check_leaks();
    assert_eq!((left.reservations, left.mappings, left.physical_handles), (1, 1, 0));
    assert_eq!(left.physical_bytes, PAGE);
}

#[test]
fn growth_that_fails_anywhere_changes_nothing() {
    let calls = [("cuMemCreate", 4), ("cuMemMap", 4), ("cuMemSetAccess", 1)];
    for (call, count) in calls {
        for (nth, code) in (1..=count)
            .flat_map(|nth| [(nth, ErrorCode::INVALID_VALUE), (nth, ErrorCode::OUT_OF_MEMORY)])
        {
            let machine = machine();
            let pool = machine.pool(PAGE, 8, 2);
            machine.sim.fail_nth(call, nth, code);
            let error = pool.grow_to(6).unwrap_err();
            if code == ErrorCode::OUT_OF_MEMORY {
                assert_eq!(error, GrowError::OutOfMemory { asked_blocks: 6, ready_blocks: 2 });
                assert!(error.is_retryable());
            } else {
                let source = refused(call, code);
                assert_eq!(error, GrowError::Device { ready_blocks: 2, source });
                assert!(!error.is_retryable());
            }
            let stats = pool.stats();
            assert_eq!((stats.ready_blocks, stats.mapped_bytes), (2, 2 * PAGE));
            assert_eq!((stats.retiring_bytes, stats.quarantined_bytes), (0, 0));
            let pages = pool.pages().stats();
            assert_eq!(pages.in_use, 2);
            // A growth that ran short of memory releases the memory it created.
            let kept = if call == "cuMemCreate" { 0 } else { 4 };
            assert_eq!((pages.idle, pages.live), (kept, 2 + kept));
            assert_eq!(pool.grow_to(6).unwrap(), 6);
            assert!(pool.close(&[]).wait().unwrap().is_clean());
            machine.assert_clean();
        }
    }
}

#[test]
fn a_quarantined_page_does_not_stop_later_growth() {
    let machine = machine();
    let pool = machine.pool(PAGE, 8, 4);
    machine.sim.fail_nth("cuMemUnmap", 1, ErrorCode::INVALID_VALUE);
    pool.shrink_to(2, &[]).unwrap();
    let report = pool.poll_retired();
    assert_eq!((report.unmapped_pages, report.failed.len()), (1, 1));
    assert_eq!(pool.stats().quarantined_bytes, PAGE);
    machine.sim.fail_nth("cuMemUnmap", 1, ErrorCode::INVALID_VALUE);
    let error = pool.grow_to(4).unwrap_err();
    assert_eq!(error, GrowError::Quarantined { index: 2, ready_blocks: 2 });
    assert_eq!(pool.grow_to(4).unwrap(), 4);
    assert_eq!(pool.stats().quarantined_bytes, 0);
    assert!(pool.close(&[]).wait().unwrap().is_clean());
    machine.assert_clean();
}

#[test]
fn construction_that_fails_leaves_nothing() {
    let machine = machine();
    let options = |bytes| ReservationOptions { bytes, ..Default::default() };
    for call in ["cuMemGetAllocationGranularity", "cuMemAddressReserve"] {
        machine.sim.fail_nth(call, 1, ErrorCode::NOT_SUPPORTED);
        let error = Reservation::new(&machine.device, options(PAGE)).map(drop);
        assert_eq!(error, Err(SpaceError::Device(refused(call, ErrorCode::NOT_SUPPORTED))));
    }
    machine.sim.fail_nth("cuMemMap", 2, ErrorCode::INVALID_VALUE);
    let options = ElasticPoolOptions {
        block_bytes: PAGE,
        capacity_blocks: 4,
        page_bytes: None,
        initial_blocks: 3,
    };
    let error = ElasticPool::new(&machine.device, options).map(drop).unwrap_err();
    let source = refused("cuMemMap", ErrorCode::INVALID_VALUE);
    let grow = GrowError::Device { ready_blocks: 0, source };
    assert_eq!(error, cuda_vmm::SpaceError::Grow(grow));
    let left = machine.sim.check_leaks();
    assert_eq!((left.reservations, left.mappings, left.physical_handles), (0, 0, 0));
    machine.assert_clean();
}

#[test]
fn a_page_that_cannot_be_created_is_not_counted() {
    let machine = machine();
    let pages = machine.pages(8);
    machine.sim.fail_nth("cuMemCreate", 3, ErrorCode::OUT_OF_MEMORY);
    let error = pages.take_many(5).unwrap_err();
    assert_eq!(error, PageError::OutOfMemory { page_bytes: PAGE, live: 2 });
    let stats = pages.stats();
    assert_eq!((stats.live, stats.created, stats.released), (0, 2, 2));
    assert_eq!(take(&pages, 5).len(), 5);
    drop(pages);
    machine.assert_clean();
}

#[test]
fn an_idle_page_that_a_pool_cannot_release_when_it_closes_is_reported_as_leaked() {
    for (code, left) in [(ErrorCode::OUT_OF_MEMORY, 0), (ErrorCode::INVALID_VALUE, PAGE)] {
        let machine = machine();
        let pool = machine.pool(PAGE, 4, 4);
        pool.shrink_to(0, &[]).unwrap();
        assert_eq!(pool.poll_retired().unmapped_pages, 4);
        machine.sim.fail_nth("cuMemRelease", 1, code);
        let report = pool.close(&[]).wait().unwrap();
        assert_eq!(report.errors.len(), 1, "{report:?}");
        assert_eq!((report.released, report.leaked_bytes), (4 - left / PAGE, left));
        assert_eq!(machine.sim.check_leaks().physical_bytes, left);
    }
}

/// Pools, a space and a reservation under one limit, with memory in every state.
struct World {
    machine: Machine,
    limit: MemoryLimit,
    stock: PagePool,
    held: Vec<PhysicalPage>,
    grows: ElasticPool,
    rests: ElasticPool,
    worker: Worker,
    space: SequenceSpace,
    sequence: Sequence,
    addresses: Reservation,
}

/// All that somebody uses, and none of what only waits for a use. Unused memory may be released for
/// a call that is then refused, and pages may be left idle.
#[derive(Debug, PartialEq)]
struct Needed {
    ready_blocks: [u64; 2],
    tokens: u64,
    sequences: [u64; 2],
    mapped: u64,
    retiring: u64,
    in_use: u64,
}

const ROW: u64 = 4;

impl World {
    fn new() -> Self {
        let (machine, limit, worker) = (machine(), MemoryLimit::new(30 * PAGE), Worker::manual());
        let rules = || MemoryRules { limit: Some(limit.clone()), admission: None };
        let pages = |capacity_pages| {
            let options = PagePoolOptions { page_bytes: None, capacity_pages };
            PagePool::with_rules(&machine.device, options, rules()).unwrap()
        };
        let pool = |initial_blocks| {
            let options = ElasticPoolOptions {
                block_bytes: PAGE / 2 * 3,
                capacity_blocks: 12,
                page_bytes: None,
                initial_blocks,
            };
            ElasticPool::with_rules(&machine.device, options, EpochGate::new(), rules()).unwrap()
        };
        let (stock, grows, rests) = (pages(12), pool(2), pool(6));
        let held = stock.take_many(3).unwrap();
        rests.shrink_to(2, &[]).unwrap();
        let options = SpaceOptions {
            sequences: 3,
            planes: 2,
            token_bytes: PAGE / ROW,
            tokens_max: 4 * ROW,
            ..SpaceOptions::default()
        };
        let space = SequenceSpace::new(&pages(24), &worker, options).unwrap();
        let mut sequence = space.admit(2 * ROW).unwrap();
        sequence.extend_blocking(2 * ROW).unwrap();
        let mut parked = space.admit(2 * ROW).unwrap();
        parked.extend_blocking(2 * ROW).unwrap();
        sequence.shrink_to(ROW, &[]).unwrap();
        parked.finish(&[]);
        let addresses = machine.reservation(8);
        addresses.map_range(0, stock.take_many(2).unwrap()).unwrap();
        stock.prepare(2).unwrap();
        Self { machine, limit, stock, held, grows, rests, worker, space, sequence, addresses }
    }

    fn needed(&self) -> Needed {
        let (blocks, space) = ([&self.grows, &self.rests], self.space.stats());
        let [grows, rests] = blocks.map(ElasticPool::stats);
        let own = self.addresses.stats();
        Needed {
            ready_blocks: blocks.map(ElasticPool::ready_blocks),
            // A refused extension counts as a demand, and keeps what it has mapped.
            tokens: self.sequence.ready_tokens().min(ROW),
            sequences: [space.live, space.abandoned],
            mapped: grows.mapped_bytes + rests.mapped_bytes + own.mapped_bytes,
            retiring: own.retiring_bytes,
            in_use: self.stock.stats().in_use,
        }
    }

    /// The accounts agree with the device, whatever happened.
    #[track_caller]
    fn assert_adds_up(&self, at: &str) {
        let used = self.machine.sim.device_used_bytes(0);
        assert_eq!(self.limit.stats().used_bytes, used, "{at}");
        let pools = [&self.stock, self.grows.pages(), self.rests.pages(), self.space.pages()];
        let live: u64 = pools.iter().map(|pool| pool.stats().live).sum();
        assert_eq!(live * PAGE, used, "{at}");
        let space = self.space.stats();
        let bytes = space.mapped_bytes + space.parked_bytes + space.quarantined_bytes;
        assert_eq!(self.space.pages().stats().in_use * PAGE, bytes, "{at}: {space:?}");
        for pool in [&self.grows, &self.rests] {
            let stats = pool.stats();
            let bytes = stats.mapped_bytes + stats.retiring_bytes + stats.quarantined_bytes;
            assert_eq!(pool.pages().stats().in_use * PAGE, bytes, "{at}: {stats:?}");
        }
    }

    fn close(self, at: &str) {
        let Self { machine, limit, stock, held, grows, rests, worker, space, sequence, addresses } =
            self;
        drop((sequence, held));
        let mut reports = vec![space.close(&[]).unwrap().wait().unwrap()];
        reports.extend([grows, rests].map(|pool| pool.close(&[]).wait().unwrap()));
        let mut closed = addresses.close(&[]).wait().unwrap();
        let pages = std::mem::take(&mut closed.pages);
        pages.into_iter().for_each(|page| stock.give_back(page).unwrap());
        reports.push(closed);
        let freed = |report: &CloseReport| report.errors.is_empty() && report.leaked_bytes == 0;
        assert!(reports.iter().all(freed), "{at}: {reports:?}");
        worker.close();
        drop((stock, reports));
        assert_eq!(limit.stats().used_bytes, 0, "{at}");
        machine.assert_clean();
    }
}

type Call = fn(&mut World) -> bool;

/// Every public call that makes driver calls; each returns whether it was refused. Its results are
/// dropped, so that a call that was granted is not compared.
const PUBLIC: [(&str, Call); 16] = [
    ("take", |t| t.stock.take().map(drop).is_err()),
    ("take what is not there", |t| t.stock.take_many(5).map(drop).is_err()),
    ("prepare", |t| t.stock.prepare(4).is_err()),
    ("grow", |t| t.grows.grow_to(4).is_err()),
    ("grow into what others do not use", |t| t.grows.grow_to(10).is_err()),
    ("grow into what was parked", |t| t.rests.grow_to(5).is_err()),
    ("extend", |t| t.sequence.extend_blocking(4 * ROW).is_err()),
    ("map", |t| {
        let pages = t.held.drain(..).collect::<Vec<_>>();
        let refused = t.addresses.map_range(3, pages).map_err(|error| error.pages);
        let failed = refused.is_err();
        for page in refused.err().into_iter().flatten() {
            t.held.extend(page.into_owned());
        }
        failed
    }),
    ("make a pool", |t| {
        let options = ElasticPoolOptions {
            block_bytes: PAGE,
            capacity_blocks: 4,
            page_bytes: None,
            initial_blocks: 3,
        };
        let rules = MemoryRules { limit: Some(t.limit.clone()), admission: None };
        ElasticPool::with_rules(&t.machine.device, options, EpochGate::new(), rules).is_err()
    }),
    ("make a reservation", |t| {
        let options = ReservationOptions { bytes: PAGE, ..Default::default() };
        Reservation::new(&t.machine.device, options).is_err()
    }),
    // These report what the driver refused, and go on.
    ("poll", |t| t.rests.poll_retired().unmapped_pages == u64::MAX),
    ("trim a pool", |t| t.rests.trim(0) == u64::MAX),
    ("trim a stock", |t| t.stock.trim(0).0 == u64::MAX),
    ("trim a space", |t| t.space.trim(u64::MAX).is_err()),
    ("reclaim", |t| {
        t.limit.set(0);
        t.limit.reclaim();
        t.limit.set(30 * PAGE);
        false
    }),
    ("work", |t| (0..20).filter(|_| t.worker.poll()).count() == usize::MAX),
];

#[test]
fn a_call_that_the_driver_refuses_anywhere_changes_nothing_that_is_in_use() {
    let mut refused = 0;
    for (name, call) in PUBLIC {
        let mut world = World::new();
        let before = world.machine.sim.calls();
        assert!(!call(&mut world), "{name} is refused without a fault");
        let mut counts = world.machine.sim.calls();
        for (call, count) in &mut counts {
            *count -= before.get(call).copied().unwrap_or(0);
        }
        // Contexts are bound around each of the calls. Addresses that are not freed are the driver's.
        counts.retain(|call, _| !call.starts_with("cuCtx") && *call != "cuMemAddressFree");
        world.assert_adds_up(name);
        for (driver_call, count) in counts {
            let codes = |nth| refusals(driver_call).iter().map(move |&code| (nth, code));
            for (nth, code) in (1..=count).flat_map(codes) {
                let at = format!("{name}, {driver_call} {nth} refused by {code:?}");
                let mut world = World::new();
                let before = world.needed();
                world.machine.sim.fail_nth(driver_call, nth, code);
                if call(&mut world) {
                    assert_eq!(world.needed(), before, "{at}");
                    refused += 1;
                }
                world.assert_adds_up(&at);
                // The same call succeeds once the fault is over.
                assert!(!call(&mut world), "{at}: refused again");
                world.assert_adds_up(&at);
                world.close(&at);
            }
        }
    }
    assert!(refused > 60, "{refused} calls were refused");
}
