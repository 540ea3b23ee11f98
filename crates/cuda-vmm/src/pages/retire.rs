//! Unmapping, in its two steps: retire now, unmap when at rest.

use cuda_driver::messages::one_line_debug;
use std::ops::Range;
use std::sync::Arc;

use cuda_driver::DeviceError;

use crate::pages::Page;
use crate::pages::reservation::Inner;
use crate::pages::table::{Retirement, Ticket};
use crate::rest::{AtRest, Quiescence};
use crate::{NotAtRest, Unrest};

/// What was unmapped, and what would not be.
#[derive(Debug, Default)]
#[must_use = "the pages are released to the driver when dropped; give them back to their pool"]
pub struct UnmapReport {
    /// The physical pages that lie nowhere in the reservation any more, in ascending order of where
    /// they lay.
    pub pages: Vec<Page>,
    /// Pages that the driver would not unmap: in quarantine now.
    pub failed: Vec<UnmapFailure>,
}

/// A page that the driver would not unmap.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("page {index} could not be unmapped")]
pub struct UnmapFailure {
    /// Which page of the reservation.
    pub index: u64,
    /// What the device answered.
    #[source]
    pub error: DeviceError,
}

impl UnmapReport {
    fn merge(&mut self, other: Self) {
        self.pages.extend(other.pages);
        self.failed.extend(other.failed);
    }
}

/// Pages that were retired together. They are unmapped by this handle, or by
/// [`Reservation::poll_retired`](crate::pages::Reservation::poll_retired); dropping the handle unmaps
/// nothing and loses nothing.
#[derive(Debug)]
#[must_use = "the pages stay mapped until this or `poll_retired` unmaps them"]
pub struct Retiring {
    reservation: Arc<Inner>,
    ticket: Ticket,
    pages: Range<u64>,
}

impl Retiring {
    pub(crate) fn new(reservation: Arc<Inner>, ticket: Ticket, pages: Range<u64>) -> Self {
        Self { reservation, ticket, pages }
    }

    /// The pages of the reservation that were retired.
    #[must_use]
    pub fn pages(&self) -> Range<u64> {
        self.pages.clone()
    }

    /// Unmaps the pages if they are at rest. Does not wait for the device.
    ///
    /// The report is empty when they were unmapped otherwise in the meantime.
    ///
    /// # Errors
    /// [`NotAtRest`] with this handle.
    #[track_caller]
    pub fn try_complete(self) -> Result<UnmapReport, NotAtRest<Self>> {
        let _site = cuda_driver::site::enter();
        self.complete(|retirement| retirement.users.check())
    }

    /// Waits on the host until the pages are at rest, and unmaps them.
    ///
    /// # Ordering
    /// Waits for the leases and for the fences, and where there are neither, for all work of the device.
    /// Never call it while holding a lease of the same gate that is older than the retirement: it would
    /// wait for itself.
    ///
    /// # Errors
    /// [`NotAtRest`] with this handle, when a fence cannot be waited for.
    #[track_caller]
    pub fn wait(self) -> Result<UnmapReport, NotAtRest<Self>> {
        let _site = cuda_driver::site::enter();
        let reservation = Arc::clone(&self.reservation);
        self.complete(|retirement| retirement.users.wait(|| reservation.wait_for_all()))
    }

    fn complete(
        self,
        prove: impl FnOnce(&Retirement) -> Result<AtRest, Unrest>,
    ) -> Result<UnmapReport, NotAtRest<Self>> {
        let retirement = self.reservation.table.lock().retirement(self.ticket);
        let Some(retirement) = retirement else { return Ok(UnmapReport::default()) };
        match prove(&retirement) {
            Ok(proof) => Ok(self.reservation.unmap(self.ticket, proof)),
            Err(reason) => Err(NotAtRest { request: self, reason }),
        }
    }
}

impl Inner {
    /// Unmaps what was retired under `ticket`, unless somebody else is at it.
    pub(crate) fn unmap(&self, ticket: Ticket, proof: AtRest) -> UnmapReport {
        let Some(retirement) = self.table.lock().claim(ticket) else {
            return UnmapReport::default();
        };
        self.unmap_pages(retirement.indices(), &proof)
    }

    /// Unmaps mapped pages whose users are known to be done. The proof must have been made after the
    /// last of them could be found by a new user, and none may find them now.
    pub(crate) fn unmap_at_rest(&self, indices: &[u64], proof: &AtRest) -> UnmapReport {
        {
            let mut table = self.table.lock();
            indices.iter().for_each(|&index| table.begin_unmapping(index));
        }
        self.unmap_pages(indices.iter().copied(), proof)
    }

    /// Retires mapped pages whose users are known already.
    pub(crate) fn retire_at(&self, indices: &[u64], users: Arc<Quiescence>) {
        let ranges = indices.iter().map(|&index| index..index + 1).collect();
        self.table.lock().retire_ranges(ranges, users);
    }

    /// Unmaps pages in the state retiring, page by page: one call for many would be no cheaper
    /// and would not say which of them failed.
    fn unmap_pages(&self, indices: impl Iterator<Item = u64>, _proof: &AtRest) -> UnmapReport {
        let mut report = UnmapReport::default();
        let addresses = self.addresses.read();
        let Some(addresses) = addresses.as_ref() else { return report };
        for index in indices {
            match self.unmap_page(addresses, index) {
                Ok(()) => report.pages.extend(self.table.lock().set_free(index)),
                Err(error) => {
                    self.table.lock().set_stuck(index);
                    report.failed.push(UnmapFailure { index, error });
                }
            }
        }
        report
    }

    pub(crate) fn poll_retired(&self) -> UnmapReport {
        self.unmap_retired(|retirement| match retirement.users.check() {
            Ok(proof) => Some(proof),
            Err(Unrest::Device(error)) => {
                tracing::warn!(%error, "a fence cannot be queried: its pages stay mapped");
                None
            }
            Err(_) => None,
        })
    }

    /// Unmaps every retirement that `prove` has a proof for.
    pub(crate) fn unmap_retired(
        &self,
        mut prove: impl FnMut(&Retirement) -> Option<AtRest>,
    ) -> UnmapReport {
        let retirements = self.table.lock().retirements();
        let mut report = UnmapReport::default();
        for (ticket, retirement) in retirements {
            if let Some(proof) = prove(&retirement) {
                report.merge(self.unmap(ticket, proof));
            }
        }
        report
    }

    /// Tries to unmap the pages in quarantine, which are at rest: their proof was given before the
    /// first attempt, or they were never reported as mapped.
    pub(crate) fn retry_quarantined(&self) -> UnmapReport {
        // Serialised, so that no two threads unmap one page, and the second a new mapping.
        let _editing = self.editing.lock();
        let stuck = self.table.lock().quarantined();
        let mut report = UnmapReport::default();
        let addresses = self.addresses.read();
        let Some(addresses) = addresses.as_ref() else { return report };
        for index in stuck {
            match self.unmap_page(addresses, index) {
                Ok(()) => report.pages.extend(self.table.lock().set_free(index)),
                Err(error) => report.failed.push(UnmapFailure { index, error }),
            }
        }
        report
    }
}

one_line_debug!(UnmapFailure);
