//! Replays LLM request traces through mapped, pooled, staged and transferred KV memory and verifies every byte.
//!
//! The program `kv-replay` is a thin command line over this library:
//!
//! - [`trace`] reads and writes request traces, also in other public formats, and refuses an invalid one with its line and
//!   value; [`convert`] converts them;
//! - [`generate`] creates workloads in the same format from a seed;
//! - [`policies`] simulates eviction policies on a trace, exactly;
//! - [`config`] and [`shape`] hold the options of a run, [`device`] opens its devices, [`disk`] is its files below host memory, [`nodes`] the
//!   processes that keep blocks for each other, and
//!   [`place`] divides the model over them;
//! - [`doctor`] looks at the machine that is to run it;
//! - [`plan`] says what so many GPUs would make of a trace;
//! - [`series`] is what a run did over time, and [`page`] shows it;
//! - [`engine`] runs it, by itself or with [worker processes](engine::workers), and [`report`] holds the
//!   results.
//!
//! # Examples
//!
//! ```
//! use kv_replay::generate::{GenerateOptions, generate};
//! use kv_replay::policies::{Capacity, hit_rates};
//!
//! let trace = generate(&GenerateOptions { requests: 100, seed: 7 })?;
//! let report = hit_rates(&trace, &[Capacity::new(1000)?]);
//! let rate = |policy| report.capacities[0].hit_rate(policy);
//! assert!(rate("lru") <= rate("belady"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What it does not do
//!
//! It runs no model. The library prints nothing: reports are values, and [`config::Progress`]
//! receives the progress of a run.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod compressed;
pub mod config;
pub mod convert;
pub mod device;
pub mod disk;
pub mod doctor;
pub mod engine;
pub mod family;
mod formats;
pub mod generate;
pub mod hints;
pub mod json_file;
mod life;
pub mod memory;
mod model_cost;
mod model_line;
pub mod nodes;
pub mod page;
pub mod place;
pub mod plan;
pub mod policies;
pub mod profile;
pub mod report;
pub mod rng;
mod run_progress;
pub mod series;
pub mod shape;
mod tiers_report;
pub mod trace;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
