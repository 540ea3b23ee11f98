//! What limited a run and what would help most, in plain words, by rules on its numbers.

use serde::Serialize;

use super::run_file::{RunFile, share};
use kv_replay::report::grouped;
use kv_replay::series::{Samples, Series};

/// Devices that waited this share of the time for copies were limited by the link.
const LINK_LIMITS: f64 = 0.2;

/// A single wait of this share of a run limited it.
const STALL_LIMITS: f64 = 0.1;

/// Requests that waited for room, or for a row, in this share of the samples were limited by it.
const WAITING_LIMITS: f64 = 0.25;

/// Lookups that miss what was there before, of those that a cache could answer: the cache is too small from here on.
const LOST_LIMITS: f64 = 0.1;

/// And of all lookups, so that a few misses do not count.
const LOST_MATTERS: f64 = 0.01;

/// Devices that computed this share of the time were busy.
const BUSY: f64 = 0.7;

/// What a run says about itself.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub(super) struct Summary {
    /// What limited the run: a word for programs.
    pub(super) limit: &'static str,
    /// The same in a sentence.
    pub(super) limited_by: String,
    /// What would help most.
    pub(super) helps: String,
    /// Further facts, a sentence each.
    pub(super) facts: Vec<String>,
}

/// Derives the summary of a run.
pub(super) fn summarise(run: &RunFile) -> Summary {
    let (limit, limited_by, helps) = limit(run);
    Summary { limit, limited_by, helps, facts: facts(run) }
}

type Limit = (&'static str, String, String);

/// The first of these that holds. What makes a run wrong comes first, then what costs most.
fn limit(run: &RunFile) -> Limit {
    wrong(run)
        .or_else(|| {
            let series = run.series.as_ref()?;
            let rules = [workers, link, room, rows, lost, computation];
            rules.into_iter().find_map(|rule| rule(run, series))
        })
        .unwrap_or_else(|| match run.series {
            Some(_) => (
                "nothing",
                "Nothing in the cache limited this run: no device waited long for a copy, and no request for room."
                    .to_owned(),
                "More load. The cache has room for it.".to_owned(),
            ),
            None => (
                "unknown",
                "The report has totals only, so it does not say what limited the run.".to_owned(),
                "Run it again with --series.".to_owned(),
            ),
        })
}

fn wrong(run: &RunFile) -> Option<Limit> {
    if run.corrupt_blocks > 0 {
        let blocks = grouped(run.corrupt_blocks);
        return Some((
            "corrupt",
            format!("The run is wrong: {blocks} blocks held bytes of another request."),
            "Find out why before anything else; the report's corruptions name the blocks."
                .to_owned(),
        ));
    }
    let missing = run.requests.saturating_sub(run.finished.saturating_add(run.cancelled));
    (missing > 0).then(|| {
        (
            "unfinished",
            format!(
                "The run did not end: {} of {} requests are missing.",
                grouped(missing),
                grouped(run.requests)
            ),
            "Look at the error that the run has printed.".to_owned(),
        )
    })
}

fn workers(_: &RunFile, series: &Series) -> Option<Limit> {
    let total = last(&series.samples.time_ns);
    let waits = series.timeline.waits();
    let (_, _, begin, length) = waits.iter().find(|(_, cause, ..)| *cause == "workers")?;
    (share(*length, total) >= STALL_LIMITS).then(|| {
        (
            "workers",
            format!(
                "One wait for the workers took {}, from {} on: {} of the run.",
                time(*length),
                time(*begin),
                percent(share(*length, total))
            ),
            "Look at that moment in the timeline, and at the worker that was slow then.".to_owned(),
        )
    })
}

fn link(run: &RunFile, series: &Series) -> Option<Limit> {
    let (all, to_device, to_host) =
        (compute_time(series), waited(series, "to the device"), waited(series, "to host memory"));
    (share(to_device.saturating_add(to_host), all) >= LINK_LIMITS).then(|| {
        let (what, helps) = match to_device >= to_host {
            true => (
                "from host memory",
                "A faster link, or fewer blocks to bring back: more device memory keeps them where they are needed.",
            ),
            false if run.store == "evidence" => (
                "to host memory",
                "Fewer blocks to store: more device memory evicts fewer, and --store-rate gives stores a share of the link.",
            ),
            false => (
                "to host memory",
                "Fewer blocks to store: --store evidence leaves out those that are unlikely to be asked for again.",
            ),
        };
        let waited = percent(share(to_device.saturating_add(to_host), all));
        ("link", format!("The link: devices waited {waited} of the time for copies, most of them {what}."), helps.to_owned())
    })
}

fn room(run: &RunFile, series: &Series) -> Option<Limit> {
    let samples = &series.samples;
    let stalled = stalled(samples, &samples.stalls_room);
    (stalled >= WAITING_LIMITS).then(|| {
        (
            "room",
            format!(
                "Device memory: in {} of the time requests waited for room; {} were preempted and computed again.",
                percent(stalled),
                grouped(run.preemptions)
            ),
            "More device blocks, or fewer requests at once (--max-batch).".to_owned(),
        )
    })
}

fn rows(run: &RunFile, series: &Series) -> Option<Limit> {
    let samples = &series.samples;
    let full = samples.running.iter().zip(&samples.waiting);
    let full =
        full.filter(|(running, waiting)| **running >= u64::from(run.max_batch) && **waiting > 0);
    let full = share(full.count() as u64, samples.running.len() as u64);
    let free = share(
        last(&samples.device_free).saturating_add(last(&samples.device_cached)),
        run.device_blocks,
    );
    (run.max_batch > 0 && full >= WAITING_LIMITS && free >= 0.5).then(|| {
        (
            "batch",
            format!("The batch: in {} of the time it was full, and half of the device blocks were not in use.", percent(full)),
            "More requests at once (--max-batch).".to_owned(),
        )
    })
}

fn lost(run: &RunFile, series: &Series) -> Option<Limit> {
    let gone = last(&series.samples.lost);
    let (lost, of_all) =
        (share(gone, run.block_hits.saturating_add(gone)), share(gone, run.block_lookups));
    (lost >= LOST_LIMITS && of_all >= LOST_MATTERS).then(|| {
        let tier = match (run.host_blocks, last(&series.samples.lower_names)) {
            (0, _) => "host memory (--host-blocks)",
            (_, 0) => "more host memory, or files below it (--disk)",
            _ => "more memory below the device",
        };
        (
            "capacity",
            format!(
                "The size of the cache: of {} looked-up blocks that had been there before, {} were gone ({}).",
                grouped(run.block_hits.saturating_add(gone)),
                grouped(gone),
                percent(lost)
            ),
            format!(
                "A larger cache: {tier}. It can raise the hit rate by up to {:.1} points.{}",
                100.0 * of_all,
                enough(run, series).unwrap_or_default()
            ),
        )
    })
}

/// How large a cache would have had what was gone.
fn enough(run: &RunFile, series: &Series) -> Option<String> {
    let of = &series.cache_at_loss_blocks;
    let has = run.device_blocks.saturating_add(run.host_blocks);
    // A cache that is divided into tiers, or does not evict what was unused for longest, loses what a smaller one would keep:
    // that is no advice on its size.
    let larger = |per_mille: u64| of.quantile(per_mille).filter(|&blocks| blocks > has);
    let parts: Vec<_> = [(500, "half"), (900, "nine in ten")]
        .into_iter()
        .filter_map(|(per_mille, part)| {
            Some(format!("{} blocks would have kept {part}", grouped(larger(per_mille)?)))
        })
        .collect();
    (!parts.is_empty()).then(|| {
        format!(
            " If it evicted what was not used for longest, {} of those that were gone; device and host memory have {}.",
            parts.join(", and "),
            grouped(has)
        )
    })
}

fn computation(run: &RunFile, series: &Series) -> Option<Limit> {
    if run.verifies() {
        // The devices were busy with what the run has them check.
        return None;
    }
    let tracks = series.timeline.tracks.iter().filter(|track| track.name.ends_with("compute"));
    let busy = share(tracks.map(|track| track.busy_ns).sum(), compute_time(series));
    (busy >= BUSY).then(|| {
        (
            "computation",
            format!("Computation: devices computed in {} of the time.", percent(busy)),
            format!(
                "More devices. The cache already saves {} of the prompt tokens.",
                percent(share(run.prefix_tokens_reused, run.prompt_tokens))
            ),
        )
    })
}

fn facts(run: &RunFile) -> Vec<String> {
    let mut facts = vec![format!(
        "{} of {} looked-up blocks were found ({}); {} of {} prompt tokens did not have to be computed.",
        grouped(run.block_hits),
        grouped(run.block_lookups),
        percent(run.hit_rate()),
        grouped(run.prefix_tokens_reused),
        grouped(run.prompt_tokens),
    )];
    if let Some(samples) = run.series.as_ref().map(|series| &series.samples) {
        let (hits, lost) = (
            last(&samples.hits_device).saturating_add(last(&samples.hits_host)),
            last(&samples.lost),
        );
        let new = last(&samples.lookups).saturating_sub(hits.saturating_add(lost));
        facts.push(format!(
            "Of those that were not found, {} were new, which no cache can have, and {} had been there before.",
            grouped(new),
            grouped(lost)
        ));
    }
    if run.verifies() {
        facts.push(format!(
            "The devices read blocks back to compare them (--verify {}), so the time that they were busy says nothing about the model.",
            run.verify
        ));
    }
    if run.blocks_offloaded > 0 {
        facts.push(format!(
            "{} evicted blocks were stored in host memory; blocks came back {} times, {:.0} for each 100 stored.",
            grouped(run.blocks_offloaded),
            grouped(run.blocks_onboarded),
            100.0 * share(run.blocks_onboarded, run.blocks_offloaded),
        ));
    }
    if run.blocks_refused > 0 {
        facts.push(format!(
            "{} evicted blocks were not stored, because little spoke for it; {} of them were asked for later.",
            grouped(run.blocks_refused),
            grouped(run.blocks_regretted)
        ));
    }
    if let Some(series) = &run.series {
        let (evicted, reused) = (&series.age_at_eviction_ms, &series.age_at_reuse_ms);
        if evicted.count > 0 && reused.count > 0 {
            facts.push(format!(
                "By the arrivals of the trace, half of the evicted blocks had been unused for {} or less, and half of the reused ones came back within {}; the timeline shows the time of devices.",
                time(evicted.p50.saturating_mul(1_000_000)),
                time(reused.p50.saturating_mul(1_000_000))
            ));
        }
    }
    facts
}

/// Share of the samples in which a count of stalls grew.
fn stalled(samples: &Samples, stalls: &[u64]) -> f64 {
    let before = std::iter::once(&0).chain(stalls);
    let grew = before.zip(stalls).filter(|(before, after)| after > before).count();
    share(grew as u64, samples.time_ns.len() as u64)
}

/// Time of all compute streams together.
fn compute_time(series: &Series) -> u64 {
    let streams = series.timeline.tracks.iter().filter(|track| track.name.ends_with("compute"));
    last(&series.samples.time_ns).saturating_mul(streams.count() as u64)
}

/// For how long compute streams waited for copies that way.
fn waited(series: &Series, way: &str) -> u64 {
    let streams = series.timeline.tracks.iter().filter(|track| track.name.ends_with("compute"));
    let waits =
        streams.flat_map(|track| &track.waited_ns).filter(|(cause, _)| cause.ends_with(way));
    waits.map(|(_, ns)| ns).sum()
}

fn last(column: &[u64]) -> u64 {
    column.last().copied().unwrap_or(0)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn time(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} µs", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests;
