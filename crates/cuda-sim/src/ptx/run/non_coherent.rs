//! Finds bytes that a kernel both writes and loads by `ld.global.nc`, in whatever order.
//!
//! Such a load goes through a cache that is not kept up to date while the kernel runs. So no
//! barrier orders it behind a write, not even of the same thread.

use std::collections::HashMap;

/// Number of bytes of a page, one bit each.
const PAGE_BYTES: u64 = 1024;

/// Maximum number of pages. Beyond it all are dropped, and noting starts again.
const PAGES_MAX: usize = 1 << 20;

/// One bit for each byte of a page.
type Bits = [u64; PAGE_BYTES as usize / 64];

/// The bytes of a launch that were loaded so, and those that were written.
#[derive(Debug, Default)]
pub(super) struct NonCoherent {
    pages: HashMap<u64, [Bits; 2]>,
}

impl NonCoherent {
    /// Notes a write, or a load of the kind. Returns whether a byte of it was accessed in the other
    /// way too. The range is aligned to its length, at most 16 bytes.
    pub(super) fn access(&mut self, (address, bytes): (u64, u32), writes: bool) -> bool {
        if self.pages.len() >= PAGES_MAX {
            self.pages.clear();
        }
        let [loaded, written] = self.pages.entry(address / PAGE_BYTES).or_default();
        let (own, other) = if writes { (written, loaded) } else { (loaded, written) };
        let (word, bit) = ((address % PAGE_BYTES / 64) as usize, address % 64);
        let range = ((1u64 << bytes) - 1) << bit;
        own[word] |= range;
        other[word] & range != 0
    }
}
