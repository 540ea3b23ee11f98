//! The handle of a simulated machine, and the functions for tests beyond the driver's calls.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cuda_driver::ErrorCode;
use cuda_driver::reference::KernelReference;
use parking_lot::{Mutex, MutexGuard};

use crate::findings::{Finding, FindingKind};
use crate::ptx::Limits;
use crate::scheduler::Pace;
use crate::state::Machine;
use crate::work::Work;
use crate::{LeakReport, OperationTime, Race, RaceCheck, SimConfig, SimConfigError};

/// A machine with simulated CUDA devices. The handle is cheap: clones share the machine.
///
/// The machine has no thread of its own. Operations run inside calls, on the calling thread, as the
/// [`Pace`] says, one call at a time. The machine and its pinned memory are freed when the last
/// clone is dropped.
#[derive(Clone)]
pub struct SimDriver {
    /// The whole machine. Kernel references run while this lock is held, and cannot reach the driver
    /// that runs them.
    state: Arc<Mutex<Machine>>,
}

impl SimDriver {
    /// Builds a machine.
    ///
    /// # Errors
    /// [`SimConfigError`] if the configuration cannot be simulated.
    pub fn new(config: SimConfig) -> Result<Self, SimConfigError> {
        config.check()?;
        Ok(Self { state: Arc::new(Mutex::new(Machine::new(config))) })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, Machine> {
        self.state.lock()
    }

    /// The machine's configuration.
    #[must_use]
    pub fn config(&self) -> SimConfig {
        self.state().config.clone()
    }

    /// Registers references for kernels, by entry name. A later reference with the same name
    /// replaces the earlier one.
    pub fn register_kernels(&self, references: &[KernelReference]) {
        self.state().kernels.register(references);
    }

    /// Chooses whether kernels with a registered reference run from their PTX instead.
    ///
    /// The default is `false`: a reference is much faster. A kernel without a reference always runs
    /// from its PTX, and only a run from PTX tests the kernel itself.
    pub fn prefer_ptx(&self, prefer: bool) {
        self.state().kernels.prefer_ptx(prefer);
    }

    /// Limits the number of instructions of a kernel that runs from PTX: per thread, and over all
    /// threads of the launch. A kernel beyond a limit is reported as endless. The defaults are 2^22
    /// and 2^33.
    pub fn limit_instructions(&self, thread: u64, launch: u64) {
        self.state().kernels.set_limits(Limits { thread_steps: thread, launch_steps: launch });
    }

    /// Number of PTX instructions that kernels have run, over all threads.
    #[must_use]
    pub fn instructions(&self) -> u64 {
        self.state().kernels.instructions()
    }

    /// Holds a stream: none of its operations runs until [`release_hold`](Self::release_hold).
    ///
    /// A host wait that cannot end because of the hold returns `LAUNCH_TIMEOUT` with a finding,
    /// where a real one would hang. The device is not lost by that. Stream 0 means the legacy
    /// default streams of all devices. An unknown handle is ignored.
    pub fn hold(&self, stream: u64) {
        self.set_hold(stream, true);
    }

    /// Releases a held stream.
    pub fn release_hold(&self, stream: u64) {
        self.set_hold(stream, false);
    }

    fn set_hold(&self, handle: u64, held: bool) {
        let mut state = self.state();
        state.streams.hold(handle, held);
        state.keep_pace();
    }

    /// Sets the pace of the devices from now on.
    pub fn set_pace(&self, pace: Pace) {
        let mut state = self.state();
        state.scheduler.set_pace(pace);
        state.keep_pace();
    }

    /// Runs the next operation of one ready stream; returns false if there is none.
    pub fn step(&self) -> bool {
        self.state().step()
    }

    /// Runs all operations that can run, and returns their number.
    pub fn run_all(&self) -> u64 {
        let mut state = self.state();
        let before = state.scheduler.ran();
        while state.step() {}
        state.scheduler.ran() - before
    }

    /// Virtual time since the machine was built: the host's clock.
    ///
    /// The time that the driver's calls and the waits for the device would have taken on the
    /// machine of [`SimConfig::profile`]. Computation of the program between calls takes no time,
    /// unless [`advance_host`](Self::advance_host) adds it. All host threads share one clock, as if
    /// one thread had made all calls.
    #[must_use]
    pub fn virtual_now(&self) -> Duration {
        Duration::from_nanos(self.state().clock.now())
    }

    /// Of [`virtual_now`](Self::virtual_now), the time in which the host waited for devices.
    #[must_use]
    pub fn virtual_waited(&self) -> Duration {
        Duration::from_nanos(self.state().clock.waited())
    }

    /// Advances the host's clock by `time`, as if the program had computed that long. Enqueued work
    /// proceeds meanwhile.
    pub fn advance_host(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.state().clock.advance_host(nanos);
    }

    /// Enqueues work in the stream `stream` that keeps its device busy for `time` of virtual time, and touches no
    /// memory: the computation of a model, whose cost is known and whose kernels are not there.
    ///
    /// # Ordering
    ///
    /// Like a kernel: behind all earlier work of the stream, and one after another with kernels and copies within the
    /// device, whatever their streams. Copies over the link go on meanwhile. An unknown stream is ignored.
    pub fn compute(&self, stream: u64, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut state = self.state();
        state.enqueue(stream, "compute", Work::Compute(nanos));
        state.keep_pace();
    }

    /// Keeps the times of up to `limit` operations from now on, until [`take_times`](Self::take_times) takes them. 0 keeps
    /// none, as at the beginning.
    ///
    /// Changes no time: an operation's times are computed when something needs them, as without this call.
    pub fn keep_times(&self, limit: usize) {
        self.state().clock.keep_times(limit);
    }

    /// The times that were computed and kept since they were last taken, in that order.
    #[must_use]
    pub fn take_times(&self) -> Vec<OperationTime> {
        self.state().clock.take_times()
    }

    /// Number of driver calls so far, by the driver's name of the call.
    #[must_use]
    pub fn calls(&self) -> BTreeMap<&'static str, u64> {
        self.state().faults.calls()
    }

    /// The findings, oldest first; at most the first 256.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        self.state().findings.kept().to_vec()
    }

    /// Number of findings after the first 256, which are not kept.
    #[must_use]
    pub fn findings_dropped(&self) -> u64 {
        self.state().findings.dropped()
    }

    /// Sets the reaction to races from now on, in place of [`SimConfig::races`]. If this turns the
    /// check on or off, earlier operations and accesses are not checked.
    pub fn set_race_check(&self, check: RaceCheck) {
        self.state().set_race_check(check);
    }

    /// The races among the findings.
    #[must_use]
    pub fn races(&self) -> Vec<Race> {
        let state = self.state();
        state
            .findings
            .kept()
            .iter()
            .filter_map(|finding| finding.race.as_deref().cloned())
            .collect()
    }

    /// Number of times that the race check skipped something: the history grew beyond 2^22 ranges
    /// and was dropped, or an operation was ordered after more than 65,534 streams.
    #[must_use]
    pub fn races_unseen(&self) -> u64 {
        self.state().races.unseen()
    }

    /// Drops history that can no longer lead to a race, as the machine does when its history has
    /// grown. For tests of the detector.
    #[doc(hidden)]
    pub fn sweep_races(&self) {
        self.state().sweep_races();
    }

    /// Live objects and memory. Adds a finding unless there are none.
    #[must_use]
    pub fn check_leaks(&self) -> LeakReport {
        let mut state = self.state();
        let report = state.leaks();
        if !report.is_clean() {
            let finding = Finding::new(FindingKind::Leak, "check_leaks", report.to_string());
            state.findings.add(finding);
        }
        report
    }

    /// Makes the `nth` call of `call` from now on (1 is the next) fail once with `code`.
    ///
    /// The failed call has no effect. A sticky code loses the calling thread's current device.
    pub fn fail_nth(&self, call: &'static str, nth: u64, code: ErrorCode) {
        self.state().faults.order(call, nth, code);
    }

    /// Loses a device after it has run `operations` more operations, or now if `operations` is 0.
    ///
    /// Its pending work never runs. Every later call in its context returns `code`, which must be a
    /// sticky code ([`ErrorCode::is_sticky`]). Clean-up calls still work. An unknown ordinal is
    /// ignored.
    pub fn lose_device(&self, device: u32, operations: u64, code: ErrorCode) {
        let mut state = self.state();
        if device >= state.config.devices {
            return;
        }
        match operations {
            0 => state.poison(device, code),
            _ => state.faults.order_loss(device, operations, code),
        }
    }

    /// Delays an event: after it completes, `queries` further queries still return "not ready".
    ///
    /// A synchronisation returns only after the delay. Streams that wait for the event are not
    /// delayed.
    pub fn delay_event(&self, event: u64, queries: u64) {
        self.state().events.delay(event, queries);
    }

    /// Whether `device` may access the whole range and every byte of the range was written before,
    /// by a copy, a fill or a kernel. Pinned host memory counts as written.
    ///
    /// A copy between device ranges also copies which bytes were never written. Without
    /// [`SimConfig::track_initialised`] all accessible memory counts as written.
    #[must_use]
    pub fn is_initialised(&self, device: u32, address: u64, bytes: u64) -> bool {
        let state = self.state();
        if device >= state.config.devices {
            return false;
        }
        let viewer = state.viewer(device);
        state.memory.check(viewer, address, bytes).is_ok()
            && state.memory.initialised(viewer, address, bytes)
    }

    /// Live pinned host memory, in bytes.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.state().memory.host.live_bytes()
    }

    /// Memory in use on a device, in bytes; 0 for an unknown ordinal.
    #[must_use]
    pub fn device_used_bytes(&self, device: u32) -> u64 {
        self.state().memory.used(device)
    }
}

impl fmt::Debug for SimDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDriver").field("config", &self.config()).finish_non_exhaustive()
    }
}
