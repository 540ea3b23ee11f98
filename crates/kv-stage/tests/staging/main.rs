//! Staging on the simulated device: what arrives, what is reused when, and what a failure leaves.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod failures;
mod machine;
mod overlap;
mod retirement;
mod stall;
mod step;
