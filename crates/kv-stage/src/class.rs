//! What a loop does about each error of this crate.

use cuda_driver::{Classed, ErrorClass};

use crate::error::{AcquireError, BatchError, StagingError, SubmitError};

use ErrorClass::{Restart, Retry, Shed};

impl Classed for StagingError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Options { .. }
            | Self::Memory { .. }
            | Self::SlabOptions { .. }
            | Self::TooManySlabs { .. }
            | Self::SlabMemory { .. }
            | Self::Batch { .. }
            | Self::HostMemory { .. }
            | Self::Thread(_) => Shed,
            Self::Pages(error) => error.class(),
            Self::Copy(error) => error.class(),
            Self::Kernel(error) => error.class(),
            Self::Device(error) => error.class(),
        }
    }
}

impl Classed for AcquireError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Exhausted { .. } => Retry,
            Self::Closed => Restart,
            Self::Device(error) => error.class(),
        }
    }
}

impl<E: Classed + 'static> Classed for SubmitError<E> {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Event(error) | Self::Retire(error) => error.class(),
            Self::Enqueue(error) => error.class(),
        }
    }
}

impl Classed for BatchError {
    fn class(&self) -> ErrorClass {
        match self {
            // A step that is submitted, also an empty one, sends the ids that wait.
            Self::Backlog { .. } => Retry,
            Self::Acquire(error) => error.class(),
            Self::Submit(error) => error.class(),
            Self::Copy(error) => error.class(),
            Self::Device(error) => error.class(),
            _ => Shed,
        }
    }
}
