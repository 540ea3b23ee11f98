//! The device work of an iteration: fill, store, read, and copy the checksums back.

use cuda_driver::guard;
use cuda_driver::{DeviceBuffer, DeviceSpan, HostAllocFlags, PinnedBuffer};
use kv_kernels::{
    Direction,
    chunks::{Chunk, ChunkMapping, ChunkTransfer, LaunchLimits},
    verify::{ChecksumArgs, FillPattern},
};
use kv_plane::{BatchStep, GroupKind, GroupOptions, GroupPart, KvCacheOptions, Part};
use kv_pool::Slot;
use kv_stage::error::BatchError;

use super::RunError;
use super::batch::{Batch, Further, Launch, Rejected};
use super::expected::Oracle;
use super::groups::Reads;
use crate::config::RunConfig;

/// The buffers of a group on one device, all allocated before the first iteration.
#[derive(Debug)]
struct Buffers {
    /// The tokens of an iteration, as a model's forward pass would leave them; of a recurrent group, the states.
    chunk: DeviceBuffer,
    /// A checksum for each entry of the largest block table.
    checksums: DeviceBuffer,
    /// Buffers for arriving checksums: one for each step that may be in flight, and one to compare.
    arrivals: Vec<PinnedBuffer>,
    /// Entries of a row of the checksums.
    width: usize,
}

/// The arrays of an iteration besides the batch, by their place.
const SLOTS: usize = 0;
const KEYS: usize = 1;
/// What is read of each sequence, where that is not all that was staged.
const LENGTHS: usize = 2;
/// How many tokens of each sequence are right, as the sampler finds.
const ACCEPTED: usize = 3;
/// One state of each sequence.
const ONES: usize = 4;
/// The slots and the keys of each further group, one after the other.
const FURTHER: usize = 5;

/// Bytes of each of these arrays.
pub(super) fn arrays(config: &RunConfig) -> Vec<u64> {
    let (tokens, sequences) = (u64::from(config.step_tokens), u64::from(config.max_batch));
    let mut arrays = vec![tokens * 8, tokens * 8, sequences * 4, sequences * 4];
    if config.has_groups() {
        arrays.push(sequences * 4);
    }
    if config.window.is_some() {
        arrays.extend([tokens * 8; 2]);
    }
    if config.state_layers > 0 {
        arrays.extend([sequences * (1 + u64::from(config.life.drafts)) * 8; 2]);
    }
    if config.draft_layers > 0 {
        // In the place of the slots, which the cache computes, the lengths.
        arrays.extend([sequences * 4, tokens * 8]);
    }
    arrays
}

/// The arrays with the slots and the keys of a group.
fn arrays_of(group: usize) -> (usize, usize) {
    match group {
        0 => (SLOTS, KEYS),
        further => (FURTHER + 2 * (further - 1), FURTHER + 2 * (further - 1) + 1),
    }
}

#[derive(Debug)]
pub(super) struct DeviceWork {
    /// Of each device, and of each group there.
    buffers: Vec<Vec<Buffers>>,
    reads: Vec<Reads>,
    /// Which part of the model the first device holds.
    first_part: usize,
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
        let reads: Vec<_> = options.groups.iter().map(Reads::of).collect();
        let buffers = |part: &Part| {
            let groups = part.groups().iter().zip(&options.groups);
            groups.map(|(group, of)| Buffers::new(part, group, of, options)).collect()
        };
        let buffers = parts.iter().map(buffers).collect::<Result<_, _>>()?;
        Ok(Self { buffers, reads, first_part, keys: Vec::new() })
    }

    /// Adds the arrays of an iteration to what is staged for a device.
    pub(super) fn add_arrays(
        &mut self,
        part: usize,
        batch: &Batch,
        step: &mut BatchStep<'_>,
    ) -> Result<(), BatchError> {
        let first = self.first_part + part;
        let first = guard!("replay.groups-have-own-bytes", first * self.reads.len(), else first);
        for (group, reads) in self.reads.iter().enumerate() {
            let (slots, keys) = arrays_of(group);
            let further = group.checked_sub(1).and_then(|at| batch.further.get(at));
            let all = match (reads, further) {
                (Reads::State | Reads::Drafted, Some(further)) => &further.keys,
                _ => &batch.keys,
            };
            self.keys.clear();
            self.keys.extend(all.iter().map(|&key| Oracle::key_on(first + group, key)));
            step.array(keys, &self.keys)?;
            match further {
                Some(further) if *reads == Reads::Drafted => step.array(slots, &further.lengths)?,
                Some(further) if !further.slots.is_empty() => step.array(slots, &further.slots)?,
                None if !batch.is_unplaced() => step.array(slots, &batch.slots)?,
                _ => {}
            }
        }
        if self.reads.contains(&Reads::State) {
            step.array(ONES, &vec![1_u32; batch.lengths.len()])?;
        }
        if batch.is_unplaced() {
            step.array(ACCEPTED, &batch.accepted)?;
            step.array(LENGTHS, &batch.lengths)?;
        }
        Ok(())
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
                for (group, buffers) in buffers.iter().enumerate() {
                    let here = Here { part, group, buffers };
                    if self.reads[group] == Reads::Drafted {
                        here.write_drafts(batch)?;
                        continue;
                    }
                    if self.reads[group] == Reads::State {
                        // A step begins with the state that the one before has left.
                        if read {
                            here.checksum(batch, part.batch().arrays[ONES], step)?;
                        }
                        here.write_states(batch)?;
                        continue;
                    }
                    for &launch in batch.launches() {
                        here.write(launch, batch)?;
                    }
                }
                sample(part, batch)?;
                for (group, buffers) in buffers.iter().enumerate().filter(|_| read) {
                    if self.reads[group] == Reads::Drafted {
                        let lengths = part.batch().arrays[arrays_of(group).0];
                        Here { part, group, buffers }.checksum(batch, lengths, step)?;
                    } else if self.reads[group] != Reads::State {
                        // Rejected drafts are not read.
                        let all = match batch.is_unplaced() {
                            true => part.batch().arrays[LENGTHS],
                            false => part.batch().lengths,
                        };
                        Here { part, group, buffers }.checksum(batch, all, step)?;
                    }
                }
                Ok::<(), RunError>(())
            });
            enqueued??;
        }
        Ok(())
    }

    /// Copies out the checksums of a part of a completed step of so many sequences, row by row; entries of a
    /// row. Parts are counted through the groups of each device.
    pub(super) fn arrived(
        &self,
        part: usize,
        step: u64,
        sequences: usize,
        checksums: &mut Vec<u64>,
    ) -> Result<usize, RunError> {
        let groups = self.reads.len();
        let buffers = &self.buffers[part / groups][part % groups];
        checksums.resize(sequences * buffers.width, 0);
        let bytes = bytemuck::cast_slice_mut(checksums);
        buffers.arrivals[arrival(buffers, step)]
            .read_at(0, bytes)
            .map_err(cuda_driver::CopyError::from)?;
        Ok(buffers.width)
    }
}

impl Buffers {
    fn new(
        part: &Part,
        group: &GroupPart,
        of: &GroupOptions,
        options: &KvCacheOptions,
    ) -> Result<Self, RunError> {
        let (device, sequences) = (part.device(), u64::from(options.sequences_max));
        let (chunk_tokens, width) = match of.kind {
            GroupKind::State { drafts, .. } => (sequences * (1 + u64::from(drafts)), 1),
            _ => (u64::from(options.step_tokens_max), of.blocks_per_sequence_max as usize),
        };
        let refused = |what, bytes| move |source| RunError::Buffers { what, bytes, source };
        let chunk_bytes = chunk_tokens
            .checked_mul(group.shape().token_bytes())
            .ok_or(RunError::ChunkOverflow { tokens: chunk_tokens })?;
        let chunk = DeviceBuffer::alloc(device, chunk_bytes)
            .map_err(refused("the tokens of an iteration (--step-tokens)", chunk_bytes))?;
        let sums_bytes = sequences * width as u64 * 8;
        let no_sums = refused("a checksum for each block of --max-batch requests", sums_bytes);
        let pinned = |_| PinnedBuffer::alloc(device, sums_bytes, HostAllocFlags::CACHED);
        let arrivals = 0
            ..guard!("replay.sums-arrive-apart", options.overlap_depth + 1, else options.overlap_depth);
        Ok(Self {
            chunk,
            checksums: DeviceBuffer::alloc(device, sums_bytes).map_err(no_sums)?,
            arrivals: arrivals.map(pinned).collect::<Result<_, _>>().map_err(no_sums)?,
            width,
        })
    }
}

#[derive(Clone, Copy)]
struct Here<'a> {
    part: &'a Part,
    group: usize,
    buffers: &'a Buffers,
}

impl Here<'_> {
    fn of(&self) -> &GroupPart {
        &self.part.groups()[self.group]
    }

    /// Fills one launch's part of the chunk and stores it.
    fn write(self, launch: Launch, batch: &Batch) -> Result<(), RunError> {
        let Launch { first, tokens, skip } = launch;
        let (slots, keys) = arrays_of(self.group);
        let device = self.part.batch();
        let host = match self.group {
            0 => &batch.slots,
            further => &batch.further[further - 1].slots,
        };
        let (slots, host) = match batch.is_unplaced() {
            true => (device.tables[self.group].slots, None),
            false => (device.arrays[slots], Some(&host[first..first + tokens])),
        };
        self.store((slots, host), device.arrays[keys], (first as u64, tokens as u64, skip as u64))
    }

    fn write_states(self, batch: &Batch) -> Result<(), RunError> {
        // A step for nobody writes none.
        let Some(Further { slots: states, .. }) = batch.further.get(self.group - 1) else {
            return Ok(());
        };
        if states.is_empty() {
            return Ok(());
        }
        let (slots, keys) = arrays_of(self.group);
        let device = self.part.batch();
        let slots = (device.arrays[slots], Some(&states[..]));
        self.store(slots, device.arrays[keys], (0, states.len() as u64, 0))
    }

    /// Fills the tokens that the draft model computes, and stores them where its batch says.
    fn write_drafts(self, batch: &Batch) -> Result<(), RunError> {
        let tokens = batch.further.get(self.group - 1).map_or(0, |further| further.keys.len());
        let Some(drafts) = self.part.draft_batch().filter(|_| tokens > 0) else { return Ok(()) };
        let keys = self.part.batch().arrays[arrays_of(self.group).1];
        // There is one group of the draft model's.
        self.store((drafts.tables[0].slots, None), keys, (0, tokens as u64, 0))
    }

    /// Fills some of the chunk with tokens of these keys, from entry `first` on, and stores it in slots; `host` has those that the
    /// host knows.
    fn store(
        self,
        (slots, host): (DeviceSpan, Option<&[Slot]>),
        keys: DeviceSpan,
        (first, count, skip): (u64, u64, u64),
    ) -> Result<(), RunError> {
        let (part, group) = (self.part, self.of());
        let token_bytes = group.shape().token_bytes();
        let bounds = cuda_driver::CopyError::from;
        let chunk = self.buffers.chunk.span();
        let chunk = chunk.slice(first * token_bytes, count * token_bytes).map_err(bounds)?;
        let here = |array: DeviceSpan| array.slice(first * 8, count * 8).map_err(bounds);
        let (kernels, on, paged) = (part.kernels(), part.compute(), group.paged());
        let pattern = FillPattern { chunk, token_keys: here(keys)?, tokens: count };
        kernels.fill_pattern(on, paged.shape(), pattern)?;
        let chunk = Chunk {
            memory: chunk.into(),
            mapping: ChunkMapping::Slots { slots: here(slots)?.into(), host },
            tokens: count,
            skip_prefix_n_tokens: skip,
        };
        let transfer = ChunkTransfer {
            chunks: &[chunk],
            layers: 0..paged.shape().layers(),
            direction: Direction::ChunkToPaged,
            num_blocks: group.ready_blocks(),
            limits: LaunchLimits::default(),
            report: None,
        };
        Ok(kernels.transfer_chunks(on, paged, &transfer)?)
    }

    /// Reads all staged sequences, each as long as `lengths` says, through the batch's block table, and copies
    /// the checksums to the host.
    fn checksum(self, tokens: &Batch, lengths: DeviceSpan, step: u64) -> Result<(), RunError> {
        let Self { part, group, buffers } = self;
        let sequences = tokens.lengths.len();
        if sequences == 0 {
            return Ok(());
        }
        let entries = (sequences * buffers.width) as u64;
        let checksums =
            buffers.checksums.span().slice(0, entries * 8).map_err(cuda_driver::CopyError::from)?;
        let table = part.batch().tables[group];
        let args = ChecksumArgs {
            // Of states, the one that the step begins with.
            block_table: guard!(
                "replay.chosen-state-read",
                table.state_in.unwrap_or(table.block_table),
                else table.block_table
            ),
            table_stride: buffers.width as u64,
            seq_lens: lengths,
            sequences: sequences as u32,
            checksums,
            num_blocks: self.of().ready_blocks(),
        };
        part.kernels().paged_checksum(part.compute(), self.of().paged(), args)?;
        let arrival = &buffers.arrivals[arrival(buffers, step)];
        part.compute().copy_to_host(arrival, 0, checksums)?;
        Ok(())
    }
}

fn arrival(buffers: &Buffers, step: u64) -> usize {
    (step % buffers.arrivals.len() as u64) as usize
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
