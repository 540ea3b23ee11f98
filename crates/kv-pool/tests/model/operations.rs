//! What callers ask of the pool, done to the reference.

use crate::reference::{Block, Claimed, Happened, Model, Now, PRIMARY, name};

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

impl Block {
    /// Takes the name from content on its way, if it has one that is meant.
    fn forget_on_its_way(&mut self, meant: impl Fn(u32) -> bool) -> bool {
        match &mut self.now {
            Now::Moving { content, expected, .. } if *expected && meant(*content) => {
                *expected = false;
                true
            }
            _ => false,
        }
    }
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
        let unheld = self.ready as u64 - all.sum::<u64>();
        if count + kept > unheld { Err(Refusal::KeptForOthers) } else { Ok(()) }
    }

    pub fn claim(&mut self, tier: usize, by: usize, count: usize) -> Result<Vec<Claimed>, Refusal> {
        self.check_claim(tier, by, count)?;
        Ok((0..count).map(|_| self.claim_one(tier, by).unwrap()).collect())
    }

    pub fn release_claimed(&mut self, block: usize, moving: Option<usize>) {
        if let Some(moving) = moving {
            self.abort_offload(moving, block);
        }
        assert_eq!(self.blocks[block].now, Now::Claimed);
        self.rest(block);
    }

    /// The block that has the name already, if it keeps it. It is pinned then.
    pub fn register(
        &mut self,
        block: usize,
        moving: Option<usize>,
        content: u32,
        parent: Option<usize>,
        words: Words,
    ) -> Option<usize> {
        if let Some(moving) = moving {
            self.abort_offload(moving, block);
        }
        if let Some(existing) = self.find(content) {
            let found = &self.blocks[existing];
            if found.tier == PRIMARY || matches!(found.now, Now::Pinned(_)) {
                self.counters.duplicates += 1;
                self.pin(existing);
                return Some(existing);
            }
            self.forget(existing);
        }
        self.counters.registered += 1;
        let new = &mut self.blocks[block];
        (new.content, new.priority, new.duration) = (Some(content), words.priority, words.duration);
        (new.now, new.depth) = (Now::Pinned(1), 0);
        new.chained = words.parent.is_some();
        if let Some(parent) = parent {
            self.link(block, parent);
        }
        let before = self.blocks[block].parent.and_then(|parent| self.blocks[parent].content);
        self.events.push(Happened::Stored {
            block,
            name: name(content),
            parent: before.map_or(kv_pool::BlockHash::ROOT, name),
            at: self.at(block),
            priority: words.priority,
        });
        None
    }

    /// The parent that a registration names, if it is there.
    pub fn parent(&self, words: Words) -> Option<usize> {
        self.find(words.parent?)
    }

    /// Names claimed blocks as consecutive content; which blocks are pinned for it.
    pub fn register_list(
        &mut self,
        claims: &[Claimed],
        contents: &[u32],
        mut words: Words,
    ) -> Vec<usize> {
        let mut parent = self.parent(words);
        let mut pinned = Vec::new();
        for (claim, &content) in claims.iter().zip(contents) {
            let tier = self.blocks[claim.block].tier;
            let existing = self.register(claim.block, claim.moving, content, parent, words);
            let block = match existing {
                Some(existing) if self.blocks[existing].tier == tier => {
                    self.release_claimed(claim.block, None);
                    existing
                }
                Some(existing) => {
                    self.unpin(existing);
                    self.blocks[claim.block].now = Now::Pinned(1);
                    claim.block
                }
                None => claim.block,
            };
            pinned.push(block);
            words.parent = Some(content);
            parent = self.find(content);
        }
        pinned
    }

    /// Finds the next block of a prefix, which follows `before` again if it has lost its parent.
    pub fn find_after(&mut self, content: u32, before: Option<usize>) -> Option<usize> {
        let found = self.find(content)?;
        if let Some(before) = before
            && self.blocks[found].chained
            && self.blocks[found].parent.is_none()
        {
            self.link(found, before);
        }
        Some(found)
    }

    pub fn match_prefix(&mut self, contents: &[u32]) -> Vec<usize> {
        let mut found = Vec::new();
        for &content in contents {
            let Some(block) = self.find_after(content, found.last().copied()) else { break };
            self.pin(block);
            found.push(block);
        }
        self.counters.lookups += contents.len() as u64;
        self.counters.hits += found.len() as u64;
        found
    }

    pub fn commit_offload(&mut self, block: usize, holder: usize) {
        let Now::Moving { content, expected, from } = self.blocks[block].now else {
            panic!("{block} is not on its way")
        };
        if !expected || self.find(content).is_some() {
            return self.abort_offload(block, holder);
        }
        self.blocks[block].content = Some(content);
        self.counters.offloaded += 1;
        self.events.push(Happened::Moved { block, name: name(content), from, to: self.at(block) });
        self.rest(block);
        self.end_copy(holder);
    }

    /// The content is lost, also if its name was removed before.
    pub fn abort_offload(&mut self, block: usize, holder: usize) {
        let Now::Moving { content, .. } = self.blocks[block].now else {
            panic!("{block} is not on its way")
        };
        self.counters.dropped += 1;
        self.events.push(Happened::Removed { block, name: name(content), at: self.at(block) });
        (self.blocks[block].duration, self.blocks[block].expiry) = (None, None);
        self.cut(block);
        self.rest(block);
        self.end_copy(holder);
    }

    /// The copy that reads the slot of `holder` has ended.
    fn end_copy(&mut self, holder: usize) {
        self.blocks[holder].copying = false;
        if self.blocks[holder].now == Now::Draining {
            self.rest(holder);
        }
    }

    /// Whether the content moved; it is copied otherwise.
    pub fn commit_move(&mut self, source: usize, target: usize, alone: bool) -> bool {
        let (from, to) = (self.at(source), self.at(target));
        self.counters.onboarded += u64::from(to.0 < from.0);
        let moves = alone && self.blocks[source].now == Now::Pinned(1);
        if moves {
            self.counters.offloaded += u64::from(to.0 > from.0);
            self.swap(source, target);
            if let Some(content) = self.blocks[source].content {
                self.events.push(Happened::Moved { block: source, name: name(content), from, to });
            }
            self.rest(target);
        }
        moves
    }

    pub fn remove(&mut self, content: u32) -> bool {
        let mut any = false;
        for block in &mut self.blocks {
            if block.forget_on_its_way(|moving| moving == content) {
                any = true;
            }
        }
        if let Some(block) = self.find(content) {
            self.forget(block);
            any = true;
        }
        any
    }

    pub fn remove_with_successors(&mut self, content: u32) -> usize {
        let Some(first) = self.find(content) else { return usize::from(self.remove(content)) };
        let mut following = vec![first];
        let mut at = 0;
        while let Some(&block) = following.get(at) {
            let next = self.ids().filter(|&id| self.blocks[id].parent == Some(block));
            let next: Vec<_> = next.filter(|id| !following.contains(id)).collect();
            following.extend(next);
            at += 1;
        }
        following.sort_unstable();
        self.forget_all(&following)
    }

    pub fn remove_tenant(&mut self, tenant: usize) -> usize {
        let own: Vec<_> = self.ids().filter(|&id| self.blocks[id].tenant == tenant).collect();
        self.forget_all(&own)
    }

    fn forget_all(&mut self, blocks: &[usize]) -> usize {
        let mut forgotten = 0;
        for &block in blocks {
            if self.blocks[block].content.is_some() {
                self.forget(block);
                forgotten += 1;
            } else if self.blocks[block].forget_on_its_way(|_| true) {
                forgotten += 1;
            }
        }
        forgotten
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
            self.blocks[block].duration = duration;
        }
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

    pub fn next_expiry(&self) -> Option<u64> {
        self.blocks.iter().filter_map(|block| block.expiry).min()
    }

    /// Pins the next victims of a tier that have content, and passes over the protected ones.
    pub fn pin_victims(
        &mut self,
        tier: usize,
        count: usize,
        protected: &[u32],
    ) -> Result<Vec<usize>, Refusal> {
        let cached = |block: &Block| block.content.is_some() && block.tier == tier;
        let mut ranked: Vec<_> = self.ids().filter(|&id| cached(&self.blocks[id])).collect();
        ranked.retain(|&id| self.is_unused(id));
        ranked.sort_by_key(|&id| match self.blocks[id].now {
            Now::Unused(order) => (false, self.blocks[id].priority, order),
            Now::Shadowed(order) => (true, 0, order),
            now => panic!("{now:?} is not unused"),
        });
        let free = |id: &usize| !protected.iter().any(|&p| self.blocks[*id].content == Some(p));
        let victims: Vec<usize> = ranked.into_iter().filter(free).collect();
        if victims.len() < count {
            let (claimable, retiring) = (victims.len(), self.retiring(tier));
            return Err(Refusal::Exhausted { requested: count, claimable, retiring });
        }
        for &victim in &victims[..count] {
            self.pin(victim);
        }
        Ok(victims[..count].to_vec())
    }
}
