//! Moves in which a driver call fails, or a device is lost: nothing leaks, and the source is intact.

use std::collections::BTreeMap;

use crate::common::machine;
use crate::common::moving::{Pair, buffer, contents, pattern, scattered};
use cuda_driver::{Device, DeviceBuffer, DeviceError, ErrorCode, Stream};
use cuda_sim::{Pace, SimDriver};
use kv_multigpu::moves::{
    BlockGrid, BlockMemory, BlockMove, BlockPairs, HandOver, MoveError, MoveOrder, Mover,
    MoverConfig, Route,
};

const BYTES: usize = 5 * 1024;

fn config(prefer: Route) -> MoverConfig {
    MoverConfig { prefer, chunk_bytes: 1024, chunks: 2, kernel_blocks: 1, ..MoverConfig::default() }
}

fn devices(count: u32) -> (SimDriver, Vec<Device>) {
    let (sim, registry) = machine(count, true);
    sim.prefer_ptx(true);
    let devices = (0..count as i32).map(|ordinal| registry.device(ordinal).unwrap()).collect();
    (sim, devices)
}

/// What is moved: a range, or blocks of it.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Tensor,
    Blocks,
}

/// Moves once, and tells how it went with both ends given back.
fn go(
    pair: &mut Pair,
    kind: Kind,
    near: DeviceBuffer,
    far: DeviceBuffer,
) -> (Result<(), MoveError>, DeviceBuffer, DeviceBuffer) {
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let result = match kind {
        Kind::Tensor => pair.mover.move_tensor(near.into(), far.into(), order),
        Kind::Blocks => {
            let grid = BlockGrid { blocks: 20, block_stride: 256, row_stride: 0 };
            let (from, to) = (pair.mover.from().clone(), pair.mover.to().clone());
            let source = BlockMemory::new(&from, vec![near.span()], grid, near).unwrap();
            let target = BlockMemory::new(&to, vec![far.span()], grid, far).unwrap();
            let all = scattered(20, 20);
            pair.mover.move_blocks(
                source,
                target,
                &BlockMove::whole(BlockPairs::new(&all).unwrap(), 256),
                order,
            )
        }
    };
    // A call of these waits may be the one that fails.
    match result {
        Ok(mut held) => loop {
            held = match held.finish() {
                Ok((near, far)) => return (Ok(()), near.unwrap(), far.unwrap()),
                Err((_, held)) => held,
            };
        },
        Err(failed) => {
            let mut held = failed.held;
            loop {
                held = match held.finish() {
                    Ok((near, far)) => return (Err(failed.error), near, far),
                    Err((_, held)) => held,
                };
            }
        }
    }
}

/// Calls that end something. One that is refused leaves it to the driver, so leaks are not asked about.
const CLEAN_UP: [&str; 3] = ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuEventDestroy"];

/// The calls that `work` makes.
fn calls_of(sim: &SimDriver, work: impl FnOnce()) -> BTreeMap<&'static str, u64> {
    let before = sim.calls();
    work();
    let of = |call| before.get(call).copied().unwrap_or(0);
    sim.calls().into_iter().map(|(call, count)| (call, count - of(call))).collect()
}

fn ends(devices: &[Device], pair: &Pair, seed: u64) -> (DeviceBuffer, DeviceBuffer, Vec<u8>) {
    let data = pattern(seed, BYTES);
    let near = buffer(&pair.after, &data);
    (near, DeviceBuffer::alloc(&devices[1], BYTES as u64).unwrap(), data)
}

#[test]
fn a_call_that_fails_leaves_the_source_intact_and_the_mover_usable() {
    let mut failed = 0;
    for (prefer, kind) in [
        (Route::Push, Kind::Tensor),
        (Route::Push, Kind::Blocks),
        (Route::Pull, Kind::Blocks),
        (Route::Host, Kind::Tensor),
        (Route::Host, Kind::Blocks),
    ] {
        let (sim, all) = devices(2);
        let mut pair = Pair::new(&all[0], &all[1], config(prefer));
        let (near, far, _) = ends(&all, &pair, 1);
        let calls = calls_of(&sim, || drop(go(&mut pair, kind, near, far)));
        drop((pair, all));
        for (call, count) in calls {
            // The wait for the end is the test's, and so is asking whether it came.
            if ["cuEventSynchronize", "cuMemFree", "cuStreamSynchronize"].contains(&call) {
                continue;
            }
            for nth in 1..=count {
                let (sim, all) = devices(2);
                let mut pair = Pair::new(&all[0], &all[1], config(prefer));
                let (near, far, data) = ends(&all, &pair, nth);
                sim.fail_nth(call, nth, ErrorCode::INVALID_VALUE);
                let (outcome, near, far) = go(&mut pair, kind, near, far);
                let at = format!("{call} {nth} of {count}, {prefer:?} {kind:?}");
                if let Err(error) = &outcome {
                    failed += 1;
                    let MoveError::Device(DeviceError::Driver(error)) = error else {
                        panic!("{at}: {error}")
                    };
                    assert_eq!((error.call, error.code), (call, ErrorCode::INVALID_VALUE), "{at}");
                }
                assert!(contents(&pair.after, near.span()) == data, "{at}: the source changed");
                // Again, with nothing in the way.
                let (outcome, near, far) = go(&mut pair, kind, near, far);
                assert_eq!(outcome, Ok(()), "{at}");
                if matches!(kind, Kind::Tensor) {
                    assert!(contents(&pair.on, far.span()) == data, "{at}");
                }
                drop((near, far, pair, all));
                if !CLEAN_UP.contains(&call) {
                    assert_eq!(sim.findings(), [], "{at}");
                    assert!(sim.check_leaks().is_clean(), "{at}: {:?}", sim.check_leaks());
                }
            }
        }
    }
    assert!(failed > 100, "{failed}");
}

#[test]
fn a_mover_that_cannot_be_made_leaves_nothing() {
    for prefer in [Route::Push, Route::Host] {
        let (sim, all) = devices(2);
        let mut made = None;
        let calls = calls_of(&sim, || made = Mover::new(&all[0], &all[1], config(prefer)).ok());
        drop((made.unwrap(), all));
        let mut refused = 0;
        for (call, count) in calls {
            for nth in 1..=count {
                let (sim, all) = devices(2);
                sim.fail_nth(call, nth, ErrorCode::OUT_OF_MEMORY);
                refused += u32::from(Mover::new(&all[0], &all[1], config(prefer)).is_err());
                drop(all);
                assert!(sim.check_leaks().is_clean(), "{call} {nth}: {:?}", sim.check_leaks());
            }
        }
        assert!(refused > 20, "{refused}");
    }
}

#[test]
fn a_hand_over_that_fails_is_done_again() {
    for prefer in [Route::Push, Route::Host] {
        let pass = |boundary: &mut HandOver, producer: &Stream, consumer: &Stream, byte: u8| {
            let mut outgoing = match boundary.room(producer) {
                Ok(outgoing) => outgoing,
                Err(_) => boundary.room(producer).unwrap(),
            };
            producer.fill(outgoing.span(), byte).unwrap();
            let mut refusals = 0;
            let incoming = loop {
                match boundary.send(outgoing, BYTES as u64, producer, consumer) {
                    Ok(incoming) => break incoming,
                    Err(failed) => outgoing = failed.outgoing,
                }
                refusals += 1;
            };
            let mut seen = vec![0; BYTES];
            while consumer.download(&mut seen, incoming.span()).is_err() {}
            assert!(seen.iter().all(|&it| it == byte), "{byte}");
            if let Err((_, incoming)) = boundary.done(incoming, consumer) {
                refusals += 1;
                boundary.done(incoming, consumer).map_err(|(error, _)| error).unwrap();
            }
            refusals
        };
        let set_up = || {
            let (sim, all) = devices(2);
            let mover = Mover::new(&all[0], &all[1], config(prefer)).unwrap();
            let boundary = HandOver::new(mover, BYTES as u64, 1).unwrap();
            let streams = [0, 1, 1].map(|i| Stream::new(&all[i]).unwrap());
            (sim, all, boundary, streams)
        };
        // The same consumer's stream again, another one, and back.
        let passes = |boundary: &mut HandOver, [producer, one, other]: &[Stream; 3]| {
            let mut refusals = 0;
            for (byte, consumer) in (1..).zip([one, one, other, one]) {
                refusals += pass(boundary, producer, consumer, byte);
            }
            refusals
        };
        let (sim, _all, mut boundary, streams) = set_up();
        let calls = calls_of(&sim, || assert_eq!(passes(&mut boundary, &streams), 0));
        let mut refusals = 0;
        for call in [
            "cuEventRecord",
            "cuStreamWaitEvent",
            "cuEventCreate",
            "cuMemcpyPeerAsync",
            "cuMemcpyDtoHAsync",
            "cuMemcpyHtoDAsync",
        ] {
            for nth in 1..=calls.get(call).copied().unwrap_or(0) {
                let (sim, all, mut boundary, streams) = set_up();
                sim.fail_nth(call, nth, ErrorCode::INVALID_VALUE);
                refusals += passes(&mut boundary, &streams);
                drop((boundary, streams, all));
                assert_eq!(sim.findings(), [], "{call} {nth} {prefer:?}");
                assert!(sim.check_leaks().is_clean(), "{call} {nth}");
            }
        }
        assert!(refusals > 5, "{refusals}");
    }
}

#[test]
fn a_device_lost_under_a_move_leaves_the_others_serving() {
    for prefer in [Route::Push, Route::Pull, Route::Host] {
        for kind in [Kind::Tensor, Kind::Blocks] {
            for lost in [0, 1] {
                for operations in [0, 1, 2, 3, 5, 8] {
                    lose(prefer, kind, lost, operations);
                }
            }
        }
    }
}

/// The receiver is lost before the sender has read the source into the host's memory.
#[test]
fn a_move_to_a_lost_receiver_is_under_way_until_the_sender_has_read_its_source() {
    let (sim, all) = devices(2);
    sim.set_pace(Pace::Slowest);
    let mut pair = Pair::new(&all[0], &all[1], config(Route::Host));
    let (near, far, _) = ends(&all, &pair, 7);
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let moved = pair.mover.move_tensor(near.into(), far.into(), order).unwrap();
    sim.lose_device(1, 0, ErrorCode::ILLEGAL_ADDRESS);
    assert_eq!(moved.is_complete(), Ok(false), "the source is still to be read");
    let (near, far) = moved.finish().map_err(|(error, _)| error).unwrap();
    assert!(all[1].poison().is_some() && all[0].poison().is_none());
    assert_eq!(sim.run_all(), 0, "nothing reads the source any more");
    drop((near, far, pair, all));
    let leaks = sim.check_leaks();
    assert!(leaks.is_clean(), "{leaks:?}");
}

/// Loses one end of a move from device 0 to device 1, and moves from device 2 to device 3.
fn lose(prefer: Route, kind: Kind, lost: u32, operations: u64) {
    let (sim, all) = devices(4);
    let mut doomed = Pair::new(&all[0], &all[1], config(prefer));
    let mut other = Pair::new(&all[2], &all[3], config(prefer));
    let (near, far, _) = ends(&all, &doomed, 7);
    let data = pattern(8, BYTES);
    let other_near = buffer(&other.after, &data);
    let other_far = DeviceBuffer::alloc(&all[3], BYTES as u64).unwrap();

    sim.lose_device(lost, operations, ErrorCode::ILLEGAL_ADDRESS);
    let order = MoveOrder { after: &doomed.after, on: &doomed.on };
    let moved = match kind {
        Kind::Tensor => doomed.mover.move_tensor(near.into(), far.into(), order),
        Kind::Blocks => {
            let grid = BlockGrid { blocks: 20, block_stride: 256, row_stride: 0 };
            let source = BlockMemory::new(&all[0], vec![near.span()], grid, near).unwrap();
            let target = BlockMemory::new(&all[1], vec![far.span()], grid, far).unwrap();
            let pairs = scattered(20, 20);
            doomed.mover.move_blocks(
                source,
                target,
                &BlockMove::whole(BlockPairs::new(&pairs).unwrap(), 256),
                order,
            )
        }
    };
    // Whatever became of it, waiting for it ends; and the other devices serve.
    match moved {
        Ok(held) => drop(held.finish()),
        Err(failed) => {
            let of_the_lost = matches!(failed.error, MoveError::Device(_));
            assert!(of_the_lost, "{:?}", failed.error);
            drop(failed.held.finish());
        }
    }
    let (outcome, other_near, other_far) = go(&mut other, Kind::Tensor, other_near, other_far);
    assert_eq!(outcome, Ok(()));
    assert!(contents(&other.on, other_far.span()) == data);
    drop((doomed, other, other_near, other_far, all));
    let leaks = sim.check_leaks();
    assert!(leaks.is_clean(), "{prefer:?} {kind:?} {lost} {operations}: {leaks:?}");
}
