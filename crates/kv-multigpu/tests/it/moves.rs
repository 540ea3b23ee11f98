//! Moves between simulated devices: every pair, every way, and what they hold on to.

use crate::common::machine;
use crate::common::moving::{self, Pair, buffer, contents, pattern, scattered};
use cuda_driver::{Device, DeviceBuffer, Stream};
use cuda_sim::{Pace, SimConfig, SimDriver};
use kv_kernels::BlockId;
use kv_kernels::error::KernelError;
use kv_multigpu::moves::{
    BlockGrid, BlockMemory, BlockMove, BlockPair, BlockPairs, HandOver, Held, MoveError, MoveOrder,
    Mover, MoverConfig, Route, Side,
};

/// Small enough that every scenario goes round the ring, and few threads to interpret.
fn small(prefer: Route) -> MoverConfig {
    MoverConfig { prefer, chunk_bytes: 8192, chunks: 3, kernel_blocks: 2, ..MoverConfig::default() }
}

fn devices(count: u32, peer_access: bool) -> (SimDriver, Vec<Device>) {
    let (sim, registry) = machine(count, peer_access);
    sim.prefer_ptx(true);
    let devices = (0..count as i32).map(|ordinal| registry.device(ordinal).unwrap()).collect();
    (sim, devices)
}

fn free(device: &Device) {
    device.free_retired().unwrap();
}

/// Nothing was seen that a GPU would hide, and nothing is left.
#[track_caller]
fn sound(sim: &SimDriver, devices: Vec<Device>) {
    assert_eq!(sim.findings(), []);
    drop(devices);
    let leaks = sim.check_leaks();
    assert!(leaks.is_clean(), "{leaks:?}");
}

#[test]
fn every_scenario_holds_with_access_without_it_and_through_the_host() {
    for (peer_access, prefer, route) in [
        (true, Route::Push, Route::Push),
        (true, Route::Pull, Route::Pull),
        (true, Route::Host, Route::Host),
        (false, Route::Push, Route::Host),
    ] {
        for (name, scenario) in moving::ALL {
            let (sim, devices) = devices(2, peer_access);
            let config = small(prefer);
            assert_eq!(Mover::new(&devices[0], &devices[1], config).unwrap().route(), route);
            scenario(&devices[0], &devices[1], config);
            assert_eq!(sim.findings(), [], "{name}");
            sound(&sim, devices);
        }
    }
}

/// Everything is enqueued on all ways before anything is looked at.
fn all_pairs_at_once(count: u32, peer_access: bool, peer_group: u32) {
    let config = SimConfig { devices: count, peer_access, peer_group, ..SimConfig::default() };
    let sim = SimDriver::new(config).unwrap();
    sim.prefer_ptx(true);
    let driver: std::sync::Arc<dyn cuda_driver::Driver> = std::sync::Arc::new(sim.clone());
    let devices: Vec<_> =
        (0..count as i32).map(|i| Device::open(driver.clone(), i).unwrap()).collect();
    let routes = moving::all_pairs_at_once(&devices, small(Route::Push), &moving::SMALL);
    for ([i, j], route) in routes {
        let near = peer_access && i as u32 / peer_group == j as u32 / peer_group;
        assert_eq!(route, if near { Route::Push } else { Route::Host });
    }
    drop(driver);
    sound(&sim, devices);
}

#[test]
fn every_scenario_holds_within_one_device_and_overlaps_are_refused() {
    for prefer in [Route::Push, Route::Pull, Route::Host] {
        let (sim, devices) = devices(1, true);
        for (_, scenario) in moving::ALL {
            scenario(&devices[0], &devices[0], small(prefer));
        }
        let mut pair = Pair::new(&devices[0], &devices[0], small(prefer));
        let memory = buffer(&pair.after, &pattern(1, 256));
        let order = MoveOrder { after: &pair.after, on: &pair.on };
        let held = |at| Held::new(&devices[0], memory.span().slice(at, 100).unwrap(), ());
        let refused = pair.mover.move_tensor(held(0), held(99), order).unwrap_err().error;
        assert_eq!(refused, MoveError::Overlap { bytes: 1 });
        pair.mover.move_tensor(held(0), held(100), order).unwrap();
        let grid = BlockGrid { blocks: 4, block_stride: 64, row_stride: 0 };
        let whole = || BlockMemory::new(&devices[0], vec![memory.span()], grid, ()).unwrap();
        let pairs = [moving::pair(0, 1)];
        let what = BlockMove::whole(BlockPairs::new(&pairs).unwrap(), 64);
        let refused = pair.mover.move_blocks(whole(), whole(), &what, order).unwrap_err().error;
        assert_eq!(refused, MoveError::Overlap { bytes: 256 });
        pair.mover.settle().unwrap();
        pair.on.synchronize().unwrap();
        drop((pair, memory));
        sound(&sim, devices);
    }
}

/// Planes of a destination that are one, or share a byte, would lose what one of them is written. Those of a source may.
#[test]
fn planes_of_a_destination_that_share_bytes_are_refused() {
    let (sim, devices) = devices(2, true);
    let mut pair = Pair::new(&devices[0], &devices[1], small(Route::Push));
    let near = buffer(&pair.after, &pattern(3, 512));
    let far = buffer(&pair.on, &[0; 512]);
    let grid = BlockGrid { blocks: 4, block_stride: 64, row_stride: 0 };
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let pairs = [0, 1, 2, 3].map(|block| moving::pair(block, block));
    let what = BlockMove::whole(BlockPairs::new(&pairs).unwrap(), 64);
    let memory = |device, of: &DeviceBuffer, starts: [u64; 2]| {
        let plane = |at| of.span().slice(at, 256).unwrap();
        BlockMemory::new(device, starts.map(plane).to_vec(), grid, ()).unwrap()
    };
    for (starts, [first, second]) in [([0, 0], [0, 1]), ([0, 255], [0, 1]), ([64, 0], [1, 0])] {
        let source = memory(&devices[0], &near, [0, 256]);
        let target = memory(&devices[1], &far, starts);
        let refused = pair.mover.move_blocks(source, target, &what, order).unwrap_err().error;
        assert_eq!(refused, MoveError::PlanesOverlap { first, second, bytes: 256 });
    }
    let source = memory(&devices[0], &near, [0, 128]);
    let target = memory(&devices[1], &far, [256, 0]);
    pair.mover.move_blocks(source, target, &what, order).unwrap().finish().map_err(drop).unwrap();
    let (read, seen) = (contents(&pair.after, near.span()), contents(&pair.on, far.span()));
    assert!(seen[256..] == read[..256] && seen[..256] == read[128..384]);
    pair.mover.settle().unwrap();
    drop((pair, near, far));
    sound(&sim, devices);
}

#[test]
fn all_pairs_of_four_devices_move_at_once() {
    all_pairs_at_once(4, true, 4);
    all_pairs_at_once(4, false, 4);
}

#[test]
fn all_pairs_of_eight_devices_move_at_once_in_two_groups() {
    all_pairs_at_once(8, true, 4);
}

#[test]
fn a_move_waits_for_nothing_on_the_host_and_pins_nothing() {
    for prefer in [Route::Push, Route::Pull, Route::Host] {
        let (sim, devices) = devices(2, true);
        let mut pair = Pair::new(&devices[0], &devices[1], small(prefer));
        let near = buffer(&pair.after, &pattern(1, 100_000));
        let far = DeviceBuffer::alloc(&devices[1], 100_000).unwrap();
        let before = sim.calls();
        let order = MoveOrder { after: &pair.after, on: &pair.on };
        for _ in 0..3 {
            let source = Held::new(&devices[0], near.span(), ());
            let target = Held::new(&devices[1], far.span(), ());
            drop(pair.mover.move_tensor(source, target, order).unwrap());
            let grid = BlockGrid { blocks: 20, block_stride: 4096, row_stride: 0 };
            let source = BlockMemory::new(&devices[0], vec![near.span()], grid, ()).unwrap();
            let target = BlockMemory::new(&devices[1], vec![far.span()], grid, ()).unwrap();
            let pairs = scattered(20, 20);
            let what = BlockMove::whole(BlockPairs::new(&pairs).unwrap(), 4096);
            drop(pair.mover.move_blocks(source, target, &what, order).unwrap());
        }
        let calls = sim.calls();
        let made = |call: &str| {
            calls.get(call).copied().unwrap_or(0) - before.get(call).copied().unwrap_or(0)
        };
        for call in [
            "cuStreamSynchronize",
            "cuEventSynchronize",
            "cuCtxSynchronize",
            "cuMemAlloc",
            "cuMemFree",
            "cuMemHostAlloc",
            "cuMemFreeHost",
            "cuStreamCreate",
        ] {
            assert_eq!(made(call), 0, "{call} by {prefer:?}");
        }
        if prefer != Route::Host {
            assert_eq!(
                (made("cuMemcpyPeerAsync"), made("cuLaunchKernel")),
                (3, 3),
                "one launch each"
            );
        }
        assert!(contents(&pair.on, far.span()).len() == 100_000);
        pair.mover.settle().unwrap();
        drop((pair, near, far));
        sound(&sim, devices);
    }
}

#[test]
fn a_dropped_move_keeps_its_ends_until_it_has_completed() {
    for prefer in [Route::Push, Route::Host] {
        let (sim, devices) = devices(2, true);
        let mut pair = Pair::new(&devices[0], &devices[1], small(prefer));
        let data = pattern(2, 30_000);
        let near = buffer(&pair.after, &data);
        let far = DeviceBuffer::alloc(&devices[1], 30_000).unwrap();
        let far_span = far.span();
        sim.hold(pair.after.raw());
        let order = MoveOrder { after: &pair.after, on: &pair.on };
        let moved = pair.mover.move_tensor(near.into(), far.into(), order).unwrap();
        assert_eq!(moved.is_complete(), Ok(false));
        let moved = moved.try_finish().map(drop).unwrap_err();
        drop(moved);
        let before = [0, 1].map(|device| sim.device_used_bytes(device));
        assert_eq!(pair.mover.sweep(), 1, "{prefer:?}");
        devices.iter().for_each(free);
        assert_eq!([0, 1].map(|device| sim.device_used_bytes(device)), before, "still held");
        sim.release_hold(pair.after.raw());
        assert!(contents(&pair.on, far_span) == data);
        assert_eq!(pair.mover.sweep(), 0);
        devices.iter().for_each(free);
        let after = [0, 1].map(|device| sim.device_used_bytes(device));
        assert!(after[0] < before[0] && after[1] < before[1], "{before:?} {after:?}");
        drop(pair);
        sound(&sim, devices);
    }
}

/// Whoever has waited for a move's order has waited for all of it: nothing is recorded that ends later.
#[test]
fn a_move_is_complete_when_what_it_is_ordered_on_is() {
    for prefer in [Route::Push, Route::Pull, Route::Host] {
        let (sim, devices) = devices(2, true);
        sim.set_pace(Pace::Slowest);
        let mut pair = Pair::new(&devices[0], &devices[1], small(prefer));
        let near = buffer(&pair.after, &pattern(2, 30_000));
        let far = DeviceBuffer::alloc(&devices[1], 30_000).unwrap();
        let order = MoveOrder { after: &pair.after, on: &pair.on };
        let moved = pair.mover.move_tensor(near.into(), far.into(), order).unwrap();
        assert_eq!(moved.is_complete(), Ok(false), "{prefer:?}");
        pair.on.synchronize().unwrap();
        assert_eq!(moved.is_complete(), Ok(true), "{prefer:?}");
        drop((moved, pair));
        sound(&sim, devices);
    }
}

#[test]
fn a_source_is_reclaimed_for_work_that_waits_on_the_device() {
    let (sim, devices) = devices(2, true);
    let mut pair = Pair::new(&devices[0], &devices[1], small(Route::Push));
    let near = buffer(&pair.after, &[1; 4096]);
    let far = DeviceBuffer::alloc(&devices[1], 4096).unwrap();
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    sim.hold(pair.on.raw());
    let mut moved = pair.mover.move_tensor(near.into(), far.into(), order).unwrap();
    let near = moved.reclaim_on(&pair.after).unwrap().unwrap();
    assert!(moved.reclaim_on(&pair.after).unwrap().is_none());
    // Overwritten at once, by work that the move is before.
    pair.after.fill(near.span(), 9).unwrap();
    sim.run_all();
    sim.release_hold(pair.on.raw());
    let far = moved.take_destination().unwrap();
    assert!(contents(&pair.on, far.span()) == [1; 4096]);
    assert!(contents(&pair.after, near.span()) == [9; 4096]);
    drop((moved, pair, near, far));
    sound(&sim, devices);
}

#[test]
fn tables_that_are_read_are_not_written_and_the_move_is_told_to_wait() {
    let (sim, devices) = devices(2, true);
    let config = MoverConfig { tables: 2, table_pairs: 4, ..small(Route::Push) };
    let mut pair = Pair::new(&devices[0], &devices[1], config);
    let grid = BlockGrid { blocks: 8, block_stride: 16, row_stride: 0 };
    let buffers = [buffer(&pair.after, &[1; 128]), buffer(&pair.on, &[2; 128])];
    sim.hold(pair.after.raw());
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let mut go = |pairs: &[BlockPair]| {
        let [near, far] = [0, 1]
            .map(|i| BlockMemory::new(&devices[i], vec![buffers[i].span()], grid, ()).unwrap());
        let what = BlockMove::whole(BlockPairs::new(pairs).unwrap(), 16);
        pair.mover.move_blocks(near, far, &what, order).map_err(|e| e.error)
    };
    let pairs = scattered(8, 8);
    let first = go(&pairs[..3]).unwrap();
    let busy = MoveError::Busy { needed: 2, in_use: 1, tables: 2 };
    assert_eq!(go(&pairs).unwrap_err(), busy);
    let second = go(&pairs[3..6]).unwrap();
    assert_eq!(go(&pairs[..1]).unwrap_err(), MoveError::Busy { needed: 1, in_use: 2, tables: 2 });
    sim.release_hold(pair.after.raw());
    first.finish().map_err(|(error, _)| error).unwrap();
    second.finish().map_err(|(error, _)| error).unwrap();
    go(&pairs).unwrap().finish().map_err(|(error, _)| error).unwrap();
    drop((pair, buffers));
    sound(&sim, devices);
}

#[test]
fn what_cannot_move_is_told_with_its_numbers() {
    let (sim, devices) = devices(2, true);
    let none = MoverConfig { chunks: 0, ..small(Route::Push) };
    assert!(matches!(
        Mover::new(&devices[0], &devices[1], none),
        Err(MoveError::Zero { what: "chunks" })
    ));
    let mut pair = Pair::new(&devices[0], &devices[1], small(Route::Push));
    let (near, far) = (
        DeviceBuffer::alloc(&devices[0], 640).unwrap(),
        DeviceBuffer::alloc(&devices[1], 640).unwrap(),
    );
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let back = MoveOrder { after: &pair.on, on: &pair.after };
    let held = |device: &Device, buffer: &DeviceBuffer, bytes| {
        Held::new(device, buffer.span().slice(0, bytes).unwrap(), ())
    };
    let mut tensor =
        |from, to, order| pair.mover.move_tensor(from, to, order).map(drop).unwrap_err().error;
    let (zero, one) = (&devices[0], &devices[1]);
    assert_eq!(
        tensor(held(zero, &near, 640), held(one, &far, 639), order),
        MoveError::Lengths { source_bytes: 640, destination_bytes: 639 }
    );
    assert_eq!(
        tensor(held(one, &far, 640), held(one, &far, 640), order),
        MoveError::WrongDevice { what: "source", expected: 0, found: 1 }
    );
    assert_eq!(
        tensor(held(zero, &near, 640), held(one, &far, 640), back),
        MoveError::WrongDevice { what: "stream before the move", expected: 0, found: 1 }
    );
    drop((pair, near, far));
    sound(&sim, devices);
}

#[test]
fn blocks_that_cannot_move_are_told_with_their_numbers() {
    let (sim, devices) = devices(2, true);
    let (zero, one) = (&devices[0], &devices[1]);
    let mut pair = Pair::new(zero, one, small(Route::Push));
    let near = DeviceBuffer::alloc(zero, 640).unwrap();
    let far = DeviceBuffer::alloc(one, 640).unwrap();
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let grid = BlockGrid { blocks: 10, block_stride: 64, row_stride: 16 };
    let memory = |device: &Device, buffer: &DeviceBuffer| {
        BlockMemory::new(device, vec![buffer.span()], grid, ()).unwrap()
    };
    let mut blocks = |what: BlockMove<'_>| {
        pair.mover
            .move_blocks(memory(zero, &near), memory(one, &far), &what, order)
            .map(drop)
            .unwrap_err()
            .error
    };
    let of = |from, to| [moving::pair(from, to)];
    let mut whole =
        |pairs: &[BlockPair]| blocks(BlockMove::whole(BlockPairs::new(pairs).unwrap(), 64));
    assert_eq!(
        [of(10, 0), of(9, 11)].map(|pairs| whole(&pairs)),
        [(Side::Source, 10), (Side::Destination, 11),].map(|(side, block)| {
            let block = BlockId::from(block);
            let error = KernelError::BlockOutOfRange { place: 0, side, block, blocks: 10 };
            MoveError::Blocks(Box::new(error))
        })
    );
    let pairs = of(1, 3);
    let whole = BlockMove::whole(BlockPairs::new(&pairs).unwrap(), 64);
    for wrong in [
        BlockMove { row_bytes: 65, ..whole },
        BlockMove { source_offset: 1, ..whole },
        BlockMove { destination_offset: u64::MAX, ..whole },
        BlockMove { rows: 5, row_bytes: 16, ..whole },
        BlockMove { rows: 2, row_bytes: 17, ..whole },
    ] {
        assert!(matches!(blocks(wrong), MoveError::Rows { .. }), "{wrong:?}");
    }
    let longer = BlockGrid { blocks: 11, ..grid };
    let refused = BlockMemory::new(zero, vec![near.span()], longer, ()).unwrap_err();
    assert!(matches!(refused, MoveError::PlaneTooShort { plane: 0, bytes: 640, blocks: 11, .. }));
    let mapped = memory(one, &far).mapped_for(&[1]);
    let refused = pair.mover.move_blocks(memory(zero, &near), mapped, &whole, order).map(drop);
    assert_eq!(refused.unwrap_err().error, MoveError::NotMapped { what: "destination", device: 0 });
    drop((pair, near, far));
    sound(&sim, devices);
}

#[test]
fn a_boundary_whose_buffers_are_all_held_says_so() {
    let (sim, devices) = devices(2, true);
    let mover = Mover::new(&devices[0], &devices[1], small(Route::Push)).unwrap();
    let mut boundary = HandOver::new(mover, 64, 2).unwrap();
    let (producer, consumer) =
        (Stream::new(&devices[0]).unwrap(), Stream::new(&devices[1]).unwrap());
    let first = boundary.room(&producer).unwrap();
    let second = boundary.room(&producer).unwrap();
    let full = MoveError::NoBuffer { in_use: 2, abandoned: 0, buffers: 2 };
    assert_eq!(boundary.room(&producer).unwrap_err(), full);
    producer.fill(first.span(), 1).unwrap();
    let refused = boundary.send(first, 65, &producer, &consumer).unwrap_err();
    assert!(matches!(refused.error, MoveError::OutOfBounds(_)));
    let incoming = boundary.send(refused.outgoing, 64, &producer, &consumer).unwrap();
    assert_eq!(boundary.room(&producer).unwrap_err(), full);
    assert!(contents(&consumer, incoming.span()) == [1; 64]);
    boundary.done(incoming, &consumer).map_err(|(error, _)| error).unwrap();
    let again = boundary.room(&producer).unwrap();
    boundary.give_back(again).unwrap();
    boundary.give_back(second).unwrap();
    drop((boundary, producer, consumer));
    sound(&sim, devices);
}

/// Each misuse says what is wrong with which GPU, block and number, and `Debug`, which `?` in `main` prints, says no less.
#[test]
fn every_misuse_is_told_in_a_line_of_its_own() {
    let (sim, devices) = devices(2, true);
    let mut pair = Pair::new(&devices[0], &devices[1], small(Route::Push));
    let (near, far) = (buffer(&pair.after, &[1; 128]), buffer(&pair.on, &[2; 128]));
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let held = |device, buffer: &DeviceBuffer, bytes| {
        Held::new(device, buffer.span().slice(0, bytes).unwrap(), ())
    };
    let [zero, one] = &devices[..] else { panic!("two devices") };
    let mut lines = Vec::new();
    for (source, destination) in
        [(held(zero, &near, 64), held(one, &far, 32)), (held(one, &far, 64), held(one, &far, 64))]
    {
        let refused = pair.mover.move_tensor(source, destination, order).map(drop).unwrap_err();
        lines.push((refused.to_string(), format!("{refused:?}")));
    }
    let grid = BlockGrid { blocks: 4, block_stride: 32, row_stride: 0 };
    let memory = |device, buffer: &DeviceBuffer| {
        BlockMemory::new(device, vec![buffer.span()], grid, ()).unwrap()
    };
    let missing = [moving::pair(4, 0)];
    let what = BlockMove::whole(BlockPairs::new(&missing).unwrap(), 32);
    let (source, destination) = (memory(zero, &near), memory(one, &far));
    let refused = pair.mover.move_blocks(source, destination, &what, order);
    let refused = refused.map(drop).unwrap_err();
    lines.push((refused.to_string(), format!("{refused:?}")));
    let expected = [
        "a source of 64 bytes and a destination of 32 bytes",
        "the source is of GPU 1, not of GPU 0",
        "the source of pair 0 is block 4, out of range: 4 blocks are ready",
    ]
    .map(|why| format!("move from GPU 0 to GPU 1: {why}"));
    for (expected, (display, debug)) in expected.iter().zip(lines) {
        assert_eq!((&display, &debug), (expected, expected));
    }
    drop((pair, near, far));
    sound(&sim, devices);
}
