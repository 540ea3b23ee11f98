//! Memory as one kernel sees it.

use std::borrow::Cow;

use cuda_driver::{AccessFault, DeviceMemory};

use super::{Memory, Place, Viewer};

/// The memory of the machine with the rights of one device.
#[derive(Debug)]
pub(crate) struct View<'a> {
    memory: &'a mut Memory,
    viewer: Viewer,
}

impl<'a> View<'a> {
    pub(crate) fn new(memory: &'a mut Memory, viewer: Viewer) -> Self {
        Self { memory, viewer }
    }

    /// Whether every byte of a range that may be loaded was written once before.
    pub(crate) fn initialised(&self, address: u64, bytes: u64) -> bool {
        self.memory.initialised(self.viewer, address, bytes)
    }
}

impl DeviceMemory for View<'_> {
    /// Takes no lock and looks nothing up in a hash table: a replay reads a terabyte through this.
    fn load(&self, address: u64, bytes: u64) -> Result<Cow<'_, [u8]>, AccessFault> {
        self.memory.traffic.load(address, bytes);
        let piece = match self.memory.locate(self.viewer, address) {
            Ok((Place::Physical { index, offset }, rest)) => {
                match self.memory.virtual_memory.own_pages(index) {
                    Some(pages) => pages.piece(offset, bytes.min(rest)),
                    None => &[],
                }
            }
            Ok((Place::Allocation { index, offset }, rest)) => {
                self.memory.allocations.pages(index).piece(offset, bytes.min(rest))
            }
            _ => &[],
        };
        if piece.len() as u64 == bytes {
            return Ok(Cow::Borrowed(piece));
        }
        // In several pieces, in memory that the host or another machine may write meanwhile (and
        // which therefore is never borrowed), or bad.
        self.memory.read(self.viewer, address, bytes).map(|copy| Cow::Owned(copy.into_vec()))
    }

    fn store(&mut self, address: u64, data: &[u8]) -> Result<(), AccessFault> {
        self.memory.traffic.store(address, data.len() as u64);
        self.memory.store(self.viewer, address, data)
    }
}
