//! The device work of an iteration: fill, store, read, and copy the checksums back.

use cuda_driver::{DeviceBuffer, DeviceSpan, HostAllocFlags, PinnedBuffer};
use kv_cache::{BatchStep, KvCacheOptions, Part};
use kv_kernels::{
    Direction,
    chunks::{Chunk, ChunkMapping, ChunkTransfer, LaunchLimits},
    verify::{ChecksumArgs, FillPattern},
};
use kv_stage::error::BatchError;

use super::RunError;
use super::batch::{Batch, Launch, Rejected};
use super::expected::Oracle;
use crate::config::RunConfig;

/// One device's buffers, all allocated before the first iteration.
#[derive(Debug)]
struct Buffers {
    /// The tokens of an iteration, as a model's forward pass would leave them.
    chunk: DeviceBuffer,
    /// A checksum for each entry of the largest block table.
    checksums: DeviceBuffer,
    /// Buffers for arriving checksums: one for each step that may be in flight, and one to compare.
    arrivals: Vec<PinnedBuffer>,
}

/// The arrays of an iteration besides the batch, by their place.
const SLOTS: usize = 0;
const KEYS: usize = 1;
/// What is read of each sequence, where that is not all that was staged.
const LENGTHS: usize = 2;
/// How many tokens of each sequence are right, as the sampler finds.
const ACCEPTED: usize = 3;

/// Bytes of each of these arrays.
pub(super) fn arrays(config: &RunConfig) -> Vec<u64> {
    let (tokens, sequences) = (u64::from(config.step_tokens), u64::from(config.max_batch));
    vec![tokens * 8, tokens * 8, sequences * 4, sequences * 4]
}

/// The engine's kernels and copies.
#[derive(Debug)]
pub(super) struct DeviceWork {
    buffers: Vec<Buffers>,
    /// Which part of the model the first device holds.
    first_part: usize,
    /// Entries of a row of the checksums.
    width: usize,
    /// Keys for the device of one part, kept to avoid allocation.
    keys: Vec<u64>,
}

impl DeviceWork {
    /// Allocates the buffers for the devices of `parts`, of which the first holds part `first_part` of the
    /// model.
    pub(super) fn new(
        parts: &[Part],
        options: &KvCacheOptions,
        first_part: usize,
    ) -> Result<Self, RunError> {
        let chunk_tokens = u64::from(options.step_tokens_max);
        let entries = u64::from(options.sequences_max) * u64::from(options.blocks_per_sequence_max);
        let arrivals = options.overlap_depth + 1;
        let buffers = |part: &Part| -> Result<Buffers, RunError> {
            let device = part.device();
            let refused = |what, bytes| move |source| RunError::Buffers { what, bytes, source };
            let chunk_bytes = chunk_tokens
                .checked_mul(part.shape().token_bytes())
                .ok_or(RunError::ChunkOverflow { tokens: chunk_tokens })?;
            let chunk = DeviceBuffer::alloc(device, chunk_bytes)
                .map_err(refused("the tokens of an iteration (--step-tokens)", chunk_bytes))?;
            let sums_bytes = entries * 8;
            let no_sums = refused("a checksum for each block of --max-batch requests", sums_bytes);
            let pinned = |_| PinnedBuffer::alloc(device, sums_bytes, HostAllocFlags::CACHED);
            Ok(Buffers {
                chunk,
                checksums: DeviceBuffer::alloc(device, sums_bytes).map_err(no_sums)?,
                arrivals: (0..arrivals).map(pinned).collect::<Result<_, _>>().map_err(no_sums)?,
            })
        };
        let buffers = parts.iter().map(buffers).collect::<Result<_, _>>()?;
        let width = options.blocks_per_sequence_max as usize;
        Ok(Self { buffers, first_part, width, keys: Vec::new() })
    }

    /// Adds the arrays of an iteration to what is staged for a device.
    pub(super) fn add_arrays(
        &mut self,
        part: usize,
        batch: &Batch,
        step: &mut BatchStep<'_>,
    ) -> Result<(), BatchError> {
        let part = self.first_part + part;
        self.keys.clear();
        self.keys.extend(batch.keys.iter().map(|&key| Oracle::key_on(part, key)));
        step.array(KEYS, &self.keys)?;
        if batch.is_unplaced() {
            step.array(ACCEPTED, &batch.accepted)?;
            step.array(LENGTHS, &batch.lengths)
        } else {
            step.array(SLOTS, &batch.slots)
        }
    }

    /// Enqueues an iteration that was staged: writes the batch's tokens, and then, if `read`, reads all
    /// of its sequences, but for rejected drafts.
    pub(super) fn enqueue(
        &self,
        parts: &[Part],
        step: u64,
        batch: &Batch,
        read: bool,
    ) -> Result<(), RunError> {
        for (part, buffers) in parts.iter().zip(&self.buffers) {
            let enqueued = part.device().while_current(|| {
                for &launch in batch.launches() {
                    write(part, buffers, launch, batch)?;
                }
                sample(part, batch)?;
                match read {
                    true => checksum(part, buffers, batch, self.width, arrival(buffers, step)),
                    false => Ok(()),
                }
            });
            enqueued??;
        }
        Ok(())
    }

    /// Copies out the checksums of a completed step of so many sequences, row by row.
    pub(super) fn arrived(
        &self,
        part: usize,
        step: u64,
        sequences: usize,
        checksums: &mut Vec<u64>,
    ) -> Result<(), RunError> {
        checksums.resize(sequences * self.width, 0);
        let bytes = bytemuck::cast_slice_mut(checksums);
        let buffers = &self.buffers[part];
        buffers.arrivals[arrival(buffers, step)]
            .read_at(0, bytes)
            .map_err(cuda_driver::CopyError::from)?;
        Ok(())
    }
}

/// The arrival buffer of a step.
fn arrival(buffers: &Buffers, step: u64) -> usize {
    (step % buffers.arrivals.len() as u64) as usize
}

/// Fills one launch's part of the chunk and stores it.
fn write(part: &Part, buffers: &Buffers, launch: Launch, batch: &Batch) -> Result<(), RunError> {
    let Launch { first, tokens, skip } = launch;
    let (first_token, token_count) = (first as u64, tokens as u64);
    let token_bytes = part.shape().token_bytes();
    let bounds = cuda_driver::CopyError::from;
    let chunk = buffers.chunk.span();
    let chunk =
        chunk.slice(first_token * token_bytes, token_count * token_bytes).map_err(bounds)?;
    let here = |array: DeviceSpan| array.slice(first_token * 8, token_count * 8).map_err(bounds);
    let token_keys = here(part.batch().arrays[KEYS])?;
    let fill = FillPattern { chunk, token_keys, tokens: token_count };
    part.kernels().fill_pattern(part.compute(), part.shape(), fill)?;
    let (slots, host) = match batch.is_unplaced() {
        true => (part.batch().tables[0].slots, None),
        false => (part.batch().arrays[SLOTS], Some(&batch.slots[first..first + tokens])),
    };
    let chunk = Chunk {
        memory: chunk.into(),
        mapping: ChunkMapping::Slots { slots: here(slots)?.into(), host },
        tokens: token_count,
        skip_prefix_n_tokens: skip as u64,
    };
    let transfer = ChunkTransfer {
        chunks: &[chunk],
        layers: 0..part.shape().layers(),
        direction: Direction::ChunkToPaged,
        num_blocks: part.ready_blocks(),
        limits: LaunchLimits::default(),
        report: None,
    };
    part.kernels().transfer_chunks(part.compute(), part.paged(), &transfer)?;
    Ok(())
}

/// Says, as a sampler does, how many tokens of the sequences with rejected drafts are right.
fn sample(part: &Part, batch: &Batch) -> Result<(), RunError> {
    let bounds = cuda_driver::CopyError::from;
    for &Rejected { index, row } in &batch.rejected {
        let from = part.batch().arrays[ACCEPTED].slice(index as u64 * 4, 4).map_err(bounds)?;
        let to = part.batch().accepted.slice(row.index() as u64 * 4, 4).map_err(bounds)?;
        part.compute().copy_on_device(to, from)?;
    }
    Ok(())
}

/// Reads all staged sequences through the batch's block table, and copies the checksums to the host.
fn checksum(
    part: &Part,
    buffers: &Buffers,
    tokens: &Batch,
    width: usize,
    arrival: usize,
) -> Result<(), RunError> {
    let sequences = tokens.lengths.len();
    let entries = (sequences * width) as u64;
    let checksums =
        buffers.checksums.span().slice(0, entries * 8).map_err(cuda_driver::CopyError::from)?;
    let batch = part.batch();
    let args = ChecksumArgs {
        block_table: batch.tables[0].block_table,
        table_stride: width as u64,
        // Rejected drafts are not read.
        seq_lens: if tokens.is_unplaced() { batch.arrays[LENGTHS] } else { batch.lengths },
        sequences: sequences as u32,
        checksums,
        num_blocks: part.ready_blocks(),
    };
    part.kernels().paged_checksum(part.compute(), part.paged(), args)?;
    part.compute().copy_to_host(&buffers.arrivals[arrival], 0, checksums)?;
    Ok(())
}
