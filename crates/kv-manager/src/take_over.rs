//! What a sequence has that begins behind a hit: the blocks that were found, those that come back, and those that were
//! claimed for it.

use kv_pool::HandleError;
use kv_pool::moves::Onboarded;
use kv_pool::tenants::TenantId;
use kv_pool::{Claimed, Pinned, Tier, guard};
use smallvec::SmallVec;

use crate::blocks::Blocks;
use crate::group::{Group, Held, Marks, near};
use crate::hit::{Found, Hit};
use crate::lower::OpenLoad;
use crate::plan::CopyFor;
use crate::sequence::{Depends, note_depends};
use crate::{BlockCopy, Manager};

/// What a sequence gets of all groups.
#[derive(Default)]
pub(crate) struct Gotten {
    pub(crate) held: SmallVec<[Held; 1]>,
    /// Blocks of these that came from host memory.
    pub(crate) far: usize,
    /// Tokens of these blocks, in the group that has most of them.
    pub(crate) far_tokens: u64,
    pub(crate) depends: Depends,
    /// Tokens of the prefix that was found, what loads bring included.
    pub(crate) tokens: u64,
    /// The open loads that bring the rest of it.
    pub(crate) load: OpenLoad,
}

impl Manager {
    /// What a sequence has that goes on behind a hit, with the blocks that were claimed for it.
    pub(crate) fn take_over(
        &mut self,
        tenant: TenantId,
        hit: Hit,
        all: SmallVec<[Claimed; 4]>,
        marks: Marks,
    ) -> Gotten {
        let Hit { tokens, found: all_found, load } = hit;
        let mut gotten = Gotten { tokens, load, ..Gotten::default() };
        for (index, (found, mut claimed)) in all_found.into_iter().zip(all).enumerate() {
            self.groups[index].plan_claimed(&mut self.plan, tenant, &mut claimed);
            let far = self.groups[index].far(&found);
            gotten.far += far;
            gotten.far_tokens = gotten.far_tokens.max(self.groups[index].tokens_of(far));
            self.note_pending(index, &found, tokens, &mut gotten.depends);
            // What a load brings has no name here before it has ended.
            let end = if self.groups[index].is_state() { 0 } else { found.end() };
            let named = found.loading().next().map_or(end, |place| place.min(end));
            let turn = self.groups[index].turn(tokens, marks);
            let blocks = if self.groups[index].is_state() {
                self.state_from(index, found, claimed)
            } else {
                self.blocks_from(index, found, claimed)
            };
            gotten.held.push(Held { named, blocks, turn, ..Held::default() });
        }
        gotten
    }

    /// A running state that begins as a checkpoint, if there is one.
    fn state_from(&mut self, group: usize, found: Found, claimed: Claimed) -> Blocks {
        let group = &self.groups[group];
        let at = found.tail.locations().zip(found.tail.records()).next();
        if let (Some((from, record)), Some(to)) = (at, claimed.ids().next()) {
            let written_by = group.pending(record, self.steps.completed()).unwrap_or(0);
            let (group, tokens) = (group.id, group.block_tokens);
            let copy = BlockCopy { group, from, to: near(to), tokens, written_by };
            guard!("manager.checkpoints-are-copied", self.plan.copy(CopyFor::Checkpoint, copy));
        }
        // The copy comes before every later use of the checkpoint, in the order of the plans.
        let mut blocks = Blocks::default();
        blocks.push_own(claimed);
        blocks
    }

    fn blocks_from(&mut self, group: usize, found: Found, mut claimed: Claimed) -> Blocks {
        let gone = found.tail_first - found.head.len() - found.head_loads;
        let mut blocks = self.found_again(group, found.head, &mut claimed);
        blocks.push_own(take_first(&mut claimed, found.head_loads));
        blocks.push_gone(gone);
        blocks.append(self.found_again(group, found.tail, &mut claimed));
        blocks.push_own(take_first(&mut claimed, found.tail_loads));
        let behind = claimed.split_off(found.gone.start.saturating_sub(blocks.len()));
        blocks.push_own(claimed);
        blocks.push_gone(found.gone.len());
        blocks.push_own(behind);
        blocks
    }

    /// The same of blocks that the pool has found for the sequence.
    fn found_again(&mut self, group: usize, prefix: Pinned, claimed: &mut Claimed) -> Blocks {
        match self.brought(group, prefix, claimed) {
            Ok(blocks) => blocks,
            Err(error) => unreachable!("the pool refused its own blocks: {error}"),
        }
    }

    /// Blocks with names, those in host memory brought back to the first of `claimed`.
    pub(crate) fn brought(
        &mut self,
        group: usize,
        mut prefix: Pinned,
        claimed: &mut Claimed,
    ) -> Result<Blocks, HandleError> {
        let mut blocks = Blocks::default();
        if !self.groups[group].has_far() {
            blocks.push_shared(prefix);
            return Ok(blocks);
        }
        while let Some(tier) = first_tier(&prefix) {
            let alike = prefix.locations().take_while(|at| at.tier == tier).count();
            let rest = prefix.split_off(alike);
            let part = std::mem::replace(&mut prefix, rest);
            if tier == Tier::Primary {
                blocks.push_shared(part);
            } else {
                let target = take_first(claimed, alike);
                hold_onboarded(&mut blocks, self.onboard(group, part, target)?);
            }
        }
        Ok(blocks)
    }

    /// Plans the copies of content in host memory to as many claimed blocks.
    fn onboard(
        &mut self,
        group: usize,
        pinned: Pinned,
        target: Claimed,
    ) -> Result<Onboarded, HandleError> {
        let group = &self.groups[group];
        let onboard = group.pool.begin_onboard(pinned, target).map_err(|refused| refused.reason)?;
        for (from, to) in onboard.pairs() {
            group.plan_copy(&mut self.plan, CopyFor::Return, from, to);
        }
        // Every later use of either block comes later in the plans.
        Ok(onboard.commit())
    }

    /// Notes on which steps the content of what was found in a group depends, for a sequence that goes on behind `tokens`
    /// tokens.
    pub(crate) fn note_pending(
        &self,
        group: usize,
        found: &Found,
        tokens: u64,
        depends: &mut Depends,
    ) {
        let group = &self.groups[group];
        let completed = self.steps.completed();
        for (first, part) in [(0, &found.head), (found.tail_first, &found.tail)] {
            for (place, record) in (first..).zip(part.records()) {
                let pending = group.pending(record, completed);
                if let Some(step) =
                    guard!("manager.depends-on-what-it-finds-later", pending, else None)
                {
                    note_depends(depends, step, group.first_token(place, tokens));
                }
            }
        }
    }
}

fn first_tier(pinned: &Pinned) -> Option<Tier> {
    pinned.locations().next().map(|first| first.tier)
}

fn take_first(claimed: &mut Claimed, count: usize) -> Claimed {
    let rest = claimed.split_off(count);
    std::mem::replace(claimed, rest)
}

impl Group {
    /// The first token that is wrong if the content of a block is, which a sequence of `tokens` tokens goes on
    /// behind.
    pub(crate) fn first_token(&self, place: usize, tokens: u64) -> u64 {
        let before = guard!("manager.a-failed-state-takes-a-token-back", 1, else 0);
        if self.is_state() { tokens.saturating_sub(before) } else { self.tokens_of(place) }
    }
}

/// Adds the blocks that were brought back, in their order: moved blocks are shared, the others are copies.
fn hold_onboarded(blocks: &mut Blocks, onboarded: Onboarded) {
    let Onboarded { mut pinned, mut copies } = onboarded;
    while let Some(tier) = first_tier(&pinned) {
        let alike = pinned.locations().take_while(|at| at.tier == tier).count();
        let rest = pinned.split_off(alike);
        let part = std::mem::replace(&mut pinned, rest);
        if tier == Tier::Primary {
            blocks.push_shared(part);
        } else {
            let rest = copies.split_off(alike);
            blocks.push_own(std::mem::replace(&mut copies, rest));
        }
    }
}
