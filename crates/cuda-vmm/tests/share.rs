//! Pages that two machines share, as two processes do on a GPU: visibility, accounting, and the
//! fate of the memory afterwards.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::sharing::{close, holds, mapped, pool, write};
use common::{Machine, PAGE, machine_with, sharing};
use cuda_driver::{Device, DeviceError, ErrorCode};
use cuda_sim::SimConfig;
use cuda_vmm::pages::share::{ExportError, ImportError, import_page};
use cuda_vmm::pages::{PageError, Reservation, ReservationOptions};

/// The exporting and the importing process.
fn processes() -> (Machine, Machine) {
    (machine_with(1, 1), machine_with(1, 2))
}

#[test]
fn every_scenario_passes_on_the_simulated_device() {
    for &(name, scenario) in sharing::ALL {
        let machine = machine_with(1, 0);
        scenario(&machine.device);
        assert!(machine.sim.findings().is_empty(), "{name}: {:?}", machine.sim.findings());
        machine.assert_no_leak();
    }
}

#[test]
fn two_processes_share_a_page() {
    let (exporter, importer) = processes();
    let pool = pool(&exporter.device, 1);
    let page = pool.take_exportable().unwrap().share();
    let ours = mapped(&exporter.device, &page);
    write(&ours, 1);
    let exported = page.export().unwrap();
    assert_eq!(exported.device_uuid(), importer.device.info().uuid);
    let import = import_page(&importer.device, &exported, exported.bytes()).unwrap();
    let theirs = mapped(&importer.device, &import);
    drop(exported);
    assert!(holds(&theirs, 1));
    write(&theirs, 2);
    assert!(holds(&ours, 2));

    close(ours);
    pool.give_back(page).unwrap();
    assert_eq!(pool.stats().live, 0);
    assert_eq!(exporter.sim.device_used_bytes(0), PAGE, "the importer still has it");
    assert!(holds(&theirs, 2));
    drop(import);
    close(theirs);
    assert_eq!(exporter.sim.device_used_bytes(0), 0);
    drop(pool);
    importer.assert_no_leak();
    exporter.assert_no_leak();
}

/// A request's page must not be readable by a process that had it before.
#[test]
fn an_exported_page_is_never_handed_out_again() {
    let (exporter, importer) = processes();
    let pool = pool(&exporter.device, 2);
    let page = pool.take_exportable().unwrap().share();
    let exported = page.export().unwrap();
    let import = import_page(&importer.device, &exported, exported.bytes()).unwrap();
    let theirs = mapped(&importer.device, &import);
    write(&theirs, 1);
    pool.give_back(page).unwrap();
    assert_eq!((pool.stats().idle, pool.stats().released), (0, 1));

    let next = pool.take().unwrap().share();
    let ours = mapped(&exporter.device, &next);
    write(&ours, 2);
    assert!(holds(&theirs, 1), "the other process sees the bytes of a later request");
    write(&theirs, 3);
    assert!(holds(&ours, 2), "the other process wrote into a later request");
}

#[test]
fn a_page_that_was_not_exported_is_kept() {
    let (exporter, _) = processes();
    let pool = pool(&exporter.device, 2);
    pool.give_back(pool.take_exportable().unwrap()).unwrap();
    assert_eq!((pool.stats().idle, pool.stats().released), (1, 0));
}

#[test]
fn an_exportable_page_counts_and_makes_room_for_itself() {
    let (exporter, _) = processes();
    let pool = pool(&exporter.device, 2);
    pool.prepare(2).unwrap();
    let page = pool.take_exportable().unwrap();
    let stats = pool.stats();
    assert_eq!((stats.live, stats.idle, stats.in_use, stats.released), (2, 1, 1, 1));
    let other = pool.take_exportable().unwrap();
    assert_eq!(
        pool.take_exportable().unwrap_err(),
        PageError::Exhausted { asked: 1, in_use: 2, capacity: 2 }
    );
    drop((page, other));
    assert_eq!(pool.stats().live, 0);
}

#[test]
fn only_a_page_created_for_it_is_exported() {
    let (exporter, importer) = processes();
    let pool = pool(&exporter.device, 2);
    let plain = pool.take().unwrap().share();
    assert_eq!(plain.export().unwrap_err(), ExportError::NotExportable { page: plain.id() });
    assert_eq!(exporter.calls("cuMemExportToShareableHandle"), 0);
    let exported = pool.take_exportable().unwrap().share().export().unwrap();
    let import = import_page(&importer.device, &exported, PAGE).unwrap();
    assert_eq!(import.export().unwrap_err(), ExportError::NotExportable { page: import.id() });
}

#[test]
fn an_imported_page_belongs_to_no_pool() {
    let (exporter, importer) = processes();
    let exported = pool(&exporter.device, 1).take_exportable().unwrap().share().export().unwrap();
    let import = import_page(&importer.device, &exported, PAGE).unwrap();
    let refused = pool(&importer.device, 1).give_back(import.clone()).unwrap_err();
    assert_eq!(refused.page.id(), import.id());
    drop((refused, import, exported));
    assert_eq!(exporter.sim.device_used_bytes(0), 0);
    importer.assert_no_leak();
}

#[test]
fn each_import_is_a_page_of_its_own() {
    let (exporter, importer) = processes();
    let exported = pool(&exporter.device, 1).take_exportable().unwrap().share().export().unwrap();
    let import = || import_page(&importer.device, &exported, PAGE).unwrap();
    let (first, second) = (import(), import());
    assert_ne!(first.id(), second.id());
    let (one, other) = (mapped(&importer.device, &first), mapped(&importer.device, &second));
    write(&one, 1);
    assert!(holds(&other, 1));
}

#[test]
fn a_page_is_imported_for_the_device_that_holds_it() {
    let exporter = machine_with(2, 1);
    let second = Device::open(Arc::clone(exporter.device.driver()), 1).unwrap();
    let exported = pool(&second, 1).take_exportable().unwrap().share().export().unwrap();
    // A process with both devices, one that names the wrong device, and one that has only one
    // device.
    let both = machine_with(2, 2);
    let its_second = Device::open(Arc::clone(both.device.driver()), 1).unwrap();
    drop(import_page(&its_second, &exported, PAGE).unwrap());
    for other in [&both.device, &machine_with(1, 3).device] {
        let refused = import_page(other, &exported, PAGE).unwrap_err();
        assert_eq!(refused, ImportError::OtherDevice { device: 0 });
    }
    drop(its_second);
    both.assert_no_leak();
}

#[test]
fn pages_of_another_size_are_not_mapped_as_ones_of_the_reservation() {
    let (exporter, importer) = processes();
    let exported = pool(&exporter.device, 1).take_exportable().unwrap().share().export().unwrap();
    let import = import_page(&importer.device, &exported, PAGE).unwrap();
    let options =
        ReservationOptions { bytes: 4 * PAGE, page_bytes: Some(2 * PAGE), peers: Vec::new() };
    let space = Reservation::new(&importer.device, options).unwrap();
    let refused = space.map(0, import).unwrap_err();
    assert_eq!(refused.pages.len(), 1);
}

/// The driver calls of an export and an import.
const CALLS: [&str; 4] = [
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemGetAllocationPropertiesFromHandle",
];

/// Takes, exports and imports a page. On failure the earlier steps are undone.
fn share_once(exporter: &Machine, importer: &Machine) -> Result<(), DeviceError> {
    let pool = pool(&exporter.device, 1);
    let page = pool.take_exportable().map_err(|error| match error {
        PageError::Device(error) => error,
        other => panic!("{other}"),
    })?;
    let page = page.share();
    let exported = page.export().map_err(|error| match error {
        ExportError::Device(error) => error,
        other => panic!("{other}"),
    });
    let imported = exported.and_then(|exported| {
        import_page(&importer.device, &exported, PAGE).map_err(|error| match error {
            ImportError::Device(error) => error,
            other => panic!("{other}"),
        })
    });
    pool.give_back(page).unwrap();
    assert_eq!((pool.stats().live, pool.stats().in_use), (0, 0));
    imported.map(drop)
}

#[test]
fn each_call_that_fails_leaves_nothing_behind() {
    for call in CALLS {
        let (exporter, importer) = processes();
        for machine in [&exporter, &importer] {
            machine.sim.fail_nth(call, 1, ErrorCode::UNKNOWN);
        }
        let error = share_once(&exporter, &importer).unwrap_err().driver_error();
        assert_eq!((error.call, error.code), (call, ErrorCode::UNKNOWN));
        share_once(&exporter, &importer).unwrap();
        assert_eq!(exporter.sim.device_used_bytes(0), 0, "{call}");
        exporter.assert_no_leak();
        importer.assert_no_leak();
    }
}

#[test]
fn granularities_of_two_processes_may_differ() {
    let exporter = machine_with(1, 1);
    let config = SimConfig { granularity: PAGE / 4, ..SimConfig::default() };
    let sim = cuda_sim::SimDriver::new(config).unwrap();
    let device = Device::open(Arc::new(sim), 0).unwrap();
    let exported = pool(&exporter.device, 1).take_exportable().unwrap().share().export().unwrap();
    let import = import_page(&device, &exported, PAGE).unwrap();
    let space = mapped(&device, &import);
    write(&space, 4);
    assert!(holds(&space, 4));
}
