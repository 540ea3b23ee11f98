//! Whether a load is worth its wait: the time that it is expected to take, against computing the same tokens again.
//!
//! A tier loads one block after the other, so a load takes the time of the blocks that are open there before it, and
//! of its own. The time of a block is measured from tickets that have ended. Computing takes the time that the engine's
//! rate says. Of a prefix, as much is loaded as saves most time.

use std::time::Duration;

use kv_pool::BlockHash;
use kv_tier::Direction;

use super::loads::{Lack, Lacks};
use super::{Lower, TierState};
use crate::{GroupId, Manager};

/// How fast the engine computes the tokens that are not loaded.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum ComputeRate {
    /// Not known: what a tier has is loaded, however long that takes.
    #[default]
    Unknown,
    /// So many tokens a second; 0 is the same as [`Unknown`](Self::Unknown).
    PerSecond(u64),
    /// Measured by the pool's clock from the steps: as fast as the fastest of late. Not known before a step is complete.
    Measured,
}

/// Of so many requests, or blocks to be stored, for which a tier is too slow, one uses it nevertheless: it may have become
/// faster.
const TRIED: u64 = 64;

/// How much a new measurement counts.
const NEWEST: f64 = 0.25;

/// How much of the fastest rate is left after each further measurement.
const FADES: f64 = 0.98;

/// Measurements of the engine.
#[derive(Debug, Default)]
pub(super) struct Compute {
    per_second: f64,
    /// Tokens of steps that have completed since then.
    tokens: u64,
    since: Duration,
}

impl Compute {
    /// Takes in the time of a new step.
    pub(super) fn tick(&mut self, now: Duration) {
        let took = now.saturating_sub(self.since).as_secs_f64();
        if took > 0.0 {
            let rate = std::mem::take(&mut self.tokens) as f64 / took;
            if rate > 0.0 {
                self.per_second = rate.max(self.per_second * FADES);
            }
            self.since = now;
        }
    }
}

/// Measurements of a tier's loads.
#[derive(Debug, Default)]
pub(super) struct LoadRate {
    /// Seconds of a block, once one was loaded.
    block_s: Option<f64>,
    /// When the latest load ended.
    ended: Duration,
    /// Requests and blocks that it was too slow for.
    declined: u64,
}

impl LoadRate {
    /// A load of so many blocks, which was begun then, has ended.
    pub(super) fn note(&mut self, begun: Duration, now: Duration, blocks: usize) {
        let took = now.saturating_sub(begun.max(self.ended)).as_secs_f64() / blocks.max(1) as f64;
        let before = self.block_s.unwrap_or(took);
        self.block_s = Some(before + NEWEST * (took - before));
        self.ended = now;
    }

    /// Whether it is to be tried although it is too slow. Counts that it was too slow.
    fn is_tried(&mut self) -> bool {
        self.declined += 1;
        self.declined.is_multiple_of(TRIED)
    }
}

impl Lower {
    /// A step of so many tokens is complete.
    pub(crate) fn note_computed(&mut self, tokens: u64) {
        self.compute.tokens += tokens;
    }

    /// Seconds that the engine takes to compute so many tokens, if that is known.
    fn compute_s(&self, tokens: u64) -> Option<f64> {
        let per_second = match self.options.compute {
            ComputeRate::Unknown => 0.0,
            ComputeRate::PerSecond(rate) => rate as f64,
            ComputeRate::Measured => self.compute.per_second,
        };
        (per_second > 0.0).then(|| tokens as f64 / per_second)
    }

    /// Seconds until what is open at a tier is loaded.
    fn queue_s(&self, tier: usize, block_s: f64) -> f64 {
        let loads = self.open.iter().filter(|ticket| ticket.tier == tier);
        let loads = loads.filter(|ticket| ticket.direction == Direction::Load);
        loads.map(|ticket| ticket.blocks() as f64 * block_s).sum()
    }

    /// Whether a block of so many tokens that is stored in a tier could be loaded faster than it is computed. Now and then
    /// it is said to be so although it could not.
    pub(super) fn pays(&mut self, tier: usize, tokens: u32) -> bool {
        let compute = self.compute_s(tokens.into());
        let TierState { load_rate, .. } = &mut self.tiers[tier];
        match (compute, load_rate.block_s) {
            (Some(compute), Some(load)) if load >= compute => load_rate.is_tried(),
            _ => true,
        }
    }

    /// When a request that waits for so many tokens is to stop: no later than it would have them computed.
    pub(super) fn compute_deadline(&self, tokens: u64, deadline: Duration) -> Duration {
        let compute = self.compute_s(tokens).map(|s| Duration::try_from_secs_f64(s).ok());
        match compute.flatten() {
            Some(compute) => deadline.min(self.now.saturating_add(compute)),
            None => deadline,
        }
    }
}

impl Manager {
    /// As much of what a prefix lacks as is worth loading, until the deadline; `None` if nothing is. `near` tokens of it
    /// are cached.
    pub(super) fn worth_loading(
        &mut self,
        names: &[BlockHash],
        lacks: Lacks,
        deadline: Duration,
    ) -> Option<Lacks> {
        let end = self.best_end(&lacks, deadline);
        if end == Some(lacks.end) {
            return Some(lacks);
        }
        let lacking = lacks.keys().count();
        let part = end.filter(|&end| end > lacks.near).and_then(|end| self.lacks(names, end));
        // What a window needs behind a nearer end may be other blocks.
        let part = part.filter(|part| self.best_end(part, deadline) == Some(part.end));
        let tier = lacks.keys().find_map(|key| self.lower.tier_with(key));
        if part.is_none()
            && let Some(tier) = tier
            && self.lower.tiers[tier].load_rate.is_tried()
        {
            return Some(lacks);
        }
        let loaded = part.as_ref().map_or(0, |part| part.keys().count());
        self.lower.stats.declined_blocks += lacking.saturating_sub(loaded) as u64;
        part
    }

    /// The end of a prefix, in tokens, up to which loading saves most time; `None` if it saves none. All of it, where it is
    /// not known how fast the engine is.
    fn best_end(&self, lacks: &Lacks, deadline: Duration) -> Option<u64> {
        if self.lower.compute_s(0).is_none() {
            return Some(lacks.end);
        }
        let left = deadline.saturating_sub(self.lower.now).as_secs_f64();
        let mut order: Vec<(u64, GroupId, Lack)> = Vec::new();
        for (group, lacking) in self.groups.iter().zip(&lacks.groups) {
            // A state is behind all tokens of its place.
            let end = |lack: &Lack| group.tokens_of(lack.place + 1).min(lacks.end);
            order.extend(lacking.iter().map(|lack| (end(lack), group.id, *lack)));
        }
        order.sort_by_key(|&(end, group, lack)| (end, group, lack.place));
        let block_s = |tier: usize| self.lower.tiers[tier].load_rate.block_s.unwrap_or(0.0);
        let mut takes: Vec<f64> = (0..self.lower.tiers.len())
            .map(|tier| self.lower.queue_s(tier, block_s(tier)))
            .collect();
        let mut waits = vec![false; takes.len()];
        let (mut best, mut best_s) = (None, 0.0);
        for (at, &(end, group, lack)) in order.iter().enumerate() {
            let key = (group, lack.name);
            // What is on its way takes no more time than what is open.
            let arriving = self.lower.arriving.get(&key);
            let arriving =
                arriving.and_then(|id| self.lower.open.iter().find(|open| open.id == *id));
            let tier = arriving.map(|open| open.tier).or_else(|| self.lower.tier_with(key));
            let Some(tier) = tier else { break };
            waits[tier] = true;
            if arriving.is_none() {
                takes[tier] += block_s(tier);
            }
            // Blocks of all groups with this end come together.
            if order.get(at + 1).is_some_and(|next| next.0 == end) {
                continue;
            }
            let used = takes.iter().zip(&waits).filter(|(_, waits)| **waits);
            let load_s = used.map(|(takes, _)| *takes).fold(0.0, f64::max);
            let end = if at + 1 == order.len() { lacks.end } else { end };
            let saved = self.lower.compute_s(end.saturating_sub(lacks.near))? - load_s;
            if saved > best_s && load_s <= left {
                (best, best_s) = (Some(end), saved);
            }
        }
        best
    }
}
