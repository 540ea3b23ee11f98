//! Epochs and leases: batches that the CPU has not enqueued yet count as users of memory.
//!
//! An event covers enqueued work. A scheduler that runs ahead of the device also holds batches that
//! are *not* enqueued yet but already contain addresses. No event covers these. Each such batch
//! holds a [`Lease`]. Memory retired meanwhile stays mapped until the lease is closed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Weak};

use cuda_driver::messages::one_line_debug;
use cuda_driver::{DeviceError, Fence, guard};
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use crate::pages::access::AccessList;
use crate::rest::Look;

/// Hands out leases, and reports when all leases older than a retire point are closed.
///
/// The handle is cheap: clones share the gate, and one gate may serve many reservations. An owner
/// that takes a lease for *every* use of the memory needs no other proof: the gate alone proves
/// rest.
#[derive(Clone, Debug, Default)]
pub struct EpochGate {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<GateState>,
    lease_closed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    /// The epoch of leases taken now. Each retire point starts the next epoch.
    epoch: u64,
    /// Number of open leases by epoch. An epoch without leases has no entry.
    leases: BTreeMap<u64, u64>,
    /// Fences of closed leases that were not yet seen to be complete, in no order.
    submitted: Vec<Submitted>,
    /// Index in `submitted` of the next fence to query.
    asked: usize,
    /// Whether leases cover all uses of the memory.
    leased: bool,
    left: Left,
    /// The devices that can access the memory of the leases.
    guarded: Vec<Weak<AccessList>>,
}

/// Dropped leases. The work of their batches may be enqueued, with no fence after it.
#[derive(Debug, Default)]
struct Left {
    /// Number of dropped leases.
    dropped: u64,
    /// Number of them, from the first on, whose work is covered by fences.
    covered: u64,
    /// The earliest epoch of the uncovered ones.
    epoch: u64,
}

/// The fence of a submitted batch.
#[derive(Debug)]
struct Submitted {
    epoch: u64,
    fence: Fence,
}

/// Number of submissions kept before any is queried. Their owners usually query the fences
/// themselves.
const UNASKED_MAX: usize = 16;

/// Number of fences queried per submission beyond that. More than one, so that fences that stay
/// incomplete for long do not keep the others from being queried.
const ASKED_EACH: usize = 2;

impl EpochGate {
    /// Creates a gate without leases. Until its first lease it proves nothing about memory whose
    /// addresses were handed out.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a gate whose owner takes a lease for every use of its memory. The gate alone proves
    /// rest, even before the first lease.
    #[must_use]
    pub fn for_all_uses() -> Self {
        let gate = Self::default();
        gate.inner.state.lock().leased = true;
        gate
    }

    /// Opens a lease. Take it before reading any address or block table that the batch will use.
    ///
    /// Makes no driver call.
    pub fn lease(&self) -> Lease {
        let (lease, over) = {
            let mut state = self.inner.state.lock();
            state.leased = true;
            let epoch = state.epoch;
            *state.leases.entry(epoch).or_default() += 1;
            (Lease { gate: self.clone(), epoch, open: true }, state.take_over())
        };
        // Dropped outside the lock, because it may be the last handle of an event.
        drop(over);
        lease
    }

    /// Number of open leases.
    #[must_use]
    pub fn open_leases(&self) -> u64 {
        self.inner.state.lock().leases_through(u64::MAX)
    }

    /// Covers the work of dropped leases by the fences that `record` makes, one for each stream
    /// that may have such work. If no lease was dropped since the last call, `record` is not
    /// called.
    ///
    /// Before this call, memory retired after such a lease was taken is at rest only for a call
    /// that waits for all work of its device ([`Unrest::Dropped`]). An empty list of fences covers
    /// nothing.
    ///
    /// # Ordering
    /// Does not wait. Covers leases dropped before this call, because `record` is called after
    /// their drop.
    ///
    /// # Errors
    /// [`CoverError`]; nothing is covered then.
    pub fn cover_dropped<E>(
        &self,
        record: impl FnOnce() -> Result<Vec<Fence>, E>,
    ) -> Result<(), CoverError<E>> {
        let (dropped, epoch) = {
            let Left { dropped, covered, epoch } = self.inner.state.lock().left;
            if dropped == covered {
                return Ok(());
            }
            (dropped, epoch)
        };
        let fences = record().map_err(CoverError::Record)?;
        let over = {
            let mut state = self.inner.state.lock();
            // The work is unknown, so it may use any of the memory.
            let all = || state.guarded().all(|access| access.reaches_any(&fences));
            if fences.is_empty() || !guard!("vmm.cover-reaches-all", all(), else true) {
                drop(state);
                return Err(CoverError::Uncovered { fences });
            }
            if dropped > state.left.covered {
                state.left.covered =
                    guard!("vmm.cover-counts-before", dropped, else state.left.dropped);
                state.submitted.extend(fences.into_iter().map(|fence| Submitted { epoch, fence }));
            }
            state.take_over()
        };
        drop(over);
        Ok(())
    }

    /// Registers the devices that can access memory covered by the leases, while that memory
    /// exists.
    pub(crate) fn guard(&self, access: &Arc<AccessList>) {
        let mut state = self.inner.state.lock();
        state.guarded.retain(|access| access.strong_count() > 0);
        state.guarded.push(Arc::downgrade(access));
    }

    /// Whether `fences` can belong to a batch that uses memory of this gate.
    fn is_told_by(&self, fences: &[Fence]) -> bool {
        let state = self.inner.state.lock();
        let mut guarded = state.guarded().peekable();
        let unguarded = guarded.peek().is_none();
        !fences.is_empty() && {
            let mut reached = || guarded.any(|access| access.reaches_any(fences));
            unguarded || guard!("vmm.lease-fence-reaches", reached(), else true)
        }
    }

    /// Ends the current epoch. The returned point is passed when every lease taken so far is closed
    /// and the work of their fences has completed. Later leases do not affect it.
    pub(crate) fn retire_point(&self) -> RetirePoint {
        let mut state = self.inner.state.lock();
        let last = state.epoch;
        state.epoch += 1;
        RetirePoint { gate: self.clone(), last }
    }

    /// Whether a lease was ever taken, or leases cover every use.
    pub(crate) fn was_leased(&self) -> bool {
        self.inner.state.lock().leased
    }

    fn close(&self, epoch: u64, end: LeaseEnd<'_>) {
        let fences = match end {
            LeaseEnd::Submitted(fences) => fences,
            LeaseEnd::Dropped => &[],
        };
        let (doubtful, over) = {
            let mut state = self.inner.state.lock();
            let submitted = fences.iter().map(|fence| Submitted { epoch, fence: fence.clone() });
            state.submitted.extend(submitted);
            if matches!(end, LeaseEnd::Dropped) {
                guard!("vmm.dropped-lease-counts", state.left.add(epoch));
            }
            state.end_lease(epoch);
            let over = state.take_over();
            (state.doubtful(ASKED_EACH * fences.len()), over)
        };
        self.inner.lease_closed.notify_all();
        drop(over);
        for fence in doubtful {
            // The next call drops completed entries. A failing query keeps its entry, and the
            // caller that needs the answer gets the error.
            let _ = guard!("vmm.gate-asks", fence.is_at_rest(), else Ok(false));
        }
    }

    /// Drops submissions that are known to be complete.
    fn forget_over(&self) {
        let over = self.inner.state.lock().take_over();
        drop(over);
    }
}

/// How a lease ended.
#[derive(Clone, Copy)]
enum LeaseEnd<'a> {
    /// The work is ordered before these fences.
    Submitted(&'a [Fence]),
    /// The lease was dropped.
    Dropped,
}

impl Left {
    fn add(&mut self, epoch: u64) {
        self.epoch = if self.dropped == self.covered { epoch } else { self.epoch.min(epoch) };
        self.dropped += 1;
    }

    /// The number of dropped leases that may be of an epoch up to `last`.
    fn through(&self, last: u64) -> u64 {
        if self.epoch <= last { self.dropped - self.covered } else { 0 }
    }
}

impl GateState {
    fn guarded(&self) -> impl Iterator<Item = Arc<AccessList>> + '_ {
        self.guarded.iter().filter_map(Weak::upgrade)
    }

    fn leases_through(&self, last: u64) -> u64 {
        self.leases.range(..=last).map(|(_, open)| open).sum()
    }

    fn submitted_through(&self, last: u64) -> Vec<Fence> {
        let through = self.submitted.iter().filter(|entry| entry.epoch <= last);
        through.map(|entry| entry.fence.clone()).collect()
    }

    fn end_lease(&mut self, epoch: u64) {
        let Some(open) = self.leases.get_mut(&epoch) else { return };
        *open -= 1;
        if *open == 0 {
            self.leases.remove(&epoch);
        }
    }

    /// Removes entries known to be complete, so that the caller drops them outside the lock. Makes
    /// no driver call.
    fn take_over(&mut self) -> SmallVec<[Submitted; 8]> {
        let mut over = SmallVec::new();
        let mut at = 0;
        while let Some(entry) = self.submitted.get(at) {
            if entry.fence.is_known_complete() {
                over.push(self.submitted.swap_remove(at));
            } else {
                at += 1;
            }
        }
        over
    }

    /// Up to `most` of the fences, different ones each time if there are many. This bounds the
    /// number of entries and of queries by the number of batches in flight, even if nothing is ever
    /// retired.
    fn doubtful(&mut self, most: usize) -> SmallVec<[Fence; 8]> {
        let held = self.submitted.len();
        if held <= UNASKED_MAX {
            return SmallVec::new();
        }
        let most = most.min(held);
        let first = self.asked % held;
        self.asked = first + most;
        let places = (first..first + most).map(|place| place % held);
        places.map(|place| self.submitted[place].fence.clone()).collect()
    }
}

/// A batch on the CPU that may still touch memory; see [`EpochGate`].
///
/// Close it with [`submitted`](Lease::submitted), passing a fence after the batch's work for each
/// stream with such work. If nothing was enqueued, pass a fence on any stream of the device.
///
/// Dropping a lease, as an early return does, is safe whatever was enqueued: the gate assumes that
/// the work was enqueued. The memory is then at rest only when fences cover the work
/// ([`EpochGate::cover_dropped`]), or for a call that waits for all work of its device. There is no
/// call that claims "nothing was enqueued": nothing could check the claim, and memory would be
/// unmapped because of it.
///
/// ```compile_fail,E0599
/// # let gate = cuda_vmm::EpochGate::new();
/// gate.lease().cancel();
/// ```
#[derive(Debug)]
#[must_use = "dropping a lease says that its batch may use the memory until something covers its work"]
pub struct Lease {
    gate: EpochGate,
    epoch: u64,
    open: bool,
}

impl Lease {
    /// Closes the lease of a batch whose work is enqueued. `fences`, recorded after that work, one
    /// for each of its streams, take the lease's place.
    ///
    /// # Ordering
    /// Does not wait. If many submitted fences have not been seen to complete, queries at most two
    /// of them for each of `fences`.
    ///
    /// # Errors
    /// [`UncoveredLease`] with the lease, which is still open. Dropping that is a [drop](Lease) of
    /// the lease.
    pub fn submitted(mut self, fences: &[Fence]) -> Result<(), UncoveredLease> {
        if !self.gate.is_told_by(fences) {
            return Err(UncoveredLease { lease: self, fences: fences.len() as u64 });
        }
        self.open = false;
        self.gate.close(self.epoch, LeaseEnd::Submitted(fences));
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.open {
            self.gate.close(self.epoch, LeaseEnd::Dropped);
        }
    }
}

/// The lease was not closed: none of the fences belongs to a device that can access memory of the
/// lease's gate.
#[derive(thiserror::Error)]
#[error(
    "lease not closed: none of {fences} fences is of a device that can access the lease's memory"
)]
pub struct UncoveredLease {
    /// The lease, still open.
    pub lease: Lease,
    /// Number of given fences.
    pub fences: u64,
}

/// The reason why dropped leases are not covered.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CoverError<E> {
    /// The fences could not be made.
    #[error("could not record fences for dropped leases")]
    Record(#[source] E),
    /// Some memory of the gate cannot be accessed by any device of the fences.
    #[error("{} fences do not cover all devices whose memory the gate guards", .fences.len())]
    Uncovered {
        /// The fences.
        fences: Vec<Fence>,
    },
}

impl<E: fmt::Debug> fmt::Debug for CoverError<E> {
    /// One line with the cause. `?` in `main` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)?;
        match self {
            Self::Record(cause) => write!(f, ": {cause:?}"),
            Self::Uncovered { .. } => Ok(()),
        }
    }
}

/// The end of an epoch; see [`EpochGate::retire_point`].
#[derive(Clone, Debug)]
pub(crate) struct RetirePoint {
    gate: EpochGate,
    last: u64,
}

/// The reason why a point is not passed, or memory is not at rest.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Unrest {
    /// Batches that may use the memory are still on the CPU.
    #[error("{open} leases taken before the memory was retired are still open")]
    Leases {
        /// Number of open leases.
        open: u64,
    },
    /// Work that may use the memory has not completed.
    #[error("{pending} fences that cover uses of the memory have not completed")]
    Events {
        /// Number of incomplete fences.
        pending: u64,
    },
    /// Leases were dropped, and nothing covers the work that their batches may have enqueued.
    /// [`EpochGate::cover_dropped`] covers it, and so does waiting for all work of the device.
    #[error("{leases} leases were dropped, and nothing covers the work of their batches")]
    Dropped {
        /// Number of dropped leases of the gate; at least one was taken before the memory was
        /// retired.
        leases: u64,
    },
    /// The end of the uses is unknown: addresses were handed out, no lease was ever taken at the
    /// gate, and no fence of a device with access was given.
    #[error("neither a fence nor a lease covers the uses of the memory")]
    Unknown,
    /// A fence could not be queried, although its device is not lost.
    #[error("a fence that covers uses of the memory could not be queried")]
    Device(#[from] DeviceError),
}

impl RetirePoint {
    /// Of two points of one gate, the later has the larger number.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Whether the point is passed. Does not wait.
    pub(crate) fn check(&self, look: &mut Look) -> Result<(), Unrest> {
        let (open, submitted, left) = {
            let state = self.gate.inner.state.lock();
            let (last, left) = (self.last, state.left.through(self.last));
            (state.leases_through(last), state.submitted_through(last), left)
        };
        if open > 0 {
            return Err(Unrest::Leases { open });
        }
        let mut pending = 0;
        for fence in &submitted {
            pending += u64::from(!look.is_at_rest(fence)?);
        }
        self.gate.forget_over();
        if pending > 0 {
            return Err(Unrest::Events { pending });
        }
        match left {
            0 => Ok(()),
            leases => {
                guard!("vmm.dropped-lease-blocks", Err(Unrest::Dropped { leases }), else Ok(()))
            }
        }
    }

    /// Number of uncovered dropped leases that may have been taken before the point.
    pub(crate) fn left(&self) -> u64 {
        self.gate.inner.state.lock().left.through(self.last)
    }

    /// Waits on the host until the leases are closed.
    pub(crate) fn wait_for_leases(&self) {
        let mut state = self.gate.inner.state.lock();
        while state.leases_through(self.last) > 0 {
            self.gate.inner.lease_closed.wait(&mut state);
        }
    }

    /// Waits on the host for the fences with which the leases were closed.
    pub(crate) fn wait_for_fences(&self) -> Result<(), DeviceError> {
        let submitted = self.gate.inner.state.lock().submitted_through(self.last);
        submitted.iter().try_for_each(Fence::wait_for_rest)
    }
}

one_line_debug!(UncoveredLease, Unrest);

#[cfg(test)]
mod tests {
    use cuda_driver::{Device, FencePool, Stream};
    use cuda_sim::{SimConfig, SimDriver};

    use super::*;

    fn held(gate: &EpochGate) -> usize {
        gate.inner.state.lock().submitted.len()
    }

    #[test]
    fn submissions_are_forgotten_though_nothing_is_ever_retired() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let gate = EpochGate::new();
        for _ in 0..10_000 {
            let fence = Fence::record(&stream).unwrap();
            stream.synchronize().unwrap();
            gate.lease().submitted(&[fence]).unwrap();
            assert!(held(&gate) <= UNASKED_MAX + ASKED_EACH);
        }
    }

    #[test]
    fn work_that_goes_on_for_long_does_not_keep_what_came_after_it() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        sim.set_pace(cuda_sim::Pace::Slowest);
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
        let (long, short) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
        let gate = EpochGate::new();
        sim.hold(long.raw());
        for _ in 0..40 {
            gate.lease().submitted(&[Fence::record(&long).unwrap()]).unwrap();
        }
        for _ in 0..10_000 {
            let fence = Fence::record(&short).unwrap();
            short.synchronize().unwrap();
            gate.lease().submitted(&[fence]).unwrap();
            assert!(held(&gate) <= 40 + 2 * UNASKED_MAX + 40, "{}", held(&gate));
        }
        sim.release_hold(long.raw());
        long.synchronize().unwrap();
        assert_eq!(gate.retire_point().check(&mut Look::default()), Ok(()));
        assert_eq!(held(&gate), 0);
    }

    #[test]
    fn what_its_owner_has_seen_to_be_over_is_let_go_without_a_question() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let gate = EpochGate::new();
        let mut pool = FencePool::default();
        let fence = pool.record(&stream).unwrap();
        gate.lease().submitted(std::slice::from_ref(&fence)).unwrap();
        fence.wait().unwrap();
        let next = gate.lease();
        drop(fence);
        assert_eq!(held(&gate), 0);
        // So its event is used again.
        next.submitted(&[pool.record(&stream).unwrap()]).unwrap();
        assert_eq!(sim.calls()["cuEventCreate"], 1);
        assert_eq!(sim.calls().get("cuEventQuery"), None);
    }

    #[test]
    fn memory_that_is_gone_is_not_remembered() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim), 0).unwrap();
        let gate = EpochGate::new();
        for _ in 0..100 {
            gate.guard(&Arc::new(AccessList::new(&device, &[]).unwrap()));
        }
        assert_eq!(gate.inner.state.lock().guarded.len(), 1);
    }

    #[test]
    fn a_point_is_passed_by_older_leases_only() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim), 0).unwrap();
        let fence = Fence::record(&Stream::new(&device).unwrap()).unwrap();
        fence.wait().unwrap();
        let over = |lease: Lease| lease.submitted(std::slice::from_ref(&fence)).unwrap();
        let gate = EpochGate::new();
        let first = gate.lease();
        let early = gate.retire_point();
        let second = gate.lease();
        let late = gate.retire_point();
        over(second);
        assert_eq!(early.check(&mut Look::default()), Err(Unrest::Leases { open: 1 }));
        assert_eq!(late.check(&mut Look::default()), Err(Unrest::Leases { open: 1 }));
        over(first);
        let third = gate.lease();
        assert_eq!(
            (early.check(&mut Look::default()), late.check(&mut Look::default())),
            (Ok(()), Ok(()))
        );
        assert_eq!(gate.open_leases(), 1);
        over(third);
    }
}
