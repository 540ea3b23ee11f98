//! Buffers of a pool: what is received, when they are reused, and the state after failures.

mod failures;
mod overlap;
mod pinning;
mod retirement;
mod slabs;
mod stall;

use crate::prelude::*;

/// Bytes of a buffer.
const BYTES: usize = 256;

/// A machine, a pool of so many buffers there, and memory for what one of them holds.
fn rig(seed: u64, buffers: usize) -> (Machine, StagingPool, DeviceBuffer) {
    let machine = Machine::new(seed);
    let pool = machine.pool(BYTES as u64, buffers);
    let target = machine.memory(BYTES as u64);
    (machine, pool, target)
}
