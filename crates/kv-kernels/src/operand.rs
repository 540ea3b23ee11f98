//! The checks that every operand of a launch passes before anything is enqueued.

use cuda_driver::DeviceSpan;

use crate::{
    KernelSource,
    error::{Operand, OperandError},
};

/// Checks that `span` holds `count` values of `size` bytes each, aligned to that size.
///
/// `size` is 4 or 8.
pub(crate) fn check_array(
    operand: Operand,
    span: impl Into<Extent>,
    count: u64,
    size: u64,
) -> Result<(), OperandError> {
    let Extent { address, bytes } = span.into();
    check_aligned(operand, address, size)?;
    let overflow = OperandError::Overflow { operand, rows: count, row_bytes: size };
    check_length(operand, bytes, count.checked_mul(size).ok_or(overflow)?)
}

/// Where memory lies, on the device or on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl From<DeviceSpan> for Extent {
    fn from(span: DeviceSpan) -> Self {
        Self { address: span.address(), bytes: span.bytes() }
    }
}

impl From<KernelSource<'_>> for Extent {
    fn from(source: KernelSource<'_>) -> Self {
        Self { address: source.place(), bytes: source.bytes() }
    }
}

/// Checks that what is written and what is read share no byte.
pub(crate) fn check_disjoint(
    (written, at): (Operand, impl Into<Extent>),
    (read, from): (Operand, impl Into<Extent>),
) -> Result<(), OperandError> {
    let (at, from) = (at.into(), from.into());
    // Neither sum overflows: both are of memory.
    let (start, end) = (at.address.max(from.address), at.end().min(from.end()));
    if at.bytes == 0 || from.bytes == 0 || start >= end {
        return Ok(());
    }
    Err(OperandError::Overlap { written, read, address: start, bytes: end - start })
}

impl Extent {
    pub(crate) fn end(self) -> u64 {
        self.address.saturating_add(self.bytes)
    }
}

/// A table of 4- or 8-byte entries whose rows lie `stride` entries apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableExtent {
    pub(crate) rows: u64,
    /// Entries of a row that are accessed.
    pub(crate) width: u64,
    pub(crate) stride: u64,
    pub(crate) entry_bytes: u64,
}

/// Checks that `span` holds all rows of a table, the last one up to its width only.
pub(crate) fn check_table(
    operand: Operand,
    span: DeviceSpan,
    table: TableExtent,
) -> Result<(), OperandError> {
    let TableExtent { rows, width, stride, entry_bytes } = table;
    check_aligned(operand, span.address(), entry_bytes)?;
    if rows == 0 || width == 0 {
        return Ok(());
    }
    if stride < width {
        return Err(OperandError::Stride { operand, width, stride });
    }
    let row_bytes = stride.saturating_mul(entry_bytes);
    let needed_bytes = stride
        .checked_mul(rows - 1)
        .and_then(|entries| entries.checked_add(width))
        .and_then(|entries| entries.checked_mul(entry_bytes))
        .ok_or(OperandError::Overflow { operand, rows, row_bytes })?;
    check_length(operand, span.bytes(), needed_bytes)
}

/// Checks that `address` is a multiple of `alignment`.
pub(crate) fn check_aligned(
    operand: Operand,
    address: u64,
    alignment: u64,
) -> Result<(), OperandError> {
    if address.is_multiple_of(alignment) {
        Ok(())
    } else {
        Err(OperandError::Misaligned { operand, address, alignment })
    }
}

/// Checks that `bytes` bytes are at least `needed_bytes`.
pub(crate) fn check_length(
    operand: Operand,
    bytes: u64,
    needed_bytes: u64,
) -> Result<(), OperandError> {
    if needed_bytes <= bytes {
        Ok(())
    } else {
        Err(OperandError::TooShort { operand, needed_bytes, bytes })
    }
}
