//! The cache on the simulated device: contents, order, errors and clean-up.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "../common/mod.rs"]
mod common;

mod adopted;
mod contents;
mod machine;
#[path = "../../../cuda-driver/tests/common/watch.rs"]
mod watch;
