//! What a loop does about each error of this crate.

use crate::host_pages::{PinError, RegisterError};
use crate::reference::{AccessFault, ReferenceError};
use crate::{
    Classed, CloseError, CopyError, DeviceError, DriverError, ErrorClass, ErrorCode, ModuleError,
    OutOfBounds, ReleaseError, ResidencyError, Unavailable,
};

use ErrorClass::{Restart, Retry, Shed};

impl Classed for DriverError {
    /// A driver that refuses what it should take is not called on: only what it says of memory and of a capture
    /// under way is about the call alone.
    fn class(&self) -> ErrorClass {
        match self.code {
            ErrorCode::OUT_OF_MEMORY => Shed,
            ErrorCode::NOT_READY | ErrorCode::STREAM_CAPTURE_UNSUPPORTED => Retry,
            _ => Restart,
        }
    }
}

impl Classed for DeviceError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Driver(error) => error.class(),
            Self::Poisoned { .. } => Restart,
            Self::OtherDevice { .. } => Shed,
        }
    }
}

impl Classed for OutOfBounds {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for CopyError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::OutOfBounds(_)
            | Self::Lengths { .. }
            | Self::OtherStream { .. }
            | Self::OtherDriver { .. }
            | Self::Gone { .. } => Shed,
            Self::Device(error) => error.class(),
        }
    }
}

impl Classed for PinError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Refused { .. } | Self::Unsupported => Shed,
            Self::Device(error) => error.class(),
        }
    }
}

impl Classed for RegisterError {
    fn class(&self) -> ErrorClass {
        self.source.class()
    }
}

impl Classed for ReleaseError {
    fn class(&self) -> ErrorClass {
        self.source.class()
    }
}

impl Classed for ResidencyError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::OutOfBounds(_)
            | Self::Unknown { .. }
            | Self::Kind { .. }
            | Self::OtherDevice { .. }
            | Self::Misaligned { .. }
            | Self::Length { .. } => Shed,
            Self::Cudarc(error) => error.class(),
            Self::Device(error) => error.class(),
        }
    }
}

impl Classed for ModuleError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Load { source, .. } | Self::Kernel { source, .. } => source.class(),
        }
    }
}

impl Classed for CloseError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::InUse { .. } => Retry,
            Self::Refused(_) => Restart,
        }
    }
}

impl Classed for AccessFault {
    fn class(&self) -> ErrorClass {
        Restart
    }
}

impl Classed for ReferenceError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Fault(fault) => fault.class(),
            Self::Argument { .. } => Shed,
        }
    }
}

impl Classed for Unavailable {
    fn class(&self) -> ErrorClass {
        Restart
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_shed_for_and_a_lost_device_made_anew() {
        let answer = |code| DriverError::new("cuMemAlloc", code);
        assert_eq!(answer(ErrorCode::OUT_OF_MEMORY).class(), Shed);
        assert_eq!(answer(ErrorCode::ILLEGAL_ADDRESS).class(), Restart);
        assert_eq!(answer(ErrorCode::NOT_READY).class(), Retry);
        let first = answer(ErrorCode::OUT_OF_MEMORY);
        assert_eq!(CopyError::Device(DeviceError::Poisoned { first }).class(), Restart);
        assert_eq!(PinError::Device(first.into()).class(), Shed);
    }
}
