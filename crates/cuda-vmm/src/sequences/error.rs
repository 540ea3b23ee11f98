//! Errors of a space and its sequences.

use cuda_driver::OutOfBounds;
use std::fmt;

use cuda_driver::messages::one_line_debug;

use crate::pages::ReserveError;
use crate::worker::Fault;

/// The reason why a space was not created.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SpaceError {
    /// One of the sizes is 0.
    #[error(
        "cannot create a space of {sequences} sequences of {planes} planes and {tokens_max} tokens of {token_bytes} bytes: it has no bytes"
    )]
    Empty {
        /// Number of seats.
        sequences: u64,
        /// Number of planes.
        planes: u64,
        /// Bytes of a token in a plane.
        token_bytes: u64,
        /// Maximum number of tokens of a sequence.
        tokens_max: u64,
    },
    /// The addresses do not fit in 64 bits.
    #[error(
        "cannot create a space of {sequences} sequences of {planes} planes and {tokens_max} tokens of {token_bytes} bytes: the size overflows 64 bits"
    )]
    Overflow {
        /// Number of seats.
        sequences: u64,
        /// Number of planes.
        planes: u64,
        /// Bytes of a token in a plane.
        token_bytes: u64,
        /// Maximum number of tokens of a sequence.
        tokens_max: u64,
    },
    /// More seats than a space can have.
    #[error("cannot create a space of {sequences} sequences: at most {sequences_max} are possible")]
    TooMany {
        /// Requested number of seats.
        sequences: u64,
        /// Maximum number of seats.
        sequences_max: u64,
    },
    /// The addresses could not be reserved.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
}

/// The reason why no sequence was admitted.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AdmitError {
    /// More tokens than a sequence of this space can have.
    #[error(
        "cannot admit a sequence of {asked_tokens} tokens: sequences have at most {tokens_max}"
    )]
    TooLong {
        /// Requested number of tokens.
        asked_tokens: u64,
        /// Maximum number of tokens of a sequence.
        tokens_max: u64,
    },
    /// No seat is both free and at rest. This is expected; retry when sequences have finished and
    /// their work is done.
    #[error("none of {sequences} seats is free: {live} live, {busy} finished but in use or stuck")]
    NoSeat {
        /// Number of seats.
        sequences: u64,
        /// Number of seats with a sequence.
        live: u64,
        /// Number of seats whose sequence has finished, but whose memory may be in use or cannot
        /// grow.
        busy: u64,
    },
}

/// The reason why a sequence may not use the requested tokens. It keeps what it had.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ExtendError {
    /// More tokens than a sequence of this space can have.
    #[error("cannot extend to {asked_tokens} tokens: the sequence has at most {tokens_max}")]
    TooLong {
        /// Requested number of tokens.
        asked_tokens: u64,
        /// Maximum number of tokens of a sequence.
        tokens_max: u64,
    },
    /// The memory is not mapped yet. The demand is recorded and the worker is awake. Retry.
    #[error("cannot extend to {asked_tokens} tokens yet: memory for {ready_tokens} is ready")]
    NotReady {
        /// Requested number of tokens.
        asked_tokens: u64,
        /// Number of tokens that may be used.
        ready_tokens: u64,
        /// The obstacle, if there is any besides time.
        #[source]
        cause: Option<Fault>,
    },
    /// No thread can map memory for this space any more.
    #[error("cannot extend to {asked_tokens} tokens: no more than {ready_tokens} will be ready")]
    Failed {
        /// Requested number of tokens.
        asked_tokens: u64,
        /// Number of tokens that may be used.
        ready_tokens: u64,
        /// The cause.
        #[source]
        cause: Fault,
    },
}

impl ExtendError {
    /// Whether the same call may succeed later without a repair.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::NotReady { .. })
    }
}

/// Some sequences of a batch may not use the requested tokens; all others may.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("cannot extend {refused} sequences of the batch, first the one at index {first}")]
pub struct BatchError {
    /// Number of refused sequences.
    pub refused: u64,
    /// Index of the first of them in the batch.
    pub first: usize,
    /// Why that one was refused.
    #[source]
    pub error: ExtendError,
}

/// A plane or token that the sequence does not have, or not yet.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlaneError {
    /// The plane does not exist.
    #[error("plane {plane} does not exist: the sequence has {planes}")]
    NoPlane {
        /// Requested plane.
        plane: u64,
        /// Number of planes.
        planes: u64,
    },
    /// The tokens have no memory yet.
    #[error("{asked_tokens} tokens of the plane wanted: memory for {ready_tokens} is ready")]
    NotReady {
        /// Requested number of tokens.
        asked_tokens: u64,
        /// Number of tokens that may be used.
        ready_tokens: u64,
    },
    /// The range lies outside the plane.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
}

/// A space was not closed because it has live sequences. The space is returned.
#[derive(thiserror::Error)]
#[error("the space was not closed: {live} sequences are live")]
pub struct StillLive<T> {
    /// The space.
    pub space: T,
    /// Number of live sequences.
    pub live: u64,
}

one_line_debug!(SpaceError, AdmitError, ExtendError, BatchError, PlaneError);

impl<T> fmt::Debug for StillLive<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
