//! The handle of a simulated machine, and what a test may ask of it beyond the driver's calls.

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
use crate::streams::DefaultOrder;
use crate::{LeakReport, Race, RaceCheck, SimConfig, SimConfigError};

/// A machine with simulated CUDA devices. A cheap handle: clones are the same machine.
///
/// The machine does nothing by itself: operations run inside calls, as the [`Pace`] says, on the thread
/// that makes the call, one call at a time. It ends, and its pinned memory with it, when the last clone
/// is dropped.
#[derive(Clone)]
pub struct SimDriver {
    /// All of the machine. Two kinds of code from outside the crate run while this lock is held. Kernel
    /// references cannot reach the driver that runs them. Host functions can, and a driver call of theirs
    /// is refused before it asks for the lock.
    state: Arc<Mutex<Machine>>,
}

impl SimDriver {
    /// Builds a machine.
    ///
    /// # Errors
    /// [`SimConfigError`] for a machine that cannot be simulated.
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

    /// Says what kernels compute, by entry name; a later reference of a name replaces the earlier.
    pub fn register_kernels(&self, references: &[KernelReference]) {
        let mut state = self.state();
        for reference in references {
            state.references.insert(reference.name, *reference);
        }
    }

    /// Whether kernels that have a registered reference run from their PTX all the same.
    ///
    /// Off at first: a reference is much faster. A kernel without one always runs from its PTX, and
    /// only a run from PTX proves anything about the kernel.
    pub fn prefer_ptx(&self, prefer: bool) {
        self.state().prefer_ptx = prefer;
    }

    /// Most instructions that a kernel may run from its PTX before it is taken to be endless: those
    /// of one thread, and those of all threads of the launch. At first 2^22 and 2^33.
    pub fn limit_instructions(&self, thread: u64, launch: u64) {
        self.state().limits = Limits { thread_steps: thread, launch_steps: launch };
    }

    /// Instructions that kernels have run from their PTX, of all threads.
    #[must_use]
    pub fn instructions(&self) -> u64 {
        self.state().instructions
    }

    /// Holds a stream still: none of its operations runs until [`release_hold`](Self::release_hold).
    ///
    /// A host wait that cannot end because of it answers `LAUNCH_TIMEOUT`, with a finding, where a
    /// real one would hang; the device is not lost by that. Stream 0 means the legacy default
    /// streams of all devices; a handle that is no stream does nothing.
    pub fn hold(&self, stream: u64) {
        self.set_hold(stream, true);
    }

    /// Lets a held stream go on.
    pub fn release_hold(&self, stream: u64) {
        self.set_hold(stream, false);
    }

    fn set_hold(&self, handle: u64, held: bool) {
        let mut state = self.state();
        for (&other, stream) in &mut state.streams {
            let is_default = handle == 0 && stream.order == DefaultOrder::Legacy;
            if is_default || other == handle {
                stream.held = held;
            }
        }
        state.keep_pace();
    }

    /// How far the devices go on by themselves from now on.
    pub fn set_pace(&self, pace: Pace) {
        let mut state = self.state();
        state.pace = pace;
        state.keep_pace();
    }

    /// Runs the next operation of one ready stream; false when there is none.
    pub fn step(&self) -> bool {
        self.state().step()
    }

    /// Runs all operations that can run, and returns how many did.
    pub fn run_all(&self) -> u64 {
        let mut state = self.state();
        let before = state.ticks;
        while state.step() {}
        state.ticks - before
    }

    /// Virtual time since the machine was built: the host's clock.
    ///
    /// It tells what the driver's calls and the waits for the device would have taken on the machine
    /// of [`SimConfig::profile`]. What the program itself computes between calls takes no time unless
    /// [`advance_host`](Self::advance_host) says so. There is one clock for all host threads: their
    /// calls count as if one thread had made them.
    #[must_use]
    pub fn virtual_now(&self) -> Duration {
        Duration::from_nanos(self.state().clock.now())
    }

    /// Lets the host's clock go on by `time`, as if the program had computed for so long. What was
    /// enqueued before runs on meanwhile.
    pub fn advance_host(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.state().clock.advance_host(nanos);
    }

    /// Driver calls so far, by the driver's name of the call.
    #[must_use]
    pub fn calls(&self) -> BTreeMap<&'static str, u64> {
        self.state().faults.calls()
    }

    /// What was seen to go wrong, oldest first; at most the first 256.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        self.state().findings.kept().to_vec()
    }

    /// Findings that came after the first 256 and were not kept.
    #[must_use]
    pub fn findings_dropped(&self) -> u64 {
        self.state().findings.dropped()
    }

    /// What is done about races from now on, in place of what [`SimConfig::races`] said. Where this begins
    /// or ends the looking, what was enqueued and accessed before is not looked at.
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

    /// How often something was not looked at for races: the history grew beyond 2^22 ranges and was
    /// dropped, or an operation was of more than 65,534 streams.
    #[must_use]
    pub fn races_unseen(&self) -> u64 {
        self.state().races.unseen()
    }

    /// Forgets now what no race can come of any more, as the machine does when its history has grown. For
    /// the tests of the detector.
    #[doc(hidden)]
    pub fn sweep_races(&self) {
        self.state().sweep_races();
    }

    /// What is still alive; a finding too, unless that is nothing.
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

    /// Makes the `nth` call of `call` from now on (1 is the next) answer `code`, once.
    ///
    /// The call does nothing then. A sticky code loses the calling thread's current device.
    pub fn fail_nth(&self, call: &'static str, nth: u64, code: ErrorCode) {
        self.state().faults.order(call, nth, code);
    }

    /// Loses a device after it has run `operations` more operations, or now if that is 0.
    ///
    /// Its pending work never runs, and every later call in its context answers `code`, which is one
    /// that a driver repeats ([`ErrorCode::is_sticky`]). Clean-up calls do their work all the same. An
    /// ordinal that names no device does nothing.
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

    /// Makes an event late: after it completes, `queries` queries still answer "not ready".
    ///
    /// A synchronisation waits the lateness out. Streams that wait for the event are not delayed.
    pub fn delay_event(&self, event: u64, queries: u64) {
        self.state().delay_event(event, queries);
    }

    /// Whether `device` may access the whole range and every byte of it was written once before, by
    /// a copy, a fill or a kernel. Pinned host memory counts as written.
    ///
    /// A copy within the devices takes along which of its bytes were never written. Without
    /// [`SimConfig::track_initialised`] all memory in reach counts as written.
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

    /// Memory in use on a device, in bytes; 0 for an ordinal that names none.
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
