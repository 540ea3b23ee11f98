//! The proof that nothing uses a range any more, without which nothing is unmapped.

use std::fmt;

use cuda_driver::messages::{Chain, one_line_debug};
use smallvec::SmallVec;

use crate::epoch::{RetirePoint, Unrest};
use crate::{EpochGate, Fence};

/// Nothing says when the uses of the memory end, so it was not given up: its addresses were given out, no
/// lease was ever taken at its gate, and none of the fences given is of a device that can access it.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("none of {fences} fences and no lease covers the uses of the memory")]
pub struct UsersUnknown {
    /// Fences given.
    pub fences: u64,
}

/// The memory is still in use, so nothing was unmapped; here is the request back, to try again.
#[derive(thiserror::Error)]
#[error("the memory is not at rest")]
pub struct NotAtRest<T> {
    /// What was asked.
    pub request: T,
    /// Who uses the memory.
    #[source]
    pub reason: Unrest,
}

impl<T> fmt::Debug for NotAtRest<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}: {}", Chain(&self.reason))
    }
}

/// Everybody who may still use memory that was retired: enqueued work, by its fences, and batches
/// on the CPU, by the gate's leases.
#[derive(Debug)]
pub(crate) struct Quiescence {
    fences: SmallVec<[Fence; 4]>,
    point: RetirePoint,
    /// Whether fences and leases speak for all users.
    covered: Covered,
}

/// Whether fences and leases speak for all users of some memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Covered {
    Yes,
    /// Addresses are out there, and nobody says who uses them.
    No,
}

/// Proof that a [`Quiescence`] was reached. Made here and nowhere else; unmapping consumes it.
#[derive(Debug)]
pub(crate) struct AtRest(());

impl Quiescence {
    /// The users as of now. Call it once the memory can be found by no new user.
    pub(crate) fn new(gate: &EpochGate, fences: &[Fence], covered: Covered) -> Self {
        Self { fences: fences.iter().cloned().collect(), point: gate.retire_point(), covered }
    }

    /// The proof, if all users are done. Does not wait.
    pub(crate) fn check(&self) -> Result<AtRest, Unrest> {
        let mut pending = 0;
        for fence in &self.fences {
            pending += u64::from(!fence.is_at_rest()?);
        }
        if pending > 0 {
            return Err(Unrest::Events { pending });
        }
        self.point.check()?;
        match self.covered {
            Covered::Yes => Ok(AtRest(())),
            Covered::No => Err(Unrest::Unknown),
        }
    }

    /// The fences among the users.
    pub(crate) fn fences(&self) -> &[Fence] {
        &self.fences
    }

    /// Waits on the host until all users are done. Where fences and leases do not speak for all of
    /// them, or leases were dropped, `rest_of_all` must: it waits for everything that can access the memory.
    pub(crate) fn wait(
        &self,
        rest_of_all: impl FnOnce() -> Result<(), Unrest>,
    ) -> Result<AtRest, Unrest> {
        // Counted when no lease is open any more, and before the fences are looked up: leases that are
        // covered in between have fences by then, or are counted.
        self.point.wait_for_leases();
        let left = self.point.left();
        self.point.wait_for_fences()?;
        self.fences.iter().try_for_each(Fence::wait_for_rest)?;
        if self.covered == Covered::No || left > 0 {
            rest_of_all().map_err(|unrest| match unrest {
                Unrest::Unknown if self.covered == Covered::Yes => Unrest::Dropped { leases: left },
                unrest => unrest,
            })?;
        }
        Ok(AtRest(()))
    }
}

impl AtRest {
    /// For memory whose addresses never left the reservation: no user can exist.
    pub(crate) fn never_exposed() -> Self {
        Self(())
    }

    /// No proof at all: what the protection is there to prevent.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) fn sabotage() -> Self {
        Self(())
    }
}

one_line_debug!(UsersUnknown);
