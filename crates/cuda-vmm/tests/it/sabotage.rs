//! With the protection disabled, unmapping at once faults on the device. With the protection it
//! does not.

use crate::common::{Machine, PAGE, machine, machine_of_races, recorded};
use cuda_driver::{DeviceError, ErrorCode, Stream};
use cuda_sim::FindingKind;
use cuda_vmm::sequences::{SequenceSpace, SpaceOptions};
use cuda_vmm::{ElasticPool, Worker};

/// Checks that the race detector reports the missing order, whether or not the schedule shows the
/// harm.
#[track_caller]
fn assert_raced(machine: &Machine, raced: bool) {
    let races = machine.sim.races();
    assert_eq!(!races.is_empty(), raced, "{races:?}");
}

/// Shrinks the pool while a batch still runs on the removed blocks.
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
    let machine = machine_of_races();
    let (pool, stream) = (machine.pool(PAGE, 4, 4), machine.stream());
    pool.sabotage_unmap_at_once();
    shrink_under_a_running_batch(&machine, &pool, &stream);
    assert_eq!(pool.stats().retiring_bytes, 0);
    let error = stream.synchronize().unwrap_err();
    let DeviceError::Driver(error) = error else { panic!("{error:?}") };
    assert_eq!(error.code, ErrorCode::ILLEGAL_ADDRESS);
    assert_eq!(machine.sim.findings()[0].kind, FindingKind::IllegalAccess);
    assert_raced(&machine, true);
    let report = pool.close(&[]).wait().unwrap();
    assert!(report.is_clean(), "{:?}", report.errors);
    drop(stream);
    let Machine { sim, device } = machine;
    drop(device);
    assert!(sim.check_leaks().is_clean(), "{}", sim.check_leaks());
}

#[test]
fn waiting_for_rest_does_not_fault() {
    let machine = machine();
    let (pool, stream) = (machine.pool(PAGE, 4, 4), machine.stream());
    shrink_under_a_running_batch(&machine, &pool, &stream);
    assert_eq!(pool.stats().retiring_bytes, 3 * PAGE);
    stream.synchronize().unwrap();
    assert_eq!(pool.poll_retired().unmapped_pages, 3);
    assert!(pool.close(&[]).wait().unwrap().is_clean());
    drop(stream);
    machine.assert_clean();
}

fn space(machine: &Machine, worker: &Worker, sequences: u64) -> SequenceSpace {
    let options = SpaceOptions {
        sequences,
        planes: 2,
        token_bytes: PAGE / 4,
        tokens_max: 8,
        ..SpaceOptions::default()
    };
    SequenceSpace::new(&machine.pages(16), worker, options).unwrap()
}

/// A sequence ends while its batch still runs, and the next one writes its own bytes.
fn finish_under_a_running_batch(machine: &Machine, space: &SequenceSpace) -> Option<u8> {
    let (old, new) = (machine.stream(), machine.stream());
    let mut sequence = space.admit(4).unwrap();
    sequence.extend_blocking(4).unwrap();
    machine.sim.hold(old.raw());
    old.fill(sequence.plane(0).unwrap().span(0..4).unwrap(), 7).unwrap();
    sequence.finish(&[recorded(&old)]);
    let seen = space.admit(4).ok().map(|mut next| {
        next.extend_blocking(4).unwrap();
        let span = next.plane(0).unwrap().span(0..4).unwrap();
        new.fill(span, 9).unwrap();
        new.synchronize().unwrap();
        machine.sim.release_hold(old.raw());
        old.synchronize().unwrap();
        let mut seen = [0];
        new.download(&mut seen, span.slice(0, 1).unwrap()).unwrap();
        next.finish(&[]);
        seen[0]
    });
    machine.sim.release_hold(old.raw());
    old.synchronize().unwrap();
    seen
}

#[test]
fn adopting_at_once_loses_bytes_and_waiting_for_rest_does_not() {
    for (protected, seen) in [(false, Some(7)), (true, None)] {
        let (machine, worker) = (machine_of_races(), Worker::manual());
        let space = space(&machine, &worker, 1);
        if !protected {
            space.sabotage_rest_at_once();
        }
        assert_eq!(finish_under_a_running_batch(&machine, &space), seen);
        assert_raced(&machine, !protected);
        assert!(space.close(&[]).unwrap().wait().unwrap().is_clean());
    }
}

#[test]
fn trimming_at_once_faults_and_waiting_for_rest_does_not() {
    for protected in [false, true] {
        let (machine, worker, stream) = {
            let machine = machine_of_races();
            let stream = machine.stream();
            (machine, Worker::manual(), stream)
        };
        let space = space(&machine, &worker, 1);
        if !protected {
            space.sabotage_rest_at_once();
        }
        let mut sequence = space.admit(4).unwrap();
        sequence.extend_blocking(4).unwrap();
        machine.sim.hold(stream.raw());
        stream.fill(sequence.plane(0).unwrap().span(0..4).unwrap(), 7).unwrap();
        sequence.finish(&[recorded(&stream)]);
        space.trim(u64::MAX).unwrap();
        machine.sim.release_hold(stream.raw());
        assert_eq!(stream.synchronize().is_ok(), protected);
        let findings = machine.sim.findings();
        let faults = findings.iter().filter(|one| one.kind == FindingKind::IllegalAccess).count();
        assert_eq!(faults, usize::from(!protected), "{findings:?}");
        assert_raced(&machine, !protected);
        assert!(space.close(&[]).unwrap().wait().unwrap().is_clean());
    }
}
