//! PTX, parsed when a module is loaded and run thread by thread when a kernel is launched.
//!
//! Loading converts text to tokens ([`token`]), to a tree ([`parse`]), and to steps whose operands
//! are register numbers ([`lower`]). Unknown PTX is refused at load time, with its line, so that no
//! kernel runs partly. [`run`](mod@run) executes the steps.

mod alu;
mod lower;
mod module;
mod op;
mod parse;
mod parse_body;
mod run;
mod syntax;
mod token;
mod types;

pub(crate) use module::load;
pub(crate) use op::Program;
pub(crate) use run::{Limits, Outcome, Trouble, code_of, run};

/// A line of PTX that cannot run here.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("ptx line {line}; fatal: {message}")]
pub(crate) struct LoadError {
    pub(crate) line: u32,
    pub(crate) message: String,
}

impl LoadError {
    pub(crate) fn new(line: u32, message: impl Into<String>) -> Self {
        Self { line, message: message.into() }
    }
}

/// The result of a step of loading.
pub(crate) type Loaded<T> = Result<T, LoadError>;
