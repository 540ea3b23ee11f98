//! Epochs and leases: batches that still sit on the CPU count as users of memory.
//!
//! An event covers work that was enqueued. A scheduler that runs ahead of the device also holds
//! batches that are *not* enqueued yet but already carry addresses; no event can speak for them. Each
//! such batch holds a [`Lease`], and memory retired while it does stays mapped until it is closed.

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_driver::{DeviceError, Event};
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

/// Hands out leases and tells when all that are older than a point in time are closed.
///
/// A cheap handle: clones are the same gate, and one gate may serve many reservations. Who takes
/// leases takes them for *every* use of the memory: then the gate alone proves rest.
#[derive(Clone, Debug, Default)]
pub struct EpochGate {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    lease_closed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The epoch that leases are taken in now; each retire point begins the next.
    epoch: u64,
    /// Epochs with open leases or with submitted work that was not yet seen to complete.
    open: BTreeMap<u64, Epoch>,
    leased: bool,
    submissions: u64,
    /// Submissions held before completed ones are looked for again.
    sweep_at: usize,
}

#[derive(Debug, Default)]
struct Epoch {
    leases: u64,
    submitted: Vec<Submitted>,
}

/// The event of a submitted batch. The serial number tells two submissions of one event apart:
/// the earlier may be seen to complete while the event already stands for the later.
#[derive(Clone, Debug)]
struct Submitted {
    serial: u64,
    event: Arc<Event>,
}

/// Submissions held before the first search for completed ones.
const SWEEP_AT_LEAST: usize = 64;

impl EpochGate {
    /// A gate without leases.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens a lease. Take it before reading any address or block table that the batch will use.
    pub fn lease(&self) -> Lease {
        let mut state = self.inner.state.lock();
        state.leased = true;
        let epoch = state.epoch;
        state.open.entry(epoch).or_default().leases += 1;
        Lease { gate: self.clone(), epoch, open: true }
    }

    /// How many leases are open.
    #[must_use]
    pub fn open_leases(&self) -> u64 {
        self.inner.state.lock().leases_through(u64::MAX)
    }

    /// Ends the current epoch: the point is passed when every lease taken so far is closed and the
    /// work they were closed with has completed. Later leases do not matter to it.
    pub(crate) fn retire_point(&self) -> RetirePoint {
        let mut state = self.inner.state.lock();
        let last = state.epoch;
        state.epoch += 1;
        RetirePoint { gate: self.clone(), last }
    }

    /// Whether a lease was ever taken.
    pub(crate) fn was_leased(&self) -> bool {
        self.inner.state.lock().leased
    }

    fn close(&self, epoch: u64, events: impl IntoIterator<Item = Arc<Event>>) {
        let mut state = self.inner.state.lock();
        let mut serial = state.submissions;
        let entry = state.open.entry(epoch).or_default();
        for event in events {
            entry.submitted.push(Submitted { serial, event });
            serial += 1;
        }
        entry.leases -= 1;
        state.submissions = serial;
        state.forget_empty();
        let held: usize = state.open.values().map(|epoch| epoch.submitted.len()).sum();
        let sweep = held >= state.sweep_at.max(SWEEP_AT_LEAST);
        if sweep {
            state.sweep_at = held * 2;
        }
        drop(state);
        self.inner.lease_closed.notify_all();
        if sweep {
            self.sweep();
        }
    }

    /// Forgets submissions that have completed, so that their number stays bounded by those in
    /// flight when nothing is ever retired. Amortised: about two queries a submission.
    fn sweep(&self) {
        let held = self.inner.state.lock().submitted_through(u64::MAX);
        // A failing query keeps its entry: whoever needs the answer will meet the error.
        let done: Vec<u64> = held
            .iter()
            .filter(|entry| is_complete(&entry.event).unwrap_or(false))
            .map(|entry| entry.serial)
            .collect();
        self.forget(&done);
    }

    /// Forgets submissions by their ascending serial numbers. Callers hold clones of the events
    /// until this returns, so that no event is destroyed, by a driver call, under the lock.
    fn forget(&self, serials: &[u64]) {
        let mut state = self.inner.state.lock();
        for epoch in state.open.values_mut() {
            epoch.submitted.retain(|entry| serials.binary_search(&entry.serial).is_err());
        }
        state.forget_empty();
        let held: usize = state.open.values().map(|epoch| epoch.submitted.len()).sum();
        state.sweep_at = held * 2;
    }
}

impl State {
    fn leases_through(&self, last: u64) -> u64 {
        self.open.range(..=last).map(|(_, epoch)| epoch.leases).sum()
    }

    /// In ascending order of their serial numbers.
    fn submitted_through(&self, last: u64) -> Vec<Submitted> {
        let mut entries: Vec<_> =
            self.open.range(..=last).flat_map(|(_, epoch)| &epoch.submitted).cloned().collect();
        entries.sort_unstable_by_key(|entry| entry.serial);
        entries
    }

    fn forget_empty(&mut self) {
        self.open.retain(|_, epoch| epoch.leases > 0 || !epoch.submitted.is_empty());
    }
}

/// A batch on the CPU that may still touch memory; see [`EpochGate`].
///
/// Close it with [`submitted`](Lease::submitted) when the batch's work is enqueued. Dropping it
/// says that the batch will enqueue nothing, or that its work has completed already.
#[derive(Debug)]
#[must_use = "dropping a lease says that its batch uses no memory any more"]
pub struct Lease {
    gate: EpochGate,
    epoch: u64,
    open: bool,
}

impl Lease {
    /// Closes the lease of a batch whose work is enqueued: `events`, recorded after that work, one
    /// for each stream it is on, take its place.
    ///
    /// # Ordering
    /// An event that was never recorded counts as complete. Recording one again before it has
    /// completed is safe: rest then waits for the later record.
    pub fn submitted(mut self, events: impl IntoIterator<Item = Arc<Event>>) {
        self.open = false;
        self.gate.close(self.epoch, events);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.open {
            self.gate.close(self.epoch, []);
        }
    }
}

/// The end of an epoch; see [`EpochGate::retire_point`].
#[derive(Debug)]
pub(crate) struct RetirePoint {
    gate: EpochGate,
    last: u64,
}

/// Why a point is not passed, or memory not at rest.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Unrest {
    /// Batches that may use the memory are still on the CPU.
    #[error("{open} leases taken before the memory was retired are still open")]
    Leases {
        /// How many.
        open: u64,
    },
    /// Work that may use the memory has not completed.
    #[error("{pending} events that cover uses of the memory have not completed")]
    Events {
        /// How many.
        pending: u64,
    },
    /// An event could not be asked, though its device is not lost.
    #[error("an event that covers uses of the memory could not be queried")]
    Device(#[from] DeviceError),
}

impl RetirePoint {
    /// Whether the point is passed. Does not wait.
    pub(crate) fn check(&self) -> Result<(), Unrest> {
        let (open, submitted) = {
            let state = self.gate.inner.state.lock();
            (state.leases_through(self.last), state.submitted_through(self.last))
        };
        if open > 0 {
            return Err(Unrest::Leases { open });
        }
        let mut done: SmallVec<[u64; 8]> = SmallVec::new();
        for entry in &submitted {
            if is_complete(&entry.event)? {
                done.push(entry.serial);
            }
        }
        let pending = (submitted.len() - done.len()) as u64;
        if !done.is_empty() {
            self.gate.forget(&done);
        }
        if pending > 0 { Err(Unrest::Events { pending }) } else { Ok(()) }
    }

    /// Waits on the host until the point is passed.
    pub(crate) fn wait(&self) -> Result<(), DeviceError> {
        let submitted = {
            let mut state = self.gate.inner.state.lock();
            while state.leases_through(self.last) > 0 {
                self.gate.inner.lease_closed.wait(&mut state);
            }
            state.submitted_through(self.last)
        };
        submitted.iter().try_for_each(|entry| wait_for(&entry.event))
    }
}

/// Whether the work before an event can touch memory no more. On a lost device no work goes on.
pub(crate) fn is_complete(event: &Event) -> Result<bool, DeviceError> {
    at_rest_if_lost(event, event.is_complete(), true)
}

/// Waits on the host until the work before an event can touch memory no more.
pub(crate) fn wait_for(event: &Event) -> Result<(), DeviceError> {
    at_rest_if_lost(event, event.synchronize(), ())
}

/// A sticky error ends all work of its context, so nothing is left to wait for.
fn at_rest_if_lost<T>(
    event: &Event,
    answer: Result<T, DeviceError>,
    at_rest: T,
) -> Result<T, DeviceError> {
    match answer {
        Err(_) if event.device().poison().is_some() => Ok(at_rest),
        answer => answer,
    }
}

#[cfg(test)]
mod tests {
    use cuda_driver::{Device, Stream};
    use cuda_sim::{SimConfig, SimDriver};

    use super::*;

    fn held(gate: &EpochGate) -> usize {
        gate.inner.state.lock().open.values().map(|epoch| epoch.submitted.len()).sum()
    }

    #[test]
    fn submissions_are_forgotten_though_nothing_is_ever_retired() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let gate = EpochGate::new();
        for _ in 0..10_000 {
            let event = Arc::new(Event::new(&device).unwrap());
            event.record(&stream).unwrap();
            stream.synchronize().unwrap();
            gate.lease().submitted([event]);
            assert!(held(&gate) <= SWEEP_AT_LEAST);
        }
    }

    #[test]
    fn one_event_submitted_again_is_not_forgotten_with_its_first_submission() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let gate = EpochGate::new();
        let event = Arc::new(Event::new(&device).unwrap());
        gate.lease().submitted([Arc::clone(&event)]);
        let point = gate.retire_point();

        sim.hold(stream.raw());
        gate.lease().submitted([Arc::clone(&event)]);
        // Never recorded: the first submission is over, and only it is forgotten.
        assert_eq!(point.check(), Ok(()));
        assert_eq!(held(&gate), 1);
        event.record(&stream).unwrap();
        let later = gate.retire_point();
        assert_eq!(later.check(), Err(Unrest::Events { pending: 1 }));
        sim.release_hold(stream.raw());
        stream.synchronize().unwrap();
        assert_eq!(later.check(), Ok(()));
        assert_eq!(held(&gate), 0);
    }

    #[test]
    fn a_point_is_passed_by_older_leases_only() {
        let gate = EpochGate::new();
        let first = gate.lease();
        let early = gate.retire_point();
        let second = gate.lease();
        let late = gate.retire_point();
        drop(second);
        assert_eq!(early.check(), Err(Unrest::Leases { open: 1 }));
        assert_eq!(late.check(), Err(Unrest::Leases { open: 1 }));
        drop(first);
        let third = gate.lease();
        assert_eq!((early.check(), late.check()), (Ok(()), Ok(())));
        assert_eq!(gate.open_leases(), 1);
        drop(third);
    }
}
