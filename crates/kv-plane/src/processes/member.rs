//! A worker process, as the manager's process sees it.
//!
//! Two threads hold the connection, so that a process which neither reads nor writes holds nobody up: one writes
//! what is to be sent, the other reads what comes. Every wait for the process has a deadline.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use cuda_driver::guard;

use super::connection::{Connection, End};
use super::error::{FrameError, WorkerFault};
use super::frame::{Frame, Kind};

/// The longest wait: longer ones than any run are as good as this one.
const WAIT_MAX: Duration = Duration::from_secs(1 << 32);

/// Most frames that have come and were not looked at; a process that says more waits.
const FRAMES_MAX: usize = 1024;

#[derive(Debug)]
pub(super) struct Member {
    /// `None` once it has ended.
    end: Option<End>,
    frames: Receiver<Result<Frame, WorkerFault>>,
    orders: Sender<Arc<[u8]>>,
    /// Steps whose plans it was sent and that it has not completed, oldest first.
    pub(super) sent: VecDeque<u64>,
    /// What it said of steps, oldest first.
    pub(super) results: VecDeque<(u64, Vec<u8>)>,
}

impl Member {
    pub(super) fn new(connection: Connection) -> Result<Self, WorkerFault> {
        let Connection { input, output, end } = connection;
        let (orders, to_send) = mpsc::channel();
        let (arrived, frames) = mpsc::sync_channel(FRAMES_MAX);
        let (sent, results) = (VecDeque::new(), VecDeque::new());
        // Made first: its drop ends the process.
        let member = Self { end: Some(end), frames, orders, sent, results };
        // The threads end with the process, or when nobody sends or reads any more.
        in_thread(move || write_all(output, &to_send)).map_err(WorkerFault::Start)?;
        in_thread(move || read_all(input, &arrived)).map_err(WorkerFault::Start)?;
        Ok(member)
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.end.as_ref()?.pid()
    }

    /// Sends bytes, behind those that were sent before. Does not wait. That a process has ended shows when
    /// something is expected of it.
    pub(super) fn send(&self, bytes: impl Into<Arc<[u8]>>) {
        drop(self.orders.send(bytes.into()));
    }

    /// The next frame, which comes before `deadline`.
    pub(super) fn receive(&mut self, deadline: Deadline) -> Result<Frame, WorkerFault> {
        loop {
            match self.frames.recv_timeout(deadline.left()) {
                Ok(frame) => return frame,
                Err(RecvTimeoutError::Disconnected) => return Err(WorkerFault::Ended(None)),
                Err(RecvTimeoutError::Timeout) => {
                    if guard!("replay.silent-worker-given-up", true, else false) {
                        return Err(WorkerFault::Silent { seconds: deadline.seconds });
                    }
                }
            }
        }
    }

    /// The next frame, if one comes within `wait`. A process that has ended is noticed when it is waited for.
    pub(super) fn receive_within(&mut self, wait: Duration) -> Option<Result<Frame, WorkerFault>> {
        self.frames.recv_timeout(wait).ok()
    }

    pub(super) fn expect(
        &mut self,
        kind: Kind,
        expected: &'static str,
        deadline: Deadline,
    ) -> Result<Frame, WorkerFault> {
        Ok(self.receive(deadline)?.expected(kind, expected)?)
    }

    /// Ends the process and waits until it has ended: it writes to no memory any more. How it has ended, if that is known.
    pub(super) fn fence(&mut self, deadline: Deadline) -> Result<Option<ExitStatus>, WorkerFault> {
        let unknown = WorkerFault::NotFenced { seconds: deadline.seconds };
        let Some(mut end) = self.end.take() else { return Err(unknown) };
        end.kill();
        match deadline.wait(move || end.wait()) {
            Ok(Some(Ok(status))) => Ok(status),
            _ => Err(unknown),
        }
    }
}

impl Drop for Member {
    /// Ends a process that was started here. Nothing waits for its end: a thread does, if the system grants one.
    fn drop(&mut self) {
        if let Some(mut end @ End::Child(_)) = self.end.take() {
            end.kill();
            let _ = in_thread(move || drop(end.wait()));
        }
    }
}

fn write_all(mut output: impl Write, to_send: &Receiver<Arc<[u8]>>) {
    while let Ok(bytes) = to_send.recv() {
        if output.write_all(&bytes).and_then(|()| output.flush()).is_err() {
            return;
        }
    }
}

/// Reads what the process says, up to the first frame that it should not have said.
fn read_all(mut input: impl Read, arrived: &SyncSender<Result<Frame, WorkerFault>>) {
    loop {
        let frame = match Frame::read(&mut input) {
            Ok(Some(frame)) if frame.kind == Kind::Refused => {
                let reason = String::from_utf8_lossy(&frame.body).into_owned();
                Err(WorkerFault::Refused { reason })
            }
            Ok(Some(frame)) => Ok(frame),
            // The connection has ended, between two frames or inside one.
            Ok(None) | Err(FrameError::Torn { .. } | FrameError::Connection(_)) => return,
            Err(error) => Err(error.into()),
        };
        let ends = frame.is_err();
        if arrived.send(frame).is_err() || ends {
            return;
        }
    }
}

pub(super) fn in_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name("kv-worker".into()).spawn(work).map(drop)
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

    fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// What a call returns that may block, unless the deadline passes before.
    fn wait<T: Send + 'static>(
        self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Option<T>> {
        let (done, result) = mpsc::channel();
        in_thread(move || drop(done.send(call())))?;
        Ok(result.recv_timeout(self.left()).ok())
    }
}
