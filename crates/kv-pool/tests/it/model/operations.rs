//! What callers ask of the pool, done to the reference.

use std::collections::HashSet;

use super::reference::{
    Block, DEFAULT_PRIORITY, Happened, Model, ModelClaim, Now, PRIMARY, SECONDARY, name,
};

/// Why a claim is refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Refusal {
    Exhausted { requested: usize, claimable: usize, retiring: usize },
    HeldMax,
    KeptForOthers,
}

/// What is said of content when it is given a name.
#[derive(Clone, Copy, Debug)]
pub struct Words {
    pub parent: Option<u32>,
    pub priority: u8,
    pub duration: Option<u64>,
}

impl Model {
    pub fn check_claim(&self, tier: usize, by: usize, count: usize) -> Result<(), Refusal> {
        let (claimable, retiring) = (self.claimable(tier), self.retiring(tier));
        if claimable < count {
            return Err(Refusal::Exhausted { requested: count, claimable, retiring });
        }
        if tier == PRIMARY && count > 0 { self.check_tenant(by, count as u64) } else { Ok(()) }
    }

    pub fn check_tenant(&self, by: usize, count: u64) -> Result<(), Refusal> {
        let (held, _) = self.shares(by);
        if held + count > self.tenants[by].held_max {
            return Err(Refusal::HeldMax);
        }
        let unmet =
            |tenant: usize| self.tenants[tenant].reserved.saturating_sub(self.shares(tenant).0);
        let kept: u64 = (0..self.tenants.len()).filter(|&t| t != by).map(unmet).sum();
        let all = (0..self.tenants.len()).map(|tenant| self.shares(tenant).0);
        let unheld = self.room() - all.sum::<u64>();
        if count + kept > unheld { Err(Refusal::KeptForOthers) } else { Ok(()) }
    }

    pub fn claim(
        &mut self,
        tier: usize,
        by: usize,
        count: usize,
    ) -> Result<Vec<ModelClaim>, Refusal> {
        self.check_claim(tier, by, count)?;
        Ok((0..count).map(|_| self.claim_one(tier, by).unwrap()).collect())
    }

    pub fn release_claimed(&mut self, block: usize, moving: Option<usize>) {
        if let Some(to) = moving {
            self.abort_offload(self.blocks[block].block_id, to);
        }
        assert_eq!(self.blocks[block].now, Now::Claimed);
        self.rest(block);
    }

    /// The block that has the name now, or the one that had it already and keeps it. It is pinned then.
    pub fn register(
        &mut self,
        block: usize,
        moving: Option<usize>,
        content: u32,
        parent: Option<usize>,
        words: Words,
    ) -> Result<usize, usize> {
        let from = self.blocks[block].block_id;
        let named = self.name(block, content, parent, words);
        if let Some(to) = moving {
            self.abort_offload(from, to);
        }
        named
    }

    fn name(
        &mut self,
        own: usize,
        content: u32,
        parent: Option<usize>,
        words: Words,
    ) -> Result<usize, usize> {
        let bearer = self.bearer(content);
        if let Some(known) = bearer {
            let found = &self.blocks[known];
            let as_near = found.content.is_some() && found.tier <= self.blocks[own].tier;
            let found = as_near || matches!(found.now, Now::Pinned(_));
            if found && self.may_use(known) {
                self.counters.duplicates += 1;
                self.pin(known);
                self.adopt(known, parent);
                return Err(known);
            }
            self.come_near(known, own);
        }
        let block = bearer.unwrap_or(own);
        self.counters.registered += 1;
        let new = &mut self.blocks[block];
        (new.content, new.priority, new.duration) = (Some(content), words.priority, words.duration);
        (new.now, new.depth) = (Now::Pinned(1), 0);
        new.chained = words.parent.is_some();
        if let Some(parent) = parent {
            self.link(block, parent);
        }
        self.events.push(Happened::Stored {
            block,
            name: name(content),
            parent: words.parent.map_or(kv_pool::BlockHash::ROOT, name),
            at: self.at(block),
            priority: words.priority,
        });
        Ok(block)
    }

    /// Content that is far and unused, or on its way, was computed again in `own`: it gets that block id, and
    /// keeps what follows it.
    fn come_near(&mut self, known: usize, own: usize) {
        self.counters.dropped += 1;
        let was = self.blocks[known].now;
        self.take_name(known);
        self.unlink(known);
        self.swap(known, own);
        self.blocks[known].tenant = self.blocks[own].tenant;
        match was {
            Now::Moving { from, .. } => self.blocks[own].now = Now::Moving { content: None, from },
            Now::Unused(_) | Now::PassedOver(_) | Now::Shadowed(_) => self.unused(own),
            _ => self.rest(own),
        }
    }

    /// Has a block that lost what it followed follow `parent`.
    fn adopt(&mut self, block: usize, parent: Option<usize>) {
        if let Some(parent) = parent
            && self.blocks[block].chained
            && self.blocks[block].parent.is_none()
        {
            self.link(block, parent);
        }
    }

    /// The parent that a registration names, if it is there.
    pub fn parent(&self, words: Words) -> Option<usize> {
        self.bearer(words.parent?)
    }

    /// Names claimed blocks as consecutive content; which blocks are pinned for it.
    pub fn register_list(
        &mut self,
        claims: &[ModelClaim],
        contents: &[u32],
        mut words: Words,
    ) -> Vec<usize> {
        let mut parent = self.parent(words);
        let mut pinned = Vec::new();
        for (claim, &content) in claims.iter().zip(contents) {
            let tier = self.blocks[claim.block].tier;
            let existing = self.register(claim.block, claim.moving, content, parent, words);
            let block = match existing {
                Err(existing) if self.blocks[existing].tier == tier => {
                    self.release_claimed(claim.block, None);
                    existing
                }
                Err(existing) => {
                    self.unpin(existing);
                    self.blocks[claim.block].now = Now::Pinned(1);
                    claim.block
                }
                Ok(named) => named,
            };
            pinned.push(block);
            words.parent = Some(content);
            parent = self.bearer(content);
        }
        pinned
    }

    /// Has each block of a prefix that has lost its parent follow the one before it again.
    pub fn adopt_all(&mut self, prefix: &[usize]) {
        for (at, &block) in prefix.iter().enumerate() {
            self.adopt(block, prefix[..at].last().copied());
        }
    }

    /// The first of these blocks that their tenants may hold together.
    pub fn usable(&self, found: Vec<usize>) -> Vec<usize> {
        let mut again = HashSet::new();
        found.into_iter().take_while(|&block| self.may_use_beside(block, &mut again)).collect()
    }

    /// Whether the tenant of a block may hold it beside those that are used again, if nobody does yet.
    fn may_use_beside(&self, block: usize, again: &mut HashSet<usize>) -> bool {
        let Block { tenant, tier, .. } = self.blocks[block];
        let free = self.tenants.len() == 1 || tier != PRIMARY;
        if free || !self.is_unused(block) || again.contains(&block) {
            return true;
        }
        let held = |tenant: usize| {
            let own = again.iter().filter(|&&of| self.blocks[of].tenant == tenant);
            self.shares(tenant).0 + own.count() as u64
        };
        let others = (0..self.tenants.len()).filter(|&other| other != tenant);
        let kept: u64 = others.map(|t| self.tenants[t].reserved.saturating_sub(held(t))).sum();
        let in_use: u64 = (0..self.tenants.len()).map(held).sum();
        let may = held(tenant) < self.tenants[tenant].held_max && in_use + kept < self.room();
        if may {
            again.insert(block);
        }
        may
    }

    pub fn match_prefix(&mut self, contents: &[u32]) -> Vec<usize> {
        let there = contents.iter().map_while(|&content| self.find(content)).collect();
        let found = self.usable(there);
        self.adopt_all(&found);
        found.iter().for_each(|&block| self.pin(block));
        self.counters.lookups += contents.len() as u64;
        self.counters.hits += found.len() as u64;
        found
    }

    /// The block that lies at a block id.
    fn lying_in(&self, tier: usize, block_id: usize) -> usize {
        let here =
            |&id: &usize| self.at(id) == (tier, block_id) && self.blocks[id].now != Now::Absent;
        self.ids().find(here).unwrap()
    }

    /// A copy from a primary block id to a secondary one has been made.
    pub fn commit_offload(&mut self, from: usize, to: usize) {
        let block = self.lying_in(SECONDARY, to);
        if let Some(content) = self.blocks[block].bears() {
            self.blocks[block].content = Some(content);
            self.counters.offloaded += 1;
            let (from, to) = ((PRIMARY, from), (SECONDARY, to));
            self.events.push(Happened::Moved { block, name: name(content), from, to });
        }
        self.end_copy(from, to);
    }

    /// The same copy is not made: the content is lost, unless that was so before.
    pub fn abort_offload(&mut self, from: usize, to: usize) {
        let block = self.lying_in(SECONDARY, to);
        if self.blocks[block].bears().is_some() {
            self.forget(block);
        }
        self.end_copy(from, to);
    }

    fn end_copy(&mut self, from: usize, to: usize) {
        let (moving, holder) = (self.lying_in(SECONDARY, to), self.lying_in(PRIMARY, from));
        assert!(
            matches!(self.blocks[moving].now, Now::Moving { .. }),
            "{moving} is not on its way"
        );
        self.reading.retain(|&block_id| block_id != from);
        self.rest(moving);
        if self.blocks[holder].now == Now::Draining {
            self.rest(holder);
        }
    }

    /// Whether the content moved; it is copied otherwise.
    pub fn commit_move(&mut self, source: usize, target: usize, alone: bool) -> bool {
        let (from, to) = (self.at(source), self.at(target));
        self.counters.onboarded += u64::from(to.0 == PRIMARY);
        let moves = alone && self.blocks[source].now == Now::Pinned(1);
        if moves {
            self.counters.offloaded += u64::from((from.0, to.0) == (PRIMARY, SECONDARY));
            self.swap(source, target);
            if let Some(content) = self.blocks[source].content {
                self.events.push(Happened::Moved { block: source, name: name(content), from, to });
            }
            self.rest(target);
        }
        moves
    }

    pub fn remove(&mut self, content: u32) -> bool {
        let bearer = self.bearer(content);
        if let Some(block) = bearer {
            self.forget(block);
        }
        bearer.is_some()
    }

    pub fn remove_with_successors(&mut self, content: u32) -> usize {
        let Some(first) = self.bearer(content) else { return 0 };
        let mut following = vec![first];
        let mut at = 0;
        while let Some(&block) = following.get(at) {
            let next = self.ids().filter(|&id| self.blocks[id].parent == Some(block));
            let next: Vec<_> = next.filter(|id| !following.contains(id)).collect();
            following.extend(next);
            at += 1;
        }
        following.sort_unstable();
        following.retain(|&block| self.blocks[block].bears().is_some());
        following.iter().for_each(|&block| self.forget(block));
        following.len()
    }

    pub fn complete(&mut self, upto: u64) {
        self.completed = self.completed.max(upto);
        let mut over: Vec<(i64, usize)> = Vec::new();
        for (id, block) in self.blocks.iter().enumerate() {
            match block.now {
                Now::Released { epoch, order } if epoch <= self.completed => over.push((order, id)),
                _ => {}
            }
        }
        over.sort_unstable();
        for (_, id) in over {
            self.unused(id);
        }
    }

    /// Says what pinned blocks are worth from their release on.
    pub fn retain(&mut self, blocks: &[usize], priority: u8, duration: Option<u64>) {
        for &block in blocks {
            self.set_priority(block, priority);
            (self.blocks[block].duration, self.blocks[block].over) = (duration, false);
        }
    }

    /// Says that pinned blocks are over, whose list has no clones if it is the `sole` one; how many are.
    pub fn hint_over(&mut self, blocks: &[usize], sole: bool) -> usize {
        let (mut after, mut ended) = (None, 0);
        for &block in blocks.iter().rev() {
            let others = |id: &usize| self.blocks[*id].parent == Some(block) && after != Some(*id);
            if self.ids().any(|id| others(&id)) {
                break;
            }
            after = Some(block);
            let ending = &self.blocks[block];
            let alone = sole && ending.now == Now::Pinned(1) && ending.content.is_some();
            if alone && ending.priority == DEFAULT_PRIORITY {
                self.set_priority(block, 0);
                (self.blocks[block].duration, self.blocks[block].over) = (None, true);
                ended += 1;
            }
        }
        ended
    }

    /// Ends the priorities whose time has come; how many.
    pub fn refresh(&mut self) -> usize {
        let mut ended = 0;
        loop {
            let next = self.ids().filter_map(|id| Some((self.blocks[id].expiry?, id))).min();
            let Some((expiry, block)) = next else { return ended };
            if expiry > self.read_clock() {
                return ended;
            }
            let unused = self.is_unused(block);
            (self.blocks[block].duration, self.blocks[block].expiry) = (None, None);
            self.set_priority(block, 35);
            if unused {
                self.unused(block);
            }
            ended += 1;
        }
    }
}
