//! Mapping as a transaction: access is granted before any thread can see the pages, or everything
//! is undone.

use cuda_driver::guard;
use std::ops::Range;

use cuda_driver::AddressRange;

use crate::pages::reservation::Inner;
use crate::pages::{MapError, MapRefusal, Page};

impl Inner {
    /// Maps `pages` from page `first` on; returns how many were new. See
    /// [`Reservation::map_range`](crate::pages::Reservation::map_range).
    pub(crate) fn map(&self, first: u64, pages: Vec<Page>) -> Result<u64, MapError> {
        match self.check_range(first, pages.len() as u64) {
            Ok(()) => self.map_at((first..).zip(pages).collect()),
            Err(reason) => Err(MapError { reason, pages, quarantined: 0 }),
        }
    }

    /// Maps pages at distinct, ascending places, which need not be neighbours: all or none.
    pub(crate) fn map_at(&self, places: Vec<(u64, Page)>) -> Result<u64, MapError> {
        debug_assert!(places.windows(2).all(|pair| pair[0].0 < pair[1].0), "not in order");
        let refuse = |reason, places: Vec<(u64, Page)>| {
            let pages = places.into_iter().map(|(_, page)| page).collect();
            Err(MapError { reason, pages, quarantined: 0 })
        };
        if let Err(reason) = self.check_pages(&places) {
            return refuse(reason, places);
        }
        // The second of two callers waits here, and then finds the pages mapped by the first (H1).
        let _editing = guard!("vmm.mapping-alone", Some(self.editing.lock()), else None);
        let runs = match self.runs_to_map(&places) {
            Ok(runs) => runs,
            Err(reason) => return refuse(reason, places),
        };
        let addresses = self.addresses.read();
        let Some(addresses) = addresses.as_ref() else {
            unreachable!("a reservation is consumed when it is closed");
        };
        let commit = || self.commit(addresses, &runs, &places);
        // The context is bound once for all calls. If that fails, each call reports it.
        let committed = match self.device.while_current(commit) {
            Ok(committed) => committed,
            Err(_) => commit(),
        };
        match committed {
            Ok(()) => Ok(self.record(&runs, places)),
            Err((mapped, reason)) => Err(self.roll_back(addresses, mapped, reason, places)),
        }
    }

    fn check_pages(&self, places: &[(u64, Page)]) -> Result<(), MapRefusal> {
        for (index, page) in places {
            self.check_range(*index, 1)?;
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

    /// The runs of pages that are not mapped yet. Fails if another page is mapped at one of the
    /// places.
    fn runs_to_map(&self, places: &[(u64, Page)]) -> Result<Vec<Range<u64>>, MapRefusal> {
        let table = self.table.lock();
        let mut runs: Vec<Range<u64>> = Vec::new();
        for &(index, ref page) in places {
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

    /// Makes the driver calls. On failure, returns which pages are mapped so far.
    fn commit(
        &self,
        addresses: &AddressRange,
        runs: &[Range<u64>],
        places: &[(u64, Page)],
    ) -> Result<(), (Vec<u64>, MapRefusal)> {
        let mut mapped = Vec::new();
        let mut wanted = runs.iter().cloned().flatten().peekable();
        for &(index, ref page) in places {
            if wanted.next_if_eq(&index).is_none() {
                continue;
            }
            match self.map_page(addresses, index, page) {
                Ok(()) => mapped.push(index),
                Err(refusal) => return Err((mapped, refusal)),
            }
        }
        for run in runs {
            let (offset, bytes) = (self.offset(run.start), (run.end - run.start) * self.page_bytes);
            if let Err(source) = addresses.set_access(offset, bytes, self.access.as_slice()) {
                return Err((mapped, MapRefusal::Device { index: run.start, source }));
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
        let mapped = addresses.map(self.offset(index), memory);
        mapped.map_err(|source| MapRefusal::Device { index, source })
    }

    /// Makes the new mappings visible, all at once.
    fn record(&self, runs: &[Range<u64>], places: Vec<(u64, Page)>) -> u64 {
        let mut runs = runs.iter().cloned().flatten().peekable();
        let mut surplus = Vec::new();
        let mut table = self.table.lock();
        let mut count = 0;
        for (index, page) in places {
            if runs.next_if_eq(&index).is_some() {
                table.set_mapped(index, page);
                count += 1;
            } else {
                surplus.push(page);
            }
        }
        drop(table);
        // Clones of pages that were mapped before. Dropped outside the lock, because a drop may
        // call the driver.
        drop(surplus);
        count
    }

    /// Unmaps, in reverse order, what `commit` mapped.
    ///
    /// Needs no proof of rest: the pages were never reported as mapped.
    fn roll_back(
        &self,
        addresses: &AddressRange,
        mapped: Vec<u64>,
        reason: MapRefusal,
        places: Vec<(u64, Page)>,
    ) -> MapError {
        let mut stuck = Vec::new();
        let undone = guard!("vmm.failed-map-undone", mapped.as_slice(), else &[]);
        for &index in undone.iter().rev() {
            if let Err(error) = self.unmap_page(addresses, index) {
                tracing::warn!(%error, index, "a failed mapping could not be undone: quarantined");
                stuck.push(index);
            }
        }
        let mut table = self.table.lock();
        let mut returned = Vec::with_capacity(places.len() - stuck.len());
        for (index, page) in places {
            if stuck.contains(&index) {
                table.set_quarantined(index, page);
            } else {
                returned.push(page);
            }
        }
        MapError { reason, pages: returned, quarantined: stuck.len() as u64 }
    }
}
