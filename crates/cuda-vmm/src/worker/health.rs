//! How background work is doing, and what stands in its way.

use cuda_driver::messages::one_line_debug;
use std::sync::Arc;

use cuda_driver::{Device, DeviceError};

/// Why background work could not be done.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The device has too little memory: expected, tried again.
    #[error("memory for {bytes} bytes ahead of need: CUDA_ERROR_OUT_OF_MEMORY (2)")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// A limit of our own is reached: expected, tried again.
    #[error("the limit leaves no room for {bytes} bytes more")]
    Limit {
        /// Bytes asked for.
        bytes: u64,
    },
    /// A page that could not be unmapped earlier stands in the way; tried again.
    #[error("page {index} is in quarantine")]
    Quarantined {
        /// Which page of the reservation.
        index: u64,
    },
    /// The driver refused a call; tried again.
    #[error("work ahead of need was refused")]
    Device(#[source] DeviceError),
    /// The device is lost: nothing is tried any more.
    #[error("the device is lost")]
    Lost(#[source] DeviceError),
    /// The work panicked, so its state is in doubt: nothing is tried any more.
    #[error("background work panicked: {message}")]
    Panicked {
        /// What the panic said.
        message: Arc<str>,
    },
    /// The worker was closed: nobody works ahead any more.
    #[error("the worker is closed")]
    Stopped,
}

impl Fault {
    /// What a refusal of the driver means: out of memory for `bytes`, the loss of the device, or a
    /// refusal that may pass.
    #[must_use]
    pub fn of_device(device: &Device, error: DeviceError, bytes: u64) -> Self {
        if error.is_out_of_memory() {
            Self::OutOfMemory { bytes }
        } else if device.poison().is_some() {
            Self::Lost(error)
        } else {
            Self::Device(error)
        }
    }

    /// Whether trying again is pointless.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::Panicked { .. } | Self::Stopped)
    }
}

/// How background work is doing.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum Health {
    /// It does what it was asked to.
    #[default]
    Healthy,
    /// It could not do something and will try again: when it is woken, and from time to time.
    Degraded {
        /// The first thing that went wrong since it was last healthy.
        cause: Fault,
    },
    /// It has ended for good.
    Failed {
        /// Why.
        cause: Fault,
    },
}

impl Health {
    /// Whether nothing is wrong.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        matches!(self, Self::Healthy)
    }

    /// What is wrong.
    #[must_use]
    pub fn cause(&self) -> Option<&Fault> {
        match self {
            Self::Healthy => None,
            Self::Degraded { cause } | Self::Failed { cause } => Some(cause),
        }
    }

    /// Takes note of how a step ended. A failure is final.
    pub(super) fn note(&mut self, outcome: Result<(), Fault>) {
        match (&*self, outcome) {
            (Self::Failed { .. }, _) => {}
            (_, Err(cause)) if cause.is_fatal() => *self = Self::Failed { cause },
            (_, Ok(())) => *self = Self::Healthy,
            (Self::Healthy, Err(cause)) => *self = Self::Degraded { cause },
            (Self::Degraded { .. }, Err(_)) => {}
        }
    }

    /// The worse of two.
    pub(super) fn or(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::Healthy, _) | (Self::Degraded { .. }, Self::Failed { .. }) => other,
            _ => self,
        }
    }
}

one_line_debug!(Fault);
