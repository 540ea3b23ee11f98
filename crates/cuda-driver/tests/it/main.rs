//! The tests that need no GPU. `gpu.rs` runs the scenarios and cases of [`common`] on one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]
#![allow(clippy::print_stdout, reason = "a failure is preceded by the case's name or the table")]

mod borrows;
mod common;
mod conformance;
mod current;
mod fence;
mod loss;
mod messages;
mod micro_gpu;
#[cfg(feature = "cuda")]
mod no_driver;
mod pin;
mod reused;
mod reusing;
mod sites;
mod sizes;
mod spans;

kv_testkit::allocator!(1 << 30);
