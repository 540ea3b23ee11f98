//! All tests of the crate.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]
#![allow(clippy::print_stdout, reason = "a long campaign prints its counts")]
#![allow(unreachable_pub, reason = "helpers of several modules")]

mod common;
mod contexts;
mod explore;
mod faults;
mod handles;
mod initialised;
mod kernels;
mod memory;
mod order;
mod pace;
mod ptx_kernels;
mod ptx_order;
mod ptx_planted;
mod ptx_semantics;
mod race_programs;
mod races;
mod sizes;
mod time;
mod time_profile;
mod virtual_memory;

kv_testkit::allocator!(1 << 30);
