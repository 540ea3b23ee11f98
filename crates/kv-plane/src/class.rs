//! What a loop does about each error of this crate.

use kv_pool::{Classed, ErrorClass};

use crate::{
    BuildError, CloseError, DemandError, GranuleError, HostCopyError, OptionsError, QuotaError,
    ReserveError, ResumeError, StepError,
};

use ErrorClass::{Restart, Shed};

impl Classed for OptionsError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for BuildError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NoMemory { .. } => Shed,
            Self::Options(error) => error.class(),
            Self::Shape(error) => error.class(),
            Self::Manager(error) => error.class(),
            Self::Policy(error) => error.class(),
            Self::Memory(error) => error.class(),
            Self::Paged(error) => error.class(),
            Self::Kernels(error) => error.class(),
            Self::Staging(error) => error.class(),
            Self::Span(error) => error.class(),
            Self::Grow(error) => error.class(),
            Self::Granule(error) => error.class(),
            Self::HostMemory(error) => error.class(),
            Self::Device(error) => error.class(),
            #[cfg(feature = "processes")]
            Self::Worker(error) => error.class(),
        }
    }
}

impl Classed for GranuleError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Pages { source, .. } => source.class(),
            Self::Null { source, .. } | Self::Map { source, .. } => source.class(),
        }
    }
}

impl Classed for DemandError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Grow(error) => error.class(),
            Self::Ahead(error) => error.class(),
        }
    }
}

impl Classed for ReserveError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Refused(error) => error.class(),
            Self::Memory(error) => error.class(),
        }
    }
}

impl Classed for ResumeError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Refused(error) => error.class(),
            Self::Memory(error) => error.class(),
        }
    }
}

impl Classed for QuotaError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Refused(error) => error.class(),
            Self::Memory(error) => error.class(),
        }
    }
}

impl Classed for HostCopyError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Block(error) => error.class(),
            Self::BlockInPieces { .. } => Shed,
            Self::Blocks(error) => error.class(),
            Self::List(error) => error.class(),
            Self::Device(error) => error.class(),
        }
    }
}

impl Classed for StepError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Batch(error) => error.class(),
            Self::Refused(error) => error.class(),
            Self::Step(error) => error.class(),
            Self::Plan(error) => error.class(),
            Self::Granule(error) => error.class(),
            Self::HostCopy(error) => error.class(),
            Self::Device(error) => error.class(),
            // The tiers' own reads and writes will end.
            Self::Lent { .. } => ErrorClass::Retry,
            Self::Layer { .. } => Shed,
            #[cfg(feature = "processes")]
            Self::Work { .. } => Shed,
            #[cfg(feature = "processes")]
            Self::Worker(error) => error.class(),
        }
    }
}

impl Classed for CloseError {
    /// What could not be given back is lost until the process ends; an open step can be finished first.
    fn class(&self) -> ErrorClass {
        match self {
            Self::StepOpen => ErrorClass::Retry,
            Self::NotAtRest { .. } | Self::Refused { .. } | Self::Staging(_) => Restart,
            #[cfg(feature = "processes")]
            Self::Worker(error) => error.class(),
        }
    }
}

#[cfg(feature = "metrics")]
impl Classed for crate::metrics::LabelError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

#[cfg(feature = "processes")]
mod of_processes {
    use kv_pool::{Classed, ErrorClass};

    use crate::processes::{FrameError, ServeError, WorkerError, WorkerFault};

    use ErrorClass::{Restart, Shed};

    impl Classed for FrameError {
        /// The connection is at no frame's beginning any more.
        fn class(&self) -> ErrorClass {
            Restart
        }
    }

    impl Classed for WorkerFault {
        fn class(&self) -> ErrorClass {
            Restart
        }
    }

    impl Classed for WorkerError {
        fn class(&self) -> ErrorClass {
            self.fault.class()
        }
    }

    impl Classed for ServeError {
        fn class(&self) -> ErrorClass {
            match self {
                Self::Format { .. } => Shed,
                Self::Frame(_) | Self::Answer(_) | Self::Thread(_) => Restart,
                Self::Grow(error) => error.class(),
                Self::Step(error) => error.class(),
                Self::Device(error) => error.class(),
            }
        }
    }
}

#[cfg(feature = "remote")]
impl Classed for crate::handover::HandoverError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Cache { .. }
            | Self::Kind
            | Self::Layout
            | Self::TooLarge { .. }
            | Self::Records { .. }
            | Self::TooLong { .. }
            | Self::OtherCache
            | Self::Again { .. }
            | Self::NoSource { .. }
            | Self::Thread(_) => Shed,
            Self::Copy(error) => error.class(),
            Self::Sums(error) => error.class(),
            Self::Device(error) => error.class(),
            Self::Export(error) => error.class(),
            Self::Memory(error) => error.class(),
            #[cfg(feature = "nixl")]
            Self::NodeMemory => Shed,
            #[cfg(feature = "nixl")]
            Self::Nixl(error) => error.class(),
        }
    }
}
