//! `cuMemAlloc` memory: ranges of any length, with gaps between them.

use cuda_driver::ErrorCode;

use super::pages::Pages;
use super::{
    ALLOCATION_PAGE_SHIFT, ALLOCATION_START, Charge, Denied, Located, Memory, VIRTUAL_START, Viewer,
};
use crate::RangeKind;

/// Alignment of allocations, and the smallest gap between two, in bytes.
const ALIGNMENT: u64 = 512;

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) device: u32,
    pages: Pages,
    _charge: Charge,
}

impl Allocation {
    pub(crate) fn bytes(&self) -> u64 {
        self.pages.bytes()
    }
}

/// All live allocations, by address. Addresses only rise, so no address is reused.
#[derive(Debug)]
pub(crate) struct Allocations {
    live: Vec<Allocation>,
    next: u64,
}

impl Allocations {
    pub(super) fn new() -> Self {
        Self { live: Vec::new(), next: ALLOCATION_START + ALIGNMENT }
    }

    pub(crate) fn live(&self) -> &[Allocation] {
        &self.live
    }

    #[inline]
    pub(super) fn locate(&self, viewer: Viewer, address: u64) -> Result<(Located, u64), Denied> {
        let next = self.live.partition_point(|allocation| allocation.base <= address);
        let index = next.checked_sub(1).ok_or(Denied::Nothing)?;
        let allocation = &self.live[index];
        let offset = address - allocation.base;
        let rest = allocation.bytes().checked_sub(offset).filter(|&rest| rest > 0);
        let rest = rest.ok_or(Denied::Nothing)?;
        if viewer.allocations >> allocation.device & 1 == 0 {
            return Err(Denied::NoAccess);
        }
        Ok((Located::Allocation { index, offset }, rest))
    }

    #[inline]
    pub(super) fn pages(&self, index: usize) -> &Pages {
        &self.live[index].pages
    }

    pub(super) fn pages_mut(&mut self, index: usize) -> &mut Pages {
        &mut self.live[index].pages
    }

    /// Index of the allocation that starts at `base`.
    pub(crate) fn starting_at(&self, base: u64) -> Option<usize> {
        self.live.binary_search_by_key(&base, |allocation| allocation.base).ok()
    }
}

impl Memory {
    pub(crate) fn allocate(&mut self, device: u32, bytes: u64) -> Result<u64, ErrorCode> {
        if bytes == 0 {
            return Err(ErrorCode::INVALID_VALUE);
        }
        let taken = bytes.checked_next_multiple_of(ALIGNMENT).ok_or(ErrorCode::OUT_OF_MEMORY)?;
        let base = self.allocations.next;
        if taken > VIRTUAL_START - ALIGNMENT - base {
            return Err(ErrorCode::OUT_OF_MEMORY);
        }
        let charge = self.take(device, taken)?;
        let pages = Pages::new(bytes, ALLOCATION_PAGE_SHIFT, self.fresh());
        self.allocations.live.push(Allocation { base, device, pages, _charge: charge });
        self.allocations.next = base + taken + ALIGNMENT;
        Ok(base)
    }

    pub(crate) fn free(&mut self, index: usize) {
        let allocation = self.allocations.live.remove(index);
        self.remember_freed(RangeKind::Allocation, allocation.base, allocation.bytes());
    }
}
