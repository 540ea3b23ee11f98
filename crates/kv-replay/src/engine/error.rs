//! Why a run ended early.

use cuda_driver::{CopyError, DeviceError, ModuleError};
use kv_kernels::{KernelError, layout::LayoutError, link::TransportError};
use kv_plane::manager::{BudgetError, ChangeError, CommitError, DraftError, SlotError};
use kv_plane::processes::{WorkerError, WorkerFault};
use kv_plane::{BuildError, CloseError, DemandError, NoRoom, ReserveError, ResumeError, StepError};

use crate::config::ConfigError;
use crate::place::PlaceError;
use crate::report::RunReport;
use crate::shape::ShapeError;
use crate::trace::LineProblem;

#[derive(thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("request {request}, counted from 0: {problem}")]
    Request { request: usize, problem: LineProblem },
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error("{what} is {value}, more than the cache can count")]
    TooLarge { what: &'static str, value: u64 },
    #[error("an iteration of {tokens} tokens has more bytes than 64 bits can count")]
    ChunkOverflow { tokens: u64 },
    #[error("prompts are not handed over")]
    Handover(#[from] kv_plane::handover::HandoverError),
    #[error("a sequence from another node was not taken in")]
    Adopted(#[source] kv_plane::manager::SequenceError),
    #[error("the devices of other processes hand no sequences over")]
    HandoverElsewhere,
    #[error("the node does not serve")]
    Node(#[from] crate::nodes::NodeStartError),
    #[error("--disk is not used; --disk-fresh gives up what files of another shape or size have")]
    Disk(#[from] kv_disk::OpenError),
    #[error(
        "--open-loop: the last request arrives after {arrival_ms} ms, and a run counts {limit_ms} ms at most; cut the trace, or raise --rate"
    )]
    LateArrival { arrival_ms: u64, limit_ms: u64 },
    #[error(
        "an iteration of the model takes up to {} s, more than {} s on a GPU; raise --prefill-rate, or lower --decode-step-us or --step-tokens",
        time.as_secs(), limit.as_secs()
    )]
    Iteration { time: std::time::Duration, limit: std::time::Duration },
    #[error("cannot allocate {bytes} bytes for {what}")]
    Buffers { what: &'static str, bytes: u64, source: DeviceError },
    #[error("cannot build the KV cache")]
    Build(#[source] BuildError),
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error("cannot measure the link between {device} and host memory")]
    Measure { device: String, source: Box<MeasureError> },
    #[error("cannot start growth ahead of need")]
    Growth(#[from] cuda_vmm::worker::SpawnError),
    #[error("worker {worker} failed")]
    Worker { worker: u16, source: Box<WorkerFault> },
    #[error("a worker process was not stopped or continued")]
    Signal(#[source] std::io::Error),
    #[error("a worker process has said at its end what cannot be read")]
    Account(#[source] serde_json::Error),
    #[error("worker {worker} gets no layers by --place")]
    WorkerWithoutLayers { worker: u16 },
    #[error("the drill {drill} is for a worker of a run with {workers}, counted from 0")]
    DrillWorker { drill: String, workers: u16 },
    #[error("the drill {drill} never came: the run had {steps} steps")]
    DrillUnused { drill: String, steps: u64 },
    #[error("cannot give blocks to request {request}")]
    Admit { request: usize, source: AdmitError },
    #[error("cannot reserve room for request {request}")]
    Reserve { request: usize, source: ReserveError },
    #[error("cannot commit the ids of request {request}")]
    Commit { request: usize, source: CommitError },
    #[error("cannot commit what the draft model has computed of request {request}")]
    CommitDraft { request: usize, source: DraftError },
    #[error("cannot fork request {request}")]
    Fork { request: usize, source: ChangeError },
    #[error("cannot suspend or resume request {request}")]
    Resume { request: usize, source: ResumeError },
    #[error("cannot map memory under device blocks")]
    Memory(#[from] DemandError),
    #[error("cannot change the budget of device blocks")]
    Budget(#[from] BudgetError),
    #[error("an iteration failed")]
    Step(#[source] StepError),
    #[error("a kernel was not launched")]
    Kernel(#[from] KernelError),
    #[error("a copy was not enqueued")]
    Copy(#[from] CopyError),
    #[error("a slot mapping was refused")]
    Slots(#[from] SlotError),
    #[error("the device refused")]
    Device(#[from] DeviceError),
    #[error("cannot close the KV cache completely ({count} refusals)")]
    Close { count: usize, source: Box<CloseError> },
    #[error("cannot load the kernels")]
    LoadKernels(#[from] ModuleError),
    #[error("the kernels support no such shape")]
    Layout(#[from] LayoutError),
    #[error("{} corrupt blocks were found before the run failed", report.corrupt_blocks)]
    Corrupted { report: Box<RunReport>, source: Box<RunError> },
    #[error("the simulated device has {count} findings, the first: {first}")]
    Findings { count: usize, first: String },
}

#[derive(thiserror::Error)]
pub enum AdmitError {
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    #[error(transparent)]
    Refused(#[from] kv_plane::manager::AdmitError),
}

cuda_driver::messages::one_line_debug!(RunError, AdmitError);

impl From<BuildError> for RunError {
    fn from(error: BuildError) -> Self {
        match error {
            BuildError::Worker(failed) => failed.into(),
            error => Self::Build(error),
        }
    }
}

impl From<StepError> for RunError {
    fn from(error: StepError) -> Self {
        match error {
            StepError::Worker(failed) => failed.into(),
            error => Self::Step(error),
        }
    }
}

impl From<WorkerError> for RunError {
    fn from(WorkerError { worker, fault }: WorkerError) -> Self {
        Self::Worker { worker: worker.0, source: Box::new(fault) }
    }
}

#[derive(thiserror::Error)]
pub enum MeasureError {
    #[error("cannot load the kernels")]
    Kernels(#[from] ModuleError),
    #[error("a transfer was refused")]
    Transfer(#[from] TransportError),
}

cuda_driver::messages::one_line_debug!(MeasureError);
