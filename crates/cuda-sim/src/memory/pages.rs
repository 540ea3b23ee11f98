//! Bytes of device memory, allocated from the host page by page.

use std::sync::OnceLock;

use super::initialised::Initialised;
use crate::random::mix;

#[derive(Clone, Copy, Debug)]
pub(super) struct Fresh {
    /// The number that determines the byte pattern.
    pub(super) pattern: u64,
    pub(super) track_initialised: bool,
}

/// The bytes of one allocation or one physical handle.
///
/// A page is allocated when first touched, and starts with one seeded byte repeated. The byte is
/// never zero: fresh device memory holds whatever was there before, and code that relies on zeros
/// is wrong.
#[derive(Debug)]
pub(crate) struct Pages {
    bytes: u64,
    shift: u32,
    pattern: u64,
    pages: Box<[OnceLock<Box<[u8]>>]>,
    initialised: Initialised,
}

impl Pages {
    /// `bytes` bytes in pages of `1 << shift`, filled by `fresh`.
    pub(super) fn new(bytes: u64, shift: u32, fresh: Fresh) -> Self {
        let count = bytes.div_ceil(1 << shift) as usize;
        let pages = (0..count).map(|_| OnceLock::new()).collect();
        let initialised = Initialised::new(count, fresh.track_initialised);
        Self { bytes, shift, pattern: fresh.pattern, pages, initialised }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fresh(&self, index: usize) -> Box<[u8]> {
        let len = self.page_bytes(index) as usize;
        let byte = mix(self.pattern.wrapping_add(index as u64)) as u8 | 1;
        vec![byte; len].into_boxed_slice()
    }

    /// The bytes from `offset` on: at most `most`, and at most to the end of their page.
    pub(crate) fn piece(&self, offset: u64, most: u64) -> &[u8] {
        let (index, start) = self.place(offset);
        let page = self.pages[index].get_or_init(|| self.fresh(index));
        let end = (start as u64).saturating_add(most).min(page.len() as u64);
        &page[start..end as usize]
    }

    /// Like [`piece`](Pages::piece), for a caller that writes all of it.
    pub(crate) fn piece_mut(&mut self, offset: u64, most: u64) -> &mut [u8] {
        let (index, start) = self.place(offset);
        if self.pages[index].get().is_none() {
            let page = self.fresh(index);
            self.pages[index] = OnceLock::from(page);
        }
        let page = self.pages[index].get_mut().map(|page| &mut **page).unwrap_or_default();
        let len = page.len() as u64;
        let end = (start as u64).saturating_add(most).min(len);
        self.initialised.written(index, (start as u64, end), len);
        &mut page[start..end as usize]
    }

    /// The number of the `most` bytes from `offset` on that lie in the same page, and the first
    /// never-written run among them: its start relative to `offset`, and its length.
    pub(super) fn gap(&self, offset: u64, most: u64) -> (u64, Option<(u64, u64)>) {
        let (index, start) = self.place(offset);
        let start = start as u64;
        let end = start.saturating_add(most).min(self.page_bytes(index));
        let gap = self.initialised.gap(index, start, end);
        (end - start, gap.map(|(from, to)| (from - start, to - from)))
    }

    /// Marks the bytes from `offset` on as never written: at most `most`, and at most to the end of
    /// their page. Returns their number.
    pub(super) fn forget(&mut self, offset: u64, most: u64) -> u64 {
        let (index, start) = self.place(offset);
        let (start, len) = (start as u64, self.page_bytes(index));
        let end = start.saturating_add(most).min(len);
        self.initialised.forgotten(index, (start, end), len);
        end - start
    }

    fn page_bytes(&self, index: usize) -> u64 {
        (self.bytes - ((index as u64) << self.shift)).min(1 << self.shift)
    }

    fn place(&self, offset: u64) -> (usize, usize) {
        ((offset >> self.shift) as usize, (offset & ((1 << self.shift) - 1)) as usize)
    }
}
