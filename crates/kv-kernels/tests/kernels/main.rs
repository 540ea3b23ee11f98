//! The kernels on the simulated device, against oracles that know nothing of them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod checksum;
mod errors;
mod fill_and_gather;
mod machine;
mod transfer;
