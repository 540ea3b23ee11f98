//! Loads: what follows the cached part of a prefix comes back to host memory, while its request waits.

use kv_pool::tenants::TenantId;
use kv_pool::{BlockHash, ClaimError, Naming, Pinned, Tier, guard};
use kv_tier::{BlockFault, Direction, TicketId};
use smallvec::SmallVec;

use super::{Kept, Key, LoadWait, Lower, Ticket, VAIN_LOADS_MAX};
use crate::events::LowerNote;
use crate::group::Group;
use crate::names::Known;
use crate::request::{Request, Waiting, Wanted};
use crate::transfers::LOWER;
use crate::{GroupId, Manager};

/// How often a shorter prefix is tried for which host memory has room: the search is part of a step's cost.
const ROOM_TRIES: usize = 4;

/// What is to be loaded so that a prefix is cached in all groups.
#[derive(Debug, Default)]
pub(super) struct Lacks {
    /// Tokens of the prefix.
    pub(super) end: u64,
    /// Tokens of it that are cached.
    pub(super) near: u64,
    /// What is to be loaded of each group, in order.
    pub(super) groups: SmallVec<[Vec<Lack>; 4]>,
    /// Blocks that the prefix needs and that are cached.
    cached: usize,
    /// Those in host memory, while others are claimed.
    pinned: Vec<Pinned>,
}

/// A block that a prefix lacks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lack {
    pub(super) place: usize,
    pub(super) name: BlockHash,
    /// The name before it.
    before: Option<BlockHash>,
}

impl Lacks {
    pub(super) fn keys(&self) -> impl Iterator<Item = Key> + '_ {
        let each = (0..).map(GroupId).zip(&self.groups);
        each.flat_map(|(group, lacking)| lacking.iter().map(move |lack| (group, lack.name)))
    }
}

impl Manager {
    pub(super) fn end_load(&mut self, ticket: Ticket) {
        let Ticket { id, tier, group, names, asked, claimed, faults, void, .. } = ticket;
        let (waiters, begun, deadline) = (ticket.waiters, ticket.begun, ticket.deadline);
        let of = usize::from(group.0);
        let blocks = claimed.into_iter().flatten();
        let (mut loaded, mut wrong) = (Pinned::default(), Vec::new());
        let all_faults = faults.clone();
        let ends = names.into_iter().zip(asked).zip(blocks).zip(faults.into_iter().zip(void));
        for (((name, asked), mut block), (fault, void)) in ends {
            let key: Key = (group, name);
            if self.lower.arriving.get(&key) == Some(&id) {
                self.lower.arriving.remove(&key);
            }
            self.lower.tiers[tier].loading.remove(&key);
            if void {
                self.lower.stats.void_blocks += 1;
                wrong.push(block);
                // Its store had to wait, if it has become complete meanwhile.
                self.lower.want_in(tier, key, false);
                continue;
            }
            if let Some(fault) = guard!("manager.faults-are-misses", fault, else None) {
                self.lower.stats.faults[fault.index()] += 1;
                wrong.push(block);
                // What is wrong once is not asked for again. What is late is there.
                if fault != BlockFault::Late && self.lower.tiers[tier].index.remove(&key).is_some()
                {
                    self.forget_in(tier, key);
                }
                self.lower.want_in(tier, key, false);
                continue;
            }
            self.lower.moved[of].loaded[tier] += 1;
            self.lower.note_used(tier, key);
            let retention = self.lower.tiers[tier].index.get(&key).copied().unwrap_or_default();
            let own = block.records().next();
            let mut feed = self.home.feed();
            let parent = asked.parent().filter(|_| self.groups[of].is_chained());
            let mut note = |id| self.groups[of].note_filled(id, 0);
            guard!("manager.what-loads-has-a-number", block.ids().for_each(&mut note));
            let named = block.register(&[name], Naming { parent, retention });
            let Ok(named) = named else { unreachable!("one block for one name") };
            // Unless another block bore the name already, it bears it now, and is complete.
            if let Some(record) = named.records().next().filter(|record| Some(*record) == own) {
                self.groups[of].note_written(record, 0);
                if let Some(feed) = &mut feed {
                    feed.loaded(of, LOWER[tier], record, asked);
                }
            }
            // Lists of one pool are joined.
            drop(loaded.append(named));
        }
        if !loaded.is_empty() {
            let now = self.lower.now;
            self.lower.tiers[tier].load_rate.note(begun, now, all_faults.len());
        }
        self.lower.end_read(ticket.readers, &all_faults, wrong, &loaded);
        let is_wanted = waiters > 0 && self.lower.now < deadline && !loaded.is_empty();
        if guard!("manager.keeps-what-is-waited-for", is_wanted, else false) {
            self.lower.kept.push(Kept { ticket: id, waiters, until: deadline, blocks: loaded });
        }
    }

    /// Whether a request is to wait for a load of its prefix, which begins now if it has not.
    pub(crate) fn await_load(&mut self, request: &mut Request) -> Option<Waiting> {
        if self.lower.tiers.is_empty() || !request.waits {
            return None;
        }
        let now = self.lower.now;
        let mut wait = request.load.take().unwrap_or_else(|| LoadWait {
            ticket: None,
            counted: SmallVec::new(),
            deadline: now.saturating_add(self.lower.options.wait_max),
            cached: 0,
            begun: 0,
            declined: false,
            enters: false,
        });
        let waiting = self.next_wait(&mut wait, request);
        wait.enters = waiting.is_some() && request.by_layers && self.enters(request);
        let enters = wait.enters;
        request.load = Some(wait);
        waiting.filter(|_| !enters)
    }

    fn next_wait(&mut self, wait: &mut LoadWait, request: &Request) -> Option<Waiting> {
        let Wanted::Known(known) = &request.tokens else { return None };
        let (names, most) = request.wanted();
        let is_late = self.lower.now >= wait.deadline;
        if let Some(ticket) = wait.ticket
            && let Some(open) = self.lower.ticket(ticket)
            // What brings nothing any more is not waited for.
            && open.is_useful()
        {
            if !is_late {
                return Some(waiting_for(open));
            }
            self.lower.stats.late += 1;
        }
        wait.ticket = None;
        if is_late {
            return None;
        }
        let mut lacks = self.lacks(names, most)?;
        if lacks.cached > wait.cached {
            (wait.cached, wait.begun) = (lacks.cached, 0);
        }
        if wait.declined {
            return None;
        }
        if wait.begun < VAIN_LOADS_MAX && self.lower.may_load(&lacks) {
            let worth = self.worth_loading(names, lacks, wait.deadline);
            wait.declined = worth.is_none();
            lacks = self.with_room(names, worth?)?;
            wait.deadline = self.lower.compute_deadline(lacks.end - lacks.near, wait.deadline);
            wait.begun += u32::from(self.load(&lacks, Some(known)) > 0);
        }
        let brought = lacks.keys().filter_map(|key| self.lower.arriving.get(&key).copied());
        let brought: SmallVec<[TicketId; 8]> = brought.collect();
        let ticket = *brought.first()?;
        for brings in brought {
            if !wait.counted.contains(&brings) {
                wait.counted.push(brings);
                self.lower.ticket(brings).into_iter().for_each(|open| open.waiters += 1);
            }
        }
        wait.ticket = Some(ticket);
        let waiting = waiting_for(self.lower.ticket(ticket)?);
        self.lower.stats.waits += 1;
        Some(waiting)
    }

    /// What a prefix of at most `most` tokens lacks to be cached in all groups, as far as tiers below have it. Nothing
    /// if that is no further than it is cached.
    pub(super) fn lacks(&self, names: &[BlockHash], most: u64) -> Option<Lacks> {
        // Without a pin, which would keep the blocks from others in this step, however often a request asks.
        let firsts = self.groups.cached_first(names, most);
        let is_below =
            |key| self.lower.arriving.contains_key(&key) || self.lower.tier_with(key).is_some();
        // Where a group that keeps all ends, nobody goes on: so most names are not looked up.
        let mut most = most;
        for (group, &first) in self.groups.iter().zip(&firsts).filter(|(at, _)| at.is_chained()) {
            let is_there = |name| group.is_cached(name) || is_below((group.id, name));
            most = most.min(group.reach(names, most, first, is_there));
        }
        let end = self.groups.reach_with(names, most, &firsts, is_below);
        let near = if end > 0 { self.groups.reach_with(names, end, &firsts, |_| false) } else { 0 };
        let least = u64::from(self.lower.options.load_blocks_min.max(1));
        if end - near < least * self.namer.unit() {
            return None;
        }
        let mut lacks = Lacks::default();
        for (group, first) in self.groups.iter().zip(firsts) {
            let mut lacking = Vec::new();
            for (place, name) in group.needed_names(names, group.whole_blocks(end), 0) {
                if place < first || group.is_cached(name) {
                    lacks.cached += 1;
                    continue;
                }
                let before = (place * group.stride).checked_sub(1).map(|before| names[before]);
                lacking.push(Lack { place, name, before });
            }
            lacks.groups.push(lacking);
        }
        (lacks.end, lacks.near) = (end, near);
        Some(lacks)
    }

    /// The same for so much of a prefix that host memory has room for what it lacks, in all groups. What is cached of
    /// it stays until the tickets are opened.
    fn with_room(&self, names: &[BlockHash], mut lacks: Lacks) -> Option<Lacks> {
        for _ in 0..ROOM_TRIES {
            let without = self.without_room(names, &lacks);
            let Some(end) = guard!("manager.loads-have-room", without, else None) else {
                // Claims must not evict what is there.
                lacks.pinned = self.pin_in_host(names, lacks.end);
                return Some(lacks);
            };
            lacks = self.lacks(names, end)?;
        }
        None
    }

    fn pin_in_host(&self, names: &[BlockHash], end: u64) -> Vec<Pinned> {
        let mut pinned = Vec::new();
        for group in self.groups.iter() {
            let reads = group.needed_names(names, group.whole_blocks(end), 0);
            pinned.extend(
                reads.filter_map(|(_, name)| group.pool.find_and_pin(name, Tier::Secondary)),
            );
        }
        pinned
    }

    /// Tokens before the first block that host memory has no room for beside what is cached there. Nothing is pinned for
    /// the question: a request may ask in every step, and what is given back could not be claimed until it is complete.
    fn without_room(&self, names: &[BlockHash], lacks: &Lacks) -> Option<u64> {
        let first = |(group, lacking): (&Group, &Vec<Lack>)| {
            let mut missing = lacking
                .iter()
                .filter(|lack| !self.lower.arriving.contains_key(&(group.id, lack.name)));
            let count = missing.clone().count();
            if count == 0 {
                return None;
            }
            let reads = group.needed_names(names, group.whole_blocks(lacks.end), 0);
            let reads: Vec<_> = reads.map(|(_, name)| name).collect();
            let stays = group.pool.pin_cost(&reads).far_unused;
            match group.pool.check_claim(Tier::Secondary, TenantId::NOBODY, count + stays) {
                Ok(()) => None,
                Err(ClaimError::Exhausted { claimable, .. }) => {
                    missing.nth(claimable.saturating_sub(stays))
                }
                Err(_) => missing.next(),
            }
            .map(|lack| group.tokens_of(lack.place))
        };
        self.groups.iter().zip(&lacks.groups).filter_map(first).min()
    }

    /// Opens tickets for what a prefix lacks and is not on its way, in order, as many as are left; how many. `known` is known of
    /// who asks for it, if that is not the names alone.
    fn load(&mut self, lacks: &Lacks, known: Option<&Known>) -> usize {
        let most = self.lower.options.ticket_blocks_max.max(1) as usize;
        let mut opened = 0;
        for (group, lacking) in (0..).map(GroupId).zip(&lacks.groups) {
            for tier in 0..self.lower.tiers.len() {
                let from_here = |lack: &&Lack| {
                    let key = (group, lack.name);
                    !self.lower.arriving.contains_key(&key)
                        && self.lower.tier_with(key) == Some(tier)
                };
                let from_here: Vec<Lack> = lacking.iter().filter(from_here).copied().collect();
                for lacking in from_here.chunks(most) {
                    opened += usize::from(self.load_from(tier, group, (lacking, known)));
                }
            }
        }
        opened
    }

    /// Opens a ticket for blocks of a group that a tier has; whether one was left, and room.
    fn load_from(
        &mut self,
        tier: usize,
        group: GroupId,
        (lacking, known): (&[Lack], Option<&Known>),
    ) -> bool {
        let max = self.lower.options.loads_open_max as usize;
        if self.lower.open_of(tier, Direction::Load) >= max {
            return false;
        }
        let of = &self.groups[usize::from(group.0)];
        let Ok(claimed) = of.pool.claim_in(Tier::Secondary, lacking.len()) else { return false };
        let places = claimed.ids().collect();
        let names: Vec<_> = lacking.iter().map(|lack| lack.name).collect();
        let keys = names.iter().map(|&name| (group, name)).collect::<Vec<Key>>();
        let mut ticket = Ticket::new(tier, group, Direction::Load, names);
        let noted = guard!("manager.what-loads-is-noted-as-asked", known, else None);
        let asked = |&Lack { place, name, before }: &Lack| {
            LowerNote::asked(noted, (place, of.block_tokens), (before, name), of.is_chained())
        };
        ticket.asked = lacking.iter().map(asked).collect();
        ticket.claimed.push(claimed);
        let id = self.open_ticket(ticket, places);
        self.lower.tiers[tier].loading.extend(&keys);
        self.lower.arriving.extend(keys.into_iter().map(|key| (key, id)));
        true
    }

    /// Begins to load what a prefix lacks; how many blocks are on their way.
    pub(crate) fn prefetch_below(&mut self, names: &[BlockHash]) -> usize {
        let Some(mut lacks) = self.lacks(names, u64::MAX) else { return 0 };
        if self.lower.may_load(&lacks) {
            let Some(with_room) = self.with_room(names, lacks) else { return 0 };
            self.load(&with_room, None);
            lacks = with_room;
        }
        lacks.keys().filter(|key| self.lower.arriving.contains_key(key)).count()
    }
}

fn waiting_for(ticket: &Ticket) -> Waiting {
    Waiting::Load { ticket: ticket.id, blocks: ticket.blocks() as u64 }
}

impl Lower {
    /// Requests whose loads begin before their turn, at most: tickets that may be open.
    pub(crate) fn loads_ahead(&self) -> usize {
        if self.tiers.is_empty() { 0 } else { self.options.loads_open_max as usize }
    }

    /// Whether tickets are left for some of it.
    fn may_load(&self, lacks: &Lacks) -> bool {
        let max = self.options.loads_open_max as usize;
        let left = |tier| self.open_of(tier, Direction::Load) < max;
        let tiers: SmallVec<[bool; 2]> = (0..self.tiers.len()).map(left).collect();
        let is_left = |key| {
            !self.arriving.contains_key(&key) && self.tier_with(key).is_some_and(|tier| tiers[tier])
        };
        lacks.keys().any(is_left)
    }

    /// A request is admitted: it has pinned what was kept for it.
    pub(crate) fn end_wait(&mut self, request: &mut Request) {
        let Some(wait) = request.load.take() else { return };
        for ticket in wait.counted {
            let open = self.open.iter_mut().find(|open| open.id == ticket);
            let kept = self.kept.iter_mut().find(|kept| kept.ticket == ticket);
            let open = open.map(|open| &mut open.waiters);
            let waiters = open.or(kept.map(|kept| &mut kept.waiters));
            waiters.into_iter().for_each(|waiters| *waiters = waiters.saturating_sub(1));
        }
        self.kept.retain(|kept| kept.waiters > 0);
    }
}
