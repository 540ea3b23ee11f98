//! The hazards H17, H18, H19 and H20 on the simulated device.

use crate::common::pipeline::copy_across;
use crate::common::{kernel, machine};
use cuda_driver::{Device, DeviceBuffer, DeviceError, Driver, ErrorCode, Event, Stream};
use cuda_sim::{Pace, RaceCheck};

const DEVICES: [(u32, bool); 4] = [(2, true), (2, false), (8, true), (8, false)];

/// H17. Weights come from one instance, the cache from another one, of the same GPU. Returns whether the loss
/// that the first one met is known to the second, and whether memory that was dropped is used again.
fn two_users_of_one_gpu(lose: bool) -> (bool, bool) {
    let (sim, registry) = machine(2, true);
    let [weights, cache] = [1, 1].map(|ordinal| registry.device(ordinal).unwrap());
    // Three quarters of the GPU, dropped by one user, and wanted by the other.
    let most = sim.config().device_bytes / 4 * 3;
    drop(DeviceBuffer::alloc(&weights, most).unwrap());
    let is_reused = DeviceBuffer::alloc(&cache, most).is_ok();
    if lose {
        sim.lose_device(1, 0, ErrorCode::ILLEGAL_ADDRESS);
        weights.synchronize().unwrap_err();
    }
    (cache.poison().is_some(), is_reused)
}

#[test]
fn one_instance_of_a_gpu_is_shared() {
    assert_eq!(two_users_of_one_gpu(true), (true, true));
    assert_eq!(two_users_of_one_gpu(false), (false, true));
}

/// H18. A task of the last device goes on where device 0 is current; returns how much memory device 0 and its
/// own device have in use then.
fn used_after_a_migration(devices: u32, peer_access: bool) -> (u64, u64) {
    let (sim, registry) = machine(devices, peer_access);
    let last = devices - 1;
    let [first, own] = [0, last as i32].map(|ordinal| registry.device(ordinal).unwrap());
    std::thread::scope(|scope| {
        let runtimes = scope.spawn(|| {
            // As code of the host program leaves it on a thread of the runtime.
            // SAFETY: the context lives as long as `first`.
            unsafe { sim.ctx_set_current(first.context()) }.unwrap();
            let buffer = DeviceBuffer::alloc(&own, 1 << 20).unwrap();
            let used = [0, last].map(|device| sim.device_used_bytes(device));
            drop(buffer);
            own.free_retired().unwrap();
            assert_eq!(sim.ctx_get_current(), Ok(first.context()));
            (used[0], used[1])
        });
        runtimes.join().unwrap()
    })
}

#[test]
fn with_binding_memory_comes_from_its_own_device() {
    for (devices, peer_access) in DEVICES {
        let (elsewhere, own) = used_after_a_migration(devices, peer_access);
        assert!(elsewhere == 0 && own >= 1 << 20, "{elsewhere} {own}");
    }
}

/// H19. An activation is handed over, and its source reused for the next one: after an event of the copy, or
/// at once. Returns the first byte that arrives, for many orders of the device's own.
fn handed_over(devices: u32, peer_access: bool, ordered: bool) -> Vec<u8> {
    let (sim, registry) = machine(devices, peer_access);
    sim.set_race_check(RaceCheck::Report);
    if !ordered {
        sim.set_pace(Pace::Random);
    }
    let [first, second] = [0, devices as i32 - 1].map(|i| registry.device(i).unwrap());
    let (producer, consumer) = (Stream::new(&first).unwrap(), Stream::new(&second).unwrap());
    let source = DeviceBuffer::alloc(&first, 64).unwrap();
    let arrived = DeviceBuffer::alloc(&second, 64).unwrap();
    let [produced, copied] = [&first, &second].map(|device| Event::new(device).unwrap());
    let mut seen = Vec::new();
    for _ in 0..64 {
        producer.fill(source.span(), 1).unwrap();
        produced.record(&producer).unwrap();
        consumer.wait(&produced).unwrap();
        copy_across(&consumer, &arrived, &source).unwrap();
        copied.record(&consumer).unwrap();
        if ordered {
            producer.wait(&copied).unwrap();
        }
        producer.fill(source.span(), 2).unwrap();
        let mut bytes = [0; 64];
        consumer.download(&mut bytes, arrived.span()).unwrap();
        producer.synchronize().unwrap();
        seen.push(bytes[0]);
    }
    assert_eq!(sim.races().is_empty(), ordered, "{:?}", sim.races());
    seen
}

#[test]
fn a_source_reused_at_once_arrives_as_the_next_activation() {
    for (devices, peer_access) in DEVICES {
        let seen = handed_over(devices, peer_access, false);
        assert!(seen.contains(&2), "no order showed the harm: {seen:?}");
    }
}

#[test]
fn a_source_reused_after_its_event_arrives_as_it_was() {
    for (devices, peer_access) in DEVICES {
        assert_eq!(handed_over(devices, peer_access, true), [1; 64]);
    }
}

/// H19. A source that is dropped while its copy has not run is freed by a call that waits for it, whichever
/// device the copy runs on.
#[test]
fn a_source_that_is_dropped_outlives_its_copy() {
    for (devices, peer_access) in DEVICES {
        let (sim, registry) = machine(devices, peer_access);
        let [first, second] = [0, devices as i32 - 1].map(|i| registry.device(i).unwrap());
        let stream = Stream::new(&second).unwrap();
        let source = DeviceBuffer::alloc(&first, 64).unwrap();
        Stream::new(&first).unwrap().upload(source.span(), &[5; 64]).unwrap();
        let arrived = DeviceBuffer::alloc(&second, 64).unwrap();
        copy_across(&stream, &arrived, &source).unwrap();
        drop(source);
        let next = DeviceBuffer::alloc(&first, 64).unwrap();
        Stream::new(&first).unwrap().upload(next.span(), &[6; 64]).unwrap();
        let mut bytes = [0; 64];
        stream.download(&mut bytes, arrived.span()).unwrap();
        assert_eq!(bytes, [5; 64]);
        assert!(sim.findings().is_empty(), "{:?}", sim.findings());
    }
}

/// H20. A device is lost, and the next three operations are of others; returns what they are told, and how many
/// calls for memory reached the driver.
fn told_after_a_loss(devices: u32, peer_access: bool) -> (Vec<DeviceError>, u64) {
    let (sim, registry) = machine(devices, peer_access);
    sim.set_pace(Pace::Slowest);
    let device: Device = registry.device(devices as i32 - 1).unwrap();
    let stream = Stream::new(&device).unwrap();
    // Kept: a module that is dropped is unloaded by the allocation, which is not what is asked here.
    let kernel = kernel::load(&device);
    kernel::write_nowhere(&kernel, &stream).unwrap();
    stream.synchronize().unwrap_err();
    let before = sim.calls().get("cuMemAlloc").copied().unwrap_or(0);
    let told = vec![
        DeviceBuffer::alloc(&device, 64).unwrap_err(),
        Event::new(&device).unwrap_err(),
        device.memory_info().unwrap_err(),
    ];
    (told, sim.calls().get("cuMemAlloc").copied().unwrap_or(0) - before)
}

#[test]
fn with_the_first_cause_every_later_call_names_it() {
    for (devices, peer_access) in DEVICES {
        let (told, made) = told_after_a_loss(devices, peer_access);
        for error in told {
            let DeviceError::Poisoned { first } = error else { panic!("{error:?}") };
            assert_eq!(
                (first.call, first.code),
                ("cuStreamSynchronize", ErrorCode::ILLEGAL_ADDRESS)
            );
        }
        assert_eq!(made, 0, "the driver was called");
    }
}
