//! The tests of the library and the program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

mod cli;
mod config;
mod device;
mod disk;
mod engine;
mod faults;
mod files;
mod generate;
mod groups;
mod hints;
mod json_file;
mod life;
mod memory;
mod misuse;
mod nodes;
mod numbers;
mod open_loop;
mod report;
#[cfg(all(feature = "sabotage", debug_assertions))]
mod sabotage;
mod series;
mod signals;
mod sizes;
mod trace;
mod workers;

// What a thread takes is bounded: sizes that would take more are to be refused.
kv_testkit::allocator!(1 << 30);
