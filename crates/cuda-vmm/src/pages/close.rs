//! Clean-up in its one right order, complete under errors, and reported once.

use std::sync::Arc;

use crate::pages::page::quiet_if_lost;
use crate::pages::pool::release;
use crate::pages::table::{Retirement, Ticket};
use crate::pages::{CloseError, CloseStep, Page, Reservation, UnmapReport};
use crate::rest::AtRest;
use crate::{NotAtRest, Unrest};

/// What a clean-up did.
///
/// Every step is tried even if one before it failed. A refused unmapping is tried a second time, and so is
/// a release that did nothing for certain, so an error here does not by itself mean that something was left
/// behind: [`leaked_bytes`](CloseReport::leaked_bytes) does. On a lost device, whose every answer is the error
/// that it was lost by, the steps are taken too and count as done.
#[derive(Debug, Default)]
pub struct CloseReport {
    /// Pages handed back to the caller of [`Reservation::close`]; a pool releases its own.
    pub pages: Vec<Page>,
    /// Mappings that were taken away.
    pub unmapped: u64,
    /// Physical pages that were released to the driver.
    pub released: u64,
    /// Bytes that are still mapped, and stay so until the process ends, and those whose release was refused
    /// and not repeated: they may be released, and their handle be another page's.
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
        self.errors.extend(unmapped.failed.into_iter().map(|failure| CloseError {
            step: CloseStep::Unmap { index: failure.index },
            error: failure.error,
        }));
    }
}

/// A reservation that is being closed: everything in it is retired, nothing can be mapped any more.
///
/// Dropping it instead follows the rule for dropping a [`Reservation`].
#[derive(Debug)]
#[must_use = "nothing is unmapped until `try_complete` or `wait`"]
pub struct Closing {
    reservation: Reservation,
}

impl Closing {
    pub(crate) fn new(reservation: Reservation) -> Self {
        Self { reservation }
    }

    /// Finishes if everything is at rest; then unmaps every page, frees the addresses, and hands
    /// the physical pages back. Does not wait for the device.
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
    /// Waits for the leases and for the fences, and where there are neither, for all work of the device.
    /// Never call it while holding a lease of the same gate: it would wait for itself.
    ///
    /// # Errors
    /// [`NotAtRest`] with this request, when a fence cannot be waited for.
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
        // All proofs come before the first unmapping: a refusal leaves everything as it was.
        let retirements = self.reservation.inner.table.lock().retirements();
        let mut proofs = Vec::with_capacity(retirements.len());
        for (ticket, retirement) in retirements {
            match prove(&retirement) {
                Ok(proof) => proofs.push((ticket, proof)),
                Err(reason) => return Err(NotAtRest { request: self, reason }),
            }
        }
        Ok(self.finish(proofs))
    }

    fn finish(self, proofs: Vec<(Ticket, AtRest)>) -> CloseReport {
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
            // The handle is given up, the memory lives on under its mapping.
            report.released += u64::from(release(page, &mut report.errors).0);
        }
        report
    }
}

/// Releases the physical pages that a clean-up got back: the last of its steps.
pub(crate) fn release_pages(report: &mut CloseReport) {
    for page in std::mem::take(&mut report.pages) {
        let (released, leaked_bytes) = release(page, &mut report.errors);
        report.released += u64::from(released);
        report.leaked_bytes += leaked_bytes;
    }
}
