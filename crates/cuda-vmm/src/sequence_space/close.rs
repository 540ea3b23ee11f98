//! The end of a space.

use std::sync::Arc;

use cuda_driver::Event;

use super::core::Core;
use super::{SequenceSpace, StillLive};
use crate::{CloseReport, Closing, NotAtRest, Reservation};

/// A space that is being closed: nothing can be admitted or mapped any more.
///
/// Dropping it instead follows the rule for dropping a [`Reservation`].
#[derive(Debug)]
#[must_use = "nothing is unmapped until `try_complete` or `wait`"]
pub struct SpaceClosing {
    closing: Closing,
    core: Arc<Core>,
}

impl SequenceSpace {
    /// Takes the space away from its worker, after a piece of work that runs, and retires everything
    /// that is mapped, as a first step of clean-up. The rest happens in [`SpaceClosing`] when the work
    /// before `events`, that before the events of finished sequences and the gate's leases are done.
    /// `events` must cover what still uses the memory of abandoned sequences.
    ///
    /// # Errors
    /// [`StillLive`] with the space while sequences are live.
    pub fn close(self, events: &[Arc<Event>]) -> Result<SpaceClosing, StillLive<Self>> {
        let (live, parked) = {
            let book = self.core.book.lock();
            (book.census().live, book.parked())
        };
        if live > 0 {
            return Err(StillLive { space: self, live });
        }
        let Self { core, handle, holder } = self;
        drop(holder);
        handle.detach();
        let mut users: Vec<_> = events.to_vec();
        users.extend(parked.iter().flat_map(|waiting| waiting.events().iter().cloned()));
        let reservation = Reservation { inner: Arc::clone(&core.reservation.inner) };
        let closing = reservation.close(&users);
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
    pub fn try_complete(self) -> Result<CloseReport, NotAtRest<Self>> {
        let Self { closing, core } = self;
        Self::finish(closing.try_complete(), core)
    }

    /// Waits on the host until everything is at rest, and finishes.
    ///
    /// # Ordering
    /// Waits for the leases and for the events. Never call it while holding a lease of the same
    /// gate: it would wait for itself.
    ///
    /// # Errors
    /// [`NotAtRest`] with this request, when an event cannot be waited for.
    pub fn wait(self) -> Result<CloseReport, NotAtRest<Self>> {
        let Self { closing, core } = self;
        Self::finish(closing.wait(), core)
    }

    fn finish(
        closed: Result<CloseReport, NotAtRest<Closing>>,
        core: Arc<Core>,
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
