//! What a step of the engine enqueues on each device: tokens are written, and all KV of the step is read.

use std::sync::Arc;

use cuda_driver::{DeviceBuffer, HostAllocFlags, PinnedBuffer};
use kv_kernels::{
    BlockCopy, BlockPair, BlockPairs, Blocks, Direction, PagedKv, PagedLayout, Transfer,
    verify::{ChecksumArgs, Expected, FillPattern},
};
use kv_plane::{GroupId, KvCache, Part};
use kv_pool::{BlockId, Slot};

use super::{Failure, KEYS, Live, Load, PAIRS, SLOTS};

/// What one step reads, and what it should be.
#[derive(Debug)]
pub(crate) struct Check {
    pub(super) number: u64,
    /// The results that the step writes.
    pub(super) ring: usize,
    pub(super) width: usize,
    /// Keys of each sequence, in the order of the step.
    pub(super) keys: Vec<Vec<u64>>,
    /// The loads that each sequence read before they had ended.
    pub(super) loads: Vec<Option<Arc<Load>>>,
}

/// What a step computes of one sequence.
pub(super) struct Fill {
    pub(super) keys: Vec<u64>,
    pub(super) slots: Vec<Slot>,
    /// Of the first tokens, how many are cached. The chunk has junk in their place.
    pub(super) skip: u64,
    /// The keys of all tokens that the sequence has after it.
    pub(super) read: Vec<u64>,
}

impl Fill {
    pub(super) fn new(cache: &KvCache, live: &Live) -> Self {
        let computed = live.sequence.upper();
        let end = computed + u64::from(live.sequence.next());
        // A first step computes a chunk from the start of the prompt, as an engine does that loads
        // whole chunks.
        let start = if live.started { computed } else { 0 };
        let skip = computed - start;
        let mut all = live.prompt.clone();
        all.tokens.extend(&live.drafts);
        let mut read = all.keys();
        read.truncate(end as usize);
        let mut keys = read[start as usize..].to_vec();
        keys[..skip as usize].fill(0xBAD);
        let mut slots = Vec::new();
        cache.manager().slot_mapping(GroupId(0), &live.sequence, start..end, &mut slots).unwrap();
        Self { keys, slots, skip, read }
    }
}

/// The buffers of one part.
#[derive(Debug)]
pub(super) struct Workspace {
    block_tokens: usize,
    pub(super) chunk: DeviceBuffer,
    expected: Expected,
    sums: DeviceBuffer,
    /// Where rows lie in pieces, which the kernel that sums does not read.
    scratch: Option<Scratch>,
    /// What was read: one for each step that may be in flight.
    results: Vec<PinnedBuffer>,
}

/// A place for each entry of the block table, where the blocks of a step are copied to, and a table of the
/// places.
#[derive(Debug)]
struct Scratch {
    paged: PagedKv,
    table: DeviceBuffer,
    _memory: DeviceBuffer,
}

impl Scratch {
    fn new(part: &Part, entries: u32) -> Self {
        let (stream, shape) = (part.compute(), *part.shape());
        let bytes = u64::from(entries) * shape.block_bytes();
        let memory = DeviceBuffer::alloc(part.device(), bytes).unwrap();
        let layout = PagedLayout::block_major(&shape);
        let paged = PagedKv::new(stream, shape, layout, memory.span(), entries.into()).unwrap();
        let table = DeviceBuffer::alloc(part.device(), u64::from(entries) * 4).unwrap();
        let places: Vec<u8> = (0..entries).flat_map(u32::to_ne_bytes).collect();
        stream.upload(table.span(), &places).unwrap();
        Self { paged, table, _memory: memory }
    }
}

impl Workspace {
    pub(super) fn new(part: &Part, cache: &KvCache) -> Self {
        let options = cache.options();
        let entries = options.sequences_max * options.groups[0].blocks_per_sequence_max;
        let columns = u64::from(options.groups[0].blocks_per_sequence_max);
        let tokens = columns * u64::from(options.groups[0].shape.block_tokens());
        let (device, bytes) = (part.device(), u64::from(entries) * 8);
        let result = |_| PinnedBuffer::alloc(device, bytes, HostAllocFlags::CACHED).unwrap();
        let is_whole = part.paged().layout().has_whole_rows();
        Self {
            block_tokens: options.groups[0].shape.block_tokens() as usize,
            chunk: DeviceBuffer::alloc(device, tokens * part.shape().token_bytes()).unwrap(),
            expected: Expected::new(part.shape()).unwrap(),
            sums: DeviceBuffer::alloc(device, bytes).unwrap(),
            scratch: (!is_whole).then(|| Scratch::new(part, entries)),
            results: (0..=options.overlap_depth).map(result).collect(),
        }
    }

    /// Blocks read, and those of them that did not hold what they should.
    pub(super) fn check(&self, check: &Check) -> (u64, u64) {
        let result = &self.results[check.ring];
        check.count(self.block_tokens, |entry, keys| {
            let mut sum = [0; 8];
            result.read_at(entry * 8, &mut sum).unwrap();
            self.expected.checksum(keys) == Some(u64::from_ne_bytes(sum))
        })
    }
}

/// The blocks of all sequences of a step, each with its entry of the table.
pub(super) fn pairs(lives: &[&mut Live], width: usize) -> Vec<BlockPair> {
    let of_row = |(row, live): (usize, &&mut Live)| {
        let ids = (0..width).map_while(|column| live.sequence.block(GroupId(0), column));
        let entries = ids.zip(row * width..);
        let pair = |(id, entry): (BlockId, usize)| BlockPair {
            source: id,
            destination: BlockId::new(entry as u32).unwrap(),
        };
        entries.map(pair).collect::<Vec<_>>()
    };
    lives.iter().enumerate().flat_map(of_row).collect()
}

impl Check {
    /// Whether it is known of all loads what became of them, as far as anybody asks still.
    pub(super) fn is_decided(&self) -> bool {
        let mut loads = self.loads.iter().flatten();
        loads.all(|load| load.get().is_some() || Arc::strong_count(load) == 1)
    }

    /// Asks whether each block is right, by its entry of the table and the keys of its tokens. Blocks, and
    /// those that are not.
    fn count(&self, block_tokens: usize, right: impl Fn(u64, &[u64]) -> bool) -> (u64, u64) {
        let (mut verified, mut corrupt) = (0, 0);
        for (row, (keys, load)) in self.keys.iter().zip(&self.loads).enumerate() {
            if load.as_ref().is_some_and(|load| load.get() != Some(&true)) {
                // What it has read is void.
                continue;
            }
            for (column, keys) in keys.chunks(block_tokens).enumerate() {
                verified += 1;
                corrupt += u64::from(!right((row * self.width + column) as u64, keys));
            }
        }
        (verified, corrupt)
    }
}

/// Writes what the fills hold into the cache.
pub(super) fn compute(part: &Part, workspace: &Workspace, fills: &[Fill]) -> Result<(), Failure> {
    let (keys, slots) = (part.batch().arrays[KEYS], part.batch().arrays[SLOTS]);
    let mut offset = 0;
    for fill in fills {
        let tokens = fill.keys.len() as u64;
        let chunk = workspace.chunk.span().slice(0, tokens * part.shape().token_bytes())?;
        let token_keys = keys.slice(offset, tokens * 8)?;
        let slot_mapping = slots.slice(offset, tokens * 8)?;
        offset += tokens * 8;
        let pattern = FillPattern { chunk, token_keys, tokens };
        part.kernels().fill_pattern(part.compute(), part.shape(), pattern)?;
        let transfer = Transfer {
            chunk,
            slot_mapping,
            host_slots: &fill.slots,
            tokens,
            skip_prefix_n_tokens: fill.skip,
            direction: Direction::ChunkToPaged,
            num_blocks: part.ready_blocks(),
        };
        part.kernels().multi_layer_transfer(part.compute(), part.paged(), transfer)?;
    }
    Ok(())
}

/// Reads all sequences of the step, whose blocks are those of `pairs`, and sends what was read to the host.
pub(super) fn attend(
    part: &Part,
    workspace: &Workspace,
    (sequences, width): (usize, usize),
    pairs: &[BlockPair],
    ring: usize,
) -> Result<(), Failure> {
    let (stream, entries) = (part.compute(), (sequences * width) as u64);
    let (mut paged, mut num_blocks) = (part.paged(), part.ready_blocks());
    let mut block_table = part.batch().tables[0].block_table;
    if let Some(scratch) = &workspace.scratch {
        let copy = BlockCopy {
            from: Blocks::Device(paged),
            to: Blocks::Device(&scratch.paged),
            pairs: part.batch().arrays[PAIRS].slice(0, pairs.len() as u64 * 8)?.into(),
            count: pairs.len() as u64,
            host_pairs: Some(BlockPairs::new(pairs)?),
            from_blocks: num_blocks,
            to_blocks: scratch.paged.blocks(),
            report: None,
            multiprocessors: None,
        };
        part.kernels().copy_blocks(stream, copy)?;
        (paged, num_blocks) = (&scratch.paged, scratch.paged.blocks());
        block_table = scratch.table.span();
    }
    let checksums = workspace.sums.span().slice(0, entries * 8)?;
    let checksum = ChecksumArgs {
        block_table,
        table_stride: width as u64,
        seq_lens: part.batch().lengths,
        sequences: sequences as u32,
        checksums,
        num_blocks,
    };
    part.kernels().paged_checksum(stream, paged, checksum)?;
    Ok(stream.copy_to_host(&workspace.results[ring], 0, checksums)?)
}
