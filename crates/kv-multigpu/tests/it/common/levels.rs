//! Whether passes leak memory, told apart from what a driver makes once and keeps.

use cuda_driver::Device;
use kv_multigpu::DeviceRegistry;

use super::pipeline::{Plan, Seen, run};

/// Whole runs that may take memory before it is called a leak.
const RUNS_MAX: usize = 4;

/// A run that left the free memory of every device as it was.
#[derive(Debug)]
pub(crate) struct Level {
    pub(crate) free: Vec<u64>,
    pub(crate) seen: Seen,
    /// Whole runs until then, itself among them.
    pub(crate) runs: usize,
}

/// Free memory of every device, once all that was dropped is freed.
pub(crate) fn free_bytes(registry: &DeviceRegistry) -> Vec<u64> {
    let free = |ordinal| {
        let device: Device = registry.device(ordinal).unwrap();
        device.free_retired().unwrap();
        device.synchronize().unwrap();
        assert_eq!(device.alive().handles(), 0, "alive: {}", device.alive());
        device.memory_info().unwrap().0
    };
    (0..registry.count()).map(free).collect()
}

/// Runs the plan until one whole run of it takes no memory; the levels between runs, if none does.
///
/// A driver takes memory when there are more streams, events and launches at once than ever before, and
/// keeps it. How many there are is chance, but it comes to an end. A leak of every pass does not: each
/// run takes it again, so that none leaves the memory as it was. Memory is told in pages of 2 MiB, so
/// what a whole run leaks of one device must come to that.
pub(crate) fn run_level(registry: &DeviceRegistry, plan: Plan) -> Result<Level, Vec<Vec<u64>>> {
    let short = Plan { passes: (plan.passes / 10).max(4 * plan.lanes), ..plan };
    let after = |plan| (run(registry, plan).unwrap(), free_bytes(registry));
    let mut last = after(short).1;
    for _ in 0..8 {
        let now = after(short).1;
        if std::mem::replace(&mut last, now.clone()) == now {
            break;
        }
    }
    let mut levels = vec![last];
    for runs in 1..=RUNS_MAX {
        let (seen, free) = after(plan);
        if levels.last() == Some(&free) {
            return Ok(Level { free, seen, runs });
        }
        levels.push(free);
    }
    Err(levels)
}
