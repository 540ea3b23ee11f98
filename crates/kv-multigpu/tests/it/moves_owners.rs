//! Whose memory a move and a boundary touch: what failed never writes to the next owner's, and what one
//! boundary gave out is refused by another.

use crate::common::moving::{Pair, buffer, contents, pattern};
use cuda_driver::{Device, DeviceBuffer, DeviceSpan, Driver, ErrorCode, Stream};
use cuda_sim::{Pace, RaceCheck, SimConfig, SimDriver};
use kv_multigpu::moves::{
    BlockGrid, BlockMemory, BlockMove, BlockPairs, HandOver, Held, MoveError, MoveOrder, Mover,
    MoverConfig, Outgoing, Route,
};

const BYTES: usize = 5 * 1024;

fn config(prefer: Route) -> MoverConfig {
    MoverConfig {
        prefer,
        chunk_bytes: 1024,
        chunks: 2,
        kernel_blocks: 1,
        tables: 0,
        ..MoverConfig::default()
    }
}

fn devices(seed: u64) -> (SimDriver, [Device; 2]) {
    let config = SimConfig { devices: 2, seed, ..SimConfig::default() };
    let sim = SimDriver::new(config).unwrap();
    let driver: std::sync::Arc<dyn cuda_driver::Driver> = std::sync::Arc::new(sim.clone());
    (sim, [0, 1].map(|ordinal| Device::open(driver.clone(), ordinal).unwrap()))
}

/// A chunk of a move fails; the next owner of the destination writes to it on the stream that the move was
/// ordered on. No chunk of the move that is still on its way may come after that.
#[test]
fn no_late_chunk_of_a_failed_move_is_written_to_the_next_owners_bytes() {
    for seed in 0..40 {
        let (sim, all) = devices(seed);
        sim.set_pace(Pace::Random);
        let mut pair = Pair::new(&all[0], &all[1], config(Route::Host));
        let near = buffer(&pair.after, &pattern(seed, BYTES));
        let far = DeviceBuffer::alloc(&all[1], BYTES as u64).unwrap();
        sim.fail_nth("cuMemcpyHtoDAsync", 3, ErrorCode::UNKNOWN);
        let order = MoveOrder { after: &pair.after, on: &pair.on };
        let failed = pair.mover.move_tensor(near.into(), far.into(), order).unwrap_err();
        assert_eq!(failed.held.is_complete(), Ok(false), "two chunks are under way");
        let (_near, far) = failed.held.reclaim_on(&pair.on).map_err(|(error, _)| error).unwrap();
        pair.on.fill(far.span(), 0xEE).unwrap();
        pair.on.synchronize().unwrap();
        sim.run_all();
        assert!(contents(&pair.on, far.span()) == [0xEE; BYTES], "seed {seed}");
    }
}

/// Keys and values go over boundaries of their own, side by side, and their tokens are mixed up.
#[test]
fn tokens_of_one_boundary_are_refused_by_another_and_given_back() {
    let (_sim, all) = devices(1);
    let boundary = || {
        let mover = Mover::new(&all[0], &all[1], config(Route::Push)).unwrap();
        HandOver::new(mover, 64, 2).unwrap()
    };
    let (mut keys, mut values) = (boundary(), boundary());
    let (producer, consumer) = (Stream::new(&all[0]).unwrap(), Stream::new(&all[1]).unwrap());
    let foreign = |error: &MoveError, buffer| {
        let MoveError::OtherHandOver { buffer: found, .. } = *error else { panic!("{error}") };
        assert_eq!(found, buffer);
    };
    for buffer in [0, 1] {
        let [key, value] = [&mut keys, &mut values].map(|of| of.room(&producer).unwrap());
        producer.fill(key.span(), 1).unwrap();
        producer.fill(value.span(), 2).unwrap();
        // Each mix-up is refused, with the token, which is then good where it belongs.
        let refused = keys.send(value, 64, &producer, &consumer).unwrap_err();
        foreign(&refused.error, buffer);
        let value = values.send(refused.outgoing, 64, &producer, &consumer).unwrap();
        let (error, key) = values.give_back(key).unwrap_err();
        foreign(&error, buffer);
        let key = keys.send(key, 64, &producer, &consumer).unwrap();
        assert!(contents(&consumer, key.span()) == [1; 64]);
        assert!(contents(&consumer, value.span()) == [2; 64]);
        let (error, key) = values.done(key, &consumer).unwrap_err();
        foreign(&error, buffer);
        keys.done(key, &consumer).map_err(|(error, _)| error).unwrap();
        values.done(value, &consumer).map_err(|(error, _)| error).unwrap();
    }
}

/// Two machines give their contexts the same numbers. Memory of the one is no memory of the other.
#[test]
fn memory_of_another_machine_is_refused() {
    let ((_one, here), (_other, there)) = (devices(1), devices(1));
    assert_eq!(here[0].context(), there[0].context(), "told apart by more than the number");
    let mut pair = Pair::new(&here[0], &here[1], config(Route::Push));
    let near = DeviceBuffer::alloc(&there[0], 64).unwrap();
    let far = DeviceBuffer::alloc(&here[1], 64).unwrap();
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let refused = pair.mover.move_tensor(near.into(), far.into(), order).map(drop).unwrap_err();
    let context = here[0].context();
    let found = (context, context);
    assert_eq!(wrong_context(&refused.error), ("source", 0, found));
}

/// The end, the GPU, and the contexts expected and found.
#[track_caller]
fn wrong_context(error: &MoveError) -> (&'static str, i32, (u64, u64)) {
    let MoveError::WrongContext { what, device, expected, found } = *error else {
        panic!("{error}")
    };
    (what, device, (expected, found))
}

/// The host program has a context of its own on the receiver's GPU. What is made on it, is of the GPU and of no use to
/// a mover that is on the other context; nothing of it is lost by the refusal.
#[test]
fn memory_and_streams_of_another_context_of_the_gpu_are_refused() {
    let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
    let driver: std::sync::Arc<dyn cuda_driver::Driver> = std::sync::Arc::new(sim.clone());
    let first = sim.device_primary_ctx_retain(1).unwrap();
    // SAFETY: used no more once it is gone, except for clean-up, which the driver refuses.
    let gone = unsafe { Device::adopt(driver.clone(), first) }.unwrap();
    // The only way to a second context that the simulated device has: the program resets the GPU.
    // SAFETY: nothing was made from the context.
    unsafe { sim.device_primary_ctx_release(1) }.unwrap();
    let [near, far] = [0, 1].map(|ordinal| Device::open(driver.clone(), ordinal).unwrap());
    assert!(gone.ordinal() == far.ordinal() && !gone.shares_context(&far));
    let contexts = (far.context(), gone.context());

    let mut pair = Pair::new(&near, &far, config(Route::Push));
    let source = buffer(&pair.after, &[7; 64]);
    let there = DeviceBuffer::alloc(&far, 64).unwrap();
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let target = Held::new(&gone, there.span(), "kept");
    let refused = pair.mover.move_tensor(source.into(), target, order).map(drop).unwrap_err();
    assert_eq!(wrong_context(&refused.error), ("destination", 1, contexts));
    let (source, kept) = refused.held.try_finish().unwrap();
    assert_eq!(kept, "kept");
    let grid = BlockGrid { blocks: 4, block_stride: 16, row_stride: 0 };
    let from = BlockMemory::new(&near, vec![source.span()], grid, ()).unwrap();
    let to = BlockMemory::new(&gone, vec![there.span()], grid, ()).unwrap();
    let what = BlockMove::whole(BlockPairs::new(&[]).unwrap(), 16);
    let refused = pair.mover.move_blocks(from, to, &what, order).map(drop).unwrap_err();
    assert_eq!(wrong_context(&refused.error), ("destination", 1, contexts));

    // The same two ends on the mover's own contexts.
    let target = Held::new(&far, there.span(), "kept");
    let moved = pair.mover.move_tensor(source.into(), target, order).unwrap();
    moved.finish().map_err(|(error, _)| error).unwrap();
    assert!(contents(&pair.on, there.span()) == [7; 64]);
}

/// A reader's stream of another device or machine is refused with the token, which is good afterwards.
#[test]
fn a_reader_on_another_device_is_refused_and_the_boundary_goes_on() {
    let (_sim, all) = devices(1);
    let (_other, theirs) = devices(1);
    let mover = Mover::new(&all[0], &all[1], config(Route::Push)).unwrap();
    let mut boundary = HandOver::new(mover, 64, 1).unwrap();
    let [producer, consumer] = all.each_ref().map(|device| Stream::new(device).unwrap());
    let foreign = Stream::new(&theirs[1]).unwrap();
    assert_eq!(foreign.device().context(), consumer.device().context());
    for byte in 0..3 {
        let outgoing = boundary.room(&producer).unwrap();
        producer.fill(outgoing.span(), byte).unwrap();
        let mut incoming = boundary.send(outgoing, 64, &producer, &consumer).unwrap();
        for wrong in [&producer, &foreign] {
            let (error, back) = boundary.done(incoming, wrong).unwrap_err();
            let (MoveError::WrongDevice { what, .. } | MoveError::WrongContext { what, .. }) =
                error
            else {
                panic!("{error}")
            };
            assert_eq!(what, "consumer's stream");
            incoming = back;
        }
        assert!(contents(&consumer, incoming.span()) == [byte; 64]);
        boundary.done(incoming, &consumer).map_err(|(error, _)| error).unwrap();
    }
}

#[test]
fn a_boundary_creates_no_event_after_it_is_made() {
    for prefer in [Route::Push, Route::Host] {
        let (sim, all) = devices(1);
        let mover = Mover::new(&all[0], &all[1], config(prefer)).unwrap();
        let mut boundary = HandOver::new(mover, 64, 3).unwrap();
        let [producer, consumer] = all.each_ref().map(|device| Stream::new(device).unwrap());
        let created = sim.calls()["cuEventCreate"];
        for byte in 0..7 {
            let outgoing = boundary.room(&producer).unwrap();
            producer.fill(outgoing.span(), byte).unwrap();
            let incoming = boundary.send(outgoing, 64, &producer, &consumer).unwrap();
            assert!(contents(&consumer, incoming.span()) == [byte; 64]);
            boundary.done(incoming, &consumer).map_err(|(error, _)| error).unwrap();
            assert_eq!(sim.calls()["cuEventCreate"], created, "{prefer:?}, {byte}");
        }
    }
}

/// A boundary of one buffer, and streams of either side.
struct Side {
    sim: SimDriver,
    boundary: HandOver,
    producers: [Stream; 4],
    consumers: [Stream; 4],
}

impl Side {
    fn new() -> Self {
        let (sim, all) = devices(1);
        sim.set_race_check(RaceCheck::Report);
        let mover = Mover::new(&all[0], &all[1], config(Route::Push)).unwrap();
        let boundary = HandOver::new(mover, 64, 1).unwrap();
        let streams = |device| [(); 4].map(|()| Stream::new(device).unwrap());
        Self { sim, boundary, producers: streams(&all[0]), consumers: streams(&all[1]) }
    }

    /// Hands 64 bytes of `byte` over, from stream to stream by their positions, and reads them.
    fn pass(&mut self, byte: u8, producer: usize, consumer: usize) {
        let (producer, consumer) = (&self.producers[producer], &self.consumers[consumer]);
        let outgoing = self.boundary.room(producer).unwrap();
        producer.fill(outgoing.span(), byte).unwrap();
        let incoming = self.boundary.send(outgoing, 64, producer, consumer).unwrap();
        assert!(contents(consumer, incoming.span()) == [byte; 64]);
        self.boundary.done(incoming, consumer).unwrap();
    }

    /// Sends `byte` to consumer 0, whose stream stands still; the record after the copy fails, before which
    /// there are so many.
    fn interrupted(&mut self, byte: u8, records: u64) -> Outgoing {
        let outgoing = self.boundary.room(&self.producers[0]).unwrap();
        self.producers[0].fill(outgoing.span(), byte).unwrap();
        self.sim.hold(self.consumers[0].raw());
        self.sim.fail_nth("cuEventRecord", records + 1, ErrorCode::UNKNOWN);
        let [producer, consumer] = [&self.producers[0], &self.consumers[0]];
        self.boundary.send(outgoing, 64, producer, consumer).unwrap_err().outgoing
    }

    /// What lies in `span` now, seen by a stream that waits for nothing, and so races on purpose.
    fn now(&self, streams: &[Stream; 4], span: DeviceSpan) -> u8 {
        self.sim.run_all();
        let seen = contents(&streams[3], span);
        assert!(seen.iter().all(|&byte| byte == seen[0]));
        seen[0]
    }
}

impl Drop for Side {
    /// Nothing raced but those who looked.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.sim.run_all();
        let looks = [&self.producers[3], &self.consumers[3]].map(|stream| Some(stream.raw()));
        for race in self.sim.races() {
            let sides = [race.first.actor.stream(), race.second.actor.stream()];
            assert!(sides.iter().any(|side| looks.contains(side)), "{race}");
        }
    }
}

#[test]
fn no_producer_writes_under_an_interrupted_copy() {
    let mut side = Side::new();
    // Of what the producer has enqueued.
    let outgoing = side.interrupted(1, 1);
    side.boundary.give_back(outgoing).unwrap();
    let outgoing = side.boundary.room(&side.producers[1]).unwrap();
    side.producers[1].fill(outgoing.span(), 2).unwrap();
    assert_eq!(side.now(&side.producers, outgoing.span()), 1, "the copy still reads it");
    side.sim.release_hold(side.consumers[0].raw());
    assert_eq!(side.now(&side.producers, outgoing.span()), 2);
}

#[test]
fn a_copy_sent_again_comes_after_the_interrupted_one() {
    let mut side = Side::new();
    // Its reader is on the stream that the copy is sent to in the end.
    side.pass(7, 0, 1);
    let outgoing = side.interrupted(1, 2);
    let (producer, consumer) = (&side.producers[0], &side.consumers[1]);
    let incoming = side.boundary.send(outgoing, 64, producer, consumer).unwrap();
    assert_eq!(side.now(&side.consumers, incoming.span()), 7, "the first copy is to come before");
    side.sim.release_hold(side.consumers[0].raw());
    assert!(contents(consumer, incoming.span()) == [1; 64]);
}

/// As above, with a producer in between whose stream could not be made to wait: what was interrupted is
/// not forgotten.
#[test]
fn an_interrupted_copy_is_remembered_after_a_producer_was_refused() {
    let mut side = Side::new();
    // Its reader is on the stream that the copy is sent to in the end.
    side.pass(7, 0, 1);
    let outgoing = side.interrupted(1, 2);
    side.boundary.give_back(outgoing).unwrap();
    // The wait for the last copy that was sent, after those for the interrupted one and for the producer.
    side.sim.fail_nth("cuStreamWaitEvent", 3, ErrorCode::UNKNOWN);
    side.boundary.room(&side.producers[1]).unwrap_err();
    let producer = &side.producers[2];
    let outgoing = side.boundary.room(producer).unwrap();
    producer.fill(outgoing.span(), 2).unwrap();
    assert_eq!(side.now(&side.producers, outgoing.span()), 1, "the copy still reads it");
    let incoming = side.boundary.send(outgoing, 64, producer, &side.consumers[1]).unwrap();
    assert_eq!(side.now(&side.consumers, incoming.span()), 7, "the first copy is to come before");
    side.sim.release_hold(side.consumers[0].raw());
    assert!(contents(&side.consumers[1], incoming.span()) == [2; 64]);
}

/// A producer begins to fill a buffer and gives it back; another one fills it and sends it.
#[test]
fn what_was_written_and_not_sent_comes_before_the_next_producer() {
    let mut side = Side::new();
    side.sim.hold(side.producers[0].raw());
    let outgoing = side.boundary.room(&side.producers[0]).unwrap();
    side.producers[0].fill(outgoing.span(), 1).unwrap();
    side.boundary.give_back(outgoing).unwrap();
    let (producer, consumer) = (&side.producers[1], &side.consumers[0]);
    let outgoing = side.boundary.room(producer).unwrap();
    producer.fill(outgoing.span(), 2).unwrap();
    side.sim.hold(consumer.raw());
    let incoming = side.boundary.send(outgoing, 64, producer, consumer).unwrap();
    side.sim.run_all();
    side.sim.release_hold(side.producers[0].raw());
    side.sim.run_all();
    side.sim.release_hold(consumer.raw());
    assert!(contents(consumer, incoming.span()) == [2; 64]);
}

/// Two consumers take turns. A copy waits for the buffer's reader, not for what comes after it on the
/// reader's stream, and for the reader whichever stream it is on.
#[test]
fn a_copy_waits_for_the_last_reader_and_not_for_later_work() {
    let mut side = Side::new();
    side.pass(1, 0, 0);
    side.pass(2, 0, 1);
    side.pass(3, 0, 0);
    side.sim.run_all();
    // Would time out if it waited for the stream that stands still.
    side.sim.hold(side.consumers[0].raw());
    side.pass(4, 0, 1);
    // A reader that has not run: the next copy waits for it.
    side.sim.release_hold(side.consumers[0].raw());
    let (producer, consumer) = (&side.producers[0], &side.consumers[1]);
    let outgoing = side.boundary.room(producer).unwrap();
    producer.fill(outgoing.span(), 5).unwrap();
    let incoming = side.boundary.send(outgoing, 64, producer, consumer).unwrap();
    let span = incoming.span();
    side.sim.run_all();
    side.sim.hold(consumer.raw());
    side.boundary.done(incoming, consumer).unwrap();
    let (producer, other) = (&side.producers[0], &side.consumers[0]);
    let outgoing = side.boundary.room(producer).unwrap();
    producer.fill(outgoing.span(), 6).unwrap();
    let incoming = side.boundary.send(outgoing, 64, producer, other).unwrap();
    assert_eq!(side.now(&side.consumers, span), 5, "its reader has not run");
    side.sim.release_hold(consumer.raw());
    assert!(contents(other, incoming.span()) == [6; 64]);
}
