//! Dropping without closing never waits and never faults. It leaks only where rest is not proved.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "it/common/mod.rs"]
mod common;

use common::{PAGE, machine, recorded, take};
use cuda_vmm::leaked_bytes;

// A single test, because the count of leaked bytes is global to the process.
#[test]
fn dropping_unmaps_what_is_provably_at_rest_and_leaks_the_rest() {
    never_used_is_unmapped();
    closed_leases_prove_rest();
    retired_pages_at_rest_are_unmapped();
    assert_eq!(leaked_bytes(), 0);
    used_without_a_lease_is_leaked();
    assert_eq!(leaked_bytes(), PAGE);
    a_pending_batch_does_not_fault();
    assert_eq!(leaked_bytes(), 3 * PAGE);
    an_open_lease_leaks();
    assert_eq!(leaked_bytes(), 7 * PAGE);
    a_dropped_lease_leaks_and_does_not_fault();
    assert_eq!(leaked_bytes(), 9 * PAGE);
}

fn never_used_is_unmapped() {
    let machine = machine();
    let (pages, space) = (machine.pages(4), machine.reservation(4));
    let lease = space.gate().lease();
    space.map_range(0, take(&pages, 3)).unwrap();
    drop(space.retire(0..1, &[]).unwrap());
    // No address ever left the reservation, so even an open lease cannot have used one.
    drop(space);
    drop((lease, pages));
    drop(machine.pool(PAGE, 4, 4));
    machine.assert_clean();
}

fn closed_leases_prove_rest() {
    let machine = machine();
    let pool = machine.pool(PAGE, 4, 4);
    let stream = machine.stream();
    let lease = pool.gate().lease();
    stream.fill(pool.block_span(3).unwrap(), 1).unwrap();
    lease.submitted(&[recorded(&stream)]).unwrap();
    stream.synchronize().unwrap();
    drop((pool, stream));
    machine.assert_clean();
}

fn retired_pages_at_rest_are_unmapped() {
    let machine = machine();
    let (pages, space) = (machine.pages(4), machine.reservation(4));
    let stream = machine.stream();
    space.map_range(0, take(&pages, 3)).unwrap();
    stream.fill(space.mapped_span(0..3).unwrap(), 1).unwrap();
    let retiring = space.retire(0..3, &[recorded(&stream)]).unwrap();
    stream.synchronize().unwrap();
    drop((space, retiring, pages, stream));
    machine.assert_clean();
}

fn used_without_a_lease_is_leaked() {
    let machine = machine();
    let (pages, space) = (machine.pages(4), machine.reservation(4));
    space.map_range(0, take(&pages, 3)).unwrap();
    assert_eq!(space.span().bytes(), 4 * PAGE);
    let stream = machine.stream();
    drop(space.retire(0..2, &[recorded(&stream)]).unwrap());
    stream.synchronize().unwrap();
    drop((space, stream));
    // Two pages were proved to be at rest, one was not.
    assert_eq!(machine.calls("cuMemUnmap"), 2);
    assert_eq!((pages.stats().live, pages.stats().in_use), (1, 1));
    let left = machine.sim.check_leaks();
    assert_eq!((left.mappings, left.physical_handles, left.reservations), (1, 1, 1));
}

fn a_pending_batch_does_not_fault() {
    let machine = machine();
    let pool = machine.pool(PAGE, 2, 2);
    let stream = machine.stream();
    machine.sim.hold(stream.raw());
    let lease = pool.gate().lease();
    stream.fill(pool.block_span(1).unwrap(), 1).unwrap();
    lease.submitted(&[recorded(&stream)]).unwrap();
    drop(pool);
    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    assert!(machine.sim.findings().is_empty(), "{:?}", machine.sim.findings());
}

fn an_open_lease_leaks() {
    let machine = machine();
    let pool = machine.pool(PAGE, 4, 4);
    let gate = pool.gate().clone();
    let lease = gate.lease();
    assert_eq!(pool.span().bytes(), 4 * PAGE);
    drop(pool);
    assert_eq!(machine.calls("cuMemUnmap"), 0);
    drop(lease);
}

fn a_dropped_lease_leaks_and_does_not_fault() {
    let machine = machine();
    let pool = machine.pool(PAGE, 2, 2);
    let stream = machine.stream();
    machine.sim.hold(stream.raw());
    let lease = pool.gate().lease();
    stream.fill(pool.block_span(1).unwrap(), 1).unwrap();
    drop((lease, pool));
    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    assert!(machine.sim.findings().is_empty(), "{:?}", machine.sim.findings());
}
