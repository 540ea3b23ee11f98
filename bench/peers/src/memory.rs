//! What a pool costs in memory, and what its creation costs in time, each in a fresh process.
//!
//! In one process the memory of one contender would be the free list of the next.

use std::process::Command;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use crate::clock::Stopwatch;
use crate::contender::{CHAIN, Contender, chain};
use crate::heap;

/// Blocks of the pool that is created.
pub const BLOCKS: usize = 1 << 20;

/// What is seen in one fresh process.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Seen {
    /// Time to create the pool.
    pub create_ms: f64,
    /// Resident memory a block after creation.
    pub created_resident: f64,
    /// Time to store a block without eviction, once for each block, in batches.
    pub fill_ns: f64,
    /// Peak resident memory a block with every block cached.
    pub cached_resident: f64,
    /// Time to drop the full pool.
    pub drop_ms: f64,
    /// Bytes asked of the heap and not given back, a block, after creation.
    pub created_heap: f64,
    /// The same with every block cached.
    pub cached_heap: f64,
}

/// Looks at `C` in this process, which has done nothing else.
///
/// # Errors
/// Where the system does not tell how much memory is resident.
pub fn look<C: Contender>() -> anyhow::Result<Seen> {
    let per_block = |bytes: u64| bytes as f64 / BLOCKS as f64;
    let before = resident("VmRSS")?;
    let start = Stopwatch::start();
    let pool = C::with_blocks(BLOCKS);
    let create_ms = start.elapsed().as_secs_f64() * 1e3;
    let created_resident = per_block(resident("VmRSS")?.saturating_sub(before));
    let start = Stopwatch::start();
    fill(&pool);
    let fill_ns = start.elapsed().as_secs_f64() * 1e9 / BLOCKS as f64;
    let cached_resident = per_block(resident("VmHWM")?.saturating_sub(before));
    let start = Stopwatch::start();
    drop(pool);
    let drop_ms = start.elapsed().as_secs_f64() * 1e3;
    // Once more, counted: counting would slow down what is timed.
    let (created, pool) = heap::count(|| C::with_blocks(BLOCKS));
    let (filled, ()) = heap::count(|| fill(&pool));
    let created_heap = created.live_bytes as f64 / BLOCKS as f64;
    let cached_heap = created_heap + filled.live_bytes as f64 / BLOCKS as f64;
    Ok(Seen {
        create_ms,
        created_resident,
        fill_ns,
        cached_resident,
        drop_ms,
        created_heap,
        cached_heap,
    })
}

fn fill<C: Contender>(pool: &C) {
    for number in 0..(BLOCKS / CHAIN) as u64 {
        pool.store_batch(&chain::<C>(0, number));
    }
}

/// Looks at the contender called `name` in a fresh process of this program.
///
/// # Errors
/// When that process fails.
pub fn look_in_fresh_process(name: &str) -> anyhow::Result<Seen> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let output = Command::new(program)
        .args(["--look-at", name])
        .output()
        .context("cannot start this program again")?;
    if !output.status.success() {
        bail!("looking at {name} failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    serde_json::from_slice(&output.stdout).context("cannot read what was seen")
}

/// A figure of `/proc/self/status`, in bytes.
fn resident(field: &str) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("no /proc/self/status")?;
    parse_status(&status, field).with_context(|| format!("no {field} in /proc/self/status"))
}

fn parse_status(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_is_read_in_bytes() {
        let status = "Name:\tpeers\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n";
        assert_eq!(parse_status(status, "VmRSS"), Some(1 << 20));
        assert_eq!(parse_status(status, "VmSwap"), None);
    }
}
