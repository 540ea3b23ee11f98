//! Queries of a device before there is a context.

use cuda_driver::{AllocationProp, DeviceAttribute, ErrorCode, Granularity, PeerAttribute};

use super::{Case, Needs, Subject, cases, refused};

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    the_version_is_one_with_virtual_memory,
    there_is_a_device,
    a_device_has_a_name_and_a_bus_id,
    an_unknown_device_is_refused,
    an_unknown_attribute_is_refused,
    attributes_are_those_of_every_gpu,
    a_device_is_not_its_own_peer,
    the_bus_id_is_spelt_from_its_parts,
    granularity_does_not_ask_for_a_device,
    total_memory_agrees_with_the_context,
];

fn the_version_is_one_with_virtual_memory(on: &Subject) {
    assert!(on.driver.driver_get_version().unwrap() >= 11_020);
}

fn there_is_a_device(on: &Subject) {
    assert!(on.driver.device_get_count().unwrap() >= 1);
}

fn a_device_has_a_name_and_a_bus_id(on: &Subject) {
    let info = on.driver.device_get_info(0).unwrap();
    assert!(!info.name.is_empty() && info.uuid != [0; 16], "{info:?}");
    assert_eq!((info.pci_bus_id.len(), info.pci_bus_id.matches(':').count()), (12, 2), "{info:?}");
}

fn an_unknown_device_is_refused(on: &Subject) {
    let driver = &on.driver;
    let count = driver.device_get_count().unwrap();
    for device in [99, -1] {
        let attribute = driver.device_get_attribute(device, DeviceAttribute::MAX_THREADS_PER_BLOCK);
        refused(attribute, ErrorCode::INVALID_DEVICE);
        for (from, to) in [(device, 0), (0, device)] {
            refused(driver.device_can_access_peer(from, to), ErrorCode::INVALID_DEVICE);
            let which = PeerAttribute::PERFORMANCE_RANK;
            refused(driver.device_get_p2p_attribute(which, from, to), ErrorCode::INVALID_DEVICE);
        }
        refused(driver.device_primary_ctx_retain(device), ErrorCode::INVALID_DEVICE);
        // SAFETY: there is no such context that anybody could use.
        let released = unsafe { driver.device_primary_ctx_release(device) };
        refused(released, ErrorCode::INVALID_DEVICE);
    }
    for device in [count, -1] {
        refused(driver.device_get_info(device), ErrorCode::INVALID_DEVICE);
    }
}

fn an_unknown_attribute_is_refused(on: &Subject) {
    for number in [0, 0x00FF_FFFF] {
        let answer = on.driver.device_get_attribute(0, DeviceAttribute(number));
        refused(answer, ErrorCode::INVALID_VALUE);
    }
}

fn attribute(on: &Subject, which: DeviceAttribute) -> i32 {
    on.driver.device_get_attribute(0, which).unwrap()
}

fn attributes_are_those_of_every_gpu(on: &Subject) {
    for (which, value) in [
        (DeviceAttribute::MAX_THREADS_PER_BLOCK, 1024),
        (DeviceAttribute::MAX_GRID_DIM_X, i32::MAX),
        (DeviceAttribute::MAX_GRID_DIM_Y, 65_535),
        (DeviceAttribute::MAX_GRID_DIM_Z, 65_535),
        (DeviceAttribute::UNIFIED_ADDRESSING, 1),
        (DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1),
    ] {
        assert_eq!(attribute(on, which), value, "{which:?}");
    }
    for (which, least) in [
        (DeviceAttribute::COMPUTE_CAPABILITY_MAJOR, 8),
        (DeviceAttribute::COMPUTE_CAPABILITY_MINOR, 0),
        (DeviceAttribute::ASYNC_ENGINE_COUNT, 1),
        (DeviceAttribute::MULTIPROCESSOR_COUNT, 1),
        (DeviceAttribute::MEMORY_CLOCK_RATE, 1),
        (DeviceAttribute::GLOBAL_MEMORY_BUS_WIDTH, 1),
        // None is -1.
        (DeviceAttribute::HOST_NUMA_ID, -1),
    ] {
        assert!(attribute(on, which) >= least, "{which:?}");
    }
}

fn a_device_is_not_its_own_peer(on: &Subject) {
    assert_eq!(on.driver.device_can_access_peer(0, 0), Ok(false));
    let way = on.driver.device_get_p2p_attribute(PeerAttribute::ACCESS_SUPPORTED, 0, 0);
    refused(way, ErrorCode::INVALID_DEVICE);
}

fn the_bus_id_is_spelt_from_its_parts(on: &Subject) {
    let parts = [
        DeviceAttribute::PCI_DOMAIN_ID,
        DeviceAttribute::PCI_BUS_ID,
        DeviceAttribute::PCI_DEVICE_ID,
    ];
    let [domain, bus, slot] = parts.map(|which| attribute(on, which));
    let spelt = format!("{domain:04x}:{bus:02x}:{slot:02x}.0");
    assert_eq!(on.driver.device_get_info(0).unwrap().pci_bus_id.to_lowercase(), spelt);
}

fn granularity_does_not_ask_for_a_device(on: &Subject) {
    for device in [99, -1] {
        let prop = AllocationProp::on(device);
        let answer = on.driver.mem_get_allocation_granularity(prop, Granularity::Minimum);
        assert!(answer.is_ok_and(u64::is_power_of_two), "{answer:?}");
    }
}

fn total_memory_agrees_with_the_context(on: &Subject) {
    let info = on.driver.device_get_info(0).unwrap();
    let bound = on.bind();
    let (free, total) = bound.mem_get_info().unwrap();
    assert!(0 < free && free <= total, "{free} of {total}");
    assert_eq!(total, info.total_bytes);
}
