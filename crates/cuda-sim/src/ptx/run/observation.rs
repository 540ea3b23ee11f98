//! Mistakes of a running kernel.

use cuda_driver::ErrorCode;

use crate::{FindingKind, KernelSite};

/// A mistake, and where it was made.
pub(crate) type Observation = (KernelSite, Trouble);

/// The error that loses the device for a mistake of a kernel; `None` if the kernel continues.
pub(crate) fn code_of(kind: FindingKind) -> Option<ErrorCode> {
    match kind {
        FindingKind::IllegalAccess => Some(ErrorCode::ILLEGAL_ADDRESS),
        FindingKind::Misaligned => Some(ErrorCode::MISALIGNED_ADDRESS),
        FindingKind::Endless => Some(ErrorCode::LAUNCH_TIMEOUT),
        FindingKind::Uninitialised | FindingKind::Conflict => None,
        _ => Some(ErrorCode::LAUNCH_FAILED),
    }
}

/// A mistake of a thread, before the thread is known.
#[derive(Clone, Debug)]
pub(crate) struct Trouble {
    pub(crate) kind: FindingKind,
    /// The address, if the host knows addresses of that memory.
    pub(crate) address: Option<u64>,
    pub(crate) bytes: u64,
    pub(crate) detail: String,
}

impl Trouble {
    pub(super) fn new(kind: FindingKind, detail: impl Into<String>) -> Box<Self> {
        Box::new(Self { kind, address: None, bytes: 0, detail: detail.into() })
    }

    pub(super) fn at(
        kind: FindingKind,
        address: u64,
        bytes: u64,
        detail: impl Into<String>,
    ) -> Box<Self> {
        Box::new(Self { kind, address: Some(address), bytes, detail: detail.into() })
    }
}

pub(super) type Ran<T> = Result<T, Box<Trouble>>;
