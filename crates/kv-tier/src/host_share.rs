//! Host blocks that readers outside of the engine read while the manager goes on: other hosts, by a transport of theirs.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kv_pool::{BlockHash, BlockId, BlockPool, GroupId, Loan, LoanId, Tier, guard};
use parking_lot::{Mutex, RwLock};

use crate::frame::Sections;
use crate::{BlockFault, HostBlocks, HostPiece, RecordKey};

/// The step of a block whose copy is in no plan yet.
pub const UNPLANNED: u64 = u64::MAX;

/// The host tier of a manager, for readers in other threads: `Manager::share_host` of `kv-manager`.
///
/// A reader [borrows](Self::lend) cached blocks by name. A borrowed block is neither evicted nor written, whatever the manager
/// claims meanwhile (H8 to H10), and is lent only when the copies that fill it are complete.
///
/// Blocks have addresses, from 0 on: group behind group, block behind block, each of its group's block bytes.
pub struct HostShare {
    groups: Vec<GroupShare>,
    /// The last complete step. No block is lent whose copy is of a later one.
    completed: AtomicU64,
    /// Set when a worker is lost: what memory holds is nobody's word any more.
    ended: AtomicBool,
    /// Of the blocks' records.
    format: u64,
}

/// What makes a [`HostShare`], for who knows what is copied to its blocks and says so: [`fill`](Self::fill), [`plan`](Self::plan),
/// [`complete`](Self::complete), [`end`](Self::end), [`set_memory`](Self::set_memory). No reader gets it: a block that was said to be
/// there too early, or elsewhere, would be lent with wrong bytes. Clones are of the same share.
#[derive(Clone, Debug)]
pub struct HostShareWriter(Arc<HostShare>);

/// What a [`HostShare`] is made of.
#[derive(Debug)]
pub struct ShareOptions {
    /// The host blocks of each group, in their order.
    pub groups: Vec<SharedGroup>,
    /// The format of the blocks' records: see [`record_format`](crate::record_format).
    pub format: u64,
    /// The last complete step.
    pub completed: u64,
    /// The last step whose plan was staged: it may copy to any block.
    pub staged: u64,
}

/// A group's blocks in host memory.
#[derive(Debug)]
pub struct SharedGroup {
    /// The pool that knows which block is where, and lends it.
    pub pool: BlockPool,
    /// Blocks, also where some of them have memory only later.
    pub blocks: u64,
    /// Their memory, in this process.
    pub memory: Arc<dyn HostBlocks>,
}

struct GroupShare {
    pool: BlockPool,
    block_bytes: usize,
    /// The address of the first block.
    first: u64,
    blocks: Vec<Written>,
    memory: RwLock<Arc<dyn HostBlocks>>,
    /// Headers that were asked for, each with the number of the write that it is of.
    headers: Mutex<Headers>,
}

type Headers = HashMap<BlockId, (u64, Arc<[u8]>)>;

/// How a host block came to what it holds.
#[derive(Debug, Default)]
struct Written {
    /// The last step whose plan copies to it.
    step: AtomicU64,
    /// Counts what it was filled with.
    number: AtomicU64,
}

/// A block of a [`HostLoan`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LentHostBlock {
    /// Its group.
    pub group: GroupId,
    /// Its name.
    pub name: BlockHash,
    /// Which block of the group's host memory it is.
    pub block: BlockId,
    /// Where it begins in the addresses of the [`HostShare`].
    pub address: u64,
    /// Its bytes.
    pub bytes: usize,
    /// The number of what the block was filled with. No two contents of a block have the same.
    pub write: u64,
}

/// What has happened in host memory, for those who tell others what is there.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum HostChange {
    /// Blocks are there from now on.
    Come(Vec<(GroupId, BlockHash)>),
    /// Blocks are there no more.
    Gone(Vec<(GroupId, BlockHash)>),
    /// Nothing is there of all that was.
    Cleared,
}

/// Host blocks that are lent to a reader. Dropping it gives them back.
#[must_use = "dropping it gives the blocks back"]
pub struct HostLoan {
    share: Arc<HostShare>,
    loans: Vec<(GroupId, LoanId)>,
    blocks: Vec<LentHostBlock>,
    /// Where each block begins and ends, in the order of the addresses.
    ranges: Vec<(u64, u64)>,
}

impl HostShareWriter {
    /// Shares the host blocks of groups.
    #[must_use]
    pub fn new(options: ShareOptions) -> Self {
        let ShareOptions { groups, format, completed, staged } = options;
        let mut end = 0;
        let groups = groups.into_iter().map(|SharedGroup { pool, blocks, memory }| {
            let (block_bytes, first) = (memory.block_bytes(), end);
            end = blocks.saturating_mul(block_bytes as u64).saturating_add(end);
            // What is on its way is of a plan that was staged, or of the next one.
            let written = || Written { step: staged.into(), number: 0.into() };
            GroupShare {
                pool,
                block_bytes,
                first,
                blocks: (0..blocks).map(|_| written()).collect(),
                memory: RwLock::new(memory),
                headers: Mutex::default(),
            }
        });
        let groups = groups.collect();
        let (completed, ended) = (completed.into(), AtomicBool::new(false));
        Self(Arc::new(HostShare { groups, completed, ended, format }))
    }

    /// What readers get.
    #[must_use]
    pub fn share(&self) -> &Arc<HostShare> {
        &self.0
    }

    /// Says, before anybody can find it there, that other content comes to a host block, by the plan of a step: [`UNPLANNED`] by that of
    /// the next one, and 0 if it is there.
    pub fn fill(&self, group: GroupId, block: BlockId, step: u64) {
        let Some(written) = self.0.written(group, block) else { return };
        // The pool's lock, which is taken behind this and by readers before they look, orders both.
        written.number.fetch_add(1, Ordering::Relaxed);
        written.step.store(step, Ordering::Release);
    }

    /// Says by which step's plan a host block is copied to.
    pub fn plan(&self, group: GroupId, block: BlockId, step: u64) {
        if let Some(written) = self.0.written(group, block) {
            written.step.store(step, Ordering::Release);
        }
    }

    /// Says that a step is complete: what it has failed to write is found no more.
    pub fn complete(&self, step: u64) {
        self.0.completed.store(step, Ordering::Release);
    }

    /// Ends the share: nothing is lent any more.
    pub fn end(&self) {
        self.0.ended.store(true, Ordering::Release);
    }

    /// Has a group's blocks read from this memory from now on: it was grown or shrunk. False, and nothing is changed, for another
    /// group or another length of blocks.
    pub fn set_memory(&self, group: GroupId, memory: Arc<dyn HostBlocks>) -> bool {
        let Some(of) = self.0.of(group).filter(|of| of.block_bytes == memory.block_bytes()) else {
            return false;
        };
        // What was there before may be the last handle of the caller's memory: it goes behind the lock.
        let _before = std::mem::replace(&mut *of.memory.write(), memory);
        true
    }
}

impl HostShare {
    fn of(&self, group: GroupId) -> Option<&GroupShare> {
        self.groups.get(usize::from(group.0))
    }

    fn written(&self, group: GroupId, block: BlockId) -> Option<&Written> {
        self.of(group)?.blocks.get(block.index())
    }

    /// The format of the records that [headers](HostLoan::header) of the blocks make.
    #[must_use]
    pub fn format(&self) -> u64 {
        self.format
    }

    /// Blocks of all groups.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.groups.iter().map(|group| group.blocks.len() as u64).sum()
    }

    /// Bytes of all blocks.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let bytes = |group: &GroupShare| group.blocks.len() as u64 * group.block_bytes as u64;
        self.groups.iter().map(bytes).sum()
    }

    /// Bytes of the largest block.
    #[must_use]
    pub fn block_bytes_max(&self) -> usize {
        self.groups.iter().map(|group| group.block_bytes).max().unwrap_or(0)
    }

    /// The memory of all blocks that have some by now, piece behind piece, each with the address of its first byte: for a transport that
    /// registers it. Pieces that are side by side in both are one.
    #[must_use]
    pub fn pieces(&self) -> Vec<(u64, HostPiece)> {
        let mut pieces = Vec::<(u64, HostPiece)>::new();
        for group in &self.groups {
            let memory = Arc::clone(&group.memory.read());
            let mut address = group.first;
            for block in (0..group.blocks.len() as u32).filter_map(BlockId::new) {
                let mut at = address;
                for piece in memory.pieces(block) {
                    let bytes = piece.bytes as u64;
                    let last = pieces.last_mut().filter(|(first, last)| {
                        first + last.bytes as u64 == at
                            && last.offset + last.bytes as u64 == piece.offset
                            && Arc::ptr_eq(&last.memory, &piece.memory)
                    });
                    match last {
                        Some((_, last)) => last.bytes += piece.bytes,
                        None => pieces.push((at, piece)),
                    }
                    at += bytes;
                }
                address += group.block_bytes as u64;
            }
        }
        pieces
    }

    /// Borrows the longest run of blocks that are cached in host memory, each by its group and name. None if the first is not there, or
    /// its copy is not complete, and once the share has ended.
    ///
    /// What is lent to readers cannot be evicted: bound how much that is, and how long.
    ///
    /// # Ordering
    /// From any thread, beside any call of the manager. What is read of the blocks while they are lent is what their names say.
    #[must_use]
    pub fn lend(self: &Arc<Self>, names: &[(GroupId, BlockHash)]) -> Option<HostLoan> {
        // Before the names are looked up: what a step has failed to write is withdrawn before the step counts as complete.
        let completed = self.completed.load(Ordering::Acquire);
        let (loans, blocks, ranges) = (Vec::new(), Vec::with_capacity(names.len()), Vec::new());
        let mut loan = HostLoan { share: Arc::clone(self), loans, blocks, ranges };
        for run in names.chunk_by(|one, next| one.0 == next.0) {
            let Some(&(group, _)) = run.first() else { break };
            let Some(of) = self.of(group) else { break };
            let hashes: Vec<_> = run.iter().map(|&(_, name)| name).collect();
            let Some((lent, writes)) = of.lend(&hashes, completed) else { break };
            loan.loans.push((group, lent.id));
            let blocks = lent.blocks.iter().zip(writes).zip(hashes);
            loan.blocks.extend(blocks.map(|((at, write), name)| LentHostBlock {
                group,
                name,
                block: at.id,
                address: of.first + at.id.index() as u64 * of.block_bytes as u64,
                bytes: of.block_bytes,
                write,
            }));
            if lent.blocks.len() < run.len() {
                break;
            }
        }
        let range = |of: &LentHostBlock| (of.address, of.address + of.bytes as u64);
        loan.ranges = loan.blocks.iter().map(range).collect();
        loan.ranges.sort_unstable();
        // Behind the lookups: what is lost is withdrawn behind this.
        let is_lent = !loan.blocks.is_empty() && !self.ended.load(Ordering::Acquire);
        is_lent.then_some(loan)
    }

    /// Copies bytes from an address on, also across blocks. False, and any bytes, if there are not as many. Nothing keeps them from
    /// changing but a loan of their blocks.
    #[must_use]
    pub fn read(&self, address: u64, into: &mut [u8]) -> bool {
        let (mut address, mut rest) = (address, into);
        while !rest.is_empty() {
            let Some((group, block, offset)) = self.place(address) else { return false };
            let count = rest.len().min(group.block_bytes - offset);
            let (now, later) = rest.split_at_mut(count);
            let memory = Arc::clone(&group.memory.read());
            if !memory.read(block, offset, now) {
                return false;
            }
            (address, rest) = (address + count as u64, later);
        }
        true
    }

    /// The block at an address, and where that is in the block.
    fn place(&self, address: u64) -> Option<(&GroupShare, BlockId, usize)> {
        let at = self.groups.partition_point(|group| group.first <= address).checked_sub(1)?;
        let group = self.groups.get(at)?;
        let (offset, bytes) = (address - group.first, group.block_bytes as u64);
        // Blocks without bytes are at no address.
        let block = usize::try_from(offset.checked_div(bytes)?).ok();
        let block = block.filter(|&at| at < group.blocks.len())?;
        Some((group, BlockId::new(block as u32)?, (offset % bytes) as usize))
    }
}

impl GroupShare {
    /// Borrows the first blocks that are there and whose copies are complete with this step, with the number of each one's write.
    fn lend(&self, names: &[BlockHash], completed: u64) -> Option<(Loan, Vec<u64>)> {
        let lend = |names| self.pool.lend(names, Tier::Secondary);
        let loan = lend(names)?;
        let written = loan.blocks.iter().map_while(|at| self.blocks.get(at.id.index()));
        let last = guard!("tier.lends-what-is-copied", completed, else UNPLANNED - 1);
        let is_whole = |of: &&Written| of.step.load(Ordering::Acquire) <= last;
        let writes = written.take_while(is_whole).map(|of| of.number.load(Ordering::Relaxed));
        let writes: Vec<_> = writes.collect();
        if writes.len() == loan.blocks.len() {
            return Some((loan, writes));
        }
        // No more than is lent is kept from the engine. The first loan keeps what the second one finds.
        let whole = names.get(..writes.len()).filter(|whole| !whole.is_empty()).and_then(lend);
        self.pool.end_loan(loan.id);
        Some((whole?, writes))
    }
}

impl HostLoan {
    /// A number that no other loan of this process has, of whatever pool.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.loans.first().map_or(0, |(_, loan)| loan.0)
    }

    /// The blocks, in the order in which they were asked for.
    #[must_use]
    pub fn blocks(&self) -> &[LentHostBlock] {
        &self.blocks
    }

    /// Bytes of all blocks.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks.iter().map(|of| of.bytes as u64).sum()
    }

    /// Where the lent block ends that an address is in; none if it is in none.
    #[must_use]
    pub fn covered(&self, address: u64) -> Option<u64> {
        let behind = self.ranges.partition_point(|(start, _)| *start <= address);
        let (_, end) = *self.ranges.get(behind.checked_sub(1)?)?;
        (end > address).then_some(end)
    }

    /// What stands before a block's bytes in its record, by its place among the [blocks](Self::blocks), as tiers below host memory keep it: with this header, the bytes are
    /// [told from others](crate::check_record). Reads the block, unless it was asked for before.
    ///
    /// # Errors
    /// [`BlockFault::Missing`] if there are not as many blocks, or the memory is not there.
    pub fn header(&self, at: usize) -> Result<Arc<[u8]>, BlockFault> {
        let block = self.blocks.get(at).ok_or(BlockFault::Missing)?;
        let group = self.share.of(block.group).ok_or(BlockFault::Missing)?;
        if let Some((write, header)) = group.headers.lock().get(&block.block)
            && guard!("tier.headers-are-of-one-write", *write == block.write, else true)
        {
            return Ok(Arc::clone(header));
        }
        let memory = Arc::clone(&group.memory.read());
        let sections = Sections::new(memory.block_bytes(), memory.section_bytes());
        let key = RecordKey { format: self.share.format, group: block.group, name: block.name };
        let header = key.header(sections, |offset, into| {
            memory.read(block.block, offset, into).then_some(()).ok_or(BlockFault::Missing)
        });
        let header: Arc<[u8]> = header?.into();
        group.headers.lock().insert(block.block, (block.write, Arc::clone(&header)));
        Ok(header)
    }
}

impl Drop for HostLoan {
    fn drop(&mut self) {
        for &(group, loan) in &self.loans {
            if let Some(group) = self.share.of(group) {
                // Nobody else ends it.
                group.pool.end_loan(loan);
            }
        }
    }
}

impl fmt::Debug for HostShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostShare").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl fmt::Debug for HostLoan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostLoan").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}
