//! A worker's side of a tier: host memory whose blocks say whose they are, and tickets.

use kv_manager::{Dropped, Forget, Settled};
use kv_tier::Transfer;

use super::{FORMAT, pair, random};

use crate::prelude::*;

/// Of the blocks.
pub(crate) const BLOCK_BYTES: usize = 240;
/// Blocks of each of two groups: the blocks of even and of odd numbers.
const NAMES: u64 = 128;
/// Of the records.
pub(crate) const RECORD_BYTES: u64 = 64 + 8 + BLOCK_BYTES as u64;

#[derive(Debug)]
struct Host(Mutex<Vec<u8>>);

impl HostBlocks for Host {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        let from = block.index() * BLOCK_BYTES + offset;
        into.copy_from_slice(&self.0.lock().unwrap()[from..from + into.len()]);
        true
    }

    fn write(&self, block: BlockId, offset: usize, from: &[u8]) -> bool {
        let at = block.index() * BLOCK_BYTES + offset;
        self.0.lock().unwrap()[at..at + from.len()].copy_from_slice(from);
        true
    }
}

pub(crate) fn bytes_of(number: u64) -> Vec<u8> {
    let mut state = number * 31 + 5;
    (0..BLOCK_BYTES / 8).flat_map(|_| random(&mut state).to_le_bytes()).collect()
}

/// A worker with one tier.
pub(crate) struct Worker {
    host: Arc<Host>,
    format: u64,
    transfers: TierTransfers,
    tickets: u64,
    open: BTreeMap<TicketId, (Direction, Vec<u64>)>,
    numbers: BTreeMap<(GroupId, BlockHash), u64>,
    /// Blocks that were stored, of which the tier has said nothing else.
    pub(crate) stored: BTreeSet<u64>,
    /// Blocks that the tier has got otherwise.
    pub(crate) gained: BTreeSet<u64>,
    pub(crate) dropped: Vec<u64>,
    /// Loads that came right, and those that did not.
    pub(crate) loaded: Vec<u64>,
    pub(crate) missed: Vec<(u64, BlockFault)>,
}

impl Worker {
    pub(crate) fn new(tier: impl LowerTier + 'static, format: u64) -> Self {
        Self {
            host: Arc::new(Host(Mutex::new(vec![0; NAMES as usize * BLOCK_BYTES]))),
            format,
            transfers: TierTransfers::new(vec![Box::new(tier)], format),
            tickets: 0,
            open: BTreeMap::new(),
            numbers: (0..NAMES).map(|number| (pair(number), number)).collect(),
            stored: BTreeSet::new(),
            gained: BTreeSet::new(),
            dropped: Vec::new(),
            loaded: Vec::new(),
            missed: Vec::new(),
        }
    }

    /// The worker's own share of a block: workers of two formats have other bytes.
    fn bytes_of(&self, number: u64) -> Vec<u8> {
        bytes_of(number | (self.format ^ FORMAT) << 32)
    }

    fn begin(&mut self, direction: Direction, numbers: &[u64]) {
        for group in 0..2 {
            let numbers: Vec<u64> =
                numbers.iter().copied().filter(|number| number % 2 == group).collect();
            if numbers.is_empty() {
                continue;
            }
            for &number in &numbers {
                let at = number as usize * BLOCK_BYTES;
                let bytes = match direction {
                    Direction::Store => self.bytes_of(number),
                    Direction::Load => vec![0xee; BLOCK_BYTES],
                };
                self.host.0.lock().unwrap()[at..at + BLOCK_BYTES].copy_from_slice(&bytes);
            }
            self.tickets += 1;
            let ticket = TicketId(self.tickets);
            let blocks =
                numbers.iter().map(|&of| (pair(of).1, BlockId::new(of as u32).unwrap())).collect();
            let group = GroupId(group as u16);
            let transfer = Transfer { ticket, tier: Tier::Third, group, direction, blocks };
            self.open.insert(ticket, (direction, numbers));
            let host: Arc<dyn HostBlocks> = self.host.clone();
            self.transfers.begin(&transfer, &host).unwrap();
        }
    }

    pub(crate) fn store(&mut self, numbers: impl IntoIterator<Item = u64>) {
        let numbers: Vec<u64> = numbers.into_iter().collect();
        self.begin(Direction::Store, &numbers);
    }

    pub(crate) fn load(&mut self, numbers: impl IntoIterator<Item = u64>) {
        let numbers: Vec<u64> = numbers.into_iter().collect();
        self.begin(Direction::Load, &numbers);
    }

    pub(crate) fn forget(&mut self, numbers: impl IntoIterator<Item = u64>) {
        let forget = |number: u64| {
            let (group, name) = pair(number);
            Forget::Block(Tier::Third, group, name)
        };
        let forgets: Vec<_> = numbers.into_iter().map(forget).collect();
        self.transfers.forget(&forgets);
    }

    pub(crate) fn clear(&mut self) {
        self.transfers.forget(&[Forget::All(Tier::Third)]);
    }

    /// Lets the tier work, and compares every byte that it has brought; tickets that are open.
    pub(crate) fn poll(&mut self) -> usize {
        let (mut settled, mut dropped) = (Vec::new(), Vec::new());
        self.transfers.poll(WorkerId(0), &mut settled, &mut dropped);
        for Dropped { blocks, .. } in dropped {
            self.dropped.extend(blocks.iter().filter_map(|block| self.numbers.get(block)));
        }
        for gained in self.transfers.gained(WorkerId(0)) {
            self.gained.extend(gained.blocks.iter().filter_map(|block| self.numbers.get(block)));
        }
        for Settled { ticket, wrong, .. } in settled {
            let (direction, numbers) = self.open.remove(&ticket).unwrap();
            for (at, number) in (0..).zip(numbers) {
                let fault = wrong.iter().find(|(of, _)| *of == at).map(|(_, fault)| *fault);
                match (direction, fault) {
                    (Direction::Store, None) => drop(self.stored.insert(number)),
                    (Direction::Store, Some(_)) => drop(self.stored.remove(&number)),
                    (Direction::Load, None) => {
                        let from = number as usize * BLOCK_BYTES;
                        let bytes = self.host.0.lock().unwrap()[from..from + BLOCK_BYTES].to_vec();
                        assert!(bytes == self.bytes_of(number), "wrong bytes of {number}");
                        self.loaded.push(number);
                    }
                    (Direction::Load, Some(fault)) => self.missed.push((number, fault)),
                }
            }
        }
        self.open.len()
    }

    /// Stores blocks, to their end.
    pub(crate) fn keep(&mut self, numbers: impl IntoIterator<Item = u64>) {
        self.store(numbers);
        self.settle();
    }

    /// Lets the tier work until all tickets have ended.
    pub(crate) fn settle(&mut self) {
        super::until("all tickets have ended", || self.poll() == 0);
    }

    /// Loads blocks; those that came, in order.
    pub(crate) fn loads(&mut self, numbers: impl IntoIterator<Item = u64>) -> Vec<u64> {
        self.loaded.clear();
        self.load(numbers);
        self.settle();
        self.loaded.sort_unstable();
        std::mem::take(&mut self.loaded)
    }
}
