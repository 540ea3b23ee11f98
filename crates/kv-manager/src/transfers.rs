//! The stores and loads of one worker: begun by plans, and told to the manager when they have ended.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_pool::{BlockHash, BlockId, Tier, guard};
use kv_tier::{Arrived, Batch, Direction, HostBlocks, LowerTier, TicketId, Transfer};

use crate::check::of_group;
use crate::plan::{Dropped, Forget, Gained, LayerLoad, Settled, Survivors};
use crate::{CompletionError, GroupId, PlanError, StepPlan, WorkerId};

/// The tiers of one worker, and the tickets that are open there.
///
/// A worker [begins](Self::begin) the transfers of a plan when the plan's copies are complete, and sends the
/// manager what [`poll`](Self::poll) returns.
#[derive(Debug)]
pub struct TierTransfers {
    tiers: Vec<Box<dyn LowerTier>>,
    format: u64,
    open: Vec<Open>,
    /// Batches of tickets that are forgotten, whose memory a tier still has.
    lent: Vec<Arc<Batch>>,
    /// The last ticket that was begun.
    last: TicketId,
    /// Kept to avoid allocation.
    forgotten: Vec<(GroupId, BlockHash)>,
}

/// A transfer that has not ended.
#[derive(Debug)]
struct Open {
    ticket: TicketId,
    group: GroupId,
    batch: Arc<Batch>,
}

impl TierTransfers {
    /// The tiers of a worker, the nearest first: [`Tier::Third`], then [`Tier::Fourth`]. `format` is that of the worker's records
    /// ([`record_format`](kv_tier::record_format)). A record of another format is not read.
    #[must_use]
    pub fn new(mut tiers: Vec<Box<dyn LowerTier>>, format: u64) -> Self {
        tiers.iter_mut().for_each(|tier| tier.set_format(format));
        let (open, lent, forgotten) = (Vec::new(), Vec::new(), Vec::new());
        Self { tiers, format, open, lent, last: TicketId::default(), forgotten }
    }

    /// Number of tiers.
    #[must_use]
    pub fn tiers(&self) -> usize {
        self.tiers.len()
    }

    /// Tickets that are open here.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Checks that transfers and forgotten names of a plan are of tiers that there are, and the transfers of new
    /// tickets and of host blocks that there are, so many of each group, where a load shares no block with another
    /// transfer that has not ended, and blocks that are copied layer by layer are of loads from before. `waiting` are
    /// transfers of plans before that were not [begun](Self::begin).
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn check<'a>(
        &self,
        plan: &StepPlan,
        host: &[u64],
        waiting: impl IntoIterator<Item = &'a Transfer>,
    ) -> Result<(), PlanError> {
        let (step, tiers) = (plan.step, self.tiers.len());
        let named = plan.forgets.iter().map(Forget::tier);
        let mut named = named.chain(plan.transfers.iter().map(|transfer| transfer.tier));
        let is_there = |tier: &Tier| index_of(*tier).is_some_and(|at| at < tiers);
        if let Some(tier) = named.find(|tier| !is_there(tier)) {
            return Err(PlanError::Tier { step, tier, tiers });
        }
        for forget in &plan.forgets {
            if let Forget::Block(_, group, _) = *forget {
                of_group(host, group, step)?;
            }
        }
        if plan.transfers.is_empty() && plan.layer_loads.is_empty() {
            return Ok(());
        }
        let (mut tickets, mut users) = (HashSet::new(), Users::new());
        let mut note = |ticket, group, direction, blocks: &mut dyn Iterator<Item = BlockId>| {
            tickets.insert(ticket);
            users.extend(blocks.map(|block| ((group, block), (ticket, direction))));
        };
        for Open { ticket, group, batch } in &self.open {
            note(*ticket, *group, batch.direction(), &mut batch.places().iter().copied());
        }
        for &Transfer { ticket, group, direction, ref blocks, .. } in waiting {
            note(ticket, group, direction, &mut blocks.iter().map(|&(_, block)| block));
        }
        let last = tickets.iter().copied().fold(self.last, TicketId::max);
        check_transfers(plan, last, &mut users, host)?;
        check_layer_loads(plan, (last, &tickets), &users, host)
    }

    /// Begins a store or a load of blocks of `host`, the host memory of the transfer's group. The blocks hold what is to be stored, or may be written, from now on until
    /// [`poll`](Self::poll) tells of the ticket.
    ///
    /// # Errors
    /// [`CompletionError::NoTier`]; nothing was begun, and the ticket does not end here.
    pub fn begin(
        &mut self,
        transfer: &Transfer,
        host: &Arc<dyn HostBlocks>,
    ) -> Result<(), CompletionError> {
        let &Transfer { ticket, tier, group, .. } = transfer;
        let (tiers, format) = (self.tiers.len(), self.format);
        let at = index_of(tier).and_then(|at| self.tiers.get_mut(at));
        let Some(at) = at else { return Err(CompletionError::NoTier { tier, tiers }) };
        let batch = Batch::begin(transfer, host, format, &mut **at);
        self.last = self.last.max(ticket);
        self.open.push(Open { ticket, group, batch });
        Ok(())
    }

    /// Removes blocks from tiers, as a plan says. Tiers that the worker does not have are passed over.
    pub fn forget(&mut self, forgets: &[Forget]) {
        for chunk in forgets.chunk_by(|a, b| a.tier() == b.tier()) {
            let Some(tier) = chunk.first().and_then(|first| index_of(first.tier())) else {
                continue;
            };
            let Some(tier) = self.tiers.get_mut(tier) else { continue };
            self.forgotten.clear();
            for forget in chunk {
                match *forget {
                    Forget::Block(_, group, name) => self.forgotten.push((group, name)),
                    Forget::All(_) => {
                        self.forgotten.clear();
                        tier.clear();
                    }
                }
            }
            if !self.forgotten.is_empty() {
                tier.forget(&self.forgotten);
            }
        }
    }

    /// Lets the tiers work, and appends tickets that have ended, and blocks that tiers have dropped by themselves, which the
    /// manager is to be told of first: they may have made room for what those tickets have stored. What is not
    /// right of a block that was to be loaded is overwritten with zeros before its ticket is told of: whoever gets the memory
    /// next finds nothing of its former owners there.
    pub fn poll(
        &mut self,
        worker: WorkerId,
        settled: &mut Vec<Settled>,
        dropped: &mut Vec<Dropped>,
    ) {
        self.poll_dropped(worker, dropped);
        let before = settled.len();
        self.open.retain(|Open { ticket, batch, .. }| match batch.ended() {
            Some(wrong) => {
                settled.push(Settled { worker, ticket: *ticket, wrong });
                false
            }
            None => true,
        });
        // A thread of a tier may have dropped blocks since, and ended stores that they have made room for.
        if guard!("manager.what-made-room-is-told-with-it", settled.len() > before, else false) {
            self.poll_dropped(worker, dropped);
        }
    }

    fn poll_dropped(&mut self, worker: WorkerId, dropped: &mut Vec<Dropped>) {
        for (tier, of) in LOWER.into_iter().zip(&mut self.tiers) {
            let mut blocks = Vec::new();
            of.poll(&mut blocks);
            if !blocks.is_empty() {
                dropped.push(Dropped { worker, tier, blocks });
            }
        }
    }

    /// What each tier has had since before it was made: what the manager is to be
    /// [told](crate::Manager::take_survivors), once and before everything else.
    pub fn survivors(&mut self, worker: WorkerId) -> Vec<Survivors> {
        let of = LOWER.into_iter().zip(&mut self.tiers).map(|(tier, of)| {
            let mut blocks = Vec::new();
            of.survivors(&mut blocks);
            Survivors { worker, tier, blocks }
        });
        of.collect()
    }

    /// What has come to each tier by itself since the last call: what the manager is to be
    /// [told](crate::Manager::take_gained).
    pub fn gained(&mut self, worker: WorkerId) -> Vec<Gained> {
        let of = LOWER.into_iter().zip(&mut self.tiers).map(|(tier, of)| {
            let mut blocks = Vec::new();
            of.gained(&mut blocks);
            Gained { worker, tier, blocks }
        });
        of.filter(|gained| !gained.blocks.is_empty()).collect()
    }

    /// How much of a host block is there that a load brings; `None` if no such load is open here.
    #[must_use]
    pub fn arrived(&self, ticket: TicketId, block: BlockId) -> Option<Arrived> {
        let batches = self.open.iter().filter(|open| open.ticket == ticket);
        let mut batches = batches.map(|open| &open.batch);
        batches.find(|batch| batch.direction() == Direction::Load)?.arrived(block)
    }

    /// Ends a ticket here: no tier reads or writes a block of it after this call, and blocks that had not ended are
    /// [late](kv_tier::BlockFault::Late). Memory that a tier has [borrowed](kv_tier::LentBlock) is not waited for: the ticket is
    /// told of when that is back.
    pub fn give_up(&mut self, ticket: TicketId) {
        self.open.iter().filter(|open| open.ticket == ticket).for_each(|open| open.batch.give_up());
    }

    /// Takes the memory of all open tickets back, and forgets the tickets: no tier reads or writes a block of
    /// theirs after this call, but for what it has [borrowed](kv_tier::LentBlock), for which [`await_lent`](Self::await_lent)
    /// waits. For a worker whose manager has given it up: tickets may be numbered from 1 again.
    pub fn fence(&mut self) {
        for Open { batch, .. } in self.open.drain(..) {
            batch.fence();
            if guard!("manager.waits-for-what-was-lent", batch.is_lent(), else false) {
                self.lent.push(batch);
            }
        }
        self.last = TicketId::default();
    }

    /// Lets the tiers work until they have given back all memory of tickets that were [taken back](Self::fence), at
    /// most `wait`. Whether all is back. What tiers drop meanwhile is told to nobody: the manager that knew of it is gone.
    pub fn await_lent(&mut self, wait: Duration) -> bool {
        let since = Instant::now();
        loop {
            self.lent.retain(|batch| batch.is_lent());
            if self.lent.is_empty() {
                return true;
            }
            if since.elapsed() >= wait {
                return false;
            }
            self.tiers.iter_mut().for_each(|tier| tier.poll(&mut Vec::new()));
            std::thread::yield_now();
        }
    }
}

impl Drop for TierTransfers {
    fn drop(&mut self) {
        self.fence();
    }
}

/// The transfers that use a host block.
type Users = HashMap<(GroupId, BlockId), (TicketId, Direction)>;

/// Checks that the transfers of a plan are of tickets behind the `last` one, and of host blocks that there are, of which no load
/// shares one. Adds them to the users.
fn check_transfers(
    plan: &StepPlan,
    mut last: TicketId,
    users: &mut Users,
    host: &[u64],
) -> Result<(), PlanError> {
    let step = plan.step;
    for &Transfer { ticket, group, direction, ref blocks, .. } in &plan.transfers {
        of_group(host, group, step)?;
        if guard!("manager.tickets-begin-once", ticket <= last, else false) {
            return Err(PlanError::Ticket { step, ticket, last });
        }
        last = ticket;
        for &(_, block) in blocks {
            check_host(step, (group, block), host)?;
            if let Some((other, way)) = users.insert((group, block), (ticket, direction))
                && guard!(
                    "manager.loads-have-blocks-of-their-own",
                    way == Direction::Load || direction == Direction::Load,
                    else false
                )
            {
                return Err(PlanError::Shared { step, ticket, other, block });
            }
        }
    }
    Ok(())
}

/// Checks that blocks which are copied layer by layer are of loads from before, that no other load writes them, and
/// that each goes to a block of its own. `open` are the last ticket before, and those that have not ended.
fn check_layer_loads(
    plan: &StepPlan,
    (last, open): (TicketId, &HashSet<TicketId>),
    users: &Users,
    host: &[u64],
) -> Result<(), PlanError> {
    let step = plan.step;
    let mut targets = HashSet::new();
    for &LayerLoad { ticket, group, from: block, to } in &plan.layer_loads {
        check_host(step, (group, block), host)?;
        let user = users.get(&(group, block));
        let brings = user == Some(&(ticket, Direction::Load));
        if ticket > last || open.contains(&ticket) && !brings {
            return Err(PlanError::NotLoaded { step, ticket, block });
        }
        if let Some(&(other, Direction::Load)) = user.filter(|_| !brings) {
            return Err(PlanError::Shared { step, ticket, other, block });
        }
        if !targets.insert((group, to)) {
            return Err(PlanError::LoadedTwice { step, block: to });
        }
    }
    Ok(())
}

/// Checks that host memory has a block of a group.
fn check_host(step: u64, (group, id): (GroupId, BlockId), host: &[u64]) -> Result<(), PlanError> {
    let blocks = *of_group(host, group, step)?;
    if id.index() as u64 >= blocks {
        return Err(PlanError::Block { step, tier: Tier::Secondary, id, blocks });
    }
    Ok(())
}

/// The tiers below host memory.
pub(crate) const LOWER: [Tier; 2] = [Tier::Third, Tier::Fourth];

/// The position of a tier among those below host memory.
pub(crate) fn index_of(tier: Tier) -> Option<usize> {
    LOWER.iter().position(|of| *of == tier)
}
