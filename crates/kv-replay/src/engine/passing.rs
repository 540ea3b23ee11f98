//! Time that passes while blocks are on their way to tiers below the host and back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_pool::clock::{Clock, ManualClock, SystemClock};

use super::RunError;
use super::cache::Compute;
use super::scheduler::Scheduler;
use super::tiers::keeps_blocks;
use crate::config::RunConfig;

/// Number of iterations after which blocks on their way are given up at the end of a run.
const TRANSFER_ITERATIONS_MAX: u32 = 20_000;

/// For how long blocks on their way to files are waited for at the end of a run.
const TRANSFER_WAIT_MAX: Duration = Duration::from_secs(60);

/// Between two looks at files while nothing else goes on.
const PAUSE: Duration = Duration::from_micros(100);

/// Whether a run goes by the host's clock: over files and other nodes, which take its time, unless requests arrive by that of
/// simulated devices. By a clock that an idle iteration advances, a load would be late however soon it came.
pub(super) fn is_real(config: &RunConfig, is_simulated: bool) -> bool {
    let is_outside = config.disk.is_some() || keeps_blocks(config);
    is_outside && !(config.open_loop && is_simulated)
}

/// The clock of a run's pools: the host's, or the one that shows arrivals.
///
/// The host's is read when a step begins, behind the wait for the one before. What is measured from step to step, such as how
/// fast the engine computes, would be wrong by a clock that is set before.
pub(super) fn pool_clock(
    config: &RunConfig,
    is_simulated: bool,
    arrivals: &ManualClock,
) -> Arc<dyn Clock> {
    match is_real(config, is_simulated) {
        true => Arc::new(SystemClock::new()),
        false => Arc::new(arrivals.clone()),
    }
}

impl<C: Compute> Scheduler<'_, C> {
    /// How much time has passed since the last call, in a run by the host's clock.
    fn passed(&mut self) -> Duration {
        let Some(real) = &mut self.real else { return Duration::ZERO };
        let now = Instant::now();
        now.saturating_duration_since(std::mem::replace(real, now))
    }

    /// Waits until what is on its way to and from the tiers below the host has arrived. A tier that keeps blocks
    /// for good is left behind, and the report says how many.
    pub(super) fn end_transfers(&mut self) -> Result<(), RunError> {
        self.passed();
        let (mut iterations, mut waited) = (0, Duration::ZERO);
        while self.cache.manager().lower_stats().open_tickets > 0 {
            iterations += 1;
            waited += self.passed();
            let given_up = match self.real {
                Some(_) => waited > TRANSFER_WAIT_MAX,
                None => iterations > TRANSFER_ITERATIONS_MAX,
            };
            if given_up {
                break;
            }
            self.pause();
            let step = self.cache.begin_step()?;
            self.cache.finish_step(step)?;
            self.cache.about_to_wait(0);
            self.cache.drain()?;
        }
        Ok(())
    }

    /// Leaves the processor to the threads of the files and of the nodes.
    pub(super) fn pause(&self) {
        if self.real.is_some() {
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use kv_remote::Key;

    use super::*;
    use crate::disk::DiskConfig;
    use crate::nodes::NodeConfig;

    #[test]
    fn a_run_over_files_or_nodes_goes_by_a_clock_that_nobody_sets() {
        let disk = Some(DiskConfig::new("files".into(), 1 << 20));
        let plain = RunConfig::default();
        let files = RunConfig { disk, ..plain.clone() };
        let node = NodeConfig::new(0, 2, Path::new("nodes"), Key::new(&[7; 32]).unwrap(), 1 << 20);
        let mut split = node.clone();
        split.prefill = 1;
        let [node, split] = [node, split].map(|of| RunConfig { node: Some(of), ..plain.clone() });
        let open = RunConfig { open_loop: true, ..files.clone() };
        // By the virtual time of a simulated device, arrivals are all the time there is.
        for (config, is_simulated, is_set) in [
            (&plain, false, true),
            (&files, true, false),
            (&files, false, false),
            (&node, true, false),
            (&split, true, true),
            (&open, true, true),
            (&open, false, false),
        ] {
            let arrivals = ManualClock::new();
            let clock = pool_clock(config, is_simulated, &arrivals);
            let before = clock.now();
            arrivals.advance(Duration::from_secs(1 << 30));
            let passed = clock.now() - before;
            assert_eq!(passed >= Duration::from_secs(1 << 30), is_set, "{config:?} {is_simulated}");
        }
    }
}
