//! Time that passes while blocks are on their way to tiers below the host and back.

use std::time::{Duration, Instant};

use super::RunError;
use super::cache::Cache;
use super::scheduler::Scheduler;

/// Number of iterations after which blocks on their way are given up at the end of a run.
const TRANSFER_ITERATIONS_MAX: u32 = 20_000;

/// For how long blocks on their way to files are waited for at the end of a run.
const TRANSFER_WAIT_MAX: Duration = Duration::from_secs(60);

/// Between two looks at files while nothing else goes on.
const PAUSE: Duration = Duration::from_micros(100);

impl<C: Cache> Scheduler<'_, C> {
    /// Has the clock go on by as much as the host's has, in a run over files.
    pub(super) fn pass(&mut self) -> Duration {
        let Some(real) = &mut self.real else { return Duration::ZERO };
        let now = Instant::now();
        let passed = now.saturating_duration_since(*real);
        *real = now;
        self.clock.advance(passed);
        passed
    }

    /// Waits until what is on its way to and from the tiers below the host has arrived. A tier that keeps blocks
    /// for good is left behind, and the report says how many.
    pub(super) fn end_transfers(&mut self) -> Result<(), RunError> {
        let (mut iterations, mut waited) = (0, self.pass());
        while self.cache.manager().lower_stats().open_tickets > 0 {
            iterations += 1;
            waited += self.pass();
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
            self.cache.drain()?;
        }
        Ok(())
    }

    /// Leaves the processor to the threads of the files.
    pub(super) fn pause(&self) {
        if self.real.is_some() {
            std::thread::sleep(PAUSE);
        }
    }
}
