//! What a step of the engine enqueues on each device: tokens are written, and all KV of the step is read.

use std::collections::BTreeSet;
use std::sync::Arc;

use cuda_driver::{DeviceBuffer, HostAllocFlags, PinnedBuffer};
use kv_cache::{KvCache, Part};
use kv_kernels::{
    Direction, Transfer,
    verify::{ChecksumArgs, Expected, FillPattern},
};

use super::tensors::{Places, Tensors};
use super::{Failure, Fill, KEYS, Live, Load, SLOTS};

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

/// The buffers of one part.
#[derive(Debug)]
pub(super) struct Workspace {
    block_tokens: usize,
    pub(super) chunk: DeviceBuffer,
    reader: Reader,
    /// What was read: one for each step that may be in flight.
    results: Vec<PinnedBuffer>,
}

/// How all KV of the sequences is read.
#[derive(Debug)]
enum Reader {
    /// A kernel sums each block.
    Sums { expected: Expected, sums: DeviceBuffer },
    /// The blocks of the step are copied, each piece to its place in the tensors, and the block table behind
    /// them.
    Copy { places: Places, memory: Vec<DeviceBuffer> },
}

impl Workspace {
    pub(super) fn summing(part: &Part, cache: &KvCache) -> Self {
        let options = cache.options();
        let bytes =
            u64::from(options.sequences_max) * u64::from(options.blocks_per_sequence_max) * 8;
        let expected = Expected::new(part.shape()).unwrap();
        let sums = DeviceBuffer::alloc(part.device(), bytes).unwrap();
        Self::new(part, cache, bytes, Reader::Sums { expected, sums })
    }

    /// A workspace of a cache over its own tensors.
    pub(super) fn over(cache: &KvCache, tensors: Tensors, memory: Vec<DeviceBuffer>) -> Self {
        let [part] = cache.parts() else { panic!("tensors of one device") };
        let options = cache.options();
        let entries = options.sequences_max * options.blocks_per_sequence_max;
        let places = tensors.places();
        let bytes = places.bytes + u64::from(entries) * 4;
        Self::new(part, cache, bytes, Reader::Copy { places, memory })
    }

    fn new(part: &Part, cache: &KvCache, result_bytes: u64, reader: Reader) -> Self {
        let options = cache.options();
        let columns = u64::from(options.blocks_per_sequence_max);
        let tokens = columns * u64::from(options.shape.block_tokens());
        let device = part.device();
        let result = |_| PinnedBuffer::alloc(device, result_bytes, HostAllocFlags::CACHED).unwrap();
        Self {
            block_tokens: options.shape.block_tokens() as usize,
            chunk: DeviceBuffer::alloc(device, tokens * part.shape().token_bytes()).unwrap(),
            reader,
            results: (0..=options.overlap_depth).map(result).collect(),
        }
    }

    /// Blocks read, and those of them that did not hold what they should.
    pub(super) fn check(&self, check: &Check) -> (u64, u64) {
        let result = &self.results[check.ring];
        match &self.reader {
            Reader::Sums { expected, .. } => check.count(self.block_tokens, |entry, keys| {
                let mut sum = [0; 8];
                result.read_at(entry * 8, &mut sum).unwrap();
                expected.checksum(keys) == Some(u64::from_ne_bytes(sum))
            }),
            Reader::Copy { places, .. } => {
                let mut copied = vec![0; result.bytes() as usize];
                result.read_at(0, &mut copied).unwrap();
                let (bytes, table) = copied.split_at(places.bytes as usize);
                let block_tokens = self.block_tokens;
                check.count(block_tokens, |entry, keys| {
                    let entry = entry as usize * 4;
                    let block = i32::from_ne_bytes(table[entry..entry + 4].try_into().unwrap());
                    let block = u64::try_from(block).unwrap();
                    keys.iter()
                        .enumerate()
                        .all(|(token, &key)| places.hold(bytes, (block, token), key))
                })
            }
        }
    }
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

/// Reads all sequences of the step and sends what was read to the host.
pub(super) fn attend(
    part: &Part,
    workspace: &Workspace,
    lives: &[&mut Live],
    width: usize,
    ring: usize,
) -> Result<(), Failure> {
    let (result, entries) = (&workspace.results[ring], (lives.len() * width) as u64);
    match &workspace.reader {
        Reader::Sums { sums, .. } => {
            let checksums = sums.span().slice(0, entries * 8)?;
            let checksum = ChecksumArgs {
                block_table: part.batch().tables[0].block_table,
                table_stride: width as u64,
                seq_lens: part.batch().lengths,
                sequences: lives.len() as u32,
                checksums,
                num_blocks: part.ready_blocks(),
            };
            part.kernels().paged_checksum(part.compute(), part.paged(), checksum)?;
            part.compute().copy_to_host(result, 0, checksums)?;
        }
        Reader::Copy { places, memory } => {
            // Others may be on their way from the host or to it: only blocks of the step hold still.
            let blocks = lives.iter().flat_map(|live| {
                (0..width).map_while(|index| live.sequence.block(index)).map(|id| id.index() as u64)
            });
            for block in blocks.collect::<BTreeSet<_>>() {
                for (place, piece) in places.pieces(memory, block) {
                    part.compute().copy_to_host(result, place, piece)?;
                }
            }
            let table = part.batch().tables[0].block_table.slice(0, entries * 4)?;
            part.compute().copy_to_host(result, places.bytes, table)?;
        }
    }
    Ok(())
}
