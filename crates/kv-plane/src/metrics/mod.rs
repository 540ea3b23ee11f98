//! The statistics of a cache as Prometheus text, with a Grafana dashboard. Nothing is counted here: a scrape
//! takes snapshots of the statistics that the crates keep, and writes them out.
//!
//! ```
//! use kv_plane::metrics::Exposition;
//! use kv_pool::{BlockPool, PoolConfig};
//!
//! let pool = BlockPool::new(&PoolConfig::primary_only(64))?;
//!
//! // In the handler of /metrics. The content type is `text/plain; version=0.0.4`.
//! let mut exposition = Exposition::new();
//! exposition.label("model", "llama-3-8b")?;
//! let text = exposition.pool(&pool.stats()).text();
//! let free = "kv_cache_blocks{tier=\"device\",state=\"free\",model=\"llama-3-8b\"} 64";
//! assert!(text.contains(free));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With a [`KvCache`](crate::KvCache):
//!
//! ```text
//! exposition
//!     .manager(&cache.manager().stats())
//!     .lower_tiers(&cache.manager().lower_stats())
//!     .cache(&cache.stats())
//!     .disk(&disk_watch.stats());
//! ```
//!
//! Counters only rise while the process lives, and end in `_total`. Units are in the names: blocks, tokens,
//! bytes.
//!
//! | from | metrics |
//! | --- | --- |
//! | `pool`, `manager` | `kv_cache_blocks{tier,state}` |
//! | `pool` | `kv_cache_block_lookups_total`, `kv_cache_block_hits_total`, `kv_cache_blocks_evicted_total`, `kv_cache_policy_faults_total` |
//! | `manager` | `kv_cache_prompt_tokens_total`, `kv_cache_hit_tokens_total{tier}`, `kv_cache_recomputed_tokens_total`, `kv_cache_steps_total`, `kv_cache_failed_steps_total`, `kv_cache_moved_blocks_total{way}`, `kv_cache_stalls_total{cause}`, `kv_cache_quarantined_blocks{tier}` |
//! | `lower_tiers` | `kv_cache_lower_names{tier}`, `kv_cache_lower_stored_blocks_total{tier}`, `kv_cache_lower_loaded_blocks_total{tier}`, `kv_cache_lower_dropped_names_total{tier}`, `kv_cache_lower_faults_total{reason}`, `kv_cache_lower_unstored_blocks_total`, `kv_cache_lower_waits_total`, `kv_cache_lower_late_total`, `kv_cache_lower_open_blocks` |
//! | `cache` | `kv_cache_ready_blocks{tier}`, `kv_cache_mapped_pages_total{when}`, `kv_cache_growth_stalls_total`, `kv_cache_moved_bytes_total{way}`, `kv_cache_transport_blocks_total{transport}`, `kv_cache_transport_batches_total{transport}` |
//! | `disk` | `kv_cache_disk_slots`, `kv_cache_disk_used_slots`, `kv_cache_disk_files_off`, `kv_cache_disk_stored_blocks_total`, `kv_cache_disk_loaded_blocks_total`, `kv_cache_disk_evicted_blocks_total`, `kv_cache_disk_written_bytes_total`, `kv_cache_disk_read_bytes_total`, `kv_cache_disk_failed_operations_total`, `kv_cache_disk_misses_total{reason}`, `kv_cache_disk_unstored_blocks_total{reason}` |
//!
//! `pool` and `manager` both give `kv_cache_blocks`: add one of them for a cache, or give each a label of its
//! own.
//!
//! It serves no HTTP, and has no registry: a program has those. It has no latencies: an engine knows the time
//! of its steps, and the crates below have no clock.

mod cache;
mod disk;
mod exposition;
mod manager;
mod pool;

pub use exposition::{Exposition, LabelError};

/// A dashboard of these metrics for Grafana: JSON to import, which asks for the Prometheus data source.
pub const DASHBOARD: &str = include_str!("../../grafana.json");
