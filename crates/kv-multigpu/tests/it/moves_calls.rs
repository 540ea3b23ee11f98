//! How many driver calls moves make in steady state: what they cost the host, counted where it can be.

use std::collections::BTreeMap;

use crate::common::machine;
use crate::common::moving::{Pair, scattered};
use cuda_driver::{Device, DeviceBuffer, Stream};
use cuda_sim::SimDriver;
use kv_multigpu::moves::{
    BlockGrid, BlockMemory, BlockMove, BlockPairs, HandOver, Held, MoveOrder, Mover, MoverConfig,
    Route,
};

const BYTES: u64 = 4096;

type Calls = BTreeMap<&'static str, u64>;

/// The calls of each of `times` rounds, which must be alike.
fn calls_a_round(sim: &SimDriver, times: u64, mut round: impl FnMut()) -> Calls {
    let before = sim.calls();
    (0..times).for_each(|_| round());
    let of = |call| before.get(call).copied().unwrap_or(0);
    let made = sim.calls().into_iter().map(|(call, count)| (call, count - of(call)));
    let each = |(call, count): (&'static str, u64)| {
        assert_eq!(count % times, 0, "{count} {call} in {times} rounds");
        (call, count / times)
    };
    made.filter(|&(_, count)| count > 0).map(each).collect()
}

fn calls(expected: &[(&'static str, u64)]) -> Calls {
    expected.iter().copied().collect()
}

fn two_devices() -> (SimDriver, [Device; 2]) {
    let (sim, registry) = machine(2, true);
    (sim, [0, 1].map(|ordinal| registry.device(ordinal).unwrap()))
}

/// A layer is `room`, `send` and `done`. Five calls do its work; the others bind contexts on a thread that
/// has none.
#[test]
fn a_layer_is_handed_over_with_five_calls_and_two_bindings() {
    let (sim, [from, to]) = two_devices();
    let config = MoverConfig { tables: 0, ..MoverConfig::default() };
    let mover = Mover::new(&from, &to, config).unwrap();
    let mut boundary = HandOver::new(mover, BYTES, 2).unwrap();
    let (producer, consumer) = (Stream::new(&from).unwrap(), Stream::new(&to).unwrap());
    let mut layer = |consumer: &Stream| {
        let outgoing = boundary.room(&producer).unwrap();
        let incoming = boundary.send(outgoing, BYTES, &producer, consumer).unwrap();
        boundary.done(incoming, consumer).unwrap();
    };
    (0..4).for_each(|_| layer(&consumer));
    let work =
        [("cuEventRecord", 2), ("cuStreamWaitEvent", 2), ("cuMemcpyPeerAsync", 1)].as_slice();
    let seen = calls_a_round(&sim, 10, || layer(&consumer));
    let binding = [("cuCtxGetCurrent", 6), ("cuCtxSetCurrent", 4)];
    assert_eq!(seen, calls(&[work, &binding].concat()));
    // Where the consumer's context is current already, as on its thread, one binding is left.
    let seen = to.run(|_| Ok(calls_a_round(&sim, 10, || layer(&consumer)))).unwrap();
    let binding = [("cuCtxGetCurrent", 6), ("cuCtxSetCurrent", 2)];
    assert_eq!(seen, calls(&[work, &binding].concat()));
    // Streams that take turns are told apart by events.
    let other = Stream::new(&to).unwrap();
    (0..4).for_each(|i| layer([&consumer, &other][i % 2]));
    let mut turn = 0;
    let seen = calls_a_round(&sim, 10, || {
        turn += 1;
        layer([&consumer, &other][turn % 2]);
    });
    let work = [("cuEventRecord", 3), ("cuStreamWaitEvent", 3), ("cuMemcpyPeerAsync", 1)];
    let binding = [("cuCtxGetCurrent", 8), ("cuCtxSetCurrent", 6)];
    assert_eq!(seen, calls(&[&work[..], &binding].concat()));
}

/// Moves, and waits on the host, which is one call with a binding of its own. Whether its table is still
/// read is known from that wait.
#[test]
fn a_move_makes_no_event_and_binds_its_device_once() {
    for (prefer, blocks, expected) in [
        (Route::Push, false, [2, 1, 0, 1, 6, 4]),
        (Route::Push, true, [3, 3, 1, 0, 9, 6]),
        (Route::Pull, true, [2, 1, 1, 0, 6, 4]),
    ] {
        let (sim, [from, to]) = two_devices();
        sim.prefer_ptx(true);
        let config = MoverConfig { prefer, kernel_blocks: 1, ..MoverConfig::default() };
        let mut pair = Pair::new(&from, &to, config);
        let near = DeviceBuffer::alloc(&from, BYTES).unwrap();
        let far = DeviceBuffer::alloc(&to, BYTES).unwrap();
        pair.after.fill(near.span(), 1).unwrap();
        let grid = BlockGrid { blocks: 16, block_stride: BYTES / 16, row_stride: 0 };
        let pairs = scattered(16, 16);
        let mut round = || {
            let order = MoveOrder { after: &pair.after, on: &pair.on };
            let moved = if blocks {
                let source = BlockMemory::new(&from, vec![near.span()], grid, ()).unwrap();
                let target = BlockMemory::new(&to, vec![far.span()], grid, ()).unwrap();
                let what = BlockMove::whole(BlockPairs::new(&pairs).unwrap(), BYTES / 16);
                pair.mover.move_blocks(source, target, &what, order).unwrap()
            } else {
                let source = Held::new(&from, near.span(), ());
                let target = Held::new(&to, far.span(), ());
                pair.mover.move_tensor(source, target, order).unwrap()
            };
            moved.finish().map_err(|(error, _)| error).unwrap();
        };
        // Until every table has been used.
        (0..10).for_each(|_| round());
        let [records, waits, launches, copies, gets, sets] = expected;
        let expected = [
            ("cuEventRecord", records),
            ("cuStreamWaitEvent", waits),
            ("cuLaunchKernel", launches),
            ("cuMemcpyPeerAsync", copies),
            ("cuEventSynchronize", 1),
            ("cuCtxGetCurrent", gets),
            ("cuCtxSetCurrent", sets),
        ];
        let expected: Calls = expected.into_iter().filter(|&(_, count)| count > 0).collect();
        assert_eq!(calls_a_round(&sim, 10, &mut round), expected, "{prefer:?} {blocks}");
    }
}
