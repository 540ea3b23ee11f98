//! The tests of kv-disk.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;
mod faults;
mod files;
mod fuzz;
mod kills;
mod lent;
mod prelude;
#[cfg(feature = "seal")]
mod seal;
mod sizes;
