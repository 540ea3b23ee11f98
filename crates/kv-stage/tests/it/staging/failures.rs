//! The state after a refusal, a panic or the loss of a device.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::prelude::*;

use super::{BYTES, rig};

/// Runs `end` after a copy behind a stalled stream; the buffer must be kept for that copy.
fn keeps_the_buffer_when(end: impl FnOnce(&SubmittedView<'_>) -> Result<(), CopyError>) {
    let (machine, pool, target) = rig(1, 1);
    machine.sim.hold(machine.stream.raw());
    let mut buffer = pool.acquire().unwrap();
    buffer.bytes_mut().copy_from_slice(&pattern(1, BYTES));
    let enqueue = |view: &SubmittedView<'_>| {
        view.copy_to_device(target.span(), 0)?;
        end(view)
    };
    let ended = catch_unwind(AssertUnwindSafe(|| buffer.submit(&machine.stream, enqueue)));
    assert!(!matches!(ended, Ok(Ok(()))));
    let refused = pool.acquire().map(drop);
    assert_eq!(refused, Err(AcquireError::Exhausted { live: 1, max: 1 }));
    machine.sim.release_hold(machine.stream.raw());
    let mut next = pool.acquire_wait().unwrap();
    next.bytes_mut().fill(0);
    assert_eq!(machine.read(target.span()), pattern(1, BYTES));
}

#[test]
fn a_failed_closure_keeps_the_buffer_for_what_it_enqueued() {
    // The second copy is longer than the buffer.
    let machine = Machine::new(0);
    let pool = machine.pool(BYTES as u64, 1);
    let long = machine.memory(2 * BYTES as u64);
    let buffer = pool.acquire().unwrap();
    let refused = buffer.submit(&machine.stream, |view| view.copy_to_device(long.span(), 0));
    assert!(matches!(refused, Err(SubmitError::Enqueue(CopyError::OutOfBounds(_)))));

    keeps_the_buffer_when(|view| view.copy_to_device(long.span(), 0));
}

#[test]
fn a_panicking_closure_keeps_the_buffer_for_what_it_enqueued() {
    keeps_the_buffer_when(|_| panic!("a closure that gives up"));
}

#[test]
fn a_buffer_without_an_event_waits_for_its_idle_stream_and_holds_up_none() {
    let (machine, pool, target) = rig(2, 2);
    let submit = || {
        let buffer = pool.acquire().unwrap();
        buffer.submit(&machine.stream, |view| view.copy_to_device(target.span(), 0))
    };
    let exhausted = Err(AcquireError::Exhausted { live: 2, max: 2 });
    machine.sim.hold(machine.stream.raw());
    machine.sim.fail_nth("cuEventRecord", 1, ErrorCode::OUT_OF_MEMORY);
    let refused = submit();
    assert!(matches!(refused, Err(SubmitError::Retire(DeviceError::Driver(_)))), "{refused:?}");
    submit().unwrap();
    // The first question finds the stream busy, and would record an event.
    machine.sim.fail_nth("cuEventCreate", 1, ErrorCode::OUT_OF_MEMORY);
    assert_eq!(pool.acquire().map(drop), exhausted);
    machine.sim.release_hold(machine.stream.raw());
    machine.stream.synchronize().unwrap();
    // Later work keeps the stream busy, and says nothing of the buffer that has an event.
    machine.sim.hold(machine.stream.raw());
    machine.stream.fill(target.span(), 1).unwrap();
    let held = pool.acquire().unwrap();
    assert_eq!(pool.acquire().map(drop), exhausted);
    machine.sim.release_hold(machine.stream.raw());
    drop((pool.acquire_wait().unwrap(), held));
    pool.close().unwrap();
    assert_eq!(machine.sim.pinned_bytes(), 0);
}

#[test]
fn a_buffer_without_an_event_comes_back_from_a_stream_that_always_has_more_work() {
    let (machine, pool, target) = rig(2, 1);
    machine.sim.hold(machine.stream.raw());
    machine.sim.fail_nth("cuEventRecord", 1, ErrorCode::OUT_OF_MEMORY);
    let buffer = pool.acquire().unwrap();
    let refused = buffer.submit(&machine.stream, |view| view.copy_to_device(target.span(), 0));
    assert!(matches!(refused, Err(SubmitError::Retire(_))), "{refused:?}");
    assert!(matches!(pool.acquire(), Err(AcquireError::Exhausted { .. })));
    machine.sim.release_hold(machine.stream.raw());
    machine.stream.synchronize().unwrap();
    machine.sim.hold(machine.stream.raw());
    machine.stream.fill(target.span(), 1).unwrap();
    drop(pool.acquire().unwrap());
    machine.sim.release_hold(machine.stream.raw());
    machine.stream.synchronize().unwrap();
}

#[test]
fn a_second_event_that_cannot_be_had_loses_nothing() {
    let (machine, pool, target) = rig(3, 1);
    let other = cuda_driver::Stream::new(&machine.device).unwrap();
    machine.sim.fail_nth("cuEventCreate", 1, ErrorCode::OUT_OF_MEMORY);
    let buffer = pool.acquire().unwrap();
    let copies = machine.calls("cuMemcpyHtoDAsync");
    let refused =
        buffer.submit(&machine.stream, |view| view.copy_to_device_on(&other, target.span(), 0));
    assert!(matches!(refused, Err(SubmitError::Enqueue(CopyError::Device(_)))), "{refused:?}");
    assert_eq!(machine.calls("cuMemcpyHtoDAsync"), copies);
    drop(pool.acquire_wait().unwrap());
    assert_eq!(pool.live(), 0);
}

#[test]
fn construction_that_fails_at_any_step_gives_everything_back() {
    let calls = [("cuMemHostRegister", 1), ("cuMemHostGetDevicePointer", 1), ("cuEventCreate", 3)];
    for (call, times) in calls {
        for nth in 1..=times {
            let machine = Machine::new(nth);
            let before = machine.sim.check_leaks();
            machine.sim.fail_nth(call, nth, ErrorCode::OUT_OF_MEMORY);
            let options = StagingOptions { buffer_bytes: 4096, buffers_max: 3 };
            let refused = StagingPool::new(&machine.device, options).map(drop);
            let Err(StagingError::Device(error)) = refused else { panic!("{refused:?}") };
            assert!(error.is_out_of_memory(), "{error:?}");
            assert_eq!(machine.sim.check_leaks(), before, "{call} {nth}");
        }
    }
}

#[test]
fn a_lost_device_releases_what_it_held() {
    let (machine, pool, target) = rig(4, 3);
    machine.sim.hold(machine.stream.raw());
    for source in [None, Some(0x10)] {
        let buffer = pool.acquire().unwrap();
        let enqueue = |view: &SubmittedView<'_>| {
            let source = source.unwrap_or(view.address());
            machine.launch_copy(view.stream(), target.span(), source)
        };
        buffer.submit(&machine.stream, enqueue).unwrap();
    }
    let held = pool.acquire().unwrap();
    machine.sim.release_hold(machine.stream.raw());
    assert!(machine.stream.synchronize().is_err());
    let calls = machine.sim.calls();
    let refused = pool.acquire().map(drop);
    let Err(AcquireError::Device(DeviceError::Poisoned { first })) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(first.code, ErrorCode::ILLEGAL_ADDRESS);
    assert_eq!(pool.live(), 1, "the submitted ones are released, the held one is its holder's");
    // A submission on a lost device reports the loss and keeps nothing.
    let refused = held.submit(&machine.stream, |view| view.copy_to_device(target.span(), 0));
    assert!(matches!(refused, Err(SubmitError::Enqueue(CopyError::Device(_)))), "{refused:?}");
    assert!(matches!(pool.acquire_wait().map(drop), Err(AcquireError::Device(_))));
    assert!(matches!(pool.drain(), Err(StagingError::Device(_))));
    assert_eq!(pool.live(), 0);
    assert_eq!(machine.sim.calls(), calls, "a lost device is asked nothing, not even about events");
    // Clean-up ends without further errors.
    pool.close().unwrap();
    assert_eq!(machine.sim.pinned_bytes(), 0);
}

#[test]
fn a_device_lost_while_asking_for_an_event_releases_too() {
    let (machine, pool, target) = rig(5, 2);
    machine.sim.hold(machine.stream.raw());
    for _ in 0..2 {
        let buffer = pool.acquire().unwrap();
        buffer.submit(&machine.stream, |view| view.copy_to_device(target.span(), 0)).unwrap();
    }
    machine.sim.fail_nth("cuEventQuery", 1, ErrorCode::LAUNCH_FAILED);
    assert!(matches!(pool.acquire().map(drop), Err(AcquireError::Device(_))));
    assert_eq!(pool.live(), 0);
}
