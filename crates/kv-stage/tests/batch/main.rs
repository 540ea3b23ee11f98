//! Batches at addresses that stay, on the simulated device.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod graphs;
mod limits;
#[allow(dead_code, reason = "of the staging tests the simulated machine alone is used here")]
#[path = "../staging/machine.rs"]
mod machine;
mod model;
#[cfg(all(feature = "sabotage", debug_assertions))]
mod ptx;
mod refusals;
mod replay;
mod steps;
