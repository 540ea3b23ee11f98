//! The proof that no work uses a range any more. Unmapping needs this proof.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use cuda_driver::messages::{Chain, one_line_debug};
use cuda_driver::{DeviceError, Fence, guard};
use smallvec::SmallVec;

use crate::EpochGate;
use crate::epoch::{RetirePoint, Unrest};

/// The memory was not given up, because the end of its uses is unknown. Either addresses were handed
/// out, no lease was ever taken at the gate, and no fence was given, or some of the given fences are
/// of devices that cannot access the memory: those say nothing about its uses.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
pub struct UsersUnknown {
    /// Number of given fences.
    pub fences: u64,
    /// Number of them whose device cannot access the memory.
    pub foreign: u64,
}

impl fmt::Display for UsersUnknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self { fences, foreign: 0 } => {
                write!(f, "none of {fences} fences and no lease covers the uses of the memory")
            }
            Self { fences, foreign } => write!(
                f,
                "{foreign} of {fences} fences are of devices that cannot access the memory: \
                 give fences of its own device and of its peers"
            ),
        }
    }
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

/// The possible users of some memory, in the one place where they are kept until they are seen to be
/// done. The memory counts in units from its start, such as rows or blocks.
///
/// A group of users leaves the list by [`Done`], for another that waits for the same and more, or
/// all together with the memory that they use, by [`joined`](Users::joined).
#[derive(Debug, Default)]
pub(crate) struct Users {
    groups: Vec<Group>,
    /// The length at which the fences are to be queried: twice the length after the last time.
    look_at: usize,
}

/// Users that were told of together.
#[derive(Debug)]
struct Group {
    /// They use units before this one only.
    end: u64,
    users: Arc<Quiescence>,
}

/// Users that were seen to be done.
#[derive(Debug)]
pub(crate) struct Done(Arc<Quiescence>);

/// Number of groups that are kept before any fence is queried for their number alone.
const UNASKED_MAX: usize = 16;

impl Users {
    /// Adds users of the units before `end`.
    pub(crate) fn add(&mut self, end: u64, users: Quiescence) {
        // Who waits for the leases up to a later point waits for those up to an earlier one too. So
        // nothing gathers while a lease stays open, or a dropped one uncovered.
        self.groups.retain(|old| {
            let Quiescence { fences, covered, .. } = &*old.users;
            let told_more = old.end > end || !fences.is_empty() || *covered == Covered::No;
            guard!("vmm.users-gather", told_more, else false)
        });
        self.groups.push(Group { end, users: Arc::new(users) });
    }

    /// Whether so many groups have gathered that a caller who adds more should query their fences.
    /// Over time that is at most two queries for each group.
    pub(crate) fn are_many(&mut self) -> bool {
        let many = self.groups.len() > self.look_at.max(UNASKED_MAX);
        if many {
            self.look_at = 2 * self.groups.len();
        }
        many
    }

    pub(crate) fn are_none(&self) -> bool {
        self.groups.is_empty()
    }

    /// Whether some users are known to exist, and nothing says when they are done.
    pub(crate) fn are_unknown(&self) -> bool {
        self.groups.iter().any(|group| group.users.covered == Covered::No)
    }

    /// The first unit that nobody uses, and behind which nobody does.
    pub(crate) fn end(&self) -> u64 {
        self.groups.iter().map(|group| group.end).max().unwrap_or(0)
    }

    /// The proof for the units from `first` on, if nobody uses them.
    pub(crate) fn rest_from(&self, first: u64) -> Option<AtRest> {
        (self.end() <= first).then_some(AtRest(()))
    }

    /// The users that may be done, to be checked without a lock.
    pub(crate) fn pending(&self) -> impl Iterator<Item = Arc<Quiescence>> + '_ {
        let known = self.groups.iter().filter(|group| group.users.covered == Covered::Yes);
        known.map(|group| Arc::clone(&group.users))
    }

    /// Removes users that are done. Drops no last handle of a fence: `done` has another.
    pub(crate) fn forget(&mut self, done: &Done) {
        self.groups.retain(|group| !Arc::ptr_eq(&group.users, &done.0));
        self.look_at = 2 * self.groups.len();
    }

    /// Replaces unknown users by those who may have been meant.
    pub(crate) fn explain(&mut self, users: Quiescence) {
        let named = |group: &Group| group.users.covered == Covered::Yes;
        self.groups.retain(|group| guard!("vmm.recovery-keeps-named", named(group), else false));
        self.add(u64::MAX, users);
    }

    /// All of them, for an owner to whom the memory goes; `None` if there are none, or unknown ones.
    pub(crate) fn joined(&self) -> Option<Quiescence> {
        let last = self.groups.iter().max_by_key(|group| group.users.point.last())?;
        let (fences, point) = (self.fences().cloned().collect(), last.users.point.clone());
        (!self.are_unknown()).then_some(Quiescence { fences, point, covered: Covered::Yes })
    }

    /// The fences of all of them that are not known to be over.
    pub(crate) fn fences(&self) -> impl Iterator<Item = &Fence> {
        let fences = self.groups.iter().flat_map(|group| &group.users.fences);
        fences.filter(|fence| !fence.is_known_complete())
    }
}

impl Done {
    /// Queries the fences of `users`. Does not wait.
    pub(crate) fn check(users: Arc<Quiescence>, look: &mut Look) -> Option<Self> {
        match guard!("vmm.seat-waits", users.check_in(look), else Ok(AtRest(()))) {
            Ok(AtRest(())) => Some(Self(users)),
            Err(Unrest::Device(error)) => {
                tracing::warn!(%error, "a fence cannot be queried: the memory behind it stays in use");
                None
            }
            Err(_) => None,
        }
    }

    /// No proof at all: the mistake that the protection prevents.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) fn sabotage(users: Arc<Quiescence>) -> Self {
        Self(users)
    }
}

/// One look at many users, during which no fence is queried twice.
#[derive(Debug, Default)]
pub(crate) struct Look {
    /// The fences that were found to be incomplete.
    incomplete: HashSet<Fence>,
}

impl Look {
    pub(crate) fn is_at_rest(&mut self, fence: &Fence) -> Result<bool, DeviceError> {
        if self.incomplete.contains(fence) {
            return Ok(false);
        }
        let at_rest = fence.is_at_rest()?;
        if !at_rest {
            self.incomplete.insert(fence.clone());
        }
        Ok(at_rest)
    }
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
        self.check_in(&mut Look::default())
    }

    /// Does the same as a part of a look at many users.
    pub(crate) fn check_in(&self, look: &mut Look) -> Result<AtRest, Unrest> {
        let mut pending = 0;
        for fence in &self.fences {
            pending += u64::from(!look.is_at_rest(fence)?);
        }
        if pending > 0 {
            return Err(Unrest::Events { pending });
        }
        self.point.check(look)?;
        match self.covered {
            Covered::Yes => Ok(AtRest(())),
            Covered::No => {
                guard!("vmm.unknown-users-block", Err(Unrest::Unknown), else Ok(AtRest(())))
            }
        }
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
        if self.covered == Covered::No || guard!("vmm.wait-counts-dropped", left > 0, else false) {
            guard!("vmm.wait-waits-for-all", rest_of_all(), else Ok(())).map_err(|unrest| {
                match unrest {
                    Unrest::Unknown if self.covered == Covered::Yes => {
                        Unrest::Dropped { leases: left }
                    }
                    unrest => unrest,
                }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_joined_to_the_last_of_them_in_whatever_order_they_were_told_of() {
        for order in [[0, 1], [1, 0]] {
            let gate = EpochGate::new();
            let of = |gate: &EpochGate| Some(Quiescence::new(gate, &[], Covered::Yes));
            let before = of(&gate);
            let lease = gate.lease();
            let mut told = [before, of(&gate)];
            let mut users = Users::default();
            // The first that is told of has the more units, so that both stay.
            for (end, at) in [2, 1].into_iter().zip(order) {
                users.add(end, told[at].take().unwrap());
            }
            let joined = users.joined().unwrap().check();
            assert!(matches!(joined, Err(Unrest::Leases { open: 1 })), "{order:?}: {joined:?}");
            drop(lease);
        }
    }
}
