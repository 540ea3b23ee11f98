//! Mapping: once, completely, by one thread at a time, with the right access.

use std::sync::Barrier;

use crate::common::{PAGE, close_into, machine, machine_with, pattern, recorded, take};
use cuda_driver::{Device, Stream};
use cuda_vmm::SpaceError;
use cuda_vmm::pages::{MapRefusal, NotMapped, Page, PageState, Reservation, ReservationOptions};

#[test]
fn the_same_page_twice_does_nothing() {
    let machine = machine();
    let (pages, space) = (machine.pages(4), machine.reservation(8));
    let page = pages.take().unwrap();
    let (held, shared) = (page.id(), page.share());
    assert_eq!(space.map_range(3, [shared.clone()]).unwrap(), 1);
    assert_eq!(space.map_range(3, [shared.clone()]).unwrap(), 0);
    assert_eq!(space.map_range(3, [shared.clone()]).unwrap(), 0);
    assert_eq!(machine.calls("cuMemMap"), 1);
    assert_eq!(machine.calls("cuMemSetAccess"), 1);
    assert_eq!(space.page_state(3), PageState::Mapped(held));

    // The call without effect kept no reference: one clone is here, one in the reservation.
    let retired = space.retire(3..4, &[]).unwrap().try_complete().unwrap();
    drop(retired);
    assert_eq!(Page::from(shared).into_owned().map(|page| page.id()), Some(held));
    close_into(space, &pages);
    drop(pages);
    machine.assert_clean();
}

#[test]
fn another_page_is_refused_and_comes_back() {
    let machine = machine();
    let (pages, space) = (machine.pages(4), machine.reservation(8));
    let (first, second) = (pages.take().unwrap(), pages.take().unwrap());
    let (held, offered) = (first.id(), second.id());
    space.map_range(5, [first]).unwrap();
    let mut error = space.map_range(5, [second]).unwrap_err();
    assert_eq!(error.reason, MapRefusal::Occupied { index: 5, held });
    assert_eq!(error.pages.iter().map(Page::id).collect::<Vec<_>>(), [offered]);
    assert_eq!(machine.calls("cuMemMap"), 1);
    assert_eq!(space.page_state(5), PageState::Mapped(held));
    pages.give_back(error.pages.pop().unwrap()).unwrap();
    assert_eq!(pages.stats().idle, 1);
    close_into(space, &pages);
    drop(pages);
    machine.assert_clean();
}

#[test]
fn a_range_with_one_occupied_page_maps_nothing() {
    let machine = machine();
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    space.map_range(2, [pages.take().unwrap()]).unwrap();
    let error = space.map_range(0, take(&pages, 4)).unwrap_err();
    assert!(matches!(error.reason, MapRefusal::Occupied { index: 2, .. }));
    assert_eq!((error.pages.len(), error.quarantined), (4, 0));
    assert_eq!(machine.calls("cuMemMap"), 1);
    assert_eq!(space.stats().mapped_bytes, PAGE);
    drop(error);
    assert_eq!(pages.stats().live, 1);
    close_into(space, &pages);
    drop(pages);
    machine.assert_clean();
}

#[test]
fn a_range_is_completed_around_pages_that_lie_there_already() {
    let machine = machine();
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    let shared: Vec<_> = take(&pages, 5).into_iter().map(|page| page.share()).collect();
    space.map_range(1, [shared[1].clone()]).unwrap();
    space.map_range(3, [shared[3].clone()]).unwrap();
    assert_eq!(space.map_range(0, shared.iter().cloned()).unwrap(), 3);
    assert_eq!(machine.calls("cuMemMap"), 5);
    // One call for each of the two earlier mappings, and one for each run of the three later ones.
    assert_eq!(machine.calls("cuMemSetAccess"), 5);
    assert_eq!(space.mapped_span(0..5).unwrap().bytes(), 5 * PAGE);
    drop(shared);
    close_into(space, &pages);
    drop(pages);
    machine.assert_clean();
}

#[test]
fn one_page_under_several_addresses_shows_the_same_bytes() {
    let machine = machine();
    let (pages, space) = (machine.pages(1), machine.reservation(8));
    let shared = pages.take().unwrap().share();
    space.map_range(2, [shared.clone(), shared.clone()]).unwrap();
    space.map_range(7, [shared]).unwrap();
    let stream = machine.stream();
    let bytes = pattern(1, PAGE);
    stream.upload(space.mapped_span(2..3).unwrap(), &bytes).unwrap();
    for index in [3, 7] {
        let mut seen = vec![0; PAGE as usize];
        stream.download(&mut seen, space.mapped_span(index..index + 1).unwrap()).unwrap();
        assert!(seen == bytes, "page {index} shows other bytes");
    }
    close_into(space, &pages);
    // The last of the three holders made the page idle.
    assert_eq!((pages.stats().idle, pages.stats().in_use), (1, 0));
    drop((pages, stream));
    machine.assert_clean();
}

#[test]
fn pages_that_do_not_fit_are_refused_before_any_call() {
    let machine = machine_with(2, 0);
    let (pages, space) = (machine.pages(4), machine.reservation(8));
    let refuse = |first, page: Page| space.map_range(first, [page]).unwrap_err().reason;

    let page = pages.take().unwrap();
    assert_eq!(refuse(8, page.into()), MapRefusal::OutOfRange { first: 8, count: 1, capacity: 8 });
    let page = pages.take().unwrap();
    assert_eq!(
        refuse(u64::MAX, page.into()),
        MapRefusal::OutOfRange { first: u64::MAX, count: 1, capacity: 8 }
    );
    let options =
        cuda_vmm::pages::PagePoolOptions { page_bytes: Some(2 * PAGE), capacity_pages: 1 };
    let large = cuda_vmm::pages::PagePool::new(&machine.device, options).unwrap().take().unwrap();
    let page = large.id();
    assert_eq!(
        refuse(0, large.into()),
        MapRefusal::PageBytes { page, bytes: 2 * PAGE, page_bytes: PAGE }
    );
    let other = Device::open(machine.device.driver().clone(), 1).unwrap();
    let options = cuda_vmm::pages::PagePoolOptions { page_bytes: None, capacity_pages: 1 };
    let foreign = cuda_vmm::pages::PagePool::new(&other, options).unwrap().take().unwrap();
    let page = foreign.id();
    assert_eq!(refuse(0, foreign.into()), MapRefusal::ForeignDevice { page });
    assert_eq!(machine.calls("cuMemMap"), 0);
    assert_eq!(space.map_range(8, Vec::<Page>::new()).unwrap(), 0);
    drop((space, pages, other));
    machine.assert_clean();
}

#[test]
fn threads_that_map_the_same_indices_map_each_once() {
    const THREADS: usize = 8;
    const INDICES: u64 = 40;
    for seed in 0..20 {
        let machine = machine_with(1, seed);
        let (pages, space) =
            (machine.pages(INDICES + THREADS as u64), machine.reservation(INDICES));
        let start = Barrier::new(THREADS);
        let won: u64 = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..THREADS)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        let mut won = 0;
                        for index in 0..INDICES {
                            match space.map_range(index, [pages.take().unwrap()]) {
                                Ok(mapped) => {
                                    assert_eq!(mapped, 1);
                                    won += 1;
                                }
                                Err(error) => {
                                    assert!(matches!(error.reason, MapRefusal::Occupied { .. }));
                                    for page in error.pages {
                                        pages.give_back(page).unwrap();
                                    }
                                }
                            }
                            // Whether this thread won or lost, the page can be used now.
                            assert!(space.mapped_span(index..index + 1).is_ok());
                        }
                        won
                    })
                })
                .collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).sum()
        });
        assert_eq!(won, INDICES);
        assert_eq!(machine.calls("cuMemMap"), INDICES);
        assert_eq!(machine.calls("cuMemSetAccess"), INDICES);
        assert_eq!(pages.stats().in_use, INDICES);
        close_into(space, &pages);
        assert_eq!(pages.stats().idle, pages.stats().live);
        drop(pages);
        machine.assert_clean();
    }
}

#[test]
fn owner_and_named_peers_get_access_and_nobody_else() {
    for (peers, expected) in [(vec![1], true), (vec![], false)] {
        let machine = machine_with(3, 0);
        let pages = machine.pages(1);
        let options = ReservationOptions { bytes: PAGE, page_bytes: None, peers };
        let space = Reservation::new(&machine.device, options).unwrap();
        space.map_range(0, [pages.take().unwrap()]).unwrap();
        let span = space.mapped_span(0..1).unwrap();
        let bytes = pattern(7, PAGE);
        machine.stream().upload(span, &bytes).unwrap();

        let peer = Device::open(machine.device.driver().clone(), 1).unwrap();
        let mut seen = vec![0; PAGE as usize];
        let read = Stream::new(&peer).unwrap().download(&mut seen, span);
        assert_eq!(read.is_ok(), expected, "{read:?}");
        assert_eq!(seen == bytes, expected);
        let report = space.close(&[recorded(&machine.stream())]).wait().unwrap();
        assert!(report.is_clean(), "{:?}", report.errors);
    }
}

#[test]
fn access_lists_are_checked_before_anything_is_reserved() {
    let machine = machine_with(2, 0);
    let reserve = |bytes, page_bytes, peers: &[i32]| {
        let options = ReservationOptions { bytes, page_bytes, peers: peers.to_vec() };
        Reservation::new(&machine.device, options).map(drop)
    };
    assert_eq!(reserve(PAGE, None, &[0]), Err(SpaceError::PeerTwice { peer: 0 }));
    assert_eq!(reserve(PAGE, None, &[1, 1]), Err(SpaceError::PeerTwice { peer: 1 }));
    assert!(matches!(reserve(PAGE, None, &[7]), Err(SpaceError::Device(_))));
    let page_bytes = PAGE / 2;
    assert_eq!(
        reserve(PAGE, Some(page_bytes), &[]),
        Err(SpaceError::PageBytes { page_bytes, granularity: PAGE })
    );
    for bytes in [0, PAGE + 1] {
        let refused = SpaceError::Misaligned { bytes, page_bytes: PAGE };
        assert_eq!(reserve(bytes, None, &[]), Err(refused));
    }
    assert_eq!(machine.calls("cuMemAddressReserve"), 0);
    machine.assert_clean();
}

#[test]
fn a_span_over_a_hole_is_refused() {
    let machine = machine();
    let (pages, space) = (machine.pages(4), machine.reservation(8));
    space.map_range(0, take(&pages, 2)).unwrap();
    assert_eq!(space.mapped_span(0..3), Err(NotMapped { index: 2 }));
    assert_eq!(space.mapped_span(7..u64::MAX), Err(NotMapped { index: 7 }));
    assert_eq!(space.retire(1..9, &[]).map(drop), Err(NotMapped { index: 2 }.into()));
    assert_eq!(space.stats().mapped_bytes, 2 * PAGE);
    close_into(space, &pages);
    drop(pages);
    machine.assert_clean();
}

#[test]
fn an_empty_range_has_an_empty_span_however_it_is_written() {
    let machine = machine();
    let (pages, space) = (machine.pages(8), machine.reservation(8));
    space.map_range(0, take(&pages, 8)).unwrap();
    #[expect(clippy::reversed_empty_ranges, reason = "what is tested")]
    for range in [5..3, 0..0, 8..8, u64::MAX..0, u64::MAX..u64::MAX] {
        assert_eq!(space.mapped_span(range.clone()).map(|span| span.bytes()), Ok(0), "{range:?}");
        let retired = space.retire(range, &[]).unwrap();
        assert_eq!(retired.wait().unwrap().pages.len(), 0);
    }
    close_into(space, &pages);
    drop(pages);
    machine.assert_clean();
}
