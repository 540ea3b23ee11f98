//! What callers do with blocks: claim, name, offload, move, pin and release.

use std::rc::Rc;
use std::time::Duration;

use crate::common::one::{Moved, One, OneClaimed, OneMove, Registration};
use kv_pool::{
    BlockHash, ClaimError, Claimed, HandleError, Naming, Pinned, Priority, Tier,
    retention::Retention, tenants::TenantError,
};

use super::driver::{Coming, Driver, Owner};
use super::operations::{Refusal, Words};
use super::reference::{Block, ModelClaim, Now, name};

pub fn names(contents: &[u32]) -> Vec<BlockHash> {
    contents.iter().copied().map(name).collect()
}

pub fn refusal(error: &ClaimError) -> Refusal {
    match error {
        &ClaimError::Exhausted { requested, claimable, retiring } => {
            Refusal::Exhausted { requested, claimable, retiring }
        }
        ClaimError::Tenant(TenantError::HeldMax { .. }) => Refusal::HeldMax,
        ClaimError::Tenant(TenantError::KeptForOthers { .. }) => Refusal::KeptForOthers,
        other => panic!("{other:?} was not expected"),
    }
}

pub fn naming(words: Words) -> Naming {
    let retention = retention(words.priority, words.duration);
    Naming { parent: words.parent.map(name), retention }
}

pub fn retention(priority: u8, duration: Option<u64>) -> Retention {
    let priority = Priority::new(priority).unwrap();
    Retention { priority, duration: duration.map(Duration::from_millis) }
}

impl Driver {
    pub fn words(&mut self, content: u32) -> Words {
        let parent = match self.random.below(4) {
            0 => None,
            1 => Some(self.random.content()).filter(|&parent| parent != content),
            _ => content.checked_sub(1),
        };
        Words { parent, priority: self.random.priority(), duration: self.random.duration() }
    }

    /// Mostly the primary tier.
    fn tier(&mut self) -> Tier {
        let primary = Tier::Primary;
        self.random.one_of(&[primary, primary, primary, primary, Tier::Secondary, Tier::Third])
    }

    pub fn refused(&mut self, error: &ClaimError, expected: Refusal) {
        assert_eq!(refusal(error), expected);
        match expected {
            Refusal::Exhausted { .. } => self.seen.saw("claim refused", 1),
            _ => self.seen.saw("claim refused to a tenant", 1),
        }
    }

    pub fn claim(&mut self) {
        match (self.pool.claim_one(), self.model.claim(0, 0, 1)) {
            (Ok(block), Ok(claims)) => self.hold(block, claims[0]),
            (Err(error), Err(expected)) => self.refused(&error, expected),
            (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
        }
    }

    fn hold(&mut self, block: Claimed, claim: ModelClaim) {
        let seen = (block.block().index(), block.block_id().index(), block.evicted(0));
        assert_eq!(seen, (claim.block, claim.block_id, claim.evicted));
        self.held.push((block, claim));
    }

    pub fn claim_list(&mut self) {
        let count = self.random.one_of(&[0, 1, 2, 2, 3, 5, 50]);
        let (tier, tenant) = (self.tier(), self.random.below(self.tenants.len() as u64) as usize);
        let (real, expected) = if tier == Tier::Primary && self.random.below(2) == 0 {
            let real = self.pool.claim_for(self.tenants[tenant], count);
            (real, self.model.claim(0, tenant, count))
        } else {
            (self.pool.claim_in(tier, count), self.model.claim(tier.index(), 0, count))
        };
        match (real, expected) {
            (Ok(blocks), Ok(claims)) => {
                let seen = blocks.records().map(|record| record.index()).zip(blocks.ids());
                let seen: Vec<_> =
                    seen.map(|(block, block_id)| (block, block_id.index())).collect();
                let wanted: Vec<_> = claims.iter().map(|c| (c.block, c.block_id)).collect();
                assert_eq!(seen, wanted);
                for (at, claim) in claims.iter().enumerate() {
                    assert_eq!(blocks.evicted(at), claim.evicted);
                }
                self.held_lists.push((blocks, claims));
            }
            (Err(error), Err(expected)) => self.refused(&error, expected),
            (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
        }
    }

    pub fn take_offload(&mut self) {
        if let Some((mut block, mut claim)) = self.random.pick(&mut self.held) {
            match (block.take_offload(), claim.moving.take()) {
                (Some(offload), Some(to)) => {
                    assert_eq!((offload.from(), offload.to().index()), (block.block_id(), to));
                    self.offloads.push(offload);
                }
                (None, None) => {}
                (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
            }
            self.held.push((block, claim));
        }
        let Some((mut blocks, mut claims)) = self.random.pick(&mut self.held_lists) else { return };
        let next = claims.iter_mut().find(|claim| claim.moving.is_some());
        match (blocks.take_offload(), next) {
            (Some(offload), Some(claim)) => {
                let to = claim.moving.take().unwrap();
                assert_eq!((offload.from().index(), offload.to().index()), (claim.block_id, to));
                self.offloads.push(offload);
            }
            (None, None) => {}
            (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
        }
        self.held_lists.push((blocks, claims));
    }

    pub fn end_offload(&mut self) {
        let Some(offload) = self.random.pick(&mut self.offloads) else { return };
        let (from, to) = (offload.from().index(), offload.to().index());
        if self.random.below(5) == 0 {
            drop(offload);
            self.model.abort_offload(from, to);
        } else {
            offload.commit();
            self.model.commit_offload(from, to);
        }
    }

    pub fn register(&mut self) {
        if let Some((block, claim)) = self.random.pick(&mut self.held) {
            let content = self.random.content();
            self.name(block, claim, content);
        }
    }

    /// Claims a block whose content goes to the secondary tier, and names it before the copy is made:
    /// with the name that is on its way, or with another one, to move that down at once.
    pub fn overtake(&mut self) {
        let held = self.held.len();
        self.claim();
        if self.held.len() == held {
            return;
        }
        let Some((mut block, mut claim)) = self.held.pop() else { return };
        if self.random.below(4) > 0
            && let Some(offload) = block.take_offload()
        {
            self.offloads.push(offload);
            claim.moving = None;
        }
        if self.random.below(2) == 0
            && let Some(content) = self.on_its_way()
        {
            return self.name(block, claim, content);
        }
        let (content, pins) = (self.random.content(), self.pins.len());
        self.name(block, claim, content);
        if self.pins.len() == pins {
            return;
        }
        let Some((pin, source, owner)) = self.pins.pop() else { return };
        match (self.pool.claim_in(Tier::Secondary, 1), self.model.claim(1, 0, 1)) {
            (Ok(block), Ok(claims)) => self.begin((pin, source, owner), (block, claims[0])),
            (Err(error), Err(expected)) => {
                self.refused(&error, expected);
                self.pins.push((pin, source, owner));
            }
            (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
        }
    }

    /// Some content that is on its way.
    pub fn on_its_way(&mut self) -> Option<u32> {
        let content = |block: &Block| match block.now {
            Now::Moving { content, .. } => content,
            _ => None,
        };
        self.random.pick(&mut self.model.blocks.iter().filter_map(content).collect())
    }

    fn name(&mut self, block: Claimed, claim: ModelClaim, content: u32) {
        let words = self.words(content);
        let bearer = self.model.bearer(content);
        let on_its_way = |id: usize| matches!(self.model.blocks[id].now, Now::Moving { .. });
        self.seen.saw("computed again on its way", bearer.is_some_and(on_its_way).into());
        let parent = self.model.parent(words);
        let expected = self.model.register(claim.block, claim.moving, content, parent, words);
        match (block.register_one(name(content), naming(words)), expected) {
            (Registration::New(pin), Ok(named)) => {
                self.seen.saw("secondary copy gave way", bearer.is_some().into());
                self.pins.push((pin, named, Rc::new(())));
            }
            (Registration::Duplicate(own), Err(existing)) => {
                assert_eq!(own.block().index(), claim.block);
                self.model.unpin(existing);
                self.held.push((own, ModelClaim { moving: None, ..claim }));
            }
            (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
        }
    }

    pub fn register_list(&mut self) {
        if self.random.below(2) == 0 {
            return self.register_onto();
        }
        let Some((mut blocks, mut claims)) = self.random.pick(&mut self.held_lists) else { return };
        let count = claims.len().min(1 + self.random.below(4) as usize);
        let first = self.random.content();
        let contents: Vec<u32> = (first..).take(count).collect();
        let words = self.words(first);
        let named: Vec<_> = claims.drain(..count).collect();
        let expected = self.model.register_list(&named, &contents, words);
        let pins = blocks.register(&names(&contents), naming(words)).unwrap();
        assert_eq!(blocks.len(), claims.len());
        let seen: Vec<_> = pins.records().map(|record| record.index()).collect();
        assert_eq!(seen, expected);
        self.pin_lists.push((pins, expected, Rc::new(())));
        self.held_lists.push((blocks, claims));
    }

    /// Names the first blocks of a list behind a list of pins, up to the first duplicate.
    fn register_onto(&mut self) {
        let Some((mut blocks, mut claims)) = self.random.pick(&mut self.held_lists) else { return };
        let onto = self.random.pick(&mut self.pin_lists);
        let onto = onto.unwrap_or_else(|| (Pinned::default(), Vec::new(), Rc::default()));
        let (mut pins, mut pinned, mut owner) = onto;
        let count = claims.len().min(1 + self.random.below(4) as usize);
        let first = self.random.content();
        let contents: Vec<u32> = (first..).take(count).collect();
        let mut words = self.words(first);
        if count > 0 {
            // Empty lists have nothing in common, whatever they were made of.
            owner = if pinned.is_empty() { Rc::new(()) } else { self.make_own(&pinned, owner) };
        }
        let naming = naming(words);
        let (mut parent, mut named) = (self.model.parent(words), 0);
        for (claim, &content) in claims.iter_mut().zip(&contents) {
            match self.model.register(claim.block, claim.moving.take(), content, parent, words) {
                Ok(block) => pinned.push(block),
                Err(existing) => {
                    self.model.unpin(existing);
                    break;
                }
            }
            named += 1;
            words.parent = Some(content);
            parent = self.model.bearer(content);
        }
        assert_eq!(blocks.register_onto(&names(&contents), naming, &mut pins), Ok(named));
        self.seen.saw("named behind others", if pinned.len() > named { named as u64 } else { 0 });
        self.seen.saw("a duplicate stayed claimed", u64::from(named < count));
        claims.drain(..named);
        assert_eq!(blocks.len(), claims.len());
        let seen: Vec<_> = pins.records().map(|record| record.index()).collect();
        assert_eq!(seen, pinned);
        self.pin_lists.push((pins, pinned, owner));
        self.held_lists.push((blocks, claims));
    }

    pub fn drop_claimed(&mut self) {
        if let Some((block, claim)) = self.random.pick(&mut self.held) {
            drop(block);
            self.model.release_claimed(claim.block, claim.moving);
        }
        let Some((mut blocks, mut claims)) = self.random.pick(&mut self.held_lists) else { return };
        match self.random.below(4) {
            0 | 1 if !claims.is_empty() => {
                let (block, claim) = (blocks.take_first().unwrap(), claims.remove(0));
                self.hold(block, claim);
                self.held_lists.push((blocks, claims));
            }
            2 => {
                let at = self.random.below(4) as usize;
                let rest = (blocks.split_off(at), claims.split_off(at.min(claims.len())));
                self.held_lists.extend([(blocks, claims), rest]);
            }
            _ => self.drop_claimed_list(blocks, &claims),
        }
    }

    pub fn drop_claimed_list(&mut self, blocks: Claimed, claims: &[ModelClaim]) {
        drop(blocks);
        for claim in claims.iter().rev() {
            self.model.release_claimed(claim.block, claim.moving);
        }
    }

    /// One of several owners goes; the last one gives the references back.
    pub fn let_go(&mut self, blocks: &[usize], owner: Owner) {
        if Rc::strong_count(&owner) == 1 {
            for &block in blocks.iter().rev() {
                self.model.unpin(block);
            }
        }
    }

    pub fn release(&mut self) {
        let mut pins = Vec::new();
        for _ in 0..=self.random.below(4) {
            pins.extend(self.random.pick(&mut self.pins));
        }
        let mut real = Vec::new();
        let mut owners = Vec::new();
        for (pin, block, owner) in pins {
            real.push(pin);
            owners.push((block, owner));
        }
        if real.len() == 1 {
            drop(real);
        } else {
            self.pool.release(real);
        }
        while let Some((block, owner)) = owners.pop() {
            self.let_go(&[block], owner);
        }
    }

    pub fn drop_list(&mut self) {
        let Some((pins, blocks, owner)) = self.random.pick(&mut self.pin_lists) else { return };
        drop(pins);
        self.let_go(&blocks, owner);
    }

    pub fn clone_pin(&mut self) {
        if let Some((pin, block, owner)) = self.random.pick(&mut self.pins) {
            self.pins.push((pin.clone(), block, Rc::clone(&owner)));
            self.pins.push((pin, block, owner));
        }
        if let Some((pins, blocks, owner)) = self.random.pick(&mut self.pin_lists) {
            self.pin_lists.push((pins.clone(), blocks.clone(), Rc::clone(&owner)));
            self.pin_lists.push((pins, blocks, owner));
        }
    }

    /// A list with clones is given references of its own before it is changed.
    fn make_own(&mut self, blocks: &[usize], owner: Owner) -> Owner {
        if blocks.is_empty() || Rc::strong_count(&owner) == 1 {
            return owner;
        }
        blocks.iter().for_each(|&block| self.model.pin(block));
        Rc::new(())
    }

    pub fn change_list(&mut self) {
        let Some((mut pins, mut blocks, owner)) = self.random.pick(&mut self.pin_lists) else {
            return;
        };
        match self.random.below(4) {
            0 => {
                let len = self.random.below(4) as usize;
                let mut owner = owner;
                if len < blocks.len() {
                    owner = self.make_own(&blocks, owner);
                    for block in blocks.split_off(len).into_iter().rev() {
                        self.model.unpin(block);
                    }
                }
                pins.truncate(len);
                self.pin_lists.push((pins, blocks, owner));
            }
            1 => {
                let more = self.random.pick(&mut self.pin_lists);
                let more = more.unwrap_or_else(|| (Pinned::default(), Vec::new(), Rc::default()));
                self.append((pins, blocks, owner), more);
            }
            2 => {
                let at = self.random.below(4) as usize;
                let pin = pins.pin(at);
                assert_eq!(pin.is_some(), at < blocks.len());
                if let Some(pin) = pin {
                    self.model.pin(blocks[at]);
                    self.pins.push((pin, blocks[at], Rc::new(())));
                }
                self.pin_lists.push((pins, blocks, owner));
            }
            _ => {
                drop(self.make_own(&blocks, owner));
                let singles: Vec<Pinned> = pins.into_iter().collect();
                assert_eq!(singles.len(), blocks.len());
                let singles = singles.into_iter().zip(blocks);
                self.pins.extend(singles.map(|(pin, block)| (pin, block, Rc::new(()))));
            }
        }
    }

    fn append(
        &mut self,
        (mut pins, mut blocks, owner): (Pinned, Vec<usize>, Owner),
        (more, more_blocks, more_owner): (Pinned, Vec<usize>, Owner),
    ) {
        let owner = match (blocks.is_empty(), more_blocks.is_empty()) {
            (_, true) => owner,
            (true, false) => more_owner,
            (false, false) => {
                let owner = self.make_own(&blocks, owner);
                drop(self.make_own(&more_blocks, more_owner));
                owner
            }
        };
        pins.append(more).unwrap();
        blocks.extend(more_blocks);
        self.pin_lists.push((pins, blocks, owner));
    }

    pub fn match_prefix(&mut self) {
        let (first, len) = (self.random.content(), self.random.below(5) as u32);
        let contents: Vec<u32> = (first..first + len).collect();
        let retiring = contents.iter().map_while(|&content| self.model.find(content));
        let retiring =
            retiring.filter(|&id| matches!(self.model.blocks[id].now, Now::Released { .. }));
        self.seen.saw("pinned while retiring", retiring.count() as u64);
        let pins = self.pool.match_prefix(&names(&contents));
        let there = contents.iter().map_while(|&content| self.model.find(content)).count();
        let expected = self.model.match_prefix(&contents);
        self.seen.saw("found less than there is", u64::from(expected.len() < there));
        let seen: Vec<_> = pins.records().map(|record| record.index()).collect();
        assert_eq!(seen, expected);
        self.pin_lists.push((pins, expected, Rc::new(())));
    }

    pub fn find_and_pin(&mut self) {
        let (content, tier) = (self.random.content(), self.tier());
        let expected = self.model.find(content);
        let expected = expected.filter(|&id| self.model.blocks[id].tier == tier.index());
        let expected = expected.filter(|&id| self.model.may_use(id));
        match (self.pool.find_and_pin(name(content), tier), expected) {
            (Some(pin), Some(id)) => {
                self.model.pin(id);
                self.pins.push((pin, id, Rc::new(())));
            }
            (None, None) => {}
            (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
        }
    }

    /// Any pin to any claimed block: most pairs are refused, and the rest move up or down.
    pub fn begin_move(&mut self) {
        if self.held.is_empty()
            && let Some((mut blocks, mut claims)) = self.random.pick(&mut self.held_lists)
        {
            if let Some(block) = blocks.take_first() {
                let claim = claims.remove(0);
                self.hold(block, claim);
            }
            self.held_lists.push((blocks, claims));
        }
        let Some((block, claim)) = self.pick_target() else { return };
        let Some(source) = self.pick_source(claim.block) else {
            return self.held.push((block, claim));
        };
        self.begin(source, (block, claim));
    }

    fn begin(
        &mut self,
        (pin, source, owner): (Pinned, usize, Owner),
        (block, claim): (Claimed, ModelClaim),
    ) {
        let (from, to) = (self.model.at(source), self.model.at(claim.block));
        let location = pin.location();
        let expected = if from.0 == to.0 {
            Some(HandleError::SameTier { location })
        } else if claim.moving.is_some() || self.model.is_read(claim.block) {
            Some(HandleError::TargetNotEmpty)
        } else {
            None
        };
        match (self.pool.begin_onboard(pin, block), expected) {
            (Ok(onboard), None) => {
                assert_eq!((onboard.from().index(), onboard.to().index()), (from.1, to.1));
                self.coming.push(Coming { onboard, source, target: claim.block, owner });
            }
            (Err(refused), Some(expected)) => {
                self.seen.saw("move refused", 1);
                assert_eq!(refused.reason, expected);
                self.pins.push((refused.pinned, source, owner));
                self.held.push((refused.target, claim));
            }
            (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
        }
    }

    /// A claimed block: mostly one that nothing is copied from.
    fn pick_target(&mut self) -> Option<(Claimed, ModelClaim)> {
        let clean = |(_, claim): &(Claimed, ModelClaim)| {
            claim.moving.is_none() && !self.model.is_read(claim.block)
        };
        match self.held.iter().position(clean).filter(|_| self.random.below(8) > 0) {
            Some(at) => Some(self.held.swap_remove(at)),
            None => self.random.pick(&mut self.held),
        }
    }

    /// A pinned block: mostly one of another tier than `target`.
    fn pick_source(&mut self, target: usize) -> Option<(Pinned, usize, Owner)> {
        let tier = self.model.at(target).0;
        let elsewhere = |(_, block, _): &(Pinned, usize, Owner)| self.model.at(*block).0 != tier;
        match self.pins.iter().position(elsewhere).filter(|_| self.random.below(8) > 0) {
            Some(at) => Some(self.pins.swap_remove(at)),
            None => self.random.pick(&mut self.pins),
        }
    }

    pub fn end_move(&mut self) {
        let Some(coming) = self.random.pick(&mut self.coming) else { return };
        let Coming { onboard, source, target, owner } = coming;
        if self.random.below(5) == 0 {
            drop(onboard);
            self.let_go(&[source], owner);
            self.model.release_claimed(target, None);
            return;
        }
        let up = self.model.at(target).0 < self.model.at(source).0;
        let read = self.model.is_read(source);
        let sole = Rc::strong_count(&owner) == 1;
        match (onboard.commit_one(), self.model.commit_move(source, target, sole)) {
            (Moved::Moved(pin), true) => {
                self.seen.saw(if up { "moved up" } else { "moved down" }, 1);
                self.seen.saw("left a block id that a copy reads", read.into());
                self.pins.push((pin, source, owner));
            }
            (Moved::Copied { copy, source: pin }, false) => {
                self.seen.saw("copied", 1);
                self.pins.push((pin, source, owner));
                let block_id = self.model.at(target).1;
                self.hold_copy(
                    copy,
                    ModelClaim { block: target, block_id, evicted: false, moving: None },
                );
            }
            (real, moved) => panic!("{real:?}, but moved was expected to be {moved}"),
        }
    }

    fn hold_copy(&mut self, copy: Claimed, claim: ModelClaim) {
        assert_eq!((copy.block().index(), copy.block_id().index()), (claim.block, claim.block_id));
        self.held.push((copy, claim));
    }
}
