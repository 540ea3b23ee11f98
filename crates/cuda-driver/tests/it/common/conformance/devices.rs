//! Queries of a device before there is a context.

use cuda_driver::{AllocationProp, DeviceAttribute, ErrorCode, Granularity, PeerAttribute};

use super::{Case, Needs, Subject, cases, refused};

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    the_version_is_one_with_virtual_memory,
    there_is_a_device,
    a_device_has_a_name_and_a_bus_id,
    info_of_an_ordinal_past_the_last_is_refused,
    info_of_a_negative_ordinal_is_refused,
    attributes_of_an_unknown_device_are_refused,
    an_unknown_attribute_is_refused,
    attribute_zero_is_refused,
    a_block_has_at_most_1024_threads,
    grid_limits_are_those_of_every_gpu,
    the_compute_capability_is_8_or_more,
    addresses_are_unified,
    virtual_memory_is_supported,
    there_are_copy_engines,
    a_device_is_not_its_own_peer,
    peer_access_of_an_unknown_device_is_refused,
    peer_access_to_an_unknown_device_is_refused,
    a_device_has_no_way_to_itself,
    the_way_from_or_to_an_unknown_device_is_refused,
    the_bus_id_is_spelt_from_its_parts,
    memory_has_a_clock_and_a_width,
    the_nearest_node_is_a_number_or_none,
    granularity_does_not_ask_for_a_device,
    a_context_of_an_unknown_device_is_refused,
    release_of_an_unknown_device_is_refused,
    total_memory_agrees_with_the_context,
];

const NONE: [i32; 2] = [99, -1];

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

fn info_of_an_ordinal_past_the_last_is_refused(on: &Subject) {
    let count = on.driver.device_get_count().unwrap();
    refused(on.driver.device_get_info(count), ErrorCode::INVALID_DEVICE);
}

fn info_of_a_negative_ordinal_is_refused(on: &Subject) {
    refused(on.driver.device_get_info(-1), ErrorCode::INVALID_DEVICE);
}

fn attributes_of_an_unknown_device_are_refused(on: &Subject) {
    for device in NONE {
        let answer = on.driver.device_get_attribute(device, DeviceAttribute::MAX_THREADS_PER_BLOCK);
        refused(answer, ErrorCode::INVALID_DEVICE);
    }
}

fn an_unknown_attribute_is_refused(on: &Subject) {
    let answer = on.driver.device_get_attribute(0, DeviceAttribute(0x00FF_FFFF));
    refused(answer, ErrorCode::INVALID_VALUE);
}

fn attribute_zero_is_refused(on: &Subject) {
    refused(on.driver.device_get_attribute(0, DeviceAttribute(0)), ErrorCode::INVALID_VALUE);
}

fn attribute(on: &Subject, which: DeviceAttribute) -> i32 {
    on.driver.device_get_attribute(0, which).unwrap()
}

fn a_block_has_at_most_1024_threads(on: &Subject) {
    assert_eq!(attribute(on, DeviceAttribute::MAX_THREADS_PER_BLOCK), 1024);
}

fn grid_limits_are_those_of_every_gpu(on: &Subject) {
    let limits = [
        DeviceAttribute::MAX_GRID_DIM_X,
        DeviceAttribute::MAX_GRID_DIM_Y,
        DeviceAttribute::MAX_GRID_DIM_Z,
    ];
    assert_eq!(limits.map(|which| attribute(on, which)), [i32::MAX, 65_535, 65_535]);
}

fn the_compute_capability_is_8_or_more(on: &Subject) {
    assert!(attribute(on, DeviceAttribute::COMPUTE_CAPABILITY_MAJOR) >= 8);
    assert!(attribute(on, DeviceAttribute::COMPUTE_CAPABILITY_MINOR) >= 0);
}

fn addresses_are_unified(on: &Subject) {
    assert_eq!(attribute(on, DeviceAttribute::UNIFIED_ADDRESSING), 1);
}

fn virtual_memory_is_supported(on: &Subject) {
    assert_eq!(attribute(on, DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), 1);
}

fn there_are_copy_engines(on: &Subject) {
    assert!(attribute(on, DeviceAttribute::ASYNC_ENGINE_COUNT) >= 1);
    assert!(attribute(on, DeviceAttribute::MULTIPROCESSOR_COUNT) >= 1);
}

fn a_device_is_not_its_own_peer(on: &Subject) {
    assert_eq!(on.driver.device_can_access_peer(0, 0), Ok(false));
}

fn peer_access_of_an_unknown_device_is_refused(on: &Subject) {
    for device in NONE {
        refused(on.driver.device_can_access_peer(device, 0), ErrorCode::INVALID_DEVICE);
    }
}

fn peer_access_to_an_unknown_device_is_refused(on: &Subject) {
    for device in NONE {
        refused(on.driver.device_can_access_peer(0, device), ErrorCode::INVALID_DEVICE);
    }
}

fn a_device_has_no_way_to_itself(on: &Subject) {
    let answer = on.driver.device_get_p2p_attribute(PeerAttribute::ACCESS_SUPPORTED, 0, 0);
    refused(answer, ErrorCode::INVALID_DEVICE);
}

fn the_way_from_or_to_an_unknown_device_is_refused(on: &Subject) {
    for device in NONE {
        for (from, to) in [(device, 0), (0, device)] {
            let which = PeerAttribute::PERFORMANCE_RANK;
            refused(on.driver.device_get_p2p_attribute(which, from, to), ErrorCode::INVALID_DEVICE);
        }
    }
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

fn memory_has_a_clock_and_a_width(on: &Subject) {
    assert!(attribute(on, DeviceAttribute::MEMORY_CLOCK_RATE) > 0);
    assert!(attribute(on, DeviceAttribute::GLOBAL_MEMORY_BUS_WIDTH) > 0);
}

fn the_nearest_node_is_a_number_or_none(on: &Subject) {
    assert!(attribute(on, DeviceAttribute::HOST_NUMA_ID) >= -1);
}

fn granularity_does_not_ask_for_a_device(on: &Subject) {
    for device in NONE {
        let prop = AllocationProp::on(device);
        let answer = on.driver.mem_get_allocation_granularity(prop, Granularity::Minimum);
        assert!(answer.is_ok_and(u64::is_power_of_two), "{answer:?}");
    }
}

fn a_context_of_an_unknown_device_is_refused(on: &Subject) {
    for device in NONE {
        refused(on.driver.device_primary_ctx_retain(device), ErrorCode::INVALID_DEVICE);
    }
}

fn release_of_an_unknown_device_is_refused(on: &Subject) {
    for device in NONE {
        // SAFETY: there is no such context that anybody could use.
        let answer = unsafe { on.driver.device_primary_ctx_release(device) };
        refused(answer, ErrorCode::INVALID_DEVICE);
    }
}

fn total_memory_agrees_with_the_context(on: &Subject) {
    let info = on.driver.device_get_info(0).unwrap();
    let bound = on.bind();
    let (free, total) = bound.mem_get_info().unwrap();
    assert!(0 < free && free <= total, "{free} of {total}");
    assert_eq!(total, info.total_bytes);
}
