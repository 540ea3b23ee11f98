//! Mapping as a transaction: access is granted before anybody can see the pages, or all is undone.

use std::ops::Range;

use cuda_driver::AddressRange;

use crate::reservation::Inner;
use crate::{MapError, MapRefusal, MapStep, Page};

impl Inner {
    /// Maps `pages` from page `first` on; returns how many were new. See
    /// [`Reservation::map_range`](crate::Reservation::map_range).
    pub(crate) fn map(&self, first: u64, pages: Vec<Page>) -> Result<u64, MapError> {
        let refuse = |reason, pages| Err(MapError { reason, pages, quarantined: 0 });
        if let Err(reason) = self.check_pages(first, &pages) {
            return refuse(reason, pages);
        }
        // Whoever comes second waits here and then finds the first one's pages mapped (H1).
        let _editing = self.editing.lock();
        let runs = match self.runs_to_map(first, &pages) {
            Ok(runs) => runs,
            Err(reason) => return refuse(reason, pages),
        };
        let addresses = self.addresses.read();
        let Some(addresses) = addresses.as_ref() else {
            unreachable!("a reservation is consumed when it is closed");
        };
        match self.commit(addresses, first, &runs, &pages) {
            Ok(()) => Ok(self.record(first, &runs, pages)),
            Err((mapped, reason)) => Err(self.roll_back(addresses, first, mapped, reason, pages)),
        }
    }

    fn check_pages(&self, first: u64, pages: &[Page]) -> Result<(), MapRefusal> {
        self.check_range(first, pages.len() as u64)?;
        for page in pages {
            if page.bytes() != self.page_bytes {
                return Err(MapRefusal::PageBytes {
                    page: page.id(),
                    bytes: page.bytes(),
                    page_bytes: self.page_bytes,
                });
            }
            if *page.device() != self.device {
                return Err(MapRefusal::ForeignDevice { page: page.id() });
            }
        }
        Ok(())
    }

    /// The runs of pages that are not mapped yet. Fails on a page that holds something else.
    fn runs_to_map(&self, first: u64, pages: &[Page]) -> Result<Vec<Range<u64>>, MapRefusal> {
        let table = self.table.lock();
        let mut runs: Vec<Range<u64>> = Vec::new();
        for (index, page) in (first..).zip(pages) {
            if !table.wants(index, page.id())? {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end == index => run.end += 1,
                _ => runs.push(index..index + 1),
            }
        }
        Ok(runs)
    }

    /// Makes the driver calls. On failure says which pages are mapped by now.
    fn commit(
        &self,
        addresses: &AddressRange,
        first: u64,
        runs: &[Range<u64>],
        pages: &[Page],
    ) -> Result<(), (Vec<u64>, MapRefusal)> {
        let mut mapped = Vec::new();
        for index in runs.iter().cloned().flatten() {
            match self.map_page(addresses, index, &pages[(index - first) as usize]) {
                Ok(()) => mapped.push(index),
                Err(refusal) => return Err((mapped, refusal)),
            }
        }
        for run in runs {
            let (offset, bytes) = (self.offset(run.start), (run.end - run.start) * self.page_bytes);
            if let Err(source) = addresses.set_access(offset, bytes, self.access.as_slice()) {
                let refusal =
                    MapRefusal::Device { step: MapStep::SetAccess, index: run.start, source };
                return Err((mapped, refusal));
            }
        }
        Ok(())
    }

    fn map_page(
        &self,
        addresses: &AddressRange,
        index: u64,
        page: &Page,
    ) -> Result<(), MapRefusal> {
        let Some(memory) = page.memory() else {
            unreachable!("{} was released while it had a holder", page.id());
        };
        addresses.map(self.offset(index), memory).map_err(|source| MapRefusal::Device {
            step: MapStep::Map,
            index,
            source,
        })
    }

    /// Makes the new mappings visible, all at once.
    fn record(&self, first: u64, runs: &[Range<u64>], pages: Vec<Page>) -> u64 {
        let mut runs = runs.iter().cloned().flatten().peekable();
        let mut surplus = Vec::new();
        let mut table = self.table.lock();
        let mut count = 0;
        for (index, page) in (first..).zip(pages) {
            if runs.next_if_eq(&index).is_some() {
                table.set_mapped(index, page);
                count += 1;
            } else {
                surplus.push(page);
            }
        }
        drop(table);
        // Clones of pages that were mapped before. Dropped outside the lock: a drop may call the
        // driver.
        drop(surplus);
        count
    }

    /// Unmaps in reverse what `commit` mapped.
    ///
    /// Needs no proof of rest: the pages were never reported as mapped.
    fn roll_back(
        &self,
        addresses: &AddressRange,
        first: u64,
        mapped: Vec<u64>,
        reason: MapRefusal,
        pages: Vec<Page>,
    ) -> MapError {
        let mut stuck = Vec::new();
        for &index in mapped.iter().rev() {
            if let Err(error) = self.unmap_page(addresses, index) {
                tracing::warn!(%error, index, "a failed mapping could not be undone: quarantined");
                stuck.push(index);
            }
        }
        let mut table = self.table.lock();
        let mut returned = Vec::with_capacity(pages.len() - stuck.len());
        for (index, page) in (first..).zip(pages) {
            if stuck.contains(&index) {
                table.set_quarantined(index, page);
            } else {
                returned.push(page);
            }
        }
        MapError { reason, pages: returned, quarantined: stuck.len() as u64 }
    }
}
