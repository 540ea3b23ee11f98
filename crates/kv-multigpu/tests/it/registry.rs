//! One instance per GPU, whoever asks, on the simulated device.

use std::sync::Arc;

use cuda_driver::{Driver, ErrorCode};
use cuda_sim::{SimConfig, SimDriver};
use kv_multigpu::{DeviceRegistry, RegistryError};

fn driver(devices: u32) -> Arc<SimDriver> {
    Arc::new(SimDriver::new(SimConfig { devices, ..SimConfig::default() }).unwrap())
}

#[test]
fn an_ordinal_out_of_range_is_named() {
    let registry = DeviceRegistry::new(driver(1)).unwrap();
    for ordinal in [-1, 1, i32::MAX] {
        assert_eq!(
            registry.device(ordinal).unwrap_err(),
            RegistryError::NoSuchDevice { ordinal, count: 1 }
        );
    }
}

#[test]
fn the_host_programs_context_is_adopted_and_stays_its_own() {
    let driver = driver(2);
    let host_context = driver.device_primary_ctx_retain(0).unwrap();
    let registry = DeviceRegistry::new(Arc::clone(&driver) as Arc<dyn Driver>).unwrap();
    // SAFETY: the context is retained until the end of the test.
    let adopted = unsafe { registry.adopt(host_context) }.unwrap();
    assert!(adopted == registry.device(0).unwrap(), "the adopted context is the instance");
    // SAFETY: as above.
    let again = unsafe { registry.adopt(host_context) }.unwrap();
    assert!(again == adopted);
    drop((adopted, again, registry));
    assert!(!driver.calls().contains_key("cuDevicePrimaryCtxRelease"), "it is not ours to release");
    // SAFETY: the registry and its devices are gone.
    unsafe { driver.device_primary_ctx_release(0) }.unwrap();
    assert!(driver.check_leaks().is_clean());
}

#[test]
fn a_gpu_that_is_open_is_found_again_by_its_context() {
    let registry = DeviceRegistry::new(driver(2)).unwrap();
    let opened = registry.device(1).unwrap();
    // SAFETY: `opened` keeps the context, and outlives what is adopted here.
    let adopted = unsafe { registry.adopt(opened.context()) }.unwrap();
    assert!(adopted == opened);
}

#[test]
fn a_second_context_of_a_gpu_is_refused() {
    let driver = driver(1);
    let first = driver.device_primary_ctx_retain(0).unwrap();
    let registry = DeviceRegistry::new(Arc::clone(&driver) as Arc<dyn Driver>).unwrap();
    // SAFETY: used no more once it is gone, except as a number.
    let instance = unsafe { registry.adopt(first) }.unwrap();
    // The host program resets its GPU behind the registry's back: the only way to a second context
    // among those that the simulated device has.
    // SAFETY: nothing was made from the context.
    unsafe { driver.device_primary_ctx_release(0) }.unwrap();
    let second = driver.device_primary_ctx_retain(0).unwrap();
    assert_ne!(first, second);
    let refusal = RegistryError::OtherContext { ordinal: 0, registered: first, adopted: second };
    // SAFETY: the context is retained until the end of the test.
    assert_eq!(unsafe { registry.adopt(second) }.unwrap_err(), refusal);
    assert!(registry.device(0).unwrap() == instance, "the refusal changed nothing");
    drop((instance, registry));
    // SAFETY: nothing made from the context is left.
    unsafe { driver.device_primary_ctx_release(0) }.unwrap();
    assert!(driver.check_leaks().is_clean());
}

#[test]
fn what_is_no_context_is_not_adopted() {
    let registry = DeviceRegistry::new(driver(1)).unwrap();
    // SAFETY: the simulated device looks handles up and follows none.
    let refused = unsafe { registry.adopt(0xBAD) }.unwrap_err();
    assert!(matches!(refused, RegistryError::Adopt { context: 0xBAD, .. }), "{refused:?}");
    assert_eq!(registry.device(0).unwrap().ordinal(), 0);
}

#[test]
fn a_device_that_could_not_be_opened_is_tried_again() {
    let driver = driver(1);
    let registry = DeviceRegistry::new(Arc::clone(&driver) as Arc<dyn Driver>).unwrap();
    driver.fail_nth("cuDevicePrimaryCtxRetain", 1, ErrorCode::OUT_OF_MEMORY);
    let RegistryError::Open { ordinal: 0, source } = registry.device(0).unwrap_err() else {
        panic!("opening failed");
    };
    assert!(source.is_out_of_memory());
    registry.device(0).unwrap().synchronize().unwrap();
}

#[test]
fn instances_release_their_contexts_with_the_registry() {
    let driver = driver(1);
    let registry = DeviceRegistry::new(Arc::clone(&driver) as Arc<dyn Driver>).unwrap();
    let device = registry.device(0).unwrap();
    drop(registry);
    device.synchronize().unwrap();
    drop(device);
    let calls = driver.calls();
    assert_eq!(calls["cuDevicePrimaryCtxRetain"], calls["cuDevicePrimaryCtxRelease"]);
}
