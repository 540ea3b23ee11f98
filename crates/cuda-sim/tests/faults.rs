//! Failures on order, kernels that cannot run, and what is left behind.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::*;
use cuda_driver::{Driver, ErrorCode, KernelArgs, LaunchConfig};
use cuda_sim::{FindingKind, LeakReport, SimDriver};

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
    // What needs no device still answers, and clean-up is bookkept.
    sim.ctx_get_current().unwrap();
    assert_eq!(code(free(&sim, memory)), ErrorCode::ECC_UNCORRECTABLE);
    assert!(sim.check_leaks().is_clean());
    // SAFETY: no handle of the context is used again.
    unsafe { sim.device_primary_ctx_release(0) }.unwrap();
    assert_eq!(code(sim.device_primary_ctx_retain(0)), ErrorCode::ECC_UNCORRECTABLE);
}

#[test]
fn calls_are_counted_by_name() {
    let sim = seeded(0);
    let stream = sim.stream_create(false).unwrap();
    let memory = sim.mem_alloc(4).unwrap();
    fill(&sim, memory, 0, 4, stream).unwrap();
    fill(&sim, memory, 0, 5, stream).unwrap_err();
    let calls = sim.calls();
    assert_eq!(calls["cuMemsetD8Async"], 2);
    assert_eq!(calls["cuStreamCreate"], 1);
    assert_eq!(calls["cuDevicePrimaryCtxRetain"], 1);
    assert!(!calls.contains_key("cuLaunchKernel"));
}

#[test]
fn a_kernel_needs_an_entry_and_a_reference() {
    let sim = seeded(0);
    let module = sim.module_load_data(PTX, &mut String::new()).unwrap();
    // SAFETY: handles are looked up.
    let function = |name| unsafe { sim.module_get_function(module, name) };
    assert_eq!(code(function("no_such_kernel")), ErrorCode::NOT_FOUND);
    assert_eq!(code(function("unknown_kernel")), ErrorCode::NOT_SUPPORTED);
    let found = function("add_one").unwrap();
    assert_eq!(function("add_one").unwrap(), found);
    let finding = &sim.findings()[0];
    assert_eq!(finding.kind, FindingKind::MissingReference);
    assert_eq!(finding.operation, "unknown_kernel");
    // SAFETY: the function is used once more only to see that it is refused.
    unsafe { sim.module_unload(module) }.unwrap();
    let launched = launch(&sim, found, &KernelArgs::new(), 0);
    assert_eq!(code(launched), ErrorCode::INVALID_HANDLE);
}

#[test]
fn bad_ptx_says_why() {
    let sim = seeded(0);
    let mut log = String::new();
    let loaded = sim.module_load_data(".version 99.0\n.target sm_90", &mut log);
    assert_eq!(code(loaded), ErrorCode::UNSUPPORTED_PTX_VERSION);
    assert!(log.contains("99.0"), "{log}");
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
fn arguments_are_those_at_the_launch() {
    let sim = seeded(0);
    let function = kernel(&sim, "add_one");
    let memory = sim.mem_alloc(1).unwrap();
    fill(&sim, memory, 1, 1, 0).unwrap();
    let args = KernelArgs::new().arg(memory);
    launch(&sim, function, &args, 0).unwrap();
    drop(args);
    assert_eq!(download(&sim, memory, 1, 0).unwrap(), [2]);
}

#[test]
fn launches_over_the_limits_are_refused() {
    let sim = seeded(0);
    let function = kernel(&sim, "add_one");
    let memory = sim.mem_alloc(1).unwrap();
    let try_launch = |grid, block, shared_bytes| {
        let config = LaunchConfig { grid, block, shared_bytes };
        let args = KernelArgs::new().arg(memory);
        // SAFETY: the argument is the one that the kernel takes.
        unsafe { sim.launch_kernel(function, &config, &args, 0) }
    };
    let one = [1, 1, 1];
    let refused = [
        try_launch([0, 1, 1], one, 0),
        try_launch(one, [1, 0, 1], 0),
        try_launch([1 << 31, 1, 1], one, 0),
        try_launch([1, 65_536, 1], one, 0),
        try_launch([1, 1, 65_536], one, 0),
        try_launch(one, [1025, 1, 1], 0),
        try_launch(one, [1, 1, 65], 0),
        try_launch(one, [512, 2, 2], 0),
        try_launch(one, one, (227 << 10) + 1),
    ];
    assert!(refused.into_iter().all(|result| code(result) == ErrorCode::INVALID_VALUE));
    try_launch([i32::MAX as u32, 65_535, 65_535], [32, 16, 2], 227 << 10).unwrap();
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
    sim.mem_release(handle).unwrap();
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
