//! The tests of the tools.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cli;
mod eviction;
mod formats;
mod page;
mod plan;
mod policies;
