//! The results of a run, as a record for programs and as a summary for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use kv_cache::TransportStats;
use serde::Serialize;

use crate::config::{RunConfig, Verify};
use crate::disk::DiskReport;
use crate::memory::MemoryReport;
use crate::model_line::model_line;
use crate::place::PlaceReport;
use crate::shape::{Dtype, ShapeError};

/// Maximum number of corrupt blocks kept with all details. Further ones are only counted.
pub const CORRUPTIONS_KEPT_MAX: usize = 32;

/// Maximum number of corrupt blocks in the summary.
const CORRUPTIONS_SHOWN_MAX: usize = 5;

/// Maximum number of replaced worker processes in the summary.
const RESTARTS_SHOWN_MAX: usize = 5;

/// Maximum number of driver calls in the summary, the most frequent first.
const CALLS_SHOWN_MAX: usize = 4;

/// The results of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunReport {
    /// Number of requests of the trace.
    pub requests: u64,
    /// Number of requests that finished.
    pub finished: u64,
    /// Number of blocks looked up in the prefix index.
    pub block_lookups: u64,
    /// Number of lookups that hit, in device or host memory.
    pub block_hits: u64,
    /// Share of lookups that hit, from 0 to 1.
    pub hit_rate: f64,
    /// Number of blocks whose device memory was reused for other content.
    pub blocks_evicted: u64,
    /// Number of blocks copied from device to host memory.
    pub blocks_offloaded: u64,
    /// Number of blocks copied from host back to device memory.
    pub blocks_onboarded: u64,
    /// The requested transport between device and host memory.
    pub transport: &'static str,
    /// Batches and blocks of each transport, by its name. Unused transports are omitted.
    pub transports: BTreeMap<&'static str, WayReport>,
    /// Bytes transferred between host and device, or moved within a device.
    pub bytes_transferred: u64,
    /// Number of iterations of the engine.
    pub iterations: u64,
    /// Number of prompt tokens of the finished requests.
    pub prompt_tokens: u64,
    /// Number of tokens generated for them.
    pub generated_tokens: u64,
    /// Number of prompt tokens that were not written because the cache held them.
    pub prefix_tokens_reused: u64,
    /// Number of batches in which requests were admitted.
    pub admissions: u64,
    /// The largest number of requests admitted in one batch.
    pub most_admitted_at_once: u64,
    /// Number of times that a request was preempted to make room for others.
    pub preemptions: u64,
    /// Number of times that tokens of a request were staged before the ids of its last step were known.
    pub staged_behind_open_ids: u64,
    /// Number of tokens that a draft model has computed.
    pub draft_model_tokens: u64,
    /// Number of requests that were cancelled.
    pub cancelled: u64,
    /// Number of branches that forks made.
    pub forks: u64,
    /// Number of times that the budget of device blocks was changed.
    pub budget_changes: u64,
    /// The fewest device blocks with memory after the first budget. Where groups share memory, see
    /// [`fewest_granules`](crate::memory::SharedReport::fewest_granules) instead.
    pub fewest_device_blocks: u64,
    /// Number of times that a request was suspended to host memory.
    pub suspensions: u64,
    /// Number of blocks copied within the device because a fork shared them.
    pub blocks_copied_on_write: u64,
    /// Number of blocks of suspended requests copied to host memory.
    pub blocks_suspended: u64,
    /// Number of blocks that were read back and compared.
    pub verified_blocks: u64,
    /// Number of these that held a byte which does not belong to their request.
    pub corrupt_blocks: u64,
    /// The first [`CORRUPTIONS_KEPT_MAX`] corrupt blocks.
    pub corruptions: Vec<CorruptBlock>,
    /// Pinned host memory allocated after the first four iterations, in bytes; 0 in a steady state.
    /// `None` for a run with fewer iterations, which has no steady state.
    pub pinned_bytes_allocated_after_warmup: Option<u64>,
    /// Number of pages of device memory mapped ahead of need.
    pub pages_mapped_ahead: u64,
    /// Number of pages of device memory mapped by the call that needed them.
    pub pages_mapped_inline: u64,
    /// Number of calls that found too few ready blocks and mapped pages themselves.
    pub growth_stalls: u64,
    /// The device memory that blocks in use took; `None` for a run over contiguous ranges.
    pub memory: Option<MemoryReport>,
    /// The tier below host memory; `None` without one.
    pub tiers: Option<TiersReport>,
    /// The files below host memory; absent without any.
    #[serde(flatten)]
    pub disk: Option<DiskReport>,
    /// The figures of a run over contiguous ranges; `None` for a run over blocks.
    pub contiguous: Option<RangesReport>,
    /// Number of driver calls, by name.
    pub driver_calls: BTreeMap<String, u64>,
    /// The worker processes; `None` in a run whose devices are this process's.
    pub workers: Option<WorkersReport>,
    /// The devices.
    pub device: String,
    /// The division of the model over several devices; `None` on one device.
    pub placement: Option<PlaceReport>,
    /// Shape of the KV.
    pub shape: ReportShape,
    /// Maximum number of blocks in device memory; where groups share it, of the first group if it had all.
    pub device_blocks: u64,
    /// Maximum number of blocks in host memory.
    pub host_blocks: u64,
    /// Largest number of device blocks in use at once.
    pub peak_device_blocks: u64,
    /// Maximum number of requests at once.
    pub max_batch: u32,
    /// Maximum number of tokens that one iteration writes.
    pub step_tokens: u32,
    /// Name of the eviction policy.
    pub policy: &'static str,
    /// How many of the read blocks were compared.
    pub verify: Verify,
    /// Seed of all random choices of the run.
    pub seed: u64,
    /// Seconds to build the cache: reserving addresses, pinning the host tier, loading the kernels.
    pub setup_s: f64,
    /// Seconds from the first iteration until everything was compared and released.
    pub wall_s: f64,
    /// On simulated devices: virtual seconds for the same period, that is the time of driver calls
    /// and devices on the machine of the profile. It does not include the engine's own work between
    /// calls.
    pub predicted_s: Option<f64>,
}

/// The figures of contiguous ranges.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct RangesReport {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Maximum number of pages of device memory.
    pub limit_pages: u64,
    /// Number of calls that asked for memory under a range's next tokens.
    /// [`RunReport::growth_stalls`] of them found it missing and mapped it themselves.
    pub growth_calls: u64,
    /// Number of pages that the driver created.
    pub pages_created: u64,
    /// Number of times that a page was mapped.
    pub pages_mapped: u64,
    /// Number of times that a request got a page which another one had used before: mapped as it
    /// was left, or unmapped there and mapped again.
    pub pages_recycled: u64,
    /// Largest number of bytes mapped at once, for running requests and for those that have left.
    pub peak_mapped_bytes: u64,
    /// Largest number of bytes of tokens in use at once.
    pub peak_used_bytes: u64,
}

/// What came of a tier below host memory, at all workers together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TiersReport {
    /// Blocks that every worker stored.
    pub blocks_stored: u64,
    /// Blocks that some worker did not store.
    pub blocks_unstored: u64,
    /// Blocks that came back right at every worker: hits below host memory.
    pub blocks_loaded: u64,
    /// Blocks on their way that were forgotten, or whose worker was lost.
    pub blocks_void: u64,
    /// Names that the tier dropped by itself.
    pub names_dropped: u64,
    /// Blocks of loads that were wrong at some worker, by fault. Each was a miss.
    pub faults: BTreeMap<&'static str, u64>,
    /// Number of times that a request waited for a load.
    pub waits: u64,
    /// Number of these waits that a deadline ended.
    pub waits_late: u64,
    /// Host blocks that tickets held when the run had ended.
    pub quarantined_at_end: u64,
}

/// The worker processes of a run.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct WorkersReport {
    /// Number of workers.
    pub workers: u64,
    /// Processes that were replaced by new ones, in order.
    pub restarts: Vec<RestartReport>,
    /// Number of steps that were in flight when a process was replaced: they count for nothing.
    pub steps_voided: u64,
    /// Processes that were stopped for a while by a drill, in order.
    pub stops: Vec<StopReport>,
}

/// A worker process that was replaced by a new one.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct RestartReport {
    /// The worker, counted from 0.
    pub worker: u64,
    /// The latest step that was staged by then.
    pub step: u64,
    /// What was wrong with the process.
    pub reason: String,
}

/// A worker process that was stopped for a while. The numbers are 0 if it did not go on.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct StopReport {
    /// The worker, counted from 0.
    pub worker: u64,
    /// The step whose plan it did not get before it went on.
    pub step: u64,
    /// The latest step that was staged while it was stopped.
    pub staged: u64,
    /// The latest step that all workers had completed when it went on.
    pub completed: u64,
}

/// The use of one transport between device and host memory, over all devices.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct WayReport {
    /// Number of batches.
    pub batches: u64,
    /// Number of blocks, or of parts of blocks if several devices hold a part each.
    pub blocks: u64,
}

/// Shape of a run's KV.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct ReportShape {
    /// Number of layers.
    pub layers: u32,
    /// Number of heads of K, and of V, in one layer.
    pub kv_heads: u32,
    /// Number of elements of one head.
    pub head_size: u32,
    /// Type of one element.
    pub dtype: Dtype,
    /// Number of tokens of a block.
    pub block_tokens: u32,
    /// Bytes of a block in all layers, K and V.
    pub block_bytes: u64,
    /// Tokens of the sliding window of layers that have one.
    pub window: Option<u32>,
    /// Layers that have one.
    pub window_layers: u32,
    /// Layers with a recurrent state, beside those.
    pub state_layers: u32,
    /// Layers of a draft model, beside those.
    pub draft_layers: u32,
}

/// A block that held a byte which does not belong to its request.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct CorruptBlock {
    /// The request, counted from 0 in the order of the trace.
    pub request: u64,
    /// The iteration that read the block.
    pub iteration: u64,
    /// Index of the block in the request, from 0.
    pub block: u64,
    /// Id of the device block in its block table.
    pub physical_block: u64,
    /// Index of the device among those that hold a part of the cache.
    pub device: u32,
    /// The found and the expected content.
    pub message: String,
}

impl RunReport {
    /// The report of a run before it starts: the options of `config`, and zeros.
    ///
    /// # Errors
    ///
    /// [`ShapeError`] for an invalid shape.
    pub fn new(config: &RunConfig, device: &str) -> Result<Self, ShapeError> {
        let shape = config.shape;
        Ok(Self {
            requests: 0,
            finished: 0,
            block_lookups: 0,
            block_hits: 0,
            hit_rate: 0.0,
            blocks_evicted: 0,
            blocks_offloaded: 0,
            blocks_onboarded: 0,
            transport: config.transport.name(),
            transports: BTreeMap::new(),
            bytes_transferred: 0,
            iterations: 0,
            prompt_tokens: 0,
            generated_tokens: 0,
            prefix_tokens_reused: 0,
            admissions: 0,
            most_admitted_at_once: 0,
            preemptions: 0,
            staged_behind_open_ids: 0,
            draft_model_tokens: 0,
            cancelled: 0,
            forks: 0,
            budget_changes: 0,
            fewest_device_blocks: 0,
            suspensions: 0,
            blocks_copied_on_write: 0,
            blocks_suspended: 0,
            verified_blocks: 0,
            corrupt_blocks: 0,
            corruptions: Vec::new(),
            pinned_bytes_allocated_after_warmup: None,
            pages_mapped_ahead: 0,
            pages_mapped_inline: 0,
            growth_stalls: 0,
            memory: None,
            tiers: None,
            disk: None,
            contiguous: None,
            driver_calls: BTreeMap::new(),
            workers: None,
            device: device.to_owned(),
            placement: None,
            shape: ReportShape {
                layers: shape.layers,
                kv_heads: shape.kv_heads,
                head_size: shape.head_size,
                dtype: shape.dtype,
                block_tokens: config.block_tokens,
                block_bytes: config.block_bytes()?,
                window: config.window,
                window_layers: config.window_layers(),
                state_layers: config.state_layers,
                draft_layers: config.draft_layers,
            },
            device_blocks: config.device_blocks,
            host_blocks: config.host_blocks,
            peak_device_blocks: 0,
            max_batch: config.max_batch,
            step_tokens: config.step_tokens,
            policy: config.policy.name(),
            verify: config.verify,
            seed: config.seed,
            setup_s: 0.0,
            wall_s: 0.0,
            predicted_s: None,
        })
    }

    /// Records the transports used so far.
    pub(crate) fn add_transports(&mut self, stats: &TransportStats) {
        for (name, carried) in stats.by_name().into_iter().filter(|(_, way)| way.blocks > 0) {
            let way = self.transports.entry(name).or_default();
            way.batches += carried.batches;
            way.blocks += carried.blocks;
        }
    }

    /// Counts a corrupt block, and keeps it if it is one of the first.
    pub fn add_corruption(&mut self, corrupt: CorruptBlock) {
        self.corrupt_blocks += 1;
        if self.corruptions.len() < CORRUPTIONS_KEPT_MAX {
            self.corruptions.push(corrupt);
        }
    }

    /// A summary of a few lines. The last ones say whether every byte was right.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut text = format!(
            "{} of {} requests finished on {} in {:.1} s\n\n",
            grouped(self.finished),
            grouped(self.requests),
            self.device,
            self.wall_s,
        );
        // Contiguous ranges share, evict and offload nothing.
        let of_blocks = |line: fn(&Self) -> String| {
            self.contiguous.map_or_else(|| line(self), |_| String::new())
        };
        for (name, what) in [
            ("model", model_line(&self.shape)),
            ("tokens", self.tokens_line()),
            ("lookups", of_blocks(Self::lookups_line)),
            ("memory", of_blocks(Self::memory_line)),
            ("moves", of_blocks(Self::moves_line)),
            ("transport", of_blocks(Self::transport_line)),
            ("ranges", self.contiguous.map_or_else(String::new, |ranges| self.ranges_line(ranges))),
            ("steps", self.steps_line()),
            ("life", self.life_line()),
            ("tiers", self.tiers_line()),
            ("disk", self.disk_line()),
            ("workers", self.workers_line()),
            ("driver", self.calls_line()),
            ("verified", self.verdict()),
        ] {
            if !what.is_empty() {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "  {name:<10}{what}");
            }
        }
        if let Some(predicted_s) = self.predicted_s {
            let _ = writeln!(
                text,
                "  predicted {predicted_s:.3} s of calls and device work on such hardware; the engine's own work comes on top"
            );
        }
        self.explain_placement(&mut text);
        self.name_restarts(&mut text);
        self.name_corruptions(&mut text);
        text
    }

    fn tokens_line(&self) -> String {
        format!(
            "{} prompt, of which {} came from the cache; {} generated",
            grouped(self.prompt_tokens),
            grouped(self.prefix_tokens_reused),
            grouped(self.generated_tokens),
        )
    }

    fn lookups_line(&self) -> String {
        format!(
            "{} blocks, {} hit ({:.1} %)",
            grouped(self.block_lookups),
            grouped(self.block_hits),
            100.0 * self.hit_rate,
        )
    }

    fn memory_line(&self) -> String {
        format!(
            "{} device blocks, {} in use at most; {} host blocks; {}",
            grouped(self.device_blocks),
            grouped(self.peak_device_blocks),
            grouped(self.host_blocks),
            self.pinned(),
        )
    }

    /// What was pinned after the warm-up.
    fn pinned(&self) -> String {
        match self.pinned_bytes_allocated_after_warmup {
            Some(pinned) => format!("{} pinned after warm-up", bytes(pinned)),
            None => "too short to warm up".to_owned(),
        }
    }

    fn ranges_line(&self, ranges: RangesReport) -> String {
        format!(
            "{} mapped of {} at most, {} in use; {} pages of {} created, {} mappings, {} pages recycled; {} growth \
             calls, {} of which mapped pages themselves; {}",
            bytes(ranges.peak_mapped_bytes),
            bytes(ranges.limit_pages.saturating_mul(ranges.page_bytes)),
            bytes(ranges.peak_used_bytes),
            grouped(ranges.pages_created),
            bytes(ranges.page_bytes),
            grouped(ranges.pages_mapped),
            grouped(ranges.pages_recycled),
            grouped(ranges.growth_calls),
            grouped(self.growth_stalls),
            self.pinned(),
        )
    }

    fn moves_line(&self) -> String {
        format!(
            "{} blocks evicted by {}, {} offloaded, {} onboarded; {} transferred",
            grouped(self.blocks_evicted),
            self.policy,
            grouped(self.blocks_offloaded),
            grouped(self.blocks_onboarded),
            bytes(self.bytes_transferred),
        )
    }

    /// What happened to requests beside prefill and decoding; nothing for nothing.
    fn life_line(&self) -> String {
        let counts = [
            (self.staged_behind_open_ids, "staged behind open ids"),
            (self.draft_model_tokens, "tokens of a draft model"),
            (self.forks, "forked"),
            (self.blocks_copied_on_write, "blocks copied on write"),
            (self.suspensions, "suspended"),
            (self.cancelled, "cancelled"),
            (self.budget_changes, "budgets"),
            (self.fewest_device_blocks, "blocks mapped at least"),
        ];
        let some = counts.into_iter().filter(|(count, _)| *count > 0);
        let some: Vec<_> = some.map(|(count, what)| format!("{} {what}", grouped(count))).collect();
        some.join(", ")
    }

    /// What came of the tier below host memory; nothing where there is none.
    fn disk_line(&self) -> String {
        let Some(disk) = &self.disk else { return String::new() };
        let missed = disk.disk_misses.iter();
        let missed = missed.map(|(reason, count)| format!(", {} {reason}", grouped(*count)));
        format!(
            "{} blocks stored and {} loaded over {}, {} found from before: {} tokens not computed; {} evicted{}",
            grouped(disk.disk_stored),
            grouped(disk.disk_loaded),
            disk.disk_backend,
            grouped(disk.disk_survivors),
            grouped(disk.disk_saved_tokens),
            grouped(disk.disk_evicted),
            missed.collect::<String>(),
        )
    }

    fn tiers_line(&self) -> String {
        let Some(tiers) = &self.tiers else { return String::new() };
        let faults = tiers.faults.iter();
        let faults: Vec<_> =
            faults.map(|(name, count)| format!("{} {name}", grouped(*count))).collect();
        format!(
            "{} blocks stored, {} loaded; wrong: {}; {} waits, {} too long; {} quarantined",
            grouped(tiers.blocks_stored),
            grouped(tiers.blocks_loaded),
            if faults.is_empty() { "none".to_owned() } else { faults.join(", ") },
            grouped(tiers.waits),
            grouped(tiers.waits_late),
            grouped(tiers.quarantined_at_end),
        )
    }

    /// What became of worker processes; nothing where there are none.
    fn workers_line(&self) -> String {
        let Some(workers) = &self.workers else { return String::new() };
        let WorkersReport { workers, restarts, steps_voided, stops } = workers;
        let (restarts, stops) = (restarts.len() as u64, stops.len() as u64);
        format!(
            "{} processes, {} stopped for a while, {} replaced; {} steps void",
            grouped(*workers),
            grouped(stops),
            grouped(restarts),
            grouped(*steps_voided),
        )
    }

    /// The transports used, with their batches.
    fn transport_line(&self) -> String {
        let way = |(name, way): (&&str, &WayReport)| {
            format!("{name}, {} blocks in {} batches", grouped(way.blocks), grouped(way.batches))
        };
        let ways: Vec<_> = self.transports.iter().map(way).collect();
        let ways = if ways.is_empty() { "no block travelled".to_owned() } else { ways.join("; ") };
        format!("{}: {ways}", self.transport)
    }

    fn steps_line(&self) -> String {
        let (iterations, preemptions) = (grouped(self.iterations), grouped(self.preemptions));
        format!("{iterations} iterations, {preemptions} preemptions")
    }

    /// The number of driver calls, and the most frequent ones.
    fn calls_line(&self) -> String {
        let mut calls: Vec<_> = self.driver_calls.iter().collect();
        calls.sort_by_key(|&(name, count)| (std::cmp::Reverse(count), name));
        let total: u64 = self.driver_calls.values().sum();
        let each = match self.iterations {
            0 => String::new(),
            iterations => format!(", {:.1} an iteration", total as f64 / iterations as f64),
        };
        let named = calls.iter().take(CALLS_SHOWN_MAX);
        let named: Vec<_> =
            named.map(|(name, count)| format!("{name} {}", grouped(**count))).collect();
        let more = if calls.len() > CALLS_SHOWN_MAX { ", …" } else { "" };
        if named.is_empty() {
            return "no calls".to_owned();
        }
        format!("{} calls{each}: {}{more}", grouped(total), named.join(", "))
    }

    fn verdict(&self) -> String {
        let verified = grouped(self.verified_blocks);
        match (self.corrupt_blocks, self.verify) {
            (0, Verify::None) => "nothing, as asked for".to_owned(),
            (0, _) if self.verified_blocks == 0 => "no block was read back".to_owned(),
            (0, verify) => {
                format!("{verified} blocks ({verify}): every byte belongs to its request")
            }
            (corrupt, verify) => {
                format!("{verified} blocks ({verify}): {} CORRUPT", grouped(corrupt))
            }
        }
    }

    fn explain_placement(&self, text: &mut String) {
        let Some(placement) = &self.placement else { return };
        for (index, line) in placement.explanation.iter().enumerate() {
            let name = if index == 0 { "placed" } else { "" };
            let _ = writeln!(text, "  {name:<10}{line}");
        }
    }

    fn name_restarts(&self, text: &mut String) {
        let restarts = self.workers.iter().flat_map(|workers| &workers.restarts);
        for RestartReport { worker, step, reason } in restarts.take(RESTARTS_SHOWN_MAX) {
            let _ = writeln!(text, "  replaced  worker {worker} after step {step}: {reason}");
        }
    }

    fn name_corruptions(&self, text: &mut String) {
        let shown = self.corruptions.iter().take(CORRUPTIONS_SHOWN_MAX);
        for corrupt in shown.clone() {
            let CorruptBlock { request, iteration, block, physical_block, device, message } =
                corrupt;
            let _ = writeln!(
                text,
                "    request {request}, block {block}, iteration {iteration}: device block \
                 {physical_block} on device {device}: {message}"
            );
        }
        let more = self.corrupt_blocks.saturating_sub(shown.len() as u64);
        if more > 0 {
            let _ = writeln!(text, "    and {} more", grouped(more));
        }
    }
}

/// Formats a number with a comma after every third digit from the right.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a size in the largest binary unit that it fills.
pub(crate) fn bytes(size: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if size < 1024 {
        return format!("{size} B");
    }
    let exponent = size.ilog2() / 10;
    let value = size as f64 / (1_u64 << (10 * exponent)) as f64;
    let unit = UNITS[exponent as usize - 1];
    if value.fract() == 0.0 { format!("{value} {unit}") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> RunReport {
        let mut report = RunReport::new(&RunConfig::default(), "sim (Simulated H100)").unwrap();
        report.requests = 1000;
        report.finished = 1000;
        report.block_lookups = 1234;
        report.block_hits = 617;
        report.hit_rate = 0.5;
        report.verified_blocks = 1_234_567;
        report.bytes_transferred = 3 << 29;
        report.wall_s = 3.25;
        report.pinned_bytes_allocated_after_warmup = Some(0);
        let calls =
            [("cuLaunchKernel", 70), ("cuEventQuery", 70), ("cuMemMap", 9), ("a", 2), ("b", 1)];
        report.driver_calls = calls.map(|(name, count)| (name.to_owned(), count)).into();
        report
    }

    fn corrupt(request: u64) -> CorruptBlock {
        CorruptBlock {
            request,
            iteration: 7,
            block: 3,
            physical_block: 99,
            device: 0,
            message: "checksum 1 where 2 belongs".to_owned(),
        }
    }

    #[test]
    fn the_summary_of_a_clean_run() {
        let expected = "\
1,000 of 1,000 requests finished on sim (Simulated H100) in 3.2 s

  model     1 layers, 1 KV heads of 8 x fp8; blocks of 512 tokens, 8 KiB each
  tokens    0 prompt, of which 0 came from the cache; 0 generated
  lookups   1,234 blocks, 617 hit (50.0 %)
  memory    8,192 device blocks, 0 in use at most; 32,768 host blocks; 0 B pinned after warm-up
  moves     0 blocks evicted by lru, 0 offloaded, 0 onboarded; 1.5 GiB transferred
  transport auto: no block travelled
  steps     0 iterations, 0 preemptions
  driver    152 calls: cuEventQuery 70, cuLaunchKernel 70, cuMemMap 9, a 2, …
  verified  1,234,567 blocks (full): every byte belongs to its request
";
        assert_eq!(report().summary(), expected);
        let predicted = RunReport { predicted_s: Some(1.5), ..report() };
        let line = "  predicted 1.500 s of calls and device work on such hardware; the engine's own work \
                    comes on top\n";
        assert_eq!(predicted.summary(), format!("{expected}{line}"));
        let unverified =
            RunReport { verify: Verify::None, driver_calls: BTreeMap::new(), ..report() };
        assert!(unverified.summary().ends_with("no calls\n  verified  nothing, as asked for\n"));
        let short = RunReport { pinned_bytes_allocated_after_warmup: None, ..report() };
        assert!(short.summary().contains("; 32,768 host blocks; too short to warm up\n"));
        let unread = RunReport { verified_blocks: 0, ..report() };
        assert!(unread.summary().ends_with("  verified  no block was read back\n"));
    }

    #[test]
    fn corrupt_blocks_are_counted_and_the_first_are_named() {
        let mut report = report();
        for request in 0..40 {
            report.add_corruption(corrupt(request));
        }
        assert_eq!((report.corrupt_blocks, report.corruptions.len()), (40, CORRUPTIONS_KEPT_MAX));
        let summary = report.summary();
        assert!(summary.contains("1,234,567 blocks (full): 40 CORRUPT\n"), "{summary}");
        assert!(
            summary.contains(
                "    request 4, block 3, iteration 7: device block 99 on device 0: checksum 1 \
                 where 2 belongs\n    and 35 more\n"
            ),
            "{summary}"
        );
    }

    #[test]
    fn the_record_has_the_documented_fields() {
        let mut report = report();
        report.add_corruption(corrupt(1));
        let json = serde_json::to_value(&report).unwrap();
        for field in [
            "requests",
            "finished",
            "block_lookups",
            "block_hits",
            "hit_rate",
            "blocks_evicted",
            "blocks_offloaded",
            "blocks_onboarded",
            "transport",
            "transports",
            "bytes_transferred",
            "iterations",
            "admissions",
            "policy",
            "verified_blocks",
            "corrupt_blocks",
            "pinned_bytes_allocated_after_warmup",
            "pages_mapped_ahead",
            "pages_mapped_inline",
            "growth_stalls",
            "driver_calls",
            "device",
            "seed",
            "wall_s",
            "predicted_s",
        ] {
            assert!(json.get(field).is_some(), "{field}");
        }
        assert_eq!(json["driver_calls"]["cuMemMap"], 9);
        assert_eq!(json["verify"], "full");
        assert_eq!(json["shape"]["dtype"], "fp8");
        assert_eq!(json["shape"]["block_bytes"], 8192);
        assert_eq!(json["corruptions"][0]["physical_block"], 99);
    }

    #[test]
    fn sizes_and_numbers_are_readable() {
        assert_eq!(
            [grouped(0), grouped(999), grouped(1000), grouped(1_234_567)],
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!(
            [bytes(0), bytes(1023), bytes(4096), bytes(5 << 19)],
            ["0 B", "1023 B", "4 KiB", "2.5 MiB"]
        );
        assert_eq!(bytes(u64::MAX), "16 EiB");
    }
}
