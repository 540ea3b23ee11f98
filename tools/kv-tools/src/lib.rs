//! What stands beside `kv-replay`: it reads traces and the JSON reports of runs.
//!
//! - [`plan`] says what so many GPUs would make of a trace;
//! - [`policies`] simulates eviction policies on a trace, exactly;
//! - [`convert`] reads traces in public formats and writes them in that of `kv-replay`;
//! - [`page`] draws the reports of runs as one HTML page;
//! - [`doctor`] looks at the machine that is to run.
//!
//! The program `kv-tools` is a thin command line over these.

#![forbid(unsafe_code)]

pub mod convert;
pub mod doctor;
pub mod page;
pub mod plan;
pub mod policies;
