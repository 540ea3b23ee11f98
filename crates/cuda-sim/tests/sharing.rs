//! Memory that two machines hold, as two processes can.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::os::fd::{AsFd, OwnedFd};

use common::*;
use cuda_driver::shareable::{ShareableHandle, ShareableKind, ShareableRef};
use cuda_driver::{AccessDesc, AllocationProp, Driver, DriverResult, ErrorCode};
use cuda_sim::{SimConfig, SimDriver};

const ACCESS: [AccessDesc; 1] = [AccessDesc { device: 0 }];

/// A machine, and one page of addresses in it.
struct Side {
    sim: SimDriver,
    address: u64,
    handle: u64,
}

fn export(sim: &SimDriver, handle: u64) -> DriverResult<OwnedFd> {
    // SAFETY: handles are looked up.
    match unsafe { sim.mem_export_to_shareable_handle(handle, ShareableKind::PosixFd) }? {
        ShareableHandle::PosixFd(fd) => Ok(fd),
        other => panic!("{other:?}"),
    }
}

fn import(sim: &SimDriver, fd: &OwnedFd) -> DriverResult<u64> {
    sim.mem_import_from_shareable_handle(ShareableRef::PosixFd(fd.as_fd()))
}

fn create(sim: &SimDriver, device: i32) -> u64 {
    let prop = AllocationProp::exportable(device, ShareableKind::PosixFd);
    sim.mem_create(PAGE, prop).unwrap()
}

impl Side {
    fn with(sim: SimDriver, handle: u64) -> Self {
        let address = reserve(&sim, 1);
        map(&sim, address, PAGE, 0, handle).unwrap();
        sim.mem_set_access(address, PAGE, &ACCESS).unwrap();
        Self { sim, address, handle }
    }

    fn exporter() -> (Self, OwnedFd) {
        let sim = seeded(1);
        let handle = create(&sim, 0);
        let fd = export(&sim, handle).unwrap();
        (Self::with(sim, handle), fd)
    }

    fn importer(fd: &OwnedFd) -> Self {
        let sim = seeded(2);
        let handle = import(&sim, fd).unwrap();
        Self::with(sim, handle)
    }

    fn write(&self, offset: u64, data: &[u8]) {
        upload(&self.sim, self.address + offset, data, 0).unwrap();
        sync(&self.sim, 0).unwrap();
    }

    fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        download(&self.sim, self.address + offset, bytes, 0).unwrap()
    }

    /// Frees all virtual memory.
    fn clear(&self) {
        self.sim.mem_unmap(self.address, PAGE).unwrap();
        self.sim.mem_address_free(self.address, PAGE).unwrap();
        release(&self.sim, self.handle).unwrap();
    }
}

#[test]
fn each_machine_sees_what_the_other_wrote() {
    let (exporter, fd) = Side::exporter();
    let importer = Side::importer(&fd);
    exporter.write(0, &[1, 2, 3]);
    assert_eq!(importer.read(0, 3), [1, 2, 3]);
    importer.write(PAGE - 2, &[8, 9]);
    assert_eq!(exporter.read(PAGE - 2, 2), [8, 9]);
}

#[test]
fn kernels_reach_shared_memory() {
    let (exporter, fd) = Side::exporter();
    let importer = Side::importer(&fd);
    exporter.write(0, &[5; 64]);
    let (to, from) = (importer.address + 4096, importer.address);
    launch_copy(&importer.sim, (to, from), 64, 0).unwrap();
    sync(&importer.sim, 0).unwrap();
    assert_eq!(exporter.read(4096, 64), [5; 64]);
    assert_eq!(importer.sim.findings(), []);
}

#[test]
fn what_was_never_written_is_known_on_both_sides() {
    let (exporter, fd) = Side::exporter();
    let importer = Side::importer(&fd);
    assert!(!importer.sim.is_initialised(0, importer.address, 1));
    exporter.write(10, &[0; 10]);
    assert!(importer.sim.is_initialised(0, importer.address + 10, 10));
    assert!(!importer.sim.is_initialised(0, importer.address + 9, 11));
    assert_eq!(exporter.read(0, 10), importer.read(0, 10), "fresh bytes are the same bytes");
}

#[test]
fn memory_lives_until_the_last_machine_lets_go() {
    let (exporter, fd) = Side::exporter();
    let importer = Side::importer(&fd);
    drop(fd);
    exporter.write(0, &[7; 100]);
    exporter.clear();
    assert!(exporter.sim.check_leaks().is_clean(), "{}", exporter.sim.check_leaks());
    assert_eq!(exporter.sim.device_used_bytes(0), PAGE, "the importer has it mapped");
    assert_eq!(importer.read(0, 100), [7; 100]);
    assert_eq!(importer.sim.check_leaks().physical_bytes, PAGE);
    release(&importer.sim, importer.handle).unwrap();
    assert_eq!(importer.read(0, 100), [7; 100]);
    importer.sim.mem_unmap(importer.address, PAGE).unwrap();
    importer.sim.mem_address_free(importer.address, PAGE).unwrap();
    assert_eq!(exporter.sim.device_used_bytes(0), 0);
    assert!(importer.sim.check_leaks().is_clean());
}

#[test]
fn the_importer_outlives_the_exporting_machine() {
    let (exporter, fd) = Side::exporter();
    exporter.write(0, &[3; 10]);
    let importer = Side::importer(&fd);
    drop(exporter);
    assert_eq!(importer.read(0, 10), [3; 10]);
    let late = Side::importer(&fd);
    late.write(0, &[4; 10]);
    assert_eq!(importer.read(0, 10), [4; 10]);
}

#[test]
fn a_descriptor_keeps_memory_and_closing_it_gives_it_back() {
    let (exporter, fd) = Side::exporter();
    let duplicate = fd.try_clone().unwrap();
    exporter.clear();
    drop(fd);
    assert_eq!(exporter.sim.device_used_bytes(0), PAGE, "a duplicate is open");
    drop(duplicate);
    assert_eq!(exporter.sim.device_used_bytes(0), 0);
}

#[test]
fn memory_that_descriptors_kept_can_be_taken_again() {
    let config = SimConfig { device_bytes: PAGE, ..SimConfig::default() };
    let sim = machine(config);
    let handle = create(&sim, 0);
    let fd = export(&sim, handle).unwrap();
    release(&sim, handle).unwrap();
    assert_eq!(code(sim.mem_create(PAGE, prop(0))), ErrorCode::OUT_OF_MEMORY);
    drop(fd);
    let handle = sim.mem_create(PAGE, prop(0)).unwrap();
    release(&sim, handle).unwrap();
}

#[test]
fn imports_take_no_memory_of_the_importing_machine() {
    let (exporter, fd) = Side::exporter();
    let importer = Side::importer(&fd);
    assert_eq!(exporter.sim.device_used_bytes(0), PAGE);
    assert_eq!(importer.sim.device_used_bytes(0), 0);
}

#[test]
fn a_machine_without_the_device_cannot_import() {
    let two = machine(SimConfig { devices: 2, ..SimConfig::default() });
    let fd = export(&two, create(&two, 1)).unwrap();
    assert_eq!(code(import(&seeded(0), &fd)), ErrorCode::INVALID_DEVICE);
    let other = machine(SimConfig { devices: 2, ..SimConfig::default() });
    let handle = import(&other, &fd).unwrap();
    // SAFETY: handles are looked up.
    let properties = unsafe { other.mem_get_allocation_properties_from_handle(handle) };
    assert_eq!(properties.unwrap().device, 1);
}

#[test]
fn granularities_may_differ_where_the_size_fits_both() {
    let (exporter, fd) = Side::exporter();
    let finer = machine(SimConfig { granularity: 64 << 10, ..SimConfig::default() });
    let handle = import(&finer, &fd).unwrap();
    let importer = Side::with(finer, handle);
    exporter.write(100_000, &[6; 100_000]);
    assert_eq!(importer.read(100_000, 100_000), vec![6; 100_000]);
    let coarser = machine(SimConfig { granularity: 4 << 20, ..SimConfig::default() });
    assert_eq!(code(import(&coarser, &fd)), ErrorCode::INVALID_VALUE);
}

#[test]
fn an_import_that_was_ordered_to_fail_leaves_nothing() {
    let (exporter, fd) = Side::exporter();
    let importer = seeded(3);
    importer.fail_nth("cuMemImportFromShareableHandle", 1, ErrorCode::OUT_OF_MEMORY);
    assert_eq!(code(import(&importer, &fd)), ErrorCode::OUT_OF_MEMORY);
    assert!(importer.check_leaks().is_clean());
    exporter.sim.fail_nth("cuMemExportToShareableHandle", 1, ErrorCode::UNKNOWN);
    assert_eq!(code(export(&exporter.sim, exporter.handle)), ErrorCode::UNKNOWN);
    drop(fd);
    exporter.clear();
    assert_eq!(exporter.sim.device_used_bytes(0), 0);
}

/// Each machine has a lock, and so has the shared memory. No order of taking them may deadlock.
#[test]
fn two_threads_use_one_memory_at_once() {
    let (exporter, fd) = Side::exporter();
    let importer = Side::importer(&fd);
    std::thread::scope(|scope| {
        for (side, offset) in [(&exporter, 0), (&importer, PAGE / 2)] {
            scope.spawn(move || {
                bind(&side.sim, 0);
                for round in 0..200u8 {
                    side.write(offset, &[round; 5000]);
                    assert_eq!(side.read(offset, 5000), [round; 5000]);
                }
            });
        }
    });
    assert_eq!(exporter.read(PAGE / 2, 5000), [199; 5000]);
    assert_eq!(importer.read(0, 5000), [199; 5000]);
}
