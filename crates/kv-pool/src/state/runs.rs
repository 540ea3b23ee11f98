//! Runs: blocks of one prefix that leave a queue together, and come back to it together.
//!
//! A prefix is released from last to first, so its blocks lie in the queue one right behind the
//! other until something comes between them. Such a run is taken out, or put back, with one change
//! of the queue and of the counts for all of it. Other blocks go one by one, with the same outcome.

use crate::blocks::BlockPhase;
use crate::hold::BlockAt;
use crate::state::PoolState;

impl PoolState {
    /// Takes one reference to each block, in their order.
    pub(crate) fn pin_all(&mut self, found: &[BlockAt]) {
        let mut rest = found;
        while let Some((first, others)) = rest.split_first() {
            if self.blocks.pin_again(first.block()) {
                rest = others;
                continue;
            }
            let pinned = if self.plain { self.pin_run(rest) } else { 0 };
            rest = &rest[pinned..];
            if pinned == 0 {
                self.pin(first.block());
                rest = others;
            }
        }
    }

    /// Gives one reference to each block back, from last to first.
    pub(crate) fn unpin_all(&mut self, held: &[BlockAt]) {
        let together = self.plain && self.current <= self.completed;
        let mut rest = held;
        while let Some((last, others)) = rest.split_last() {
            if self.blocks.unpin_one_of_many(last.block()) {
                rest = others;
                continue;
            }
            let released = if together { self.unpin_run(rest) } else { 0 };
            rest = &rest[..rest.len() - released];
            if released == 0 {
                self.unpin(last.block());
                rest = others;
            }
        }
    }

    /// Pins the first blocks as far as they are a run; how many.
    fn pin_run(&mut self, found: &[BlockAt]) -> usize {
        let Some(first) = found.first() else { return 0 };
        let kind = self.blocks.kind(first.block());
        if !kind.is_only_cached() {
            return 0;
        }
        let after = self.blocks.after(first.block());
        let Some(mut before) = self.blocks.pin_first(first.block(), kind) else { return 0 };
        let mut pinned = 1;
        for at in &found[1..] {
            // A link leads to another kind, too: to a block with a duration.
            if before != at.block().0 {
                break;
            }
            let Some(next) = self.blocks.pin_first(at.block(), kind) else { break };
            before = next;
            pinned += 1;
        }
        let tier = &mut self.tiers[kind.tier().index()];
        tier.queues.unlinked(&mut self.blocks, kind.class(), before, after, pinned);
        tier.counts[BlockPhase::Queued as usize] -= pinned as u32;
        tier.counts[BlockPhase::Pinned as usize] += pinned as u32;
        pinned
    }

    /// Releases the last blocks as far as they go to the end of one queue; how many.
    fn unpin_run(&mut self, held: &[BlockAt]) -> usize {
        let Some(last) = held.last() else { return 0 };
        let kind = self.blocks.kind(last.block());
        if !kind.is_only_pinned() {
            return 0;
        }
        let stamp = self.watch.now_ms() as u32;
        let run = held.iter().rev().map(|at| at.block());
        let tier = &mut self.tiers[kind.tier().index()];
        let released = tier.queues.push_run_cached(&mut self.blocks, run, kind, stamp);
        tier.counts[BlockPhase::Pinned as usize] -= released as u32;
        tier.counts[BlockPhase::Queued as usize] += released as u32;
        released
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::integrity;
    use crate::tenants::Tenant;
    use crate::{BlockHash, Naming, PoolConfig, Priority, RecordId, Retention, Tier};

    const BLOCKS: u64 = 48;

    /// A pool full of unused content; every seventh block has a priority of its own, and every
    /// eleventh keeps its priority for a while only.
    fn full() -> (PoolState, Vec<RecordId>) {
        let mut state = PoolState::plain(&PoolConfig::primary_only(BLOCKS)).unwrap();
        let mut ids = Vec::new();
        for n in 0..BLOCKS {
            let id = state.claim_one(Tier::Primary, Tenant::NOBODY).unwrap().block();
            let priority = if n % 7 == 0 { Priority::MAX } else { Priority::MIN };
            let duration = (n % 11 == 0).then_some(Duration::from_secs(9));
            let naming = Naming::from(Retention { priority, duration });
            state.register(id, BlockHash::from_u128(n.into()), None, &naming);
            ids.push(id);
        }
        ids.iter().rev().for_each(|&id| state.unpin(id));
        (state, ids)
    }

    fn at(state: &PoolState, ids: &[RecordId]) -> Vec<BlockAt> {
        ids.iter().map(|&block| state.blocks.at(block)).collect()
    }

    /// Everything that a run changes.
    #[derive(Debug, PartialEq)]
    struct Picture {
        queue: Vec<RecordId>,
        /// References, stamp, and when the priority ends.
        blocks: Vec<(u32, u32, Option<Duration>)>,
        counts: [u32; BlockPhase::COUNT],
    }

    fn picture(state: &PoolState) -> Picture {
        integrity::check(state).unwrap();
        let of = |id| {
            let pinned = state.blocks.place(id) == BlockPhase::Pinned;
            let references = if pinned { state.blocks.references(id) } else { 0 };
            (references, state.blocks.stamp(id), state.watch.expiry(id))
        };
        let tier = state.tier(Tier::Primary);
        Picture {
            queue: tier.queues.iter(&state.blocks).map(|(id, _)| id).collect(),
            blocks: state.blocks.ids().map(of).collect(),
            counts: tier.counts,
        }
    }

    fn random(seed: &mut u64, end: usize) -> usize {
        *seed =
            seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) as usize % end
    }

    #[test]
    fn together_is_the_same_as_one_by_one() {
        for seed in 0..200 {
            let ((mut together, ids), (mut single, _)) = (full(), full());
            let (mut random_state, mut held) = (seed, Vec::<Vec<RecordId>>::new());
            for _ in 0..40 {
                let mut next = |end| random(&mut random_state, end);
                if next(2) == 0 {
                    // A prefix, or some of its blocks, or one block more than once.
                    let (start, step) = (next(ids.len()), 1 + next(3) / 2);
                    let mut some: Vec<_> = ids[start..].iter().copied().step_by(step).collect();
                    some.truncate(1 + next(20));
                    some.extend((next(4) == 0).then_some(some[0]));
                    let found = at(&together, &some);
                    together.pin_all(&found);
                    some.iter().for_each(|&id| single.pin(id));
                    held.push(some);
                } else if !held.is_empty() {
                    let some = held.swap_remove(next(held.len()));
                    let some = at(&together, &some);
                    together.unpin_all(&some);
                    some.iter().rev().for_each(|at| single.unpin(at.block()));
                }
                // Sometimes released blocks must wait for work under way.
                for state in [&mut together, &mut single] {
                    match random_state >> 60 {
                        0 => state.current += 1,
                        1 => state.complete(state.current),
                        _ => {}
                    }
                }
                assert_eq!(picture(&together), picture(&single), "seed {seed}");
            }
        }
    }

    #[test]
    fn a_release_of_what_is_not_held_is_counted_here_too() {
        let (mut state, ids) = full();
        let before = picture(&state);
        let all = at(&state, &ids);
        state.unpin_all(&all);
        assert_eq!(std::mem::take(&mut state.counters.misuses), BLOCKS);
        assert_eq!(picture(&state), before);
    }
}
