//! Physical memory that is exported and imported.
//!
//! Where a case says so, the code is the documentation's or a guess, and not yet seen on a card.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use cuda_driver::shareable::{ShareableHandle, ShareableKind, ShareableRef};
use cuda_driver::{
    AccessDesc, AllocationProp, DeviceAttribute, DriverResult, ErrorCode, Granularity,
};

use super::bound::{Bound, Owned};
use super::{Case, Needs, Subject, cases, refused};
use crate::common::pattern;

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    file_descriptors_are_supported,
    exportable_memory_has_the_granularity_of_any,
    an_import_has_the_bytes_of_the_export,
    what_is_written_through_an_import_is_seen,
    memory_is_exported_twice,
    a_descriptor_is_imported_twice,
    a_duplicate_of_a_descriptor_is_imported,
    a_descriptor_may_be_closed_after_the_import,
    an_open_descriptor_keeps_the_memory,
    a_closed_descriptor_keeps_nothing,
    an_import_outlives_the_exporters_handle,
    memory_of_an_import_is_given_back_after_the_last_mapping,
    an_import_needs_access_of_its_own,
    a_part_of_an_import_is_not_mapped,
    an_import_takes_no_memory,
    properties_are_those_of_the_creation,
    memory_not_created_for_it_is_not_exported,
    memory_for_descriptors_is_not_exported_to_a_fabric,
    a_fabric_is_there_or_refused,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    an_import_is_not_exported_again,
    a_file_of_something_else_is_not_imported,
    a_socket_is_not_imported,
    a_closed_descriptor_is_not_imported,
    bytes_that_are_no_fabric_handle_are_not_imported,
];

pub(crate) const PAIRS: &[Case] = cases![Needs::Pair;
    an_import_stays_on_its_device,
    an_import_is_opened_to_a_peer,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("the driver follows such a handle");
    a_handle_never_made_is_not_exported,
    a_released_handle_is_not_exported,
    a_handle_never_made_has_no_properties,
];

const INVALID: ErrorCode = ErrorCode::INVALID_VALUE;

fn prop(bound: &Bound<'_>) -> AllocationProp {
    AllocationProp::exportable(bound.device, ShareableKind::PosixFd)
}

/// Physical memory of `pages` pages that can be exported.
fn exportable<'b>(bound: &'b Bound<'_>, pages: u64) -> Owned<'b> {
    bound.physical_as(pages, prop(bound))
}

fn export(bound: &Bound<'_>, handle: u64) -> DriverResult<OwnedFd> {
    match bound.mem_export_to_shareable_handle(handle, ShareableKind::PosixFd)? {
        ShareableHandle::PosixFd(fd) => Ok(fd),
        other => panic!("{other:?}, where a descriptor was asked for"),
    }
}

fn import(bound: &Bound<'_>, fd: &impl AsFd) -> DriverResult<u64> {
    bound.mem_import_from_shareable_handle(ShareableRef::PosixFd(fd.as_fd()))
}

fn imported<'b>(bound: &'b Bound<'_>, fd: &impl AsFd) -> Owned<'b> {
    bound.own_physical(import(bound, fd))
}

/// Writes `tag`'s pattern into all of a handle of one page, by way of addresses of its own.
fn write_into(bound: &Bound<'_>, handle: u64, tag: u8) {
    let range = bound.range(1);
    range.map_usable(0, 1, handle);
    bound.write(range.base, &pattern(tag, 5000));
}

/// Whether a handle of one page has `tag`'s pattern.
fn holds(bound: &Bound<'_>, handle: u64, tag: u8) -> bool {
    let range = bound.range(1);
    range.map_usable(0, 1, handle);
    bound.read(range.base, 5000) == pattern(tag, 5000)
}

fn free(bound: &Bound<'_>) -> u64 {
    bound.mem_get_info().unwrap().0
}

fn file_descriptors_are_supported(on: &Subject) {
    let attribute = DeviceAttribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    assert_eq!(on.driver.device_get_attribute(0, attribute), Ok(1));
}

fn exportable_memory_has_the_granularity_of_any(on: &Subject) {
    let bound = on.bind();
    for which in [Granularity::Minimum, Granularity::Recommended] {
        let [any, exported] = [bound.prop(), prop(&bound)]
            .map(|prop| bound.mem_get_allocation_granularity(prop, which).unwrap());
        assert_eq!(any, exported);
    }
}

fn an_import_has_the_bytes_of_the_export(on: &Subject) {
    let bound = on.bind();
    let handle = exportable(&bound, 1);
    write_into(&bound, *handle, 1);
    let import = imported(&bound, &export(&bound, *handle).unwrap());
    assert!(holds(&bound, *import, 1));
}

fn what_is_written_through_an_import_is_seen(on: &Subject) {
    let bound = on.bind();
    let (handle, [first, second]) = (exportable(&bound, 1), [bound.range(1), bound.range(1)]);
    first.map_usable(0, 1, *handle);
    let import = imported(&bound, &export(&bound, *handle).unwrap());
    second.map_usable(0, 1, *import);
    bound.write(second.base + 100, &pattern(2, 3000));
    assert!(bound.read(first.base + 100, 3000) == pattern(2, 3000));
    bound.write(first.base, &pattern(3, 200));
    assert!(bound.read(second.base, 200) == pattern(3, 200));
}

fn memory_is_exported_twice(on: &Subject) {
    let bound = on.bind();
    let handle = exportable(&bound, 1);
    write_into(&bound, *handle, 4);
    let [first, second] = [export(&bound, *handle).unwrap(), export(&bound, *handle).unwrap()];
    drop(first);
    assert!(holds(&bound, *imported(&bound, &second), 4));
}

fn a_descriptor_is_imported_twice(on: &Subject) {
    let bound = on.bind();
    let handle = exportable(&bound, 1);
    let fd = export(&bound, *handle).unwrap();
    let [first, second] = [imported(&bound, &fd), imported(&bound, &fd)];
    write_into(&bound, *first, 5);
    assert!(holds(&bound, *second, 5));
}

fn a_duplicate_of_a_descriptor_is_imported(on: &Subject) {
    let bound = on.bind();
    let handle = exportable(&bound, 1);
    let fd = export(&bound, *handle).unwrap();
    let duplicate = fd.try_clone().unwrap();
    drop(fd);
    write_into(&bound, *handle, 6);
    assert!(holds(&bound, *imported(&bound, &duplicate), 6));
}

fn a_descriptor_may_be_closed_after_the_import(on: &Subject) {
    let bound = on.bind();
    let handle = exportable(&bound, 1);
    let fd = export(&bound, *handle).unwrap();
    let import = imported(&bound, &fd);
    drop(fd);
    write_into(&bound, *handle, 7);
    assert!(holds(&bound, *import, 7));
}

fn an_open_descriptor_keeps_the_memory(on: &Subject) {
    let bound = on.bind();
    let handle = exportable(&bound, 1);
    write_into(&bound, *handle, 8);
    let fd = export(&bound, *handle).unwrap();
    drop(handle);
    assert!(holds(&bound, *imported(&bound, &fd), 8));
}

/// Enough that what a driver keeps for itself is small beside it.
const MANY: u64 = 64;

fn a_closed_descriptor_keeps_nothing(on: &Subject) {
    let bound = on.bind();
    drop(exportable(&bound, MANY));
    let before = free(&bound);
    let handle = exportable(&bound, MANY);
    let fd = export(&bound, *handle).unwrap();
    drop(handle);
    assert!(free(&bound) < before, "the descriptor keeps the memory");
    drop(fd);
    let kept = before.saturating_sub(free(&bound));
    assert!(kept < bound.page() * MANY / 2, "{kept} bytes are kept");
}

fn an_import_outlives_the_exporters_handle(on: &Subject) {
    let bound = on.bind();
    let (handle, [first, second]) = (exportable(&bound, 1), [bound.range(1), bound.range(1)]);
    first.map_usable(0, 1, *handle);
    bound.write(first.base, &pattern(9, 5000));
    let import = imported(&bound, &export(&bound, *handle).unwrap());
    second.map_usable(0, 1, *import);
    drop((first, handle));
    assert!(bound.read(second.base, 5000) == pattern(9, 5000));
}

fn memory_of_an_import_is_given_back_after_the_last_mapping(on: &Subject) {
    let bound = on.bind();
    drop(exportable(&bound, MANY));
    let before = free(&bound);
    let (handle, range) = (exportable(&bound, MANY), bound.range(MANY));
    let import = imported(&bound, &export(&bound, *handle).unwrap());
    range.map_usable(0, MANY, *import);
    drop((handle, import));
    assert!(free(&bound) < before, "it is mapped");
    bound.write(range.base, &[1; 64]);
    drop(range);
    let kept = before.saturating_sub(free(&bound));
    assert!(kept < bound.page() * MANY / 2, "{kept} bytes are kept");
}

fn an_import_needs_access_of_its_own(on: &Subject) {
    let bound = on.bind();
    let (handle, [first, second]) = (exportable(&bound, 1), [bound.range(1), bound.range(1)]);
    first.map_usable(0, 1, *handle);
    let import = imported(&bound, &export(&bound, *handle).unwrap());
    second.map(0, 1, *import).unwrap();
    refused(bound.memset_d8_async(second.base, 0, 64, 0), INVALID);
}

/// As for a handle that was created here; not yet seen on a card.
fn a_part_of_an_import_is_not_mapped(on: &Subject) {
    let bound = on.bind();
    let (handle, range) = (exportable(&bound, 2), bound.range(4));
    let import = imported(&bound, &export(&bound, *handle).unwrap());
    refused(range.map(0, 1, *import), ErrorCode::NOT_SUPPORTED);
    refused(range.map(0, 3, *import), ErrorCode::NOT_SUPPORTED);
    assert_eq!(range.map(1, 2, *import), Ok(()));
}

fn an_import_takes_no_memory(on: &Subject) {
    let bound = on.bind();
    let handle = exportable(&bound, MANY);
    let fd = export(&bound, *handle).unwrap();
    drop(imported(&bound, &fd));
    let before = free(&bound);
    let import = imported(&bound, &fd);
    let taken = before.saturating_sub(free(&bound));
    assert!(taken < bound.page() * MANY / 2, "{taken} bytes are taken");
    drop(import);
}

fn properties_are_those_of_the_creation(on: &Subject) {
    let bound = on.bind();
    let (plain, handle) = (bound.physical(1), exportable(&bound, 1));
    let properties = |handle| bound.mem_get_allocation_properties_from_handle(handle);
    assert_eq!(properties(*plain), Ok(bound.prop()));
    assert_eq!(properties(*handle), Ok(prop(&bound)));
    let import = imported(&bound, &export(&bound, *handle).unwrap());
    assert_eq!(properties(*import).map(|prop| prop.device), Ok(0));
}

/// The documentation names this code; not yet seen on a card.
fn memory_not_created_for_it_is_not_exported(on: &Subject) {
    let bound = on.bind();
    refused(export(&bound, *bound.physical(1)), INVALID);
}

/// The documentation names this code; not yet seen on a card.
fn memory_for_descriptors_is_not_exported_to_a_fabric(on: &Subject) {
    let bound = on.bind();
    let handle = exportable(&bound, 1);
    refused(bound.mem_export_to_shareable_handle(*handle, ShareableKind::Fabric), INVALID);
}

/// Whether a process may make fabric handles hangs on the machine it runs on.
fn a_fabric_is_there_or_refused(on: &Subject) {
    let bound = on.bind();
    let prop = AllocationProp::exportable(0, ShareableKind::Fabric);
    let refusals = [ErrorCode::NOT_PERMITTED, ErrorCode::NOT_SUPPORTED];
    match bound.mem_create(bound.page(), prop) {
        Ok(handle) => {
            let handle = bound.own_physical(Ok(handle));
            let exported = bound.mem_export_to_shareable_handle(*handle, ShareableKind::Fabric);
            let kind = exported.map(|exported| exported.kind()).map_err(|error| error.code);
            match kind {
                Ok(kind) => assert_eq!(kind, ShareableKind::Fabric),
                Err(code) => assert!(refusals.contains(&code), "{code}"),
            }
        }
        Err(error) => assert!(refusals.contains(&error.code), "{error}"),
    }
}

/// Not yet seen on a card.
fn an_import_is_not_exported_again(on: &Subject) {
    let bound = on.bind();
    let handle = exportable(&bound, 1);
    let import = imported(&bound, &export(&bound, *handle).unwrap());
    refused(export(&bound, *import), INVALID);
    // A descriptor of the exporter's is good for any number of imports.
    let second = imported(&bound, &export(&bound, *handle).unwrap());
    write_into(&bound, *second, 10);
    assert!(holds(&bound, *import, 10));
}

fn a_file_of_something_else_is_not_imported(on: &Subject) {
    refused(import(&on.bind(), &File::open("/dev/null").unwrap()), ErrorCode::UNKNOWN);
}

fn a_socket_is_not_imported(on: &Subject) {
    let (socket, _peer) = UnixStream::pair().unwrap();
    refused(import(&on.bind(), &socket), ErrorCode::UNKNOWN);
}

fn a_closed_descriptor_is_not_imported(on: &Subject) {
    // SAFETY: nobody opens so many files; a number that names none is answered with an error.
    let closed = unsafe { BorrowedFd::borrow_raw(1_000_000) };
    refused(import(&on.bind(), &closed), ErrorCode::UNKNOWN);
}

/// Any refusal: which, hangs on the machine.
fn bytes_that_are_no_fabric_handle_are_not_imported(on: &Subject) {
    let nonsense = cuda_driver::shareable::FabricHandle([7; 64]);
    let answer = on.bind().mem_import_from_shareable_handle(ShareableRef::Fabric(&nonsense));
    let code = answer.unwrap_err().code;
    let refusals = [INVALID, ErrorCode::NOT_PERMITTED, ErrorCode::NOT_SUPPORTED];
    assert!(refusals.contains(&code), "{code}");
}

/// An import has no say in where the memory is: that is behind the descriptor.
fn an_import_stays_on_its_device(on: &Subject) {
    let [first, second] = [on.bind_device(0), on.bind_device(1)];
    let handle = exportable(&first, 1);
    let fd = export(&first, *handle).unwrap();
    second.make_current();
    let import = imported(&second, &fd);
    let properties = second.mem_get_allocation_properties_from_handle(*import);
    assert_eq!(properties.map(|prop| prop.device), Ok(0));
    drop(import);
    first.make_current();
}

fn an_import_is_opened_to_a_peer(on: &Subject) {
    let [first, second] = [on.bind_device(0), on.bind_device(1)];
    first.make_current();
    let handle = exportable(&first, 1);
    write_into(&first, *handle, 11);
    let (import, range) = (imported(&first, &export(&first, *handle).unwrap()), first.range(1));
    range.map(0, 1, *import).unwrap();
    first.mem_set_access(range.base, range.bytes, &[AccessDesc { device: 1 }]).unwrap();
    second.make_current();
    assert!(second.read(range.base, 5000) == pattern(11, 5000));
    first.make_current();
}

fn a_handle_never_made_is_not_exported(on: &Subject) {
    refused(export(&on.bind(), 0x0BAD_BAD0), INVALID);
}

fn a_released_handle_is_not_exported(on: &Subject) {
    let bound = on.bind();
    let handle = bound.mem_create(bound.page(), prop(&bound)).unwrap();
    bound.mem_release(handle).unwrap();
    refused(export(&bound, handle), INVALID);
}

fn a_handle_never_made_has_no_properties(on: &Subject) {
    refused(on.bind().mem_get_allocation_properties_from_handle(0x0BAD_BAD0), INVALID);
}
