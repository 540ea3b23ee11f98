//! Loads: what follows the cached part of a prefix comes back to host memory, while its request waits.

use kv_pool::{BlockHash, ClaimError, Naming, Pinned, Tier};

use super::{Kept, LOADS_OF_REQUEST, LoadWait, Lower, Ticket};
use crate::Manager;
use crate::admit::{Request, Waiting};
use crate::tickets::{Direction, TicketId};
use crate::tiers::tier_at;

impl Manager {
    pub(super) fn end_load(&mut self, ticket: Ticket) {
        let Ticket { id, tier, names, parent, claimed, faults, void, awaited, deadline, .. } =
            ticket;
        let blocks = claimed.into_iter().flatten();
        let (mut parent, mut loaded) = (parent, Pinned::default());
        for (((&name, mut block), fault), void) in names.iter().zip(blocks).zip(faults).zip(void) {
            if self.lower.arriving.get(&name) == Some(&id) {
                self.lower.arriving.remove(&name);
            }
            let before = parent.replace(name);
            if void {
                self.lower.stats.void_blocks += 1;
                continue;
            }
            if let Some(fault) = fault {
                self.lower.stats.faults[fault.index()] += 1;
                // What is wrong once is not asked for again.
                if self.lower.tiers[tier].index.remove(&name).is_some() {
                    self.forget_in(tier, name);
                }
                continue;
            }
            self.lower.stats.loaded_blocks[tier] += 1;
            let retention = self.lower.tiers[tier].index.get(&name).copied().unwrap_or_default();
            let own = block.records().next();
            let mut feed = self.home.feed();
            let named = block.register(&[name], Naming { parent: before, retention });
            let Ok(named) = named else { unreachable!("one block for one name") };
            // Unless another block bore the name already, it bears it now, and is complete.
            if let Some(record) = named.records().next().filter(|record| Some(*record) == own) {
                self.groups[0].written[record.index()] = 0;
                if let (Some(feed), Some(tier)) = (&mut feed, tier_at(tier)) {
                    feed.loaded((0, tier, name), record, before);
                }
            }
            // Lists of one pool are joined.
            drop(loaded.append(named));
        }
        if awaited && self.lower.now < deadline && !loaded.is_empty() {
            self.lower.kept.push(Kept { ticket: id, until: deadline, blocks: loaded });
        }
    }

    /// Whether a request is to wait for a load of its prefix, which begins now if it has not.
    pub(crate) fn await_load(&mut self, request: &mut Request) -> Option<Waiting> {
        if self.lower.tiers.is_empty() || !request.waits {
            return None;
        }
        let now = self.lower.now;
        let before = request.load;
        if let Some(wait) = before.filter(|wait| wait.waits) {
            if let Some(open) = self.lower.open.iter().find(|open| open.id == wait.ticket) {
                if now < wait.deadline {
                    return Some(waiting_for(open));
                }
                self.lower.stats.late += 1;
            }
            request.load = Some(LoadWait { waits: false, ..wait });
        }
        let (begun, deadline) = before.map_or_else(
            || (0, now.saturating_add(self.lower.options.wait_max)),
            |wait| (wait.begun, wait.deadline),
        );
        if now >= deadline {
            return None;
        }
        let names = self.names_of(request);
        let (ticket, is_new) = self.load_rest(names, begun < LOADS_OF_REQUEST)?;
        let begun = begun + u32::from(is_new);
        let open = self.lower.open.iter_mut().find(|open| open.id == ticket)?;
        open.awaited = true;
        self.lower.stats.waits += 1;
        let waiting = waiting_for(open);
        request.load = Some(LoadWait { ticket, deadline, waits: true, begun });
        Some(waiting)
    }

    /// The ticket that brings what follows the cached part of a prefix, and whether it was opened now.
    fn load_rest(&mut self, names: &[BlockHash], opens: bool) -> Option<(TicketId, bool)> {
        let below = |lower: &Lower, name| {
            lower.arriving.contains_key(name) || lower.tier_with(*name).is_some()
        };
        if !names.iter().any(|name| below(&self.lower, name)) {
            return None;
        }
        // Without a pin, which would keep the blocks from others in this step, however often a request asks.
        let near = self.groups[0].pool.prefix_len(names);
        let rest = &names[near..];
        let first = *rest.first()?;
        if let Some(&ticket) = self.lower.arriving.get(&first) {
            return Some((ticket, false));
        }
        let tier = self.lower.tier_with(first).filter(|_| opens)?;
        let options = &self.lower.options;
        let (least, most) = (options.load_blocks_min.max(1), options.ticket_blocks_max.max(1));
        if self.lower.open_of(tier, Direction::Load) >= options.loads_open_max as usize {
            return None;
        }
        let there = rest.iter().take(most as usize).take_while(|name| {
            self.lower.tiers[tier].index.contains_key(name)
                && !self.lower.arriving.contains_key(name)
        });
        let mut count = there.count();
        let claimed = loop {
            if count < least as usize {
                return None;
            }
            match self.groups[0].pool.claim_in(Tier::Secondary, count) {
                Ok(claimed) => break claimed,
                Err(ClaimError::Exhausted { claimable, .. }) if claimable < count => {
                    count = claimable;
                }
                Err(_) => return None,
            }
        };
        let places = claimed.ids().collect();
        let mut ticket = Ticket::new(tier, Direction::Load, rest[..count].to_vec());
        ticket.parent = near.checked_sub(1).map(|last| names[last]);
        ticket.claimed.push(claimed);
        let id = self.open_ticket(ticket, places);
        self.lower.arriving.extend(rest[..count].iter().map(|&name| (name, id)));
        Some((id, true))
    }

    /// Begins to load what follows the cached part of a prefix; how many blocks are on their way.
    pub(crate) fn prefetch_below(&mut self, names: &[BlockHash]) -> usize {
        if self.lower.tiers.is_empty() {
            return 0;
        }
        match self.load_rest(names, true) {
            Some(_) => names.iter().filter(|name| self.lower.arriving.contains_key(name)).count(),
            None => 0,
        }
    }

    /// A request is admitted: it has pinned what was kept for it.
    pub(crate) fn end_wait(&mut self, request: &mut Request) {
        if let Some(wait) = request.load.take() {
            self.lower.kept.retain(|kept| kept.ticket != wait.ticket);
        }
    }
}

fn waiting_for(ticket: &Ticket) -> Waiting {
    Waiting::Load { ticket: ticket.id, blocks: ticket.blocks() as u64 }
}
