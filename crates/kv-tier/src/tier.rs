//! The trait of a tier, and the host memory that it copies from and to.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use kv_pool::{BlockHash, BlockId, GroupId};

use crate::{BlockSink, BlockSource};

/// A worker's blocks in host memory, each with the worker's share of the block's bytes.
pub trait HostBlocks: fmt::Debug + Send + Sync {
    /// Bytes of a block.
    fn block_bytes(&self) -> usize;

    /// Bytes of a section of a block, which is checked alone when it arrives: a layer, where steps are to begin before
    /// the last layer has come. The last section may be shorter.
    fn section_bytes(&self) -> usize {
        self.block_bytes()
    }

    /// Copies the bytes of a block from `offset` on into `into`. False, and nothing is copied, if there are
    /// none.
    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool;

    /// Copies `from` into a block, from `offset` on. False, and nothing is copied, if there is no such
    /// room.
    fn write(&self, block: BlockId, offset: usize, from: &[u8]) -> bool;

    /// The memory of a block, piece after piece, for tiers that [borrow](crate::LentBlock) it. Empty if it is not lent.
    fn pieces(&self, _block: BlockId) -> Vec<HostPiece> {
        Vec::new()
    }
}

/// A part of a block's memory. A tier that knows the type of the memory reads and writes it by what that type offers; to all
/// others it says nothing.
#[derive(Clone, Debug)]
pub struct HostPiece {
    /// What the bytes lie in. It lives as long as this.
    pub memory: Arc<dyn Any + Send + Sync>,
    /// The first byte there.
    pub offset: u64,
    /// Bytes.
    pub bytes: usize,
}

/// A tier under host memory. It keeps copies of blocks, found by name and [group](BlockSource::group), and owns
/// its space.
///
/// No call waits. A tier does its work in threads of its own, in [`poll`](Self::poll), or in the call if that
/// is quick; [`Background`](crate::Background) runs any tier in a thread.
///
/// # Ordering
/// Loads and stores of different batches may end in any order. A worker never loads a name while it stores it, and
/// never stores a name twice at a time. After [`forget`](Self::forget), a store that began before may still
/// end; the manager then asks to forget its blocks again. What has made room for a store is told by a
/// [`poll`](Self::poll) that begins after the store has ended, if not before; [`Background`](crate::Background) may
/// tell it a moment later.
pub trait LowerTier: fmt::Debug + Send {
    /// Says of which [format](crate::RecordKey::format) the records of all blocks are, once and before a block is stored, loaded or
    /// forgotten: for tiers that workers of several formats share. A tier around another one passes it on.
    fn set_format(&mut self, _format: u64) {}

    /// Stores blocks. What is there under their names is replaced.
    fn store(&mut self, blocks: Vec<BlockSource>);

    /// Loads blocks. One that is not there [fails](BlockSink::failed) as [`BlockFault::Missing`](crate::BlockFault::Missing).
    fn load(&mut self, blocks: Vec<BlockSink>);

    /// Removes blocks, each by its group and name.
    fn forget(&mut self, blocks: &[(GroupId, BlockHash)]);

    /// Removes everything that was stored before.
    fn clear(&mut self);

    /// Lets the tier work, and appends the blocks that it has dropped by itself since the last call, to make room or
    /// because they were lost.
    fn poll(&mut self, dropped: &mut Vec<(GroupId, BlockHash)>);

    /// Appends the blocks that the tier has had since before it was made, such as those in files of an earlier process.
    /// It is asked once, before everything else. They may turn out to be missing when they are loaded.
    fn survivors(&mut self, _found: &mut Vec<(GroupId, BlockHash)>) {}

    /// Appends blocks that have come to the tier since the last call otherwise than by [`store`](Self::store), such as those
    /// that other hosts have stored. They may turn out to be missing when they are loaded.
    fn gained(&mut self, _found: &mut Vec<(GroupId, BlockHash)>) {}
}
