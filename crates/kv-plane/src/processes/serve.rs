//! A worker process: carries out the plans that come over a connection.

use std::error::Error;
use std::io::Write;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use cuda_driver::guard;
use cuda_driver::messages::Chain;
use kv_manager::{Completion, GroupId, Message, Outcome, StepPlan, WorkerId};
use kv_tier::codec::Fields;

use super::connection::Connection;
use super::error::{FrameError, ServeError};
use super::frame::{self, Frame, Kind};
use super::handshake::{Begin, Memory, Open, Ready, in_writer};
use super::member::in_thread;
use crate::KvWorker;

/// How long a worker with work on the device waits for the next plan before it looks at the device.
const LOOK: Duration = Duration::from_micros(20);

/// Orders that have come and were not taken. The manager sends no more plans than may be in flight.
const ORDERS_MAX: usize = 64;

/// Runs a worker: `run` makes a [`KvWorker`], [begins](Orders::begin), and follows the [orders](Orders::next) until there are no
/// more. What it returns is told to the manager when the cache is [closed](crate::KvCache::close).
///
/// # Errors
/// That of `run`, which the manager is told as the reason why the worker cannot go on; and [`ServeError`].
///
/// # Examples
/// `examples/processes.rs` is an engine with two such workers.
pub fn serve(
    connection: Connection,
    run: impl FnOnce(&mut Orders) -> Result<Vec<u8>, Box<dyn Error + Send + Sync>>,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let Connection { mut input, output, cut: _cut, .. } = connection;
    let (send, frames) = mpsc::sync_channel(ORDERS_MAX);
    let read = move || {
        while let Some(frame) = Frame::read(&mut input).transpose() {
            let ends = frame.is_err();
            if send.send(frame).is_err() || ends {
                return;
            }
        }
    };
    in_thread(read).map_err(ServeError::Thread)?;
    let mut orders = Orders::new(frames, output);
    let served = match orders.open() {
        Ok(true) => run(&mut orders),
        // The manager's process has ended before it said anything.
        Ok(false) => return Ok(()),
        Err(error) => Err(error.into()),
    };
    let bytes = match &served {
        Ok(account) if orders.closes => frame::of(Kind::Closed, |body| body.extend(account)),
        // The manager's process has ended: nobody is left to report to.
        Ok(_) => return Ok(()),
        Err(error) => {
            let reason = Chain(error.as_ref()).to_string();
            frame::of(Kind::Refused, |body| body.extend_from_slice(reason.as_bytes()))
        }
    };
    let answered = orders.send(&bytes);
    // Without the connection, the process's end says that it cannot go on.
    served.and(answered.map_err(Into::into))
}

/// What a manager in another process has a worker do.
pub struct Orders {
    open: Open,
    frames: Receiver<Result<Frame, FrameError>>,
    output: Box<dyn Write + Send>,
    /// A plan that has come without what the engine sends along.
    plan: Option<StepPlan>,
    /// A plan that has come in full and waits for the steps before it.
    next: Option<(StepPlan, Vec<u8>)>,
    /// The step that the engine computes, or has computed last.
    step: (StepPlan, Vec<u8>),
    /// A step that is complete and of which the manager was not told yet, and what the engine says of it.
    completed: Option<(u64, Outcome)>,
    result: Vec<u8>,
    /// Device blocks beyond which memory is still to be given back.
    gives_back: Option<u64>,
    waits: bool,
    closes: bool,
}

/// What a worker does next.
#[derive(Debug)]
pub enum Order<'a> {
    /// A step is to be carried out: [`carry_out`](KvWorker::carry_out) the plan, enqueue the forward pass on the compute streams,
    /// and [`finish`](KvWorker::finish).
    Step {
        /// The plan.
        plan: &'a StepPlan,
        /// What the engine's scheduler sends along ([`stage_with`](crate::KvCache::stage_with)); empty without.
        work: &'a [u8],
    },
    /// A step is complete on all devices of the worker. The manager is told by the next call.
    Completed {
        /// Its number.
        step: u64,
        /// What the engine tells its scheduler of it, such as the sampled ids: see [`Processes::result`](super::Processes::result).
        result: &'a mut Vec<u8>,
    },
}

/// What has come from the manager's process.
enum Heard {
    Frame(Frame),
    Nothing,
    /// It has ended.
    End,
}

impl std::fmt::Debug for Orders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Orders").field("open", &self.open).finish_non_exhaustive()
    }
}

impl Orders {
    fn new(frames: Receiver<Result<Frame, FrameError>>, output: Box<dyn Write + Send>) -> Self {
        Self {
            open: Open { worker: 0, workers: 0, replaces: false },
            frames,
            output,
            plan: None,
            next: None,
            step: Default::default(),
            completed: None,
            result: Vec::new(),
            gives_back: None,
            waits: false,
            closes: false,
        }
    }

    /// Learns which worker this is. Whether there is a manager to work for.
    fn open(&mut self) -> Result<bool, ServeError> {
        let Some(frame) = self.expect(Kind::Open, "who the worker is")? else {
            return Ok(guard!("replay.nobody-is-not-served", false, else true));
        };
        self.open = Open::take(&frame.body)?;
        Ok(true)
    }

    /// Which worker this is.
    #[must_use]
    pub fn worker(&self) -> WorkerId {
        WorkerId(self.open.worker)
    }

    /// How many workers the cache has.
    #[must_use]
    pub fn workers(&self) -> u16 {
        self.open.workers
    }

    /// Whether this process takes the place of one that has failed. Nothing that the other one has stored counts any more.
    #[must_use]
    pub fn replaces(&self) -> bool {
        self.open.replaces
    }

    /// Has [`next`](Self::next) wait on the host for a step in flight where it would look again and again: a simulated device
    /// may complete nothing before somebody waits for it. A GPU is looked at, since a plan may come while it computes.
    pub fn wait_on_host(&mut self) {
        self.waits = true;
    }

    /// What the engine's scheduler [asks](super::Processes::ask) before the worker begins; `None` if its process has ended.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn question(&mut self) -> Result<Option<Vec<u8>>, ServeError> {
        Ok(self.expect(Kind::Ask, "a question")?.map(|frame| frame.body))
    }

    /// Answers the question.
    ///
    /// # Errors
    /// [`ServeError::Answer`].
    pub fn answer(&mut self, answer: &[u8]) -> Result<(), ServeError> {
        self.send(&frame::of(Kind::Answer, |body| body.extend_from_slice(answer)))
    }

    /// Takes the place in the cache: maps the memory that the manager hands out, waits for host memory, and says what is there.
    ///
    /// # Errors
    /// [`ServeError`]. A worker with another rank, other blocks, tables or steps than its manager's is refused ([`ServeError::Format`]).
    pub fn begin(&mut self, kv: &mut KvWorker) -> Result<(), ServeError> {
        let Some(frame) = self.expect(Kind::Begin, "the memory to begin with")? else {
            return Ok(());
        };
        let begin = Begin::take(&frame.body)?;
        let ((WorkerId(number), of), Open { worker, workers, .. }) = (kv.rank, self.open);
        let ranks = [("number of the worker", number, worker), ("number of workers", of, workers)];
        let other = ranks.into_iter().find(|(_, here, manager)| here != manager);
        if let Some((what, here, manager)) =
            guard!("replay.workers-have-their-rank", other, else None)
        {
            let (what, here, manager) = (what.into(), here.into(), manager.into());
            return Err(ServeError::Format { what, here, manager });
        }
        let own = Begin::new(kv.options(), begin.device_blocks);
        if let Some((what, here, manager)) = own.difference(&begin)
            && guard!("replay.workers-have-the-managers-blocks", true, else false)
        {
            return Err(ServeError::Format { what, here, manager });
        }
        kv.grow_to(begin.device_blocks)?;
        if let Err(error) = kv.wait_for_host() {
            // What was pinned is used all the same.
            tracing::warn!(%error, "less host memory than the options say is pinned");
        }
        let memory = memory(kv, kv.options().groups.len());
        let ready = Ready::new(memory, &kv.survivors(self.worker()));
        self.send(&frame::of(Kind::Ready, |body| ready.put(body)))
    }

    /// What to do next; `None` when there is nothing more: close the worker then. Waits for it, and sees meanwhile to the
    /// memory, the tiers and the steps in flight, of which at most [`overlap_depth`](crate::KvCacheOptions::overlap_depth) are
    /// before the one that is to be carried out.
    ///
    /// # Errors
    /// [`ServeError`]: the worker cannot go on.
    pub fn next(&mut self, kv: &mut KvWorker) -> Result<Option<Order<'_>>, ServeError> {
        self.report(kv)?;
        loop {
            if let Some(next) = self.next.take() {
                if kv.in_flight() <= kv.options().overlap_depth as usize {
                    if self.gives_back.is_some_and(|blocks| kv.shrink_to(blocks)) {
                        self.gives_back = None;
                    }
                    self.step = next;
                    let (plan, work) = (&self.step.0, &self.step.1[..]);
                    return Ok(Some(Order::Step { plan, work }));
                }
                self.next = Some(next);
                self.completed = kv.wait()?;
            } else {
                let busy = kv.in_flight() > 0 || kv.open_transfers() > 0;
                match self.hear(busy.then_some(LOOK))? {
                    Heard::Frame(frame) if self.follow(&frame, kv)? => {}
                    Heard::Frame(_) | Heard::End => return Ok(None),
                    Heard::Nothing => {
                        self.completed = if self.waits { kv.wait()? } else { kv.poll()? };
                        if self.completed.is_none() {
                            self.report(kv)?;
                        }
                    }
                }
            }
            if let Some((step, _)) = self.completed {
                self.result.clear();
                return Ok(Some(Order::Completed { step, result: &mut self.result }));
            }
        }
    }

    /// Takes in what the manager says. Whether more is to come.
    fn follow(&mut self, frame: &Frame, kv: &mut KvWorker) -> Result<bool, ServeError> {
        match (frame.kind, self.plan.take()) {
            (Kind::Message, None) => match Message::from_bytes(&frame.body) {
                Ok(Message::Plan(plan)) => self.plan = Some(plan),
                Ok(Message::Snapshot(snapshot)) => kv.restore(&snapshot)?,
                Ok(_) => return Err(frame.unexpected("a plan").into()),
                Err(error) => return Err(FrameError::from(error).into()),
            },
            (Kind::Work, Some(plan)) => self.next = Some((plan, frame.body.clone())),
            (Kind::Memory, None) => self.map(&frame.body, kv)?,
            (Kind::Close, None) => {
                self.closes = true;
                return Ok(false);
            }
            (Kind::Work, None) => return Err(frame.unexpected("a plan").into()),
            (_, Some(_)) => return Err(frame.unexpected("the work of a plan").into()),
            (_, None) => return Err(frame.unexpected("an order").into()),
        }
        Ok(true)
    }

    /// Maps device blocks, or gives back the memory of those that no plan names any more.
    fn map(&mut self, body: &[u8], kv: &mut KvWorker) -> Result<(), ServeError> {
        let mut body = Fields::new(body);
        let blocks = body.u64().map_err(FrameError::from)?;
        let answers = body.flag("answers").map_err(FrameError::from)?;
        self.gives_back = None;
        if blocks < kv.ready_blocks(GroupId(0)) {
            self.gives_back = (!kv.shrink_to(blocks)).then_some(blocks);
        } else {
            kv.grow_to(blocks)?;
        }
        if !answers {
            return Ok(());
        }
        let memory = memory(kv, 1).first().copied().unwrap_or_default();
        let write = |body: &mut Vec<u8>| in_writer(body, |out| memory.write(out));
        self.send(&frame::of(Kind::Mapped, write))
    }

    /// Says which step is complete, what has become of stores and loads, and what has come to tiers by others.
    fn report(&mut self, kv: &mut KvWorker) -> Result<(), ServeError> {
        let (worker, mut bytes) = (self.worker(), Vec::new());
        let (mut settled, mut dropped) = (Vec::new(), Vec::new());
        if let Some((step, outcome)) = self.completed.take() {
            // What a step has read of loads is known before the step is over.
            kv.take_ended(worker, &mut settled, &mut dropped);
            dropped.drain(..).for_each(|of| message(&mut bytes, |body| of.to_bytes(body)));
            settled.drain(..).for_each(|of| message(&mut bytes, |body| of.to_bytes(body)));
            frame::append(&mut bytes, Kind::Result, |body| {
                body.extend_from_slice(&step.to_le_bytes());
                body.append(&mut self.result);
            });
            message(&mut bytes, |body| Completion { worker, step, outcome }.to_bytes(body));
        }
        kv.poll_transfers(worker, &mut settled, &mut dropped);
        dropped.into_iter().for_each(|of| message(&mut bytes, |body| of.to_bytes(body)));
        settled.into_iter().for_each(|of| message(&mut bytes, |body| of.to_bytes(body)));
        let gained = guard!("replay.gained-names-are-told", kv.gained(worker), else Vec::new());
        gained.iter().for_each(|of| message(&mut bytes, |body| of.to_bytes(body)));
        if bytes.is_empty() { Ok(()) } else { self.send(&bytes) }
    }

    /// What comes next, or what has come when so much time is over.
    fn hear(&mut self, wait: Option<Duration>) -> Result<Heard, FrameError> {
        let heard = match wait {
            Some(wait) => self.frames.recv_timeout(wait),
            None => self.frames.recv().map_err(RecvTimeoutError::from),
        };
        match heard {
            Ok(frame) => Ok(Heard::Frame(frame?)),
            Err(RecvTimeoutError::Timeout) => Ok(Heard::Nothing),
            Err(RecvTimeoutError::Disconnected) => Ok(Heard::End),
        }
    }

    /// The next frame; `None` if the manager's process has ended.
    fn expect(&mut self, kind: Kind, expected: &'static str) -> Result<Option<Frame>, FrameError> {
        match self.hear(None)? {
            Heard::Frame(frame) => frame.expected(kind, expected).map(Some),
            Heard::Nothing | Heard::End => Ok(None),
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), ServeError> {
        let sent = self.output.write_all(bytes).and_then(|()| self.output.flush());
        sent.map_err(ServeError::Answer)
    }
}

fn message(into: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    frame::append(into, Kind::Message, write);
}

/// Blocks of each group that have memory.
fn memory(kv: &KvWorker, groups: usize) -> Vec<Memory> {
    let of = |group| Memory {
        device_blocks: kv.ready_blocks(group),
        host_blocks: kv.host_blocks(group),
    };
    (0..).map(GroupId).take(groups).map(of).collect()
}
