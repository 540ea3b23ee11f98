//! Moves in which a driver call fails, or a device is lost: nothing leaks, and the source is intact.

use crate::common::machine;
use crate::common::moving::{Pair, buffer, contents, pattern, scattered};
use cuda_driver::{Device, DeviceBuffer, ErrorCode, Stream};
use cuda_sim::{Pace, SimDriver};
use kv_multigpu::moves::{
    BlockGrid, BlockMemory, BlockMove, BlockPairs, MoveError, MoveOrder, MoverConfig, Route,
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

fn ends(devices: &[Device], pair: &Pair, seed: u64) -> (DeviceBuffer, DeviceBuffer, Vec<u8>) {
    let data = pattern(seed, BYTES);
    let near = buffer(&pair.after, &data);
    (near, DeviceBuffer::alloc(&devices[1], BYTES as u64).unwrap(), data)
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

/// The receiver is lost before the move, which is refused when the sender already waits for its order.
#[test]
fn a_move_that_is_refused_before_it_begins_leaks_no_chunk() {
    let (sim, all) = devices(2);
    sim.set_pace(Pace::Slowest);
    let mut pair = Pair::new(&all[0], &all[1], config(Route::Host));
    let (near, far, _) = ends(&all, &pair, 7);
    sim.lose_device(1, 0, ErrorCode::ILLEGAL_ADDRESS);
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let failed = pair.mover.move_tensor(near.into(), far.into(), order).map(drop).unwrap_err();
    let ends = failed.held.try_finish().map_err(|_| "nothing was enqueued").unwrap();
    drop((ends, pair, all));
    let leaks = sim.check_leaks();
    assert!(leaks.is_clean(), "{leaks:?}");
}

/// The bytes are there, and the sender's reads are over: its loss says nothing about them.
#[test]
fn a_move_that_has_arrived_is_waited_for_though_the_sender_is_lost() {
    let (sim, all) = devices(2);
    let mut pair = Pair::new(&all[0], &all[1], config(Route::Host));
    let (near, far, data) = ends(&all, &pair, 7);
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let mut moved = pair.mover.move_tensor(near.into(), far.into(), order).unwrap();
    pair.on.synchronize().unwrap();
    sim.lose_device(0, 0, ErrorCode::ILLEGAL_ADDRESS);
    assert!(all[0].synchronize().is_err() && all[0].poison().is_some());
    let reader = Stream::new(&all[1]).unwrap();
    moved.wait_on(&reader).unwrap();
    let far = moved.take_destination().unwrap();
    assert!(contents(&reader, far.span()) == data);
    assert!(moved.reclaim_on(&reader).unwrap().is_some());
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
    let order = MoveOrder { after: &other.after, on: &other.on };
    let moved = other.mover.move_tensor(other_near.into(), other_far.into(), order);
    let (other_near, other_far) = moved.unwrap().finish().map_err(|(error, _)| error).unwrap();
    let (other_near, other_far) = (other_near.unwrap(), other_far.unwrap());
    assert!(contents(&other.on, other_far.span()) == data);
    drop((doomed, other, other_near, other_far, all));
    let leaks = sim.check_leaks();
    assert!(leaks.is_clean(), "{prefer:?} {kind:?} {lost} {operations}: {leaks:?}");
}
