//! Who follows whom: parents, their generations, and how many children they have.

use super::{
    BlockPhase, Blocks, CHILDREN, Flag, GENERATION, ORIGIN, PARENT, PARENT_GENERATION, RecordId,
};

impl Blocks {
    /// The block that holds the content before this one's, as long as it does.
    #[inline]
    pub(crate) fn parent(&self, id: RecordId) -> Option<RecordId> {
        let kin = self.kin(id);
        let parent = RecordId(kin[PARENT].checked_sub(1)?);
        (self.kin(parent)[GENERATION] == kin[PARENT_GENERATION]).then_some(parent)
    }

    /// Whether there is a [`parent`](Self::parent), mostly without a look at the kin.
    #[inline]
    pub(crate) fn has_parent(&self, id: RecordId) -> bool {
        self.is(id, Flag::LINKED) && (self.orphans == 0 || self.parent(id).is_some())
    }

    #[inline]
    pub(crate) fn set_parent(&mut self, id: RecordId, parent: Option<RecordId>) {
        if self.kin(id)[PARENT] != 0 && self.parent(id).is_none() {
            self.orphans -= 1;
        }
        let generation = parent.map_or(0, |parent| self.kin(parent)[GENERATION]);
        let kin = self.kin_mut(id);
        kin[PARENT] = parent.map_or(0, |parent| parent.0 + 1);
        kin[PARENT_GENERATION] = generation;
        match parent {
            Some(_) => self.set(id, Flag::LINKED),
            None => self.clear(id, Flag::LINKED),
        }
    }

    #[inline]
    pub(crate) fn children(&self, id: RecordId) -> u32 {
        self.kin(id)[CHILDREN]
    }

    #[inline]
    pub(crate) fn set_children(&mut self, id: RecordId, children: u32) {
        self.kin_mut(id)[CHILDREN] = children;
    }

    /// Cuts off all children: they have no parent from now on. Whether there can be a next time; if
    /// not, the block must be given no children any more.
    #[inline]
    pub(crate) fn disown(&mut self, id: RecordId) {
        let kin = self.kin_mut(id);
        let children = std::mem::take(&mut kin[CHILDREN]);
        kin[GENERATION] = kin[GENERATION].saturating_add(1);
        self.orphans += children as usize;
    }

    /// Blocks that name a parent that has disowned them.
    pub(crate) fn orphans(&self) -> usize {
        self.orphans
    }

    /// Whether a parent is named that has disowned the block.
    pub(crate) fn is_orphan(&self, id: RecordId) -> bool {
        self.is(id, Flag::LINKED) && self.parent(id).is_none()
    }

    /// Whether children of this block can still be told from those of its former contents.
    #[inline]
    pub(crate) fn may_have_children(&self, id: RecordId) -> bool {
        self.kin(id)[GENERATION] != u32::MAX
    }

    /// Makes `parent` the parent of a block that has none, if it may have children; whether it may.
    #[inline]
    pub(crate) fn follow(&mut self, id: RecordId, parent: RecordId) -> bool {
        let kin = self.kin_mut(parent);
        let generation = kin[GENERATION];
        if generation == u32::MAX || parent == id {
            return false;
        }
        kin[CHILDREN] += 1;
        let depth = ((kin[ORIGIN] >> 16) as u16).saturating_add(1);
        let own = self.kin_mut(id);
        own[PARENT] = parent.0 + 1;
        own[PARENT_GENERATION] = generation;
        own[ORIGIN] = own[ORIGIN] & 0xFFFF | u32::from(depth) << 16;
        self.set(id, Flag::LINKED);
        true
    }

    /// Counts one child less; whether it was the last, and the block waits for that.
    #[inline]
    pub(crate) fn lose_child(&mut self, id: RecordId) -> bool {
        let children = &mut self.kin_mut(id)[CHILDREN];
        *children -= 1;
        *children == 0 && self.place(id) == BlockPhase::Shadowed
    }
}
