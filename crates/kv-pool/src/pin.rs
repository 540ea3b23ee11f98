//! Pinned blocks: references to cached content that keep it where it is.

use std::ops::Range;

use crate::guard;
use crate::hold::{BlockAt, Hold, let_go, unpin};
use crate::policy::ReuseHint;
use crate::state::{Claim, PoolState};
use crate::sync::{Arc, is_sole};
use crate::view::Shared;
use crate::{BlockId, BlockPool, Claimed, Location, RecordId};

/// Pinned blocks in their order, such as the cached prefix of a prompt. Others may read them; while the
/// list lives, none is evicted or moved. One block is a list of one.
///
/// One count of owners stands for the whole list: cloning it, and dropping all but the last clone, is one
/// atomic operation whatever its length, and takes no lock. The last owner gives the blocks back from
/// last to first in one step, so that the tail of a prefix is evicted before its head.
#[derive(Clone, Debug, Default)]
pub struct Pinned {
    /// `None` for no blocks.
    hold: Option<Arc<Hold>>,
    /// The only block, if the list was made as one of one; the hold has no blocks then. Its location was
    /// read in the same hold of the lock in which the reference was counted, and stays true as long as it
    /// is.
    one: Option<BlockAt>,
}

impl Pinned {
    /// A list of one, for a reference that has been counted.
    #[inline]
    pub(crate) fn one(hold: Arc<Hold>, at: BlockAt) -> Self {
        Self { hold: Some(hold), one: Some(at) }
    }

    /// A list of references that `pin` counts.
    #[inline]
    pub(crate) fn counted(
        state: &mut PoolState,
        pool: &Arc<Shared>,
        pin: impl FnOnce(&mut PoolState, &mut Vec<BlockAt>),
    ) -> Self {
        let mut hold = state.spares.take_hold(pool);
        match Arc::get_mut(&mut hold) {
            Some(own) => pin(state, &mut own.blocks),
            None => unreachable!("a spare hold has no other owner"),
        }
        Self { hold: Some(hold), one: None }
    }

    /// How many blocks there are.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.blocks().len()
    }

    /// Whether there are none.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.blocks().is_empty()
    }

    /// The block ids, in the order of the list. Blocks of several tiers may be in it:
    /// [`locations`](Self::locations) says which.
    pub fn ids(&self) -> impl DoubleEndedIterator + ExactSizeIterator<Item = BlockId> + '_ {
        self.locations().map(|location| location.id)
    }

    /// The tier and the block id of each block, which stay as they are while this list lives.
    pub fn locations(&self) -> impl DoubleEndedIterator + ExactSizeIterator<Item = Location> + '_ {
        self.blocks().iter().map(|at| at.location())
    }

    /// The pool's records of the blocks, as policies, events and snapshots name them.
    pub fn records(&self) -> impl DoubleEndedIterator + ExactSizeIterator<Item = RecordId> + '_ {
        self.blocks().iter().map(|at| at.block())
    }

    /// A list of block `index` alone, which outlives this one. Takes the lock; `None` if there is no
    /// such block.
    #[must_use]
    pub fn pin(&self, index: usize) -> Option<Self> {
        let (at, pool) = (*self.blocks().get(index)?, self.pool()?);
        let mut state = pool.state.lock();
        state.pin(at.block());
        let hold = state.spares.take_single(pool);
        drop(state);
        Some(Self::one(hold, at))
    }

    /// Takes the name off the only block of a list, if nobody else holds it, and makes it the caller's to write: its
    /// content is forgotten.
    ///
    /// # Errors
    /// Returns the list as it was: others hold the block, or there is not one block.
    pub fn unname(mut self) -> Result<Claimed, Self> {
        let (&[at], Some(pool)) = (self.blocks(), self.pool().cloned()) else { return Err(self) };
        if self.sole_blocks().is_none() {
            return Err(self);
        }
        let mut state = pool.state.lock();
        if !state.unname_pinned(at.block()) {
            drop(state);
            return Err(self);
        }
        let claim = Claim::new(at.block(), at.location().id, false);
        // The reference is the claim's now.
        let hold = state.spares.take_single(&pool);
        drop(state);
        self.disown();
        Ok(Claimed::one(hold, at.location().tier, claim))
    }

    /// Lets go of blocks whose references are counted no more.
    fn disown(&mut self) {
        let Some(mut hold) = self.hold.take() else { return };
        if let Some(own) = Arc::get_mut(&mut hold) {
            own.blocks.clear();
        }
        self.one = None;
    }

    /// Adds blocks behind those that are there. A list that has clones is given references of its own
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
        if let (Some(to), Some(from)) = (self.own_list(), more.own_list()) {
            to.append(from);
        }
        Ok(())
    }

    /// Makes room for so many blocks in all, so that those that are [named onto](Claimed::register_onto) the list need
    /// none. A hint, which a list that has clones or was made as a list of one does not take.
    pub fn reserve(&mut self, blocks: usize) {
        if let Some(own) = self.own_list() {
            // What cannot be reserved now is asked for when it is needed.
            let _ = own.try_reserve(blocks.saturating_sub(own.len()));
        }
    }

    /// Releases the blocks from `len` on, the last one first, in one step.
    pub fn truncate(&mut self, len: usize) {
        if len >= self.len() {
            return;
        }
        let Some(pool) = self.pool().cloned() else { return };
        self.make_own();
        let Some(own) = self.own_list() else { return };
        let mut state = pool.state.lock();
        for at in own.drain(len..).rev() {
            state.unpin(at.block());
        }
    }

    /// Takes the blocks from `at` on out of the list; none if there are fewer. A list that has clones is
    /// given references of its own first.
    #[must_use = "dropping the list releases the blocks"]
    pub fn split_off(&mut self, at: usize) -> Self {
        if at >= self.len() {
            return Self::default();
        }
        if at == 0 {
            return std::mem::take(self);
        }
        let Some(pool) = self.pool().cloned() else { return Self::default() };
        self.make_own();
        let Some(own) = self.own_list() else { return Self::default() };
        let mut state = pool.state.lock();
        Self::counted(&mut state, &pool, |_, blocks| blocks.extend(own.drain(at..)))
    }

    /// Says how the content of blocks will be used once they are released; of how many the hint was taken. It holds
    /// until somebody finds or pins the block again. `lists` are a prefix in its order, of one pool, and `blocks` are
    /// counted through them; what is of another pool than the first list is left alone. Takes the lock once, when it
    /// has gone through `lists`.
    ///
    /// [`Over`](ReuseHint::Over) gives blocks of default priority the lowest one, so they go before others, and are
    /// not offloaded. It leaves out what others hold too, with a clone of the list or by a lookup, and ends, from the
    /// last block on, before the first that other content follows: more sessions than one begin with it. The other
    /// hints go to the [policies](crate::policy); priority LRU has no use for them.
    pub fn hint<'a, L>(lists: L, blocks: Range<usize>, hint: ReuseHint) -> usize
    where
        L: IntoIterator<Item = &'a Self>,
    {
        // The iterator is the caller's: it does not run under the lock.
        let lists: Vec<&Self> = lists.into_iter().collect();
        let Some(pool) = lists.iter().find_map(|list| list.pool()) else { return 0 };
        let mut index = lists.iter().map(|list| list.len()).sum::<usize>();
        let all = lists.iter().rev().flat_map(|list| {
            let own = list.pool().is_some_and(
                |own| guard!("pool.hint-is-for-own-pins", Arc::ptr_eq(own, pool), else true),
            );
            let sole = list.hold.as_ref().is_some_and(is_sole);
            list.blocks().iter().rev().map(move |at| own.then(|| (at.block(), sole)))
        });
        let within = all.filter_map(|block| {
            index -= 1;
            block.filter(|_| blocks.contains(&index))
        });
        pool.state.lock().hint(within, hint)
    }

    #[inline]
    pub(crate) fn blocks(&self) -> &[BlockAt] {
        match (&self.one, &self.hold) {
            (Some(at), _) => std::slice::from_ref(at),
            (None, Some(hold)) => &hold.blocks,
            (None, None) => &[],
        }
    }

    /// The blocks, if this list has no clones. Nobody can make one while it is borrowed mutably.
    pub(crate) fn sole_blocks(&mut self) -> Option<&mut [BlockAt]> {
        let own = Arc::get_mut(self.hold.as_mut()?)?;
        match &mut self.one {
            Some(at) => Some(std::slice::from_mut(at)),
            None => Some(&mut own.blocks),
        }
    }

    pub(crate) fn pool(&self) -> Option<&Arc<Shared>> {
        self.hold.as_ref().map(|hold| &hold.pool)
    }

    pub(crate) fn belongs_to(&self, pool: &BlockPool) -> bool {
        self.pool().is_some_and(|own| pool.is(own))
    }

    /// Gives the blocks back, whose hold has no other owner.
    fn give_back_to(&self, state: &mut PoolState, hold: Option<&mut Hold>) {
        match (self.one, hold) {
            (Some(at), Some(_)) => state.unpin(at.block()),
            (None, Some(own)) => own.give_back(state),
            (_, None) => {}
        }
    }

    fn same_pool(&self, other: &Self) -> bool {
        match (self.pool(), other.pool()) {
            (Some(one), Some(other)) => {
                guard!("pool.pins-join-within-one-pool", Arc::ptr_eq(one, other), else true)
            }
            _ => false,
        }
    }

    /// Makes the list one that blocks of `pool` can be added to; `false`, and nothing has changed, if it has
    /// blocks of another pool.
    pub(crate) fn make_own_in(&mut self, pool: &Arc<Shared>) -> bool {
        match self.pool() {
            None => return true,
            Some(own)
                if guard!(
                    "pool.named-behind-own-pins",
                    Arc::ptr_eq(own, pool),
                    else true
                ) =>
            {
                self.make_own()
            }
            Some(_) if self.is_empty() => drop(std::mem::take(self)),
            Some(_) => return false,
        }
        true
    }

    /// The list that [`make_own_in`](Self::make_own_in) has made.
    pub(crate) fn own_or_new(
        &mut self,
        state: &mut PoolState,
        pool: &Arc<Shared>,
    ) -> &mut Vec<BlockAt> {
        if self.hold.is_none() {
            *self = Self::counted(state, pool, |_, _| {});
        }
        match self.own_list() {
            Some(list) => list,
            None => unreachable!("it was made the caller's own"),
        }
    }

    /// The list that [`make_own`](Self::make_own) has made.
    fn own_list(&mut self) -> Option<&mut Vec<BlockAt>> {
        match self.one {
            Some(_) => None,
            None => Arc::get_mut(self.hold.as_mut()?).map(|own| &mut own.blocks),
        }
    }

    /// Gives a list that has clones references of its own, and a list of one a record that can grow.
    fn make_own(&mut self) {
        if self.own_list().is_some() {
            return;
        }
        let Some(pool) = self.pool().cloned() else { return };
        let mut state = pool.state.lock();
        let own = Self::counted(&mut state, &pool, |state, blocks| {
            for at in self.blocks() {
                state.pin(at.block());
                blocks.push(*at);
            }
        });
        drop(state);
        *self = own;
    }
}

impl IntoIterator for Pinned {
    type Item = Pinned;
    type IntoIter = std::vec::IntoIter<Pinned>;

    /// Takes the list apart into lists of one, in one step. A list that has clones is given references of
    /// its own first.
    fn into_iter(mut self) -> Self::IntoIter {
        if self.one.is_some() && self.hold.as_ref().is_some_and(is_sole) {
            return vec![self].into_iter();
        }
        let Some(pool) = self.pool().cloned() else { return Vec::new().into_iter() };
        self.make_own();
        let Some(own) = self.own_list() else { return Vec::new().into_iter() };
        let mut pins = Vec::with_capacity(own.len());
        let mut state = pool.state.lock();
        for at in own.drain(..) {
            pins.push(Self::one(state.spares.take_single(&pool), at));
        }
        drop(state);
        pins.into_iter()
    }
}

impl Drop for Pinned {
    #[inline]
    fn drop(&mut self) {
        match (self.hold.take(), self.one) {
            (None, _) => {}
            (Some(hold), Some(at)) => unpin(hold, at.block()),
            (Some(hold), None) => let_go(hold),
        }
    }
}

/// Releases lists from last to first in one hold of the lock, as far as they belong to `pool`.
pub(crate) fn release_in_order(pool: &BlockPool, mut lists: Vec<Pinned>) {
    let mut state = pool.shared.state.lock();
    for list in lists.iter_mut().rev() {
        // A foreign list takes its own pool's lock, after this one is free.
        if !list.belongs_to(pool) {
            continue;
        }
        let Some(mut hold) = list.hold.take() else { continue };
        if is_sole(&hold) {
            list.give_back_to(&mut state, Arc::get_mut(&mut hold));
            state.spares.keep_hold(hold);
        } else {
            list.give_back_to(&mut state, Arc::into_inner(hold).as_mut());
        }
    }
    drop(state);
    lists.into_iter().rev().for_each(drop);
}

/// A lookup's outcome goes back to the caller in two registers.
#[cfg(not(any(loom, shuttle)))]
const _: () = assert!(size_of::<Pinned>() == 2 * size_of::<usize>());
