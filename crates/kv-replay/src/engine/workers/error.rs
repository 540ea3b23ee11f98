//! Why a worker process was given up, or a run with worker processes ended early.

use std::io;
use std::process::ExitStatus;

use kv_cache::kv_manager::{BytesError, CompletionError, TicketError};

/// Why bytes from a pipe are no frame.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The pipe failed.
    #[error("a pipe failed")]
    Pipe(#[from] io::Error),
    /// The pipe ended inside a frame.
    #[error("a frame of which {bytes} bytes came, where {expected} were to come")]
    Torn {
        /// Bytes that came.
        bytes: u64,
        /// Bytes that were to come.
        expected: u64,
    },
    /// It does not begin as a frame does.
    #[error("a frame begins with {found:02x?}")]
    Magic {
        /// The first bytes.
        found: [u8; 4],
    },
    /// The checksum is wrong.
    #[error("a frame with {bytes} bytes of body has a wrong checksum")]
    Checksum {
        /// Bytes of the body.
        bytes: u64,
    },
    /// A kind that no frame has.
    #[error("a frame of kind {kind}")]
    Kind {
        /// The kind.
        kind: u32,
    },
    /// The body is shorter than what it is to hold.
    #[error("a frame whose body ends inside a list, with {bytes} bytes left")]
    Body {
        /// Bytes that are left.
        bytes: usize,
    },
    /// A number that is no slot.
    #[error("a batch with {number} for a slot")]
    Slot {
        /// The number.
        number: i64,
    },
    /// Launches beyond the tokens, or fewer slots than tokens.
    #[error("a batch of {tokens} tokens with {slots} slots, and launches that do not fit them")]
    Launches {
        /// Tokens.
        tokens: usize,
        /// Slots.
        slots: usize,
    },
    /// What is for each group is there for another number of groups.
    #[error("a frame for {found} groups, expected {expected}")]
    Groups {
        /// Groups in the frame.
        found: usize,
        /// Groups of the model.
        expected: usize,
    },
    /// The body is not the value that the frame is to hold.
    #[error("a frame whose body is not what its kind says")]
    Value(#[source] serde_json::Error),
    /// The message of the manager's crate is none.
    #[error("a frame whose message is none")]
    Message(#[from] BytesError),
    /// Another frame was to come.
    #[error("a frame about {found}, where {expected} was to come")]
    Unexpected {
        /// What came.
        found: String,
        /// What was to come.
        expected: &'static str,
    },
}

/// Why a worker process was given up.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum WorkerFault {
    /// The process was not started.
    #[error("the process was not started")]
    Start(#[source] io::Error),
    /// The process has ended.
    #[error("the process has ended{}", status(*.0))]
    Ended(Option<ExitStatus>),
    /// The process has said nothing for so long.
    #[error("the process was silent for {seconds} s")]
    Silent {
        /// Seconds without progress.
        seconds: u64,
    },
    /// The process said what is no frame.
    #[error("the process said what cannot be read")]
    Frame(#[from] FrameError),
    /// The process said that it cannot go on.
    #[error("the process cannot go on: {reason}")]
    Refused {
        /// What it said.
        reason: String,
    },
    /// The process cannot use its device, or lacks memory for its share: nothing has run yet.
    #[error("the process cannot begin: {reason}")]
    Unusable {
        /// What it said.
        reason: String,
    },
    /// The process spoke of a step that it was not asked for.
    #[error("the process completed step {step} of worker {worker}, where step {expected} was next")]
    Step {
        /// The worker that it named.
        worker: u16,
        /// The step that it named.
        step: u64,
        /// The oldest step that it has not completed; the largest number for none.
        expected: u64,
    },
    /// The manager refused what the process said of a step.
    #[error("the manager refused a completion")]
    Completion(#[from] CompletionError),
    /// The manager refused what the process said of a ticket.
    #[error("the manager refused what was said of a ticket")]
    Ticket(#[from] TicketError),
    /// The process completed a step without computing it, or without all of its checksums.
    #[error("the process completed step {step} and has not computed it, or not read it")]
    NotComputed {
        /// The step.
        step: u64,
    },
    /// The process has memory for fewer blocks than are handed out.
    #[error("the process has memory for {blocks} of {expected} {tier} blocks")]
    Memory {
        /// The tier.
        tier: &'static str,
        /// Blocks with memory.
        blocks: u64,
        /// Blocks that are handed out.
        expected: u64,
    },
    /// The process was not stopped or continued.
    #[error("the process was not stopped or continued")]
    Signal(#[source] io::Error),
    /// The process was killed and has not ended: its blocks can never be handed out again.
    #[error("the process was killed, and has not ended for {seconds} s")]
    NotFenced {
        /// Seconds since it was killed.
        seconds: u64,
    },
}

fn status(status: Option<ExitStatus>) -> String {
    status.map_or_else(String::new, |status| format!(" ({status})"))
}

cuda_driver::messages::one_line_debug!(FrameError, WorkerFault);

impl WorkerFault {
    /// The same, of a process that has not begun.
    pub(super) fn at_start(self) -> Self {
        match self {
            Self::Refused { reason } => Self::Unusable { reason },
            other => other,
        }
    }

    /// The fault with its causes, on one line.
    pub(super) fn reason(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    }
}
