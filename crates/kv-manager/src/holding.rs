//! What a sequence has of every group, and the ends up to which a step changes nothing of it.

use std::ops::{Deref, DerefMut};

use kv_pool::guard;
use smallvec::SmallVec;

use crate::group::{Group, Held};

/// What a sequence has of every group, in their order.
///
/// Most decode steps write into blocks that are there, name none and leave none behind. Whether a step is such a one
/// is three comparisons with [`Bounds`], however many groups there are. Whoever may change what is held makes them
/// unknown, by borrowing it mutably.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Holding {
    bounds: Option<Bounds>,
    each: SmallVec<[Held; 1]>,
}

/// Ends of a sequence's KV, in tokens, between which no group needs or gives anything.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Tokens from `writes_from` up to `writes_to` can be written to blocks that are there and its own.
    pub(crate) writes_from: u64,
    pub(crate) writes_to: u64,
    /// The most tokens that a step can write at once.
    pub(crate) at_once: u32,
    /// The certain end with which a block can be named that has not been offered to the prefix index.
    pub(crate) names_at: u64,
    /// The certain end with which a block may have left its window.
    pub(crate) retires_at: u64,
}

impl Holding {
    pub(crate) fn new(each: SmallVec<[Held; 1]>) -> Self {
        Self { bounds: None, each }
    }

    /// The bounds, which are computed after every change.
    #[inline]
    pub(crate) fn bounds(&mut self, groups: &[Group]) -> &Bounds {
        self.bounds.get_or_insert_with(|| Bounds::of(groups, &self.each))
    }

    /// The bounds, looked for anew.
    pub(crate) fn find_bounds(&self, groups: &[Group]) -> Bounds {
        Bounds::of(groups, &self.each)
    }
}

impl Bounds {
    fn of(groups: &[Group], each: &[Held]) -> Self {
        let mut bounds = Self {
            writes_from: 0,
            writes_to: u64::MAX,
            at_once: u32::MAX,
            names_at: u64::MAX,
            retires_at: u64::MAX,
        };
        for (group, held) in groups.iter().zip(each) {
            let (own_from, len) = (held.blocks.own_from(), held.blocks.len());
            let (writes_to, names_at) = if group.is_draft {
                // Where it is written, and named, is another end.
                (group.tokens_of(len), u64::MAX)
            } else if group.is_state() {
                // A state is written whole, and by drafts only where there is room for each.
                bounds.at_once = 1;
                let is_own = guard!("manager.writes-its-own-state", own_from == 0, else true);
                let writable = is_own && len > 0;
                (if writable { u64::MAX } else { 0 }, held.turn)
            } else {
                bounds.writes_from = bounds.writes_from.max(group.tokens_of(own_from));
                (group.tokens_of(len), group.tokens_of(held.named + 1))
            };
            bounds.writes_to = bounds.writes_to.min(writes_to);
            bounds.names_at = bounds.names_at.min(names_at);
            if group.is_window() {
                bounds.retires_at = bounds.retires_at.min(held.turn);
            }
        }
        bounds
    }
}

impl Deref for Holding {
    type Target = [Held];

    #[inline]
    fn deref(&self) -> &[Held] {
        &self.each
    }
}

impl DerefMut for Holding {
    #[inline]
    fn deref_mut(&mut self) -> &mut [Held] {
        self.bounds = None;
        &mut self.each
    }
}
