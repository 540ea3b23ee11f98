//! When buffers are returned to the pool, and what does not delay them.

use cuda_driver::PinnedSpan;

use crate::prelude::*;

use super::{BYTES, rig};

/// A buffer filled with the pattern of `number`.
fn filled(pool: &StagingPool, number: u64) -> StagingBuffer {
    let mut buffer = pool.acquire().unwrap();
    buffer.bytes_mut().copy_from_slice(&pattern(number, BYTES));
    buffer
}

/// Sends such a buffer to device memory.
fn send(machine: &Machine, pool: &StagingPool, number: u64, target: &DeviceBuffer) {
    let copy = |view: &SubmittedView<'_>| view.copy_to_device(target.span(), 0);
    filled(pool, number).submit(&machine.stream, copy).unwrap();
}

#[test]
fn exhaustion_is_an_outcome_and_nothing_is_lost() {
    let machine = Machine::new(1);
    let pool = machine.pool(BYTES as u64, 2);
    let targets = [machine.memory(BYTES as u64), machine.memory(BYTES as u64)];
    machine.sim.hold(machine.stream.raw());
    for (number, target) in targets.iter().enumerate() {
        send(&machine, &pool, number as u64, target);
    }
    for _ in 0..10 {
        let refused = pool.acquire().map(drop);
        assert_eq!(refused, Err(AcquireError::Exhausted { live: 2, max: 2 }));
    }
    machine.sim.release_hold(machine.stream.raw());
    // Waits only for the oldest reader.
    let held = [pool.acquire_wait().unwrap(), pool.acquire_wait().unwrap()];
    assert_eq!(pool.live(), 2);
    // The caller holds all buffers, so waiting would never end.
    let refused = pool.acquire_wait().map(drop);
    assert_eq!(refused, Err(AcquireError::Exhausted { live: 2, max: 2 }));
    drop(held);
    assert_eq!((pool.live(), pool.peak_live()), (0, 2));
    assert_eq!(machine.read(targets[0].span()), pattern(0, BYTES));
    assert_eq!(machine.read(targets[1].span()), pattern(1, BYTES));
}

#[test]
fn a_call_asks_about_no_more_buffers_than_it_needs() {
    let (machine, pool, target) = rig(1, 8);
    for number in 0..8 {
        send(&machine, &pool, number, &target);
    }
    machine.stream.synchronize().unwrap();
    let mut held = Vec::new();
    for taken in 1..=8 {
        held.push(pool.acquire().unwrap());
        assert_eq!((machine.calls("cuEventQuery"), pool.live()), (taken, 8));
    }
    assert!(pool.acquire().is_err());
    drop(held);
    assert_eq!((machine.calls("cuEventQuery"), pool.live()), (8, 0));
}

#[test]
fn an_unsubmitted_buffer_returns_at_once() {
    let machine = Machine::new(2);
    let pool = machine.pool(BYTES as u64, 1);
    let records = machine.calls("cuEventRecord");
    for number in 0..10 {
        assert_eq!(filled(&pool, number).bytes(), BYTES as u64);
        assert_eq!(pool.live(), 0);
    }
    assert_eq!(machine.calls("cuEventRecord"), records);
}

#[test]
fn a_stream_that_stands_still_does_not_hold_up_another() {
    let machine = Machine::new(3);
    // One for each stream: each buffer of this stream is back before the next is submitted.
    let pool = machine.pool(BYTES as u64, 2);
    let other = Stream::new(&machine.device).unwrap();
    let (stuck, target) = (machine.memory(BYTES as u64), machine.memory(BYTES as u64));
    machine.sim.hold(other.raw());
    filled(&pool, 99).submit(&other, |view| view.copy_to_device(stuck.span(), 0)).unwrap();
    for number in 0..200 {
        send(&machine, &pool, number, &target);
        assert_eq!(machine.read(target.span()), pattern(number, BYTES));
    }
    assert_eq!(pool.live(), 2);
    machine.sim.release_hold(other.raw());
    other.synchronize().unwrap();
    assert_eq!(machine.read(stuck.span()), pattern(99, BYTES));
}

#[test]
fn a_buffer_read_by_several_streams_waits_for_all_and_holds_up_none() {
    let machine = Machine::new(4);
    let pool = machine.pool(BYTES as u64, 2);
    let other = Stream::new(&machine.device).unwrap();
    let targets = [(); 3].map(|()| machine.memory(BYTES as u64));
    machine.sim.hold(other.raw());
    let enqueue = |view: &SubmittedView<'_>| {
        view.copy_to_device(targets[0].span(), 0)?;
        view.copy_to_device_on(&other, targets[1].span(), 0)?;
        // A second reader on the same stream needs no second event.
        view.also_read_by(&other)?;
        machine.launch_copy(&other, targets[2].span(), view.address())?;
        Ok::<_, CopyError>(())
    };
    filled(&pool, 7).submit(&machine.stream, enqueue).unwrap();
    machine.stream.synchronize().unwrap();
    // The first stream has finished with it, the second has not. The other buffer is used and
    // returned.
    for number in 0..50 {
        let buffer = filled(&pool, number);
        assert_eq!(pool.live(), 2);
        buffer.submit(&machine.stream, |view| view.copy_to_device(targets[0].span(), 0)).unwrap();
        machine.stream.synchronize().unwrap();
    }
    machine.sim.release_hold(other.raw());
    other.synchronize().unwrap();
    assert_eq!(machine.read(targets[1].span()), pattern(7, BYTES));
    assert_eq!(machine.read(targets[2].span()), pattern(7, BYTES));
    pool.drain().unwrap();
    assert_eq!(pool.live(), 0);
}

#[test]
fn the_first_of_several_streams_is_waited_for_as_the_last_is() {
    let machine = Machine::new(13);
    let pool = machine.pool(BYTES as u64, 1);
    let other = Stream::new(&machine.device).unwrap();
    let targets = [(); 2].map(|()| machine.memory(BYTES as u64));
    for number in 0..3 {
        machine.sim.hold(machine.stream.raw());
        let enqueue = |view: &SubmittedView<'_>| {
            view.copy_to_device(targets[0].span(), 0)?;
            view.copy_to_device_on(&other, targets[1].span(), 0)
        };
        filled(&pool, number).submit(&machine.stream, enqueue).unwrap();
        other.synchronize().unwrap();
        assert!(matches!(pool.acquire(), Err(AcquireError::Exhausted { .. })), "read by the first");
        machine.sim.release_hold(machine.stream.raw());
        pool.acquire_wait().unwrap().bytes_mut().fill(0xBB);
        assert_eq!(machine.read(targets[0].span()), pattern(number, BYTES));
    }
}

#[test]
fn readers_on_another_device_are_waited_for() {
    let machine = Machine::new(5);
    let pool = machine.pool(BYTES as u64, 1);
    let far = Device::open(machine.device.driver().clone(), 1).unwrap();
    let far_stream = Stream::new(&far).unwrap();
    let far_target = DeviceBuffer::alloc(&far, BYTES as u64).unwrap();
    let near_target = machine.memory(BYTES as u64);
    let created = machine.calls("cuEventCreate");
    for number in 0..20 {
        machine.sim.hold(far_stream.raw());
        let enqueue = |view: &SubmittedView<'_>| {
            view.copy_to_device(near_target.span(), 0)?;
            view.copy_to_device_on(&far_stream, far_target.span(), 0)
        };
        filled(&pool, number).submit(&machine.stream, enqueue).unwrap();
        machine.stream.synchronize().unwrap();
        assert!(matches!(pool.acquire(), Err(AcquireError::Exhausted { .. })));
        machine.sim.release_hold(far_stream.raw());
        drop(pool.acquire_wait().unwrap());
        let mut arrived = vec![0; BYTES];
        far_stream.download(&mut arrived, far_target.span()).unwrap();
        assert_eq!(arrived, pattern(number, BYTES));
    }
    // The far device's event was created once and kept.
    assert_eq!(machine.calls("cuEventCreate"), created + 1);
}

/// Another handle of the device's context shares its events: each stream needs one of its own nevertheless.
#[test]
fn readers_on_a_twin_of_the_device_have_their_events_before_they_read() {
    let (machine, pool, target) = rig(5, 1);
    let created = machine.calls("cuEventCreate");
    for number in 0..3 {
        let twin = Device::open(machine.device.driver().clone(), 0).unwrap();
        let stream = Stream::new(&twin).unwrap();
        let enqueue = |view: &SubmittedView<'_>| {
            view.also_read_by(&stream)?;
            assert_eq!(machine.calls("cuEventCreate"), created + 1, "{number}");
            view.copy_to_device(target.span(), 0)
        };
        filled(&pool, number).submit(&machine.stream, enqueue).unwrap();
        pool.drain().unwrap();
        assert_eq!(machine.calls("cuEventCreate"), created + 1, "{number}");
    }
}

/// Enqueues a kernel that reads the first bytes of `source`, like safe launches, which ask for the
/// address on `stream`.
fn read_span(
    machine: &Machine,
    stream: &Stream,
    (out, source): (DeviceSpan, PinnedSpan<'_>),
) -> Result<(), ReadError> {
    let address = source.device_address(stream)?;
    Ok(machine.launch_copy(stream, out, address)?)
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    Reader(#[from] CopyError),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

#[test]
fn a_span_goes_to_no_stream_that_the_pool_does_not_know_of() {
    let machine = Machine::new(11);
    let pool = machine.pool(BYTES as u64, 1);
    let other = Stream::new(&machine.device).unwrap();
    let target = machine.memory(16);
    let staged = |byte: u8| {
        let mut buffer = pool.acquire().unwrap();
        buffer.bytes_mut()[..16].fill(byte);
        buffer
    };
    machine.sim.hold(other.raw());
    let launched = staged(0xAA)
        .submit(&machine.stream, |view| read_span(&machine, &other, (target.span(), view.span())));
    machine.stream.synchronize().unwrap();
    drop(staged(0xBB));
    machine.sim.release_hold(other.raw());
    other.synchronize().unwrap();
    if launched.is_ok() {
        assert_eq!(machine.read(target.span()), [0xAA; 16], "read after the buffer was recycled");
    }
    let error = CopyError::OtherStream { reader: machine.stream.raw(), stream: other.raw() };
    assert_eq!(launched, Err(SubmitError::Enqueue(ReadError::Reader(error))));
}

#[test]
fn a_span_for_another_stream_keeps_the_buffer_for_that_stream() {
    let machine = Machine::new(12);
    let pool = machine.pool(BYTES as u64, 1);
    let other = Stream::new(&machine.device).unwrap();
    let target = machine.memory(16);
    let mut buffer = pool.acquire().unwrap();
    buffer.bytes_mut()[..16].fill(0xAA);
    machine.sim.hold(other.raw());
    let enqueue = |view: &SubmittedView<'_>| {
        let span = view.span_on(&other)?;
        let foreign = read_span(&machine, &machine.stream, (target.span(), span));
        assert!(matches!(foreign, Err(ReadError::Reader(_))), "{foreign:?}");
        read_span(&machine, &other, (target.span(), span))
    };
    buffer.submit(&machine.stream, enqueue).unwrap();
    machine.stream.synchronize().unwrap();
    assert!(
        matches!(pool.acquire(), Err(AcquireError::Exhausted { .. })),
        "recycled under its reader"
    );
    machine.sim.release_hold(other.raw());
    pool.acquire_wait().unwrap().bytes_mut().fill(0xBB);
    assert_eq!(machine.read(target.span()), [0xAA; 16]);
}

#[test]
fn asking_alone_brings_a_buffer_back() {
    let (machine, pool, target) = rig(6, 1);
    send(&machine, &pool, 1, &target);
    let mut refused = 0;
    let buffer = loop {
        match pool.acquire() {
            Ok(buffer) => break buffer,
            Err(AcquireError::Exhausted { live: 1, max: 1 }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
        assert!(refused < 10, "nobody waits, but the device goes on and the pool asks it");
        machine.sim.step();
    };
    drop(buffer);
    assert_eq!(machine.read(target.span()), pattern(1, BYTES));
}

#[test]
fn drain_waits_for_all_streams_and_close_gives_the_memory_back() {
    let machine = Machine::new(7);
    let pool = machine.pool(BYTES as u64, 4);
    assert_eq!((pool.pinned_bytes(), machine.sim.pinned_bytes()), (4096, 4096));
    let other = Stream::new(&machine.device).unwrap();
    let target = machine.memory(4 * BYTES as u64);
    machine.sim.hold(machine.stream.raw());
    machine.sim.hold(other.raw());
    for (number, stream) in [&machine.stream, &other, &machine.stream].into_iter().enumerate() {
        let span = target.span().slice((number * BYTES) as u64, BYTES as u64).unwrap();
        let buffer = filled(&pool, number as u64);
        buffer.submit(stream, |view| view.copy_to_device(span, 0)).unwrap();
    }
    assert_eq!(pool.live(), 3);
    machine.sim.release_hold(machine.stream.raw());
    machine.sim.release_hold(other.raw());
    pool.drain().unwrap();
    assert_eq!(pool.live(), 0);
    let clone = pool.clone();
    let mut held = filled(&pool, 3);
    pool.close().unwrap();
    assert_eq!(clone.acquire().map(drop), Err(AcquireError::Closed));
    assert_eq!((clone.pinned_bytes(), machine.sim.pinned_bytes()), (4096, 4096), "one slab");
    // A buffer taken before can still be used. Its memory is freed with it.
    held.bytes_mut()[0] ^= 0xFF;
    let last = target.span().slice(3 * BYTES as u64, BYTES as u64).unwrap();
    held.submit(&machine.stream, |view| view.copy_to_device(last, 0)).unwrap();
    clone.drain().unwrap();
    machine.device.free_retired().unwrap();
    assert_eq!((clone.pinned_bytes(), machine.sim.pinned_bytes()), (0, 0));
    let mut expected = [0, 1, 2, 3].map(|number| pattern(number, BYTES)).concat();
    expected[3 * BYTES] ^= 0xFF;
    assert_eq!(machine.read(target.span()), expected);
}

/// While a drain waits, another thread submits what will not be read soon.
#[test]
fn drain_waits_for_nothing_that_was_submitted_after_it_began() {
    let later = Arc::new(Mutex::new(None::<(StagingPool, Stream, DeviceBuffer)>));
    let submits = Arc::clone(&later);
    let mut machine = Machine::new(11);
    let counting = CountingDriver::watched(Arc::new(machine.sim.clone()), move |call| {
        let taken = (call == "cuEventSynchronize").then(|| submits.lock().unwrap().take());
        if let Some((pool, stream, target)) = taken.flatten() {
            let buffer = pool.acquire().unwrap();
            buffer.submit(&stream, |view| view.copy_to_device(target.span(), 0)).unwrap();
        }
    });
    machine.device = Device::open(Arc::new(counting), 0).unwrap();
    machine.stream = Stream::new(&machine.device).unwrap();
    machine.sim.set_pace(Pace::Slowest);
    let pool = machine.pool(BYTES as u64, 2);
    let (target, other) = (machine.memory(BYTES as u64), Stream::new(&machine.device).unwrap());
    send(&machine, &pool, 0, &target);
    machine.sim.hold(other.raw());
    let elsewhere = machine.memory(BYTES as u64);
    *later.lock().unwrap() = Some((pool.clone(), other.clone(), elsewhere));
    pool.drain().unwrap();
    assert_eq!((pool.live(), later.lock().unwrap().is_none()), (1, true));
    machine.sim.release_hold(other.raw());
    pool.drain().unwrap();
    assert_eq!(pool.live(), 0);
}

#[test]
fn a_dropped_pool_leaves_its_memory_to_the_readers() {
    let (machine, pool, target) = rig(8, 2);
    machine.sim.hold(machine.stream.raw());
    let read = |view: &SubmittedView<'_>| {
        machine.launch_copy(view.stream(), target.span(), view.address())
    };
    filled(&pool, 5).submit(&machine.stream, read).unwrap();
    drop(pool);
    assert_eq!(machine.sim.pinned_bytes(), 4096);
    machine.sim.release_hold(machine.stream.raw());
    machine.device.free_retired().unwrap();
    assert_eq!(machine.sim.pinned_bytes(), 0);
    assert_eq!(machine.read(target.span()), pattern(5, BYTES));
    assert!(machine.sim.findings().is_empty(), "{:?}", machine.sim.findings());
}

#[test]
fn a_dropped_pool_leaves_its_memory_to_readers_on_other_devices_too() {
    let machine = Machine::new(10);
    let far = Device::open(machine.device.driver().clone(), 1).unwrap();
    let stream = Stream::new(&far).unwrap();
    let target = DeviceBuffer::alloc(&far, BYTES as u64).unwrap();
    let pool = machine.pool(BYTES as u64, 1);
    let read = |view: &SubmittedView<'_>| view.copy_to_device_on(&stream, target.span(), 0);
    filled(&pool, 6).submit(&machine.stream, read).unwrap();
    drop(pool);
    // The driver waits only for the device that registered the memory.
    machine.device.free_retired().unwrap();
    assert_eq!(machine.sim.pinned_bytes(), 0);
    let mut arrived = vec![0; BYTES];
    stream.download(&mut arrived, target.span()).unwrap();
    assert_eq!(arrived, pattern(6, BYTES));
    assert_eq!((machine.device.poison(), far.poison()), (None, None));
}
