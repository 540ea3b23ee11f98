//! The statistics of a KV cache as Prometheus text, with a Grafana dashboard.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

#[cfg(feature = "cache")]
mod cache;
#[cfg(feature = "disk")]
mod disk;
mod exposition;
mod manager;
mod pool;

pub use exposition::{Exposition, LabelError};

/// A dashboard of these metrics for Grafana: JSON to import, which asks for the Prometheus data source.
pub const DASHBOARD: &str = include_str!("../grafana.json");
