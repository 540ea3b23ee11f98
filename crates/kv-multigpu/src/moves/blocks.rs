//! Scattered blocks from one device to another.

use cuda_driver::{Device, DeviceSpan, Stream};

use super::held::Pendings;
use super::kernel::{ELEMENTS_MAX, Job, Side, WORD_BYTES};
use super::mover::{Interrupted, Lane, check_apart, check_device, is_same_device};
use super::table::{PLANES_MAX, Written};
use super::{Move, MoveError, MoveFailed, MoveOrder, Mover, Route};

/// Which block goes where.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct BlockPair {
    /// Id in the source.
    pub from: u32,
    /// Id in the destination.
    pub to: u32,
}

/// How blocks lie in each of their planes.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct BlockGrid {
    /// Blocks of a plane.
    pub blocks: u32,
    /// From block to block, in bytes.
    pub block_stride: u64,
    /// From row to row of a block, in bytes; not used where blocks move as one row.
    pub row_stride: u64,
}

/// Blocks in the memory of one device: for each plane (one layer's keys, or values) a range that holds
/// all blocks. What keeps the memory is held by the moves that it is given to.
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
    /// [`MoveError::PlaneTooShort`], [`MoveError::Planes`] for none or more than 1,024, or
    /// [`MoveError::Zero`] for blocks of no bytes.
    pub fn new(
        device: &Device,
        planes: Vec<DeviceSpan>,
        grid: BlockGrid,
        keeper: K,
    ) -> Result<Self, MoveError> {
        if planes.is_empty() || planes.len() > PLANES_MAX {
            let planes = planes.len();
            return Err(MoveError::Planes { source_planes: planes, destination_planes: planes });
        }
        let BlockGrid { blocks, block_stride, .. } = grid;
        // Blocks of no bytes would all be one, and as many as an id counts.
        if block_stride == 0 {
            return Err(MoveError::Zero { what: "bytes from block to block" });
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

    /// Says that the planes are mapped memory, with access for the devices of these ordinals. Naming
    /// one that has none is an error on that device.
    #[must_use]
    pub fn mapped_for(mut self, ordinals: &[i32]) -> Self {
        self.mapped_for = Some(ordinals.to_vec());
        self
    }

    /// The keeper.
    #[must_use]
    pub fn into_keeper(self) -> K {
        self.keeper
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

    /// First addresses of what moves in each plane.
    fn addresses(&self, offset: u64) -> Vec<u64> {
        self.planes.iter().map(|plane| plane.address() + offset).collect()
    }
}

/// What moves of each block: `rows` rows of `row_bytes` bytes, from an offset in the block on either
/// side. Part of a block, for instance some of its heads, moves as rows.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct BlockMove<'a> {
    /// Which block goes where, in every plane. No destination is there twice.
    pub pairs: &'a [BlockPair],
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
    pub const fn whole(pairs: &'a [BlockPair], block_bytes: u64) -> Self {
        Self { pairs, rows: 1, row_bytes: block_bytes, source_offset: 0, destination_offset: 0 }
    }

    /// Bytes of one block in one plane.
    fn item_bytes(&self) -> Option<u64> {
        self.row_bytes.checked_mul(u64::from(self.rows))
    }
}

/// A checked move: plain numbers, good for any of its launches.
struct Plan {
    lane: Lane,
    from_planes: Vec<u64>,
    to_planes: Vec<u64>,
    from: BlockGrid,
    to: BlockGrid,
    rows: u32,
    row_bytes: u64,
    item_bytes: u64,
    wide: bool,
}

impl Mover {
    /// Moves scattered blocks, in one launch where their pairs fit one table
    /// ([`MoverConfig::table_pairs`](super::MoverConfig::table_pairs)).
    ///
    /// The way from device to device is a kernel that reads on one and writes on the other; through the
    /// host, kernels of either side fill and drain the pinned chunks.
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
            .and_then(|plan| self.enqueue(&plan, what.pairs, order));
        self.conclude(enqueued, source.keeper, destination.keeper)
    }

    fn plan<S, D>(
        &mut self,
        source: &BlockMemory<S>,
        destination: &BlockMemory<D>,
        what: &BlockMove<'_>,
        order: MoveOrder<'_>,
    ) -> Result<Plan, MoveError> {
        self.check_order(order)?;
        check_device("source", &self.from, &source.device)?;
        check_device("destination", &self.to, &destination.device)?;
        let (source_planes, destination_planes) = (source.planes.len(), destination.planes.len());
        if source_planes != destination_planes {
            return Err(MoveError::Planes { source_planes, destination_planes });
        }
        if is_same_device(&self.from, &self.to) {
            for &from in &source.planes {
                destination.planes.iter().try_for_each(|&to| check_apart(from, to))?;
            }
        }
        source.check_rows(what, what.source_offset)?;
        destination.check_rows(what, what.destination_offset)?;
        self.check_pairs(what.pairs, source.grid.blocks, destination.grid.blocks)?;
        let lane = self.lane(source, destination)?;
        let from_planes = source.addresses(what.source_offset);
        let to_planes = destination.addresses(what.destination_offset);
        let strides = [source.grid, destination.grid]
            .into_iter()
            .fold(what.row_bytes, |bits, grid| bits | grid.block_stride | row_bits(what, grid));
        let bits = from_planes.iter().chain(&to_planes).fold(strides, |bits, at| bits | at);
        let wide = bits.is_multiple_of(WORD_BYTES);
        let most = ELEMENTS_MAX * if wide { WORD_BYTES } else { 1 };
        let most = match &self.ring {
            Some(ring) => most.min(ring.chunk_bytes()),
            None => most,
        };
        let bytes = what.item_bytes().unwrap_or(u64::MAX);
        if bytes > most {
            return Err(MoveError::BlockTooLarge { bytes, most });
        }
        Ok(Plan {
            lane,
            from_planes,
            to_planes,
            from: source.grid,
            to: destination.grid,
            rows: what.rows,
            row_bytes: what.row_bytes,
            item_bytes: bytes,
            wide,
        })
    }

    /// Which streams carry the move.
    fn lane<S, D>(
        &self,
        source: &BlockMemory<S>,
        destination: &BlockMemory<D>,
    ) -> Result<Lane, MoveError> {
        let (reader, lane) = match self.route {
            Route::Host => return Ok(Lane::Ring),
            Route::Push => (destination.reached_by(&self.from), Lane::Push),
            Route::Pull => (source.reached_by(&self.to), Lane::Order),
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

    fn check_pairs(
        &mut self,
        pairs: &[BlockPair],
        from_blocks: u32,
        to_blocks: u32,
    ) -> Result<(), MoveError> {
        self.written.clear();
        self.written.resize(to_blocks.div_ceil(64) as usize, 0);
        for &BlockPair { from, to } in pairs {
            if from >= from_blocks {
                let (block, blocks) = (from, from_blocks);
                return Err(MoveError::NoSuchBlock { side: "source", block, blocks });
            }
            if to >= to_blocks {
                let (block, blocks) = (to, to_blocks);
                return Err(MoveError::NoSuchBlock { side: "destination", block, blocks });
            }
            let (word, bit) = (&mut self.written[to as usize / 64], 1 << (to % 64));
            if *word & bit != 0 {
                return Err(MoveError::WrittenTwice { block: to });
            }
            *word |= bit;
        }
        Ok(())
    }

    fn enqueue(
        &mut self,
        plan: &Plan,
        pairs: &[BlockPair],
        order: MoveOrder<'_>,
    ) -> Result<Pendings, Interrupted> {
        if pairs.is_empty() || plan.item_bytes == 0 {
            return Ok(Pendings::new());
        }
        let tables = self.tables.free_for(pairs.len())?;
        let most = self.tables.pairs();
        let enqueued = self.ordered(order, plan.lane, |mover, started| {
            for (&table, pairs) in tables.iter().zip(pairs.chunks(most)) {
                let planes = [&plan.from_planes[..], &plan.to_planes[..]];
                let words = pairs.iter().map(|p| u64::from(p.from) | u64::from(p.to) << 32);
                let written = mover.tables.write(table, planes, words)?;
                *started = true;
                mover.launch(plan, &written, pairs.len(), order.on)?;
            }
            Ok(())
        });
        let readers = match &enqueued {
            Ok(pendings) => pendings,
            Err(interrupted) => &interrupted.pendings,
        };
        self.tables.read_by(&tables, readers);
        enqueued
    }

    /// Enqueues the launches of one table.
    fn launch(
        &mut self,
        plan: &Plan,
        table: &Written,
        pairs: usize,
        on: &Stream,
    ) -> Result<(), MoveError> {
        let items = (plan.from_planes.len() * pairs) as u64;
        let side = |planes, grid: BlockGrid| Side {
            planes,
            dense: 0,
            block_stride: grid.block_stride,
            row_stride: grid.row_stride,
        };
        let job = Job {
            from: side(table.from_planes, plan.from),
            to: side(table.to_planes, plan.to),
            pairs: table.pairs,
            first: 0,
            items,
            row_bytes: plan.row_bytes,
            rows: plan.rows,
            pair_count: pairs as u32,
        };
        let (blocks, wide) = (self.config.kernel_blocks, plan.wide);
        let Some([near, far]) = &self.kernels else {
            return Err(MoveError::TooManyPairs { pairs, most: 0 });
        };
        // SAFETY of the launches below: the rows of both sides lie in their planes, which are device
        // memory: `plan` has checked ids, rows and lengths, which are those of the job. Dense items
        // lie in a chunk: as many as it holds. The host reads and writes no chunk. The table is
        // written once nothing reads it, and is kept until `read_by`'s readers are over. `plan` has
        // checked the words of an item and their alignment; chunks are page aligned.
        let Some(ring) = self.ring.as_mut().filter(|_| plan.lane == Lane::Ring) else {
            let (kernel, stream) =
                if plan.lane == Lane::Push { (near, &self.push) } else { (far, on) };
            // SAFETY: see above.
            return Ok(unsafe { kernel.launch(stream, blocks, job, wide) }?);
        };
        let each = ring.chunk_bytes() / plan.item_bytes;
        let mut first = 0;
        while first < items {
            let part = Job { first, items: each.min(items - first), ..job };
            ring.pass(
                |chunk| {
                    let to = Side { dense: chunk.memory.device_address(), ..part.to };
                    // SAFETY: see above.
                    Ok(unsafe { near.launch(chunk.down, blocks, Job { to, ..part }, wide) }?)
                },
                |chunk| {
                    let from = Side { dense: chunk.memory.device_address(), ..part.from };
                    // SAFETY: see above.
                    Ok(unsafe { far.launch(chunk.up, blocks, Job { from, ..part }, wide) }?)
                },
            )?;
            first += part.items;
        }
        Ok(())
    }
}

/// What the rows' stride adds to the alignment: nothing where there is one row.
fn row_bits(what: &BlockMove<'_>, grid: BlockGrid) -> u64 {
    if what.rows > 1 { grid.row_stride } else { 0 }
}
