//! The `kv-replay` program: a command line over the library of the same name.

#![forbid(unsafe_code)]

mod cli;
mod commands;
mod fleet;
mod live;
mod manual;
mod partition;
mod plan_args;
mod progress;
#[cfg(all(feature = "sabotage", debug_assertions))]
mod sabotage;
mod settings;

use std::process::ExitCode;

use clap::Parser as _;

use crate::cli::Cli;
use crate::commands::{Failure, Outcome, complain, execute};

/// Exit status where the machine lacks something.
const LACKING: u8 = 2;

/// Exit status after corrupt blocks were found.
const CORRUPT: u8 = 3;

fn main() -> ExitCode {
    if let Err(error) = kv_replay::family::join() {
        complain(&Failure::Family(error));
        return ExitCode::FAILURE;
    }
    let args = std::env::args_os().collect();
    let args = match settings::complete(args, |name| std::env::var_os(name)) {
        Ok(args) => args,
        Err(error) => {
            let failure = Failure::Settings(error);
            complain(&failure);
            return ExitCode::from(failure.exit_status());
        }
    };
    match execute(Cli::parse_from(&args).command.as_ref(), &args) {
        Ok(Outcome::Clean) => ExitCode::SUCCESS,
        Ok(Outcome::Corrupt) => ExitCode::from(CORRUPT),
        Ok(Outcome::Lacking) => ExitCode::from(LACKING),
        Err(failure) => {
            complain(&failure);
            ExitCode::from(failure.exit_status())
        }
    }
}
