//! H19 under every order of stream progress: a move reads what was written before it, and its source is
//! not reused under it. With a protection taken out, an order is found in which that goes wrong.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, Driver, Stream};
use cuda_sim::{ExploreLimits, SimConfig, SimDriver, explore, explore_random};
use kv_multigpu::moves::{MoveOrder, Mover, MoverConfig, Route};

const BYTES: u64 = 64;

fn config() -> SimConfig {
    SimConfig { devices: 2, device_bytes: 64 << 20, ..SimConfig::default() }
}

/// Writes, moves, and writes again as soon as the move gives its source back.
fn write_move_write(sim: &SimDriver, prefer: Route) -> Result<(), String> {
    let driver: Arc<dyn Driver> = Arc::new(sim.clone());
    let [from, to] = [0, 1].map(|ordinal| Device::open(Arc::clone(&driver), ordinal).unwrap());
    let (after, on) = (Stream::new(&from).unwrap(), Stream::new(&to).unwrap());
    let config =
        MoverConfig { prefer, chunk_bytes: 32, chunks: 1, tables: 0, ..MoverConfig::default() };
    let mut mover = Mover::new(&from, &to, config).unwrap();
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

#[cfg(all(feature = "sabotage", debug_assertions))]
#[test]
fn without_its_protections_an_order_is_found_that_brings_other_bytes() {
    use kv_multigpu::moves::sabotage::{Protection, take_out};
    for prefer in [Route::Push, Route::Host] {
        for protection in [Protection::SourceOrder, Protection::SourceHeld] {
            let program = |sim: &SimDriver| {
                take_out(Some(protection));
                write_move_write(sim, prefer)
            };
            let found = explore_random(&config(), 0..2_000, program).unwrap();
            take_out(None);
            let failure = found.failure.unwrap_or_else(|| panic!("{prefer:?} {protection:?}"));
            assert!(failure.reason.contains("arrived"), "{}", failure.reason);
        }
    }
}
