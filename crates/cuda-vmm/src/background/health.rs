//! The state of background work, and the obstacles to it.

use cuda_driver::messages::one_line_debug;
use std::sync::Arc;

use cuda_driver::{Device, DeviceError};

/// The reason why background work failed.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The device has too little memory. This is expected, and tried again.
    #[error("memory for {bytes} bytes ahead of need: CUDA_ERROR_OUT_OF_MEMORY (2)")]
    OutOfMemory {
        /// Requested bytes.
        bytes: u64,
    },
    /// One of our limits is reached. This is expected, and tried again.
    #[error("the limit leaves no room for {bytes} bytes more")]
    Limit {
        /// Requested bytes.
        bytes: u64,
    },
    /// A page that could not be unmapped earlier is in the way. Tried again.
    #[error("page {index} is in quarantine")]
    Quarantined {
        /// Index of the page in the reservation.
        index: u64,
    },
    /// The driver refused a call. Tried again.
    #[error("work ahead of need was refused")]
    Device(#[source] DeviceError),
    /// The device is lost. Not tried again.
    #[error("the device is lost")]
    Lost(#[source] DeviceError),
    /// The work panicked, so its state is unknown. Not tried again.
    #[error("background work panicked: {message}")]
    Panicked {
        /// The panic message.
        message: Arc<str>,
    },
    /// The worker was closed, or the space of the sequence was dropped. No work ahead of need is
    /// done any more.
    #[error("the worker was closed, or the space dropped")]
    Stopped,
}

impl Fault {
    /// The fault for a refusal by the driver: out of memory for `bytes`, loss of the device, or a
    /// refusal that may be temporary.
    pub(crate) fn of_device(device: &Device, error: DeviceError, bytes: u64) -> Self {
        if error.is_out_of_memory() {
            Self::OutOfMemory { bytes }
        } else if device.poison().is_some() {
            Self::Lost(error)
        } else {
            Self::Device(error)
        }
    }

    /// Whether trying again is useless.
    pub(crate) fn is_fatal(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::Panicked { .. } | Self::Stopped)
    }
}

/// The state of background work.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum Health {
    /// The work succeeds.
    #[default]
    Healthy,
    /// Something failed and will be tried again, when the worker is woken and from time to time.
    Degraded {
        /// The first fault since the state was last healthy.
        cause: Fault,
    },
    /// The work has ended for good.
    Failed {
        /// The reason.
        cause: Fault,
    },
}

impl Health {
    /// Records the result of a step. A failure is final.
    pub(super) fn note(&mut self, outcome: Result<(), Fault>) {
        match (&*self, outcome) {
            (Self::Failed { .. }, _) => {}
            (_, Err(cause)) if cause.is_fatal() => *self = Self::Failed { cause },
            (_, Ok(())) => *self = Self::Healthy,
            (Self::Healthy, Err(cause)) => *self = Self::Degraded { cause },
            (Self::Degraded { .. }, Err(_)) => {}
        }
    }

    /// The worse of two states.
    pub(super) fn or(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::Healthy, _) | (Self::Degraded { .. }, Self::Failed { .. }) => other,
            _ => self,
        }
    }
}

one_line_debug!(Fault);
