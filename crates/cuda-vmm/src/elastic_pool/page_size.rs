//! Which size of pages suits blocks of a size: what each wastes, and how many calls it takes.

/// Page sizes worth comparing on today's devices: their granularity, and two larger ones, which take
/// fewer driver calls and fewer entries of the device's page tables.
pub const PAGE_SIZES: [u64; 3] = [2 << 20, 16 << 20, 64 << 20];

/// What pages of one size mean for a number of blocks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PageSizeReport {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages that the blocks lie on.
    pub pages: u64,
    /// Bytes of these pages.
    pub mapped_bytes: u64,
    /// Of the mapped bytes, those that no block covers.
    pub waste_bytes: u64,
    /// Blocks that become ready with the first page; 0 if a block is larger than a page.
    pub blocks_per_page: u64,
}

/// Why page sizes could not be compared.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PageSizeError {
    /// A page has no bytes.
    #[error("a page of 0 bytes")]
    NoPage,
    /// The blocks' bytes do not fit in 64 bits.
    #[error("{blocks} blocks of {block_bytes} bytes, in pages of {page_bytes}, overflow 64 bits")]
    Overflow {
        /// Blocks.
        blocks: u64,
        /// Bytes of each.
        block_bytes: u64,
        /// Bytes of a page.
        page_bytes: u64,
    },
}

/// What `blocks` blocks of `block_bytes` bytes, laid end to end as in an
/// [`ElasticPool`](crate::ElasticPool), take of pages of each candidate size, in the candidates' order.
///
/// # Errors
/// [`PageSizeError`].
///
/// # Examples
/// ```
/// use cuda_vmm::{PAGE_SIZES, page_size_report};
///
/// // 100 blocks of 640 KiB are 62.5 MiB.
/// let reports = page_size_report(100, 640 << 10, &PAGE_SIZES)?;
/// let pages: Vec<_> = reports.iter().map(|report| report.pages).collect();
/// assert_eq!(pages, [32, 4, 1]);
/// assert_eq!(reports[2].waste_bytes, 3 << 19);
/// # Ok::<(), cuda_vmm::PageSizeError>(())
/// ```
pub fn page_size_report(
    blocks: u64,
    block_bytes: u64,
    candidates: &[u64],
) -> Result<Vec<PageSizeReport>, PageSizeError> {
    let report = |&page_bytes: &u64| {
        if page_bytes == 0 {
            return Err(PageSizeError::NoPage);
        }
        let overflow = PageSizeError::Overflow { blocks, block_bytes, page_bytes };
        let bytes = blocks.checked_mul(block_bytes).ok_or(overflow)?;
        let mapped_bytes = bytes.checked_next_multiple_of(page_bytes).ok_or(overflow)?;
        Ok(PageSizeReport {
            page_bytes,
            pages: mapped_bytes / page_bytes,
            mapped_bytes,
            waste_bytes: mapped_bytes - bytes,
            blocks_per_page: page_bytes.checked_div(block_bytes).unwrap_or(0).min(blocks),
        })
    };
    candidates.iter().map(report).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waste_and_pages_add_up_for_every_size() {
        for (blocks, block_bytes) in [(1, 1), (7, 3 << 20), (1000, 48 << 10), (0, 5), (3, 0)] {
            for report in page_size_report(blocks, block_bytes, &PAGE_SIZES).unwrap() {
                let PageSizeReport { page_bytes, pages, mapped_bytes, waste_bytes, .. } = report;
                assert_eq!(mapped_bytes, pages * page_bytes);
                assert_eq!(mapped_bytes - waste_bytes, blocks * block_bytes);
                assert!(waste_bytes < page_bytes);
                assert!(report.blocks_per_page * block_bytes <= page_bytes);
            }
        }
    }

    #[test]
    fn sizes_that_mean_nothing_are_named() {
        assert_eq!(page_size_report(1, 1, &[2, 0]), Err(PageSizeError::NoPage));
        let (blocks, block_bytes) = (u64::MAX, 2);
        let overflow = PageSizeError::Overflow { blocks, block_bytes, page_bytes: 2 };
        assert_eq!(page_size_report(blocks, block_bytes, &[2]), Err(overflow));
        assert!(page_size_report(u64::MAX, 1, &[1 << 20]).is_err());
    }
}
