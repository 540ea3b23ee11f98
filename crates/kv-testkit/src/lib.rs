//! What the tests of several crates need. Never published: a dev-dependency without a version.
//!
//! * [`allocator!`] and [`alloc`]: memory in bounds, and counted.
//! * [`Watch`]: which line of a test each call of the driver was made for.
//! * [`etcd`]: the program, for a trial alone.
//! * [`machine`]: simulated devices, and a kernel that copies bytes.
//! * [`raw_args`]: the parameters of a transfer kernel.
//! * [`Random`]: reproducible numbers.
//! * [`sweep`]: the values at which numbers are tried.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

pub mod alloc;
pub mod etcd;
#[cfg(feature = "cuda")]
pub mod machine;
mod random;
#[cfg(feature = "cuda")]
pub mod raw_args;
pub mod sweep;
#[cfg(feature = "cuda")]
mod watch;

pub use random::{Random, mix, pattern};
#[cfg(feature = "cuda")]
pub use watch::Watch;
