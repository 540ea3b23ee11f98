//! Errors of a space and its sequences.

use cuda_driver::OutOfBounds;
use std::fmt;

use cuda_driver::messages::one_line_debug;

use crate::background::Fault;

/// The reason why a sequence does not have the room asked for: it was not admitted, not extended, or has no such plane or
/// tokens. It keeps what it had.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RoomError {
    /// More tokens than a sequence of this space can have.
    #[error("no sequence with room for {asked_tokens} tokens: sequences have at most {tokens_max}")]
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
    /// The memory is not mapped yet. If the sequence was to be extended, the demand is recorded and the worker is awake:
    /// retry.
    #[error("no room for {asked_tokens} tokens yet: memory for {ready_tokens} is ready")]
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
    #[error("no room for {asked_tokens} tokens: no more than {ready_tokens} will be ready")]
    Failed {
        /// Requested number of tokens.
        asked_tokens: u64,
        /// Number of tokens that may be used.
        ready_tokens: u64,
        /// The cause.
        #[source]
        cause: Fault,
    },
    /// The plane does not exist.
    #[error("plane {plane} does not exist: the sequence has {planes}")]
    NoPlane {
        /// Requested plane.
        plane: u64,
        /// Number of planes.
        planes: u64,
    },
    /// The range lies outside the plane.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
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
    pub error: RoomError,
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

one_line_debug!(RoomError, BatchError);

impl<T> fmt::Debug for StillLive<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
