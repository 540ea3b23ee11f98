//! Claimed blocks: blocks that one owner writes, until the content gets a name.

use crate::blocks::Flag;
use crate::hold::{BlockAt, Token, give_token_back};
use crate::pin::BlockPin;
use crate::pool::Shared;
use crate::state::{Claim, Move, Named, State};
use crate::sync::Arc;
use crate::{
    BlockHash, BlockId, BlockPool, Location, PinnedBlocks, Priority, RegisterError, Retention,
    SlotIndex, Tier,
};

/// What is said of content when it is given a name.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Naming {
    /// The name of the content before, which must be cached if this is to be found by prefix.
    /// A block is never evicted before those that name it here, as long as there is another choice.
    pub parent: Option<BlockHash>,
    /// What the content is worth when nobody uses it.
    pub retention: Retention,
}

impl Naming {
    /// Content that follows `parent`.
    #[must_use]
    pub fn after(parent: BlockHash) -> Self {
        Self { parent: Some(parent), ..Self::default() }
    }

    /// The same with another retention.
    #[must_use]
    pub fn keep(self, retention: impl Into<Retention>) -> Self {
        Self { retention: retention.into(), ..self }
    }
}

impl From<Priority> for Naming {
    fn from(priority: Priority) -> Self {
        Self::default().keep(priority)
    }
}

impl From<Retention> for Naming {
    fn from(retention: Retention) -> Self {
        Self::default().keep(retention)
    }
}

/// A block that belongs to the holder alone. No lookup finds it.
///
/// Dropped without a name, it is the next to be claimed once its epoch is complete.
#[derive(Debug)]
#[must_use = "dropping a claimed block gives it back"]
pub struct ClaimedBlock {
    /// `None` only when the block was handed on.
    handle: Option<Handle>,
    claim: Claim,
    tier: Tier,
}

/// How a claimed block reaches its pool.
#[derive(Debug)]
pub(crate) enum Handle {
    /// By a token, which becomes that of the pin.
    Token(Arc<Token>),
    /// As one of many that were claimed together.
    Pool(Arc<Shared>),
}

impl Handle {
    #[inline]
    fn pool(&self) -> &Arc<Shared> {
        match self {
            Self::Token(token) => &token.pool,
            Self::Pool(pool) => pool,
        }
    }

    /// Does the last of what the block was claimed for.
    #[inline]
    fn end(self, last: impl FnOnce(&mut State)) {
        match self {
            Self::Token(token) => give_token_back(token, last),
            Self::Pool(pool) => last(&mut pool.state.lock()),
        }
    }
}

/// What became of content that was given a name.
#[derive(Debug)]
pub enum Registration {
    /// Lookups find it from now on, in the slot of the claimed block. The pin is of that block, or of the
    /// one that bore the name before with a copy that nobody used in another tier, or that was on its
    /// way there: then this one has got the slot, and keeps the blocks that follow it.
    New(BlockPin),
    /// The same content was cached already. Whoever asks for the hash is given `existing`.
    ///
    /// Which of the two blocks to go on with is the caller's choice; dropping the other loses nothing.
    /// `existing` holds the content as soon as the move that brought it there is done, which its mover
    /// has said by [`Onboard::commit`](crate::Onboard::commit). Who commits a move before its copy is
    /// enqueued goes on with `own` until it is.
    Duplicate {
        /// A pin of the block that has the name; it may lie in any tier.
        existing: BlockPin,
        /// The block that was to be named, still claimed, with its slot and what was written there.
        own: ClaimedBlock,
    },
}

impl ClaimedBlock {
    pub(crate) fn new(handle: Handle, tier: Tier, claim: Claim) -> Self {
        Self { handle: Some(handle), claim, tier }
    }

    /// The block.
    #[must_use]
    pub fn block(&self) -> BlockId {
        self.claim.block()
    }

    /// Its slot in its tier.
    #[must_use]
    pub fn slot(&self) -> SlotIndex {
        self.claim.slot()
    }

    /// Where it lies: in the primary tier unless it was claimed in another.
    #[must_use]
    pub fn location(&self) -> Location {
        Location { tier: self.tier, slot: self.claim.slot() }
    }

    /// Whether cached content lost this slot to the claim.
    #[must_use]
    pub fn evicted(&self) -> bool {
        self.claim.evicted()
    }

    /// The move of the evicted content to the secondary tier, if there is to be one, once.
    ///
    /// The slot must not be written before that copy has read it. The pool sees to it that nobody
    /// else is given the slot before the [`Offload`] has ended, even if this block is dropped; the
    /// holder orders its own writes after the copy.
    #[must_use]
    pub fn take_offload(&mut self) -> Option<Offload> {
        let handle = self.handle.as_ref()?;
        take_offload(handle.pool(), &mut self.claim)
    }

    /// Gives the content of the block its name, so that lookups find and share it.
    ///
    /// The content must have been written, or its writing enqueued where all readers come after
    /// it. An offload that was not taken is given up.
    #[inline]
    pub fn register(mut self, hash: BlockHash, naming: impl Into<Naming>) -> Registration {
        let (naming, claim, tier) = (naming.into(), self.claim, self.tier);
        // Taken only by methods that consume the block.
        let Some(handle) = self.handle.take() else { unreachable!("a claimed block has a pool") };
        let (named, location, spare) = register(handle.pool(), &handle, claim, hash, &naming);
        match (named, spare, handle) {
            (Named::New(block), None, Handle::Token(token))
            | (Named::New(block), Some(token), _) => {
                Registration::New(BlockPin::counted(token, BlockAt { block, location }))
            }
            (Named::Duplicate(block), Some(token), handle) => {
                let existing = BlockPin::counted(token, BlockAt { block, location });
                let own = Self::new(handle, tier, claim.without_offload());
                Registration::Duplicate { existing, own }
            }
            (..) => unreachable!("a token was taken"),
        }
    }

    /// Names the content of the block and releases it, in one step: what
    /// [`register`](Self::register) does, for who needs it no longer. Whether the block has the name;
    /// if not, the same content was cached already, and this block is given back.
    pub fn cache(mut self, hash: BlockHash, naming: impl Into<Naming>) -> bool {
        let naming = naming.into();
        // Taken only by methods that consume the block.
        let Some(handle) = self.handle.take() else { return false };
        let mut named = false;
        handle.end(|state| named = state.cache_claim(&self.claim, hash, &naming));
        named
    }

    pub(crate) fn has_offload(&self) -> bool {
        self.claim.offload().is_some()
    }

    pub(crate) fn belongs_to(&self, pool: &BlockPool) -> bool {
        self.handle.as_ref().is_some_and(|own| pool.is(own.pool()))
    }

    /// Hands the block over to the caller, who holds it from now on.
    pub(crate) fn into_block(mut self) -> BlockId {
        self.handle = None;
        self.claim.block()
    }
}

impl Drop for ClaimedBlock {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            handle.end(|state| state.release_claim(&self.claim));
        }
    }
}

/// Blocks that were claimed in one step, which belong to the holder alone.
///
/// Operations on the list take the lock once for all blocks. Dropped, the blocks are given back.
#[derive(Debug)]
#[must_use = "dropping claimed blocks gives them back"]
pub struct ClaimedBlocks {
    pool: Arc<Shared>,
    tier: Tier,
    /// # Invariants
    ///
    /// - Those before `first` have left the list: what takes the first ones away moves no others.
    /// - Those before `offloads` have no move to be taken, so each is looked at once for all calls.
    claims: Vec<Claim>,
    first: usize,
    offloads: usize,
}

impl ClaimedBlocks {
    pub(crate) fn new(pool: Arc<Shared>, tier: Tier, claims: Vec<Claim>) -> Self {
        Self { pool, tier, claims, first: 0, offloads: 0 }
    }

    fn claims(&self) -> &[Claim] {
        &self.claims[self.first..]
    }

    fn single(&self, claim: Claim) -> ClaimedBlock {
        ClaimedBlock::new(Handle::Pool(Arc::clone(&self.pool)), self.tier, claim)
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

    /// The slots of the blocks, in their order.
    pub fn slots(&self) -> impl DoubleEndedIterator + ExactSizeIterator<Item = SlotIndex> + '_ {
        self.claims().iter().map(|claim| claim.slot())
    }

    /// The blocks, in their order.
    pub fn blocks(&self) -> impl DoubleEndedIterator + ExactSizeIterator<Item = BlockId> + '_ {
        self.claims().iter().map(|claim| claim.block())
    }

    /// Whether block `index` is there and cached content lost its slot to the claim.
    #[must_use]
    pub fn evicted(&self, index: usize) -> bool {
        self.claims().get(index).is_some_and(|claim| claim.evicted())
    }

    /// The next move of evicted content to the secondary tier, until there is none left; see
    /// [`ClaimedBlock::take_offload`]. Takes no lock. To take all moves of a list takes time in
    /// proportion to its length.
    #[must_use]
    pub fn take_offload(&mut self) -> Option<Offload> {
        self.offloads = self.offloads.max(self.first);
        while let Some(claim) = self.claims.get_mut(self.offloads) {
            self.offloads += 1;
            if claim.offload().is_some() {
                return take_offload(&self.pool, claim);
            }
        }
        None
    }

    /// Takes the first block out of the list.
    pub fn take_first(&mut self) -> Option<ClaimedBlock> {
        let claim = *self.claims().first()?;
        self.first += 1;
        Some(self.single(claim))
    }

    /// Takes the last block out of the list.
    pub fn pop(&mut self) -> Option<ClaimedBlock> {
        let claim = *self.claims().last()?;
        self.claims.pop();
        Some(self.single(claim))
    }

    /// Takes the blocks from `at` on out of the list; none if there are fewer.
    pub fn split_off(&mut self, at: usize) -> Self {
        let at = self.first + at.min(self.len());
        let claims = self.claims.split_off(at);
        let offloads = self.offloads.saturating_sub(at);
        Self { pool: Arc::clone(&self.pool), tier: self.tier, claims, first: 0, offloads }
    }

    /// Gives the first blocks names, as consecutive content that follows `naming.parent`, in one
    /// step. They leave this list; the others stay claimed.
    ///
    /// Block `n` of the result is the one that lookups of `hashes[n]` find, unless that lies in
    /// another tier and is in use there: then it is the block of this list, without a name. Where
    /// the same content was cached in this tier already, the block of this list is given back. Who
    /// commits moves before their copies are enqueued registers block by block instead, and chooses.
    ///
    /// Contents must have been written as for [`ClaimedBlock::register`]. Offloads of these blocks
    /// that were not taken are given up.
    ///
    /// # Errors
    /// [`RegisterError::TooMany`] if there are fewer blocks than names; nothing was named then.
    pub fn register(
        &mut self,
        hashes: &[BlockHash],
        naming: impl Into<Naming>,
    ) -> Result<PinnedBlocks, RegisterError> {
        let (names, blocks) = (hashes.len(), self.len());
        if names > blocks {
            return Err(RegisterError::TooMany { names, blocks });
        }
        if names == 0 {
            return Ok(PinnedBlocks::default());
        }
        let naming = naming.into();
        let mut state = self.pool.state.lock();
        let mut parent = naming.parent.and_then(|parent| state.find_parent(parent));
        let mut following = naming;
        let (tier, claims) = (self.tier, &self.claims()[..names]);
        let pins = PinnedBlocks::counted(&mut state, &self.pool, |state, pins| {
            pins.reserve(names);
            state.warm(hashes);
            for (claim, &hash) in claims.iter().zip(hashes) {
                let block = state.register_or_share(claim, tier, hash, parent, &following);
                pins.push(BlockAt { block, location: state.blocks.location(block) });
                following.parent = Some(hash);
                // A block without the name is not the one that the next is found after.
                let named = state.blocks.is(block, Flag::NAMED);
                parent = if named { Some(block) } else { state.bearer(hash) };
            }
        });
        drop(state);
        self.first += names;
        Ok(pins)
    }
}

impl IntoIterator for ClaimedBlocks {
    type Item = ClaimedBlock;
    type IntoIter = std::vec::IntoIter<ClaimedBlock>;

    fn into_iter(mut self) -> Self::IntoIter {
        let (pool, tier) = (&self.pool, self.tier);
        let single = |claim| ClaimedBlock::new(Handle::Pool(Arc::clone(pool)), tier, claim);
        let singles = self.claims[self.first..].iter().copied().map(single).collect::<Vec<_>>();
        self.first = self.claims.len();
        singles.into_iter()
    }
}

impl Drop for ClaimedBlocks {
    fn drop(&mut self) {
        let claims = std::mem::take(&mut self.claims);
        if claims.capacity() == 0 {
            return;
        }
        let mut state = self.pool.state.lock();
        // The first one is the next to be claimed.
        for claim in claims[self.first..].iter().rev() {
            state.release_claim(claim);
        }
        state.keep_claims(claims);
    }
}

/// Names a claimed block. The block that has the name, with its reference counted, where that lies, and
/// a token for the pin if there is need of one.
#[inline(never)]
fn register(
    pool: &Arc<Shared>,
    handle: &Handle,
    claim: Claim,
    hash: BlockHash,
    naming: &Naming,
) -> (Named, Location, Option<Arc<Token>>) {
    let mut state = pool.state.lock();
    let parent = naming.parent.and_then(|parent| state.find_parent(parent));
    let named = state.register_claim(&claim, hash, parent, naming);
    let (Named::New(block) | Named::Duplicate(block)) = named;
    let location = state.blocks.location(block);
    let has_token = matches!((handle, named), (Handle::Token(_), Named::New(_)));
    let spare = if has_token { None } else { Some(state.take_token(pool)) };
    (named, location, spare)
}

impl State {
    /// Gives a claimed block back, with what was to be moved away from it.
    pub(crate) fn release_claim(&mut self, claim: &Claim) {
        if let Some(moved) = claim.offload() {
            self.abort_offload(moved);
        }
        self.release_claimed(claim.block());
    }

    /// Names a claimed block and releases it; whether it has the name.
    fn cache_claim(&mut self, claim: &Claim, hash: BlockHash, naming: &Naming) -> bool {
        let parent = naming.parent.and_then(|parent| self.find_parent(parent));
        match self.register_claim(claim, hash, parent, naming) {
            Named::New(block) => {
                self.unpin(block);
                true
            }
            Named::Duplicate(existing) => {
                self.unpin(existing);
                self.release_claimed(claim.block());
                false
            }
        }
    }

    /// Names a claimed block; an offload that was not taken is given up.
    fn register_claim(
        &mut self,
        claim: &Claim,
        hash: BlockHash,
        parent: Option<BlockId>,
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
        parent: Option<BlockId>,
        naming: &Naming,
    ) -> BlockId {
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

fn take_offload(pool: &Arc<Shared>, claim: &mut Claim) -> Option<Offload> {
    let moved = claim.offload()?;
    *claim = claim.without_offload();
    Some(Offload { pool: Some(Arc::clone(pool)), moved })
}

/// Evicted content on its way from a primary slot to a secondary one.
///
/// The caller copies, then commits. Lookups find the content again after the commit. Dropped
/// without a commit, the content is given up. Until either, nobody is handed one of the two slots,
/// except for the one who claimed the primary one.
#[derive(Debug)]
#[must_use = "evicted content is lost unless its copy is committed"]
pub struct Offload {
    /// `None` only when the move has ended.
    pool: Option<Arc<Shared>>,
    moved: Move,
}

impl Offload {
    /// The primary slot that holds the content.
    #[must_use]
    pub fn from(&self) -> SlotIndex {
        self.moved.from
    }

    /// The secondary slot that it goes to.
    #[must_use]
    pub fn to(&self) -> SlotIndex {
        self.moved.to
    }

    /// Says that the copy is done, or enqueued where every later use of either slot comes after it.
    pub fn commit(mut self) {
        if let Some(pool) = self.pool.take() {
            pool.state.lock().commit_offload(self.moved);
        }
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.state.lock().abort_offload(self.moved);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PoolConfig;

    /// Every block that is claimed has content to be moved away.
    fn evicting(blocks: u64) -> ClaimedBlocks {
        let config = PoolConfig { secondary_blocks: blocks, ..PoolConfig::primary_only(blocks) };
        let pool = BlockPool::new(&config).unwrap();
        let names: Vec<_> = (0..blocks).map(|name| BlockHash::from_u128(name.into())).collect();
        drop(pool.claim(names.len()).unwrap().register(&names, Naming::default()).unwrap());
        pool.claim(names.len()).unwrap()
    }

    #[test]
    fn a_block_is_looked_at_for_its_move_once_for_all_calls() {
        let mut blocks = evicting(64);
        let whole = blocks.claims.clone();
        let mut taken = Vec::new();
        while taken.len() < whole.len()
            && let Some(offload) = blocks.take_offload()
        {
            taken.push(offload.moved.block);
            // None of them shall end twice.
            std::mem::forget(offload);
            // What came before is put back as it was: nobody looks there again.
            blocks.claims[..taken.len()].copy_from_slice(&whole[..taken.len()]);
        }
        let no_more = blocks.take_offload().is_none();
        blocks.claims.iter_mut().for_each(|claim| *claim = claim.without_offload());
        let moves = whole.iter().filter_map(Claim::offload);
        assert_eq!(taken, moves.map(|moved| moved.block).collect::<Vec<_>>());
        assert!(no_more);
    }

    #[test]
    fn the_first_blocks_leave_a_list_without_the_others_being_moved() {
        let mut blocks = evicting(64);
        let at = blocks.claims.as_ptr();
        let names: Vec<_> = (100..132).map(BlockHash::from_u128).collect();
        for name in names {
            drop(blocks.take_first());
            drop(blocks.register(&[name], Naming::default()).unwrap());
            assert_eq!(blocks.claims.len(), 64, "the others have been moved");
        }
        assert_eq!((blocks.len(), blocks.claims.as_ptr()), (0, at));
    }

    #[test]
    fn every_move_is_taken_once_whatever_has_left_the_list() {
        for program in 0..256_u32 {
            let mut blocks = evicting(24);
            let mut expected = blocks.claims.clone();
            let mut taken = Vec::new();
            for step in 0..4 {
                let (mut singles, mut lists) = (Vec::new(), Vec::new());
                taken.extend(blocks.take_offload());
                match program >> (2 * step) & 3 {
                    0 => singles.extend(blocks.take_first()),
                    1 => singles.extend(blocks.pop()),
                    2 => lists.push(blocks.split_off(blocks.len() - 2)),
                    _ => {
                        let tail = blocks.split_off(3);
                        lists.push(std::mem::replace(&mut blocks, tail));
                    }
                }
                taken.extend(singles.iter_mut().filter_map(ClaimedBlock::take_offload));
                for list in &mut lists {
                    taken.extend(std::iter::from_fn(|| list.take_offload()));
                }
                taken.extend(blocks.take_offload());
            }
            taken.extend(std::iter::from_fn(|| blocks.take_offload()));
            let mut taken: Vec<_> = taken.iter().map(|offload| offload.moved.block).collect();
            taken.sort_unstable();
            expected.sort_unstable_by_key(|claim| claim.offload().map(|moved| moved.block));
            let expected = expected.iter().filter_map(Claim::offload).map(|moved| moved.block);
            assert_eq!(taken, expected.collect::<Vec<_>>(), "program {program:#x}");
        }
    }
}
