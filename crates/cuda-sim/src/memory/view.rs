//! Memory as one kernel sees it.

use std::borrow::Cow;

use cuda_driver::reference::{AccessFault, DeviceMemory};

use super::{Located, Memory, Viewer};
use crate::races::StrongMark;

/// The memory of the machine, with the access rights of one device.
#[derive(Debug)]
pub(crate) struct View<'a> {
    memory: &'a mut Memory,
    viewer: Viewer,
}

impl<'a> View<'a> {
    pub(crate) fn new(memory: &'a mut Memory, viewer: Viewer) -> Self {
        Self { memory, viewer }
    }

    /// Loads like [`DeviceMemory::load`]. With a mark, the access takes part in synchronisation with
    /// other launches.
    #[inline]
    pub(crate) fn load_as(
        &self,
        address: u64,
        bytes: u64,
        mark: Option<StrongMark>,
    ) -> Result<Cow<'_, [u8]>, AccessFault> {
        self.memory.recorder.load(address, bytes, mark);
        self.load_unrecorded(address, bytes)
    }

    /// Stores, with the same meaning of the mark.
    #[inline]
    pub(crate) fn store_as(
        &mut self,
        address: u64,
        data: &[u8],
        mark: Option<StrongMark>,
    ) -> Result<(), AccessFault> {
        self.memory.recorder.store(address, data.len() as u64, mark);
        self.memory.traffic.store(address, data.len() as u64);
        self.memory.store(self.viewer, address, data)
    }

    /// Whether every byte of an accessible range was written before.
    pub(crate) fn initialised(&self, address: u64, bytes: u64) -> bool {
        self.memory.initialised(self.viewer, address, bytes)
    }
}

impl View<'_> {
    /// Avoids hash table lookups: a replay reads a terabyte through this function.
    fn load_unrecorded(&self, address: u64, bytes: u64) -> Result<Cow<'_, [u8]>, AccessFault> {
        self.memory.traffic.load(address, bytes);
        let piece = match self.memory.locate(self.viewer, address) {
            Ok((Located::Physical { index, offset }, rest)) => {
                self.memory.virtual_memory.pages(index).piece(offset, bytes.min(rest))
            }
            Ok((Located::Allocation { index, offset }, rest)) => {
                self.memory.allocations.pages(index).piece(offset, bytes.min(rest))
            }
            _ => &[],
        };
        if piece.len() as u64 == bytes {
            return Ok(Cow::Borrowed(piece));
        }
        // The range lies in several pieces, or in memory that the host may write meanwhile (which is
        // therefore never borrowed), or is invalid.
        self.memory.read(self.viewer, address, bytes).map(|copy| Cow::Owned(copy.into_vec()))
    }
}

impl DeviceMemory for View<'_> {
    fn load(&self, address: u64, bytes: u64) -> Result<Cow<'_, [u8]>, AccessFault> {
        self.load_as(address, bytes, None)
    }

    fn store(&mut self, address: u64, data: &[u8]) -> Result<(), AccessFault> {
        self.store_as(address, data, None)
    }
}
