//! What a step's tables and arrays are on a device.

use cuda_driver::DeviceSpan;
use kv_stage::{PartId, Staged};

use crate::StepError;

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

    /// The sequences' lengths in tokens, those that the step computes included: one `u32` each. Of a row
    /// whose [start is open](kv_manager::Start::Open), the length if all drafts are accepted.
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
