//! Blocks in lists, one for each kind and each priority, in the order of their last use.

use super::super::table;
use super::ages::Tick;
use super::kind::KINDS;
use super::traits::{Order, TRAIT_BITS, Traits};
use crate::ConfigError;
use crate::{Priority, RecordId};

/// No block.
const NONE: u32 = u32::MAX;

/// Lists: one for each kind, then one for each priority.
pub(super) const LISTS: usize = KINDS + Priority::COUNT;

/// Where in its life a block is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Phase {
    /// Not cached.
    Absent,
    /// Held.
    Held,
    /// Evictable, in the list that its traits say.
    Listed,
    /// Evictable but for its children, and in no list: it came up for eviction.
    Aside,
}

/// One of the two ends of a list.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum End {
    /// Where blocks are that were used long ago.
    Oldest,
    /// Where blocks are that were used lately.
    Newest,
}

const PHASE_AT: u32 = TRAIT_BITS;
const PHASES: u16 = 3;
const HAS_CHILDREN: u16 = 1 << (PHASE_AT + 2);

const _: () = assert!(PHASE_AT + 3 <= u16::BITS);

#[derive(Clone, Copy, Debug)]
struct Node {
    /// Neighbours in its list.
    older: u32,
    newer: u32,
    used: Tick,
    /// Traits, phase, and whether it has children.
    bits: u16,
}

const _: () = assert!(size_of::<Node>() == 16);

#[derive(Clone, Copy, Debug)]
struct Ends {
    oldest: u32,
    newest: u32,
    /// When these two were used.
    oldest_used: Tick,
    newest_used: Tick,
}

/// All blocks, and the lists of those that are evictable.
#[derive(Debug)]
pub(super) struct Lists {
    nodes: Vec<Node>,
    ends: Box<[Ends]>,
    /// A bit for each kind whose list has other ends than when it was last asked.
    changed: u128,
    /// A bit for each priority whose list has blocks.
    occupied: u128,
    /// Blocks that are listed or aside.
    evictable: usize,
}

const _: () = assert!(KINDS <= 128 && Priority::COUNT <= 128);

impl Lists {
    pub(super) fn new(len: usize, blocks: u64) -> Result<Self, ConfigError> {
        let absent = Node { older: NONE, newer: NONE, used: Tick::ZERO, bits: 0 };
        let empty =
            Ends { oldest: NONE, newest: NONE, oldest_used: Tick::ZERO, newest_used: Tick::ZERO };
        Ok(Self {
            nodes: table(len, absent, blocks)?,
            ends: table(LISTS, empty, blocks)?.into_boxed_slice(),
            changed: 0,
            occupied: 0,
            evictable: 0,
        })
    }

    pub(super) fn blocks(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn evictable(&self) -> usize {
        self.evictable
    }

    /// [`Phase::Absent`] for blocks beyond the last one.
    pub(super) fn phase(&self, block: RecordId) -> Phase {
        self.nodes.get(block.index()).map_or(Phase::Absent, |node| node.phase())
    }

    pub(super) fn traits(&self, block: RecordId) -> Traits {
        Traits::from_bits(self.nodes[block.index()].bits)
    }

    pub(super) fn used(&self, block: RecordId) -> Tick {
        self.nodes[block.index()].used
    }

    /// The same, no longer ago than is told apart.
    pub(super) fn used_lately(&mut self, block: RecordId, now: Tick) -> Tick {
        let node = &mut self.nodes[block.index()];
        let used = node.used.at_least(now);
        if used != node.used {
            node.used = used;
            if node.phase() == Phase::Listed {
                let ends = &mut self.ends[node.list()];
                if ends.oldest == block.0 {
                    ends.oldest_used = used;
                }
                if ends.newest == block.0 {
                    ends.newest_used = used;
                }
            }
        }
        used
    }

    /// Takes note of a use: the block is held from then on.
    pub(super) fn hold(&mut self, block: RecordId, traits: Traits, used: Tick) {
        self.withdraw(block, Phase::Held);
        let node = &mut self.nodes[block.index()];
        (node.used, node.bits) = (used, traits.to_bits());
        node.set_phase(Phase::Held);
    }

    /// Takes a block out of its list, if it is in one.
    pub(super) fn withdraw(&mut self, block: RecordId, to: Phase) {
        let phase = self.phase(block);
        if phase == Phase::Listed {
            self.unlink(block.0);
        }
        self.evictable -= usize::from(matches!(phase, Phase::Listed | Phase::Aside));
        self.nodes[block.index()].set_phase(to);
    }

    /// Makes a block that is held evictable, as the newest of its list.
    pub(super) fn offer(&mut self, block: RecordId, traits: Traits, has_children: bool) {
        let node = &mut self.nodes[block.index()];
        node.bits = traits.to_bits() | if has_children { HAS_CHILDREN } else { 0 };
        self.evictable += 1;
        self.link(block.0, End::Newest);
    }

    /// Takes note of whether an evictable block has children. One that was put aside comes to the end
    /// of its list that it was used closer to.
    pub(super) fn set_children(&mut self, block: RecordId, has_children: bool) {
        let phase = self.phase(block);
        if !matches!(phase, Phase::Listed | Phase::Aside) {
            return;
        }
        let node = &mut self.nodes[block.index()];
        node.bits = node.bits & !HAS_CHILDREN | if has_children { HAS_CHILDREN } else { 0 };
        if phase == Phase::Aside && !has_children {
            let Node { used, .. } = *node;
            let ends = self.ends[node.list()];
            let newest = ends.newest != NONE && used.is_closer(ends.newest_used, ends.oldest_used);
            self.link(block.0, if newest { End::Newest } else { End::Oldest });
        }
    }

    /// The block at an end of a list and when it was used.
    pub(super) fn end(&self, list: usize, end: End) -> Option<(RecordId, Tick)> {
        let ends = self.ends[list];
        let (block, used) = match end {
            End::Oldest => (ends.oldest, ends.oldest_used),
            End::Newest => (ends.newest, ends.newest_used),
        };
        (block != NONE).then_some((RecordId(block), used))
    }

    /// The block at an end of a list, if it may go. One that has children is put aside.
    pub(super) fn leaf_at(&mut self, list: usize, end: End) -> Option<RecordId> {
        let (block, _) = self.end(list, end)?;
        if self.nodes[block.index()].bits & HAS_CHILDREN == 0 {
            return Some(block);
        }
        self.unlink(block.0);
        self.nodes[block.index()].set_phase(Phase::Aside);
        None
    }

    /// The kinds whose lists have other ends than when this was asked last, a bit each.
    pub(super) fn take_changed(&mut self) -> u128 {
        std::mem::take(&mut self.changed)
    }

    /// The lowest priority below `below` that decides on blocks which may go, and the first of them.
    pub(super) fn of_priority(&mut self, below: u128) -> Option<RecordId> {
        loop {
            let lowest = (self.occupied & below).trailing_zeros() as usize;
            if lowest >= Priority::COUNT {
                return None;
            }
            if let Some(block) = self.leaf_at(KINDS + lowest, End::Oldest) {
                return Some(block);
            }
        }
    }

    fn link(&mut self, block: u32, end: End) {
        let node = &mut self.nodes[block as usize];
        let (list, used) = (node.list(), node.used);
        node.set_phase(Phase::Listed);
        let ends = &mut self.ends[list];
        let (older, newer) = match end {
            End::Oldest => (NONE, ends.oldest),
            End::Newest => (ends.newest, NONE),
        };
        (node.older, node.newer) = (older, newer);
        if older == NONE {
            (ends.oldest, ends.oldest_used) = (block, used);
        }
        if newer == NONE {
            (ends.newest, ends.newest_used) = (block, used);
        }
        if let Some(node) = self.nodes.get_mut(older as usize) {
            node.newer = block;
        }
        if let Some(node) = self.nodes.get_mut(newer as usize) {
            node.older = block;
        }
        self.note_change(list);
    }

    fn unlink(&mut self, block: u32) {
        let node = self.nodes[block as usize];
        let list = node.list();
        match self.nodes.get_mut(node.older as usize) {
            Some(older) => older.newer = node.newer,
            None => {
                let used = self.nodes.get(node.newer as usize).map_or(Tick::ZERO, |node| node.used);
                (self.ends[list].oldest, self.ends[list].oldest_used) = (node.newer, used);
                self.note_change(list);
            }
        }
        match self.nodes.get_mut(node.newer as usize) {
            Some(newer) => newer.older = node.older,
            None => {
                let used = self.nodes.get(node.older as usize).map_or(Tick::ZERO, |node| node.used);
                (self.ends[list].newest, self.ends[list].newest_used) = (node.older, used);
                self.note_change(list);
            }
        }
    }

    fn note_change(&mut self, list: usize) {
        match list.checked_sub(KINDS) {
            None => self.changed |= 1 << list,
            Some(priority) if self.ends[list].oldest == NONE => self.occupied &= !(1 << priority),
            Some(priority) => self.occupied |= 1 << priority,
        }
    }
}

impl Node {
    fn phase(self) -> Phase {
        match self.bits >> PHASE_AT & PHASES {
            0 => Phase::Absent,
            1 => Phase::Held,
            2 => Phase::Listed,
            _ => Phase::Aside,
        }
    }

    fn set_phase(&mut self, phase: Phase) {
        let bits = match phase {
            Phase::Absent => 0,
            Phase::Held => 1,
            Phase::Listed => 2,
            Phase::Aside => 3,
        };
        self.bits = self.bits & !(PHASES << PHASE_AT) | bits << PHASE_AT;
    }

    fn list(self) -> usize {
        match Traits::from_bits(self.bits).order() {
            Order::Learned(kind) => kind.index(),
            Order::Priority(priority) => KINDS + priority.index(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_list_grows_no_older_than_is_told_apart() {
        let mut clock = super::super::ages::Clock::new(1);
        let mut lists = Lists::new(1, 1).unwrap();
        let (block, first) = (RecordId(0), clock.tick(1));
        let traits = Traits::new(0, super::super::ages::Gap::UNKNOWN);
        lists.hold(block, traits, first);
        lists.offer(block, traits, false);
        let used = lists.used_lately(block, clock.tick(1 << 20));
        assert_ne!(used, first);
        let list = Node { bits: traits.to_bits(), ..lists.nodes[0] }.list();
        let ends = [End::Oldest, End::Newest].map(|end| lists.end(list, end));
        assert_eq!(ends, [Some((block, used)); 2]);
    }
}
