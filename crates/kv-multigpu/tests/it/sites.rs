//! What a driver sees of moves and of tasks: which line of the program asked for them, and which bytes of
//! its tables the host writes.

use std::sync::Arc;

use crate::common::moving::pair;
use cuda_driver::{Device, DeviceBuffer, Event, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_multigpu::DeviceRegistry;
use kv_multigpu::moves::{
    BlockGrid, BlockMemory, BlockMove, BlockPair, BlockPairs, HandOver, Held, MoveOrder, Mover,
    MoverConfig, Route,
};
use kv_multigpu::threads::{DeviceThread, DeviceThreadOptions};
use kv_testkit::{Watch, from_here};

const BYTES: u64 = 8192;

fn devices(watch: &Watch) -> [Device; 2] {
    machine(watch).1
}

fn machine(watch: &Watch) -> (SimDriver, [Device; 2]) {
    let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
    sim.prefer_ptx(true);
    let driver = watch.over(Arc::new(sim.clone()));
    (sim, [0, 1].map(|ordinal| Device::open(Arc::clone(&driver), ordinal).unwrap()))
}

fn config(prefer: Route) -> MoverConfig {
    MoverConfig { prefer, chunk_bytes: 4096, chunks: 2, kernel_blocks: 2, ..MoverConfig::default() }
}

fn memory(device: &Device) -> DeviceBuffer {
    DeviceBuffer::alloc(device, BYTES).unwrap()
}

fn pairs() -> [BlockPair; 2] {
    [pair(0, 1), pair(1, 0)]
}

fn blocks(device: &Device) -> BlockMemory<DeviceBuffer> {
    let buffer = memory(device);
    let grid = BlockGrid { blocks: 2, block_stride: BYTES / 2, row_stride: BYTES / 2 };
    BlockMemory::new(device, vec![buffer.span()], grid, buffer).unwrap()
}

#[test]
fn moves_name_the_programs_line() {
    for route in [Route::Push, Route::Pull, Route::Host] {
        let watch = Watch::default();
        let (sim, [from, to]) = machine(&watch);
        let (after, on) = (Stream::new(&from).unwrap(), Stream::new(&to).unwrap());
        // A move that is known to be over asks the driver nothing.
        sim.hold(after.raw());
        let order = MoveOrder { after: &after, on: &on };
        let config = config(route);
        let mut mover =
            from_here!(watch, "cuStreamCreate", Mover::new(&from, &to, config)).0.unwrap();
        assert_eq!(mover.route(), route);
        let (source, destination) = (Held::from(memory(&from)), Held::from(memory(&to)));
        let moved =
            { from_here!(watch, "cuEventRecord", mover.move_tensor(source, destination, order)) };
        assert!(moved.1, "it is enqueued by lines of this crate");
        let mut moved = moved.0.unwrap();
        from_here!(watch, "cuEventQuery", moved.is_complete()).0.unwrap();
        from_here!(watch, "cuStreamWaitEvent", moved.wait_on(&after)).0.unwrap();
        from_here!(watch, "cuStreamWaitEvent", moved.reclaim_on(&after)).0.unwrap();
        let (finished, _) = from_here!(watch, "cuEventQuery", moved.try_finish());
        drop(finished);
        sim.release_hold(after.raw());
        let (near, far) = (blocks(&from), blocks(&to));
        let pairs = pairs();
        let what = BlockMove::whole(BlockPairs::new(&pairs).unwrap(), BYTES / 2);
        let moved =
            { from_here!(watch, "cuLaunchKernel", mover.move_blocks(near, far, &what, order)) };
        let moved = moved.0.unwrap();
        drop(from_here!(watch, "cuEventSynchronize", moved.finish()).0.unwrap());
        let (source, destination) = (Held::from(memory(&from)), Held::from(memory(&to)));
        sim.hold(after.raw());
        drop(mover.move_tensor(source, destination, order).unwrap());
        from_here!(watch, "cuEventQuery", mover.sweep()).0;
        sim.release_hold(after.raw());
        from_here!(watch, "cuEventSynchronize", mover.settle()).0.unwrap();
        after.synchronize().unwrap();
    }
}

#[test]
fn activations_name_the_programs_line() {
    let watch = Watch::default();
    let [from, to] = devices(&watch);
    let (producer, consumer) = (Stream::new(&from).unwrap(), Stream::new(&to).unwrap());
    let mover = Mover::new(&from, &to, config(Route::Push)).unwrap();
    let mut boundary = from_here!(watch, "cuMemAlloc", HandOver::new(mover, BYTES, 1)).0.unwrap();
    let outgoing = from_here!(watch, "cuStreamWaitEvent", boundary.room(&producer)).0.unwrap();
    let sent = {
        from_here!(watch, "cuMemcpyPeerAsync", boundary.send(outgoing, BYTES, &producer, &consumer))
    };
    let incoming = sent.0.unwrap();
    boundary.done(incoming, &consumer).unwrap();
    // A second consumer makes readers be recorded.
    let other = Stream::new(&to).unwrap();
    for consumer in [&other, &consumer, &other] {
        let outgoing = boundary.room(&producer).unwrap();
        let incoming = boundary.send(outgoing, BYTES, &producer, consumer).unwrap();
        boundary.done(incoming, consumer).unwrap();
    }
    let outgoing = boundary.room(&producer).unwrap();
    let incoming = boundary.send(outgoing, BYTES, &producer, &consumer).unwrap();
    from_here!(watch, "cuEventRecord", boundary.done(incoming, &consumer)).0.unwrap();
}

#[test]
fn devices_name_the_programs_line() {
    let watch = Watch::default();
    let devices = devices(&watch);
    let registry = DeviceRegistry::new(Arc::clone(devices[0].driver())).unwrap();
    drop(devices);
    drop(registry.device(0).unwrap());
    drop(registry.device(1).unwrap());
    from_here!(watch, "cuCtxSynchronize", registry.drain(0)).0.unwrap();
    from_here!(watch, "cuDevicePrimaryCtxRelease", registry.close(0)).0.unwrap();
    let closed = from_here!(watch, "cuDevicePrimaryCtxRelease", registry.close_all()).0;
    assert!(closed.is_complete());
}

/// A task runs on another thread, inside a call of this crate; the place is the line of the task.
#[test]
fn tasks_name_their_own_lines() {
    let watch = Watch::default();
    let [device, _] = devices(&watch);
    let thread = DeviceThread::spawn(&device, DeviceThreadOptions::default()).unwrap();
    let (memory, stream) = (memory(&device), Stream::new(&device).unwrap());
    let of_task = watch.clone();
    let task = thread.submit(move |device| {
        let through = [
            from_here!(of_task, "cuMemsetD8Async", stream.fill(memory.span(), 1)).1,
            from_here!(of_task, "cuEventCreate", Event::new(device)).1,
        ];
        from_here!(of_task, "cuStreamSynchronize", stream.synchronize()).0.unwrap();
        through
    });
    assert_eq!(task.unwrap().wait(), Ok([false, false]));
    thread.close().unwrap();
}

/// Two planes and two pairs are all that a table of a move holds, however long the table is.
#[test]
fn a_move_of_blocks_tells_the_words_of_its_table() {
    let watch = Watch::default();
    let [from, to] = devices(&watch);
    let (after, on) = (Stream::new(&from).unwrap(), Stream::new(&to).unwrap());
    let mut mover = Mover::new(&from, &to, config(Route::Push)).unwrap();
    let (source, destination) = (blocks(&from), blocks(&to));
    watch.accesses();
    let order = MoveOrder { after: &after, on: &on };
    let moved = mover.move_blocks(
        source,
        destination,
        &BlockMove::whole(BlockPairs::new(&pairs()).unwrap(), BYTES / 2),
        order,
    );
    let told: Vec<_> =
        watch.accesses().iter().map(|access| (access.bytes, access.writes)).collect();
    assert_eq!(told, [((2 + pairs().len() as u64) * 8, true)]);
    moved.unwrap().finish().map_err(|(error, _)| error).unwrap();
}
