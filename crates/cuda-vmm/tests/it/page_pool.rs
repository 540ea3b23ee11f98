//! The pool of pages: limits, reuse, and consistent accounts.

use crate::common::{DEVICE_PAGES, PAGE, machine, take};
use cuda_vmm::pages::{PageError, PagePool, PagePoolOptions, PagePoolStats};

#[track_caller]
fn assert_adds_up(stats: PagePoolStats) {
    assert_eq!(stats.live, stats.idle + stats.in_use, "{stats:?}");
    assert_eq!(stats.created, stats.live + stats.released, "{stats:?}");
    assert!(stats.live <= stats.capacity, "{stats:?}");
}

#[test]
fn pages_are_reused_last_in_first_out_and_dropped_ones_are_counted() {
    let machine = machine();
    let pages = machine.pages(3);
    let mut taken = take(&pages, 3);
    let refused = PageError::Exhausted { asked: 1, in_use: 3, capacity: 3 };
    assert_eq!(pages.take().unwrap_err(), refused);
    let last = taken.pop().unwrap();
    let id = last.id();
    pages.give_back(last).unwrap();
    assert_eq!(pages.take().unwrap().id(), id);
    // The page was dropped here: released, so there is room for another.
    assert_eq!(
        pages.stats(),
        PagePoolStats { capacity: 3, live: 2, idle: 0, in_use: 2, created: 3, released: 1 }
    );
    let another = pages.take().unwrap();
    assert_ne!(another.id(), id);
    assert_eq!(machine.calls("cuMemCreate"), 4);
    drop((another, taken));
    assert_eq!(pages.stats().live, 0);
    drop(pages);
    machine.assert_clean();
}

#[test]
fn preparing_creates_ahead_and_trimming_releases() {
    let machine = machine();
    let pages = machine.pages(6);
    assert_eq!(pages.prepare(4), Ok(4));
    assert_eq!(pages.prepare(2), Ok(4));
    assert_eq!(machine.calls("cuMemCreate"), 4);
    let taken = take(&pages, 5);
    assert_eq!(machine.calls("cuMemCreate"), 5);
    let refused = PageError::Exhausted { asked: 2, in_use: 5, capacity: 6 };
    assert_eq!(pages.prepare(2), Err(refused));
    assert_eq!(pages.stats().idle, 1);
    for page in taken {
        pages.give_back(page).unwrap();
    }
    assert_eq!(pages.trim(2).0, 4);
    assert_adds_up(pages.stats());
    assert_eq!((pages.stats().idle, machine.sim.device_used_bytes(0)), (2, 2 * PAGE));
    drop(pages);
    machine.assert_clean();
}

#[test]
fn the_device_runs_out_before_the_pool_does() {
    let machine = machine();
    let pages = machine.pages(2 * DEVICE_PAGES);
    let error = pages.take_many(DEVICE_PAGES + 1).unwrap_err();
    assert!(matches!(error, PageError::OutOfMemory { page_bytes: PAGE, .. }), "{error:?}");
    // All or none: the memory of the failed call is free again.
    assert_eq!(take(&pages, DEVICE_PAGES).len() as u64, DEVICE_PAGES);
    assert_adds_up(pages.stats());
    drop(pages);
    machine.assert_clean();
}

#[test]
fn a_request_beyond_the_capacity_names_what_is_in_use_and_calls_no_driver() {
    let machine = machine();
    let pages = machine.pages(64);
    let held = pages.take().unwrap();
    assert_eq!(pages.prepare(15), Ok(15));
    let before = (machine.sim.calls(), pages.stats());
    for asked in [64, 2_047, u64::MAX] {
        let refused = PageError::Exhausted { asked, in_use: 1, capacity: 64 };
        assert_eq!(pages.take_many(asked).unwrap_err(), refused);
        assert_eq!((machine.sim.calls(), pages.stats()), before);
    }
    let refused = PageError::Exhausted { asked: 2_047, in_use: 1, capacity: 64 };
    assert_eq!(refused.to_string(), "cannot take 2047 pages: 1 of 64 are in use");
    assert_eq!(take(&pages, 63).len(), 63);
    drop((held, pages));
    machine.assert_clean();
}

#[test]
fn a_page_of_another_pool_comes_back() {
    let machine = machine();
    let (ours, theirs) = (machine.pages(1), machine.pages(1));
    let error = ours.give_back(theirs.take().unwrap()).unwrap_err();
    assert_eq!((ours.stats().idle, theirs.stats().in_use), (0, 1));
    theirs.give_back(error.page).unwrap();
    assert_eq!(theirs.stats().idle, 1);
    for page_bytes in [0, PAGE + 1, PAGE / 2] {
        let options = PagePoolOptions { page_bytes: Some(page_bytes), capacity_pages: 1 };
        let refused = PageError::PageBytes { page_bytes, granularity: PAGE };
        assert_eq!(PagePool::new(&machine.device, options).map(drop), Err(refused));
    }
    drop((ours, theirs));
    machine.assert_clean();
}
