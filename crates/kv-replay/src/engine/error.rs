//! Why a run ended early.

use cuda_driver::{CopyError, DeviceError, ModuleError};
use kv_cache::kv_manager::{self, BudgetError, CommitError, DraftError, ForkError, Missing};
use kv_cache::{
    BuildError, CloseError, DemandError, ReserveError, ResumeError, SlotError, StepError,
};
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
pub enum RunError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("request {request}, counted from 0: {problem}")]
    Request { request: usize, problem: LineProblem },
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error("the kernels do not support the shape")]
    KernelShape(#[from] kv_kernels::error::ShapeError),
    #[error("{what} is {value}, more than the cache can count")]
    TooLarge { what: &'static str, value: u64 },
    #[error("an iteration of {tokens} tokens has more bytes than 64 bits can count")]
    ChunkOverflow { tokens: u64 },
    #[error("request {request} cannot be handed over")]
    Export { request: usize, source: Box<kv_cache::kv_manager::ExportRefused> },
    #[error("a sequence from another node was not taken in")]
    Adopted(#[source] kv_cache::kv_manager::SequenceError),
    #[error("a block of a sequence that is handed over was not copied")]
    BlockCopy(#[source] Box<dyn std::error::Error + Send + Sync>),
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
    Build(#[from] BuildError),
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error("cannot measure the link between {device} and host memory")]
    Measure { device: String, source: Box<MeasureError> },
    #[error("cannot start growth ahead of need")]
    Growth(#[from] kv_cache::SpawnError),
    #[error("worker {worker} failed")]
    Worker { worker: u16, source: Box<WorkerFault> },
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
    Fork { request: usize, source: ForkError },
    #[error("cannot suspend or resume request {request}")]
    Resume { request: usize, source: ResumeError },
    #[error("cannot map memory under device blocks")]
    Memory(#[from] DemandError),
    #[error("cannot change the budget of device blocks")]
    Budget(#[from] BudgetError),
    #[error("an iteration failed")]
    Step(#[from] StepError),
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
    #[error(transparent)]
    Ranges(#[from] RangeError),
    #[error("{} corrupt blocks were found before the run failed", report.corrupt_blocks)]
    Corrupted { report: Box<RunReport>, source: Box<RunError> },
    #[error("the simulated device has {count} findings, the first: {first}")]
    Findings { count: usize, first: String },
}

/// Why a request got no blocks.
#[derive(thiserror::Error)]
pub enum AdmitError {
    #[error("too few blocks")]
    Missing(#[from] Missing),
    #[error(transparent)]
    Refused(#[from] kv_manager::AdmitError),
}

cuda_driver::messages::one_line_debug!(RunError, AdmitError);

/// The reason why a link was not measured.
#[derive(thiserror::Error)]
pub enum MeasureError {
    #[error("cannot load the kernels")]
    Kernels(#[from] ModuleError),
    #[error("a transfer was refused")]
    Transfer(#[from] TransportError),
}

cuda_driver::messages::one_line_debug!(MeasureError);
