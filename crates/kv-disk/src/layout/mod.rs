//! What lies where in a file of slots, and how its own words are written and read.
//!
//! | part | place | bytes |
//! | --- | --- | --- |
//! | heading, twice | 0 and 4096 | a page each, the newer one counts |
//! | table | 8192 | 128 for each slot, 32 a page |
//! | slots | behind, at a page | [`Geometry::slot_bytes`] each |
//!
//! A slot holds an [`Entry`] and then a record: its header behind the entry, and its block. A block of whole pages begins at
//! the next page, so that a disk reads and writes it in place; any other begins right behind the header. The table has a copy of each slot's entry, so that opening a file reads
//! the table alone. All numbers are little-endian.

mod entry;
mod heading;

pub use entry::{ENTRY_BYTES, Entry, EntryFault};
pub use heading::{Heading, HeadingFault};

use crate::io::PAGE_BYTES;

/// The version of the layout. A file of another version is not read.
pub(crate) const VERSION: u32 = 4;

/// Entries in a page of the table.
pub const ENTRIES_A_PAGE: u64 = (PAGE_BYTES / ENTRY_BYTES) as u64;

/// Slots of a file, at most.
pub(crate) const SLOTS_MAX: u64 = kv_pool::BLOCKS_MAX;

/// Bytes of a slot, at most.
pub(crate) const SLOT_BYTES_MAX: u64 = 1 << 30;

/// How many slots a file has, and of how many bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Geometry {
    /// Slots.
    pub slots: u64,
    /// Bytes of each, a multiple of [`PAGE_BYTES`].
    pub slot_bytes: u64,
}

impl Geometry {
    /// Bytes of a slot that has room for a record of so many bytes.
    #[must_use]
    pub fn slot_bytes_for(record_bytes: u64) -> u64 {
        let page = PAGE_BYTES as u64;
        let bytes = record_bytes.saturating_add(ENTRY_BYTES as u64);
        bytes.checked_next_multiple_of(page).unwrap_or(u64::MAX - (page - 1))
    }

    /// As many slots as fit into a file of so many bytes; none if not one does.
    #[must_use]
    pub fn within(file_bytes: u64, slot_bytes: u64) -> Option<Self> {
        let page = PAGE_BYTES as u64;
        let fits = slot_bytes.is_multiple_of(page) && (page..=SLOT_BYTES_MAX).contains(&slot_bytes);
        let room = file_bytes.checked_sub(2 * page).filter(|_| fits)?;
        let most = (room / (slot_bytes + ENTRY_BYTES as u64)).min(SLOTS_MAX);
        // The last page of the table may be in part empty.
        let slots = [most, most.saturating_sub(1)];
        let slots =
            slots.into_iter().find(|&slots| Self { slots, slot_bytes }.bytes() <= file_bytes);
        let slots = slots.unwrap_or(0);
        (slots > 0).then_some(Self { slots, slot_bytes })
    }

    /// Whether the numbers can be those of a file.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let page = PAGE_BYTES as u64;
        (1..=SLOTS_MAX).contains(&self.slots)
            && (page..=SLOT_BYTES_MAX).contains(&self.slot_bytes)
            && self.slot_bytes.is_multiple_of(page)
    }

    /// Pages of the table.
    #[must_use]
    pub fn table_pages(&self) -> u64 {
        self.slots.div_ceil(ENTRIES_A_PAGE)
    }

    /// Where a page of the table begins.
    #[must_use]
    pub fn table_page(&self, page: u64) -> u64 {
        (2 + page) * PAGE_BYTES as u64
    }

    /// Where a slot begins.
    #[must_use]
    pub fn slot(&self, slot: u64) -> u64 {
        self.table_page(self.table_pages()) + slot * self.slot_bytes
    }

    /// Bytes of the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.slot(self.slots)
    }
}

/// Where the block of a record begins in its slot.
pub(crate) fn block_at(length: u64, head: u32) -> u64 {
    let (page, behind) = (PAGE_BYTES as u64, ENTRY_BYTES as u64 + u64::from(head));
    let whole = head > 0 && length.saturating_sub(head.into()).is_multiple_of(page);
    if whole { behind.next_multiple_of(page) } else { behind }
}

/// Bytes of a slot that a record has, in whole pages; none if there is no such record.
pub(crate) fn bytes_of(length: u64, head: u32) -> Option<u64> {
    let block = length.checked_sub(head.into())?;
    block_at(length, head).checked_add(block)?.checked_next_multiple_of(PAGE_BYTES as u64)
}
