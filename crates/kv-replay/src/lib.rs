//! What the program `kv-replay` is made of. The library is for that program, `tools/` and the examples of this repository alone,
//! without promises: nothing here is a public API, and it changes without notice. Run the program: see the README.
//!
//! - [`trace`] reads and writes request traces, and refuses an invalid one with its line and value;
//! - [`generate`] creates workloads in the same format from a seed;
//! - [`config`] and [`shape`] hold the options of a run, [`device`] opens its devices, [`disk`] is its files below host memory, [`nodes`]
//!   the processes that keep blocks for each other, and [`place`] divides the model over them;
//! - [`engine`] runs it, by itself or with [worker processes](engine::workers), and [`report`] holds the results;
//! - [`series`] is what a run did over time;
//! - [`command_line`] is what several command lines have in common.

#![doc(hidden)]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod command_line;
pub mod config;
pub mod device;
pub mod disk;
pub mod engine;
pub mod family;
pub mod generate;
pub mod hints;
pub mod json_file;
pub mod memory;
pub mod nodes;
pub mod place;
pub mod report;
pub mod rng;
pub mod series;
pub mod shape;
pub mod trace;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
