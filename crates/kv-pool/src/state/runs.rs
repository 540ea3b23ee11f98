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
