//! Why a worker process was given up, or cannot go on itself.

use std::io;
use std::process::ExitStatus;

use kv_manager::{BytesError, CompletionError, WorkerId};
use kv_tier::codec::FieldError;

use super::frame::FRAME_BYTES_MAX;

/// Why what one process said to the other cannot be read.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The connection failed.
    #[error("a connection failed")]
    Connection(#[from] io::Error),
    /// It ended inside a frame.
    #[error("a frame of which {bytes} bytes came, where {expected} were to come")]
    Torn {
        /// Bytes that came.
        bytes: u64,
        /// Bytes that the frame has.
        expected: u64,
    },
    /// It does not begin as a frame does: something else was written to the connection, such as the output of a program.
    #[error("a frame begins with {found:02x?}")]
    Magic {
        /// The first bytes.
        found: [u8; 4],
    },
    /// It has more bytes than any frame.
    #[error("a frame of {bytes} bytes, where {FRAME_BYTES_MAX} are the most")]
    TooLong {
        /// Bytes of its body.
        bytes: u64,
    },
    /// Its checksum is wrong.
    #[error("a frame with {bytes} bytes of body has a wrong checksum")]
    Checksum {
        /// Bytes of its body.
        bytes: u64,
    },
    /// There is no such kind.
    #[error("a frame of kind {kind}")]
    Kind {
        /// Its kind.
        kind: u32,
    },
    /// Its body is not what its kind says.
    #[error("a frame whose body is not what its kind says: {0:?}")]
    Body(FieldError),
    /// Its body is no message of a manager or a worker.
    #[error("a frame whose message is none")]
    Message(#[from] BytesError),
    /// It is about something else than what was to come.
    #[error("a frame about {found}, where {expected} was to come")]
    Unexpected {
        /// What it is about.
        found: String,
        /// What was to come.
        expected: &'static str,
    },
    /// It speaks of another number of groups.
    #[error("a frame for {found} groups, expected {expected}")]
    Groups {
        /// Groups in the frame.
        found: usize,
        /// Groups of the cache.
        expected: usize,
    },
}

impl From<FieldError> for FrameError {
    fn from(error: FieldError) -> Self {
        Self::Body(error)
    }
}

/// What is wrong with the process of a worker. The process is ended and replaced, unless that goes wrong again and again.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum WorkerFault {
    /// There is no connection to a process.
    #[error("the process was not started")]
    Start(#[source] io::Error),
    /// It has ended, or its connection.
    #[error("the process has ended{}", status(*.0))]
    Ended(Option<ExitStatus>),
    /// Nothing came from it though something was to.
    #[error("the process was silent for {seconds} s")]
    Silent {
        /// How long it was waited for.
        seconds: u64,
    },
    /// All that came from it was known, or about something else than what was to come.
    #[error("the process has talked for {seconds} s without getting anywhere")]
    Talks {
        /// How long it was listened to.
        seconds: u64,
    },
    /// It said what cannot be read.
    #[error("the process said what cannot be read")]
    Frame(#[from] FrameError),
    /// It said that it cannot go on.
    #[error("the process cannot go on: {reason}")]
    Refused {
        /// The first 4 KiB of what it said.
        reason: String,
    },
    /// It said that it cannot begin: so no other process could.
    #[error("the process cannot begin: {reason}")]
    Unusable {
        /// The first 4 KiB of what it said.
        reason: String,
    },
    /// It spoke for another worker.
    #[error("the process spoke for worker {worker}")]
    Other {
        /// The worker that it named.
        worker: u16,
    },
    /// It spoke of a step that it was not sent.
    #[error("the process completed step {step} of worker {worker}, where step {expected} was next")]
    Step {
        /// The worker.
        worker: u16,
        /// The step that it named.
        step: u64,
        /// The step that was next.
        expected: u64,
    },
    /// The manager refused what was said of a step, a ticket or a tier.
    #[error("the manager refused what was said")]
    Completion(#[from] CompletionError),
    /// It has not computed what it says that it has.
    #[error("the process completed step {step} and has not computed it, or not read it")]
    NotComputed {
        /// The step.
        step: u64,
    },
    /// It has less memory than the process whose place it takes.
    #[error("the process has memory for {blocks} of {expected} {tier} blocks")]
    Memory {
        /// Where the blocks are.
        tier: &'static str,
        /// Blocks that it has.
        blocks: u64,
        /// Blocks that the manager hands out.
        expected: u64,
    },
    /// Nobody knows that it writes nothing any more: its blocks cannot be handed out again.
    #[error("the process was ended, and nothing has said for {seconds} s that it is")]
    NotFenced {
        /// How long that was waited for.
        seconds: u64,
    },
}

fn status(status: Option<ExitStatus>) -> String {
    status.map_or_else(String::new, |status| format!(" ({status})"))
}

impl WorkerFault {
    /// The same, of a process that has not begun.
    pub(super) fn at_start(self) -> Self {
        match self {
            Self::Refused { reason } => Self::Unusable { reason },
            other => other,
        }
    }

    /// The same of a process whose end is known.
    pub(super) fn with_status(self, status: Option<ExitStatus>) -> Self {
        match self {
            Self::Ended(_) => Self::Ended(status),
            other => other,
        }
    }
}

/// A worker whose process failed, and that no other process could replace.
#[derive(thiserror::Error)]
#[error("worker {} failed", worker.0)]
pub struct WorkerError {
    /// The worker.
    pub worker: WorkerId,
    /// What was wrong with its last process.
    #[source]
    pub fault: WorkerFault,
}

/// Why a worker process cannot go on.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The manager's process said what cannot be read.
    #[error("the manager's process said what cannot be read")]
    Frame(#[from] FrameError),
    /// The manager's process could not be answered.
    #[error("cannot answer the manager's process")]
    Answer(#[source] io::Error),
    /// The thread that reads orders could not be started.
    #[error("no thread to read the manager's orders")]
    Thread(#[source] io::Error),
    /// The worker was made for another rank, other blocks, tables or steps than its manager's.
    #[error(
        "{what}: {here} at the worker, {manager} at its manager; give both the same options, and the worker its own rank"
    )]
    Format {
        /// What differs.
        what: String,
        /// Its value here.
        here: u64,
        /// Its manager's value.
        manager: u64,
    },
    /// Memory could not be mapped, though some is left.
    #[error("the worker's memory could not be mapped")]
    Grow(#[from] cuda_vmm::GrowError),
    /// The place of the worker could not be taken, or an order not carried out.
    #[error("the worker cannot carry out an order")]
    Step(#[from] crate::StepError),
    /// The device is lost.
    #[error("the worker's device failed")]
    Device(#[from] cuda_driver::DeviceError),
}

cuda_driver::messages::one_line_debug!(FrameError, WorkerFault, WorkerError, ServeError);
