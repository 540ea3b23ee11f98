//! The virtual-memory calls behave like those of driver 580.

use crate::common::*;
use cuda_driver::{AccessDesc, Driver, ErrorCode, Granularity};
use cuda_sim::{FindingKind, Pace, RangeKind, SimConfig, SimDriver};

const INVALID: ErrorCode = ErrorCode::INVALID_VALUE;

/// Writes and reads a byte at each end of `pages` pages at `address`.
fn use_pages(sim: &SimDriver, address: u64, pages: u64) {
    fill(sim, address, 0x5A, pages * PAGE, 0).unwrap();
    assert_eq!(download(sim, address, 1, 0).unwrap(), [0x5A]);
    assert_eq!(download(sim, address + pages * PAGE - 1, 1, 0).unwrap(), [0x5A]);
}

#[test]
fn granularity_is_that_of_the_configuration() {
    let sim = machine(SimConfig { granularity: 64 << 10, ..SimConfig::default() });
    for which in [Granularity::Minimum, Granularity::Recommended] {
        assert_eq!(sim.mem_get_allocation_granularity(prop(0), which).unwrap(), 64 << 10);
    }
    // The driver does not check the device.
    assert_eq!(sim.mem_get_allocation_granularity(prop(1), Granularity::Minimum), Ok(64 << 10));
}

#[test]
fn a_hint_is_followed_where_the_addresses_are_free() {
    let sim = seeded(0);
    let base = reserve(&sim, 2);
    assert_ne!(sim.mem_address_reserve(PAGE, 0, base + PAGE).unwrap(), base + PAGE);
    sim.mem_address_free(base, 2 * PAGE).unwrap();
    assert_eq!(sim.mem_address_reserve(PAGE, 0, base).unwrap(), base);
}

#[test]
fn access_on_a_hole_is_refused_as_a_whole() {
    let sim = seeded(0);
    let base = reserve(&sim, 3);
    let handle = sim.mem_create(PAGE, prop(0)).unwrap();
    map(&sim, base, PAGE, 0, handle).unwrap();
    let access = [AccessDesc { device: 0 }];
    assert_eq!(code(sim.mem_set_access(base, 2 * PAGE, &access)), INVALID);
    assert_eq!(code(sim.mem_set_access(base + PAGE, PAGE, &access)), INVALID);
    // The refused call did not give access to the mapped page.
    assert_eq!(code(fill(&sim, base, 1, 1, 0)), INVALID);
}

#[test]
fn access_needs_a_known_device_in_reach() {
    let sim = machine(SimConfig { devices: 2, peer_access: false, ..SimConfig::default() });
    let base = reserve(&sim, 1);
    let handle = sim.mem_create(PAGE, prop(0)).unwrap();
    map(&sim, base, PAGE, 0, handle).unwrap();
    assert_eq!(code(sim.mem_set_access(base, PAGE, &[])), INVALID);
    for device in [-1, 1, 2] {
        let access = [AccessDesc { device: 0 }, AccessDesc { device }];
        assert_eq!(code(sim.mem_set_access(base, PAGE, &access)), INVALID, "device {device}");
    }
    sim.mem_set_access(base, PAGE, &[AccessDesc { device: 0 }]).unwrap();
    use_pages(&sim, base, 1);
}

#[test]
fn creating_is_bounded_by_the_device_and_its_granularity() {
    let sim = machine(SimConfig { device_bytes: 3 * PAGE, ..SimConfig::default() });
    assert_eq!(code(sim.mem_create(PAGE - 1, prop(0))), INVALID);
    assert_eq!(code(sim.mem_create(0, prop(0))), INVALID);
    assert_eq!(code(sim.mem_create(PAGE, prop(1))), ErrorCode::INVALID_DEVICE);
    let handle = sim.mem_create(2 * PAGE, prop(0)).unwrap();
    assert_eq!(sim.mem_get_info().unwrap(), (PAGE, 3 * PAGE));
    assert_eq!(code(sim.mem_create(2 * PAGE, prop(0))), ErrorCode::OUT_OF_MEMORY);
    assert_eq!(code(sim.mem_alloc(PAGE + 1)), ErrorCode::OUT_OF_MEMORY);
    release(&sim, handle).unwrap();
    sim.mem_create(3 * PAGE, prop(0)).unwrap();
}

#[test]
fn unmapping_under_a_pending_kernel_loses_the_device() {
    let sim = paced(Pace::Slowest, 0);
    let base = reserve(&sim, 1);
    let handle = map_page(&sim, base);
    let stream = sim.stream_create(false).unwrap();
    let target = sim.mem_alloc(4).unwrap();
    launch_copy(&sim, (target, base + 8), 4, stream).unwrap();
    sim.mem_unmap(base, PAGE).unwrap();
    assert_eq!(code(sync(&sim, stream)), ErrorCode::ILLEGAL_ADDRESS);
    let findings = sim.findings();
    let kinds: Vec<_> = findings.iter().map(|finding| finding.kind).collect();
    assert_eq!(kinds, [FindingKind::IllegalAccess, FindingKind::Race]);
    let finding = &findings[0];
    assert_eq!(finding.operation, "copy_bytes");
    assert_eq!((finding.device, finding.stream), (Some(0), Some(stream)));
    assert_eq!((finding.address, finding.bytes), (Some(base + 8), 4));
    let nearest = finding.nearest.unwrap();
    assert_eq!((nearest.kind, nearest.base), (RangeKind::Reservation, base));
    assert!(finding.detail.contains("reserved but not mapped"), "{finding}");
    // Clean-up still works on the lost device, and returns the sticky error, except for the calls
    // that need no context.
    release(&sim, handle).unwrap();
    sim.mem_address_free(base, PAGE).unwrap();
    assert_eq!(code(free(&sim, target)), ErrorCode::ILLEGAL_ADDRESS);
    let report = sim.check_leaks();
    assert_eq!((report.physical_handles, report.reservations, report.allocations), (0, 0, 0));
}

#[test]
fn a_large_reservation_costs_little() {
    let sim = seeded(0);
    let base = sim.mem_address_reserve(1 << 44, 0, 0).unwrap();
    map_page(&sim, base + (1 << 43));
    use_pages(&sim, base + (1 << 43), 1);
}
