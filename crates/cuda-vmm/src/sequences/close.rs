//! The end of a space.

use std::sync::Arc;

use super::core::SpaceCore;
use super::{SequenceSpace, StillLive};
use crate::pages::{Closing, Reservation};
use crate::rest::Covered;
use crate::{CloseReport, Fence, NotAtRest};

/// A space that is being closed: nothing can be admitted or mapped any more.
///
/// Dropping it instead follows the rule for dropping a [`Reservation`].
#[derive(Debug)]
#[must_use = "nothing is unmapped until `try_complete` or `wait`"]
pub struct SpaceClosing {
    closing: Closing,
    core: Arc<SpaceCore>,
}

impl SequenceSpace {
    /// Takes the space away from its worker, after a piece of work that runs, and retires everything
    /// that is mapped, as a first step of clean-up. The rest happens in [`SpaceClosing`] when the work
    /// before `fences`, that before the fences of finished sequences and the gate's leases are done.
    /// `fences` must cover what still uses the memory of abandoned sequences.
    ///
    /// # Errors
    /// [`StillLive`] with the space while sequences are live.
    #[track_caller]
    pub fn close(self, fences: &[Fence]) -> Result<SpaceClosing, StillLive<Self>> {
        let _site = cuda_driver::site::enter();
        let (census, parked) = {
            let book = self.core.book.lock();
            (book.census(), book.parked())
        };
        let live = census.live;
        if live > 0 {
            return Err(StillLive { space: self, live });
        }
        let Self { core, handle, holder } = self;
        drop(holder);
        handle.detach();
        let mut users: Vec<_> = fences.to_vec();
        users.extend(parked.iter().flat_map(|waiting| waiting.fences().iter().cloned()));
        let covered = match census.abandoned {
            0 => Covered::Yes,
            _ => core.reservation.inner.covers(fences),
        };
        let reservation = Reservation { inner: Arc::clone(&core.reservation.inner) };
        let closing = reservation.close_after(&users, covered);
        core.book.lock().seats.clear();
        Ok(SpaceClosing { closing, core })
    }
}

impl SpaceClosing {
    /// Finishes if everything is at rest: unmaps every page, frees the addresses, and gives the
    /// physical pages back to their pool, whose owner releases them. Does not wait for the device.
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
    /// Waits for the leases and for the fences, and where there are neither, for all work of the device.
    /// Never call it while holding a lease of the same gate: it would wait for itself.
    ///
    /// # Errors
    /// [`NotAtRest`] with this request, when a fence cannot be waited for.
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
