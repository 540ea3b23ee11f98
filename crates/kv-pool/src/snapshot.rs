//! What a pool is at one moment, and what happens to its content.

use std::time::Duration;

use crate::blocks::{BlockPhase, Flag};
use crate::guard;
use crate::tenants::Tenant;
use crate::{BlockHash, Location, PoolStats, PoolView, Priority, Reading, RecordId, TenantId};

/// What a block is doing.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum BlockUse {
    /// Nobody uses it.
    Unused,
    /// Released, and not yet to be handed out again.
    Retiring,
    /// One owner writes it, or content is being moved to it.
    Claimed,
    /// Pinned, by so many owners: a list of pins and its clones are one.
    Pinned(u32),
}

/// One block as of the moment of a snapshot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct BlockView {
    /// The block.
    pub block: RecordId,
    /// Where it lies.
    pub location: Location,
    /// What it is doing.
    pub usage: BlockUse,
    /// The name of its content, if lookups find it.
    pub hash: Option<BlockHash>,
    /// The name of content on its way to it, which lookups do not find yet, and where it comes from: there
    /// the events know it until it has moved.
    pub expected: Option<(BlockHash, Location)>,
    /// The block that its content follows.
    pub parent: Option<RecordId>,
    /// How many blocks follow it.
    pub children: u32,
    /// Blocks before it in its chain, at most 65,535.
    pub depth: u16,
    /// What its content is worth.
    pub priority: Priority,
    /// When it loses that priority, by the pool's clock, if a duration is running.
    pub expiry: Option<Duration>,
    /// Whose it is.
    pub tenant: TenantId,
}

/// What a pool is at one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PoolSnapshot {
    /// The counts.
    pub stats: PoolStats,
    /// The number of the first event that is not in this snapshot yet. These events follow from the names
    /// of the snapshot, those that are [expected](BlockView::expected) among them.
    pub next_event: u64,
    /// All blocks that have ever been used, and have not left beyond a budget.
    pub blocks: Vec<BlockView>,
}

/// Reads a pool's events in order, each once.
#[derive(Clone, Debug)]
pub struct EventReader {
    pool: PoolView,
    /// The number of the event that is read next.
    next: u64,
}

impl EventReader {
    /// Appends what has happened since the last call, at most `max` readings, and says how many.
    /// Readings are [`Lost`](Reading::Lost) where this reader was too slow.
    pub fn read(&mut self, max: usize, into: &mut Vec<Reading>) -> usize {
        into.reserve(max.min(1024));
        let state = self.pool.shared.state.lock();
        let Some(events) = &state.watch.events else { return 0 };
        let before = into.len();
        while into.len() - before < max
            && let Some(reading) = events.read(&mut self.next)
        {
            into.push(reading);
        }
        into.len() - before
    }
}

impl PoolView {
    /// A reader of the events from now on; `None` if the pool was not
    /// [built](crate::PoolBuilder::events) to keep any.
    #[must_use]
    pub fn events(&self) -> Option<EventReader> {
        let next = self.shared.state.lock().watch.events.as_ref()?.len();
        Some(EventReader { pool: self.clone(), next })
    }

    /// All blocks and counts as of one moment. Holds the lock for a time in proportion to the blocks.
    #[must_use]
    pub fn snapshot(&self) -> PoolSnapshot {
        let mut views = Vec::new();
        let state = self.shared.state.lock();
        let blocks = &state.blocks;
        views.reserve(blocks.len());
        for block in blocks.ids() {
            let usage = match blocks.place(block) {
                BlockPhase::Absent => continue,
                BlockPhase::Queued | BlockPhase::Shadowed => BlockUse::Unused,
                BlockPhase::Retiring | BlockPhase::Draining => BlockUse::Retiring,
                BlockPhase::Claimed | BlockPhase::Moving => BlockUse::Claimed,
                BlockPhase::Pinned => BlockUse::Pinned(blocks.references(block)),
            };
            let expected = blocks.is(block, Flag::EXPECTED);
            let coming = guard!("pool.snapshot-names-what-is-coming", expected, else false);
            views.push(BlockView {
                block,
                location: blocks.location(block),
                usage,
                hash: blocks.is(block, Flag::NAMED).then(|| blocks.hash(block)),
                expected: coming.then(|| {
                    let from = blocks.location(blocks.partner(block));
                    (blocks.hash(block), from)
                }),
                parent: blocks.parent(block),
                children: blocks.children(block),
                depth: blocks.depth(block),
                priority: blocks.priority(block),
                expiry: state.watch.expiry(block),
                tenant: TenantId::of(state.mark, Tenant(blocks.tenant(block))),
            });
        }
        let next_event = state.watch.events.as_ref().map_or(0, |events| events.len());
        PoolSnapshot { stats: state.stats(), next_event, blocks: views }
    }
}
