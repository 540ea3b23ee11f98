//! Closing a space.

use cuda_driver::{Fence, guard};
use std::sync::Arc;

use super::core::SpaceCore;
use super::{SequenceSpace, StillLive};
use crate::pages::{Closing, Reservation};
use crate::rest::Covered;
use crate::{CloseReport, gate::NotAtRest};

/// A space that is being closed: no sequence is admitted and nothing is mapped any more.
///
/// Dropping it instead follows the rule for dropping a [`Reservation`].
#[derive(Debug)]
#[must_use = "nothing is unmapped until `try_complete` or `wait`"]
pub struct SpaceClosing {
    closing: Closing,
    core: Arc<SpaceCore>,
}

impl SequenceSpace {
    /// Detaches the space from its worker, after a running step, and retires everything that is
    /// mapped, as the first step of clean-up. [`SpaceClosing`] does the rest, once the work before
    /// `fences` and before the fences of finished sequences has completed and the leases of the
    /// gate are closed. `fences` must cover all uses of the memory of abandoned sequences.
    ///
    /// # Errors
    /// [`StillLive`] with the space while sequences are live.
    #[track_caller]
    pub fn close(self, fences: &[Fence]) -> Result<SpaceClosing, StillLive<Self>> {
        let _site = cuda_driver::site::enter();
        let census = self.core.book.lock().census();
        let live = census.live;
        if live > 0 {
            return Err(StillLive { space: self, live });
        }
        let Self { core, handle, holder } = self;
        drop(holder);
        handle.detach();
        let seats = std::mem::take(&mut core.book.lock().seats);
        let mut users: Vec<_> = fences.to_vec();
        let named = seats.iter().flat_map(|seat| seat.users.fences().cloned());
        guard!("vmm.space-close-waits", users.extend(named));
        let covered = match census.abandoned {
            0 => Covered::Yes,
            _ => core.reservation.inner.covers(fences),
        };
        let reservation = Reservation { inner: Arc::clone(&core.reservation.inner) };
        let closing = reservation.close_after(&users, covered);
        Ok(SpaceClosing { closing, core })
    }
}

impl SpaceClosing {
    /// Finishes if everything is at rest: unmaps every page, frees the addresses, and returns the
    /// physical pages to their pool, whose owner releases them. Does not wait for the device.
    ///
    /// # Errors
    /// [`NotAtRest`] with this request; nothing was unmapped.
    #[track_caller]
    pub fn try_complete(self) -> Result<CloseReport, NotAtRest<Self>> {
        let _site = cuda_driver::site::enter();
        let Self { closing, core } = self;
        Self::finish(closing.try_complete(), core)
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
        let Self { closing, core } = self;
        Self::finish(closing.wait(), core)
    }

    fn finish(
        closed: Result<CloseReport, NotAtRest<Closing>>,
        core: Arc<SpaceCore>,
    ) -> Result<CloseReport, NotAtRest<Self>> {
        match closed {
            Ok(mut report) => {
                core.give_back(std::mem::take(&mut report.pages));
                Ok(report)
            }
            Err(NotAtRest { request, reason }) => {
                Err(NotAtRest { request: Self { closing: request, core }, reason })
            }
        }
    }
}
