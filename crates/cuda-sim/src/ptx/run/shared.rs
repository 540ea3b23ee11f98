//! The shared memory of a block.

use super::observation::{Ran, Trouble};
use crate::FindingKind;

/// The contents of shared memory before the first write.
const FRESH: u8 = 0xA7;

/// Shared memory, and which of its bytes were written.
#[derive(Debug)]
pub(super) struct SharedBytes {
    bytes: Vec<u8>,
    written: Vec<bool>,
    touched: bool,
}

impl SharedBytes {
    pub(super) fn new(bytes: u32) -> Self {
        let bytes = bytes as usize;
        Self { bytes: vec![FRESH; bytes], written: vec![false; bytes], touched: false }
    }

    /// Resets shared memory for a new block.
    pub(super) fn renew(&mut self) {
        if self.touched {
            self.bytes.fill(FRESH);
            self.written.fill(false);
            self.touched = false;
        }
    }

    fn range(&self, offset: u64, bytes: u32) -> Ran<std::ops::Range<usize>> {
        let size = self.bytes.len() as u64;
        match offset.checked_add(bytes.into()) {
            Some(end) if end <= size => Ok(offset as usize..end as usize),
            _ => {
                let past = offset.saturating_add(bytes.into()) - size;
                let detail = format!(
                    "{bytes} bytes at offset {offset:#x} of shared memory, \
                     {past} bytes past the end of its {size} bytes"
                );
                Err(Trouble::new(FindingKind::IllegalAccess, detail))
            }
        }
    }

    /// Reads into the start of `into`. Returns whether all of it was written before.
    pub(super) fn load(&self, offset: u64, bytes: u32, into: &mut [u8; 16]) -> Ran<bool> {
        let range = self.range(offset, bytes)?;
        into[..bytes as usize].copy_from_slice(&self.bytes[range.clone()]);
        Ok(self.written[range].iter().all(|&written| written))
    }

    pub(super) fn store(&mut self, offset: u64, data: &[u8]) -> Ran<()> {
        let range = self.range(offset, data.len() as u32)?;
        self.bytes[range.clone()].copy_from_slice(data);
        self.written[range].fill(true);
        self.touched = true;
        Ok(())
    }
}
