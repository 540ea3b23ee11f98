//! Stores: complete content goes down ahead of need, while the link is idle.

use kv_pool::{BlockHash, BlockId, Claimed, Location, Tier};

use super::Ticket;
use crate::tickets::Direction;
use crate::tiers::tier_at;
use crate::{BlockCopy, Manager};

/// What becomes of a block that is to be stored.
#[derive(Clone, Copy, Debug)]
enum Storing {
    /// Its bytes lie here, or are copied there first.
    At(BlockId),
    Later,
    Never,
}

impl Manager {
    /// Begins stores of what is complete, as far as tickets are left. Content in host memory is stored from there.
    /// Content on the device is copied to a host block first, if the plan makes no other copies between the two: the
    /// link is idle.
    pub(crate) fn plan_stores(&mut self) {
        for tier in 0..self.lower.tiers.len() {
            while !self.lower.tiers[tier].wanted.is_empty()
                && self.lower.open_of(tier, Direction::Store)
                    < self.lower.options.stores_open_max as usize
            {
                if !self.plan_store(tier) {
                    break;
                }
            }
        }
    }

    /// Begins one store; whether anything was stored.
    fn plan_store(&mut self, tier: usize) -> bool {
        let crosses =
            |copy: &BlockCopy| (copy.from.tier == Tier::Primary) != (copy.to.tier == Tier::Primary);
        let idle = !self.plan.copies.iter().any(crosses);
        let most = self.lower.options.ticket_blocks_max.max(1) as usize;
        let mut ticket = Ticket::new(tier, Direction::Store, Vec::new());
        let (mut places, mut later) = (Vec::new(), Vec::new());
        // What waits for an idle link is looked at once a step.
        for _ in 0..self.lower.tiers[tier].wanted.len().min(4 * most) {
            if places.len() == most {
                break;
            }
            let Some(name) = self.lower.tiers[tier].wanted.pop_front() else { break };
            match self.begin_store(&mut ticket, name, idle) {
                Storing::At(place) => places.push(place),
                Storing::Later => later.push(name),
                Storing::Never => {}
            }
        }
        let wanted = &mut self.lower.tiers[tier].wanted;
        later.into_iter().rev().for_each(|name| wanted.push_front(name));
        if places.is_empty() {
            return false;
        }
        self.open_ticket(ticket, places);
        true
    }

    /// Adds a block to a store; where it lies in host memory.
    fn begin_store(&mut self, ticket: &mut Ticket, name: BlockHash, idle: bool) -> Storing {
        let state = &self.lower.tiers[ticket.tier];
        if state.index.contains_key(&name) || state.storing.contains(&name) {
            return Storing::Never;
        }
        let group = &self.groups[0];
        let worth = group.pool.retention(name).unwrap_or_default();
        // What has left the cache, or is being computed anew, is wanted again when it is complete.
        let Some((record, at)) = group.pool.locate(name) else { return Storing::Never };
        if group.pending(record, self.completed).is_some() {
            return Storing::Never;
        }
        let stored =
            tier_at(ticket.tier).is_some_and(|tier| self.lower.policy.stores(tier, name, worth));
        if !stored {
            return Storing::Never;
        }
        let place = match at.tier {
            Tier::Primary if !idle => return Storing::Later,
            // Not pinned: every later use of the block comes later in the plans than the copy.
            Tier::Primary => {
                let Some(host) = self.copy_down(at) else { return Storing::Later };
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
        if let (Some(mut feed), Some(tier)) = (self.home.feed(), tier_at(ticket.tier)) {
            feed.storing_below(0, tier, record);
        }
        self.lower.tiers[ticket.tier].storing.insert(name);
        ticket.names.push(name);
        ticket.worth.push(worth);
        ticket.faults.push(None);
        ticket.void.push(false);
        Storing::At(place)
    }

    /// Plans the copy of a device block to a host block that is claimed for it.
    fn copy_down(&mut self, from: Location) -> Option<Claimed> {
        let host = self.groups[0].pool.claim_in(Tier::Secondary, 1).ok()?;
        let id = host.ids().next()?;
        let (group, to) = (&self.groups[0], Location { tier: Tier::Secondary, id });
        group.plan_copy(&mut self.plan, from, to, group.block_tokens);
        Some(host)
    }

    pub(super) fn end_store(&mut self, ticket: Ticket) {
        let Ticket { tier, names, worth, faults, void, claimed, pinned, .. } = ticket;
        drop((claimed, pinned));
        for (((name, worth), fault), void) in names.into_iter().zip(worth).zip(faults).zip(void) {
            self.lower.tiers[tier].storing.remove(&name);
            if !void && fault.is_none() {
                self.lower.tiers[tier].index.insert(name, worth);
                self.lower.stats.stored_blocks[tier] += 1;
                if let (Some(mut feed), Some(tier)) = (self.home.feed(), tier_at(tier)) {
                    feed.stored_below(0, tier, name);
                }
                continue;
            }
            match void {
                true => self.lower.stats.void_blocks += 1,
                false => self.lower.stats.unstored_blocks += 1,
            }
            // It may be there, at some worker.
            self.forget_in(tier, name);
        }
    }
}
