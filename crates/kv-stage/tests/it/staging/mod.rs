//! Buffers of a pool: what is received, when they are reused, and the state after failures.

mod failures;
mod overlap;
mod pinning;
mod retirement;
mod slabs;
mod stall;
