//! Steps: the host runs ahead of the device by a known number of them.

use std::sync::Arc;

use cuda_driver::DeviceSpan;
use cuda_vmm::{Fence, Lease};
use kv_pool::Epoch;
use kv_stage::{PartId, Staged};

use crate::StepError;

/// A step whose work is being put together: from [`begin_step`](crate::KvCache::begin_step) to
/// [`finish_step`](crate::KvCache::finish_step).
///
/// While it lives, memory that its work may use stays mapped, and no other step begins. Dropping it
/// instead of finishing it says that nothing was enqueued; the next step has the same number.
#[derive(Debug)]
#[must_use = "finish the step when its work is enqueued"]
pub struct OpenStep {
    pub(crate) number: u64,
    pub(crate) epoch: Epoch,
    pub(crate) lease: Lease,
    /// Lets the cache see whether this step is still open, and whether it is its own.
    pub(crate) life: Arc<()>,
}

impl OpenStep {
    /// The step's number; the first is 1.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }
}

/// A step whose work is enqueued, with a fence after it on every device, and fences of copies before it.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) number: u64,
    pub(crate) epoch: Epoch,
    pub(crate) fences: Vec<Fence>,
}

/// What one device was sent for a step.
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
    /// The block table: `[sequences, width]` of `i32`, -1 beyond a sequence's blocks. To be read only:
    /// the next step sends what changed in it.
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

    /// Where an array lies that the caller added to the step.
    ///
    /// # Errors
    /// [`StepError::Part`] for an array of another step or device.
    pub fn span(&self, part: PartId) -> Result<DeviceSpan, StepError> {
        Ok(self.staged.span(part)?)
    }

    /// What the caller's closure returned for this device.
    #[must_use]
    pub fn extra(&self) -> &T {
        &self.extra
    }
}
