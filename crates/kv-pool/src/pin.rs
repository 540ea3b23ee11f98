//! Pins: references to cached content that keep it where it is.

use crate::hold::{BlockAt, Hold, Token, fill, let_go, unpin};
use crate::pool::Shared;
use crate::state::State;
use crate::sync::{Arc, into_inner, is_sole};
use crate::{BlockHash, BlockId, BlockPool, Location, SlotIndex};

/// A reference to a block with content. While it lives, the block is neither evicted nor moved.
///
/// Clones are further references; cloning, and dropping all but the last clone, takes no lock. For
/// the blocks of one request use [`PinnedBlocks`] or [`BlockPool::release`], which keep their order.
#[derive(Clone, Debug)]
pub struct BlockPin {
    /// `None` only while being dropped.
    token: Option<Arc<Token>>,
    at: BlockAt,
}

impl BlockPin {
    /// A pin for a reference that has been counted. The location was read in the same hold of the
    /// lock, and stays true as long as the reference is counted.
    #[inline]
    pub(crate) fn counted(token: Arc<Token>, at: BlockAt) -> Self {
        Self { token: Some(token), at }
    }

    /// The block.
    #[must_use]
    pub fn block(&self) -> BlockId {
        self.at.block
    }

    /// Where its content lies, for as long as this pin lives.
    #[must_use]
    pub fn location(&self) -> Location {
        self.at.location
    }

    /// The slot of the location.
    #[must_use]
    pub fn slot(&self) -> SlotIndex {
        self.at.location.slot
    }

    /// The name of the content; `None` if it was [removed](BlockPool::remove) from the index.
    #[must_use]
    pub fn hash(&self) -> Option<BlockHash> {
        self.pool()?.state.lock().blocks.name(self.at.block)
    }

    pub(crate) fn pool(&self) -> Option<&Arc<Shared>> {
        self.token.as_ref().map(|token| &token.pool)
    }

    pub(crate) fn belongs_to(&self, pool: &BlockPool) -> bool {
        self.pool().is_some_and(|own| pool.is(own))
    }

    /// Whether this pin has no clones. Nobody can make one while it is borrowed mutably or owned.
    pub(crate) fn is_sole(&self) -> bool {
        self.token.as_ref().is_some_and(is_sole)
    }

    /// The new location of a block that this pin alone holds, or nothing if there are clones.
    pub(crate) fn relocate(&mut self, location: Location) -> bool {
        let sole = self.is_sole();
        if sole {
            self.at.location = location;
        }
        sole
    }
}

impl Drop for BlockPin {
    #[inline]
    fn drop(&mut self) {
        if let Some(token) = self.token.take() {
            unpin(token, self.at.block);
        }
    }
}

/// A pin of which one thread makes further pins, and takes them back, without an atomic operation.
///
/// To clone a [`BlockPin`] and to drop the clone are an atomic addition and subtraction. A stock keeps
/// what is given back to it for the next that is asked for, so that where pins come back to the
/// thread that handed them out, as after each step of a scheduler, only the highest number that was
/// ever out at once was counted. Pins of a stock are like all others: they may go to other threads,
/// be cloned, be dropped, and outlive the stock.
///
/// Spare pins are owners like others: a block of which there are some is never moved by
/// [`Onboard::commit`](crate::Onboard::commit).
#[derive(Debug)]
pub struct PinStock {
    pin: BlockPin,
    /// Owners of the pin's token.
    spare: Vec<Arc<Token>>,
}

impl Drop for PinStock {
    fn drop(&mut self) {
        // As pins, so that whoever is the last of all owners gives the block back.
        let at = self.pin.at;
        self.spare.drain(..).for_each(|token| drop(BlockPin::counted(token, at)));
    }
}

impl PinStock {
    /// A stock without spares; nothing is allocated before one is given back.
    #[must_use]
    pub fn new(pin: BlockPin) -> Self {
        Self { pin, spare: Vec::new() }
    }

    /// The stock's own pin.
    #[must_use]
    pub fn pin(&self) -> &BlockPin {
        &self.pin
    }

    /// A further pin: a spare one, else a clone.
    #[must_use]
    #[inline]
    pub fn take(&mut self) -> BlockPin {
        match self.spare.pop() {
            Some(token) => BlockPin::counted(token, self.pin.at),
            None => self.pin.clone(),
        }
    }

    /// Takes back a pin, for the next [`take`](Self::take).
    ///
    /// # Errors
    /// Returns `pin` if it is neither of this stock nor of its pin's clones.
    #[inline]
    pub fn give_back(&mut self, mut pin: BlockPin) -> Result<(), BlockPin> {
        match (pin.token.take(), &self.pin.token) {
            (Some(token), Some(own)) if Arc::ptr_eq(&token, own) => {
                self.spare.push(token);
                Ok(())
            }
            (token, _) => {
                pin.token = token;
                Err(pin)
            }
        }
    }
}

/// Pinned blocks in their order, such as the cached prefix of a prompt.
///
/// One count of owners stands for all of them: cloning the list, and dropping all but the last
/// clone, is one atomic operation whatever its length. The last one gives the blocks back from last
/// to first in one step, so that the tail of a prefix is evicted before its head.
#[derive(Clone, Debug, Default)]
pub struct PinnedBlocks {
    /// `None` for no blocks.
    hold: Option<Arc<Hold>>,
}

impl PinnedBlocks {
    /// A list of references that `pin` counts. None is made if there is nothing to pin.
    pub(crate) fn counted(
        state: &mut State,
        pool: &Arc<Shared>,
        pin: impl FnOnce(&mut State, &mut Vec<BlockAt>),
    ) -> Self {
        let spare = state.take_hold();
        let hold = fill(spare, Arc::clone(pool), |blocks| pin(state, blocks));
        Self { hold: Some(hold) }
    }

    /// How many blocks there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.as_slice().is_empty()
    }

    /// The blocks and where they lie, for as long as this list lives.
    #[must_use]
    pub fn as_slice(&self) -> &[BlockAt] {
        self.hold.as_ref().map_or(&[], |hold| &hold.blocks)
    }

    /// The slots of the blocks, in their order.
    pub fn slots(&self) -> impl DoubleEndedIterator + ExactSizeIterator<Item = SlotIndex> + '_ {
        self.as_slice().iter().map(|at| at.location.slot)
    }

    /// A pin of block `index` alone, which outlives the list. Takes the lock; `None` if there is no
    /// such block.
    #[must_use]
    pub fn pin(&self, index: usize) -> Option<BlockPin> {
        let hold = self.hold.as_ref()?;
        let (at, pool) = (*hold.blocks.get(index)?, hold.pool()?);
        let mut state = pool.state.lock();
        state.pin(at.block);
        let token = state.take_token(pool);
        drop(state);
        Some(BlockPin::counted(token, at))
    }

    /// Adds blocks behind those that are there. A list that has clones is given a record of its own
    /// first. Lists of two pools are not joined.
    ///
    /// # Errors
    /// Returns `more` if it belongs to another pool.
    pub fn append(&mut self, mut more: Self) -> Result<(), Self> {
        if more.is_empty() {
            return Ok(());
        }
        if self.is_empty() {
            *self = more;
            return Ok(());
        }
        if !self.same_pool(&more) {
            return Err(more);
        }
        self.make_own();
        more.make_own();
        let from = more.hold.as_mut().and_then(Arc::get_mut);
        if let (Some(to), Some(from)) = (self.hold.as_mut().and_then(Arc::get_mut), from) {
            to.blocks.append(&mut from.blocks);
        }
        Ok(())
    }

    /// Releases the blocks from `len` on, the last one first, in one step.
    pub fn truncate(&mut self, len: usize) {
        if len >= self.len() {
            return;
        }
        self.make_own();
        let Some(own) = self.hold.as_mut().and_then(Arc::get_mut) else { return };
        let Some(pool) = own.pool().cloned() else { return };
        let mut state = pool.state.lock();
        for at in own.blocks.drain(len..).rev() {
            state.unpin(at.block);
        }
    }

    pub(crate) fn belongs_to(&self, pool: &BlockPool) -> bool {
        self.hold.as_ref().and_then(|hold| hold.pool()).is_some_and(|own| pool.is(own))
    }

    fn same_pool(&self, other: &Self) -> bool {
        let pool = |list: &Self| list.hold.as_ref().and_then(|hold| hold.pool().cloned());
        match (pool(self), pool(other)) {
            (Some(one), Some(other)) => Arc::ptr_eq(&one, &other),
            _ => false,
        }
    }

    /// Gives a list that has clones references of its own.
    fn make_own(&mut self) {
        let Some(hold) = &mut self.hold else { return };
        if Arc::get_mut(hold).is_some() {
            return;
        }
        let Some(pool) = hold.pool().cloned() else { return };
        let own = {
            let mut state = pool.state.lock();
            Self::counted(&mut state, &pool, |state, blocks| {
                for at in &hold.blocks {
                    state.pin(at.block);
                    blocks.push(*at);
                }
            })
        };
        *self = own;
    }
}

impl IntoIterator for PinnedBlocks {
    type Item = BlockPin;
    type IntoIter = std::vec::IntoIter<BlockPin>;

    /// Takes the list apart into pins of single blocks, in one step.
    fn into_iter(mut self) -> Self::IntoIter {
        self.make_own();
        let Some(mut hold) = self.hold.take() else { return Vec::new().into_iter() };
        let Some(pool) = hold.pool().cloned() else { return Vec::new().into_iter() };
        let mut pins = Vec::with_capacity(hold.blocks.len());
        let mut state = pool.state.lock();
        if let Some(own) = Arc::get_mut(&mut hold) {
            for at in own.blocks.drain(..) {
                pins.push(BlockPin::counted(state.take_token(&pool), at));
            }
        }
        drop(state);
        let_go(hold);
        pins.into_iter()
    }
}

impl Drop for PinnedBlocks {
    #[inline]
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            let_go(hold);
        }
    }
}

/// Releases pins from last to first in one hold of the lock, as far as they belong to `pool`.
pub(crate) fn release_in_order(pool: &BlockPool, mut pins: Vec<BlockPin>) {
    let mut state = pool.shared.state.lock();
    for pin in pins.iter_mut().rev() {
        // A foreign pin takes its own pool's lock, after this one is free.
        if !pin.belongs_to(pool) {
            continue;
        }
        let Some(token) = pin.token.take() else { continue };
        if is_sole(&token) {
            state.unpin(pin.at.block);
            // A pool that has a handle keeps it, or has enough.
            drop(state.keep_token(token));
        } else if into_inner(token).is_some() {
            state.unpin(pin.at.block);
        }
    }
    drop(state);
    pins.into_iter().rev().for_each(drop);
}
