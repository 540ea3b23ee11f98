//! Every driver call of moves, boundaries, devices' threads and places fails once, at every position, on devices
//! that are as slow as is legal, with the host one and two steps ahead: no wrong byte, no lost device, no leak,
//! and the run goes on. And long runs, in which nothing grows.

#![allow(clippy::result_large_err, reason = "a refusal gives back what it was given")]

use std::collections::VecDeque;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::common::moving::scattered;
use cuda_driver::{Device, DeviceBuffer, Driver, ErrorCode, Event, Stream};
use cuda_sim::{Pace, RaceCheck, SimConfig, SimDriver};
use kv_multigpu::moves::{
    BlockGrid, BlockMemory, BlockMove, BlockPair, BlockPairs, HandOver, Held, Move, MoveOrder,
    Mover, MoverConfig, Route,
};
use kv_multigpu::threads::{DeviceThread, DeviceThreadOptions};
use kv_multigpu::topology::{Sources, Topology};

const BLOCKS: u32 = 6;
const BLOCK: u64 = 32;
const BYTES: u64 = BLOCKS as u64 * BLOCK;
const STEPS: usize = 4;

fn config(prefer: Route) -> MoverConfig {
    MoverConfig {
        prefer,
        chunk_bytes: 2 * BLOCK,
        chunks: 2,
        // As many as are under way with one move interrupted again and again.
        tables: 12,
        table_pairs: 4,
        kernel_blocks: 1,
    }
}

fn slow_devices() -> (SimDriver, [Device; 2]) {
    let config = SimConfig { devices: 2, device_bytes: 1 << 20, ..SimConfig::default() };
    let sim = SimDriver::new(config).unwrap();
    sim.prefer_ptx(true);
    sim.set_pace(Pace::Slowest);
    let driver: Arc<dyn Driver> = Arc::new(sim.clone());
    (sim, [0, 1].map(|ordinal| Device::open(Arc::clone(&driver), ordinal).unwrap()))
}

/// Tries again what was refused: once is planned, and a second time would be a call that never works.
fn again<T, E: Debug>(mut work: impl FnMut() -> Result<T, E>) -> T {
    work().or_else(|_| work()).or_else(|_| work()).unwrap()
}

/// As [`again`], of work that gives back what it was given.
fn again_with<A, T, E: Debug>(given: A, mut work: impl FnMut(A) -> Result<T, (E, A)>) -> T {
    let (mut given, mut errors) = (Some(given), Vec::new());
    while errors.len() < 3 {
        match work(given.take().unwrap()) {
            Ok(done) => return done,
            Err((error, back)) => {
                given = Some(back);
                errors.push(error);
            }
        }
    }
    panic!("refused again and again: {errors:?}")
}

/// What is moved.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Tensor,
    Blocks,
}

/// A machine at work, and a log on the receiver, to which each step's bytes are copied.
struct Work {
    mover: Mover,
    after: Stream,
    on: Stream,
    log: DeviceBuffer,
    pairs: Vec<BlockPair>,
}

impl Work {
    fn new(all: &[Device; 2], prefer: Route) -> Self {
        Self {
            mover: again(|| Mover::new(&all[0], &all[1], config(prefer))),
            log: again(|| DeviceBuffer::alloc(&all[1], STEPS as u64 * BYTES)),
            after: again(|| Stream::new(&all[0])),
            on: again(|| Stream::new(&all[1])),
            pairs: scattered(BLOCKS, BLOCKS),
        }
    }

    fn go(
        &mut self,
        kind: Kind,
        near: DeviceBuffer,
        far: DeviceBuffer,
    ) -> Move<DeviceBuffer, DeviceBuffer> {
        let order = MoveOrder { after: &self.after, on: &self.on };
        let (mut near, mut far) = (near, far);
        let mut errors = Vec::new();
        while errors.len() < 3 {
            let moved = match kind {
                Kind::Tensor => self.mover.move_tensor(near.into(), far.into(), order),
                Kind::Blocks => {
                    let grid = BlockGrid { blocks: BLOCKS, block_stride: BLOCK, row_stride: 0 };
                    let [source, target] = [near, far].map(|buffer| {
                        let device = buffer.device().clone();
                        BlockMemory::new(&device, vec![buffer.span()], grid, buffer).unwrap()
                    });
                    let what = BlockMove::whole(BlockPairs::new(&self.pairs).unwrap(), BLOCK);
                    self.mover.move_blocks(source, target, &what, order)
                }
            };
            match moved {
                Ok(moved) => return moved,
                Err(failed) => {
                    errors.push(failed.error);
                    // On the device's side: the host waits for nothing.
                    (near, far) = again_with(failed.held, |held| held.reclaim_on(&self.after));
                }
            }
        }
        panic!("refused again and again: {errors:?}")
    }

    /// The host is `ahead` steps ahead of the oldest move that it waits for.
    fn run(&mut self, all: &[Device; 2], kind: Kind, ahead: usize) {
        let fresh = |device| again(|| DeviceBuffer::alloc(device, BYTES));
        let mut spare: Vec<_> = (0..=ahead).map(|_| (fresh(&all[0]), fresh(&all[1]))).collect();
        let mut moves = VecDeque::new();
        for step in 0..STEPS {
            let (near, far) = spare.pop().unwrap();
            again(|| self.after.fill(near.span(), step as u8 + 1));
            let (far_span, at) = (far.span(), step as u64 * BYTES);
            moves.push_back(self.go(kind, near, far));
            let part = self.log.span().slice(at, BYTES).unwrap();
            again(|| self.on.copy_on_device(part, far_span));
            if moves.len() > ahead {
                let moved: Move<_, _> = moves.pop_front().unwrap();
                let (near, far) = again_with(moved, Move::finish);
                spare.push((near.unwrap(), far.unwrap()));
            }
        }
        // What is not waited for is left to the mover.
        drop(moves);
        again(|| self.mover.settle());
        let mut seen = vec![0; STEPS * BYTES as usize];
        again(|| self.on.download(&mut seen, self.log.span()));
        for (step, bytes) in seen.chunks(BYTES as usize).enumerate() {
            assert!(bytes.iter().all(|&byte| byte == step as u8 + 1), "step {step}: {bytes:?}");
        }
    }
}

/// Calls that end something, or that a destructor asks before it ends something: refused there, they leave it to
/// the driver, with a warning, and nobody can give it back again.
const CLEAN_UP: [&str; 8] = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuEventDestroy",
    "cuEventQuery",
    "cuMemFreeHost",
    "cuModuleUnload",
    "cuStreamDestroy",
    "cuStreamQuery",
];

/// Runs `program` on slow devices, on what `make` has made there, once for each of its driver calls, which
/// then fails.
fn sweep<T>(
    what: &str,
    make: impl Fn(&[Device; 2]) -> T,
    program: impl Fn(T, &[Device; 2]),
) -> usize {
    let (sim, all) = slow_devices();
    let made = make(&all);
    let before = sim.calls();
    program(made, &all);
    let of = |call: &str| before.get(call).copied().unwrap_or(0);
    let calls: Vec<_> = sim.calls().into_iter().map(|(call, n)| (call, n - of(call))).collect();
    let mut positions = 0;
    for (call, count) in calls {
        for nth in 1..=count {
            let (sim, all) = slow_devices();
            let made = make(&all);
            sim.fail_nth(call, nth, ErrorCode::UNKNOWN);
            let at = format!("{what}: {call}, {nth} of {count}");
            let run = catch_unwind(AssertUnwindSafe(|| program(made, &all)));
            assert!(run.is_ok(), "{at}");
            assert!(all.iter().all(|device| device.poison().is_none()), "{at}");
            assert_eq!(sim.findings(), [], "{at}");
            drop(all);
            let leaks = sim.check_leaks();
            assert!(CLEAN_UP.contains(&call) || leaks.is_clean(), "{at}: {leaks}");
            positions += 1;
        }
    }
    positions
}

#[test]
fn moves_go_on_after_any_call_has_failed_on_slow_devices() {
    let mut positions = 0;
    // Kernels take their time here, so that blocks go once by each way.
    for (prefer, kind, ahead) in [
        (Route::Push, Kind::Tensor, 1),
        (Route::Push, Kind::Tensor, 2),
        (Route::Host, Kind::Tensor, 1),
        (Route::Host, Kind::Tensor, 2),
        (Route::Push, Kind::Blocks, 2),
        (Route::Pull, Kind::Blocks, 1),
        (Route::Host, Kind::Blocks, 2),
    ] {
        let what = format!("{prefer:?} {kind:?}, {ahead} ahead");
        positions +=
            sweep(&what, |all| Work::new(all, prefer), |mut work, all| work.run(all, kind, ahead));
    }
    assert!(positions > 500, "{positions}");
}

/// Passes of a boundary of two buffers, to consumers that take turns, read into a log.
fn hand_over(all: &[Device; 2], prefer: Route, ahead: usize) {
    let mover = again(|| Mover::new(&all[0], &all[1], MoverConfig { tables: 0, ..config(prefer) }));
    // A boundary that cannot be made takes its mover with it.
    let mut boundary = HandOver::new(mover, BYTES, 2).unwrap_or_else(|_| {
        let mover = Mover::new(&all[0], &all[1], MoverConfig { tables: 0, ..config(prefer) });
        HandOver::new(mover.unwrap(), BYTES, 2).unwrap()
    });
    let producer = again(|| Stream::new(&all[0]));
    let consumers = [0, 1].map(|_| again(|| Stream::new(&all[1])));
    let log = again(|| DeviceBuffer::alloc(&all[1], STEPS as u64 * BYTES));
    let mut ends = VecDeque::new();
    for step in 0..STEPS {
        // The same consumer again, another one, and back.
        let consumer = &consumers[step / 2 % 2];
        let mut outgoing = again(|| boundary.room(&producer));
        if step == 1 {
            again(|| producer.fill(outgoing.span(), 0xEE));
            boundary.give_back(outgoing).unwrap();
            // The buffers take turns.
            let other = again(|| boundary.room(&producer));
            boundary.give_back(other).unwrap();
            outgoing = again(|| boundary.room(&producer));
        }
        again(|| producer.fill(outgoing.span(), step as u8 + 1));
        let incoming = again_with(outgoing, |outgoing| {
            let sent = boundary.send(outgoing, BYTES, &producer, consumer);
            sent.map_err(|failed| (failed.error, failed.outgoing))
        });
        let part = log.span().slice(step as u64 * BYTES, BYTES).unwrap();
        again(|| consumer.copy_on_device(part, incoming.span()));
        again_with(incoming, |incoming| boundary.done(incoming, consumer));
        let end = again(|| Event::new(&all[1]));
        again(|| end.record(consumer));
        ends.push_back(end);
        if ends.len() > ahead {
            let end: Event = ends.pop_front().unwrap();
            again(|| end.synchronize());
        }
    }
    consumers.iter().for_each(|consumer| again(|| consumer.synchronize()));
    let mut seen = vec![0; STEPS * BYTES as usize];
    again(|| consumers[0].download(&mut seen, log.span()));
    for (step, bytes) in seen.chunks(BYTES as usize).enumerate() {
        assert!(bytes.iter().all(|&byte| byte == step as u8 + 1), "step {step}: {bytes:?}");
    }
}

#[test]
fn boundaries_go_on_after_any_call_has_failed_on_slow_devices() {
    let mut positions = 0;
    for prefer in [Route::Pull, Route::Host] {
        for ahead in [1, 2] {
            let what = format!("boundary, {prefer:?}, {ahead} ahead");
            positions += sweep(&what, |_| (), |(), all| hand_over(all, prefer, ahead));
        }
    }
    assert!(positions > 300, "{positions}");
}

/// Tasks of both devices' threads; one that could not be run, or whose call failed, is submitted again.
fn on_threads(all: &[Device; 2]) {
    let threads = all
        .each_ref()
        .map(|device| DeviceThread::spawn(device, DeviceThreadOptions::default()).unwrap());
    for step in 0..STEPS as u8 {
        for thread in &threads {
            let task = move |device: &Device| -> Result<u8, cuda_driver::CopyError> {
                let (stream, memory) = (Stream::new(device)?, DeviceBuffer::alloc(device, 1)?);
                stream.fill(memory.span(), step)?;
                let mut byte = [0];
                stream.download(&mut byte, memory.span())?;
                Ok(byte[0])
            };
            let run = || match thread.submit(task).unwrap().wait() {
                Ok(result) => result.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            assert_eq!(again(run), step);
        }
    }
    threads.iter().for_each(|thread| thread.close().unwrap());
}

#[test]
fn threads_go_on_after_any_call_has_failed_on_slow_devices() {
    let positions = sweep("threads", |_| (), |(), all| on_threads(all));
    assert!(positions > 50, "{positions}");
}

#[test]
fn places_are_told_after_any_call_has_failed_on_slow_devices() {
    let told = |(), all: &[Device; 2]| {
        let topology = again(|| Topology::discover(all, &Sources::default()));
        assert!(topology.pair(1, 0).unwrap().access);
    };
    let positions = sweep("topology", |_| (), told);
    assert!(positions > 40, "{positions}");
}

/// How many calls a step makes, and what is alive, at a moment of a long run.
#[derive(Debug, PartialEq)]
struct Load {
    calls: Vec<(&'static str, u64)>,
    alive: cuda_sim::LeakReport,
    bytes: i64,
}

/// Runs `steps` steps, and compares what a tenth of them takes early on with what the last tenth takes.
fn nothing_grows(steps: usize, sim: &SimDriver, mut step: impl FnMut(usize)) {
    // The machine's record of accesses is not ours, and grows to a bound of its own.
    sim.set_race_check(RaceCheck::Off);
    let mut loads = Vec::new();
    let part = steps / 10;
    for tenth in 0..10 {
        let before = sim.calls();
        (tenth * part..(tenth + 1) * part).for_each(&mut step);
        let of = |call: &str| before.get(call).copied().unwrap_or(0);
        let calls = sim.calls().into_iter().map(|(call, count)| (call, count - of(call)));
        let bytes = kv_testkit::alloc::bytes();
        loads.push(Load { calls: calls.collect(), alive: sim.check_leaks(), bytes });
    }
    let (early, late) = (&loads[1], &loads[9]);
    assert_eq!(early.calls, late.calls);
    assert_eq!(early.alive, late.alive);
    // A table that doubles once, and no more.
    assert!(late.bytes - early.bytes < 64 << 10, "{} bytes, then {}", early.bytes, late.bytes);
}

#[test]
fn a_hundred_thousand_passes_of_a_boundary_take_no_more_than_the_first() {
    let (sim, all) = slow_devices();
    let mover = Mover::new(&all[0], &all[1], MoverConfig { tables: 0, ..config(Route::Pull) });
    let mut boundary = HandOver::new(mover.unwrap(), 64, 2).unwrap();
    let producer = Stream::new(&all[0]).unwrap();
    let consumers = [0, 1].map(|_| Stream::new(&all[1]).unwrap());
    let ends = [0, 1, 2].map(|_| Event::new(&all[1]).unwrap());
    nothing_grows(100_000, &sim, |step| {
        let consumer = &consumers[step % 2];
        let outgoing = boundary.room(&producer).unwrap();
        // Given back unsent, again and again.
        boundary.give_back(outgoing).unwrap();
        let outgoing = boundary.room(&producer).unwrap();
        producer.fill(outgoing.span(), step as u8).unwrap();
        let incoming = boundary.send(outgoing, 64, &producer, consumer).unwrap();
        boundary.done(incoming, consumer).unwrap();
        ends[step % 3].record(consumer).unwrap();
        // Two steps behind.
        ends[(step + 1) % 3].synchronize().unwrap();
    });
}

#[test]
fn a_hundred_thousand_moves_take_no_more_than_the_first() {
    for prefer in [Route::Push, Route::Host] {
        let (sim, all) = slow_devices();
        let tables = MoverConfig { tables: 0, ..config(prefer) };
        let mut mover = Mover::new(&all[0], &all[1], tables).unwrap();
        let (after, on) = (Stream::new(&all[0]).unwrap(), Stream::new(&all[1]).unwrap());
        let near = DeviceBuffer::alloc(&all[0], 64).unwrap();
        let far = DeviceBuffer::alloc(&all[1], 64).unwrap();
        let ends = [0, 1, 2].map(|_| Event::new(&all[1]).unwrap());
        let mut kept = None;
        nothing_grows(50_000, &sim, |step| {
            let order = MoveOrder { after: &after, on: &on };
            let source = Held::new(&all[0], near.span(), ());
            let target = Held::new(&all[1], far.span(), ());
            let moved = mover.move_tensor(source, target, order).unwrap();
            // Dropped under way, but for one that is kept for ever.
            if step == 10 {
                kept = Some(moved)
            } else {
                drop(moved)
            }
            ends[step % 3].record(&on).unwrap();
            ends[(step + 1) % 3].synchronize().unwrap();
        });
        drop(kept);
    }
}
