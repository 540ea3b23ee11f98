//! Iterations that are alike, taken as one step: what makes a day of a thousand GPUs quick to plan.

use kv_plane::Sequence;

use super::{Gpu, Planned};
use crate::plan::PlanError;
use crate::plan::jobs::Job;

/// Iterations that are alike are one step from this number on: by its end, nothing of the steps before is open.
const ALIKE_MIN: u64 = 3;

impl Gpu {
    /// For how many iterations the step can stand: they are alike until one request ends, if none computes a prompt and
    /// none that waits may come in, nor blocks from files. Blocks for them are taken at once, if there are so many.
    pub(super) fn alike(&mut self, planned: &Planned) -> Result<u64, PlanError> {
        let pool = self.manager.pool();
        let nobody = self.waiting.is_empty() && self.arrived.is_empty();
        let still = self.over.is_empty() && pool.stats().primary.retiring == 0;
        let stuck = still && (planned.refused || self.manager.free_rows() == 0);
        let one = |job: &Job| {
            job.sequence.as_ref().is_some_and(|of| of.next() == 1 && of.to_compute() < 2)
        };
        let all = self.running.iter().all(one);
        // A manager over files measures the engine by its steps, and is told at each what has come.
        if self.disk.is_some() || planned.prompt_tokens > 0 || !all || !(nobody || stuck) {
            return Ok(1);
        }
        let left = |job: &Job| job.total - job.end + 1;
        let mut iterations = self.running.iter().map(left).min().unwrap_or(1);
        let room = pool.claimable();
        let block_tokens = u64::from(self.manager.formats()[0].block_tokens);
        while iterations >= ALIKE_MIN {
            let tokens = u32::try_from(iterations).unwrap_or(u32::MAX);
            let sequences = self.running.iter().filter_map(|job| job.sequence.as_ref());
            let blocks = |of: &Sequence| {
                let end = of.upper() + u64::from(tokens);
                (end.div_ceil(block_tokens) as usize).saturating_sub(of.block_count())
            };
            if sequences.map(blocks).sum::<usize>() <= room {
                break;
            }
            iterations /= 2;
        }
        if iterations < ALIKE_MIN {
            return Ok(1);
        }
        for job in &mut self.running {
            let Some(sequence) = &mut job.sequence else { continue };
            let tokens = u32::try_from(iterations).unwrap_or(u32::MAX);
            let room = self.manager.reserve(sequence, tokens).map_err(PlanError::manager)?;
            room.given().map_err(PlanError::manager)?;
            job.end += iterations - 1;
        }
        Ok(iterations)
    }
}
