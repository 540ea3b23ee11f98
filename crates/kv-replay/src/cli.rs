//! The command line: subcommands, flags and their defaults.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use kv_replay::command_line::whole;

use crate::run_args::RunArgs;

const AFTER_HELP: &str = "\
Without a command, kv-replay generates a workload and replays it on a simulated device, verifying every byte.

Exit status:
  0  all is well
  1  the engine or the driver failed
  2  bad input, or something that the machine lacks
  3  a byte was found that does not belong to its request";

/// Replays LLM request traces through mapped, pooled, staged and transferred KV memory and verifies
/// every byte.
#[derive(Debug, Parser)]
#[command(version, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Replays a trace, or a generated workload, and reports the results.
    Run(Box<RunArgs>),
    /// Generates a workload in the trace format.
    Generate(GenerateArgs),
    /// Carries out the plans of a run with --workers, which starts it.
    #[command(hide = true)]
    Worker,
}

const GENERATE_HELP: &str = "\
Examples:
  kv-replay generate --requests 1000 --seed 7 --output chat.jsonl
  kv-replay generate --requests 10 | head";

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true, after_help = GENERATE_HELP)]
pub(crate) struct GenerateArgs {
    /// Number of requests.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = whole::<u64>)]
    pub(crate) requests: u64,
    /// Seed of the workload.
    #[arg(long, value_name = "S", default_value_t = 0, value_parser = whole::<u64>)]
    pub(crate) seed: u64,
    /// Writes the workload to this file, completely or not at all, instead of to standard output.
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Writes what it has to this file as JSON, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use kv_replay::config::RunConfig;
    use kv_replay::device::DeviceSpec;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_defaults_are_those_of_the_library() {
        let cli = Cli::try_parse_from(["kv-replay", "run"]).unwrap();
        let Some(Command::Run(args)) = cli.command else { panic!("run, found {cli:?}") };
        assert_eq!(args.config(), RunConfig::default());
        assert_eq!(args.device.device, DeviceSpec::default());
    }

    #[test]
    fn a_run_has_few_options() {
        let program = Cli::command();
        let run = program.find_subcommand("run").unwrap();
        assert!(run.get_arguments().count() <= 60, "{}", run.get_arguments().count());
    }
}
