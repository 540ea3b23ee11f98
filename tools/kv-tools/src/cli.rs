//! The command line: subcommands, flags and their defaults.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use kv_replay::command_line::{ReadArgs, whole};
use kv_replay::device::DeviceSpec;
use kv_replay::disk::ByteSize;
use kv_tools::convert::ConvertOptions;
use kv_tools::policies::Half;

use crate::plan_args::PlanArgs;

const AFTER_HELP: &str = "\
Exit status:
  0  all is well
  2  bad input, or something that the machine lacks";

/// Plans, eviction policies, other formats of traces, a page of reports and a look at the machine, for traces and reports of kv-replay.
#[derive(Debug, Parser)]
#[command(version, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Compares eviction policies and Belady's optimum on a trace, one request at a time, exactly.
    Policies(PoliciesArgs),
    /// Converts traces in public formats to the format of kv-replay, with the reason if one cannot be.
    Convert(ConvertArgs),
    /// Draws the JSON reports of runs as one HTML page, and says what limited them.
    Page(PageArgs),
    /// Says what so many GPUs, so much memory and a policy would make of a trace, in virtual time.
    Plan(Box<PlanArgs>),
    /// Looks at this machine: driver, devices, links, memory, limits and a disk, each with what to do about it.
    Doctor(DoctorArgs),
}

const POLICIES_HELP: &str = "\
Examples:
  kv-tools policies --trace chat.jsonl
  kv-tools policies --trace chat.jsonl --capacities 1000,10000 --host-capacities 30000 --half second
  kv-tools policies --trace chat.jsonl --trace agents.jsonl --hints --json rates.json";

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true, after_help = POLICIES_HELP)]
pub(crate) struct PoliciesArgs {
    /// A trace, in any format that `convert` reads; gzip and zstd are unpacked. May be repeated.
    #[arg(long, value_name = "FILE", required = true)]
    pub(crate) trace: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadArgs,
    /// Cache sizes to compare, in blocks of a hash id.
    #[arg(
        long,
        value_name = "LIST",
        default_value = "1000,3000,10000,30000,50000,100000",
        allow_hyphen_values = true
    )]
    pub(crate) capacities: String,
    /// Also simulates host memory of these sizes, in blocks, below each of the capacities: hits in both, and blocks
    /// stored and brought back.
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    pub(crate) host_capacities: Option<String>,
    /// Requests whose lookups count: first, second or both. The first half is served in any case.
    #[arg(long, value_name = "HALF", default_value_t)]
    pub(crate) half: Half,
    /// Also searches how much smaller HitDensity's cache may be for LRU's hit rate.
    #[arg(long)]
    pub(crate) saved: bool,
    /// Give hints, derived from the trace, about the blocks of requests that are done: that their
    /// session is over, or waits for a tool at most 30 s.
    #[arg(long)]
    pub(crate) hints: bool,
    /// Writes the hit rates to this file as JSON, completely or not at all.
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
  kv-tools convert AzureLLMInferenceTrace_conv.csv --output azure.jsonl
  kv-tools convert sessions/*.json --sessions-within 14400 --output agents.jsonl
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
    pub(crate) fn options(&self) -> ConvertOptions {
        let sessions_within_ms = u64::from(self.sessions_within) * 1000;
        ConvertOptions { reading: self.reading.options(), sessions_within_ms, seed: self.seed }
    }
}

const DOCTOR_HELP: &str = "\
Exit status: 0 if a run would work, with or without notes; 2 if there is a problem. Nothing is left behind.

Examples:
  kv-tools doctor
  kv-tools doctor --device sim
  kv-tools doctor --folder /mnt/nvme --disk-test 4GiB --json doctor.json";

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true, after_help = DOCTOR_HELP)]
pub(crate) struct DoctorArgs {
    /// Devices that a run would use: cuda for every GPU, GPUs such as cuda:0,cuda:1, or sim for none.
    #[arg(long, value_name = "DEVICES", default_value_t = DeviceSpec::EveryCuda)]
    pub(crate) device: DeviceSpec,
    /// Folder that `kv-replay run --disk` would use.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) folder: PathBuf,
    /// Bytes that are written there and read back, to measure the disk; 0 to measure nothing.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub(crate) disk_test: ByteSize,
    /// Writes the findings to this file as JSON, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

const PAGE_HELP: &str = "\
The page needs no network and no other file. Reports of runs with --series have charts and a timeline; others have totals.

Examples:
  kv-replay run --trace chat.jsonl --series --json chat.json
  kv-tools page chat.json --out chat.html
  kv-tools page small.json large.json --out both.html --trace-events both.trace.json";

#[derive(Args, Debug)]
#[command(after_help = PAGE_HELP)]
pub(crate) struct PageArgs {
    /// JSON reports of runs, side by side; at most 8.
    #[arg(value_name = "RUN.json", required = true)]
    pub(crate) runs: Vec<PathBuf>,
    /// Writes the page to this file, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Also writes the timelines to this file, in the format that Perfetto and chrome://tracing open.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace_events: Option<PathBuf>,
    /// Also writes to this file as JSON what limited each run and what would help.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
