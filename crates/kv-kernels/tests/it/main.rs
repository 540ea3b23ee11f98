//! The kernels and their launches on the simulated device.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]
#![allow(clippy::duplicate_mod, reason = "each benchmark is a program of its own")]

mod benches;
mod kernels;
mod ops;
mod ptx;
mod ptx_mutants;
mod sites;
mod sizes;
mod transports;

// An unchecked size is a failed test.
kv_testkit::allocator!(1 << 30);
