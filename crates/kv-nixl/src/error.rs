//! What goes wrong with NIXL.

use std::fmt;
use std::path::PathBuf;

use kv_pool::{Classed, ErrorClass};

/// A status that a function of NIXL has answered, which is not success.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Status {
    /// An argument is wrong.
    InvalidParameter,
    /// The backend, such as UCX, has failed.
    Backend,
    /// The call is not for this state.
    InvalidState,
    /// The library has caught an exception of its own.
    Exception,
    /// Not yet.
    InProgress,
    /// The metadata of the other agent is not loaded, or no backend serves the request.
    NotFound,
    /// A number that this crate does not know.
    Other(i32),
}

impl Status {
    pub(crate) fn of(status: i32) -> Self {
        match status {
            -1 => Self::InvalidParameter,
            -2 => Self::Backend,
            -3 => Self::InvalidState,
            -4 => Self::Exception,
            1 => Self::InProgress,
            -6 => Self::NotFound,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidParameter => f.write_str("an invalid parameter"),
            Self::Backend => f.write_str("a failure of the backend"),
            Self::InvalidState => f.write_str("an invalid state"),
            Self::Exception => f.write_str("an exception of the library"),
            Self::InProgress => f.write_str("a transfer in progress"),
            Self::NotFound => f.write_str("nothing found"),
            Self::Other(status) => write!(f, "status {status}"),
        }
    }
}

/// Why NIXL did not do what it was asked.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NixlError {
    /// The library was not found, or lacks a function.
    #[error(
        "NIXL's library {} cannot be used: {reason}. Install NIXL (pip install nixl), and name \
         libnixl_capi.so in KV_NIXL_LIBRARY", path.display()
    )]
    Library {
        /// The path or name that was tried.
        path: PathBuf,
        /// The dynamic linker's reason.
        reason: String,
    },
    /// A call has failed.
    #[error("NIXL answers {status} to {operation}")]
    Call {
        /// What was tried.
        operation: &'static str,
        /// The answer.
        status: Status,
    },
    /// The system has no memory.
    #[error("the system has refused {bytes} bytes of memory")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The device has refused what was asked of it.
    #[error(transparent)]
    Device(#[from] cuda_driver::DeviceError),
    /// A copy on the device was refused.
    #[error(transparent)]
    Copy(#[from] cuda_driver::CopyError),
    /// The description of a peer's memory is none.
    #[error("the description of a peer's memory is wrong in its field {field}")]
    Descriptor {
        /// The field.
        field: &'static str,
    },
    /// Reads that did not end in time are still open, and their memory cannot be used.
    #[error("{open} reads of this peer have not ended though their time was over")]
    Open {
        /// How many.
        open: usize,
    },
}

impl Classed for NixlError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Call { status: Status::InProgress, .. } | Self::Open { .. } => ErrorClass::Retry,
            Self::Call { status: Status::InvalidParameter | Status::NotFound, .. }
            | Self::Memory { .. }
            | Self::Descriptor { .. } => ErrorClass::Shed,
            Self::Library { .. } | Self::Call { .. } => ErrorClass::Restart,
            Self::Device(error) => error.class(),
            Self::Copy(error) => error.class(),
        }
    }
}

kv_pool::one_line_debug!(NixlError);
