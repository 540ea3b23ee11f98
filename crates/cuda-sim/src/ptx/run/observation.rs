//! Mistakes of a running kernel, with their location.

use cuda_driver::ErrorCode;

/// The thread and the line of a mistake.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Site {
    pub(crate) line: u32,
    pub(crate) thread: [u32; 3],
    pub(crate) block: [u32; 3],
}

/// The kind of mistake.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum ObservationKind {
    /// An access to memory that may not be accessed.
    Illegal,
    /// An access at an address that is not a multiple of its width.
    Misaligned,
    /// A read of bytes that were never written.
    Uninitialised,
    /// Two unordered accesses to one address.
    Conflict,
    /// A barrier or exchange that can never complete.
    Barrier,
    /// An instruction that stops the kernel.
    Trap,
    /// More instructions than a launch may take.
    Endless,
}

impl ObservationKind {
    /// The error that loses the device; `None` if the kernel continues.
    pub(crate) fn code(self) -> Option<ErrorCode> {
        match self {
            Self::Illegal => Some(ErrorCode::ILLEGAL_ADDRESS),
            Self::Misaligned => Some(ErrorCode::MISALIGNED_ADDRESS),
            Self::Barrier | Self::Trap => Some(ErrorCode::LAUNCH_FAILED),
            Self::Endless => Some(ErrorCode::LAUNCH_TIMEOUT),
            Self::Uninitialised | Self::Conflict => None,
        }
    }
}

/// One observation.
#[derive(Clone, Debug)]
pub(crate) struct Observation {
    pub(crate) kind: ObservationKind,
    pub(crate) site: Site,
    /// The address, if the host knows addresses of that memory.
    pub(crate) address: Option<u64>,
    pub(crate) bytes: u64,
    pub(crate) detail: String,
}

/// A mistake that stopped a thread, before the thread is known.
#[derive(Clone, Debug)]
pub(super) struct Trouble {
    pub(super) kind: ObservationKind,
    pub(super) address: Option<u64>,
    pub(super) bytes: u64,
    pub(super) detail: String,
}

impl Trouble {
    pub(super) fn new(kind: ObservationKind, detail: impl Into<String>) -> Box<Self> {
        Box::new(Self { kind, address: None, bytes: 0, detail: detail.into() })
    }

    pub(super) fn at(
        kind: ObservationKind,
        address: u64,
        bytes: u64,
        detail: impl Into<String>,
    ) -> Box<Self> {
        Box::new(Self { kind, address: Some(address), bytes, detail: detail.into() })
    }

    pub(super) fn seen_at(self, site: Site) -> Observation {
        let Self { kind, address, bytes, detail } = self;
        Observation { kind, site, address, bytes, detail }
    }
}

/// The result of a step.
pub(super) type Ran<T> = Result<T, Box<Trouble>>;
