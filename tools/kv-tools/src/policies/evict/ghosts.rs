//! The names of evicted content in several lists, bounded, with every operation in constant time.

use super::{check_blocks, table};
use kv_pool::BlockHash;
use kv_pool::ConfigError;

/// One of the lists, by number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct GhostList(pub(super) u8);

/// No node: the end of a list, or an empty place of the index.
const NONE: u32 = u32::MAX;

/// Spreads names over the index: 2^64 divided by the golden ratio.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

#[derive(Clone, Copy, Debug)]
struct Ghost {
    /// The low half of the name.
    name: u64,
    before: u32,
    /// The next one in the list, or in the list of free nodes.
    after: u32,
    list: GhostList,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    front: u32,
    back: u32,
    len: usize,
}

/// `N` lists of names, each name in at most one of them, the oldest at the front.
///
/// Names are told apart by their low 64 bits: taking one for another costs a wrong guess of a
/// policy, once in 2^64 / n lookups, and never a wrong block.
#[derive(Debug)]
pub(super) struct Ghosts<const N: usize> {
    nodes: Vec<Ghost>,
    /// Nodes by name, with linear probing. At most half of the places are taken.
    index: Vec<u32>,
    ends: [Ends; N],
    free: u32,
}

impl<const N: usize> Ghosts<N> {
    /// Empty lists with room for `names` names together, for a policy of `blocks` blocks.
    pub(super) fn new(names: usize, blocks: u64) -> Result<Self, ConfigError> {
        check_blocks(blocks)?;
        let empty = Ghost { name: 0, before: NONE, after: NONE, list: GhostList(0) };
        let mut nodes = table(names, empty, blocks)?;
        for (next, node) in (1..).zip(&mut nodes) {
            node.after = if (next as usize) < names { next } else { NONE };
        }
        let places = (2 * names).next_power_of_two().max(2);
        let free = if names == 0 { NONE } else { 0 };
        let ends = [Ends { front: NONE, back: NONE, len: 0 }; N];
        Ok(Self { nodes, index: table(places, NONE, blocks)?, ends, free })
    }

    pub(super) fn len(&self, list: GhostList) -> usize {
        self.ends[usize::from(list.0)].len
    }

    /// The list that `name` is in.
    pub(super) fn list_of(&self, name: BlockHash) -> Option<GhostList> {
        let place = self.place_of(low_half(name))?;
        Some(self.nodes[self.index[place] as usize].list)
    }

    /// Puts `name` at the back of `list`, out of the list that it was in. Without room the oldest
    /// name of the longest list makes some.
    pub(super) fn push_back(&mut self, list: GhostList, name: BlockHash) {
        self.remove(name);
        if self.free == NONE {
            let longest = (0..N as u8).max_by_key(|&other| self.len(GhostList(other)));
            self.pop_front(GhostList(longest.unwrap_or_default()));
        }
        let node = self.free;
        let Some(ghost) = self.nodes.get_mut(node as usize) else { return };
        self.free = ghost.after;
        let ends = &mut self.ends[usize::from(list.0)];
        let before = std::mem::replace(&mut ends.back, node);
        ends.len += 1;
        *ghost = Ghost { name: low_half(name), before, after: NONE, list };
        match before {
            NONE => ends.front = node,
            _ => self.nodes[before as usize].after = node,
        }
        let mut place = self.home(low_half(name));
        while self.index[place] != NONE {
            place = self.next(place);
        }
        self.index[place] = node;
    }

    /// Forgets the oldest name of `list`.
    pub(super) fn pop_front(&mut self, list: GhostList) {
        let front = self.ends[usize::from(list.0)].front;
        if let Some(ghost) = self.nodes.get(front as usize)
            && let Some(place) = self.place_of(ghost.name)
        {
            self.remove_at(place);
        }
    }

    /// Forgets `name`; the list that it was in.
    pub(super) fn remove(&mut self, name: BlockHash) -> Option<GhostList> {
        let place = self.place_of(low_half(name))?;
        Some(self.remove_at(place))
    }

    fn remove_at(&mut self, place: usize) -> GhostList {
        let node = self.index[place];
        let Ghost { before, after, list, .. } = self.nodes[node as usize];
        let ends = &mut self.ends[usize::from(list.0)];
        ends.len -= 1;
        match before {
            NONE => ends.front = after,
            _ => self.nodes[before as usize].after = after,
        }
        match after {
            NONE => ends.back = before,
            _ => self.nodes[after as usize].before = before,
        }
        self.nodes[node as usize].after = std::mem::replace(&mut self.free, node);
        self.close_gap(place);
        list
    }

    /// Empties a place of the index and moves up what was put further on because of it.
    fn close_gap(&mut self, mut gap: usize) {
        let mut place = gap;
        loop {
            place = self.next(place);
            let node = self.index[place];
            if node == NONE {
                break;
            }
            let home = self.home(self.nodes[node as usize].name);
            let mask = self.index.len() - 1;
            // It may move to the gap if that lies between its home and where it is.
            if (place.wrapping_sub(home) & mask) >= (place.wrapping_sub(gap) & mask) {
                self.index[gap] = node;
                gap = place;
            }
        }
        self.index[gap] = NONE;
    }

    fn place_of(&self, name: u64) -> Option<usize> {
        let mut place = self.home(name);
        loop {
            match self.index[place] {
                NONE => return None,
                node if self.nodes[node as usize].name == name => return Some(place),
                _ => place = self.next(place),
            }
        }
    }

    fn home(&self, name: u64) -> usize {
        let bits = self.index.len().trailing_zeros();
        (name.wrapping_mul(SPREAD) >> (u64::BITS - bits)) as usize
    }

    fn next(&self, place: usize) -> usize {
        (place + 1) & (self.index.len() - 1)
    }
}

fn low_half(name: BlockHash) -> u64 {
    name.to_u128() as u64
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Every operation on few names in a small index, against lists that are searched.
    #[test]
    fn agrees_with_lists_that_are_searched() {
        let mut ghosts = Ghosts::<2>::new(5, 5).unwrap();
        let mut model: [VecDeque<u128>; 2] = Default::default();
        let mut state = 1_u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (name, act) = (u128::from(state >> 60), (state >> 40) % 4);
            let hash = BlockHash::from_u128(name);
            let list = usize::from((state >> 50) % 2 == 1);
            let found = model.iter().position(|names| names.contains(&name));
            assert_eq!(ghosts.list_of(hash).map(|list| usize::from(list.0)), found);
            match act {
                0 => {
                    ghosts.pop_front(GhostList(list as u8));
                    model[list].pop_front();
                }
                1 => {
                    let removed = ghosts.remove(hash).map(|list| usize::from(list.0));
                    assert_eq!(removed, found);
                    model.iter_mut().for_each(|names| names.retain(|&other| other != name));
                }
                _ => {
                    ghosts.push_back(GhostList(list as u8), hash);
                    model.iter_mut().for_each(|names| names.retain(|&other| other != name));
                    if model[0].len() + model[1].len() == 5 {
                        let longest = usize::from(model[1].len() >= model[0].len());
                        model[longest].pop_front();
                    }
                    model[list].push_back(name);
                }
            }
            for (names, list) in model.iter().zip(0..) {
                assert_eq!(ghosts.len(GhostList(list)), names.len());
            }
        }
    }

    #[test]
    fn without_room_nothing_is_remembered() {
        let mut ghosts = Ghosts::<1>::new(0, 0).unwrap();
        ghosts.push_back(GhostList(0), BlockHash::from_u128(1));
        assert_eq!(ghosts.list_of(BlockHash::from_u128(1)), None);
        ghosts.pop_front(GhostList(0));
        assert_eq!(ghosts.len(GhostList(0)), 0);
    }
}
