//! Why a run ended early.

use cuda_driver::{CopyError, DeviceError, ModuleError};
use kv_cache::kv_manager::{
    self, BudgetError, CommitError, DraftError, ForkError, Missing, SlotError,
};
use kv_cache::{BuildError, CloseError, DemandError, ReserveError, ResumeError, StepError};
use kv_kernels::{KernelError, link::TransportError};

use super::contiguous::RangeError;
use super::workers::WorkerFault;
use crate::config::ConfigError;
use crate::place::PlaceError;
use crate::report::RunReport;
use crate::shape::ShapeError;
use crate::trace::LineProblem;

/// The reason why a run ended early.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The options of the run are refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A request violates the trace format.
    #[error("request {request}, counted from 0: {problem}")]
    Request {
        /// The request.
        request: usize,
        /// The problem.
        problem: LineProblem,
    },
    /// The shape is invalid.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The kernels do not support the shape.
    #[error("the kernels do not support the shape")]
    KernelShape(#[from] kv_kernels::error::ShapeError),
    /// A number exceeds what the cache supports.
    #[error("{what} is {value}, more than the cache can count")]
    TooLarge {
        /// The kind of number.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// The bytes of an iteration's tokens exceed 64 bits.
    #[error("an iteration of {tokens} tokens has more bytes than 64 bits can count")]
    ChunkOverflow {
        /// Number of tokens of an iteration.
        tokens: u64,
    },
    /// A sequence whose prompt is computed did not leave.
    #[error("request {request} cannot be handed over")]
    Export {
        /// The request of this process.
        request: usize,
        /// The reason.
        source: Box<kv_cache::kv_manager::ExportRefused>,
    },
    /// A sequence from another node was not taken in.
    #[error("a sequence from another node was not taken in")]
    Adopted(#[source] kv_cache::kv_manager::SequenceError),
    /// A block was not copied between the device and this process.
    #[error("a block of a sequence that is handed over was not copied")]
    BlockCopy(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Sequences are handed over by processes with one device each.
    #[error("the devices of other processes hand no sequences over")]
    HandoverElsewhere,
    /// The node does not serve.
    #[error("the node does not serve")]
    Node(#[from] crate::nodes::NodeStartError),
    /// See the message.
    #[error("--disk is not used; --disk-fresh gives up what files of another shape or size have")]
    Disk(#[from] kv_disk::OpenError),
    /// Requests come later than the clock of a run can count.
    #[error(
        "--open-loop: the last request arrives after {arrival_ms} ms, and a run counts {limit_ms} ms at most; cut the trace, or raise --rate"
    )]
    LateArrival {
        /// Arrival of the last request.
        arrival_ms: u64,
        /// The latest arrival.
        limit_ms: u64,
    },
    /// Nothing ends the kernel that takes the time of a model on a device that is not simulated.
    #[error(
        "an iteration of the model takes up to {} s, more than {} s on a GPU; raise --prefill-rate, or lower --decode-step-us or --step-tokens",
        time.as_secs(), limit.as_secs()
    )]
    Iteration {
        /// What the longest iteration takes.
        time: std::time::Duration,
        /// What it may take.
        limit: std::time::Duration,
    },
    /// The engine's own buffers could not be allocated.
    #[error("cannot allocate {bytes} bytes for {what}")]
    Buffers {
        /// The contents, and the option that determines the size.
        what: &'static str,
        /// Their size.
        bytes: u64,
        /// The device's error.
        source: DeviceError,
    },
    /// The cache was not built.
    #[error("cannot build the KV cache")]
    Build(#[from] BuildError),
    /// The model could not be placed on the devices.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The transports between a device and host memory were not measured.
    #[error("cannot measure the link between {device} and host memory")]
    Measure {
        /// The device.
        device: String,
        /// The cause.
        source: Box<MeasureError>,
    },
    /// The worker's thread, which maps memory ahead of need, was not started.
    #[error("cannot start growth ahead of need")]
    Growth(#[from] cuda_vmm::worker::SpawnError),
    /// A worker process failed, and could not be replaced.
    #[error("worker {worker} failed")]
    Worker {
        /// The worker, counted from 0.
        worker: u16,
        /// The cause.
        source: Box<WorkerFault>,
    },
    /// The division of the model leaves a worker without a share.
    #[error("worker {worker} gets no layers by --place")]
    WorkerWithoutLayers {
        /// The worker, counted from 0.
        worker: u16,
    },
    /// A drill names a worker that there is not.
    #[error("the drill {drill} is for a worker of a run with {workers}, counted from 0")]
    DrillWorker {
        /// The drill.
        drill: String,
        /// Number of workers.
        workers: u16,
    },
    /// A drill was never carried out.
    #[error("the drill {drill} never came: the run had {steps} steps")]
    DrillUnused {
        /// The drill.
        drill: String,
        /// Number of steps.
        steps: u64,
    },
    /// A request was not admitted or got no room, and waiting would not help.
    #[error("cannot give blocks to request {request}")]
    Admit {
        /// The request, counted from 0.
        request: usize,
        /// The cause.
        source: AdmitError,
    },
    /// No room was reserved for a request, for another reason than too few blocks.
    #[error("cannot reserve room for request {request}")]
    Reserve {
        /// The request, counted from 0.
        request: usize,
        /// The cause.
        source: ReserveError,
    },
    /// The ids of a request were refused.
    #[error("cannot commit the ids of request {request}")]
    Commit {
        /// The request, counted from 0.
        request: usize,
        /// The cause.
        source: CommitError,
    },
    /// The end of a draft model's KV was refused.
    #[error("cannot commit what the draft model has computed of request {request}")]
    CommitDraft {
        /// The request, counted from 0.
        request: usize,
        /// The cause.
        source: DraftError,
    },
    /// A request was not forked.
    #[error("cannot fork request {request}")]
    Fork {
        /// The request, counted from 0.
        request: usize,
        /// The cause.
        source: ForkError,
    },
    /// A request was not suspended or resumed, for another reason than too little room.
    #[error("cannot suspend or resume request {request}")]
    Resume {
        /// The request, counted from 0.
        request: usize,
        /// The cause.
        source: ResumeError,
    },
    /// Memory could not be mapped, though some is left.
    #[error("cannot map memory under device blocks")]
    Memory(#[from] DemandError),
    /// The budget of device blocks was not changed.
    #[error("cannot change the budget of device blocks")]
    Budget(#[from] BudgetError),
    /// A step failed.
    #[error("an iteration failed")]
    Step(#[from] StepError),
    /// A kernel was not launched.
    #[error("a kernel was not launched")]
    Kernel(#[from] KernelError),
    /// A copy was not enqueued.
    #[error("a copy was not enqueued")]
    Copy(#[from] CopyError),
    /// A slot mapping was refused.
    #[error("a slot mapping was refused")]
    Slots(#[from] SlotError),
    /// The device refused.
    #[error("the device refused")]
    Device(#[from] DeviceError),
    /// The cache was not closed completely.
    #[error("cannot close the KV cache completely ({count} refusals)")]
    Close {
        /// Number of refusals.
        count: usize,
        /// The first refusal.
        source: Box<CloseError>,
    },
    /// Contiguous ranges were refused.
    #[error(transparent)]
    Ranges(#[from] RangeError),
    /// Corrupt blocks were found, and then the run failed.
    #[error("{} corrupt blocks were found before the run failed", report.corrupt_blocks)]
    Corrupted {
        /// The results until then.
        report: Box<RunReport>,
        /// The failure.
        source: Box<RunError>,
    },
    /// The simulated device reported findings: work that may fail on a real device.
    #[error("the simulated device has {count} findings, the first: {first}")]
    Findings {
        /// Number of findings.
        count: usize,
        /// The first finding.
        first: String,
    },
}

/// Why a request got no blocks.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum AdmitError {
    /// There are too few.
    #[error("too few blocks")]
    Missing(#[from] Missing),
    /// It can never be admitted.
    #[error(transparent)]
    Refused(#[from] kv_manager::AdmitError),
}

cuda_driver::messages::one_line_debug!(RunError, AdmitError);

/// The reason why a link was not measured.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum MeasureError {
    /// The kernels were not loaded.
    #[error("cannot load the kernels")]
    Kernels(#[from] ModuleError),
    /// A transfer or an allocation was refused.
    #[error("a transfer was refused")]
    Transfer(#[from] TransportError),
}

cuda_driver::messages::one_line_debug!(MeasureError);
