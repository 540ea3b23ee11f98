//! A submitted step, and the location of its parts.

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
    /// Distinguishes this step's parts from another's.
    pub(crate) number: u64,
    /// End of the last part, in bytes.
    pub(crate) used: u64,
    /// Number of sent bytes, once submitted.
    pub(crate) sent: u64,
    /// Number of scattered words.
    pub(crate) words: u32,
    pub(crate) places: SmallVec<[PartRange; 8]>,
}

/// The location of a part in the device's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartRange {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Number of entries of a row; 0 for an array.
    pub(crate) row_entries: usize,
}

/// A submitted step: the location of its parts on the device.
///
/// Valid on the stager's stream until the next submit there, and only for reading; see
/// [`StepStager`](crate::StepStager).
#[derive(Clone, Debug)]
pub struct Staged {
    pub(crate) span: DeviceSpan,
    pub(crate) parts: Parts,
}

impl Staged {
    /// The location of a part on the device. Its address is a multiple of
    /// [`PART_ALIGNMENT`](crate::StepStager::PART_ALIGNMENT).
    ///
    /// # Errors
    /// [`PartError`] for a part of another step.
    pub fn span(&self, part: PartId) -> Result<DeviceSpan, PartError> {
        let PartRange { offset, bytes, .. } = self.place(part)?;
        let foreign = PartError { part_step: part.step, step: self.parts.number };
        self.span.slice(offset, bytes).map_err(|_| foreign)
    }

    /// Number of entries from one row of a table's part to the next, at least the requested width;
    /// 0 for an array.
    ///
    /// # Errors
    /// Like [`span`](Staged::span).
    pub fn row_entries(&self, part: PartId) -> Result<usize, PartError> {
        Ok(self.place(part)?.row_entries)
    }

    /// Number of sent bytes: copied bytes including padding between parts, and scattered words with
    /// their indices.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.sent
    }

    /// Number of scattered words of 16 bytes; 0 for a step that was copied.
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
