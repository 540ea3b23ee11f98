//! One instance per GPU, whoever asks, on the simulated device.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::sync::Arc;

use cuda_driver::Driver;
use cuda_sim::{SimConfig, SimDriver};
use kv_multigpu::{DeviceRegistry, RegistryError};

fn driver(devices: u32) -> Arc<SimDriver> {
    Arc::new(SimDriver::new(SimConfig { devices, ..SimConfig::default() }).unwrap())
}

#[test]
fn all_threads_get_the_same_instance() {
    let registry = DeviceRegistry::new(driver(2)).unwrap();
    let seen: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|i| {
                scope.spawn({
                    let registry = &registry;
                    move || registry.device(i % 2).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (i, device) in seen.iter().enumerate() {
        assert!(*device == seen[i % 2], "thread {i} got another instance");
        assert_eq!(device.context(), seen[i % 2].context());
    }
    assert!(seen[0] != seen[1]);
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
fn the_host_programs_context_is_adopted_and_a_second_one_refused() {
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
    // SAFETY: the registry and its devices are gone.
    unsafe { driver.device_primary_ctx_release(0) }.unwrap();
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
