//! The program `kv-tools`: plans, policies, the page of reports, and a look at the machine.

#![forbid(unsafe_code)]

mod cli;
mod commands;
mod plan_args;

use std::process::ExitCode;

use clap::Parser as _;
use kv_replay::command_line::complain;

use crate::cli::Cli;
use crate::commands::{Outcome, execute};

/// Exit status of bad input, and where the machine lacks something.
const BAD: u8 = 2;

fn main() -> ExitCode {
    match execute(&Cli::parse().command) {
        Ok(Outcome::Clean) => ExitCode::SUCCESS,
        Ok(Outcome::Lacking) => ExitCode::from(BAD),
        Err(failure) => {
            complain(&failure);
            ExitCode::from(BAD)
        }
    }
}
