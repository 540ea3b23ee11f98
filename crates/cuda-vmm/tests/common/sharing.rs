//! Scenarios for exported pages on every device, with both sides in one process.

use std::os::fd::AsFd;

use cuda_driver::{Device, Stream};
use cuda_vmm::pages::share::{ImportError, import_page};
use cuda_vmm::pages::{
    MapRefusal, MapStep, PagePool, PagePoolOptions, Reservation, ReservationOptions, SharedPage,
};

use super::pattern;
use super::scenarios::Scenario;

/// Every scenario, by name.
pub(crate) const ALL: &[(&str, Scenario)] = &[
    ("an_exported_page_is_imported_and_mapped", an_exported_page_is_imported_and_mapped),
    ("what_is_no_page_is_not_imported", what_is_no_page_is_not_imported),
];

/// A pool of pages of the device's granularity.
pub(crate) fn pool(device: &Device, capacity_pages: u64) -> PagePool {
    PagePool::new(device, PagePoolOptions { page_bytes: None, capacity_pages }).unwrap()
}

/// Addresses of one page.
fn empty(device: &Device, bytes: u64) -> Reservation {
    let options = ReservationOptions { bytes, page_bytes: Some(bytes), peers: Vec::new() };
    Reservation::new(device, options).unwrap()
}

/// One page, mapped at its own addresses.
pub(crate) fn mapped(device: &Device, page: &SharedPage) -> Reservation {
    let space = empty(device, page.bytes());
    space.map(0, page.clone()).unwrap();
    space
}

pub(crate) fn write(space: &Reservation, tag: u64) {
    let span = space.mapped_span(0..1).unwrap();
    let stream = Stream::new(space.device()).unwrap();
    stream.upload(span, &pattern(tag, span.bytes())).unwrap();
    // The other side cannot see the stream.
    stream.synchronize().unwrap();
}

pub(crate) fn holds(space: &Reservation, tag: u64) -> bool {
    let span = space.mapped_span(0..1).unwrap();
    let mut seen = vec![0; span.bytes() as usize];
    Stream::new(space.device()).unwrap().download(&mut seen, span).unwrap();
    seen == pattern(tag, span.bytes())
}

/// Unmaps and drops the mapped page.
#[track_caller]
pub(crate) fn close(space: Reservation) {
    let report = space.close(&[]).wait().unwrap();
    assert!(report.is_clean(), "{:?}", report.errors);
}

fn an_exported_page_is_imported_and_mapped(device: &Device) {
    let pool = pool(device, 1);
    let page = pool.take_exportable().unwrap().share();
    let ours = mapped(device, &page);
    write(&ours, 1);
    let exported = page.export().unwrap();
    assert_eq!((exported.page(), exported.bytes()), (page.id(), page.bytes()));
    assert_eq!(exported.device_uuid(), device.info().uuid);
    let import = import_page(device, &exported, exported.bytes()).unwrap();
    drop(exported);
    assert_ne!(import.id(), page.id());
    let theirs = mapped(device, &import);
    assert!(holds(&theirs, 1));
    write(&theirs, 2);
    assert!(holds(&ours, 2));
    close(ours);
    pool.give_back(page).unwrap();
    assert_eq!(pool.stats().live, 0);
    assert!(holds(&theirs, 2), "bytes were lost with the exporter");
    close(theirs);
}

fn what_is_no_page_is_not_imported(device: &Device) {
    let pool = pool(device, 1);
    let page = pool.take_exportable().unwrap().share();
    let (exported, bytes) = (page.export().unwrap(), page.bytes());
    for wrong in [0, bytes + 4096, 4096] {
        let refused = import_page(device, &exported, wrong).unwrap_err();
        assert_eq!(refused, ImportError::PageBytes { bytes: wrong, granularity: bytes });
    }
    let longer = import_page(device, &exported, 2 * bytes).unwrap();
    let space = empty(device, 2 * bytes);
    let refused = space.map(0, longer).unwrap_err();
    assert!(matches!(refused.reason, MapRefusal::Device { step: MapStep::Map, index: 0, .. }));
    assert_eq!((refused.pages.len(), refused.quarantined), (1, 0));
    drop(refused);
    close(space);
    let file = std::fs::File::open("/dev/null").unwrap();
    let refused = import_page(device, file.as_fd(), bytes).unwrap_err();
    assert!(matches!(refused, ImportError::Device(_)), "{refused:?}");
    assert_eq!(device.poison(), None);
}
