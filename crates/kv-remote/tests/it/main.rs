//! The tests of kv-remote.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;
mod fuzz;
mod handover;
mod host_tier;
mod node;
mod peers;
mod prelude;
mod sizes;
mod tier;
