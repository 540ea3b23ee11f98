//! Prints what a scrape of a cache would answer, to check it with another program:
//!
//! `cargo run -p kv-cache --features metrics --example scrape | promtool check metrics`

#![allow(clippy::print_stdout, reason = "a program that reports")]

use kv_cache::CacheStats;
use kv_cache::metrics::Exposition;
use kv_disk::DiskStats;
use kv_manager::{LowerStats, ManagerStats};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let manager = ManagerStats { prompt_tokens: 4096, cached_tokens: 1024, ..Default::default() };
    let mut exposition = Exposition::new();
    exposition
        .label("model", "a model with \"quotes\"")?
        .manager(&manager)
        .lower_tiers(&LowerStats::default())
        .cache(&CacheStats::default())
        .disk(&DiskStats::default());
    print!("{}", exposition.text());
    Ok(())
}
