//! The subcommands, and why one fails.

use std::io;

use indicatif::{ProgressBar, ProgressStyle};
use kv_replay::command_line;
use kv_replay::device::ProfileReadError;
use kv_replay::generate::{self, GenerateError};
use kv_replay::json_file::{WriteError, check_files, write_json};
use kv_replay::shape::ShapeError;
use kv_replay::trace::TraceError;
use kv_tools::convert::{self, ConvertError};
use kv_tools::doctor::{AREAS, DoctorOptions, examine};
use kv_tools::page::{self, ReportError, ReportOptions};
use kv_tools::plan::{self, ModelError, PlanError, PlanOptions};
use kv_tools::policies::{self, PoliciesError, PoliciesOptions};

use crate::cli::{Command, ConvertArgs, DoctorArgs, PageArgs, PoliciesArgs};
use crate::plan_args::{Asked, PlanArgs};

/// The result of a command that completed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Outcome {
    /// There was no mistake.
    Clean,
    /// The machine lacks something.
    Lacking,
}

/// The reason why a command did not complete.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("--requests is 0, expected at least 1")]
    NoRequests,
    #[error(transparent)]
    Profile(#[from] ProfileReadError),
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error(transparent)]
    Generate(#[from] GenerateError),
    #[error(transparent)]
    Policies(#[from] PoliciesError),
    #[error(transparent)]
    Convert(#[from] ConvertError),
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Shape(ShapeError),
    #[error("{option} is 0, expected at least 1")]
    PlanZero { option: &'static str },
    #[error(
        "--rate and --hours make {requests} requests, more than the largest workload, {}",
        generate::REQUESTS_MAX
    )]
    PlanHours { requests: u64 },
    #[error(
        "no rates: give --model and --gpu h100 or h200, or --prefill-rate and --decode-step-us, both above 0"
    )]
    NoRates,
    #[error(
        "{model} has {needed:.0} GB of weights, which leave no room for a block on --gpu {gpu}; give --tensor-parallel, or --device-blocks"
    )]
    NoMemory { model: String, gpu: String, needed: f64 },
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("cannot write to standard output")]
    Stdout(#[source] io::Error),
}

/// Runs the command.
pub(crate) fn execute(command: &Command) -> Result<Outcome, Failure> {
    match command {
        Command::Policies(args) => compare_policies(args),
        Command::Convert(args) => convert(args),
        Command::Page(args) => draw(args),
        Command::Plan(args) => plan(args),
        Command::Doctor(args) => doctor(args),
    }
}

fn convert(args: &ConvertArgs) -> Result<Outcome, Failure> {
    let bar = bar(args.traces.len(), "files");
    let files = (args.output.as_deref(), args.json.as_deref());
    let told =
        convert::run(&args.traces, &args.options(), files, |done| bar.set_position(done as u64));
    bar.finish_and_clear();
    say(&told?)?;
    Ok(Outcome::Clean)
}

fn draw(args: &PageArgs) -> Result<Outcome, Failure> {
    let options = ReportOptions {
        runs: &args.runs,
        out: &args.out,
        trace_events: args.trace_events.as_deref(),
        json: args.json.as_deref(),
    };
    say(&page::run(&options)?)?;
    Ok(Outcome::Clean)
}

fn compare_policies(args: &PoliciesArgs) -> Result<Outcome, Failure> {
    let options = PoliciesOptions {
        traces: &args.trace,
        reading: &args.reading.options(),
        capacities: &args.capacities,
        host_capacities: args.host_capacities.as_deref(),
        half: args.half,
        saved: args.saved,
        hints: args.hints,
        json: args.json.as_deref(),
    };
    let bar = bar(0, "capacities");
    let told = policies::run(&options, |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    say(&told?)?;
    Ok(Outcome::Clean)
}

fn doctor(args: &DoctorArgs) -> Result<Outcome, Failure> {
    check_files([], args.json.as_deref())?;
    let DoctorArgs { device, folder, disk_test, json } = args;
    let bar = bar(AREAS, "areas");
    let options = DoctorOptions { device, folder, disk_bytes: disk_test.0 };
    let report = examine(&options, |done| bar.set_position(done as u64));
    bar.finish_and_clear();
    if let Some(path) = json {
        write_json(path, &report)?;
    }
    say(&report.text())?;
    Ok(if report.problems == 0 { Outcome::Clean } else { Outcome::Lacking })
}

fn plan(args: &PlanArgs) -> Result<Outcome, Failure> {
    let Asked { trace, rules, choices, assumed } = args.asked()?;
    let (against, out, json) = (args.against.as_deref(), args.out.as_deref(), args.json.as_deref());
    let bar = bar(choices.len(), "choices");
    let (trace, rules, choices, assumed) = (&trace, &rules, &choices[..], &assumed[..]);
    let read = &args.reads();
    let options = PlanOptions {
        read,
        trace,
        rules,
        choices,
        assumed,
        against,
        target_ms: args.target_ttft_ms,
        out,
        json,
    };
    let planned = plan::run(&options, |done| bar.set_position(done as u64));
    bar.finish_and_clear();
    say(&planned?)?;
    Ok(Outcome::Clean)
}

/// A progress bar: on standard error, and only if that is a terminal.
fn bar(all: usize, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(all as u64);
    let template =
        format!("{{elapsed:>4}} [{{bar:32}}] {{pos}}/{{len}} {what}, {{per_sec}}, {{eta}} left");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.tick();
    bar
}

/// Writes `text` to standard output.
fn say(text: &str) -> Result<(), Failure> {
    command_line::say(text).map_err(Failure::Stdout)
}
