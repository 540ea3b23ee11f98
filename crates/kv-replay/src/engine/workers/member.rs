//! A worker process, as the manager's process sees it.
//!
//! Two threads hold the pipes, so that a process which neither reads nor writes holds nobody up: one writes
//! what is to be sent, the other reads what comes. Every wait for the process has a deadline.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use cuda_driver::guard;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use super::error::{FrameError, WorkerFault};
use super::frame::{Frame, Kind};
use crate::family;

/// The longest wait: longer ones than any run are as good as this one.
const WAIT_MAX: Duration = Duration::from_secs(1 << 32);

/// How worker processes are started: a program that calls [`serve`](super::serve).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct WorkerCommand {
    pub program: PathBuf,
    pub args: Vec<String>,
}

#[derive(Debug)]
pub(super) struct Member {
    /// `None` once it has ended.
    child: Option<Child>,
    pid: Option<Pid>,
    frames: Receiver<Result<Frame, WorkerFault>>,
    orders: Sender<Arc<[u8]>>,
    stopped: Option<Stopped>,
    /// Steps whose plans it was sent and that it has not completed, oldest first, and whether it reads in them.
    pub(super) sent: VecDeque<(u64, bool)>,
    /// Checksums of steps, oldest first, of each group.
    pub(super) checksums: VecDeque<(u64, Vec<Vec<u64>>)>,
}

/// A process that is stopped until the manager has waited for it for so long.
#[derive(Clone, Copy, Debug)]
struct Stopped {
    wait: Duration,
    since: Option<Instant>,
}

impl Member {
    pub(super) fn start(command: &WorkerCommand) -> Result<Self, WorkerFault> {
        let mut child = family::bind(&mut Command::new(&command.program))
            .args(&command.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(WorkerFault::Start)?;
        let (orders, to_send) = mpsc::channel();
        let (arrived, frames) = mpsc::channel();
        let pipes = (child.stdin.take(), child.stdout.take());
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let (sent, checksums) = (VecDeque::new(), VecDeque::new());
        let member =
            Self { child: Some(child), pid, frames, orders, stopped: None, sent, checksums };
        if let (Some(input), Some(output)) = pipes {
            // The threads end with the process, or when nobody sends or reads any more.
            in_thread(move || write_all(input, &to_send)).map_err(WorkerFault::Start)?;
            in_thread(move || read_all(output, &arrived)).map_err(WorkerFault::Start)?;
        }
        Ok(member)
    }

    /// Sends bytes, behind those that were sent before. Does not wait. That a process has ended shows when
    /// something is expected of it.
    pub(super) fn send(&self, bytes: Arc<[u8]>) {
        drop(self.orders.send(bytes));
    }

    /// The next frame, which comes before `deadline`.
    pub(super) fn receive(&mut self, deadline: Deadline) -> Result<Frame, WorkerFault> {
        loop {
            let now = Instant::now();
            let goes_on = self.stopped.as_mut().map(|stopped| {
                // The time counts from when there is nothing to do but wait.
                *stopped.since.get_or_insert(now) + stopped.wait
            });
            let until = goes_on.map_or(deadline.at, |at| at.min(deadline.at));
            match self.frames.recv_timeout(until.saturating_duration_since(now)) {
                Ok(frame) => return frame,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(WorkerFault::Ended(None));
                }
                Err(RecvTimeoutError::Timeout) => {
                    let now = Instant::now();
                    if goes_on.is_some_and(|at| at <= now) {
                        self.go_on()?;
                    } else if guard!("replay.silent-worker-given-up", deadline.at <= now, else false)
                    {
                        return Err(WorkerFault::Silent { seconds: deadline.seconds });
                    }
                }
            }
        }
    }

    pub(super) fn receive_arrived(&mut self) -> Option<Result<Frame, WorkerFault>> {
        // A process that has ended is noticed when it is waited for.
        self.frames.try_recv().ok()
    }

    pub(super) fn expect(
        &mut self,
        kind: Kind,
        expected: &'static str,
        deadline: Deadline,
    ) -> Result<Frame, WorkerFault> {
        let frame = self.receive(deadline)?;
        if frame.kind == kind {
            return Ok(frame);
        }
        let found = format!("{:?}", frame.kind);
        Err(FrameError::Unexpected { found, expected }.into())
    }

    /// Stops the process, and waits until it has stopped: until it is waited for so long.
    pub(super) fn stop(&mut self, wait: Duration, deadline: Deadline) -> Result<(), WorkerFault> {
        let Some(pid) = self.pid else { return Ok(()) };
        let signalled = kill_process(pid, Signal::STOP);
        signalled.map_err(|error| WorkerFault::Signal(error.into()))?;
        // A process that has ended instead is left for its fence.
        let states = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let waited = deadline.wait(move || waitid(WaitId::Pid(pid), states));
        let Some(waited) = waited.map_err(WorkerFault::Signal)? else {
            return Err(WorkerFault::Silent { seconds: deadline.seconds });
        };
        waited.map_err(|error| WorkerFault::Signal(error.into()))?;
        self.stopped = Some(Stopped { wait: wait.min(WAIT_MAX), since: None });
        Ok(())
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.is_some()
    }

    fn go_on(&mut self) -> Result<(), WorkerFault> {
        self.stopped = None;
        let Some(pid) = self.pid else { return Ok(()) };
        kill_process(pid, Signal::CONT).map_err(|error| WorkerFault::Signal(error.into()))
    }

    pub(super) fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            // One that has ended already cannot be killed.
            let _ = child.kill();
        }
    }

    /// Kills the process and waits until it has ended: it writes to no memory any more. How it has ended; nothing
    /// if that was said before.
    pub(super) fn fence(&mut self, deadline: Deadline) -> Result<Option<ExitStatus>, WorkerFault> {
        self.kill();
        let Some(mut child) = self.child.take() else { return Ok(None) };
        match deadline.wait(move || child.wait()) {
            Ok(Some(Ok(status))) => Ok(Some(status)),
            _ => Err(WorkerFault::NotFenced { seconds: deadline.seconds }),
        }
    }
}

impl Drop for Member {
    /// Kills the process. Nothing waits for its end here: a thread does, if the system grants one.
    fn drop(&mut self) {
        self.kill();
        if let Some(mut child) = self.child.take() {
            let _ = in_thread(move || drop(child.wait()));
        }
    }
}

fn write_all(mut input: ChildStdin, to_send: &Receiver<Arc<[u8]>>) {
    while let Ok(bytes) = to_send.recv() {
        if input.write_all(&bytes).and_then(|()| input.flush()).is_err() {
            return;
        }
    }
}

/// Reads what the process says, up to the first frame that it should not have said.
fn read_all(mut output: ChildStdout, arrived: &Sender<Result<Frame, WorkerFault>>) {
    loop {
        let frame = match Frame::read(&mut output) {
            Ok(Some(frame)) if frame.kind == Kind::Refused => {
                let reason = String::from_utf8_lossy(&frame.body).into_owned();
                Err(WorkerFault::Refused { reason })
            }
            Ok(Some(frame)) => Ok(frame),
            // The pipe has ended, between two frames or inside one.
            Ok(None) | Err(FrameError::Torn { .. }) => return,
            Err(error) => Err(error.into()),
        };
        let ends = frame.is_err();
        if arrived.send(frame).is_err() || ends {
            return;
        }
    }
}

fn in_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().spawn(work).map(drop)
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    at: Instant,
    seconds: u64,
}

impl Deadline {
    pub(super) fn after(timeout: Duration) -> Self {
        Self { at: Instant::now() + timeout.min(WAIT_MAX), seconds: timeout.as_secs() }
    }

    /// What a call returns that may block, unless the deadline passes before.
    fn wait<T: Send + 'static>(
        self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Option<T>> {
        let (done, result) = mpsc::channel();
        in_thread(move || drop(done.send(call())))?;
        Ok(result.recv_timeout(self.at.saturating_duration_since(Instant::now())).ok())
    }
}
