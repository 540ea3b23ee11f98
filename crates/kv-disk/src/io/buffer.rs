//! Memory that the kernel may read and write without copies: whole pages, at addresses that are multiples of a page.

use std::fmt;

use bytemuck::{Pod, Zeroable};

/// Alignment of every place in a file, and of every buffer: a page, and a multiple of every sector in use.
pub const PAGE_BYTES: usize = 4096;

/// A page. Its alignment is that of the buffer that it is in.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

/// Aligned memory of a read or write.
pub struct Buffer {
    pages: Vec<Page>,
    /// Its number among the buffers that a ring has registered.
    pub(crate) registered: Option<u16>,
}

impl Buffer {
    /// Zeros, of so many bytes, rounded up to pages.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self { pages: vec![Page::zeroed(); bytes.div_ceil(PAGE_BYTES)], registered: None }
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pages.len() * PAGE_BYTES
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.pages)
    }

    /// The bytes, to be written.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.pages)
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("bytes", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_whole_pages_at_page_addresses() {
        for bytes in [0, 1, 4096, 4097, 1 << 20] {
            let buffer = Buffer::new(bytes);
            assert_eq!(buffer.len(), bytes.next_multiple_of(PAGE_BYTES));
            assert!(buffer.bytes().as_ptr().addr().is_multiple_of(PAGE_BYTES));
            assert!(buffer.bytes().iter().all(|byte| *byte == 0));
        }
    }
}
