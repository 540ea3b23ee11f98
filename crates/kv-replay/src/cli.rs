//! The command line: subcommands, flags and their defaults.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use kv_replay::command_line::{ReadArgs, whole};
use kv_replay::trace::ReadOptions;

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
    /// Converts traces in public formats to the trace format, with the reason if one cannot be.
    Convert(ConvertArgs),
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

const CONVERT_HELP: &str = "\
Formats, told by their content; gzip and zstd are unpacked:
  trace     one JSON object a line, as the Mooncake traces: timestamp (ms), input_length, output_length, hash_ids
  Bailian   the same with chat_id, and timestamp in seconds; 16 tokens a hash id
  WEKA      a session of a coding agent as one JSON document, or several, with nested sub-agents; says its tokens a hash id
  Azure     CSV with TIMESTAMP, ContextTokens, GeneratedTokens: lengths only, every prompt is unique
  BurstGPT  CSV with Timestamp, Request tokens, Response tokens: lengths only, every prompt is unique

Examples:
  kv-replay convert AzureLLMInferenceTrace_conv.csv --output azure.jsonl
  kv-replay convert sessions/*.json --sessions-within 14400 --output agents.jsonl
  kv-replay run --trace agents.jsonl --trace-block-tokens 64";

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true, after_help = CONVERT_HELP)]
pub(crate) struct ConvertArgs {
    /// Traces in any of the formats below. Several are joined in the order of arrival.
    #[arg(value_name = "FILE", required = true)]
    pub(crate) traces: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadArgs,
    /// Has sessions whose times are their own begin at random moments within S seconds.
    #[arg(long, value_name = "S", default_value_t = 0, value_parser = whole::<u32>)]
    pub(crate) sessions_within: u32,
    /// Seed of these moments.
    #[arg(long, value_name = "S", default_value_t = 0, value_parser = whole::<u64>)]
    pub(crate) seed: u64,
    /// Writes the trace to this file, completely or not at all, instead of to standard output.
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Writes what it has to this file as JSON, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl ConvertArgs {
    pub(crate) fn options(&self) -> ReadOptions {
        let sessions_within_ms = u64::from(self.sessions_within) * 1000;
        ReadOptions { sessions_within_ms, seed: self.seed, ..self.reading.options() }
    }
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
