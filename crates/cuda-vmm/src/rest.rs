//! The proof that no work uses a range any more. Unmapping needs this proof.

use std::fmt;

use cuda_driver::messages::{Chain, one_line_debug};
use smallvec::SmallVec;

use crate::epoch::{RetirePoint, Unrest};
use crate::{EpochGate, Fence};

/// The memory was not given up, because the end of its uses is unknown: addresses were handed out,
/// no lease was ever taken at the gate, and none of the given fences is of a device with access.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("none of {fences} fences and no lease covers the uses of the memory")]
pub struct UsersUnknown {
    /// Number of given fences.
    pub fences: u64,
}

/// The memory is still in use, so nothing was unmapped. The request is returned for another try.
#[derive(thiserror::Error)]
#[error("the memory is not at rest")]
pub struct NotAtRest<T> {
    /// The request.
    pub request: T,
    /// The users of the memory.
    #[source]
    pub reason: Unrest,
}

impl<T> fmt::Debug for NotAtRest<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}: {}", Chain(&self.reason))
    }
}

/// All possible users of retired memory: enqueued work, by its fences, and batches on the CPU, by
/// the gate's leases.
#[derive(Debug)]
pub(crate) struct Quiescence {
    fences: SmallVec<[Fence; 4]>,
    point: RetirePoint,
    /// Whether fences and leases cover all users.
    covered: Covered,
}

/// Whether fences and leases cover all users of some memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Covered {
    Yes,
    /// Addresses were handed out, and nothing covers their users.
    No,
}

/// Proof that a [`Quiescence`] was reached. Only this module creates it, and unmapping consumes it.
#[derive(Debug)]
pub(crate) struct AtRest(());

impl Quiescence {
    /// The users at this moment. Call it once no new user can find the memory.
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

    /// Waits on the host until all users are done. If fences and leases do not cover all users, or
    /// leases were dropped, `rest_of_all` must wait for all work that can access the memory.
    pub(crate) fn wait(
        &self,
        rest_of_all: impl FnOnce() -> Result<(), Unrest>,
    ) -> Result<AtRest, Unrest> {
        // Counted when no lease is open any more, and before the fences are read. Leases that are
        // covered in between either have fences by then, or are counted here.
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
    /// For memory whose addresses never left the reservation: it can have no users.
    pub(crate) fn never_exposed() -> Self {
        Self(())
    }

    /// No proof at all: the mistake that the protection prevents.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) fn sabotage() -> Self {
        Self(())
    }
}

one_line_debug!(UsersUnknown);
