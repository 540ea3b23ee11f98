//! Bytes of device memory, taken from the host page by page.

use std::sync::OnceLock;

use crate::random::mix;

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
}

impl Pages {
    /// `bytes` bytes in pages of `1 << shift`.
    pub(crate) fn new(bytes: u64, shift: u32, pattern: u64) -> Self {
        let count = bytes.div_ceil(1 << shift) as usize;
        Self { bytes, shift, pattern, pages: (0..count).map(|_| OnceLock::new()).collect() }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fresh(&self, index: usize) -> Box<[u8]> {
        let start = (index as u64) << self.shift;
        let len = (self.bytes - start).min(1 << self.shift) as usize;
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

    /// As [`piece`](Pages::piece), to be written.
    pub(crate) fn piece_mut(&mut self, offset: u64, most: u64) -> &mut [u8] {
        let (index, start) = self.place(offset);
        if self.pages[index].get().is_none() {
            let page = self.fresh(index);
            self.pages[index] = OnceLock::from(page);
        }
        let page = self.pages[index].get_mut().map(|page| &mut **page).unwrap_or_default();
        let end = (start as u64).saturating_add(most).min(page.len() as u64);
        &mut page[start..end as usize]
    }

    fn place(&self, offset: u64) -> (usize, usize) {
        ((offset >> self.shift) as usize, (offset & ((1 << self.shift) - 1)) as usize)
    }
}
