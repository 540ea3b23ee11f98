//! Device memory that groups share by granules: its pages, and where each group has them.
//!
//! Every granule has pages on each device from the start. A group has addresses for all granules, and gets the
//! pages of one mapped there when it is first given it. They stay mapped when the granule becomes another group's,
//! so that nothing is unmapped while steps run, and addresses in captured graphs stay valid. Only plans say which
//! group uses the pages: a granule changes hands when the work that used it is complete.

use cuda_driver::{Device, DeviceSpan};
use cuda_vmm::pages::{
    Page, PagePool, PagePoolOptions, Reservation, ReservationOptions, SharedPage,
};
use cuda_vmm::{CloseReport, EpochGate, MemoryRules};
use kv_manager::{GroupId, SharedMemory};

use crate::options::common_divisor;
use crate::{BuildError, CloseError, GranuleError, OptionsError};

/// The pages of all granules on one device.
#[derive(Debug)]
pub(crate) struct Granules {
    pages: PagePool,
    /// Those of each granule, one granule after the other.
    all: Vec<SharedPage>,
    /// Pages of a granule: as many as the group needs that needs most.
    granule_pages: u64,
    granules: u32,
}

/// A group's addresses on one device: its place for each granule, and behind them its null block.
#[derive(Debug)]
pub(crate) struct GroupRange {
    group: GroupId,
    reservation: Reservation,
    pages: PagePool,
    /// Pages of a granule of this group.
    granule_pages: u64,
    /// Which granules are mapped.
    mapped: Vec<bool>,
}

impl Granules {
    /// Pages for granules of as many blocks as `memory` says; blocks of the groups have `block_bytes` bytes here.
    pub(crate) fn new(
        device: &Device,
        memory: &SharedMemory,
        block_bytes: &[u64],
        rules: MemoryRules,
    ) -> Result<Self, BuildError> {
        let one = PagePoolOptions { page_bytes: None, capacity_pages: 1 };
        let smallest = PagePool::new(device, one).map_err(|source| no_pages(device, 1, source))?;
        let smallest = smallest.page_bytes();
        let mut page_bytes = 0;
        let granule_bytes = || {
            block_bytes.iter().zip(&memory.granule_blocks).map(|(bytes, &of)| bytes * u64::from(of))
        };
        for (bytes, id) in granule_bytes().zip(0..) {
            if !bytes.is_multiple_of(smallest) {
                let (group, page_bytes) = (GroupId(id), smallest);
                return Err(OptionsError::SplitPage { group, bytes, page_bytes }.into());
            }
            page_bytes = common_divisor(page_bytes, bytes);
        }
        // As large as all groups can map, so that a granule takes few calls.
        let options = PagePoolOptions { page_bytes: Some(page_bytes), capacity_pages: u64::MAX };
        let pages = PagePool::with_rules(device, options, rules)
            .map_err(|source| no_pages(device, 0, source))?;
        let granule_pages = granule_bytes().max().unwrap_or(0) / page_bytes;
        let count = granule_pages * u64::from(memory.granules);
        let all = pages.take_many(count).map_err(|source| no_pages(device, count, source))?;
        let all = all.into_iter().map(|page| page.share()).collect();
        Ok(Self { pages, all, granule_pages, granules: memory.granules })
    }

    /// Addresses for a group, and memory for its null block.
    pub(crate) fn range(
        &self,
        gate: &EpochGate,
        (group, granule_bytes, block_bytes): (GroupId, u64, u64),
    ) -> Result<GroupRange, BuildError> {
        let (device, page_bytes) = (self.pages.device(), self.pages.page_bytes());
        let null_pages = block_bytes.div_ceil(page_bytes);
        let granule_pages = granule_bytes / page_bytes;
        let count = granule_pages * u64::from(self.granules);
        let bytes = (count + null_pages) * page_bytes;
        let options = ReservationOptions { bytes, page_bytes: Some(page_bytes), peers: Vec::new() };
        let reservation = Reservation::with_gate(device, options, gate.clone())?;
        let null = self.pages.take_many(null_pages);
        let null = null.map_err(|source| no_pages(device, null_pages, source))?;
        let ordinal = device.ordinal();
        if let Err(error) = reservation.map_range(count, null) {
            let source = error.reason;
            return Err(GranuleError::Null { group, ordinal, source }.into());
        }
        let mapped = vec![false; self.granules as usize];
        Ok(GroupRange { group, reservation, pages: self.pages.clone(), granule_pages, mapped })
    }

    pub(crate) fn close(self) -> Vec<CloseError> {
        let Self { pages, all, .. } = self;
        give_back(&pages, all);
        let (_, refused) = pages.trim(0);
        let (ordinal, leaked_bytes) = (pages.device().ordinal(), 0);
        let first = refused.into_iter().next();
        first
            .map(|source| CloseError::Refused { ordinal, leaked_bytes, source })
            .into_iter()
            .collect()
    }
}

impl GroupRange {
    pub(crate) fn span(&self) -> DeviceSpan {
        self.reservation.span()
    }

    /// Has a granule mapped at the group's place for it, from now on.
    pub(crate) fn map(&mut self, granules: &Granules, granule: u32) -> Result<(), GranuleError> {
        let index = granule as usize;
        if self.mapped.get(index) != Some(&false) {
            return Ok(());
        }
        let pages = granules.all.iter().skip(index * granules.granule_pages as usize);
        let pages = pages.take(self.granule_pages as usize).cloned();
        let first = u64::from(granule) * self.granule_pages;
        if let Err(error) = self.reservation.map_range(first, pages) {
            // Else the next try would find them there.
            give_back(&self.pages, self.reservation.retry_quarantined().pages);
            let (group, ordinal) = (self.group, self.reservation.device().ordinal());
            return Err(GranuleError::Map { group, granule, ordinal, source: error.reason });
        }
        self.mapped[index] = true;
        Ok(())
    }

    /// Unmaps everything. The device is at rest, and no lease of the gate is open.
    pub(crate) fn close(self) -> Result<CloseReport, ()> {
        let Self { reservation, pages, .. } = self;
        let mut report = reservation.close(&[]).wait().map_err(drop)?;
        give_back(&pages, std::mem::take(&mut report.pages));
        Ok(report)
    }
}

fn no_pages(device: &Device, pages: u64, source: cuda_vmm::pages::PageError) -> GranuleError {
    GranuleError::Pages { ordinal: device.ordinal(), pages, source }
}

fn give_back<P: Into<Page>>(pool: &PagePool, pages: impl IntoIterator<Item = P>) {
    for page in pages {
        if let Err(error) = pool.give_back(page) {
            tracing::error!(%error, "a page of shared memory is of another pool");
        }
    }
}
