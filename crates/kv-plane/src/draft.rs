//! What a draft model computes in a step: a batch of its own, since its KV ends elsewhere.

use cuda_driver::{Device, Stream};
use kv_manager::{BatchRow, Start};
use kv_stage::{
    BatchBuffers, BatchLength, DeviceBatch, Row, StagingOptions, StagingPool, TableEntry,
    error::{BatchError, StagingError},
};

use crate::{BuildError, KvCacheOptions};

/// The batch of the draft model on one device.
#[derive(Debug)]
pub(crate) struct DraftBatch {
    staging: StagingPool,
    batch: DeviceBatch,
    /// Of each group of the cache, its table here.
    tables: Vec<Option<usize>>,
    lengths: Vec<BatchLength>,
}

impl DraftBatch {
    /// `None` if no group is of a draft model.
    pub(crate) fn new(
        device: &Device,
        options: &KvCacheOptions,
    ) -> Result<Option<Self>, BuildError> {
        let Some(batch) = options.draft_batch() else { return Ok(None) };
        let depth = options.overlap_depth as usize;
        let buffers = StagingOptions::overlapped(batch.buffer_bytes(), depth);
        let staging = StagingPool::new(device, buffers)?;
        let mut numbers = 0..;
        let tables = options.groups.iter();
        let tables = tables.map(|group| if group.draft_model { numbers.next() } else { None });
        let tables = tables.collect();
        let lengths = Vec::with_capacity(options.sequences_max as usize);
        let batch = DeviceBatch::new(&staging, batch)?;
        Ok(Some(Self { staging, batch, tables, lengths }))
    }

    pub(crate) fn buffers(&self) -> &BatchBuffers {
        self.batch.buffers()
    }

    pub(crate) fn lengths(&self) -> &[BatchLength] {
        &self.lengths
    }

    /// Notes a change of a row of a group's table, if the group is the draft model's.
    pub(crate) fn edit(
        &mut self,
        group: usize,
        row: Row,
        first: u32,
        ids: &[TableEntry],
    ) -> Result<(), BatchError> {
        match self.tables.get(group).copied().flatten() {
            Some(table) => self.batch.edit(table, row, first, ids),
            None => Ok(()),
        }
    }

    pub(crate) fn forget_edits(&mut self) {
        self.batch.forget_edits();
    }

    pub(crate) fn stage(&mut self, compute: &Stream, rows: &[BatchRow]) -> Result<(), BatchError> {
        let mut step = self.batch.step_wait(compute)?;
        for row in rows {
            let (resolved, upper) = match row.start {
                Start::At(at) => (at, at),
                Start::Open { resolved, upper } => (resolved, upper),
            };
            step.row(row.row, resolved, upper, row.tokens)?;
        }
        let staged = step.submit()?;
        self.lengths.clear();
        self.lengths.extend_from_slice(staged.lengths);
        Ok(())
    }

    /// Frees the pinned buffers. The device is at rest.
    pub(crate) fn close(self) -> Result<(), StagingError> {
        drop(self.batch);
        self.staging.close()
    }
}
