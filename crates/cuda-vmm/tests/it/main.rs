//! The tests of this crate on the simulated device, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

mod admission;
mod ahead;
mod behind;
mod conformance;
mod elastic_pool;
mod faults;
mod gate;
mod limit;
mod mapping;
mod page_pool;
mod proof;
mod properties;
mod rest;
#[cfg(all(feature = "sabotage", debug_assertions))]
mod sabotage;
mod sequence_faults;
mod sequence_schedules;
mod sequence_space;
mod sites;
mod sizes;
mod stress;

kv_testkit::allocator!(1 << 30);
