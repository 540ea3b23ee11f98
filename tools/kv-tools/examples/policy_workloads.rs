//! Our own policy against published ones on workloads that it was not made for, and on traces.
//!
//! `cargo run --release --manifest-path tools/Cargo.toml --example policy_workloads [-- TRACE...]`
//!
//! Prints one line for each workload and capacity, and fails if our own policy is more than 0.002 below
//! the best of the published ones anywhere.

#![allow(clippy::print_stdout, reason = "a program that reports")]

use std::error::Error;
use std::path::Path;

use kv_replay::trace::Trace;
use kv_tools::convert::{self, ConvertOptions};
use kv_tools::policies::workloads::WORKLOADS;
use kv_tools::policies::{DEFAULT_POLICY, hit_rates, parse_capacities};

const LOOKUPS: u64 = 400_000;
const CAPACITIES: &str = "300,1000,3000,10000,30000,100000";
const PUBLISHED: [&str; 4] = ["lru", "slru", "s3fifo", "arc"];
const ALLOWED: f64 = 0.002;

/// How far our own policy is below the best published one, at worst.
fn compare(name: &str, trace: &Trace) -> Result<f64, Box<dyn Error>> {
    let mut worst = f64::NEG_INFINITY;
    for row in hit_rates(trace, &parse_capacities(CAPACITIES)?).capacities {
        let rate = |policy| row.hit_rate(policy).unwrap_or(f64::NAN);
        let best = PUBLISHED.into_iter().map(rate).fold(0.0, f64::max);
        let ours = rate(DEFAULT_POLICY);
        print!("{name:<14} {:>7}", row.capacity.blocks());
        PUBLISHED.into_iter().for_each(|policy| print!("  {policy} {:.4}", rate(policy)));
        println!("  ours {ours:.4} ({:+.4})  belady {:.4}", ours - best, rate("belady"));
        worst = worst.max(best - ours);
    }
    Ok(worst)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut worst = f64::NEG_INFINITY;
    for workload in WORKLOADS {
        worst = worst.max(compare(workload.name, &workload.generate(LOOKUPS)?)?);
    }
    for path in std::env::args().skip(1) {
        worst = worst
            .max(compare(&path, &convert::read(Path::new(&path), &ConvertOptions::default())?)?);
    }
    println!("at worst {worst:+.4} below the best published policy");
    if worst > ALLOWED { Err("below a published policy".into()) } else { Ok(()) }
}
