//! The `kv-replay` program: a command line over the library of the same name.

#![forbid(unsafe_code)]

mod cli;
mod commands;
mod drills;
mod fleet;
mod partition;
mod run_args;

use std::process::ExitCode;

use clap::Parser as _;
use kv_replay::command_line::complain;

use crate::cli::Cli;
use crate::commands::{Failure, Outcome, execute};

const CORRUPT: u8 = 3;

fn main() -> ExitCode {
    if let Err(error) = kv_replay::family::join() {
        complain(&Failure::Family(error));
        return ExitCode::FAILURE;
    }
    let args: Vec<_> = std::env::args_os().collect();
    let cli = Cli::try_parse_from(&args).unwrap_or_else(|error| drills::with_tip(error).exit());
    match execute(cli.command.as_ref(), &args) {
        Ok(Outcome::Clean) => ExitCode::SUCCESS,
        Ok(Outcome::Corrupt) => ExitCode::from(CORRUPT),
        Err(failure) => {
            complain(&failure);
            ExitCode::from(failure.exit_status())
        }
    }
}
