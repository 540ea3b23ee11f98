//! Scattered blocks from one device to another.

use cuda_driver::guard;
use cuda_driver::{Device, DeviceSpan, Stream};
use kv_kernels::BlockPair;
use kv_kernels::error::Side;
use kv_kernels::raw::{RawBlockCopy, RawBlockSide, RawBlockUnits};

use super::held::Fences;
use super::mover::{Interrupted, MovePath, check_apart, check_device};
use super::table::{PLANES_MAX, WrittenTable};
use super::{BlockPairs, Move, MoveError, MoveFailed, MoveOrder, Mover, Route};

/// How blocks lie in each of their planes.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct BlockGrid {
    /// Blocks of a plane.
    pub blocks: u32,
    /// From block to block, in bytes.
    pub block_stride: u64,
    /// From row to row of a block, in bytes. Not used where blocks move as one row.
    pub row_stride: u64,
}

/// Blocks in the memory of one device. Each plane (one layer's keys, or values) is a range that holds all blocks. A
/// move holds the keeper of the memory until it has completed.
#[derive(Debug)]
pub struct BlockMemory<K> {
    device: Device,
    planes: Vec<DeviceSpan>,
    grid: BlockGrid,
    /// Ordinals of the devices that a mapping names; none for `cuMemAlloc` memory.
    mapped_for: Option<Vec<i32>>,
    keeper: K,
}

impl<K> BlockMemory<K> {
    /// Blocks in `cuMemAlloc` memory of `device`.
    ///
    /// # Errors
    /// [`MoveError::PlaneTooShort`], [`MoveError::PlaneCount`] for none or more than 1,024,
    /// [`MoveError::Zero`] for blocks of no bytes, or [`MoveError::TooMany`] for 2^31 blocks or more.
    pub fn new(
        device: &Device,
        planes: Vec<DeviceSpan>,
        grid: BlockGrid,
        keeper: K,
    ) -> Result<Self, MoveError> {
        if planes.is_empty() || planes.len() > PLANES_MAX {
            return Err(MoveError::PlaneCount { planes: planes.len(), most: PLANES_MAX });
        }
        let BlockGrid { blocks, block_stride, .. } = grid;
        // Blocks of no bytes would all be one, and as many as an id counts.
        if block_stride == 0 {
            return Err(MoveError::Zero { what: "bytes from block to block" });
        }
        // Ids are signed where kernels read them.
        if i32::try_from(blocks).is_err() {
            let (count, most) = (blocks.into(), i32::MAX as u64);
            return Err(MoveError::TooMany { what: "blocks of a plane", count, most });
        }
        let needed = u64::from(blocks).checked_mul(block_stride);
        for (plane, span) in planes.iter().enumerate() {
            if needed.is_none_or(|needed| span.bytes() < needed) {
                let bytes = span.bytes();
                return Err(MoveError::PlaneTooShort { plane, bytes, blocks, block_stride });
            }
        }
        Ok(Self { device: device.clone(), planes, grid, mapped_for: None, keeper })
    }

    /// The planes are mapped memory, with access for the devices of these ordinals. A named device without access
    /// is lost by the move.
    #[must_use]
    pub fn mapped_for(mut self, ordinals: &[i32]) -> Self {
        self.mapped_for = Some(ordinals.to_vec());
        self
    }

    /// Whether kernels of `device` reach the planes, given that it has access to the memory's own.
    fn reached_by(&self, device: &Device) -> bool {
        self.mapped_for.as_ref().is_none_or(|ordinals| ordinals.contains(&device.ordinal()))
    }

    /// Refuses rows that leave their block.
    fn check_rows(&self, what: &BlockMove<'_>, offset: u64) -> Result<(), MoveError> {
        let BlockMove { rows, row_bytes, .. } = *what;
        let BlockGrid { block_stride, row_stride, .. } = self.grid;
        let end = u64::from(rows.saturating_sub(1))
            .checked_mul(row_stride)
            .and_then(|last| last.checked_add(offset))
            .and_then(|last| last.checked_add(row_bytes));
        let apart = rows <= 1 || row_bytes <= row_stride;
        if apart && end.is_some_and(|end| end <= block_stride) {
            return Ok(());
        }
        Err(MoveError::Rows { rows, row_bytes, offset, row_stride, block_stride })
    }

    /// Refuses planes that share bytes: of what is written there, one would be left.
    fn check_planes_apart(&self) -> Result<(), MoveError> {
        let BlockGrid { blocks, block_stride, .. } = self.grid;
        // No overflow: every plane is as long.
        let bytes = u64::from(blocks) * block_stride;
        let mut starts: Vec<_> =
            self.planes.iter().map(|plane| plane.address()).zip(0usize..).collect();
        starts.sort_unstable();
        let meet = |two: &&[(u64, usize)]| two[1].0 - two[0].0 < bytes;
        starts.windows(2).find(meet).map_or(Ok(()), |two| {
            let (first, second) = (two[0].1, two[1].1);
            Err(MoveError::PlanesOverlap { first, second, bytes })
        })
    }

    /// First addresses of what moves in each plane.
    fn addresses(&self, offset: u64) -> Vec<u64> {
        self.planes.iter().map(|plane| plane.address() + offset).collect()
    }
}

/// The part of each block that moves: `rows` rows of `row_bytes` bytes, from an offset in the block on either side. A
/// whole block is one row. Some heads of a block are a row for each token.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct BlockMove<'a> {
    /// Which block goes where, in every plane.
    pub pairs: BlockPairs<'a>,
    /// Rows of a block.
    pub rows: u32,
    /// Bytes of a row that move.
    pub row_bytes: u64,
    /// Where the first row begins in a block of the source.
    pub source_offset: u64,
    /// Likewise of the destination.
    pub destination_offset: u64,
}

impl<'a> BlockMove<'a> {
    /// Whole blocks of `block_bytes` bytes.
    #[must_use]
    pub const fn whole(pairs: BlockPairs<'a>, block_bytes: u64) -> Self {
        Self { pairs, rows: 1, row_bytes: block_bytes, source_offset: 0, destination_offset: 0 }
    }

    /// Bytes of one block in one plane.
    fn item_bytes(&self) -> Option<u64> {
        self.row_bytes.checked_mul(u64::from(self.rows))
    }
}

/// A checked move: plain numbers, good for any of its launches.
struct LaunchPlan {
    lane: MovePath,
    from_planes: Vec<u64>,
    to_planes: Vec<u64>,
    from: BlockGrid,
    to: BlockGrid,
    rows: u32,
    row_bytes: u64,
    item_bytes: u64,
    /// Bytes that a thread moves at once.
    vector_bytes: u64,
}

impl Mover {
    /// Moves scattered blocks, in one launch where their pairs fit one table
    /// ([`MoverConfig::table_pairs`](super::MoverConfig::table_pairs)).
    ///
    /// From device to device, one kernel reads and writes. Through the host, a kernel of the source fills the pinned
    /// chunks and one of the destination drains them.
    ///
    /// # Ordering
    /// As [`move_tensor`](Mover::move_tensor).
    ///
    /// # Errors
    /// [`MoveFailed`] with both ends, and with what is wrong with the blocks;
    /// [`MoveError::Busy`] when earlier moves still use all tables; what the driver answers.
    #[track_caller]
    pub fn move_blocks<S: Send, D: Send>(
        &mut self,
        source: BlockMemory<S>,
        destination: BlockMemory<D>,
        what: &BlockMove<'_>,
        order: MoveOrder<'_>,
    ) -> Result<Move<S, D>, MoveFailed<S, D>> {
        let _site = cuda_driver::site::enter();
        self.parking.sweep_oldest();
        let enqueued = self
            .plan(&source, &destination, what, order)
            .map_err(Interrupted::from)
            .and_then(|plan| self.enqueue(&plan, what.pairs.as_slice(), order));
        self.conclude(enqueued, source.keeper, destination.keeper)
    }

    fn plan<S, D>(
        &self,
        source: &BlockMemory<S>,
        destination: &BlockMemory<D>,
        what: &BlockMove<'_>,
        order: MoveOrder<'_>,
    ) -> Result<LaunchPlan, MoveError> {
        self.check_order(order)?;
        check_device("source", &self.from, &source.device)?;
        check_device("destination", &self.to, &destination.device)?;
        let (source_planes, destination_planes) = (source.planes.len(), destination.planes.len());
        if source_planes != destination_planes {
            return Err(MoveError::Planes { source_planes, destination_planes });
        }
        if self.from.shares_context(&self.to) {
            for &from in &source.planes {
                destination.planes.iter().try_for_each(|&to| check_apart(from, to))?;
            }
        }
        guard!("multigpu.planes-apart", destination.check_planes_apart()?);
        source.check_rows(what, what.source_offset)?;
        destination.check_rows(what, what.destination_offset)?;
        what.pairs.check_within(source.grid.blocks.into(), destination.grid.blocks.into())?;
        let lane = self.lane(source, destination)?;
        let from_planes = source.addresses(what.source_offset);
        let to_planes = destination.addresses(what.destination_offset);
        let strides = [source.grid, destination.grid]
            .into_iter()
            .fold(what.row_bytes, |bits, grid| bits | grid.block_stride | row_bits(what, grid));
        let bits = from_planes.iter().chain(&to_planes).fold(strides, |bits, at| bits | at);
        let vector_bytes = 1 << bits.trailing_zeros().min(4);
        let most = RawBlockCopy::BATCHED_VECTORS_MAX * vector_bytes;
        let most = match &self.ring {
            Some(ring) => most.min(ring.chunk_bytes()),
            None => most,
        };
        let bytes = what.item_bytes().unwrap_or(u64::MAX);
        if bytes > most {
            return Err(MoveError::BlockTooLarge { bytes, most });
        }
        Ok(LaunchPlan {
            lane,
            from_planes,
            to_planes,
            from: source.grid,
            to: destination.grid,
            rows: what.rows,
            row_bytes: what.row_bytes,
            item_bytes: bytes,
            vector_bytes,
        })
    }

    /// Which streams carry the move.
    fn lane<S, D>(
        &self,
        source: &BlockMemory<S>,
        destination: &BlockMemory<D>,
    ) -> Result<MovePath, MoveError> {
        let (reader, lane) = match self.route {
            Route::Host => return Ok(MovePath::Ring),
            Route::Push => (destination.reached_by(&self.from), MovePath::Push),
            Route::Pull => (source.reached_by(&self.to), MovePath::Order),
        };
        if reader {
            return Ok(lane);
        }
        let (what, device) = match self.route {
            Route::Push => ("destination", &self.from),
            _ => ("source", &self.to),
        };
        Err(MoveError::NotMapped { what, device: device.ordinal() })
    }

    fn enqueue(
        &mut self,
        plan: &LaunchPlan,
        pairs: &[BlockPair],
        order: MoveOrder<'_>,
    ) -> Result<Fences, Interrupted> {
        if pairs.is_empty() || plan.item_bytes == 0 {
            return Ok(Fences::default());
        }
        let tables = self.tables.free_for(pairs.len())?;
        let most = self.tables.pairs();
        let enqueued = self.ordered(order, plan.lane, |mover, started| {
            for (&table, pairs) in tables.iter().zip(pairs.chunks(most)) {
                let planes = [&plan.from_planes[..], &plan.to_planes[..]];
                let written = mover.tables.write(table, planes, pairs)?;
                *started = true;
                mover.launch(plan, &written, pairs.len(), order.on)?;
            }
            Ok(())
        });
        let readers = match &enqueued {
            Ok(fences) => fences,
            Err(interrupted) => &interrupted.fences,
        };
        guard!("multigpu.tables-in-use", self.tables.read_by(&tables, readers));
        enqueued
    }

    /// Enqueues the launches of one table.
    fn launch(
        &mut self,
        plan: &LaunchPlan,
        table: &WrittenTable,
        pairs: usize,
        on: &Stream,
    ) -> Result<(), MoveError> {
        let (blocks, planes) = (self.config.kernel_blocks, plan.from_planes.len() as u64);
        let Some([near, far]) = &self.kernels else {
            return Err(MoveError::TooManyPairs { pairs, most: 0 });
        };
        let items_max = RawBlockCopy::ITEMS_MAX * plan.vector_bytes / plan.item_bytes;
        // SAFETY of the launches below: the rows of both sides lie in their planes, which are device
        // memory: `plan` has checked ids, rows and lengths, which are those of the launch. A dense side
        // is a chunk, and a part of the move has as many blocks as it holds. The host reads and writes no
        // chunk. The table is written once nothing reads it, and is kept until `read_by`'s readers are
        // over. `plan` has found a vector that divides every address, stride and length; chunks are page
        // aligned.
        let Some(ring) = self.ring.as_mut().filter(|_| plan.lane == MovePath::Ring) else {
            let (kernels, stream) =
                if plan.lane == MovePath::Push { (near, &self.push) } else { (far, on) };
            for part in LaunchPart::of([planes, pairs as u64], items_max) {
                // SAFETY: see above.
                unsafe { kernels.launch(stream, &plan.raw(table, part, None, blocks)) }?;
            }
            return Ok(());
        };
        let items_max = items_max.min(ring.chunk_bytes() / plan.item_bytes);
        for part in LaunchPart::of([planes, pairs as u64], items_max) {
            ring.pass(
                |chunk| {
                    let to = Some((Side::Destination, chunk.memory.device_address()));
                    // SAFETY: see above.
                    Ok(unsafe { near.launch(chunk.down, &plan.raw(table, part, to, blocks)) }?)
                },
                |chunk| {
                    let from = Some((Side::Source, chunk.memory.device_address()));
                    // SAFETY: see above.
                    Ok(unsafe { far.launch(chunk.up, &plan.raw(table, part, from, blocks)) }?)
                },
            )?;
        }
        Ok(())
    }
}

/// The share of one launch: some planes of some pairs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct LaunchPart {
    first_plane: u64,
    planes: u64,
    first_pair: u64,
    pairs: u64,
}

impl LaunchPart {
    /// All planes of all pairs, in parts of at most `items_max` blocks of a plane. Of two ways to cut, the one with
    /// fewer parts.
    fn of([planes, pairs]: [u64; 2], items_max: u64) -> impl Iterator<Item = Self> {
        let items_max = items_max.max(1);
        let (most_pairs, most_planes) = (pairs.min(items_max), planes.min(items_max));
        let by_pairs = (planes.min(items_max / most_pairs.max(1)), most_pairs);
        let by_planes = (most_planes, pairs.min(items_max / most_planes.max(1)));
        let parts = |(of_planes, of_pairs): (u64, u64)| {
            planes.div_ceil(of_planes.max(1)) * pairs.div_ceil(of_pairs.max(1))
        };
        let (of_planes, of_pairs) =
            if parts(by_planes) < parts(by_pairs) { by_planes } else { by_pairs };
        let (of_planes, of_pairs) = (of_planes.max(1), of_pairs.max(1));
        (0..planes.div_ceil(of_planes)).flat_map(move |plane| {
            (0..pairs.div_ceil(of_pairs)).map(move |pair| Self {
                first_plane: plane * of_planes,
                planes: of_planes.min(planes - plane * of_planes),
                first_pair: pair * of_pairs,
                pairs: of_pairs.min(pairs - pair * of_pairs),
            })
        })
    }
}

impl LaunchPlan {
    /// One launch. The blocks of a `dense` side follow each other from that address on, in the order of planes and
    /// then of pairs.
    fn raw(
        &self,
        table: &WrittenTable,
        part: LaunchPart,
        dense: Option<(Side, u64)>,
        blocks: u32,
    ) -> RawBlockCopy {
        const WORD: u64 = size_of::<u64>() as u64;
        let side = |which, planes, grid: BlockGrid| match dense {
            Some((side, base)) if side == which => RawBlockSide {
                base,
                plane_ptrs: 0,
                plane_stride: self.item_bytes * part.pairs,
                block_stride: self.item_bytes,
                token_stride: self.row_bytes,
                segment_stride: 0,
                num_blocks: part.pairs,
            },
            _ => RawBlockSide {
                base: 0,
                plane_ptrs: planes + part.first_plane * WORD,
                plane_stride: 0,
                block_stride: grid.block_stride,
                token_stride: grid.row_stride,
                segment_stride: 0,
                num_blocks: grid.blocks.into(),
            },
        };
        RawBlockCopy {
            from: side(Side::Source, table.from_planes, self.from),
            to: side(Side::Destination, table.to_planes, self.to),
            units: RawBlockUnits {
                planes: part.planes,
                tokens: self.rows.into(),
                segments: 1,
                unit_vectors: self.row_bytes / self.vector_bytes,
            },
            pairs: table.pairs + part.first_pair * size_of::<BlockPair>() as u64,
            items: part.planes * part.pairs * (self.item_bytes / self.vector_bytes),
            by_place: dense.map(|(side, _)| side),
            first_pair: part.first_pair,
            vector_bytes: self.vector_bytes,
            report: 0,
            grid: blocks,
            threads: RawBlockCopy::BATCHED_THREADS_MAX,
            batched: true,
        }
    }
}

/// The rows' stride, as far as it counts for alignment: 0 where there is one row.
fn row_bits(what: &BlockMove<'_>, grid: BlockGrid) -> u64 {
    if what.rows > 1 { grid.row_stride } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every plane of every pair is in one part, and no part is too large.
    #[test]
    fn parts_have_every_block_once_and_few_are_needed() {
        for planes in [1, 2, 7, 64] {
            for pairs in [1, 3, 5, 100] {
                for most in [1, 2, 9, 64, 1000, u64::MAX] {
                    let mut times = vec![0; (planes * pairs) as usize];
                    let mut count = 0;
                    for part in LaunchPart::of([planes, pairs], most) {
                        assert!(part.planes * part.pairs <= most, "{part:?} {most}");
                        count += 1;
                        for plane in part.first_plane..part.first_plane + part.planes {
                            for pair in part.first_pair..part.first_pair + part.pairs {
                                times[(plane * pairs + pair) as usize] += 1;
                            }
                        }
                    }
                    assert!(times.iter().all(|&times| times == 1), "{planes} {pairs} {most}");
                    let least = (planes * pairs).div_ceil(most);
                    assert!(count <= 4 * least, "{planes} {pairs} {most}: {count} of {least}");
                }
            }
        }
    }
}
