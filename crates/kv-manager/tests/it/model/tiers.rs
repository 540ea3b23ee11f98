//! Tiers below host memory that are late and wrong, and what becomes of the blocks on their way.

use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard};

use super::engine::Engine;
use super::truth::Cell;
use super::worker::Size;
use crate::prelude::*;

const CELL: usize = size_of::<Cell>();

/// A worker's host memory, which tiers read and write too.
#[derive(Debug)]
pub struct HostCells {
    block_tokens: usize,
    mapped: AtomicUsize,
    cells: Mutex<Vec<Cell>>,
}

impl HostCells {
    pub fn new(block_tokens: usize, cells: Vec<Cell>) -> Self {
        let mapped = AtomicUsize::new(cells.len() / block_tokens);
        Self { block_tokens, mapped, cells: Mutex::new(cells) }
    }

    pub fn lock(&self) -> MutexGuard<'_, Vec<Cell>> {
        self.cells.lock().unwrap()
    }

    pub fn map(&self, blocks: usize) {
        self.mapped.store(blocks, Ordering::Relaxed);
    }

    /// The cell of a byte.
    fn at(&self, block: BlockId, byte: usize) -> usize {
        let mapped = self.mapped.load(Ordering::Relaxed);
        assert!(block.index() < mapped, "a tier uses host block {block} of {mapped}");
        block.index() * self.block_tokens + byte / CELL
    }
}

impl HostBlocks for HostCells {
    fn block_bytes(&self) -> usize {
        self.block_tokens * CELL
    }

    /// A layer of a token.
    fn section_bytes(&self) -> usize {
        CELL
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        let cells = self.lock();
        for (at, byte) in (offset..).zip(into) {
            *byte = cells[self.at(block, at)].to_le_bytes()[at % CELL];
        }
        true
    }

    fn write(&self, block: BlockId, offset: usize, from: &[u8]) -> bool {
        let mut cells = self.lock();
        for (at, byte) in (offset..).zip(from) {
            let cell = &mut cells[self.at(block, at)];
            let mut bytes = cell.to_le_bytes();
            bytes[at % CELL] = *byte;
            *cell = Cell::from_le_bytes(bytes);
        }
        true
    }
}

/// What a worker knows of its loads.
#[derive(Debug, Default)]
pub struct Loads {
    /// The blocks of each that has not ended.
    open: HashMap<TicketId, Vec<BlockId>>,
    wrong: HashSet<(TicketId, BlockId)>,
    /// Sequences with a load that was wrong here.
    pub void: HashSet<u64>,
    /// What the manager is to be told.
    settled: Vec<Settled>,
    dropped: Vec<Dropped>,
}

impl Loads {
    pub fn begin(&mut self, transfer: &Transfer) {
        let blocks = transfer.blocks.iter().map(|&(_, block)| block).collect();
        self.open.insert(transfer.ticket, blocks);
    }

    pub fn poll(&mut self, worker: usize, tiers: &mut TierTransfers) {
        let before = self.settled.len();
        tiers.poll(WorkerId(worker as u16), &mut self.settled, &mut self.dropped);
        for settled in &self.settled[before..] {
            let blocks = self.open.remove(&settled.ticket).unwrap();
            let wrong = settled.wrong.iter().map(|&(at, _)| (settled.ticket, blocks[at as usize]));
            self.wrong.extend(wrong);
        }
    }

    pub fn is_wrong(&self, ticket: TicketId, block: BlockId) -> bool {
        self.wrong.contains(&(ticket, block))
    }
}

/// What tiers do wrong, beside the seed.
pub fn faults_of(random: &mut Random) -> FaultRules {
    let mut percent = |most| if random.chance(50) { 0 } else { random.below(most) as u8 };
    FaultRules {
        seed: 0,
        late: percent(60),
        late_polls_max: 60,
        fails: percent(20),
        tears: percent(20),
        corrupts: percent(20),
        swaps: percent(20),
        loses: percent(20),
    }
}

/// The tiers of a worker.
pub fn tiers_of(size: &Size, random: &mut Random) -> TierTransfers {
    let tier = |seed| -> Box<dyn LowerTier> {
        let faults = FaultRules { seed, ..size.faults };
        let load_pieces = (seed % 5) as u32;
        let clock = Arc::new(ManualClock::new());
        let records_max = size.records;
        Box::new(MemoryTier::new(MemoryTierOptions {
            records_max,
            faults,
            clock,
            load_pieces,
            latency: Duration::ZERO,
        }))
    };
    TierTransfers::new((0..size.tiers).map(|_| tier(random.number())).collect(), 7)
}

pub fn lower_options(tiers: usize, random: &mut Random) -> LowerOptions {
    LowerOptions {
        tiers: tiers as u8,
        stores_open_max: if random.chance(10) { 0 } else { random.from(1, 3) as u32 },
        loads_open_max: random.from(1, 6) as u32,
        ticket_blocks_max: random.from(1, 6) as u32,
        load_blocks_min: if random.chance(80) { 1 } else { 2 },
        queue_max: random.from(2, 40) as usize,
        wait_max: Duration::from_millis(random.from(1, 300)),
        compute: match random.below(4) {
            0 => ComputeRate::Measured,
            1 => ComputeRate::PerSecond(1 << random.below(20)),
            _ => ComputeRate::Unknown,
        },
    }
}

#[derive(Debug)]
struct StoreNothing;

impl StorePolicy for StoreNothing {
    fn name(&self) -> &'static str {
        "test"
    }

    fn stores(&mut self, _: Tier, _: &Candidate) -> bool {
        false
    }
}

impl Engine {
    /// Time goes on, and some worker's tiers get on with their work.
    pub fn tiers_work(&mut self) {
        if self.size.tiers == 0 {
            return;
        }
        self.clock.advance(Duration::from_millis(self.random.below(3)));
        let at = self.random.index(self.workers.len());
        if self.random.chance(50) {
            self.settle(at);
        }
        if self.random.chance(3) {
            self.settle_wrongly(at);
        }
        if self.random.chance(4) {
            self.hint_below();
        }
        let stats = self.manager.lower_stats();
        assert!(stats.quarantined_blocks <= stats.ticket_blocks, "{stats:?}");
        let open = self.workers.iter().flatten().map(|worker| worker.tiers.open()).max();
        assert!(open.is_none_or(|open| open as u64 <= stats.open_tickets), "an unknown ticket");
    }

    /// Tells the manager which tickets have ended at a worker.
    fn settle(&mut self, at: usize) {
        let Some(worker) = &mut self.workers[at] else { return };
        worker.loads.poll(at, &mut worker.tiers);
        self.tell_settled(at);
    }

    pub fn tell_settled(&mut self, at: usize) {
        let Some(worker) = &mut self.workers[at] else { return };
        let settled = std::mem::take(&mut worker.loads.settled);
        let dropped = std::mem::take(&mut worker.loads.dropped);
        // They come as bytes.
        let mut bytes = Vec::new();
        for dropped in dropped {
            bytes.clear();
            dropped.to_bytes(&mut bytes);
            assert_eq!(Message::from_bytes(&bytes), Ok(Message::Dropped(dropped.clone())));
            self.manager.dropped(&dropped).unwrap();
        }
        for settled in settled {
            bytes.clear();
            settled.to_bytes(&mut bytes);
            assert_eq!(Message::from_bytes(&bytes), Ok(Message::Settled(settled.clone())));
            self.manager.settle(&settled).unwrap();
            let again = self.manager.settle(&settled);
            let (worker, ticket) = (settled.worker, settled.ticket);
            assert_eq!(again, Err(CompletionError::NotOpen { worker, ticket }));
        }
    }

    /// A worker says what cannot be.
    fn settle_wrongly(&mut self, at: usize) {
        let (worker, ticket) = (WorkerId(at as u16), TicketId(u64::MAX));
        let refused = self.manager.settle(&Settled { worker, ticket, wrong: Vec::new() });
        let expected = match self.workers[at] {
            Some(_) => CompletionError::NotOpen { worker, ticket },
            None => CompletionError::Lost { worker },
        };
        assert_eq!(refused, Err(expected));
        let (worker, workers) = (WorkerId(9), self.workers.len());
        let blocks = Vec::new();
        let refused = self.manager.dropped(&Dropped { worker, tier: Tier::Third, blocks });
        assert_eq!(refused, Err(CompletionError::NoWorker { worker, workers }));
    }

    /// A prefix is loaded, or forgotten, before anybody asks for it.
    fn hint_below(&mut self) {
        let wish = self.wish();
        let mut request = wish.request;
        let named = self.manager.ask_all(std::slice::from_mut(&mut request), 0);
        drop(named);
        let facts = wish.ideal.facts;
        if facts.salt != 0 || self.generation > 0 || facts.tenant != 0 {
            return;
        }
        let names: Vec<BlockHash> = facts.names(&wish.ideal.ids);
        let groups = self.size.further.len() as u16 + 1;
        let is_below = |engine: &Self, name: &BlockHash| {
            (0..groups).any(|of| engine.manager.find_below(GroupId(of), *name).is_some())
        };
        let below = names.iter().filter(|name| is_below(self, name)).count();
        if self.random.chance(70) {
            let back = self.manager.prefetch(&names);
            assert!(back <= names.len() * usize::from(groups));
            self.saw_if(back > 0 && below > 0, "a prefetch from below");
        } else if below > 0 {
            assert!(self.manager.forget(&names) >= below);
            assert!(names.iter().all(|name| !is_below(self, name)));
        }
    }

    /// Has all tickets end, and checks that they hold nothing any more.
    pub fn end_tickets(&mut self) {
        if self.size.tiers == 0 {
            return;
        }
        for tier in [Tier::Third, Tier::Fourth].into_iter().take(self.size.tiers) {
            self.manager.set_store_policy(tier, Box::new(StoreNothing)).unwrap();
        }
        for turn in 0.. {
            let stats = self.manager.lower_stats();
            if stats.open_tickets == 0
                && self.workers.iter().flatten().all(|one| one.tiers.open() == 0)
            {
                break;
            }
            assert!(turn < 1000, "tickets do not end: {stats:?}");
            self.begin();
            self.stage();
            self.finish();
            self.carry_out_all();
            (0..self.workers.len()).for_each(|at| self.settle(at));
        }
        // Nobody comes back for what was loaded.
        self.clock.advance(Duration::from_secs(10));
        self.begin();
        self.stage();
        self.finish();
        self.carry_out_all();
        let stats = self.manager.lower_stats();
        assert_eq!((stats.ticket_blocks, stats.quarantined_blocks, stats.kept_blocks), (0, 0, 0));
        let all = |of: [u64; 2]| of.iter().sum::<u64>() > 0;
        self.saw_if(all(stats.stored_blocks), "a block stored below");
        self.saw_if(all(stats.loaded_blocks), "a block loaded from below");
        self.saw_if(all(stats.dropped_names), "a name that a tier has dropped");
        self.saw_if(stats.void_blocks > 0, "a void block of a ticket");
        self.saw_if(stats.late > 0, "a wait that ended before its load");
        self.saw_if(stats.entered > 0, "an admission before its load had ended");
        self.saw_if(stats.redone > 0, "a load that was wrong after its admission");
        let faults = [
            "a missing block below",
            "a failed load",
            "a short block",
            "a corrupt block below",
            "a foreign block below",
            "a fenced block",
            "a load that was given up",
        ];
        for (count, fault) in stats.faults.into_iter().zip(faults) {
            self.saw_if(count > 0, fault);
        }
    }
}
