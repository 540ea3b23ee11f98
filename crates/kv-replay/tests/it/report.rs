//! Reports of runs: their fields, their summary, and latencies.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_replay::config::{RunConfig, Verify};
use kv_replay::report::{
    CORRUPTIONS_KEPT_MAX, CorruptBlock, LatencyReport, RunReport, bytes, grouped, queue_growth,
};

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
    let calls = [("cuLaunchKernel", 70), ("cuEventQuery", 70), ("cuMemMap", 9), ("a", 2), ("b", 1)];
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
  moves     0 blocks evicted by hit_density, 0 offloaded, 0 onboarded; 1.5 GiB transferred
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
    let unverified = RunReport { verify: Verify::None, driver_calls: BTreeMap::new(), ..report() };
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

#[test]
fn the_record_has_the_documented_fields() {
    let mut report = RunReport::new(&RunConfig::default(), "sim").unwrap();
    report.driver_calls = [("cuMemMap".to_owned(), 9)].into();
    report.add_corruption(CorruptBlock {
        request: 1,
        iteration: 7,
        block: 3,
        physical_block: 99,
        device: 0,
        message: "checksum 1 where 2 belongs".to_owned(),
    });
    let json = serde_json::to_value(&report).unwrap();
    let names = "requests finished block_lookups block_hits hit_rate blocks_evicted blocks_offloaded \
                 blocks_onboarded transport transports bytes_transferred iterations admissions policy hints \
                 verified_blocks corrupt_blocks pinned_bytes_allocated_after_warmup pages_mapped_ahead \
                 pages_mapped_inline growth_stalls driver_calls device seed wall_s predicted_s";
    for name in names.split_whitespace() {
        assert!(json.get(name).is_some(), "{name}");
    }
    assert_eq!(json["driver_calls"]["cuMemMap"], 9);
    assert_eq!(json["verify"], "full");
    assert_eq!(json["shape"]["dtype"], "fp8");
    assert_eq!(json["shape"]["block_bytes"], 8192);
    assert_eq!(json["corruptions"][0]["physical_block"], 99);
}

/// Waits at a server that takes so long for each of 1,000 requests, one of which comes each second.
fn growth(service_ms: u64) -> f64 {
    let (mut free, mut waits) = (Duration::ZERO, Vec::new());
    for arrival in (0..1000).map(Duration::from_secs) {
        free = free.max(arrival) + Duration::from_millis(service_ms);
        waits.push((arrival, free - arrival));
    }
    queue_growth(waits)
}

#[test]
fn a_queue_grows_by_what_comes_more_than_is_done() {
    for (service_ms, expected) in [(10, 0.0), (990, 0.0), (1060, 0.06), (2000, 1.0)] {
        assert!((growth(service_ms) - expected).abs() < 1e-9, "{service_ms}");
    }
    // A peak that has drained at the end counts.
    let peak = |at: u64| Duration::from_secs(if (500..750).contains(&at) { at - 499 } else { 1 });
    let drained = (0..1000).map(|at| (Duration::from_secs(at), peak(at))).collect();
    assert!(queue_growth(drained) > 0.4);
    let at_once = |count| vec![(Duration::ZERO, Duration::from_secs(5)); count];
    assert_eq!((queue_growth(at_once(0)), queue_growth(at_once(100))), (0.0, 0.0));
}

#[test]
fn ranks_are_those_of_values_that_were_seen() {
    let times: Vec<_> = (1..=200).rev().map(Duration::from_millis).collect();
    let LatencyReport { count, mean, p50, p99, max } = LatencyReport::of(&times);
    assert_eq!((count, mean, p50, p99, max), (200, 100.5, 100.0, 198.0, 200.0));
    let one = LatencyReport::of(&[Duration::from_micros(1500)]);
    assert_eq!((one.p50, one.p99, one.max), (1.5, 1.5, 1.5));
    assert_eq!(LatencyReport::of(&[]), LatencyReport::default());
}
