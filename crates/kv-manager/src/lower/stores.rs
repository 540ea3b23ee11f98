//! Stores: complete content goes down ahead of need, while the link is idle.

use std::sync::atomic::Ordering;

use kv_pool::store::Candidate;
use kv_pool::{BlockId, Claimed, Location, Tier, guard};
use kv_tier::{BlockFault, Direction};

use super::{Key, Ticket, TierState, Wanted};
use crate::events::Below;
use crate::group::far;
use crate::plan::CopyFor;
use crate::transfers::LOWER;
use crate::{BlockCopy, GroupId, Manager};

/// What becomes of a block that is to be stored.
#[derive(Clone, Copy, Debug)]
enum Storing {
    /// Its bytes lie here, or are copied there first.
    At(BlockId),
    Later,
    Never,
}

/// Blocks that have to wait of which a step looks at no more for each store: the search is part of a step's cost.
const LATER_MAX: usize = 8;

/// Blocks that wait of which a step without a plan looks at no more.
const LOOKS_MAX: usize = 64;

impl Manager {
    /// Begins stores of what is complete, as far as tickets are left. Content in host memory is stored from there.
    /// Content on the device is copied to a host block first, if the plan makes no other copies between the two: the
    /// link is idle.
    pub(crate) fn plan_stores(&mut self) {
        let before = self.plan.next().copies.len();
        for tier in 0..self.lower.tiers.len() {
            while self.lower.may_store(tier) && self.plan_store(tier, before) {}
        }
    }

    /// Whether a plan without other copies would begin a store. Where host memory has no block without content, a call looks at a
    /// part of what waits, and the next one at the next part.
    pub(crate) fn would_store(&self) -> bool {
        let most = guard!("manager.idle-steps-look-at-a-part", LOOKS_MAX, else usize::MAX);
        (0..self.lower.tiers.len()).filter(|&tier| self.lower.may_store(tier)).any(|tier| {
            let TierState { wanted, looked, .. } = &self.lower.tiers[tier];
            // A number alone: nothing else is read or written by its order.
            let from = looked.load(Ordering::Relaxed);
            let found = self.groups.iter().zip(wanted).any(|(group, wanted)| {
                let is_far = |at: usize| {
                    #[cfg(test)]
                    crate::proportion::looks(1);
                    let wanted = &wanted[from.wrapping_add(at) % wanted.len()];
                    !group.is_near(wanted.name)
                };
                // What is on the device is copied to a block without content.
                !wanted.is_empty()
                    && (group.pool.stats().secondary.empty > 0
                        || (0..wanted.len().min(most)).any(is_far))
            });
            if !found {
                looked.store(from.wrapping_add(LOOKS_MAX), Ordering::Relaxed);
            }
            found
        })
    }

    /// Begins one store, of the next group that has something to be stored; whether there was one. Other copies than
    /// those for stores are the first `before` of the plan.
    fn plan_store(&mut self, tier: usize, before: usize) -> bool {
        let groups = self.groups.len();
        let turn = self.lower.tiers[tier].turn;
        for group in (turn..turn + groups).map(|group| group % groups) {
            if self.plan_store_of(tier, GroupId(group as u16), before) {
                self.lower.tiers[tier].turn = group + 1;
                return true;
            }
        }
        false
    }

    /// The same of a group.
    fn plan_store_of(&mut self, tier: usize, group: GroupId, before: usize) -> bool {
        let of = usize::from(group.0);
        if self.lower.tiers[tier].wanted[of].is_empty() {
            return false;
        }
        let crosses =
            |copy: &BlockCopy| (copy.from.tier == Tier::Primary) != (copy.to.tier == Tier::Primary);
        // Of each group, a step copies down for one store.
        let copies = (0..).zip(&self.plan.next().copies);
        let idle = !copies
            .filter(|(at, copy)| *at < before || copy.group == group)
            .any(|(_, copy)| crosses(copy));
        let most = self.lower.options.ticket_blocks_max.max(1) as usize;
        let mut ticket = Ticket::new(tier, group, Direction::Store, Vec::new());
        let mut places = Vec::new();
        let mut later = Vec::new();
        // What has left the cache since is passed over, up to a bound.
        for _ in 0..self.lower.tiers[tier].wanted[of].len().min(4 * most) {
            if places.len() == most || later.len() == LATER_MAX {
                break;
            }
            let Some(mut wanted) = self.lower.tiers[tier].wanted[of].pop_front() else { break };
            match self.begin_store(&mut ticket, &mut wanted, idle) {
                Storing::At(place) => places.push(place),
                Storing::Later => later.push(wanted),
                Storing::Never => drop(self.lower.tiers[tier].asked.remove(&(group, wanted.name))),
            }
        }
        // Behind the others, which need not wait for the same.
        self.lower.tiers[tier].wanted[of].extend(later);
        if places.is_empty() {
            return false;
        }
        self.open_ticket(ticket, places);
        true
    }

    /// Adds a block to a store; where it lies in host memory.
    fn begin_store(&mut self, ticket: &mut Ticket, wanted: &mut Wanted, idle: bool) -> Storing {
        let Wanted { name, again, .. } = *wanted;
        let state = &self.lower.tiers[ticket.tier];
        // No tier is told to store what it is loading. If the load fails, the name is wanted again.
        let key = (ticket.group, name);
        let is_loading =
            guard!("manager.stores-nothing-loading", state.loading.contains(&key), else false);
        if state.index.contains_key(&key) || is_loading {
            return Storing::Never;
        }
        let group = &self.groups[usize::from(ticket.group.0)];
        let worth = group.pool.retention(name).unwrap_or_default();
        // What has left the cache, or is being computed anew, is wanted again when it is complete.
        let Some((record, at)) = group.pool.locate(name) else { return Storing::Never };
        let is_computed = group.pending(record, self.steps.completed()).is_some();
        if guard!("manager.stores-what-is-complete", is_computed, else false) {
            return Storing::Never;
        }
        if !wanted.decided && !self.is_worth_storing(ticket.tier, key) {
            return Storing::Never;
        }
        wanted.decided = true;
        let group = &self.groups[usize::from(ticket.group.0)];
        let place = match at.tier {
            Tier::Primary if !idle => return Storing::Later,
            // Not pinned: every later use of the block comes later in the plans than the copy.
            Tier::Primary => {
                let Some(host) = self.copy_down(ticket.group, at) else { return Storing::Later };
                let place = host.ids().next();
                ticket.claimed.push(host);
                place
            }
            _ => {
                let Some(found) = group.pool.find_and_pin(name, Tier::Secondary) else {
                    return Storing::Never;
                };
                if worth.duration.is_some() {
                    group.pool.retain(&found, worth);
                }
                ticket.pinned.push(found);
                Some(at.id)
            }
        };
        let Some(place) = place else { return Storing::Never };
        self.home.note_below(ticket.tier, key, Below::Storing(record));
        ticket.names.push(name);
        ticket.worth.push((worth, again));
        ticket.faults.push(None);
        ticket.void.push(false);
        Storing::At(place)
    }

    /// Whether the policy of a tier wants a block that is cached.
    fn is_worth_storing(&mut self, tier: usize, (group, name): Key) -> bool {
        if self.lower.tiers[tier].policy.is_none() {
            return true;
        }
        // What is never loaded need not be stored.
        let pays = self.lower.pays(tier, self.groups[usize::from(group.0)].block_tokens);
        let state = &mut self.lower.tiers[tier];
        let Some(policy) = &mut state.policy else { return true };
        let candidate = self.groups[usize::from(group.0)].pool.candidate(name);
        let Some(candidate) = candidate else { return false };
        let now_ms = u64::try_from(self.lower.now.as_millis()).unwrap_or(u64::MAX);
        // Blocks that follow it may be in other tiers only.
        let stores =
            pays && policy.stores(LOWER[tier], &Candidate { now_ms, followed: false, ..candidate });
        self.lower.stats.refused_blocks[tier] += u64::from(!stores);
        stores
    }

    /// Plans the copy of a device block to a host block that is claimed for it, if one has no content: what is there
    /// may be in no tier below.
    fn copy_down(&mut self, group: GroupId, from: Location) -> Option<Claimed> {
        let group = &self.groups[usize::from(group.0)];
        if group.pool.stats().secondary.empty == 0 {
            return None;
        }
        let host = group.pool.claim_in(Tier::Secondary, 1).ok()?;
        let to = far(host.ids().next()?);
        group.plan_copy(&mut self.plan, CopyFor::Store, from, to);
        Some(host)
    }

    pub(super) fn end_store(&mut self, ticket: Ticket) {
        let Ticket { tier, group, names, worth, faults, void, claimed, pinned, .. } = ticket;
        drop((claimed, pinned));
        for (((name, (worth, again)), fault), void) in
            names.into_iter().zip(worth).zip(faults).zip(void)
        {
            let key: Key = (group, name);
            self.lower.tiers[tier].asked.remove(&key);
            let is_void = guard!("manager.void-stores-are-not-found", void, else false);
            let is_right =
                guard!("manager.failed-stores-are-not-found", fault.is_none(), else true);
            if !is_void && is_right {
                self.lower.tiers[tier].index.insert(key, worth);
                self.lower.moved[usize::from(group.0)].stored[tier] += 1;
                self.home.note_below(tier, key, Below::Stored);
                continue;
            }
            if void {
                self.lower.stats.void_blocks += 1
            } else {
                self.lower.stats.unstored_blocks += 1
            }
            // It may be there, at some worker.
            self.forget_in(tier, key);
            // Once more, if it is cached still, or again.
            if void || !again && fault != Some(BlockFault::Fenced) {
                self.lower.want_in(tier, key, !void);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_pool::Tier;

    use super::LOOKS_MAX;
    use crate::GroupId;
    use crate::proportion::{Fixture, Size, looked};

    #[test]
    fn a_step_without_a_plan_looks_at_a_part_of_what_waits_and_the_next_one_at_the_next() {
        for blocks in [1 << 12, 1 << 15] {
            let mut fixture = Fixture::new(Size { blocks, others: 1, several: false });
            let manager = &mut fixture.manager;
            // One store is open, and has all host blocks that there are.
            manager.set_budget(GroupId(0), Tier::Secondary, 0).unwrap();
            manager.lower.options.stores_open_max = 2;
            let waiting = manager.lower.tiers[0].wanted[0].len();
            assert!(waiting > 16 * LOOKS_MAX);
            let calls = |most: usize| {
                let before = looked();
                let found = (0..most).position(|_| manager.would_store());
                (found, (looked() - before) as usize)
            };
            assert_eq!(calls(1), (None, LOOKS_MAX));
            // All parts come, whichever has something to be stored.
            assert_eq!(calls(waiting / LOOKS_MAX), (None, waiting / LOOKS_MAX * LOOKS_MAX));
            let last = manager.lower.tiers[0].wanted[0][waiting - 1].name;
            assert!(manager.groups[0].pool.remove(last));
            assert!(calls(waiting / LOOKS_MAX + 1).0.is_some());
        }
    }
}
