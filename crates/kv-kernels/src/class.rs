//! What a loop does about each error of this crate.

use cuda_driver::{Classed, ErrorClass};

use crate::error::{KernelError, OperandError, PagedKvError};
use crate::layout::LayoutError;
use crate::link::{TransportError, TransportProfileError};

use ErrorClass::{Restart, Shed};

impl Classed for LayoutError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for OperandError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for PagedKvError {
    /// The device's answer, where it was asked. Else these numbers describe no memory.
    fn class(&self) -> ErrorClass {
        match self {
            Self::Memory(error) | Self::Owner { error, .. } => error.class(),
            Self::Residency { error, .. } => error.class(),
            Self::Device(error) => error.class(),
            _ => Shed,
        }
    }
}

impl Classed for KernelError {
    /// The device's answer, where it was asked. Else no launch takes these numbers, and others go on.
    fn class(&self) -> ErrorClass {
        match self {
            Self::Memory(error) => error.class(),
            Self::Module(error) => error.class(),
            Self::Device(error) => error.class(),
            _ => Shed,
        }
    }
}

impl Classed for TransportError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Kernel(error) => error.class(),
            Self::Pages(error) => error.class(),
            Self::Copy(error) => error.class(),
            Self::Device(error) => error.class(),
            // The next transfer of the link waits for the device first. Until then its memory may be written.
            Self::Unordered { .. } => Restart,
            Self::HostRange(_) | Self::TooManyRounds { .. } => Shed,
        }
    }
}

impl Classed for TransportProfileError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}
