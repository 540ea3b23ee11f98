//! What a run did over time: equal runs have equal series, sums are those of the report, and the timeline finds what a run
//! was made to wait for.

use std::collections::BTreeMap;

use crate::common::{program, read_json, request};
use cuda_sim::{Profile, Rate};
use kv_pool::store::StoreKind;
use kv_replay::config::{RunConfig, Verify};
use kv_replay::device::{SimSizes, open};
use kv_replay::engine;
use kv_replay::report::RunReport;
use kv_replay::series::{
    Name, SAMPLES_MAX, SPANS_MAX, Sample, Sampler, Samples, Series, Span, TimelineBuilder, Track,
};
use kv_replay::shape::KvModelShape;
use kv_replay::trace::{Request, Trace};

fn config() -> RunConfig {
    RunConfig {
        block_tokens: 64,
        device_blocks: 2048,
        host_blocks: 8192,
        store: StoreKind::All,
        verify: Verify::None,
        series: true,
        ..RunConfig::default()
    }
}

fn replay(config: &RunConfig, profile: Profile, trace: &Trace) -> RunReport {
    let sizes = SimSizes { profile, ..SimSizes::for_config(config) };
    let devices = open(&"sim".parse().unwrap(), sizes).unwrap();
    engine::run(config, trace, &devices, &mut ()).unwrap()
}

/// A series without what the host's clock has measured.
fn without_host_clock(report: &RunReport) -> Series {
    let mut series = *report.series.clone().unwrap();
    series.calls_ns = BTreeMap::new();
    series
}

fn generated() -> Trace {
    crate::common::generated(80, 3, (u64::MAX, 3))
}

#[test]
fn equal_runs_have_equal_series_and_their_sums_are_those_of_the_report() {
    let trace = generated();
    let report = replay(&config(), Profile::default(), &trace);
    let series = without_host_clock(&report);
    assert_eq!(series, without_host_clock(&replay(&config(), Profile::default(), &trace)));
    assert!(series.is_whole());
    assert!(series.samples.time_ns.len() <= SAMPLES_MAX);
    assert!(series.timeline.track.len() <= SPANS_MAX);
    let last = |column: &[u64]| column.last().copied().unwrap();
    let samples = &series.samples;
    assert_eq!(last(&samples.lookups), report.block_lookups);
    assert_eq!(last(&samples.hits_device) + last(&samples.hits_host), report.block_hits);
    assert_eq!(last(&samples.evicted), report.blocks_evicted);
    assert_eq!(last(&samples.finished), report.finished);
    let block = report.shape.block_bytes;
    assert_eq!(last(&samples.bytes_to_host), report.blocks_offloaded * block);
    assert_eq!(last(&samples.bytes_to_device), report.blocks_onboarded * block);
    assert!(report.blocks_onboarded > 0, "the run brings blocks back");
    assert_eq!(series.age_at_eviction_ms.count, report.blocks_evicted);
    assert_eq!(series.clock, "virtual");
    assert!(series.moves_ns["onboard"].count > 0);
    assert!(samples.time_ns.is_sorted());
}

#[test]
fn a_series_changes_nothing_else_and_is_absent_unless_asked_for() {
    let trace = generated();
    let recorded = replay(&config(), Profile::default(), &trace);
    let plain = replay(&RunConfig { series: false, ..config() }, Profile::default(), &trace);
    assert!(plain.series.is_none());
    let times = |report: RunReport| RunReport { setup_s: 0.0, wall_s: 0.0, series: None, ..report };
    let json = serde_json::to_value(&plain).unwrap();
    assert!(json.get("series").is_none());
    assert_eq!(times(recorded), times(plain));
}

#[test]
fn a_series_survives_its_file() {
    let report = replay(&config(), Profile::default(), &generated());
    let json = serde_json::to_value(&report).unwrap();
    let read: Series = serde_json::from_value(json["series"].clone()).unwrap();
    assert_eq!(&read, &**report.series.as_ref().unwrap());
}

/// Two prompts in turn, of which the device has room for one.
fn taking_turns() -> Trace {
    Trace::new((0..8).map(|turn| request(16_384, 2, 100 * (turn % 2))).collect())
}

#[test]
fn the_timeline_finds_that_a_slow_link_was_waited_for() {
    // Blocks that are large beside what is staged for a step.
    let shape = KvModelShape { layers: 4, head_size: 32, ..RunConfig::default().shape };
    let (device_blocks, host_blocks) = (300, 2048);
    let config = RunConfig { shape, device_blocks, host_blocks, max_batch: 1, ..config() };
    let waits = |mb_per_s| {
        let link = Rate::mb_per_s(mb_per_s);
        let profile = Profile { htod: link, kernel_host_load: link, ..Profile::h100() };
        let report = replay(&config, profile, &taking_turns());
        assert!(report.blocks_onboarded > 1000, "{}", report.blocks_onboarded);
        let series = *report.series.unwrap();
        let compute = series.timeline.tracks.iter().find(|track| track.name.contains("compute"));
        let waited = compute.unwrap().waited_ns.iter();
        let copies = waited.filter(|(cause, _)| cause.ends_with("copies to the device"));
        (copies.map(|(_, ns)| ns).sum::<u64>(), series)
    };
    let (slow, series) = waits(10);
    // The longest waits of the device, and of the engine for it, are for the slow copies.
    let longest = series.timeline.waits();
    let of = |track| *longest.iter().find(|(on, ..)| *on == track).unwrap();
    for track in ["engine", "device 0: compute"] {
        assert!(of(track).1.ends_with("copies to the device"), "{:?}", &longest[..9]);
    }
    assert!(slow > series.samples.time_ns.last().unwrap() / 2, "{slow}");
    let (fast, _) = waits(50_000);
    assert!(fast < slow / 100, "{fast} of {slow}");
}

#[test]
fn content_that_is_asked_for_again_has_its_age_found_or_lost() {
    let at = |timestamp_ms, first| Request { timestamp_ms, ..request(5121, 2, first) };
    // The second is found. The third evicts it, and the fourth has lost it.
    let trace = Trace::new(vec![at(0, 0), at(3000, 0), at(4000, 100), at(9000, 0)]);
    let config = RunConfig { device_blocks: 90, host_blocks: 0, max_batch: 1, ..config() };
    let series = without_host_clock(&replay(&config, Profile::default(), &trace));
    let (reuse, loss) = (&series.age_at_reuse_ms, &series.age_at_loss_ms);
    assert_eq!(reuse.buckets.first().map(|of| of.1), Some(80), "{reuse:?}");
    assert!((3000..3400).contains(&reuse.p50), "{reuse:?}");
    assert_eq!(reuse.count + loss.count, 160);
    assert_eq!(series.samples.lost.last(), Some(&loss.count));
    assert!(loss.count > 70 && loss.max == 6000, "{loss:?}");
    // Both prompts' 80 blocks have room in 160.
    let size = &series.cache_at_loss_blocks;
    assert_eq!((size.count, size.p50, size.max), (loss.count, 160, 160));
}

#[test]
fn the_timeline_finds_a_stopped_worker() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("run.json");
    let args = ["run", "--requests", "40", "--workers", "2", "--series", "--verify", "none"];
    let drill = ["--drill", "stop-worker=1@20:1500", "--json", json.to_str().unwrap()];
    let mut command = program();
    let output = command.args(args).args(drill).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json: serde_json::Value = read_json(&json);
    let series: Series = serde_json::from_value(json["series"].clone()).unwrap();
    let waits = series.timeline.waits();
    let (track, cause, begin, length) = waits[0];
    assert_eq!((series.clock.as_str(), track, cause), ("host", "engine", "workers"));
    // The drill has it go on when it has been waited for so long. A wait for a step that it had completed comes before.
    let before = waits.iter().filter(|wait| wait.2 < begin).map(|wait| wait.2).max().unwrap();
    assert!(begin + length - before >= 1_500_000_000, "{length} from {begin}, {before}");
}

fn track(name: &str) -> Track {
    Track { name: name.to_owned(), ..Track::default() }
}

fn span(track: u32, name: &'static str, begin_ns: u64, length: u64) -> Span {
    let end_ns = begin_ns + length;
    Span { track, name: Name::Text(name), cause: None, begin_ns, end_ns, count: 1 }
}

#[test]
fn a_long_run_has_few_spans_and_keeps_its_long_wait_and_its_sums() {
    let mut builder = TimelineBuilder::default();
    for at in 0..100_000 {
        builder.add(span(0, "copy", 1000 * at, 600));
        builder.add(span(1, "kernel", 1000 * at, 500));
        if at == 50_000 {
            let cause = Some(Name::Track(0));
            builder.add(Span { cause, ..span(1, "wait", 1000 * at + 500, 3_000_000) });
        }
    }
    let timeline = builder.finish(vec![track("copies"), track("compute")]);
    assert!(timeline.is_whole());
    assert!(timeline.track.len() < SPANS_MAX, "{}", timeline.track.len());
    assert_eq!(timeline.count.iter().sum::<u64>(), 200_001);
    assert_eq!(timeline.waits()[0], ("compute", "copies", 50_000_500, 3_000_000));
    assert_eq!(timeline.tracks[0].busy_ns, 60_000_000);
    assert_eq!(timeline.tracks[1].waited_ns, [("copies".to_owned(), 3_000_000)].into());
}

#[test]
fn a_short_run_keeps_every_span() {
    let mut builder = TimelineBuilder::default();
    (0..100).for_each(|at| builder.add(span(0, "admit", 10 * at, 5)));
    builder.add(span(0, "nothing", 3, 0));
    let timeline = builder.finish(vec![track("engine")]);
    assert_eq!((timeline.track.len(), timeline.names.len()), (100, 1));
    assert_eq!(timeline.begin_ns, (0..100).map(|at| 10 * at).collect::<Vec<_>>());
    assert_eq!(timeline.waits(), []);
}

fn samples_of(iterations: u64) -> Samples {
    let mut sampler = Sampler::default();
    for at in 1..=iterations {
        // A peak in one iteration only.
        let waiting = if at == 777 { 50 } else { 1 };
        sampler.add(Sample { time_ns: 10 * at, iterations: at, waiting, ..Sample::default() });
    }
    sampler.samples()
}

#[test]
fn short_runs_have_a_sample_for_each_iteration() {
    let samples = samples_of(399);
    assert_eq!((samples.every, samples.time_ns.len()), (1, 399));
    assert_eq!(samples.iterations, (1..400).collect::<Vec<_>>());
    assert!(samples_of(0).time_ns.is_empty());
}

#[test]
fn long_runs_have_no_more_and_lose_no_peak_and_no_end() {
    for iterations in [400, 401, 1000, 99_999] {
        let samples = samples_of(iterations);
        assert!(samples.is_whole());
        let count = samples.time_ns.len();
        assert!((SAMPLES_MAX / 2..=SAMPLES_MAX).contains(&count), "{count} of {iterations}");
        assert_eq!(samples.iterations.last(), Some(&iterations));
        assert_eq!(samples.time_ns.last(), Some(&(10 * iterations)));
        let gaps: Vec<_> = samples.iterations.windows(2).map(|of| of[1] - of[0]).collect();
        assert!(gaps[..gaps.len() - 1].iter().all(|&gap| gap == samples.every), "{gaps:?}");
        let peak = samples.waiting.iter().max().copied();
        assert_eq!(peak, Some(if iterations > 777 { 50 } else { 1 }));
    }
}
