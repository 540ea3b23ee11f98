//! Ordered failures, kernels that cannot run, and leak checks.

use crate::common::*;
use cuda_driver::{Driver, DriverResult, ErrorCode, HostAllocFlags, KernelArgs, LaunchConfig};
use cuda_sim::{FindingKind, LeakReport, Pace, SimConfig, SimDriver};

#[test]
fn the_nth_call_fails_once() {
    let sim = seeded(0);
    sim.mem_alloc(4).unwrap();
    sim.fail_nth("cuMemAlloc", 2, ErrorCode::OUT_OF_MEMORY);
    let outcomes: Vec<bool> = (0..4).map(|_| sim.mem_alloc(4).is_ok()).collect();
    assert_eq!(outcomes, [true, false, true, true]);
    assert_eq!(sim.check_leaks().allocations, 4, "the failed call did nothing");
    sim.fail_nth("cuMemCreate", 1, ErrorCode::OUT_OF_MEMORY);
    let error = sim.mem_create(PAGE, prop(0)).unwrap_err();
    assert_eq!((error.call, error.code), ("cuMemCreate", ErrorCode::OUT_OF_MEMORY));
}

#[test]
fn two_orders_of_one_call_fail_two_calls() {
    let sim = seeded(0);
    sim.fail_nth("cuMemAlloc", 1, ErrorCode::OUT_OF_MEMORY);
    sim.fail_nth("cuMemAlloc", 3, ErrorCode::UNKNOWN);
    let outcomes: Vec<_> = (0..4).map(|_| sim.mem_alloc(4).err().map(|e| e.code)).collect();
    assert_eq!(outcomes, [Some(ErrorCode::OUT_OF_MEMORY), None, Some(ErrorCode::UNKNOWN), None]);
}

#[test]
fn a_sticky_code_on_order_loses_the_device() {
    let sim = seeded(0);
    sim.fail_nth("cuMemsetD8Async", 1, ErrorCode::ECC_UNCORRECTABLE);
    let memory = sim.mem_alloc(4).unwrap();
    assert_eq!(code(fill(&sim, memory, 0, 4, 0)), ErrorCode::ECC_UNCORRECTABLE);
    assert_eq!(code(sync(&sim, 0)), ErrorCode::ECC_UNCORRECTABLE);
    // Calls that need no device still work, and clean-up is recorded.
    sim.ctx_get_current().unwrap();
    assert_eq!(code(free(&sim, memory)), ErrorCode::ECC_UNCORRECTABLE);
    assert!(sim.check_leaks().is_clean());
    // SAFETY: no handle of the context is used again.
    unsafe { sim.device_primary_ctx_release(0) }.unwrap();
    assert_eq!(code(sim.device_primary_ctx_retain(0)), ErrorCode::ECC_UNCORRECTABLE);
}

#[test]
fn missing_arguments_fail_the_launch() {
    let sim = seeded(0);
    let function = kernel(&sim, "add_one");
    launch(&sim, function, &KernelArgs::new().arg(7u32), 0).unwrap();
    assert_eq!(code(sync(&sim, 0)), ErrorCode::LAUNCH_FAILED);
    assert_eq!(sim.findings()[0].kind, FindingKind::KernelFailed);
}

#[test]
fn leaks_are_reported_and_found() {
    let sim = seeded(0);
    assert!(sim.check_leaks().is_clean());
    let stream = sim.stream_create(false).unwrap();
    let event = sim.event_create(false).unwrap();
    let (memory, host) = (sim.mem_alloc(100).unwrap(), pinned(&sim, 64));
    let base = reserve(&sim, 2);
    let handle = map_page(&sim, base);
    let module = sim.module_load_data(PTX, &mut String::new()).unwrap();
    let report = sim.check_leaks();
    assert_eq!((report.streams, report.events, report.modules), (1, 1, 1));
    assert_eq!((report.allocations, report.allocated_bytes), (1, 100));
    assert_eq!((report.pinned_regions, report.pinned_bytes), (1, 64));
    assert_eq!((report.reservations, report.mappings), (1, 1));
    assert_eq!((report.physical_handles, report.physical_bytes), (1, PAGE));
    assert_eq!(sim.findings().last().unwrap().kind, FindingKind::Leak);
    sim.mem_unmap(base, PAGE).unwrap();
    release(&sim, handle).unwrap();
    sim.mem_address_free(base, 2 * PAGE).unwrap();
    free(&sim, memory).unwrap();
    free_host(&sim, host).unwrap();
    clean(&sim, stream, event, module);
    assert_eq!(sim.check_leaks(), LeakReport::default());
    assert_eq!(sim.findings().len(), 1);
}

fn clean(sim: &SimDriver, stream: u64, event: u64, module: u64) {
    // SAFETY: the caller uses the handle no more.
    unsafe { sim.stream_destroy(stream) }.unwrap();
    // SAFETY: the caller uses the handle no more.
    unsafe { sim.event_destroy(event) }.unwrap();
    // SAFETY: the caller uses the handle no more.
    unsafe { sim.module_unload(module) }.unwrap();
}

#[test]
fn findings_are_bounded() {
    let sim = seeded(0);
    let memory = sim.mem_alloc(1).unwrap();
    for _ in 0..300 {
        fill(&sim, memory, 0, 2, 0).unwrap_err();
    }
    assert_eq!((sim.findings().len(), sim.findings_dropped()), (256, 44));
}

#[test]
fn a_device_is_lost_between_two_operations() {
    for operations in 0..4 {
        let sim = paced(Pace::Slowest, operations);
        let stream = sim.stream_create(false).unwrap();
        let (device, host) = (sim.mem_alloc(4).unwrap(), pinned(&sim, 4));
        fill(&sim, device, 7, 4, 0).unwrap();
        sync(&sim, 0).unwrap();
        host_write(host, &[0; 4]);
        sim.lose_device(0, operations, ErrorCode::ECC_UNCORRECTABLE);
        for offset in 0..4 {
            // SAFETY: the host reads the bytes only after the device was lost or the copies have
            // run.
            let copied =
                unsafe { sim.memcpy_dtoh_async(host + offset, device + offset, 1, stream) };
            assert_eq!(copied.is_ok(), operations > 0);
        }
        assert_eq!(code(sync(&sim, stream)), ErrorCode::ECC_UNCORRECTABLE);
        // Operations that ran before the loss took effect, and none after it.
        let arrived = host_read(host, 4).iter().filter(|&&byte| byte == 7).count();
        assert_eq!(arrived as u64, operations);
        assert_eq!(sim.run_all(), 0, "pending work has vanished");
        assert!(sim.findings().is_empty(), "an ordered loss is not a finding");
    }
}

#[test]
fn losing_one_device_leaves_the_others() {
    let sim = machine(SimConfig { devices: 2, ..SimConfig::default() });
    let stream = sim.stream_create(false).unwrap();
    let memory = sim.mem_alloc(1).unwrap();
    sim.lose_device(1, 0, ErrorCode::NVLINK_UNCORRECTABLE);
    sim.lose_device(2, 0, ErrorCode::NVLINK_UNCORRECTABLE);
    fill(&sim, memory, 3, 1, stream).unwrap();
    assert_eq!(download(&sim, memory, 1, stream).unwrap(), [3]);
    assert_eq!(code(sim.device_primary_ctx_retain(1)), ErrorCode::NVLINK_UNCORRECTABLE);
}

/// Objects of every kind. Some have work pending.
struct Objects {
    stream: u64,
    event: u64,
    memory: u64,
    host: u64,
    base: u64,
    handle: u64,
    module: u64,
    function: u64,
}

impl Objects {
    fn new(sim: &SimDriver) -> Self {
        let base = reserve(sim, 2);
        let module = sim.module_load_data(PTX, &mut String::new()).unwrap();
        Self {
            stream: sim.stream_create(false).unwrap(),
            event: sim.event_create(true).unwrap(),
            memory: sim.mem_alloc(4).unwrap(),
            host: pinned(sim, 4),
            base,
            handle: map_page(sim, base),
            module,
            // SAFETY: the module was loaded just now.
            function: unsafe { sim.module_get_function(module, "add_one") }.unwrap(),
        }
    }

    /// The results of all calls that need the device.
    #[allow(
        clippy::multiple_unsafe_ops_per_block,
        reason = "one reason for all: handles are looked up"
    )]
    fn use_all(&self, sim: &SimDriver) -> Vec<(&'static str, ErrorCode)> {
        let Self { stream, event, memory, host, base, module, function, .. } = *self;
        let args = KernelArgs::new().arg(memory);
        let unit = |result: DriverResult<u64>| result.map(|_| ());
        // SAFETY: handles are live and looked up; the host does not touch the pinned memory.
        let answers = unsafe {
            [
                sim.ctx_synchronize(),
                unit(sim.device_primary_ctx_retain(0)),
                unit(sim.stream_create(false)),
                sim.stream_synchronize(stream),
                sim.stream_query(stream).map(|_| ()),
                sim.stream_wait_event(stream, event),
                unit(sim.stream_get_ctx(stream)),
                unit(sim.event_create(false)),
                sim.event_record(event, stream),
                sim.event_query(event).map(|_| ()),
                sim.event_synchronize(event),
                sim.event_elapsed_time(event, event).map(|_| ()),
                sim.mem_get_info().map(|_| ()),
                unit(sim.mem_alloc(4)),
                unit(sim.mem_host_alloc(4, HostAllocFlags::CACHED)),
                unit(sim.mem_host_get_device_pointer(host)),
                sim.memcpy_htod_async(memory, host, 4, stream),
                sim.memcpy_dtoh_async(host, memory, 4, stream),
                sim.memcpy_dtod_async(memory, base, 4, stream),
                sim.memset_d8_async(memory, 0, 4, stream),
                unit(sim.module_load_data(PTX, &mut String::new())),
                unit(sim.module_get_function(module, "add_one")),
                sim.launch_kernel(function, &LaunchConfig::linear(1, 1), &args, stream),
            ]
        };
        answers.into_iter().map(|answer| answer.unwrap_err()).map(|e| (e.call, e.code)).collect()
    }

    /// The results of all clean-up calls.
    #[allow(
        clippy::multiple_unsafe_ops_per_block,
        reason = "one reason for all: handles are looked up"
    )]
    fn clean_up(self, sim: &SimDriver) -> Vec<(&'static str, ErrorCode)> {
        // SAFETY: nothing uses the objects after this.
        let answers = unsafe {
            [
                sim.mem_free(self.memory),
                sim.mem_free_host(self.host),
                sim.event_destroy(self.event),
                sim.stream_destroy(self.stream),
                sim.module_unload(self.module),
            ]
        };
        answers.into_iter().map(|answer| answer.unwrap_err()).map(|e| (e.call, e.code)).collect()
    }
}

/// Asserts that every call sees the device as lost, and that clean-up leaves no object.
fn assert_lost(sim: &SimDriver, objects: Objects, lost: ErrorCode) {
    for (call, code) in objects.use_all(sim) {
        assert_eq!(code, lost, "{call}");
    }
    // Virtual memory belongs to no context.
    sim.mem_unmap(objects.base, PAGE).unwrap();
    release(sim, objects.handle).unwrap();
    sim.mem_address_free(objects.base, 2 * PAGE).unwrap();
    for (call, code) in objects.clean_up(sim) {
        assert_eq!(code, lost, "{call}");
    }
    assert!(sim.check_leaks().is_clean());
    // Calls that need no device still work.
    assert_eq!(sim.device_get_count().unwrap(), 1);
    // SAFETY: no handle of the context is used again.
    unsafe { sim.device_primary_ctx_release(0) }.unwrap();
}

#[test]
fn every_call_of_a_lost_device_answers_its_code_and_clean_up_works() {
    let sim = seeded(0);
    let objects = Objects::new(&sim);
    fill(&sim, objects.memory, 1, 4, objects.stream).unwrap();
    record(&sim, objects.event, objects.stream).unwrap();
    sim.hold(objects.stream);
    sim.lose_device(0, 0, ErrorCode::DEVICE_UNAVAILABLE);
    assert_lost(&sim, objects, ErrorCode::DEVICE_UNAVAILABLE);
}

#[test]
fn a_bad_access_poisons_its_context_in_the_same_way() {
    let sim = paced(Pace::Slowest, 0);
    let objects = Objects::new(&sim);
    let args = KernelArgs::new().arg(objects.memory + 4);
    launch(&sim, objects.function, &args, objects.stream).unwrap();
    fill(&sim, objects.memory, 1, 4, objects.stream).unwrap();
    assert_eq!(code(sync(&sim, objects.stream)), ErrorCode::ILLEGAL_ADDRESS);
    assert_eq!(sim.findings()[0].kind, FindingKind::IllegalAccess);
    assert_lost(&sim, objects, ErrorCode::ILLEGAL_ADDRESS);
}

#[test]
fn a_held_stream_does_not_keep_a_lost_device_from_answering() {
    let sim = seeded(0);
    let stream = sim.stream_create(false).unwrap();
    let other = sim.stream_create(false).unwrap();
    let memory = sim.mem_alloc(1).unwrap();
    sim.hold(stream);
    fill(&sim, memory, 1, 1, stream).unwrap();
    sim.lose_device(0, 1, ErrorCode::NVLINK_UNCORRECTABLE);
    fill(&sim, memory, 2, 1, other).unwrap();
    assert_eq!(code(sync(&sim, stream)), ErrorCode::NVLINK_UNCORRECTABLE);
    assert!(sim.findings().is_empty());
}

#[test]
fn a_lost_device_runs_no_kernel() {
    let sim = paced(Pace::Slowest, 0);
    let (stream, notes) = (sim.stream_create(false).unwrap(), Notes::new(&sim));
    notes.enqueue(&sim, stream, 1);
    sim.lose_device(0, 0, ErrorCode::ECC_UNCORRECTABLE);
    assert_eq!(code(sync(&sim, stream)), ErrorCode::ECC_UNCORRECTABLE);
    assert!(notes.numbers().is_empty());
}

#[test]
fn one_event_being_late_delays_no_other() {
    let sim = seeded(0);
    let stream = sim.stream_create(false).unwrap();
    let events = [0; 2].map(|_| sim.event_create(false).unwrap());
    for event in events {
        record(&sim, event, stream).unwrap();
    }
    sim.delay_event(events[0], 2);
    sync(&sim, stream).unwrap();
    let answers: Vec<[bool; 2]> =
        (0..3).map(|_| events.map(|event| query(&sim, event).unwrap())).collect();
    assert_eq!(answers, [[false, true], [false, true], [true, true]]);
    sim.delay_event(events[0], 1000);
    // SAFETY: the handle is looked up.
    unsafe { sim.event_synchronize(events[0]) }.unwrap();
    assert!(query(&sim, events[0]).unwrap(), "a synchronisation waits for the delay");
}
