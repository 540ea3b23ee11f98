//! The device work of an iteration: fill, store, read, and copy the checksums back.

use cuda_driver::{DeviceBuffer, HostAllocFlags, PinnedBuffer};
use kv_cache::{KvCache, OpenStep, Part, Sequence, StagedPart};
use kv_kernels::{
    Direction, Transfer,
    verify::{ChecksumArgs, FillPattern},
};
use kv_stage::PartId;

use super::RunError;
use super::batch::{Batch, Launch};
use super::expected::Oracle;

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

/// The arrays of one iteration, besides the block table.
struct Arrays {
    slots: PartId,
    keys: PartId,
    /// What is read of each sequence, where that is not all that was staged.
    lengths: Option<PartId>,
}

/// How much is read of each sequence.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lengths<'a> {
    /// All that was staged.
    Staged,
    /// Rejected drafts are left out.
    Right(&'a [u32]),
}

/// The engine's kernels and copies.
#[derive(Debug)]
pub(super) struct DeviceWork {
    buffers: Vec<Buffers>,
    /// Keys for the device of one part, kept to avoid allocation.
    keys: Vec<u64>,
}

/// The work enqueued for an iteration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Enqueued {
    /// Number of entries in a row of the checksums.
    pub(super) width: usize,
    /// Index of the arrival buffer that holds them.
    pub(super) arrival: usize,
}

impl DeviceWork {
    pub(super) fn new(cache: &KvCache, chunk_tokens: u64) -> Result<Self, RunError> {
        let options = cache.options();
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
        let buffers = cache.parts().iter().map(buffers).collect::<Result<_, _>>()?;
        Ok(Self { buffers, keys: Vec::new() })
    }

    /// Stages and enqueues one iteration: writes the batch's tokens, and then, if `read`, reads all
    /// of `readers` up to `lengths`.
    pub(super) fn enqueue(
        &mut self,
        cache: &mut KvCache,
        step: &OpenStep,
        batch: &Batch,
        readers: &mut [&mut Sequence],
        lengths: Lengths<'_>,
        read: bool,
    ) -> Result<Enqueued, RunError> {
        let keys = &mut self.keys;
        let staged = cache.stage(step, readers, |part, step| {
            keys.clear();
            keys.extend(batch.keys.iter().map(|&key| Oracle::key_on(part, key)));
            let lengths = match lengths {
                Lengths::Staged => None,
                Lengths::Right(lengths) => Some(step.array(lengths)?),
            };
            Ok(Arrays { slots: step.array(&batch.slots)?, keys: step.array(keys)?, lengths })
        })?;
        let arrival = (step.number() % self.buffers[0].arrivals.len() as u64) as usize;
        let mut width = 0;
        for ((part, staged), buffers) in cache.parts().iter().zip(&staged).zip(&self.buffers) {
            width = staged.width();
            let enqueued = part.device().while_current(|| {
                for &launch in batch.launches() {
                    write(part, staged, buffers, launch, &batch.slots)?;
                }
                match read && width > 0 {
                    true => checksum(part, staged, buffers, readers.len(), arrival),
                    false => Ok(()),
                }
            });
            enqueued??;
        }
        Ok(Enqueued { width, arrival })
    }

    /// Copies out the checksums of a completed step: `entries` of them.
    pub(super) fn arrived(
        &self,
        part: usize,
        arrival: usize,
        entries: usize,
        checksums: &mut Vec<u64>,
    ) -> Result<(), RunError> {
        checksums.resize(entries, 0);
        let bytes = bytemuck::cast_slice_mut(checksums);
        self.buffers[part].arrivals[arrival]
            .read_at(0, bytes)
            .map_err(cuda_driver::CopyError::from)?;
        Ok(())
    }
}

/// Fills one launch's part of the chunk and stores it.
fn write(
    part: &Part,
    staged: &StagedPart<Arrays>,
    buffers: &Buffers,
    launch: Launch,
    host_slots: &[i64],
) -> Result<(), RunError> {
    let Launch { first, tokens, skip } = launch;
    let (first_token, token_count) = (first as u64, tokens as u64);
    let token_bytes = part.shape().token_bytes();
    let bounds = cuda_driver::CopyError::from;
    let chunk = buffers.chunk.span();
    let chunk =
        chunk.slice(first_token * token_bytes, token_count * token_bytes).map_err(bounds)?;
    let array = |id| -> Result<_, RunError> {
        Ok(staged.span(id)?.slice(first_token * 8, token_count * 8).map_err(bounds)?)
    };
    let fill = FillPattern { chunk, token_keys: array(staged.extra().keys)?, tokens: token_count };
    part.kernels().fill_pattern(part.compute(), part.shape(), fill)?;
    let transfer = Transfer {
        chunk,
        slot_mapping: array(staged.extra().slots)?,
        host_slots: &host_slots[first..first + tokens],
        tokens: token_count,
        skip_prefix_n_tokens: skip as u64,
        direction: Direction::ChunkToPaged,
        num_blocks: part.ready_blocks(),
    };
    part.kernels().multi_layer_transfer(part.compute(), part.paged(), transfer)?;
    Ok(())
}

/// Reads all staged sequences through the staged block table, and copies the checksums to the host.
fn checksum(
    part: &Part,
    staged: &StagedPart<Arrays>,
    buffers: &Buffers,
    sequences: usize,
    arrival: usize,
) -> Result<(), RunError> {
    let entries = (sequences * staged.width()) as u64;
    let checksums =
        buffers.checksums.span().slice(0, entries * 8).map_err(cuda_driver::CopyError::from)?;
    let args = ChecksumArgs {
        block_table: staged.block_table()?,
        table_stride: staged.width() as u64,
        seq_lens: match staged.extra().lengths {
            Some(lengths) => staged.span(lengths)?,
            None => staged.lengths()?,
        },
        sequences: sequences as u32,
        checksums,
        num_blocks: part.ready_blocks(),
    };
    part.kernels().paged_checksum(part.compute(), part.paged(), args)?;
    part.compute().copy_to_host(&buffers.arrivals[arrival], 0, checksums)?;
    Ok(())
}
