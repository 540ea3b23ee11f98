//! Bytes of device memory, taken from the host page by page.

use std::sync::OnceLock;

use super::initialised::Initialised;
use crate::random::mix;

/// What new memory is like.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fresh {
    /// Number that its bytes come from.
    pub(super) pattern: u64,
    /// Whether it is known later which bytes were written.
    pub(super) track_initialised: bool,
}

/// The bytes of one allocation or one physical handle.
///
/// A page is taken when first touched, and starts with one seeded byte repeated, which is never
/// zero: fresh device memory holds whatever was there before, and code that relies on zeros is wrong.
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

    /// The bytes from `offset` on, at most `most` and at most to the end of their page.
    pub(crate) fn piece(&self, offset: u64, most: u64) -> &[u8] {
        let (index, start) = self.place(offset);
        let page = self.pages[index].get_or_init(|| self.fresh(index));
        let end = (start as u64).saturating_add(most).min(page.len() as u64);
        &page[start..end as usize]
    }

    /// As [`piece`](Pages::piece), all of it to be written.
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

    /// How many of the `most` bytes from `offset` on lie in the same page, and the first run of
    /// these that was never written: where it starts, from `offset` on, and its length.
    pub(super) fn gap(&self, offset: u64, most: u64) -> (u64, Option<(u64, u64)>) {
        let (index, start) = self.place(offset);
        let start = start as u64;
        let end = start.saturating_add(most).min(self.page_bytes(index));
        let gap = self.initialised.gap(index, start, end);
        (end - start, gap.map(|(from, to)| (from - start, to - from)))
    }

    /// Notes that the bytes from `offset` on, at most `most` and at most to the end of their page,
    /// hold what was never written; how many these are.
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
