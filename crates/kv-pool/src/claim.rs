//! Claimed blocks: blocks that one owner writes, until the content gets a name.

use crate::RecordId;
use crate::blocks::Flag;
use crate::guard;
use crate::hold::{BlockAt, Hold, give_single_back};
use crate::moves::{Offload, take_offload};
use crate::state::{Claim, Named, PoolState};
use crate::sync::Arc;
use crate::view::Shared;
use crate::{BlockHash, BlockId, BlockPool, HandleError, Naming, Pinned, Tier};

/// Blocks that one owner writes, in the order in which they were claimed. No lookup finds them. One
/// block is a list of one.
///
/// Operations on the list take the lock once for all its blocks. Dropped, the blocks are given back: those
/// without a name are the next to be claimed, once their epoch is complete.
#[derive(Debug, Default)]
#[must_use = "dropping claimed blocks gives them back"]
pub struct Claimed {
    blocks: Own,
}

#[derive(Debug, Default)]
enum Own {
    #[default]
    Nothing,
    /// The hold becomes that of the pin.
    One(Arc<Hold>, Claim, Tier),
    List(Box<ClaimList>),
}

/// Claims of one pool and tier.
#[derive(Debug)]
pub(crate) struct ClaimList {
    pool: Arc<Shared>,
    tier: Tier,
    /// # Invariants
    ///
    /// - Those before `first` have left the list: what takes the first ones away moves no others.
    /// - Those before `offloads` have no move to be taken, so each is looked at once for all calls.
    pub(crate) claims: Vec<Claim>,
    first: usize,
    offloads: usize,
}

impl ClaimList {
    pub(crate) fn new(pool: &Arc<Shared>) -> Box<Self> {
        let pool = Arc::clone(pool);
        Box::new(Self { pool, tier: Tier::Primary, claims: Vec::new(), first: 0, offloads: 0 })
    }

    fn claims(&self) -> &[Claim] {
        &self.claims[self.first..]
    }

    /// Gives up the places of claims that have left, once they are half of all: a list that some leave from the front and
    /// others join behind does not grow.
    fn compact(&mut self) {
        if 2 * self.first >= self.claims.len() {
            self.claims.drain(..self.first);
            self.offloads = self.offloads.saturating_sub(self.first);
            self.first = 0;
        }
    }

    fn clear(&mut self) {
        self.claims.clear();
        (self.first, self.offloads) = (0, 0);
    }

    fn take_offload(&mut self) -> Option<Offload> {
        self.offloads = guard!(
            "pool.moves-are-looked-for-once",
            self.offloads.max(self.first),
            else self.first
        );
        while let Some(claim) = self.claims.get_mut(self.offloads) {
            self.offloads += 1;
            if let Some(moved) = claim.offload() {
                return Some(take_offload(&self.pool, claim, moved));
            }
        }
        None
    }
}

impl Claimed {
    #[inline]
    pub(crate) fn one(hold: Arc<Hold>, tier: Tier, claim: Claim) -> Self {
        Self { blocks: Own::One(hold, claim, tier) }
    }

    /// The claims in `list`.
    pub(crate) fn list(tier: Tier, mut list: Box<ClaimList>) -> Self {
        list.tier = tier;
        Self { blocks: Own::List(list) }
    }

    fn claims(&self) -> &[Claim] {
        match &self.blocks {
            Own::Nothing => &[],
            Own::One(_, claim, _) => std::slice::from_ref(claim),
            Own::List(list) => list.claims(),
        }
    }

    /// How many blocks there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.claims().len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.claims().is_empty()
    }

    /// The block ids, in the order of the list.
    pub fn ids(&self) -> impl DoubleEndedIterator + ExactSizeIterator<Item = BlockId> + '_ {
        self.claims().iter().map(|claim| claim.block_id())
    }

    /// The tier that the blocks were claimed in.
    #[must_use]
    pub fn tier(&self) -> Tier {
        match &self.blocks {
            Own::Nothing => Tier::Primary,
            Own::One(_, _, tier) => *tier,
            Own::List(list) => list.tier,
        }
    }

    /// The pool's records of the blocks, as policies, events and snapshots name them.
    pub fn records(&self) -> impl DoubleEndedIterator + ExactSizeIterator<Item = RecordId> + '_ {
        self.claims().iter().map(|claim| claim.block())
    }

    /// Whether block `index` is there and cached content lost its place to the claim.
    #[must_use]
    pub fn evicted(&self, index: usize) -> bool {
        self.claims().get(index).is_some_and(|claim| claim.evicted())
    }

    /// The next move of evicted content to the secondary tier, until there is none left. Takes no lock.
    /// To take all moves of a list takes time in proportion to its length.
    ///
    /// A block must not be written before that copy has read it. The pool sees to it that nobody else is
    /// given the block id before the [`Offload`] has ended, even if this list is dropped; the holder
    /// orders its own writes after the copy.
    #[must_use]
    pub fn take_offload(&mut self) -> Option<Offload> {
        match &mut self.blocks {
            Own::Nothing => None,
            Own::One(hold, claim, _) => {
                let moved = claim.offload()?;
                Some(take_offload(&hold.pool, claim, moved))
            }
            Own::List(list) => list.take_offload(),
        }
    }

    /// Takes the first block out of the list. Takes the lock if there are several.
    pub fn take_first(&mut self) -> Option<Self> {
        let Own::List(list) = &mut self.blocks else {
            return (!self.is_empty()).then(|| std::mem::take(self));
        };
        let claim = *list.claims().first()?;
        list.first += 1;
        let hold = list.pool.state.lock().spares.take_single(&list.pool);
        Some(Self::one(hold, list.tier, claim))
    }

    /// Takes the blocks from `at` on out of the list; none if there are fewer.
    pub fn split_off(&mut self, at: usize) -> Self {
        if at == 0 {
            return std::mem::take(self);
        }
        let Own::List(list) = &mut self.blocks else { return Self::default() };
        let at = list.first + at;
        if at >= list.claims.len() {
            return Self::default();
        }
        let mut rest = list.pool.state.lock().spares.take_claims(&list.pool);
        rest.claims.extend(list.claims.drain(at..));
        rest.offloads = list.offloads.saturating_sub(at);
        Self::list(list.tier, rest)
    }

    /// Adds blocks behind those that are there. Takes the lock. Lists of two pools or tiers are not
    /// joined.
    ///
    /// # Errors
    /// Returns `more` if it belongs to another pool or tier.
    pub fn append(&mut self, mut more: Self) -> Result<(), Self> {
        if more.is_empty() {
            return Ok(());
        }
        if self.is_empty() {
            *self = more;
            return Ok(());
        }
        let Some(pool) = self.pool().cloned() else { return Err(more) };
        let tier = self.tier();
        let own = more.pool().is_some_and(|other| Arc::ptr_eq(&pool, other));
        if guard!("pool.claims-join-within-one-pool", !own, else false) || more.tier() != tier {
            return Err(more);
        }
        let mut state = pool.state.lock();
        let spares = &mut state.spares;
        let mut list = match std::mem::take(&mut self.blocks) {
            Own::List(list) => list,
            Own::One(hold, claim, _) => {
                spares.keep_hold(hold);
                let mut list = spares.take_claims(&pool);
                list.claims.push(claim);
                list
            }
            Own::Nothing => spares.take_claims(&pool),
        };
        // Blocks may have left behind those that were looked at.
        list.offloads = list.offloads.min(list.claims.len());
        list.compact();
        match std::mem::take(&mut more.blocks) {
            Own::List(mut behind) => {
                list.claims.extend_from_slice(behind.claims());
                behind.clear();
                spares.keep_claims(behind);
            }
            Own::One(hold, claim, _) => {
                list.claims.push(claim);
                spares.keep_hold(hold);
            }
            Own::Nothing => {}
        }
        drop(state);
        *self = Self::list(tier, list);
        Ok(())
    }

    /// Gives the first blocks names, as consecutive content that follows `naming.parent`, in one
    /// step, so that lookups find and share them. They leave this list; the others stay claimed.
    ///
    /// Block `n` of the result is the one that lookups of `hashes[n]` find, unless that lies in
    /// another tier and is in use there: then it is the block of this list, without a name. Where
    /// the same content was cached in this tier already, the block of this list is given back. A caller
    /// that commits moves before their copies are enqueued uses [`register_onto`](Self::register_onto), and
    /// chooses.
    ///
    /// The contents must have been written, or their writing enqueued where all readers come after it.
    /// Offloads of these blocks that were not taken are given up.
    ///
    /// # Errors
    /// [`HandleError::Names`] if there are fewer blocks than names; nothing was named then.
    #[inline(always)]
    pub fn register(
        &mut self,
        hashes: &[BlockHash],
        naming: impl Into<Naming>,
    ) -> Result<Pinned, HandleError> {
        let naming = naming.into();
        // By value, and inlined: a block that is claimed and named in one place stays in registers.
        match (hashes, std::mem::take(&mut self.blocks)) {
            ([hash], Own::One(hold, claim, tier)) => {
                let at = register_one(&hold, claim, tier, *hash, &naming);
                Ok(Pinned::one(hold, at))
            }
            (_, blocks) => {
                let (rest, named) = Self { blocks }.register_list(hashes, &naming);
                *self = rest;
                Ok(named?.0)
            }
        }
    }

    /// Names the first blocks; the others, and what came of it, with how many have got their names.
    #[inline(never)]
    fn register_list(
        mut self,
        hashes: &[BlockHash],
        naming: &Naming,
    ) -> (Self, Result<(Pinned, usize), HandleError>) {
        let named = self.register_first(hashes, *naming);
        (self, named)
    }

    fn register_first(
        &mut self,
        hashes: &[BlockHash],
        naming: Naming,
    ) -> Result<(Pinned, usize), HandleError> {
        let (names, blocks) = (hashes.len(), self.len());
        if names > blocks {
            return Err(HandleError::Names { names, blocks });
        }
        let Own::List(list) = &mut self.blocks else { return Ok((Pinned::default(), 0)) };
        if names == 0 {
            return Ok((Pinned::default(), 0));
        }
        let pool = &list.pool;
        let mut state = pool.state.lock();
        let mut parent = naming.parent.and_then(|parent| state.find_parent(parent));
        let registered = state.counters.registered;
        let mut following = naming;
        let (tier, claims) = (list.tier, &list.claims()[..names]);
        let pins = Pinned::counted(&mut state, pool, |state, pins| {
            pins.reserve(names);
            state.warm(hashes);
            for (claim, &hash) in claims.iter().zip(hashes) {
                let block = state.register_or_share(claim, tier, hash, parent, &following);
                pins.push(state.blocks.at(block));
                following.parent = Some(hash);
                // A block without the name is not the one that the next is found after.
                let named = state.blocks.is(block, Flag::NAMED);
                parent = if named { Some(block) } else { state.bearer(hash) };
            }
        });
        let new = state.counters.registered - registered;
        drop(state);
        list.first += names;
        Ok((pins, new as usize))
    }

    /// Gives the first blocks names as [`register`](Self::register) does, up to the first whose content is cached
    /// already, and adds them to `onto`, behind those that are there, in one step; how many. The block of the
    /// duplicate stays claimed, as the first of this list, with what was written to it. Whether to go on with it or
    /// with what a lookup finds is the caller's choice, and dropping it loses nothing.
    ///
    /// What a lookup finds holds the content as soon as the move that brought it there is done, which its mover
    /// has said by [`Onboard::commit`](crate::moves::Onboard::commit). A caller that commits a move before its
    /// copy is enqueued goes on with its own block until it is.
    ///
    /// Content that was cached, unused, in a farther tier, or on its way there, is no duplicate: it takes
    /// the place of the claimed block, and keeps the blocks that follow it.
    ///
    /// Takes the lock once, unless `onto` has clones or was made as a list of one: it is given references of its own
    /// first.
    ///
    /// # Errors
    /// As [`register`](Self::register), and [`HandleError::OtherPool`]; nothing was named then.
    pub fn register_onto(
        &mut self,
        hashes: &[BlockHash],
        naming: impl Into<Naming>,
        onto: &mut Pinned,
    ) -> Result<usize, HandleError> {
        let (names, blocks) = (hashes.len(), self.len());
        if names > blocks {
            return Err(HandleError::Names { names, blocks });
        }
        let Some(pool) = self.pool().filter(|_| names > 0).cloned() else { return Ok(0) };
        if !onto.make_own_in(&pool) {
            return Err(HandleError::OtherPool);
        }
        // Before the lock is taken: the conversion is the caller's.
        let (mut following, mut done) = (naming.into(), 0);
        let mut state = pool.state.lock();
        let named = onto.own_or_new(&mut state, &pool);
        state.warm(hashes);
        // Mostly the block that is there already: its record says so without a look at the index.
        let last = named.last().map(|at| at.block());
        let mut parent = following.parent.and_then(|parent| match last {
            Some(last) if state.blocks.bears(last, parent) => Some(last),
            _ => state.find_parent(parent),
        });
        for (claim, &hash) in self.claims_mut().iter_mut().zip(hashes) {
            match state.register_claim(claim, hash, parent, &following) {
                Named::New(block) => {
                    named.push(state.blocks.at(block));
                    (following.parent, parent) = (Some(hash), Some(block));
                    done += 1;
                }
                Named::Duplicate(existing) => {
                    *claim = claim.without_offload();
                    guard!("pool.duplicate-is-not-kept-pinned", state.unpin(existing));
                    break;
                }
            }
        }
        self.remove_first(done, &mut state);
        Ok(done)
    }

    /// Takes the first blocks off the list, which have been handed on. An empty list is kept for the next user.
    fn remove_first(&mut self, count: usize, state: &mut PoolState) {
        match &mut self.blocks {
            Own::List(list) => {
                list.first += count;
                if list.first < list.claims.len() {
                    return;
                }
            }
            _ if count == 0 => return,
            _ => {}
        }
        match std::mem::take(&mut self.blocks) {
            Own::Nothing => {}
            Own::One(hold, ..) => state.spares.keep_hold(hold),
            Own::List(mut list) => {
                list.clear();
                state.spares.keep_claims(list);
            }
        }
    }

    /// Names the first blocks and releases them: what [`register`](Self::register) does, for content that
    /// its writer needs no longer, in one step if it is one block. The other blocks are given back. How
    /// many contents have got their names, also in place of an unused copy farther away; the others were cached already.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    #[inline]
    pub fn cache(
        mut self,
        hashes: &[BlockHash],
        naming: impl Into<Naming>,
    ) -> Result<usize, HandleError> {
        let naming = naming.into();
        match (hashes, std::mem::take(&mut self.blocks)) {
            ([hash], Own::One(hold, claim, _)) => {
                Ok(usize::from(cache_one(hold, claim, *hash, &naming)))
            }
            (_, blocks) => Self { blocks }.cache_list(hashes, &naming),
        }
    }

    #[inline(never)]
    fn cache_list(self, hashes: &[BlockHash], naming: &Naming) -> Result<usize, HandleError> {
        let (_rest, named) = self.register_list(hashes, naming);
        Ok(named?.1)
    }

    pub(crate) fn pool(&self) -> Option<&Arc<Shared>> {
        match &self.blocks {
            Own::Nothing => None,
            Own::One(hold, ..) => Some(&hold.pool),
            Own::List(list) => Some(&list.pool),
        }
    }

    pub(crate) fn belongs_to(&self, pool: &BlockPool) -> bool {
        self.pool().is_some_and(|own| pool.is(own))
    }

    pub(crate) fn any_claim(&self, is: impl FnMut(&Claim) -> bool) -> bool {
        self.claims().iter().any(is)
    }

    fn claims_mut(&mut self) -> &mut [Claim] {
        match &mut self.blocks {
            Own::Nothing => &mut [],
            Own::One(_, claim, _) => std::slice::from_mut(claim),
            Own::List(list) => &mut list.claims[list.first..],
        }
    }

    /// Hands over to `take`, in their order, the blocks that it answers `true` for. None of them has a
    /// move to be taken.
    pub(crate) fn hand_over(
        &mut self,
        state: &mut PoolState,
        mut take: impl FnMut(&mut PoolState, RecordId) -> bool,
    ) {
        match &mut self.blocks {
            Own::Nothing => {}
            Own::List(list) => {
                let mut at = 0;
                let first = list.first;
                list.claims.retain(|claim| {
                    at += 1;
                    at <= first || !take(state, claim.block())
                });
                list.offloads = first;
            }
            Own::One(_, claim, _) => {
                if take(state, claim.block())
                    && let Own::One(hold, ..) = std::mem::take(&mut self.blocks)
                {
                    state.spares.keep_hold(hold);
                }
            }
        }
    }
}

impl IntoIterator for Claimed {
    type Item = Claimed;
    type IntoIter = std::vec::IntoIter<Claimed>;

    /// Takes the list apart into lists of one, in one step.
    fn into_iter(mut self) -> Self::IntoIter {
        let Own::List(list) = &mut self.blocks else {
            return if self.is_empty() { Vec::new() } else { vec![self] }.into_iter();
        };
        let pool = &list.pool;
        let mut singles = Vec::with_capacity(list.claims().len());
        let mut state = pool.state.lock();
        for &claim in list.claims() {
            singles.push(Self::one(state.spares.take_single(pool), list.tier, claim));
        }
        drop(state);
        list.first = list.claims.len();
        singles.into_iter()
    }
}

impl Drop for Claimed {
    #[inline]
    fn drop(&mut self) {
        match std::mem::take(&mut self.blocks) {
            Own::Nothing => {}
            Own::One(hold, claim, tier) => release_one(hold, claim, tier),
            Own::List(list) => give_list_back(list),
        }
    }
}

fn give_list_back(mut list: Box<ClaimList>) {
    // While it is locked, the pool is this function's, wherever the list goes.
    let pool = Arc::clone(&list.pool);
    let mut state = pool.state.lock();
    state.release_claims(list.tier, list.claims());
    list.clear();
    state.spares.keep_claims(list);
}

#[inline(never)]
fn release_one(hold: Arc<Hold>, claim: Claim, tier: Tier) {
    give_single_back(hold, |state| state.release_claims(tier, &[claim]));
}

/// Names a claimed block, or changes over to the one that has the name. The block that the pin is of,
/// with its reference counted.
#[inline(never)]
fn register_one(
    hold: &Arc<Hold>,
    claim: Claim,
    tier: Tier,
    hash: BlockHash,
    naming: &Naming,
) -> BlockAt {
    let mut state = hold.pool.state.lock();
    let parent = naming.parent.and_then(|parent| state.find_parent(parent));
    let block = state.register_or_share(&claim, tier, hash, parent, naming);
    state.blocks.at(block)
}

/// Names a claimed block and releases it; whether it has the name.
#[inline(never)]
fn cache_one(hold: Arc<Hold>, claim: Claim, hash: BlockHash, naming: &Naming) -> bool {
    let mut named = false;
    give_single_back(hold, |state| {
        let parent = naming.parent.and_then(|parent| state.find_parent(parent));
        match state.register_claim(&claim, hash, parent, naming) {
            Named::New(block) => {
                state.unpin(block);
                named = true;
            }
            Named::Duplicate(existing) => {
                state.unpin(existing);
                state.release_claimed(claim.block());
            }
        }
    });
    named
}

impl PoolState {
    /// Gives claimed blocks of a tier back, with what was to be moved away from them. The first one is the
    /// next to be claimed.
    fn release_claims(&mut self, tier: Tier, claims: &[Claim]) {
        let mut rest = claims;
        while !rest.is_empty() {
            let released = self.release_empties(tier, rest);
            rest = &rest[..rest.len() - released];
            if let Some((last, others)) = rest.split_last() {
                self.release_claim(last);
                rest = others;
            }
        }
    }

    /// Gives a claimed block back, with what was to be moved away from it.
    pub(crate) fn release_claim(&mut self, claim: &Claim) {
        if let Some(moved) = claim.offload() {
            self.abort_offload(moved);
        }
        self.release_claimed(claim.block());
    }

    /// Names a claimed block; an offload that was not taken is given up.
    fn register_claim(
        &mut self,
        claim: &Claim,
        hash: BlockHash,
        parent: Option<RecordId>,
        naming: &Naming,
    ) -> Named {
        let named = self.register(claim.block(), hash, parent, naming);
        // Not before: what was to be moved away may be the content that has just been computed again.
        if let Some(moved) = claim.offload() {
            self.abort_offload(moved);
        }
        named
    }

    /// Names a claimed block, or changes over to the block of the same tier that has the name.
    fn register_or_share(
        &mut self,
        claim: &Claim,
        tier: Tier,
        hash: BlockHash,
        parent: Option<RecordId>,
        naming: &Naming,
    ) -> RecordId {
        let own = claim.block();
        match self.register_claim(claim, hash, parent, naming) {
            Named::New(block) => block,
            Named::Duplicate(existing) if self.blocks.tier(existing) == tier => {
                self.release_claimed(own);
                existing
            }
            Named::Duplicate(existing) => {
                self.unpin(existing);
                self.take_unnamed(own);
                own
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PoolConfig;

    /// Every block that is claimed has content to be moved away.
    fn evicting(blocks: u64) -> Claimed {
        let config = PoolConfig { secondary_blocks: blocks, ..PoolConfig::primary_only(blocks) };
        let pool = BlockPool::new(&config).unwrap();
        let names: Vec<_> = (0..blocks).map(|name| BlockHash::from_u128(name.into())).collect();
        drop(pool.claim(names.len()).unwrap().register(&names, Naming::default()).unwrap());
        pool.claim(names.len()).unwrap()
    }

    #[test]
    fn a_block_is_looked_at_for_its_move_once_for_all_calls() {
        let mut blocks = evicting(64);
        let whole = blocks.claims().to_vec();
        let mut taken = Vec::new();
        while taken.len() < whole.len()
            && let Some(offload) = blocks.take_offload()
        {
            taken.push(offload.moved.block);
            // None of them shall end twice.
            std::mem::forget(offload);
            // What came before is put back as it was: nobody looks there again.
            blocks.claims_mut()[..taken.len()].copy_from_slice(&whole[..taken.len()]);
        }
        let no_more = blocks.take_offload().is_none();
        blocks.claims_mut().iter_mut().for_each(|claim| *claim = claim.without_offload());
        let moves = whole.iter().filter_map(Claim::offload);
        assert_eq!(taken, moves.map(|moved| moved.block).collect::<Vec<_>>());
        assert!(no_more);
    }

    #[test]
    fn the_first_blocks_leave_a_list_without_the_others_being_moved() {
        let mut blocks = evicting(64);
        let inner = |blocks: &Claimed| match &blocks.blocks {
            Own::List(list) => (list.claims.len(), list.claims.as_ptr()),
            _ => panic!("it is no list"),
        };
        let before = inner(&blocks);
        let names: Vec<_> = (100..132).map(BlockHash::from_u128).collect();
        for name in names {
            drop(blocks.take_first());
            drop(blocks.register(&[name], Naming::default()).unwrap());
            assert_eq!(inner(&blocks), before, "the others have been moved");
        }
        assert_eq!(blocks.len(), 0);
    }

    #[test]
    fn a_move_is_found_behind_blocks_that_were_looked_at_and_left() {
        let mut blocks = evicting(6);
        let behind = blocks.split_off(4);
        let expected = behind.claims().iter().filter_map(Claim::offload).map(|moved| moved.block);
        let expected = expected.collect::<Vec<_>>();
        while let Some(offload) = blocks.take_offload() {
            drop(offload);
        }
        drop(blocks.split_off(2));
        blocks.append(behind).unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| blocks.take_offload()).collect();
        assert_eq!(taken.iter().map(|offload| offload.moved.block).collect::<Vec<_>>(), expected);
        assert_eq!(taken.len(), 2);
    }
}
