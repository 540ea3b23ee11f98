//! A worker process, as the manager's process sees it.
//!
//! Two threads hold the connection, so that a process which neither reads nor writes holds nobody up: one writes
//! what is to be sent, the other reads what comes. Every wait for the process has a deadline.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::iter;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use cuda_driver::guard;

use super::connection::{Connection, Cut, End};
use super::error::{FrameError, WorkerFault};
use super::frame::{Frame, Kind};

/// The longest wait: longer ones than any run are as good as this one.
const WAIT_MAX: Duration = Duration::from_secs(1 << 32);

/// Most frames that have come and were not looked at; a process that says more waits.
pub(super) const FRAMES_MAX: usize = 1024;

/// Bytes of a frame beyond which it takes the places of several.
const PLACE_BYTES: usize = 64 << 10;

/// Most bytes that are kept of the reason why a process cannot go on.
const REASON_BYTES_MAX: usize = 4096;

#[derive(Debug)]
pub(super) struct Member {
    /// `None` once it has ended, or ends by itself.
    end: Option<End>,
    /// What has come, with `None` for each further place that a frame takes.
    frames: Receiver<Option<Result<Frame, WorkerFault>>>,
    orders: Sender<Arc<[u8]>>,
    /// Steps whose plans it was sent and that it has not completed, oldest first.
    pub(super) sent: VecDeque<u64>,
    /// What it said of steps, oldest first.
    pub(super) results: VecDeque<(u64, Vec<u8>)>,
    /// A thread that sends to a process which does not read ends with it.
    _cut: Cut,
}

impl Member {
    pub(super) fn new(connection: Connection) -> Result<Self, WorkerFault> {
        let Connection { input, output, end, cut } = connection;
        let (orders, to_send) = mpsc::channel();
        let (arrived, frames) = mpsc::sync_channel(FRAMES_MAX);
        let (sent, results) = (VecDeque::new(), VecDeque::new());
        // Made first: its drop ends the process.
        let member = Self { end: Some(end), frames, orders, sent, results, _cut: cut };
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

    /// The next frame, which comes before `deadline`. Of what is there behind it, no more is taken than may have come before.
    pub(super) fn receive(&mut self, deadline: &mut Deadline) -> Result<Frame, WorkerFault> {
        loop {
            let left = deadline.left();
            let talks = left.is_zero() && deadline.late == FRAMES_MAX;
            if guard!("replay.talk-is-no-progress", talks, else false) {
                return Err(deadline.fault());
            }
            match self.frames.recv_timeout(left) {
                Ok(Some(frame)) => {
                    deadline.late += usize::from(left.is_zero());
                    deadline.talks = true;
                    return frame;
                }
                Ok(None) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(WorkerFault::Ended(None)),
                Err(RecvTimeoutError::Timeout) => {
                    if guard!("replay.silent-worker-given-up", true, else false) {
                        return Err(deadline.fault());
                    }
                }
            }
        }
    }

    /// The next frame, if one comes within `wait`. A process that has ended is noticed when it is waited for.
    pub(super) fn receive_within(&mut self, wait: Duration) -> Option<Result<Frame, WorkerFault>> {
        loop {
            match self.frames.recv_timeout(wait) {
                Ok(Some(frame)) => return Some(frame),
                Ok(None) => {}
                Err(_) => return None,
            }
        }
    }

    /// The answer to what was sent last, which comes within `timeout`.
    pub(super) fn expect(
        &mut self,
        kind: Kind,
        expected: &'static str,
        timeout: Duration,
    ) -> Result<Frame, WorkerFault> {
        Ok(self.receive(&mut Deadline::after(timeout))?.expected(kind, expected)?)
    }

    /// Leaves a process that has said all to end by itself: waits for that if it was started here.
    pub(super) fn leave(&mut self, mut deadline: Deadline) {
        // Nothing more is sent, which it sees.
        self.orders = mpsc::channel().0;
        match self.end {
            // Its end is that of what it says.
            Some(End::Child(_)) => guard!("replay.workers-end-by-themselves", {
                while self.receive(&mut deadline).is_ok() {}
            }),
            _ => self.end = None,
        }
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
    /// Ends the process. Nothing waits for its end: a thread does, if the system grants one.
    fn drop(&mut self) {
        let Some(mut end) = self.end.take() else { return };
        end.kill();
        guard!("replay.who-is-dropped-is-ended", drop(in_thread(move || drop(end.wait()))));
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
fn read_all(mut input: impl Read, arrived: &SyncSender<Option<Result<Frame, WorkerFault>>>) {
    loop {
        let frame = match Frame::read(&mut input) {
            Ok(Some(frame)) if frame.kind == Kind::Refused => {
                let all = frame.body.len();
                let kept =
                    guard!("replay.reasons-are-shortened", all.min(REASON_BYTES_MAX), else all);
                let reason = String::from_utf8_lossy(&frame.body[..kept]).into_owned();
                Err(WorkerFault::Refused { reason })
            }
            Ok(Some(frame)) => Ok(frame),
            // The connection has ended, between two frames or inside one.
            Ok(None) | Err(FrameError::Torn { .. } | FrameError::Connection(_)) => return,
            Err(error) => Err(error.into()),
        };
        let ends = frame.is_err();
        let bytes = frame.as_ref().map_or(0, |frame| frame.body.len());
        let further = guard!("replay.queued-bytes-are-bounded", bytes / PLACE_BYTES, else 0);
        let places = iter::once(Some(frame)).chain(iter::repeat_with(|| None).take(further));
        if places.map(|place| arrived.send(place)).any(|sent| sent.is_err()) || ends {
            return;
        }
    }
}

pub(super) fn in_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name("kv-worker".into()).spawn(work).map(drop)
}

/// When a wait for a process ends, whatever the process says meanwhile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    at: Instant,
    seconds: u64,
    /// Whether frames have come that were not what it waits for.
    talks: bool,
    /// Frames that were taken behind it.
    late: usize,
}

impl Deadline {
    pub(super) fn after(timeout: Duration) -> Self {
        let at = Instant::now() + timeout.min(WAIT_MAX);
        Self { at, seconds: timeout.as_secs(), talks: false, late: 0 }
    }

    /// What is wrong with a process that was waited for so long.
    fn fault(self) -> WorkerFault {
        let Self { seconds, talks, .. } = self;
        if talks { WorkerFault::Talks { seconds } } else { WorkerFault::Silent { seconds } }
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::frame;
    use super::*;

    /// The same frame for ever. How often it was begun.
    struct Endless(Vec<u8>, usize, Arc<AtomicUsize>);

    impl Read for Endless {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let Self(frame, at, begun) = self;
            begun.fetch_add(usize::from(*at == 0), Ordering::SeqCst);
            let read = (&frame[*at..]).read(into)?;
            *at = (*at + read) % frame.len();
            Ok(read)
        }
    }

    #[test]
    fn no_more_is_taken_behind_a_deadline_than_may_have_come_before() {
        let begun = Arc::new(AtomicUsize::new(0));
        let input = Endless(frame::of(Kind::Message, |_| ()), 0, Arc::clone(&begun));
        let mut member = Member::new(Connection::new(input, io::sink())).unwrap();
        let mut deadline = Deadline::after(Duration::ZERO);
        let mut receive = |taken| {
            // The next one has come when the one behind it is read.
            while begun.load(Ordering::SeqCst) < taken + 2 {
                thread::yield_now();
            }
            member.receive(&mut deadline)
        };
        assert!((0..FRAMES_MAX).all(|taken| receive(taken).is_ok()));
        let fault = receive(FRAMES_MAX).unwrap_err();
        assert!(matches!(fault, WorkerFault::Talks { seconds: 0 }), "{fault:?}");
    }
}
