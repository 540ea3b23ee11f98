//! Clean-up in the only correct order, complete in spite of errors, with one report.

use cuda_driver::guard;
use std::sync::Arc;

use crate::gate::{NotAtRest, Unrest};
use crate::pages::page::quiet_if_lost;
use crate::pages::pool::release_all;
use crate::pages::table::{Retirement, Ticket};
use crate::pages::{CloseError, CloseStep, Page, PagePool, Reservation, UnmapReport};
use crate::rest::AtRest;

/// The result of a clean-up.
///
/// Every step is tried, even after a failed one. A refused unmapping is tried a second time, and so
/// is a release that certainly had no effect. So an error here does not mean that memory was
/// leaked; [`leaked_bytes`](CloseReport::leaked_bytes) says that. A lost device returns its error
/// for every call. The steps are tried there too, and count as done.
#[derive(Debug, Default)]
pub struct CloseReport {
    /// Pages returned to the caller of [`Reservation::close`]; pools and spaces keep their own.
    pub pages: Vec<Page>,
    /// Number of mappings that were removed.
    pub unmapped: u64,
    /// Number of physical pages that were released to the driver.
    pub released: u64,
    /// Bytes that stay mapped until the process ends, and bytes whose release was refused. The
    /// driver may have released the latter and reused their handle. If it certainly has not, they
    /// are released later, if possible.
    pub leaked_bytes: u64,
    /// Every refusal, in the order of the steps.
    pub errors: Vec<CloseError>,
}

impl CloseReport {
    /// Whether no step was refused.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.errors.is_empty()
    }

    fn note(&mut self, unmapped: UnmapReport) {
        self.unmapped += unmapped.pages.len() as u64;
        self.pages.extend(unmapped.pages);
        self.errors.extend(unmapped.failed);
    }
}

/// A [`Reservation`], an [`ElasticPool`](crate::ElasticPool) or a
/// [`SequenceSpace`](crate::sequences::SequenceSpace) that is being closed: everything in it is
/// retired, and nothing can be mapped any more.
///
/// Dropping it instead follows the rule for dropping a reservation.
#[derive(Debug)]
#[must_use = "nothing is unmapped until `try_complete` or `wait`"]
pub struct Closing {
    /// Dropped first: pages that it unmaps on drop are released, not returned to a pool.
    reservation: Reservation,
    then: ThenPages,
}

/// What becomes of the physical pages of a reservation that is closed.
#[derive(Debug)]
pub(crate) enum ThenPages {
    /// The report has them.
    Reported,
    /// They go back to their pool, whose owner releases them.
    GivenBack(PagePool),
    /// They are released, with the idle ones of their pool.
    Released(PagePool),
}

impl Closing {
    pub(crate) fn new(reservation: Reservation, then: ThenPages) -> Self {
        Self { reservation, then }
    }

    /// Finishes if everything is at rest: unmaps every page, and frees the addresses. The physical
    /// pages of an elastic pool are released then, those of a space return to their pool, and those
    /// of a reservation are in the report. Does not wait for the device.
    ///
    /// # Errors
    /// [`NotAtRest`] with this request; nothing was unmapped.
    #[track_caller]
    pub fn try_complete(self) -> Result<CloseReport, NotAtRest<Self>> {
        let _site = cuda_driver::site::enter();
        self.complete(|retirement| retirement.users.check())
    }

    /// Waits on the host until everything is at rest, and finishes.
    ///
    /// # Ordering
    /// Waits for the leases and the fences, and without either for all work of the device. Never
    /// call it while holding a lease of the same gate: it would deadlock.
    ///
    /// # Errors
    /// [`NotAtRest`] with this request if a fence cannot be waited for.
    #[track_caller]
    pub fn wait(self) -> Result<CloseReport, NotAtRest<Self>> {
        let _site = cuda_driver::site::enter();
        let inner = Arc::clone(&self.reservation.inner);
        self.complete(|retirement| retirement.users.wait(|| inner.wait_for_all()))
    }

    fn complete(
        self,
        prove: impl Fn(&Retirement) -> Result<AtRest, Unrest>,
    ) -> Result<CloseReport, NotAtRest<Self>> {
        // All proofs are collected before the first unmapping: a refusal leaves everything
        // unchanged.
        let retirements = self.reservation.inner.table.lock().retirements();
        let mut proofs = Vec::with_capacity(retirements.len());
        for (ticket, retirement) in retirements {
            match prove(&retirement) {
                Ok(proof) => proofs.push((ticket, proof)),
                Err(reason) => return Err(NotAtRest { request: self, reason }),
            }
        }
        let mut report = self.finish(proofs);
        match self.then {
            ThenPages::Reported => {}
            ThenPages::GivenBack(pages) => pages.take_back(std::mem::take(&mut report.pages)),
            ThenPages::Released(pages) => {
                let pages = std::mem::take(&mut report.pages).into_iter().chain(pages.take_idle());
                let (released, leaked_bytes) = release_all(pages, &mut report.errors);
                report.released += released;
                report.leaked_bytes += leaked_bytes;
            }
        }
        Ok(report)
    }

    fn finish(&self, proofs: Vec<(Ticket, AtRest)>) -> CloseReport {
        let inner = &self.reservation.inner;
        let mut report = CloseReport::default();
        for (ticket, proof) in proofs {
            report.note(inner.unmap(ticket, proof));
        }
        report.note(inner.retry_quarantined());
        let Some(addresses) = inner.addresses.write().take() else { return report };
        if let Err(error) = quiet_if_lost(&inner.device, addresses.free()) {
            report.errors.push(CloseError { step: CloseStep::FreeAddresses, error });
        }
        for page in inner.table.lock().take_rest() {
            report.leaked_bytes += page.bytes();
            // The handle is released. The memory lives on under its mapping, and stays counted.
            guard!("vmm.mapped-stays-charged", page.stays_mapped());
            release_all([page], &mut report.errors);
        }
        report
    }
}
