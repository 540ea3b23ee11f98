//! Devices on their way out: drained, closed, lost, and what the others make of it, on the simulated
//! device (H20).

use crate::common::pipeline::{Plan, run_on};
use crate::common::{kernel, machine};
use cuda_driver::{DeviceBuffer, DeviceError, Driver, DriverError, ErrorCode, Event, Stream};
use cuda_sim::Pace;
use kv_multigpu::{DeviceState, RegistryError};

const PLAN: Plan =
    Plan { layers: 12, passes: 10, lanes: 3, words: 32, peer_access: false, leak_bytes: 0 };

#[test]
fn a_device_is_drained_then_closed_and_opened_anew() {
    let (sim, registry) = machine(2, true);
    assert_eq!(registry.drain(0).unwrap_err(), RegistryError::NotOpen { ordinal: 0 });
    assert_eq!(registry.close(0).unwrap_err(), RegistryError::NotOpen { ordinal: 0 });
    let device = registry.device(0).unwrap();
    let (stream, buffer) = (Stream::new(&device).unwrap(), DeviceBuffer::alloc(&device, 64));
    stream.fill(buffer.as_ref().unwrap().span(), 1).unwrap();
    drop(buffer);
    let drained = registry.drain(0).unwrap();
    assert_eq!((drained.lost, drained.freed), (None, 1), "{drained:?}");
    assert_eq!((drained.alive.streams, drained.alive.devices), (1, 1), "{drained:?}");
    assert!(stream.is_idle().unwrap());
    assert_eq!(registry.device(0).unwrap_err(), RegistryError::Draining { ordinal: 0 });
    // SAFETY: the context lives as long as `device`.
    let adopted = unsafe { registry.adopt(device.context()) };
    assert_eq!(adopted.unwrap_err(), RegistryError::Draining { ordinal: 0 });
    assert_eq!(registry.entry(0).unwrap().state, DeviceState::Draining);
    assert_eq!(registry.entry(1).unwrap().state, DeviceState::Unopened);

    let RegistryError::InUse { ordinal: 0, alive } = registry.close(0).unwrap_err() else {
        panic!("a stream is alive");
    };
    assert_eq!(alive.to_string(), "1 streams, 1 handles of the device");
    assert!(registry.resume(0).unwrap() == device, "the same instance");
    assert!(registry.device(0).unwrap() == device);
    drop((stream, device));
    assert_eq!(registry.close(0).unwrap().lost, None);
    assert_eq!(registry.entry(0).unwrap().state, DeviceState::Closed { lost: None });
    assert_eq!(registry.resume(0).unwrap_err(), RegistryError::NotOpen { ordinal: 0 });
    assert!(sim.check_leaks().is_clean());
    registry.device(0).unwrap().synchronize().unwrap();
    assert_eq!(registry.entry(0).unwrap().state, DeviceState::Open);
}

/// What is in use is not closed, but its work is waited for, and what was dropped is freed.
#[test]
fn a_device_that_is_in_use_is_drained_when_it_is_not_closed() {
    let (sim, registry) = machine(1, true);
    // A query advances nothing.
    sim.set_pace(Pace::Slowest);
    let device = registry.device(0).unwrap();
    let (stream, kept) = (Stream::new(&device).unwrap(), DeviceBuffer::alloc(&device, 64).unwrap());
    let dropped = DeviceBuffer::alloc(&device, 64).unwrap();
    stream.fill(kept.span(), 1).unwrap();
    drop(dropped);
    assert!(!stream.is_idle().unwrap() && device.alive().retired == 1);
    assert!(matches!(registry.close(0), Err(RegistryError::InUse { ordinal: 0, .. })));
    assert!(stream.is_idle().unwrap(), "its work was not waited for");
    assert_eq!(device.alive().retired, 0, "what was dropped is not freed");
    drop((stream, kept, device));
    registry.close(0).unwrap();
}

/// Loss of one device alone, as of a card that fails.
#[test]
fn a_lost_device_is_drained_and_closed_while_the_others_serve() {
    for (devices, peer_access) in [(2, true), (2, false), (8, true), (8, false)] {
        let (sim, registry) = machine(devices, peer_access);
        let others: Vec<i32> = (1..devices as i32).collect();
        let plan = Plan { peer_access, ..PLAN };
        run_on(&registry, &others, plan).unwrap();

        let lost = registry.device(0).unwrap();
        let (stream, event) = (Stream::new(&lost).unwrap(), Event::new(&lost).unwrap());
        let memory = DeviceBuffer::alloc(&lost, 4096).unwrap();
        sim.lose_device(0, 0, ErrorCode::ECC_UNCORRECTABLE);
        let first = stream.synchronize().unwrap_err().driver_error();
        assert_eq!(first, DriverError::new("cuStreamSynchronize", ErrorCode::ECC_UNCORRECTABLE));
        let state = DeviceState::Lost { first, after: None };
        assert_eq!(registry.entry(0).unwrap().state, state);
        assert_eq!(registry.first_loss(), Some((0, first)));
        // Handed out still, and every operation names the cause without a call of the driver.
        let made = sim.calls();
        let refused = DeviceBuffer::alloc(&registry.device(0).unwrap(), 64).unwrap_err();
        assert_eq!(refused, DeviceError::Poisoned { first });
        assert_eq!(event.record(&stream), Err(DeviceError::Poisoned { first }));
        let call = |calls: &std::collections::BTreeMap<&str, u64>, name| calls.get(name).copied();
        for name in ["cuMemAlloc", "cuEventRecord", "cuCtxSetCurrent"] {
            assert_eq!(call(&sim.calls(), name), call(&made, name), "{name} was called");
        }

        drop(memory);
        let drained = registry.drain(0).unwrap();
        assert_eq!((drained.lost, drained.freed), (Some(first), 1));
        let in_use = registry.close(0).unwrap_err();
        assert!(matches!(in_use, RegistryError::InUse { ordinal: 0, .. }), "{in_use}");
        run_on(&registry, &others, plan).unwrap();
        drop((stream, event, lost));
        assert_eq!(registry.close(0).unwrap().lost, Some(first));
        assert_eq!(registry.device(0).unwrap_err(), RegistryError::Lost { ordinal: 0, first });
        assert_eq!(registry.entry(0).unwrap().state, DeviceState::Closed { lost: Some(first) });
        let RegistryError::Open { ordinal: 0, source } = registry.reopen(0).unwrap_err() else {
            panic!("the driver has not forgotten");
        };
        assert_eq!(source.driver_error().code, ErrorCode::ECC_UNCORRECTABLE);
        run_on(&registry, &others, plan).unwrap();
        assert!(registry.close_all().is_complete());
        assert!(sim.findings().is_empty(), "{:?}", sim.findings());
        assert!(sim.check_leaks().is_clean(), "{}", sim.check_leaks());
    }
}

/// A device that the driver does not open again stays lost, and one that it does open is no reason to forget the loss.
#[test]
fn a_loss_is_remembered_whether_the_device_opens_again_or_not() {
    let (sim, registry) = machine(2, true);
    // A fault that the driver forgets with the context.
    let first = DriverError::new("cuLaunchKernel", ErrorCode::ILLEGAL_ADDRESS);
    assert!(registry.device(0).unwrap().run(|_| Err::<(), _>(first)).is_err());
    assert_eq!(registry.close(0).unwrap().lost, Some(first));
    let again = registry.reopen(0).unwrap();
    assert_eq!(registry.entry(0).unwrap().state, DeviceState::Open);
    assert_eq!(registry.first_loss(), Some((0, first)), "opened again");
    // The same fault of another device comes after it.
    registry.device(1).unwrap();
    sim.lose_device(1, 0, ErrorCode::ILLEGAL_ADDRESS);
    let echo = DriverError::new("cuMemGetInfo", ErrorCode::ILLEGAL_ADDRESS);
    assert_eq!(registry.probe(1).unwrap(), DeviceState::Lost { first: echo, after: Some(0) });
    // A second loss of the first device, which the driver does not forget.
    sim.lose_device(0, 0, ErrorCode::ECC_UNCORRECTABLE);
    let second = again.synchronize().unwrap_err().driver_error();
    drop(again);
    assert_eq!(registry.close(0).unwrap().lost, Some(second));
    for _ in 0..2 {
        assert!(matches!(registry.reopen(0), Err(RegistryError::Open { ordinal: 0, .. })));
        let state = registry.entry(0).unwrap().state;
        assert_eq!(state, DeviceState::Closed { lost: Some(second) });
        let refused = registry.device(0).unwrap_err();
        assert_eq!(refused, RegistryError::Lost { ordinal: 0, first: second });
        assert_eq!(registry.first_loss(), Some((0, first)));
    }
}

#[test]
fn a_device_that_is_lost_again_was_not_lost_by_itself() {
    let (_sim, registry) = machine(1, true);
    let fault = DriverError::new("cuLaunchKernel", ErrorCode::ILLEGAL_ADDRESS);
    for _ in 0..2 {
        let device = registry.reopen(0).unwrap();
        let lost = device.run(|_| Err::<(), _>(fault)).unwrap_err().driver_error();
        let state = registry.entry(0).unwrap().state;
        assert_eq!(state, DeviceState::Lost { first: lost, after: None });
        drop(device);
        registry.close(0).unwrap();
    }
}

/// NVIDIA's driver loses all devices of a process by the fault of one: the report says which came first.
#[test]
fn a_fault_is_traced_to_the_device_that_met_it() {
    for devices in [2, 8] {
        let (sim, registry) = machine(devices, true);
        let all: Vec<_> = (0..devices as i32).map(|i| registry.device(i).unwrap()).collect();
        let streams: Vec<_> = all.iter().map(|device| Stream::new(device).unwrap()).collect();
        let kernel = kernel::load(&all[1]);
        // The launch is no error: the call that waits meets it.
        kernel::write_nowhere(&kernel, &streams[1]).unwrap();
        let first = streams[1].synchronize().unwrap_err().driver_error();
        assert_eq!(first, DriverError::new("cuStreamSynchronize", ErrorCode::ILLEGAL_ADDRESS));
        assert_eq!(registry.entry(0).unwrap().state, DeviceState::Open, "nobody asked it yet");
        let after = registry.probe(0).unwrap();
        let echo = DriverError::new("cuMemGetInfo", ErrorCode::ILLEGAL_ADDRESS);
        assert_eq!(after, DeviceState::Lost { first: echo, after: Some(1) });
        assert_eq!(registry.probe(1).unwrap(), DeviceState::Lost { first, after: None });
        assert_eq!(registry.first_loss(), Some((1, first)));
        let report = registry.report().unwrap();
        assert_eq!(
            report
                .iter()
                .filter(|entry| matches!(entry.state, DeviceState::Unopened | DeviceState::Open))
                .count(),
            all.len() - 2
        );
        let findings = sim.findings();
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(findings[0].device, Some(1));

        drop((kernel, streams, all));
        let closed = registry.close_all();
        assert!(closed.is_complete(), "{closed:?}");
        let order: Vec<i32> = closed.devices.iter().map(|(ordinal, _)| *ordinal).collect();
        assert_eq!(
            order,
            (0..devices as i32).rev().collect::<Vec<_>>(),
            "last opened, first closed"
        );
        assert_eq!(registry.first_loss(), Some((1, first)), "remembered");
        assert!(sim.check_leaks().is_clean());
    }
}

#[test]
fn every_device_is_closed_though_one_is_in_use_and_one_is_refused() {
    let (sim, registry) = machine(3, true);
    for ordinal in [2, 0, 1] {
        registry.device(ordinal).unwrap();
    }
    let kept = Stream::new(&registry.device(0).unwrap()).unwrap();
    // Not tried again: it may have been made, and the next release would be another owner's.
    sim.fail_nth("cuDevicePrimaryCtxRelease", 1, ErrorCode::NOT_PERMITTED);
    let closed = registry.close_all();
    let source = DriverError::new("cuDevicePrimaryCtxRelease", ErrorCode::NOT_PERMITTED);
    let [(1, refused), (0, in_use), (2, Ok(_))] = &closed.devices[..] else {
        panic!("{closed:?}");
    };
    assert_eq!(*refused, Err(RegistryError::Refused { ordinal: 1, source }));
    assert!(matches!(in_use, Err(RegistryError::InUse { ordinal: 0, .. })), "{in_use:?}");
    assert!(!closed.is_complete());
    kept.synchronize().unwrap();
    drop(kept);
    assert_eq!(registry.close_all().devices.len(), 1, "only the one that was left");
}

#[test]
fn draining_one_device_holds_up_no_other() {
    let (sim, registry) = machine(2, true);
    let [first, second] = [0, 1].map(|ordinal| registry.device(ordinal).unwrap());
    let stream = Stream::new(&first).unwrap();
    let buffer = DeviceBuffer::alloc(&first, 64).unwrap();
    sim.hold(stream.raw());
    stream.fill(buffer.span(), 1).unwrap();
    // The simulated device says of a wait that cannot end that the device is lost; a real one would
    // stand still here, with no lock held.
    assert_eq!(registry.drain(0).unwrap().lost.unwrap().code, ErrorCode::LAUNCH_TIMEOUT);
    assert!(registry.device(1).unwrap() == second);
    second.synchronize().unwrap();
    sim.release_hold(stream.raw());
}

#[test]
fn an_adopted_context_is_given_back_to_its_owner() {
    let (sim, registry) = machine(1, true);
    let context = sim.device_primary_ctx_retain(0).unwrap();
    // SAFETY: retained until the end of the test.
    drop(unsafe { registry.adopt(context) }.unwrap());
    registry.close(0).unwrap();
    assert!(!sim.calls().contains_key("cuDevicePrimaryCtxRelease"), "it is not ours to release");
    // SAFETY: as above.
    let again = unsafe { registry.adopt(context) }.unwrap();
    again.synchronize().unwrap();
    drop(again);
    registry.close(0).unwrap();
    // SAFETY: nothing made from the context is left.
    unsafe { sim.device_primary_ctx_release(0) }.unwrap();
    assert!(sim.check_leaks().is_clean());
}

#[test]
fn many_threads_close_and_open_without_a_second_instance() {
    let (sim, registry) = machine(2, true);
    std::thread::scope(|scope| {
        for i in 0..6 {
            let registry = &registry;
            scope.spawn(move || {
                for _ in 0..50 {
                    let ordinal = i % 2;
                    match registry.device(ordinal) {
                        Ok(device) => {
                            device.synchronize().unwrap();
                            // As long as this handle lives, no other instance is made.
                            match registry.device(ordinal) {
                                Ok(again) => assert!(again == device, "a second instance"),
                                Err(error) => {
                                    assert_eq!(error, RegistryError::Draining { ordinal });
                                }
                            }
                        }
                        Err(error) => assert_eq!(error, RegistryError::Draining { ordinal }),
                    }
                    if i < 2 {
                        match registry.close(i) {
                            Ok(_) | Err(RegistryError::NotOpen { .. }) => {}
                            Err(RegistryError::InUse { alive, .. }) => {
                                assert_eq!(alive.handles(), 0);
                                registry.resume(i).unwrap();
                            }
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            });
        }
    });
    assert!(registry.close_all().is_complete());
    let calls = sim.calls();
    assert_eq!(calls["cuDevicePrimaryCtxRetain"], calls["cuDevicePrimaryCtxRelease"]);
}
