//! Gathering offset tables on the host, for systems whose kernels may not read host memory.

use cuda_driver::{CopyError, DeviceSpan, PinnedBuffer, Stream};

use crate::{KernelSource, tables::BlockOffsets};

/// Rows of block ids in host memory, as [`BlockOffsets`] describes them.
#[derive(Clone, Copy, Debug)]
pub struct HostOffsets<'a> {
    /// Block ids, -1 where there is none: at least `pools * pool_stride`.
    pub source: &'a [i32],
    /// Entries from a pool of the source to the next, and all that may be read of one.
    pub pool_stride: usize,
    /// Entries from a row of the source to the next.
    pub row_stride: usize,
    /// The source's row for each row of the output.
    pub row_index: &'a [u32],
    /// Columns of each row that are alive, as many as rows; a number beyond `width` is cut to it.
    /// `None` where all are.
    pub live: Option<&'a [u32]>,
    /// What the ids of each pool are multiplied with.
    pub scales: &'a [i32],
    /// What each pool adds for values, as many as scales.
    pub offsets: &'a [i32],
    /// Columns of a row.
    pub width: usize,
}

/// Why offsets were not gathered on the host. Nothing was written.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HostGatherError {
    /// A slice has not the length that the others ask for.
    #[error("{what} of {given} entries, where the gather of offsets needs {needed}")]
    Length {
        /// Name of the slice.
        what: &'static str,
        /// Entries that it has.
        given: usize,
        /// Entries that are needed.
        needed: usize,
    },
    /// A row would be read from beyond its pool of the source.
    #[error("row {row} comes from row {source_row}, beyond {pool_stride} entries")]
    RowOutOfRange {
        /// Row of the output.
        row: usize,
        /// Row of the source.
        source_row: u32,
        /// Entries of a pool of the source.
        pool_stride: usize,
    },
    /// The entries are more than an address space holds.
    #[error("{pools} pools of {entries} entries do not fit in memory")]
    Size {
        /// Pools.
        pools: usize,
        /// Entries of each.
        entries: usize,
    },
}

/// Writes dense rows `[pools, rows, 2, width]` to `dense`, which
/// [`copy_block_offsets`] then sends; the formula is that of
/// [`gather_block_offsets`](crate::KvKernels::gather_block_offsets). Columns that are not alive are
/// not written.
///
/// # Errors
/// [`HostGatherError`].
pub fn block_offsets_on_host(
    gather: &HostOffsets<'_>,
    dense: &mut [i32],
) -> Result<(), HostGatherError> {
    let (pools, rows, width) = (gather.scales.len(), gather.row_index.len(), gather.width);
    gather.check()?;
    let row_entries = 2 * width;
    needs("dense rows", dense.len(), product(pools, product(rows, row_entries)?)?)?;
    for pool in 0..pools {
        let (scale, offset) = (gather.scales[pool], gather.offsets[pool]);
        for row in 0..rows {
            let ids = gather.ids(pool, row);
            let at = (pool * rows + row) * row_entries;
            let (keys, values) = dense[at..at + row_entries].split_at_mut(width);
            for ((key, value), &id) in keys.iter_mut().zip(values).zip(ids) {
                let scaled = scale.wrapping_mul(id);
                (*key, *value) =
                    if id == -1 { (-1, -1) } else { (scaled, scaled.wrapping_add(offset)) };
            }
        }
    }
    Ok(())
}

/// Enqueues the copy of dense rows `[pools, rows, 2, width]`, as [`block_offsets_on_host`] wrote
/// them to `staged` at `offset`, to an output `[pools, out_rows, 2, width]`; returns how many copies
/// that took. It is one where the output has no further rows, and one for each pool otherwise: rows
/// from `rows` on are not written.
///
/// # Ordering
/// The staging buffer is read when the copies run; see [`Stream::copy_to_device`].
///
/// # Errors
/// [`CopyError`]; of several pools some may have been enqueued then.
pub fn copy_block_offsets(
    stream: &Stream,
    out: DeviceSpan,
    out_rows: u32,
    staged: (&PinnedBuffer, u64),
    [pools, rows, width]: [u32; 3],
) -> Result<u32, CopyError> {
    let (buffer, start) = staged;
    // 2^32 rows of 2^33 entries of 4 bytes do not fit in 64 bits; then nothing that long exists.
    let row_bytes = 8 * u64::from(width);
    let pool_bytes = u64::from(rows).saturating_mul(row_bytes);
    let out_pool_bytes = u64::from(out_rows).saturating_mul(row_bytes);
    if pool_bytes == 0 || pools == 0 {
        return Ok(0);
    }
    if rows > out_rows {
        let (destination, source_bytes) = (out_pool_bytes, pool_bytes);
        return Err(CopyError::Lengths { destination, source_bytes });
    }
    // All places first, so that nothing is enqueued where one of them is not there.
    let all_bytes = out_pool_bytes.saturating_mul(pools.into());
    let out = out.slice(0, all_bytes)?;
    buffer.span(start, pool_bytes.saturating_mul(pools.into()))?;
    if rows == out_rows {
        stream.copy_to_device(out, buffer, start)?;
        return Ok(1);
    }
    for pool in 0..u64::from(pools) {
        let to = out.slice(pool * out_pool_bytes, pool_bytes)?;
        stream.copy_to_device(to, buffer, start + pool * pool_bytes)?;
    }
    Ok(pools)
}

/// Where everything lies in a staging buffer of packed rows: live columns only, and all arrays that
/// the kernel needs, so that one copy to the device carries them.
///
/// [`pack`](PackedOffsets::pack) fills the buffer on the host, one copy sends it to as many bytes of
/// device memory, and [`on_device`](PackedOffsets::on_device) is what
/// [`gather_block_offsets`](crate::KvKernels::gather_block_offsets) then reads, there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PackedOffsets {
    rows: usize,
    pools: usize,
    /// Live columns of all rows, in one pool.
    pool_entries: usize,
    entries: usize,
}

impl PackedOffsets {
    /// The places for what `gather` names.
    ///
    /// # Errors
    /// [`HostGatherError`], for anything that [`pack`](PackedOffsets::pack) could not do.
    pub fn new(gather: &HostOffsets<'_>) -> Result<Self, HostGatherError> {
        gather.check()?;
        let (pools, rows) = (gather.scales.len(), gather.row_index.len());
        // No sum overflows: 2^32 rows of 2^32 columns at most.
        let pool_entries = (0..rows).map(|row| gather.columns(row)).sum::<usize>();
        if u32::try_from(pool_entries).is_err() {
            return Err(HostGatherError::Size { pools, entries: pool_entries });
        }
        let entries = product(pools, pool_entries)?;
        let entries = entries.checked_add(2 * rows + 2 * pools);
        let entries = entries.ok_or(HostGatherError::Size { pools, entries: pool_entries })?;
        Ok(Self { rows, pools, pool_entries, entries })
    }

    /// Entries of 4 bytes that the staging buffer needs.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// Writes starts, lengths, scales, offsets and the live ids of all pools to `staged`.
    ///
    /// # Errors
    /// [`HostGatherError`]; nothing was written then.
    pub fn pack(
        &self,
        gather: &HostOffsets<'_>,
        staged: &mut [i32],
    ) -> Result<(), HostGatherError> {
        if *self != Self::new(gather)? {
            let (given, needed) = (gather.row_index.len(), self.rows);
            return Err(HostGatherError::Length { what: "rows or live columns", given, needed });
        }
        needs("staging buffer", staged.len(), self.entries)?;
        let (starts, rest) = staged.split_at_mut(self.rows);
        let (live, rest) = rest.split_at_mut(self.rows);
        let (scales, rest) = rest.split_at_mut(self.pools);
        let (offsets, ids) = rest.split_at_mut(self.pools);
        scales.copy_from_slice(gather.scales);
        offsets.copy_from_slice(gather.offsets);
        let mut start = 0;
        for row in 0..self.rows {
            let columns = gather.columns(row);
            // The bits of a `u32`: fewer than 2^32 entries are packed (`new`).
            (starts[row], live[row]) = (start as u32 as i32, columns as u32 as i32);
            for pool in 0..self.pools {
                let at = pool * self.pool_entries + start;
                ids[at..at + columns].copy_from_slice(gather.ids(pool, row));
            }
            start += columns;
        }
        Ok(())
    }

    /// The launch that unpacks `staged`, which holds a copy of the staging buffer, into `out`, which
    /// is `[pools, out_rows, 2, width]`.
    ///
    /// # Errors
    /// [`HostGatherError::Length`] where `staged` is shorter than the staging buffer.
    pub fn on_device(
        &self,
        staged: DeviceSpan,
        out: DeviceSpan,
        (out_rows, width): (u32, u32),
    ) -> Result<BlockOffsets<'static>, HostGatherError> {
        needs("device memory", (staged.bytes() / 4) as usize, self.entries)?;
        let mut next = 0;
        let mut part = |entries: usize| {
            let span = staged.slice(next, entries as u64 * 4);
            next += entries as u64 * 4;
            // Within the entries counted above.
            span.map(KernelSource::Device).map_err(|_| HostGatherError::Length {
                what: "device memory",
                given: (staged.bytes() / 4) as usize,
                needed: self.entries,
            })
        };
        let (row_index, live) = (part(self.rows)?, part(self.rows)?);
        let (scales, offsets) = (part(self.pools)?, part(self.pools)?);
        Ok(BlockOffsets {
            source: part(self.pools * self.pool_entries)?,
            pool_stride: self.pool_entries as u64,
            row_stride: 1,
            row_index: Some(row_index),
            host_index: None,
            live: Some(live),
            scales,
            offsets,
            out,
            out_rows,
            pools: self.pools as u32,
            rows: self.rows as u32,
            width,
            report: None,
        })
    }
}

impl HostOffsets<'_> {
    fn columns(&self, row: usize) -> usize {
        self.live.map_or(self.width, |live| self.width.min(live[row] as usize))
    }

    /// The live ids of a row, once `check` has passed.
    fn ids(&self, pool: usize, row: usize) -> &[i32] {
        let at = pool * self.pool_stride + self.row_index[row] as usize * self.row_stride;
        &self.source[at..at + self.columns(row)]
    }

    fn check(&self) -> Result<(), HostGatherError> {
        let (pools, rows) = (self.scales.len(), self.row_index.len());
        let small = |count: usize| u32::try_from(count).is_ok();
        if !small(pools) || !small(rows) || !small(self.width) || !small(self.pool_stride) {
            return Err(HostGatherError::Size { pools, entries: self.pool_stride });
        }
        needs("offsets", self.offsets.len(), pools)?;
        if let Some(live) = self.live {
            needs("live columns", live.len(), rows)?;
        }
        needs("source", self.source.len(), product(pools, self.pool_stride)?)?;
        for (row, &source_row) in self.row_index.iter().enumerate() {
            let start = (source_row as usize).saturating_mul(self.row_stride);
            if start.saturating_add(self.columns(row)) > self.pool_stride {
                let pool_stride = self.pool_stride;
                return Err(HostGatherError::RowOutOfRange { row, source_row, pool_stride });
            }
        }
        Ok(())
    }
}

fn product(pools: usize, entries: usize) -> Result<usize, HostGatherError> {
    pools.checked_mul(entries).ok_or(HostGatherError::Size { pools, entries })
}

fn needs(what: &'static str, given: usize, needed: usize) -> Result<(), HostGatherError> {
    if given >= needed { Ok(()) } else { Err(HostGatherError::Length { what, given, needed }) }
}

cuda_driver::messages::one_line_debug!(HostGatherError);
