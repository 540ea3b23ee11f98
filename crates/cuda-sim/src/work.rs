//! The operations of a stream, and their effects.

use std::sync::Arc;

use cuda_driver::guard;
use cuda_driver::reference::{AccessFault, KernelReference, ReferenceError};
use cuda_driver::{BatchCopy, ErrorCode, KernelArgs, LaunchConfig};
use parking_lot::Mutex;

use crate::findings::{Finding, FindingKind};
use crate::memory::{View, Viewer};
use crate::ptx::{self, Outcome, Program, Trouble};
use crate::races::{CallName, Order, Touches};
use crate::state::Machine;
use crate::streams::{DefaultOrder, Point};

#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) sequence: u64,
    /// The host's clock at the end of the enqueuing call.
    pub(crate) enqueued_ns: u64,
    /// The driver call that enqueued it.
    pub(crate) call: &'static str,
    pub(crate) work: Work,
    /// The work ordered before this operation, for the race check.
    pub(crate) order: Option<Order>,
}

#[derive(Debug)]
pub(crate) enum Work {
    /// Copies between any two addresses. Each side has the access rights of a device.
    Copy {
        destination: (u32, u64),
        source: (u32, u64),
        bytes: u64,
    },
    /// The copies of one batch, unordered among themselves, with the access rights of the device.
    CopyBatch(Box<[BatchCopy]>),
    /// Writes bytes that were staged during the call.
    WriteStaged {
        destination: u64,
        data: Box<[u8]>,
    },
    /// Reads bytes for a waiting caller.
    Fetch {
        source: u64,
        bytes: u64,
    },
    Fill {
        destination: u64,
        bytes: u64,
        value: u8,
    },
    Launch(Box<Launch>),
    /// Keeps the device busy for so many nanoseconds of virtual time, and touches no memory.
    Compute(u64),
    Record(u64),
    Wait(Point),
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// Runs the registered reference with the kernel's name.
    Reference(KernelReference),
    /// Runs its PTX, with the variables of its module.
    Ptx(Arc<Program>, Arc<Mutex<Vec<u8>>>),
}

/// A kernel with its arguments, copied at the launch.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) body: Body,
    /// Handle of the kernel's module.
    pub(crate) module: u64,
    pub(crate) config: LaunchConfig,
    pub(crate) args: KernelArgs,
}

impl Work {
    /// The name that reports give to an operation enqueued by `call`.
    pub(crate) fn name(&self, call: &'static str) -> CallName {
        match self {
            Self::Launch(launch) => match &launch.body {
                Body::Reference(reference) => CallName::Fixed(reference.name),
                Body::Ptx(program, _) => CallName::Program(Arc::clone(program)),
            },
            _ => CallName::Fixed(call),
        }
    }
}

impl Launch {
    pub(crate) fn name(&self) -> &str {
        match &self.body {
            Body::Reference(reference) => reference.name,
            Body::Ptx(program, _) => program.name(),
        }
    }
}

impl Machine {
    /// Runs an operation of stream `place.1` on device `place.0`.
    pub(crate) fn run(&mut self, place: (u32, u64), operation: Operation) {
        let (device, _) = place;
        let viewer = self.viewer(device);
        // As in the driver, copies and fills reach a peer's allocations without peer access.
        let engine = Viewer::enqueuing;
        let mut name = operation.call;
        let order = operation.order;
        let touches = order.as_ref().map(|_| Touches::of(device, &operation.work));
        guard!("sim.kernel-recorded", self.memory.recorder.switch(order.is_some()));
        let outcome = match operation.work {
            Work::Copy { destination, source, bytes } => {
                let to = (engine(destination.0), destination.1);
                let from = (engine(source.0), source.1);
                self.memory.copy(to, from, bytes).map_err(ReferenceError::from)
            }
            Work::CopyBatch(mut copies) => self.run_batch(device, &mut copies),
            Work::WriteStaged { destination, data } => {
                self.memory.store(engine(device), destination, &data).map_err(ReferenceError::from)
            }
            Work::Fetch { source, bytes } => {
                self.memory.fetch(engine(device), source, bytes).map_err(ReferenceError::from)
            }
            Work::Fill { destination, bytes, value } => self
                .memory
                .fill(engine(device), destination, bytes, value)
                .map_err(ReferenceError::from),
            Work::Launch(launch) => {
                let mut view = View::new(&mut self.memory, viewer);
                match launch.body {
                    Body::Reference(reference) => {
                        name = reference.name;
                        (reference.run)(&mut view, &launch.config, &launch.args)
                    }
                    Body::Ptx(program, variables) => {
                        let (config, args) = (&launch.config, &launch.args);
                        let limits = self.kernels.limits();
                        let variables = &mut variables.lock();
                        let outcome = ptx::run(&program, config, args, view, variables, &limits);
                        self.note_outcome(place, program.name(), outcome);
                        Ok(())
                    }
                }
            }
            // The completion of a record is reported with its time.
            Work::Compute(_) | Work::Record(_) | Work::Wait(_) => Ok(()),
        };
        if let Err(error) = outcome {
            self.fail(place, name, error);
        }
        if let Some(order) = &order {
            self.look_for_races(order, device, touches.unwrap_or_default());
        }
    }

    /// Runs the copies of a batch in a random order that the scheduler chooses.
    fn run_batch(&mut self, device: u32, copies: &mut [BatchCopy]) -> Result<(), ReferenceError> {
        self.scheduler.shuffle(copies);
        let engine = Viewer::enqueuing(device);
        copies.iter().try_for_each(|copy| {
            let (to, from) = ((engine, copy.destination), (engine, copy.source));
            self.memory.copy(to, from, copy.bytes).map_err(ReferenceError::from)
        })
    }

    /// Reports a kernel's mistakes, and loses its device if a mistake ended the kernel.
    fn note_outcome(&mut self, place: (u32, u64), name: &str, outcome: Outcome) {
        self.kernels.count_instructions(outcome.steps);
        let code = outcome.end.as_ref().and_then(|(_, end)| ptx::code_of(end.kind));
        for (site, trouble) in outcome.seen.into_iter().chain(outcome.end) {
            let Trouble { kind, address, bytes, detail } = trouble;
            let nearest = address.and_then(|address| self.memory.nearest(address, bytes));
            let detail = match (kind, nearest) {
                // The reason for the denied access already says it.
                (FindingKind::IllegalAccess, _) | (_, None) => detail,
                (_, Some(nearest)) => format!("{detail}: {nearest}"),
            };
            let finding = self.finding_at(place, kind, name, detail);
            self.findings.add(Finding { address, bytes, nearest, site: Some(site), ..finding });
        }
        if let Some(code) = code {
            self.poison_process(place.0, code);
        }
    }

    /// A finding of an operation. Programs know the legacy default stream as 0.
    fn finding_at(
        &self,
        (device, stream): (u32, u64),
        kind: FindingKind,
        name: &str,
        detail: String,
    ) -> Finding {
        let found = self.streams.get(stream);
        let is_legacy = found.is_some_and(|found| found.order() == DefaultOrder::Legacy);
        let stream = Some(if is_legacy { 0 } else { stream });
        Finding { device: Some(device), stream, ..Finding::new(kind, name, detail) }
    }

    #[cold]
    fn fail(&mut self, place: (u32, u64), name: &str, error: ReferenceError) {
        let (finding, code) = match error {
            ReferenceError::Fault(AccessFault { address, bytes, reason }) => {
                let nearest = self.memory.nearest(address, bytes);
                let finding = self.finding_at(place, FindingKind::IllegalAccess, name, reason);
                let finding = Finding { address: Some(address), bytes, nearest, ..finding };
                (finding, ErrorCode::ILLEGAL_ADDRESS)
            }
            other => {
                let reason = other.to_string();
                let finding = self.finding_at(place, FindingKind::KernelFailed, name, reason);
                (finding, ErrorCode::LAUNCH_FAILED)
            }
        };
        self.findings.add(finding);
        self.poison_process(place.0, code);
    }
}
