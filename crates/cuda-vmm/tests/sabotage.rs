//! The protection taken out: unmapping at once faults on the device, waiting for rest does not.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(debug_assertions)]

mod common;

use common::{Machine, PAGE, machine, recorded};
use cuda_driver::{DeviceError, ErrorCode, Stream};
use cuda_sim::FindingKind;
use cuda_vmm::ElasticPool;

/// A batch still runs on blocks that the pool shrinks away.
fn shrink_under_a_running_batch(machine: &Machine, pool: &ElasticPool, stream: &Stream) {
    machine.sim.hold(stream.raw());
    stream.fill(pool.block_span(3).unwrap(), 7).unwrap();
    let shrink = pool.shrink_to(1, &[recorded(stream)]).unwrap();
    assert_eq!(shrink.retiring_pages, 3);
    pool.poll_retired();
    machine.sim.release_hold(stream.raw());
}

#[test]
fn unmapping_at_once_faults() {
    let machine = machine();
    let (pool, stream) = (machine.pool(PAGE, 4, 4), machine.stream());
    pool.sabotage_unmap_at_once();
    shrink_under_a_running_batch(&machine, &pool, &stream);
    assert_eq!(pool.stats().retiring_bytes, 0);
    let error = stream.synchronize().unwrap_err();
    let DeviceError::Driver(error) = error else { panic!("{error:?}") };
    assert_eq!(error.code, ErrorCode::ILLEGAL_ADDRESS);
    assert_eq!(machine.sim.findings()[0].kind, FindingKind::IllegalAccess);
    let report = pool.close(&[]).try_complete().unwrap();
    assert!(report.is_clean(), "{:?}", report.errors);
    drop(stream);
    machine.assert_no_leak();
}

#[test]
fn waiting_for_rest_does_not_fault() {
    let machine = machine();
    let (pool, stream) = (machine.pool(PAGE, 4, 4), machine.stream());
    shrink_under_a_running_batch(&machine, &pool, &stream);
    assert_eq!(pool.stats().retiring_bytes, 3 * PAGE);
    stream.synchronize().unwrap();
    assert_eq!(pool.poll_retired().unmapped_pages, 3);
    assert!(machine.sim.findings().is_empty(), "{:?}", machine.sim.findings());
    assert!(pool.close(&[]).try_complete().unwrap().is_clean());
    drop(stream);
    machine.assert_no_leak();
}
