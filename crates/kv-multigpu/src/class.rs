//! What a loop does about each error of this crate.

use cuda_driver::{Classed, ErrorClass};

use crate::RegistryError;
use crate::moves::{MoveError, MoveFailed};
use crate::place::PlacementError;
use crate::threads::{Refusal, SpawnThreadError, SubmitError, TaskError};

use ErrorClass::{Restart, Retry, Shed};

impl Classed for PlacementError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for RegistryError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NoSuchDevice { .. }
            | Self::OtherContext { .. }
            | Self::NotOpen { .. }
            | Self::Uuid { .. } => Shed,
            Self::Draining { .. } | Self::InUse { .. } => Retry,
            Self::Lost { .. } | Self::Refused { .. } => Restart,
            Self::Driver(error) => error.class(),
            Self::Open { source, .. } | Self::Adopt { source, .. } | Self::Drain { source, .. } => {
                source.class()
            }
        }
    }
}

impl Classed for MoveError {
    /// The device's answer, where it was asked. Else no move takes these numbers, and others go on.
    fn class(&self) -> ErrorClass {
        match self {
            Self::Busy { .. } | Self::NoBuffer { .. } => Retry,
            Self::EndLost { .. } => Restart,
            Self::Module(error) => error.class(),
            Self::Copy(error) => error.class(),
            Self::Blocks(error) => error.class(),
            Self::Device(error) => error.class(),
            _ => Shed,
        }
    }
}

impl<S: Send + 'static, D: Send + 'static> Classed for MoveFailed<S, D> {
    fn class(&self) -> ErrorClass {
        self.error.class()
    }
}

impl Classed for TaskError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Panicked { .. }
            | Self::Cancelled
            | Self::WaitsForItself
            | Self::FromItsOwnTask
            | Self::Taken => Shed,
            Self::Lost { .. } => Restart,
            Self::Device(error) => error.class(),
        }
    }
}

impl Classed for SpawnThreadError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for Refusal {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Full { .. } => Retry,
            Self::Closed | Self::Lost { .. } => Restart,
        }
    }
}

impl<F> Classed for SubmitError<F> {
    fn class(&self) -> ErrorClass {
        self.refusal.class()
    }
}
