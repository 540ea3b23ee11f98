//! What a loop does about each error of this crate.

use cuda_driver::{Classed, ErrorClass};

use crate::background::{Fault, SpawnError};
use crate::elastic::{AheadError, BlockNotReady};
use crate::gate::{CoverError, UncoveredLease, Unrest, UsersUnknown};
use crate::memory_limit::{OverLimit, Verdict};
use crate::pages::{
    CloseError, ForeignPage, MapError, MapRefusal, NotMapped, PageError, RetireError,
};
use crate::sequences::{BatchError, RoomError, StillLive};
use crate::{GrowError, SpaceError};

use ErrorClass::{Restart, Retry, Shed};

impl Classed for SpaceError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::PageBytes { .. }
            | Self::Misaligned { .. }
            | Self::PeerTwice { .. }
            | Self::PeerUnreachable { .. }
            | Self::EmptyPool { .. }
            | Self::PoolOverflow { .. }
            | Self::Empty { .. }
            | Self::Overflow { .. }
            | Self::TooManySeats { .. } => Shed,
            Self::Grow(error) => error.class(),
            Self::Device(error) => error.class(),
        }
    }
}

impl Classed for GrowError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Retiring { .. } => Retry,
            Self::OverCapacity { .. }
            | Self::OutOfMemory { .. }
            | Self::OverLimit { .. }
            | Self::NoHeadroom { .. }
            // The pool goes on at its size, and tries the page again.
            | Self::Quarantined { .. } => Shed,
            Self::Device { source, .. } => source.class(),
        }
    }
}

impl Classed for AheadError {
    fn class(&self) -> ErrorClass {
        self.cause.class()
    }
}

impl Classed for BlockNotReady {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for PageError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::PageBytes { .. }
            | Self::Exhausted { .. }
            | Self::OverLimit(_)
            | Self::NoHeadroom(_)
            | Self::OutOfMemory { .. } => Shed,
            Self::Device(error) => error.class(),
        }
    }
}

impl Classed for OverLimit {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for Verdict {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for MapError {
    fn class(&self) -> ErrorClass {
        self.reason.class()
    }
}

impl Classed for MapRefusal {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Retiring { .. } => Retry,
            Self::OutOfRange { .. }
            | Self::PageBytes { .. }
            | Self::ForeignDevice { .. }
            | Self::Occupied { .. }
            | Self::Quarantined { .. } => Shed,
            Self::Device { source, .. } => source.class(),
        }
    }
}

impl Classed for ForeignPage {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for NotMapped {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for UsersUnknown {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for RetireError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NotMapped(error) => error.class(),
            Self::UsersUnknown(error) => error.class(),
        }
    }
}

impl Classed for CloseError {
    /// What was to go has stayed: only the end of the context frees it.
    fn class(&self) -> ErrorClass {
        Restart
    }
}

impl Classed for Unrest {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Leases { .. } | Self::Events { .. } => Retry,
            Self::Dropped { .. } | Self::Unknown => Shed,
            Self::Device(error) => error.class(),
        }
    }
}

impl Classed for UncoveredLease {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl<E: Classed + 'static> Classed for CoverError<E> {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Record(error) => error.class(),
            Self::Uncovered { .. } => Shed,
        }
    }
}

impl Classed for RoomError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NotReady { cause: None, .. } => Retry,
            Self::NotReady { cause: Some(cause), .. } | Self::Failed { cause, .. } => cause.class(),
            Self::TooLong { .. }
            | Self::NoSeat { .. }
            | Self::NoPlane { .. }
            | Self::OutOfBounds(_) => Shed,
        }
    }
}

impl Classed for BatchError {
    fn class(&self) -> ErrorClass {
        self.error.class()
    }
}

impl<T> Classed for StillLive<T> {
    fn class(&self) -> ErrorClass {
        Retry
    }
}

impl Classed for Fault {
    fn class(&self) -> ErrorClass {
        match self {
            // The worker tries again.
            Self::Device(_) => Retry,
            Self::OutOfMemory { .. } | Self::Limit { .. } | Self::Quarantined { .. } => Shed,
            Self::Lost(_) | Self::Panicked { .. } | Self::Stopped => Restart,
        }
    }
}

impl Classed for SpawnError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}
