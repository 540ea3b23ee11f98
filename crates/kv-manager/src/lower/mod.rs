//! The tiers below host memory, as the manager knows them: which names are complete there, and which blocks are on
//! their way.
//!
//! A name counts as stored once every worker has said that its share of the block was stored (H22). Blocks of a
//! ticket belong to the ticket, whoever asked for it, until every worker has settled it or is fenced (H30): a
//! deadline ends waiting for it, and nothing else.

mod layers;
mod loads;
mod options;
mod stores;
mod survivors;
mod worth;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use kv_pool::store::StorePolicy;
use kv_pool::{BlockHash, BlockId, Claimed, Pinned, Tier, guard, retention::Retention};
use kv_tier::{BlockFault, Direction, TicketId, Transfer};
use smallvec::SmallVec;

pub(crate) use layers::{Entering, OpenLoad};
use layers::{Read, Readers};
pub(crate) use options::TIERS_MAX;
pub use options::{LowerBlocks, LowerOptions, LowerStats};
pub use worth::ComputeRate;
use worth::{Compute, LoadRate};

use crate::events::{Below, LowerNote};
use crate::plan::{Dropped, Forget, Settled};
use crate::transfers::{LOWER, index_of};
use crate::{CompletionError, GroupId, Manager, WorkerId};

/// A block below host memory: its group, and its name.
pub(crate) type Key = (GroupId, BlockHash);

/// What a waiting request has to do with loads.
#[derive(Clone, Debug)]
pub(crate) struct LoadWait {
    /// The load that it waits for, if it does still.
    ticket: Option<TicketId>,
    /// The loads that count it among their waiters.
    counted: SmallVec<[TicketId; 2]>,
    deadline: Duration,
    /// Blocks that it needs that were cached when it was last looked at.
    cached: usize,
    /// Times that loads were begun for it since there were more of these.
    begun: u32,
    /// Computing what it lacks is faster than loading it.
    declined: bool,
    /// It is admitted with the loads that are open.
    pub(crate) enters: bool,
}

/// Times that loads are begun for a request without more of what it needs being cached: once for each tier.
const VAIN_LOADS_MAX: u32 = TIERS_MAX as u32;

/// The manager's side of the tiers below host memory.
#[derive(Debug)]
pub(crate) struct Lower {
    options: LowerOptions,
    tiers: Vec<TierState>,
    open: Vec<Ticket>,
    next_ticket: u64,
    /// Blocks that open loads bring.
    arriving: HashMap<Key, TicketId>,
    /// Loaded blocks that requests are expected to come back for.
    kept: Vec<Kept>,
    /// Blocks of loads that have ended, which plans copy to the device.
    read: Vec<Read>,
    compute: Compute,
    /// The time of the latest step.
    now: Duration,
    /// Without the blocks that were moved.
    stats: LowerStats,
    /// Of each group.
    moved: Vec<LowerBlocks>,
}

#[derive(Debug, Default)]
struct TierState {
    /// What is complete there, and what it is worth when it comes back.
    index: HashMap<Key, Retention>,
    /// Blocks to be stored, of each group.
    wanted: Vec<VecDeque<Wanted>>,
    /// The group that stores next.
    turn: usize,
    /// Where the next step without a plan looks at what waits.
    looked: AtomicUsize,
    /// These blocks, and blocks in open stores: each once.
    asked: HashSet<Key>,
    /// Blocks in open loads.
    loading: HashSet<Key>,
    /// Decides what is stored; everything is, without one.
    policy: Option<Box<dyn StorePolicy>>,
    load_rate: LoadRate,
    /// What workers have had since before they began.
    survivors: survivors::Tally,
}

/// A block to be stored.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    name: BlockHash,
    /// A store of it has failed before.
    again: bool,
    /// The policy wants it to be stored.
    decided: bool,
}

#[derive(Debug)]
struct Ticket {
    id: TicketId,
    tier: usize,
    group: GroupId,
    direction: Direction,
    names: Vec<BlockHash>,
    /// Of a store: what the blocks are worth, and whether a store of them has failed before.
    worth: Vec<(Retention, bool)>,
    /// Of a load: what who has asked for them knows of each.
    asked: Vec<LowerNote>,
    /// Blocks that the tier writes, or that were made for it to read.
    claimed: Vec<Claimed>,
    /// Blocks that it reads where they are cached.
    pinned: Vec<Pinned>,
    faults: Vec<Option<BlockFault>>,
    /// Blocks whose end means nothing any more.
    void: Vec<bool>,
    /// Workers that have not settled it. None before its plan is staged.
    left: SmallVec<[WorkerId; 4]>,
    staged: bool,
    begun: Duration,
    deadline: Duration,
    /// Requests that wait for it.
    waiters: u32,
    /// What sequences have of it that were admitted before it has ended.
    readers: Option<Readers>,
}

impl Ticket {
    fn new(tier: usize, group: GroupId, direction: Direction, names: Vec<BlockHash>) -> Self {
        Self {
            id: TicketId(0),
            tier,
            group,
            direction,
            worth: Vec::new(),
            asked: Vec::new(),
            claimed: Vec::new(),
            pinned: Vec::new(),
            faults: vec![None; names.len()],
            void: vec![false; names.len()],
            names,
            left: SmallVec::new(),
            staged: false,
            begun: Duration::ZERO,
            deadline: Duration::ZERO,
            waiters: 0,
            readers: None,
        }
    }

    fn blocks(&self) -> usize {
        self.names.len()
    }

    /// Whether anything that it brings is of use.
    fn is_useful(&self) -> bool {
        !self.void.iter().all(|void| *void)
    }
}

#[derive(Debug)]
struct Kept {
    ticket: TicketId,
    /// Requests that have waited for it and were not admitted.
    waiters: u32,
    until: Duration,
    blocks: Pinned,
}

impl Lower {
    pub(crate) fn new(options: LowerOptions, groups: usize) -> Self {
        let tiers = usize::from(options.tiers.min(TIERS_MAX));
        let wanted = vec![VecDeque::new(); groups];
        let tier = || TierState { wanted: wanted.clone(), ..TierState::default() };
        Self {
            options,
            tiers: (0..tiers).map(|_| tier()).collect(),
            open: Vec::new(),
            next_ticket: 1,
            arriving: HashMap::new(),
            kept: Vec::new(),
            read: Vec::new(),
            compute: Compute::default(),
            now: Duration::ZERO,
            stats: LowerStats::default(),
            moved: vec![LowerBlocks::default(); groups],
        }
    }

    fn ticket(&mut self, id: TicketId) -> Option<&mut Ticket> {
        self.open.iter_mut().find(|open| open.id == id)
    }

    fn open_of(&self, tier: usize, direction: Direction) -> usize {
        let same = |ticket: &&Ticket| ticket.tier == tier && ticket.direction == direction;
        self.open.iter().filter(same).count()
    }

    /// The nearest tier that has a block.
    fn tier_with(&self, key: Key) -> Option<usize> {
        #[cfg(test)]
        crate::proportion::looks(1);
        self.tiers.iter().position(|tier| tier.index.contains_key(&key))
    }

    /// Whether content waits to be stored in a tier, and a ticket is left for it.
    fn may_store(&self, tier: usize) -> bool {
        let max = self.options.stores_open_max as usize;
        let waits = self.tiers[tier].wanted.iter().any(|wanted| !wanted.is_empty());
        waits && self.open_of(tier, Direction::Store) < max
    }

    /// Asks for content that was computed to be stored in all tiers.
    fn want(&mut self, key: Key) {
        for tier in 0..self.tiers.len() {
            self.note_used(tier, key);
            self.want_in(tier, key, false);
        }
    }

    /// Tells the policy of a tier that content was loaded from there, or computed, maybe again.
    fn note_used(&mut self, tier: usize, key: Key) {
        if let Some(policy) = &mut self.tiers[tier].policy {
            self.stats.regretted_blocks[tier] += u64::from(policy.used(key.1));
        }
    }

    /// Asks for complete content to be stored in a tier, unless that was asked before.
    fn want_in(&mut self, tier: usize, key: Key, again: bool) {
        let state = &mut self.tiers[tier];
        let (group, name) = key;
        if state.index.contains_key(&key) || !state.asked.insert(key) {
            return;
        }
        let waiting: usize = state.wanted.iter().map(VecDeque::len).sum();
        if waiting >= self.options.queue_max
            && let Some((of, longest)) =
                (0..).zip(&mut state.wanted).max_by_key(|(_, wanted)| wanted.len())
            && let Some(oldest) = longest.pop_front()
        {
            state.asked.remove(&(GroupId(of), oldest.name));
        }
        state.wanted[usize::from(group.0)].push_back(Wanted { name, again, decided: false });
    }

    /// Takes in the time of a new step: requests that did not come back for loaded blocks lose them.
    pub(crate) fn tick(&mut self, now: Duration) {
        self.now = now;
        self.compute.tick(now);
        self.kept.retain(|kept| kept.until > now);
    }

    /// Makes a block that is on its way mean nothing.
    fn void(&mut self, key: Key) {
        self.arriving.remove(&key);
        let (group, name) = key;
        for ticket in self.open.iter_mut().filter(|ticket| ticket.group == group) {
            for (void, _) in
                ticket.void.iter_mut().zip(&ticket.names).filter(|(_, of)| **of == name)
            {
                *void = true;
            }
        }
    }

    /// The position of a tier that there is.
    fn check_tier(&self, tier: Tier) -> Result<usize, CompletionError> {
        let tiers = self.tiers.len();
        index_of(tier).filter(|&at| at < tiers).ok_or(CompletionError::NoTier { tier, tiers })
    }

    /// Content with these names is complete, each of a group.
    pub(crate) fn want_stored(&mut self, names: &[(usize, BlockHash)]) {
        if !self.tiers.is_empty() {
            names.iter().for_each(|&(group, name)| self.want((GroupId(group as u16), name)));
        }
    }

    /// What content of a group is worth from now on, wherever it is.
    pub(crate) fn retain_below(
        &mut self,
        group: GroupId,
        names: &[BlockHash],
        retention: Retention,
    ) {
        for tier in &mut self.tiers {
            for &name in names {
                if let Some(worth) = tier.index.get_mut(&(group, name)) {
                    *worth = retention;
                }
            }
        }
    }
}

impl Manager {
    /// Has `policy` decide what is stored in a tier below host memory. At first, everything is. The policy is asked
    /// for each block once, when its turn comes, and is told of the blocks that were loaded or computed, but not of
    /// those that were found nearer: a tier below saves nothing for these.
    ///
    /// # Errors
    /// [`CompletionError::NoTier`]; nothing has changed.
    pub fn set_store_policy(
        &mut self,
        tier: Tier,
        policy: Box<dyn StorePolicy>,
    ) -> Result<(), CompletionError> {
        let at = self.lower.check_tier(tier)?;
        let state = &mut self.lower.tiers[at];
        state.policy = Some(policy);
        // It decides on what waits, too.
        state.wanted.iter_mut().flatten().for_each(|wanted| wanted.decided = false);
        Ok(())
    }

    /// Counts of the tiers below host memory.
    #[must_use]
    pub fn lower_stats(&self) -> LowerStats {
        let Lower { tiers, open, kept, now, stats, moved, .. } = &self.lower;
        let mut stats = *stats;
        for (at, of) in (0..tiers.len()).flat_map(|at| moved.iter().map(move |of| (at, of))) {
            stats.stored_blocks[at] += of.stored[at];
            stats.loaded_blocks[at] += of.loaded[at];
        }
        for (names, tier) in stats.names.iter_mut().zip(tiers) {
            *names = tier.index.len() as u64;
        }
        let blocks = |tickets: &mut dyn Iterator<Item = &Ticket>| {
            tickets.map(|ticket| ticket.blocks() as u64).sum()
        };
        let is_lost = |worker: &WorkerId| self.steps.workers().completed(*worker).is_err();
        let mut late =
            open.iter().filter(|ticket| ticket.deadline <= *now || ticket.left.iter().any(is_lost));
        stats.quarantined_blocks = blocks(&mut late);
        stats.ticket_blocks = blocks(&mut open.iter());
        stats.open_tickets = open.len() as u64;
        stats.kept_blocks = kept.iter().map(|kept| kept.blocks.len() as u64).sum();
        stats
    }

    /// What tiers below host memory have stored and loaded of a group so far; `None` if there is no such group.
    #[must_use]
    pub fn lower_blocks(&self, group: GroupId) -> Option<LowerBlocks> {
        self.lower.moved.get(usize::from(group.0)).copied()
    }

    /// Whether a tier below host memory has a block of a group, on all workers, and which.
    #[must_use]
    pub fn find_below(&self, group: GroupId, name: BlockHash) -> Option<Tier> {
        self.lower.tier_with((group, name)).map(|at| LOWER[at])
    }

    /// Takes in that a ticket has ended at a worker. When it has ended at all workers, the blocks that are right at
    /// all of them are found: of a store, in the tier; of a load, in host memory. The others are misses.
    ///
    /// # Errors
    /// [`CompletionError`]; nothing was taken in.
    pub fn settle(&mut self, settled: &Settled) -> Result<(), CompletionError> {
        let &Settled { worker, ticket, ref wrong } = settled;
        self.steps.workers().completed(worker)?;
        let open = self.lower.ticket(ticket);
        let at = open.as_ref().and_then(|open| {
            let at = open.left.iter().position(|left| *left == worker);
            guard!("manager.workers-settle-once", at, else (!open.left.is_empty()).then_some(0))
        });
        let (Some(open), Some(at)) = (open, at) else {
            return Err(CompletionError::NotOpen { worker, ticket });
        };
        let blocks = open.blocks();
        if let Some(&(index, _)) = wrong.iter().find(|(index, _)| *index as usize >= blocks) {
            return Err(CompletionError::NoBlock { ticket, index, blocks });
        }
        for &(index, fault) in wrong {
            open.faults[index as usize].get_or_insert(fault);
        }
        open.left.swap_remove(at);
        self.end_settled();
        Ok(())
    }

    /// Takes in that a worker's tier has dropped blocks by itself. They are found there no more, and the tiers of
    /// the other workers are told to forget them.
    ///
    /// # Errors
    /// [`CompletionError`]; nothing was taken in.
    pub fn dropped(&mut self, dropped: &Dropped) -> Result<(), CompletionError> {
        let &Dropped { worker, tier, ref blocks } = dropped;
        self.steps.workers().completed(worker)?;
        let at = self.lower.check_tier(tier)?;
        for &key in blocks {
            if self.lower.tiers[at].index.remove(&key).is_some() {
                self.lower.stats.dropped_names[at] += 1;
                self.forget_in(at, key);
            }
            // What is being stored may have been dropped since it was there.
            let (group, name) = key;
            for ticket in self.lower.open.iter_mut().filter(|ticket| ticket.tier == at) {
                if ticket.direction == Direction::Store
                    && ticket.group == group
                    && let Some(index) = ticket.names.iter().position(|of| *of == name)
                {
                    guard!("manager.the-dropped-is-not-stored", {
                        ticket.faults[index].get_or_insert(BlockFault::Missing);
                    });
                }
            }
        }
        Ok(())
    }

    fn forget_in(&mut self, tier: usize, key: Key) {
        self.plan.forget(Forget::Block(LOWER[tier], key.0, key.1));
        self.home.note_below(tier, key, Below::Removed);
    }

    /// Forgets a name in all tiers below host memory, also on its way. Whether one had it.
    pub(crate) fn forget_below(&mut self, name: BlockHash) -> bool {
        if self.lower.tiers.is_empty() {
            return false;
        }
        let mut found = false;
        for key in (0..self.groups.len()).map(|group| (GroupId(group as u16), name)) {
            self.lower.void(key);
            for tier in 0..self.lower.tiers.len() {
                if self.lower.tiers[tier].index.remove(&key).is_some() {
                    self.forget_in(tier, key);
                    found = true;
                }
            }
        }
        found
    }

    /// Forgets all names in all tiers below host memory, also on their way (rule 14).
    pub(crate) fn forget_all_below(&mut self) {
        let Lower { tiers, open, arriving, kept, .. } = &mut self.lower;
        arriving.clear();
        kept.clear();
        let void = |ticket: &mut Ticket| ticket.void.fill(true);
        guard!("manager.resets-void-tickets", open.iter_mut().for_each(void));
        for (at, tier) in tiers.iter_mut().enumerate() {
            tier.index.clear();
            tier.survivors.clear();
            for (group, wanted) in (0..).zip(&mut tier.wanted) {
                for wanted in wanted.drain(..) {
                    tier.asked.remove(&(GroupId(group), wanted.name));
                }
            }
            self.plan.forget(Forget::All(LOWER[at]));
        }
    }

    /// A fenced worker settles nothing any more: its part of every ticket has ended, and nothing of it is right.
    pub(crate) fn fence_tickets(&mut self, worker: WorkerId) {
        for ticket in &mut self.lower.open {
            if let Some(at) = ticket.left.iter().position(|left| *left == worker) {
                ticket.left.swap_remove(at);
                ticket.faults.iter_mut().for_each(|fault| {
                    fault.get_or_insert(BlockFault::Fenced);
                });
            }
        }
        self.end_settled();
    }

    /// The plan that is staged now brings its tickets to all workers that are not fenced.
    pub(crate) fn stage_tickets(&mut self) {
        if self.lower.open.iter().all(|ticket| ticket.staged) {
            return;
        }
        let unfenced: SmallVec<[WorkerId; 4]> = self.steps.workers().unfenced().collect();
        for ticket in self.lower.open.iter_mut().filter(|ticket| !ticket.staged) {
            ticket.staged = true;
            ticket.left.clone_from(&unfenced);
            if unfenced.is_empty() {
                ticket.faults.fill(Some(BlockFault::Fenced));
            }
        }
        self.end_settled();
    }

    /// Ends tickets that all workers have settled.
    fn end_settled(&mut self) {
        let least = guard!("manager.all-workers-settle", 1, else self.steps.workers().count());
        let has_ended = |ticket: &Ticket| ticket.staged && ticket.left.len() < least;
        while let Some(at) = self.lower.open.iter().position(has_ended) {
            let ticket = self.lower.open.swap_remove(at);
            match ticket.direction {
                Direction::Store => self.end_store(ticket),
                Direction::Load => self.end_load(ticket),
            }
        }
    }

    /// Opens a ticket, and puts its transfer into the plan.
    fn open_ticket(&mut self, mut ticket: Ticket, places: Vec<BlockId>) -> TicketId {
        let id = TicketId(self.lower.next_ticket);
        self.lower.next_ticket += 1;
        let blocks = ticket.names.iter().copied().zip(places).collect();
        ticket.id = id;
        ticket.begun = self.lower.now;
        ticket.deadline = self.lower.now.saturating_add(self.lower.options.wait_max);
        let (tier, group, direction) = (LOWER[ticket.tier], ticket.group, ticket.direction);
        self.plan.transfer(Transfer { ticket: id, tier, group, direction, blocks });
        self.lower.open.push(ticket);
        id
    }
}
