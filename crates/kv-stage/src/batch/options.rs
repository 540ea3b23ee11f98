//! The sizes of a batch, checked once.

use crate::BlockId;
use crate::error::StagingError;

/// The block table of one group of layers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BatchTable {
    /// Block ids of a row.
    pub width: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// The id that stands where a row has no block: of real memory that no sequence owns, because
    /// some attention kernels read it.
    pub null_block: BlockId,
    /// Whether the blocks of a row are states of recurrent layers: entry 0 is the one behind the step's tokens before its
    /// drafts, entry `n` the one behind `n` drafts. `block_tokens` means nothing then.
    pub is_state: bool,
}

/// The sizes of a [`DeviceBatch`](crate::DeviceBatch).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct BatchOptions {
    /// Rows of each block table, one for each sequence that the engine knows.
    pub rows: u32,
    /// Maximum number of sequences of a step.
    pub sequences_max: u32,
    /// Maximum number of tokens of a step, over all its sequences.
    pub tokens_max: u32,
    /// The block tables. They share rows, lengths and positions; each has slots of its own.
    pub tables: Vec<BatchTable>,
    /// Maximum number of bytes of each array of the engine's own.
    pub arrays: Vec<u64>,
}

/// Bytes of the packet's header, without the arrays' places.
pub(super) const HEADER_BYTES: u64 = 64;
/// Bytes of an edit.
pub(super) const RECORD_BYTES: u64 = 16;
/// Bytes of a job.
const JOB_BYTES: u64 = 32;
/// Sections of the packet start at multiples of this.
pub(super) const VECTOR_BYTES: u64 = 16;
/// Minimum room of a packet for edits, in bytes.
const EDIT_BYTES_MIN: u64 = 64 << 10;
/// Offsets in a packet are 32-bit numbers of words.
const PACKET_BYTES_MAX: u64 = 4 * (u32::MAX as u64);
const INT_MAX: u64 = i32::MAX as u64;

impl BatchOptions {
    /// Bytes of a staging buffer that any step of the batch fits in. More block ids than it has room
    /// for, about 16,000, are sent in several submissions.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        // Two of the sections are padded to whole vectors.
        let edits = self.edit_room_bytes() + 2 * VECTOR_BYTES;
        self.edits_offset_max().saturating_add(edits)
    }

    /// Bytes of a packet for the header, the arrays and the rows of the largest step.
    fn edits_offset_max(&self) -> u64 {
        let arrays = self.arrays.iter().map(|&bytes| padded(bytes));
        let arrays = arrays.fold(0, u64::saturating_add);
        let jobs = u64::from(self.sequences_max) * JOB_BYTES;
        let heads = u64::from(self.sequences_max).saturating_mul(4 * self.tables.len() as u64);
        self.header_bytes().saturating_add(arrays).saturating_add(jobs).saturating_add(heads)
    }

    /// Bytes of the header, with the places of the arrays.
    pub(super) fn header_bytes(&self) -> u64 {
        HEADER_BYTES + padded(8 * self.arrays.len() as u64)
    }

    /// Bytes of a packet for edits, each [`edit_bytes`](Self::edit_bytes) long: at least one of any row.
    pub(super) fn edit_room_bytes(&self) -> u64 {
        let widest = self.tables.iter().map(|table| self.edit_bytes(table.width)).max();
        let each = u64::from(self.sequences_max) * 2 * self.edit_bytes(4);
        widest.unwrap_or(0).max(each).max(EDIT_BYTES_MIN)
    }

    /// Bytes of a packet for an edit of `ids` ids, and for the job of its row.
    pub(super) fn edit_bytes(&self, ids: u32) -> u64 {
        JOB_BYTES + RECORD_BYTES + 4 * (self.tables.len() as u64 + u64::from(ids))
    }

    /// Tokens that a row of `table` has blocks for.
    pub(super) fn row_tokens(table: &BatchTable) -> u64 {
        if table.is_state {
            return INT_MAX;
        }
        (u64::from(table.width) * u64::from(table.block_tokens)).min(INT_MAX)
    }

    /// Maximum number of ids, and of edits, that wait to be sent: twice all entries.
    pub(super) fn pending_max(&self) -> u64 {
        let entries = self.tables.iter().map(|table| u64::from(table.width)).sum::<u64>();
        entries.saturating_mul(2 * u64::from(self.rows))
    }

    pub(super) fn check(&self) -> Result<(), StagingError> {
        let check = |what: &'static str, value: u64, most: u64| match value {
            1.. if value <= most => Ok(()),
            _ => Err(StagingError::Batch { what, value, most }),
        };
        check("rows", self.rows.into(), INT_MAX)?;
        check("sequences", self.sequences_max.into(), self.rows.into())?;
        check("tokens", self.tokens_max.into(), INT_MAX)?;
        check("block tables", self.tables.len() as u64, 1 << 16)?;
        for table in &self.tables {
            check("blocks in a row", table.width.into(), INT_MAX)?;
            check("tokens in a block", table.block_tokens.into(), INT_MAX)?;
        }
        for &bytes in &self.arrays {
            check("bytes in an array", bytes, PACKET_BYTES_MAX)?;
        }
        check("bytes in a packet", self.buffer_bytes(), PACKET_BYTES_MAX)
    }
}

/// `bytes` rounded up to whole vectors.
pub(super) fn padded(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(VECTOR_BYTES).unwrap_or(u64::MAX)
}
