//! A step that was sent, and where its parts lie.

use cuda_driver::DeviceSpan;
use smallvec::SmallVec;

use crate::error::PartError;

/// A part of one step: rows of a table or an array.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PartId {
    pub(crate) step: u64,
    pub(crate) index: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Parts {
    /// Tells this step's parts from another's.
    pub(crate) number: u64,
    /// End of the last part, in bytes.
    pub(crate) used: u64,
    /// Bytes that travelled, once submitted.
    pub(crate) sent: u64,
    /// Words that were scattered.
    pub(crate) words: u32,
    pub(crate) places: SmallVec<[PartRange; 8]>,
}

/// Where a part lies in the device's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartRange {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Entries of a row; 0 for an array.
    pub(crate) row_entries: usize,
}

/// A step that was sent: where its parts lie on the device.
///
/// Valid on the stager's stream until the next submit there, and to be read only; see
/// [`StepStager`](crate::StepStager).
#[derive(Clone, Debug)]
pub struct Staged {
    pub(crate) span: DeviceSpan,
    pub(crate) parts: Parts,
}

impl Staged {
    /// Where a part lies on the device; its address is a multiple of [`PART_ALIGNMENT`](crate::StepStager::PART_ALIGNMENT).
    ///
    /// # Errors
    /// [`PartError`] for a part of another step.
    pub fn span(&self, part: PartId) -> Result<DeviceSpan, PartError> {
        let PartRange { offset, bytes, .. } = self.place(part)?;
        let foreign = PartError { part_step: part.step, step: self.parts.number };
        self.span.slice(offset, bytes).map_err(|_| foreign)
    }

    /// Entries from a row of a table's part to the next, at least the width asked for; 0 for an array.
    ///
    /// # Errors
    /// As [`span`](Staged::span).
    pub fn row_entries(&self, part: PartId) -> Result<usize, PartError> {
        Ok(self.place(part)?.row_entries)
    }

    /// Bytes that travelled: those that were copied, padding between parts included, and the words
    /// that were scattered, each with its index.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.sent
    }

    /// Words of 16 bytes that were scattered; 0 for a step that was copied.
    #[must_use]
    pub fn words(&self) -> u32 {
        self.parts.words
    }

    fn place(&self, part: PartId) -> Result<PartRange, PartError> {
        let foreign = PartError { part_step: part.step, step: self.parts.number };
        if part.step != self.parts.number {
            return Err(foreign);
        }
        self.parts.places.get(part.index as usize).copied().ok_or(foreign)
    }
}
