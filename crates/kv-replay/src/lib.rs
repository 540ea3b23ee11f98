//! Replays LLM request traces through mapped, pooled, staged and transferred KV memory and verifies every byte.
//!
//! The program `kv-replay` is a thin command line over this library:
//!
//! - [`trace`] reads and writes request traces, and refuses a broken one with its line and value;
//! - [`generate`] makes workloads in the same format, which follow from their seed;
//! - [`policies`] simulates eviction policies on a trace, exactly;
//! - [`config`] and [`shape`] say what a run is asked to do, [`device`] opens what it is to use, [`place`] divides the
//!   model over it;
//! - [`engine`] runs it, and [`report`] is what it found.
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
//! It runs no model, and the library prints nothing: reports are values, and [`config::Progress`] tells the caller how
//! far a run is.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod config;
pub mod device;
pub mod engine;
pub mod generate;
pub mod json_file;
pub mod place;
pub mod policies;
pub mod profile;
pub mod report;
pub mod rng;
pub mod shape;
pub mod trace;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
