//! Metrics of a manager, and of the tiers below host memory that it decides for.

use kv_manager::{LowerStats, ManagerStats};
use kv_tier::BlockFault;

use super::Exposition;
use super::pool::BLOCKS_HELP;

/// The tiers below host memory, the nearer first.
const LOWER: [&str; 2] = ["lower", "lowest"];

impl Exposition {
    /// Adds what a manager has done, what its blocks are doing, and what requests and steps have waited for.
    pub fn manager(&mut self, stats: &ManagerStats) -> &mut Self {
        for (tier, blocks) in ["device", "host"].into_iter().zip(&stats.blocks) {
            for (state, count) in [
                ("free", blocks.free),
                ("cached", blocks.cached),
                ("in_use", blocks.in_use),
                ("retiring", blocks.retiring),
            ] {
                let labels = [("tier", tier), ("state", state)];
                self.gauge("kv_cache_blocks", BLOCKS_HELP, &labels, count);
            }
            self.gauge(
                "kv_cache_quarantined_blocks",
                "Blocks that nobody has a use for, and that a lost worker or a late transfer may still touch.",
                &[("tier", tier)],
                blocks.quarantined,
            );
        }
        let tokens = "Prompt tokens found in the cache, by the tier that they lay in.";
        let device = stats.cached_tokens.saturating_sub(stats.host_tokens);
        let hits = [("device", device), ("host", stats.host_tokens)];
        self.counters("kv_cache_hit_tokens_total", tokens, "tier", hits);
        for (name, help, count) in [
            ("kv_cache_prompt_tokens_total", "Tokens of admitted prompts.", stats.prompt_tokens),
            (
                "kv_cache_recomputed_tokens_total",
                "Tokens that were computed though they were cached.",
                stats.twice_tokens,
            ),
            ("kv_cache_steps_total", "Steps staged.", stats.steps),
            ("kv_cache_failed_steps_total", "Steps that failed at a worker.", stats.failed_steps),
        ] {
            self.counter(name, help, &[], count);
        }
        let moved = [
            ("offload", stats.offloaded_blocks),
            ("onboard", stats.onboarded_blocks),
            ("suspend", stats.suspended_blocks),
            ("copy_on_write", stats.copied_on_write),
            ("scrub", stats.scrubbed_blocks),
        ];
        let help = "Blocks copied or cleared, by the reason.";
        self.counters("kv_cache_moved_blocks_total", help, "way", moved);
        let stalls = stats.stalls;
        let stalls = [
            ("prefix", stalls.prefix),
            ("load", stalls.load),
            ("room", stalls.room),
            ("row", stalls.row),
            ("busy", stalls.busy),
        ];
        let help = "Answers that made a request or a step wait, by the cause.";
        self.counters("kv_cache_stalls_total", help, "cause", stalls);
        self
    }

    /// Adds what came of tiers below host memory, on all workers.
    pub fn lower_tiers(&mut self, stats: &LowerStats) -> &mut Self {
        for (at, tier) in LOWER.into_iter().enumerate() {
            let tier = [("tier", tier)];
            let names = "Names that can be loaded from a tier below host memory now.";
            self.gauge("kv_cache_lower_names", names, &tier, stats.names[at]);
            for (name, help, count) in [
                (
                    "kv_cache_lower_stored_blocks_total",
                    "Blocks stored below host memory.",
                    stats.stored_blocks[at],
                ),
                (
                    "kv_cache_lower_loaded_blocks_total",
                    "Blocks loaded from below host memory, and right.",
                    stats.loaded_blocks[at],
                ),
                (
                    "kv_cache_lower_dropped_names_total",
                    "Names that a tier has dropped by itself.",
                    stats.dropped_names[at],
                ),
            ] {
                self.counter(name, help, &tier, count);
            }
        }
        let faults = BlockFault::ALL.map(|fault| fault.name()).into_iter().zip(stats.faults);
        let help = "Blocks of loads that were not right, by the fault: each was a miss.";
        self.counters("kv_cache_lower_faults_total", help, "reason", faults);
        for (name, help, count) in [
            (
                "kv_cache_lower_unstored_blocks_total",
                "Blocks of stores that some worker did not store.",
                stats.unstored_blocks,
            ),
            (
                "kv_cache_lower_waits_total",
                "Times that a request began to wait for a load.",
                stats.waits,
            ),
            ("kv_cache_lower_late_total", "Waits for a load that its deadline ended.", stats.late),
        ] {
            self.counter(name, help, &[], count);
        }
        let help = "Host blocks that open stores and loads hold now.";
        self.gauge("kv_cache_lower_open_blocks", help, &[], stats.ticket_blocks);
        self
    }
}
