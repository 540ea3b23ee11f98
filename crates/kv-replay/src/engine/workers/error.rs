//! Why a worker process was given up, or a run with worker processes ended early.

use std::io;
use std::process::ExitStatus;

use kv_plane::manager::{BytesError, CompletionError, TicketError};

#[derive(thiserror::Error)]
pub enum FrameError {
    #[error("a pipe failed")]
    Pipe(#[from] io::Error),
    #[error("a frame of which {bytes} bytes came, where {expected} were to come")]
    Torn { bytes: u64, expected: u64 },
    #[error("a frame begins with {found:02x?}")]
    Magic { found: [u8; 4] },
    #[error("a frame with {bytes} bytes of body has a wrong checksum")]
    Checksum { bytes: u64 },
    #[error("a frame of kind {kind}")]
    Kind { kind: u32 },
    #[error("a frame whose body ends inside a list, with {bytes} bytes left")]
    Body { bytes: usize },
    #[error("a batch with {number} for a slot")]
    Slot { number: i64 },
    #[error("a batch of {tokens} tokens with {slots} slots, and launches that do not fit them")]
    Launches { tokens: usize, slots: usize },
    #[error("a frame for {found} groups, expected {expected}")]
    Groups { found: usize, expected: usize },
    #[error("a frame whose body is not what its kind says")]
    Value(#[source] serde_json::Error),
    #[error("a frame whose message is none")]
    Message(#[from] BytesError),
    #[error("a frame about {found}, where {expected} was to come")]
    Unexpected { found: String, expected: &'static str },
}

#[derive(thiserror::Error)]
pub enum WorkerFault {
    #[error("the process was not started")]
    Start(#[source] io::Error),
    #[error("the process has ended{}", status(*.0))]
    Ended(Option<ExitStatus>),
    #[error("the process was silent for {seconds} s")]
    Silent { seconds: u64 },
    #[error("the process said what cannot be read")]
    Frame(#[from] FrameError),
    #[error("the process cannot go on: {reason}")]
    Refused { reason: String },
    #[error("the process cannot begin: {reason}")]
    Unusable { reason: String },
    #[error("the process completed step {step} of worker {worker}, where step {expected} was next")]
    Step { worker: u16, step: u64, expected: u64 },
    #[error("the manager refused a completion")]
    Completion(#[from] CompletionError),
    #[error("the manager refused what was said of a ticket")]
    Ticket(#[from] TicketError),
    #[error("the process completed step {step} and has not computed it, or not read it")]
    NotComputed { step: u64 },
    #[error("the process has memory for {blocks} of {expected} {tier} blocks")]
    Memory { tier: &'static str, blocks: u64, expected: u64 },
    #[error("the process was not stopped or continued")]
    Signal(#[source] io::Error),
    #[error("the process was killed, and has not ended for {seconds} s")]
    NotFenced { seconds: u64 },
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
