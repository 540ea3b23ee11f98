//! The files below a GPU's host memory, without their bytes: which blocks they have, and how long reads and writes take.

use std::collections::{BTreeMap, HashMap, VecDeque};

use kv_plane::GroupId;
use kv_plane::manager::{CompletionError, Dropped, Forget, Manager, Settled, StepPlan, WorkerId};
use kv_plane::tier::{BlockFault, Direction, Transfer};
use kv_pool::{BlockHash, Tier};

use crate::plan::rules::Rules;

/// The only worker, and the only group of layers.
const WORKER: WorkerId = WorkerId(0);
const GROUP: GroupId = GroupId(0);

/// Transfers one way, one behind the other: when each ends, and what is said of it then.
type Lane = VecDeque<(u64, Settled)>;

/// Blocks in files, of which the one that was stored or loaded longest ago makes room.
#[derive(Debug)]
pub(super) struct Disk {
    slots: usize,
    /// By which number in `order` each block is.
    kept: HashMap<BlockHash, u64>,
    order: BTreeMap<u64, BlockHash>,
    next: u64,
    reads: Lane,
    writes: Lane,
    dropped: Vec<(GroupId, BlockHash)>,
}

impl Disk {
    /// Files with room for so many blocks, at least one.
    pub(super) fn new(slots: u64) -> Self {
        Self {
            slots: usize::try_from(slots).unwrap_or(usize::MAX),
            kept: HashMap::new(),
            order: BTreeMap::new(),
            next: 0,
            reads: Lane::new(),
            writes: Lane::new(),
            dropped: Vec::new(),
        }
    }

    /// When the next transfer ends.
    pub(super) fn ends_ns(&self) -> Option<u64> {
        [&self.reads, &self.writes].into_iter().flat_map(Lane::front).map(|(ends, _)| *ends).min()
    }

    /// Begins what a plan asks for.
    pub(super) fn begin(&mut self, plan: &StepPlan, rules: &Rules, now_ns: u64) {
        for forget in &plan.forgets {
            match *forget {
                Forget::Block(_, _, name) => self.forget(name),
                Forget::All(_) => (self.kept, self.order) = Default::default(),
            }
        }
        for transfer in &plan.transfers {
            let (lane, wrong) = match transfer.direction {
                Direction::Store => (&self.writes, Vec::new()),
                Direction::Load => (&self.reads, self.missing(transfer)),
            };
            let begins_ns = lane.back().map_or(0, |(ends, _)| *ends).max(now_ns);
            let blocks = transfer.blocks.len() - wrong.len();
            let ends_ns = begins_ns.saturating_add(rules.disk_ns(blocks as u64));
            for &(name, _) in &transfer.blocks {
                if transfer.direction == Direction::Store || self.kept.contains_key(&name) {
                    self.keep(name);
                }
            }
            let settled = Settled { worker: WORKER, ticket: transfer.ticket, wrong };
            match transfer.direction {
                Direction::Store => self.writes.push_back((ends_ns, settled)),
                Direction::Load => self.reads.push_back((ends_ns, settled)),
            }
        }
    }

    /// Tells a manager what has ended by now, and what had to make room.
    pub(super) fn tell(
        &mut self,
        manager: &mut Manager,
        now_ns: u64,
    ) -> Result<(), CompletionError> {
        for lane in [&mut self.reads, &mut self.writes] {
            while let Some((_, settled)) = lane.pop_front_if(|(ends_ns, _)| *ends_ns <= now_ns) {
                manager.settle(&settled)?;
            }
        }
        let blocks = std::mem::take(&mut self.dropped);
        match blocks.is_empty() {
            true => Ok(()),
            false => manager.dropped(&Dropped { worker: WORKER, tier: Tier::Third, blocks }),
        }
    }

    fn missing(&self, transfer: &Transfer) -> Vec<(u32, BlockFault)> {
        let blocks = (0..).zip(&transfer.blocks);
        let missing = blocks.filter(|(_, (name, _))| !self.kept.contains_key(name));
        missing.map(|(at, _)| (at, BlockFault::Missing)).collect()
    }

    fn forget(&mut self, name: BlockHash) {
        if let Some(at) = self.kept.remove(&name) {
            self.order.remove(&at);
        }
    }

    /// Keeps a block, or notes that it was used.
    fn keep(&mut self, name: BlockHash) {
        self.forget(name);
        if self.kept.len() >= self.slots
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.kept.remove(&oldest);
            self.dropped.push((GROUP, oldest));
        }
        self.kept.insert(name, self.next);
        self.order.insert(self.next, name);
        self.next += 1;
    }
}
