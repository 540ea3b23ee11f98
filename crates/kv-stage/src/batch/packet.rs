//! The packet of a step: its records, and their places in a staging buffer.

use std::collections::TryReserveError;

use bytemuck::{NoUninit, Zeroable};
use cuda_driver::guard;

use super::options::{BatchOptions, padded};
use crate::error::StagingError;
use crate::{StagingBuffer, TableEntry};

/// A change of a row that the device does not have yet. Its ids follow those of the changes before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edit {
    pub(super) table: u32,
    pub(super) row: u32,
    pub(super) first: u32,
    pub(super) count: u32,
}

/// `Job` of `kernels/stage/batch.cu`: a row of the batch, or one that is only changed.
#[derive(Clone, Copy, Debug, NoUninit, Zeroable)]
#[repr(C, align(16))]
pub(super) struct Job {
    pub(super) row: u32,
    pub(super) resolved: u32,
    pub(super) upper: u32,
    pub(super) first_token: u32,
    pub(super) drafts: u32,
    pub(super) input: u32,
    pub(super) unused: [u32; 2],
}

/// `Edit` of `kernels/stage/batch.cu`.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C, align(16))]
struct EditRecord {
    first: u32,
    count: u32,
    ids_at: u32,
    next: u32,
}

/// `ArrayPart` of `kernels/stage/batch.cu`.
#[derive(Clone, Copy, Debug, Default, NoUninit)]
#[repr(C)]
pub(super) struct ArrayPart {
    pub(super) at: u32,
    pub(super) vectors: u32,
}

/// `Header` of `kernels/stage/batch.cu`.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
struct Header {
    step: u64,
    sequences: u32,
    jobs: u32,
    tokens: u32,
    jobs_at: u32,
    heads_at: u32,
    edits_at: u32,
    ids_at: u32,
    unused: [u32; 7],
}

/// The records of the step that is being built. Its memory is kept from step to step.
#[derive(Debug)]
pub(super) struct Records {
    /// # Invariants
    /// The rows of the batch, and then those that are only changed; each row once.
    jobs: Vec<Job>,
    /// # Invariants
    /// For each row the number of its job, counted from 1; 0 without one.
    job_of: Box<[u32]>,
    /// Rows of the batch.
    pub(super) sequences: u32,
    pub(super) tokens: u32,
    pub(super) arrays: Vec<ArrayPart>,
    /// For each table and job the number of the first and of the last edit, counted from 1; 0 for none.
    heads: Vec<u32>,
    tails: Vec<u32>,
    edits: Vec<EditRecord>,
}

impl Records {
    pub(super) fn new(options: &BatchOptions) -> Result<Self, StagingError> {
        let no_memory = |_| StagingError::HostMemory { bytes: 4 * u64::from(options.rows) };
        let edits = (options.edit_room_bytes() / options.edit_bytes(1)) as usize;
        let jobs = options.sequences_max as usize + edits;
        Ok(Self {
            jobs: Vec::with_capacity(jobs),
            job_of: zeros(options.rows as usize).map_err(no_memory)?,
            sequences: 0,
            tokens: 0,
            arrays: Vec::with_capacity(options.arrays.len()),
            heads: Vec::with_capacity(jobs * options.tables.len()),
            tails: Vec::with_capacity(jobs * options.tables.len()),
            edits: Vec::with_capacity(edits),
        })
    }

    /// Forgets the last step.
    pub(super) fn clear(&mut self, options: &BatchOptions) {
        for job in self.jobs.drain(..) {
            guard!("stage.dropped-rows-are-forgotten", self.job_of[job.row as usize] = 0);
        }
        (self.sequences, self.tokens) = (0, 0);
        self.arrays.clear();
        self.arrays.resize(options.arrays.len(), ArrayPart::default());
    }

    /// Whether a row has a job; `None` without such a row.
    #[inline]
    pub(super) fn has(&self, row: u32) -> Option<bool> {
        self.job_of.get(row as usize).map(|&job| job != 0)
    }

    /// Adds a row, which has no job yet, and of the batch before those that are only changed.
    #[inline]
    pub(super) fn push(&mut self, job: Job) {
        self.jobs.push(job);
        self.job_of[job.row as usize] = self.jobs.len() as u32;
    }

    /// Adds the edits, in order, and a job for each row that has none.
    fn link(&mut self, tables: usize, edits: &[Edit]) {
        for edit in edits {
            if self.has(edit.row) == Some(false) {
                let row = edit.row;
                self.push(Job { row, first_token: self.tokens, ..Job::zeroed() });
            }
        }
        let jobs = self.jobs.len();
        for list in [&mut self.heads, &mut self.tails] {
            list.clear();
            list.resize(tables * jobs, 0);
        }
        self.edits.clear();
        let mut ids_at = 0;
        for (number, edit) in (1..).zip(edits) {
            let job = self.job_of[edit.row as usize] as usize - 1;
            let list = edit.table as usize * jobs + job;
            let last = std::mem::replace(&mut self.tails[list], number);
            match guard!("stage.changes-keep-order", last, else 0) {
                0 => self.heads[list] = number,
                last => self.edits[last as usize - 1].next = number,
            }
            let Edit { first, count, .. } = *edit;
            self.edits.push(EditRecord { first, count, ids_at, next: 0 });
            ids_at += count;
        }
    }

    /// Writes the packet of step `number`, whose arrays end at `used`, with these edits. Returns its bytes.
    pub(super) fn write(
        &mut self,
        buffer: &mut StagingBuffer,
        number: u64,
        used: u64,
        tables: usize,
        (edits, ids): (&[Edit], &[TableEntry]),
    ) -> u64 {
        self.link(tables, edits);
        let heads: &[u8] = bytemuck::cast_slice(&self.heads);
        let jobs_at = used;
        let heads_at = jobs_at + size_of_val(&self.jobs[..]) as u64;
        let edits_at = heads_at + padded(heads.len() as u64);
        let ids_at = edits_at + size_of_val(&self.edits[..]) as u64;
        let word = |at: u64| (at / 4) as u32;
        let header = Header {
            step: number,
            sequences: self.sequences,
            jobs: self.jobs.len() as u32,
            tokens: self.tokens,
            jobs_at: word(jobs_at),
            heads_at: word(heads_at),
            edits_at: word(edits_at),
            ids_at: word(ids_at),
            unused: [0; 7],
        };
        put(buffer, 0, bytemuck::bytes_of(&header));
        put(buffer, size_of::<Header>() as u64, bytemuck::cast_slice(&self.arrays));
        put(buffer, jobs_at, bytemuck::cast_slice(&self.jobs));
        put(buffer, heads_at, heads);
        put(buffer, edits_at, bytemuck::cast_slice(&self.edits));
        put(buffer, ids_at, bytemuck::cast_slice(ids));
        ids_at + size_of_val(ids) as u64
    }
}

fn zeros(count: usize) -> Result<Box<[u32]>, TryReserveError> {
    let mut values = Vec::new();
    values.try_reserve_exact(count)?;
    values.resize(count, 0);
    Ok(values.into_boxed_slice())
}

/// Puts `bytes` at `offset`, and zeros up to the next vector.
pub(super) fn put(buffer: &mut StagingBuffer, offset: u64, bytes: &[u8]) {
    let length = padded(bytes.len() as u64);
    match buffer.range_mut(offset, length) {
        Ok(part) => {
            let (data, rest) = part.split_at_mut(bytes.len());
            data.copy_from_slice(bytes);
            guard!("stage.arrays-end-in-zeros", rest.fill(0));
        }
        Err(error) => unreachable!("a packet keeps to its room, which its buffer has: {error}"),
    }
}
