//! A worker's side of a tier: host memory whose blocks say whose they are, and tickets.

use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use cuda_driver::{Device, HostAllocFlags, PinnedBuffer};
use cuda_sim::{SimConfig, SimDriver};
use kv_manager::{Dropped, Forget, Settled, TierTransfers, WorkerId};
use kv_pool::{BlockId, Tier};
use kv_tier::{BlockSink, BlockSource, Direction, HostBlocks, HostPiece, LowerTier, Transfer};

use crate::prelude::*;

pub(crate) const BLOCK_BYTES: usize = 5000;
pub(crate) const SECTION_BYTES: usize = 1800;
/// Of a record: its header, with a sum for each of three sections, and the block.
pub(crate) const RECORD_BYTES: u64 = 64 + 3 * 8 + BLOCK_BYTES as u64;
/// A block of whole pages, which a disk can read and write where it is, and a record of it.
pub(crate) const PAGED_BYTES: usize = 8192;
pub(crate) const PAGED_RECORD_BYTES: u64 = 64 + 3 * 8 + PAGED_BYTES as u64;
/// Host blocks: each name has one in each of two groups.
pub(crate) const HOST_BLOCKS: u64 = 64;
const NAMES: u64 = HOST_BLOCKS / 2;

pub(crate) fn place_of(group: u16, name: u64) -> usize {
    (u64::from(group) * NAMES + name) as usize
}

/// Host memory. That of blocks of whole pages is pinned, and lent to tiers.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) block_bytes: usize,
    bytes: Mutex<Vec<u8>>,
    pinned: Option<Pinned>,
    /// Whether blocks are lent that can be.
    pub(crate) lends: AtomicBool,
}

#[derive(Debug)]
struct Pinned {
    buffer: Arc<PinnedBuffer>,
    /// The first whole page.
    first: u64,
}

static DEVICE: LazyLock<Device> = LazyLock::new(|| {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    Device::open(Arc::new(sim), 0).unwrap()
});

impl Host {
    fn new(block_bytes: usize) -> Self {
        let all = HOST_BLOCKS as usize * block_bytes;
        if !block_bytes.is_multiple_of(4096) {
            let (bytes, lends) = (Mutex::new(vec![0; all]), AtomicBool::new(false));
            return Self { block_bytes, bytes, pinned: None, lends };
        }
        let flags = HostAllocFlags::CACHED;
        let buffer = PinnedBuffer::alloc(&DEVICE, all as u64 + 4096, flags).unwrap();
        let first = buffer.host_address().next_multiple_of(4096) - buffer.host_address();
        let pinned = Some(Pinned { buffer: Arc::new(buffer), first });
        Self { block_bytes, bytes: Mutex::default(), pinned, lends: AtomicBool::new(true) }
    }

    /// Some bytes of all blocks together.
    pub(crate) fn get(&self, at: usize, into: &mut [u8]) {
        match &self.pinned {
            None => into.copy_from_slice(&self.bytes.lock().unwrap()[at..at + into.len()]),
            Some(Pinned { buffer, first }) => buffer.read_at(first + at as u64, into).unwrap(),
        }
    }

    pub(crate) fn put(&self, at: usize, from: &[u8]) {
        match &self.pinned {
            None => self.bytes.lock().unwrap()[at..at + from.len()].copy_from_slice(from),
            Some(Pinned { buffer, first }) => buffer.write_shared(first + at as u64, from).unwrap(),
        }
    }
}

impl HostBlocks for Host {
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn section_bytes(&self) -> usize {
        SECTION_BYTES.max(self.block_bytes.div_ceil(3))
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        self.get(block.index() * self.block_bytes + offset, into);
        true
    }

    fn write(&self, block: BlockId, offset: usize, from: &[u8]) -> bool {
        self.put(block.index() * self.block_bytes + offset, from);
        true
    }

    fn pieces(&self, block: BlockId) -> Vec<HostPiece> {
        let Some(Pinned { buffer, first }) = &self.pinned else { return Vec::new() };
        if !self.lends.load(Relaxed) {
            return Vec::new();
        }
        let at = first + (block.index() * self.block_bytes) as u64;
        // Two pieces, as of a block that two devices share.
        let bytes = self.block_bytes / 2;
        let piece = |offset| HostPiece { memory: buffer.clone(), offset, bytes };
        vec![piece(at), piece(at + bytes as u64)]
    }
}

pub(crate) fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The bytes that a block of a name and group has.
pub(crate) fn bytes_of(group: u16, name: u64, bytes: usize) -> Vec<u8> {
    let mut state = name.wrapping_mul(2) + 1 + u64::from(group) * 0x1_0000_0001;
    (0..bytes.div_ceil(8)).flat_map(|_| random(&mut state).to_le_bytes()).take(bytes).collect()
}

/// A good hash of a number.
pub(crate) fn hash(name: u64) -> BlockHash {
    let mut state = name;
    let (high, low) = (random(&mut state), random(&mut state));
    BlockHash::from_u128(u128::from(high) << 64 | u128::from(low))
}

/// A tier that tests look at while a worker has it.
#[derive(Debug)]
pub(crate) struct Seen<T>(pub(crate) Arc<Mutex<T>>);

impl<T: LowerTier> LowerTier for Seen<T> {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        self.0.lock().unwrap().store(blocks);
    }
    fn load(&mut self, blocks: Vec<BlockSink>) {
        self.0.lock().unwrap().load(blocks);
    }
    fn forget(&mut self, blocks: &[(GroupId, BlockHash)]) {
        self.0.lock().unwrap().forget(blocks);
    }
    fn clear(&mut self) {
        self.0.lock().unwrap().clear();
    }
    fn poll(&mut self, dropped: &mut Vec<(GroupId, BlockHash)>) {
        self.0.lock().unwrap().poll(dropped);
    }
    fn survivors(&mut self, found: &mut Vec<(GroupId, BlockHash)>) {
        self.0.lock().unwrap().survivors(found);
    }
}

/// A worker with one tier, and what it knows of it.
pub(crate) struct Worker {
    pub(crate) host: Arc<Host>,
    pub(crate) transfers: TierTransfers,
    tickets: u64,
    open: BTreeMap<TicketId, (Direction, u16, Vec<u64>)>,
    /// Tickets of loads that began when these blocks were gone: what is forgotten later may have come before.
    barred: BTreeMap<TicketId, BTreeSet<(u16, u64)>>,
    /// Blocks that the tier has said that it has, and nothing else since.
    pub(crate) has: BTreeSet<(u16, u64)>,
    /// Blocks that it must not give: forgotten, and not stored since.
    pub(crate) gone: BTreeSet<(u16, u64)>,
    /// Loads that came right, and those that did not, by reason.
    pub(crate) loaded: u64,
    pub(crate) missed: Vec<BlockFault>,
    names: BTreeMap<BlockHash, u64>,
    /// Blocks of open stores that have made room again.
    early: BTreeSet<(u16, u64)>,
    polls: u64,
}

impl Worker {
    pub(crate) fn new(tier: impl LowerTier + 'static, block_bytes: usize) -> Self {
        Self::of_format(tier, block_bytes, 7)
    }

    pub(crate) fn of_format(
        tier: impl LowerTier + 'static,
        block_bytes: usize,
        format: u64,
    ) -> Self {
        let host = Arc::new(Host::new(block_bytes));
        let transfers = TierTransfers::new(vec![Box::new(tier)], format);
        let names = (0..NAMES).map(|name| (hash(name), name)).collect();
        Self {
            host,
            transfers,
            tickets: 0,
            open: BTreeMap::new(),
            barred: BTreeMap::new(),
            has: BTreeSet::new(),
            gone: BTreeSet::new(),
            loaded: 0,
            missed: Vec::new(),
            names,
            early: BTreeSet::new(),
            polls: 0,
        }
    }

    fn begin(&mut self, direction: Direction, group: u16, names: &[u64], change: &dyn Fn(usize)) {
        self.tickets += 1;
        let ticket = TicketId(self.tickets);
        let busy = |name: &u64| {
            self.open.values().any(|(_, of, open)| *of == group && open.contains(name))
        };
        let names: Vec<u64> = names.iter().copied().filter(|name| !busy(name)).collect();
        let blocks = names
            .iter()
            .map(|&name| (hash(name), BlockId::new(place_of(group, name) as u32).unwrap()))
            .collect();
        for &name in &names {
            let at = place_of(group, name) * self.host.block_bytes;
            let bytes = match direction {
                Direction::Store => bytes_of(group, name, self.host.block_bytes),
                Direction::Load => vec![0xee; self.host.block_bytes],
            };
            self.host.put(at, &bytes);
            change(at);
        }
        let transfer =
            Transfer { ticket, tier: Tier::Third, group: GroupId(group), direction, blocks };
        let host: Arc<dyn HostBlocks> = self.host.clone();
        let gone = names.iter().map(|&name| (group, name)).filter(|of| self.gone.contains(of));
        self.barred.insert(ticket, gone.collect());
        if direction == Direction::Store {
            // What is there under the name is replaced.
            self.has.retain(|(of, name)| *of != group || !names.contains(name));
        }
        self.open.insert(ticket, (direction, group, names));
        self.transfers.begin(&transfer, &host).unwrap();
    }

    pub(crate) fn store(&mut self, group: u16, names: &[u64]) {
        self.begin(Direction::Store, group, names, &|_| ());
    }

    /// Stores a block whose bytes are changed before, by a function of their place in host memory.
    pub(crate) fn store_as(&mut self, group: u16, name: u64, change: &dyn Fn(usize)) {
        self.begin(Direction::Store, group, &[name], change);
    }

    pub(crate) fn load(&mut self, group: u16, names: &[u64]) {
        self.begin(Direction::Load, group, names, &|_| ());
    }

    pub(crate) fn forget(&mut self, group: u16, names: &[u64]) {
        let forgets: Vec<_> = names
            .iter()
            .map(|&name| Forget::Block(Tier::Third, GroupId(group), hash(name)))
            .collect();
        self.transfers.forget(&forgets);
        for &name in names {
            self.has.remove(&(group, name));
            // A store that is open may end yet.
            self.gone.insert((group, name));
        }
    }

    /// Takes all memory back, and forgets the tickets; tickets are numbered from 1 again.
    pub(crate) fn fence(&mut self) {
        self.transfers.fence();
        self.open.clear();
        self.barred.clear();
        self.tickets = 0;
    }

    pub(crate) fn clear(&mut self) {
        self.transfers.forget(&[Forget::All(Tier::Third)]);
        self.gone.append(&mut self.has);
    }

    /// Lets the tier work, and compares what it has brought.
    pub(crate) fn poll(&mut self) -> usize {
        let (mut settled, mut dropped) = (Vec::new(), Vec::new());
        self.transfers.poll(WorkerId(0), &mut settled, &mut dropped);
        for Dropped { blocks, .. } in dropped {
            for (group, name) in blocks {
                let block = (group.0, self.names[&name]);
                self.has.remove(&block);
                // What is being stored may have been there, and have made room.
                let stores = self.open.values().filter(|(direction, of, names)| {
                    *direction == Direction::Store && *of == block.0 && names.contains(&block.1)
                });
                if stores.count() > 0 {
                    self.early.insert(block);
                }
            }
        }
        for Settled { ticket, wrong, .. } in settled {
            let (direction, group, names) = self.open.remove(&ticket).unwrap();
            let barred = self.barred.remove(&ticket).unwrap();
            for (at, name) in (0..).zip(names) {
                let fault = wrong.iter().find(|(of, _)| *of == at).map(|(_, fault)| *fault);
                self.take(direction, (group, name), fault, &barred);
            }
        }
        self.open.len()
    }

    fn take(
        &mut self,
        direction: Direction,
        block: (u16, u64),
        fault: Option<BlockFault>,
        barred: &BTreeSet<(u16, u64)>,
    ) {
        let (group, name) = block;
        match (direction, fault) {
            (Direction::Store, None) => {
                self.gone.remove(&block);
                if !self.early.remove(&block) {
                    self.has.insert(block);
                }
            }
            (Direction::Store, Some(_)) => {
                self.early.remove(&block);
                self.has.remove(&block);
            }
            (Direction::Load, None) => {
                let at = place_of(group, name) * self.host.block_bytes;
                let mut bytes = vec![0; self.host.block_bytes];
                self.host.get(at, &mut bytes);
                assert!(bytes == bytes_of(group, name, bytes.len()), "wrong bytes for {block:?}");
                assert!(!barred.contains(&block), "{block:?} was forgotten, and loaded");
                self.loaded += 1;
            }
            (Direction::Load, Some(fault)) => self.missed.push(fault),
        }
    }

    /// Stores blocks, to their end.
    pub(crate) fn keep(&mut self, group: u16, names: &[u64]) {
        self.store(group, names);
        self.settle();
    }

    /// Lets the tier work until all tickets have ended.
    pub(crate) fn settle(&mut self) {
        let since = std::time::Instant::now();
        while self.poll() > 0 {
            assert!(since.elapsed().as_secs() < 60, "open: {:?}", self.open);
            // Threads of the tier work meanwhile; a tier without threads does so in `poll`.
            self.polls += 1;
            if self.polls > 50 {
                std::thread::park_timeout(std::time::Duration::from_micros(100));
            }
        }
        self.polls = 0;
    }

    /// Loads one block; whether it came.
    pub(crate) fn loads(&mut self, group: u16, name: u64) -> bool {
        let before = self.loaded;
        self.load(group, &[name]);
        self.settle();
        self.loaded > before
    }

    pub(crate) fn survivors<T: LowerTier>(&self, tier: &Mutex<T>) -> BTreeSet<(u16, u64)> {
        let mut found = Vec::new();
        tier.lock().unwrap().survivors(&mut found);
        found.into_iter().map(|(group, name)| (group.0, self.names[&name])).collect()
    }
}

pub(crate) fn number_of(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().map_or(default, |value| value.parse().unwrap())
}

/// Waits until a tier's thread has counted what it has told before.
pub(crate) fn counted(watch: &DiskWatch, right: impl Fn(&DiskStats) -> bool) -> DiskStats {
    let since = std::time::Instant::now();
    loop {
        let stats = watch.stats();
        if right(&stats) || since.elapsed().as_secs() > 20 {
            return stats;
        }
        std::thread::park_timeout(std::time::Duration::from_micros(100));
    }
}
