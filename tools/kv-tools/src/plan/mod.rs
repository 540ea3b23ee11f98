//! `kv-tools plan`: what a number of GPUs, their memory and a policy would make of a trace, before any of them is there.
//!
//! Each choice is played by a simulation of blocks and iterations alone: the pool of `kv-pool` decides what each GPU has, and
//! virtual time passes by the cost of the model and the link. It moves no bytes, so that a thousand GPUs fit into one
//! process. Beside each choice stands the best possible hit rate: Belady's optimum, with all memory of all GPUs as one cache.

mod against;
mod fleet;
mod gpu;
mod jobs;
mod model;
mod page;
mod rules;

use std::path::{Path, PathBuf};

use kv_pool::ConfigError;
use serde::Serialize;

pub use against::{Against, AgainstError};
pub use fleet::{Router, UnknownRouter, simulate};
pub use model::{Model, ModelError};
pub use rules::Rules;

use crate::policies::evict::Eviction;
use crate::policies::{CAPACITY_MAX_BLOCKS, Capacity, hit_rate_of_belady};
use kv_replay::json_file::{WriteError, check_files, write_atomically, write_json};
use kv_replay::report::{LatencyReport, OVERLOADED, grouped};
use kv_replay::trace::{Request, Trace};

/// Most GPUs of a choice.
pub const GPUS_MAX: u32 = 10_000;

/// Most choices of a plan.
pub const CHOICES_MAX: usize = 64;

/// What is chosen.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Choice {
    /// GPUs, each with the whole model and a cache of its own.
    pub gpus: u32,
    /// Blocks in the memory of each.
    pub device_blocks: u64,
    /// Blocks in host memory for each.
    pub host_blocks: u64,
    /// Blocks in files for each, below its host memory.
    pub disk_blocks: u64,
    /// The eviction policy of both.
    pub policy: Eviction,
}

/// What came of a choice.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ChoiceReport {
    /// The choice.
    pub choice: Choice,
    /// Blocks of prompts that were looked up.
    pub block_lookups: u64,
    /// Of these, blocks found.
    pub block_hits: u64,
    /// Their share, from 0 to 1.
    pub hit_rate: f64,
    /// Share of the lookups that were found in host memory.
    pub host_hit_rate: f64,
    /// Blocks that were read from files into host memory, for each lookup: also again, and in vain.
    pub disk_reads_per_lookup: f64,
    /// The most that a cache of all this memory together can find, knowing the future.
    pub best_hit_rate: f64,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Of these, tokens that did not have to be computed.
    pub prefill_tokens_saved: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Virtual time from the beginning of the trace to the last token.
    pub virtual_s: f64,
    /// Tokens generated in a second of it.
    pub generated_tokens_per_s: f64,
    /// Share of the time in which a GPU had something to do.
    pub busy: f64,
    /// Share of what the link to the device can carry that loads took, and of that to host memory that stores took.
    pub link_to_device: f64,
    /// See [`link_to_device`](Self::link_to_device).
    pub link_to_host: f64,
    /// From arrival to the first token.
    pub time_to_first_token_ms: LatencyReport,
    /// From the first token to the end, divided by the tokens behind the first.
    pub time_per_output_token_ms: LatencyReport,
    /// From arrival to the end.
    pub end_to_end_ms: LatencyReport,
    /// Seconds by which the wait for a first token grows in each second of arrivals.
    pub queue_growth: f64,
}

impl ChoiceReport {
    /// Whether more arrives than is served, so that requests wait the longer the later they come.
    #[must_use]
    pub fn is_overloaded(&self) -> bool {
        self.queue_growth >= OVERLOADED
    }
}

/// The reason why there is no plan.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Blocks that do not fit those of the trace.
    #[error("--block-tokens is {block_tokens}, expected a divisor or a multiple of {trace}")]
    BlockTokens {
        /// Tokens of a block.
        block_tokens: u64,
        /// Tokens of a hash id of the trace.
        trace: u64,
    },
    /// No GPUs, or more than can be simulated.
    #[error("{gpus} GPUs, expected 1 to {GPUS_MAX}")]
    Gpus {
        /// Their number.
        gpus: u32,
    },
    /// More choices than a table has room for, or none.
    #[error("{count} choices, expected 1 to {CHOICES_MAX}; give shorter lists")]
    Choices {
        /// Their number.
        count: usize,
    },
    /// A request that no GPU has room for.
    #[error(
        "request {request} of the trace needs {blocks} blocks, and a GPU has {device_blocks}; give it more (--device-blocks), or smaller ones"
    )]
    RequestTooLarge {
        /// The request, from 0.
        request: usize,
        /// Its blocks.
        blocks: u64,
        /// Those of a GPU.
        device_blocks: u64,
    },
    /// Files without host memory, which all that they have goes through.
    #[error(
        "{disk_blocks} blocks in files and none in host memory; give it some (--host-blocks, --host-memory)"
    )]
    DiskWithoutHost {
        /// The blocks in files.
        disk_blocks: u64,
    },
    /// Requests that were never admitted: the rules leave no room for any.
    #[error(
        "{requests} requests were never served with {max_batch} at once and {step_tokens} tokens of an iteration; give more (--max-batch, --step-tokens)"
    )]
    Unserved {
        /// Their number.
        requests: usize,
        /// Most requests at once.
        max_batch: u32,
        /// Most tokens of an iteration.
        step_tokens: u32,
    },
    /// More blocks than a pool can have.
    #[error("the blocks of a choice cannot be simulated")]
    Pool(#[source] ConfigError),
    /// A manager refuses what a choice asks of it.
    #[error("a GPU of a choice cannot be simulated")]
    Manager(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A run to compare with cannot be used.
    #[error(transparent)]
    Against(#[from] AgainstError),
    /// A result cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

cuda_driver::messages::one_line_debug!(PlanError);

impl PlanError {
    pub(super) fn manager(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Manager(Box::new(error))
    }
}

/// What is to be planned, and where it is written to.
#[derive(Clone, Copy, Debug)]
pub struct PlanOptions<'a> {
    /// Files that the other options were read from, none of which is written.
    pub read: &'a [PathBuf],
    /// The requests.
    pub trace: &'a Trace,
    /// What all choices have in common.
    pub rules: &'a Rules,
    /// The choices.
    pub choices: &'a [Choice],
    /// What was assumed, a sentence each.
    pub assumed: &'a [String],
    /// The report of a run to compare with.
    pub against: Option<&'a Path>,
    /// Milliseconds within which 99 in 100 requests are to have their first token.
    pub target_ms: Option<u64>,
    /// The page to be written.
    pub out: Option<&'a Path>,
    /// The file for the plan as JSON.
    pub json: Option<&'a Path>,
}

/// A plan as JSON.
#[derive(Serialize)]
struct PlanReport<'a> {
    assumed: &'a [String],
    choices: Vec<serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<Against>,
}

/// Plays every choice, writes what is asked for, each file completely or not at all, and returns what to print. `tell` hears
/// how many choices are done.
///
/// # Errors
///
/// [`PlanError`]. Nothing was written if an input is wrong.
pub fn run(options: &PlanOptions<'_>, mut tell: impl FnMut(usize)) -> Result<String, PlanError> {
    let PlanOptions { read, trace, rules, choices, assumed, against, target_ms, out, json } =
        *options;
    if !(1..=CHOICES_MAX).contains(&choices.len()) {
        return Err(PlanError::Choices { count: choices.len() });
    }
    check_files(read.iter().map(PathBuf::as_path).chain(against), out.into_iter().chain(json))?;
    let measured = against.map(|path| against::Measured::read(path, choices)).transpose()?;
    let mut reports = Vec::with_capacity(choices.len());
    choices.iter().try_for_each(|choice| fleet::check(trace, choice, rules).map(drop))?;
    let looked_up = looked_up(trace, rules);
    let mut bests: Vec<(u64, f64)> = Vec::new();
    for choice in choices {
        let mut report = simulate(trace, choice, rules)?;
        let blocks = choice.device_blocks.saturating_add(choice.host_blocks);
        let blocks = blocks.saturating_add(choice.disk_blocks);
        let blocks = blocks.saturating_mul(choice.gpus.into());
        let known = bests.iter().find(|best| best.0 == blocks).map(|best| best.1);
        report.best_hit_rate = known.unwrap_or_else(|| best(&looked_up, rules, blocks));
        bests.push((blocks, report.best_hit_rate));
        reports.push(report);
        tell(reports.len());
    }
    let against = measured.map(|measured| measured.compare(&reports[0]));
    if let Some(path) = out {
        write_atomically(
            path,
            page::page(&reports, rules, assumed, (against.as_ref(), target_ms)).as_bytes(),
        )?;
    }
    let mut text = table(&reports);
    page::verdicts(&reports, target_ms).iter().for_each(|one| text.push_str(&format!("{one}\n")));
    text.push_str("\nAssumed:\n");
    assumed.iter().for_each(|one| text.push_str(&format!("- {one}\n")));
    if let Some(against) = &against {
        text.push_str(&format!("\n{against}"));
    }
    if let Some(path) = json {
        let choices = reports.iter().map(|report| report.json(rules)).collect();
        write_json(path, &PlanReport { assumed, choices, against })?;
    }
    if let Some(path) = out {
        text.push_str(&format!("{} is written.\n", path.display()));
    }
    Ok(text)
}

/// The trace as far as its blocks are looked up: without the last token of each prompt, and without blocks that are not full.
fn looked_up(trace: &Trace, rules: &Rules) -> Trace {
    let unit = trace.block_tokens.max(u64::from(rules.block_tokens));
    let shortened = trace.requests.iter().map(|request| {
        let input_length = request.input_length.saturating_sub(1) / unit * unit;
        let ids = (input_length / trace.block_tokens) as usize;
        let hash_ids = request.hash_ids[..ids.min(request.hash_ids.len())].to_vec();
        Request { input_length, hash_ids, ..request.clone() }
    });
    Trace { block_tokens: trace.block_tokens, ..Trace::new(shortened.collect()) }
}

/// Belady's hit rate with so many blocks.
fn best(looked_up: &Trace, rules: &Rules, blocks: u64) -> f64 {
    let tokens = blocks.saturating_mul(rules.block_tokens.into());
    let ids = (tokens / looked_up.block_tokens).clamp(1, CAPACITY_MAX_BLOCKS as u64);
    Capacity::new(ids as usize).map_or(0.0, |capacity| hit_rate_of_belady(looked_up, capacity))
}

impl ChoiceReport {
    fn json(&self, rules: &Rules) -> serde_json::Value {
        let Choice { gpus, device_blocks, host_blocks, disk_blocks, policy } = self.choice;
        serde_json::json!({
            "gpus": gpus,
            "device_blocks": device_blocks,
            "host_blocks": host_blocks,
            "host_bytes": host_blocks.saturating_mul(rules.block_bytes),
            "disk_blocks": disk_blocks,
            "disk_bytes": disk_blocks.saturating_mul(rules.block_bytes),
            "policy": policy.name(),
            "block_lookups": self.block_lookups,
            "block_hits": self.block_hits,
            "hit_rate": self.hit_rate,
            "host_hit_rate": self.host_hit_rate,
            "disk_reads_per_lookup": self.disk_reads_per_lookup,
            "best_hit_rate": self.best_hit_rate,
            "prompt_tokens": self.prompt_tokens,
            "prefill_tokens_saved": self.prefill_tokens_saved,
            "generated_tokens": self.generated_tokens,
            "generated_tokens_per_s": self.generated_tokens_per_s,
            "virtual_s": self.virtual_s,
            "busy": self.busy,
            "link_to_device": self.link_to_device,
            "link_to_host": self.link_to_host,
            "time_to_first_token_ms": self.time_to_first_token_ms,
            "time_per_output_token_ms": self.time_per_output_token_ms,
            "queue_growth": self.queue_growth,
            "overloaded": self.is_overloaded(),
            "end_to_end_ms": self.end_to_end_ms,
        })
    }
}

/// A line for each choice.
fn table(reports: &[ChoiceReport]) -> String {
    let mut text = String::from(
        "   GPUs     blocks       host       disk  policy          hit    best    tokens saved     busy   link  TTFT p50    p99 (ms)  TPOT p50    p99 (ms)  tokens/s\n",
    );
    for report in reports {
        let Choice { gpus, device_blocks, host_blocks, disk_blocks, policy } = report.choice;
        let link = report.link_to_device.max(report.link_to_host);
        text.push_str(&format!(
            "{gpus:>7}{device_blocks:>11}{host_blocks:>11}{disk_blocks:>11}  {:<12}{:>6.1} %{:>6.1} %{:>16}{:>7.1} %{:>5.1} %{:>10.0}{:>12.0}{:>10.1}{:>12.1}{:>10.0}\n",
            policy.name(),
            100.0 * report.hit_rate,
            100.0 * report.best_hit_rate,
            grouped(report.prefill_tokens_saved),
            100.0 * report.busy,
            100.0 * link,
            report.time_to_first_token_ms.p50,
            report.time_to_first_token_ms.p99,
            report.time_per_output_token_ms.p50,
            report.time_per_output_token_ms.p99,
            report.generated_tokens_per_s,
        ));
    }
    text
}
