//! What is still under way: it is neither written again, nor taken for over, nor let go of.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use crate::common::machine;
use crate::common::moving::{Pair, buffer, contents, pattern, scattered};
use cuda_driver::{Device, DeviceBuffer, ErrorCode};
use cuda_sim::{Pace, SimDriver};
use kv_multigpu::moves::{
    BlockGrid, BlockMemory, BlockMove, BlockPair, BlockPairs, Held, Move, MoveError, MoveOrder,
    MoverConfig, Route,
};

fn config(prefer: Route) -> MoverConfig {
    let (chunk_bytes, chunks, kernel_blocks) = (256, 2, 1);
    MoverConfig { prefer, chunk_bytes, chunks, kernel_blocks, ..MoverConfig::default() }
}

fn devices() -> (SimDriver, [Device; 2]) {
    let (sim, registry) = machine(2, true);
    sim.prefer_ptx(true);
    (sim, [0, 1].map(|ordinal| registry.device(ordinal).unwrap()))
}

/// Moves 64 bytes of the two buffers whose keepers nobody needs.
fn move_ends(pair: &mut Pair, ends: &[DeviceBuffer; 2]) -> Move<(), ()> {
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let [source, target] = ends.each_ref().map(|end| Held::new(end.device(), end.span(), ()));
    pair.mover.move_tensor(source, target, order).unwrap()
}

fn ends(pair: &Pair, bytes: usize) -> [DeviceBuffer; 2] {
    [buffer(&pair.after, &pattern(1, bytes)), buffer(&pair.on, &vec![0; bytes])]
}

/// The second launch of a move is refused. The first one has still to read its table.
#[test]
fn tables_of_an_interrupted_move_are_not_written_before_it_is_over() {
    for (prefer, stands) in [(Route::Push, 0), (Route::Pull, 1), (Route::Host, 0)] {
        let (sim, all) = devices();
        let config = MoverConfig { tables: 2, table_pairs: 4, ..config(prefer) };
        let mut pair = Pair::new(&all[0], &all[1], config);
        let grid = BlockGrid { blocks: 8, block_stride: 16, row_stride: 0 };
        let data = pattern(3, 128);
        let buffers = [buffer(&pair.after, &data), buffer(&pair.on, &[0; 128])];
        sim.hold([pair.after.raw(), pair.on.raw()][stands]);
        let order = MoveOrder { after: &pair.after, on: &pair.on };
        let mut go = |pairs: &[BlockPair]| {
            let [near, far] = [0, 1]
                .map(|i| BlockMemory::new(&all[i], vec![buffers[i].span()], grid, ()).unwrap());
            let what = BlockMove::whole(BlockPairs::new(pairs).unwrap(), 16);
            pair.mover.move_blocks(near, far, &what, order)
        };
        let refused = if prefer == Route::Host { 3 } else { 2 };
        sim.fail_nth("cuLaunchKernel", refused, ErrorCode::UNKNOWN);
        let interrupted = go(&scattered(8, 8)).unwrap_err();
        let busy = go(&scattered(4, 8)).unwrap_err().error;
        assert_eq!(busy, MoveError::Busy { needed: 1, in_use: 2, tables: 2 }, "{prefer:?}");
        sim.release_hold([pair.after.raw(), pair.on.raw()][stands]);
        interrupted.held.finish().map_err(|(error, _)| error).unwrap();
        go(&scattered(8, 8)).unwrap().finish().map_err(|(error, _)| error).unwrap();
        let seen = contents(&pair.on, buffers[1].span());
        for BlockPair { source: from, destination: to } in scattered(8, 8) {
            let [from, to] = [from, to].map(|id| id.index() * 16..(id.index() + 1) * 16);
            assert!(seen[to] == data[from], "{prefer:?}");
        }
    }
}

/// Chunks and tables belong to one device and are used by both. What frees them there need not wait for the
/// other device.
#[test]
fn pinned_memory_that_is_still_used_is_not_freed_with_its_mover() {
    for (prefer, blocks) in [(Route::Host, false), (Route::Pull, true), (Route::Push, true)] {
        for busy in [true, false] {
            let (sim, all) = devices();
            let config = MoverConfig { tables: usize::from(blocks), ..config(prefer) };
            let mut pair = Pair::new(&all[0], &all[1], config);
            let ends = ends(&pair, 64);
            if busy {
                sim.hold(pair.on.raw());
            }
            if blocks {
                let order = MoveOrder { after: &pair.after, on: &pair.on };
                let grid = BlockGrid { blocks: 4, block_stride: 16, row_stride: 0 };
                let memory =
                    |i: usize| BlockMemory::new(&all[i], vec![ends[i].span()], grid, ()).unwrap();
                let pairs = scattered(4, 4);
                let what = BlockMove::whole(BlockPairs::new(&pairs).unwrap(), 16);
                drop(pair.mover.move_blocks(memory(0), memory(1), &what, order).unwrap());
            } else {
                drop(move_ends(&mut pair, &ends));
            }
            if !busy {
                pair.mover.settle().unwrap();
            }
            let Pair { mover, on, after } = pair;
            drop(mover);
            sim.release_hold(on.raw());
            on.synchronize().unwrap();
            after.synchronize().unwrap();
            // What was in use when the mover went stays, also when it no longer is.
            all[0].free_retired().unwrap();
            let freed = sim.calls().get("cuMemFreeHost").copied().unwrap_or(0);
            // A table, or two chunks.
            let all_of_it = if blocks { 1 } else { 2 };
            assert_eq!(freed, if busy { 0 } else { all_of_it }, "{prefer:?} {blocks} {busy}");
            assert_eq!(sim.findings(), []);
        }
    }
}

/// Each end has an event that is not recorded again while somebody asks about it.
#[test]
fn a_move_that_is_over_stays_over_while_others_are_under_way() {
    let (sim, all) = devices();
    let mut pair = Pair::new(&all[0], &all[1], config(Route::Push));
    let ends = ends(&pair, 64);
    let first = move_ends(&mut pair, &ends);
    pair.on.synchronize().unwrap();
    assert_eq!(first.is_complete(), Ok(true));
    sim.hold(pair.on.raw());
    let second = move_ends(&mut pair, &ends);
    sim.run_all();
    assert_eq!((first.is_complete(), second.is_complete()), (Ok(true), Ok(false)));
    sim.release_hold(pair.on.raw());
    second.finish().map_err(|(error, _)| error).unwrap();
}

/// A move that is kept does not keep the events of those after it from being used again.
#[test]
fn there_are_no_more_events_than_moves_alive() {
    let (sim, all) = devices();
    let mut pair = Pair::new(&all[0], &all[1], config(Route::Push));
    let ends = ends(&pair, 64);
    let kept = move_ends(&mut pair, &ends);
    drop(move_ends(&mut pair, &ends).finish());
    let before = sim.check_leaks().events;
    for _ in 0..100 {
        drop(move_ends(&mut pair, &ends).finish());
    }
    assert_eq!(sim.check_leaks().events, before);
    drop(kept);
}

/// Four lengths of a chunk go through one, which stands full.
#[test]
fn a_chunk_is_not_filled_again_before_it_was_drained() {
    let (sim, all) = devices();
    let config = MoverConfig { chunks: 1, chunk_bytes: 64, tables: 0, ..config(Route::Host) };
    let mut pair = Pair::new(&all[0], &all[1], config);
    let ends = ends(&pair, 256);
    sim.hold(pair.on.raw());
    let moved = move_ends(&mut pair, &ends);
    sim.run_all();
    sim.release_hold(pair.on.raw());
    moved.finish().map_err(|(error, _)| error).unwrap();
    assert!(contents(&pair.on, ends[1].span()) == pattern(1, 256));
}

/// The record after a chunk's last use is refused. What was drained from the chunk before is on its way, and
/// keeps its bytes.
#[test]
fn a_chunk_of_an_interrupted_move_is_not_filled_before_it_was_drained() {
    let (sim, all) = devices();
    let config = MoverConfig { chunks: 1, tables: 0, ..config(Route::Host) };
    let mut pair = Pair::new(&all[0], &all[1], config);
    let [first, second] = [1, 2].map(|_| ends(&pair, 64));
    pair.after.upload(second[0].span(), &[9; 64]).unwrap();
    sim.hold(pair.on.raw());
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    // After those of both streams of the order, and of the filled chunk.
    sim.fail_nth("cuEventRecord", 4, ErrorCode::UNKNOWN);
    let [source, target] = first.each_ref().map(|end| Held::new(end.device(), end.span(), ()));
    let failed = pair.mover.move_tensor(source, target, order).unwrap_err();
    let moved = move_ends(&mut pair, &second);
    sim.run_all();
    sim.release_hold(pair.on.raw());
    moved.finish().map_err(|(error, _)| error).unwrap();
    failed.held.finish().map_err(|(error, _)| error).unwrap();
    assert!(contents(&pair.on, first[1].span()) == pattern(1, 64), "the next move's bytes");
    assert!(contents(&pair.on, second[1].span()) == [9; 64]);
}

/// Both ends of a move that failed half-way are dropped by their owner, and kept until it is over.
#[test]
fn ends_of_a_failed_move_that_are_dropped_are_kept_until_it_is_over() {
    let (sim, all) = devices();
    let mut pair = Pair::new(&all[0], &all[1], config(Route::Host));
    let ends = ends(&pair, 1024);
    let owner = Arc::new(());
    sim.hold(pair.after.raw());
    sim.fail_nth("cuMemcpyHtoDAsync", 2, ErrorCode::UNKNOWN);
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let held = |end: usize| Held::new(&all[end], ends[end].span(), Arc::clone(&owner));
    let failed = pair.mover.move_tensor(held(0), held(1), order).unwrap_err();
    drop(failed);
    assert_eq!((pair.mover.sweep(), Arc::strong_count(&owner)), (1, 3));
    sim.release_hold(pair.after.raw());
    pair.mover.settle().unwrap();
    assert_eq!((pair.mover.sweep(), Arc::strong_count(&owner)), (0, 1));
}

/// Counts its drops, and panics at them.
struct Unsteady(Arc<AtomicUsize>);

impl Drop for Unsteady {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
        if !std::thread::panicking() {
            panic!("an owner's destructor");
        }
    }
}

/// An owner of a move that is over panics as it is let go of. Owners of others are still held.
#[test]
fn an_owner_that_panics_takes_no_other_one_with_it() {
    for settle in [false, true] {
        let (sim, all) = devices();
        sim.set_pace(Pace::Slowest);
        let mut pair = Pair::new(&all[0], &all[1], config(Route::Push));
        let others = [all[1].clone()].map(|device| cuda_driver::Stream::new(&device).unwrap());
        let both = [ends(&pair, 64), ends(&pair, 64)];
        let drops = Arc::new(AtomicUsize::new(0));
        sim.hold(others[0].raw());
        for (on, ends) in [&pair.on, &others[0]].into_iter().zip(&both) {
            let order = MoveOrder { after: &pair.after, on };
            let source = Held::new(&all[0], ends[0].span(), Unsteady(Arc::clone(&drops)));
            let target = Held::new(&all[1], ends[1].span(), ());
            drop(pair.mover.move_tensor(source, target, order).unwrap());
        }
        pair.on.synchronize().unwrap();
        // A wait that is refused says nothing of the work.
        sim.fail_nth("cuEventSynchronize", 2, ErrorCode::UNKNOWN);
        let swept = catch_unwind(AssertUnwindSafe(|| match settle {
            true => pair.mover.settle().is_err().into(),
            false => pair.mover.sweep(),
        }));
        assert!(swept.is_err());
        assert_eq!(drops.load(SeqCst), 1, "the other move is under way");
        sim.release_hold(others[0].raw());
        others[0].synchronize().unwrap();
        let swept = catch_unwind(AssertUnwindSafe(|| pair.mover.sweep()));
        assert!(swept.is_err());
        assert_eq!(drops.load(SeqCst), 2);
    }
}
