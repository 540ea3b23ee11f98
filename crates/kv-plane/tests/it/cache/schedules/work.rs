//! What a step does on the devices: it writes the tokens of every group, and reads all that its sequences attend to.

use cuda_driver::{CopyError, HostAllocFlags};
use kv_kernels::Direction;
use kv_kernels::chunks::{Chunk, ChunkMapping, ChunkTransfer, LaunchLimits};
use kv_kernels::verify::{ChecksumArgs, Expected, FillPattern};

use super::workers::Act;
use crate::prelude::*;

/// What a step writes and reads, the same for all workers.
#[derive(Debug)]
pub(super) struct Work {
    /// Which of the buffers takes what is read.
    pub(super) ring: usize,
    pub(super) rows: Vec<RowWork>,
    pub(super) groups: Vec<GroupWork>,
    /// What goes wrong.
    pub(super) act: Option<(WorkerId, Act)>,
}

/// One sequence of a step.
#[derive(Debug)]
pub(super) struct RowWork {
    pub(super) number: u64,
    /// Its row of the table.
    pub(super) row: u32,
    /// Tokens that are right of those that the step computes, if not all are.
    pub(super) accepted: Option<u32>,
    /// What becomes of the loads whose content it reads.
    pub(super) load: Option<Arc<Load>>,
}

/// A group's share of it.
#[derive(Debug, Default)]
pub(super) struct GroupWork {
    /// Keys of the tokens, or of the states, that are written, one sequence after the other.
    pub(super) keys: Vec<u64>,
    /// Where states are written.
    pub(super) slots: Vec<Slot>,
    /// Tokens that are read of each sequence.
    pub(super) lengths: Vec<u32>,
    /// Blocks that are read, each with the keys of its tokens.
    pub(super) read: Vec<Read>,
}

#[derive(Debug)]
pub(super) struct Read {
    pub(super) row: usize,
    pub(super) column: usize,
    pub(super) keys: Vec<u64>,
}

/// How many of its tokens a step finds right in each row.
const ACCEPTED: usize = 0;

/// The arrays of a group.
fn keys_of(group: usize) -> usize {
    1 + 3 * group
}

fn lengths_of(group: usize) -> usize {
    2 + 3 * group
}

fn slots_of(group: usize) -> usize {
    3 + 3 * group
}

/// Bytes of the arrays for so many groups.
pub(super) fn arrays(groups: usize, sequences: u64, tokens: u64) -> Vec<u64> {
    let group = [tokens * 8, sequences * 4, tokens * 8];
    std::iter::once(sequences * 4).chain((0..groups).flat_map(|_| group)).collect()
}

fn is_state(group: &GroupOptions) -> bool {
    matches!(group.kind, GroupKind::State { .. })
}

/// The buffers of a worker's parts.
#[derive(Debug)]
pub(super) struct Bench {
    /// Of each part, and of each group there.
    buffers: Vec<Vec<Buffers>>,
    groups: Vec<GroupOptions>,
    /// Parts of the workers before this one.
    before: usize,
}

/// The buffers of a group on a part.
#[derive(Debug)]
struct Buffers {
    width: usize,
    chunk: DeviceBuffer,
    sums: DeviceBuffer,
    expected: Expected,
    results: Vec<PinnedBuffer>,
}

/// Buffers for results: of the steps in flight, and of one that is being enqueued.
pub(super) fn rings(options: &KvCacheOptions) -> usize {
    options.overlap_depth as usize + 1
}

impl Bench {
    pub(super) fn new(parts: &[Part], options: &KvCacheOptions, before: usize) -> Self {
        let groups = options.groups.clone();
        let buffers = |part: &Part, at: usize, of: &GroupOptions| {
            let (width, tokens) = match of.kind {
                GroupKind::State { drafts, .. } => (1, options.sequences_max * (1 + drafts)),
                _ => (of.blocks_per_sequence_max as usize, options.step_tokens_max),
            };
            let shape = part.groups()[at].shape();
            let (device, bytes) =
                (part.device(), u64::from(options.sequences_max) * width as u64 * 8);
            let result = |_| PinnedBuffer::alloc(device, bytes, HostAllocFlags::CACHED).unwrap();
            Buffers {
                width,
                chunk: DeviceBuffer::alloc(device, u64::from(tokens) * shape.token_bytes())
                    .unwrap(),
                sums: DeviceBuffer::alloc(device, bytes).unwrap(),
                expected: Expected::new(shape).unwrap(),
                results: (0..rings(options)).map(result).collect(),
            }
        };
        let of_part =
            |part| groups.iter().enumerate().map(|(at, of)| buffers(part, at, of)).collect();
        Self { buffers: parts.iter().map(of_part).collect(), groups, before }
    }

    /// A key as it is on one part: each has other bytes for a token, and each group.
    fn turn(&self, part: usize, group: usize, key: u64) -> u64 {
        key.rotate_left(((self.before + part) * self.groups.len() + group) as u32)
    }

    /// Sends the arrays of a step to a part.
    pub(super) fn send(
        &self,
        part: usize,
        work: &Work,
        step: &mut BatchStep<'_>,
    ) -> Result<(), BatchError> {
        let accepted: Vec<u32> =
            work.rows.iter().map(|row| row.accepted.unwrap_or_default()).collect();
        step.array(ACCEPTED, &accepted)?;
        for (group, of) in work.groups.iter().enumerate() {
            let keys: Vec<u64> = of.keys.iter().map(|&key| self.turn(part, group, key)).collect();
            step.array(keys_of(group), &keys)?;
            step.array(lengths_of(group), &of.lengths)?;
            step.array(slots_of(group), &of.slots)?;
        }
        Ok(())
    }

    /// Enqueues the step on all parts, behind what the cache has enqueued for it.
    pub(super) fn enqueue(&self, parts: &[Part], work: &Work) -> Result<(), Failure> {
        if work.rows.is_empty() {
            return Ok(());
        }
        for (part, buffers) in parts.iter().zip(&self.buffers) {
            let here = |group| Here { part, group, buffers: &buffers[group] };
            for (group, of) in self.groups.iter().enumerate() {
                if is_state(of) {
                    // A step begins with the state that the one before has left.
                    here(group).read(work)?;
                }
                let drafts = self.groups[..group].iter().filter(|of| of.draft_model).count();
                here(group).write((of, drafts), &work.groups[group])?;
            }
            for (index, row) in
                work.rows.iter().enumerate().filter(|(_, row)| row.accepted.is_some())
            {
                let batch = part.batch();
                let from = batch.arrays[ACCEPTED].slice(index as u64 * 4, 4)?;
                let to = batch.accepted.slice(u64::from(row.row) * 4, 4)?;
                part.compute().copy_on_device(to, from)?;
            }
            for (group, _) in self.groups.iter().enumerate().filter(|(_, of)| !is_state(of)) {
                here(group).read(work)?;
            }
        }
        Ok(())
    }

    /// Of each sequence of a step that is complete, what is not as it should be; and how many blocks were compared.
    pub(super) fn check(&self, work: &Work) -> (Vec<Option<String>>, u64) {
        let (mut wrong, mut compared) = (vec![None; work.rows.len()], 0);
        for (part, buffers) in self.buffers.iter().enumerate() {
            for (group, buffers) in buffers.iter().enumerate() {
                let mut bytes = vec![0; work.rows.len() * buffers.width * 8];
                buffers.results[work.ring].read_at(0, &mut bytes).unwrap();
                for Read { row, column, keys } in &work.groups[group].read {
                    let at = (row * buffers.width + column) * 8;
                    let found = u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
                    let keys: Vec<u64> =
                        keys.iter().map(|&key| self.turn(part, group, key)).collect();
                    let expected = buffers.expected.checksum(&keys).unwrap();
                    compared += 1;
                    if found != expected && wrong[*row].is_none() {
                        let RowWork { number, row: line, .. } = work.rows[*row];
                        wrong[*row] = Some(format!(
                            "sequence {number} (row {line}) reads {found:#x} instead of \
                             {expected:#x} in place {column} ({} tokens) of group {group} ({:?}), \
                             part {}",
                            keys.len(),
                            self.groups[group].kind,
                            self.before + part
                        ));
                    }
                }
            }
        }
        (wrong, compared)
    }
}

/// A group of a part.
#[derive(Clone, Copy)]
struct Here<'a> {
    part: &'a Part,
    group: usize,
    buffers: &'a Buffers,
}

impl Here<'_> {
    fn write(self, (of, drafts): (&GroupOptions, usize), work: &GroupWork) -> Result<(), Failure> {
        let tokens = work.keys.len() as u64;
        if tokens == 0 {
            return Ok(());
        }
        let batch = self.part.batch();
        let (slots, host) = if is_state(of) {
            (batch.arrays[slots_of(self.group)], Some(&work.slots[..]))
        } else if of.draft_model {
            let batch = self.part.draft_batch().ok_or("no batch of a draft model")?;
            (batch.tables[drafts].slots, None)
        } else {
            (batch.tables[self.group].slots, None)
        };
        let (part, group) = (self.part, &self.part.groups()[self.group]);
        let slice = |span: DeviceSpan, bytes: u64| span.slice(0, tokens * bytes);
        let chunk = slice(self.buffers.chunk.span(), group.shape().token_bytes())?;
        let token_keys = slice(batch.arrays[keys_of(self.group)], 8)?;
        let pattern = FillPattern { chunk, token_keys, tokens };
        part.kernels().fill_pattern(part.compute(), group.shape(), pattern)?;
        let mapping = ChunkMapping::Slots { slots: slice(slots, 8)?.into(), host };
        let chunk = Chunk { memory: chunk.into(), mapping, tokens, skip_prefix_n_tokens: 0 };
        let transfer = ChunkTransfer {
            chunks: &[chunk],
            layers: 0..group.shape().layers(),
            direction: Direction::ChunkToPaged,
            num_blocks: group.ready_blocks(),
            limits: LaunchLimits::default(),
            report: None,
        };
        Ok(part.kernels().transfer_chunks(part.compute(), group.paged(), &transfer)?)
    }

    /// Sums up what the block table names, and sends the sums to the host.
    fn read(self, work: &Work) -> Result<(), Failure> {
        let Self { part, buffers, .. } = self;
        let (sequences, group) = (work.rows.len(), &part.groups()[self.group]);
        let checksums = buffers.sums.span().slice(0, (sequences * buffers.width) as u64 * 8)?;
        let table = part.batch().tables[self.group];
        let args = ChecksumArgs {
            block_table: table.state_in.unwrap_or(table.block_table),
            table_stride: buffers.width as u64,
            seq_lens: part.batch().arrays[lengths_of(self.group)],
            sequences: sequences as u32,
            checksums,
            num_blocks: group.ready_blocks(),
        };
        part.kernels().paged_checksum(part.compute(), group.paged(), args)?;
        let arrived: Result<(), CopyError> =
            part.compute().copy_to_host(&buffers.results[work.ring], 0, checksums);
        Ok(arrived?)
    }
}
