//! The proof that nothing uses a range any more, without which nothing is unmapped.

use std::sync::Arc;

use cuda_driver::{DeviceError, Event};
use smallvec::SmallVec;

use crate::EpochGate;
use crate::epoch::{RetirePoint, Unrest, is_complete, wait_for};

/// Everybody who may still use memory that was retired: enqueued work, by its events, and batches
/// on the CPU, by the gate's leases.
#[derive(Debug)]
pub(crate) struct Quiescence {
    events: SmallVec<[Arc<Event>; 4]>,
    point: RetirePoint,
}

/// Proof that a [`Quiescence`] was reached. Made here and nowhere else; unmapping consumes it.
#[derive(Debug)]
pub(crate) struct AtRest(());

impl Quiescence {
    /// The users as of now. Call it once the memory can be found by no new user.
    pub(crate) fn new(gate: &EpochGate, events: &[Arc<Event>]) -> Self {
        Self { events: events.iter().cloned().collect(), point: gate.retire_point() }
    }

    /// The proof, if all users are done. Does not wait.
    pub(crate) fn check(&self) -> Result<AtRest, Unrest> {
        let mut pending = 0;
        for event in &self.events {
            pending += u64::from(!is_complete(event)?);
        }
        if pending > 0 {
            return Err(Unrest::Events { pending });
        }
        self.point.check()?;
        Ok(AtRest(()))
    }

    /// The events among the users.
    pub(crate) fn events(&self) -> &[Arc<Event>] {
        &self.events
    }

    /// Waits on the host until all users are done.
    pub(crate) fn wait(&self) -> Result<AtRest, DeviceError> {
        self.point.wait()?;
        self.events.iter().try_for_each(|event| wait_for(event))?;
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
