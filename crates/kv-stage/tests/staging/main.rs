//! Staging on the simulated device: what is received, when buffers are reused, and the state after
//! failures.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod delta;
mod failures;
mod machine;
mod overlap;
mod pinning;
mod retirement;
#[path = "../support/rows.rs"]
mod rows;
mod slabs;
mod stall;
mod step;
