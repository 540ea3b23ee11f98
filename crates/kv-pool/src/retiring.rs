//! Released blocks whose slots the device may still use.

use crate::list::{Links, List};
use crate::{BlockId, Tier};

/// Released blocks in the order of their release, and so of their epochs, counted by tier.
#[derive(Debug)]
pub(crate) struct Retiring {
    list: List,
    len: [usize; 2],
}

impl Retiring {
    pub(crate) fn new() -> Self {
        Self { list: List::EMPTY, len: [0; 2] }
    }

    pub(crate) fn len(&self, tier: Tier) -> usize {
        self.len[tier.index()]
    }

    /// The block that was released first.
    pub(crate) fn front(&self) -> Option<BlockId> {
        self.list.front()
    }

    /// Inserts a block of `tier`, whose slot does not change as long as it is here.
    pub(crate) fn insert(&mut self, links: &mut Links, block: BlockId, tier: Tier) {
        self.list.push_back(links, block);
        self.len[tier.index()] += 1;
    }

    pub(crate) fn remove(&mut self, links: &mut Links, block: BlockId, tier: Tier) {
        self.list.remove(links, block);
        self.len[tier.index()] -= 1;
    }

    pub(crate) fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = BlockId> + 'a {
        self.list.iter(links)
    }
}
