//! Reservations, physical memory, and mappings.

use cuda_driver::{AccessDesc, AllocationProp, ErrorCode, Granularity};

use super::{Case, Needs, Subject, cases, refused};
use crate::common::pattern;

pub(crate) const RESERVATIONS: &[Case] = cases![Needs::Device;
    the_granularity_is_a_power_of_two_that_divides_the_recommended,
    addresses_are_reserved_and_freed,
    reservations_are_aligned_to_the_granularity,
    a_larger_alignment_is_kept,
    impossible_sizes_and_alignments_are_not_reserved,
    reservations_do_not_overlap,
    a_hint_in_use_is_passed_over,
    a_whole_reservation_is_freed_once_and_unmapped,
];

pub(crate) const HANDLES: &[Case] = cases![Needs::Device;
    physical_memory_is_created_and_released,
    impossible_memory_is_not_created,
    a_handle_of_zero_is_not_released,
    a_handle_may_be_released_while_mapped,
    released_memory_is_given_back_after_the_unmap,
];

pub(crate) const MAPPINGS: &[Case] = cases![Needs::Device;
    mapped_memory_keeps_bytes,
    bytes_stay_when_memory_is_mapped_elsewhere,
    one_handle_is_mapped_at_two_places,
    a_page_is_not_mapped_twice,
    a_mapping_does_not_overlap_another,
    only_a_whole_handle_is_mapped_at_reserved_pages,
    access_is_given_twice,
    access_to_a_hole_is_refused,
    access_over_two_mappings_is_given,
    access_is_of_somebody_to_a_whole_mapping,
    a_range_is_unmapped_whether_it_was_mapped_or_not,
    a_range_mapped_in_part_is_unmapped,
    a_part_of_a_mapping_is_not_unmapped,
    two_mappings_are_unmapped_at_once,
    no_bytes_and_addresses_never_reserved_are_not_unmapped,
    a_page_is_mapped_again_after_an_unmap,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    an_odd_hint_is_refused,
    a_remapped_page_needs_access_again,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("the driver follows such a handle, or lets such a range through");
    a_handle_is_released_once_and_used_no_more,
    a_mapping_ends_within_its_reservation,
    an_odd_range_or_one_beyond_its_reservation_is_not_unmapped,
];

const INVALID: ErrorCode = ErrorCode::INVALID_VALUE;

fn the_granularity_is_a_power_of_two_that_divides_the_recommended(on: &Subject) {
    let bound = on.bind();
    let page = bound.page();
    assert!(page >= 4096 && page.is_power_of_two(), "{page}");
    let recommended =
        bound.mem_get_allocation_granularity(bound.prop(), Granularity::Recommended).unwrap();
    assert_eq!((recommended > 0, recommended % page), (true, 0));
}

fn addresses_are_reserved_and_freed(on: &Subject) {
    let bound = on.bind();
    let base = bound.mem_address_reserve(3 * bound.page(), 0, 0).unwrap();
    assert_ne!(base, 0);
    assert_eq!(bound.mem_address_free(base, 3 * bound.page()), Ok(()));
}

fn reservations_are_aligned_to_the_granularity(on: &Subject) {
    let bound = on.bind();
    for pages in 1..5 {
        assert_eq!(bound.range(pages).base % bound.page(), 0);
    }
}

fn a_larger_alignment_is_kept(on: &Subject) {
    let bound = on.bind();
    for alignment in [bound.page(), 64 << 20, 1 << 30] {
        let base = bound.mem_address_reserve(bound.page(), alignment, 0).unwrap();
        assert_eq!(base % alignment, 0, "{alignment}");
        bound.mem_address_free(base, bound.page()).unwrap();
    }
}

fn impossible_sizes_and_alignments_are_not_reserved(on: &Subject) {
    let bound = on.bind();
    let page = bound.page();
    for (bytes, alignment) in [(page, 3 * page), (0, 0), (page + 4096, 0)] {
        refused(bound.mem_address_reserve(bytes, alignment, 0), INVALID);
    }
    refused(bound.mem_address_reserve(1 << 56, 0, 0), ErrorCode::OUT_OF_MEMORY);
}

fn reservations_do_not_overlap(on: &Subject) {
    let bound = on.bind();
    let mut all: Vec<_> = (1..10).map(|pages| bound.range(pages)).collect();
    all.sort_unstable_by_key(|range| range.base);
    assert!(all.windows(2).all(|pair| pair[0].base + pair[0].bytes <= pair[1].base));
}

fn a_hint_in_use_is_passed_over(on: &Subject) {
    let bound = on.bind();
    let (range, page) = (bound.range(2), bound.page());
    let other = bound.mem_address_reserve(2 * page, 0, range.base).unwrap();
    assert!(other + 2 * page <= range.base || range.base + 2 * page <= other);
    bound.mem_address_free(other, 2 * page).unwrap();
}

fn an_odd_hint_is_refused(on: &Subject) {
    let bound = on.bind();
    refused(bound.mem_address_reserve(bound.page(), 0, (1 << 45) + 12_345), INVALID);
}

fn a_whole_reservation_is_freed_once_and_unmapped(on: &Subject) {
    let bound = on.bind();
    let page = bound.page();
    let base = bound.mem_address_reserve(page, 0, 0).unwrap();
    bound.mem_address_free(base, page).unwrap();
    refused(bound.mem_address_free(base, page), INVALID);
    let (range, handle) = (bound.range(2), bound.physical(1));
    for (base, bytes) in
        [(range.base, page), (range.at(1), page), (range.base, 3 * page), (range.base, 0)]
    {
        refused(bound.mem_address_free(base, bytes), INVALID);
    }
    refused(bound.mem_address_free(page, page), INVALID);
    range.map(1, 1, *handle).unwrap();
    refused(bound.mem_address_free(range.base, range.bytes), INVALID);
}

fn physical_memory_is_created_and_released(on: &Subject) {
    let bound = on.bind();
    let handle = bound.mem_create(bound.page(), bound.prop()).unwrap();
    assert_eq!(bound.mem_release(handle), Ok(()));
}

fn impossible_memory_is_not_created(on: &Subject) {
    let bound = on.bind();
    for bytes in [0, bound.page() + 4096] {
        refused(bound.mem_create(bytes, bound.prop()), INVALID);
    }
    refused(bound.mem_create(1 << 45, bound.prop()), ErrorCode::OUT_OF_MEMORY);
    for device in [99, -1] {
        let prop = AllocationProp::on(device);
        refused(bound.mem_create(bound.page(), prop), ErrorCode::INVALID_DEVICE);
    }
}

fn a_handle_of_zero_is_not_released(on: &Subject) {
    refused(on.bind().mem_release(0), INVALID);
}

fn a_handle_is_released_once_and_used_no_more(on: &Subject) {
    let bound = on.bind();
    refused(bound.mem_release(0x0BAD_BAD0), INVALID);
    let handle = bound.mem_create(bound.page(), bound.prop()).unwrap();
    bound.mem_release(handle).unwrap();
    refused(bound.mem_release(handle), INVALID);
    refused(bound.range(1).map(0, 1, handle), INVALID);
}

fn a_handle_may_be_released_while_mapped(on: &Subject) {
    let bound = on.bind();
    let range = bound.range(1);
    let handle = bound.physical(1);
    range.map_usable(0, 1, *handle);
    bound.write(range.base, &pattern(1, 500));
    drop(handle);
    assert!(bound.read(range.base, 500) == pattern(1, 500));
}

fn released_memory_is_given_back_after_the_unmap(on: &Subject) {
    let bound = on.bind();
    let range = bound.range(16);
    let handle = bound.physical(16);
    range.map(0, 16, *handle).unwrap();
    drop(handle);
    let (during, _) = bound.mem_get_info().unwrap();
    range.unmap(0, 16).unwrap();
    let (after, _) = bound.mem_get_info().unwrap();
    assert!(after >= during + 16 * bound.page(), "{during} {after}");
}

fn mapped_memory_keeps_bytes(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(1), bound.physical(1));
    range.map_usable(0, 1, *handle);
    bound.write(range.base + 77, &pattern(2, 3000));
    assert!(bound.read(range.base + 77, 3000) == pattern(2, 3000));
}

fn bytes_stay_when_memory_is_mapped_elsewhere(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(2), bound.physical(1));
    range.map_usable(0, 1, *handle);
    bound.write(range.base, &pattern(3, 300));
    range.unmap(0, 1).unwrap();
    range.map_usable(1, 1, *handle);
    assert!(bound.read(range.at(1), 300) == pattern(3, 300));
}

fn one_handle_is_mapped_at_two_places(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(2), bound.physical(1));
    range.map_usable(0, 1, *handle);
    range.map_usable(1, 1, *handle);
    bound.write(range.base, &pattern(4, 300));
    assert!(bound.read(range.at(1), 300) == pattern(4, 300));
}

fn a_page_is_not_mapped_twice(on: &Subject) {
    let bound = on.bind();
    let (range, handle, other) = (bound.range(1), bound.physical(1), bound.physical(1));
    range.map(0, 1, *handle).unwrap();
    for again in [*handle, *other] {
        refused(range.map(0, 1, again), INVALID);
    }
}

fn a_mapping_does_not_overlap_another(on: &Subject) {
    let bound = on.bind();
    let (range, handle, other) = (bound.range(4), bound.physical(1), bound.physical(2));
    range.map(1, 1, *handle).unwrap();
    refused(range.map(0, 2, *other), INVALID);
    refused(range.map(1, 2, *other), INVALID);
    assert_eq!(range.map(2, 2, *other), Ok(()));
}

fn only_a_whole_handle_is_mapped_at_reserved_pages(on: &Subject) {
    let bound = on.bind();
    let (range, one, two) = (bound.range(2), bound.physical(1), bound.physical(2));
    let (base, page) = (range.base, range.page);
    for (address, bytes, handle) in
        [(base + 4096, page, *one), (base, 0, *one), (page, page, *one), (base, page, 0)]
    {
        refused(bound.mem_map(address, bytes, 0, handle), INVALID);
    }
    // A part of a handle, with an odd size or behind an offset, and more than a handle.
    for (bytes, offset, handle) in
        [(page + 4096, 0, *two), (page, 0, *two), (page, page, *two), (2 * page, 0, *one)]
    {
        refused(bound.mem_map(base, bytes, offset, handle), ErrorCode::NOT_SUPPORTED);
    }
}

fn a_mapping_ends_within_its_reservation(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(2), bound.physical(2));
    refused(range.map(1, 2, *handle), INVALID);
    refused(range.map(2, 2, *handle), INVALID);
}

fn access_is_given_twice(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(1), bound.physical(1));
    range.map_usable(0, 1, *handle);
    assert_eq!(range.give_access(0, 1), Ok(()));
}

fn access_to_a_hole_is_refused(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(3), bound.physical(1));
    refused(range.give_access(0, 1), INVALID);
    range.map(1, 1, *handle).unwrap();
    refused(range.give_access(0, 2), INVALID);
    refused(range.give_access(1, 2), INVALID);
}

fn access_over_two_mappings_is_given(on: &Subject) {
    let bound = on.bind();
    let (range, handles) = (bound.range(2), [bound.physical(1), bound.physical(1)]);
    range.map(0, 1, *handles[0]).unwrap();
    range.map(1, 1, *handles[1]).unwrap();
    assert_eq!(range.give_access(0, 2), Ok(()));
    bound.write(range.at(1) - 5, &[1; 10]);
}

fn access_is_of_somebody_to_a_whole_mapping(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(2), bound.physical(2));
    let (base, page) = (range.base, range.page);
    range.map(0, 2, *handle).unwrap();
    for (address, bytes) in
        [(base, page), (base + page, page), (base + 4096, page), (base, 0), (page, page)]
    {
        refused(bound.mem_set_access(address, bytes, &bound.access()), INVALID);
    }
    refused(bound.mem_set_access(base, range.bytes, &[]), INVALID);
    for device in [99, -1] {
        let access = [AccessDesc { device }];
        refused(bound.mem_set_access(base, range.bytes, &access), INVALID);
    }
}

fn a_range_is_unmapped_whether_it_was_mapped_or_not(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(2), bound.physical(1));
    assert_eq!(range.unmap(0, 2), Ok(()));
    range.map(0, 1, *handle).unwrap();
    assert_eq!([range.unmap(0, 1), range.unmap(0, 1)], [Ok(()), Ok(())]);
}

fn a_range_mapped_in_part_is_unmapped(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(3), bound.physical(1));
    range.map_usable(1, 1, *handle);
    assert_eq!(range.unmap(0, 3), Ok(()));
    refused(bound.memset_d8_async(range.at(1), 0, 64, 0), INVALID);
}

fn a_part_of_a_mapping_is_not_unmapped(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(2), bound.physical(2));
    range.map_usable(0, 2, *handle);
    for half in [0, 1] {
        refused(range.unmap(half, 1), INVALID);
        assert_eq!(bound.memset_d8_async(range.base, 0, range.bytes, 0), Ok(()));
    }
}

fn two_mappings_are_unmapped_at_once(on: &Subject) {
    let bound = on.bind();
    let (range, handles) = (bound.range(2), [bound.physical(1), bound.physical(1)]);
    range.map(0, 1, *handles[0]).unwrap();
    range.map(1, 1, *handles[1]).unwrap();
    assert_eq!(range.unmap(0, 2), Ok(()));
    assert_eq!(range.map(1, 1, *handles[0]), Ok(()));
}

fn no_bytes_and_addresses_never_reserved_are_not_unmapped(on: &Subject) {
    let bound = on.bind();
    refused(bound.mem_unmap(bound.page(), bound.page()), INVALID);
    refused(bound.mem_unmap(bound.range(1).base, 0), INVALID);
}

fn an_odd_range_or_one_beyond_its_reservation_is_not_unmapped(on: &Subject) {
    let bound = on.bind();
    let range = bound.range(2);
    refused(range.unmap(0, 3), INVALID);
    refused(bound.mem_unmap(range.base + 4096, range.page), INVALID);
    refused(bound.mem_unmap(range.base, range.page + 4096), INVALID);
}

fn a_page_is_mapped_again_after_an_unmap(on: &Subject) {
    let bound = on.bind();
    let (range, handle, other) = (bound.range(1), bound.physical(1), bound.physical(1));
    range.map_usable(0, 1, *handle);
    range.unmap(0, 1).unwrap();
    range.map_usable(0, 1, *other);
    bound.write(range.base, &[1; 64]);
}

/// Access belongs to the mapping, not to the addresses.
fn a_remapped_page_needs_access_again(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(1), bound.physical(1));
    range.map_usable(0, 1, *handle);
    bound.write(range.base, &[1; 64]);
    range.unmap(0, 1).unwrap();
    range.map(0, 1, *handle).unwrap();
    refused(bound.memset_d8_async(range.base, 0, 64, 0), INVALID);
}
