//! Runs: blocks of one prefix that leave a queue together, and come back to it together.
//!
//! A prefix is released from last to first, so its blocks lie in the queue one right behind the
//! other until something comes between them. Such a run is taken out, or put back, with one change
//! of the queue and of the counts for all of it. Other blocks go one by one, with the same outcome. While an epoch is
//! open, the list of released blocks takes the place of the queue.

use crate::RecordId;
use crate::blocks::{BlockPhase, Blocks, Kind};
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
            let pinned = if self.open { self.pin_run(rest) } else { 0 };
            rest = &rest[pinned..];
            if pinned == 0 {
                self.pin(first.block());
                rest = others;
            }
        }
    }

    /// Gives one reference to each block back, from last to first.
    pub(crate) fn unpin_all(&mut self, held: &[BlockAt]) {
        let mut rest = held;
        while let Some((last, others)) = rest.split_last() {
            if self.blocks.unpin_one_of_many(last.block()) {
                rest = others;
                continue;
            }
            let released = if self.open { self.unpin_run(rest) } else { 0 };
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
        let phase = kind.phase();
        let is_listed = matches!(phase, BlockPhase::Queued | BlockPhase::Retiring);
        if !is_listed || !kind.is_only(phase) {
            return 0;
        }
        let tier = kind.tier().index();
        if phase == BlockPhase::Queued && self.watch.policies[tier].is_some() {
            return self.pin_run_by_policy(found, kind);
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
        let tier = &mut self.tiers[tier];
        match phase {
            BlockPhase::Retiring => self.retiring.close(&mut self.blocks, before, after),
            _ => tier.queues.unlinked(&mut self.blocks, kind.class(), before, after, pinned),
        }
        tier.counts[phase as usize] -= pinned as u32;
        tier.counts[BlockPhase::Pinned as usize] += pinned as u32;
        pinned
    }

    /// The same of blocks that a policy has in its order, which need not lie side by side there.
    fn pin_run_by_policy(&mut self, found: &[BlockAt], kind: Kind) -> usize {
        let tier = &mut self.tiers[kind.tier().index()];
        if tier.held_back.is_some() {
            // Some of them are in a list.
            return 0;
        }
        let blocks = &mut self.blocks;
        let is_pinned = |at: &&BlockAt| blocks.pin_first(at.block(), kind).is_some();
        let pinned = found.iter().take_while(is_pinned).count();
        self.watch.tell(kind.tier(), |policy| {
            found[..pinned].iter().for_each(|at| policy.held(at.block()));
        });
        tier.counts[BlockPhase::Queued as usize] -= pinned as u32;
        tier.counts[BlockPhase::Pinned as usize] += pinned as u32;
        pinned
    }

    /// Releases the last blocks as far as they go to the end of one list; how many.
    fn unpin_run(&mut self, held: &[BlockAt]) -> usize {
        let Some(last) = held.last() else { return 0 };
        let kind = self.blocks.kind(last.block());
        if !kind.is_only(BlockPhase::Pinned) {
            return 0;
        }
        let run = held.iter().rev().map(|at| at.block());
        let frees = self.frees_at_once();
        if frees && self.watch.policies[kind.tier().index()].is_some() {
            return 0;
        }
        let Self { blocks, tiers, retiring, watch, current, .. } = self;
        let tier = &mut tiers[kind.tier().index()];
        let (phase, released) = if frees {
            let stamp = watch.now_ms() as u32;
            (BlockPhase::Queued, tier.queues.push_run_cached(blocks, run, kind, stamp))
        } else {
            let to = (BlockPhase::Retiring, *current as u32);
            let rest = |blocks: &mut Blocks, id, back| blocks.rest_last(id, kind, to, back);
            (to.0, retiring.push_run_back(blocks, run, rest))
        };
        tier.counts[BlockPhase::Pinned as usize] -= released as u32;
        tier.counts[phase as usize] += released as u32;
        released
    }

    /// Makes the first released blocks claimable, `first` and those behind it, as far as they are of one kind with content
    /// and their epochs are complete; whether there were any.
    pub(super) fn free_run(&mut self, first: RecordId) -> bool {
        let kind = self.blocks.kind(first);
        if !kind.is_only(BlockPhase::Retiring) {
            return false;
        }
        let Self { blocks, tiers, retiring, watch, completed, .. } = self;
        let tier = &mut tiers[kind.tier().index()];
        let to = (*completed, watch.now_ms() as u32);
        let freed = tier.queues.take_run_cached(blocks, retiring, kind, to);
        tier.counts[BlockPhase::Retiring as usize] -= freed as u32;
        tier.counts[BlockPhase::Queued as usize] += freed as u32;
        freed > 0
    }
}
