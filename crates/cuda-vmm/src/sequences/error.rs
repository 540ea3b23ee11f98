//! What can go wrong with a space and its sequences.

use cuda_driver::OutOfBounds;
use std::fmt;

use cuda_driver::messages::one_line_debug;

use crate::pages::ReserveError;
use crate::worker::Fault;

/// Why a space could not be made.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SpaceError {
    /// One of the sizes is 0.
    #[error(
        "{sequences} sequences of {planes} planes and {tokens_max} tokens of {token_bytes} bytes have no bytes"
    )]
    Empty {
        /// Seats.
        sequences: u64,
        /// Planes.
        planes: u64,
        /// Bytes of a token in a plane.
        token_bytes: u64,
        /// Most tokens of a sequence.
        tokens_max: u64,
    },
    /// The addresses do not fit in 64 bits.
    #[error(
        "{sequences} sequences of {planes} planes and {tokens_max} tokens of {token_bytes} bytes overflow 64 bits"
    )]
    Overflow {
        /// Seats.
        sequences: u64,
        /// Planes.
        planes: u64,
        /// Bytes of a token in a plane.
        token_bytes: u64,
        /// Most tokens of a sequence.
        tokens_max: u64,
    },
    /// More seats than a space keeps books of.
    #[error("{sequences} sequences asked of a space, which has at most {sequences_max}")]
    TooMany {
        /// Seats asked for.
        sequences: u64,
        /// Most seats.
        sequences_max: u64,
    },
    /// The addresses could not be reserved.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
}

/// Why no sequence was admitted.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AdmitError {
    /// A sequence never has so many tokens.
    #[error("{asked_tokens} tokens asked of sequences of {tokens_max}")]
    TooLong {
        /// Tokens asked for.
        asked_tokens: u64,
        /// Most tokens of a sequence.
        tokens_max: u64,
    },
    /// No seat is both free and at rest: an expected outcome, worth a retry when sequences have
    /// finished and their work is done.
    #[error("none of {sequences} seats is free: {live} live, {busy} finished but in use or stuck")]
    NoSeat {
        /// Seats.
        sequences: u64,
        /// Seats with a sequence.
        live: u64,
        /// Seats whose sequence has finished but whose memory may be in use, or cannot grow.
        busy: u64,
    },
}

/// Why a sequence may not use as many tokens as asked. What it had it still has.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ExtendError {
    /// A sequence never has so many tokens.
    #[error("{asked_tokens} tokens asked of a sequence of at most {tokens_max}")]
    TooLong {
        /// Tokens asked for.
        asked_tokens: u64,
        /// Most tokens of a sequence.
        tokens_max: u64,
    },
    /// The memory is not there yet; the demand is noted and the worker is awake. Worth a retry.
    #[error("{asked_tokens} tokens asked, memory for {ready_tokens} is ready")]
    NotReady {
        /// Tokens asked for.
        asked_tokens: u64,
        /// Tokens that may be used.
        ready_tokens: u64,
        /// What stands in the way, if anything does but time.
        #[source]
        cause: Option<Fault>,
    },
    /// Nobody can map memory for this space any more.
    #[error("{asked_tokens} tokens asked, no more than {ready_tokens} will be ready")]
    Failed {
        /// Tokens asked for.
        asked_tokens: u64,
        /// Tokens that may be used.
        ready_tokens: u64,
        /// Why.
        #[source]
        cause: Fault,
    },
}

impl ExtendError {
    /// Whether the same call may succeed later without anything being repaired.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::NotReady { .. })
    }
}

/// Some sequences of a batch may not use as many tokens as asked; all others may.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("{refused} sequences of the batch were refused, first that at place {first}")]
pub struct BatchError {
    /// How many.
    pub refused: u64,
    /// Place of the first of them in the batch.
    pub first: usize,
    /// Why that one was.
    #[source]
    pub error: ExtendError,
}

/// A plane or token that a sequence does not have, or not yet.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlaneError {
    /// There is no such plane.
    #[error("plane {plane} asked of {planes}")]
    NoPlane {
        /// Plane asked for.
        plane: u64,
        /// Planes.
        planes: u64,
    },
    /// The tokens have no memory yet.
    #[error("{asked_tokens} tokens asked, memory for {ready_tokens} is ready")]
    NotReady {
        /// Tokens asked for.
        asked_tokens: u64,
        /// Tokens that may be used.
        ready_tokens: u64,
    },
    /// The bytes lie outside.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
}

/// A space was not closed because it has live sequences; here it is back.
#[derive(thiserror::Error)]
#[error("the space was not closed: {live} sequences are live")]
pub struct StillLive<T> {
    /// The space.
    pub space: T,
    /// How many.
    pub live: u64,
}

one_line_debug!(SpaceError, AdmitError, ExtendError, BatchError, PlaneError);

impl<T> fmt::Debug for StillLive<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
