//! Replays LLM request traces through mapped, pooled, staged and transferred KV memory and verifies every byte.
//!
//! The program `kv-replay` is a thin command line over this library: [`trace`] reads and writes request traces,
//! [`generate`] makes workloads in the same format, and [`policies`] simulates eviction policies on them, exactly.

pub mod config;
pub mod device;
pub mod generate;
pub mod json_file;
pub mod policies;
pub mod report;
pub mod rng;
pub mod shape;
pub mod trace;
