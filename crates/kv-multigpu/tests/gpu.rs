//! One instance per GPU on real devices, also when cudarc was there first.
//!
//! Needs one device. Without one every trial is listed as ignored; with `KV_REQUIRE_GPU=1` it fails.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use cuda_driver::{CudaDriver, Stream, interop};
use cudarc::driver::CudaContext;
use kv_multigpu::DeviceRegistry;
use libtest_mimic::{Arguments, Failed, Trial};

type Run = fn(&DeviceRegistry);

fn main() {
    let trials: &[(&str, Run)] = &[
        ("all_threads_get_the_same_instance", all_threads_get_the_same_instance),
        ("cudarc_shares_the_instances_context", cudarc_shares_the_instances_context),
    ];
    let required = std::env::var_os("KV_REQUIRE_GPU").is_some_and(|value| value == "1");
    let missing = CudaDriver::load().is_err();
    let trials = trials.iter().map(|&(name, run)| {
        let trial = Trial::test(name, move || {
            let driver = CudaDriver::probe().map_err(|error| Failed::from(format!("{error:?}")))?;
            run(&DeviceRegistry::new(driver).unwrap());
            Ok(())
        });
        trial.with_ignored_flag(missing && !required)
    });
    let mut arguments = Arguments::from_args();
    // They share a device, and its memory.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

fn all_threads_get_the_same_instance(registry: &DeviceRegistry) {
    for ordinal in 0..registry.count() {
        let first = registry.device(ordinal).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let device = registry.device(ordinal).unwrap();
                    assert!(device == first);
                    Stream::new(&device).unwrap().synchronize().unwrap();
                });
            }
        });
        for other in 0..ordinal {
            assert!(registry.device(other).unwrap() != first);
        }
    }
}

fn cudarc_shares_the_instances_context(registry: &DeviceRegistry) {
    registry.driver().device_primary_ctx_retain(0).unwrap();
    let theirs = CudaContext::new(0).unwrap();
    // SAFETY: a live context, retained above and not released before the process ends.
    let adopted = unsafe { registry.adopt(interop::context_handle(&theirs)) }.unwrap();
    assert!(registry.device(0).unwrap() == adopted);
    let again = CudaContext::new(0).unwrap();
    // SAFETY: as above.
    assert!(unsafe { registry.adopt(interop::context_handle(&again)) }.unwrap() == adopted);
    Stream::new(&adopted).unwrap().synchronize().unwrap();
}
