//! The tests of the library and the program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

mod cli;
mod contiguous;
mod disk;
mod engine;
mod faults;
mod files;
mod generate;
mod groups;
mod life;
mod misuse;
mod nodes;
mod open_loop;
#[cfg(all(feature = "sabotage", debug_assertions))]
mod sabotage;
mod series;
mod signals;
mod sizes;
mod trace;
mod workers;

// What a thread takes is bounded: sizes that would take more are to be refused.
kv_testkit::allocator!(1 << 30);
