//! A worker process: carries out the plans that come over a pipe, on one device.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use cuda_driver::Stream;
use kv_plane::KvWorker;
use kv_plane::manager::{Completion, GroupId, Message, Outcome, StepPlan, WorkerId};

use super::error::FrameError;
use super::frame::{self, Frame, Kind};
use super::setup::{Account, Memory, Open, Opened, Ready, Share};
#[cfg(all(feature = "sabotage", debug_assertions))]
use super::wrong::{Misbehave, Wrong};
use crate::device::{
    self, DeviceOpenError, DeviceSpecError, OpenDevices, ProfileReadError, SimSizes,
};
use crate::disk::DiskConfig;
use crate::engine::batch::Batch;
use crate::engine::groups::{self, Reads};
use crate::engine::work::DeviceWork;
use crate::engine::{OVERLAP_DEPTH, RunError, WARMUP_ITERATIONS, options};

/// How long a worker with work on the device waits for the next plan before it looks at the device.
const LOOK: Duration = Duration::from_micros(20);

#[derive(thiserror::Error)]
pub enum ServeError {
    #[error("the manager's process said what cannot be read")]
    Frame(#[from] FrameError),
    #[error("cannot answer the manager's process")]
    Answer(#[source] io::Error),
    #[error(transparent)]
    Spec(#[from] DeviceSpecError),
    #[error(transparent)]
    Profile(#[from] ProfileReadError),
    #[error("cannot open the worker's device")]
    Device(#[from] DeviceOpenError),
    #[error("there is no device for the worker")]
    NoDevice,
    #[error("the worker cannot go on")]
    Run(#[from] RunError),
}

cuda_driver::messages::one_line_debug!(ServeError);

#[derive(Clone, Copy, Debug, Default)]
pub struct ServeOptions {
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub misbehave: Option<Misbehave>,
}

/// Carries out the plans that `input` brings, on one device, and says on `output` what came of them, until
/// there are no more or the manager's process has ended. `prepare` may change the worker before the first
/// plan.
pub fn serve(
    input: impl Read + Send + 'static,
    output: impl Write,
    options: ServeOptions,
    prepare: impl FnOnce(&mut KvWorker),
) -> Result<(), ServeError> {
    let (send, orders) = mpsc::channel();
    std::thread::spawn(move || {
        let mut input = input;
        while let Some(frame) = Frame::read(&mut input).transpose() {
            let ends = frame.is_err();
            if send.send(frame).is_err() || ends {
                return;
            }
        }
    });
    let mut pipes = Pipes { orders, output };
    let served = attend(&mut pipes, options, prepare);
    if let Err(error) = &served {
        let reason = chain(error);
        let mut bytes = Vec::new();
        frame::append(&mut bytes, Kind::Refused, |body| body.extend_from_slice(reason.as_bytes()));
        // Without the pipe, the process's end says that it cannot go on.
        let _ = pipes.answer(&bytes);
    }
    served
}

fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

struct Pipes<W> {
    orders: Receiver<Result<Frame, FrameError>>,
    output: W,
}

impl<W: Write> Pipes<W> {
    /// The next order; `None` if the manager's process has ended.
    fn order(&mut self) -> Result<Option<Frame>, FrameError> {
        self.orders.recv().ok().transpose()
    }

    fn expect(&mut self, kind: Kind, expected: &'static str) -> Result<Option<Frame>, FrameError> {
        match self.order()? {
            Some(frame) if frame.kind != kind => {
                Err(FrameError::Unexpected { found: format!("{:?}", frame.kind), expected })
            }
            frame => Ok(frame),
        }
    }

    fn answer(&mut self, bytes: &[u8]) -> Result<(), ServeError> {
        let written = self.output.write_all(bytes).and_then(|()| self.output.flush());
        written.map_err(ServeError::Answer)
    }
}

fn attend(
    pipes: &mut Pipes<impl Write>,
    options: ServeOptions,
    prepare: impl FnOnce(&mut KvWorker),
) -> Result<(), ServeError> {
    let Some(frame) = pipes.expect(Kind::Open, "the device to open")? else { return Ok(()) };
    let open: Open = frame.value()?;
    let devices = open_device(&open)?;
    let Some(device) = devices.devices.first() else { return Err(ServeError::NoDevice) };
    let (free_bytes, _) = device.memory_info().map_err(RunError::from)?;
    let opened = Opened {
        name: device.info().name.clone(),
        ordinal: device.ordinal(),
        simulated: devices.sim.is_some(),
        free_bytes,
    };
    pipes.answer(&frame::of_value(Kind::Opened, &opened))?;
    let Some(frame) = pipes.expect(Kind::Share, "a share of the model")? else { return Ok(()) };
    let share: Share = frame.value()?;
    let served = device.while_current(|| -> Result<(), ServeError> {
        let mut hands = Hands::new(&open, &share, &devices, options)?;
        prepare(&mut hands.worker);
        let survivors = hands.worker.survivors(WorkerId(hands.id));
        let ready = Ready::new(hands.memory(), &survivors);
        pipes.answer(&frame::of_value(Kind::Ready, &ready))?;
        hands.carry_out_all(pipes)
    });
    served.map_err(RunError::from)?
}

fn open_device(open: &Open) -> Result<OpenDevices, ServeError> {
    let mut sizes = SimSizes {
        device_bytes: open.device_bytes,
        pinned_bytes: open.pinned_bytes,
        seed: open.seed,
        profile: Default::default(),
    };
    if let Some(name) = &open.profile {
        sizes.profile = device::read_profile(name)?;
    }
    Ok(device::open_one(&open.device.parse()?, open.worker.into(), sizes)?)
}

struct Hands<'a> {
    id: u16,
    worker: KvWorker,
    work: DeviceWork,
    devices: &'a OpenDevices,
    reads: Vec<Reads>,
    /// Steps in flight that read, oldest first, each with the tokens of each sequence.
    reading: VecDeque<(u64, Vec<u32>)>,
    block_tokens: u32,
    steps: u64,
    /// Device blocks beyond which memory is still to be given back.
    gives_back: Option<u64>,
    disk: Option<DiskConfig>,
    pinned_warm: Option<u64>,
    sums: Vec<u64>,
    answer: Vec<u8>,
    #[cfg_attr(not(all(feature = "sabotage", debug_assertions)), expect(dead_code))]
    serve: ServeOptions,
}

impl<'a> Hands<'a> {
    fn new(
        open: &Open,
        share: &Share,
        devices: &'a OpenDevices,
        serve: ServeOptions,
    ) -> Result<Self, ServeError> {
        let config = &share.config;
        config.check().map_err(RunError::from)?;
        devices.check_fits(config)?;
        let options =
            options(config, share.blocks_per_sequence, devices, None, open.worker.into())?;
        let options = groups::sharing(options, share.shared());
        let (device_blocks, id) = (share.mapped_blocks, usize::from(open.worker));
        let streams = devices.devices.iter().map(Stream::new).collect::<Result<Vec<_>, _>>();
        let streams = streams.map_err(RunError::from)?;
        let worker = KvWorker::new(&streams, options).map_err(RunError::from)?;
        let work = DeviceWork::new(worker.parts(), worker.options(), id)?;
        let mut hands = Self {
            id: open.worker,
            work,
            devices,
            reads: groups::shapes(config)?.into_iter().map(|(_, reads)| reads).collect(),
            reading: VecDeque::new(),
            block_tokens: config.block_tokens,
            steps: 0,
            gives_back: None,
            disk: config.disk.clone(),
            pinned_warm: None,
            sums: Vec::new(),
            answer: Vec::new(),
            serve,
            worker,
        };
        hands.grow(device_blocks)?;
        let pinned = hands.worker.wait_for_host().map_err(kv_plane::BuildError::from);
        pinned.map_err(RunError::from)?;
        Ok(hands)
    }

    /// Blocks of each group that have memory.
    fn memory(&self) -> Vec<Memory> {
        let of = |group| Memory {
            device_blocks: self.worker.ready_blocks(group),
            host_blocks: self.worker.host_blocks(group),
        };
        (0..).map(GroupId).take(self.reads.len()).map(of).collect()
    }

    fn grow(&mut self, blocks: u64) -> Result<(), RunError> {
        self.worker.grow_to(blocks).map_err(kv_plane::DemandError::from)?;
        Ok(())
    }

    /// Maps device blocks, or gives back the memory of those that no plan names any more.
    fn map(&mut self, mut body: &[u8], pipes: &mut Pipes<impl Write>) -> Result<(), ServeError> {
        let order = frame::take::<u64>(&mut body)?;
        let &[blocks, answers] = &order[..] else {
            return Err(FrameError::Body { bytes: body.len() }.into());
        };
        self.gives_back = None;
        if blocks < self.worker.ready_blocks(GroupId(0)) {
            self.gives_back = (!self.worker.shrink_to(blocks)).then_some(blocks);
        } else {
            self.grow(blocks)?;
        }
        if answers == 0 {
            return Ok(());
        }
        let memory = self.memory();
        pipes.answer(&frame::of_value(Kind::Mapped, &memory.first()))
    }

    fn carry_out_all(mut self, pipes: &mut Pipes<impl Write>) -> Result<(), ServeError> {
        let mut plan = None;
        while let Some(frame) = self.next_order(pipes)? {
            match (frame.kind, plan.take()) {
                (Kind::Message, None) => match Message::from_bytes(&frame.body) {
                    Ok(Message::Plan(next)) => plan = Some(next),
                    Ok(Message::Snapshot(snapshot)) => {
                        self.worker.restore(&snapshot).map_err(RunError::from)?;
                    }
                    Ok(_) => return Err(unexpected(&frame, "a plan").into()),
                    Err(error) => return Err(FrameError::from(error).into()),
                },
                (Kind::Work, Some(plan)) => self.carry_out(&plan, &frame.body, pipes)?,
                (Kind::Memory, None) => self.map(&frame.body, pipes)?,
                (Kind::Close, None) => return self.close(pipes),
                (Kind::Work, None) => return Err(unexpected(&frame, "a plan").into()),
                (_, Some(_)) => return Err(unexpected(&frame, "the work of a plan").into()),
                (_, None) => return Err(unexpected(&frame, "an order").into()),
            }
        }
        // Nobody is left to report to.
        Ok(())
    }

    /// Waits for the next order, and reports steps that complete meanwhile.
    fn next_order(&mut self, pipes: &mut Pipes<impl Write>) -> Result<Option<Frame>, ServeError> {
        while self.worker.in_flight() > 0 || self.worker.open_transfers() > 0 {
            match pipes.orders.recv_timeout(LOOK) {
                Ok(frame) => return Ok(Some(frame?)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
            // A simulated device may complete nothing before somebody waits for it.
            let completed = match self.devices.sim {
                Some(_) => self.worker.wait(),
                None => self.worker.poll(),
            };
            if let Some((step, outcome)) = completed.map_err(RunError::from)? {
                self.report(step, outcome, pipes)?;
            }
            self.report_transfers(pipes)?;
        }
        Ok(pipes.order()?)
    }

    /// Says which tickets have ended here, and which names the tier has dropped.
    fn report_transfers(&mut self, pipes: &mut Pipes<impl Write>) -> Result<(), ServeError> {
        let (mut settled, mut dropped) = (Vec::new(), Vec::new());
        self.worker.poll_transfers(WorkerId(self.id), &mut settled, &mut dropped);
        self.answer.clear();
        for dropped in dropped {
            frame::append(&mut self.answer, Kind::Message, |body| dropped.to_bytes(body));
        }
        for settled in settled {
            frame::append(&mut self.answer, Kind::Message, |body| settled.to_bytes(body));
        }
        if self.answer.is_empty() { Ok(()) } else { pipes.answer(&self.answer) }
    }

    fn carry_out(
        &mut self,
        plan: &StepPlan,
        mut body: &[u8],
        pipes: &mut Pipes<impl Write>,
    ) -> Result<(), ServeError> {
        let head = frame::take::<u64>(&mut body)?;
        let batch = Batch::take(&mut body)?;
        let read = head == [plan.step, 1];
        let (found, expected) = (batch.further.len() + 1, self.reads.len());
        if found != expected && !batch.launches().is_empty() {
            return Err(FrameError::Groups { found, expected }.into());
        }
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if self.serve.does(self.id, plan.step) == Some(Wrong::Deaf) {
            return Ok(());
        }
        if self.gives_back.is_some_and(|blocks| self.worker.shrink_to(blocks)) {
            self.gives_back = None;
        }
        while self.worker.in_flight() > OVERLAP_DEPTH as usize {
            if let Some((step, outcome)) = self.worker.wait().map_err(RunError::from)? {
                self.report(step, outcome, pipes)?;
            }
        }
        let Self { worker, work, .. } = self;
        let arrays = worker.carry_out(plan, |part, staged| work.add_arrays(part, &batch, staged));
        arrays.map_err(RunError::from)?;
        work.enqueue(worker.parts(), plan.step, &batch, read)?;
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if self.serve.does(self.id, plan.step) == Some(Wrong::Byte) {
            super::wrong::spoil(worker.parts(), &batch)?;
        }
        worker.finish(Outcome::Done).map_err(RunError::from)?;
        if read {
            self.reading.push_back((plan.step, batch.lengths));
        }
        self.steps += 1;
        if self.steps == WARMUP_ITERATIONS {
            self.pinned_warm = Some(self.devices.driver.pinned_bytes_allocated());
        }
        Ok(())
    }

    /// Says that a step is complete, and what was read in it.
    fn report(
        &mut self,
        step: u64,
        outcome: Outcome,
        pipes: &mut Pipes<impl Write>,
    ) -> Result<(), ServeError> {
        self.answer.clear();
        if let Some((_, lengths)) = self.reading.pop_front_if(|(read, _)| *read == step) {
            let mut body = Vec::new();
            frame::put(&mut body, &[step]);
            for (group, reads) in self.reads.iter().enumerate() {
                let width = self.work.arrived(group, step, lengths.len(), &mut self.sums)?;
                let mut read = Vec::new();
                for (row, &tokens) in self.sums.chunks_exact(width.max(1)).zip(&lengths) {
                    let entries = reads.checksums(tokens.into(), self.block_tokens.into());
                    read.extend_from_slice(&row[..entries.min(row.len())]);
                }
                frame::put(&mut body, &read);
            }
            frame::append(&mut self.answer, Kind::Checksums, |frame| frame.append(&mut body));
        }
        let completion = Completion { worker: WorkerId(self.id), step, outcome };
        frame::append(&mut self.answer, Kind::Message, |body| completion.to_bytes(body));
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if let Some(wrong) = self.serve.does(self.id, step) {
            wrong.spoil(completion, &mut self.answer);
            if wrong == Wrong::Silent {
                while pipes.order()?.is_some() {}
                return Ok(());
            }
        }
        pipes.answer(&self.answer)
    }

    fn close(self, pipes: &mut Pipes<impl Write>) -> Result<(), ServeError> {
        let Self { worker, work, devices, disk, pinned_warm, .. } = self;
        let transports = worker.transports().by_name();
        let transports = transports.map(|(_, way)| (way.batches, way.blocks));
        let copied_bytes = worker.copied_bytes();
        // The buffers of the work are in use until the worker is at rest.
        let closed = worker.close();
        drop(work);
        crate::engine::closed(closed)?;
        let findings = devices.sim.as_ref().map(|sim| sim.findings()).unwrap_or_default();
        let pinned = devices.driver.pinned_bytes_allocated();
        let calls = devices.driver.calls().into_iter();
        let account = Account {
            driver_calls: calls.map(|(name, count)| (name.to_owned(), count)).collect(),
            transports,
            copied_bytes,
            pinned_after_warmup: pinned_warm.map(|warm| pinned - warm),
            findings: findings.first().map(|first| (findings.len(), first.to_string())),
            disk: disk.and_then(|disk| disk.report(0)),
        };
        pipes.answer(&frame::of_value(Kind::Closed, &account))
    }
}

fn unexpected(frame: &Frame, expected: &'static str) -> FrameError {
    FrameError::Unexpected { found: format!("{:?}", frame.kind), expected }
}
