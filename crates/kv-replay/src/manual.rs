//! What a system installs beside the program: completions of shells, and manual pages.

use std::io;

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::cli::Cli;

/// The completions of a shell.
pub(crate) fn completions(shell: Shell) -> Vec<u8> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "kv-replay", &mut text);
    text
}

/// The page of a subcommand, or of the program; none if there is no such subcommand.
pub(crate) fn page(subcommand: Option<&str>) -> io::Result<Option<Vec<u8>>> {
    let mut program = Cli::command();
    program.build();
    let command = match subcommand {
        None => program,
        Some(name) => match program.find_subcommand(name).filter(|found| !found.is_hide_set()) {
            None => return Ok(None),
            Some(found) => found.clone(),
        },
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(command).render(&mut text)?;
    Ok(Some(text))
}
