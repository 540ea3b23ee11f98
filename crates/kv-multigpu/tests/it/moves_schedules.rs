//! H19 under every order of stream progress: a move reads what was written before it, and its source is
//! not reused under it; neither are its destination and the buffers of a boundary between two stages.

use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, Driver, Stream};
use cuda_sim::{ExploreLimits, SimConfig, SimDriver, explore, explore_random};
use kv_multigpu::moves::{HandOver, MoveOrder, Mover, MoverConfig, Route};

const BYTES: u64 = 64;

fn config() -> SimConfig {
    SimConfig { devices: 2, device_bytes: 64 << 20, ..SimConfig::default() }
}

fn pair(sim: &SimDriver) -> [Device; 2] {
    let driver: Arc<dyn Driver> = Arc::new(sim.clone());
    [0, 1].map(|ordinal| Device::open(Arc::clone(&driver), ordinal).unwrap())
}

fn mover(from: &Device, to: &Device, prefer: Route) -> Mover {
    let config =
        MoverConfig { prefer, chunk_bytes: 32, chunks: 1, tables: 0, ..MoverConfig::default() };
    Mover::new(from, to, config).unwrap()
}

/// What a buffer holds after the work on `stream`, if it is `byte` throughout.
fn expect(stream: &Stream, buffer: &DeviceBuffer, byte: u8, what: &str) -> Result<(), String> {
    let mut seen = [0; BYTES as usize];
    stream.download(&mut seen, buffer.span()).unwrap();
    if seen == [byte; BYTES as usize] { Ok(()) } else { Err(format!("{what}: {seen:?}")) }
}

/// Writes, moves, and writes again as soon as the move gives its source back.
fn write_move_write(sim: &SimDriver, prefer: Route) -> Result<(), String> {
    let [from, to] = pair(sim);
    let (after, on) = (Stream::new(&from).unwrap(), Stream::new(&to).unwrap());
    let mut mover = mover(&from, &to, prefer);
    let near = DeviceBuffer::alloc(&from, BYTES).unwrap();
    let far = DeviceBuffer::alloc(&to, BYTES).unwrap();
    after.fill(near.span(), 1).unwrap();
    let order = MoveOrder { after: &after, on: &on };
    let mut moved = mover.move_tensor(near.into(), far.into(), order).unwrap();
    let far = moved.take_destination().unwrap();
    // The host's way of getting the source back; where it is too early, the device's.
    let near = match moved.try_finish() {
        Ok((near, _)) => near.unwrap(),
        Err(mut moved) => moved.reclaim_on(&after).unwrap().unwrap(),
    };
    after.fill(near.span(), 2).unwrap();
    let mut seen = [0; BYTES as usize];
    on.download(&mut seen, far.span()).unwrap();
    after.synchronize().unwrap();
    if seen == [1; BYTES as usize] { Ok(()) } else { Err(format!("{seen:?} arrived")) }
}

/// Reads a buffer, then moves other bytes into it.
fn read_then_move(sim: &SimDriver, prefer: Route) -> Result<(), String> {
    let [from, to] = pair(sim);
    let (after, on) = (Stream::new(&from).unwrap(), Stream::new(&to).unwrap());
    let mut mover = mover(&from, &to, prefer);
    let near = DeviceBuffer::alloc(&from, BYTES).unwrap();
    let [far, read] = [0, 1].map(|_| DeviceBuffer::alloc(&to, BYTES).unwrap());
    after.fill(near.span(), 1).unwrap();
    on.fill(far.span(), 9).unwrap();
    on.copy_on_device(read.span(), far.span()).unwrap();
    let order = MoveOrder { after: &after, on: &on };
    let mut moved = mover.move_tensor(near.into(), far.into(), order).unwrap();
    let far = moved.take_destination().unwrap();
    expect(&on, &read, 9, "read before the move")?;
    expect(&on, &far, 1, "moved")
}

/// Hands over three times through one buffer, to these of two streams.
fn hand_over_thrice(sim: &SimDriver, prefer: Route, turns: [usize; 3]) -> Result<(), String> {
    let [from, to] = pair(sim);
    let producer = Stream::new(&from).unwrap();
    let consumers = [0, 1].map(|_| Stream::new(&to).unwrap());
    let mut boundary = HandOver::new(mover(&from, &to, prefer), BYTES, 1).unwrap();
    let got = [0, 1, 2].map(|_| DeviceBuffer::alloc(&to, BYTES).unwrap());
    for (pass, got) in got.iter().enumerate() {
        let consumer = &consumers[turns[pass]];
        let outgoing = boundary.room(&producer).unwrap();
        producer.fill(outgoing.span(), pass as u8 + 1).unwrap();
        let incoming = boundary.send(outgoing, BYTES, &producer, consumer).unwrap();
        consumer.copy_on_device(got.span(), incoming.span()).unwrap();
        boundary.done(incoming, consumer).unwrap();
    }
    for (pass, got) in got.iter().enumerate() {
        expect(&consumers[turns[pass]], got, pass as u8 + 1, "handed over")?;
    }
    Ok(())
}

#[test]
fn a_destination_is_not_written_under_its_last_reader() {
    for prefer in [Route::Push, Route::Host] {
        let program = |sim: &SimDriver| read_then_move(sim, prefer);
        explore_random(&config(), 0..500, program).unwrap().assert_passed();
    }
}

#[test]
fn buffers_of_a_boundary_are_not_overwritten_under_copies_and_readers() {
    for prefer in [Route::Push, Route::Host] {
        for turns in [[0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 1, 1]] {
            let program = |sim: &SimDriver| hand_over_thrice(sim, prefer, turns);
            explore_random(&config(), 0..300, program).unwrap().assert_passed();
        }
    }
}

#[test]
fn a_move_brings_what_was_written_before_it_in_every_order() {
    let limits = ExploreLimits { schedules_max: 500, ..ExploreLimits::default() };
    for prefer in [Route::Push, Route::Host] {
        let program = |sim: &SimDriver| write_move_write(sim, prefer);
        let found = explore(&config(), limits, program).unwrap();
        assert!(found.explored > 10, "{found:?}");
        assert!(found.failure.is_none(), "{:?}", found.failure);
        explore_random(&config(), 0..500, program).unwrap().assert_passed();
    }
}
