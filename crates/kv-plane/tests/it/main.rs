//! Tests on the simulated device, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod allocations;
mod benches;
mod cache;
mod common;
mod endless;
mod groups;
#[cfg(feature = "remote")]
mod handover;
#[cfg(debug_assertions)]
mod harm;
mod latent;
#[cfg(feature = "processes")]
mod liars;
mod machine;
#[cfg(feature = "metrics")]
mod metrics;
mod prelude;
#[cfg(feature = "processes")]
mod processes;
mod sizes;
mod spans;

// Refuses what an unchecked size would ask for, and counts.
kv_testkit::allocator!(1 << 30);
