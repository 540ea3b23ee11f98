//! Devices, contexts and peers: which device a call belongs to, and what it may access.

use crate::common::*;
use cuda_driver::{DeviceAttribute, Driver, DriverResult, ErrorCode, PeerAttribute};
use cuda_sim::{FindingKind, SimConfig, SimConfigError, SimDriver};

fn two_devices() -> SimDriver {
    machine(SimConfig { devices: 2, ..SimConfig::default() })
}

fn release(sim: &SimDriver, device: i32) -> DriverResult<()> {
    // SAFETY: the simulated driver looks up handles, and refuses those of a dead context.
    unsafe { sim.device_primary_ctx_release(device) }
}

#[test]
fn machines_that_cannot_be_are_refused() {
    let refused = |config| SimDriver::new(config).unwrap_err();
    assert_eq!(
        refused(SimConfig { devices: 0, ..SimConfig::default() }),
        SimConfigError::Devices { devices: 0, most: 32 }
    );
    for granularity in [0, 3 << 20, 1024, 1 << 40] {
        let error = refused(SimConfig { granularity, ..SimConfig::default() });
        assert_eq!(error, SimConfigError::Granularity { granularity });
    }
    assert_eq!(
        refused(SimConfig { device_bytes: 0, ..SimConfig::default() }),
        SimConfigError::DeviceBytes { device_bytes: 0 }
    );
}

#[test]
fn an_older_device_says_so_and_refuses_what_it_cannot_run() {
    let refused = |compute_capability| {
        SimDriver::new(SimConfig { compute_capability, ..SimConfig::default() }).unwrap_err()
    };
    for (major, minor) in [(9, 1), (10, 0), (8, 10)] {
        let error = SimConfigError::ComputeCapability { major, minor, most: (9, 0) };
        assert_eq!(refused((major, minor)), error);
    }
    let config = SimConfig { compute_capability: (8, 6), ..SimConfig::default() };
    let sim = SimDriver::new(config).unwrap();
    let attribute = |which| sim.device_get_attribute(0, which).unwrap();
    assert_eq!(attribute(DeviceAttribute::COMPUTE_CAPABILITY_MAJOR), 8);
    assert_eq!(attribute(DeviceAttribute::COMPUTE_CAPABILITY_MINOR), 6);
    let context = sim.device_primary_ctx_retain(0).unwrap();
    // SAFETY: the context was retained just now.
    unsafe { sim.ctx_set_current(context) }.unwrap();
    let mut log = String::new();
    let load = |target: &str, log: &mut String| {
        sim.module_load_data(&format!(".version 8.0\n.target {target}\n"), log)
    };
    load("sm_86", &mut log).unwrap();
    assert_eq!(code(load("sm_90", &mut log)), ErrorCode::INVALID_PTX);
    assert_eq!(log, "PTX for sm_90 does not run on this device");
}

#[test]
fn devices_say_what_they_are() {
    let sim = two_devices();
    assert_eq!(sim.name(), "sim");
    assert_eq!(sim.device_get_count().unwrap(), 2);
    assert_eq!(sim.driver_get_version().unwrap(), 12_080);
    let (first, second) = (sim.device_get_info(0).unwrap(), sim.device_get_info(1).unwrap());
    assert_ne!(first.uuid, second.uuid);
    assert_ne!(first.pci_bus_id, second.pci_bus_id);
    let attribute = |which| sim.device_get_attribute(0, which);
    assert_eq!(attribute(DeviceAttribute::COMPUTE_CAPABILITY_MAJOR).unwrap(), 9);
    assert_eq!(attribute(DeviceAttribute::MULTIPROCESSOR_COUNT).unwrap(), 132);
    assert_eq!(attribute(DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED).unwrap(), 1);
    assert_eq!(code(attribute(DeviceAttribute(9999))), ErrorCode::INVALID_VALUE);
    assert_eq!(code(sim.device_get_info(2)), ErrorCode::INVALID_DEVICE);
    assert_eq!(code(sim.device_get_info(-1)), ErrorCode::INVALID_DEVICE);
    assert_eq!(code(sim.device_primary_ctx_retain(2)), ErrorCode::INVALID_DEVICE);
}

#[test]
fn the_primary_context_is_counted_and_ends_with_all_in_it() {
    let sim = seeded(0);
    let context = sim.ctx_get_current().unwrap();
    assert_eq!(sim.device_primary_ctx_retain(0).unwrap(), context);
    release(&sim, 0).unwrap();
    let stream = sim.stream_create(false).unwrap();
    let memory = sim.mem_alloc(4).unwrap();
    fill(&sim, memory, 1, 4, stream).unwrap();
    release(&sim, 0).unwrap();
    assert_eq!(code(release(&sim, 0)), ErrorCode::INVALID_CONTEXT);
    assert_eq!(code(sim.mem_alloc(4)), ErrorCode::CONTEXT_IS_DESTROYED);
    assert_eq!(code(set_current(&sim, context)), ErrorCode::INVALID_CONTEXT);
    assert_eq!(sim.findings()[0].kind, FindingKind::LostObjects);
    assert!(sim.check_leaks().is_clean());
    assert_ne!(bind(&sim, 0), context);
    assert_eq!(code(sync(&sim, stream)), ErrorCode::INVALID_HANDLE);
    assert_eq!(code(free(&sim, memory)), ErrorCode::INVALID_VALUE);
}

#[test]
fn devices_reach_the_neighbours_of_their_group() {
    let config = SimConfig { devices: 8, peer_group: 4, ..SimConfig::default() };
    let sim = machine(config);
    let contexts: Vec<_> =
        (0..8).map(|device| sim.device_primary_ctx_retain(device).unwrap()).collect();
    for (device, &context) in contexts.iter().enumerate() {
        // SAFETY: a live context.
        unsafe { sim.ctx_set_current(context) }.unwrap();
        for (peer, &peer_context) in contexts.iter().enumerate().filter(|&(peer, _)| peer != device)
        {
            let near = device / 4 == peer / 4;
            let (from, to) = (device as i32, peer as i32);
            assert_eq!(sim.device_can_access_peer(from, to), Ok(near));
            let of = |which| sim.device_get_p2p_attribute(which, from, to);
            assert_eq!(of(PeerAttribute::ACCESS_SUPPORTED), Ok(i32::from(near)));
            assert_eq!(of(PeerAttribute::PERFORMANCE_RANK), Ok(i32::from(!near)));
            // SAFETY: a live context.
            let enabled = unsafe { sim.ctx_enable_peer_access(peer_context) };
            let code = enabled.map_err(|error| error.code);
            assert_eq!(code, if near { Ok(()) } else { Err(ErrorCode::PEER_ACCESS_UNSUPPORTED) });
        }
    }
    let refused = SimDriver::new(SimConfig { peer_group: 0, ..SimConfig::default() }).unwrap_err();
    assert_eq!(refused, SimConfigError::PeerGroup);
}
