//! The summary of a run, for people.

use std::fmt::Write as _;

use super::{
    CorruptBlock, LatencyReport, ReportShape, RestartReport, RunReport, WayReport, WorkersReport,
};
use crate::config::Verify;
use crate::nodes::{HandoverReport, NodeReport};
use crate::trace::left_out;

const CORRUPTIONS_SHOWN_MAX: usize = 5;

const RESTARTS_SHOWN_MAX: usize = 5;

/// Maximum number of driver calls in the summary, the most frequent first.
const CALLS_SHOWN_MAX: usize = 4;

impl RunReport {
    /// A summary of a few lines. The last ones say whether every byte was right.
    pub fn summary(&self) -> String {
        let mut text = format!(
            "{} of {} requests finished on {} in {:.1} s\n\n",
            grouped(self.finished),
            grouped(self.requests),
            self.device,
            self.wall_s,
        );
        for (name, what) in [
            ("trace", left_out(self.requests_skipped)),
            ("model", model_line(&self.shape)),
            ("tokens", self.tokens_line()),
            ("lookups", self.lookups_line()),
            ("memory", self.memory_line()),
            ("moves", self.moves_line()),
            ("transport", self.transport_line()),
            ("steps", self.steps_line()),
            ("latency", self.latency_line()),
            ("tenants", self.tenants_line()),
            ("life", self.life_line()),
            ("tiers", self.tiers_line()),
            ("disk", self.disk_line()),
            ("handover", self.handover.as_ref().map_or_else(String::new, HandoverReport::line)),
            ("remote", self.remote.as_ref().map_or_else(String::new, NodeReport::line)),
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

    /// What requests waited for; nothing unless they waited for their arrival.
    fn latency_line(&self) -> String {
        let Some(open) = &self.open_loop else { return String::new() };
        let both = |of: &LatencyReport| format!("{:.1} ms p50, {:.1} ms p99", of.p50, of.p99);
        format!(
            "first token after {}; {} a token behind it; {:.0} tokens/s in {:.1} s of {} time",
            both(&open.time_to_first_token_ms),
            both(&open.time_per_output_token_ms),
            open.generated_tokens_per_s,
            open.elapsed_s,
            open.clock,
        )
    }

    /// Between which tenants hit rates are.
    fn tenants_line(&self) -> String {
        let by_hits = || self.tenants.iter().map(|(name, tenant)| (tenant.hit_rate(), name));
        let order = |a: &(f64, &String), b: &(f64, &String)| a.0.total_cmp(&b.0);
        let (Some(least), Some(most)) = (by_hits().min_by(order), by_hits().max_by(order)) else {
            return String::new();
        };
        format!(
            "{}, with hit rates from {:.1} % ({}) to {:.1} % ({})",
            grouped(self.tenants.len() as u64),
            100.0 * least.0,
            least.1,
            100.0 * most.0,
            most.1
        )
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

    fn pinned(&self) -> String {
        match self.pinned_bytes_allocated_after_warmup {
            Some(pinned) => format!("{} pinned after warm-up", bytes(pinned)),
            None => "too short to warm up".to_owned(),
        }
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

/// Layers, heads and blocks, and what layers keep that are not all alike.
fn model_line(shape: &ReportShape) -> String {
    let ReportShape { layers, kv_heads, head_size, dtype, block_tokens, block_bytes, .. } = *shape;
    let mut line = format!(
        "{layers} layers, {kv_heads} KV heads of {head_size} x {dtype}; blocks of \
         {block_tokens} tokens, {} each",
        bytes(block_bytes),
    );
    if let Some(tokens) = shape.window {
        line.push_str(&format!("; a window of {tokens} tokens in {} layers", shape.window_layers));
    }
    if shape.state_layers > 0 {
        line.push_str(&format!("; {} layers with a state", shape.state_layers));
    }
    if shape.draft_layers > 0 {
        line.push_str(&format!("; {} of a draft model", shape.draft_layers));
    }
    line
}

/// Formats a number with a comma after every third digit from the right.
pub fn grouped(number: u64) -> String {
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
pub fn bytes(size: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if size < 1024 {
        return format!("{size} B");
    }
    let exponent = size.ilog2() / 10;
    let value = size as f64 / (1_u64 << (10 * exponent)) as f64;
    let unit = UNITS[exponent as usize - 1];
    if value.fract() == 0.0 { format!("{value} {unit}") } else { format!("{value:.1} {unit}") }
}
