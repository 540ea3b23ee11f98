//! Steps: the host runs ahead of the device by a known number of them.

use std::sync::Arc;

use cuda_driver::DeviceSpan;
use cuda_vmm::{Fence, Lease};
use kv_pool::Epoch;
use kv_stage::{PartId, Staged};
use parking_lot::Mutex;

use crate::StepError;

/// A step whose work is being put together: from [`begin_step`](crate::KvCache::begin_step) to
/// [`finish_step`](crate::KvCache::finish_step).
///
/// While it lives, memory that its work may use stays mapped, and no other step begins.
///
/// Dropping it, as an early return does, is always safe. The work counts as enqueued, and the cache
/// waits for it before it hands out, unmaps or frees memory that the work may use. The next step
/// has the same number. No call can declare that no work was enqueued, because such a claim could
/// not be checked:
///
/// ```compile_fail,E0599
/// # fn give_up(step: kv_cache::OpenStep) {
/// step.cancel();
/// # }
/// ```
#[derive(Debug)]
#[must_use = "finish the step when its work is enqueued"]
pub struct OpenStep {
    number: u64,
    epoch: Epoch,
    /// None only while the step ends.
    lease: Option<Lease>,
    /// The place of the cache's latest step, which is this one. It identifies the cache.
    latest: Arc<Mutex<Latest>>,
}

/// The state of a cache's latest step, shared by the cache and the holder of the step.
#[derive(Debug, Default)]
pub(crate) enum Latest {
    /// Finished, or there was none yet.
    #[default]
    Over,
    /// There is an [`OpenStep`] of it.
    Open,
    /// Dropped. Its work may be enqueued, with no event after it, so the lease is kept.
    Left { lease: Lease, epoch: Epoch },
}

impl OpenStep {
    /// Opens the step whose place is `latest`.
    pub(crate) fn open(
        latest: &Arc<Mutex<Latest>>,
        number: u64,
        (epoch, lease): (Epoch, Lease),
    ) -> Self {
        *latest.lock() = Latest::Open;
        Self { number, epoch, lease: Some(lease), latest: Arc::clone(latest) }
    }

    pub(crate) fn is_of(&self, latest: &Arc<Mutex<Latest>>) -> bool {
        Arc::ptr_eq(&self.latest, latest)
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Ends the step and returns its lease.
    pub(crate) fn end(&mut self) -> Option<Lease> {
        *self.latest.lock() = Latest::Over;
        self.lease.take()
    }

    /// The step's number; the first is 1.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for OpenStep {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            *self.latest.lock() = Latest::Left { lease, epoch: self.epoch };
        }
    }
}

/// A step whose work is enqueued, with a fence after it on every device, and fences of copies before it.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) number: u64,
    pub(crate) epoch: Epoch,
    pub(crate) fences: Vec<Fence>,
}

/// The tables and arrays of a step, on one device.
///
/// Valid on the part's compute stream until the next step is staged.
#[derive(Debug)]
pub struct StagedPart<T> {
    pub(crate) staged: Staged,
    pub(crate) table: PartId,
    pub(crate) lengths: PartId,
    pub(crate) width: usize,
    pub(crate) extra: T,
}

impl<T> StagedPart<T> {
    /// The block table: `[sequences, width]` of `i32`, -1 beyond a sequence's blocks. Do not write
    /// it: the next step sends only changes to it.
    ///
    /// # Errors
    /// None that this type can cause; see [`Staged::span`].
    pub fn block_table(&self) -> Result<DeviceSpan, StepError> {
        Ok(self.staged.span(self.table)?)
    }

    /// Entries of a row of the block table: at least the blocks of the longest sequence. Rows are
    /// longer than that so that they keep their places while sequences grow.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// The sequences' lengths in tokens: one `u32` each.
    ///
    /// # Errors
    /// As [`block_table`](StagedPart::block_table).
    pub fn lengths(&self) -> Result<DeviceSpan, StepError> {
        Ok(self.staged.span(self.lengths)?)
    }

    /// The place of an array that the caller added to the step.
    ///
    /// # Errors
    /// [`StepError::Part`] for an array of another step or device.
    pub fn span(&self, part: PartId) -> Result<DeviceSpan, StepError> {
        Ok(self.staged.span(part)?)
    }

    /// The value that the caller's closure returned for this device.
    #[must_use]
    pub fn extra(&self) -> &T {
        &self.extra
    }
}
