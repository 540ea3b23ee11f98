//! Unmapping in two steps: retire now, unmap when at rest.

use cuda_driver::guard;
use std::ops::Range;
use std::sync::Arc;

use crate::gate::{NotAtRest, Unrest};
use crate::pages::reservation::Inner;
use crate::pages::table::{Retirement, Ticket};
use crate::pages::{CloseError, Page};
use crate::rest::{AtRest, Look, Quiescence};

/// The unmapped pages, and the refused ones.
#[derive(Debug, Default)]
#[must_use = "the pages are released to the driver when dropped; give them back to their pool"]
pub struct UnmapReport {
    /// The physical pages that are no longer mapped in the reservation, ordered by their former
    /// index.
    pub pages: Vec<Page>,
    /// Pages that the driver refused to unmap. They are in quarantine now.
    pub failed: Vec<CloseError>,
}

impl UnmapReport {
    fn merge(&mut self, other: Self) {
        self.pages.extend(other.pages);
        self.failed.extend(other.failed);
    }
}

/// Pages that were retired together. This handle or
/// [`Reservation::poll_retired`](crate::pages::Reservation::poll_retired) unmaps them. Dropping the
/// handle unmaps nothing and loses nothing.
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

    /// The retired pages of the reservation.
    #[must_use]
    pub fn pages(&self) -> Range<u64> {
        self.pages.clone()
    }

    /// Unmaps the pages if they are at rest. Does not wait for the device.
    ///
    /// The report is empty if another call unmapped them meanwhile.
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
    /// Waits for the leases and the fences, and without either for all work of the device. Never
    /// call it while holding a lease of the same gate that is older than the retirement: it would
    /// deadlock.
    ///
    /// # Errors
    /// [`NotAtRest`] with this handle if a fence cannot be waited for.
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
    /// Unmaps the pages retired under `ticket`, unless another thread is doing so.
    pub(crate) fn unmap(&self, ticket: Ticket, proof: AtRest) -> UnmapReport {
        let Some(retirement) = self.table.lock().claim(ticket) else {
            return UnmapReport::default();
        };
        self.unmap_pages(retirement.indices(), &proof)
    }

    /// Unmaps mapped pages whose users are known to be done. The proof must have been made after
    /// the last moment at which a new user could find them, and no user may find them now.
    pub(crate) fn unmap_at_rest(&self, indices: &[u64], proof: &AtRest) -> UnmapReport {
        {
            let mut table = self.table.lock();
            indices.iter().for_each(|&index| table.begin_unmapping(index));
        }
        self.unmap_pages(indices.iter().copied(), proof)
    }

    /// Retires mapped pages whose users are already known.
    pub(crate) fn retire_at(&self, indices: &[u64], users: Arc<Quiescence>) {
        let ranges = indices.iter().map(|&index| index..index + 1).collect();
        self.table.lock().retire_ranges(ranges, users);
    }

    /// Unmaps retiring pages one by one: a single call for many would be no cheaper and would not
    /// say which page failed.
    fn unmap_pages(&self, indices: impl Iterator<Item = u64>, _proof: &AtRest) -> UnmapReport {
        let mut report = UnmapReport::default();
        let addresses = self.addresses.read();
        let Some(addresses) = addresses.as_ref() else { return report };
        for index in indices {
            match self.unmap_page(addresses, index) {
                Ok(()) => report.pages.extend(self.table.lock().set_free(index)),
                Err(error) => {
                    self.table.lock().set_stuck(index);
                    report.failed.push(CloseError::unmapping(index, error));
                }
            }
        }
        report
    }

    pub(crate) fn poll_retired(&self) -> UnmapReport {
        let mut look = Look::default();
        let mut check = |retirement: &Retirement| {
            let checked = retirement.users.check_in(&mut look);
            guard!("vmm.unmap-needs-rest", checked, else Ok(AtRest::never_exposed()))
        };
        self.unmap_retired(|retirement| match check(retirement) {
            Ok(proof) => Some(proof),
            Err(Unrest::Device(error)) => {
                tracing::warn!(%error, "a fence cannot be queried: its pages stay mapped");
                None
            }
            Err(_) => None,
        })
    }

    /// Number of retired pages that are at rest.
    pub(crate) fn retired_at_rest(&self) -> u64 {
        let mut look = Look::default();
        let retirements = self.table.lock().retirements();
        let mut at_rest = 0;
        for (_, retirement) in retirements {
            if retirement.users.check_in(&mut look).is_ok() {
                at_rest += retirement.indices().count() as u64;
            }
        }
        at_rest
    }

    /// Unmaps every retirement for which `prove` returns a proof.
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

    /// Tries to unmap the pages in quarantine. They are at rest: their proof was given before the
    /// first attempt, or they were never reported as mapped.
    pub(crate) fn retry_quarantined(&self) -> UnmapReport {
        // Serialised, so that two threads do not unmap one page twice, the second time under a new
        // mapping.
        let _editing = self.editing.lock();
        let stuck = self.table.lock().quarantined();
        let mut report = UnmapReport::default();
        let addresses = self.addresses.read();
        let Some(addresses) = addresses.as_ref() else { return report };
        for index in stuck {
            match self.unmap_page(addresses, index) {
                Ok(()) => report.pages.extend(self.table.lock().set_free(index)),
                Err(error) => report.failed.push(CloseError::unmapping(index, error)),
            }
        }
        report
    }
}
