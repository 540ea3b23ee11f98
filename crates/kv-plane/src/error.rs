//! Errors, one enum for each family of operations.

use cuda_driver::host_pages::PinError;
use cuda_driver::messages::{ByteSize, one_line_debug};
use cuda_driver::{CopyError, DeviceError, ModuleError};
use cuda_vmm::pages::{MapRefusal, PageError};
use cuda_vmm::{GrowError, SpaceError, elastic::AheadError};
use kv_kernels::{error::PagedKvError, layout::LayoutError, link::TransportError};
use kv_manager::GroupId;
use kv_pool::ConfigError;
use kv_stage::error::{AcquireError, BatchError, StagingError, SubmitError};

use crate::OptionsError;
#[cfg(feature = "processes")]
use crate::processes::WorkerError;

/// Why a cache was not built.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The options contradict each other or cannot be met anywhere.
    #[error("no cache can have these options")]
    Options(#[from] OptionsError),
    /// The layers of one device have no shape.
    #[error("no cache can have this share of the layers on one device")]
    Shape(#[from] LayoutError),
    /// The manager refused the options.
    #[error("no manager can have these options")]
    Manager(#[from] kv_manager::OptionsError),
    /// An eviction policy could not be made.
    #[error("the eviction policy of the cache could not be made")]
    Policy(#[from] ConfigError),
    /// No addresses could be reserved.
    #[error("no addresses could be reserved for the cache's blocks")]
    Memory(#[from] SpaceError),
    /// The memory could not be described to the kernels.
    #[error("the cache's blocks could not be described to the kernels")]
    Paged(#[from] PagedKvError),
    /// The kernels could not be loaded.
    #[error("the cache's kernels could not be loaded")]
    Kernels(#[from] ModuleError),
    /// The staging buffers, or the slabs of the host tier, have impossible sizes or could not be pinned.
    #[error("the cache's pinned memory could not be made")]
    Staging(#[from] StagingError),
    /// A span of the reservation is not where it should be.
    #[error("the addresses reserved for the cache's blocks are too few")]
    Span(#[from] CopyError),
    /// The blocks of a group whose memory does not grow have none: it is mapped when the cache is made.
    #[error("{mapped} of {blocks} blocks of group {} have memory on device {ordinal}", group.0)]
    NoMemory {
        /// The group.
        group: GroupId,
        /// The device.
        ordinal: i32,
        /// Blocks that have memory.
        mapped: u64,
        /// Blocks that the options ask for.
        blocks: u64,
    },
    /// The memory of a group whose memory does not grow was refused, though some is left.
    #[error("the memory of a group of layers could not be mapped")]
    Grow(#[from] GrowError),
    /// There are no pages for the memory that groups share.
    #[error("the memory that groups share could not be made")]
    Granule(#[from] GranuleError),
    /// The memory of the host tier could not be pinned.
    #[error("the host tier of the cache could not be pinned")]
    HostMemory(#[from] PinError),
    /// The device refused: a stream or an event.
    #[error("a device refused a call that builds the cache")]
    Device(#[from] DeviceError),
    /// A worker process was not started, or did not begin.
    #[cfg(feature = "processes")]
    #[error("the workers of the cache have not begun")]
    Worker(#[from] WorkerError),
}

/// Why groups that share memory have none on a device.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum GranuleError {
    /// The pages of all granules, or of a null block, could not be created.
    #[error("{pages} pages for shared memory were not to be had on GPU {ordinal}")]
    Pages {
        /// Ordinal of the device.
        ordinal: i32,
        /// Pages asked for; 0 where pages of their size cannot be.
        pages: u64,
        /// The refusal.
        source: PageError,
    },
    /// The null block of a group could not be mapped.
    #[error("the null block of group {} was not mapped on GPU {ordinal}", group.0)]
    Null {
        /// The group.
        group: GroupId,
        /// Ordinal of the device.
        ordinal: i32,
        /// The refusal.
        source: MapRefusal,
    },
    /// A granule could not be mapped where a group has it.
    #[error("granule {granule} was not mapped for group {} on GPU {ordinal}", group.0)]
    Map {
        /// The group.
        group: GroupId,
        /// The granule.
        granule: u32,
        /// Ordinal of the device.
        ordinal: i32,
        /// The refusal.
        source: MapRefusal,
    },
}

/// Why memory was not mapped under device blocks.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum DemandError {
    /// The driver refused, though memory is left.
    #[error("memory could not be mapped under device blocks: {0:?}")]
    Grow(GrowError),
    /// The worker that maps memory ahead of need has ended, by a panic or with the device.
    #[error("the worker that maps device memory ahead of need has stopped: {0:?}")]
    Ahead(AheadError),
}

/// Why a sequence got no room. It is as it was.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The sequence cannot go on as it is.
    #[error("{0}")]
    Refused(kv_manager::ReserveError),
    /// Memory could not be mapped, though some is left.
    #[error("no room was reserved: {0}")]
    Memory(DemandError),
}

/// Why a sequence was not resumed. It is suspended as it was.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// The sequence cannot be resumed.
    #[error("{0:?}")]
    Refused(kv_manager::SuspendError),
    /// Memory could not be mapped, though some is left.
    #[error("the sequence was not resumed: {0}")]
    Memory(DemandError),
}

/// Why a tenant was not given a quota.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum QuotaError {
    /// There is no such group or tenant, or more blocks would be reserved than exist.
    #[error("{0}")]
    Refused(kv_manager::BudgetError),
    /// The memory under the reserved blocks could not be mapped.
    #[error("the tenant's quota was not set: the blocks to keep have no memory: {0}")]
    Memory(DemandError),
}

/// Why copies between device and host memory were not enqueued. They are enqueued when the step ends or
/// the next one begins, in their order.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum HostCopyError {
    /// The copy of one block was refused.
    #[error("a block was not copied between device and host memory: {0:?}")]
    Block(CopyError),
    /// The layers of a block lie in several pieces, which only a kernel copies.
    #[error("block {block} lies in several pieces, and cannot be copied by one call")]
    BlockInPieces {
        /// The block.
        block: usize,
    },
    /// The transfer of several blocks was refused.
    #[error("a list of blocks was not copied between device and host memory: {0:?}")]
    Blocks(TransportError),
    /// No buffer is left for the list of blocks.
    #[error("no staging buffer for a list of blocks to copy: {0:?}")]
    List(AcquireError),
    /// The device refused: to be bound, or an event for the list.
    #[error("a device refused a call that copies blocks: {0:?}")]
    Device(DeviceError),
}

impl HostCopyError {
    /// What the submission of a list of blocks met.
    pub(crate) fn from_submit(error: SubmitError<TransportError>) -> Self {
        match error {
            SubmitError::Enqueue(error) => Self::Blocks(error),
            SubmitError::Event(error) | SubmitError::Retire(error) => error.into(),
            error => {
                tracing::error!(%error, "an unknown refusal of a staging buffer");
                Self::List(AcquireError::Closed)
            }
        }
    }
}

/// Why a step could not be begun, staged or finished.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The batch of a device could not be put together or sent.
    #[error("the step's batch was not sent: {0:?}")]
    Batch(BatchError),
    /// The manager refused the batch. Nothing was staged.
    #[error("the batch was not staged: {0:?}")]
    Refused(kv_manager::StageError),
    /// The step before is open, or the step is of another cache.
    #[error("{0:?}")]
    Step(kv_manager::StepError),
    /// A plan does not follow the last one, or names what is not there. Nothing was carried out.
    #[error("the plan was not carried out: {0:?}")]
    Plan(kv_manager::PlanError),
    /// There is no such layer.
    #[error("layer {layer} of group {} is waited for, which has {layers}", group.0)]
    Layer {
        /// The group named.
        group: GroupId,
        /// The layer named.
        layer: u32,
        /// Layers of the group; 0 if there is no such group.
        layers: u32,
    },
    /// A granule of shared memory could not be mapped for the group that got it. It is mapped when the step ends,
    /// before anything is enqueued that uses it.
    #[error("the step was not staged: a group's memory was not mapped: {0:?}")]
    Granule(GranuleError),
    /// Tiers below host memory have not given back blocks that they read or write by themselves.
    #[error("tiers below host memory still have blocks of it after {} ms", waited.as_millis())]
    Lent {
        /// How long they were waited for.
        waited: std::time::Duration,
    },
    /// Blocks could not be sent between device and host memory.
    #[error("the step was not staged: {0}")]
    HostCopy(HostCopyError),
    /// The device refused or is lost.
    #[error("the device refused a call of the step: {0:?}")]
    Device(DeviceError),
    /// Worker processes are not sent so much with a step. Nothing was staged.
    #[cfg(feature = "processes")]
    #[error(
        "a step with {bytes} bytes for worker processes, which take {max}: send less of it with each step"
    )]
    Work {
        /// Bytes given.
        bytes: u64,
        /// The most that a step has.
        max: u64,
    },
    /// A worker process failed, and could not be replaced.
    #[cfg(feature = "processes")]
    #[error("{0:?}")]
    Worker(WorkerError),
}

/// Everything that kept a cache from being closed in full, of all devices and workers: one refusal at least.
#[derive(thiserror::Error)]
#[error("the cache was not closed in full: {}", one_line(.0))]
pub struct CloseErrors(Vec<CloseError>);

fn one_line(errors: &[CloseError]) -> String {
    let each: Vec<_> = errors.iter().map(|error| format!("{error:?}")).collect();
    each.join("; ")
}

impl From<Vec<CloseError>> for CloseErrors {
    fn from(errors: Vec<CloseError>) -> Self {
        Self(errors)
    }
}

impl std::ops::Deref for CloseErrors {
    type Target = [CloseError];

    fn deref(&self) -> &[CloseError] {
        &self.0
    }
}

impl IntoIterator for CloseErrors {
    type Item = CloseError;
    type IntoIter = std::vec::IntoIter<CloseError>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// One refusal of those that kept a cache from being closed in full.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// A step is open, which may yet use the memory: only what is provably at rest was given back.
    #[error("the cache cannot be closed while a step is open")]
    StepOpen,
    /// The device could not be waited for: only what is provably at rest was given back.
    #[error("the cache cannot be closed: GPU {ordinal} could not be waited for")]
    NotAtRest {
        /// Ordinal of the device.
        ordinal: i32,
    },
    /// The driver refused a step of the clean-up.
    #[error("GPU {ordinal} refused a call of the clean-up: {} leaked", ByteSize(*leaked_bytes))]
    Refused {
        /// Ordinal of the device.
        ordinal: i32,
        /// Bytes that stay mapped until the process ends, or may not have been released.
        leaked_bytes: u64,
        /// The first refusal.
        #[source]
        source: cuda_vmm::pages::CloseError,
    },
    /// The staging buffers, the host tier's pinned memory or a small buffer on the device could not
    /// be freed.
    #[error("the cache's pinned memory was not freed")]
    Staging(#[from] StagingError),
    /// A worker process failed before it had released everything. It was ended.
    #[cfg(feature = "processes")]
    #[error("a worker process has not closed its part of the cache")]
    Worker(#[from] WorkerError),
}

/// Causes that stand in the message whole, and so are no sources beside it.
macro_rules! told_whole {
    ($($error:ident::$variant:ident($cause:ty)),+ $(,)?) => {$(
        impl From<$cause> for $error {
            fn from(cause: $cause) -> Self {
                Self::$variant(cause)
            }
        }
    )+};
}

told_whole!(
    DemandError::Grow(GrowError),
    DemandError::Ahead(AheadError),
    ReserveError::Refused(kv_manager::ReserveError),
    ReserveError::Memory(DemandError),
    ResumeError::Refused(kv_manager::SuspendError),
    ResumeError::Memory(DemandError),
    QuotaError::Refused(kv_manager::BudgetError),
    QuotaError::Memory(DemandError),
    HostCopyError::Block(CopyError),
    HostCopyError::Blocks(TransportError),
    HostCopyError::List(AcquireError),
    HostCopyError::Device(DeviceError),
    StepError::Batch(BatchError),
    StepError::Refused(kv_manager::StageError),
    StepError::Step(kv_manager::StepError),
    StepError::Plan(kv_manager::PlanError),
    StepError::Granule(GranuleError),
    StepError::HostCopy(HostCopyError),
    StepError::Device(DeviceError),
);

#[cfg(feature = "processes")]
told_whole!(StepError::Worker(WorkerError));

one_line_debug!(
    BuildError,
    GranuleError,
    DemandError,
    QuotaError,
    ReserveError,
    ResumeError,
    HostCopyError,
    StepError,
    CloseError,
    CloseErrors
);
