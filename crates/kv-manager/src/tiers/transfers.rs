//! The stores and loads of one worker: begun by plans, and told to the manager when they have ended.

use std::sync::Arc;

use kv_pool::{BlockHash, Tier};

use super::frame::Label;
use super::handles::Batch;
use super::{BlockSink, BlockSource, HostBlocks, LowerTier};
use crate::WorkerId;
use crate::tickets::{Direction, Dropped, Forget, Settled, TicketId, Transfer};

/// Why a worker did not begin a transfer.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// The worker has no such tier.
    #[error("ticket {} is of the {tier:?} tier, and the worker has {tiers} below host memory", ticket.0)]
    NoTier {
        /// The ticket.
        ticket: TicketId,
        /// The tier named.
        tier: Tier,
        /// Tiers that there are.
        tiers: usize,
    },
}

kv_pool::one_line_debug!(TierError);

/// The tiers of one worker, and the tickets that are open there.
///
/// A worker [begins](Self::begin) the transfers of a plan when the plan's copies are complete, and sends the
/// manager what [`poll`](Self::poll) returns.
#[derive(Debug)]
pub struct TierTransfers {
    tiers: Vec<Box<dyn LowerTier>>,
    format: u64,
    open: Vec<(TicketId, Arc<Batch>)>,
    /// Kept to avoid allocation.
    names: Vec<BlockHash>,
}

impl TierTransfers {
    /// The tiers of a worker, the nearest first: [`Tier::Third`], then [`Tier::Fourth`]. `format` is a number for
    /// everything beside names that decides what the bytes of a block mean: the model and its weights, the shape and
    /// layout of the KV, and which share of it this worker holds. A record of another format is not read.
    #[must_use]
    pub fn new(tiers: Vec<Box<dyn LowerTier>>, format: u64) -> Self {
        Self { tiers, format, open: Vec::new(), names: Vec::new() }
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

    /// Begins a store or a load. Its blocks hold what is to be stored, or may be written, from now on until
    /// [`poll`](Self::poll) tells of the ticket.
    ///
    /// # Errors
    /// [`TierError`]; nothing was begun, and the ticket does not end here.
    pub fn begin(
        &mut self,
        transfer: &Transfer,
        host: &Arc<dyn HostBlocks>,
    ) -> Result<(), TierError> {
        let &Transfer { ticket, tier, group, direction, ref blocks } = transfer;
        let (format, tiers) = (self.format, self.tiers.len());
        let at = index_of(tier).and_then(|at| self.tiers.get_mut(at));
        let Some(at) = at else { return Err(TierError::NoTier { ticket, tier, tiers }) };
        let batch = Batch::new(Arc::clone(host), blocks.len());
        self.open.push((ticket, Arc::clone(&batch)));
        let blocks = blocks
            .iter()
            .zip(0..)
            .map(|(&(name, block), index)| (index, block, Label { name, group, format }));
        match direction {
            Direction::Store => at.store(
                blocks
                    .map(|(index, block, label)| BlockSource::new(&batch, index, block, label))
                    .collect(),
            ),
            Direction::Load => at.load(
                blocks
                    .map(|(index, block, label)| BlockSink::new(&batch, index, block, label))
                    .collect(),
            ),
        }
        Ok(())
    }

    /// Removes names from tiers, as a plan says. Tiers that the worker does not have are passed over.
    pub fn forget(&mut self, forgets: &[Forget]) {
        for chunk in forgets.chunk_by(|a, b| a.tier() == b.tier()) {
            let Some(tier) = chunk.first().and_then(|first| index_of(first.tier())) else {
                continue;
            };
            let Some(tier) = self.tiers.get_mut(tier) else { continue };
            self.names.clear();
            for forget in chunk {
                match *forget {
                    Forget::Name(_, name) => self.names.push(name),
                    Forget::All(_) => {
                        self.names.clear();
                        tier.clear();
                    }
                }
            }
            if !self.names.is_empty() {
                tier.forget(&self.names);
            }
        }
    }

    /// Lets the tiers work, and appends tickets that have ended, and names that tiers have dropped by themselves.
    pub fn poll(
        &mut self,
        worker: WorkerId,
        settled: &mut Vec<Settled>,
        dropped: &mut Vec<Dropped>,
    ) {
        for (index, tier) in self.tiers.iter_mut().enumerate() {
            let mut names = Vec::new();
            tier.poll(&mut names);
            if let (false, Some(tier)) = (names.is_empty(), tier_at(index)) {
                dropped.push(Dropped { worker, tier, names });
            }
        }
        self.open.retain(|(ticket, batch)| match batch.ended() {
            Some(wrong) => {
                settled.push(Settled { worker, ticket: *ticket, wrong });
                false
            }
            None => true,
        });
    }

    /// Takes the memory of all open tickets back, and forgets the tickets: no tier reads or writes a block of
    /// theirs after this call. For a worker whose manager has given it up.
    pub fn fence(&mut self) {
        self.open.drain(..).for_each(|(_, batch)| batch.fence());
    }
}

impl Drop for TierTransfers {
    fn drop(&mut self) {
        self.fence();
    }
}

/// The position of a tier among those below host memory.
pub(crate) fn index_of(tier: Tier) -> Option<usize> {
    tier.index().checked_sub(Tier::Third.index())
}

/// The tier at a position below host memory.
pub(crate) fn tier_at(index: usize) -> Option<Tier> {
    Tier::ALL.get(Tier::Third.index() + index).copied()
}
