//! Pins, prefetches of whole prefixes, what is known of sessions to come, and budgets of groups beside the first.

use super::engine::Engine;
use crate::prelude::*;

/// What an engine knows of a session, mostly nothing.
pub fn reuse(random: &mut Random) -> Reuse {
    let then = match random.below(8) {
        0 => Some(ReuseHint::Over),
        1 => Some(ReuseHint::BackIn(Duration::from_millis(random.below(100)))),
        2 => Some(ReuseHint::SharedHead),
        _ => None,
    };
    Reuse { shared_head: if random.chance(30) { random.below(20) } else { 0 }, then }
}

impl Engine {
    /// A hint, a pin or the end of one.
    pub fn hint_more(&mut self) {
        match self.random.below(8) {
            0..3 => self.pin(),
            3 if !self.pins.is_empty() => {
                let at = self.random.index(self.pins.len());
                drop(self.pins.swap_remove(at));
            }
            3..5 => self.prefetch_chain(),
            5 if !self.runs.is_empty() => {
                let (at, reuse) = (self.random.index(self.runs.len()), reuse(&mut self.random));
                self.runs[at].sequence.set_reuse(reuse);
                self.saw_if(reuse.then.is_some(), "a hint of reuse");
            }
            _ => self.swing_further(),
        }
    }

    fn claimable(&self) -> Vec<usize> {
        let pools = (0..).map_while(|group| self.manager.pool(GroupId(group)));
        pools.map(|pool| pool.claimable()).collect()
    }

    /// The names of a prefix that is cached in the first group, as a caller gives them.
    fn chain(&mut self) -> Vec<BlockHash> {
        let blocks = self.manager.pool(GroupId(0)).unwrap().snapshot().blocks;
        let named: Vec<_> = blocks.iter().filter(|view| view.hash.is_some()).collect();
        if named.is_empty() {
            return Vec::new();
        }
        let mut at = Some(named[self.random.index(named.len())].block);
        let mut names = Vec::new();
        while let Some(id) = at
            && let Some(view) = named.iter().find(|view| view.block == id)
            && names.len() < blocks.len()
        {
            names.extend(view.hash);
            at = view.parent;
        }
        names.reverse();
        // A block of the first group has the name of its last part.
        let parts = self.size.block_tokens / self.size.unit();
        names.into_iter().flat_map(|name| std::iter::repeat_n(name, parts)).collect()
    }

    fn pin(&mut self) {
        let names = self.chain();
        let before = self.claimable();
        match self.manager.pin(&names) {
            Ok(pin) => {
                self.saw_if(!pin.is_empty(), "a pin");
                self.pins.push(pin);
            }
            Err(BudgetError::Pins { more, pinned, max }) => {
                assert!(more > max - pinned, "{more} and {pinned} of {max}");
                assert_eq!(self.claimable(), before, "a refused pin has taken something");
                self.saw("a pin that was refused");
            }
            Err(error) => panic!("{error:?}"),
        }
        let pinned = self.pins.iter().map(|pin| pin.len() as u64).sum::<u64>();
        assert_eq!(self.manager.pinned_blocks(), pinned);
        assert!(pinned <= self.manager.options().pinned_blocks_max);
    }

    fn prefetch_chain(&mut self) {
        if self.size.block_tokens != self.size.unit() {
            // The names of parts are not known here, and readers are told what a prefetch says to come before a block.
            return;
        }
        let names = self.chain();
        let before = self.claimable();
        if self.manager.prefetch(&names) == 0 {
            assert_eq!(self.claimable(), before, "a prefetch of nothing has taken something");
        } else {
            self.saw("a prefetch of a prefix");
        }
    }

    /// Gives a group beside the first another budget.
    fn swing_further(&mut self) {
        if self.size.further.is_empty() {
            return;
        }
        let at = self.random.index(self.size.further.len());
        let (group, size) = (GroupId(at as u16 + 1), self.size.further[at]);
        let tier = [Tier::Primary, Tier::Secondary][self.random.index(2)];
        if tier == Tier::Primary && self.size.shared.is_some() {
            return;
        }
        let capacity = if tier == Tier::Primary { size.device } else { size.host } as u64;
        let least = if tier == Tier::Primary { capacity / 2 } else { 0 };
        let blocks =
            if self.random.chance(50) { capacity } else { self.random.from(least, capacity) };
        let budgeted = self.manager.set_budget(group, tier, blocks).unwrap();
        assert!(self.manager.unmappable_from(group, tier).unwrap() <= capacity);
        self.saw_if(budgeted.leaving + budgeted.in_use > 0, "a smaller budget of a further group");
    }

    /// Ends all pins, and gives all groups their whole memory.
    pub fn end_hints(&mut self) {
        self.pins.clear();
        for (group, size) in (1..).map(GroupId).zip(self.size.further.clone()) {
            if self.size.shared.is_none() {
                self.manager.set_budget(group, Tier::Primary, size.device as u64).unwrap();
            }
            self.manager.set_budget(group, Tier::Secondary, size.host as u64).unwrap();
        }
    }
}
