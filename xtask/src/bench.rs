//! `cargo xtask bench`: every benchmark that needs no GPU, one after another.
//!
//! `cargo xtask gpu-bundle` packs those that need one.

use std::process::Stdio;

use anyhow::{Context, bail};

use crate::cargo::{self, Package};
use crate::services;

/// Benchmarks with this name ending need a GPU.
const GPU: &str = "_gpu";

/// Runs all of them, even after one has failed.
pub(crate) fn run() -> anyhow::Result<()> {
    services::provide();
    let packages = cargo::packages()?;
    let mut failed = Vec::new();
    for (package, bench) in without_gpu(&packages) {
        println!("== {package}: {bench}");
        let status = cargo::command()
            .args(["bench", "--package", package, "--bench", bench])
            .stdin(Stdio::null())
            .status()
            .context("cannot start Cargo")?;
        if !status.success() {
            failed.push(format!("{bench} of {package} ({status})"));
        }
    }
    println!(
        "\nOn a machine with a GPU: `cargo xtask gpu-bundle`, and `run.sh` of the folder that it makes."
    );
    println!("Beside the peer's block pool: `cargo xtask peers`.");
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

/// The package and name of each benchmark that needs no GPU.
fn without_gpu(packages: &[Package]) -> impl Iterator<Item = (&str, &str)> {
    packages.iter().flat_map(|package| {
        let benches = package.targets_of("bench").filter(|bench| !bench.ends_with(GPU));
        benches.map(|bench| (package.name.as_str(), bench))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_needs_no_gpu_and_transfers_do() {
        let packages = cargo::packages().unwrap();
        let benches: Vec<_> = without_gpu(&packages).collect();
        assert!(benches.contains(&("kv-pool", "pool")), "{benches:?}");
        assert!(!benches.iter().any(|(_, bench)| bench.contains("gpu")), "{benches:?}");
    }
}
