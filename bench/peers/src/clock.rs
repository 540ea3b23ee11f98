//! Which time counts.
//!
//! The machine may be busy with other programs. What one thread does is measured by the processor
//! time of that thread, which stands still while another program has the processor; what several
//! threads do together, by the clock on the wall, for waiting is part of it.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A start, in the processor time of the thread that made it.
pub struct Stopwatch(Duration);

impl Stopwatch {
    /// Starts now.
    #[must_use]
    pub fn start() -> Self {
        Self(thread_time())
    }

    /// Processor time of this thread since the start.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        thread_time().saturating_sub(self.0)
    }
}

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_processor_time() {
        let watch = Stopwatch::start();
        let mut steps = 0_u64;
        while watch.elapsed().is_zero() {
            steps += 1;
        }
        assert!(steps < 1_000_000, "the clock stood still");
    }
}
