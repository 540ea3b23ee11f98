//! Tests on the simulated device, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod batch;
mod behind;
mod machine;
mod prelude;
mod schedules;
mod sites;
mod sizes;
mod staging;
mod tables;

// Refuses what an unchecked size would ask for, and counts.
kv_testkit::allocator!(1 << 30);
