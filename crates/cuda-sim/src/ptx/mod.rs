//! PTX, parsed when a module is loaded and run thread by thread when a kernel is launched.
//!
//! Loading converts text to tokens ([`token`]), to a tree ([`parse`]), and to steps whose operands
//! are register numbers ([`lower`]). Unknown PTX is refused at load time, with its line, so that no
//! kernel runs partly. [`run`](mod@run) executes the steps.

mod alu;
mod error;
mod lower;
mod module;
mod op;
mod parse;
mod parse_body;
mod run;
mod syntax;
#[cfg(test)]
mod tests;
mod token;
mod types;

pub(crate) use module::load;
pub(crate) use op::Program;
pub(crate) use run::{Limits, ObservationKind, Outcome, Site, run};
