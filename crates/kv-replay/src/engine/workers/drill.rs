//! Fault drills: worker processes that are stopped for a while, or killed, in a given step.

use std::fmt;
use std::io;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use kv_plane::KvCache;
use kv_plane::manager::WorkerId;
use kv_plane::processes::Processes;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, pidfd_open, pidfd_send_signal,
    waitid,
};

use super::WorkersConfig;
use crate::engine::RunError;
use crate::report::StopReport;

/// What happens to a worker in a step: it is stopped before it gets the plan, and continued once the manager has waited for
/// it for so long; or, without a time to wait, it is killed when it has been sent the plan.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct WorkerDrill {
    pub worker: u16,
    /// The step, or the first one staged after it.
    pub step: u64,
    pub wait: Option<Duration>,
}

impl fmt::Display for WorkerDrill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.worker, self.step)?;
        self.wait.map_or(Ok(()), |wait| write!(f, ":{}", wait.as_millis()))
    }
}

/// The drills of a run that are to come, and what has come of the others.
#[derive(Debug, Default)]
pub(super) struct Drills {
    to_come: Vec<WorkerDrill>,
    /// Workers that are stopped, and until they were waited for how long.
    stopped: Vec<(WorkerId, Duration)>,
    /// For how long a process is waited for that is to stop.
    timeout: Duration,
    pub(super) report: Vec<StopReport>,
}

impl Drills {
    pub(super) fn new(config: &WorkersConfig) -> Self {
        Self { to_come: config.drills.clone(), timeout: config.timeout, ..Self::default() }
    }

    /// Stops the workers whose turn it is, before they get the plan of a step. Those that are to be
    /// [killed](Self::kill) stop, too: otherwise one could complete the step before it ends.
    pub(super) fn stop(
        &mut self,
        cache: &KvCache<Processes>,
        step: u64,
    ) -> Result<Vec<WorkerId>, RunError> {
        let mut kills = Vec::new();
        let due: Vec<_> = self.to_come.extract_if(.., |drill| drill.step <= step).collect();
        for WorkerDrill { worker, wait, .. } in due {
            self.stop_one(cache, WorkerId(worker))?;
            let Some(wait) = wait else {
                kills.push(WorkerId(worker));
                continue;
            };
            self.stopped.push((WorkerId(worker), wait));
            self.report.push(StopReport { worker: worker.into(), step, ..StopReport::default() });
        }
        Ok(kills)
    }

    /// Kills workers that have been sent the plan, and have not read it.
    pub(super) fn kill(cache: &KvCache<Processes>, workers: Vec<WorkerId>) {
        for pid in workers.into_iter().filter_map(|worker| pid_of(cache, worker)) {
            // One that has ended already cannot be killed.
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Stops a process, and waits until it has stopped. One that has ended instead is left for who waits for its plans.
    fn stop_one(&self, cache: &KvCache<Processes>, worker: WorkerId) -> Result<(), RunError> {
        let Some(pid) = pid_of(cache, worker) else { return Ok(()) };
        kill_process(pid, Signal::STOP).map_err(|error| RunError::Signal(error.into()))?;
        let states = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let (done, waited) = mpsc::channel();
        let wait = move || {
            let _ = done.send(waitid(WaitId::Pid(pid), states));
        };
        thread::Builder::new().spawn(wait).map_err(RunError::Signal)?;
        let waited = waited.recv_timeout(self.timeout);
        let late = |_| RunError::Signal(io::ErrorKind::TimedOut.into());
        waited.map_err(late)?.map_err(|error| RunError::Signal(error.into()))?;
        Ok(())
    }

    /// Has stopped workers go on, each after its time: the manager is about to wait for them.
    pub(super) fn let_go(&mut self, cache: &KvCache<Processes>) -> Result<(), RunError> {
        for (worker, wait) in self.stopped.drain(..) {
            let mut stops = self.report.iter_mut();
            if let Some(stop) = stops.rfind(|stop| stop.worker == u64::from(worker.0)) {
                let manager = cache.manager();
                (stop.staged, stop.completed) =
                    (manager.last_plan().step, manager.completed_step());
            }
            let Some(pid) = pid_of(cache, worker) else { continue };
            // Its number may be another process's by then, and this is its own.
            let process = pidfd_open(pid, PidfdFlags::empty());
            let process = process.map_err(|error| RunError::Signal(error.into()))?;
            let go_on = move || {
                thread::sleep(wait);
                // One that was given up meanwhile has ended.
                let _ = pidfd_send_signal(process, Signal::CONT);
            };
            thread::Builder::new().spawn(go_on).map_err(RunError::Signal)?;
        }
        Ok(())
    }

    /// A drill that has not come.
    pub(super) fn unused(&self) -> Option<String> {
        self.to_come.first().map(WorkerDrill::to_string)
    }
}

fn pid_of(cache: &KvCache<Processes>, worker: WorkerId) -> Option<Pid> {
    cache.workers().pid(worker).and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?))
}
