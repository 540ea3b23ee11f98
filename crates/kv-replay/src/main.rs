//! The `kv-replay` program: a command line over the library of the same name.

#![forbid(unsafe_code)]

mod cli;
mod commands;
mod progress;
#[cfg(all(feature = "sabotage", debug_assertions))]
mod sabotage;

use std::error::Error;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Parser as _;

use crate::cli::Cli;
use crate::commands::{Outcome, execute};

/// Exit status where a byte was found that does not belong to its request.
const CORRUPT: u8 = 3;

fn main() -> ExitCode {
    match execute(Cli::parse().command.as_ref()) {
        Ok(Outcome::Clean) => ExitCode::SUCCESS,
        Ok(Outcome::Corrupt) => ExitCode::from(CORRUPT),
        Err(failure) => {
            // Nobody is left to be told if standard error is closed.
            let _ = io::stderr().lock().write_all(described(&failure).as_bytes());
            ExitCode::from(failure.exit_status())
        }
    }
}

/// The error and what caused it, a line each.
fn described(error: &dyn Error) -> String {
    let mut text = format!("error: {error}\n");
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!("  caused by: {error}\n"));
        cause = error.source();
    }
    text
}
