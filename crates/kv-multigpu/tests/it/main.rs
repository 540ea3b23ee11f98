//! The tests of this crate on simulated devices, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

mod bench_moves;
mod device_thread;
mod drops;
mod hand_over_ends;
mod hazards;
mod health;
mod identity;
mod layers;
mod moves;
mod moves_calls;
mod moves_faults;
mod moves_owners;
mod moves_rest;
mod moves_schedules;
mod moves_sweep;
mod placement;
mod registry;
mod sites;
mod sizes;
mod topology;

kv_testkit::allocator!(1 << 30);
